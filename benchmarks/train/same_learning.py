"""Whether drafts, the order of responses and an fp8 KV cache change what a run learns.

    python benchmarks/train/same_learning.py                    on a CPU, deterministic: the same run, bit for bit
    python benchmarks/train/same_learning.py --device cuda      on a GPU, also fp8: the same reward, up to rounding

Each run is `windfall train recipes/demo.toml` with two workers that stay: the tiny model learns arithmetic. `same` is
the number of steps after which reward, length, entropy, gradient and gap to the engine of every step so far have the
same bits as without. `reward`: on held-out tasks, before the first step and after the last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WITHOUT = {"engine.speculation": "off", "rollout.order": "fifo", "engine.kv_dtype": "auto"}
VARIANTS = {
    "without": {},
    "drafts": {"engine.speculation": "auto"},
    "context": {"rollout.order": "context"},
    "both": {"engine.speculation": "auto", "rollout.order": "context"},
    "fp8": {"engine.kv_dtype": "fp8"},
}
COMPARED = ("reward", "length", "entropy", "grad_norm", "engine_gap")


def run(steps: int, seed: int, device: str, sets: dict[str, str]) -> list[dict[str, Any]]:
    """The events of a run."""
    with tempfile.TemporaryDirectory() as name:
        sets = {
            **WITHOUT, **sets, "run.folder": name, "run.steps": str(steps), "run.seed": str(seed), "run.device": device,
            "run.deterministic": "true" if device == "cpu" else "false", "trace.nodes": "0", "fleet.workers": "2",
            "checkpoint.every": "1000", "eval.every": str(steps),
        }  # fmt: skip
        command = [sys.executable, "-m", "windfall.run.cli", "train", str(ROOT / "recipes" / "demo.toml")]
        command += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
        events = (Path(name) / "demo" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in events]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(f"{'seed':>5}{'':>10}{'reward':>17}{'same':>8}{'drafted':>10}{'accepted':>10}{'fp8 left':>10}")
    for seed in range(options.seeds):
        first: list[tuple[Any, ...]] = []
        for variant, sets in VARIANTS.items():
            if variant == "fp8" and options.device == "cpu":
                continue
            events = run(options.steps, seed, options.device, sets)
            steps = [e for e in events if (e["kind"], e["name"]) == ("scalar", "step")]
            learned = [tuple(e.get(key) for key in COMPARED) for e in steps]
            first = first or learned
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, learned, strict=True)))
            rewards = [e["reward"] for e in events if (e["kind"], e["name"]) == ("scalar", "eval")]
            drafted, accepted = (sum(e.get(key, 0) for e in steps) for key in ("drafted", "drafts_accepted"))
            left = sum(e["name"] == "kv_dtype" for e in events)
            print(
                f"{seed:5}{variant:>10}{f'{rewards[0]:.3f} to {rewards[-1]:.3f}':>17}{f'{same}/{len(steps)}':>8}"
                f"{drafted:>10}{accepted:>10}{left:>10}",
                flush=True,
            )


if __name__ == "__main__":
    main()
