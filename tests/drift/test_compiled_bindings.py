"""Functions of compiled modules: known by signature and release, replaced where they are used, refused in words."""

from __future__ import annotations

import _bisect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patches import binding
from upstream_wheels import ROOT, TRANSFORMER_ENGINE, sources

# A package whose compiled half is loaded around every finder, as TransformerEngine's is: _bisect, a real extension.
PACKAGE = """
import importlib.machinery, importlib.util, sys
spec = importlib.util.spec_from_file_location("_bisect", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules["compiled_upstream"] = module
SIGNED = {signed}
if SIGNED:
    # What pybind11 writes into a docstring; the stdlib's own functions say something else.
    class Signed:
        def __call__(self, *arguments):
            return module.bisect_right(*arguments)
    module.find = Signed()
    module.find.__doc__ = {doc!r}
else:
    module.find = module.bisect_right
"""
DECLARATION = """
from patches import override

@override(id="up.find", target="compiled_upstream:find", after="upstream.user", kind="binding", modes=("stable",),
          why="w", how="h", retire_when="r", evidence="docs/limits.md", distribution="upstream", absent={absent!r})
def build(original):
    def find(*arguments):
        return ("ours", original(*arguments))
    return find
"""
PROGRAM = """
import pathlib, patches, sys
patches.arm("stable", declarations=["declaration"], lock_path=pathlib.Path("lock.json"))
for attempt in range(2):
    try:
        import upstream.user as user
        print(user.look([1, 2, 3], 2))
    except Exception as error:
        print(type(error).__name__, error)
print({e.state: e.reason for e in patches.current_ledger().entries.values()})
"""
DOC = "find(arg0: list[int], arg1: int) -> int\\n\\nFinds."
LOCK = '{"schema": 1, "targets": {"compiled_upstream:find": [{"fingerprint": "%s", "versions": ["1.5.0"]}]}}'


def _run(
    folder: Path, doc: str = DOC, version: str = "1.5.0", signed: bool = True, uses: str = "find",
    compiled: str = "installed/upstream/wheel_lib", held: str = "", absent: str = "",
) -> str:  # fmt: skip
    outside, folder = folder, folder / "installed"
    package, extension = folder / "upstream", outside / compiled / Path(_bisect.__file__).name
    package.mkdir(parents=True)
    extension.parent.mkdir(parents=True)
    shutil.copy(_bisect.__file__, extension)
    if held:
        (folder / f"compiled_upstream-{held}.dist-info").mkdir()
    (package / "__init__.py").write_text("")
    (package / "compiled.py").write_text(
        PACKAGE.format(signed=signed, doc=doc.replace("\\n", "\n"), file=str(extension))
    )
    (package / "user.py").write_text(
        "import upstream.compiled\nimport compiled_upstream as c\n"
        + ("" if uses == "find" else "delattr(c, 'find')\n")
        + f"def look(*a): return c.{'seek' if uses == 'seek' else 'find'}(*a)\n"
    )
    (folder / f"upstream-{version}.dist-info").mkdir()
    (folder / "declaration.py").write_text(DECLARATION.format(absent=absent))
    (folder / "lock.json").write_text(LOCK % "binding:(arg0: list[int], arg1: int) -> int")
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "DETERMINISTIC_ROCM": ""}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_reviewed_binding_is_replaced_for_those_who_call_it_through_its_module(tmp_path: Path) -> None:
    printed = _run(tmp_path)
    assert printed.count("('ours', 2)") == 2 and "APPLIED" in printed, printed


