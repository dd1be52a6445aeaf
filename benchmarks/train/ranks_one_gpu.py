"""Several ranks of the trainer on one GPU: every exchange of tensors runs on tensors of the GPU, and is compared with
one rank.

    python benchmarks/train/ranks_one_gpu.py                 two ranks on one GPU
    python benchmarks/train/ranks_one_gpu.py --device cpu    the same on CPU tensors

NCCL refuses two ranks on one GPU, so gloo moves the tensors. First every collective is tried with tensors of the GPU;
one that gloo lacks is done through host memory, and a line says so. Then each line is a trainer as a run builds it: it
trains two updates with clipped gradients, publishes each, saves a checkpoint, is built anew from it, and trains one
more. "moments" is the largest relative difference from one rank of Adam's first moments after an update, which are the
gradients; "weights" is that of the weights at the end. At last a rank is killed in a pass, and one rank goes on from a
checkpoint of several. This tests exchanges; it says nothing about their speed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from windfall.link import messages as m
from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.trainer import checkpoint, trained_weights
from windfall.trainer.checkpoint import VerifiedCheckpoint
from windfall.trainer.process import PolicySetup, RankPart, Setup
from windfall.trainer.ranks.ranks import Orders, RankLost, TrainerRanks
from windfall.trainer.trainer import TorchTrainer
from windfall.training import CheckpointState, Sample

TRAINED = ("all weights", "adapters, split base", "adapters, whole base")
LIMITS = {"float32": (1e-2, 1e-2), "bfloat16": (0.1, 0.2)}
"""Largest differences of moments and weights. Packs of other sizes are rounded differently, and Adam divides small
gradients by their own size. A rank whose gradients are missing makes a difference of about one."""
PROBE_S, PASS_S = 20.0, 60.0
"""Time limits of a collective, while they are tried and while a trainer uses them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    trained: str
    dtype: str
    context: int = 1

    def recipe(self) -> Recipe:
        train: dict[str, Any] = {"lr": 1e-4, "clip_norm": 0.01, "engine_gap_limit": 50.0, "engine_gap_alarm": 50.0}
        if self.trained != TRAINED[0]:
            train["lora"] = {"rank": 6}
        sections = {"model": {"path": "tiny"}, "train": train, "fleet": {"local": False}, "run": {"steps": 9}}
        return parse_recipe(sections, where="benchmark")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", nargs="+", choices=list(LIMITS), default=["bfloat16", "float32"])
    parser.add_argument("--seconds", type=float, default=120.0, help="No case begins later.")
    args = parser.parse_args()
    began_s = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_main, args=(rank, Path(folder), args)) for rank in range(args.ranks)]
        for process in ranks:
            process.start()
        until_s = began_s + args.seconds + 120
        while ranks[0].is_alive() and time.monotonic() < until_s and not any(each.exitcode == 1 for each in ranks):
            ranks[0].join(1.0)
        for process in ranks:
            process.kill()
            process.join()
    print(f"{time.monotonic() - began_s:.0f} s in all", flush=True)
    raise SystemExit(ranks[0].exitcode)


