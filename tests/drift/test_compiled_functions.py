"""Every function that Megatron compiles (`@jit_fuser`) is listed in docs/operations.md with what becomes of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_plugins.owned_modules import CONTAINERS, EXACT
from megatron_plugins.refusals import refusals
from patches import catalogue
from patches.registry import REGISTRY
from upstream_wheels import MEGATRON_CORE, sources

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `([\w.]+:[\w.]+)` \| ([\d.]+)(?: to ([\d.]+))? \| (.+) \|$", re.MULTILINE)
IN_0_19_2 = 41


def listed() -> dict[str, tuple[set[str], str]]:
    """Function -> (releases, answer), as the document says."""
    rows: dict[str, tuple[set[str], str]] = {}
    for name, first, last, answer in ROW.findall((ROOT / "docs" / "operations.md").read_text()):
        assert name not in rows, f"{name} is listed twice"
        span = slice(MEGATRON_CORE.index(first), MEGATRON_CORE.index(last or first) + 1)
        rows[name] = set(MEGATRON_CORE[span]), answer
    return rows


def decorated(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Qualified names of the definitions under `node` that jit_fuser decorates."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{prefix}{child.name}."
            if any("jit_fuser" in ast.unparse(d) for d in child.decorator_list):
                yield f"{prefix}{child.name}"
        yield from decorated(child, inner)


def uses(tree: Path) -> list[str]:
    """``module:function`` of every use under `megatron.core`; a use that is no decorator is ``module:line``."""
    found = []
    for file in sorted((tree / "megatron").rglob("*.py")):
        text = file.read_text()
        if "jit_fuser" not in text or file.name == "jit.py":
            continue
        module = ".".join(file.relative_to(tree).with_suffix("").parts).removeprefix("megatron.core.")
        parsed = ast.parse(text)
        found += [f"{module}:{name}" for name in decorated(parsed)]
        called = [n.func for n in ast.walk(parsed) if isinstance(n, ast.Call)]
        found += [f"{module}:{f.lineno}" for f in called if ast.unparse(f).split(".")[-1] == "jit_fuser"]
    return found


@pytest.mark.parametrize("release", MEGATRON_CORE)
def test_every_compiled_function_of_a_release_is_listed(release: str) -> None:
    found = uses(sources(release, "megatron-core"))
    expected = {name for name, (releases, _) in listed().items() if release in releases}
    assert set(found) == expected, (
        f"megatron-core {release}: not listed {sorted(set(found) - expected)}, gone {sorted(expected - set(found))}. "
        "Say in docs/operations.md who answers for its bits"
    )
    if release == "0.19.2":
        assert len(found) == IN_0_19_2


def test_a_use_that_nobody_listed_is_found(tmp_path: Path) -> None:
    """Mutation: as decorator of a nested function, under a condition, behind a module, and as a plain call."""
    core = tmp_path / "megatron" / "core" / "fusions"
    core.mkdir(parents=True)
    (core / "new.py").write_text(
        "if True:\n    @jit_fuser\n    def one(): ...\n"
        "class A:\n    def f(self):\n        @jit.jit_fuser\n        def two(): ...\n"
        "three = jit_fuser(four)\n"
    )
    assert uses(tmp_path) == ["fusions.new:one", "fusions.new:A.f.two", "fusions.new:8"]


def test_what_the_list_says_is_so() -> None:
    catalogue.declare_all()
    ids = {override.id for override in REGISTRY}
    for name, (_, answer) in listed().items():
        kind, _, rest = answer.partition(": ")
        named = re.findall(r"`([\w./]+)`", rest)
        if kind == "refused":
            said = refusals(SimpleNamespace(**{named[0]: 8 if named[0] == "num_moe_experts" else True}))
            assert any(named[0] in sentence for sentence in said), name
        elif kind == "refused by the gate":
            module, _, qualname = name.partition(":")
            classes = [c for c in {**CONTAINERS, **EXACT} if c.startswith(f"megatron.core.{module}.")]
            assert not classes and qualname, f"{name}: the gate lets {classes} pass"
        elif kind == "ours" and rest.startswith("override"):
            assert named[0] in ids, f"{name}: no override {named[0]}"
        else:
            assert kind in ("ours", "not called"), f"{name}: {answer}"
            assert (ROOT / "megatron_plugins" / named[0]).is_file(), f"{name}: no {named[0]}"
