"""One simulated worker at a time, behind the product's own dispatch: every message, and every way to go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import pytest

from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.sim.core import loop as loops
from windfall.sim.core.link import SimLink
from windfall.sim.core.loop import VirtualLoop
from windfall.sim.core.run import Simulation
from windfall.sim.core.service import Lengths, Service
from windfall.sim.core.token_schedule import TokenSchedule
from windfall.sim.machines.linked_trainer import LinkedTrainer
from windfall.sim.machines.network import Network
from windfall.sim.machines.worker import Kit, SimWorker
from windfall.types import Lease, Sampling

SERVICE = Service(fixed_s=0.01, each_s=0.001, prefill_s=0.0001)
Simulated = Callable[..., Any]


class Desk:
    """Stands where dispatch does: keeps the link and all that comes."""

    def __init__(self) -> None:
        self.hellos: list[m.Hello] = []
        self.heard: list[tuple[float, Any]] = []
        self.link: Any = None

    async def attend(self, link: Any, hello: m.Hello) -> None:
        self.link = link
        self.hellos.append(hello)
        loop = asyncio.get_running_loop()
        try:
            while True:
                message = await link.receive()
                self.heard.append((loop.time(), message))
        except LinkClosed as e:
            self.heard.append((loop.time(), e))

    def of(self, kind: type) -> list[Any]:
        return [x for _, x in self.heard if isinstance(x, kind)]


def work(handle: int, position: int = 0, most: int = 1000) -> m.Work:
    prompt = (2, *[1] * position)
    return m.Work(
        handle=handle, prompt=b"".join(n.to_bytes(4, "little") for n in prompt), position=position, seed=handle,
        max_tokens=most - position, sampling=Sampling(), stop=(0,),
    )  # fmt: skip


def played(play: Callable[[Desk, SimWorker, VirtualLoop], Any], *, granule: int = 1, length: float = 100.0) -> Desk:
    async def main(loop: VirtualLoop) -> Desk:
        desk = Desk()
        book = TokenSchedule(Lengths(median=length, sigma=0.0), granule=granule, prompt_tokens=10, max_tokens=1000)
        kit = Kit(
            name="w", lease=Lease(), service=SERVICE, slots=8, network=Network(100.0), weights_bytes=50.0,
            ingress_per_s=100.0, quantum_s=0.2 if granule > 1 else 0.0,
        )  # fmt: skip
        worker = SimWorker(kit, book, desk.attend, started_s=0.0)
        worker.dial()
        await asyncio.sleep(0)
        await play(desk, worker, loop)
        return desk

    return loops.run(main)


@pytest.mark.parametrize("kind", [k for k in get_args(m.ToWorker) if k not in (m.Challenge, m.Welcome)])
@pytest.mark.parametrize("busy", [False, True])
def test_every_order_of_a_controller_is_taken(kind: type, busy: bool) -> None:
    """Challenge and Welcome belong to the gate, which a link in memory has none of."""
    orders = {
        m.Refused: m.Refused(why="no"), m.Assign: m.Assign(work=(work(7),)), m.Cancel: m.Cancel(handles=(1,)),
        m.Release: m.Release(handles=(1,)), m.Load: m.Load(version=2, digest="b", url=""), m.Pause: m.Pause(),
        m.Resume: m.Resume(), m.Drain: m.Drain(why="go"),
    }  # fmt: skip

    async def play(desk: Desk, worker: SimWorker, _: VirtualLoop) -> None:
        await desk.link.send(m.Load(version=1, digest="a", url=""))
        if busy:
            await desk.link.send(m.Assign(work=(work(1), work(2))))
        await asyncio.sleep(0.605)
        await desk.link.send(orders[kind])
        await asyncio.sleep(5)
        assert worker.over == (kind in (m.Refused, m.Drain))

    desk = played(play)
    assert desk.of(m.Loaded)[0].pulled_bytes == 50
    assert desk.of(m.Loaded)[0].s == pytest.approx(0.5, abs=0.012), "50 bytes, and the end of a step"
    assert len(desk.of(m.Loaded)) == (2 if kind is m.Load else 1)
    assert bool(desk.of(m.Left)) == (kind is m.Drain)
    assert bool(desk.of(m.Released)) == (kind is m.Release)
    ended = sum(len(f.finished) for f in desk.of(m.Tokens))
    stopped = {m.Refused: 2, m.Cancel: 1, m.Release: 1, m.Pause: 2, m.Drain: 2}.get(kind, 0)
    assert ended == (2 - stopped if busy else 0) + (kind is m.Assign)


def test_an_order_waits_for_the_end_of_the_step() -> None:
    async def play(desk: Desk, worker: SimWorker, _: VirtualLoop) -> None:
        await desk.link.send(m.Assign(work=(work(1),)))
        await asyncio.sleep(0.0305)  # a step takes 11 ms, after a prefill of 1 ms
        await desk.link.send(m.Release(handles=(1,)))
        await asyncio.sleep(1)

    desk = played(play)
    at_s = next(t for t, x in desk.heard if isinstance(x, m.Released))
    assert at_s == pytest.approx(0.034)
    tokens = desk.of(m.Tokens)
    assert sum(sum(f.counts) if f.counts else len(f.handles) for f in tokens) == 3


@pytest.mark.parametrize("granule", [1, 7])
def test_a_response_that_moves_takes_as_long_as_one_that_stays(granule: int) -> None:
    """The part of a granule that was made is not made again."""
    ends: list[float] = []
    for moves in (False, True):

        async def play(desk: Desk, worker: SimWorker, loop: VirtualLoop, moves: bool = moves) -> None:
            await desk.link.send(m.Assign(work=(work(1),)))
            await asyncio.sleep(0.45)  # 41 steps: in the middle of a granule of 7
            if moves:
                await desk.link.send(m.Release(handles=(1,)))
                await asyncio.sleep(0.1)
                told = sum(sum(f.counts) if f.counts else len(f.handles) for f in desk.of(m.Tokens))
                again = work(2, told)
                again = m.Work(**{f: getattr(again, f) for f in again.__struct_fields__ if f != "seed"}, seed=1)
                await desk.link.send(m.Assign(work=(again,)))
            await asyncio.sleep(5)
            ends.append(next(t for t, x in desk.heard if isinstance(x, m.Tokens) and x.finished))

        played(play, granule=granule)
    assert ends[0] == pytest.approx(0.001 + 100 * 0.011)
    # The rest of the wait of 0.1 s, and a prefill of some 36 tokens.
    assert ends[1] == pytest.approx(ends[0] + 0.1, abs=0.02)


def test_the_trainers_machine_never_generates_while_it_trains() -> None:
    times: dict[str, float] = {}

    async def play(desk: Desk, worker: SimWorker, loop: VirtualLoop) -> None:
        learner = LinkedTrainer(
            Service(fixed_s=1.0, each_s=1.0, update_s=3.0), TokenSchedule(Lengths(median=1, sigma=0), granule=1,
            prompt_tokens=1, max_tokens=9),
        )  # fmt: skip
        learner.local = lambda: worker
        await desk.link.send(m.Assign(work=(work(1),)))
        await asyncio.sleep(0.5)
        await learner._obey(m.Update(step=None, next_task=None))
        times["trained"] = loop.time()
        await asyncio.sleep(5)

    desk = played(play)
    assert times["trained"] == pytest.approx(0.507 + 3.0), "it begins when the step under way has ended"
    made = [t for t, x in desk.heard if isinstance(x, m.Tokens)]
    assert not [t for t in made if 0.51 < t < 3.5]
    assert made[-1] == pytest.approx(1.101 + 3.0), "and generating goes on from there"


def test_killed_its_link_is_cut_and_what_it_made_has_come() -> None:
    async def play(desk: Desk, worker: SimWorker, _: VirtualLoop) -> None:
        await desk.link.send(m.Assign(work=(work(1),)))
        await asyncio.sleep(0.5)
        worker.kill()
        await asyncio.sleep(5)

    desk = played(play)
    assert isinstance(desk.heard[-1][1], LinkClosed)
    assert desk.heard[-1][0] == pytest.approx(0.5)
    assert sum(sum(f.counts) for f in desk.of(m.Tokens)) == int((0.5 - 0.001) / 0.011)
    assert len(desk.hellos) == 1, "it does not come back"


def test_a_flapping_worker_dials_again_with_its_weights() -> None:
    async def play(desk: Desk, worker: SimWorker, _: VirtualLoop) -> None:
        await desk.link.send(m.Load(version=3, digest="c", url=""))
        await asyncio.sleep(1)
        worker.flap(2.0)
        await asyncio.sleep(5)

    desk = played(play)
    assert [(h.version, h.digest) for h in desk.hellos] == [(-1, ""), (3, "c")]


def test_a_newer_load_takes_the_place_of_one_under_way() -> None:
    async def play(desk: Desk, worker: SimWorker, _: VirtualLoop) -> None:
        await desk.link.send(m.Load(version=1, digest="a", url=""))
        await asyncio.sleep(0.3)
        await desk.link.send(m.Load(version=2, digest="b", url=""))
        await asyncio.sleep(2)

    assert [x.version for x in played(play).of(m.Loaded)] == [2]


def test_a_wire_keeps_order_and_its_latency() -> None:
    async def main(loop: VirtualLoop) -> None:
        heard: list[tuple[float, object]] = []
        ended: list[str] = []
        wire = SimLink("w", lambda x: heard.append((loop.time(), x)), ended.append, 0.25)
        for n in range(20):
            await wire.send(n)
            wire.say(-n)
        assert [await wire.receive() for _ in range(20)] == [-n for n in range(20)]
        assert heard == [(0.25, n) for n in range(20)]
        await wire.close("enough")
        with pytest.raises(LinkClosed, match="enough"):
            await wire.send(1)
        with pytest.raises(LinkClosed, match="enough"):
            await wire.receive()
        await asyncio.sleep(0)
        assert ended == ["enough"]

    loops.run(main)


# behind the product's dispatch


def later(at_s: float, what: Callable[[Simulation], None]) -> Callable[[Simulation], None]:
    return lambda s: asyncio.get_running_loop().call_later(at_s, what, s) and None


STAYS = {"trace": {"nodes": 0}, "fleet": {"workers": 3, "price_usd_per_h": 5.0}}


def test_a_frozen_worker_is_given_up_and_comes_back_as_another(simulated: Simulated) -> None:
    def freeze(s: Simulation) -> None:
        worker = s.machines.workers["w1"]
        worker.freeze()
        asyncio.get_running_loop().call_later(6.0, worker.thaw)

    done, log = simulated(later(3.0, freeze), run={"steps": 6}, **STAYS)
    names = [(e["name"], e.get("worker")) for e in log]
    assert ("worker_suspect", "w1") in names
    assert ("worker_lost", "w1") in names
    assert ("worker_joined", "w1#2") in names
    lost = next(e for e in log if e["name"] == "worker_lost")
    assert 2.2 <= lost["m"] - 3.0 < 3.0, "after fleet.gone_s of silence"
    assert done.dispatch.members.all["w1#2"].generated > 0


def test_a_short_freeze_only_makes_it_suspect(simulated: Simulated) -> None:
    def freeze(s: Simulation) -> None:
        s.machines.workers["w1"].freeze()
        asyncio.get_running_loop().call_later(1.6, s.machines.workers["w1"].thaw)

    _, log = simulated(later(3.0, freeze), run={"steps": 4}, **STAYS)
    names = [e["name"] for e in log]
    assert "worker_suspect" in names
    assert "worker_well" in names
    assert "worker_lost" not in names


def test_flapping_loses_no_token(simulated: Simulated) -> None:
    def flap(s: Simulation) -> None:
        s.machines.workers["w1"].flap(0.2)
        asyncio.get_running_loop().call_later(0.7, flap, s)

    done, log = simulated(later(1.0, flap), run={"steps": 4}, **STAYS)
    assert sum(e["name"] == "worker_lost" for e in log) > 8
    steps = [e for e in log if e["name"] == "step"]
    assert all(e["responses"] == 64 and e["lost_tokens"] == 0 for e in steps)
    assert done.dispatch.ledger.counts.moved > 0


def test_one_that_comes_late_is_used_in_the_step_it_comes_in(simulated: Simulated) -> None:
    done, log = simulated(run={"steps": 1}, sim={"boot_s": 1.0, "trainer_slots": 16}, **STAYS)
    [step] = [e for e in log if e["name"] == "step"]
    joined = [e["m"] for e in log if e["name"] == "worker_joined" and e["worker"] == "w1"]
    assert joined == [pytest.approx(1.0)]
    assert done.dispatch.members.all["w1"].generated > 0
    assert step["m"] > 1.0


def test_one_that_is_warned_leaves_in_time(simulated: Simulated) -> None:
    trace = {"mean_up_s": 20.0, "mean_down_s": 4.0}
    _, log = simulated(run={"steps": 8}, trace=trace, sim={"notice_s": 8.0})
    assert any(e["name"] == "worker_warned" for e in log)
    assert any(e["name"] == "worker_left" for e in log)
    early = [e for e in log if e["name"] == "worker_lost" and e["s"] > 8.5]
    assert not early, "only one that was taken right after it came is lost"
