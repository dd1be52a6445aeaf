"""Training on several ranks gives what one rank gives, up to float32 rounding: losses, gradients, weights, reports.

The ranks are real processes that talk over gloo. The models are small, but of every kind that is treated in its own
way: tied and untied heads, norms of queries and keys, experts, adapters.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tests.support.ranks import rank_tensors
from tests.support.ranks.rank_processes import run_ranks
from windfall import algorithms
from windfall.models import attention
from windfall.recipe.file import parse_recipe
from windfall.recipe.lora import Lora
from windfall.trainer.model import lora
from windfall.trainer.ranks import sharded_file
from windfall.trainer.ranks.ranks import Orders, RankLost, TrainerRanks
from windfall.trainer.ranks.sharding import as_shard, fill, rows, sharded_policy, slice_of
from windfall.trainer.trainer import TorchTrainer, packs_of_ranks
from windfall.training import Sample
from windfall.weights.publishing.publish import RankRows

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "llama adapters": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen3 adapters": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "experts adapters": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "qwen3 adapters, whole base": Qwen3Config(**SHAPE, tie_word_embeddings=True),
}
QUICK = (("qwen3", 4), ("experts", 2), ("qwen3 adapters", 4), ("qwen3 adapters, whole base", 2))
"""Models and numbers of ranks that cover most of the others."""
WITH_KL = ("llama tied", "qwen3 adapters", "qwen3 adapters, whole base")
UPDATES = 3


def make_parts(name: str) -> tuple[Any, lora.Adapters | None]:
    """The model, and its adapters. Those have an effect: B is not zero."""
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(
        MODELS[name], dtype=torch.float32, attn_implementation=attention.NAME
    ).eval()
    adapters = attach(name, model)
    for layer in adapters.layers.values() if adapters else ():
        torch.nn.init.normal_(layer.lora_B, 0.0, 0.1)
    return model, adapters


def make_model(name: str) -> Any:
    return make_parts(name)[0]


def attach(name: str, model: Any) -> lora.Adapters | None:
    section = Lora(rank=3, targets=["q_proj", "v_proj"] if name.startswith("llama") else "all")
    return lora.attach(model, section, base="", seed=0) if "adapters" in name else None


def make_samples(seed: int, count: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        prompt, length = int(rng.integers(1, 8)), int(rng.integers(1, 30))
        sample = Sample(
            ids=tuple(int(t) for t in rng.integers(0, 61, prompt + length)),
            targets=tuple(range(prompt, prompt + length)), behavior=rng.normal(-4.1, 0.3, length),
            advantage=float(rng.normal()) if i % 4 else 0.0, limit=64,
        )  # fmt: skip
        out.append(sample)
    return out


def with_experts(sample: Sample) -> Sample:
    """As if an engine had recorded the experts of the two layers."""
    rng = np.random.default_rng(len(sample.ids))
    chosen = [rng.permutation(4)[:2] for _ in range(2 * (len(sample.ids) - 1))]
    return replace(sample, experts=np.stack(chosen).astype(np.uint8).tobytes())


def batches() -> list[list[list[Sample]]]:
    """The samples of every update in groups, as they arrive. One has fewer samples than there are ranks, with none to
    learn from."""
    return [[make_samples(10 * u + g, count) for g, count in enumerate((9, 1, 3))] for u in range(UPDATES)]


def tensors(model: Any) -> dict[str, torch.Tensor] | None:
    return model.state_dict() | dict(model.named_buffers()) if model is not None else None


def make_trainer(
    name: str, ranks: TrainerRanks, *, kl: float = 0.0, share: float = 0.0, dtype: torch.dtype = torch.float32,
    **train: Any,
) -> TorchTrainer:  # fmt: skip
    sections: dict[str, Any] = {
        "train": {"lr": 1e-2, "engine_gap_limit": 50.0, "engine_gap_alarm": 50.0, "weight_decay": 0.1} | train,
        "algorithm": {"kl": kl},
        "run": {"steps": 20},
    }
    recipe = parse_recipe(sections, where="test")
    model, adapters = make_parts(name) if ranks.first else (None, None)
    reference: Any = None
    if ranks.size == 1:
        model = model.to(dtype)
        reference = (adapters or make_model(name)) if kl else None
    else:
        found: list[lora.Adapters | None] = []
        options: dict[str, Any] = {"dtype": dtype}
        whole_base = name.endswith("whole base")
        model = sharded_policy(
            MODELS[name], tensors(model), ranks, prepare=lambda m: found.append(attach(name, m)),
            whole_base=whole_base, **options,
        )  # fmt: skip
        reference = found[0]
        if kl and reference is None:
            source = make_model(name) if ranks.first else None
            reference = sharded_policy(MODELS[name], tensors(source), ranks, trained=False, **options)
        reference = reference if kl else None
    algorithm = algorithms.make("grpo")
    options: dict[str, Any] = {"orders": Orders(ranks), "reference": reference, "host_share": share}
    return TorchTrainer(model, algorithm, recipe, micro_tokens=64, **options)


class Collector:
    """Gathers what a trainer's ranks hold."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.model, self.ranks = trainer.model, trainer.ranks
        trainer.orders.add(self)

    def gradients(self) -> dict[str, torch.Tensor]:
        return rank_tensors.gradients(self.ranks, dict(self.model.named_parameters()))

    def weights(self) -> dict[str, torch.Tensor]:
        return rank_tensors.weights(self.ranks, dict(self.model.named_parameters()))


