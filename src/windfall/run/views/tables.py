"""How all views draw tables and summaries: aligned columns, without lines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table
from rich.text import Text

Cell = str | Text
Labeled = tuple[str, str]
"""A line of a summary: what it is about, and what is known of it. A line without a label continues the one before."""


def labeled(rows: Iterable[Labeled]) -> list[str]:
    """The lines of a summary, with the labels in a column of their own."""
    return [f"  {label:<26} {text}" for label, text in rows]


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
