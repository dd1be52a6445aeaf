"""A worker's model skeleton equals transformers' module in everything that the engine uses, and needs no slow
import."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.engines import reference_kernels as reference
from tests.support.engines.small_models import SHAPE, VOCABULARY, drain, requests, tokens
from windfall.engine import factory
from windfall.engine.cuda import skeleton
from windfall.engine.cuda.decoder import Decoder, unsupported_reason
from windfall.engine.cuda.engine import GraphEngine
from windfall.errors import WindfallError
from windfall.link.messages import EngineSpec
from windfall.types import Request

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "rope_theta": 100000, "num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("qwen2", WINDOWS),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3-windows": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True, **WINDOWS}),
}


def configuration(name: str) -> Any:
    kind, own = MODELS[name]
    return AutoConfig.for_model(kind, **{**SHAPE, **HEADS, **own})


def sent_fields(config: Any) -> dict[str, Any]:
    """The configuration as it is sent to a worker."""
    return json.loads(config.to_json_string(use_diff=False))


def whole(name: str) -> Any:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(configuration(name)).eval()
    with torch.no_grad():  # initial zeros and ones would hide that a weight is not used
        for n, p in model.named_parameters():
            if n.endswith("bias") or p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
    return model


def made(name: str) -> skeleton.ModelSkeleton:
    return skeleton.ModelSkeleton(sent_fields(configuration(name)), dtype=torch.float32, device="cpu")


def storages(model: nn.Module) -> dict[str, set[str]]:
    """For every name, the names that share its storage."""
    at: dict[int, set[str]] = {}
    for n, t in model.state_dict().items():
        at.setdefault(t.data_ptr(), set()).add(n)
    return {n: names for names in at.values() for n in names}


@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_and_ties_equal_transformers(name: str) -> None:
    ours, theirs = made(name), whole(name)
    assert [(n, t.shape, t.dtype) for n, t in ours.state_dict().items()] == [
        (n, t.shape, t.dtype) for n, t in theirs.state_dict().items()
    ]
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert storages(ours) == storages(theirs)
    assert unsupported_reason(ours) is None
    assert (ours.device, ours.dtype) == (theirs.device, theirs.dtype)
    assert ours.get_input_embeddings().num_embeddings == VOCABULARY
    before = [p.data_ptr() for p in ours.parameters()]
    decoder = Decoder.of(ours)
    assert [p.data_ptr() for p in ours.parameters()] == before, "no weight had to be moved"
    windows = [layer.window for layer in decoder.layers]
    assert windows == [layer.window for layer in Decoder.of(theirs).layers]
    assert any(windows) == ("window" in name), "the case must match its name"


ROPES = {
    **{name: own.get("rope_parameters") for name, (_, own) in MODELS.items()},
    "llama3.1": {**LLAMA3, "original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize("head", [16, 48, 64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_rotary_tables_equal_transformers_bit_for_bit(name: str, head: int) -> None:
    shape = {**SHAPE, **HEADS, "num_hidden_layers": 1, "head_dim": head}
    config = AutoConfig.for_model("llama", **shape, rope_parameters=ROPES[name])
    theirs = AutoModelForCausalLM.from_config(config)
    ours = skeleton.ModelSkeleton(sent_fields(config), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        x, positions = torch.zeros(1), torch.arange(3000)[None]
        cos, sin = theirs.model.rotary_emb(x, positions)
    mine, its = Decoder.of(ours), Decoder.of(theirs)
    for decoder in (mine, its):
        decoder.build_rotary_tables(3000)
    assert torch.equal(mine.cos, cos[0])
    assert torch.equal(mine.sin, sin[0])
    assert torch.equal(mine.cos, its.cos)


def logits_of(model: Any, ids: list[int], source: Any = None) -> Tensor:
    """The engine's logits for the last of `ids`, with the weights of `source`, swapped in like pulled weights."""
    seen: list[Tensor] = []

    def sample(logits: Tensor, *rest: Any) -> None:
        seen.append(logits.clone())
        reference.sample(logits, *rest)

    engine = GraphEngine(model, kv_tokens=512, ops=SimpleNamespace(**{**vars(reference), "sample": sample}))
    if source is not None:
        engine.swap(1, {n: t.clone() for n, t in source.state_dict().items()})
    drain(engine, [Request(id="a", prompt=tuple(ids), seed=1, max_tokens=1)])
    return seen[0][0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str) -> None:
    theirs = whole(name)
    ids = torch.randint(3, VOCABULARY, (60,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor([ids])).logits[0, -1]
    got = logits_of(made(name), ids, theirs)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    assert torch.equal(got, logits_of(theirs, ids)), "the same engine on transformers' own module"


def test_tied_weights_may_be_sent_once() -> None:
    theirs = whole("smollm2")
    engine = GraphEngine(made("smollm2"), kv_tokens=512)
    weights = {n: t for n, t in theirs.state_dict().items() if n != "lm_head.weight"}
    engine.swap(1, weights)
    assert torch.equal(engine.model.lm_head.weight, theirs.lm_head.weight)
    with pytest.raises(WindfallError, match="missing"):
        engine.swap(2, {n: t for n, t in weights.items() if n != "model.norm.weight"})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
        ({"attention_bias": ...}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "None"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": None}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "not one of default, llama3"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "part"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e4}, "None"),
        ({"rope_parameters": None}, "None"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None}, "which layers"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["chunked_attention"] * 3}, "which layers"),
    ],
)
def test_incomplete_configuration_is_left_to_transformers(change: dict[str, Any], why: str) -> None:
    fields = sent_fields(configuration("qwen3"))
    assert skeleton.unsupported_reason(fields) is None
    fields = {n: v for n, v in {**fields, **change}.items() if v is not ...}
    assert why in str(skeleton.unsupported_reason(fields))


