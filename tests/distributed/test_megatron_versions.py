"""Modules, specs and overrides fit every megatron-core release they claim: a real model, four ranks, no mismatch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from upstream_wheels import MEGATRON_CORE, sources

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", MEGATRON_CORE)
def test_tp2_cp2_sp_equals_one_rank_on_every_megatron_core(version: str) -> None:
    upstream = sources(version, "megatron-core")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "scripts/step0_engine.py", "deterministic", "--only", "TP2xCP2+SP"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(upstream)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"event"')]
    errors = [event["message"] for event in events if event["event"] == "error"]
    assert done.returncode == 0 and not errors, f"{version}: {errors or done.stderr[-3000:]}"
    rows = [event for event in events if event["event"] == "row" and event["task"]["name"] != "TP1"]
    assert len(rows) == 4
    assert {event["megatron"].partition("+")[0] for event in events if event["event"] == "begin"} == {version}
    for row in rows:
        result = row["result"]
        assert result["mismatched"] == 0, f"{version}: {row['task']['dtype']}: {result}"
