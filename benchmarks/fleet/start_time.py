"""Measure the time from requesting a worker until it has imported torch and transformers and can begin its work.

    OMP_NUM_THREADS=1 python benchmarks/fleet/start_time.py [REPEATS]

Prints one line of JSON for fresh processes and one for forked processes: the median and the slowest time in seconds,
and the CPU time that a worker had used by then. The worker multiplies two matrices before it ends, to show that torch
survives the fork.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from windfall.processes import process
from windfall.processes.fork_client import ForkClient
from windfall.processes.process import Handle

MODULES = ("torch", "transformers")
WAIT_S = 120.0


def worker() -> None:
    """The measured program: prints when it got here. All processes of a machine share this clock."""
    import torch
    import transformers

    began, cpu_s = time.monotonic(), time.process_time()
    a = torch.ones(64, 64)
    product = float((a @ a).sum())
    print(json.dumps({"at": began, "cpu_s": cpu_s, "product": product, "version": transformers.__version__}))


async def _measure(handle: Handle, requested: float, log: Path) -> tuple[float, float]:
    async with asyncio.timeout(WAIT_S):
        code = await handle.wait()
    report = json.loads(log.read_text().splitlines()[-1])
    assert code == 0, f"the worker ended with status {code}"
    assert report["product"] == 64.0**3
    return report["at"] - requested, report["cpu_s"]


def _report(how: str, times: list[tuple[float, float]], **more: float) -> None:
    starts_s, cpus_s = zip(*times, strict=True)
    figures = {"median_s": statistics.median(starts_s), "slowest_s": max(starts_s), "cpu_s": statistics.median(cpus_s)}
    rounded = {name: round(value, 4) for name, value in {**figures, **more}.items()}
    print(json.dumps({"worker": how, "times": len(times), **rounded}), flush=True)


async def measure(repeats: int, folder: Path) -> None:
    here = str(Path(__file__).resolve().parent)  # so that the measured processes can import this file
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    code = "from start_time import worker; worker()"
    times: list[tuple[float, float]] = []
    for n in range(max(1, repeats // 10)):
        requested, log = time.monotonic(), folder / f"fresh{n}.log"
        handle = process.start(name=f"fresh{n}", argv=[sys.executable, "-c", code], env=env, log=log)
        times.append(await _measure(handle, requested, log))
    _report("fresh", times)
    log = folder / "fork_server.log"
    async with ForkClient(entry="start_time:worker", modules=MODULES, log=log, env=env) as client:
        began = time.monotonic()
        await client.ready()
        imports_s = time.monotonic() - began
        times = []
        for n in range(repeats):
            requested, log = time.monotonic(), folder / f"forked{n}.log"
            handle = await client.start(name=f"forked{n}", argv=["worker"], env=env, log=log)
            times.append(await _measure(handle, requested, log))
    _report("forked", times, once_s=imports_s)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 50, Path(name)))
