"""How the console and `windfall top` show the staleness of a step and of a run. Pure: numbers in, text out.

The staleness of a response is the trainer's version minus the oldest version among its tokens, when it is trained on.
A step event has `staleness_mean`, `staleness_max`, `staleness_bound`, `staleness_counts`, `too_old`, `too_old_tokens`
and `held_s` only if `rollout.staleness` is above 0; without them there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SHOWN_S = 0.05
"""Shorter times are left out of a line: they would be shown as 0.0 s."""
ROWS = 6
"""Upper limit for the rows of a histogram. The last row includes all higher values."""
BAR = 30
"""Width of the longest bar of a histogram, in characters."""


def losses(fields: Mapping[str, Any]) -> list[str]:
    """What the bound on staleness cost in one step: dropped responses, the trainer's wait, generation held back. Values
    of 0 are left out.

    >>> losses({"too_old": 3, "too_old_tokens": 1204, "train_wait_s": 1.2, "held_s": 0.0})
    ['too old 3 (1,204 tok)', 'waited 1.2 s']
    """
    parts = []
    if fields.get("too_old"):
        parts.append(f"too old {fields['too_old']:,} ({fields.get('too_old_tokens') or 0:,} tok)")
    for name, key in (("waited", "train_wait_s"), ("held", "held_s")):
        seconds = fields.get(key) or 0.0
        if seconds >= SHOWN_S:
            parts.append(f"{name} {seconds:,.1f} s")
    return parts


def of_step(step: Mapping[str, Any]) -> list[str]:
    """The parts of a step line, from a step event.

    >>> of_step({"staleness_mean": 0.4, "staleness_max": 1, "staleness_bound": 2, "staleness_counts": [36, 24]})
    ['stale 0.4 (max 1, bound 2)', 'lag 0:36 1:24']
    >>> of_step({"staleness_mean": 0.4, "staleness_max": 1, "held_s": 0.4})  # written by an older version
    ['stale 0.4 (max 1)', 'held 0.4 s']
    >>> of_step({"train_wait_s": 3.0})  # synchronous
    []
    """
    if not _is_asynchronous(step):
        return []
    mean, most = step["staleness_mean"], step.get("staleness_max")
    if mean is None:
        return losses(step)
    bound = f", bound {step['staleness_bound']}" if "staleness_bound" in step else ""
    return [f"stale {mean:.1f} (max {most}{bound})", *lags(step.get("staleness_counts") or []), *losses(step)]


def of_snapshot(fields: Mapping[str, Any], width: int) -> list[str]:
    """The lines of `windfall top`, from `staleness` in fleet.json: the last step. A part that does not fit into `width`
    columns goes to the next line.

    >>> fields = {"bound": 2, "mean": 0.42, "max": 1, "counts": [36, 24], "too_old": 0, "held_s": 0.4}
    >>> of_snapshot(fields, 80)
    ['staleness of the last step: mean 0.4, max 1, bound 2; lag 0:36 1:24; held 0.4 s']
    >>> of_snapshot(fields, 72)
    ['staleness of the last step: mean 0.4, max 1, bound 2; lag 0:36 1:24;', '  held 0.4 s']
    """
    mean, most = ("-" if fields[k] is None else f"{fields[k]:{form}}" for k, form in (("mean", ".1f"), ("max", "d")))
    figures = f"mean {mean}, max {most}, bound {fields['bound']}"
    lines = [f"staleness of the last step: {figures}"]
    for part in [*lags(fields.get("counts") or []), *losses(fields)]:
        if len(longer := f"{lines[-1]}; {part}") < width:  # one column is for a semicolon
            lines[-1] = longer
        else:
            lines[-1] += ";"
            lines.append(f"  {part}")
    return lines


def lags(counts: Sequence[int]) -> list[str]:
    """The histogram in one part of a line, from the number of responses with staleness 0, 1, 2, ...; empty if there is
    no response.

    >>> lags([12, 40, 0, 12])
    ['lag 0:12 1:40 3:12']
    >>> lags([1] * 8)
    ['lag 0:1 1:1 2:1 3:1 4:1 5+:3']
    """
    rows = " ".join(f"{label}:{count}" for label, count in _rows(counts).items() if count)
    return [f"lag {rows}"] if rows else []


def of_run(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The lines of the summary as (label, text), from all step events of a run. A label may be empty."""
    steps = [e for e in steps if _is_asynchronous(e)]
    if not steps:
        return []

    def total(key: str) -> float:
        return sum(e.get(key) or 0 for e in steps)

    counts = _add(e.get("staleness_counts") or [] for e in steps)
    lines: list[tuple[str, str]] = []
    if responses := sum(counts):
        mean = sum(n * count for n, count in enumerate(counts)) / responses
        bound = f", bound {steps[-1]['staleness_bound']}" if "staleness_bound" in steps[-1] else ""
        lines.append(("staleness", f"{mean:.2f} mean, {max(e['staleness_max'] or 0 for e in steps)} max{bound}"))
        lines += [("", row) for row in histogram(counts)]
    too_old, tokens, waited_s = total("too_old"), total("too_old_tokens"), total("train_wait_s")
    dropped = f"{_percent(tokens, total('made'))} of sampled tokens: {tokens:,} in {too_old:,} responses"
    capped = sum((e.get("capped") or 0.0) * e["trained"] for e in steps)
    return [
        *lines,
        ("dropped as too old", dropped),
        ("trainer waited", f"{_percent(waited_s, total('s'))} of the time: {waited_s:,.1f} s"),
        ("generation held back", f"{total('held_s'):,.1f} s, to keep responses fresh"),
        ("importance weight capped", f"{_percent(capped, total('trained'))} of trained tokens"),
    ]


def histogram(counts: Sequence[int]) -> list[str]:
    """One row per value, from the number of responses with staleness 0, 1, 2, ...

    >>> for row in histogram([60, 30, 10]): print(row)
    0   60.0% ██████████████████████████████
    1   30.0% ███████████████
    2   10.0% █████
    """
    rows = _rows(counts)
    most = max(rows.values(), default=1)
    return [
        f"{label:<2} {_percent(count, sum(counts)):>6} {'█' * round(BAR * count / most)}".rstrip()
        for label, count in rows.items()
    ]


def _rows(counts: Sequence[int]) -> dict[str, int]:
    """The rows of a histogram: responses by label. Empty rows at the end are left out."""
    rows = {str(n): count for n, count in enumerate(counts[: ROWS - 1])}
    rest = list(counts[ROWS - 1 :])
    if any(rest):
        rows[f"{ROWS - 1}+" if any(rest[1:]) else f"{ROWS - 1}"] = sum(rest)
    while rows and not rows[last := next(reversed(rows))]:
        del rows[last]
    return rows


def _is_asynchronous(step: Mapping[str, Any]) -> bool:
    """Whether this is the event of a step with staleness above 0."""
    return "staleness_mean" in step


def _percent(part: float, whole: float) -> str:
    """A share in percent. A share that would be rounded to 0 is not shown as 0.

    >>> [_percent(part, 10_000) for part in (0, 1, 123)]
    ['0%', '<0.1%', '1.2%']
    """
    share = part / whole if whole else 0.0
    return "0%" if not share else "<0.1%" if share < 0.0005 else f"{share:.1%}"


def _add(rows: Iterable[Sequence[int]]) -> list[int]:
    """The sums of the columns of rows of different lengths.

    >>> _add([[1, 2], [3], []])
    [4, 2]
    """
    sums: list[int] = []
    for row in rows:
        sums += [0] * (len(row) - len(sums))
        for n, count in enumerate(row):
            sums[n] += count
    return sums
