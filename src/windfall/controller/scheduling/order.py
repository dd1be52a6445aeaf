"""The order in which queued responses begin when there is not room for all of them. Pure.

"fifo": in the order in which they were queued. "context" (Seer's): in each step of the run, one response of every group
first, the probe, then the others, longest expected first. How long a group is follows from its probe (lengths.py), and
a long response that begins late is the last to end.

    >>> lengths = {"1/0": 900.0, "2/1": 100.0, "3/1": 500.0}
    >>> by_context(["1/0", "2/1", "2/2", "3/1"], 4, begun={"2", "3"}, length=lengths.__getitem__)
    ['1/0', '3/1', '2/1', '2/2']

What has begun, is part of an evaluation, or is a later turn stands at the head of the queue (ledger.py) and stays
there. Groups of an older step come before those of a newer one: in asynchronous training they become too old first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby, islice


def by_context(
    queued: Sequence[str], count: int, *, begun: Collection[str], length: Callable[[str], float],
    step: Callable[[str], int] = lambda group: 0, head: int = 0,
) -> list[str]:  # fmt: skip
    """The first `count` responses. `begun`: groups of which a response has begun. `length`: by which groups are
    ordered, of the first response of each. `step`: the step that a group was drawn for. `head`: number of responses at
    the head that keep their place."""
    found = list(islice(queued, min(head, count)))
    groups: dict[str, list[str]] = {}
    for id in islice(queued, head, None) if count > head else ():
        groups.setdefault(id.rpartition("/")[0], []).append(id)
    longest_first = sorted(groups, key=lambda group: (step(group), -length(groups[group][0])))
    for _, of_step in groupby(longest_first, step):
        siblings = [(groups[group], group not in begun) for group in of_step]
        found += [ids[0] for ids, probe in siblings if probe]
        found += [id for ids, probe in siblings for id in ids[probe:]]
        if len(found) >= count:
            break
    return found[:count]
