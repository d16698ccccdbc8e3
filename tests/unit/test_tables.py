"""On a narrow terminal every figure of a table can still be read: nothing is cut to a letter and dots."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_plugins.verify.ffn import command as ffn
from megatron_plugins.verify.model import report as model
from megatron_plugins.verify.tables import print_table

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "results"


def printed(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_every_cell_of_a_recorded_report_is_whole_at_this_width(width: int) -> None:
    table = model.table(json.loads((RESULTS / "verify-model-cpu.json").read_text()))
    shown = printed(table, width)
    cells = {Text.from_markup(str(cell)).plain for column in table.columns for cell in column.cells}
    lost = sorted(cell for cell in cells - {"", "-"} if cell not in shown)
    assert lost == [] and "…" not in shown, f"{len(lost)} of {len(cells)} cells are lost: {lost}"
    assert max(len(line) for line in shown.splitlines()) <= width


def test_a_count_stays_beside_its_heading_where_the_table_does_not_fit() -> None:
    table = Table(title="Elements")
    for heading in ("row", "logits", "gradient norm"):
        table.add_column(heading)
    table.add_row("TP2", "[red]1,234,567[/]", "3")
    table.add_row("heading of a section")
    assert printed(table, 30) == (
        "Elements\nTP2\n    logits 1,234,567,\n    gradient norm 3\nheading of a section\n"
    )
    assert "logits 1" not in printed(table, 60)


def test_the_largest_table_names_its_columns_in_full_on_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    ffn.show(json.loads((RESULTS / "verify-ffn-cpu.json").read_text()), console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    assert "train = infer 0" in shown and "of 8,861,696" in shown
