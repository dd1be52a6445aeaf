"""Every source of workers, as the contract suite starts it: the real provider, with workers that are small programs.

A worker here is the program `windfall` that a test puts in the place of the real one. It writes its process id to a
file named after the worker, then runs the code of the test.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

import windfall
from tests.support.stand_ins import kubernetes
from windfall.processes import process
from windfall.processes.process import Handle
from windfall.providers.base import OnEvent, Provider
from windfall.providers.job_queue import JobProvider
from windfall.providers.kubernetes.manifests import RunNames, deployment
from windfall.providers.kubernetes.provider import KubernetesProvider
from windfall.providers.kubernetes.section import Kubernetes
from windfall.providers.ray.provider import RayProvider
from windfall.providers.ray.section import Ray
from windfall.providers.skypilot.provider import SkyPilotQueue
from windfall.providers.skypilot.section import SkyPilot
from windfall.providers.slots import SlotProvider
from windfall.providers.slurm.provider import SlurmQueue
from windfall.providers.slurm.section import Slurm
from windfall.providers.source_part import Employer
from windfall.providers.worker_command import arguments
from windfall.recipe.worker_source import WorkerSource
from windfall.types import Lease

TOKEN = "0123456789abcdef0123"
STAND_INS = Path(__file__).parents[1] / "stand_ins"
DRAINING = (
    "import signal, sys, time; "
    "signal.signal(15, lambda *_: (open(ME + '.drained', 'w').close(), sys.exit(0))); "
    "open(ME + '.ready', 'w').close(); time.sleep(60)"
)
"""A worker that records that it was asked to leave, and leaves."""


class Workers:
    """The workers of a test: where they write, and which are alive."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder, self.bin, self.package = folder / "seen", folder / "bin", folder / "package" / "windfall"
        for path in (self.folder, self.bin, self.package, folder / "workers"):
            path.mkdir(parents=True, exist_ok=True)
        program = (
            "import os, sys\n"
            "assert os.environ['WINDFALL_TOKEN'] == " + repr(TOKEN) + "\n"
            "name = sys.argv[sys.argv.index('--name') + 1]\n"
            f"ME = {str(self.folder)!r} + '/' + name\n"
            "with open(f'{ME}.{os.getpid()}', 'w'): pass\n" + code + "\n"
        )
        (self.package / "run").mkdir(exist_ok=True)
        (self.package / "run" / "cli.py").write_text(program)
        for package in (self.package, self.package / "run"):
            (package / "__init__.py").write_text("")
        (self.bin / "windfall").write_text(f"#!{sys.executable} -S\n{program}")
        (self.bin / "windfall").chmod(0o755)

    @property
    def path(self) -> str:
        return f"{self.bin}:{os.environ['PATH']}"

    def pids(self) -> list[int]:
        """All processes so far."""
        return sorted(int(p.suffix[1:]) for p in self.folder.iterdir() if p.suffix[1:].isdecimal())

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if _is_alive(pid)]

    def drained(self) -> int:
        return len(list(self.folder.glob("*.drained")))

    async def until_ready(self, count: int, within_s: float = 30.0) -> None:
        """Wait until so many workers with the code DRAINING have installed their signal handlers."""
        for _ in range(int(within_s * 20)):
            if len(list(self.folder.glob("*.ready"))) >= count:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"waited {within_s:g} s for {count} workers with signal handlers")

    async def until(self, count: int, *, of: str = "alive", within_s: float = 30.0) -> list[int]:
        """Wait until there are so many processes."""
        for _ in range(int(within_s * 20)):
            if len(found := self.alive() if of == "alive" else self.pids()) == count:
                return found
            await asyncio.sleep(0.05)
        raise AssertionError(f"waited {within_s:g} s for {count} workers: {self.alive()} of {self.pids()}")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def url() -> str:
    return "http://127.0.0.1:1"


class LocalSource:
    name, drains = "local", True

    @asynccontextmanager
    async def open(self, folder: Path, workers: Workers, on_event: OnEvent, count: int) -> AsyncIterator[Provider]:
        async def spawn(name: str, lease: Lease) -> Handle:
            argv = ["windfall", *arguments(WorkerSource(), await url(), name)]
            env = {"PATH": workers.path, "WINDFALL_TOKEN": TOKEN}
            return process.start(name=name, argv=argv, env=env, log=folder / "workers" / f"{name}.log")

        yield SlotProvider(spawn, count, on_event=on_event, grace_s=2.0)


