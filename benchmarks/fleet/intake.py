"""Tokens per second that one controller accepts: the first table of benchmarks/fleet/costs.py.

In process: encoded frames are decoded, handled by a Dispatch, accepted by its Ledger and journaled. Every worker sends
one frame per round for all of its responses. This uses one core and no sockets.

Over links: the same controller behind its real port and gate. A second process dials with many WebSockets and sends
frames as fast as the controller accepts them. The result has both the CPU time of the controller and the wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import os
import pstats
import random
import statistics
import sys
import tempfile
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

import msgspec

from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.journal import Journal
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.members import Patience
from windfall.controller.workers.versions import Offer
from windfall.events.log import EventLog
from windfall.link import handshake
from windfall.link import messages as m
from windfall.link.gate import Gate, Terms
from windfall.link.socket import Dialer, Port, Route
from windfall.types import Lease, Sampling

VOCABULARY = 50_000
TOKEN = "a token for this benchmark only"
ENGINE = m.EngineSpec(
    model_config="{}", dtype="float32", kv_tokens=0, page_size=16, max_running=0, max_rows=64, deterministic=False,
    longest=8, wanted=1,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    tok_per_s: float
    """Tokens per second of the controller's CPU time."""
    frame_us: float
    wall_tok_per_s: float


class NoOwner:
    """The owner of responses that nobody waits for."""

    def turn_ended(self, id: str) -> None: ...
    def rejected(self, id: str, why: str) -> None: ...


def episode(id: str) -> Episode:
    return Episode(
        id=id, prompt=(1, 2, 3), seed=0, max_tokens=1 << 20, sampling=Sampling(), stop=frozenset((1, 2))
    )  # fmt: skip


def frame(handles: tuple[int, ...], position: int, count: int) -> bytes:
    """The frame of one engine step of a worker, with `count` tokens for each of its responses."""
    rng, total = random.Random(position), len(handles) * count
    return m.encode(
        m.Tokens(
            version=0, handles=handles, positions=(position,) * len(handles),
            counts=() if count == 1 else (count,) * len(handles),
            tokens=array("I", (rng.randrange(3, VOCABULARY) for _ in range(total))).tobytes(),
            logprobs=array("f", (-rng.random() for _ in range(total))).tobytes(), finished={},
        )
    )  # fmt: skip


def dispatch(folder: Path, journaled: bool) -> Dispatch:
    journal = Journal(folder / "journal", "benchmark") if journaled else None
    if journal is not None:
        journal.open(0)
    patience = Patience(suspect_s=60.0, gone_s=120.0)
    return Dispatch(events=EventLog(folder / "events.jsonl"), journal=journal, patience=patience, vocabulary=VOCABULARY)


async def in_process(
    folder: Path, *, workers: int, each: int, count: int, rounds: int, journaled: bool, profile: bool = False
) -> Taken:
    """The figures of the median round."""
    d = dispatch(folder, journaled)
    members, frames = [], []
    for w in range(workers):
        member = d.members.join(f"w{w}", Lease(), 0.0)
        d.members.pull(member.id, 0.0)
        d.members.loaded(member.id, 0, "d", each, 0.0)
        d.accounts.join(0.0, member.id, kind="spot", usd_per_h=None)
        members.append(member)
        for r in range(each):
            d.ledger.open(episode(f"{w}/{r}"))
        names = {}
        for r in range(each):
            d.ledger.queues[""].popleft()
            names[d.ledger.assign(f"{w}/{r}", member.id, 0).handle] = f"{w}/{r}"
        if d.journal is not None:
            d.journal.write_assigned(names)
        frames.append([frame(tuple(names), k * count, count) for k in range(rounds)])
    decode = msgspec.msgpack.Decoder(m.FromWorker).decode
    gc.collect()
    gc.freeze()  # the frames above belong to the benchmark, not to the controller
    profiler, took, walls = cProfile.Profile(), [], []
    for k in range(rounds):
        if profile:
            profiler.enable()
        started, wall = time.process_time(), time.perf_counter()
        for w, member in enumerate(members):
            d._handle(member, decode(frames[w][k]))
        if d.journal is not None:
            d.journal.flush()
        took.append(time.process_time() - started)
        walls.append(time.perf_counter() - wall)
        profiler.disable()
    gc.unfreeze()
    made = workers * each * count
    assert d.ledger.counts.accepted == made * rounds
    d.ledger.check()
    if profile:
        shares(profiler)
    if d.journal is not None:
        d.journal.close()
    round_s = statistics.median(took)
    return Taken(
        tok_per_s=made / round_s, frame_us=1e6 * round_s / workers, wall_tok_per_s=made / statistics.median(walls)
    )


