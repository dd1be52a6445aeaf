"""The trainer's own engine in asynchronous training: it generates while the trainer has nothing to train on.

The trainer may begin to train at any moment (`may_train` is always set): engine and trainer take turns on the machine,
one engine step or one micro-batch at a time (trainer_engine.py). Responses on the trainer's engine stand still while it
trains, and become old there. So the engine takes part only if the trainer waits enough of the time:

    GENERATES ── the trainer waited less than STOP_SHARE of a step ──▶ PAUSED     its responses go on elsewhere
              ◀── the trainer waited more than START_SHARE of a step ──

With few workers this adds what the machine can generate; with enough workers it costs nothing, while an engine that
always took part would hold responses back (docs/async.md has the figures). Without `techniques.trainer_generates` the
engine generates only if no other worker can.

Rule: while responses are open, either another worker can take them or the trainer's engine is not paused.
"""

from __future__ import annotations

from dataclasses import replace

from windfall.controller.rollout.local_generation import WITHOUT_LIMIT, LocalGeneration
from windfall.controller.scheduling.local_time import OnlyWithoutWorkers
from windfall.controller.scheduling.members import WorkerState

START_SHARE = 0.25
"""Generate in the next step if the trainer waited for more than this share of the last one."""
STOP_SHARE = 0.1
"""Do not generate in the next step if the trainer waited for less than this share of the last one."""


class IdleGeneration(LocalGeneration):
    """A Pace that never holds training back."""

    generates = True
    """Whether the trainer's engine takes part."""

    def begin(self, step: int) -> None:
        now = self._now()
        wait_share = 1.0 if self.last is None else self.last.train_wait_s / max(1e-9, now - self._step.began_s)
        if isinstance(self._policy, OnlyWithoutWorkers) or wait_share < STOP_SHARE:
            self.generates = False
        elif wait_share > START_SHARE:
            self.generates = True
        self._step = self._new_step(step, now, WITHOUT_LIMIT, None)
        self.may_train.set()
        self._apply()

    def begin_evaluation(self) -> None:
        self.may_train.set()

    def trainable(self) -> None:
        pass

    def generated(self) -> None:
        pass

    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None:
        super().end(tokens=tokens, train_s=train_s, train_wait_s=train_wait_s)
        assert self.last is not None, "end() sets it"
        # Its engine stands still while the trainer trains, so its speed is measured over the rest of the step.
        not_training_s = max(0.0, self._now() - self._step.began_s - train_s)
        self.last = replace(self.last, local_s=min(self.last.local_s, not_training_s))

    def tick(self) -> None:
        self._observe(self._now())
        self._apply()

    def _apply(self) -> None:
        """Pause or resume the trainer's engine, unless it is the only one that can generate."""
        local = self._local()
        if local is None:
            return
        if local.state is WorkerState.PAUSED:
            queued = bool(self._dispatch.ledger.queue)
            if self.generates or (queued and self._why_alone()):
                self._resume(local)
        elif local.state is WorkerState.READY and not self.generates and not self._why_alone():
            self._step.stop_generating(self._now())
            self._dispatch.pause(local.id)
        elif local.state is WorkerState.READY and self._step.generating_since_s is None:
            self._step.generating_since_s = self._now()
