"""Faults as plain data, drawn from a seed: what fails, when, on which worker, for how long. Pure.

    kill          a machine is preempted without notice; another one comes up after `s`
    notice        a worker is warned `s` before its machine is preempted
    false_notice  a worker is warned, but its machine is never preempted
    cut           a link breaks at its `n`th message from now, and messages in flight are lost
    flap          a link breaks `n` times in a row
    freeze        a worker is frozen for `s`, which may be longer or shorter than the controller's timeouts
    delay         messages of a link take `s` longer, for a while
    double        the next `n` frames of a worker arrive twice
    echo          old frames arrive again, possibly over the worker's next link to the same controller
    hole          a frame never arrives
    stale         a frame claims the wrong version
    garbage       a frame is malformed
    slow          a worker's next pulls take far longer
    refuse        a worker fails to load the next `n` versions that it is asked to load
    liar          a worker sends wrong bytes of weights for `s`
    stall_source  a worker sends no bytes of weights for `s`
    bucket_gone   the bucket cannot be reached for `s`
    bucket_liar   the bucket sends wrong bytes of weights for `s`
    hang          a worker's next pull never receives a byte and never fails, while its heartbeat continues
    reject        a worker rejects its next assignment for lack of room; another machine replaces it after `s`
    reward        the next `n` rewards fail once
    stall         everything stands still for `s`; afterward all timers are late
    trainer_cut   the link of a policy's trainer breaks
    trainer       a trainer's process is killed, with all policies on its base, and `local` with it
    controller    the controller's process is killed

Faults come in bursts, with time to recover in between. Without pauses a fleet would make no progress, and the trial
would test nothing.

To add a fault, name it in `FaultKind`, describe it above, and implement it in inject.py.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from windfall.sim.core.draws import uniform

FaultKind = Literal[
    "kill", "notice", "false_notice", "cut", "flap", "freeze", "delay", "double", "echo", "hole", "stale", "garbage",
    "slow", "refuse", "hang", "reject", "reward", "stall", "trainer_cut", "trainer", "controller", "liar",
    "stall_source", "bucket_gone", "bucket_liar",
]  # fmt: skip
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
WEIGHTS: dict[FaultKind, float] = {"trainer_cut": 0.4, "trainer": 0.4, "controller": 0.4, "cut": 2.0, "kill": 2.0}
"""Relative frequency of each kind. Kinds that are not listed have weight 1."""
MEDIAN_S: dict[FaultKind, float] = {
    "kill": 0.5, "notice": 3.0, "false_notice": 3.0, "freeze": 2.0, "delay": 0.2, "flap": 0.05, "slow": 2.0,
    "stall": 1.0, "reject": 2.0, "liar": 3.0, "stall_source": 3.0, "bucket_gone": 3.0, "bucket_liar": 3.0,
}  # fmt: skip
"""Median duration of each kind in seconds. Durations range from a tenth of it to ten times as long."""
BURSTS = (0.95, 0.98, 0.99)
"""Possible shares of faults that directly follow the previous one. The seed chooses one of these values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    at_s: float
    kind: FaultKind
    target: float
    """From 0 to 1: selects one of the current workers, or of the trainers."""
    s: float
    """Duration in seconds."""
    n: int
    """Number of messages, versions or rewards."""


def draw(seed: int, *, gap_s: float = 1.5) -> Iterator[Fault]:
    """Draw an endless sequence of faults. `gap_s`: average time between two bursts, in seconds.

    >>> from itertools import islice
    >>> a, b = (list(islice(draw(7), 50)) for _ in range(2))
    >>> a == b, a == list(islice(draw(8), 50)), all(x.at_s <= y.at_s for x, y in zip(a, a[1:]))
    (True, False, True)
    """
    weights = list(accumulate(WEIGHTS.get(kind, 1.0) for kind in KINDS))
    burst = BURSTS[int(uniform(f"{seed}/burst") * len(BURSTS))]
    at_s, number = gap_s, 0
    while True:
        number += 1
        a, b, c, d, e, f = (uniform(f"{seed}/fault/{number}/{x}") for x in "abcdef")
        at_s += -math.log(1 - b) * (gap_s if a > burst else 0.02)
        kind = KINDS[bisect(weights, c * weights[-1])]
        duration_s = MEDIAN_S.get(kind, 0.0) * 10 ** (2 * e - 1)
        yield Fault(at_s=at_s, kind=kind, target=d, s=duration_s, n=1 + int(12 * f * f))
