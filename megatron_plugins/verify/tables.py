"""Tables that stay readable where the terminal is narrower than they are."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_ANY_WIDTH, _INDENT = 10_000, 4


def print_table(console: Console, table: Table) -> None:
    """Print `table`, or, where it does not fit, one paragraph a row: its first cell, then "heading cell" for the rest.

    rich would cut cells to a letter and dots, so that a count of differing elements could no longer be read.
    """
    wanted = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table).maximum
    if wanted <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(Text.assemble((str(table.title), table.title_style or "")))
    headings = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        first, *others = (_text(cell) for cell in cells)
        console.print(first)
        said = [
            Text(f"{heading} ").append_text(cell) if heading else cell
            for heading, cell in zip(headings[1:], others, strict=True)
            if cell.plain not in ("", "-")
        ]
        for line in _lines(said, console.width - _INDENT):
            console.print(Padding(line, (0, 0, 0, _INDENT), expand=False))


def _lines(words: list[Text], width: int) -> list[Text]:
    """Join with commas, breaking between words alone while they fit: a count stays beside what it counts."""
    lines: list[Text] = []
    for word in words:
        if lines and lines[-1].cell_len + len(", ,") + word.cell_len <= width:
            lines[-1].append(", ").append_text(word)
        else:
            if lines:
                lines[-1].append(",")
            lines.append(word)
    return lines


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text.from_markup(str(cell))
