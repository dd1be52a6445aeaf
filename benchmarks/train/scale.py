"""What several ranks cost and save in training: tokens/s and memory of each rank.

    python benchmarks/train/scale.py                    1, 2 and 4 ranks on this CPU (gloo), a small model
    python benchmarks/train/scale.py --device cuda      one GPU: unsharded, FSDP2, adapters; 0.6B, 16 layers of 8B
    python benchmarks/train/scale.py --device cuda --profile    also the device time of a step by kernel

"adapters fsdp2" has a split base, "adapters whole" is one rank of several that have the whole base: both sum gradients
over the ranks, which is one rank here. With --variant also: "fsdp2 keep" does not free the weights of a layer between
its forward and its backward pass, "fsdp2 prefetch" gathers every layer before it is needed, "transformers" is unsharded
with the layers of transformers, and "compiled" the same under torch.compile.

On a CPU the ranks share the cores, so tokens/s show the overhead of sharding, not a speed-up. "state" is what a rank
must keep between two passes: weights, gradients and the optimizer's moments; "paper" is what the formula says
(src/windfall/trainer/ranks/rank_budget.py). Share of peak: as in train_gpu.py.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3Config

from benchmarks.train.random_model import random_model, random_samples
from windfall import algorithms
from windfall.recipe.file import parse_recipe
from windfall.recipe.lora import Lora
from windfall.trainer.model import lora
from windfall.trainer.ranks.rank_budget import ModelShape, rank_budget
from windfall.trainer.ranks.ranks import Orders, TrainerRanks
from windfall.trainer.ranks.sharding import decoder_layers, rows, sharded_policy
from windfall.trainer.trainer import TorchTrainer, peak_bytes
from windfall.training import Sample

PEAK = 990e12
VARIANTS = (
    "unsharded", "fsdp2", "adapters", "adapters fsdp2", "adapters whole", "fsdp2 keep", "fsdp2 prefetch",
    "transformers", "compiled",
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
    },
    "cpu": {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True,
    },
    "0.6B": {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "8B": {  # 16 of its 36 layers, so that all state fits on one GPU
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", nargs="+", choices=list(SHAPES), help="Default: cpu; on a GPU 0.6B and 8B.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--variant", nargs="+", choices=VARIANTS, help="With one rank. Default on a GPU: the first five."
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0, help="With one rank, no row begins later.")
    args = parser.parse_args()
    titles = f"{'tok/s':>10}{'x':>7}{'peak share':>12}{'state MB':>10}{'paper MB':>10}{'peak MB':>10}"
    print(f"{'model':<22}{'variant':<16}{'ranks':>5}{titles}")
    if args.device == "cuda" or args.variant:
        rows_of_one_rank(args)
        return
    for name in args.model or ("cpu",):
        first = 0.0
        for size in args.ranks:
            variant = "unsharded" if size == 1 else "fsdp2"
            found = in_processes(size, name, variant, "cpu", args.steps)
            first = first or found[0][0]
            show(name, variant, found, first)


def rows_of_one_rank(args: Any) -> None:
    """One row after the other in this process. A row that fails says why."""
    began_s = time.monotonic()
    for name in args.model or (("0.6B", "8B") if args.device == "cuda" else ("tiny",)):
        first = 0.0
        for variant in args.variant or VARIANTS[:5]:
            if time.monotonic() - began_s > args.seconds:
                print(f"{name:<22}{variant:<16}  no time", flush=True)
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = [
                        measure(0, 1, f"file://{folder}/ranks", name, variant, args.device, args.steps, args.profile)
                    ]
                    first = first or found[0][0]
                    show(name, variant, found, first, args.device)
                except Exception as e:  # the other rows are still worth having
                    print(f"{name:<22}{variant:<16}  {type(e).__name__}: {e}"[:250], flush=True)
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()


def show(
    name: str, variant: str, found: list[tuple[float, float, int, int]], first: float, device: str = "cpu"
) -> None:
    speed, share = found[0][0], found[0][1]
    state, peak = (max(row[i] for row in found) / 1e6 for i in (2, 3))
    shown = f"{share:>12.1%}" if share else f"{'-':>12}"
    paper = (
        f"{paper_bytes(name, len(found), device, sharded=variant == 'fsdp2') / 1e6:>10,.2f}"
        if variant in ("unsharded", "fsdp2")
        else f"{'-':>10}"
    )
    figures = f"{speed:>10,.0f}{speed / first:>7.2f}{shown}{state:>10,.2f}{paper}{peak:>10,.0f}"
    print(f"{name:<22}{variant:<16}{len(found):>5}{figures}", flush=True)


def paper_bytes(name: str, ranks: int, device: str = "cpu", *, sharded: bool = False) -> float:
    s = SHAPES[name]
    shape = ModelShape(
        hidden=s["hidden_size"], intermediate=s["intermediate_size"], layers=s["num_hidden_layers"],
        heads=s["num_attention_heads"], kv_heads=s["num_key_value_heads"], head=s["head_dim"],
        vocabulary=s["vocab_size"], tied=s["tie_word_embeddings"],
    )  # fmt: skip
    layout = rank_budget(shape, ranks, pack_tokens=1, value_bytes=2 if device == "cuda" else 4).layout
    return replace(layout, sharded=sharded or ranks > 1).gpu_bytes


def in_processes(size: int, *args: Any) -> list[Any]:
    """Run `measure` on every rank, each in a new process."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        started = [
            context.Process(target=send_measured, args=(pipes[rank][1], rank, size, f"file://{folder}/ranks", *args))
            for rank in range(size)
        ]
        for process in started:
            process.start()
        try:
            found = []
            for rank, (receiver, _) in enumerate(pipes):
                while not receiver.poll(1.0):
                    if not started[rank].is_alive() and not receiver.poll():
                        raise SystemExit(f"rank {rank} ended with status {started[rank].exitcode}")
                found.append(receiver.recv())
            return found
        finally:
            for process in started:
                process.join(20)
                process.kill()


