"""The rollout tenant generates for a run on a serving GPU. The host runs its orders and its steps in its own thread.

    link ── orders ──▶ (host's thread) turn: orders, memory, one launch ── frames ──▶ forwarder's thread ──▶ link

Rules:
- the engine is built, and weights are copied, in other threads: the host never waits for them;
- frames are forwarded in a thread of their own. While too many are unsent, the tenant is not runnable;
- what the tenant can take is reported about once per second, and before a response is returned (capacity.py);
- a response that loses its pages is returned to the controller, after all its tokens. So is one that had no pages, and
  every one if the tenant had no step, for `STARVED_S`;
- a tenant that had no step for that long reports no slots for `REST_S` while serving has requests: otherwise the
  controller would send the same responses again and again, and each time they would wait for nothing;
- the weights have memory of their own: serving's KV cache never needs it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from windfall.engine.blocks import TenantPages
from windfall.engine.engine_thread import Emit, EngineThread, Make, order
from windfall.engine.module_weights import copy_weights
from windfall.engine.paged import PagedEngine
from windfall.errors import WindfallError
from windfall.link.messages import Released, Stats
from windfall.serve.capacity import CapacityMeter
from windfall.serve.host import AHEAD, LAUNCH_S, Host, rollout_load
from windfall.serve.slo import RolloutLoad, credit_s, rows_allowed, slack_s, steps_allowed

STARVED_S = 2.0
PREFILL_S = 0.5
"""Prompts that have waited for this long come before decode steps, for at most as long (seconds)."""
REST_S = 10.0
MAX_UNSENT = 64
"""Frames that may wait to be forwarded before the tenant pauses."""
LOOK_S = 0.25
"""Seconds between two looks for starved responses, and between two measurements of the capacity."""
REPORT_S = 1.0


class _WakingQueue(queue.SimpleQueue[Any]):
    """Orders of the tenant; every one wakes the host."""

    wake: Callable[[], None] = staticmethod(lambda: None)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self.wake()


class _Forwarder:
    """Hands messages to a function that may block, in a thread of its own."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="rollout frames", daemon=True).start()

    @property
    def unsent(self) -> int:
        return self._queue.qsize()

    def put(self, message: object) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            if callable(message):
                message()
            else:
                self._emit(message)


