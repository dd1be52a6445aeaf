"""Availability traces, as lists of `Change`: reading, generating, cutting and summarizing them. Uses no clock.

`synthetic` draws the up times and down times of every node independently from exponential distributions with the given
means. So a node that is up is lost at a rate of 3600 / mean_up_s per hour at any age, and a node is up for the share
mean_up_s / (mean_up_s + mean_down_s) of the time, from the start. The same seed gives the same trace.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from windfall.errors import WindfallError
from windfall.providers.trace_formats import MAX_NODES, Change, check, parse

__all__ = [
    "Change", "Summary", "check", "parse", "read", "resolve", "slots", "summary", "synthetic",
    "window",
]  # fmt: skip

MAX_BYTES = 64 << 20
"""Largest trace file that is read."""
MAX_CHANGES = 1_000_000
"""Largest number of changes in a synthetic trace."""


def read(path: Path) -> list[Change]:
    """Read a trace file in any format of trace_formats.py. The first line decides which format it is."""
    try:
        if path.stat().st_size > MAX_BYTES:
            what = f"the trace is larger than {MAX_BYTES >> 20} MiB"
            raise WindfallError(what, where=str(path), fix="Cut out the part to replay.")
        content = path.read_text(encoding="utf-8")
    except OSError as e:
        raise WindfallError(f"cannot read the trace: {e.strerror}", where=str(path), fix="Check the path.") from e
    except UnicodeDecodeError as e:
        raise WindfallError(f"the trace is not UTF-8 text: {e}", where=str(path), fix="Use a text file.") from e
    return parse(content, str(path))


def resolve(*, nodes: int, file: Path | None, start_s: float, generate: Callable[[], list[Change]]) -> list[Change]:
    """The changes that the [trace] section of a recipe asks for, in trace seconds: none, those of `file` from `start_s`
    on, or generated ones. At most `nodes` nodes are up at once."""
    if nodes == 0:
        if file is not None:
            what = "trace.file is set, but trace.nodes is 0: no machine would ever come up"
            fix = "Set trace.nodes to the number of machines that may be up at once, or remove trace.file."
            raise WindfallError(what, where="trace.nodes", fix=fix)
        return []
    changes = generate() if file is None else slots(window(read(file), start_s, math.inf), nodes)
    check(changes, "the trace from trace.start_s on")
    return changes


def synthetic(*, nodes: int, mean_up_s: float, mean_down_s: float, seconds: float, seed: int) -> list[Change]:
    """Generate a trace. At least one node is up at time 0: if the draw leaves none up, `n1` is."""
    if not 1 <= nodes <= MAX_NODES:
        raise WindfallError(f"the number of nodes is {nodes}", where="synthetic trace", fix=f"Use 1 to {MAX_NODES}.")
    for what, value in (("mean_up_s", mean_up_s), ("mean_down_s", mean_down_s), ("seconds", seconds)):
        if not (math.isfinite(value) and value > 0):
            raise WindfallError(f"{what} is {value}", where="synthetic trace", fix="Use a number above 0.")
    if 2 * nodes * seconds / (mean_up_s + mean_down_s) > MAX_CHANGES:
        what, fix = f"the trace would have more than {MAX_CHANGES} changes", "Use longer means or fewer seconds."
        raise WindfallError(what, where="synthetic trace", fix=fix)
    draws = [random.Random(f"{seed}/{k}") for k in range(nodes)]
    up_at_0 = [draw.random() < mean_up_s / (mean_up_s + mean_down_s) for draw in draws]
    if not any(up_at_0):
        up_at_0[0] = True
    changes: list[Change] = []
    for k, draw in enumerate(draws):
        at_s, up = 0.0, up_at_0[k]
        if not up:
            at_s, up = draw.expovariate(1 / mean_down_s), True
        while at_s < seconds:
            changes.append(Change(at_s=at_s, node=f"n{k + 1}", up=up))
            at_s += draw.expovariate(1 / (mean_up_s if up else mean_down_s))
            up = not up
    return sorted(changes, key=lambda c: c.at_s)


def window(changes: Sequence[Change], start_s: float, length_s: float) -> list[Change]:
    """The changes from `start_s` up to `start_s + length_s`. Nodes that are up at the start come up at time 0."""
    up: dict[str, None] = {}
    for change in changes:
        if change.at_s > start_s:
            break
        if change.up:
            up[change.node] = None
        else:
            up.pop(change.node, None)
    later = [
        Change(at_s=c.at_s - start_s, node=c.node, up=c.up) for c in changes if start_s < c.at_s < start_s + length_s
    ]
    return [Change(at_s=0.0, node=node, up=True) for node in up] + later


def slots(changes: Sequence[Change], count: int) -> list[Change]:
    """At most `count` nodes at a time, in slots named s1, s2, ...: for traces whose nodes never return under the same
    name. A node that comes up takes the lowest free slot until it goes down. If there is none, it waits, and takes the
    first slot that becomes free while it is up. So `count` slots are taken whenever that many nodes are up.

    >>> a, b = (Change(at_s=0.0, node=node, up=True) for node in "ab")
    >>> [(c.at_s, c.node, c.up) for c in slots([a, b, Change(at_s=9.0, node="a", up=False)], 1)]
    [(0.0, 's1', True), (9.0, 's1', False), (9.0, 's1', True)]
    """
    held: dict[str, int] = {}
    waiting: dict[str, None] = {}
    free = set(range(1, count + 1))
    taken: list[Change] = []
    for at_s, moment in groupby(changes, key=lambda c: c.at_s):
        for change in moment:  # all of them before a slot is taken: a node may go down when its turn comes
            if change.up:
                waiting[change.node] = None
            elif change.node in held:
                slot = held.pop(change.node)
                free.add(slot)
                taken.append(Change(at_s=at_s, node=f"s{slot}", up=False))
            else:
                del waiting[change.node]
        for node in list(islice(waiting, len(free))):
            del waiting[node]
            slot = held[node] = min(free)
            free.remove(slot)
            taken.append(Change(at_s=at_s, node=f"s{slot}", up=True))
    return taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Statistics of the first `seconds` of a trace."""

    seconds: float
    nodes: int
    """Number of different nodes."""
    losses: int
    node_hours: float
    losses_per_node_hour: float
    mean_up: float
    """Mean number of nodes that are up; `min_up` and `max_up` are the extremes."""
    min_up: int
    max_up: int


def summary(changes: Sequence[Change], seconds: float) -> Summary:
    if not (math.isfinite(seconds) and seconds > 0):
        raise WindfallError(f"cannot summarize {seconds} s of a trace", where="trace", fix="Use a number above 0.")
    seen = [c for c in changes if c.at_s < seconds]
    up, node_s, at_s = 0, 0.0, 0.0
    counts: list[int] = []
    for moment_s, step in [*((c.at_s, 1 if c.up else -1) for c in seen), (seconds, 0)]:
        if moment_s > at_s:  # several changes at one moment count as one
            counts.append(up)
        node_s += up * (moment_s - at_s)
        up, at_s = up + step, moment_s
    losses = sum(not c.up for c in seen)
    return Summary(
        seconds=seconds,
        nodes=len({c.node for c in seen}),
        losses=losses,
        node_hours=node_s / 3600,
        losses_per_node_hour=losses * 3600 / node_s if node_s else 0.0,
        mean_up=node_s / seconds,
        min_up=min(counts),
        max_up=max(counts),
    )
