"""Simulated lenders: workers whose machines serve requests first. The policies are those of `windfall serve --lend`.

    run.simulate(with_lenders(scenario.build(recipe), Lenders(...)), log, make=LendingSimulation)

Every TICK_S the lender looks at its requests and decides, with serve/slo.py, how many rows a step of the run may have;
with serve/memory_policy.py, how much memory the run may hold; and with serve/capacity.py, what it reports. In between
nothing changes: a turn of the host is one serving step and one step of the run with that many rows, so the run's
formulas become slower by a factor. Prompts are prefilled before anything else. If the limit of the slowdown leaves less
time than that, only a share of the turns has a step of the run.

Not simulated: errors of the learned step times (they are exact here), and waits within a tick. The prefill of the run's
own prompts is slowed down by the same factor as its decode steps.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any

from benchmarks.support.request_load import RequestLoad
from windfall.link import messages as m
from windfall.serve.capacity import CapacityMeter
from windfall.serve.memory_policy import MemoryPolicy
from windfall.serve.slo import Objectives, RolloutLoad, ServingLoad, credit_s, objective_slack_s, rows_allowed
from windfall.sim.core.link import SimLink
from windfall.sim.core.run import Simulation
from windfall.sim.core.scenario import Scenario
from windfall.sim.core.token_schedule import TokenSchedule
from windfall.sim.machines.decode import Decode
from windfall.sim.machines.fleet import SimFleet, Stay
from windfall.sim.machines.worker import Attend, SimWorker, WorkerSpec
from windfall.step_time import LearnedStepTime, StepTime

TICK_S = 1.0
STARVED_S = 2.0
"""As in serve/rollout_tenant.py: a tenant without a step for this long returns its responses."""
BLOCKS = 256
MAX_PREFILL = 0.95
"""Share of a tick that prefill of requests takes at most; the rest of a longer prefill is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lenders:
    """Servers that lend a simulated run what they do not need. They stay for the whole run."""

    serving: StepTime
    """Step times of the served model on a lender. Those of the run's model are `sim.worker`."""
    load: RequestLoad
    objectives: Objectives
    count: int = 1
    slots: int = 16
    """Responses of the run that a lender runs at once at most."""
    kv_tokens: int = 400_000
    """Tokens of the run's model that fit into the whole KV memory of a lender."""
    serving_kv_tokens: int = 400_000
    """Tokens of the served model that fit into the same memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LendingScenario(Scenario):
    lenders: Lenders


def with_lenders(scenario: Scenario, lenders: Lenders) -> LendingScenario:
    return LendingScenario(**{f.name: getattr(scenario, f.name) for f in fields(scenario)}, lenders=lenders)


@dataclass(slots=True)
class _Request:
    context: float
    left: float
    elapsed_s: float = 0.0  # since its first token
    lent_s: float = 0.0  # of these, time that the run had


class SimLender(SimWorker):
    def __init__(
        self, spec: WorkerSpec, lending: Lenders, token_schedule: TokenSchedule, attend: Attend, *, number: int,
        response_tokens: int, started_s: float,
    ) -> None:  # fmt: skip
        """`response_tokens`: tokens of the longest possible response of the run, prompt included."""
        super().__init__(spec, token_schedule, attend, started_s=started_s)
        assert spec.kv_tokens > 0, "a lender's memory is limited"
        self._lending, self._number, self._response_tokens = lending, number, response_tokens
        self._serving_time, self._rollout_time = learned(lending.serving), learned(spec.service)
        self._policy = MemoryPolicy(BLOCKS)
        self.meter = CapacityMeter(self._loop.time(), slots=spec.slots, response_tokens=response_tokens)
        self._requests: list[_Request] = []
        self._looked_s = self._loop.time()
        self._stopped_s: float | None = None
        """When the run last stopped getting rows. None while it gets some."""
        self._turn_s = self._rollout_s = self._prefill_share = 0.0
        """Mean seconds of a turn of the host in the last tick, of the run's part of it, and the share of prefill."""
        self._slack_s = math.inf
        self.turns_s: list[float] = []
        """Time per token of the requests, for every tick with requests."""
        self.returned = 0
        """Responses that went back to the controller."""
        self._loop.call_later(TICK_S, self._look)

    # the service

    def _look(self) -> None:
        if self.finished:
            return
        self._flush_steps()
        now = self._loop.time()
        self._serve(now)
        self._limit_memory()
        self._share(now)
        self._report()
        self._resume_steps()
        self._loop.call_later(TICK_S, self._look)

    def _serve(self, now: float) -> None:
        """Advance the requests to now, and add those that have arrived."""
        passed_s, begin_s, self._looked_s = now - self._looked_s, self._looked_s, now
        if self._requests:
            tokens = passed_s * (1.0 - self._prefill_share) / self._turn_s
            lent_s = tokens * self._rollout_s
            for request in self._requests:
                request.left -= tokens
                request.context += tokens
                request.elapsed_s += passed_s
                request.lent_s += lent_s
            self._requests = [r for r in self._requests if r.left > 0]
        new = self._lending.load.arrivals(self._number, begin_s, now)
        self._requests += [_Request(context=r.prompt, left=r.generated) for r in new]
        prefill_s = self._lending.serving.prefill_s * sum(r.prompt for r in new)
        self._prefill_share = min(MAX_PREFILL, prefill_s / TICK_S)

    @property
    def _use(self) -> float:
        """Share of the memory that serving holds."""
        return min(1.0, sum(r.context for r in self._requests) / self._lending.serving_kv_tokens)

    @property
    def _budget_tokens(self) -> int:
        return self._policy.budget * self.spec.kv_tokens // BLOCKS

    def _share(self, now: float) -> None:
        """Decide how many rows the run gets, and how much slower its steps are."""
        base, lending = self.spec.service, self._lending
        count, context = len(self._requests), sum(r.context for r in self._requests)
        at_end = tuple((r.elapsed_s + TICK_S, r.lent_s) for r in self._requests)  # of this tick, if nothing is lent
        requests = ServingLoad(last_tokens_s=(now,) * count, lent_s=at_end, context=round(context))
        self._slack_s = objective_slack_s(requests, lending.objectives, self._serving_time, now)
        batch = len(self._decode) - len(self._decode.waiting)
        each = self._decode.context // batch if batch else self._response_tokens // 2
        full = RolloutLoad(running=self.spec.slots, waiting=0, context=each * self.spec.slots)
        most = rows_allowed(self._slack_s, lending.objectives, self._rollout_time, full)
        rows = min(batch, most)
        serving_s = lending.serving.step_s(count, context) if count else 0.0
        step_s = base.step_s(rows, each * rows) if rows else 0.0
        turns = self._turns_lent(credit_s(requests, lending.objectives), serving_s, step_s)
        rows = rows if turns else 0
        self._rollout_s = turns * step_s
        self._turn_s = max(serving_s + self._rollout_s, 1e-9)
        if count:
            self.turns_s.append(self._turn_s)
        self.meter.observe(now, rows=most, use=self._use)
        if rows:
            self.meter.stepped(TICK_S * (1.0 - self._prefill_share) * self._rollout_s / self._turn_s)
            alone_s = base.step_s(batch, self._decode.context)
            slower = batch / rows * self._turn_s / turns / alone_s / (1.0 - self._prefill_share)
            self._decode.service, self._stopped_s = base.slower(slower), None
        elif batch and self._stopped_s is None:
            self._stopped_s = now
        elif batch and self._stopped_s is not None and now - self._stopped_s > STARVED_S:
            self._return(tuple(self._decode.rows))

    def _turns_lent(self, credit_s: float, serving_s: float, step_s: float) -> float:
        """The share of the turns of this tick that may have a step of the run. `credit_s`: at the end of the tick if
        nothing is lent; every second lent costs one second of it, and what serving would have earned in that second."""
        if math.isinf(credit_s) or not step_s:
            return 1.0
        lent_s = max(0.0, credit_s / (1.0 + self._lending.objectives.lent_share))
        share = lent_s / (TICK_S * (1.0 - self._prefill_share))
        return min(1.0, share / (1.0 - share) * serving_s / step_s) if share < 1.0 else 1.0

    # memory

    def _limit_memory(self) -> None:
        serving = math.ceil(self._use * BLOCKS)
        held = self._decode.context
        self._policy.thaw(serving, self._loop.time())
        excess = self._policy.observe(serving, math.ceil(held / self.spec.kv_tokens * BLOCKS))
        self._apply_budget()
        if excess:
            self._return(youngest_above(self._decode, self._budget_tokens))
            self._policy.observe(serving, math.ceil(self._decode.context / self.spec.kv_tokens * BLOCKS))

    def _apply_budget(self) -> None:
        tokens = max(1, self._budget_tokens)  # 0 would mean that there is no limit
        self._decode.kv_tokens = tokens
        self._cache.limit(tokens)
        self._cache.fit(self._decode.context)

    def _return(self, handles: tuple[int, ...]) -> None:
        if handles:
            self.returned += len(handles)
            self._drop(handles)
            self._report()
            self._send(m.Released(handles=handles))

    def _swap(self, order: Any) -> None:
        self._policy.begin_step(math.ceil(self._use * BLOCKS))
        self._apply_budget()
        super()._swap(order)

    def _report(self) -> None:
        running, held = len(self._decode) - len(self._decode.waiting), self._decode.context
        slots = self.meter.slots(self._budget_tokens, running=running, held_tokens=held)
        self._send(self.meter.report(slots=slots, state=self._policy.state, slack_s=self._slack_s))

    # steps

    def dial(self) -> None:
        super().dial()
        if isinstance(self.link, SimLink) and self._held:
            self._report()

    def _start_steps(self, from_now: bool = True) -> None:
        if self._stopped_s is None:
            super()._start_steps(from_now)

    def _resume_steps(self) -> None:
        if self._timer is not None:
            return
        if self._orders and len(self._decode) and self._stopped_s is None:  # they wait for the end of the step
            end_s = self._began_s + self._decode.seconds(1)
            self._timer = self._loop.call_at(max(self._loop.time(), end_s), self._tick)
        elif self._orders:
            self._execute_orders()
        else:
            self._start_steps(from_now=False)


