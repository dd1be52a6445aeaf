"""Two policies that are trained together on one GPU, beside one policy that says the same: seconds per iteration.

    python benchmarks/train/two_policies.py --model 0.6b                   an H200; six runs, about a minute each
    python benchmarks/train/two_policies.py --model tiny --device cpu      check that the benchmark itself works

In every session a solver and a verifier write `--tokens` tokens each (random weights, so nothing ends earlier).

    one policy         has both roles, so it trains on twice as many tokens as each of two
    adapters           two adapters of one base: one trainer, one worker that holds both
    all weights        two models: two trainers, two workers; all four processes share the GPU
    staleness 0        a step begins when both policies have published: generating and training take turns
    staleness 1        policies go on at their own pace

An iteration is one step of every policy: the time from the second step of the run to its last one. `waits`: share of
it in which the trainer of a policy waits for responses.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.gpu_job import SHAPES
from windfall.events import log as events
from windfall.types import Feedback, Task, Turn

ROOT = Path(__file__).parents[2]
RECIPE = """
[run]
folder = "{folder}"
name = "{name}"
steps = {steps}
device = "{device}"
[model]
path = "{model}"
[env]
name = "custom"
factory = "benchmarks.train.two_policies:Talk"
options = {{ solver = "{solver}", verifier = "{verifier}" }}
[rollout]
groups = {groups}
group_size = 8
max_tokens = {tokens}
staleness = {staleness}
[train]
lr = 1e-6
[checkpoint]
every = 1000
[eval]
tasks = 0
[fleet]
workers = {workers}
worker_memory = {memory}
local = false
"""
LORA = {"adapters": "{ rank = 16 }", "all weights": ""}
WAYS = [
    ("one policy", "adapters", 1), ("two policies", "adapters", 0), ("two policies", "adapters", 1),
    ("one policy", "all weights", 1), ("two policies", "all weights", 0), ("two policies", "all weights", 1),
]  # fmt: skip


class Talk:
    """Each role says one thing. Rewards are as good as random."""

    def __init__(self, seed: int = 0, *, solver: str, verifier: str) -> None:
        self._roles = (solver, verifier)

    def task(self, index: int) -> Task:
        return Task(id=str(index), prompt=f"Task {index}: ", answer="", role=self._roles[0])

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        if len(turns) == 1:
            return Feedback(observation="Is it right? ", role=self._roles[1])
        return Feedback(rewards={turn.role: float(zlib.crc32(turn.text.encode()) % 2) for turn in turns})


def write_model(folder: Path, shape: str) -> None:
    """A model with random weights, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = AutoConfig.for_model(**SHAPES[shape])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {letter: n + 1 for n, letter in enumerate(letters)}  # 1 ends a response in every shape that has so few ids
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)


def run(place: Path, way: tuple[str, str, int], args: argparse.Namespace) -> str:
    policies, kind, staleness = way
    two, lora = policies == "two policies", LORA[kind]
    name = f"{policies}-{kind}-{staleness}".replace(" ", "-")
    workers = 2 if two and not lora else 1
    solver, verifier = ("solver", "verifier") if two else (":solver", ":verifier")
    text = RECIPE.format(
        folder=place, name=name, steps=args.steps, device=args.device, model=place / "model", solver=solver,
        verifier=verifier, groups=args.groups, tokens=args.tokens, staleness=staleness, workers=workers,
        memory=0.3 / workers,
    )  # fmt: skip
    sections = [f"[policies.{p}]\n" + (f"lora = {lora}\n" if lora else "") for p in (solver, verifier)] if two else []
    if two:
        sections[1] += f"rollout = {{ max_tokens = {args.tokens + 32} }}\n"  # its observation counts
    elif lora:
        sections = ["[train.lora]\nrank = 16\n"]
    recipe, said = place / f"{name}.toml", place / f"{name}.log"
    recipe.write_text(text + "\n".join(sections))
    with said.open("w") as out:
        command = [sys.executable, "-m", "windfall.run.cli", "train", str(recipe)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        code = subprocess.run(command, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=args.timeout_s).returncode
    if code:
        raise RuntimeError(f"{name} failed:\n{said.read_text()[-3000:]}")
    steps = [e for e in events.read(place / name / "events.jsonl") if (e["kind"], e["name"]) == ("scalar", "step")]
    began = max(e["m"] for e in steps if e["step"] == 2)
    counted = [e for e in steps if e["step"] > 2]
    seconds = max(e["m"] for e in counted) - began
    names = sorted({e.get("policy", "") for e in counted})
    waits = [sum(e["train_wait_s"] for e in counted if e.get("policy", "") == n) / seconds for n in names]
    waited = " ".join(f"{w:.0%}" for w in waits)
    trained = sum(e["trained"] for e in counted)
    return (
        f"{policies:14}{kind:13}{staleness:>9}{seconds / (args.steps - 2):>12.2f} s{trained / seconds:>13,.0f}"
        f"{waited:>12}{max(e['engine_gap'] for e in counted):>12.2g}"
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="0.6b", choices=list(SHAPES))
    p.add_argument("--device", default="cuda")
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--groups", type=int, default=32, help="per step, each of 8 responses")
    p.add_argument("--tokens", type=int, default=512, help="of each role")
    p.add_argument("--only", default="", help="runs whose name has this in it, such as two-policies-adapters")
    p.add_argument("--timeout-s", type=float, default=240, help="timeout of each run in seconds")
    args = p.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_model(place / "model", args.model)
        for way in WAYS:
            if args.only in "-".join(map(str, way)).replace(" ", "-"):
                lines.append(run(place, way, args))
                print(lines[-1], flush=True)
    print(f"\n{args.model}, {args.groups} x 8 sessions per step, {args.tokens} tokens of each role:")
    heads = f"{'':27}{'staleness':>9}{'s/iteration':>14}{'trained/s':>13}{'waits':>12}{'engine gap':>12}"
    print("\n".join([heads, *lines]))


if __name__ == "__main__":
    main()
