"""Serving alone, with windfall's co-serving, and with naive sharing of the device by two processes, on the same load.

    python benchmarks/serve/coserve.py --device cuda              serving 0.6b, rollout 1.7b: six minutes
    python benchmarks/serve/coserve.py --device cuda --quick      one load and a burst: 90 seconds
    python benchmarks/serve/coserve.py --device cuda --serving 8b --rollout 0.6b --loads 0.4
    python benchmarks/serve/coserve.py --device cpu --quick       tiny models: checks the benchmark itself
    ... --trace azure.csv                                         arrivals and lengths of a trace

- load: share of the time during which serving alone keeps the device busy; `busy` is what was measured. Random weights
  in the shapes of Qwen3. Requests go to the host directly, without HTTP; answers end after a given number of tokens
- violations: requests whose TTFT, or whose mean time per token (TPOT), exceeds the objective
- of idle: rollout tokens/s as a share of (1 - busy, alone) * the rollout's tokens/s while nothing is served
- added: P99 of TPOT beside that of serving alone
- activation: `copy`: the rollout's weights from host memory to the device; `first token`: until its first token. The
  engine is built before (`build`: kernels, graphs, self-test), beside the service, once per run
- naive: serving has its host, the rollout a worker's engine in another process; the device switches between them

coserve_load.py has the load, coserve_host.py the processes. The machine must be idle otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COLUMNS = (
    ("what", 9), ("load", 15), ("req", 5), ("busy", 5), ("TTFT p50", 9), ("p99 ms", 7), ("TPOT p50", 9), ("p99 ms", 7),
    ("added", 6), ("late", 5), ("rollout tok/s", 14), ("of idle", 8),
)  # fmt: skip


class Child:
    """A process of the benchmark. Its figures are collected; its output is printed if it fails."""

    def __init__(self, role: str, job: dict[str, Any]) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "support" / "coserve_host.py"), role, json.dumps(job)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.figures: list[dict[str, Any]] = []
        self._tail: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("FIGURE "):
                self.figures.append(json.loads(line[7:]))
                print("  " + short(self.figures[-1]), flush=True)
            else:
                self._tail = [*self._tail, line.rstrip()][-25:]

    def wait(self, timeout_s: float) -> None:
        """Wait for its end; after the time limit it is killed, and what it has measured is kept."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._tail.append(f"killed after {timeout_s:g} s")
            code = -1
        self._reader.join(5)
        if code:
            print("\n".join(f"    | {line}" for line in self._tail), flush=True)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def short(figure: dict[str, Any]) -> str:
    values = "  ".join(f"{k} {v:.4g}" for k, v in figure["values"].items())
    return f"{figure['what']} {figure['load']}: {values}"


def measure(job: dict[str, Any], modes: list[str], timeout_s: float) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    phases = [m for m in modes if m != "naive"] + (["activation"] if job["activation"] else [])
    print(f"serving {job['serving']}, rollout {job['rollout']}", flush=True)
    if phases:
        child = Child("host", {**job, "phases": phases})
        child.wait(timeout_s)
        figures += child.figures
    if "naive" in modes:
        request_s = next((f["values"]["seconds"] for f in figures if f["what"] == "request"), 0.0)
        with tempfile.TemporaryDirectory() as folder:
            counter = Path(folder) / "tokens"
            more = {**job, "counter": str(counter), "phases": ["naive"], "request_s": request_s}
            rollout = Child("rollout", more)
            try:
                end_s = time.monotonic() + timeout_s / 2
                while not counter.exists() and rollout.alive and time.monotonic() < end_s:
                    time.sleep(0.1)
                if counter.exists():
                    child = Child("host", more)
                    child.wait(timeout_s)
                    figures += child.figures
                else:
                    print("    | the rollout process did not start", *rollout._tail, sep="\n    | ", flush=True)
            finally:
                rollout.kill()
    return figures


def row_of(cells: list[str]) -> str:
    both = zip(cells, (width for _, width in COLUMNS), strict=True)
    return " ".join(cell.rjust(width) if n > 1 else cell.ljust(width) for n, (cell, width) in enumerate(both))


