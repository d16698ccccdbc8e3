"""Peer-to-peer collectives against the tree over ranks: real flags between processes, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    script = ROOT / "tests" / "triton_cpu" / "peers_in_interpreter.py"
    done = subprocess.run(
        [sys.executable, script, "4", "8"], capture_output=True, text=True, timeout=300, cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("world", ["4", "8"])
def test_every_rank_has_the_tree_over_ranks(report: dict[str, Any], world: str) -> None:
    """Sizes of one, odd, at odd places of larger buffers; calls of changing kinds; all orders of (1e8, 1, -1e8, 1)."""
    assert len(report[world]) == int(world)
    for rank, counts in report[world].items():
        checks = {name: count for name, count in counts.items() if name != "mutant"}
        assert len(checks) == (48 if world == "4" else 8)
        bad = {name: count for name, count in checks.items() if count[0]}
        print(
            f"rank {rank} of {world}: {sum(c[0] for c in checks.values())} of {sum(c[1] for c in checks.values())}"
        )
        assert not bad


@pytest.mark.parametrize("world", ["4", "8"])
def test_a_chain_over_ranks_is_another_sum(report: dict[str, Any], world: str) -> None:
    assert report[world]["0"]["mutant"][0] > 0


@pytest.mark.parametrize("world", ["4", "8"])
def test_no_flag_is_left_set(report: dict[str, Any], world: str) -> None:
    assert report[f"{world} flags left"] == 0


def test_a_rank_that_never_comes_is_named(report: dict[str, Any]) -> None:
    assert "rank 1 did not come" in report["lone"]["error"]


def assert_in_vain(name: str, case: dict[str, Any], limit: int, world: int) -> None:
    """No number anywhere; one wait for the whole call, none for all later ones, which touch nobody's memory."""
    numbers = case["numbers"] + case["later numbers"]
    print(
        f"{name}: {numbers} numbers instead of NaN among {case['elements']} elements in each of 21 calls; "
        f"{case['looks']} looks at flags, then {case['later looks']}"
    )
    assert case["missing"] > 0 and numbers == 0
    # Every flag is looked at once at least, in two meetings at most.
    assert 0 < case["looks"] <= limit + 4 * world
    assert case["later looks"] == 0 and case["staged later"] == 0


def test_a_sum_that_missed_a_rank_is_nan_and_no_later_one_waits(report: dict[str, Any]) -> None:
    """Both forms of the all-reduce, every dtype; also a rank that came to the first of two meetings."""
    cases = {name: case for name, case in report["lone"].items() if isinstance(case, dict)}
    assert len(cases) == 13
    for name, case in cases.items():
        assert_in_vain(name, case, 50, 2)


def test_a_sum_that_one_of_two_programs_missed_has_no_numbers(report: dict[str, Any]) -> None:
    assert report["lone"]["numbers of a call that missed it in one of two programs"] == 0


def test_every_survivor_gets_nan_and_waits_once(report: dict[str, Any]) -> None:
    assert len(report["survivors"]) == 3
    for rank, cases in report["survivors"].items():
        assert len(cases) == 4
        for name, case in cases.items():
            assert_in_vain(f"rank {rank} of 4, {name}", case, 2000, 4)
