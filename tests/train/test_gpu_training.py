"""The training step that a GPU runs: the same gradients as transformers' module, whatever is kept, packed or cut.

Here on the CPU in float32, with the functions in plain torch. Where triton can be imported, its kernels are compared
with those; on a GPU, a step in bfloat16 with one in float32 of the same weights (the norm of the difference is at most
2 % of the gradient's).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from windfall import algorithms, config
from windfall.engine.joined_weights import adjacent
from windfall.engine.torch import attention
from windfall.train import activation_memory, layers, llama
from windfall.train.activation_memory import ALL, LEAST, LIGHT
from windfall.train.gradients import Gradients
from windfall.train.llama import Blocks, Unfit
from windfall.train.logprobs import Autograd, Learner, compare, lay
from windfall.train.sample import Sample, packs
from windfall.train.trainer import TorchTrainer

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


SHAPE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=24, tie_word_embeddings=False)
    ),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SHAPE, num_key_value_heads=4, sliding_window=24, tie_word_embeddings=False)
    ),
    # Biases on queries, keys and values, and layers with and without a window.
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **SHAPE, num_key_value_heads=1, tie_word_embeddings=False, use_sliding_window=True, sliding_window=9,
            max_window_layers=1,
        )
    ),
}  # fmt: skip


def model_of(name: str, monkeypatch: pytest.MonkeyPatch | None = None) -> Any:
    torch.manual_seed(5)
    if monkeypatch is not None:  # large enough for errors to be those of real models, and scaled like them
        for key, value in {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}.items():
            monkeypatch.setitem(SHAPE, key, value)
    model = FAMILIES[name]().eval()
    for p in model.parameters():  # norms and biases, too, must matter
        if p.dim() == 1:
            torch.nn.init.normal_(p, 0.5, 0.3 if monkeypatch is None else 0.1)
    model.set_attn_implementation(attention.NAME)
    return model


def samples(count: int = 6, seed: int = 0, longest: int = 60, vocabulary: int = 160) -> list[Sample]:
    """Of uneven lengths; in some, not every token after the prompt is the policy's."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(count):
        length, prompt = int(rng.integers(4, longest)), int(rng.integers(1, 4))
        targets = tuple(t for t in range(prompt, length) if t == prompt or rng.random() < 0.9)
        behaviour = -rng.random(len(targets))
        ids = tuple(rng.integers(0, vocabulary, length).tolist())
        out.append(Sample(ids=ids, targets=targets, behaviour=behaviour, advantage=rng.normal(), limit=longest))
    return out


def gradients_of(model: Any, body: Any, pack: list[Sample], sums: Gradients) -> dict[str, torch.Tensor]:
    sums.zero()
    rows, _ = lay(pack, model.device)
    hidden, tape = body.forward(rows, learning=True)
    push = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden)
    body.backward(tape, push)
    return {n: g.clone() for n, g in ((n, sums.of(p)) for n, p in model.named_parameters()) if g is not None}


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("name", list(FAMILIES))
def test_blocks_have_the_gradients_of_the_module(name: str) -> None:
    model, pack = model_of(name), samples()
    sums = Gradients(model)
    expected = gradients_of(model, Autograd(model), pack, sums)
    hidden, _ = Autograd(model).forward(lay(pack, model.device)[0], learning=False)
    for keep in (ALL, LIGHT, LEAST):
        ours = Blocks.of(model, sums, keep=keep)
        assert apart(ours.forward(lay(pack, model.device)[0], learning=False)[0], hidden) < 1e-5
        found = gradients_of(model, ours, pack, sums)
        # A tied head's gradient comes from the head, which is not asked here.
        assert {n for n in expected if n != "lm_head.weight"} <= set(found)
        for n, g in expected.items():
            if float(g.norm()) > 0:
                assert apart(found[n], g) < 2e-5, (n, keep)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_trainer_on_blocks_has_the_gradient_of_one_on_the_module(name: str) -> None:
    model, made = model_of(name), samples(9)
    recipe = config.parse({"algorithm": {"kl": 0.1}, "train": {"engine_gap_limit": 99.0}}, where="test")

    def gradient(on_blocks: bool, micro_tokens: int, padded: bool) -> torch.Tensor:
        model.zero_grad()
        t = TorchTrainer(
            model, algorithms.make("grpo"), recipe, micro_tokens=micro_tokens, reference=model_of(name)
        )  # fmt: skip
        if on_blocks:
            t.learner.body = Blocks.of(model, t.optimizer.gradients, keep=LIGHT)
        t.learner.pads = padded
        t.accumulate(made)
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradient(False, 10_000, True)
    assert apart(gradient(True, 10_000, True), expected) < 2e-5
    assert apart(gradient(True, 70, False), expected) < 2e-5