def learned(service: StepTime) -> LearnedStepTime:
    """What a host learns of steps that take exactly as long as these formulas say."""
    out = LearnedStepTime()
    for n in range(48):
        batch, each = 1 + (n * 37) % 128, 200 + (n * 531) % 4000
        out.observe(service.step_s(batch, batch * each), batch, batch * each)
    return out


def youngest_above(decode: Decode, tokens: int) -> tuple[int, ...]:
    """Handles of the youngest running responses, so that the others have at most `tokens` tokens of context."""
    out, context = [], decode.context
    for handle in reversed(decode._admitted):
        if context <= tokens:
            break
        out.append(handle)
        _, base, _ = decode._end(decode.rows[handle])
        context -= base + decode._steps
    return tuple(out)


class LendingFleet(SimFleet):
    """The simulated fleet with the lenders of a LendingScenario."""

    lender_class = SimLender

    def __init__(self, scenario: Scenario, token_schedule: TokenSchedule, attend: Attend) -> None:
        super().__init__(scenario, token_schedule, attend)
        self.lender_stays: list[Stay] = []
        """Stays of all lenders so far, which cost nothing."""
        self._lending = scenario.lenders if isinstance(scenario, LendingScenario) else None
        numbers = range(self._lending.count) if self._lending and scenario.real.fleet.borrowed_max else ()
        self._lenders = {f"l{n + 1}": n for n in numbers}
        """Number of each lender, by node."""

    def start(self) -> None:
        """Lenders are there from the beginning: they serve whether or not there is a run. A run that borrows from none
        refuses them."""
        super().start()
        for node in self._lenders:
            self.bring_up(node)

    def bring_up(self, node: str, ago_s: float = 0.0) -> None:
        if self._lending is None or node not in self._lenders:
            super().bring_up(node, ago_s)
            return
        real, lending = self._scenario.real, self._lending
        now, life = asyncio.get_running_loop().time(), next(self._starts.setdefault(node, count(1)))
        kind = replace(self._scenario.worker, slots=lending.slots, kv_tokens=lending.kv_tokens)
        stay = self._up[node] = Stay(name=f"{node}.{life}", usd_per_h=0.0, start_s=now, joined=True)
        self.lender_stays.append(stay)
        spec = replace(self._worker_spec(stay.name, kind, "borrowed", 0.0), lends=True)
        lender = self.workers[node] = self.lender_class(
            spec, lending, self._token_schedule, self._attend, number=self._lenders[node],
            response_tokens=real.sim.prompt_tokens + real.rollout.max_tokens, started_s=now,
        )  # fmt: skip
        lender.dial()


class LendingSimulation(Simulation):
    fleet_class = LendingFleet
