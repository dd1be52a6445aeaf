"""Real processes that publish together, for tests: every one has a publisher, and a weight server where it needs one.

    with Writers(4, machines=[0, 0, 1, 1]) as writers:
        writers.publish(0, seed=7)            on all of them at the same time
        writers.call(2, corrupt, 100)         a function of (state, *args) on one of them

They exchange objects through pipes, with rank 0 in the middle. A rank that ends closes its pipe, which ends the
exchange on all others.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash

from tests.support.ranks.rank_processes import CONTEXT
from tests.support.weights.weight_shelves import load_for
from windfall.link.messages import AskRoute, Load, Routed
from windfall.weights.manifest import Manifest
from windfall.weights.publishing import meeting, row_writer
from windfall.weights.publishing.publish import Publisher
from windfall.weights.pulling.pull import Puller
from windfall.weights.serve import serve

KEY = "a-key-for-tests"
TIMEOUT_S = 20.0
Tensors = dict[str, torch.Tensor]


class PipeRanks:
    def __init__(self, rank: int, size: int, pipes: Sequence[Connection]) -> None:
        """`pipes`: of rank 0 to all others, in order; of another rank to rank 0."""
        self.rank, self.size, self.pipes, self.timeout_s = rank, size, pipes, TIMEOUT_S

    def all_gather(self, value: Any) -> list[Any]:
        if self.rank:
            self.pipes[0].send(value)
            values = self._receive(self.pipes[0])
            if values is None:
                raise ConnectionError("another rank is lost")
            return values
        values = [value]
        try:
            for pipe in self.pipes:
                values.append(self._receive(pipe))
        except (OSError, EOFError):
            for pipe in self.pipes:
                try:
                    pipe.send(None)
                except OSError:
                    continue
            raise
        for pipe in self.pipes:
            pipe.send(values)
        return values

    def _receive(self, pipe: Connection) -> Any:
        if not pipe.poll(self.timeout_s):
            raise TimeoutError(f"no answer within {self.timeout_s:g} s")
        return pipe.recv()


@dataclass(frozen=True)
class Shard:
    local: torch.Tensor
    shape: tuple[int, ...]
    first_row: int


class State:
    """Of one process."""

    def __init__(self, ranks: PipeRanks, where: str, options: dict[str, Any]) -> None:
        self.ranks, self.where, self.publisher, self.url = ranks, where, Publisher(ranks=ranks, **options), ""

    def serve(self) -> None:
        ready = threading.Event()

        async def run() -> None:
            server = await serve(self.publisher.files, host="127.0.0.1", port=0, key=KEY)
            self.url = f"http://127.0.0.1:{server.port}"
            ready.set()
            await asyncio.Event().wait()

        threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
        assert ready.wait(120)


def model(seed: int, share: float = 1.0) -> Tensors:
    """Weights of many shapes: fewer rows than ranks, none, no dimension; tied, transposed, of different dtypes. Those
    of another seed differ in a `share` of their elements."""
    g, h = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        t = torch.randn(*shape, generator=g)
        return torch.where(torch.rand(*shape, generator=h) < share, t + seed, t)

    embed = random(331, 600)
    return {
        "embed": embed,
        "layer.0": random(2800, 300).bfloat16(),
        "norm": random(3),
        "layer.1": random(300, 97).T,
        "one": random(1, 4000),
        "none": torch.empty(0, 3),
        "steps": torch.tensor(seed),
        "bytes": (random(1001) * 50).to(torch.int8),
        "head": embed,
    }


def shards(tensors: Tensors, rank: int, size: int) -> dict[str, Any]:
    """As FSDP2 splits them: equal numbers of rows, and the last ranks have fewer. A tensor without rows is on all."""
    out: dict[str, Any] = {}
    for name, t in tensors.items():
        if not t.dim():
            out[name] = t
            continue
        each = -(-len(t) // size)
        first = min(rank * each, len(t))
        out[name] = Shard(t[first : first + each], tuple(t.shape), first)
    return out


def moved(tensors: Tensors, where: str) -> Tensors:
    """The same tensors on a device, with the tied ones still tied."""
    made = {id(t): t.to(where) for t in tensors.values()}
    return {name: made[id(t)] for name, t in tensors.items()}


def publish(
    state: State, version: int, seed: int, share: float, die_at: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Publish this rank's rows of `model(seed, share)`. Returns what can be compared."""
    if die_at:
        step = meeting.Meeting.step

        def dying(self: Any, doing: str, work: Callable[[], Any]) -> Any:
            return step(self, doing, (lambda: os.kill(os.getpid(), signal.SIGKILL)) if doing == die_at else work)

        meeting.Meeting.step = dying  # type: ignore[method-assign]
    mine = shards(moved(model(seed, share), state.where), state.ranks.rank, state.ranks.size)
    state.publisher.publish(version, mine, **options)
    return found(state)


