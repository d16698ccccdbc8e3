"""The report of `scripts/bench.py attention`: bits before times, cells that did not run shown with their price."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks")]

import attention as bench  # noqa: E402

REPORT: dict[str, Any] = {
    "environment": {"gpu": "a GPU", "torch": "2", "hip": None},
    "sides": ["ours", "cuDNN", "flash"],
    "errors": {"128": {"out": {"ours": 2.0e-3, "cuDNN": 2.1e-3, "ratio": 0.952}}},
    "cells": {
        "d128 S1024": {
            "ms": {"forward": {"ours": 1.0, "cuDNN": 1.5}, "backward": {"ours": 2.0, "cuDNN": 2.0, "flash": 5.0}},
            "checks": {"repeated": [0, 9]}, "absent": {"TransformerEngine": "not installed"},
        },
        "d128 S2048": {"ms": {}, "checks": {"against portable": [3, 9]}},
        "d128 S4096": {"skipped": "2 s are left of --seconds 3", "price_s": 41.0},
    },
}  # fmt: skip


def test_a_report_shows_ratios_what_differed_and_what_did_not_run(tmp_path: Path) -> None:
    rows = bench.rows_of(REPORT)
    assert rows[0] == ["d128 S1024", "forward", "1.0000 (1.00)", "1.5000 (1.50)", "-"]
    assert rows[1] == ["d128 S1024", "backward", "2.0000 (1.00)", "2.0000 (1.00)", "5.0000 (2.50)"]
    assert rows[2][1] == "bits differ, not timed: {'against portable': [3, 9]}"
    assert rows[3][1] == "not run: 2 s are left of --seconds 3 (priced at 41 s)"
    (tmp_path / "out").mkdir()
    bench._write(REPORT, str(tmp_path / "out" / "bench.json"))
    page = (tmp_path / "out" / "bench.md").read_text()
    assert page.count("\n| ") == 5 and "priced at 41 s" in page and "out 2.000e-03 / 2.100e-03" in page
    assert (tmp_path / "out" / "bench.png").stat().st_size > 1000


def test_a_cell_is_priced_by_its_work_and_skipped_when_the_time_is_spent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    small, large = (bench.Cell(s, 1, 32, 8, 128) for s in (1024, 4096))
    assert large.price(False) - 0.5 == pytest.approx(16 * (small.price(False) - 0.5))
    assert small.price(True) > small.price(False) + 10
    measured: list[str] = []

    def measure(cell: Any) -> dict[str, Any]:
        measured.append(cell.name)
        # Hopper's and the portable kernels apart: no time.
        return {"checks": {"against portable": [1, 9]}, "absent": {}, "ms": {}}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "errors", lambda d: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    args = SimpleNamespace(
        lengths=[1024, 65536],
        head_dims=[128],
        heads=32,
        groups=8,
        seconds=60.0,
        json=str(tmp_path / "bench.json"),
    )
    assert bench.run(args) == 1 and measured == ["d128 S1024"]
    assert "priced at" in (tmp_path / "bench.md").read_text()
    args.seconds, args.json = 1.0, "-"
    capsys.readouterr()
    assert bench.run(args) == 2 and measured == ["d128 S1024"]
    shown = capsys.readouterr()
    assert set(json.loads(shown.out)["cells"]) == {"d128 S1024", "d128 S65536"}, "the report alone"
    assert "not run" in shown.err


def test_without_a_gpu_nothing_reads_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.run(SimpleNamespace(json=None)) == 2
