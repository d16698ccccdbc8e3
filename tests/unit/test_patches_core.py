"""Targets, fingerprints, versions and the lock, by themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patches import fingerprint, versions
from patches.errors import LockError, OverrideError, RegistryError, TargetError
from patches.lock import Lock
from patches.registry import REGISTRY
from patches.report import status
from patches.target import Target

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''
@decorator
def f(a, *, b="x # no comment"):
    """Documented."""
    text = f"{a!r:>{b}} {'inner'}"  # why
    def inner():
        "inner documentation"
        return text
    return inner

class C:
    """Documented."""
    class D:
        async def m(self):
            return 1
'''
LOOSE = """
import os


@decorator
def f(a,
      *, b="x # no comment"):

    text = f"{a!r:>{b}} {'inner'}"

    def inner():
            return text   # another
    # nothing
    return inner


class C:
    class D:
        async def m(self): return 1
"""


def of(source: str, qualname: str = "f", also: tuple[str, ...] = ()) -> str | None:
    return fingerprint.of_source(source, Target("m", qualname), also)


@pytest.mark.parametrize("text", ["a.b:c", "a:B.c.d"])
def test_a_target_reads_as_it_is_written(text: str) -> None:
    assert str(Target.parse(text)) == text


@pytest.mark.parametrize("text", ["a.b.c", "a:b:c", "a: b", "", "a.b:", "a-b:c"])
def test_any_other_form_is_refused(text: str) -> None:
    with pytest.raises(TargetError, match="package.module:Qualified.name"):
        Target.parse(text)


def test_comments_docstrings_and_layout_do_not_count() -> None:
    assert of(SOURCE) == of(LOOSE)
    assert of(SOURCE.replace('"inner documentation"', '"other"')) == of(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@decorator\n", ""),
        ("x # no comment", "x # other"),
        ("{a!r:>{b}}", "{a!s:>{b}}"),
        ("return inner\n", "return inner()\n"),
        ("'inner'", "'outer'"),
        ("def inner", "async def inner"),
    ],
)
def test_what_can_change_behaviour_counts(old: str, new: str) -> None:
    assert old in SOURCE
    assert of(SOURCE.replace(old, new)) != of(SOURCE)


def test_moving_a_statement_in_or_out_of_a_block_counts() -> None:
    inside = "def f(a):\n    if a:\n        g()\n        h()\n"
    outside = "def f(a):\n    if a:\n        g()\n    h()\n"
    assert of(inside) != of(outside)


def test_nested_definitions_are_found_and_missing_ones_are_not() -> None:
    assert of(SOURCE, "C.D.m") is not None
    assert of(SOURCE, "C.m") is None
    assert of("try:\n    import x\nexcept ImportError:\n    def f(): return 0\n") is not None
    assert of(SOURCE, "f", ("C",)) != of(SOURCE, "f")


def _interpreters() -> list[str]:
    found = [shutil.which(f"python3.{minor}") for minor in range(10, 15)]
    found += [str(path) for path in Path.home().glob(".pyenv/versions/3.1*/bin/python")]
    out = []
    for python in dict.fromkeys(filter(None, found)):
        done = subprocess.run(
            [python, "-c", "import sys; print(sys.version_info >= (3, 10))"], capture_output=True, text=True
        )
        if done.stdout.strip() == "True":
            out.append(python)
    return out


def test_a_fingerprint_is_the_same_in_every_python_on_this_machine() -> None:
    """Python 3.12 splits f-strings into tokens; a pin made on one version must hold on the others."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from patches import fingerprint; from patches.target import Target\n"
        "print(fingerprint.of_source(sys.stdin.read(), Target('m', 'f')))"
    )
    answers = {sys.executable: of(SOURCE)}
    for python in _interpreters():
        done = subprocess.run(
            [python, "-c", program, str(ROOT)], input=SOURCE, capture_output=True, text=True, check=True
        )
        answers[python] = done.stdout.strip()
    print(answers)
    assert len(set(answers.values())) == 1, answers


