"""The host: one thread that runs the engines of two tenants in turn. Serving comes first.

    orders ──▶ serving step ──▶ memory state ──▶ slack ──▶ rollout step (at most k rows) ──▶ orders ...

Only this thread touches the two engines, the blocks and the policies. Other threads give orders, which run between two
steps (`call`, `submit`, `cancel`). Rules:
- the thread waits only for orders, and only if no tenant has anything to do; never for a client or for the run;
- a GPU engine launches several steps at once, but no more than take `LAUNCH_S`. Each tenant is one launch ahead of the
  device, so the device never waits for the host. What a launch took is measured on the device; those in flight count
  with what they are predicted to take;
- an error of the rollout tenant ends that tenant, and its blocks are free. An error of serving ends the host, and every
  request gets an error.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from windfall.engine.blocks import TenantPages
from windfall.engine.paged import PagedEngine
from windfall.engine.torch.arena import Arena
from windfall.errors import WindfallError
from windfall.serve.memory_policy import MemoryPolicy, MemoryState
from windfall.serve.metrics import Metric, ServeMetrics, family
from windfall.serve.slo import Objectives, RolloutLoad, ServingLoad, objective_slack_s, prefill_allowed, steps_allowed
from windfall.step_time import LearnedStepTime
from windfall.types import Chunk, Request

SERVING, ROLLOUT = "serving", "rollout"
LAUNCH_S = 0.02
"""Upper limit for the time of the decode steps that are launched at once (seconds)."""
SWITCH_S = 0.001
"""Longest time for which another Python thread may keep the host's thread waiting (seconds). Python's default is 5 ms:
as long as several steps of a small model."""
AHEAD = 2
"""Launches of each tenant that may be in flight."""
LOOK_S = 0.05
"""Longest wait for orders (seconds) while there is a rollout tenant: it may be waiting for its link."""

Listener = Callable[[Chunk | WindfallError], None]
"""Called in the host's thread with every chunk of a request, or with the reason why it was not accepted."""


class Tenant(Protocol):
    """The second tenant, as the host sees it (rollout_tenant.py)."""

    evicted: int
    """Number of responses that ever lost their pages."""

    @property
    def engine(self) -> PagedEngine: ...
    @property
    def pages(self) -> TenantPages: ...
    @property
    def busy(self) -> bool:
        """Whether there is something to launch or to collect."""
        ...

    def turn(self) -> None:
        """Run its orders and at most one launch."""

    def leave_memory(self) -> None:
        """Give all blocks back."""

    def fail(self, error: BaseException) -> None: ...


@dataclass(slots=True)
class _Running:
    """A serving request that has not ended."""

    listener: Listener
    arrival_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    lent_s: float = 0.0  # time since the first token that the rollout had
    tokens: int = 0


