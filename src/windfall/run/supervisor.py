"""`windfall train`: runs the processes of a run (run_processes.py), and shows what happens. Keeps no state.

The processes of this machine end with the supervisor, however it ends (see parent_death.py). Workers elsewhere
end when it stops them, or when they find no controller for a while. Kubernetes is the exception: a Deployment restarts
such workers until a person deletes it (docs/guides/kubernetes.md).

On the first Ctrl-C or SIGTERM the run stops and saves, and nothing is restarted. The exit status is then that of a
program that the signal ended (130 or 143): a script must not take a stopped run for a finished one. On the second, all
processes are killed at once.

The machine of the trainer is there as long as the supervisor. So it is billed from the start of this process, not from
that of a trainer, which is forked after all imports, and again when it was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from windfall import devices, parts
from windfall import run_folder as folders
from windfall.controller.own_loop import LoopPart
from windfall.events import log
from windfall.link import auth, invitation
from windfall.processes import process
from windfall.processes.fork_client import ForkClient
from windfall.recipe.sections import Recipe
from windfall.run.run_processes import RunProcesses
from windfall.run.views.console import Console


class Supervisor:
    def __init__(
        self, recipe: Recipe, folder: Path, console: Console, places: Sequence[devices.Place] | None = None
    ) -> None:
        """`places`: the GPUs for the workers of this machine; by default, those that the recipe allows."""
        self.recipe = recipe
        self.folder = folder
        self._console = console
        self._token = auth.read_token(folder / "token")
        self._join_shown = False
        self._stopped_by = signal.SIGTERM
        environment = {**os.environ, "WINDFALL_TOKEN": self._token}
        if recipe.fleet.tls_cert:
            environment["WINDFALL_TLS_PIN"] = str(recipe.fleet.tls_cert)
        self._fork_client = ForkClient(
            entry="windfall.run.cli:main",
            modules=[f"windfall.run.preload:preload_run:{folder}"],
            log=folder / "fork_server.log",
            env=environment,
        )
        self._processes = RunProcesses(
            recipe,
            folder,
            self._fork_client,
            environment,
            notice=console.notice,
            on_event=self._show,
            places=places,
            trainer_environment={process.BEGAN: str(process.began_s())},
        )

    async def run(self) -> int:
        """Returns the exit status: 0 if the run is finished, or 128 plus the number of the signal that stopped it."""
        async with self._handling_signals(), self._fork_client:
            return 0 if await self._processes.run() else 128 + self._stopped_by

    def _show(self, event: log.Event) -> None:
        if event["name"] == "stopping" and not self._processes.stopping:
            return  # the controller is stopped because of an error, which is shown at the end
        try:
            self._console.show(event)
        except Exception as e:  # fault boundary: a view must never fail the run, whatever the log contains
            self._console.notice(f"cannot show event '{event['name']}': {type(e).__name__}: {e}")
        if event["name"] == "trainer_ready" and not self._join_shown:
            self._join_shown = True  # not earlier: until the trainer is ready, the start may still fail
            self._show_how_to_join()

    def _show_how_to_join(self) -> None:
        address, f = folders.address(self.folder), self.recipe.fleet
        if address is not None:
            remote = f.host in invitation.ALL_INTERFACES
            url = invitation.url(address, f)
            own = [part for part in parts.found() if isinstance(part, LoopPart)]
            if all(part.samples or part.loop(self.recipe, self.folder) is None for part in own):
                self._console.join(url, self.folder / "token", remote=remote, ca=f.tls_cert)
            if "/page" in address.get("pages", ()):
                self._console.page(f"{url}/page?key={auth.page_key(self._token)}")

    @contextlib.asynccontextmanager
    async def _handling_signals(self) -> AsyncIterator[None]:
        """The first Ctrl-C or SIGTERM asks the run to stop and save; the second ends it at once."""
        loop = asyncio.get_running_loop()
        current = asyncio.current_task()

        def on_signal(number: signal.Signals) -> None:
            if not self._processes.stopping:
                self._stopped_by = number
                self._processes.stop()
                return
            self._fork_client.kill()  # kills the trainer and all workers, too
            self._processes.kill()
            if current is not None:
                current.cancel()

        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
