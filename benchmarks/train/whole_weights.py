"""All weights on one GPU, where their state does not fit beside them: tokens/s, seconds of an update, and memory as
predicted and as measured.

    python benchmarks/train/whole_weights.py                        8B, 0.6B, 16 layers of 32B on one GPU
    python benchmarks/train/whole_weights.py --device cpu           a tiny model, to test this program

First it checks that updates are the same bit for bit wherever the state is, and measures the link to the host.
"adapters" and "all weights" are windfall's unsharded trainer with the layout that it chooses; "8-bit moments" has
train.optimizer = "adamw_8bit", "all in host memory" train.offload = true; "plain" is a loop with transformers, FSDP2 on
one rank and torch's AdamW, on padded packs. Random weights in the shapes of Qwen3, 48 samples of 512 to 2,048 tokens
per update. "x" is relative to the adapters of the same model.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config

from benchmarks.train.random_model import random_model
from benchmarks.train.scale import SHAPES, make_samples
from windfall import algorithms
from windfall.free_memory import free_bytes
from windfall.models.attention import NAME
from windfall.recipe.file import parse_recipe
from windfall.recipe.lora import Lora
from windfall.recipe.sections import Train
from windfall.trainer.memory_plan import plan_memory
from windfall.trainer.model import lora
from windfall.trainer.optimizer import Optimizer
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.trainer.ranks.sharding import decoder_layers
from windfall.trainer.trainer import TorchTrainer, packs, peak_bytes
from windfall.training import Sample

ALL: dict[str, dict[str, Any]] = {
    "tiny": SHAPES["tiny"],
    "0.6B": SHAPES["0.6B"],
    "8B": SHAPES["8B"] | {"num_hidden_layers": 36},
    "32B/4": SHAPES["8B"] | {"hidden_size": 5120, "intermediate_size": 25_600, "num_attention_heads": 64},
}
"""The last one has 16 of the 64 layers, and the whole embedding and head."""
VARIANTS: dict[str, dict[str, Any]] = {
    "adapters": {"lora": {"rank": 16}},
    "8-bit moments": {"optimizer": "adamw_8bit"},
    "all weights": {},
    "all in host memory": {"offload": True},
    "plain": {},
}
PLAIN_TOKENS = 8192
PLAIN_SHARE = 0.85
"""Share of the GPU that the state of the plain loop may need."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", nargs="+", choices=list(ALL))
    parser.add_argument("--variant", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=2, help="Timed updates, after one that is not.")
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no row after this time.")
    args = parser.parse_args()
    began_s = time.perf_counter()
    check(args.device)
    if args.device == "cuda":
        print(f"{torch.cuda.get_device_name()}; {link()}", flush=True)
    columns = ("tok/s", "x", "update s", "moved GB", "host GB", "predicted", "peak GB", "pack", "pin s")
    print(f"{'model':<7}{'variant':<20}" + "".join(f"{c:>10}" for c in columns))
    for name in args.model or (["tiny"] if args.device == "cpu" else ["8B", "0.6B", "32B/4"]):
        first = 0.0
        for variant in args.variant:
            if time.perf_counter() - began_s > args.seconds:
                continue
            try:
                row = plain(name, args) if variant == "plain" else windfall(name, variant, args)
            except Exception as e:  # the other rows follow
                row = [f"{type(e).__name__}: {e}".replace("\n", " ")[:300]]
            else:
                first = first or float(row[0])
                row.insert(1, row[0] / first)
            clean(args.device)
            print(f"{name:<7}{variant:<20}" + "".join(_cell(x) for x in row), flush=True)
    print(f"{time.perf_counter() - began_s:.0f} s in all")


def _cell(x: Any) -> str:
    return f"  {x}" if isinstance(x, str) else f"{x:>10,.0f}" if x >= 1000 else f"{x:>10.2f}"