def train(ranks: TrainerRanks, name: str, kl: float) -> Any:
    """Five updates. From rank 0: reports, gradients before the last update, weights after it."""
    t = make_trainer(name, ranks, kl=kl)
    reports, gradients, collector = [], None, Collector(t)
    if not ranks.first:
        t.orders.follow()
        return None
    for update, groups in enumerate(batches(), 1):
        t.zero_grad()
        for group in groups:
            t.forward_backward(list(map(with_experts, group)) if name.startswith("experts") else group)
        if update == UPDATES:
            gradients = t.orders.call(collector.gradients)
        reports.append(t.optim_step())
    weights = t.orders.call(collector.weights)
    t.orders.stop()
    return reports, gradients, weights


@functools.cache
def one_rank(name: str, kl: float) -> Any:
    (result,) = run_ranks(1, train, name, kl)
    return result


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if (name, size) in QUICK else pytest.mark.slow)
        for name in MODELS
        for size in (2, 4)
    ],
)
def test_ranks_agree_with_one_rank(name: str, size: int) -> None:
    kl = 0.1 if name in WITH_KL else 0.0
    reports, gradients, weights = one_rank(name, kl)
    assert all(r.grad_norm > 0 for r in reports)
    found = run_ranks(size, train, name, kl)[0]
    for one, several in zip(reports, found[0], strict=True):
        for key in ("tokens", "responses", "skipped"):
            assert getattr(one, key) == getattr(several, key)
        assert one.replayed_experts == name.startswith("experts")
        assert (one.expert_load > 1) == name.startswith("experts")
        rounded = ("grad_norm", "entropy", "engine_gap", "engine_gap_max", "clipped", "kl")
        for key in (*rounded, "replayed_experts", "expert_load"):
            assert getattr(several, key) == pytest.approx(getattr(one, key), rel=1e-4, abs=1e-6), key
    for what, ours, theirs in (("gradient", found[1], gradients), ("weight", found[2], weights)):
        assert ours.keys() == theirs.keys()
        for n, value in theirs.items():
            difference = float((ours[n] - value).norm() / value.norm().clamp(min=1e-6))
            assert difference < 2e-4, f"{what} {n} of {size} ranks differs by {difference:.2g}"


def save_and_restore(ranks: TrainerRanks, folder: Path, first: int) -> Any:
    """Train on the first `first` ranks' file, or from the start; write, and give the weights and the state."""
    t = make_trainer("qwen3", ranks, share=0.5 if ranks.size == 3 else 0.0)
    collector = Collector(t)
    if first:
        source = torch.load(folder / f"weights-{first}.pt") if ranks.first else None
        fill(t.model, source and source | dict(make_model("qwen3").named_buffers()), ranks)
        t.restore_optimizer(folder / f"optimizer-{first}.safetensors")
    if not ranks.first:
        t.orders.follow()
        return None
    for groups in batches()[:1] if not first else batches()[1:2]:
        for group in groups:
            t.forward_backward(group)
        assert (t.optim_step().state_moved_bytes > 0) == (ranks.size == 3)
    weights = t.orders.call(collector.weights)
    if not first:
        torch.save(weights, folder / f"weights-{ranks.size}.pt")
        t.write_optimizer(folder / f"optimizer-{ranks.size}.safetensors")
    t.orders.stop()
    return weights, t.optimizer.updates


