"""The committed results of `verify model` are valid reports without a mismatch, and the page quotes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_plugins.verify.model import report

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"


@pytest.mark.parametrize("place", ["cpu", "h200"])
def test_the_results_are_reports_and_the_page_quotes_them(place: str) -> None:
    given = json.loads((EVIDENCE / "results" / f"verify-model-{place}.json").read_text())
    report.check(given)
    assert report.exit_status(given) == 0
    page = (EVIDENCE / "whole-model.md").read_text()
    for row in given["rows"]:
        columns = row["results"]["deterministic"]["columns"]
        if place == "h200":
            cells = [f"0 of {columns[name]['total']:,}" for name in columns]
            assert f"| {row['name']} | " in page and all(cell in page for cell in cells)
    total = sum(report.differing(row["results"]["deterministic"])[1] for row in given["rows"])
    if place == "cpu":
        assert f"{total:,} elements: 0 differ" in page
        for side in ("upstream", "ring"):
            for row in given["rows"]:
                theirs = row["results"][side]
                if theirs["ran"] and report.differing(theirs)[0]:
                    logits = theirs["columns"]["logits"]
                    share = 100 * logits["mismatched"] / logits["total"]
                    shown = "0" if not share else f"{share:.3g}%"
                    assert f"| {row['name']} | " in page and shown in page
