"""Faults as plain data, drawn from a seed: what goes wrong, when, with whom, for how long. Pure.

    kill          a machine is taken, without a word; another comes after `s`
    notice        it is warned `s` before it is taken
    false_notice  it is warned and never taken
    cut           a link breaks at its `n`th message from now, and what is under way is lost
    flap          a link breaks `n` times in a row
    freeze        a worker stands still for `s`, which may be longer or shorter than the controller's patience
    delay         messages of a link take `s` longer, for a while
    double        the next `n` frames of a worker come twice
    echo          frames come again later, also over the worker's next link to the same controller
    hole          a frame never comes
    stale         a frame says that another version made it
    garbage       a frame is malformed
    slow          a worker's next pulls take far longer
    refuse        a worker cannot load the next `n` versions that it is asked to
    hang          a worker's next pull never gets a byte and never fails, while its heartbeat goes on
    reject        a worker has no room for what it is given next; another machine comes after `s`
    reward        the next `n` rewards fail once
    stall         the whole machine stands still for `s`: when it goes on, everything is late
    trainer_cut   the trainer's link breaks
    trainer       the trainer's process is killed, and `local` with it
    controller    the controller's process is killed

Faults come in bursts, with time to recover in between: a fleet that is hit without a pause gets nothing done, and shows
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from windfall.sim.core.service import uniform

Kind = Literal[
    "kill", "notice", "false_notice", "cut", "flap", "freeze", "delay", "double", "echo", "hole", "stale", "garbage",
    "slow", "refuse", "hang", "reject", "reward", "stall", "trainer_cut", "trainer", "controller",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
WEIGHTS: dict[Kind, float] = {"trainer_cut": 0.4, "trainer": 0.4, "controller": 0.4, "cut": 2.0, "kill": 2.0}
"""Of the others: 1."""
LONG_S: dict[Kind, float] = {
    "kill": 0.5, "notice": 3.0, "false_notice": 3.0, "freeze": 2.0, "delay": 0.2, "flap": 0.05, "slow": 2.0,
    "stall": 1.0, "reject": 2.0,
}  # fmt: skip
"""How long each is, at the middle; from a tenth of that to ten times as long."""
BURSTS = (0.95, 0.98, 0.99)
"""The share of faults that come right after the one before: one of these, by the seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    at_s: float
    kind: Kind
    who: float
    """From 0 to 1: which of those that are there."""
    s: float
    n: int


def draw(seed: int, *, gap_s: float = 1.5) -> Iterator[Fault]:
    """Without end. `gap_s`: between two bursts, on average.

    >>> from itertools import islice
    >>> a, b = (list(islice(draw(7), 50)) for _ in range(2))
    >>> a == b, a == list(islice(draw(8), 50)), all(x.at_s <= y.at_s for x, y in zip(a, a[1:]))
    (True, False, True)
    """
    weights = [WEIGHTS.get(kind, 1.0) for kind in KINDS]
    burst = BURSTS[int(uniform(f"{seed}/burst") * len(BURSTS))]
    at_s, number = gap_s, 0
    while True:
        number += 1
        a, b, c, d, e, f = (uniform(f"{seed}/fault/{number}/{x}") for x in "abcdef")
        at_s += -math.log(1 - b) * (gap_s if a > burst else 0.02)
        kind = KINDS[_pick(c, weights)]
        yield Fault(at_s=at_s, kind=kind, who=d, s=LONG_S.get(kind, 0.0) * 10 ** (2 * e - 1), n=1 + int(12 * f * f))


def _pick(share: float, weights: list[float]) -> int:
    left = share * sum(weights)
    for n, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return n
    return len(weights) - 1