@pytest.mark.parametrize(
    ("version", "specifier", "want"),
    [
        ("2.20.2", ">=2.3", True),
        ("2.3.0", ">=2.3", True),
        ("2.20.2", ">=2.3,<2.20", False),
        ("2.9", "<2.20", True),
        ("2.16.0+rocm7.2", "==2.16", True),
        ("1.0", "", True),
    ],
)
def test_version_ranges(version: str, specifier: str, want: bool) -> None:
    assert versions.matches(version, specifier) is want


def test_an_unreadable_range_is_refused() -> None:
    with pytest.raises(RegistryError, match="~=2"):
        versions.matches("2.0", "~=2")


def test_a_version_is_read_beside_the_code_that_runs(tmp_path: Path) -> None:
    file = tmp_path / "pkg" / "sub" / "mod.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    assert versions.beside(file, "pkg.sub.mod", "the-dist") is None
    (tmp_path / "The_Dist-4.5.dist-info").mkdir()
    assert versions.beside(file, "pkg.sub.mod", "the-dist") == "4.5"
    (file.parent / "__init__.py").write_text("")
    assert versions.beside(file.parent / "__init__.py", "pkg.sub", "the-dist") == "4.5"


def test_a_pin_is_written_sorted_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    lock = Lock(path)
    assert lock.accept("m:f", "source:b", "2.10") and lock.accept("m:f", "source:b", "2.9")
    assert not lock.accept("m:f", "source:b", "2.9")
    assert lock.accept("m:f", "source:a", "1.0")
    lock.write()
    assert Lock.read(path).accepted("m:f") == {"source:a": ["1.0"], "source:b": ["2.9", "2.10"]}
    assert Lock.read(path).accepted("m:g") == {}
    with pytest.raises(LockError):
        Lock.read(tmp_path / "none.json")
    assert not issubclass(OverrideError, ImportError)


def test_status_lists_every_override_with_what_an_operator_needs() -> None:
    rows = status()
    assert [row["id"] for row in rows] == [override.id for override in REGISTRY]
    for row in rows:
        assert {"id", "target", "state", "fingerprint", "why"} <= row.keys()
        assert row["accepted"], f"{row['id']} was never pinned"


def test_every_evidence_page_exists() -> None:
    status()
    for override in REGISTRY:
        assert (ROOT / override.evidence).is_file(), f"{override.id}: {override.evidence}"


@pytest.mark.parametrize(
    "arguments", [["status", "--json"], ["status"], ["explain", "megatron.rope"], ["check"]]
)
def test_the_command_line_answers_without_torch(arguments: list[str]) -> None:
    blocker = "import sys; sys.modules['torch'] = None; import runpy; sys.argv[0] = 'patches'; "
    done = subprocess.run(
        [sys.executable, "-c", blocker + "runpy.run_module('patches', run_name='__main__')", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "megatron.rope" in done.stdout or "rope_utils" in done.stdout
    if "--json" in arguments:
        assert len(json.loads(done.stdout)["overrides"]) == len(REGISTRY)


def test_status_is_whole_on_a_narrow_terminal_and_says_where_a_job_s_states_are() -> None:
    shown = {}
    for columns in ("60", "300"):
        done = subprocess.run(
            [sys.executable, "-m", "patches", "status"],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": columns},
            capture_output=True,
            text=True,
            check=True,
        )
        first, _, *shown[columns] = done.stdout.splitlines()
        assert first.endswith("every state below is NOT_ARMED; a job's are in its determinism-ledger.json")
    longest = max(map(len, shown["60"]))
    assert longest <= 60, f"a line of {longest} columns on a terminal of 60"
    for override in REGISTRY:
        at = shown["60"].index(override.id)
        assert shown["60"][at + 1].startswith("    state NOT_ARMED, installed ")
    assert len(shown["300"]) == len(REGISTRY) + 2, "one line an override where it fits"


def test_an_unknown_override_is_named_with_the_known_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "patches", "explain", "nope"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no override 'nope'" in done.stderr and "megatron.rope" in done.stderr