def test_out_of_memory_it_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pack, seen = model_of("llama"), samples(), list[int]()
    sums = Gradients(model)
    expected = gradients_of(model, Autograd(model), pack, sums)
    ours, forward = Blocks.of(model, sums), llama.LlamaLayer.forward

    def scarce(self: Any, x: Any, tape: Any, level: int) -> Any:
        seen.append(level)
        if seen == [ALL, ALL]:
            raise torch.OutOfMemoryError("none left")
        return forward(self, x, tape, level)

    monkeypatch.setattr(llama.LlamaLayer, "forward", scarce)
    found = gradients_of(model, ours, pack, sums)
    assert seen == [ALL, ALL, LEAST, LEAST, LEAST]
    assert all(apart(found[n], g) < 2e-5 for n, g in expected.items() if float(g.norm()) > 0)


def test_joined_weights_are_the_same_weights(tmp_path: Any) -> None:
    model = model_of("qwen3")
    before, weights = {n: p.clone() for n, p in model.state_dict().items()}, dict(model.named_parameters())
    made = Blocks.of(model)
    assert all(p is weights[n] for n, p in model.named_parameters())
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    attention = model.base_model.layers[1].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    joined = made.layers[1].qkv.whole
    assert joined.data_ptr() == parts[0].data_ptr()
    model.save_pretrained(tmp_path)
    again = Qwen3ForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(p, before[n]) for n, p in again.items())
    with torch.no_grad():
        parts[1].fill_(3.0)
    assert (joined[len(parts[0]) : len(parts[0]) + len(parts[1])] == 3.0).all()


def test_weights_moved_apart_are_still_the_right_ones() -> None:
    """By an engine that joins them its own way, or a load that replaces them."""
    model, pack = model_of("llama"), samples()
    sums = Gradients(model)
    expected = gradients_of(model, Autograd(model), pack, sums)
    ours = Blocks.of(model, sums)
    for p in model.parameters():
        p.data = p.data.clone()
    assert adjacent(ours.layers[0].qkv.parts) is None
    found = gradients_of(model, ours, pack, sums)
    assert all(apart(found[n], g) < 2e-5 for n, g in expected.items() if float(g.norm()) > 0)


def test_what_blocks_do_not_know_is_refused() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(Unfit, match="Llama family"):
        Blocks.of(OPTForCausalLM(OPTConfig(**shape, word_embed_proj_dim=32)))
    model = model_of("llama")
    model.config.hidden_act = "gelu"
    with pytest.raises(Unfit, match="gelu"):
        Blocks.of(model)


def test_blocks_that_compute_something_else_are_found_out() -> None:
    model = model_of("qwen3")
    sums = Gradients(model)
    compare(Blocks.of(model, sums), Autograd(model))
    assert all(float(p.grad.abs().sum()) == 0 for p in model.parameters() if p.grad is not None)
    wrong = Blocks.of(model, sums)
    wrong.layers[1].norms = [None, None]
    with pytest.raises(Unfit, match="hidden states differ"):
        compare(wrong, Autograd(model))


