"""Several jobs on the same devices at the same time, against one after the other.

    python benchmarks/jobs/together.py --jobs 2                                    CPU, the tiny model; two minutes
    python benchmarks/jobs/together.py --jobs 4 --grade-s 1                        grading takes a second per response
    python benchmarks/jobs/together.py --device cuda --models 0.6b,1.7b --jobs 4   an H200, random weights
    python benchmarks/jobs/together.py --device cuda --adapters --co-running
    python benchmarks/jobs/together.py --device cuda --jobs 3 --left-gb 50         on a GPU that is too small for all

    one after the other     `windfall train` for each job, alone on the machine
    at once, no turns       `windfall train` for all jobs at the same time: the driver or the kernel shares the device
    by turns                `windfall up`, to which all jobs are submitted
    by turns, co-running    the same with co_running = true in its file (with --co-running)

All ways run after each other in one call, on the same machine, with the same recipes and seeds. A job has a trainer,
whose own engine generates as well; on the CPU it also has one worker. Speeds are measured while all jobs are at work:
from the second step of the last job until the first job has ended; for a job alone, from its second step to its last.

    relative speed   tokens per second of a job, as a share of its speed alone
    slowdown         1 / relative speed
    in sum           the sum of the relative speeds: in one second together, the jobs advance as far as in so many
                     seconds one after the other. Above 1, sharing is a gain
    busy             share of the time in which some job has its turn on the device
    switches         how often the state of a trainer came back to the GPU, and how long that took in all
    weights          whether the trained weights of every job are, bit for bit, those that it has alone (CPU only)

Nothing else should run on the machine: beside other programs, more processes get more of it. The first line says how
many were at work before. Random weights of the large shapes seldom end a response, so an environment ends it: after
each eighth of --tokens with a probability of 1/3. So lengths have a long tail.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.gpu_job import SHAPES
from benchmarks.train.two_policies import write_model
from windfall.events import log as events
from windfall.jobs.client import JobsClient
from windfall.turns.sharing import SLICE_S
from windfall.types import Feedback, Task, Turn

ROOT = Path(__file__).parents[2]
RECIPE = """
[run]
folder = "{folder}"
name = "{name}"
steps = {steps}
seed = {seed}
device = "{device}"
{deterministic}
[model]
path = "{model}"
[env]
name = "custom"
factory = "benchmarks.jobs.together:{env}"
options = {{ grade_s = {grade_s} }}
[rollout]
groups = {groups}
group_size = 8
max_tokens = {tokens}
turn_tokens = {turn_tokens}
{processes}
[train]
lr = 1e-6
{lora}
[checkpoint]
every = 100000
[eval]
tasks = 0
[log]
page = false
[fleet]
workers = {workers}
"""
ALONE, AT_ONCE, TURNS, CO_RUNNING = "one after the other", "at once, no turns", "by turns", "by turns, co-running"
ENDED = ("done", "stopped", "failed", "over_budget")
PARTS, ENDS = 8, 3
"""Parts of a response's limit after which it may end, and one in how many times it does."""


class Sums:
    """The shipped environment, whose grading may take a while, as that of code that is run."""

    def __init__(self, seed: int = 0, *, grade_s: float) -> None:
        self._seed, self._grade_s = seed, grade_s

    def task(self, index: int) -> Task:
        rng = random.Random(f"{self._seed} {index}")
        a, b = rng.randrange(10, 99), rng.randrange(10, 99)
        return Task(id=str(index), prompt=f"{a}+{b}=", answer=str(a + b))

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        time.sleep(self._grade_s)
        return Feedback(reward=float(task.answer in turns[-1].text) + zlib.crc32(turns[-1].text.encode()) % 2)


class Chatter(Sums):
    """Ends responses by chance, as their text has it. Rewards are as good as random."""

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        chance = zlib.crc32(repr(turns[-1].tokens or turns[-1].text).encode())
        if chance % ENDS and len(turns) < PARTS:
            return Feedback(observation=".", reward=float(chance % 2))
        time.sleep(self._grade_s)
        return Feedback(reward=float(chance % 2))

    needs_tokens = True