def table(figures: list[dict[str, Any]]) -> list[str]:
    idle = next((f["values"]["rollout_tok_per_s"] for f in figures if f["what"] == "rollout idle"), 0.0)
    alone = {f["load"]: f["values"] for f in figures if f["what"] == "alone"}
    naive = {f["load"]: f["values"]["rollout_tok_per_s"] for f in figures if f["what"] == "naive"}
    lines = [row_of([name for name, _ in COLUMNS])]
    for load in alone or naive:
        for what in ("alone", "windfall", "naive serving"):
            for f in (f for f in figures if f["what"] == what and f["load"] == load):
                v = f["values"]
                rollout = naive.get(load, 0.0) if what == "naive serving" else v["rollout_tok_per_s"]
                first = alone.get(load)
                allowed = idle * max(0.0, 1.0 - first["busy"]) if first else 0.0
                added = v["tpot_p99_ms"] / first["tpot_p99_ms"] - 1.0 if first and first["tpot_p99_ms"] else 0.0
                cells = [
                    what.split()[0], load, f"{v['requests']:.0f}", f"{v['busy']:.0%}", f"{v['ttft_p50_ms']:.1f}",
                    f"{v['ttft_p99_ms']:.1f}", f"{v['tpot_p50_ms']:.2f}", f"{v['tpot_p99_ms']:.2f}",
                    "" if what == "alone" else f"{added:+.0%}", f"{v['violations']:.0f}",
                    f"{rollout:.0f}" if rollout else "", f"{rollout / allowed:.0%}" if rollout and allowed else "",
                ]  # fmt: skip
                lines.append(row_of(cells))
    lines += [short(f) for f in figures if f["what"] in ("rollout idle", "activation")]
    return lines


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--serving", default="", help="shape that is served: 0.6b, 1.7b, 8b or tiny")
    parser.add_argument("--rollout", default="", help="shape of the rollout")
    parser.add_argument("--modes", default="alone,windfall,naive")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.2, 0.4, 0.6])
    parser.add_argument("--burst", type=float, default=4.0, help="factor of the rate in the middle third; 1: no burst")
    parser.add_argument("--seconds", type=float, default=18.0, help="length of each run")
    parser.add_argument("--trace", default="", help="CSV file with TIMESTAMP, ContextTokens and GeneratedTokens")
    parser.add_argument("--max-prompt", type=int, default=4096)
    parser.add_argument("--max-output", type=int, default=96, help="upper limit for the tokens of an answer")
    parser.add_argument("--running", type=int, default=64, help="requests that are decoded at once")
    parser.add_argument("--responses", type=int, default=128, help="rollout responses in flight")
    parser.add_argument("--rollout-tokens", type=int, default=512, help="upper limit for the tokens of a response")
    parser.add_argument("--kv-tokens", type=int, default=262_144, help="tokens of the served model that fit")
    parser.add_argument("--ttft-ms", type=float, default=500.0)
    parser.add_argument("--tpot-ms", type=float, default=150.0)
    parser.add_argument("--max-slowdown", type=float, default=0.15, help="as of windfall serve; 0: no limit")
    parser.add_argument("--activation", default="", help="also measure the activation of this shape, such as 8b")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the processes of one mode")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.loads, options.seconds = [0.4], min(options.seconds, 8.0)
    if options.device == "cpu" or (options.device == "auto" and not _has_gpu()):
        options.device = "cpu"
        options.serving, options.rollout = options.serving or "tiny", options.rollout or "tiny"
        options.max_prompt, options.rollout_tokens = min(options.max_prompt, 128), min(options.rollout_tokens, 64)
        options.kv_tokens, options.responses = min(options.kv_tokens, 16_384), min(options.responses, 8)
        options.running, options.max_output = min(options.running, 16), min(options.max_output, 32)
    options.serving, options.rollout = options.serving or "0.6b", options.rollout or "1.7b"
    return options


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    options = options_of()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    job = {k: v for k, v in vars(options).items() if k not in ("out", "modes", "quick", "timeout")}
    job["request_s"] = 0.0
    began_s = time.monotonic()
    figures = measure(job, options.modes.split(","), options.timeout)
    print()
    print("\n".join(table(figures)))
    print(f"{time.monotonic() - began_s:.0f} s")
    if options.out is not None:
        options.out.write_text(json.dumps({"options": job, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