def clean(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def check(device: str) -> None:
    """Updates of one model with its state in three places."""
    kinds: tuple[Literal["adamw", "adamw_8bit"], ...] = ("adamw", "adamw_8bit")
    for kind in kinds:
        found = [_updated(kind, share, device) for share in (0.0, 0.4, 1.0)]
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
        on_cpu = [t.cpu() for t in _updated(kind, 0.0, "cpu")]
        close = sum(int((a.cpu().float() - b.float()).abs().gt(0).sum()) for a, b in zip(found[0], on_cpu, strict=True))
        print(f"{kind}: updates are equal bit for bit with 0, 40 and 100 % of the state in host memory")
        print(f"{kind}: {close:,} of {sum(t.numel() for t in on_cpu):,} numbers differ from those on a CPU", flush=True)


def _updated(kind: Literal["adamw", "adamw_8bit"], share: float, device: str) -> list[torch.Tensor]:
    """Weights and state after four updates."""
    drawn = torch.Generator().manual_seed(0)
    shapes = [(1024 + 256 * n, 1000) for n in range(3)] + [(3000,)]
    weights = {
        str(n): torch.randn(*shape, generator=drawn).to(device, torch.bfloat16) for n, shape in enumerate(shapes)
    }
    for p in weights.values():
        p.requires_grad_()
    optimizer = Optimizer(weights, Train(weight_decay=0.1, optimizer=kind), 10, host_share=share)
    for _ in range(4):
        for p in weights.values():
            total = optimizer.gradients.of(p)
            assert total is not None
            total.add_(torch.randn(p.shape, generator=drawn).to(device))
        optimizer.update(1.0)
    return [*weights.values(), *(t.local.to(device) for t in optimizer.state().values())]


def link(nbytes: int = 1 << 30) -> str:
    """Bandwidth between the GPU and pinned memory."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pairs = [(each, torch.empty_like(each, device="cuda")) for each in host]
    streams = [torch.cuda.Stream() for _ in pairs]

    def copy(directions: tuple[int, ...]) -> float:
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for which in directions:
            host, device = pairs[which]
            with torch.cuda.stream(streams[which]):
                for _ in range(4):
                    (device if which == 0 else host).copy_(host if which == 0 else device, non_blocking=True)
        torch.cuda.synchronize()
        return 4 * nbytes / (time.perf_counter() - began_s) / 1e9

    copy((0, 1))
    return f"link to the host: {copy((0,)):.0f} GB/s in, {copy((1,)):.0f} out, {copy((0, 1)):.0f} each at once"


def model_of(name: str, device: str, dtype: torch.dtype, attention: str = NAME) -> Any:
    return random_model(Qwen3Config(**ALL[name], max_position_embeddings=4096), device, dtype, attention)


def samples_of(name: str) -> list[Sample]:
    return make_samples(name if name in SHAPES else "8B")  # which has the same vocabulary


def windfall(name: str, variant: str, args: Any) -> list[Any]:
    device = args.device
    train: dict[str, Any] = {"engine_gap_limit": 1e9, "engine_gap_alarm": 1e9, "lr": 1e-6}
    recipe = parse_recipe({"train": train | VARIANTS[variant]}, where="benchmark")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = model_of(name, device, dtype)
    samples = samples_of(name)
    longest = max(len(s.ids) for s in samples)
    free, total = (free_bytes("cuda"), torch.cuda.mem_get_info()[1]) if device == "cuda" else (64e9, 64e9)
    plan = plan_memory(recipe, model, longest, free=free, total=total, host=free_bytes())
    if variant == "adapters":
        lora.attach(model, Lora(rank=16), base="none", seed=0)
    began_s = time.perf_counter()
    trainer = TorchTrainer(
        model, algorithms.make("dr_grpo"), recipe, micro_tokens=plan.pack_tokens, host_share=plan.layout.host_share
    )
    pinned_s = time.perf_counter() - began_s
    report, peak = None, 0
    for step in range(args.steps + 1):
        if step == 1:
            began_s = time.perf_counter()
        trainer.forward_backward(samples)
        report = trainer.optim_step()
        assert not report.skipped
        peak = max(peak, report.peak_bytes)
    took_s = (time.perf_counter() - began_s) / args.steps
    assert report is not None
    return [
        sum(len(s.ids) for s in samples) / took_s, report.update_s, report.state_moved_bytes / 1e9,
        plan.layout.host_bytes / 1e9, plan.peak_bytes / 1e9, peak / 1e9, plan.pack_tokens, pinned_s,
    ]  # fmt: skip


def plain(name: str, args: Any) -> list[Any]:
    """A loop as in a tutorial, with the same samples."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = TrainerRanks.join(0, 1, f"file://{folder}/ranks", device=args.device, timeout_s=60)
        try:
            return _plain(name, args, ranks)
        finally:
            torch.distributed.destroy_process_group()


def _plain(name: str, args: Any, ranks: TrainerRanks) -> list[Any]:
    device, samples = args.device, samples_of(name)
    model = model_of(name, device, torch.float32, "sdpa").train()
    state_gb = 16e-9 * sum(p.numel() for p in model.parameters())
    if device == "cuda" and state_gb > PLAIN_SHARE * torch.cuda.mem_get_info()[1] / 1e9:
        raise RuntimeError(f"its state of {state_gb:.0f} GB leaves too little for activations")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*decoder_layers(model), model):
        fully_shard(module, mesh=ranks.mesh(), mp_policy=precision)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    began_s = updated_s = 0.0
    for step in range(args.steps + 1):
        if step == 1:
            began_s, updated_s = time.perf_counter(), 0.0
        for pack in packs(samples, PLAIN_TOKENS):
            _loss(model, pack, device).backward()
        _wait(device)
        update_s = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        _wait(device)
        updated_s += time.perf_counter() - update_s
    took_s = (time.perf_counter() - began_s) / args.steps
    peak = peak_bytes(torch.device(device)) / 1e9
    tokens = sum(len(s.ids) for s in samples)
    return [tokens / took_s, updated_s / args.steps, 0.0, 0.0, 0.0, peak, PLAIN_TOKENS, 0.0]


def _loss(model: Any, pack: list[Sample], device: str) -> torch.Tensor:
    ids = torch.zeros(len(pack), len(pack[0].ids), dtype=torch.long)
    weights = torch.zeros(len(pack), len(pack[0].ids) - 1, device=device)
    for n, s in enumerate(pack):
        ids[n, : len(s.ids)] = torch.tensor(s.ids)
        weights[n, : len(s.targets)] = s.advantage / 4096
    ids = ids.to(device)
    mask = (torch.arange(ids.shape[1])[None] < torch.tensor([len(s.ids) for s in pack])[:, None]).to(device)
    logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
    each = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return (each.view_as(weights) * weights).sum()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