@dataclass(kw_only=True)
class Ran:
    """A job that has run."""

    folder: Path
    progress: list[tuple[float, float]] = field(default_factory=list)
    """Time of the end of each step (Unix), and the tokens generated until then."""

    def read(self) -> Ran:
        total, self.progress = 0.0, []
        for e in events.read(self.folder / "events.jsonl"):
            if (e["kind"], e["name"]) == ("scalar", "step"):
                total += e["made"]
                self.progress.append((e["t"], total))
        return self

    @property
    def span(self) -> tuple[float, float]:
        """Without the first step, in which everything starts."""
        return self.progress[0][0], self.progress[-1][0]

    def tokens_until(self, t: float) -> float:
        """
        >>> ran = Ran(folder=Path(), progress=[(10.0, 100.0), (12.0, 200.0), (16.0, 300.0)])
        >>> [ran.tokens_until(t) for t in (10.0, 11.0, 14.0, 20.0)]
        [100.0, 150.0, 250.0, 300.0]
        """
        before = self.progress[0]
        for after in self.progress[1:]:
            if t <= after[0]:
                return before[1] + (after[1] - before[1]) * max(0.0, t - before[0]) / (after[0] - before[0])
            before = after
        return before[1]

    def speed(self, start: float, end: float) -> float:
        return (self.tokens_until(end) - self.tokens_until(start)) / (end - start)

    def weights(self) -> list[bytes]:
        newest = max((self.folder / "checkpoints").glob("step-*"), key=lambda path: path.name)
        return [path.read_bytes() for path in sorted(newest.glob("*.safetensors"))]