def test_optimizer_state_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    """Written by one and three ranks, read by one, two and three: always the same result. Of three ranks, each has a
    part of its rows' state in host memory."""
    for size in (1, 3):
        run_ranks(size, save_and_restore, tmp_path, 0)
    one, three = (load_file(tmp_path / f"optimizer-{size}.safetensors") for size in (1, 3))
    assert one.keys() == three.keys()
    assert all(torch.allclose(value.float(), three[n].float(), rtol=1e-3, atol=1e-7) for n, value in one.items())
    expected, updates = run_ranks(1, save_and_restore, tmp_path, 1)[0]
    assert updates == 2
    for reader, writer in ((1, 3), (3, 1), (2, 3)):
        found, updates = run_ranks(reader, save_and_restore, tmp_path, writer)[0]
        assert updates == 2
        for n, value in expected.items():
            assert (found[n] - value).norm() < 2e-4 * value.norm().clamp(min=1e-6), f"{n}: {writer} to {reader} ranks"


def rewrite_moments(ranks: TrainerRanks, folder: Path, writer: int) -> None:
    """Write the moments in 8 bits: those of an update, or those that `writer` ranks wrote."""
    t = make_trainer("qwen3", ranks, optimizer="adamw_8bit", share=0.5 if ranks.size == 2 else 0.0)
    if writer:
        t.restore_optimizer(folder / f"{writer}.safetensors")
    if not ranks.first:
        t.orders.follow()
        return
    if not writer:
        t.forward_backward(batches()[0][0])
        t.optim_step()
    t.write_optimizer(folder / f"{ranks.size}.safetensors")
    t.orders.stop()


def test_moments_in_8_bits_move_between_numbers_of_ranks(tmp_path: Path) -> None:
    """Their blocks do not depend on it. Of two ranks, each has a part of them in host memory."""
    for size, writer in ((3, 0), (1, 3), (2, 1)):
        run_ranks(size, rewrite_moments, tmp_path, writer)
    written = load_file(tmp_path / "3.safetensors")
    assert sum(t.dtype == torch.int8 for t in written.values()) > 10
    for reader in (1, 2):
        found = load_file(tmp_path / f"{reader}.safetensors")
        moments = {n for n in written if n.startswith(("exp_avg", "step"))}
        assert moments == {n for n in found if n.startswith(("exp_avg", "step"))}
        assert all(torch.equal(found[n], written[n]) for n in moments)


def move_bfloat16(ranks: TrainerRanks, folder: Path, writer: int) -> Any:
    """Train a bfloat16 model for two updates, from the start or from the files of `writer` ranks, which are written
    again before that. Returns the weights before and after, on rank 0."""
    t = make_trainer("llama tied", ranks, dtype=torch.bfloat16)
    collector = Collector(t)
    if writer:
        source = torch.load(folder / f"weights-{writer}.pt") if ranks.first else None
        fill(t.model, source and source | dict(make_model("llama tied").named_buffers()), ranks)
        t.restore_optimizer(folder / f"{writer}.safetensors")
    if not ranks.first:
        t.orders.follow()
        return None
    if writer:
        t.write_optimizer(folder / f"{writer} to {ranks.size}.safetensors")
    before = t.orders.call(collector.weights)
    for groups in batches()[:2] if not writer else batches()[1:3]:
        for group in groups:
            t.forward_backward(group)
        t.optim_step()
    after = t.orders.call(collector.weights)
    if not writer:
        torch.save({n: w.bfloat16() for n, w in after.items()}, folder / f"weights-{ranks.size}.pt")
        t.write_optimizer(folder / f"{ranks.size}.safetensors")
    t.orders.stop()
    return before, after


@pytest.mark.slow
def test_float32_masters_of_a_bfloat16_model_move_between_numbers_of_ranks(tmp_path: Path) -> None:
    """One rank keeps bfloat16 weights and their masters; several have masters only. The file is the same."""
    for size in (1, 4):
        run_ranks(size, move_bfloat16, tmp_path, 0)
    _, expected = run_ranks(1, move_bfloat16, tmp_path, 1)[0]
    for reader, writer in ((1, 4), (2, 1)):
        before, after = run_ranks(reader, move_bfloat16, tmp_path, writer)[0]
        file, again = (load_file(tmp_path / f"{name}.safetensors") for name in (writer, f"{writer} to {reader}"))
        assert file.keys() == again.keys()
        assert all(torch.equal(value, again[n]) for n, value in file.items()), f"{writer} to {reader} ranks"
        for n, w in before.items():
            master = file[f"master.{n}"]
            assert master.dtype == torch.float32
            assert torch.equal(w, master.to(w.dtype)), n
            assert not torch.equal(master, master.bfloat16().float()), "the file has more than the rounded weights"
        for n, w in after.items() if writer == 1 else ():  # the other files have other weights, by bfloat16 rounding
            assert (w.float() - expected[n].float()).norm() < 5e-3 * expected[n].float().norm(), n


