"""The other machines of a trainer that is spread over several, as its supervisor sees them.

    machine 0   windfall train RECIPE.toml                       supervisor, controller, rank 0 and more ranks
    machine 1   windfall ranks --join http://HOST:PORT ...       rank_host.py: its ranks
    machine 2   windfall ranks --join http://HOST:PORT ...

Every other machine keeps one link to the supervisor, at `train.rendezvous`. Rules:

- a machine proves that it knows the secret of the trainer (trainer.secret) before it learns anything;
- the trainer starts once all machines have joined. Machines get numbers, and their ranks follow those of machine 0;
- for the supervisor, the ranks of a machine are one more process of the group (rank_group.py). It ends when they have
  ended there or the link is lost; killing it tells the machine to kill its ranks;
- every start has a number and a meeting point of its own. What a machine says about an earlier start is ignored;
- a spare machine is told to try again later, so it can take the place of a lost one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.link import auth, handshake, network, tls
from windfall.link import messages as m
from windfall.link.base import Link, LinkClosed, clip
from windfall.link.socket import Port, Route
from windfall.processes.process import Handle
from windfall.recipe.file import dump_recipe
from windfall.recipe.sections import Recipe

HEARTBEAT_S = 10.0
"""Seconds between two pings of a machine. One that does not answer a ping within half of that is lost."""
READY_S = 60.0
"""Seconds in which a machine that has joined must say how many ranks it has."""
STOP_S = 6.0
"""Seconds that a machine has to kill its ranks. Then its link is closed, and it counts as lost."""
MAX_FRAME_BYTES = 1 << 20


class Machine:
    """A machine that has joined, while its link lasts."""

    def __init__(self, number: int, name: str, link: Link) -> None:
        self.number, self.name, self.ranks = number, name, 0
        self._link = link
        self._handle: Handle | None = None
        self._attempt = 0
        self._closed = False

    def start(self, attempt: int, rendezvous: str, first: int, size: int) -> Handle:
        """Start its ranks. If the machine has been lost meanwhile, the returned handle has already ended."""
        self._attempt = attempt
        self._handle = Handle(name=f"machine {self.number}", pid=0, send=self._stop)
        if self._closed:
            self._handle.ended(-signal.SIGKILL)
        else:
            self._send(m.StartRanks(attempt=attempt, rendezvous=rendezvous, first=first, size=size))
        return self._handle

    def runs(self, attempt: int) -> bool:
        """Whether its ranks of this start have not ended yet."""
        return attempt == self._attempt and self._handle is not None and self._handle.running

    def ended(self, code: int) -> None:
        if self._handle is not None:
            self._handle.ended(code)

    def lost(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.ended(-signal.SIGKILL)

    async def end(self, why: str) -> None:
        with contextlib.suppress(LinkClosed, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._link.send(m.RunEnded(why=why))

    def _stop(self, number: int) -> None:
        """Ranks have nothing to save, so every signal ends them."""
        del number
        self._send(m.StopRanks(attempt=self._attempt))
        handle = self._handle

        def drop() -> None:
            if handle is not None and handle.running:
                self.lost()
                _keep(self._link.close("the ranks did not end"))

        asyncio.get_running_loop().call_later(STOP_S, drop)

    def _send(self, message: object) -> None:
        async def send() -> None:
            try:
                async with asyncio.timeout(STOP_S):
                    await self._link.send(message)
            except (LinkClosed, TimeoutError):
                self.lost()
                await self._link.close("the machine does not read")

        _keep(send())


class Machines:
    def __init__(self, recipe: Recipe, folder: Path, notice: Callable[[str], None]) -> None:
        """`notice` shows a line to the user."""
        self._recipe, self._folder, self._notice = recipe, folder, notice
        self._secret = auth.read_token(folder / "trainer.secret")
        self._weights_key = auth.weights_key(auth.read_token(folder / "token"))
        self.host, self._port_number = network.split_endpoint(recipe.train.rendezvous)
        self.wanted = recipe.train.machines - 1
        self._joined: dict[int, Machine] = {}
        """By number; some may not be ready yet."""
        self._changed = asyncio.Event()
        self._attempt, self._closing = 0, False
        self._problem = ""
        """Why the last machine that tried could not join."""
        context = tls.server_context(recipe.fleet)
        route = Route(
            receives=m.FromMachine, max_frame_bytes=MAX_FRAME_BYTES, handler=self._attend, heartbeat_s=HEARTBEAT_S
        )
        fix = "Set train.rendezvous to an address of this machine, or stop the process that uses the port."
        self._port = Port(self.host, self._port_number, {"/ranks": route}, context, fix=fix)
        self._url = f"{'https' if context else 'http'}://{network.in_url(self.host)}:{self._port_number}"

    async def __aenter__(self) -> Machines:
        await self._port.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        await asyncio.gather(*(machine.end("the run has ended") for machine in self._joined.values()))
        await self._port.close()

    @property
    def command(self) -> str:
        """What to run on the other machines."""
        return f"windfall ranks --join {self._url} --token {self._folder / 'trainer.secret'}"

    def environment(self) -> dict[str, str]:
        """For the ranks of this machine."""
        try:
            return network.socket_environment(network.resolve(self.host))
        except OSError:
            return {}

    async def wait(self) -> list[Machine]:
        """All other machines, in the order of their numbers. WindfallError if they do not join in time."""
        limit_s, said = self._recipe.train.machine_timeout_s, False
        try:
            async with asyncio.timeout(limit_s):
                while len(ready := self._ready()) < self.wanted:
                    if not said:
                        said = True
                        missing = self.wanted - len(ready)
                        self._notice(f"waiting for {missing} of {self.wanted + 1} machines; run there: {self.command}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            late = [str(n) for n in range(1, self.wanted + 1) if n not in {machine.number for machine in self._ready()}]
            what = f"waited {limit_s:g} s for the trainer's machines: "
            what += f"machine{'s' * (len(late) > 1)} {', '.join(late)} of 1 to {self.wanted} did not join"
            what += f" (last problem: {self._problem})" if self._problem else ""
            fix = f"Run there: {self.command} (with a copy of that file). Then `windfall resume` continues the run."
            raise WindfallError(what, where=f"train.rendezvous = {self._recipe.train.rendezvous}", fix=fix) from None
        return self._ready()

    def start(self, machines: list[Machine], here: int) -> tuple[str, int, list[Handle]]:
        """Start the ranks of these machines; `here`: how many this machine has. Returns where all ranks meet, their
        number, and a handle for every machine."""
        self._attempt += 1
        try:
            host = network.resolve(self.host)
            port = network.free_port(host)
        except OSError as e:
            fix = "Set it to an address of this machine."
            raise WindfallError(f"cannot listen: {e}", where="train.rendezvous", fix=fix) from e
        rendezvous = f"tcp://{network.in_url(host)}:{port}/{os.urandom(16).hex()}"
        size, first, handles = here + sum(machine.ranks for machine in machines), here, []
        for machine in machines:
            handles.append(machine.start(self._attempt, rendezvous, first, size))
            first += machine.ranks
        return rendezvous, size, handles

    def _ready(self) -> list[Machine]:
        return [self._joined[number] for number in sorted(self._joined) if self._joined[number].ranks]

    async def _attend(self, link: Link) -> None:
        """Serve the link of a machine until it ends."""
        try:
            hello, proof = await handshake.challenge(
                link, handshake.MACHINE, self._recipe.run.name, lambda _: self._secret
            )
        except handshake.PeerRefused as e:
            self._problem = f"{link.peer}: {e}"
            fix = "" if e.again else "; `windfall ranks` needs trainer.secret of the run, not its token"
            await self._refuse(link, f"{e}{fix}", again=e.again)
            return
        getattr(link, "authenticated", lambda: None)()
        number = next((n for n in range(1, self.wanted + 1) if n not in self._joined), None)
        if number is None:
            await self._refuse(link, f"the trainer has all of its {self.wanted + 1} machines", again=True)
            return
        machine = self._joined[number] = Machine(number, clip(hello.name), link)
        try:
            await self._serve(machine, link, proof)
        finally:
            machine.lost()
            self._joined.pop(number, None)
            self._changed.set()
            if machine.ranks and not self._closing:
                self._notice(f"machine {number} ({machine.name}) has left the trainer")

    async def _serve(self, machine: Machine, link: Link, proof: bytes) -> None:
        welcome = m.MachineWelcome(
            proof=proof, machine=machine.number, machines=self.wanted + 1, recipe=dump_recipe(self._recipe),
            weights_key=self._weights_key,
        )  # fmt: skip
        await link.send(welcome)
        try:
            async with asyncio.timeout(READY_S):
                ready: Any = await link.receive()
        except TimeoutError:
            self._problem = f"{machine.name}: waited {READY_S:g} s for the number of its ranks"
            return
        if not isinstance(ready, m.MachineReady) or ready.ranks < 1:
            self._problem = f"{machine.name}: {clip(getattr(ready, 'error', '') or 'it has no ranks')}"
            self._notice(f"a machine cannot join the trainer: {self._problem}")
            return
        machine.ranks = ready.ranks
        self._notice(f"machine {machine.number} ({machine.name}) has joined with {count_ranks(ready.ranks)}")
        self._changed.set()
        while True:
            message = await link.receive()
            if not isinstance(message, m.RanksEnded):
                raise LinkClosed(f"{link.peer}: unexpected {type(message).__name__}")
            if not machine.runs(message.attempt):
                continue
            if message.what:
                what, where = f"machine {machine.number}: {message.what}", f"{machine.name}: {message.where}"
                folders.fail(self._folder, "trainer", WindfallError(what, where=where, fix=message.fix))
            machine.ended(message.code)

    async def _refuse(self, link: Link, why: str, *, again: bool = False) -> None:
        with contextlib.suppress(LinkClosed, TimeoutError):
            async with asyncio.timeout(1.0):
                await link.send(m.Refused(why=clip(why), again=again))


def count_ranks(n: int) -> str:
    """
    >>> count_ranks(1), count_ranks(4)
    ('1 rank', '4 ranks')
    """
    return f"{n} rank{'s' * (n != 1)}"


_tasks: set[asyncio.Task[None]] = set()


def _keep(work: Any) -> None:
    """Run a coroutine to its end. The event loop alone would not keep it alive."""
    task = asyncio.ensure_future(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