def test_half_precision_gradients_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3").bfloat16()
    sums = Gradients(model)
    a = model.base_model.layers[0].self_attn
    parts = [a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]
    grads = [sums.of(p) for p in parts]
    assert adjacent([g for g in grads if g is not None]) is not None, "one product for all three"
    rows = sum(len(p) for p in parts)
    grad, x = torch.randn(50, rows).bfloat16(), torch.randn(50, 64).bfloat16()
    for _ in range(3):
        sums.add_product(parts, grad, x)
    expected = 3 * (grad.float().t() @ x.float())
    found = torch.cat([g for g in grads if g is not None])
    assert found.dtype == torch.float32
    assert apart(found, expected) < 5e-3
    a.q_proj.weight.requires_grad_(False)
    sums.zero()
    sums.add_product(parts, grad, x)
    assert float(grads[0].abs().sum()) == 0  # pyright: ignore
    assert apart(torch.cat(grads[1:]), expected[len(parts[0]) :] / 3) < 5e-3  # pyright: ignore


def test_memory_is_never_overspent_and_never_left_idle() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        least = int(rng.integers(1, 5000))
        light = least + int(rng.integers(1, 20_000))
        each = activation_memory.LayerBytes(least=least, light=light, all=light + int(rng.integers(1, 50_000)))
        layers_, tokens, free = int(rng.integers(1, 60)), int(rng.integers(1, 40_000)), float(10 ** rng.uniform(6, 12))
        levels = activation_memory.levels(free, tokens, layers_, each)
        cost = {LEAST: each.least, LIGHT: each.light, ALL: each.all}
        spent = tokens * (sum(cost[x] for x in levels) + activation_memory.WORKING * each.all)
        assert spent <= activation_memory.SPARE * free or levels == [LEAST] * layers_
        if levels != [ALL] * layers_:
            up = min(x for x in levels)
            assert spent + tokens * (cost[up + 1] - cost[up]) > activation_memory.SPARE * free, "room for more was left"
        pack = activation_memory.pack_tokens(free, layers_, each, longest=100)
        assert pack >= 100
        assert pack <= activation_memory.LARGE_PACK