def write_shards(ranks: TrainerRanks, path: Path) -> None:
    whole = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    each = -(-7 // ranks.size)
    mine = whole[ranks.rank * each : (ranks.rank + 1) * each]
    shards = {
        "matrix": RankRows(local=mine, shape=(7, 5), first_row=min(ranks.rank * each, 7)),
        "number": RankRows(local=torch.tensor(4), shape=()),
        "bytes": RankRows(local=torch.tensor([1, 2, 3], dtype=torch.uint8) * (1 + ranks.rank), shape=(3,)),
    }
    sharded_file.write(path, shards, ranks)


def test_sharded_file_is_the_same_for_every_number_of_ranks(tmp_path: Path) -> None:
    for size in (1, 3):
        run_ranks(size, write_shards, tmp_path / f"{size}.safetensors")
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "3.safetensors").read_bytes()
    found = load_file(tmp_path / "3.safetensors")
    assert found["matrix"].flatten().tolist() == list(range(35))
    assert (found["number"].item(), found["bytes"].tolist()) == (4, [1, 2, 3])
    rows_3_and_4 = RankRows(local=torch.zeros(2, 5), shape=(7, 5), first_row=3)
    sharded_file.read(tmp_path / "3.safetensors", {"matrix": rows_3_and_4, "absent": rows_3_and_4})
    assert rows_3_and_4.local.flatten().tolist() == list(range(15, 25))
    with pytest.raises(ValueError, match=r"matrix has shape \[7, 5\] in the file, expected \[8, 5\]"):
        sharded_file.read(tmp_path / "3.safetensors", {"matrix": RankRows(local=torch.zeros(8, 5), shape=(8, 5))})


def fail_to_write(ranks: TrainerRanks, folder: Path) -> str:
    try:
        write_shards(ranks, folder / "no such folder" / "file")
    except OSError as e:
        return str(e)
    return ""


def test_every_rank_learns_that_a_file_cannot_be_written(tmp_path: Path) -> None:
    assert all("No such file" in error for error in run_ranks(2, fail_to_write, tmp_path))


def compare_routing(ranks: TrainerRanks) -> float:
    """Of three samples, one has known experts: only one rank has something to compare."""
    t = make_trainer("experts", ranks)
    if not ranks.first:
        t.orders.follow()
        return 0.0
    samples = make_samples(2, 3)
    t.forward_backward([with_experts(samples[0]), *samples[1:]])
    gap = t.optim_step().router_gap
    t.orders.stop()
    return gap


def test_ranks_agree_on_what_is_computed_without_replay() -> None:
    gap, _ = run_ranks(2, compare_routing)
    assert gap == pytest.approx(run_ranks(1, compare_routing)[0], rel=1e-4)
    assert gap > 0


class Work:
    """What the ranks of a test do together."""

    def __init__(self, orders: Orders) -> None:
        self.ranks, self.sums = orders.ranks, 0
        orders.add(self)

    def sum(self, signal_number: int) -> torch.Tensor:
        self.sums += 1
        if self.ranks.rank == 2 and self.sums == 2:
            os.kill(os.getpid(), signal_number)
        return self.ranks.sum(torch.ones(1))

    def nothing(self) -> None:
        pass

    def learn(self) -> None:
        if self.ranks.rank == 1:
            raise MemoryError("too large")
        torch.distributed.all_reduce(torch.ones(1))


def lose_a_rank(ranks: TrainerRanks, signal_number: int) -> tuple[str, float]:
    """Three sums over all ranks. Rank 2 sends itself a signal before the second."""
    orders = Orders(ranks)
    work = Work(orders)
    began_s = time.monotonic()
    try:
        if not ranks.first:
            orders.follow()
        for _ in range(3):
            began_s = time.monotonic()
            assert orders.call(work.sum, signal_number).item() == ranks.size
    except RankLost as e:
        return str(e), time.monotonic() - began_s
    return "", 0.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_is_noticed_by_the_others(how: int) -> None:
    """A killed rank at once, because its connections end; a frozen one after the time limit of collectives."""
    limit_s = 60.0 if how == signal.SIGKILL else 3.0
    for error, took_s in run_ranks(3, lose_a_rank, how, timeout_s=limit_s, lost=(2,)):
        assert "waited" in error
        assert took_s < 15


