"""Notices that a worker's machine will be taken: the worker is drained shortly before that."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from windfall.controller.rollout.loading import MAX_CHARS
from windfall.controller.scheduling.members import Member, WorkerState
from windfall.events.log import EventLog
from windfall.link import messages as m

OPERATOR_SOURCES = ("sigterm", "ctrl-c")
"""Notices that come from the person who runs the worker, not from the owner of its machine."""
DRAIN_LEAD_S = 2.0
"""Seconds before the announced end at which a warned worker is drained. A drain takes one engine step and a round
trip."""


class Notices:
    def __init__(
        self,
        events: EventLog,
        drain: Callable[[str, str], None],
        stop_assigning: Callable[[str, str], None],
        *,
        migration: bool,
    ) -> None:
        self._events, self._drain, self._stop_assigning, self._migration = events, drain, stop_assigning, migration
        self.timers: dict[str, asyncio.TimerHandle] = {}
        """By worker that got a notice: the timer that drains it."""

    def handle(self, member: Member, notice: m.Notice) -> None:
        """Drain the worker shortly before its machine is taken. A second notice counts only if its end is earlier."""
        source, detail = notice.source[:MAX_CHARS], notice.detail[:MAX_CHARS]
        left_s = 0.0 if notice.left_s is None or not math.isfinite(notice.left_s) else notice.left_s
        loop = asyncio.get_running_loop()
        at_s, timer = loop.time() + max(0.0, left_s - DRAIN_LEAD_S), self.timers.get(member.id)
        if timer is not None:
            if timer.when() <= at_s:
                return
            timer.cancel()
        elif member.state is WorkerState.DRAINING:
            return
        member.preempted, member.why = source not in OPERATOR_SOURCES, f"{source}: {detail}"
        self._events.instant("worker_warned", worker=member.id, source=source, left_s=notice.left_s, detail=detail)
        if not self._migration:  # a response that it cannot finish would start again from its first token
            self._stop_assigning(member.id, member.why)
        self.timers[member.id] = loop.call_at(at_s, self._drain, member.id, "warned")

    def gone(self, id: str) -> None:
        """The worker is gone."""
        if id in self.timers:
            self.timers.pop(id).cancel()
