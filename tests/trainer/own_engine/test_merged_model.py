"""The trainer's own engine with adapters: it generates what trainer and workers compute, and frees its copies."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engines.gpu_case import graph_engine
from tests.support.engines.small_models import build, drain, engine, logprobs, requests, tokens
from windfall.models import attention, load
from windfall.recipe.lora import Lora
from windfall.trainer.model import lora
from windfall.trainer.own_engine.merged_model import MergedModel
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerTurn
from windfall.weights.merged import MergedWeights, is_repeated

TARGETS = {"all": "all", "q and v, up": ["q_proj", "v_proj", "up_proj"],
           "head": ["k_proj", "lm_head"], "embeddings": ["embed_tokens"]}  # fmt: skip


@pytest.fixture(params=["llama", "qwen3"])
def base(request: pytest.FixtureRequest) -> Any:
    torch.set_num_threads(1)
    model = build(request.param)
    model.set_attn_implementation(attention.NAME)
    return model


def attach(model: Any, targets: Any = "all") -> lora.Adapters:
    adapters = lora.attach(model, Lora(rank=3, targets=targets), base="", seed=0)
    update(adapters, seed=1)
    return adapters


@torch.no_grad()
def update(adapters: lora.Adapters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for t in adapters.tensors().values():
        t.add_(0.05 * torch.randn(t.shape, generator=generator))


def worker_engine(base: Any, adapters: lora.Adapters) -> Any:
    """An engine after a worker's swap."""
    model = copy.deepcopy(base)
    if any(not is_repeated(name) for name in adapters.layers):
        load.untie(model)
    out = engine(model)
    published = {n: t.detach().clone() for n, t in adapters.tensors().items()}
    out.swap(1, MergedWeights(base.state_dict(), published, adapters.scale))
    return out


@torch.no_grad()
def trainer_logprobs(adapters: lora.Adapters, ids: list[int], first: int) -> torch.Tensor:
    model = copy.deepcopy(adapters.model)
    model.set_attn_implementation("eager")
    logp = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    return logp[first - 1 : -1].gather(1, torch.tensor(ids[first:])[:, None])[:, 0]


@pytest.mark.parametrize("targets", TARGETS)
def test_trainer_its_engine_and_a_worker_agree(base: Any, targets: str) -> None:
    """The same tokens with the same log-probs, bit for bit between the engines, and to rounding with the trainer."""
    adapters = attach(copy.deepcopy(base), TARGETS[targets])
    merged = MergedModel(adapters.model)
    asked = requests(6)
    own, worker = drain(engine(merged.module), asked), drain(worker_engine(base, adapters), asked)
    plain = drain(engine(copy.deepcopy(base)), asked)
    assert any(tokens(plain[r.id]) != tokens(own[r.id]) for r in asked), "the adapter has no effect"
    for r in asked:
        assert tokens(own[r.id]) == tokens(worker[r.id])
        assert logprobs(own[r.id]) == logprobs(worker[r.id])
        theirs = trainer_logprobs(adapters, [*r.prompt, *tokens(own[r.id])], len(r.prompt))
        assert torch.allclose(torch.tensor(logprobs(own[r.id])), theirs, atol=1e-4)


def test_everything_but_the_adapted_matrices_is_shared(base: Any) -> None:
    adapters = attach(copy.deepcopy(base), ["q_proj"])
    merged = MergedModel(adapters.model)
    ours, theirs = lora.base_tensors(adapters.model), merged.module.state_dict()
    assert ours.keys() == theirs.keys()
    own = {n.rpartition(".self_attn.")[2] for n, t in theirs.items() if t.data_ptr() != ours[n].data_ptr()}
    assert own == {"q_proj.weight", "k_proj.weight", "v_proj.weight"}, "k and v may be joined with q"
    assert all(torch.equal(t, ours[n]) for n, t in theirs.items() if "q_proj.weight" not in n)


@pytest.mark.parametrize("targets", TARGETS)
def test_joining_engine_leaves_the_weights_of_the_trainer(base: Any, targets: str) -> None:
    """The GPU engine, on its reference kernels: it joins matrices, also those of the shared layers."""
    adapters = attach(copy.deepcopy(base), TARGETS[targets])
    before = {n: t.clone() for n, t in adapters.model.state_dict().items()}
    merged = MergedModel(adapters.model)
    runs, asked = graph_engine(merged.module), requests(4)
    expected = drain(runs, asked)
    runs.sleep()
    assert all(torch.equal(t, before[n]) for n, t in adapters.model.state_dict().items())
    merged.merge()
    runs.swap(1)
    again = drain(runs, asked)
    assert all(tokens(again[r.id]) == tokens(expected[r.id]) for r in asked)
    assert all(logprobs(again[r.id]) == logprobs(expected[r.id]) for r in asked)


def test_engine_of_the_trainer_follows_at_the_swap_and_wakes_with_the_right_weights(base: Any) -> None:
    adapters = attach(copy.deepcopy(base))
    merged, turn = MergedModel(adapters.model), TrainerTurn()
    version = SimpleNamespace(version=0)
    runs = TrainerEngine(graph_engine(merged.module), turn, published=lambda: version, share_memory=True, merged=merged)

    def generate() -> dict[str, list[Any]]:
        out: dict[str, list[Any]] = {}
        for r in asked:
            runs.add(r)
        while len(runs):
            for chunk in runs.step():
                out.setdefault(chunk.id, []).append(chunk)
        return out

    asked = requests(3)
    for version.version in (0, 1, 2):
        with turn:
            runs.invalidate()
            update(adapters, seed=10 + version.version)
        runs.swap(version.version)
        expected = drain(graph_engine(MergedModel(adapters.model).module), asked)
        for _ in range(2):
            with turn:
                runs.make_room()  # the trainer trains on something
            made = generate()
            assert all(tokens(made[r.id]) == tokens(expected[r.id]) for r in asked)
            assert all(c.version == version.version for chunks in made.values() for c in chunks)
