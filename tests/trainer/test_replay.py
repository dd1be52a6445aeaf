"""Routing replay: tokens are computed by the experts that the engine recorded, weighted by the trainer's own router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, softmax

from tests.support.engines.small_models import drain, engine, experts_model, requests, tokens
from tests.support.hostile import models as hostile
from windfall.algorithms import make
from windfall.chosen_experts import UNKNOWN
from windfall.engine.selftest.small_model import _weight_names
from windfall.errors import WindfallError
from windfall.models import experts as experts_module
from windfall.models.attention import NAME
from windfall.models.experts import ExpertReader, known, on_device
from windfall.recipe.file import parse_recipe
from windfall.trainer import selftest
from windfall.trainer import trainer as trainer_module
from windfall.trainer.model.gradients import Gradients, trained
from windfall.trainer.model.logprobs import Learner, pack_experts
from windfall.trainer.trainer import TokenTotals, TorchTrainer
from windfall.training import Sample

CHOSEN = 2
EXPERTS = 8
WIDTH = 2 * CHOSEN
"""Bytes of a token: two layers have experts."""


def model(dtype: torch.dtype = torch.float32) -> Any:
    made = experts_model(EXPERTS)
    made.set_attn_implementation(NAME)
    return made.to(dtype)


def random_samples(lengths: Sequence[int] = (17, 5, 11)) -> list[Sample]:
    """With random experts; those of some tokens are not known, and the last sample has none."""
    rng, out = np.random.default_rng(0), list[Sample]()
    for n in lengths:
        rows = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(2 * (n - 1))]).astype(np.uint8)
        data = rows.tobytes()
        data = data[: 2 * WIDTH] + UNKNOWN * WIDTH + data[3 * WIDTH :]
        ids = tuple(int(t) for t in rng.integers(3, 160, n))
        targets = tuple(range(3, n))
        out.append(
            Sample(ids=ids, targets=targets, behavior=np.zeros(n - 3), advantage=0.0, limit=n,
                   experts=data if len(out) < len(lengths) - 1 else b"")
        )  # fmt: skip
    return out


def fix_experts(reference: Any, given: torch.Tensor) -> None:
    """Plain torch: every router returns these experts, and its own weights for them. -1: as without."""
    gates = [layer.mlp.gate for layer in reference.model.layers if hasattr(layer.mlp, "gate")]
    for gate, rows in zip(gates, given, strict=True):

        def forward(x: torch.Tensor, gate: Any = gate, rows: torch.Tensor = rows) -> Any:
            logits = linear(x.reshape(-1, x.shape[-1]), gate.weight)
            probs = softmax(logits, dim=-1)
            index = torch.where(rows < 0, probs.topk(CHOSEN, -1).indices, rows)
            scores = probs.gather(-1, index)
            return logits, scores / scores.sum(-1, keepdim=True), index

        gate.forward = forward


def reference_gradients(
    samples: Sequence[Sample], weights: Sequence[np.ndarray]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Log-probs and gradients in float64, one sample after the other, by transformers with its loop over experts."""
    reference, found = experts_model(EXPERTS).double(), []
    reference.config._experts_implementation = "eager"
    for s, w in zip(samples, weights, strict=True):
        rows = np.full((len(s.ids), 2, CHOSEN), -1)
        if s.experts:
            known = np.frombuffer(s.experts, np.uint8).reshape(-1, 2, CHOSEN)
            rows[:-1] = np.where(known == 255, -1, known.astype(int))
        fix_experts(reference, torch.from_numpy(rows).transpose(0, 1))
        logits = reference(input_ids=torch.tensor([s.ids])).logits[0]
        at = torch.tensor(s.targets)
        logp = torch.log_softmax(logits[at - 1], -1).gather(-1, torch.tensor(s.ids)[at][:, None])[:, 0]
        (-(torch.tensor(w) * logp).sum()).backward()
        found.append(logp.detach())
    return torch.cat(found), {name: p.grad for name, p in reference.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_gradients_are_those_of_plain_torch_with_the_same_experts(experts: str, recompute: bool) -> None:
    rng, samples = np.random.default_rng(1), random_samples()
    weights = [rng.normal(size=len(s.targets)) for s in samples]
    wanted, gradients = reference_gradients(samples, weights)
    ours = model()
    ours.config._experts_implementation = experts
    if recompute:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    learner = Learner(ours, Gradients(trained(ours)), say=lambda line: None)
    logp, _ = learner.score(samples, 1.0)
    torch.testing.assert_close(logp.double(), wanted, rtol=0, atol=2e-5)
    own, _ = learner.score(samples, 1.0, replay=False)
    assert (own.double() - wanted).abs().max() > 1e-2, "other experts give other log-probs"
    learner.learn(samples, 1.0, lambda a, b, logp, entropy: np.concatenate(weights[a:b]))
    for name, p in ours.named_parameters():
        size = gradients[name].norm()
        assert size > 0, name
        assert (p.grad.double() - gradients[name]).norm() < 1e-4 * size, name


def test_every_trained_token_has_the_experts_of_the_engine() -> None:
    """The trainer's weights differ from the engine's, so its routers would choose others."""
    trainer, served = model(), model()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in trainer.named_parameters():
            p += 0.2 * p.std() * torch.randn_like(p) * name.endswith("gate.weight")
    asked = requests(6)
    chunks = drain(engine(served, experts=True), asked)
    samples = []
    for r in asked:
        new = tokens(chunks[r.id])
        behavior = np.array([x for c in chunks[r.id] for x in c.logprobs])
        targets = tuple(range(len(r.prompt), len(r.prompt) + len(new)))
        recorded = b"".join(c.experts for c in chunks[r.id])
        samples.append(
            Sample(ids=(*r.prompt, *new), targets=targets, behavior=behavior, advantage=1.0, limit=40, experts=recorded)
        )
    learner, reader = Learner(trainer, say=lambda line: None), ExpertReader(trainer)
    rows = pack_experts(samples, learner.policy.replay)
    assert rows is not None
    given = known(on_device(rows, torch.device("cpu"))).transpose(0, 1)

    def chosen(replay: bool) -> torch.Tensor:
        with reader.reading() as found:
            learner.score(samples, 1.0, replay=replay)
        return torch.stack(found)

    told = given >= 0
    assert int((~told).sum()) == len(samples) * given.shape[0] * CHOSEN, "only the last token of each"
    assert torch.equal(chosen(True)[told], given[told])
    assert not torch.equal(chosen(False)[told], given[told])
    exact = Learner(served, say=lambda line: None)
    logp, _ = exact.score(samples, 1.0)
    np.testing.assert_allclose(logp, np.concatenate([s.behavior for s in samples]), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mixtral", ""),
        ("deepseek_v3", ""),
        ("afmoe", ""),
        ("phimoe", "no torch.topk"),
        ("jetmoe", "in another way"),
        ("llama", "no experts"),
    ],
)
def test_other_routers_are_replayed_or_refused(kind: str, why: str) -> None:
    config = hostile.Architecture(kind=kind).config()
    refused = selftest.replay_refusal(config.to_dict(), device="cpu", names=_weight_names(config))
    assert (why in refused) if why else not refused