def send_measured(pipe: Any, *args: Any) -> None:
    pipe.send(measure(*args))


def measure(
    rank: int, size: int, meeting: str, name: str, variant: str, device: str, steps: int, profile: bool = False
) -> tuple[float, float, int, int]:
    """Returns tokens/s, share of peak, bytes of state, and peak bytes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    alone = variant in ("unsharded", "adapters", "transformers", "compiled")
    ranks = TrainerRanks.alone(device)
    if not alone:
        ranks = TrainerRanks.join(rank, size, meeting, device=device, timeout_s=300)
    trainer = make_trainer(name, variant, ranks)
    layers: list[Any] = decoder_layers(trainer.model)
    if "prefetch" in variant:
        prefetch(layers)
    if variant in ("transformers", "compiled"):
        trainer.learner.policy.body = None
    for layer in layers:
        if "keep" in variant:
            layer.set_reshard_after_forward(False)
        if variant == "compiled":
            layer.compile()
    peak_bytes(torch.device(device))
    if not ranks.first:
        trainer.orders.follow()
        return 0.0, 0.0, state_bytes(trainer), peak_bytes(torch.device(device))
    samples = make_samples(name)
    tokens = sum(len(s.ids) for s in samples)
    began_s, report = 0.0, None
    for step in range(steps + 1):
        if step == 1:  # the first step compiles, allocates, and creates the moments of the optimizer
            began_s = time.perf_counter()
        trainer.forward_backward(samples)
        report = trainer.optim_step()
        assert not report.skipped
    took_s = (time.perf_counter() - began_s) / steps
    share = flops(trainer.model, samples) / took_s / PEAK if device == "cuda" and "adapters" not in variant else 0.0
    if profile:
        show_profile(lambda: (trainer.forward_backward(samples), trainer.optim_step()), device)
    trainer.orders.stop()
    assert report is not None
    return tokens / took_s, share, state_bytes(trainer), report.peak_bytes


def prefetch(layers: list[Any]) -> None:
    """Let every layer gather the next one before it computes, in both directions."""
    for one, two in pairwise(layers):
        one.set_modules_to_forward_prefetch([two])
        two.set_modules_to_backward_prefetch([one])


def show_profile(step: Callable[[], Any], device: str) -> None:
    """Where the time of a step goes, and how often what is called."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    for key in (["self_device_time_total"] if device == "cuda" else []) + ["self_cpu_time_total"]:
        print(found.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=60), flush=True)


def make_trainer(name: str, variant: str, ranks: TrainerRanks) -> TorchTrainer:
    adapters = "adapters" in variant
    sections = {"train": {"engine_gap_limit": 1e9, "engine_gap_alarm": 1e9}}
    dtype = torch.float32 if ranks.device == "cpu" else torch.bfloat16
    shape = Qwen3Config(**SHAPES[name], max_position_embeddings=4096)

    def attach(model: Any) -> None:
        if adapters:
            lora.attach(model, Lora(rank=16), base="none", seed=0)

    model: Any = None
    if ranks.first:
        model = random_model(shape, ranks.device, dtype)
        attach(model)
    if ranks.distributed:
        source = model and dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        options: dict[str, Any] = {"dtype": dtype, "prepare": attach, "whole_base": "whole" in variant}
        model = sharded_policy(shape, source, ranks, **options)
        del source
        gc.collect()
    micro = 16_384 if ranks.device == "cuda" else 2048
    return TorchTrainer(
        model, algorithms.make("dr_grpo"), parse_recipe(sections, where="benchmark"), micro_tokens=micro,
        orders=Orders(ranks),
    )  # fmt: skip


def make_samples(name: str) -> list[Sample]:
    draw = random.Random(0)
    count, least, most = {"tiny": (8, 16, 64), "cpu": (48, 64, 256)}.get(name, (48, 512, 2048))
    return random_samples([draw.randrange(least, most) for _ in range(count)], SHAPES[name]["vocab_size"])


def state_bytes(trainer: TorchTrainer) -> int:
    """Bytes of this rank's weights, gradients and moments."""
    held = {id(p): rows(p) for p in trainer.model.parameters()}
    total = sum(t.numel() * t.element_size() for t in held.values())
    gone = trainer.optimizer.gradients.sharded  # FSDP2 allocates the sums again in the next pass
    sums = 4 * sum(rows(p).numel() for p in trainer.model.parameters() if p.requires_grad and gone)
    return total + sums + sum(t.nbytes for t in trainer.optimizer.tensors())


def flops(model: Any, samples: list[Sample]) -> float:
    """Floating point operations of one step."""
    c = model.config
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    matrices += c.vocab_size * c.hidden_size if c.tie_word_embeddings else 0
    attention = sum(
        12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * len(s.ids) ** 2 / 2 for s in samples
    )
    return 6 * matrices * sum(len(s.ids) for s in samples) + attention


if __name__ == "__main__":
    main()