class Bench:
    def __init__(self, place: Path, args: argparse.Namespace) -> None:
        self.place, self.args = place, args
        self.cuda = args.device == "cuda"
        models = args.models.split(",")
        self.jobs = {f"{models[n % len(models)]}-{n}": models[n % len(models)] for n in range(args.jobs)}
        path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        if not self.cuda:
            self.environment["OMP_NUM_THREADS"] = "1"
        for model in set(self.jobs.values()) - {"tiny"}:
            write_model(place / model, model)

    def recipe(self, name: str, folder: Path) -> str:
        args, model = self.args, self.jobs[name]
        own = model != "tiny"
        return RECIPE.format(
            folder=folder, name=name, steps=args.steps, seed=list(self.jobs).index(name), device=args.device,
            deterministic="" if self.cuda else "deterministic = true\nthreads = 1",
            model=self.place / model if own else model, env="Chatter" if own else "Sums", grade_s=args.grade_s,
            groups=args.groups, tokens=args.tokens, turn_tokens=args.tokens // PARTS if own else 0,
            processes=f"reward_processes = {args.graders}" if args.grade_s else "",
            lora="[train.lora]\nrank = 16" if args.adapters else "", workers=0 if self.cuda else 1,
        )  # fmt: skip

    def start(self, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            command = [sys.executable, "-m", "windfall.run.cli", *arguments]
            return subprocess.Popen(
                command, env=self.environment, cwd=self.place, stdout=out, stderr=out, start_new_session=True
            )

    def trained(self, way: str, names: Sequence[str]) -> dict[str, Ran]:
        """`windfall train` for these jobs at the same time."""
        folder = self.place / way.replace(" ", "-").replace(",", "")
        folder.mkdir(exist_ok=True)
        processes = {}
        try:
            for name in names:
                recipe = folder / f"{name}.toml"
                recipe.write_text(self.recipe(name, folder))
                processes[name] = self.start(folder / f"{name}.log", "train", str(recipe))
            for name, process in processes.items():
                self.wait(process, lambda p=process: p.poll() is not None, f"{way}: the end of {name}", folder, name)
                if process.returncode:
                    raise RuntimeError(f"{name} failed:\n{(folder / f'{name}.log').read_text()[-3000:]}")
        finally:
            for process in processes.values():
                end(process)
        return {name: Ran(folder=folder / name).read() for name in names}

    def served(self, way: str) -> tuple[dict[str, Ran], Path]:
        """All jobs, submitted to a service."""
        folder = self.place / way.replace(" ", "-").replace(",", "")
        folder.mkdir()
        fleet = [
            "port = 0", f'folder = "{folder}"', f"jobs_at_once = {len(self.jobs)}", f"slice_s = {self.args.slice_s}",
            f"co_running = {str(way == CO_RUNNING).lower()}", "[limits]", "processes = 10000", "memory_gb = 1000",
        ]  # fmt: skip
        if not self.cuda:
            fleet[:0] = ['devices = "cpu"', "cpu_slots = 2"]
        (folder / "fleet.toml").write_text("\n".join(fleet))
        service = self.start(folder / "up.log", "up", str(folder / "fleet.toml"))
        try:
            self.wait(service, lambda: (folder / "address.json").is_file(), f"{way}: the service", folder, "up")
            client = JobsClient(str(folder), None)
            for name in self.jobs:
                client.post("/jobs", recipe=self.recipe(name, folder), name=name, directory=str(ROOT))

            def ended() -> bool:
                time.sleep(0.5)
                return all(job["state"] in ENDED for job in client.get("/jobs")["jobs"].values())

            self.wait(service, ended, f"{way}: the end of all jobs", folder, "up")
            for name, job in client.get("/jobs")["jobs"].items():
                if job["state"] != "done":
                    raise RuntimeError(f"{name} is {job['state']}: {job['reason']}")
            service.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                service.wait(60)
        finally:
            end(service)
        return {name: Ran(folder=folder / "jobs" / name).read() for name in self.jobs}, folder / "turns.jsonl"

    def wait(
        self, process: subprocess.Popen[bytes], done: Callable[[], bool], what: str, folder: Path, name: str
    ) -> None:
        deadline = time.monotonic() + self.args.timeout_s
        while not done():
            log = folder / f"{name}.log"
            if process.poll() not in (None, 0):
                raise RuntimeError(f"{what}: the process ended with {process.returncode}:\n{log.read_text()[-3000:]}")
            if time.monotonic() > deadline:
                what = f"waited {self.args.timeout_s:g} s for {what}"
                raise RuntimeError(f"{what}:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process with all that it started: it is the leader of a session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def window(ran: Sequence[Ran]) -> tuple[float, float]:
    """The time in which all jobs are at work."""
    start, until = max(r.span[0] for r in ran), min(r.span[1] for r in ran)
    if until <= start:
        raise RuntimeError("the first job ended before the last one had made its first step; give more --steps")
    return start, until


def busy(turns: Path, start: float, until: float) -> dict[str, float]:
    """Share of the time in which a device has a turn of any job."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for line in turns.read_text().splitlines():
        turn: dict[str, Any] = json.loads(line)
        spans.setdefault(turn["device"], []).append((max(start, turn["start_s"]), min(until, turn["end_s"])))
    return {device: covered(found) / (until - start) for device, found in sorted(spans.items())}


def covered(spans: list[tuple[float, float]]) -> float:
    """
    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (9.0, 8.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def row(way: str, alone: dict[str, Ran], ran: dict[str, Ran], turns: Path | None, compare: bool) -> str:
    """A line of the table."""
    speeds = {name: r.speed(*r.span) for name, r in alone.items()}
    if way == ALONE:
        seconds = sum(r.span[1] - r.span[0] for r in ran.values())
        tokens = sum(r.progress[-1][1] - r.progress[0][1] for r in ran.values())
        return f"{way:22}{tokens / seconds:>10,.0f}{1.0:>9.2f}x   {' '.join(['1.00'] * len(ran))}"
    span = window(list(ran.values()))
    now = {name: r.speed(*span) for name, r in ran.items()}
    relative = [now[name] / speeds[name] for name in ran]
    slowdowns = " ".join(f"{1 / share:.2f}" for share in relative)
    line = f"{way:22}{sum(now.values()):>10,.0f}{sum(relative):>9.2f}x   {slowdowns}   over {span[1] - span[0]:.0f} s"
    if turns is not None:
        line += "; busy: " + ", ".join(f"{device} {share:.0%}" for device, share in busy(turns, *span).items())
        woke = [s for each in turns.read_text().splitlines() if (s := json.loads(each)["woke_s"])]
        line += f"; {len(woke)} switches, {sum(woke):.1f} s" if woke else ""
    if compare:
        same = all(r.weights() == alone[name].weights() for name, r in ran.items())
        line += f"; weights {'equal' if same else 'DIFFER'}"
    return line


def measure(args: argparse.Namespace, place: Path) -> list[str]:
    bench = Bench(place, args)
    head = (
        f"{args.device}, {args.jobs} jobs ({', '.join(bench.jobs)}), {'adapters' if args.adapters else 'all weights'}, "
        f"{args.steps} steps of {args.groups} x 8 responses, at most {args.tokens} tokens, grading {args.grade_s:g} s"
    )
    head += f"; before, {os.getloadavg()[0]:.1f} processes were at work on {os.cpu_count()} cores"
    lines = [head, f"{'':22}{'tokens/s':>10}{'in sum':>10}   slowdown of each"]
    print("\n".join(lines), flush=True)

    def add(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    taken = take_all_but(args.left_gb) if args.left_gb else None
    alone: dict[str, Ran] = {}
    for name in bench.jobs:
        alone |= bench.trained(ALONE, [name])
    add(row(ALONE, alone, alone, None, False))
    if not args.turns_only:
        add(row(AT_ONCE, alone, bench.trained(AT_ONCE, list(bench.jobs)), None, not bench.cuda))
    for way in (TURNS, CO_RUNNING) if args.co_running else (TURNS,):
        ran, turns = bench.served(way)
        add(row(way, alone, ran, turns, not bench.cuda))
    del taken
    return lines


def take_all_but(left_gb: float) -> Any:
    """The memory of the GPU, except so many GB."""
    import torch

    return torch.empty(int(torch.cuda.mem_get_info()[0] - left_gb * 1e9), dtype=torch.uint8, device="cuda")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--models", default="", help=f"of the jobs in turn: {', '.join(SHAPES)}. Default: tiny, or 0.6b")
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--adapters", action="store_true", help="train adapters of rank 16 instead of all weights")
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--groups", type=int, default=0, help="per step, each of 8 responses. Default: 8, on a GPU 32")
    p.add_argument("--tokens", type=int, default=0, help="upper limit per response. Default: 96, on a GPU 1024")
    p.add_argument("--grade-s", type=float, default=0.0, help="seconds that grading one response takes, without a GPU")
    p.add_argument("--graders", type=int, default=32, help="processes that grade, for each job, with --grade-s")
    p.add_argument("--slice-s", type=float, default=SLICE_S, help="slice_s of the fleet")
    p.add_argument("--co-running", action="store_true", help="also with co_running = true")
    p.add_argument("--turns-only", action="store_true", help="without the way in which jobs take no turns")
    p.add_argument("--left-gb", type=float, default=0.0, help="memory of the GPU for the jobs. Default: all")
    p.add_argument("--timeout-s", type=float, default=300.0, help="for each thing that is waited for")
    args = p.parse_args(words)
    cuda = args.device == "cuda"
    args.models, args.groups = args.models or ("0.6b" if cuda else "tiny"), args.groups or (32 if cuda else 8)
    args.tokens = args.tokens or (1024 if cuda else 96)
    return args


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="together-") as folder:
        measure(arguments(), Path(folder))