def test_experts_stay_narrow_until_a_layer_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bits for each, or 16 for 256 experts and more, with the same result."""
    samples, learner = random_samples(), Learner(model(), say=lambda line: None)
    found = []
    for dtype in (np.uint8, np.uint16):
        wide = [np.frombuffer(s.experts, np.uint8).astype(dtype) for s in samples]
        for w in wide:
            w[w == UNKNOWN[0]] = np.iinfo(dtype).max
        monkeypatch.setattr(experts_module, "dtype_of", lambda experts, dtype=dtype: dtype)
        given = [replace(s, experts=w.tobytes()) for s, w in zip(samples, wide, strict=True)]
        rows = pack_experts(given, learner.policy.replay)
        assert rows is not None
        assert rows.dtype == dtype
        found.append((learner.score(given, 1.0)[0], learner.loads(given)))
    assert torch.equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_loads_of_experts_count_every_known_choice() -> None:
    samples = random_samples()
    found = Learner(model(), say=lambda line: None).loads(samples)
    wanted = np.zeros((2, EXPERTS), int)
    for s in samples:
        for n, expert in enumerate(s.experts):
            if expert != UNKNOWN[0]:
                wanted[n // CHOSEN % 2, expert] += 1
    np.testing.assert_array_equal(found, wanted)
    totals = TokenTotals()
    assert totals.expert_load() == 0
    totals.loads = totals.loads + np.array([[3, 1, 0, 0], [1, 1, 1, 1]])
    assert totals.expert_load() == 2.0, "3 times as many as the average expert, and as many"


def test_only_tokens_with_known_experts_count_as_replayed() -> None:
    """As when a response ends on a worker whose engine records none."""
    samples = [replace(s, advantage=1.0) for s in random_samples()]
    assert [s.replayed for s in samples] == [len(samples[0].targets) - 1, len(samples[1].targets) - 1, 0]
    for replay in ("auto", True):
        train = {"replay_routing": replay, "engine_gap_limit": 100.0}
        options: dict[str, Any] = {"micro_tokens": 64}
        trainer = TorchTrainer(model(), make("grpo"), parse_recipe({"train": train}, where="test"), **options)
        trainer.forward_backward(samples)
        if replay is True:
            with pytest.raises(WindfallError, match="the engines did not record the experts of 10 of 24 tokens"):
                trainer.optim_step()
        else:
            assert trainer.optim_step().replayed_experts == pytest.approx(14 / 24)


def test_few_tokens_are_computed_without_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per update, and only if there are fresh tokens whose experts are known."""
    monkeypatch.setattr(trainer_module, "COMPARED_TOKENS", 40)
    samples = [replace(s, advantage=1.0) for s in random_samples((30, 17, 40, 5, 9, 11, 14))]
    old = replace(samples[3], lag=np.ones(len(samples[3].targets), np.uint16))
    recipe = parse_recipe({"train": {"engine_gap_limit": 100.0}}, where="test")
    trainer = TorchTrainer(model(), make("grpo"), recipe, micro_tokens=1000)
    compared: list[list[int]] = []
    score = trainer.learner.score

    def record(pack: Sequence[Sample], temperature: float, *, replay: bool = True) -> Any:
        if not replay:
            compared.append(sorted(len(s.ids) for s in pack))
        return score(pack, temperature, replay=replay)

    monkeypatch.setattr(trainer.learner, "score", record)
    for given, wanted in (
        ([*samples[6:], old], []),
        (samples, [[5, 9, 11]]),
        (samples, []),
    ):
        compared.clear()
        trainer.forward_backward(given)
        assert compared == wanted
    assert trainer.optim_step().router_gap > 0
    trainer.forward_backward(samples[:1])
    assert compared == [[30]]


def test_experts_of_another_model_are_refused() -> None:
    samples = random_samples((7, 5))
    learner = Learner(model(), say=lambda line: None)
    for data, what in ((samples[0].experts[:-1], "cannot be"), (b"\x09" * len(samples[0].experts), "expert 9 was")):
        with pytest.raises(WindfallError, match=what):
            learner.score([replace(samples[0], experts=data)], 1.0)