def shares(profiler: cProfile.Profile, lines: int = 8) -> None:
    """Print the share of time by function. The profiler makes calls look more expensive than loops."""
    found: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = pstats.Stats(profiler).stats  # pyright: ignore
    total = sum(own for _, _, own, _, _ in found.values())
    for (file, _, name), (_, calls, own, _, _) in sorted(found.items(), key=lambda i: -i[1][2])[:lines]:
        print(
            f"    {100 * own / total:5.1f} %  {Path(file).name + ': ' if file != '~' else ''}{name}  ({calls:,} calls)"
        )


# over links


async def over_links(folder: Path, *, links: int, each: int, count: int, rounds: int, journaled: bool) -> Taken:
    d = dispatch(folder, journaled)
    gate = Gate("benchmark", TOKEN, log=d._events.instant, max_workers=links)
    gate.terms = {"": Terms(model="m", engine=ENGINE, heartbeat_s=1.0)}
    route = Route(
        receives=m.FromWorker, max_frame_bytes=m.MAX_FRAME_BYTES, handler=lambda link: gate.worker(link, d.attend)
    )  # fmt: skip
    port = Port("127.0.0.1", 0, {"/worker": route}, None)
    await port.open()
    listener = NoOwner()
    d.set_offer(Offer(version=0, digest="d"))
    command = [
        sys.executable, __file__, "--url", f"http://127.0.0.1:{port.port}", "--links", str(links), "--each", str(each),
        "--count", str(count), "--rounds", str(rounds),
    ]  # fmt: skip
    driver = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    watching = asyncio.create_task(d.watch())
    try:
        async with asyncio.timeout(120):
            while sum(w.slots > 0 for w in d.members.here()) < links:
                await asyncio.sleep(0.05)
            for w in range(links):
                for r in range(each):
                    d.open(episode(f"{w}/{r}"), listener)
            expected = links * each * count * rounds
            while d.ledger.counts.accepted == 0:
                await asyncio.sleep(0.001)
            first, started, wall = d.ledger.counts.accepted, time.process_time(), time.perf_counter()
            while d.ledger.counts.accepted < expected:
                await asyncio.sleep(0.005)
            took_s, wall_s = time.process_time() - started, time.perf_counter() - wall
    finally:
        watching.cancel()
        if driver.returncode is None:
            driver.terminate()
        await driver.wait()
        await port.close()
    made = expected - first
    frames = made / each / count
    return Taken(tok_per_s=made / took_s, frame_us=1e6 * took_s / frames, wall_tok_per_s=made / wall_s)


async def drive(url: str, links: int, each: int, count: int, rounds: int) -> None:
    """The second process: `links` workers that send their frames as fast as the controller accepts them."""
    await asyncio.gather(*(one(url, f"w{n}", each, count, rounds) for n in range(links)))


async def one(url: str, name: str, each: int, count: int, rounds: int) -> None:
    dialer = Dialer(url, "/worker", m.ToWorker, ssl=None)
    link = await dialer.dial()
    await handshake.join(link, handshake.WORKER, TOKEN, lambda **proof: m.Hello(name=name, **proof))
    handles: list[int] = []
    while len(handles) < each:
        match message := await link.receive():
            case m.Load():
                await link.send(
                    m.Loaded(version=message.version, digest=message.digest, slots=each, s=0.0, pulled_bytes=0)
                )
            case m.Assign():
                handles += [w.handle for w in message.work]
    frames = [frame(tuple(handles), k * count, count) for k in range(rounds)]
    await asyncio.sleep(1.0)  # until all workers have built their frames
    for data in frames:
        await link._socket.send_bytes(data)
    await link.receive()  # wait until the controller ends


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory if possible, because the disk is not part of the measurement."""
    return tempfile.TemporaryDirectory(prefix="windfall-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


def main() -> None:
    p = argparse.ArgumentParser(
        description="Run the sending process of over_links; started by benchmarks/fleet/costs.py."
    )
    p.add_argument("--url", required=True)
    for name in ("--links", "--each", "--count", "--rounds"):
        p.add_argument(name, type=int, required=True)
    try:
        asyncio.run(drive(**vars(p.parse_args())))
    except Exception as e:  # fault boundary: the controller closes the links at the end
        if os.environ.get("WINDFALL_TRACE"):
            raise
        del e


if __name__ == "__main__":
    main()
