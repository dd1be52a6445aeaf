"""One simulated worker: every message, and every failure, alone and with the product's dispatch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest

from tests.support.fleets.restarts import RestartingSimulation
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.sim.core import loop as loops
from windfall.sim.core.draws import LogNormalLengths
from windfall.sim.core.link import SimLink
from windfall.sim.core.loop import VirtualLoop
from windfall.sim.core.run import Simulation
from windfall.sim.core.token_schedule import PolicyTokens, TokenSchedule
from windfall.sim.machines.acceptance import DraftAcceptance
from windfall.sim.machines.linked_trainer import LinkedTrainer
from windfall.sim.machines.weight_store import StoreNetwork, WeightStore
from windfall.sim.machines.worker import SimWorker, WorkerSpec
from windfall.step_time import StepTime
from windfall.types import Lease, Sampling

SERVICE = StepTime(fixed_s=0.01, each_s=0.001, prefill_s=0.0001)
Simulated = Callable[..., Any]
ONE_TOKEN = {"": PolicyTokens(lengths=LogNormalLengths(median=1, sigma=0), prompt_tokens=1, max_tokens=9)}


class FakeDispatch:
    """Takes the place of dispatch: keeps the link and all messages."""

    def __init__(self) -> None:
        self.hellos: list[m.Hello] = []
        self.received: list[tuple[float, Any]] = []
        self.link: Any = None

    async def attend(self, link: Any, hello: m.Hello) -> None:
        self.link = link
        self.hellos.append(hello)
        loop = asyncio.get_running_loop()
        try:
            while True:
                message = await link.receive()
                self.received.append((loop.time(), message))
        except LinkClosed as e:
            self.received.append((loop.time(), e))

    def messages(self, kind: type) -> list[Any]:
        return [x for _, x in self.received if isinstance(x, kind)]


def work(handle: int, position: int = 0, most: int = 1000) -> m.Work:
    prompt = (2, *[1] * position)
    return m.Work(
        handle=handle, prompt=b"".join(n.to_bytes(4, "little") for n in prompt), position=position, seed=handle,
        max_tokens=most - position, sampling=Sampling(), stop=(0,),
    )  # fmt: skip


def load(version: int) -> m.Load:
    """A full copy of 50 bytes, from the trainer."""
    digest = f"v{version}"
    route = m.ReadRoute(
        sources=(m.SourceRef(id="trainer", kind="trainer", location="trainer"),),
        parts=(m.RoutePart(start=0, stop=50, source=0),),
    )
    file = m.FileRef(digest=digest, nbytes=50)
    return m.Load(version=version, digest=digest, files=(m.FileRoute(file=file, route=route),))


def simulate(
    play: Callable[[FakeDispatch, SimWorker, VirtualLoop], Any], *, granule: int = 1, length: float = 100.0,
    acceptance: DraftAcceptance | None = None, lends: bool = False,
) -> FakeDispatch:  # fmt: skip
    async def main(loop: VirtualLoop) -> FakeDispatch:
        dispatch = FakeDispatch()
        lengths = LogNormalLengths(median=length, sigma=0.0)
        tokens = {"": PolicyTokens(lengths=lengths, prompt_tokens=10, max_tokens=1000)}
        token_schedule = TokenSchedule(tokens, granule=granule, acceptance=acceptance)
        spec = WorkerSpec(
            name="w", lease=Lease(), service=SERVICE, slots=8, net=StoreNetwork(), down_per_s=100.0,
            quantum_s=0.2 if granule > 1 else 0.0, lends=lends,
        )  # fmt: skip
        assert spec.net is not None
        WeightStore(net=spec.net, location="trainer").hold([load(n).files[0].file for n in range(4)])
        worker = SimWorker(spec, token_schedule, dispatch.attend, started_s=0.0)
        worker.dial()
        await asyncio.sleep(0)
        await play(dispatch, worker, loop)
        return dispatch

    return loops.run(main)


@pytest.mark.parametrize("kind", [k for k in get_args(m.ToWorker) if k not in (m.Challenge, m.Welcome)])
@pytest.mark.parametrize("busy", [False, True])
def test_every_order_of_the_controller_is_executed(kind: type, busy: bool) -> None:
    """Challenge and Welcome belong to authentication, which an in-memory link does not have."""
    orders = {
        m.Refused: m.Refused(why="no"), m.Assign: m.Assign(work=(work(7),)), m.Cancel: m.Cancel(handles=(1,)),
        m.Release: m.Release(handles=(1,)), m.Load: load(2), m.Pause: m.Pause(),
        m.Resume: m.Resume(), m.Drain: m.Drain(why="go"),
        m.SiblingTokens: m.SiblingTokens(group="7", id="7/1", position=0, tokens=b""),
        m.Routed: m.Routed(file="b", route=m.ReadRoute(sources=(), parts=())),
    }  # fmt: skip

    async def play(dispatch: FakeDispatch, worker: SimWorker, _: VirtualLoop) -> None:
        await dispatch.link.send(load(1))
        if busy:
            await dispatch.link.send(m.Assign(work=(work(1), work(2))))
        await asyncio.sleep(0.605)
        await dispatch.link.send(orders[kind])
        await asyncio.sleep(5)
        assert worker.finished == (kind in (m.Refused, m.Drain))

    dispatch = simulate(play)
    assert dispatch.messages(m.Loaded)[0].pulled_bytes == 50
    assert dispatch.messages(m.Loaded)[0].s == pytest.approx(0.5, abs=0.012), "50 bytes, then the end of a step"
    assert len(dispatch.messages(m.Loaded)) == (2 if kind is m.Load else 1)
    assert bool(dispatch.messages(m.Left)) == (kind is m.Drain)
    assert bool(dispatch.messages(m.Released)) == (kind is m.Release)
    ended = sum(len(f.finished) for f in dispatch.messages(m.Tokens))
    stopped = {m.Refused: 2, m.Cancel: 1, m.Release: 1, m.Pause: 2, m.Drain: 2}.get(kind, 0)
    assert ended == (2 - stopped if busy else 0) + (kind is m.Assign)


def test_order_waits_for_the_end_of_the_step() -> None:
    async def play(dispatch: FakeDispatch, worker: SimWorker, _: VirtualLoop) -> None:
        await dispatch.link.send(m.Assign(work=(work(1),)))
        await asyncio.sleep(0.0305)  # a step takes 11 ms, after a prefill of 1 ms
        await dispatch.link.send(m.Release(handles=(1,)))
        await asyncio.sleep(1)

    dispatch = simulate(play)
    at_s = next(t for t, x in dispatch.received if isinstance(x, m.Released))
    assert at_s == pytest.approx(0.034)
    tokens = dispatch.messages(m.Tokens)
    assert sum(sum(f.counts) if f.counts else len(f.handles) for f in tokens) == 3


@pytest.mark.parametrize("lends", [False, True])
def test_lender_drafts_nothing(lends: bool) -> None:
    """Others generate two tokens per step."""
    ended_s: list[float] = []

    async def play(dispatch: FakeDispatch, worker: SimWorker, _: VirtualLoop) -> None:
        await dispatch.link.send(m.Assign(work=(work(1),)))
        await asyncio.sleep(5)
        ended_s.extend(at_s for at_s, x in dispatch.received if isinstance(x, m.Tokens) and x.finished)

    simulate(play, acceptance=DraftAcceptance(points=[(0, 2.0)], verify_rows=1), lends=lends)
    assert ended_s == [pytest.approx(0.001 + 100 * 0.011 / (1 if lends else 2))]


@pytest.mark.parametrize("granule", [1, 7])
def test_response_that_moves_takes_as_long_as_one_that_stays(granule: int) -> None:
    """The generated part of a granule is not generated again."""
    ends: list[float] = []
    for moves in (False, True):

        async def play(dispatch: FakeDispatch, worker: SimWorker, loop: VirtualLoop, moves: bool = moves) -> None:
            await dispatch.link.send(m.Assign(work=(work(1),)))
            await asyncio.sleep(0.45)  # 41 steps, in the middle of a granule of 7
            if moves:
                await dispatch.link.send(m.Release(handles=(1,)))
                await asyncio.sleep(0.1)
                sent = sum(sum(f.counts) if f.counts else len(f.handles) for f in dispatch.messages(m.Tokens))
                again = work(2, sent)
                again = m.Work(**{f: getattr(again, f) for f in again.__struct_fields__ if f != "seed"}, seed=1)
                await dispatch.link.send(m.Assign(work=(again,)))
            await asyncio.sleep(5)
            ends.append(next(t for t, x in dispatch.received if isinstance(x, m.Tokens) and x.finished))

        simulate(play, granule=granule)
    assert ends[0] == pytest.approx(0.001 + 100 * 0.011)
    # The wait of 0.1 s, and a prefill of about 36 tokens.
    assert ends[1] == pytest.approx(ends[0] + 0.1, abs=0.02)


def test_trainer_machine_never_generates_while_it_trains() -> None:
    times: dict[str, float] = {}

    async def play(dispatch: FakeDispatch, worker: SimWorker, loop: VirtualLoop) -> None:
        trainer = LinkedTrainer(
            StepTime(fixed_s=1.0, each_s=1.0, update_s=3.0),
            TokenSchedule(ONE_TOKEN, granule=1),
        )  # fmt: skip
        trainer.local = lambda: worker
        await dispatch.link.send(m.Assign(work=(work(1),)))
        await asyncio.sleep(0.5)
        await trainer._execute(m.OptimStep(id="1"))
        times["trained"] = loop.time()
        await asyncio.sleep(5)

    dispatch = simulate(play)
    assert times["trained"] == pytest.approx(0.507 + 3.0), "it begins when the current step has ended"
    token_times = [t for t, x in dispatch.received if isinstance(x, m.Tokens)]
    assert not [t for t in token_times if 0.51 < t < 3.5]
    assert token_times[-1] == pytest.approx(1.101 + 3.0), "and generation continues from there"


def test_a_trainer_uploads_damaged_files_again_and_goes_on() -> None:
    controller: Any = FakeDispatch()

    async def play(_: FakeDispatch, __: SimWorker, ___: VirtualLoop) -> None:
        trainer = LinkedTrainer(
            StepTime(fixed_s=1.0, each_s=1.0, update_s=3.0),
            TokenSchedule(ONE_TOKEN, granule=1),
        )  # fmt: skip
        trainer.attend = controller.attend
        trainer.start()
        await asyncio.sleep(1)
        await controller.link.send(m.UploadAgain(files=("a", "b")))
        await controller.link.send(m.Save(id="1"))
        await asyncio.sleep(1)

    simulate(play)
    uploaded = [m.Uploaded(file=file, bytes=0, s=0.0) for file in ("a", "b")]
    assert [message for _, message in controller.received] == [*uploaded, m.Saved(path="nowhere")]


def test_tokens_of_a_killed_worker_have_been_sent() -> None:
    async def play(dispatch: FakeDispatch, worker: SimWorker, _: VirtualLoop) -> None:
        await dispatch.link.send(m.Assign(work=(work(1),)))
        await asyncio.sleep(0.5)
        worker.kill()
        await asyncio.sleep(5)

    dispatch = simulate(play)
    assert isinstance(dispatch.received[-1][1], LinkClosed)
    assert dispatch.received[-1][0] == pytest.approx(0.5)
    assert sum(sum(f.counts) for f in dispatch.messages(m.Tokens)) == int((0.5 - 0.001) / 0.011)
    assert len(dispatch.hellos) == 1, "it does not dial again"


def test_flapping_worker_dials_again_with_its_weights() -> None:
    async def play(dispatch: FakeDispatch, worker: SimWorker, _: VirtualLoop) -> None:
        await dispatch.link.send(load(3))
        await asyncio.sleep(1)
        worker.flap(2.0)
        await asyncio.sleep(5)

    dispatch = simulate(play)
    assert [h.held for h in dispatch.hellos] == [{}, {"": (3, "v3")}]


def test_newer_load_replaces_the_current_one() -> None:
    async def play(dispatch: FakeDispatch, worker: SimWorker, _: VirtualLoop) -> None:
        await dispatch.link.send(load(1))
        await asyncio.sleep(0.3)
        await dispatch.link.send(load(2))
        await asyncio.sleep(2)

    assert [x.version for x in simulate(play).messages(m.Loaded)] == [2]


def test_link_keeps_order_and_latency() -> None:
    async def main(loop: VirtualLoop) -> None:
        delivered: list[tuple[float, object]] = []
        ended: list[str] = []
        link = SimLink("w", lambda x: delivered.append((loop.time(), x)), ended.append, 0.25)
        for n in range(20):
            await link.send(n)
            link.send_to_controller(-n)
        assert [await link.receive() for _ in range(20)] == [-n for n in range(20)]
        assert delivered == [(0.25, n) for n in range(20)]
        await link.close("enough")
        with pytest.raises(LinkClosed, match="enough"):
            await link.send(1)
        with pytest.raises(LinkClosed, match="enough"):
            await link.receive()
        await asyncio.sleep(0)
        assert ended == ["enough"]

    loops.run(main)


# with the product's dispatch


def later(at_s: float, action: Callable[[Simulation], None]) -> Callable[[Simulation], None]:
    return lambda s: asyncio.get_running_loop().call_later(at_s, action, s) and None


STAYS = {"trace": {"nodes": 0}, "fleet": {"workers": 3, "price_usd_per_h": 5.0}}


def test_frozen_worker_is_lost_and_joins_under_a_new_id(restarting: Simulated) -> None:
    def freeze(s: RestartingSimulation) -> None:
        worker = s.fleet.workers["w1"]
        worker.freeze()
        asyncio.get_running_loop().call_later(6.0, worker.thaw)

    done, log = restarting(later(3.0, freeze), run={"steps": 6}, **STAYS)
    names = [(e["name"], e.get("worker")) for e in log]
    assert ("worker_suspect", "w1") in names
    assert ("worker_lost", "w1") in names
    assert ("worker_joined", "w1#2") in names
    lost = next(e for e in log if e["name"] == "worker_lost")
    assert 2.2 <= lost["m"] - 3.0 < 3.0, "after fleet.gone_s of silence"
    assert done.dispatch.members.all["w1#2"].generated > 0


def test_short_freeze_only_makes_a_worker_suspect(restarting: Simulated) -> None:
    def freeze(s: RestartingSimulation) -> None:
        s.fleet.workers["w1"].freeze()
        asyncio.get_running_loop().call_later(1.6, s.fleet.workers["w1"].thaw)

    _, log = restarting(later(3.0, freeze), run={"steps": 4}, **STAYS)
    names = [e["name"] for e in log]
    assert "worker_suspect" in names
    assert "worker_well" in names
    assert "worker_lost" not in names


def test_flapping_loses_no_token(simulated: Simulated) -> None:
    def flap(s: Simulation) -> None:
        s.fleet.workers["w1"].flap(0.2)
        asyncio.get_running_loop().call_later(0.7, flap, s)

    done, log = simulated(later(1.0, flap), run={"steps": 4}, **STAYS)
    assert sum(e["name"] == "worker_lost" for e in log) > 8
    steps = [e for e in log if e["name"] == "step"]
    assert all(e["responses"] == 64 and e["lost_tokens"] == 0 for e in steps)
    assert done.dispatch.ledger.counts.moved > 0


def test_late_worker_is_used_in_the_step_it_joins_in(simulated: Simulated) -> None:
    done, log = simulated(run={"steps": 1}, sim={"boot_s": 1.0, "trainer_slots": 16}, **STAYS)
    [step] = [e for e in log if e["name"] == "step"]
    joined = [e["m"] for e in log if e["name"] == "worker_joined" and e["worker"] == "w1"]
    assert joined == [pytest.approx(1.0)]
    assert done.dispatch.members.all["w1"].generated > 0
    assert step["m"] > 1.0


def test_warned_worker_leaves_in_time(simulated: Simulated) -> None:
    trace = {"mean_up_s": 20.0, "mean_down_s": 4.0}
    _, log = simulated(run={"steps": 8}, trace=trace, sim={"notice_s": 8.0})
    assert any(e["name"] == "worker_warned" for e in log)
    assert any(e["name"] == "worker_left" for e in log)
    early = [e for e in log if e["name"] == "worker_lost" and e["s"] > 8.5]
    assert not early, "only a machine preempted right after it came up is lost"


def test_worker_that_is_asked_to_join_again_forgets_its_base_when_it_loads_another() -> None:
    tokens = PolicyTokens(lengths=LogNormalLengths(median=100, sigma=0), prompt_tokens=10, max_tokens=1000)

    async def main(loop: VirtualLoop) -> tuple[FakeDispatch, SimWorker]:
        dispatch, net = FakeDispatch(), StoreNetwork()
        spec = WorkerSpec(
            name="w", lease=Lease(), service=SERVICE, slots=8, net=net, down_per_s=100.0,
            bases={"solver": "solver", "verifier": "verifier"}, base_services={"verifier": SERVICE.slower(2.0)},
        )  # fmt: skip
        WeightStore(net=net, location="trainer").hold([load(n).files[0].file for n in (1, 2)])
        worker = SimWorker(spec, TokenSchedule({"solver": tokens, "verifier": tokens}, granule=1), dispatch.attend,
                           started_s=0.0)  # fmt: skip
        worker.dial()
        for version, policy in ((1, "solver"), (2, "verifier")):
            await asyncio.sleep(2)
            await dispatch.link.send(msgspec.structs.replace(load(version), policy=policy))
            await asyncio.sleep(2)
            await dispatch.link.send(m.Assign(work=(msgspec.structs.replace(work(version), policy=policy),)))
            await asyncio.sleep(5)
            await dispatch.link.send(m.Drain(why="switch", again=True))
            await asyncio.sleep(0.5)
            await dispatch.link.close()
        await asyncio.sleep(2)
        return dispatch, worker

    dispatch, worker = loops.run(main)
    assert [set(hello.held) for hello in dispatch.hellos] == [set(), {"solver"}, {"verifier"}]
    assert [frame.versions for frame in dispatch.messages(m.Tokens) if frame.finished] == [
        {"solver": 1},
        {"verifier": 2},
    ]
    assert worker.store is not None
    assert [file.digest for file in worker.store.complete] == ["v2"], "one full model at a time"
    assert not worker.finished
