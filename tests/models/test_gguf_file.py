"""A model that was written as a GGUF has, read back by transformers, the logits and the tokens of the original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from windfall.errors import WindfallError
from windfall.recipe.lora import Lora
from windfall.run.commands import export
from windfall.trainer.model import lora

pytest.importorskip("gguf")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "vocab_size": 300,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e4}
    ),
    "qwen2": Qwen2Config(**{**SIZES, "num_hidden_layers": 1}),
    "qwen3": Qwen3Config(**{**SIZES, "head_dim": 128}),  # what transformers assumes when it reads a GGUF of Qwen3
}
TEXT = "What is 12 + 345? It's  a naïve question.\n"


def build(folder: Path, config: Any) -> Any:
    """A random model with a byte-level BPE of its own, in this folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT * 4], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:  # so that a bias or a norm that is lost makes a difference
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return model.eval()


def read(folder: Path) -> tuple[Any, Any]:
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(folder), "gguf_file": "model.gguf"}
    return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        **source
    )


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_tokens_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    model = build(tmp_path / "model", CONFIGS[name])
    own = AutoTokenizer.from_pretrained(tmp_path / "model")
    gguf = export_gguf(tmp_path, "f32")
    back, tokenizer = read(gguf)
    ids = own(TEXT)["input_ids"]
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids) == TEXT
    assert (logits(back, ids) - logits(model, ids)).abs().max() < 1e-4


def export_gguf(folder: Path, dtype: str) -> Path:
    from windfall.models import gguf_file

    out = folder / dtype
    out.mkdir()
    gguf_file.write(str(folder / "model"), out / "model.gguf", dtype)
    return out


def test_smaller_dtypes_are_smaller_and_close(tmp_path: Path) -> None:
    model, ids = build(tmp_path / "model", CONFIGS["qwen3"]), list(range(40))
    exact, size = logits(model, ids), (export_gguf(tmp_path, "f32") / "model.gguf").stat().st_size
    for dtype, limit in (("f16", 0.01), ("bf16", 0.1), ("q8_0", 0.1)):
        folder = export_gguf(tmp_path, dtype)
        assert (folder / "model.gguf").stat().st_size < 0.7 * size
        assert 0 < (logits(read(folder)[0], ids) - exact).abs().max() < limit * exact.abs().max()


def test_adapter_is_merged(tmp_path: Path) -> None:
    """From the folder of an adapter; a GGUF that is there already is refused."""
    base = build(tmp_path / "base", CONFIGS["llama"])
    adapters = lora.attach(base, Lora(rank=2), base=str(tmp_path / "base"), seed=1)
    for layer in adapters.layers.values():
        torch.nn.init.normal_(layer.pair("").b, 0.0, 0.1)
    adapters.save_pretrained(tmp_path / "adapter")
    made = export.export(tmp_path / "adapter", None, gguf="f32")
    assert made.folder == tmp_path / "adapter-f32"
    assert "as GGUF (f32)" in str(made)
    whole = export.export(tmp_path / "adapter", tmp_path / "whole").folder
    ids = list(range(40))
    expected = logits(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32), ids)
    assert (logits(read(made.folder)[0], ids) - expected).abs().max() < 1e-4
    with pytest.raises(WindfallError, match="this already exists"):
        export.export(tmp_path / "adapter", None, gguf="f32")
    with pytest.raises(WindfallError, match="unknown dtype 'q4'"):
        export.export(tmp_path / "adapter", None, gguf="q4")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=300), "the architecture 'gpt2'"),
        (LlamaConfig(**SIZES, attention_bias=True), "biases of the linear layers of llama"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
            "the rotary embedding 'linear'",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path, config: Any, said: str) -> None:
    build(tmp_path / "model", config)
    with pytest.raises(WindfallError, match=said):
        export_gguf(tmp_path, "f16")


def test_tokenizer_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    from windfall.models import gguf_file

    with pytest.raises(WindfallError, match=r"this tokenizer \(WordLevel\)"):
        gguf_file.write("tiny", tmp_path / "model.gguf", "f16")


def test_known_splits_of_text() -> None:
    from windfall.models.gguf_file import _pre

    level = {"type": "ByteLevel", "use_regex": False}
    for pattern, pre in ((r"x|\p{N}|y", "qwen2"), (r"x|\p{N}{1,3}|y", "llama-bpe"), (r"\s+", "")):
        steps = [{"type": "Split", "pattern": {"Regex": pattern}}, level]
        assert _pre({"model": {"type": "BPE"}, "pre_tokenizer": {"pretokenizers": steps}}) == pre
    assert json.dumps(_pre({"model": {"type": "Unigram"}})) == '""'
