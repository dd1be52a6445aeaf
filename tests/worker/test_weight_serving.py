"""Workers that serve what they have pulled, through a listening controller and its directory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch  # noqa: F401  # before the threads that would import it

from tests.support.fleets.listening_controller import TOKEN, Site, opened
from tests.support.weights.weight_shelves import ServedShelf, some_bytes
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer
from windfall.link import auth
from windfall.link import messages as m
from windfall.link.socket import UNAUTHENTICATED_BYTES
from windfall.types import Lease
from windfall.weights.held_files import HeldFile, HeldFiles
from windfall.weights.manifest import MAX_CHUNKS, SEAL_BYTES, Manifest, make
from windfall.weights.pulling.pull import Puller
from windfall.worker import controller_client


def publish(site: Site, made: Manifest, location: str) -> None:
    holders = (m.HolderFiles(location=location, holds=(m.Holding(file=made.ref),)),)
    files = m.PublishedFiles(version=1, digest=made.digest, files=(made.ref,), holders=holders)
    site.dispatch.weights.publish(files)
    site.dispatch.set_offer(Offer(version=1, digest=made.digest))


def test_a_worker_reads_from_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's server is gone when the second worker joins."""
    monkeypatch.setattr("tests.support.weights.weight_shelves.KEY", auth.weights_key(TOKEN))
    trainer = ServedShelf()
    made = trainer.hold(some_bytes(500_000))
    # One machine, as both are on loopback, but not this one: they read over HTTP, not from memory.
    monkeypatch.setattr(controller_client, "machine", lambda: "another machine")

    async def main() -> None:
        async with opened(tmp_path) as (site, start):
            publish(site, made, trainer.ref.location)

            def join(name: str) -> Puller:
                puller = Puller(key=auth.weights_key(TOKEN))
                worker: Any = start(name=name, files=puller.files)
                worker.client.puller = worker.client._pullers[""] = puller
                return puller

            first = join("a")
            await site.until(lambda: site.state("a") is not None and first.held, "the first has the version")
            await site.until(lambda: "a" in holders(site, made.digest), "the directory knows")
            hello = site.hellos[0]
            assert hello.location.startswith("http://127.0.0.1:")
            assert (hello.own_address, hello.holds) == ("127.0.0.1", ())
            await asyncio.to_thread(trainer.close)
            second = join("b")
            await site.until(lambda: second.held, "the second has it, too")
            assert {use.source for use in second._used} == {"a"}
            assert site.hellos[1].location != hello.location

    asyncio.run(main())


def holders(site: Site, digest: str) -> dict[str, Any]:
    member = site.dispatch.members.all.get("a")
    loaded = member is not None and member.state is not WorkerState.GONE
    return site.dispatch.weights.directories[""]._files[digest].held if loaded else {}


def many_holes(seed: int, change: str) -> HeldFile:
    """A file of 1 TiB of which every other chunk is missing."""
    count = MAX_CHUNKS
    names = {"before": f"{seed:064x}", "after": change, "result": b"x"}
    hashes = {"chunks": seed.to_bytes(8, "little") * count, "seals": bytes(SEAL_BYTES * count)}
    made = make(nbytes=count << 26, chunk_bytes=1 << 26, **hashes, **names)
    file = HeldFile(made, None)  # type: ignore[arg-type]
    for chunk in range(0, count, 2):
        file.add(chunk)
    return file


def test_a_worker_with_many_parts_of_many_files_can_join(tmp_path: Path) -> None:
    """What it says before it is known fits into the limit, with every field as long as it may be."""

    async def main() -> None:
        async with opened(tmp_path) as (site, start):
            files = HeldFiles()
            for seed in range(controller_client.MOST_FILES + 5):
                files.add(many_holes(seed, "f" * 64))
            lease = Lease(device="d" * 128, region="r" * 128)
            worker = start(name="n" * 64, files=files, lease=lease)
            await site.until(lambda: site.hellos or worker.running.done(), "the worker has joined")
            (hello,) = site.hellos
            assert [len(each.ranges) for each in hello.holds] == [64] * 32
            longest = {
                "location": "l" * 128,
                "machine": "m" * 128,
                "held": {"p" * 32: (1, "g" * 128)},
                "own_address": "a" * 45,
            }
            size = len(m.encode(msgspec.structs.replace(hello, **longest)))
            assert UNAUTHENTICATED_BYTES // 2 < size < UNAUTHENTICATED_BYTES

    asyncio.run(main())
