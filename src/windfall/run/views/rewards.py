"""Rewards on the console: their parts by name, pass@k, and graders that are slow or fail. Reads only events."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from windfall.events.log import Event
from windfall.run.views.tables import Labeled

SLOW_SHARE = 0.2
"""A step line names the slowest reward if it took this share of the step or more."""
SLOW_S = 1.0
"""Rewards that take less than this are never called slow (seconds)."""


def parts(event: Event) -> str:
    """The parts of a reward, if there are several.

    >>> parts({"rewards": {"math": 0.5, "format": 0.25}}), parts({"rewards": {"math": 0.5}})
    ('  (math 0.500, format 0.250)', '')
    """
    found = event.get("rewards") or {}
    if len(found) < 2:
        return ""
    return f"  ({', '.join(f'{escape(name)} {_number(value)}' for name, value in found.items())})"


def graded(event: Event) -> str:
    """How many responses of an evaluation were graded, if rewards are missing.

    >>> graded({"graded": 31, "responses": 64})
    ' (31 of 64 responses graded)'
    >>> graded({"graded": 64, "responses": 64}), graded({"responses": 64})  # complete; written by an older version
    ('', '')
    """
    count, of = event.get("graded"), event.get("responses")
    return f" ({count} of {of} responses graded)" if count is not None and count != of else ""


def passes(event: Event) -> str:
    """pass@k of an evaluation.

    >>> passes({"pass_at": {"1": 0.25, "8": 0.5}, "pass_left_out": {"8": 2}})
    ', pass@1 0.250, pass@8 0.500 (without 2 tasks that have too few rewards)'
    """
    left_out = event.get("pass_left_out") or {}
    shown = [
        f", pass@{k} {_number(value)}"
        + (f" (without {left_out[k]} tasks that have too few rewards)" if left_out.get(k) else "")
        for k, value in (event.get("pass_at") or {}).items()
    ]
    return "".join(shown)


def slow(event: Event) -> str:
    """For a step line: graders that delay the step, and tries that failed."""
    longest, errors = event.get("reward_s_max") or 0.0, event.get("grader_errors") or 0
    out = ""
    if longest >= max(SLOW_S, SLOW_SHARE * event["s"]):
        out += f"  rewards take {event['reward_s']:.1f} s, up to {longest:.1f} s"
    return out + (f"  grader errors {errors}" if errors else "")


def passes_of_run(first: Event, last: Event) -> list[Labeled]:
    """Lines of the summary: pass@k before and after."""
    before, after = (e.get("pass_at") or {} for e in (first, last))
    return [
        (f"pass@{k}", f"{_number(before[k])} before, {_number(value)} after")
        for k, value in after.items()
        if k in before
    ]


def graders_of_run(steps: Sequence[Event]) -> list[Labeled]:
    """Lines of the summary: rewards, if they were slow or failed, and environment servers."""
    there = servers(steps[-1].get("env_servers") or ()) if steps else []
    longest = max((e.get("reward_s_max") or 0.0 for e in steps), default=0.0)
    errors, retried = (sum(e.get(key) or 0 for e in steps) for key in ("grader_errors", "rewards_retried"))
    if longest < SLOW_S and not errors:
        return there
    mean = sum(e.get("reward_s") or 0.0 for e in steps) / max(1, len(steps))
    peak = max((e.get("grading_peak") or 0 for e in steps), default=0)
    failed = f"; {errors} tries failed, {retried} rewards came after a retry" if errors else ""
    return [
        ("rewards", f"{mean:.2f} s on average, up to {longest:.1f} s, {peak} at once{failed}"),
        *there,
    ]


def graders_of_snapshot(graders: dict) -> str:
    """Line of `windfall top` about the graders.

    >>> graders_of_snapshot({"processes": 2, "limit": 32, "queued": 7, "grading": 9, "longest_s": 3.2, "reward_s": 0.5,
    ...                      "errors": 1})
    'graders: 2 processes (at most 32), 9 rewards in progress (7 queued, longest 3.2 s), 0.50 s each, 1 errors'
    """
    g = graders
    where = f"{g['processes']} processes (at most {g['limit']})" if g["limit"] else "in the controller"
    if servers := g.get("servers"):
        where = f"{sum(s['connected'] for s in servers)} of {len(servers)} servers (at most {g['limit']} calls)"
    waiting = f"{g['grading']} rewards in progress ({g['queued']} queued, longest {g['longest_s']:.1f} s)"
    return f"graders: {where}, {waiting}, {g['reward_s']:.2f} s each, {g['errors']} errors"


def servers(found: Sequence[dict]) -> list[Labeled]:
    """A line for each environment server, for `windfall top` and the summary.

    >>> servers([{"address": "10.0.0.5:9000", "connected": True, "calls": 3, "answers": 1200, "errors": 2, "lost": 1,
    ...           "answer_s": 0.5}])
    [('server 10.0.0.5:9000', '1,200 answers, 0.50 s each, 2 errors, lost 1 times')]
    """
    rows: list[Labeled] = []
    for s in found:
        lost = f", lost {s['lost']} times" if s["lost"] else ""
        away = "" if s["connected"] else ", not connected"
        text = f"{s['answers']:,} answers, {s['answer_s']:.2f} s each, {s['errors']} errors{lost}{away}"
        rows.append((f"server {s['address']}", text))
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
