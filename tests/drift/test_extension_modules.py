"""Functions of real compiled modules that are imported in the ordinary way: pinned, replaced, refused.

Real are the loader (`ExtensionFileLoader`), the modules and their functions: one of torch that pybind11 made, and the
standard library's `_bisect`, whose docstrings are no signatures.
"""

from __future__ import annotations

import _bisect
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from upstream_wheels import ROOT

TARGETS = {
    # A counter of torch's compiler that nothing else asks for.
    "torch": "torch._C:_jit_get_num_profiled_runs",
    "upstream": "upstream._bisect:bisect_right",
}
DECLARATION = """
from patches import override

@override(id="up.find", target={target!r}, kind="binding", modes=("stable",), why="w", how="h", retire_when="r",
          evidence="docs/limits.md", distribution={distribution!r})
def build(original):
    def replacement(*arguments):
        return ("ours", original(*arguments))
    return replacement
"""
COMMAND = """
import pathlib, sys
from patches import catalogue, lock
from patches.__main__ import main
catalogue.DECLARATIONS = ("declaration",)
lock.Lock.read.__func__.__defaults__ = (pathlib.Path("lock.json"),)
sys.exit(main(sys.argv[1:]))
"""
ARMED = """
import importlib, pathlib, sys, patches
patches.arm("stable", declarations=["declaration"], lock_path=pathlib.Path("lock.json"))
print("torch while arming:", "torch" in sys.modules)
for attempt in range(2):
    try:
        module = importlib.import_module({package!r} + "." + {name!r})
        print(type(module.__loader__).__name__, module.{function}({arguments}), {call})
    except RuntimeError as error:
        print(type(error).__name__, error)
entry = patches.current_ledger().entries["up.find"]
print(entry.state, entry.version, entry.called)
"""


def _write(folder: Path, distribution: str) -> None:
    target = TARGETS[distribution]
    (folder / "declaration.py").write_text(DECLARATION.format(target=target, distribution=distribution))
    (folder / "lock.json").write_text(json.dumps({"schema": 1, "targets": {}}))
    (folder / "command.py").write_text(COMMAND)
    package, _, rest = target.partition(".")
    name, _, function = rest.partition(":")
    arguments = "[1, 2, 3], 2" if distribution == "upstream" else ""
    call = f"sys.modules[{package!r}].{name}.{function} is module.{function}"
    armed = ARMED.format(package=package, name=name, function=function, arguments=arguments, call=call)
    (folder / "armed_run.py").write_text(armed)
    if distribution == "upstream":
        (folder / "upstream").mkdir()
        (folder / "upstream" / "__init__.py").touch()
        shutil.copy(_bisect.__file__, folder / "upstream")
        (folder / "upstream-1.5.0.dist-info").mkdir()


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "DETERMINISTIC_ROCM": ""}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_function_made_by_pybind11_is_pinned_checked_and_replaced(tmp_path: Path) -> None:
    _write(tmp_path, "torch")
    never = _run(tmp_path, "armed_run.py")
    assert never.stdout.count("DriftError") == 2 and "none was ever pinned" in never.stdout, never.stdout
    pinned = _run(tmp_path, "command.py", "pin")
    assert "pinned" in pinned.stdout and not pinned.returncode, pinned.stdout + pinned.stderr
    entry = json.loads((tmp_path / "lock.json").read_text())["targets"][TARGETS["torch"]]
    assert entry == [{"fingerprint": "binding:() -> int", "versions": [version("torch")]}]
    unloaded, loaded = (_run(tmp_path, "command.py", "check", *more) for more in ((), ("--load",)))
    assert "not checkable here" in unloaded.stdout and not unloaded.returncode, unloaded.stdout
    assert "as reviewed" in loaded.stdout and not loaded.returncode, loaded.stdout + loaded.stderr
    armed = _run(tmp_path, "armed_run.py").stdout
    assert "torch while arming: False" in armed, armed
    assert armed.count("ExtensionFileLoader ('ours', 1) True") == 2, armed
    assert f"APPLIED {version('torch')} True" in armed, armed


@pytest.mark.parametrize(
    "command", [("armed_run.py",), ("command.py", "pin"), ("command.py", "check", "--load")]
)
def test_a_function_without_a_signature_is_refused_in_words(command: tuple[str, ...], tmp_path: Path) -> None:
    _write(tmp_path, "upstream")
    done = _run(tmp_path, *command)
    printed = done.stdout + done.stderr
    assert "does not begin with one signature" in printed and "ours" not in printed, printed
    if command[0] == "armed_run.py":
        assert printed.count("DriftError") == 2 and "REFUSED" in printed, printed
    else:
        assert done.returncode == (2 if "pin" in command else 1), printed
        assert json.loads((tmp_path / "lock.json").read_text())["targets"] == {}


def test_a_package_that_cannot_be_imported_is_told_not_pinned(tmp_path: Path) -> None:
    _write(tmp_path, "upstream")
    (tmp_path / "upstream" / "__init__.py").write_text("raise ImportError('no GPU here')")
    done = _run(tmp_path, "command.py", "pin")
    assert "ImportError: no GPU here" in done.stderr and "Run this where" in done.stderr, done.stderr
    assert "skipped" in done.stdout and "0 new entries" in done.stdout, done.stdout
