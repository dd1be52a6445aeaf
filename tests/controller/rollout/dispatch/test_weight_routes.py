"""Workers load through the directory: links that answer Load by script, on a real Dispatch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.directory_rules import check
from windfall.controller.directory.directory import Directory
from windfall.controller.directory.traffic import TrafficPrices
from windfall.controller.fleet_report import FleetReport
from windfall.controller.remote_trainer import RemoteTrainer
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer
from windfall.events.log import EventLog, read
from windfall.link import messages as m
from windfall.link.memory import pair
from windfall.page.history import RunHistory
from windfall.recipe.sections import Recipe
from windfall.run.views import summary, top
from windfall.sim.core import loop as loops
from windfall.types import LOCAL, Lease

GB = 10**9
NAN = float("nan")
COPIES = {v: m.FileRef(digest=f"c{v}", nbytes=16 * GB) for v in (1, 2)}
MOVED = "32.0 GB from the trainer, 32.0 GB from workers, 16.0 GB across regions ($0.32)"
DELTA = m.FileRef(digest="d2", nbytes=GB // 10, before="c1", after="c2")


def published(version: int) -> m.PublishedFiles:
    files = (COPIES[version], DELTA) if version == 2 else (COPIES[1],)
    holder = m.HolderFiles(location="http://_:1", holds=tuple(m.Holding(file=f) for f in files))
    return m.PublishedFiles(version=version, digest=f"c{version}", files=files, holders=(holder,))


class Worker:
    """The far end of a worker's link."""

    def __init__(self, fleet: Fleet, name: str, region: str = "us", **hello: Any) -> None:
        ours, self.link = pair("controller", name)
        said = {"protocol": m.PROTOCOL, "nonce": b"", "proof": b"", "name": name, "lease": Lease(region=region)}
        at = {"location": f"http://{name}:9", "own_address": name, "machine": name}
        self.hello = m.Hello(**said, **{**at, **hello})
        self.serving = asyncio.create_task(fleet.dispatch.attend(ours, self.hello))

    async def take(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(5):
            while not isinstance(message := await self.link.receive(), kind):
                assert isinstance(message, m.Load | m.Routed), message
        return message

    async def load(self) -> tuple[m.Load, list[str]]:
        """The next Load, and the first source of each of its files."""
        load = await self.take(m.Load)
        return load, [source for each in load.files for source in firsts(each.route)]

    async def loaded(self, version: int, *used: m.SourceUse) -> None:
        await self.link.send(m.Loaded(version=version, digest=f"c{version}", slots=4, s=1.0, pulled_bytes=0, used=used))


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "events.jsonl"
        self.events = EventLog(self.log)
        self.dispatch = Dispatch(events=self.events, directories={"": Directory(TrafficPrices(), region="us")})

    def offer(self, version: int) -> None:
        self.dispatch.weights.publish(published(version))
        self.dispatch.set_offer(Offer(version=version, digest=f"c{version}"))

    async def ready(self, *workers: Worker) -> None:
        async with asyncio.timeout(5):
            while not all(self.dispatch.members.all[w.hello.name].state is WorkerState.READY for w in workers):
                await asyncio.sleep(0.001)

    def of(self, *names: str) -> list[dict[str, Any]]:
        return [e for e in read(self.log) if e["name"] in names]


def firsts(route: m.ReadRoute) -> list[str]:
    return [route.sources[part.source].id.removeprefix("#") for part in route.parts]


def use(source: str, nbytes: int, why: Any = "") -> m.SourceUse:
    source = f"#{source}" if "/" in source else source  # not a worker
    return m.SourceUse(source=source, bytes=nbytes, s=1.0, why=why)


def play(folder: Path, part: Callable[[Fleet], Awaitable[None]]) -> Fleet:
    async def scenario() -> Fleet:
        fleet = Fleet(folder)
        async with asyncio.timeout(30):
            await part(fleet)
        check(fleet.dispatch.weights.directories[""])
        return fleet

    return loops.run(lambda _: scenario())


def test_a_version_goes_from_worker_to_worker(tmp_path: Path) -> None:
    async def part(fleet: Fleet) -> None:
        names = (("a", "us"), ("b", "us"), ("e", "eu"), ("f", "eu"))
        workers = [Worker(fleet, name, region) for name, region in names]
        await asyncio.sleep(0.01)
        fleet.offer(1)
        loads = [await w.load() for w in workers]
        assert [load.files[0].file for load, _ in loads] == [COPIES[1]] * 4
        assert [sources for _, sources in loads] == [["http://_:1"], ["a"], ["http://_:1"], ["e"]]
        for worker, (_, sources) in zip(workers, loads, strict=True):
            await asyncio.sleep(1)
            await worker.loaded(1, use(sources[0], 16 * GB))
        await fleet.ready(*workers)
        now_s = asyncio.get_running_loop().time()
        report = FleetReport(Recipe(), fleet.dispatch, fleet.events)
        for usd in (0.32, 0.0):
            assert report.bill(now_s)["bill"]["holders"]["traffic"]["usd"] == {"traffic": pytest.approx(usd)}
        shown = top.table(report.snapshot(steps={"": 1}, now_s=now_s, ended=None), live=True, run=tmp_path)
        assert f"weights: version 1: {MOVED}; half after 2.0 s, all after 4.0 s" in str(shown.renderables[0])

        fleet.offer(2)
        late = Worker(fleet, "late")
        assert (await late.load())[0].files[0].file == COPIES[2]
        fleet.dispatch.weights.end_run()

    fleet = play(tmp_path, part)
    [moved] = fleet.of("weights")  # nobody has read version 2
    assert {k: moved[k] for k in ("kind", "step", "version", "readers", "trainer_bytes", "peer_bytes", "usd")} == {
        "kind": "scalar", "step": 1, "version": 1, "readers": 4, "trainer_bytes": 32 * GB, "peer_bytes": 32 * GB,
        "usd": pytest.approx(0.32),
    }  # fmt: skip
    assert [(e["worker"], e["why"]) for e in fleet.of("importer")] == [("e", "first")]
    assert dict(summary.summarize(read(fleet.log)))["weights moved"] == f"{MOVED}; slowest version: 4.0 s"
    page = RunHistory()
    for event in [*read(fleet.log), {"t": 9.0, "m": 9.0, "kind": "scalar", "name": "step", "step": 2}]:
        page.add(event)
    assert page.notes == [f"weights: version 1: {MOVED}; half after 2.0 s, all after 4.0 s"]


def test_the_next_in_line_goes_on_when_a_worker_is_lost(tmp_path: Path) -> None:
    async def part(fleet: Fleet) -> None:
        fleet.offer(1)
        seed, b, c = (Worker(fleet, name, "eu") for name in ("seed", "b", "c"))
        assert [(await w.load())[1] for w in (seed, b, c)] == [["http://_:1"], ["seed"], ["b"]]
        for worker, received in ((seed, 9), (b, 8), (c, 7)):
            stats = m.Stats(running=0, made=0, steps=0, idle_s=0.0, loading="pull", pulled_bytes=received * GB)
            await worker.link.send(stats)
        await asyncio.sleep(0.01)
        await seed.link.close("preempted")
        routed = await b.take(m.Routed)
        assert (routed.file, firsts(routed.route)) == ("c1", ["http://_:1"])

        await c.link.send(m.AskRoute(file="c1", used=(use("b", 7 * GB, "stalled"),), received=7 * GB))
        answer = await c.take(m.Routed)
        assert (firsts(answer.route), answer.route.parts[0].start) == (["http://_:1"], 7 * GB)
        await b.loaded(1, use("seed", 8 * GB), use("http://_:1", 8 * GB))
        await fleet.ready(b)

    fleet = play(tmp_path, part)
    assert [(e["worker"], e["why"], e["at_bytes"]) for e in fleet.of("importer")][:2] == [
        ("seed", "first", 0), ("b", "seed", 8 * GB),
    ]  # fmt: skip


def test_a_controller_that_starts_again_learns_what_workers_hold(tmp_path: Path) -> None:
    async def part(fleet: Fleet) -> None:
        whole = Worker(fleet, "whole", held={"": (2, "c2")}, holds=(m.Holding(file=COPIES[2]),))
        half = Worker(fleet, "half", holds=(m.Holding(file=COPIES[2], ranges=((0, 8 * GB),)),))
        old = Worker(fleet, "old", held={"": (1, "c1")}, holds=(m.Holding(file=COPIES[1]),))
        await asyncio.sleep(0.01)
        fleet.offer(2)
        assert (await whole.load())[0].files == ()
        load, sources = await half.load()
        assert (sources, load.files[0].route.parts[0].start) == (["whole"], 8 * GB)
        assert [each.file for each in (await old.load())[0].files] == [DELTA]
        await whole.loaded(2)
        await fleet.ready(whole)

    play(tmp_path, part)


def test_a_location_elsewhere_and_loopback_of_another_machine_are_no_sources(tmp_path: Path) -> None:
    async def part(fleet: Fleet) -> None:
        fleet.offer(1)
        trainer = "http://_:1"
        stranger = Worker(fleet, "a", location="http://victim:80", machine="m")
        inside = Worker(fleet, "b", location="http://127.0.0.1:9", machine="m")
        mapped = Worker(fleet, "::ffff:10.0.0.5", location="http://10.0.0.5:9", own_address="10.0.0.5")
        last = Worker(fleet, "c")
        found = [(await w.load())[1] for w in (stranger, inside, mapped, last)]
        assert found == [[trainer], [trainer], [trainer], ["::ffff:10.0.0.5"]]

    play(tmp_path, part)


def test_who_has_the_weights_of_the_trainer_reads_nothing(tmp_path: Path) -> None:
    async def part(fleet: Fleet) -> None:
        fleet.offer(1)
        local, on_other_machine = Worker(fleet, LOCAL, machine=""), Worker(fleet, f"{LOCAL}-1")
        assert (await local.load())[0].files == ()
        assert (await on_other_machine.load())[1] == ["http://_:1"]
        await local.loaded(1)
        await fleet.ready(local)

    assert not play(tmp_path, part).of("weights")


@pytest.mark.parametrize(
    "message",
    [
        m.AskRoute(file="c1", used=(use("b", -1),)),
        m.AskRoute(file="c1", used=(m.SourceUse(source="b", bytes=1, s=NAN),)),
        m.AskRoute(file="c1", received=-1),
        m.Loaded(version=1, digest="c1", slots=1, s=1.0, pulled_bytes=0, used=(use("b", -1),)),
        *(m.Loaded(version=1, digest="c1", slots=1, s=1.0, pulled_bytes=0, apply_s=s) for s in (1e-308, -1.0, NAN)),
    ],
)
def test_impossible_reports_end_the_link(tmp_path: Path, message: object) -> None:
    async def part(fleet: Fleet) -> None:
        fleet.offer(1)
        a = Worker(fleet, "a")
        await a.load()
        await a.link.send(m.AskRoute(file="never heard of"))
        assert (await a.take(m.Routed)).route.sources == ()
        await a.link.send(message)
        await a.serving

    [lost] = play(tmp_path, part).of("worker_lost")
    assert "malformed" in lost["why"]


def test_the_trainer_keeps_what_workers_may_read_and_says_what_it_uploaded(tmp_path: Path) -> None:
    async def part(fleet: Fleet) -> None:
        trainer = RemoteTrainer(fleet.dispatch.weights)
        engine = m.EngineSpec(
            model_config="{}", dtype="float32", kv_tokens=0, page_size=16, max_running=0, max_rows=0,
            deterministic=False, longest=8, wanted=1,
        )  # fmt: skip
        hello = m.TrainerHello(
            protocol=m.PROTOCOL, nonce=b"", proof=b"", step=1, next_task=1, micro_tokens=64, model="m", engine=engine,
            version=1, digest="c1", facts={}, weights=published(1),
        )  # fmt: skip
        ours, theirs = pair()
        serving = asyncio.create_task(trainer.attend(ours, hello))
        await trainer.connected(5)
        fleet.offer(1)
        worker = Worker(fleet, "a")
        await worker.load()
        fleet.dispatch.weights.directories[""]._damaged.append("c1")
        await worker.link.send(m.AskRoute(file="c1"))
        assert await theirs.receive() == m.UploadAgain(files=("c1",))
        publishing = asyncio.create_task(trainer.publish(id="p"))
        assert await theirs.receive() == m.Publish(id="p", keep=("c1",))
        await theirs.send(m.Uploaded(file="c1", bytes=5, s=0.5, error=""))
        await theirs.send(m.PublishedVersion(version=2, digest="c2", weights=published(2)))
        assert (await publishing).update_bytes == DELTA.nbytes
        assert trainer.weights == published(2)
        await theirs.close()
        await serving
        fleet.dispatch.weights.directories[""]._files["c1"].damaged = True
        ours, theirs = pair()
        serving = asyncio.create_task(trainer.attend(ours, hello))
        assert await theirs.receive() == m.UploadAgain(files=("c1",))
        await theirs.close()
        await serving

    [upload] = play(tmp_path, part).of("bucket_upload")
    assert (upload["file"], upload["bytes"], upload["s"], upload["error"]) == ("c1", 5, 0.5, "")