def rank_main(rank: int, folder: Path, args: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    if args.device == "cuda":
        torch.cuda.set_device(0)
    began_s = time.monotonic()
    meetings = (f"file://{folder}/meeting-{n}" for n in count())
    join = partial(join_ranks, rank, args.ranks, meetings, args.device)
    names = missing_collectives(join, args.device)
    for name in names:
        setattr(dist, name, through_host(getattr(dist, name)))
    how = f"done through host memory: {', '.join(names)}" if names else "gloo has all collectives"
    say(rank, f"{args.ranks} ranks on {args.device}; {how}")
    titles = f"{'grad norm':>11}{'moments':>9}{'weights':>9}{'s':>6}"
    say(rank, f"{'trained':<24}{'dtype':<10}{'context':>8}{titles}")
    ranks, wrong, last = join(PASS_S), 0, None
    for case in cases(args):
        head = f"{case.trained:<24}{case.dtype:<10}{case.context:>8}"
        try:
            if not ranks.broadcast(time.monotonic() - began_s < args.seconds):
                say(rank, "no time for the other cases")
                wrong += 1
                break
            found = several(ranks, case, folder / f"{case.trained}-{case.dtype}-{case.context}")
        except Exception as e:  # the next cases need ranks that wait for nothing
            traceback.print_exc()
            print(f"{head}  rank {rank}: {type(e).__name__}: {e}"[:250], flush=True)
            wrong += 1
            dist.destroy_process_group()
            ranks = join(PASS_S)
            continue
        if found is None:  # rank 0 compares
            continue
        last = found
        try:
            line, good = compare(found, one_rank(case, args.device, folder))
        except Exception as e:  # the next cases may have more luck
            line, good = f"  one rank: {type(e).__name__}: {e}"[:250], False
        wrong += not good
        say(rank, head + line)
    wrong += not lose_a_rank(ranks, cases(args)[0], folder / "lost")
    if last is not None:
        wrong += not go_on_alone(last, args.device, folder)
    os._exit(1 if wrong else 0)  # the group of a lost rank cannot be closed


def say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def cases(args: Any) -> list[Case]:
    contexts = [n for n in (1, 2, 4) if args.ranks % n == 0]
    return [Case(trained=t, dtype=d, context=c) for d in args.dtype for c in contexts for t in TRAINED]


def join_ranks(rank: int, size: int, meetings: Iterator[str], device: str, timeout_s: float) -> TrainerRanks:
    """All ranks meet again, each time at the next meeting point."""
    return TrainerRanks.join(rank, size, next(meetings), device=device, timeout_s=timeout_s, on_gpu="gloo")


# collectives


def missing_collectives(join: Callable[[float], TrainerRanks], device: str) -> list[str]:
    """The collectives that gloo does not have for tensors on this device, by their names in torch.distributed."""
    ranks = join(PROBE_S)
    size, group = ranks.size, ranks.tensors

    def share(x: torch.Tensor) -> torch.Tensor:
        return x[: len(x) // size].clone()

    tried: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda x: dist.all_reduce(x, group=group),
        "broadcast": lambda x: dist.broadcast(x, 0, group=group),
        "all_gather": lambda x: dist.all_gather([torch.empty_like(x) for _ in range(size)], x, group=group),
        "all_to_all_single": lambda x: dist.all_to_all_single(torch.empty_like(x), x, group=group),
    }
    for name in ("all_gather_into_tensor", "all_gather_single"):  # the second one is that of newer versions of torch
        tried[name] = lambda x, name=name: getattr(dist, name)(torch.empty_like(x), share(x), group=group)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        tried[name] = lambda x, name=name: getattr(dist, name)(share(x), x, group=group)
    tried = {name: work for name, work in tried.items() if hasattr(dist, name)}
    missing: list[str] = []
    lost = False
    for name, work in tried.items():
        try:
            if lost:
                raise RuntimeError("the ranks have lost each other")
            for dtype in (torch.float32, torch.bfloat16):
                if not name.startswith("reduce") or dtype == torch.float32:  # gradients are float32
                    work(torch.ones(4 * size, 3, device=device, dtype=dtype))
        except (RuntimeError, NotImplementedError, ValueError) as e:
            lost = lost or "imed out" in str(e) or "onnection" in str(e)
            missing.append(name)
            if ranks.first:
                print(f"gloo on {device}: {name}: {str(e).splitlines()[0][:150]}", flush=True)
    dist.destroy_process_group()
    return missing


def through_host(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The same collective, which copies tensors of a GPU to host memory and back."""

    def staged(*args: Any, **options: Any) -> None:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def on_host(x: Any) -> Any:
            if isinstance(x, list):
                return [on_host(each) for each in x]
            if not isinstance(x, torch.Tensor) or not x.is_cuda:
                return x
            copies.append((x, x.cpu()))
            return copies[-1][1]

        plain(*map(on_host, args), **{n: on_host(x) for n, x in options.items()} | {"async_op": False})
        for there, here in copies:
            there.copy_(here)

    return staged


# a trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a trainer did."""

    case: Case
    norms: list[float]
    moments: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    digests: list[str]
    saved: VerifiedCheckpoint
    """After two updates."""
    took_s: float


def several(ranks: TrainerRanks, case: Case, folder: Path) -> Found | None:
    """On rank 0, what the ranks did together. It waits for the others, so that all begin the next case together."""
    began_s = time.monotonic()
    if ranks.first:
        for part in ("first", "second"):
            (folder / part).mkdir(parents=True, exist_ok=True)
    ranks.barrier()
    first = train(ranks, case, folder / "first", None, range(1, 3))
    saved = ranks.broadcast(first and first[-1])
    second = train(ranks, case, folder / "second", saved, range(3, 4))
    if first is None or second is None:
        return None
    return Found(
        case=case, norms=first[0] + second[0], digests=first[1] + second[1], took_s=time.monotonic() - began_s,
        moments=tensors(saved, checkpoint.OPTIMIZER, "exp_avg."), weights=weights(second[-1]), saved=saved,
    )  # fmt: skip


def one_rank(case: Case, device: str, folder: Path) -> Found:
    """What one rank does. Computed once for all cases that train the same in the same dtype."""
    alone = Case(trained=TRAINED[case.trained != TRAINED[0]], dtype=case.dtype)
    if alone not in _ALONE:
        found = several(TrainerRanks.alone(device), alone, folder / f"one-{alone.trained}-{alone.dtype}")
        assert found is not None
        _ALONE[alone] = found
    return _ALONE[alone]


_ALONE: dict[Case, Found] = {}


def train(
    ranks: TrainerRanks, case: Case, folder: Path, saved: VerifiedCheckpoint | None, steps: range
) -> tuple[list[float], list[str], VerifiedCheckpoint] | None:
    """Build the trainer, publish, train these steps, and save the last. On rank 0, norms of gradients, digests of
    versions, and the checkpoint."""
    recipe, orders = case.recipe(), Orders(ranks)
    if not ranks.first:
        part = RankPart(recipe, folder, orders)
        orders.follow()
        part.close()
        return None
    where = "cpu" if ranks.distributed else ranks.device
    model = load.load(trained_weights.model_to_load(recipe, saved), dtype=case.dtype, device=where)
    loaded = trained_weights.prepare(model, recipe, saved, dtype=case.dtype)
    part = RankPart(recipe, folder, orders, loaded={"": loaded})
    own = PolicySetup(
        micro_tokens=96, checkpoint=saved.path if saved else None,
        adapter=loaded.adapters.config if loaded.adapters else None,
    )  # fmt: skip
    setup = Setup(
        model_config=model.config, dtype=case.dtype, checkpoint_activations=False, onednn=False, policies={"": own},
        context=case.context, whole_base=case.trained == TRAINED[2],
    )  # fmt: skip
    orders.call(part.build, setup)
    policy, norms = part.policies[""], []
    trainer = policy.trainer
    assert trainer is not None
    digests = [orders.call(part.publish, "", steps[0] - 1, m.Publish(id="")).digest]
    for step in steps:
        samples = make_samples(step)
        trainer.forward_backward(trainer.forward(samples) if step % 2 else samples)
        report = trainer.optim_step()
        assert not report.skipped
        norms.append(report.grad_norm)
        digests.append(orders.call(part.publish, "", step, m.Publish(id="")).digest)
    collect = lambda: orders.call(part.collect, "")  # noqa: E731
    write = partial(policy.weights.write_published, model, policy.publisher, collect)
    checkpoint.save(
        folder / "checkpoints", CheckpointState(step=steps[-1], next_task=0), keep=9,
        write_model=write if ranks.distributed else loaded.saved.save_pretrained, base=loaded.base,
        tokenizer=load.load_tokenizer("tiny"), write_optimizer=trainer.write_optimizer,
    )  # fmt: skip
    orders.stop()
    part.close()
    found = checkpoint.newest(folder / "checkpoints")
    assert found is not None
    return norms, digests, found


def make_samples(seed: int) -> list[Sample]:
    """Responses of unequal length; of the shortest, a rank of a context group has no token."""
    rng, out = np.random.default_rng(seed), []
    for prompt, length in ((2, 50), (1, 3), (30, 12), (5, 21), (3, 64), (7, 9)):
        ids = tuple(rng.integers(3, 98, prompt + length).tolist())
        targets = tuple(range(prompt, prompt + length))
        behavior, advantage = rng.normal(-4.5, 0.3, length), float(rng.normal())
        out.append(Sample(ids=ids, targets=targets, behavior=behavior, advantage=advantage, limit=64))
    return out


def tensors(saved: VerifiedCheckpoint, file: str, prefix: str = "") -> dict[str, torch.Tensor]:
    return {n: t.float() for n, t in load_file(saved.path / file).items() if n.startswith(prefix)}


def weights(saved: VerifiedCheckpoint) -> dict[str, torch.Tensor]:
    adapter = (saved.path / "adapter_model.safetensors").exists()
    return tensors(saved, "adapter_model.safetensors" if adapter else "model.safetensors")


# comparisons


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor."""
    assert ours.keys() == theirs.keys()
    least = 1e-3 * max(float(t.norm()) for t in theirs.values())
    return max(float((ours[n] - t).norm() / t.norm().clamp(min=least)) for n, t in theirs.items())


def compare(found: Found, alone: Found) -> tuple[str, bool]:
    moments, weights = difference(found.moments, alone.moments), difference(found.weights, alone.weights)
    most = LIMITS[found.case.dtype]
    norms = max(abs(a - b) / b for a, b in zip(found.norms, alone.norms, strict=True))
    line = f"{found.norms[0]:>11.4f}{moments:>9.1e}{weights:>9.1e}{found.took_s:>6.1f}"
    if found.digests[2] != found.digests[3]:
        return f"{line}  WRONG: the first version after the restart is not the one that was saved", False
    if moments < most[0] and weights < most[1] and norms < most[0] and len(set(found.digests)) == 4:
        return line, True
    return f"{line}  WRONG: one rank has norms {alone.norms}, these have {found.norms}", False


def lose_a_rank(ranks: TrainerRanks, case: Case, folder: Path) -> bool:
    """The last rank kills itself in a pass. Returns whether the others noticed."""
    if ranks.first:
        folder.mkdir()
    ranks.barrier()
    if ranks.rank == ranks.size - 1:
        TorchTrainer._weights = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
    began_s = time.monotonic()
    try:
        train(ranks, case, folder, None, range(1, 3))
    except RankLost as e:
        if ranks.first:
            after = f"noticed {time.monotonic() - began_s:.1f} s after the trainer began to be built"
            print(f"a rank is killed in a pass: {after}: {str(e)[:150]}", flush=True)
        return True
    return False


def go_on_alone(found: Found, device: str, folder: Path) -> bool:
    """One rank goes on from the checkpoint of several."""
    (folder / "alone").mkdir()
    case = replace(found.case, context=1)
    third = train(TrainerRanks.alone(device), case, folder / "alone", found.saved, range(3, 4))
    assert third is not None
    apart = difference(weights(third[-1]), found.weights)
    good = apart < LIMITS[found.case.dtype][1] and third[1][0] == found.digests[2]
    how = f"{'the same version' if third[1][0] == found.digests[2] else 'WRONG: another version'}"
    print(f"one rank from the checkpoint of several: {how}, then weights differ by {apart:.1e}", flush=True)
    return good


if __name__ == "__main__":
    main()