class RolloutTenant(EngineThread):
    def __init__(self, host: Host, *, make: Make) -> None:
        """`make` builds an engine whose pages are in the host's arena."""
        super().__init__(None, make=make)
        self._host = host
        waking = self._orders = _WakingQueue()
        waking.wake = host.wake
        self._forwarder: _Forwarder | None = None
        self._swapping = False
        """The engine's weights change."""
        self._closed = False
        self._swaps = 0
        self._copying = threading.Lock()
        self._evicted: list[int] = []
        """Handles of responses that lost their pages and were not returned yet."""
        self.evicted = 0
        """Number of responses that ever lost their pages."""
        self._without_pages_s: dict[str, float] = {}
        """When each response without pages lost them, by its id."""
        self._prompts_wait_s: float | None = None
        """When the prompts that wait began to wait for a prefill. None: there are none, or a prefill was launched."""
        self._looked_s = 0.0
        self._rests_until_s = -math.inf
        """When it reports slots again. Until then it has none: serving leaves too little time for any response."""
        self.response_tokens = 0
        """Tokens of the longest possible response; 0: not known, and the slots divide the memory."""
        self._meter: CapacityMeter | None = None
        self._measured_s = self._reported_s = -math.inf

    # For other threads.

    def close(self, timeout_s: float = 10.0) -> None:
        left = self._host.call(self._leave)
        if timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                left.result(timeout_s)

    def stats(self) -> Stats:
        """As of every engine thread, but time that serving takes is no sign of a stuck engine."""
        return msgspec.structs.replace(super().stats(), idle_s=0.0)

    def _run(self) -> None:
        """Build the engine in the tenant's own thread; the host runs it."""
        try:
            assert self._make is not None
            engine, self.slots = self._make()
            self._host.call(lambda: self._built(engine)).result()
        except BaseException as e:  # fault boundary: this is the only way in which the worker learns of the error
            self.failed = e
            self._on_failure()

    # Orders.

    @order
    def attach(self, emit: Emit) -> None:
        self._drop_all()
        self._forwarder = _Forwarder(emit)
        self._emit = self._forwarder.put
        self._paused = False
        self._reported_s = -math.inf
        self._host.begin_step()

    @order
    def finish(self, done: Callable[[], None]) -> None:
        forwarder = self._forwarder
        self._drop_all(close=False)
        if forwarder is None:
            done()
        else:
            forwarder.put(done)

    @order
    def swap(
        self,
        version: int,
        weights: Mapping[str, Any] | None,
        done: Callable[[BaseException | None], None],
        *,
        policy: str = "",
    ) -> None:
        copied = functools.partial(self._copied, version, policy, done)
        if weights is None:
            copied(None)
            return
        engine = self.engine
        ready = engine.ready_weights
        if ready is None:
            self._in_thread(lambda: copy_weights(engine.model, version, weights), copied)
            return

        self._swaps += 1
        number = self._swaps

        def load() -> None:
            """To host memory first: the tenant steps with the old weights meanwhile."""
            error: BaseException | None = None
            with self._copying:
                pass  # the version before this one must be on the device before it is overwritten in host memory
            try:
                ready.load(version, weights)
            except Exception as e:  # fault boundary: the link reports it to the controller
                error = e
            self._orders.put(lambda: activate(error))

        def activate(error: BaseException | None) -> None:
            if number != self._swaps:  # a link after this one loads another version into the same memory
                done(error or WindfallError(f"version {version} was replaced while it was loaded"))
                return
            if error is not None:
                copied(error)
            else:
                self._in_thread(ready.activate, copied)

        threading.Thread(target=load, name="rollout weights", daemon=True).start()

    def _in_thread(self, copy: Callable[[], None], copied: Callable[[BaseException | None], None]) -> None:
        """Change the engine's weights in a thread. The tenant does not step meanwhile, and serving does."""
        self.engine.finish_launches()
        self._swapping = True
        self._copying.acquire()  # released by the thread

        def run() -> None:
            error: BaseException | None = None
            try:
                copy()
            except Exception as e:  # fault boundary: the link reports it to the controller
                error = e
            finally:
                self._copying.release()
            self._orders.put(functools.partial(copied, error))

        threading.Thread(target=run, name="rollout weights", daemon=True).start()

    def _copied(
        self,
        version: int,
        policy: str,
        done: Callable[[BaseException | None], None],
        error: BaseException | None,
    ) -> None:
        self._swapping = False
        self._stepped_s = time.monotonic()  # the time of the swap is no sign of starvation
        if error is None:
            self.engine.swap(version, policy=policy)
            self._mixed.clear()
            self._host.begin_step()
            self._report(time.monotonic(), at_once=True)
        elif not isinstance(error, WindfallError):  # else nothing has changed
            self._mixed.add("")
        done(error)

    # The methods below run in the host's thread.

    def _built(self, engine: Any) -> None:
        self._engine = engine
        if self._closed:
            self.leave_memory()
            return
        self.pages.evict = self._evict
        self._host.adopt(self)

    def leave_memory(self) -> None:
        if self.engine.kv is not None:
            self.engine.kv.leave()

    def _leave(self) -> None:
        self._closed = True
        if self.built:
            self._drop_all()
            self._host.drop_rollout(self)

    def fail(self, error: BaseException) -> None:
        self.failed = error
        self._closed = True
        self._running.clear()
        self._on_failure()

    @property
    def engine(self) -> PagedEngine:
        assert isinstance(self._engine, PagedEngine), "orders wait until the engine is built"
        return self._engine

    @property
    def pages(self) -> TenantPages:
        assert self.engine.kv is not None, "the pages of a tenant are in the arena"
        return self.engine.kv.pages

    @property
    def busy(self) -> bool:
        return self._runnable or self.engine.unread

    @property
    def _runnable(self) -> bool:
        return not self._idle() and (self._forwarder is None or self._forwarder.unsent < MAX_UNSENT)

    def _idle(self) -> bool:
        return self._swapping or super()._idle()

    def turn(self) -> None:
        host, engine, clock = self._host, self.engine, self._host.now_s
        if not self._run_orders():
            return
        self._limit_memory()
        self._report(clock())
        rows, steps, prefill = self._next_launch() if self._runnable else (0, 1, False)
        if rows or engine.unread:  # launches in flight are collected in any case: their time is counted here
            began_s = clock()
            self._advance(rows, steps, prefill)
            took_s = engine.device_s or clock() - began_s
            host.rollout_time.observe(took_s / engine.last_steps, *engine.last_step)
            host.metrics.rollout_seconds += took_s
        handles, self._evicted = self._evicted, []
        host.metrics.responses_returned["memory"] += self._return(handles)
        self._return_starved(clock())

    def _run_orders(self) -> bool:
        """Run all orders. False: the tenant is closed."""
        with contextlib.suppress(queue.Empty):
            while True:
                given = self._orders.get_nowait()
                if given is not None:
                    given()
        return not self._closed

    def _limit_memory(self) -> None:
        host, policy = self._host, self._host.policy
        excess = policy.observe(host.held, self.pages.owned_blocks)
        self.pages.limit = policy.budget
        if excess:
            self.pages.yield_blocks(excess)
            policy.observe(host.held, self.pages.owned_blocks)
        if policy.thaw(host.held, host.now_s()):
            self.pages.limit = policy.budget

    def _next_launch(self) -> tuple[int, int, bool]:
        """Rows and steps of the next launch, and whether it may prefill. 0 rows: it must wait."""
        host, now_s = self._host, self._host.now_s()
        serving, lent = host.serving_load(now_s), self._load(now_s)
        slack = host.slack_s = slack_s(serving, host.objectives, host.serving_time, now_s)
        growing = slack == credit_s(serving, host.objectives) < math.inf
        ahead_s = serving.rollout_ahead_s
        rows = rows_allowed(slack, host.objectives, host.rollout_time, lent, growing=growing, ahead_s=ahead_s)
        host.metrics.rollout_steps += rows > 0
        host.metrics.rollout_waits += rows == 0
        decoding = lent.running - lent.prefilling
        most_s, shape = min(slack, host.objectives.idle_s), (min(rows, decoding), lent.context)
        steps = steps_allowed(most_s, LAUNCH_S, host.rollout_time, *shape, self.engine.burst)
        return rows, steps, rows > decoding

    def _load(self, now_s: float) -> RolloutLoad:
        load = rollout_load(self.engine)
        if not load.prefill:
            self._prompts_wait_s = None
        elif self._prompts_wait_s is None:
            self._prompts_wait_s = now_s
        waited_s = 0.0 if self._prompts_wait_s is None else now_s - self._prompts_wait_s
        return replace(load, prefill_due=waited_s % (2 * PREFILL_S) >= PREFILL_S)

    def _advance(self, rows: int, steps: int, prefill: bool) -> None:
        """Launch at most this many steps, of at most this many rows each, or nothing with 0 rows."""
        engine = self.engine
        if rows and prefill:
            self._prompts_wait_s = None
        before, began_s = self._generated, time.monotonic()
        engine.depth = AHEAD
        engine.prefill_alone(len(self._host.engine) > 0)
        chunks = engine.step(rows, steps, prefill)
        if self._meter is not None:
            self._meter.stepped(time.monotonic() - began_s)
        self._stepped(chunks)
        self._host.metrics.rollout_tokens += self._generated - before

    def _report(self, now_s: float, *, at_once: bool = False) -> None:
        """Measure the capacity every `LOOK_S`, and report it every `REPORT_S`."""
        if not at_once and now_s < self._measured_s + LOOK_S:
            return
        self._measured_s = now_s
        host, engine = self._host, self.engine
        if self._meter is None:
            tokens = self.response_tokens or self.longest // max(1, self.slots)
            self._meter = CapacityMeter(now_s, slots=self.slots, response_tokens=tokens)
        slack_s, load = host.slack_now(now_s), rollout_load(engine)
        each = load.context // max(1, load.running)
        full = RolloutLoad(running=self.slots, waiting=0, context=each * self.slots)
        rows = self.slots
        if host.rollout_time.known:
            rows = rows_allowed(slack_s, host.objectives, host.rollout_time, full)
        self._meter.observe(now_s, rows=rows, use=host.serving_use)
        if self._forwarder is None or self._forwarder.unsent >= MAX_UNSENT:
            return
        if at_once or now_s >= self._reported_s + REPORT_S:
            self._reported_s = now_s
            budget = host.policy.budget * self.pages.per_block * self.pages.size
            slots = self._meter.slots(budget, running=load.running, held_tokens=load.context)
            resting = now_s < self._rests_until_s and host.requests > 0
            self._emit(self._meter.report(slots=0 if resting else slots, state=host.policy.state, slack_s=slack_s))

    def _evict(self, pages: frozenset[int]) -> None:
        engine = self.engine
        for s in [s for s in engine.sequences if not pages.isdisjoint(s.pages)]:
            engine.cancel(s.request.id)
            self._evicted.append(int(s.request.id))
            self.evicted += 1

    def _return_starved(self, now_s: float) -> None:
        """Return the responses that have waited too long for memory or for compute."""
        if now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        engine = self.engine
        if self._idle():
            self._without_pages_s.clear()
            return
        sequences, why = engine.sequences, "memory"
        if time.monotonic() - self._stepped_s > STARVED_S:
            starved, why = [s.request.id for s in sequences], "compute"
            self._rests_until_s = now_s + REST_S
        else:
            before = self._without_pages_s
            self._without_pages_s = {s.request.id: before.get(s.request.id, now_s) for s in sequences if not s.pages}
            starved = [id for id, since_s in self._without_pages_s.items() if now_s - since_s > STARVED_S]
        for id in starved:
            engine.cancel(id)
        self._host.metrics.responses_returned[why] += self._return([int(id) for id in starved])

    def _return(self, handles: list[int]) -> int:
        given = tuple(h for h in handles if h in self._running)
        for handle in given:
            del self._running[handle]
        if given:
            self._report(time.monotonic(), at_once=True)  # otherwise the controller might assign them here again
            self._emit(Released(handles=given))
        return len(given)

    def _drop_all(self, *, close: bool = True) -> None:
        super()._drop_all()
        self._evicted.clear()
        if close and self._forwarder is not None:
            self._forwarder.close()
            self._forwarder = None
