"""The GPU decoder and its module share the storage of the weights, whatever is done to the module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.engines.small_models import MODELS, SHAPE, build, drain, requests, tokens
from windfall.engine.cuda.decoder import Decoder, unsupported_reason
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.factory import build_engine, build_full_model, build_model
from windfall.errors import WindfallError
from windfall.link.messages import EngineSpec
from windfall.weights.publishing.publish import Publisher

PLACES = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))],
)


def said(model: Any, engine: GraphEngine | None = None) -> list[list[int]]:
    asked = requests(4, temperature=0.0)
    made = drain(GraphEngine(model, kv_tokens=2048) if engine is None else engine, asked)
    return [tokens(made[r.id]) for r in asked]


@pytest.mark.parametrize("name", MODELS)
def test_no_weight_is_stored_twice_or_lost(name: str, tmp_path: Path) -> None:
    model = build(name)
    before = copy.deepcopy(model.state_dict())
    own = list(model.parameters())
    decoder = Decoder.of(model)
    assert all(a is b for a, b in zip(own, model.parameters(), strict=True)), "an optimizer would lose its parameters"
    for layer, block in zip(decoder.layers, model.model.layers, strict=True):
        a, mlp = block.self_attn, block.mlp
        for whole, parts in (
            (layer.qkv[0], (a.q_proj, a.k_proj, a.v_proj)),
            (layer.gate_up[0], (mlp.gate_proj, mlp.up_proj)),
        ):
            ends = [p.weight.data_ptr() for p in parts]
            assert ends[0] == whole.data_ptr()
            assert len({p.weight.untyped_storage().data_ptr() for p in parts}) == 1
            assert torch.equal(whole, torch.cat([p.weight for p in parts]))
    after = model.state_dict()
    assert all(torch.equal(t, after[n]) for n, t in before.items())
    again = Decoder.of(model)
    assert again.layers[0].qkv[0].data_ptr() == decoder.layers[0].qkv[0].data_ptr(), "two engines may share a module"
    assert not decoder.stale()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(t, loaded[n]) for n, t in before.items())


def test_published_weights_are_the_same_as_before(tmp_path: Path) -> None:
    model = build("llama")
    one, two = Publisher(tmp_path), Publisher(tmp_path)
    plain = one.publish(1, model.state_dict())
    Decoder.of(model)
    assert two.publish(1, model.state_dict()).digest == plain.digest
    one.close()
    two.close()


@PLACES
def test_training_the_module_updates_the_engine(device: str) -> None:
    model, twin = build("qwen3").to(device), build("qwen3").to(device)
    engine = GraphEngine(model, kv_tokens=2048)
    before = said(model, engine)
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
        ids = torch.arange(3, 40, device=device)[None]
        m(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    engine.swap(1)
    assert said(model, engine) == said(twin) != before


@PLACES
def test_weights_that_moved_are_found_after_swap(device: str) -> None:
    model, other = build("llama").to(device), build("llama").to(device)
    engine = GraphEngine(model, kv_tokens=2048)
    before = said(model, engine)
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q += 0.1 * torch.randn_like(q)
            p.data = q.clone()
    engine.swap(1)
    assert said(model, engine) == said(other) != before


def test_unsupported_models_are_rejected_with_a_reason() -> None:
    shape = {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 2}
    gemma = GemmaForCausalLM(GemmaConfig(**shape, head_dim=12))
    assert "GemmaForCausalLM" in str(unsupported_reason(gemma))
    with pytest.raises(WindfallError, match="GemmaForCausalLM"):
        GraphEngine(gemma, kv_tokens=64)
    assert "gelu" in str(unsupported_reason(LlamaForCausalLM(LlamaConfig(**shape, hidden_act="gelu"))))
    growing = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "dynamic" in str(unsupported_reason(LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=growing))))
    mixed = build("llama")
    mixed.model.norm.to(torch.bfloat16)
    assert "dtype" in str(unsupported_reason(mixed))
    wrapped = build("llama")
    wrapped.model.layers[1].mlp.up_proj = torch.nn.Sequential(wrapped.model.layers[1].mlp.up_proj)
    assert "up_proj" in str(unsupported_reason(wrapped))
    assert unsupported_reason(build("llama")) is None


def spec(model: Any, **options: Any) -> EngineSpec:
    fields = {"kv_tokens": 0, "page_size": 16, "max_running": 0, "max_rows": 64, "deterministic": False}
    config = model.config.to_json_string(use_diff=False)
    return EngineSpec(model_config=config, dtype="float32", longest=64, wanted=8, **{**fields, **options})


@pytest.mark.parametrize("name", MODELS)
def test_module_without_weights_has_everything_else(name: str) -> None:
    model = build(name)
    made = build_full_model(model.config.to_dict(), "float32", "cpu")
    wanted = dict(model.named_buffers())
    assert {n: b.tolist() for n, b in made.named_buffers()} == {n: b.tolist() for n, b in wanted.items()}
    assert [(n, p.shape) for n, p in made.named_parameters()] == [(n, p.shape) for n, p in model.named_parameters()]
    made.load_state_dict(model.state_dict())
    assert said(made) == said(model)


def test_fastest_supported_engine_is_built() -> None:
    model = build("llama")
    engine, running = build_engine(spec(model), "cpu")
    assert (type(engine).__name__, running) == ("TorchEngine", 8)
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    engine, running = build_engine(spec(model), "cuda")
    assert (type(engine).__name__, running) == ("GraphEngine", 8)
    assert type(build_engine(spec(model, deterministic=True), "cuda")[0]).__name__ == "TorchEngine"
    built = build_model(spec(model), "cuda")
    built.load_state_dict(model.state_dict())
    assert torch.equal(built.model.rotary_emb.inv_freq.cpu(), model.model.rotary_emb.inv_freq)
