# ruff: noqa: E501  a row of the table is a line
"""The patch layer is on and proven, or the process stops in words: one row a way to get it wrong.

Sources of the kinds: verl#6959 (private upstream symbol, ImportError), vllm-project/vllm-ascend#4354 and #15815 (a name
imported before the patch; the patch wrapped itself).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_upstream import UPSTREAM, run, write

FINE = "arm(); import upstream.core as u; print(u.merge(1), u.Model().forward(3))"


@dataclass(frozen=True)
class Case:
    """What is installed, what a program does, and what must and must not be printed."""

    name: str
    program: str
    says: tuple[str, ...]
    upstream: str = UPSTREAM
    version: str = "1.5"
    never: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    spoil: str = ""  # Python run in the test with `folder` at hand, after everything has been written


def edited(old: str, new: str) -> str:
    """Upstream with one edit."""
    assert old in UPSTREAM
    return UPSTREAM.replace(old, new)


def consumer(text: str) -> str:
    """Writes another module of upstream's package."""
    return f"(folder / 'upstream' / 'consumer.py').write_text({text!r})"


def optional(caught: str) -> str:
    """A consumer that goes on without an import."""
    return consumer(
        f"try:\n    from upstream.core import merge\n    HAVE = True\nexcept {caught}:\n    HAVE = False\n"
    )


CYCLE = UPSTREAM + "\nimport upstream.consumer\n"
PATCHES = """
import subprocess
def p(*words):
    d = subprocess.run([sys.executable, '-m', 'patches', *words], capture_output=True, text=True)
    print(d.stdout, d.stderr, 'status', d.returncode)
"""

SETTLE = """
l = arm()
import upstream.core, upstream.consumer as c
from patches import gate
gate.settle(l)
print("WENT ON", c.Mine().forward(3))
"""
LEDGER = """
import atexit, json
ledger = pathlib.Path("ledger.json")
def show():
    said = json.loads(ledger.read_text())
    print({{o["id"]: o["called"] for o in said["overrides"]}}, said["written"])
atexit.register(show)
l = arm(); import upstream.core as u
from patches import gate
gate.settle(l); gate.write(l, [ledger]); show()
{}
"""
COMPILED = """
import torch, torch._dynamo
l = arm(); import upstream.core as u
torch._dynamo.config.error_on_recompile = True
x, model = torch.arange(4.0), u.Model()
for backend in ("eager", "aot_eager"):
    for what, function, entry, want in (
        ("caller", lambda x: u.merge(x * 2), "up.merge", x * 2 + 3),
        ("itself", u.merge, "up.merge", x + 3),
        ("method", lambda x: model.forward(x + 1), "up.forward", (x + 1) * 2),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=False)
        l.entries[entry].called = False
        results = [compiled(x) for _ in range(3)]
        equal = all(name == "ours" and torch.equal(value, want) for name, value in results)
        print(backend, what, results[0][0], len(results), equal, l.entries[entry].called)
"""
# Root may read whatever it likes: step down first, after the imports that a stranger might not be allowed.
NOBODY = "import os, patches.catalogue, patches.finder, patches.lock, patches.registry\nif not os.geteuid(): os.seteuid(65534)\n"
DRIFT = ("DriftError", "Sought source:", "1.5", "patches pin", "without --deterministic-rocm")
TWICE = """
arm()
for attempt in (1, 2):
    try:
        import upstream.core as u
        print("LOADED", u.merge(1))
    except {caught} as error:
        print(attempt, type(error).__name__ if not isinstance(error, type) else error)
"""
SWALLOWED = """
arm()
import importlib
def by_from():
    from upstream.core import merge
for attempt, again in enumerate((lambda: __import__("upstream.core"), by_from, lambda: importlib.import_module("upstream.core")), 1):
    try: import upstream.core; print("LOADED")
    except: pass
    try: again(); print("LOADED")
    except DriftError as error: print(attempt, "DriftError", "merge" if "upstream.core:merge" in str(error) else error)
print("no leftovers", "upstream.core" not in sys.modules, not hasattr(sys.modules["upstream"], "core"))
"""
BUILD = """
file = folder / "declaration.py"
file.write_text(file.read_text().replace("def replacement", "{}\\n        def replacement"))
"""
MENDED_LATER = """
arm()
for attempt in (1, 2):
    try: import upstream.core; print("LOADED")
    except DriftError: print(attempt, "DriftError")
    file = pathlib.Path("upstream/core.py")
    file.write_text(file.read_text().replace("b=3", "b=2"))
"""
LATE = ("LateActivationError", "upstream.core", "import patches.auto")

