"""The order in which queued responses begin when there is not room for all of them. Pure.

"fifo": in the order in which they were queued. "context" (Seer's): in each step of the run, one response of every group
first, the probe, then the others, longest expected first. How long a group is follows from its probe (lengths.py), and
a long response that begins late is the last to end.

    >>> lengths = {"1": 900.0, "2": 100.0, "3": 500.0}
    >>> by_context(["1/0", "2/1", "2/2", "3/1"], 4, begun={"2", "3"}, length=lengths.__getitem__)
    ['1/0', '3/1', '2/1', '2/2']

What has begun, is part of an evaluation, or is a later turn stands at the head of the queue (ledger.py) and stays
there. Groups of an older step come before those of a newer one: in asynchronous training they become too old first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from itertools import islice


def by_context(
    queued: Sequence[str], count: int, *, begun: Collection[str], length: Callable[[str], float],
    step: Callable[[str], int] = lambda group: 0, head: int = 0,
) -> list[str]:  # fmt: skip
    """The first `count` responses. `begun`: groups of which a response has begun. `length`: by which the responses of a
    group are ordered. `step`: the step that a group was drawn for. `head`: number of responses at the
    head that keep their place."""
    if count <= head:
        return list(islice(queued, count))
    groups: dict[str, tuple[int, float]] = {}
    ranked: list[tuple[int, bool, float, int, str]] = []
    for at, id in enumerate(islice(queued, head, None)):
        group = id.rpartition("/")[0]
        probe = group not in groups and group not in begun
        if group not in groups:
            groups[group] = (step(group), -length(group))
        of_step, shortest = groups[group]
        ranked.append((of_step, not probe, shortest, at, id))
    return [*islice(queued, head), *(row[-1] for row in heapq.nsmallest(count - head, ranked))]
