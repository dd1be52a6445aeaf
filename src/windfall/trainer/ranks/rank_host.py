"""`windfall ranks`: the ranks of a trainer on a machine other than that of `windfall train`.

    dial ──▶ MachineHello ──▶ MachineWelcome(recipe) ──▶ MachineReady(ranks) ──▶ [ StartRanks ──▶ ... RanksEnded ]*

- It starts one process per GPU whenever the supervisor says so, and reports when they have ended. It never restarts
  them on its own: all ranks of all machines must start together.
- When the link ends, it kills its ranks and dials again. It gives up after `patience_s` without a place in the run.
- It exits with status 0 when the run has ended, or after Ctrl-C or SIGTERM; with EXIT_REFUSED if the run does not
  accept it; and with EXIT_NO_CONTROLLER if it did not find the run.
- Its folder holds the recipe as the run sent it, and the logs of the ranks. A temporary folder is removed at the end,
  unless the last ranks have failed. Ranks die with this process.
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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from windfall import backoff, devices, errors
from windfall import run_folder as folders
from windfall.errors import WindfallError, describe_exit
from windfall.link import handshake, invitation, network, tls
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.socket import Dialer, SocketLink
from windfall.processes import process
from windfall.processes.process import EXIT_NO_CONTROLLER, EXIT_REFUSED, Handle
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.trainer.ranks.machines import MAX_FRAME_BYTES, count_ranks
from windfall.trainer.ranks.process import WEIGHTS_KEY
from windfall.trainer.ranks.rank_group import RANK_LOST, RankGroup, log_name, rank_places

RETRY_S, MAX_RETRY_S = 0.5, 5.0
"""Seconds between two attempts to join, at first and at most."""


def main(
    url: str, token: str, *, host: str, folder: Path | None, ca: Path | None, overrides: Sequence[str],
    patience_s: float,
) -> int:  # fmt: skip
    """Run ranks until the run ends. `token`: the secret of the trainer, or the file that holds it. `overrides`: recipe
    keys that differ on this machine. Returns the exit status."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
            raise ValueError(url)
    except ValueError:
        fix = "Give http://HOST:PORT with the value of train.rendezvous."
        raise WindfallError(f"{url!r} is not the address of a trainer", where="--join", fix=fix) from None
    secret = invitation.token(token, patience_s)
    with contextlib.nullcontext(folder) if folder is not None else temporary_folder() as folder:
        folder.mkdir(parents=True, exist_ok=True)
        machine = RankHost(
            url, secret, host=host, folder=folder, ca=ca, overrides=overrides, patience_s=patience_s
        )  # fmt: skip
        with folders.owned(folder, "ranks"):
            return asyncio.run(errors.guard(machine.run()))


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder. It is removed afterwards, unless a rank has failed: then its log says why."""
    folder = Path(tempfile.mkdtemp(prefix="windfall-ranks-"))
    try:
        yield folder
    finally:
        if not (folder / ".trainer.failure").exists():
            shutil.rmtree(folder, ignore_errors=True)


class RankHost:
    def __init__(
        self, url: str, secret: str, *, host: str, folder: Path, ca: Path | None, overrides: Sequence[str],
        patience_s: float,
    ) -> None:  # fmt: skip
        self._url, self._secret, self._host, self._folder = url.rstrip("/"), secret, host, folder
        self._overrides, self._patience_s = overrides, patience_s
        self._ssl = tls.client_context(url, ca=ca)
        self._ranks: Handle | None = None
        self._reporting: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Returns the exit status."""
        loop, current = asyncio.get_running_loop(), asyncio.current_task()
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            if current is not None:
                current.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        dialer = Dialer(self._url, "/ranks", m.ToMachine, ssl=self._ssl, max_frame_bytes=MAX_FRAME_BYTES)
        try:
            return await self._join_again_and_again(dialer)
        except asyncio.CancelledError:
            if not stopped:
                raise
            return 0
        finally:
            await self._end_ranks()
            await dialer.close()

    async def _join_again_and_again(self, dialer: Dialer) -> int:
        last_s, tries, said = time.monotonic(), 0, ""
        while time.monotonic() - last_s < self._patience_s:
            why = ""
            try:
                link = await dialer.dial(handshake.TIMEOUT_S)
                try:
                    welcome = await handshake.join(link, handshake.MACHINE, self._secret, self._hello)
                    last_s, tries, said = time.monotonic(), 0, ""
                    try:
                        why = await self._serve(link, welcome)
                    finally:
                        last_s = time.monotonic()
                        await self._end_ranks()
                finally:
                    await link.close()
            except LinkClosed as e:
                if isinstance(e, handshake.JoinRefused):
                    if not e.again:
                        self._say(f"refused: {e}")
                        return EXIT_REFUSED
                    last_s = time.monotonic()  # the run lives: a spare machine waits as long as it does
                if str(e) != said:  # do not repeat the same line
                    said = str(e)
                    self._say(f"no link to the run: {e}; trying again for {self._patience_s:g} s")
            if why:
                self._say(why)
                return 0
            await asyncio.sleep(backoff.delay_s(tries, first_s=RETRY_S, limit_s=MAX_RETRY_S))
            tries += 1
        self._say(f"waited {self._patience_s:g} s for the run at {self._url}")
        return EXIT_NO_CONTROLLER

    def _hello(self, **fields: Any) -> m.MachineHello:
        return m.MachineHello(name=socket.gethostname(), **fields)

    async def _serve(self, link: SocketLink, welcome: m.MachineWelcome) -> str:
        """Do what the supervisor says until the run ends. Returns the reason of its end."""
        try:
            recipe = self._read_recipe(welcome.recipe)
            places = rank_places(recipe, devices.gpu_places(recipe.run.device))
            tls.server_context(recipe.fleet)  # the ranks need it, and an error should be seen here
        except WindfallError as e:
            await link.send(m.MachineReady(ranks=0, error=e.what))
            raise
        await link.send(m.MachineReady(ranks=len(places)))
        where = f"machine {welcome.machine} of 0 to {welcome.machines - 1}, with {count_ranks(len(places))}"
        self._say(f"joined the run {recipe.run.name!r} as {where}; logs are in {self._folder}")
        while True:
            message = await link.receive()
            match message:
                case m.StartRanks():
                    await self._end_ranks()
                    self._reporting = asyncio.create_task(self._run_ranks(link, recipe, places, welcome, message))
                    self._reporting.add_done_callback(errors.report_failure)
                case m.StopRanks():
                    if self._ranks is not None:
                        self._ranks.kill()
                case m.RunEnded():
                    return message.why
                case _:
                    raise LinkClosed(f"{link.peer}: unexpected {type(message).__name__}")

    def _read_recipe(self, text: str) -> Recipe:
        path = self._folder / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        recipe = load_recipe(path, list(self._overrides))
        folders.write_recipe(recipe, self._folder)
        return recipe

    async def _run_ranks(
        self, link: SocketLink, recipe: Recipe, places: Sequence[devices.Place], welcome: m.MachineWelcome,
        start: m.StartRanks,
    ) -> None:  # fmt: skip
        """Run the ranks of this machine once, and report how they ended."""
        last = start.first + len(places) - 1
        self._say(f"starting ranks {start.first} to {last} of {start.size} (start {start.attempt})")
        (self._folder / ".trainer.failure").unlink(missing_ok=True)
        code, error = 1, WindfallError("")
        try:
            self._ranks = self._launch(places, welcome, start)
            code = await self._ranks.wait()
            error = self._failure(code)
        except (OSError, WindfallError) as e:
            error = e if isinstance(e, WindfallError) else WindfallError(f"ranks could not be started: {e}")
        self._say(f"the ranks ended: {error.what or describe_exit(code)}; waiting for the run")
        with contextlib.suppress(LinkClosed):  # then a new start follows after the next join
            await link.send(
                m.RanksEnded(attempt=start.attempt, code=code, what=error.what, where=error.where, fix=error.fix)
            )

    def _failure(self, code: int) -> WindfallError:
        """Why the ranks ended, if they failed here."""
        if code <= 0 or code == RANK_LOST:
            return WindfallError("")
        return folders.failure(self._folder, "trainer", code)

    def _launch(self, places: Sequence[devices.Place], welcome: m.MachineWelcome, start: m.StartRanks) -> Handle:
        run = urlsplit(self._url)
        own = network.address_toward(str(run.hostname), run.port or 0)
        environment = {**os.environ, WEIGHTS_KEY: welcome.weights_key, **network.socket_environment(own)}
        started: list[Handle] = []
        try:
            for local, place in enumerate(places):
                rank = start.first + local
                options = {
                    "--rank": rank, "--ranks": start.size, "--rendezvous": start.rendezvous,
                    "--machine": welcome.machine, "--local-rank": local, "--local-ranks": len(places),
                    "--host": self._host or own,
                }  # fmt: skip
                argv = [sys.executable, "-m", "windfall.run.cli", "_trainer", str(self._folder)]
                argv += [str(part) for option in options.items() for part in option]
                log, env = self._folder / log_name(rank), place.environment(environment)
                started.append(process.start(name=f"rank-{rank}", argv=argv, env=env, log=log))
        except BaseException:  # raised again: no rank may be left
            for handle in started:
                handle.kill()
            raise
        return RankGroup(started, followed=RANK_LOST)

    async def _end_ranks(self) -> None:
        """Kill the ranks and wait for their end."""
        if self._ranks is not None and self._ranks.running:
            self._ranks.kill()
        if self._reporting is not None:
            await asyncio.wait([self._reporting], timeout=10.0)
        self._ranks = self._reporting = None

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
