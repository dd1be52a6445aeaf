"""Groups for the loop: admission decides which tasks are open, a stream samples and grades them (rollout/stream.py).

    admission ──tasks──▶ stream ──episodes──▶ dispatch ──work──▶ workers
        ▲                  │ ▲                   │ ▲                │
        │                  │ └─ turns, rewards ──┘ └────tokens──────┘
        │                  └──groups──▶ admission ──oldest first, not too old──▶ fill ──▶ the batch of a step
        └───────────────────── versions ◀── published

With rollout.staleness = 0, the batch of a step is opened when the step begins, and generation stands still until the
next one: synchronous training. Otherwise generation goes on while the trainer trains (scheduling/admission.py).

An error of the stream is raised when the loop next looks for groups, so that a verb is never abandoned halfway.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Protocol

from windfall.algorithms.base import Algorithm
from windfall.controller.credit import outcomes
from windfall.controller.rollout.stream import Rollout, Stream
from windfall.controller.scheduling.admission import Admission
from windfall.controller.step_batch import StepBatch
from windfall.recipe.sections import Recipe
from windfall.training import TrainerLost
from windfall.types import Group


class Pace(Protocol):
    """Decides when the trainer generates and when it trains. LocalGeneration implements it for synchronous training,
    IdleGeneration for asynchronous training."""

    may_train: asyncio.Event
    """Set while training may begin."""

    def begin(self, step: int) -> None: ...
    def begin_evaluation(self) -> None: ...
    def arrived(self, tokens: int) -> None: ...
    def trainable(self) -> None: ...
    def generated(self) -> None: ...
    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None: ...


class Generation:
    def __init__(self, recipe: Recipe, algorithm: Algorithm, rollout: Rollout, pace: Pace, micro_tokens: int) -> None:
        """`micro_tokens`: number of tokens, prompts included, at which a micro-batch is full."""
        options = recipe.rollout
        self._options = options
        self._algorithm = algorithm
        self._micro_tokens = micro_tokens
        self.rollout = rollout
        self.pace = pace
        self.asynchronous = options.staleness > 0
        # Neither their credit nor their mini-batch depends on other groups.
        self.one_by_one = algorithm.scope == "group" and recipe.train.minibatches == 1
        """Groups are trained on one by one."""
        self.pipelined = self.one_by_one and recipe.techniques.pipelining
        """Groups are trained on while others are still being generated."""
        # Deterministic runs train in order: how a gradient sum rounds must not depend on which worker was fastest.
        self.admission = Admission(
            batch=options.groups, steps=recipe.run.steps, staleness=options.staleness, max_draws=options.max_draws,
            in_order=recipe.run.deterministic,
        )  # fmt: skip
        self.changed = asyncio.Event()
        """Set when a group has completed, or the stream has ended."""
        self.held_s = 0.0
        """Seconds since the counters were reset in which admission held generation back."""
        self.counted_from_s = 0.0
        """When the counters of an asynchronous run were reset (loop time, seconds)."""
        self._stream: Stream | None = None
        self._running: asyncio.Task[None] | None = None
        self._replaced: list[Group] = []
        """Replaced groups that no batch has counted yet."""

    @property
    def running(self) -> bool:
        return self._stream is not None

    def start(self) -> None:
        options = self._options
        self._stream = self.rollout.stream(
            size=options.group_size, sampling=self.rollout.sampling, on_group=self._group_arrived,
            on_skipped=self._task_skipped, on_too_old=self._too_old,
        )  # fmt: skip
        self._running = asyncio.create_task(self._stream.run(), name="generation")
        self._running.add_done_callback(lambda _: self.changed.set())
        self._replaced = []
        self.reset_counters()  # what the journal has of open responses is counted as restored
        if self.asynchronous:
            self._stream.expire({"": self.admission.oldest_version})
            self.admit()

    async def stop(self) -> None:
        """Withdraw everything that is open. The tokens generated so far stay in the journal."""
        running, self._running, self._stream = self._running, None, None
        if running is not None:
            running.cancel()
            with suppress(asyncio.CancelledError, TrainerLost):
                await running

    def admit(self) -> None:
        """Open the tasks that may be opened now."""
        while self._stream is not None and (tasks := self.admission.admit()):
            self._stream.open(tasks)

    def published(self) -> None:
        """The next version exists: what has become too old is dropped, and more tasks may be opened."""
        self.admission.publish()
        if self.asynchronous and self._stream is not None:
            self._stream.expire({"": self.admission.oldest_version})
            # The new version is offered already, so queued responses begin with it or with a newer one.
            self.admission.not_begun(self._stream.not_begun())
            self.admit()

    def fill(self, batch: StepBatch) -> bool:
        """Move the groups that are ready into the batch; True if it is complete. Raises the error of the stream."""
        self.changed.clear()
        if self._running is not None and self._running.done():
            self._running.result()
        size = self._options.group_size
        while (group := self.admission.take()) is not None:
            batch.add(group, size, self._micro_tokens)
            if self.pipelined and batch.micro_batches:
                self.pace.trainable()
        for group in self._replaced:
            batch.note(group, size)
        self._replaced.clear()
        self.admit()  # a group may have been too old
        if self.admission.complete:
            batch.completed(self.admission.ready, pipelined=self.pipelined)
        return self.admission.complete

    async def wait(self, batch: StepBatch) -> None:
        """Wait for a change or, while the trainer generates, until it stops."""
        may_train, began = self.pace.may_train, now_s()
        training = may_train.is_set()
        missing, ready = self.admission.batch - len(self.admission.taken), self.admission.ready
        waits = [asyncio.ensure_future(self.changed.wait())]
        if not training:
            waits.append(asyncio.ensure_future(may_train.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if training and may_train.is_set():  # otherwise the trainer has started to generate again
            batch.waited(now_s() - began, missing=missing, ready=ready, pipelined=self.pipelined)

    def reset_counters(self) -> None:
        self.rollout.reset_counters()
        self.held_s = 0.0
        self.counted_from_s = now_s()

    def tick(self, seconds: float) -> None:
        """Called every `seconds`: measures how long admission holds generation back."""
        if self.asynchronous and self.admission.closed and self.rollout.dispatch.has_free_slots():
            self.held_s += seconds

    def describe(self) -> dict[str, Any]:
        """Fields of the step's event about what was held back and dropped."""
        dropped = self.admission.dropped
        out: dict[str, Any] = {}
        if self.asynchronous:
            counted_s = now_s() - self.counted_from_s
            out |= {"lead": self.admission.lead.groups, "held_s": self.held_s, "counted_s": counted_s}
        if self.asynchronous or dropped.responses or self.admission.too_new:
            out |= {"too_old": dropped.responses, "too_old_tokens": dropped.tokens, "too_new": self.admission.too_new}
        return out

    # What the stream reports.

    def _group_arrived(self, group: Group) -> None:
        self.pace.arrived(sum(r.sampled_count for r in group.responses))
        if not group.responses:
            self.admission.drop(group.index)
        else:
            informative = self._algorithm.informative(outcomes(group, self._options.max_tokens))
            self.admission.finish(group, informative=informative)
            if not informative:
                self._replaced.append(group)
        self._after_change()

    def _task_skipped(self, index: int) -> None:
        self.admission.dismiss(index)
        self._after_change()

    def _too_old(self, index: int, tokens: int) -> None:
        del index
        self.admission.dropped.add(tokens)
        self.rollout.sampled_tokens += tokens

    def _after_change(self) -> None:
        self.admit()
        self.changed.set()


def now_s() -> float:
    """The event loop's clock in seconds. A simulated run has its own."""
    return asyncio.get_running_loop().time()
