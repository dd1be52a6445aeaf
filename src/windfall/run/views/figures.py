"""How the console, the summary and `windfall top` write figures, and draw tables. Pure: numbers in, text out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

Labeled = tuple[str, str]
"""A line of a summary: what it is about, and what is known of it. A line without a label continues the one before."""
SHOWN_S = 0.05
"""Shorter times are left out of a line: they would be shown as 0.0 s."""


def labeled(rows: Iterable[Labeled]) -> list[str]:
    """The lines of a summary, with the labels in a column of their own."""
    rows = list(rows)
    width = max([26, *(len(label) for label, _ in rows)])
    return [f"  {label:<{width}} {text}" for label, text in rows]


def plain_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Collection[str] = (), whole: bool = False
) -> Table:
    """Aligned columns, without lines. `right`: columns with numbers. `whole`: if there is too little space, only the
    last column is cut short, as far as that helps."""
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for name in columns:
        kept = whole and name != columns[-1]
        table.add_column(
            name, justify="right" if name in right else "left", no_wrap=kept, overflow="ellipsis" if whole else "fold"
        )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def percent(part: float, whole: float) -> str:
    """A share in percent. A share that would be rounded to 0 is not shown as 0.

    >>> [percent(part, 10_000) for part in (0, 1, 123)]
    ['0%', '<0.1%', '1.2%']
    """
    share = part / whole if whole else 0.0
    return "0%" if not share else "<0.1%" if share < 0.0005 else f"{share:.1%}"


def reward_parts(event: Mapping[str, Any]) -> str:
    """The parts of a reward, if there are several.

    >>> reward_parts({"rewards": {"math": 0.5, "format": 0.25}}), reward_parts({"rewards": {"math": 0.5}})
    ('  (math 0.500, format 0.250)', '')
    """
    found = event.get("rewards") or {}
    if len(found) < 2:
        return ""
    return f"  ({', '.join(f'{escape(name)} {number(value)}' for name, value in found.items())})"


def graded(event: Mapping[str, Any]) -> str:
    """How many responses of an evaluation were graded, if rewards are missing.

    >>> graded({"graded": 31, "responses": 64}), graded({"graded": 64, "responses": 64})
    (' (31 of 64 responses graded)', '')
    """
    count, of = event.get("graded"), event.get("responses")
    return f" ({count} of {of} responses graded)" if count is not None and count != of else ""


def passes(event: Mapping[str, Any]) -> str:
    """pass@k of an evaluation.

    >>> passes({"pass_at": {"1": 0.25, "8": 0.5}, "pass_left_out": {"8": 2}})
    ', pass@1 0.250, pass@8 0.500 (without 2 tasks that have too few rewards)'
    """
    left_out = event.get("pass_left_out") or {}
    shown = [
        f", pass@{k} {number(value)}"
        + (f" (without {left_out[k]} tasks that have too few rewards)" if left_out.get(k) else "")
        for k, value in (event.get("pass_at") or {}).items()
    ]
    return "".join(shown)


def staleness(step: Mapping[str, Any]) -> list[str]:
    """How old the responses of a step were, and what the bound on their age cost: dropped responses, the trainer's
    wait, generation held back. Costs of 0 are left out. Empty for a synchronous step, whose event has no such fields.

    >>> staleness({"staleness_mean": 0.4, "staleness_max": 1, "staleness_bound": 2, "too_old": 3,
    ...            "too_old_tokens": 1204, "train_wait_s": 1.2, "held_s": 0.0})
    ['stale 0.4 (max 1, bound 2)', 'too old 3 (1,204 tok)', 'waited 1.2 s']
    """
    if "staleness_mean" not in step:
        return []
    mean, parts = step["staleness_mean"], list[str]()
    if mean is not None:
        parts.append(f"stale {mean:.1f} (max {step['staleness_max']}, bound {step['staleness_bound']})")
    if step.get("too_old"):
        parts.append(f"too old {step['too_old']:,} ({step.get('too_old_tokens') or 0:,} tok)")
    return parts + waits(step)


def waits(step: Mapping[str, Any]) -> list[str]:
    """For how long the trainer waited in a step, and generation was held back."""
    found = ((name, step.get(key) or 0.0) for name, key in (("waited", "train_wait_s"), ("held", "held_s")))
    return [f"{name} {seconds:,.1f} s" for name, seconds in found if seconds >= SHOWN_S]


def graders(found: Mapping[str, Any]) -> str:
    """What the graders do, from `graders` in fleet.json.

    >>> graders({"processes": 2, "limit": 32, "queued": 7, "grading": 9, "longest_s": 3.2, "reward_s": 0.5,
    ...          "errors": 1})
    '2 processes (at most 32), 9 rewards in progress (7 queued, longest 3.2 s), 0.50 s each, 1 errors'
    """
    where = f"{found['processes']} processes (at most {found['limit']})" if found["limit"] else "in the controller"
    if servers := found.get("servers"):
        where = f"{sum(s['connected'] for s in servers)} of {len(servers)} servers (at most {found['limit']} calls)"
    waiting = f"{found['grading']} rewards in progress ({found['queued']} queued, longest {found['longest_s']:.1f} s)"
    return f"{where}, {waiting}, {found['reward_s']:.2f} s each, {found['errors']} errors"