class SlurmSource:
    name, drains = "slurm", True

    @asynccontextmanager
    async def open(
        self, folder: Path, workers: Workers, on_event: OnEvent, count: int, **options: Any
    ) -> AsyncIterator[Provider]:
        with programs(folder, "slurm", {"sbatch": "sbatch", "squeue": "squeue", "scancel": "scancel"}):
            asked = Slurm(workers=count, setup=f"export PATH={workers.path}", gpus="0", **options)
            queue = SlurmQueue(source=asked, run=employer(folder, workers, on_event))
            yield JobProvider(queue, asked, poll_s=0.2, grace_s=5.0, on_event=on_event)


class SkySource:
    name, drains = "skypilot", False

    @asynccontextmanager
    async def open(self, folder: Path, workers: Workers, on_event: OnEvent, count: int) -> AsyncIterator[Provider]:
        with programs(folder, "sky", {"sky": ""}):
            asked = SkyPilot(workers=count, setup=f"export PATH={workers.path}", max_restarts=1)
            queue = SkyPilotQueue(source=asked, run=employer(folder, workers, on_event))
            yield JobProvider(queue, asked, poll_s=0.2, grace_s=5.0, on_event=on_event)


class KubernetesSource:
    name, drains = "kubernetes", True

    @asynccontextmanager
    async def open(self, folder: Path, workers: Workers, on_event: OnEvent, count: int) -> AsyncIterator[Provider]:
        names, source = RunNames(run="test"), Kubernetes(image="windfall", drain_s=2.0, workers=count)
        _, objects = yaml.safe_load_all(deployment(source, names=names, url=await url()))
        cluster = kubernetes.Cluster(objects, secrets={names.secret: TOKEN}, path=workers.path)
        with programs(folder, "kubectl", {"kubectl": ""}):
            async with cluster:
                source = source.model_copy(update={"kubeconfig": cluster.kubeconfig(folder)})
                yield KubernetesProvider(source, names, on_event=on_event, poll_s=0.1)


class RaySource:
    name, drains = "ray", True

    @asynccontextmanager
    async def open(self, folder: Path, workers: Workers, on_event: OnEvent, count: int) -> AsyncIterator[Provider]:
        address = os.environ["TEST_RAY_ADDRESS"]
        source = Ray(address=address, cpus=0.25, gpus=0.0, workers=count, drain_s=5.0)
        yield RayProvider(source, employer(folder, workers, on_event), connect_s=20.0)


def employer(folder: Path, workers: Workers, on_event: OnEvent) -> Employer:
    env = {"WINDFALL_TOKEN": TOKEN, "PYTHONPATH": str(workers.package.parent)}
    return Employer(name="test", label="windfall-test", folder=folder, url=url, secrets=env, on_event=on_event)


SOURCES = [LocalSource(), SlurmSource(), SkySource(), KubernetesSource()]
if importlib.util.find_spec("ray") is not None:
    SOURCES.append(RaySource())  # pyright: ignore


@contextmanager
def programs(folder: Path, stand_in: str, names: dict[str, str]) -> Iterator[Path]:
    """Put programs with these names in front of PATH; each runs the stand-in with a first argument."""
    bin_, state = folder / "programs", folder / f"fake_{stand_in}"
    bin_.mkdir(exist_ok=True)
    state.mkdir(exist_ok=True)
    for name, argument in names.items():
        script = f'#!/bin/sh\nexec {sys.executable} -S {STAND_INS}/{stand_in}.py {argument} "$@"\n'
        (bin_ / name).write_text(script)
        (bin_ / name).chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"], os.environ[f"FAKE_{stand_in.upper()}"] = f"{bin_}:{before}", str(state)
    try:
        yield state
    finally:
        os.environ["PATH"] = before


@asynccontextmanager
async def running(provider: Provider) -> AsyncIterator[None]:
    task = asyncio.create_task(provider.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 240)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def source_path() -> str:
    return str(Path(windfall.__file__).parent.parent)
