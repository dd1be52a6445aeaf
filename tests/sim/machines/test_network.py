"""The simulated network: fair shares of several links, and flows that follow others, against brute force."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from random import Random

import pytest

from windfall.sim.core import loop as loops
from windfall.sim.core.loop import VirtualLoop
from windfall.sim.machines.network import Flow, Network, shares


def grown(flows: Mapping[int, list[str]], links: Mapping[str, float], leaders: Mapping[int, int]) -> dict[int, float]:
    """Shares by brute force: all rates grow in small steps, except those that are at a limit."""
    rates, step = dict.fromkeys(flows, 0.0), 0.002
    growing = set(flows)
    while growing:
        for flow in list(growing):
            full = [n for n in flows[flow] if sum(rates[f] for f in flows if n in flows[f]) + step > links[n]]
            leader = leaders.get(flow)
            if full or (leader is not None and leader not in growing and rates[flow] + step > rates[leader]):
                growing.discard(flow)
            else:
                rates[flow] += step
    return rates


@pytest.mark.parametrize("seed", range(40))
def test_shares_are_those_of_rates_that_grow_alike(seed: int) -> None:
    draw = Random(seed)
    links = {f"l{n}": draw.uniform(0.2, 2.0) for n in range(draw.randint(1, 5))}
    flows = {n: draw.sample([*links], draw.randint(1, len(links))) for n in range(draw.randint(1, 7))}
    leaders = {n: draw.randrange(n) for n in flows if n and draw.random() < 0.4}
    assert shares(flows, links, leaders) == pytest.approx(grown(flows, links, leaders), abs=0.02)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A flow to start: at what time, over which links, after which other flow."""

    at_s: float
    links: list[str]
    leader: int | None = None
    count: float = 3.0
    late_s: float = 0.0


CHUNK = 0.01


def ended(plans: list[Plan], links: Mapping[str, float]) -> dict[int, float]:
    """When each flow ends in a Network."""

    async def main(loop: VirtualLoop) -> dict[int, float]:
        net, out, flows = Network(), dict[int, float](), dict[int, Flow]()
        for number, plan in sorted(enumerate(plans), key=lambda n: n[1].at_s):
            await asyncio.sleep(plan.at_s - loop.time())
            leader = flows[plan.leader] if plan.leader is not None and plan.leader not in out else None
            done = partial(lambda n: out.update({n: loop.time()}), number)
            flow = flows[number] = Flow(count_bytes=plan.count, chunk_bytes=CHUNK, done=done)
            net.send(flow, {link: links[link] for link in plan.links}, leader=leader, late_s=plan.late_s)
        await asyncio.sleep(1000)
        return out

    return loops.run(main)


def ended_step_by_step(plans: list[Plan], links: Mapping[str, float]) -> dict[int, float]:
    """The same in small steps of time: no flow passes the bytes that its leader has."""
    have, out, now_s, step_s = dict[int, float](), dict[int, float](), 0.0, 0.004
    while len(out) < len(plans):
        begun = {n: plan for n, plan in enumerate(plans) if plan.at_s <= now_s and n not in out}
        near = {
            n: plan.leader for n, plan in begun.items()
            if plan.leader in begun and have.get(plan.leader, 0.0) - have.get(n, 0.0) < CHUNK
        }  # fmt: skip
        rates = shares({n: plan.links for n, plan in begun.items()}, links, near)
        for n, plan in begun.items():
            have[n] = have.get(n, 0.0) + rates[n] * step_s
            if have[n] >= plan.count:
                out[n] = now_s + step_s
        now_s += step_s
    return out


@pytest.mark.parametrize("seed", range(25))
def test_flows_end_as_in_small_steps(seed: int) -> None:
    draw = Random(seed)
    links = {f"l{n}": draw.uniform(0.5, 2.0) for n in range(4)}
    starts = sorted(draw.choice([0.0, draw.uniform(0.0, 4.0)]) for _ in range(6))
    plans = [
        Plan(at_s=at_s, links=draw.sample([*links], draw.randint(1, 3)),
             leader=draw.randrange(n) if n and draw.random() < 0.6 else None)
        for n, at_s in enumerate(starts)
    ]  # fmt: skip
    assert ended(plans, links) == pytest.approx(ended_step_by_step(plans, links), rel=0.02, abs=0.05)


def test_bandwidth_that_a_slow_flow_leaves_goes_to_the_others() -> None:
    plans = [Plan(at_s=0.0, count=50.0, links=["up"]), Plan(at_s=2.0, count=50.0, links=["up"])]
    assert ended(plans, {"up": 10.0}) == pytest.approx({0: 8.0, 1: 10.0}), "10 bytes per second, then 5 each"
    slow = Plan(at_s=0.0, count=5.0, links=["up", "down"])
    assert ended([*plans, slow], {"up": 10.0, "down": 1.0}) == pytest.approx({0: 8.7, 1: 10.5, 2: 5.0})


def test_chain_is_a_pipeline() -> None:
    """Each hop adds a chunk and a latency, not a copy."""
    plans = [Plan(at_s=0.0, links=[f"up {n}"], leader=n - 1 if n else None, late_s=0.5) for n in range(4)]
    links = {"up 0": 1.0, "up 1": 9.0, "up 2": 9.0, "up 3": 9.0}
    first, second, third, last = ended(plans, links).values()
    assert first == pytest.approx(3.5)
    assert second - first == pytest.approx(0.5 + CHUNK / 9)
    assert last - third == pytest.approx(0.5 + CHUNK / 9)


def test_paused_flow_leaves_its_bandwidth_and_goes_on_elsewhere() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        net, out = Network(), list[float]()
        stopped = Flow(count_bytes=9.0, done=lambda: out.append(-1.0))
        other = Flow(count_bytes=9.0, done=lambda: out.append(loop.time()))
        follower = Flow(count_bytes=9.0, chunk_bytes=1.0, done=lambda: out.append(loop.time()))
        net.send(stopped, {"up": 2.0})
        net.send(other, {"up": 2.0})
        net.send(follower, {"own": 9.0}, leader=stopped)
        await asyncio.sleep(1.0)
        net.send(stopped, {})
        await asyncio.sleep(1.0)
        assert (other.left_bytes, stopped.left_bytes, follower.left_bytes) == pytest.approx((6.0, 8.0, 9.0))
        await asyncio.sleep(100.0)
        assert out == pytest.approx([5.0]), "its follower waits"
        net.send(stopped, {"other": 4.0})
        await asyncio.sleep(100.0)
        return out

    assert loops.run(main) == pytest.approx([5.0, -1.0, 102.0 + 2.0 + 1.0 / 9.0])


@pytest.mark.parametrize("fan_out", [1, 4])
def test_thousand_flows_are_cheap(fan_out: int) -> None:
    """Four regions, whose importers share the uplink of the trainer; the others follow in chains or trees."""
    links = {"trainer": 10.0} | {f"up {n}": 5.0 for n in range(1000)} | {f"down {n}": 5.0 for n in range(1000)}
    plans = [
        Plan(at_s=0.0, links=["trainer" if n < 4 else f"up {source(n, fan_out)}", f"down {n}"],
             leader=source(n, fan_out) if n >= 4 else None)
        for n in range(1000)
    ]  # fmt: skip
    began_s = time.process_time()
    assert max(ended(plans, links).values()) < 12.0
    assert time.process_time() - began_s < 2.0


def source(n: int, fan_out: int) -> int:
    """Whom a reader follows. Readers whose numbers have the same remainder by 4 are in one region."""
    return ((n // 4 - 1) // fan_out) * 4 + n % 4
