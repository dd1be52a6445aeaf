"""Useful tokens/s on this CPU: windfall's engine compared with its peers, same models and prompts, in one run.

    python benchmarks/engine/cpu.py                the peers that are installed beside windfall
    benchmarks/engine/peers/install.sh .peers      installs the others (5 GB), which are then found there

There are two models (the tiny one, SmolLM2-135M) and two workloads, with 32 requests in flight (`--batch`): equal
lengths, and uneven ones (4 to 183 tokens, exponential), in groups of 8 that share a prompt. Useful tokens are those
requested: tokens that a peer generates only to fill its batch do not count. Every peer runs in its own process with the
same number of threads. The machine must be idle otherwise: `others` shows how many cores other processes used
meanwhile. On a busy machine, use `--threads 1 --repeats 3` and compare tokens per CPU second: neighbors change them far
less, and one thread never spins at a barrier.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from windfall.errors import WindfallError
from windfall.models import load

HERE = Path(__file__).parent / "peers"
PEERS = {  # script: which environment under the peers' folder
    "windfall_engine.py": None,
    "hf_generate.py": "trl",
    "hf_continuous.py": "trl",
    "trl_grpo.py": "trl",
    "vllm_cpu.py": "vllm",
}


def workload(model: str, kind: str, requests: int, threads: int, batch: int) -> dict[str, Any]:
    """Groups of 8 with one prompt of 24 tokens each, like in a rollout."""
    rng = random.Random(0)
    vocabulary = json.loads((Path(load.fetch(model)) / "config.json").read_text())["vocab_size"]
    prompts = [[rng.randrange(3, vocabulary) for _ in range(24)] for _ in range(-(-requests // 8))]
    lengths = {
        "equal": [64] * requests,
        "uneven": [min(183, 4 + int(rng.expovariate(1 / 55))) for _ in range(requests)],
    }
    return {
        "model": str(load.fetch(model)),
        "prompts": [prompts[i // 8] for i in range(requests)],
        "lengths": lengths[kind],
        "threads": threads,
        "batch": batch,
    }


def run(script: str, environment: str | None, folder: Path, work: Path, timeout_s: float) -> dict[str, Any]:
    inside = folder / environment / "bin" / "python" if environment else None
    python = str(inside) if inside and inside.exists() else sys.executable
    try:
        done = subprocess.run(
            [python, str(HERE / script), str(work)], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"peer": script, "skipped": f"timed out after {timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return {"peer": script, "skipped": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peers", type=Path, default=Path(".peers"), help="directory where install.sh installed the peers")
    p.add_argument("--models", default="tiny,smollm2-135m")
    p.add_argument("--lengths", default="equal,uneven", help="workloads to run")
    p.add_argument("--requests", type=int, default=64)
    p.add_argument("--batch", type=int, default=32, help="requests in flight")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--repeats", type=int, default=1, help="rounds over all peers; the table has medians")
    p.add_argument("--only", default=",".join(PEERS), help="scripts to run, from benchmarks/engine/peers")
    p.add_argument("--timeout-s", type=float, default=900)
    p.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    args = p.parse_args()
    out, results = Console(), []
    if not out.is_terminal:
        out.width = 150  # do not wrap lines in a log file
    for model in args.models.split(","):
        try:
            load.fetch(model)
        except WindfallError as e:
            out.print(f"{model} skipped: {e}")
            continue
        for kind in args.lengths.split(","):
            table = Table(
                title=f"{model}, {kind} lengths, {args.requests} requests, {args.batch} at once, {args.threads} threads"
            )
            for column in ("engine", "version", "tok/s", "windfall is", "tok/CPU s", "windfall is", "others", "note"):
                table.add_column(column, justify="left" if column in ("engine", "version", "note") else "right")
            measured: dict[str, list[dict[str, Any]]] = {script: [] for script in PEERS if script in args.only}
            with tempfile.NamedTemporaryFile("w", suffix=".json") as f, out.status(f"{model} {kind}") as status:
                json.dump(workload(model, kind, args.requests, args.threads, args.batch), f)
                f.flush()
                for script in [*measured] * args.repeats:
                    status.update(f"{model}, {kind} lengths: {script}")
                    r = run(script, PEERS[script], args.peers, Path(f.name), args.timeout_s)
                    measured[script].append(r)
                    results.append({"model": model, "kind": kind, **r})
            own: list[float] = []
            for repeats in measured.values():
                done = [r for r in repeats if "skipped" not in r]
                if not done:
                    table.add_row(repeats[0]["peer"], *["-"] * 6, repeats[0]["skipped"])
                    continue
                rates = [median(r["useful_tokens"] / r[time] for r in done) for time in ("seconds", "cpu_s")]
                own = own or rates
                shown = [text for x, y in zip(own, rates, strict=True) for text in (f"{y:,.1f}", f"{x / y:.2f}x")]
                others = median(r["others_cores"] for r in done)
                table.add_row(done[0]["peer"], done[0]["version"], *shown, f"{others:.2f}", done[0]["note"])
            out.print(table)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
