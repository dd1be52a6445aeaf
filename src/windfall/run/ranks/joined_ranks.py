"""The ranks of a trainer on several machines, as the supervisor sees them: each one dials in, like a worker.

    machine 0    windfall train RECIPE.toml                       supervisor and controller
    machine 0    windfall trainer --join http://HOST:PORT ...     rank 0 (join.py)
    machine 1    windfall trainer --join http://HOST:PORT ...     rank 1

Every rank keeps one link to the supervisor, at `train.rendezvous`. Rules:

- a rank proves that it knows the secret of the trainer (trainer.secret) before it learns anything;
- the trainer starts once all ranks have joined. Their numbers are those that torchrun or srun gave them. Rank 0 must be
  on the machine of the supervisor, because it opens the run's folder;
- a link stands for one process (rank_group.py). The process ends when the rank says so or the link is lost; killing it
  tells the rank to kill it;
- every start has a number and a meeting point of its own. What a rank says about an earlier start is ignored;
- a rank whose number is taken is told to try again later, so a spare machine can take the place of a lost one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.link import auth, handshake, network, tls
from windfall.link import messages as m
from windfall.link.base import LinkClosed, clip
from windfall.link.socket import Port, Route, SocketLink
from windfall.processes.process import Handle
from windfall.recipe.file import dump_recipe
from windfall.recipe.sections import Recipe
from windfall.run.ranks.rank_group import RankGroup

HEARTBEAT_S = 10.0
"""Seconds between two pings of a rank. One that does not answer a ping within half of that is lost."""
STOP_S = 6.0
"""Seconds that a rank has to kill its process. Then its link is closed, and it counts as lost."""
MAX_FRAME_BYTES = 1 << 20


class JoinedRank:
    """A rank that has joined, while its link lasts."""

    def __init__(self, hello: m.RankHello, link: SocketLink) -> None:
        self.rank = hello.rank
        self.size = hello.size
        self.machine = hello.machine
        self.host = clip(hello.name)
        self._link = link
        self._process: Handle | None = None
        self._attempt = 0
        self._lost = False
        self._sending: set[asyncio.Task[None]] = set()

    def start(self, order: m.StartRank) -> Handle:
        self._attempt = order.attempt
        name = f"rank-{self.rank}" if self.rank else "trainer"
        self._process = Handle(name=name, pid=0, send=self._stop)
        if self._lost:
            self._process.ended(-signal.SIGKILL)
        else:
            self._in_background(self._send(order))
        return self._process

    def process_of(self, attempt: int) -> Handle | None:
        running = attempt == self._attempt and self._process is not None and self._process.running
        return self._process if running else None

    def lost(self) -> None:
        self._lost = True
        if self._process is not None:
            self._process.ended(-signal.SIGKILL)

    async def end(self, why: str) -> None:
        with contextlib.suppress(LinkClosed, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._link.send(m.RunEnded(why=why))

    def _stop(self, number: int) -> None:
        """Ranks have nothing to save, so every signal ends them."""
        del number
        self._in_background(self._stop_in_time(self._attempt))

    async def _stop_in_time(self, attempt: int) -> None:
        await self._send(m.StopRank(attempt=attempt))
        await asyncio.sleep(STOP_S)
        if self.process_of(attempt) is not None:
            self.lost()
            await self._link.close("the process of the rank did not end")

    async def _send(self, message: object) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await self._link.send(message)
        except (LinkClosed, TimeoutError):
            self.lost()
            await self._link.close("the rank does not read")

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


class JoinedRanks:
    def __init__(self, recipe: Recipe, folder: Path, notice: Callable[[str], None]) -> None:
        self._recipe = recipe
        self._folder = folder.resolve()
        self._notice = notice
        self._secret = auth.read_token(folder / "trainer.secret")
        self._weights_key = auth.weights_key(auth.read_token(folder / "token"))
        self._host, port = network.split_endpoint(recipe.train.rendezvous)
        self._joined: dict[int, JoinedRank] = {}
        self._size = 0 if recipe.train.ranks == "auto" else recipe.train.ranks
        """Number of all ranks; 0 until the first one has said it."""
        self._changed = asyncio.Event()
        self._attempt = 0
        self._closing = False
        self._problem = ""
        """Why the last rank that tried could not join."""
        context = tls.server_context(recipe.fleet)
        route = Route(
            receives=m.FromRank, max_frame_bytes=MAX_FRAME_BYTES, handler=self._attend, heartbeat_s=HEARTBEAT_S
        )
        fix = "Set train.rendezvous to an address of this machine, or stop the process that uses the port."
        self._port = Port(self._host, port, {"/ranks": route}, context, fix=fix)
        url = f"{'https' if context else 'http'}://{network.in_url(self._host)}:{port}"
        self.command = f"windfall trainer --join {url} --token {folder / 'trainer.secret'}"
        """What to run for every rank."""

    async def __aenter__(self) -> JoinedRanks:
        await self._port.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        await asyncio.gather(*(rank.end("the run has ended") for rank in self._joined.values()))
        await self._port.close()

    async def start(self) -> RankGroup:
        ranks = await self._wait()
        self._attempt += 1
        try:
            host = network.resolve(self._host)
            port = network.free_port(host)
        except OSError as e:
            fix = "Set it to an address of this machine."
            raise WindfallError(f"cannot listen: {e}", where="train.rendezvous", fix=fix) from e
        rendezvous = f"tcp://{network.in_url(host)}:{port}/{os.urandom(16).hex()}"
        machines = list(dict.fromkeys(rank.machine for rank in ranks))
        handles: list[Handle] = []
        for rank in ranks:
            beside = [other.rank for other in ranks if other.machine == rank.machine]
            order = m.StartRank(
                attempt=self._attempt,
                rendezvous=rendezvous,
                machine=machines.index(rank.machine),
                local_rank=beside.index(rank.rank),
                local_size=len(beside),
            )
            handles.append(rank.start(order))
        return RankGroup(handles)

    async def _wait(self) -> list[JoinedRank]:
        """All ranks, in order. WindfallError if they do not join in time."""
        limit_s, said = self._recipe.train.machine_timeout_s, False
        try:
            async with asyncio.timeout(limit_s):
                while missing := self._missing():
                    if not said:
                        said = True
                        self._notice(f"waiting for {missing} of the trainer; run for each: {self.command}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            what = f"waited {limit_s:g} s for the trainer's ranks: {self._missing()} did not join"
            what += f" (last problem: {self._problem})" if self._problem else ""
            fix = f"Run for each: {self.command} (with a copy of that file). Then `windfall resume` continues the run."
            raise WindfallError(what, where=f"train.rendezvous = {self._recipe.train.rendezvous}", fix=fix) from None
        return [self._joined[number] for number in range(self._size)]

    def _missing(self) -> str:
        """The ranks that have not joined, for people; "" if all have."""
        late = [str(number) for number in range(self._size) if number not in self._joined]
        if not self._size:
            return "all ranks"
        return f"rank{'s' * (len(late) > 1)} {', '.join(late)} of 0 to {self._size - 1}" if late else ""

    async def _attend(self, link: SocketLink) -> None:
        try:
            hello, proof = await handshake.challenge(
                link, handshake.RANK, self._recipe.run.name, lambda _: self._secret
            )
        except handshake.PeerRefused as e:
            self._problem = f"{link.peer}: {e}"
            fix = "" if e.again else "; `windfall trainer` needs trainer.secret of the run, not its token"
            await handshake.refuse(link, f"{e}{fix}", again=e.again)
            return
        link.authenticated()
        if self._size and hello.size != self._size:
            self._problem = f"{clip(hello.name)}: it is one of {hello.size} ranks, but this trainer has {self._size}"
            await handshake.refuse(link, self._problem)
            return
        if hello.rank in self._joined:
            await handshake.refuse(link, f"rank {hello.rank} has already joined", again=True)
            return
        rank = self._joined[hello.rank] = JoinedRank(hello, link)
        self._size = hello.size
        try:
            await self._serve(rank, link, proof)
        finally:
            rank.lost()
            del self._joined[rank.rank]
            if not self._joined and self._recipe.train.ranks == "auto":
                self._size = 0
            self._changed.set()
            if not self._closing:
                self._notice(f"rank {rank.rank} ({rank.host}) has left the trainer")

    async def _serve(self, rank: JoinedRank, link: SocketLink, proof: bytes) -> None:
        welcome = m.RankWelcome(
            proof=proof, recipe=dump_recipe(self._recipe), folder=str(self._folder), weights_key=self._weights_key
        )
        await link.send(welcome)
        self._notice(f"rank {rank.rank} of {rank.size} ({rank.host}) has joined the trainer")
        self._changed.set()
        while True:
            message: Any = await link.receive()
            if isinstance(message, m.RankEnded) and not message.attempt:
                self._problem = f"{rank.host}: {clip(message.what)}"
                self._notice(f"rank {rank.rank} cannot join the trainer: {self._problem}")
                return
            if not isinstance(message, m.RankStarted | m.RankEnded):
                raise LinkClosed(f"{link.peer}: unexpected {type(message).__name__}")
            process = rank.process_of(message.attempt)
            if process is None:
                continue
            if isinstance(message, m.RankStarted):
                process.pid = message.pid
                continue
            if message.what:
                where = f"rank {rank.rank} on {rank.host}: {message.where}"
                folders.fail(self._folder, "trainer", WindfallError(message.what, where=where, fix=message.fix))
            process.ended(message.code)
