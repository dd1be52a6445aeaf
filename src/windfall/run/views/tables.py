"""The one way to draw a table: columns with a heading, aligned, without lines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table
from rich.text import Text

Cell = str | Text


def plain_table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, right: Collection[str] = (),
    least: dict[str, int] | None = None,
) -> Table:  # fmt: skip
    """`right`: columns with numbers. `least`: smallest widths; such columns are one line high, and are cut short."""
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for name in columns:
        justify = "right" if name in right else "left"
        if least is None:
            table.add_column(name, justify=justify)
        else:
            table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", min_width=least[name])
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
