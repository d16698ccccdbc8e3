"""A name that a module assigns another package's function to is replaced there alone; static methods are replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_upstream import run, write

from patches import fingerprint
from patches.target import Target

LIBRARY = """
def reduce(x, op="sum"):
    return ("library", x)

scatter = reduce
"""
UPSTREAM = """
import library

try:
    if hasattr(library, "reduce"):
        reduce_func = library.reduce
    else:
        reduce_func = library.old_reduce
except AttributeError:
    reduce_func = library.old_reduce

class Function:
    @staticmethod
    def backward(ctx, grad):
        return reduce_func(grad)

    @staticmethod
    def other(ctx):
        reduce_func = None
        return reduce_func
"""
DECLARATION = """
from patches import override

fields = dict(why="w", how="h", retire_when="r", evidence="docs/limits.md", distribution="upstream",
              modes=("stable", "invariant"))

@override(id="up.alias", target="upstream.core:reduce_func", kind="alias", also=("Function.backward",), **fields)
def build(original):
    def reduce_func(x, op="sum"):
        return ("ours", original(x))
    return reduce_func

@override(id="up.backward", target="upstream.core:Function.backward", **fields)
def build_static(original):
    def backward(ctx, grad):
        return ("static", original.__func__(ctx, grad))
    return staticmethod(backward)
"""
PROGRAM = """
l = arm()
import library, upstream.core as u
from patches import gate
gate.settle(l)
print({id: (e.state, e.called) for id, e in l.entries.items()})
print(u.Function.backward(None, 3), u.Function().backward(None, 4), library.reduce(5), u.Function.backward.__name__)
print({id: (e.state, e.called) for id, e in l.entries.items()})
gate.settle(l)
u.reduce_func = library.reduce
gate.settle(l)
"""


def _laid_out(folder: Path, upstream: str = UPSTREAM) -> Path:
    write(folder, upstream)
    (folder / "library.py").write_text(LIBRARY)
    (folder / "declaration.py").write_text(DECLARATION)
    targets = {}
    for target, also, alias in (
        ("upstream.core:reduce_func", ("Function.backward",), True),
        ("upstream.core:Function.backward", (), False),
    ):
        found = fingerprint.of_source(UPSTREAM, Target.parse(target), also, alias)
        targets[target] = [{"fingerprint": found, "versions": ["1.5"]}]
    (folder / "lock.json").write_text(json.dumps({"schema": 1, "targets": targets}))
    return folder


def test_the_name_is_replaced_in_its_module_and_the_function_stays_with_its_package(tmp_path: Path) -> None:
    said = run(_laid_out(tmp_path), PROGRAM)
    assert "{'up.alias': ('VERIFIED', False), 'up.backward': ('VERIFIED', False)}" in said, said
    ours = "('static', ('ours', ('library', {})))"
    assert f"{ours.format(3)} {ours.format(4)} ('library', 5) backward" in said
    assert "{'up.alias': ('VERIFIED', True), 'up.backward': ('VERIFIED', True)}" in said
    # Somebody who puts the library's function back is noticed.
    assert "GateError" in said and "up.alias: upstream.core:reduce_func is now library.reduce" in said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        reduce_func = library.reduce\n", "        reduce_func = library.scatter\n"),
        ("except AttributeError:\n    reduce_func = library.old_reduce", "except AttributeError:\n    pass"),
        ("return reduce_func(grad)", "return reduce_func(grad, 'max')"),
    ],
    ids=["another function", "one statement less", "another call"],
)
def test_another_assignment_or_another_call_is_drift(old: str, new: str, tmp_path: Path) -> None:
    assert old in UPSTREAM
    said = run(_laid_out(tmp_path, UPSTREAM.replace(old, new)), "arm(); import upstream.core")
    assert "DriftError" in said and "upstream.core:reduce_func is not the code that was reviewed" in said, (
        said
    )


def test_a_function_of_that_name_is_no_alias(tmp_path: Path) -> None:
    defined = UPSTREAM[UPSTREAM.index("class Function") :] + "\ndef reduce_func(x):\n    return x\n"
    said = run(_laid_out(tmp_path, defined), "arm(); import upstream.core")
    assert "DriftError" in said and "is bound in" in said and "but not assigned there" in said, said


def test_what_does_not_assign_the_name_does_not_count() -> None:
    target = Target.parse("upstream.core:reduce_func")

    def of(source: str) -> str | None:
        return fingerprint.of_source(source, target, alias=True)

    assert of(UPSTREAM) is not None
    assert of(UPSTREAM) == of(UPSTREAM.replace("reduce_func = None", "reduce_func = 1"))
    assert of(UPSTREAM) == of(UPSTREAM + "\nother = reduce_func\n")
    assert of("import library\n") is None
    assert of("reduce_func: object = library.reduce\n") is not None
