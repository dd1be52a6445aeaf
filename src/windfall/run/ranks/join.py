"""`windfall trainer --join URL`: one rank of a trainer on several machines. torchrun, srun, Ray or a person starts one
for every GPU, on the machine of `windfall train` and on others.

    dial ──▶ RankHello ──▶ RankWelcome(recipe) ──▶ StartRank ──▶ RankStarted ... RankEnded ──▶ dial again

- It starts the rank's process when the supervisor says so, and reports when it has ended. It never restarts it on its
  own: all ranks must start together.
- When the link ends, it kills the process and dials again. It gives up after `patience_s` without a place in the run.
- It exits with status 0 when the run has ended, or after Ctrl-C or SIGTERM; with EXIT_REFUSED if the run does not
  accept it; and with EXIT_NO_CONTROLLER if it did not find the run.
- Rank 0 works in the run's folder. The folder of any other rank holds the recipe as the run sent it, and the log. A
  temporary folder is removed at the end, unless the process has failed. The process dies with this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from windfall import backoff, devices, errors
from windfall import run_folder as folders
from windfall.devices import Place
from windfall.errors import WindfallError, describe_exit
from windfall.link import auth, handshake, invitation, network, tls
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.socket import Dialer, SocketLink
from windfall.processes import process
from windfall.processes.process import EXIT_NO_CONTROLLER, EXIT_REFUSED, Handle
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.run import liveness
from windfall.run.ranks.joined_ranks import MAX_FRAME_BYTES
from windfall.trainer.ranks.rank_place import RANK_LOST, WEIGHTS_KEY, RankPlace
from windfall.weights import buffers

RETRY_S, MAX_RETRY_S = 0.5, 5.0
"""Seconds between two attempts to join, at first and at most."""


def main(
    url: str,
    token: str,
    *,
    host: str = "",
    folder: Path | None = None,
    ca: Path | None = None,
    overrides: Sequence[str] = (),
    patience_s: float,
) -> int:
    """Run a rank until the run ends. `token`: the secret of the trainer, or the file that holds it. `overrides`: recipe
    keys that differ on this machine. Returns the exit status."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
            raise ValueError(url)
    except ValueError:
        fix = "Give http://HOST:PORT with the value of train.rendezvous."
        raise WindfallError(f"{url!r} is not the address of a trainer", where="--join", fix=fix) from None
    place = replace(RankPlace.of(os.environ), host=host or network.address_toward(str(parts.hostname), parts.port))
    secret = invitation.token(token, patience_s)
    with contextlib.nullcontext(folder) if folder is not None else temporary_folder() as folder:
        folder.mkdir(parents=True, exist_ok=True)
        context = tls.client_context(url, ca=ca)
        dialer = Dialer(url.rstrip("/"), "/ranks", m.ToRank, ssl=context, max_frame_bytes=MAX_FRAME_BYTES)
        joining = JoiningRank(dialer, secret, place, folder=folder, overrides=overrides, patience_s=patience_s)
        with folders.owned(folder, f"rank-{place.rank}"):
            return asyncio.run(errors.guard(joining.run()))


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder. It is removed afterwards, unless the rank has failed: then its log says why."""
    folder = Path(tempfile.mkdtemp(prefix="windfall-rank-"))
    try:
        yield folder
    finally:
        if not any(folder.glob(".trainer*.failure")):
            shutil.rmtree(folder, ignore_errors=True)


class JoiningRank:
    def __init__(
        self,
        dialer: Dialer,
        secret: str,
        place: RankPlace,
        *,
        folder: Path,
        overrides: Sequence[str] = (),
        patience_s: float,
    ) -> None:
        """`place`: as torchrun or srun says it."""
        self._dialer = dialer
        self._secret = secret
        self._place = place
        self._folder = folder
        self._overrides = overrides
        self._patience_s = patience_s

    async def run(self) -> int:
        loop, current = asyncio.get_running_loop(), asyncio.current_task()
        assert current is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, current.cancel)
        try:
            return await self._join_again_and_again()
        except asyncio.CancelledError:
            return 0
        finally:
            await self._dialer.close()

    async def _join_again_and_again(self) -> int:
        last_s, tries, said = time.monotonic(), 0, ""
        while time.monotonic() - last_s < self._patience_s:
            try:
                link = await self._dialer.dial(handshake.TIMEOUT_S)
                try:
                    welcome = await handshake.join(link, handshake.RANK, self._secret, self._hello)
                    tries, said = 0, ""
                    try:
                        if why := await self._serve(link, welcome):
                            self._say(why)
                            return 0
                    finally:
                        last_s = time.monotonic()
                finally:
                    await link.close()
            except LinkClosed as e:
                if isinstance(e, handshake.JoinRefused):
                    if not e.again:
                        self._say(f"refused: {e}")
                        return EXIT_REFUSED
                    last_s = time.monotonic()  # the run lives: a spare rank waits as long as it does
                if str(e) != said:  # do not repeat the same line
                    said = str(e)
                    self._say(f"no link to the run: {e}; trying again for {self._patience_s:g} s")
            await asyncio.sleep(backoff.delay_s(tries, first_s=RETRY_S, limit_s=MAX_RETRY_S))
            tries += 1
        self._say(f"waited {self._patience_s:g} s for the run at {self._dialer.url}")
        return EXIT_NO_CONTROLLER

    def _hello(self, **fields: Any) -> m.RankHello:
        p = self._place
        machine = f"{p.machine} {buffers.machine()}"
        return m.RankHello(
            name=socket.gethostname(), rank=p.rank, size=p.size, machine=machine, local_rank=p.local_rank, **fields
        )

    async def _serve(self, link: SocketLink, welcome: m.RankWelcome) -> str:
        """Run the rank's process once. Returns "" when it has ended, or the reason if the run has ended."""
        try:
            recipe, folder = self._prepare(welcome)
            self._place = replace(self._place, base=next(iter(recipe.bases())))  # a run with ranks elsewhere has one
            device = own_device(recipe, self._place)
        except WindfallError as e:
            await link.send(m.RankEnded(code=2, what=e.what))
            raise
        log = folder / f"{self._place.name}.log"
        self._say(
            f"joined the run {recipe.run.name!r} as rank {self._place.rank} of {self._place.size}; its log: {log}"
        )
        start = await self._receive(link)
        if isinstance(start, m.RunEnded):
            return start.why
        try:
            handle = self._start_process(folder, log, device, welcome.weights_key, start)
        except (OSError, WindfallError) as e:
            await link.send(m.RankEnded(code=1, what=f"the rank could not be started: {e}"))
            return ""
        watching, receiving = asyncio.create_task(self._watch(handle)), asyncio.create_task(self._receive(link))
        try:
            await link.send(m.RankStarted(pid=handle.pid))
            await asyncio.wait({watching, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():  # the run ends this start, or the link is lost
                ended = receiving.result()
                return ended.why if isinstance(ended, m.RunEnded) else ""
            code, error = watching.result(), WindfallError("")
            if self._place.rank and code > 0 and code != RANK_LOST:  # the supervisor reads that of rank 0 itself
                error = folders.failure(folder, self._place.role, code, self._place.name)
            self._say(f"rank {self._place.rank} ended: {error.what or describe_exit(code)}; waiting for the run")
            await link.send(m.RankEnded(code=code, what=error.what, where=error.where, fix=error.fix))
            return ""
        finally:
            handle.kill()
            receiving.cancel()
            await asyncio.wait({watching, receiving}, timeout=10.0)

    @staticmethod
    async def _receive(link: SocketLink) -> m.StartRank | m.RunEnded:
        message = await link.receive()
        if not isinstance(message, m.StartRank | m.RunEnded):
            raise LinkClosed(f"{link.peer}: unexpected {type(message).__name__}")
        return message

    def _prepare(self, welcome: m.RankWelcome) -> tuple[Recipe, Path]:
        """The recipe of the run, and the folder of this rank's process, which holds it."""
        if self._place.rank == 0:
            folder = Path(welcome.folder)
            if not (folder / "trainer.secret").is_file() or auth.read_token(folder / "trainer.secret") != self._secret:
                fix = "Start rank 0 on the machine of `windfall train`, and the others on any machine."
                raise WindfallError("rank 0 cannot open the folder of the run", where=str(folder), fix=fix)
            return load_recipe(folder / "recipe.toml"), folder
        path = self._folder / "recipe.toml"
        path.write_text(welcome.recipe, encoding="utf-8")
        recipe = load_recipe(path, list(self._overrides))
        folders.write_recipe(recipe, self._folder)
        tls.server_context(recipe.fleet)  # the process needs it, and an error should be seen here
        return recipe, self._folder

    def _start_process(self, folder: Path, log: Path, device: Place, weights_key: str, start: m.StartRank) -> Handle:
        place = replace(
            self._place,
            machine=start.machine,
            local_rank=start.local_rank,
            local_size=start.local_size,
            rendezvous=start.rendezvous,
        )
        environment = device.environment(
            os.environ | {WEIGHTS_KEY: weights_key} | self._interface(start.rendezvous) | place.environment()
        )
        if place.rank:
            (folder / f".{place.role}.failure").unlink(missing_ok=True)
        argv = [sys.executable, "-m", "windfall.run.cli", "_trainer", str(folder), place.base]
        return process.start(name=place.name, argv=argv, env=environment, log=log)

    async def _watch(self, handle: Handle) -> int:
        """Wait for the end of the process. Kill it if it is frozen."""
        stopped = liveness.Unchanged[int](liveness.FROZEN_S)
        while handle.running:
            if stopped.update(process.stopped([handle.pid])):
                self._say(f"the {handle.name} has been frozen for {liveness.FROZEN_S:g} s; killing it")
                handle.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(liveness.CHECK_S):
                    await handle.wait()
        return await handle.wait()

    def _interface(self, rendezvous: str) -> dict[str, str]:
        """Environment variables that let gloo and NCCL use the interface that reaches rank 0."""
        meeting = urlsplit(rendezvous)
        try:
            return network.socket_environment(network.address_toward(str(meeting.hostname), meeting.port or 0))
        except OSError:
            return {}

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def own_device(recipe: Recipe, place: RankPlace) -> Place:
    """Where a rank computes: on the GPU with its local number, or the only one that srun lets it see."""
    gpus = devices.gpu_places(recipe.run.device)
    if not gpus:
        return Place()
    if len(gpus) > 1 and place.local_rank >= len(gpus):
        what = f"local rank {place.local_rank} needs a GPU of its own, but this machine has {len(gpus)}"
        raise WindfallError(what, where="LOCAL_RANK", fix="Start at most one rank for each GPU.")
    return gpus[place.local_rank % len(gpus)]