def test_packs_without_padding_are_full_even_and_complete() -> None:
    made = samples(40, seed=3)
    for tokens in (64, 150, 400, 10**6):
        found = packs(made, tokens, padded=False)
        sizes = [sum(len(s.ids) for s in p) for p in found]
        assert sorted(id(s) for p in found for s in p) == sorted(id(s) for s in made)
        assert all(size <= tokens or len(p) == 1 for size, p in zip(sizes, found, strict=True))
        if tokens == 400:
            assert len(found) == -(-sum(sizes) // tokens)
            assert min(sizes) > 0.8 * max(sizes)
    assert packs([], 10, padded=False) == []


# ------------------------------------------------------------------------------------------------------ the kernels


def kernels() -> Any:
    """The Triton functions, and where their tensors have to be."""
    pytest.importorskip("triton", reason="needs triton")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    from windfall.train import kernels as found

    return found


SHAPES = [(7, 48, 3, 1, 32, 40, 131, True), (5, 64, 4, 2, 16, 96, 300, False), (9, 100, 6, 2, 24, 70, 5000, True),
          (300, 576, 9, 3, 64, 1536, 9001, False), (65, 1024, 16, 8, 128, 3072, 20_000, True)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_equal_plain_torch(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    ours = kernels()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and shape[0] > 10:
        pytest.skip("interpreted, this takes minutes")
    rows, width, heads, kv, head, inner, vocabulary, normed = shape
    # The interpreter cuts what a GPU rounds.
    most = {torch.float32: 1e-5, torch.bfloat16: 6e-3 if device == "cuda" else 2e-2}[dtype]
    torch.manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device).to(dtype)

    def same(found: Any, expected: Any) -> None:
        pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
        for a, b in pairs:
            assert (a is None) == (b is None)
            if b is not None:
                assert a.shape == b.shape
                assert apart(a, b) < most

    x, more, weight = draw(rows, width), draw(rows, width), draw(width)
    for add in (None, more):
        same(ours.norm(x, weight, 1e-5, add), layers.norm(x, weight, 1e-5, add))
        same(ours.norm_back(more, x, weight, 1e-5, add), layers.norm_back(more, x, weight, 1e-5, add))
    norms = (draw(head), draw(head)) if normed else (None, None)
    rest = (draw(rows, head), draw(rows, head), heads, kv, *norms, 1e-5)
    qkv = draw(rows, (heads + 2 * kv) * head)
    same(ours.turn(qkv, *rest), layers.turn(qkv, *rest))
    grads = draw(rows, heads, head), draw(rows, kv, head), draw(rows, kv, head)
    same(ours.turn_back(*grads, qkv, *rest), layers.turn_back(*grads, qkv, *rest))
    both, grad = draw(rows, 2 * inner), draw(rows, inner)
    same(ours.gate(both), layers.gate(both))
    expected = layers.gate_back(grad, both)
    same(ours.gate_back(grad.clone(), both.clone()), expected)
    logits, targets = 3 * draw(rows, vocabulary), torch.randint(0, vocabulary, (rows,), device=device)
    numbers, weights = layers.score(logits, targets, 0.7), torch.randn(rows, device=device)
    same(ours.score(logits, targets, 0.7), numbers)
    expected = layers.score_back(logits, targets, numbers[2], weights, 0.7)
    same(ours.score_back(logits.clone(), targets, numbers[2], weights, 0.7), expected)


# -------------------------------------------------------------------------------------------------------- on a GPU


@cuda
@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("keep", [ALL, LIGHT, LEAST, None], ids=["all", "light", "least", "autograd"])
def test_bfloat16_gradients_are_those_of_float32(name: str, keep: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    half, made = model_of(name, monkeypatch).cuda().bfloat16(), samples(24, longest=200)
    exact = model_of(name, monkeypatch).cuda()
    exact.load_state_dict({n: p.float() for n, p in half.state_dict().items()})
    recipe = config.parse({"train": {"engine_gap_limit": 99.0}}, where="test")

    def gradient(t: TorchTrainer, micro_tokens: int) -> torch.Tensor:
        t.micro_tokens = micro_tokens
        t.begin()
        t.accumulate(made)
        found = [t.optimizer.gradients.of(p) for _, p in sorted(t.model.named_parameters())]
        return torch.cat([g.flatten() for g in found if g is not None]).clone()

    expected = gradient(TorchTrainer(exact, algorithms.make("grpo"), recipe, micro_tokens=1), 100_000)
    ours = TorchTrainer(half, algorithms.make("grpo"), recipe, micro_tokens=1)
    assert isinstance(ours.learner.body, Blocks), "the automatic choice"
    sums = ours.optimizer.gradients
    ours.learner.body = Blocks.of(half, sums, keep=keep) if keep is not None else Autograd(half)
    for micro_tokens in (100_000, 700):
        found = apart(gradient(ours, micro_tokens), expected)
        print(f"{name} {keep} {micro_tokens}: {found:.4f}")
        assert found < 2e-2


@cuda
def test_a_failing_kernel_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = model_of("llama").cuda().bfloat16(), list[str]()
    monkeypatch.setattr(llama.LlamaLayer, "forward", lambda *a: 1 / 0)
    learner = Learner(model, Gradients(model), say=said.append)
    assert isinstance(learner.body, Autograd)
    assert "ZeroDivisionError" in said[0]


@cuda
def test_steps_in_bfloat16_learn() -> None:
    """The log-probs of what had a positive advantage rise, and Adam's state survives a restart."""
    model, made = model_of("qwen3").cuda().bfloat16(), samples(16, longest=100)
    made = [Sample(ids=s.ids, targets=s.targets, behaviour=s.behaviour, advantage=1.0, limit=s.limit) for s in made]
    recipe = config.parse({"train": {"lr": 1e-3, "engine_gap_limit": 99.0}}, where="test")
    t = TorchTrainer(model, algorithms.make("dr_grpo"), recipe, micro_tokens=500)
    before = t.learner.score(made, 1.0)[0].mean()
    for _ in range(10):
        t.accumulate(made)
        assert not t.finish().skipped
    assert t.learner.score(made, 1.0)[0].mean() > before + 0.1
    kept = t.optimizer.state()
    t.optimizer.restore(kept)
    assert all(torch.equal(v, kept[k]) for k, v in t.optimizer.state().items())
    t.accumulate(made)
    assert not t.finish().skipped
