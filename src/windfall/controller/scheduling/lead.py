"""Decides how many groups generation opens ahead of the trainer. Pure: measurements in, a number of groups out.

With B groups per batch, the bound on staleness allows `staleness` * B groups beyond the batch of the current step. If
generation is faster than training and all of them are open or ready, finished groups wait in the queue, and nearly
every response is trained on at the bound: a group that is opened behind n others is n / B versions old when it is its
turn. So only as many are opened ahead (the lead) as the trainer needs to stay busy. Two measurements of every step
say how many these are:

- `spare`: finished groups that the trainer did not need yet, at the moment of the step at which they were fewest. If n
  groups fewer had been opened ahead, n fewer would have been finished at that moment. So the step needed a lead of
  `lead - spare`, with the tail of its response lengths, its pulls and its lost workers.
- `short`: groups that the trainer lacked while it waited. The step needed a lead of `lead + short`.

Rules:

- The lead grows at once to the need of a step that waited. It shrinks to the largest need of the last WINDOW steps, by
  at most a quarter of a batch per step. The groups of a step may have been opened with an earlier, larger lead; `lead`
  above is the largest of those.
- The need of a step that waited is forgotten slowly, by 1 / FORGET of a batch per step. A wait for a share w of a step
  raises the lead by w batches or more, and it takes w * FORGET steps until that is forgotten. So the waits that this
  rule causes cost at most about 1 / FORGET of the time. A need above the bound counts as the bound: a larger lead could
  not have prevented the rest of the wait, for example while no worker was there.
- A step that waits although the lead is at its limit says that generation is the bottleneck. The lead stays there until
  FEWEST steps did not wait.
- A wait for responses that are about to become too old says nothing about the lead: other groups are ready.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW = 8
"""Number of steps whose needs the lead covers."""
FEWEST = 3
"""Number of steps that must have been measured before the lead shrinks."""
FORGET = 128
"""Steps after which a need of one batch that caused a wait is forgotten."""
WAITED_SHARE = 0.005
"""Waits below this share of a step's training time are ignored: the trainer waits for messages, not for groups."""


class Lead:
    """
    >>> lead = Lead(batch=8, staleness=2)
    >>> lead.groups  # all that the bound allows
    16
    >>> for spare in (6, 6, 6, 6, 6): lead.end_step(spare=spare, missing=0, wait_s=0.0, train_s=4.0)
    >>> lead.groups  # 6 finished groups were always left over
    10
    >>> lead.end_step(spare=0, missing=1, wait_s=1.5, train_s=4.0)
    >>> lead.groups  # 3 more would have been trained on during the wait
    13
    """

    def __init__(self, *, batch: int, staleness: int) -> None:
        """`batch`: groups per step."""
        self._batch, self._limit = batch, batch * staleness
        self.groups = self._limit
        """Number of groups that may be open or ready beyond one batch."""
        self._leads: deque[int] = deque([self.groups], maxlen=staleness + 1)
        """The leads with which the groups of the current step may have been opened."""
        self._needs: deque[int] = deque(maxlen=WINDOW)
        """The leads that the last steps needed."""
        self._waited = 0.0
        """The need of the steps that waited, less what is forgotten."""

    def end_step(self, *, spare: int, missing: int, wait_s: float, train_s: float) -> None:
        """Decide the lead of the next step. In the last one, the trainer trained for `train_s` seconds. It waited for
        `wait_s` seconds because too few groups were finished; up to `missing` were lacking."""
        if wait_s <= WAITED_SHARE * train_s:
            self._waited -= self._batch / FORGET
            self._needs.append(max(self._leads) - spare)
        elif self.groups >= self._limit:
            self._needs.clear()
        else:
            short = max(missing, math.ceil(self._batch * wait_s / max(train_s, 1e-9)))  # it trains on these in `wait_s`
            self._waited = min(self._limit, max(self._waited, self.groups + short))
        self.groups = min(self._limit, max(math.ceil(self._waited), self._shrunk()))
        self._leads.append(self.groups)

    def _shrunk(self) -> int:
        if len(self._needs) < FEWEST:
            return self.groups
        return min(self.groups, max(0, *self._needs, self.groups - max(1, self._batch // 4)))
