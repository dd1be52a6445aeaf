"""The ranks of a trainer on several machines, as the supervisor sees them: each one dials in, like a worker.

    machine 0    windfall train RECIPE.toml                       supervisor and controller
    machine 0    windfall trainer --join http://HOST:PORT ...     rank 0 (join.py)
    machine 1    windfall trainer --join http://HOST:PORT ...     rank 1

Every rank keeps one link to the supervisor, at `train.rendezvous`. Rules:

- a rank proves that it knows the secret of the trainer (trainer.secret) before it learns anything;
- the trainer starts once all ranks have joined. Their numbers are those that torchrun or srun gave them. Rank 0 must be
  on the machine of the supervisor, because it opens the run's folder;
- a link stands for one start of one process (rank_group.py). The process ends when the rank says so or the link is
  lost, and the rank joins again for the next start. Closing the link lets the rank kill its process;
- every start has a meeting point of its own;
- a rank whose number is taken is told to try again later, so a spare machine can take the place of a lost one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
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
from windfall.trainer.ranks.rank_place import RankPlace

HEARTBEAT_S = 10.0
"""Seconds between two pings of a rank. One that does not answer a ping within half of that is lost."""
REJOIN_S = 10.0
"""Seconds in which ranks join again after a start, before the run asks for them or ends without telling them."""
MAX_FRAME_BYTES = 1 << 20


@dataclass(kw_only=True, eq=False)
class JoinedRank:
    """A rank that has joined, while its link lasts."""

    hello: m.RankHello
    host: str
    link: SocketLink
    process: Handle | None = None
    """Its process, once it was told to start it."""
    code: int | None = None
    """Exit status of the process, if the rank has said it."""
    closing: asyncio.Future[None] | None = None

    def start(self, base: str) -> Handle:
        name = RankPlace(rank=self.hello.rank, size=self.hello.size, base=base).name
        self.process = Handle(name=name, pid=0, send=self._stop)
        return self.process

    def _stop(self, number: int) -> None:
        """Ranks have nothing to save, so every signal ends them."""
        del number
        if self.closing is None:
            self.closing = asyncio.ensure_future(self.link.close("this start of the trainer ends"))


class JoinedRanks:
    def __init__(self, recipe: Recipe, folder: Path, notice: Callable[[str], None]) -> None:
        self._recipe = recipe
        self._base = next(iter(recipe.bases()))  # there is one: the recipe checks it
        self._folder = folder.resolve()
        self._notice = notice
        self._secret = auth.read_token(folder / "trainer.secret")
        self._weights_key = auth.weights_key(auth.read_token(folder / "token"))
        self._host, port = network.split_endpoint(recipe.train.rendezvous)
        self._joined: dict[int, JoinedRank] = {}
        self._size = 0 if recipe.train.ranks == "auto" else recipe.train.ranks
        """Number of all ranks; 0 until the first one has said it."""
        self._changed = asyncio.Event()
        self._returning: set[int] = set()
        """Ranks whose process has ended, and that will join again."""
        self._ending = False
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
        self._ending = True
        await asyncio.gather(*(self._end(rank) for rank in self._joined.values()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REJOIN_S):
                while self._returning:
                    await self._change()
        await self._port.close()

    async def _end(self, rank: JoinedRank) -> None:
        with contextlib.suppress(LinkClosed):
            await rank.link.send(m.RunEnded(why="the run has ended"))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def start(self) -> RankGroup:
        ranks = await self._wait()
        try:
            host = network.resolve(self._host)
            port = network.free_port(host)
        except OSError as e:
            fix = "Set it to an address of this machine."
            raise WindfallError(f"cannot listen: {e}", where="train.rendezvous", fix=fix) from e
        rendezvous = f"tcp://{network.in_url(host)}:{port}/{os.urandom(16).hex()}"
        machines = list(dict.fromkeys(rank.hello.machine for rank in ranks))
        group = RankGroup([rank.start(self._base) for rank in ranks])
        for rank in ranks:
            beside = [other for other in ranks if other.hello.machine == rank.hello.machine]
            order = m.StartRank(
                rendezvous=rendezvous,
                machine=machines.index(rank.hello.machine),
                local_rank=beside.index(rank),
                local_size=len(beside),
            )
            with contextlib.suppress(LinkClosed):  # then its process counts as lost
                await rank.link.send(order)
        return group

    async def _wait(self) -> list[JoinedRank]:
        """All ranks, in order. WindfallError if they do not join in time."""
        limit_s = self._recipe.train.machine_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REJOIN_S):
                        while self._returning:
                            await self._change()
                if missing := self._missing():
                    self._notice(f"waiting for {missing} of the trainer; run for each: {self.command}")
                while self._missing():
                    await self._change()
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
        if why := self._contradiction(hello):
            self._problem = why
            await handshake.refuse(link, why)
            return
        if hello.rank in self._joined:
            await handshake.refuse(link, f"rank {hello.rank} has already joined", again=True)
            return
        rank = self._joined[hello.rank] = JoinedRank(hello=hello, host=clip(hello.name), link=link)
        self._size = hello.size
        try:
            await self._serve(rank, proof)
        finally:
            self._left(rank)

    def _contradiction(self, hello: m.RankHello) -> str:
        """Why this rank contradicts the recipe or another rank, for people; "" if it does not."""
        who = f"{clip(hello.name)}: it is"
        if self._size and hello.size != self._size:
            said = "" if self._recipe.train.ranks == "auto" else f" (train.ranks = {self._size})"
            return f"{who} one of {hello.size} ranks, but this trainer has {self._size}{said}"
        for number, other in self._joined.items():
            here, there = ((h.machine, h.local_rank) for h in (hello, other.hello))
            if number != hello.rank and here == there:
                beside = f"rank {number} is on the same machine and has the same local rank, {hello.local_rank}"
                return f"{who} rank {hello.rank}, but {beside}: give each rank of a machine its own LOCAL_RANK"
        return ""

    async def _serve(self, rank: JoinedRank, proof: bytes) -> None:
        link, number = rank.link, rank.hello.rank
        welcome = m.RankWelcome(
            proof=proof, recipe=dump_recipe(self._recipe), folder=str(self._folder), weights_key=self._weights_key
        )
        await link.send(welcome)
        self._returning.discard(number)
        self._changed.set()
        if self._ending:
            await self._end(rank)
        else:
            self._notice(f"rank {number} of {rank.hello.size} ({rank.host}) has joined the trainer")
        while True:
            message: Any = await link.receive()
            match message:
                case m.RankStarted() if rank.process is not None:
                    rank.process.pid = message.pid
                case m.RankEnded() if rank.process is not None:
                    rank.code = message.code
                    if message.what:
                        where = f"rank {number} on {rank.host}: {message.where}"
                        error = WindfallError(message.what, where=where, fix=message.fix)
                        folders.fail(self._folder, folders.trainer_role(self._base), error)
                    return
                case m.RankEnded():
                    self._problem = f"{rank.host}: {clip(message.what)}"
                    self._notice(f"rank {number} cannot join the trainer: {self._problem}")
                    return
                case _:
                    raise LinkClosed(f"{link.peer}: unexpected {type(message).__name__}")

    def _left(self, rank: JoinedRank) -> None:
        number = rank.hello.rank
        del self._joined[number]
        if rank.code is not None or rank.closing is not None:
            self._returning.add(number)
        elif not self._ending:
            self._notice(f"rank {number} ({rank.host}) has left the trainer")
        if not (self._joined or self._returning) and self._recipe.train.ranks == "auto":
            self._size = 0
        self._changed.set()
        if rank.process is not None:
            rank.process.ended(-signal.SIGKILL if rank.code is None else rank.code)
