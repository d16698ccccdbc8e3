"""A registered torch operator is what was reviewed if the reviewed arguments are the first ones of its schema.

Operators are registered in the test's own namespace with right and wrong schemas; AITER's wrappers hide theirs
(ROCm/aiter), which is why the wrapper's signature is not looked at.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from patches import schema
from patches.errors import DriftError, OverrideError
from upstream_wheels import ROOT

REVIEWED = "schema_test::attend(Tensor q, Tensor k, float scale, bool causal=False) -> (Tensor, Tensor)"
RETURNS = " -> (Tensor, Tensor)"


def _register(name: str, arguments: str, returns: str = RETURNS) -> str:
    library = torch.library.Library("schema_test", "FRAGMENT")
    library.define(f"{name}({arguments}){returns}")
    _LIBRARIES.append(library)
    return f"schema_test::{name}"


_LIBRARIES: list[torch.library.Library] = []


def _reviewed(operator: str) -> str:
    return REVIEWED.replace("schema_test::attend", operator)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("as_reviewed", "Tensor q, Tensor k, float scale, bool causal=False"),
        (
            "longer",
            "Tensor q, Tensor k, float scale, bool causal=False, int[2]? window=None, *, str how='a, b'",
        ),
        ("another_default", "Tensor q, Tensor k, float scale, bool causal=True"),
    ],
)
def test_the_reviewed_arguments_with_defaults_behind_them_pass(name: str, arguments: str) -> None:
    operator = _register(name, arguments)
    found = schema.require_prefix(operator, [_reviewed(operator)], who="the test")
    assert found.startswith(operator)


@pytest.mark.parametrize(
    ("name", "arguments", "returns", "words"),
    [
        ("inserted", "Tensor q, Tensor k, bool fast, float scale, bool causal=False", RETURNS,
         "argument 2 was reviewed as (float scale) and is (bool fast)"),
        ("renamed", "Tensor q, Tensor key, float scale, bool causal=False", RETURNS, "argument 1"),
        ("retyped", "Tensor q, Tensor k, int scale, bool causal=False", RETURNS, "is (int scale)"),
        ("removed", "Tensor q, Tensor k, float scale", RETURNS, "argument 3 (bool causal=False) is gone"),
        ("undefaulted", "Tensor q, Tensor k, float scale, bool causal", RETURNS,
         "argument 3 was reviewed as (bool causal=False) and is (bool causal)"),
        ("defaulted", "Tensor q, Tensor k, float scale=1.0, bool causal=False", RETURNS,
         "argument 2 was reviewed as (float scale) and is (float scale=1"),
        ("demanding", "Tensor q, Tensor k, float scale, bool causal=False, *, int n", RETURNS, "no default"),
        ("keyword", "Tensor q, Tensor k, float scale, *, bool causal=False", RETURNS, "argument 3"),
        ("returning", "Tensor q, Tensor k, float scale, bool causal=False", " -> Tensor", "returns Tensor"),
        ("mutating", "Tensor(a!) q, Tensor k, float scale, bool causal=False", RETURNS, "Tensor(a!) q"),
    ],
)  # fmt: skip
def test_anything_else_is_drift_that_names_the_position(
    name: str, arguments: str, returns: str, words: str
) -> None:
    operator = _register(name, arguments, returns)
    with pytest.raises(DriftError) as error:
        schema.require_prefix(operator, [_reviewed(operator)], who="override x")
    for word in (words, "override x", "Sought", "Found", "Ways on"):
        assert word in str(error.value), error.value


def test_one_of_several_reviewed_forms_is_enough() -> None:
    operator = _register("two_forms", "Tensor q, int n")
    forms = [_reviewed(operator), f"{operator}(Tensor q, int n){RETURNS}"]
    schema.require_prefix(operator, forms, who="the test")


def test_an_operator_that_is_not_there_or_was_never_reviewed_is_refused() -> None:
    with pytest.raises(OverrideError, match="no such operator"):
        schema.require_prefix("schema_test::nobody", [REVIEWED], who="the test")
    with pytest.raises(OverrideError, match="none was ever reviewed"):
        schema.require_prefix(_register("unseen", "Tensor q"), [], who="the test")
    with pytest.raises(OverrideError, match="not of the form"):
        schema.parse("attend(Tensor q)")


PLAIN = """
import sys
from patches import schema
from patches.errors import DriftError

REVIEWED = "aiterish::attend(Tensor q, Tensor k, bool causal=False) -> Tensor"

def attend():
    schema.require_prefix("aiterish::attend", REVIEWED)
    return "called"

def attempt():
    try:
        print(attend())
    except DriftError as error:
        print("DriftError", error)

attempt()
print("torch was imported:", "torch" in sys.modules)
import torch
attempt()
library = torch.library.Library("aiterish", "DEF")
library.define("attend({arguments}) -> Tensor")
attempt()
"""


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        ("Tensor q, Tensor k, bool causal=False, int window=0", "called"),
        ("Tensor q, bool fast, Tensor k, bool causal=False", "argument 1 was reviewed as (Tensor k)"),
    ],
)
def test_a_plain_function_asks_and_torch_is_looked_up_not_imported(arguments: str, last: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN.format(arguments=arguments)], capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, check=False,
    )  # fmt: skip
    before, imported, without, found = done.stdout.splitlines()
    assert "no torch in this process" in before and imported == "torch was imported: False", done.stderr
    assert "no such operator" in without and last in found, done.stdout


GATE = """
import sys, torch
from pathlib import Path
import patches
from patches import gate
library = torch.library.Library("aiterish", "DEF")
library.define("norm(Tensor x, {inserted}float eps) -> Tensor")
patches.arm("stable", declarations=["declaration"], lock_path=Path("lock.json"))
import upstream.core
try:
    gate.settle(patches.current_ledger())
    print("settled", upstream.core.merge(1))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("inserted", ["", "bool fast, "])
def test_the_gate_looks_at_the_operators_that_a_replacement_calls(inserted: str, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "drift"))
    import json

    import fake_upstream

    fake_upstream.write(tmp_path)
    declaration = (tmp_path / "declaration.py").read_text()
    (tmp_path / "declaration.py").write_text(
        declaration.replace('versions=">=1.0,<3")', 'versions=">=1.0,<3", operators=("aiterish::norm",))')
    )
    data = json.loads((tmp_path / "lock.json").read_text())
    reviewed = "schema:aiterish::norm(Tensor x, float eps) -> Tensor"
    data["targets"]["operator aiterish::norm"] = [{"fingerprint": reviewed, "versions": ["1.5"]}]
    (tmp_path / "lock.json").write_text(json.dumps(data))
    done = subprocess.run(
        [sys.executable, "-c", GATE.format(inserted=inserted)], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"}, check=False,
    )  # fmt: skip
    if inserted:
        assert "GateError" in done.stdout and "argument 1" in done.stdout and "up.merge" in done.stdout, done
    else:
        assert "settled ('ours', 4)" in done.stdout, done.stdout + done.stderr