def test_older_configuration_with_rope_theta_alone() -> None:
    fields = {**sent_fields(configuration("qwen3")), "rope_parameters": None, "rope_theta": 1e6}
    assert skeleton.unsupported_reason(fields) is None
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert torch.equal(skeleton.frequencies(fields, 64), skeleton.frequencies({"rope_parameters": plain}, 64))


def spec(fields: dict[str, Any], **options: Any) -> EngineSpec:
    return EngineSpec(
        model_config=json.dumps(fields), dtype="float32", kv_tokens=512, page_size=16, max_running=4, max_rows=64,
        longest=64, wanted=4, **{"deterministic": False, **options},
    )  # fmt: skip


def test_skeleton_is_built_only_for_the_graph_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(factory.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(skeleton, "ModelSkeleton", lambda fields, **how: ("bare", how["device"]))
    monkeypatch.setattr(factory, "build_full_model", lambda fields, dtype, device: ("whole", device))
    fields = sent_fields(configuration("qwen3"))
    assert factory.build_model(spec(fields), "cuda") == ("bare", "cuda")
    assert factory.build_model(spec(fields), "cpu") == ("whole", "cpu")
    assert factory.build_model(spec(fields, deterministic=True), "cuda") == ("whole", "cuda")
    assert not capsys.readouterr().err
    assert factory.build_model(spec({**fields, "hidden_act": "gelu"}), "cuda") == ("whole", "cuda")
    assert "gelu" in capsys.readouterr().err
    monkeypatch.setattr(factory.importlib.util, "find_spec", lambda name: None)
    assert factory.build_model(spec(fields), "cuda") == ("whole", "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", MODELS)
def test_skeleton_generates_the_same_as_transformers_module_on_a_gpu(name: str) -> None:
    theirs, asked = whole(name), requests(4, temperature=0.0)
    engine, _ = factory.build_engine(spec(sent_fields(theirs.config)), "cuda")
    assert isinstance(engine.model, skeleton.ModelSkeleton)
    engine.swap(1, theirs.state_dict())
    other = GraphEngine(theirs.to("cuda"), kv_tokens=512, max_running=4, max_rows=64, version=1)
    said = [drain(e, asked) for e in (engine, other)]
    got, wanted = ([tokens(chunks[r.id]) for r in asked] for chunks in said)
    assert got == wanted


FIRST_TOKEN = """
import json, sys
import windfall.worker.process
assert "torch" not in sys.modules, "the controller is dialed before torch is imported"
from windfall.engine.cuda import engine, skeleton
from windfall.types import Request
import tests.support.engines.reference_kernels
import torch
model = skeleton.ModelSkeleton(json.loads(sys.argv[1]), dtype=torch.float32, device="cpu")
made = engine.GraphEngine(model, kv_tokens=512)
for p in made.model.parameters():
    p.fill_(0.1)
made.add(Request(id="a", prompt=(5, 6), seed=1, max_tokens=1))
while len(made):
    said = made.step()
print(json.dumps([len(said), list(sys.modules)]))
"""


def test_worker_imports_nothing_slow_before_its_first_token() -> None:
    config = json.dumps(sent_fields(configuration("qwen3")))
    done = subprocess.run([sys.executable, "-c", FIRST_TOKEN, config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made, modules = json.loads(done.stdout)
    assert made == 1
    roots = {name.partition(".")[0] for name in modules}
    assert "torch" in roots
    assert not roots & {"transformers", "tokenizers", "huggingface_hub", "ray", "vllm", "reasoning_gym", "scipy"}
    assert not {"torch._dynamo", "torch._inductor"} & set(modules)