class Host:
    def __init__(
        self,
        engine: PagedEngine,
        arena: Arena,
        objectives: Objectives,
        *,
        max_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engine`: the engine of serving, whose pages are in the arena. `max_rows`: rows of its largest step."""
        assert engine.kv is not None, "the pages of serving are in the arena"
        self.engine = engine
        self._pages = engine.kv.pages
        self.arena = arena
        self.objectives = objectives
        self._max_rows = self._step_rows = max_rows
        """Upper limits for the rows of a step of serving: of any, and of the next."""
        self.policy = MemoryPolicy(arena.blocks.layout.count)
        self.serving_time = LearnedStepTime()
        self.rollout_time = LearnedStepTime()
        self.metrics = ServeMetrics()
        self.rollout: Tenant | None = None
        self.failed: BaseException | None = None
        self.slack_s = 0.0
        """The slack before the last rollout step, or before the last decision that it must wait."""
        self._clock = clock
        self._requests: dict[str, _Running] = {}
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="serving host", daemon=True)
        self._on_failure: Callable[[], None] = lambda: None

    # For other threads.

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """`on_failure` is called in the host's thread if serving fails. The host is useless after that."""
        self._on_failure = on_failure
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        self._orders.put(None)
        self._thread.join(timeout_s)

    def wake(self) -> None:
        self._orders.put(lambda: None)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function between two steps."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as e:  # fault boundary: the caller gets the error
                future.set_exception(e)

        self._orders.put(run)
        return future

    def submit(self, request: Request, listener: Listener, *, arrival_s: float | None = None) -> None:
        """`arrival_s`: when it arrived, by the host's clock; by default, now. Its TTFT begins then."""
        arrived_s = self._clock() if arrival_s is None else arrival_s
        self._orders.put(lambda: self._add(request, listener, arrived_s))
        if self.failed is not None:
            listener(_engine_failed())  # no thread takes the order

    def cancel(self, id: str, how: str = "canceled") -> None:
        """End a request. `how`: for the metrics."""
        self._orders.put(lambda: self._cancel(id, how))

    def now_s(self) -> float:
        """The host's clock."""
        return self._clock()

    def end_requests(self, why: str) -> None:
        """Cancel all requests. Their listeners get an error."""
        self._orders.put(lambda: self._end_requests(WindfallError(why)))

    @property
    def requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def state(self) -> list[Metric]:
        """What /metrics shows beside the counts of requests."""
        blocks, waiting = self.arena.blocks, sum(r.tokens == 0 for r in list(self._requests.values()))
        held = {name: blocks.held(name) for name in (SERVING, ROLLOUT)}
        errors = {SERVING: self.serving_time.error, ROLLOUT: self.rollout_time.error}
        states = {state.value: int(state is self.policy.state) for state in MemoryState}
        slack_s = min(self.slack_s, 1e9)
        return [
            family("serve_running", "Requests with at least one token.", self.requests - waiting),
            family("serve_waiting", "Requests without a token.", waiting),
            family("kv_blocks", "Blocks of KV memory.", {**held, "free": blocks.free}, "tenant"),
            family("kv_blocks_moved_total", "Blocks that went to the other tenant.", blocks.moves),
            family("lend_state", "Memory state of the lender: 1 for the present one.", states, "state"),
            family("lend_budget_blocks", "Blocks that the run may hold.", self.policy.budget),
            family("lend_pressure_total", "Times that serving took memory back.", self.policy.halvings),
            family("lend_slack_seconds", "Slack of the tightest request; 1e9 without requests.", slack_s),
            family("step_error", "Recent mean relative error of predicted step times.", errors, "tenant"),
        ]

    # The methods below run in the thread.

    def _run(self) -> None:
        try:
            self.arena.use_device()
            while self._take_orders():
                self._turn()
        except BaseException as e:  # fault boundary: this is the only way in which the server learns of the error
            self.failed = e
            with contextlib.suppress(Exception):  # the server must learn of it whatever else fails
                while not self._orders.empty():  # some requests may not be added yet
                    if (order := self._orders.get()) is not None:
                        order()
                self._end_requests(_engine_failed())
            self._on_failure()

    def _take_orders(self) -> bool:
        """Run all orders; wait for one if there is nothing to do. False: the host is closed."""
        while True:
            try:
                lends = self.rollout is not None and self.rollout.busy
                idle = not len(self.engine) and not lends
                if idle:
                    order = self._orders.get(timeout=LOOK_S if self.rollout is not None else None)
                else:
                    order = self._orders.get_nowait()
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            if self._orders.empty():
                return True

    def _turn(self) -> None:
        if len(self.engine):
            self._step_serving()
        if (tenant := self.rollout) is None:
            return
        began_s = self._clock()
        try:
            tenant.turn()
        except Exception as e:  # fault boundary: serving goes on without the rollout
            self.drop_rollout(tenant)
            tenant.fail(e)
        lent_s = self._clock() - began_s
        for request in self._requests.values():
            if request.tokens:
                request.lent_s += lent_s

    def _add(self, request: Request, listener: Listener, arrival_s: float) -> None:
        try:
            if self.failed is not None:
                raise _engine_failed()
            self.engine.add(request)
        except WindfallError as e:
            self.metrics.requests["rejected"] += 1
            listener(e)
            return
        self._requests[request.id] = _Running(listener, arrival_s)
        self.metrics.prompt_tokens += len(request.prompt)

    def _cancel(self, id: str, how: str = "canceled") -> None:
        if self.failed is None:
            self.engine.cancel(id)
        if (request := self._requests.pop(id, None)) is not None:
            self._count_end(request, how)

    def _end_requests(self, error: WindfallError) -> None:
        for id, request in list(self._requests.items()):
            self._cancel(id)
            request.listener(error)

    def _step_serving(self) -> None:
        evicted = self.rollout.evicted if self.rollout is not None else 0
        engine, steps, most_rows = self.engine, 1, None
        engine.depth = AHEAD
        began_s = self._clock()
        if engine.burst > 1:
            rows, context = self._serving_shape()
            steps = steps_allowed(LAUNCH_S, LAUNCH_S, self.serving_time, rows, context, engine.burst)
            most_rows, prefills = prefill_allowed(self.objectives, self.serving_time, context, self._max_rows)
            engine.decode_after(prefills)
            self._step_rows = most_rows
        chunks = engine.step(most_rows, steps)
        now_s = self._clock()
        took_s = engine.device_s or now_s - began_s
        self.metrics.serving_seconds += took_s
        self.serving_time.observe(took_s / engine.last_steps, *engine.last_step)
        if self.rollout is not None and self.rollout.evicted > evicted:  # serving took blocks in use
            self.policy.taken(self.arena.blocks.held(ROLLOUT))
        for chunk in chunks:
            self._record(chunk, now_s)

    def _record(self, chunk: Chunk, now_s: float) -> None:
        request, metrics, slo = self._requests[chunk.id], self.metrics, self.objectives
        if request.tokens == 0:
            request.first_s = now_s
            metrics.ttft.add(now_s - request.arrival_s)
            metrics.late_first_tokens += now_s - request.arrival_s > slo.ttft_s
        request.last_s = now_s
        request.tokens += len(chunk.tokens)
        metrics.generated_tokens += len(chunk.tokens)
        if chunk.finish:
            del self._requests[chunk.id]
            self._count_end(request, chunk.finish)
        request.listener(chunk)

    def _count_end(self, request: _Running, how: str) -> None:
        self.metrics.requests[how] += 1
        if request.tokens > 1:
            each_s = (request.last_s - request.first_s) / (request.tokens - 1)
            self.metrics.tpot.add(each_s)
            self.metrics.late_tokens += each_s > self.objectives.tpot_s

    # The rollout.

    def adopt(self, tenant: Tenant) -> None:
        assert self.rollout is None, "there is a rollout tenant already"
        self.rollout = tenant
        self.rollout_time = LearnedStepTime()
        self.begin_step()

    def drop_rollout(self, tenant: Tenant) -> None:
        """The tenant is gone: its blocks are free."""
        if self.rollout is tenant:
            self.rollout = None
            tenant.pages.evict = lambda pages: None
            with contextlib.suppress(Exception):  # the device may be what failed
                tenant.engine.finish_launches()
            tenant.leave_memory()

    def begin_step(self) -> None:
        """A step of the run begins: compute the rollout's budget from what serving holds."""
        self.policy.begin_step(self.held)
        if self.rollout is not None:
            self.rollout.pages.limit = self.policy.budget

    def slack_now(self, now_s: float) -> float:
        """The smallest slack of the objectives. Credit is left out: it limits how often the rollout has a step, not how
        many responses such a step can have."""
        return objective_slack_s(self.serving_load(now_s), self.objectives, self.serving_time, now_s)

    @property
    def serving_use(self) -> float:
        """Share of the KV memory that serving holds."""
        return self.held / self.arena.blocks.layout.count

    @property
    def held(self) -> int:
        """Blocks that serving holds."""
        return self._pages.held_blocks

    def _serving_shape(self) -> tuple[int, int]:
        """Rows of a decode step of serving, and the tokens that they attend to."""
        lengths = [len(s.tokens) for s in self.engine.sequences if s.pages]
        return len(lengths), sum(lengths)

    def serving_load(self, now_s: float) -> ServingLoad:
        waiting, last_tokens_s, lent_s, context = [], [], [], 0
        for s in self.engine.sequences:
            request = self._requests[s.request.id]
            if request.tokens == 0:
                waiting.append((request.arrival_s, len(s.tokens) - s.prefilled))
                if s.prefilled == len(s.tokens):  # its first token is in flight: what is launched now comes after it
                    lent_s.append((0.0, 0.0))
            else:
                last_tokens_s.append(request.last_s)
                lent_s.append((now_s - request.first_s, request.lent_s))
                context += len(s.tokens)
        return ServingLoad(
            waiting=tuple(waiting),
            last_tokens_s=tuple(last_tokens_s),
            lent_s=tuple(lent_s),
            context=context,
            max_rows=self._step_rows,
            serving_ahead_s=ahead_s(self.engine, self.serving_time),
            rollout_ahead_s=ahead_s(self.rollout.engine, self.rollout_time) if self.rollout is not None else 0.0,
        )


def _engine_failed() -> WindfallError:
    return WindfallError("the engine has failed", fix="Try again: the server restarts.")


def ahead_s(engine: PagedEngine, time: LearnedStepTime) -> float:
    """Predicted time of the launches in flight."""
    return sum(time.upper_s(*shape) * steps for shape, steps in engine.launched)


def rollout_load(engine: PagedEngine) -> RolloutLoad:
    running = [s for s in engine.sequences if s.pages]
    return RolloutLoad(
        running=len(running),
        waiting=len(engine) - len(running),
        context=sum(len(s.tokens) for s in running),
        prefilling=engine.prefilling,
        prefill=engine.prefill_rows,
    )