CASES = [
    Case("applied: function and method are replaced", FINE, ("('ours', 4) ('ours', 6)",)),
    Case("comments, docstring and layout do not count", FINE, ("('ours', 4)",),
         upstream=edited('    """Adds."""\n    # a comment\n    return helper(a) + b', "    return helper(a) + b  # another")),
    Case("function renamed", FINE, ("DriftError", "no merge in", "Sought source:"), upstream=edited("def merge", "def merge_lse")),
    Case("function renamed in a release that need not have it", FINE.replace("u.merge(1), ", ""), ("('ours', 6)",),
         upstream=edited("def merge", "def merge_lse"), version="3.1"),
    Case("body edited", FINE, DRIFT, upstream=edited("helper(a) + b", "helper(a) - b")),
    Case("default of an argument edited", FINE, DRIFT, upstream=edited("b=2", "b=3")),
    Case("argument added", FINE, DRIFT, upstream=edited("(a, b=2)", "(a, b=2, c=None)")),
    Case("decorator added", FINE, DRIFT, upstream=edited("def merge", "@staticmethod\ndef merge")),
    Case("helper edited", FINE, DRIFT, upstream=edited("x + 1", "x + 2")),
    Case("helper gone", FINE, DRIFT, upstream=edited("def helper", "def helper2").replace("helper(a)", "helper2(a)")),
    Case("method edited", FINE, ("DriftError", "Model.forward"), upstream=edited("x * 2", "x * 3")),
    Case("class gone", FINE, ("DriftError", "no Model.forward"), upstream=edited("class Model", "class Model2")),
    Case("bound but defined elsewhere", FINE, ("DriftError", "not defined there"),
         upstream=UPSTREAM.replace("def merge", "def merge_") + "\nmerge = merge_\n"),
    Case("defined twice under a condition", FINE, DRIFT, upstream=UPSTREAM + "\nif True:\n    def merge(a, b=2):\n        return 0\n"),
    Case("module missing", "arm(); import upstream.core", ("ModuleNotFoundError", "upstream.core"), spoil="(folder/'upstream'/'core.py').unlink()"),
    Case("module that raises while it executes", "arm()\ntry:\n    import upstream.core\nexcept ZeroDivisionError: print('its own error')",
         ("its own error",), upstream=UPSTREAM + "\n1 / 0\n"),
    Case("imported before arming", "import upstream.core\narm()", LATE),
    Case("by-name import before arming", "from upstream.core import merge\narm()", LATE),
    Case("armed from inside an import cycle, the target half-imported", "import upstream.core\nprint('WENT ON')",
         ("LateActivationError", "upstream.core is being imported already", "import patches.auto", "exit status 1"), never=("WENT ON",),
         upstream=CYCLE, spoil=consumer("import pathlib, patches\npatches.arm('invariant', declarations=['declaration'], lock_path=pathlib.Path('lock.json'))")),
    Case("subclass of a class with a target, defined before arming", "from upstream.core import Model\nclass Mine(Model):\n    step = Model.forward\narm()\nprint('WENT ON')",
         (*LATE, "had been imported already", "exit status 1"), never=("WENT ON",)),
    Case("subclasses defined after arming call the replacement", "arm(); from upstream.core import Model\nclass Mine(Model):\n    def forward(self, x): return 'mine', super().forward(x)\nclass Heir(Model): step = Model.forward\nprint(Mine().forward(3), Heir().forward(3), Heir().step(3))",
         ("('mine', ('ours', 6)) ('ours', 6) ('ours', 6)",)),
    Case("a subclass made inside an import cycle inherits the replacement", SETTLE, ("WENT ON ('ours', 6)", "exit status 0"),
         upstream=CYCLE, spoil=consumer("from upstream.core import Model\nclass Mine(Model): pass")),
    Case("a name taken by value inside an import cycle is found by the gate", SETTLE, ("GateError", "up.merge: upstream.consumer.kept still holds upstream's merge by value", "exit status 1"), never=("WENT ON",),
         upstream=CYCLE, spoil=consumer("from upstream.core import merge as kept")),
    Case("a method taken by value inside an import cycle is found by the gate", SETTLE,
         ("GateError", "up.forward: upstream.consumer.Mine.held, upstream.consumer.Mine.step still hold upstream's forward by value", "exit status 1"), never=("WENT ON",),
         upstream=CYCLE, spoil=consumer("from upstream.core import Model\nclass Mine(Model):\n    step = Model.forward\n    held = staticmethod(Model.forward)")),
    Case("a name taken from a first copy that was dropped before arming is found by the gate", "from upstream.core import merge as kept, Model\nclass Mine(Model): pass\ndel sys.modules['upstream.core']\nl = arm(); import upstream.core\nfrom patches import gate; gate.settle(l)\nprint('WENT ON', kept(1))",
         ("GateError", "up.merge: __main__.kept still holds upstream's merge by value", "up.forward: upstream.core.Model.forward still holds", "exit status 1"), never=("WENT ON",)),
    Case("a wrapper around the replacement is no original", "import functools\nl = arm(); import upstream.core as u\n@functools.wraps(u.merge)\ndef traced(*a): return u.merge(*a)\nfrom patches import gate; gate.settle(l)\nprint('WENT ON', traced(1))",
         ("WENT ON ('ours', 4)",)),
    Case("upstream's file under a second name is found by the gate", "sys.path.insert(0, 'upstream')\nl = arm(); import upstream.core, core\nfrom patches import gate; gate.settle(l)\nprint('WENT ON', core.merge(1))",
         ("GateError", "core.py is imported as core too, where nothing of upstream.core is replaced", "exit status 1"), never=("WENT ON",)),
    Case("armed after a failed arming", "import upstream.core\ntry:\n    arm()\nexcept LateActivationError: pass\nprint(patches.armed_mode())", ("None",)),
    Case("armed twice", "a = arm(); b = arm(); import upstream.core as u; print(a is b, u.merge(1))", ("True ('ours', 4)",), never=("('ours', ('ours'",)),
    Case("two modes", "arm('stable'); arm('invariant')", ("ModeError", "'stable'", "'invariant'")),
    Case("unknown mode", "arm('fast')", ("ModeError", "'fast'", "stable and invariant")),
    Case("variable with another value", "import patches.auto", ("ModeError", "DETERMINISTIC_ROCM='yes'", "unset it"), environment={"DETERMINISTIC_ROCM": "yes"}),
    Case("variable empty is off", "import patches.auto; import upstream.core as u; print(u.merge(1), patches.armed_mode())", ("4 None",), environment={"DETERMINISTIC_ROCM": ""}),
    Case("off leaves upstream untouched", "import upstream.core as u; print(u.merge(1), u.merge.__module__, hasattr(u.merge, '__wrapped__'), sys.meta_path[0].__class__.__name__)", ("4 upstream.core False",), never=("OverrideFinder",)),
    Case("reload is overridden again, once", "arm(); import importlib, upstream.core as u; importlib.reload(u); print(u.merge(1))", ("('ours', 4)",), never=("('ours', ('ours'",)),
    Case("removed from sys.modules and imported again", "arm(); import upstream.core; del sys.modules['upstream.core']; import upstream.core as u; print(u.merge(1))", ("('ours', 4)",)),
    Case("by-name import after arming", "arm(); from upstream.core import merge; print(merge(1))", ("('ours', 4)",)),
    Case("star import after arming", "arm(); from upstream.core import *; print(merge(1))", ("('ours', 4)",)),
    Case("drift is not swallowed by `except ImportError`", "arm()\ntry:\n    import upstream.core\n    print('LOADED')\nexcept ImportError: print('WENT ON')\nprint('REACHED')",
         (*DRIFT, "exit status 1"), upstream=edited("b=2", "b=3"), never=("LOADED", "WENT ON", "REACHED")),
    Case("a consumer that would do without an ImportError stops the job", "arm(); import upstream.consumer as c\nprint('WENT ON', c.HAVE)",
         (*DRIFT, "exit status 1"), upstream=edited("b=2", "b=3"), never=("WENT ON",), spoil=optional("ImportError")),
    Case("the same consumer beside an intact upstream", "arm(); import upstream.consumer as c; print(c.HAVE, c.merge(1))", ("True ('ours', 4)", "exit status 0"), spoil=optional("ImportError")),
    Case("drift swallowed by `except Exception`", TWICE.format(caught="Exception"), ("1 DriftError", "2 DriftError"), upstream=edited("b=2", "b=3"), never=("LOADED",)),
    Case("drift swallowed bare, then imported, from-imported and imported by name", SWALLOWED, ("1 DriftError merge", "2 DriftError merge", "3 DriftError merge", "no leftovers True True"),
         upstream=edited("b=2", "b=3"), never=("LOADED",)),
    Case("drift swallowed bare by a consumer: the next import stops the job", "arm(); import upstream.consumer as c; print(c.HAVE); import upstream.core\nprint('WENT ON')",
         ("False", *DRIFT, "exit status 1"), upstream=edited("b=2", "b=3"), never=("WENT ON",), spoil=optional("BaseException")),
    Case("drift swallowed bare by a consumer: the gate stops the job", "l = arm(); import upstream.consumer as c; print(c.HAVE)\nfrom patches import gate; gate.settle(l)\nprint('WENT ON')",
         ("False", "GateError", "up.merge is refused", "exit status 1"), upstream=edited("b=2", "b=3"), never=("WENT ON",), spoil=optional("BaseException")),
    Case("a refusal stays when the file is mended in the meantime", MENDED_LATER, ("1 DriftError", "2 DriftError"), upstream=edited("b=2", "b=3"), never=("LOADED",)),
    Case("one bad target keeps its whole module out", "arm()\ntry:\n    import upstream.core\nexcept DriftError: print('upstream.core' in sys.modules)", ("False",), upstream=edited("b=2", "b=3")),
    Case("the ledger says REFUSED", "l = arm()\ntry:\n    import upstream.core\nexcept DriftError: print(l.entries['up.merge'].state)", ("REFUSED",), upstream=edited("b=2", "b=3")),
    Case("the ledger says APPLIED and NOT_REQUIRED", "l = arm(); import upstream.core; print([(e.state, e.reason) for e in l.entries.values()])",
         ("NOT_REQUIRED", "3.1 has no such function", "APPLIED"), upstream=edited("def merge", "def merge_lse"), version="3.1"),
    Case("lock missing", FINE, ("LockError", "lock.json", "FileNotFoundError", "Reinstall"), spoil="(folder/'lock.json').unlink()"),
    Case("lock is no JSON", FINE, ("LockError", "JSONDecodeError"), spoil="(folder/'lock.json').write_text('{')"),
    Case("lock that may not be read", NOBODY + FINE, ("LockError", "lock.json", "PermissionError", "Reinstall", "exit status 1"), never=("ours",),
         spoil="(folder/'lock.json').chmod(0); folder.chmod(0o755)"),
    Case("lock that is a folder", FINE, ("LockError", "lock.json", "IsADirectoryError", "Reinstall", "exit status 1"), spoil="(folder/'lock.json').unlink(); (folder/'lock.json').mkdir()"),
    Case("lock of another schema", FINE, ("LockError", "schema 9"), spoil="(folder/'lock.json').write_text('{\"schema\": 9}')"),
    Case("lock without the target", FINE, ("DriftError", "none was ever pinned"), spoil="(folder/'lock.json').write_text('{\"schema\": 1, \"targets\": {}}')"),
    Case("duplicate id", FINE, ("RegistryError", "up.merge", "Rename"), spoil="(folder/'declaration.py').write_text((folder/'declaration.py').read_text()+'\\n_declare(\"up.merge\", \"upstream.core:helper\")\\n')"),
    Case("duplicate target", FINE, ("RegistryError", "upstream.core:merge"), spoil="(folder/'declaration.py').write_text((folder/'declaration.py').read_text()+'\\n_declare(\"other\", \"upstream.core:merge\")\\n')"),
    Case("target of another form", FINE, ("TargetError", "upstream.core.merge", "package.module:Qualified.name"), spoil="(folder/'declaration.py').write_text((folder/'declaration.py').read_text()+'\\n_declare(\"other\", \"upstream.core.merge\")\\n')"),
    Case("empty field", FINE, ("RegistryError", "'why'"), spoil="(folder/'declaration.py').write_text((folder/'declaration.py').read_text().replace('why=\"w\"', 'why=\"\"'))"),
    Case("build that raises", FINE, ("ApplyError", "up.merge", "ZeroDivisionError", "exit status 1"), never=("4 6",), spoil=BUILD.format("1/0")),
    Case("build that lacks a package is no missing optional import", "arm()\nimport upstream.consumer as c\nprint('WENT ON', c.HAVE)",
         ("ApplyError", "up.merge", "No module named 'no_such_kernels'", "Install what is missing", "exit status 1"), never=("WENT ON",),
         spoil=optional("ImportError") + BUILD.format("import no_such_kernels")),
    Case("build that raises, swallowed bare: refused for good", "l = arm()\ntry: import upstream.core\nexcept: pass\nfrom patches import gate\ntry: gate.settle(l)\nexcept GateError as e: print('gate', e)\nimport upstream.core",
         ("gate ", "up.merge is refused", "ApplyError", "exit status 1"), spoil=BUILD.format("1/0")),
    Case("module without source", FINE, ("ApplyError", "up.merge", "UnicodeDecodeError", "exit status 1"),
         spoil="import py_compile; py_compile.compile(str(folder/'upstream'/'core.py'), cfile=str(folder/'upstream'/'core.pyc')); (folder/'upstream'/'core.py').unlink()"),
    Case("consumer inside an import cycle sees the replacement", "arm(); import upstream.core, upstream.consumer as c; print(c.call())", ("('ours', 4)",),
         upstream=CYCLE, spoil=consumer("import upstream.core as u\ndef call(): return u.merge(1)\n")),
    Case("installed, never called: the ledger and the log say so at exit", LEDGER.format("u.Model().forward(3)"),
         ("{'up.merge': False, 'up.forward': True} at exit", "deterministic-rocm: installed, never called in this process: up.merge\n", "exit status 0")),
    Case("everything called: nothing to say at exit", LEDGER.format("u.merge(1); u.Model().forward(3)"),
         ("{'up.merge': True, 'up.forward': True} at exit",), never=("never called",)),
    Case("called before a reload is called after it", LEDGER.format("u.merge(1); u.Model().forward(3); import importlib; importlib.reload(u)"),
         ("{'up.merge': True, 'up.forward': True} at exit",), never=("never called",)),
    Case("only upstream's original was called", LEDGER.format("u.merge.__wrapped__(1); u.Model().forward(3)"), ("{'up.merge': False, 'up.forward': True} at exit",)),
    Case("a process that does not come to its end leaves the gate's ledger", LEDGER.format("u.merge(1); show(); sys.stdout.flush(); import os; os._exit(3)"),
         ("{'up.merge': False, 'up.forward': False} before the first forward", "exit status 3"), never=("at exit",)),
    Case("a forked child that ends does not end the parent's ledger", LEDGER.format("import os\nif os.fork() == 0: sys.exit()\nos.wait(); atexit.unregister(show); show(); sys.stdout.flush(); os._exit(0)"),
         ("{'up.merge': False, 'up.forward': False} before the first forward\n{'up.merge': False, 'up.forward': False} before the first forward",), never=("at exit", "never called")),
    Case("another run's ledger is left alone at exit", LEDGER.format("u.merge(1); other = ledger.read_text().replace('before', 'long before'); ledger.write_text(other)"), ("long before the first forward",), never=("at exit",)),
    Case("a ledger that is gone at exit is told", LEDGER.format("u.merge(1); ledger.rename('elsewhere'); atexit.unregister(show)"), ("sought to complete", "ledger.json", "No such file", "exit status 0")),
    Case("a replacement that is no function cannot tell", LEDGER.format("u.merge(1)"), ("{'up.merge': None, 'up.forward': None} before the first forward", "{'up.merge': None, 'up.forward': None} at exit"), never=("never called",),
         spoil="file = folder / 'declaration.py'\nfile.write_text(file.read_text().replace('return replacement', 'class Callable:\\n            __call__ = staticmethod(replacement)\\n        return Callable()'))"),
    Case("an outer torch.compile runs the replacement, compiled once", COMPILED,
         ("eager caller ours 3 True True", "eager itself ours 3 True True", "eager method ours 3 True True", "aot_eager caller ours 3 True True", "aot_eager itself ours 3 True True", "aot_eager method ours 3 True True", "exit status 0")),
    Case("a forked child is armed", "import os\narm()\npid = os.fork()\nif pid == 0:\n    import upstream.core as u\n    print(u.merge(1)); sys.stdout.flush(); os._exit(0)\nos.waitpid(pid, 0)", ("('ours', 4)",)),
    Case("a child process inherits the variable", "import subprocess\narm()\nprint(subprocess.run([sys.executable, '-c', 'import patches; from patches.arming import mode_from_environment as m; print(m())'], capture_output=True, text=True).stdout)", ("invariant",)),
    Case("a replaced function pickles by name", "arm(); import pickle, upstream.core as u; print(pickle.loads(pickle.dumps(u.merge)) is u.merge)", ("True",)),
    Case("a replaced function keeps its name, doc and signature", "arm(); import inspect, upstream.core as u; print(u.merge.__name__, u.merge.__doc__, inspect.signature(u.merge), u.merge.__wrapped__(1))", ("merge Adds. (a, b=2) 4",)),
    Case("tools still find the source", "arm(); import inspect, upstream.core as u; print(inspect.getsource(u).count('def merge'), u.__loader__.__class__.__name__)", ("1 SourceFileLoader",)),
    Case("arming imports no torch and no upstream", "arm(); print('torch' in sys.modules, 'upstream' in sys.modules)", ("False False",)),
    Case("errors are no ImportErrors", "import patches.errors as e; print([n for n, c in vars(e).items() if isinstance(c, type) and issubclass(c, ImportError)])", ("[]",)),
    Case("`run` takes a module and its own options", PATCHES + "pathlib.Path('job.py').write_text('import sys, patches; print(sys.argv[1:], patches.armed_mode())')\np('run', '-m', 'job', '--x', '-m')\np('run', '--mode', 'stable', '-mjob', '--mode', '3')",
         ("['--x', '-m'] invariant", "['--mode', '3'] stable")),
    Case("`run` without a script, and with one that is not there", PATCHES + "p('run', '-m')\np('run', 'nothing.py')",
         ("name a script, or -m and a module", "sought the script nothing.py, found nothing in", "status 2"), never=("Traceback", "status 1")),
    Case("`run -m` of what is not there, and of a package that cannot run", PATCHES + "pathlib.Path('job').mkdir(); pathlib.Path('job/__init__.py').write_text('')\np('run', '-m', 'no_such_module')\np('run', '-m', 'job.nothing')\np('run', '-m', 'job')\np('run', '-m', '.job')",
         ("sought the module no_such_module on this interpreter's path", "sought the module job.nothing", "found a package; sought job.__main__ to run it; found nothing", "sought the module .job", "status 2"), never=("Traceback", "status 1")),
    Case("`run -m` of a module that lacks another one ends with its own error", PATCHES + "pathlib.Path('job').mkdir(); pathlib.Path('job/__init__.py').write_text('import no_such_dependency')\np('run', '-m', 'job.main')",
         ("No module named 'no_such_dependency'", "status 1"), never=("sought the module",)),
    Case("`check` where nothing is installed is no pass", PATCHES + "pathlib.Path('empty').mkdir()\np('check', '--tree', 'empty')\np('check', 'te.lse_merge', '--tree', 'empty', '--json')",
         ("nothing to check: none of the ", "lies in empty", "nothing to check: none of the 1 modules", "status 2"), never=("status 1",)),
    Case("`check` of a tree that is not there is no pass", PATCHES + "p('check', '--tree', 'nowhere')", ("--tree nowhere: no such folder", "status 2")),
    Case("`run` in a mode that does not exist", "import subprocess\nprint(subprocess.run([sys.executable, '-m', 'patches', 'run', '--mode', 'fast', 'x.py'], capture_output=True, text=True).stderr)", ("invalid choice: 'fast'",)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_on_and_proven_or_stops_in_words(case: Case, tmp_path: Path) -> None:
    write(tmp_path, upstream=case.upstream, version=case.version)
    if case.spoil:
        exec(case.spoil, {"folder": tmp_path})  # noqa: S102
    printed = run(tmp_path, case.program, **case.environment)
    for words in case.says:
        assert words in printed, printed
    for words in case.never:
        assert words not in printed, printed


def test_the_table_has_forty_rows_and_no_name_twice() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)