def found(state: State) -> dict[str, Any]:
    newest = state.publisher.readable[0]
    delta = state.publisher.delta
    return {
        "manifest": newest.manifest,
        "encoded": len(newest.manifest.encode()),
        "bytes": xxhash.xxh3_64_hexdigest(newest.buffer.data),
        "delta": delta.manifest if delta else None,
        "blob": delta.buffer.data[: delta.manifest.nbytes].tobytes() if delta else b"",
        "versions": [p.manifest.version for p in state.publisher.readable],
    }


def small_slabs(state: State) -> None:
    row_writer.SLAB_BYTES = 1024


def descriptors(state: State) -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _run(
    rank: int, pipes: Sequence[Connection], size: int, orders: Connection, where: str, options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    state = State(PipeRanks(rank, size, pipes), where, options)
    while True:
        try:
            function, args = orders.recv()
        except EOFError:
            return
        try:
            orders.send((function(state, *args), None))
        except Exception as e:
            orders.send((None, e))


class Writers:
    def __init__(self, size: int, machines: Sequence[int] | None = None, where: str = "cpu", **options: Any) -> None:
        """`machines`: of every rank; the first rank on each has a server. `where`: the device of the tensors."""
        machines = machines or [0] * size
        pairs = [CONTEXT.Pipe() for _ in range(size - 1)]
        self.processes, self.orders = [], []
        for rank in range(size):
            pipes = [a for a, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
            ours, theirs = CONTEXT.Pipe()
            here = {"chunk_bytes": 1 << 14, "on_machine": f"machine {machines[rank]}", **options}
            process = CONTEXT.Process(target=_run, args=(rank, pipes, size, theirs, where, here), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.orders.append(ours)
        for pair in pairs:
            for end in pair:
                end.close()
        self.leaders = [machines.index(m) for m in sorted(set(machines))]
        for leader in self.leaders:
            self.call(leader, State.serve)
        self.urls = [self.call(leader, _url) for leader in self.leaders]

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        self.orders[rank].send((function, args))
        return self._answer(rank)

    def all(self, function: Callable[..., Any], *args: Any, **each: Any) -> list[Any]:
        """The results of all ranks; exceptions are results too. `each`: rank (as r0, r1) to its own arguments."""
        for rank, pipe in enumerate(self.orders):
            pipe.send((function, each.get(f"r{rank}", args)))
        out = []
        for rank in range(len(self.orders)):
            try:
                out.append(self._answer(rank))
            except Exception as e:
                out.append(e)
        return out

    def publish(self, version: int, seed: int = 0, share: float = 1.0, **options: Any) -> list[Any]:
        return self.all(publish, version, seed, share, "", options)

    def load(self, made: Manifest, held: str = "", urls: Sequence[str] = ()) -> Load:
        """What the controller would tell a reader with the weights `held`. `urls`: of the servers, if not their own."""
        holders = dict(zip(urls or self.urls, (self.call(leader, _holds) for leader in self.leaders), strict=True))
        return load_for(made, held, holders)

    def pull(self, puller: Puller, made: Manifest, urls: Sequence[str] = ()) -> Manifest:
        routes = {each.file.digest: each.route for each in self.load(made, "", urls).files}

        def ask(question: AskRoute) -> None:
            if question.file in routes:
                puller.reroute(Routed(file=question.file, route=routes[question.file]))

        puller.pull(self.load(made, puller.held.digest if puller.held else "", urls), ask)
        assert puller.held is not None
        return puller.held

    def _answer(self, rank: int) -> Any:
        assert self.orders[rank].poll(60), f"rank {rank} does not answer"
        result, error = self.orders[rank].recv()
        if error is not None:
            raise error
        return result

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.orders:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)


def _url(state: State) -> str:
    return state.url


def _holds(state: State) -> Any:
    return state.publisher.files.describe()