def test_a_build_of_a_reviewed_release_is_one(tmp_path: Path) -> None:
    assert "('ours', 2)" in _run(tmp_path, version="1.5.0.dev0+abc")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"doc": "find(arg0: list[int], arg1: bool, arg2: int) -> int"},
            ["(arg0: list[int], arg1: bool, arg2: int)"],
        ),
        ({"version": "1.6.0"}, ["upstream 1.6.0", "(1.5.0)"]),
        ({"signed": False}, ["does not begin with one signature"]),
        ({"uses": "nothing"}, ["no find in"]),
        ({"uses": "seek", "absent": "left out"}, ["no find in"]),
        ({"uses": "nothing", "absent": "left out", "version": "1.6.0"}, ["no find in", "upstream 1.6.0"]),
        ({"held": "1.4.0"}, ["of release 1.4.0, called by another release", "upstream 1.5.0"]),
        (
            {"compiled": "elsewhere/of/no/package"},
            ["whose release cannot be told", "elsewhere/of/no/package"],
        ),
        (
            {"doc": "find(*args, **kwargs)\\nOverloaded function.\\n\\n1. find(arg0: int) -> int"},
            ["one signature"],
        ),
    ],
    ids=[
        "argument inserted",
        "another release",
        "no signature",
        "gone",
        "renamed",
        "left out of a new release",
        "of another release",
        "of no release",
        "overloaded",
    ],
)
def test_anything_else_is_drift_twice_in_words(
    tmp_path: Path, change: dict[str, str], words: list[str]
) -> None:
    printed = _run(tmp_path, **change)  # type: ignore[arg-type]
    assert printed.count("DriftError override up.find") == 2 and "ours" not in printed, printed
    for word in (*words, "Sought", "Found", "Ways on"):
        assert word in printed, printed


def test_a_function_that_a_build_leaves_out_is_not_required_and_says_why(tmp_path: Path) -> None:
    printed = _run(tmp_path, uses="nothing", absent="small builds have no search")
    assert printed.count("AttributeError module") == 2 and "'NOT_REQUIRED'" in printed, printed
    assert "small builds have no search" in printed, printed


@pytest.mark.parametrize(
    ("text", "count"),
    [("()", 0), ("(arg0: int)", 1), ("(arg0: dict[str, int], arg1: tuple[int, int] = (1, 2))", 2)],
)
def test_parameters_are_counted_outside_brackets(text: str, count: int) -> None:
    assert binding.parameters(f"binding:{text} -> None") == count


# The replacement is one in both modes; every release meets it in one of them, the newest in both.
@pytest.mark.parametrize(
    ("version", "mode"),
    [*((version, "invariant") for version in TRANSFORMER_ENGINE), (TRANSFORMER_ENGINE[-1], "stable")],
)
def test_transformer_engine_s_packed_corrections_are_ours_and_equal_the_dense_ones(
    version: str, mode: str
) -> None:
    """Called as the ring calls them: through `tex`. One sequence packed is the dense batch of one.

    The gate settles: nothing of upstream's own holds an original, `cpp_extensions` with its `import *` included.
    """
    program = """
import torch
from armed import context_parallel as cp
from patches import current_ledger, gate
from te_overrides.kernels.lse_merge import ops
gate.settle(current_ledger())
print({id: e.state for id, e in current_ledger().entries.items() if "thd" in id})
g = torch.Generator().manual_seed(0)
lse, step = (torch.randn(2, 32, generator=g) * 3 for _ in range(2))
out, step_out = (torch.randn(32, 2, 8, generator=g) for _ in range(2))
cu = torch.tensor([0, 32], dtype=torch.int32)
got, want = lse.clone(), lse.clone()
cp.tex.thd_second_half_lse_correction(got, step[:, 16:], cu, True)
ops.merge_second_half_lse_(want.view(2, 2, 16), step[:, 16:])
print("lse differing", int((got != want).sum()), "of", got.numel(), "changed", int((got != lse).sum()))
new, got, want = want, out.clone(), out.clone()
if hasattr(cp, "flash_attn_fwd_incremental_out_correction"):
    cp.tex.thd_out_correction(got, step_out, lse, new, step, cu, False, True)
    ops.incremental_out_correction_(want[None], step_out[None], lse[None], new[None], step[None], 1)
else:
    cp.tex.thd_out_correction(got, step_out, new, step, cu, False, True)
    ops.out_correction_(want[None], step_out[None], new[None], step[None], 1)
print("out differing", int((got != want).sum()), "of", got.numel(), "changed", int((got != out).sum()) > 0)
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "te_cpu")])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "DETERMINISTIC_ROCM": mode,
        "TE_SOURCES": str(sources(version)),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.count("VERIFIED") == 2, done.stdout + done.stderr
    assert "lse differing 0 of 64 changed 32" in done.stdout, done.stdout
    assert "out differing 0 of 512 changed True" in done.stdout, done.stdout