def freeze_before_an_order(ranks: TrainerRanks) -> tuple[str, float]:
    """Rank 1 stops itself before it asks for the first order."""
    orders = Orders(ranks)
    work = Work(orders)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        orders.call(work.nothing)
    except RankLost as e:
        return str(e), time.monotonic() - began_s
    return "", 0.0


def test_frozen_rank_is_noticed_when_it_takes_no_order() -> None:
    """Even if the order has no collective of its own."""
    ((error, took_s),) = run_ranks(2, freeze_before_an_order, timeout_s=3.0, lost=(1,))
    assert "to give an order to rank 1 (limit 3 s)" in error
    assert took_s < 15


def order_after_a_loss(ranks: TrainerRanks) -> list[str]:
    """Rank 1 ends. When rank 0 gives its second order, the connection has failed before."""
    orders = Orders(ranks)
    work = Work(orders)
    if not ranks.first:
        return []
    errors = []
    for _ in range(2):
        try:
            orders.call(work.nothing)
        except Exception as e:
            errors.append(f"{type(e).__name__}: {e}")
    return errors


def test_rank_that_was_lost_before_an_order_is_noticed() -> None:
    (errors,) = run_ranks(2, order_after_a_loss, lost=(1,))
    assert len(errors) == 2
    assert all(e.startswith("RankLost: ") and "to give an order to rank 1" in e for e in errors), errors


def freeze_in_a_pass(ranks: TrainerRanks) -> tuple[str, float]:
    """Rank 1 stops itself between the forward and the backward pass of its first pack."""
    t = make_trainer("llama", ranks)
    if ranks.rank == 1:
        t._weights = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign, return-value]
    began_s = time.monotonic()
    try:
        if not ranks.first:
            t.orders.follow()
        t.forward_backward(make_samples(1, 9))
    except RankLost:
        return traceback.format_exc(), time.monotonic() - began_s
    return "", 0.0


def test_frozen_rank_is_noticed_in_a_pass() -> None:
    ((error, took_s),) = run_ranks(2, freeze_in_a_pass, timeout_s=3.0, lost=(1,))
    assert "_fsdp_collectives.py" in error
    assert "Timed out waiting 3000ms" in error
    assert took_s < 15


def fail_while_others_wait(ranks: TrainerRanks) -> str:
    """Rank 1 fails within an order; the others are in a collective that FSDP2 would run."""
    orders = Orders(ranks)
    work = Work(orders)
    try:
        orders.call(work.learn) if ranks.first else orders.follow()
    except (RankLost, MemoryError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def test_error_of_one_rank_is_a_loss_for_the_others() -> None:
    first, second, third = run_ranks(3, fail_while_others_wait, lost=())
    assert second == "MemoryError: too large"
    for error in (first, third):
        assert re.match(r"RankLost: rank [02] lost another one during `learn`: .*(by peer|gloo)", error), error


def test_packs_of_ranks_are_equal_in_number_and_lose_nothing() -> None:
    for count in (0, 1, 3, 40):
        made = make_samples(5, count)
        for size in (1, 2, 4):
            for padded in (True, False):
                plan = packs_of_ranks(made, 64, size, padded=padded)
                assert len(plan) == size
                assert len({len(packs) for packs in plan}) == 1
                found = sorted(id(s) for packs in plan for pack in packs for s in pack)
                assert found == sorted(id(s) for s in made)
                loads = [sum(len(s.ids) for pack in packs for s in pack) for packs in plan]
                assert count < 40 or max(loads) < 1.15 * min(loads)


def test_rows_of_a_rank_are_those_that_fsdp2_gives_it() -> None:
    assert run_ranks(3, rows_of_a_rank) == [[0, 1, 2], [3, 4, 5], [6]]


def rows_of_a_rank(ranks: TrainerRanks) -> list[int]:
    layer = torch.nn.Linear(1, 7, bias=False)
    layer.weight.data[:] = torch.arange(7.0)[:, None]
    fully_shard(layer, mesh=ranks.mesh())
    assert rows(layer.weight).flatten().tolist() == list(range(7))[slice_of(layer.weight)]
    assert as_shard(layer.weight).first_row == slice_of(layer.weight).start
    return [int(value) for value in rows(layer.weight).flatten()]
