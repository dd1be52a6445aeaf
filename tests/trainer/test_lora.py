"""Training of adapters: gradients as of an explicit merged matrix, only adapters change, and wrong ones are refused."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines.small_models import build, drain, logprobs, tokens
from windfall import algorithms
from windfall.algorithms.base import Outcome
from windfall.engine.torch.engine import TorchEngine
from windfall.errors import WindfallError
from windfall.models import attention, load
from windfall.recipe.file import parse_recipe
from windfall.recipe.lora import Lora
from windfall.trainer import checkpoint
from windfall.trainer.model import lora
from windfall.trainer.model.gradients import Gradients, trained
from windfall.trainer.model.logprobs import Learner
from windfall.trainer.trainer import TorchTrainer
from windfall.training import CheckpointState, Sample
from windfall.types import Request
from windfall.weights.adapter_folder import AdapterBase
from windfall.weights.merged import MergedWeights


def tiny(dtype: str = "float32") -> Any:
    torch.set_num_threads(1)
    return load.load("tiny", dtype=dtype, device="cpu")


def samples(model: Any, count: int, seed: int = 0) -> list[Sample]:
    """Responses of the model, sampled by the engine, with random advantages."""
    rng = np.random.default_rng(seed)
    asked = [
        Request(id=str(i), prompt=tuple(int(t) for t in rng.integers(3, 13, rng.integers(1, 20))), seed=100 * seed + i,
                max_tokens=int(rng.integers(10, 50)))
        for i in range(count)
    ]  # fmt: skip
    done = drain(TorchEngine(model, kv_tokens=4096), asked)
    return [
        Sample(
            ids=(*r.prompt, *tokens(done[r.id])),
            targets=tuple(range(len(r.prompt), len(r.prompt) + len(tokens(done[r.id])))),
            behavior=np.array(logprobs(done[r.id])),
            advantage=float(rng.uniform(-1, 1)),
            limit=50,
        )
        for r in asked
    ]


def attach(model: Any, *, noise: float = 0.05, **section: Any) -> lora.Adapters:
    """Adapters that have an effect: B is not zero."""
    adapters = lora.attach(model, Lora(**section), base="tiny", seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in adapters.layers.values():
            layer.lora_B.copy_(noise * torch.randn(layer.lora_B.shape, generator=generator))
    return adapters


def trainer(adapters: lora.Adapters, **sections: Any) -> TorchTrainer:
    reference = adapters if sections.get("algorithm", {}).get("kl") else None
    return TorchTrainer(
        adapters.model,
        algorithms.make("grpo"),
        parse_recipe(sections, where="test"),
        micro_tokens=256,
        reference=reference,
    )


def test_new_adapters_change_nothing_and_only_they_are_trained() -> None:
    model, plain = tiny(), tiny()
    names = list(plain.state_dict())
    weight = model.model.layers[0].mlp.up_proj.weight
    adapters = lora.attach(model, Lora(rank=4), base="tiny", seed=0)
    assert model.model.layers[0].mlp.up_proj.weight is weight
    assert [n for n in model.state_dict() if not lora.is_adapter(n)] == names
    assert list(lora.base_tensors(adapters.model)) == names
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"{name}.{matrix}" for name in adapters.layers for matrix in lora.MATRICES
    }
    assert len(adapters.layers) == 28
    assert adapters.scale == 2.0
    ids = torch.tensor([[1, 4, 9, 16, 25]])
    for m in (model, plain):
        m.set_attn_implementation("eager")
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_start_depends_on_the_seed_alone() -> None:
    same, other = (lora.attach(tiny(), Lora(rank=4), base="", seed=s).tensors() for s in (3, 4))
    again = lora.attach(tiny(), Lora(rank=4), base="", seed=3).tensors()
    assert all(torch.equal(t, again[name]) for name, t in same.items())
    assert any(not torch.equal(t, other[name]) for name, t in same.items())


@pytest.mark.parametrize(
    ("name", "recompute", "targets"),
    [
        ("llama", False, "all"),
        ("llama", True, "all"),
        ("qwen3", False, "all"),
        ("llama", False, ["v_proj", "lm_head"]),  # its head has the matrix of the embeddings
        ("llama", False, ["embed_tokens"]),
        ("qwen3", False, ["lm_head"]),
        ("qwen3", True, ["down_proj", "lm_head", "embed_tokens"]),
    ],
)
def test_gradients_equal_those_of_an_explicit_merged_matrix(name: str, recompute: bool, targets: Any) -> None:
    """Autograd on W + scale * B @ A in float64, in a module of transformers that knows nothing of adapters."""
    torch.set_num_threads(1)
    model = build(name)
    model.set_attn_implementation(attention.NAME)
    adapters = attach(copy.deepcopy(model), rank=3, alpha=1.5, targets=targets)
    rng = np.random.default_rng(0)
    made = [
        Sample(ids=tuple(int(t) for t in rng.integers(3, 160, n)), targets=tuple(range(2, n)), behavior=np.zeros(0),
               advantage=1.0, limit=0)
        for n in (12, 31, 7)
    ]  # fmt: skip
    weights = [rng.normal(size=len(s.targets)) for s in made]
    if recompute:
        adapters.model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = Gradients(trained(adapters.model))
    learner = Learner(adapters.model, gradients, say=lambda line: None)
    learner.learn(made, 0.8, lambda a, b, logp, entropy: np.concatenate(weights[a:b]))

    model.double()
    matrices = {n: (y.lora_A.detach().double().requires_grad_(), y.lora_B.detach().double().requires_grad_())
                for n, y in adapters.layers.items()}  # fmt: skip
    merged = {
        f"{n}.weight": model.get_submodule(n).weight.detach() + adapters.scale * b @ a for n, (a, b) in matrices.items()
    }
    model.set_attn_implementation("eager")
    loss = torch.zeros(())
    for s, w in zip(made, weights, strict=True):
        out = torch.func.functional_call(model, merged, (torch.tensor([s.ids]),), tie_weights=False)
        logp = torch.log_softmax(out.logits[0] / 0.8, -1)[[t - 1 for t in s.targets], [s.ids[t] for t in s.targets]]
        loss = loss - (torch.from_numpy(w) * logp).sum()
    loss.backward()
    for n, layer in adapters.layers.items():
        for ours, theirs in zip((layer.lora_A, layer.lora_B), matrices[n], strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert float(theirs.grad.norm()) > 0
            assert float((ours.grad - theirs.grad).norm()) < 1e-4 * float(theirs.grad.norm()), n
    assert all(p.grad is None for n, p in adapters.model.named_parameters() if not lora.is_adapter(n))


def test_updates_raise_the_probability_of_credited_tokens_and_leave_the_base_alone() -> None:
    adapters = lora.attach(tiny(), Lora(rank=8), base="tiny", seed=0)
    before = {n: t.clone() for n, t in lora.base_tensors(adapters.model).items()}
    made = [Sample(ids=s.ids, targets=s.targets, behavior=s.behavior, advantage=1.0, limit=50)
            for s in samples(adapters.model, 6)]  # fmt: skip
    t = trainer(adapters, train={"lr": 1e-3, "engine_gap_limit": 10.0})
    losses = []
    for _ in range(9):
        losses.append(-float(t.learner.score(made, 1.0)[0].mean()))
        t.forward_backward(made)
        assert t.optim_step().skipped == ""
    assert all(b < a for a, b in pairwise(losses)), losses
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(v, before[n]) for n, v in lora.base_tensors(adapters.model).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_and_checkpoint_hold_only_adapters_and_resume_exactly(tmp_path: Path, dtype: str) -> None:
    torch.set_num_threads(1)

    def objects(found: Path | None) -> tuple[lora.Adapters, TorchTrainer]:
        model = build("llama").to(getattr(torch, dtype))
        model.set_attn_implementation(attention.NAME)
        adapters = lora.attach(model, Lora(rank=2), base="", seed=0, checkpoint=found)
        t = trainer(adapters, train={"lr": 1e-2, "engine_gap_limit": 10.0})
        if found is not None:
            t.restore_optimizer(found / checkpoint.OPTIMIZER)
        return adapters, t

    made = [
        Sample(ids=tuple(range(3, 15)), targets=(4, 7, 9), behavior=np.full(3, -5.0), advantage=a, limit=9)
        for a in (1.0, -0.5)
    ]
    adapters, t = objects(None)
    state = t.optimizer.state()
    assert len([n for n in state if n.startswith("master.")]) == (0 if dtype == "float32" else len(adapters.tensors()))
    for _ in range(2):
        t.forward_backward(made)
        assert t.optim_step().skipped == ""
    base = AdapterBase(path="tiny", dtype=dtype, digest="0" * 32)
    path = checkpoint.save(
        tmp_path, CheckpointState(step=2, next_task=8), write_model=adapters.save_pretrained,
        tokenizer=load.load_tokenizer("tiny"), write_optimizer=t.write_optimizer, keep=2, base=base,
    )  # fmt: skip
    assert {p.name for p in path.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "windfall",
    }  # fmt: skip
    checkpoint.check(path)
    assert checkpoint.read_base(path) == base
    again, u = objects(path)
    for each in (t, u):
        each.forward_backward(made)
        each.optim_step()
    assert all(torch.equal(v, again.tensors()[n]) for n, v in adapters.tensors().items())
    ours, theirs = t.optimizer.state(), u.optimizer.state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(v.local, theirs[n].local) for n, v in ours.items())
    (path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(checkpoint.DamagedCheckpoint, match="adapter_model"):
        checkpoint.check(path)


def test_kl_reference_is_the_base() -> None:
    """Adapters are switched off for the reference, and are on again afterwards. No second model is loaded."""
    adapters = attach(tiny(), rank=4)
    made = samples(tiny(), 4)
    t = trainer(adapters, algorithm={"kl": 0.1}, train={"engine_gap_limit": 10.0})
    mine, base = (learner.score(made, 1.0)[0] for learner in (t.learner, t.reference))
    assert torch.equal(base, Learner(tiny()).score(made, 1.0)[0])
    assert not torch.allclose(mine, base, atol=1e-2)
    assert torch.equal(t.learner.score(made, 1.0)[0], mine)
    t.forward_backward(made)
    assert t.optim_step().kl > 0


def test_engine_with_merged_weights_agrees_with_the_trainer() -> None:
    """Over several updates, each followed by the swap that a worker makes."""
    adapters = attach(tiny(), rank=4)
    t = trainer(adapters, train={"lr": 3e-3})
    engine_model = tiny()
    engine = TorchEngine(engine_model, kv_tokens=4096)
    base = {n: v.clone() for n, v in lora.base_tensors(adapters.model).items()}
    for version in range(1, 4):
        published = {n: v.detach().clone() for n, v in adapters.tensors().items()}
        engine.swap(version, MergedWeights(base, published, adapters.scale, base_is_loaded=version > 1))
        made = samples(engine_model, 8, seed=version)
        t.forward_backward(made)
        report = t.optim_step()
        assert report.engine_gap < 1e-5
        assert report.engine_gap_max < 1e-3
        assert report.skipped == ""


@pytest.mark.slow
def test_reward_rises() -> None:
    """A whole loop in one process: the model learns to say the digits 1 and 2, with weights that are merged for every
    version."""
    adapters = lora.attach(tiny(), Lora(rank=4), base="tiny", seed=0)
    t, algorithm = trainer(adapters, train={"lr": 3e-3}), algorithms.make("grpo")
    engine = TorchEngine(tiny(), kv_tokens=4096)
    base, wanted = lora.base_tensors(adapters.model), set(load.load_tokenizer("tiny")("12")["input_ids"])
    rewards = []
    for step in range(12):
        engine.swap(step, MergedWeights(base, adapters.tensors(), adapters.scale))
        asked = [Request(id=str(i), prompt=(5, 6, 7), seed=1000 * step + i, max_tokens=6) for i in range(32)]
        done = drain(engine, asked)
        got = [float(np.mean([token in wanted for token in tokens(done[r.id])])) for r in asked]
        (credit,) = algorithm.advantages([[Outcome(reward=x, length=6, limit=6) for x in got]])
        t.forward_backward([
            Sample(ids=(5, 6, 7, *tokens(done[r.id])), targets=tuple(range(3, 3 + len(tokens(done[r.id])))),
                   behavior=np.array(logprobs(done[r.id])), advantage=a, limit=6)
            for r, a in zip(asked, credit, strict=True)
        ])  # fmt: skip
        assert t.optim_step().engine_gap < 1e-5
        rewards.append(float(np.mean(got)))
    assert rewards[-1] > rewards[0] + 0.4, rewards


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"targets": ["q_prj"]}, "no layer named 'q_prj' in this model\nDid you mean 'q_proj'?"),
        ({"targets": ["q_proj", "head"]}, "no layer named 'head' in this model\nDid you mean 'lm_head'?"),
        ({"rank": 3, "path": "saved"}, "train.lora.rank is 3, but this adapter has rank 2"),
        ({"alpha": 1.0, "path": "saved"}, "train.lora.alpha is 1, but this adapter has alpha 4"),
        ({"targets": ["v_proj"], "path": "saved"}, "other layers than train.lora.targets says: q_proj"),
    ],
)
def test_wrong_section_is_refused(tmp_path: Path, section: dict[str, Any], expected: str) -> None:
    attach(tiny(), rank=2, targets=["q_proj"]).save_pretrained(tmp_path / "saved")
    if "path" in section:
        section = section | {"path": tmp_path / section["path"]}
    model = tiny()
    with pytest.raises(WindfallError) as e:
        lora.attach(model, Lora(**section), base="", seed=0)
    assert expected in str(e.value)
    assert all(p.requires_grad for p in model.parameters()), "nothing was changed"


def test_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    other = lora.attach(build("llama"), Lora(rank=2, targets=["q_proj"]), base="", seed=0)
    other.save_pretrained(tmp_path)
    with pytest.raises(WindfallError, match=r"another shape: .*q_proj\.weight' is 128 x 128, but the adapter has 48 x"):
        lora.attach(tiny(), Lora(path=tmp_path), base="", seed=0)
