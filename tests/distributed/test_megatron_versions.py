"""Modules, specs and overrides fit every megatron-core release they claim: a real model, four ranks, no mismatch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_plugins.verify.model.plan import COLUMNS
from upstream_wheels import MEGATRON_CORE, sources

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", MEGATRON_CORE)
def test_tp2_cp2_sp_equals_one_rank_on_every_megatron_core(version: str) -> None:
    upstream = sources(version, "megatron-core")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_plugins.verify.model.engine", "deterministic"]
        + ["--device", "cpu", "--dtype", "bf16", "--shape", "tiny", "--ranks", "4", "--rows", "TP2xCP2+SP"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{upstream}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"event"')]
    errors = [event["message"] for event in events if event["event"] == "failed"]
    assert done.returncode == 0 and not errors, f"{version}: {errors or done.stderr[-3000:]}"
    assert {event["megatron"].partition("+")[0] for event in events if event["event"] == "start"} == {version}
    (row,) = (event for event in events if event["event"] == "row" and event["row"] == "TP2xCP2+SP")
    assert set(row["columns"]) == set(COLUMNS)
    for name, column in row["columns"].items():
        assert column["mismatched"] == 0 < column["total"], f"{version}: {name}: {column}"
