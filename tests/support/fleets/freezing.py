"""Simulated workers and lenders that can be frozen: a frozen one neither computes, receives nor sends."""

from __future__ import annotations

from typing import Any

from benchmarks.support.sim_lenders import TICK_S, SimLender
from windfall.sim.machines.worker import SimWorker


class FreezingWorker(SimWorker):
    def __init__(self, *args: Any, **options: Any) -> None:
        self.frozen = False
        self._undelivered: list[object] = []
        super().__init__(*args, **options)

    def freeze(self) -> None:
        if not self.frozen:
            self._flush_steps()
            self.frozen = True
            self._stop_timer()
            if self.store is not None:
                self.store.fail("stalled")

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            if self.store is not None:
                self.store.fail("")
            messages, self._undelivered = self._undelivered, []
            for message in messages:
                self._receive(message)
            if self.link is None:
                self.dial()
            if self._timer is None:  # otherwise the orders wait for the end of the current step
                self._execute_orders()

    def dial(self) -> None:
        if not self.frozen:
            super().dial()

    def _disconnect(self, why: str) -> None:
        self._undelivered = []
        super()._disconnect(why)

    def _send(self, message: object) -> None:
        if not self.frozen:
            super()._send(message)

    def _receive(self, message: object) -> None:
        if self.frozen:
            self._undelivered.append(message)
        else:
            super()._receive(message)

    def _queue_order(self, order: object) -> None:
        if self.frozen:
            self._orders.append(order)
        else:
            super()._queue_order(order)

    def _start_steps(self, from_now: bool = True) -> None:
        if not self.frozen:
            super()._start_steps(from_now)


class FreezingLender(FreezingWorker, SimLender):
    def _look(self) -> None:
        if self.frozen and not self.finished:
            self._loop.call_later(TICK_S, self._look)
        else:
            super()._look()
