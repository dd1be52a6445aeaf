"""What every peer reads and prints: a workload in JSON, and one JSON object as its last line. Imports nothing heavy."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True, kw_only=True)
class Workload:
    model: str  # a folder in Hugging Face format
    prompts: list[list[int]]
    lengths: list[int]  # tokens wanted for each request; a peer may stop by them, never plan by them
    threads: int
    batch: int  # requests in flight

    @property
    def useful_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """The limit a caller who knows no lengths would set for every request."""
        return max(self.lengths)

    @property
    def capacity_tokens(self) -> int:
        """Room for one request at its longest."""
        return max(len(prompt) for prompt in self.prompts) + self.longest

    def warm_prompts(self) -> list[list[int]]:
        """The same shapes with other content: a warm-up with them leaves nothing cold and no prefix to find again."""
        return [prompt[::-1] for prompt in self.prompts]

    def slices(self) -> list[slice]:
        """The requests in batches, in the order given."""
        return [slice(start, start + self.batch) for start in range(0, len(self.prompts), self.batch)]


def load() -> Workload:
    """The workload named on the command line. Call it before torch is imported: it also sets the number of threads."""
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {Path(sys.argv[0]).name} WORKLOAD.json")
    fields = json.loads(Path(sys.argv[1]).read_text())
    workload = Workload(
        model=fields["model"],
        prompts=fields["prompts"],
        lengths=fields["lengths"],
        threads=fields.get("threads", 2),
        batch=fields.get("batch", 32),
    )
    if len(workload.prompts) != len(workload.lengths) or not workload.prompts:
        raise SystemExit(f"{len(workload.prompts)} prompts but {len(workload.lengths)} lengths in {sys.argv[1]}")
    os.environ["OMP_NUM_THREADS"] = str(workload.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return workload


class Timer:
    """Times a `with` block, and what other processes took of the cores meanwhile: threads that spin at a barrier lose
    far more than their share to a neighbour (a hundredfold was seen), so a figure is good only with `others` near 0."""

    seconds: float
    cpu_s: float
    """Time of this process on all cores: with one thread, neighbours hardly change it."""
    others_cores: float

    def __enter__(self) -> "Timer":
        self._start, self._busy_s, self._own_s = time.perf_counter(), machine_busy_s(), time.process_time()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.cpu_s = time.process_time() - self._own_s
        self.others_cores = max(0.0, (machine_busy_s() - self._busy_s - self.cpu_s) / self.seconds)


def machine_busy_s() -> float:
    """Seconds that all cores together were busy since boot; Linux only, elsewhere 0."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    ticks = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # 3 and 4: idle, waiting for a disk


def check(workload: Workload, made: list[int]) -> None:
    """Every request got what it asked for; else the figure would count tokens that nobody made."""
    short = [i for i, (n, wanted) in enumerate(zip(made, workload.lengths, strict=True)) if n < wanted]
    if short:
        raise RuntimeError(f"request {short[0]} got {made[short[0]]} of {workload.lengths[short[0]]} tokens")


def report(peer: str, version: str, workload: Workload, timer: Timer, note: str) -> None:
    figures = {
        "useful_tokens": workload.useful_tokens,
        "seconds": round(timer.seconds, 4),
        "cpu_s": round(timer.cpu_s, 4),
        "others_cores": round(timer.others_cores, 2),
    }
    print(json.dumps({"peer": peer, "version": version, **figures, "note": note}), flush=True)


def skip(peer: str, error: ImportError, package: str) -> NoReturn:
    """The peer is not installed: say so and leave with success."""
    why = f"{error}; install it with benchmarks/engine/peers/install.sh FOLDER, or: pip install {package}"
    print(json.dumps({"peer": peer, "skipped": why}), flush=True)
    raise SystemExit(0)
