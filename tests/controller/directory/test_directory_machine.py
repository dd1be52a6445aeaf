"""The rules of the directory, over any course of workers, versions, loads and failures."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fleets.directory_rules import check
from windfall.controller.directory.directory import Directory
from windfall.controller.directory.holders import WeightHolder
from windfall.controller.directory.routes import MAX_FAN_OUT
from windfall.controller.directory.traffic import TrafficPrices
from windfall.link.messages import (
    FileRef,
    FileRoute,
    HolderFiles,
    Holding,
    PublishedFiles,
    Ranges,
    ReadRoute,
    SourceUse,
)
from windfall.weights.ranges import covers, normal, size, subtract

COPY, DELTA = 40 * 10**9, 10**6
WORKERS = st.sampled_from([f"w{n}" for n in range(7)])
BUCKET = "file:///bucket"
WHYS = ["gone", "unreachable", "stalled", "slow", "wrong", ""]


class Worker:
    """What a worker truly has."""

    def __init__(self, holder: WeightHolder) -> None:
        self.holder = holder
        self.copy = ""
        self.wanted = ""
        self.files: dict[str, FileRef] = {}
        """Of its load, in order."""
        self.had: dict[str, Ranges] = {}
        """What it had of them when the load began."""
        self.routes: dict[str, ReadRoute] = {}
        self.received: dict[str, int] = {}

    def begin(self, wanted: str, routes: tuple[FileRoute, ...], had: dict[str, Ranges]) -> None:
        self.wanted = wanted
        self.had = had
        self.files = {r.file.digest: r.file for r in routes}
        self.routes = {r.file.digest: r.route for r in routes}
        self.received = dict.fromkeys(self.files, 0)

    def missing(self, file: str) -> Ranges:
        need, left, out = subtract(((0, self.files[file].nbytes),), self.had.get(file, ())), self.received[file], []
        for start, stop in need:
            out.append((min(stop, start + left), stop))
            left = max(0, left - (stop - start))
        return normal(out)


class DirectoryMachine(RuleBasedStateMachine):
    @initialize(
        shards=st.integers(1, 2), bucket=st.booleans(), copy=st.sampled_from([COPY, 10**6]), workers=st.integers(0, 7)
    )
    def start(self, shards: int, bucket: bool, copy: int, workers: int) -> None:
        self.copy_bytes = copy
        self.directory = Directory(TrafficPrices(), region="us")
        self.workers: dict[str, Worker] = {}
        self.bucket, self.version = bucket, 0
        self.connected = False
        self.tame = True
        """All workers can reach each other, and nobody has complained."""
        self.now_s = 0.0
        self.publish(shards)
        for n in range(workers):
            self.join(f"w{n}", "us" if n < 4 else "eu", "", "public", 0)

    # What the trainer does

    def published(self) -> PublishedFiles:
        versions = range(max(1, self.version - 3), self.version + 1)
        copy = FileRef(digest=f"c{self.version}", nbytes=self.copy_bytes)
        deltas = [FileRef(digest=f"d{v}", nbytes=DELTA, before=f"c{v - 1}", after=f"c{v}") for v in versions[1:]]
        files, half = (copy, *deltas), self.copy_bytes // 2
        if self.shards == 1:
            holders = [HolderFiles(location="t0", holds=tuple(Holding(file=f) for f in files))]
        else:
            cut = lambda f: min(half, f.nbytes // 2)  # noqa: E731
            holders = [
                HolderFiles(location="t0", holds=tuple(Holding(file=f, ranges=((0, cut(f)),)) for f in files)),
                HolderFiles(location="t1", holds=tuple(Holding(file=f, ranges=((cut(f), f.nbytes),)) for f in files)),
            ]
        if self.bucket:
            holders.append(HolderFiles(location=BUCKET, holds=tuple(Holding(file=f) for f in files)))
        bucket = BUCKET if self.bucket else ""
        return PublishedFiles(
            version=self.version, digest=copy.digest, files=files, holders=tuple(holders), bucket=bucket
        )

    @rule(shards=st.integers(1, 2))
    def publish(self, shards: int) -> None:
        self.shards = shards
        self.version += 1
        self.connected = True
        self.directory.publish(self.published(), self.now_s)

    @precondition(lambda self: self.connected)
    @rule()
    def trainer_leaves(self) -> None:
        self.connected = False
        for n in range(self.shards):
            self.directory.leave(f"#t{n}")

    @precondition(lambda self: not self.connected)
    @rule()
    def trainer_returns(self) -> None:
        self.connected = True
        self.directory.publish(self.published(), self.now_s)

    # What workers do

    @rule(
        id=WORKERS,
        region=st.sampled_from(["us", "us", "eu"]),
        machine=st.sampled_from(["", "m0", "m1"]),
        reach=st.sampled_from(["public"] * 5 + ["nat", "none"]),
        version=st.integers(0, 5),
    )
    def join(self, id: str, region: str, machine: str, reach: str, version: int) -> None:
        at = region + machine if machine else id
        holder = WeightHolder(
            id=id,
            kind="peer",
            location="" if reach == "none" else f"http://{id}",
            region=region,
            machine=region + machine if machine else "",
            seen="nat" if reach == "nat" else at,
            own=at,
        )
        self.tame &= reach == "public"
        worker = self.workers[id] = Worker(holder)
        holds = ()
        if 0 < version <= self.version:
            worker.copy = f"c{version}"
            holds = (Holding(file=FileRef(digest=worker.copy, nbytes=self.copy_bytes)),)
        self.directory.join(holder, holds)

    @rule(id=WORKERS)
    def leave(self, id: str) -> None:
        self.workers.pop(id, None)
        self.directory.leave(id)

    def present(self, id: str) -> Worker | None:
        return self.workers.get(id)

    @rule(id=WORKERS)
    def load(self, id: str) -> None:
        if (worker := self.present(id)) is None:
            return
        wanted = f"c{self.version}"
        held = {f"{name}": k.held.get(id, ()) for name, k in self.directory._files.items()}
        routes = self.directory.load(id, wanted)
        worker.begin(wanted, routes, {r.file.digest: held.get(r.file.digest, ()) for r in routes})
        at = worker.copy
        for route in routes:  # the files lead from what it has to what is wanted
            assert not route.file.before or route.file.before == at, (at, routes)
            at = route.file.after or route.file.digest
        assert at == wanted
        if any(not r.route.sources and worker.missing(r.file.digest) for r in routes):
            assert len(routes) == 1  # it waits for the copy
        if any(not r.file.after for r in routes):
            worker.copy = ""  # it may have overwritten it when this load fails

    @rule()
    def load_all(self) -> None:
        for id in self.workers:
            self.load(id)
            self.keeps_its_rules()

    def reading(self, data: Any) -> Worker | None:
        busy = [w for w in self.workers.values() if w.files]
        return data.draw(st.sampled_from(busy)) if busy else None

    @rule(data=st.data(), why=st.sampled_from(WHYS), share=st.floats(0, 1))
    def ask(self, data: Any, why: Any, share: float) -> None:
        if (worker := self.reading(data)) is None:
            return
        file = data.draw(st.sampled_from(list(worker.files)))
        sources = worker.routes[file].sources
        if worker.routes[file].parts:  # it may have more than it has reported, and not all
            left = size(worker.missing(file))
            worker.received[file] += min(int(share * left), left - 1)
        used = ()
        if sources and why:
            self.tame = False
            source = data.draw(st.sampled_from(sources)).id
            used = (SourceUse(source=source, bytes=1000, s=1.0, why=why),)
        self._ask(worker, file, used)
        if used and why in ("wrong", "unreachable") and used[0].source in self.workers:
            assert used[0].source not in [s.id for s in worker.routes[file].sources]

    def _ask(self, worker: Worker, file: str, used: tuple[SourceUse, ...]) -> None:
        missing = worker.missing(file)
        received = missing[0][0] if missing else worker.files[file].nbytes
        route = self.directory.ask(worker.holder.id, file, used, received)
        worker.routes[file] = route
        if missing and route.parts:
            assert covers(normal((p.start, p.stop) for p in route.parts), missing)
            assert route.parts[0].start == missing[0][0]  # it goes on at its first missing byte

    @rule(data=st.data())
    def ask_for_the_copy(self, data: Any) -> None:
        """Its deltas cannot be applied."""
        if (worker := self.reading(data)) is None or worker.wanted in worker.files:
            return
        worker.copy = ""
        if worker.wanted != f"c{self.version}":  # that copy is gone: the load has failed
            assert not self.directory.ask(worker.holder.id, worker.wanted, (), 0).sources
            self.stop(worker)
            return
        copy = FileRef(digest=worker.wanted, nbytes=self.copy_bytes)
        worker.begin(copy.digest, (FileRoute(file=copy, route=ReadRoute(sources=(), parts=())),), {})
        self._ask(worker, copy.digest, ())

    @rule(data=st.data(), share=st.floats(0, 1))
    def progress(self, data: Any, share: float) -> None:
        if (worker := self.reading(data)) is None:
            return
        total = sum(size(subtract(((0, f.nbytes),), worker.had.get(f.digest, ()))) for f in worker.files.values())
        left = received = max(int(share * total), sum(worker.received.values()))
        for name, file in worker.files.items():
            worker.received[name] = min(left, size(subtract(((0, file.nbytes),), worker.had.get(name, ()))))
            left -= worker.received[name]
        self.directory.progress(worker.holder.id, received)

    @rule(data=st.data(), why=st.sampled_from(["", "", "wrong", "unreachable"]))
    def loaded(self, data: Any, why: Any) -> None:
        if (worker := self.reading(data)) is None:
            return
        self.now_s += 1
        used = tuple(
            SourceUse(source=s.id, bytes=10, s=1.0, why=why)
            for route in worker.routes.values()
            for s in route.sources[:1]
        )
        self.tame &= not why
        self.directory.loaded(worker.holder.id, worker.wanted, used, self.now_s, apply_s=1.0)
        worker.copy = worker.wanted
        worker.begin("", (), {})

    @rule(data=st.data())
    def stopped(self, data: Any) -> None:
        if (worker := self.reading(data)) is not None:
            self.stop(worker)

    def stop(self, worker: Worker) -> None:
        self.directory.stopped(worker.holder.id)
        worker.begin("", (), {})

    @rule()
    def controller_restarts(self) -> None:
        """A directory of Hellos and the trainer's: every worker that can use a source gets a route."""
        self.directory = Directory(TrafficPrices(), region="us")
        for worker in self.workers.values():
            holds = [Holding(file=FileRef(digest=worker.copy, nbytes=0))] if worker.copy and not worker.files else []
            for name, file in worker.files.items():
                have = subtract(((0, file.nbytes),), worker.missing(name))
                if have:
                    holds.append(Holding(file=file, ranges=have))
            self.directory.join(worker.holder, holds)
            whole = [name for name, file in worker.files.items() if not file.after and not worker.missing(name)]
            worker.copy = worker.copy if not worker.files else (whole or [""])[0]
            worker.begin("", (), {})
        self.connected = True
        self.directory.publish(self.published(), self.now_s)
        for id, worker in self.workers.items():
            self.load(id)
            assert all(worker.routes[f].sources or not worker.missing(f) for f in worker.files)

    # The rules

    @invariant()
    def keeps_its_rules(self) -> None:
        directory = self.directory
        check(directory)
        for id, route in directory.routed():
            assert route.file.digest in self.workers[id].files
            self.workers[id].routes[route.file.digest] = route.route
        for id, worker in self.workers.items():  # what is being overwritten is served no more
            served = {name for name, known in directory._files.items() if id in known.held and name.startswith("c")}
            assert not worker.files or served <= worker.files.keys()
        self.everyone_has_a_route()
        self.the_trainer_feeds_few()
        self.nothing_needed_expires()

    def everyone_has_a_route(self) -> None:
        contacts, files = self.directory._contacts, self.directory._files
        for id, worker in self.workers.items():
            for file in worker.files:
                if files[file].readings[id].parts:
                    continue
                self._ask(worker, file, ())  # as it does each second
                held = files[file].held
                usable = normal(p for other in held if contacts.usable(id, other) for p in held[other])
                if missing := worker.missing(file):
                    assert worker.routes[file].sources or not covers(usable, missing), (id, file)
        check(self.directory)
        self.directory.routed()

    def the_trainer_feeds_few(self) -> None:
        readers: dict[tuple[str, str], int] = {}
        for id, worker in self.workers.items():
            for name, known in self.directory._files.items():
                if id in known.readings and any(part.source in ("#t0", "#t1") for part in known.readings[id].parts):
                    key = name, worker.holder.region
                    readers[key] = readers.get(key, 0) + 1
        for (_, region), count in readers.items():
            assert not self.tame or count <= (MAX_FAN_OUT if region == "us" else 1)

    def nothing_needed_expires(self) -> None:
        needed = self.directory.needed()
        assert not self.connected or f"c{self.version}" in needed
        for worker in self.workers.values():
            assert not worker.files or worker.files.keys() <= needed
            if self.connected and worker.copy not in ("", f"c{self.version}"):
                chain = {f"d{v}" for v in range(int(worker.copy[1:]) + 1, self.version + 1)}
                if chain <= self.directory._files.keys() and self.copy_bytes == COPY and not worker.files:
                    assert chain <= needed


DirectoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDirectory = DirectoryMachine.TestCase
