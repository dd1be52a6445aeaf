"""Adapters in PEFT format: they read back as written, peft agrees, and what windfall cannot compute is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from windfall.errors import WindfallError
from windfall.models import load
from windfall.recipe.lora import Lora
from windfall.trainer.model import lora
from windfall.weights import adapter_folder
from windfall.weights.adapter_folder import AdapterConfig

IDS = torch.tensor([[1, 5, 9, 14, 22, 31, 8, 3]])


def adapted(**section: Any) -> lora.Adapters:
    """The tiny model with adapters that have an effect."""
    model = load.load("tiny", dtype="float32", device="cpu")
    out = lora.attach(model, Lora(**section), base=str(load.TINY), seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for t in out.tensors().values():
            t.normal_(std=0.1)
    return out


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    return model(IDS).logits


ENDS = {"rank": 2, "targets": ["q_proj", "lm_head", "embed_tokens"]}
"""The tiny model has one matrix for head and embeddings."""


@pytest.mark.parametrize(
    "section", [{"rank": 4, "alpha": 3.0}, {"rank": 2, "targets": ["q_proj", "mlp.down_proj"]}, ENDS]
)
def test_folder_reads_back_as_it_was_written(tmp_path: Path, section: dict[str, Any]) -> None:
    one = adapted(**section)
    one.save_pretrained(tmp_path)
    model = load.load("tiny", dtype="float32", device="cpu")
    two = lora.attach(model, Lora(path=tmp_path), base=str(load.TINY), seed=9)
    assert two.config == one.config
    assert two.tensors().keys() == one.tensors().keys()
    assert all(torch.equal(t, two.tensors()[name]) for name, t in one.tensors().items())
    assert torch.equal(logits(two.model), logits(one.model))


@pytest.mark.parametrize(
    "section", [{"rank": 4}, ENDS, {"rank": 2, "targets": ["lm_head"]}, {"rank": 2, "targets": ["embed_tokens"]}]
)
def test_folder_is_loaded_like_any_model(tmp_path: Path, section: dict[str, Any]) -> None:
    """`eval`, `generate` and `model.path` take an adapter: it is merged into its base. Its tokenizer is the base's."""
    one = adapted(**section)
    one.save_pretrained(tmp_path)
    merged = load.load(str(tmp_path), dtype="float32", device="cpu")
    assert merged.state_dict().keys() == load.load("tiny", dtype="float32", device="cpu").state_dict().keys()
    assert torch.allclose(logits(merged), logits(one.model), atol=1e-4)
    with one.switched_off():
        assert not torch.allclose(logits(merged), logits(one.model), atol=1e-1)
    assert load.load_tokenizer(str(tmp_path)).get_vocab() == load.load_tokenizer("tiny").get_vocab()
    merged.save_pretrained(tmp_path / "exported")
    exported = load.load(str(tmp_path / "exported"), dtype="float32", device="cpu")
    assert torch.equal(logits(exported), logits(merged))


def test_layers_are_named_in_full_if_their_last_parts_mean_more(tmp_path: Path) -> None:
    targets = ["model.layers.1.self_attn.v_proj"]
    one = adapted(rank=2, targets=targets)
    one.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == targets


@pytest.mark.parametrize("section", [{"rank": 4, "alpha": 3.0}, {"rank": 2, "targets": ["q_proj", "up_proj"]},
                                     {"rank": 2, "targets": ["model.layers.1.self_attn.v_proj"]},
                                     {"rank": 2, "targets": ["lm_head"]}, {"rank": 2, "targets": ["embed_tokens"]},
                                     ENDS])  # fmt: skip
def test_peft_computes_what_windfall_computes(tmp_path: Path, section: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    one = adapted(**section)
    one.save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(load.TINY, dtype=torch.float32), tmp_path
    )
    assert sum("lora" in name for name, _ in theirs.named_parameters()) == len(one.tensors())
    assert torch.allclose(logits(theirs.eval()), logits(one.model), atol=1e-4)


@pytest.mark.parametrize("rslora", [False, True])
def test_windfall_reads_what_peft_writes(tmp_path: Path, rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", use_rslora=rslora, init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(load.TINY, dtype=torch.float32), config).eval()
    theirs.save_pretrained(tmp_path)
    model = load.load("tiny", dtype="float32", device="cpu")
    ours = lora.attach(model, Lora(path=tmp_path), base=str(load.TINY), seed=0)
    assert len(ours.layers) == 7 * model.config.num_hidden_layers
    assert torch.allclose(logits(ours.model), logits(theirs), atol=1e-3)
    assert torch.allclose(logits(load.load(str(tmp_path), dtype="float32", device="cpu")), logits(theirs), atol=1e-3)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens", "v_proj"]])
@pytest.mark.parametrize("tied", [True, False])
def test_windfall_reads_heads_and_embeddings_of_peft(tmp_path: Path, targets: list[str], tied: bool) -> None:
    """PEFT saves their weights beside the adapter. They must be those of the base."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = load.load("tiny", dtype="float32", device="cpu")
    if not tied:
        load.untie(base)
        with torch.no_grad():
            base.lm_head.weight.mul_(-1.0)
    base.save_pretrained(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(plain, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    names = [name for name, _ in theirs.named_parameters() if "lora" in name]
    assert len(names) == 2 * sum(4 if t == "v_proj" else 1 for t in targets)
    ours = lora.attach(base, Lora(path=tmp_path / "adapter"), base="", seed=0)
    assert torch.allclose(logits(ours.model), logits(theirs), atol=1e-3)
    assert torch.allclose(logits(load.load(str(tmp_path / "adapter"), dtype="float32", device="cpu")),
                          logits(theirs), atol=1e-3)  # fmt: skip
    with ours.switched_off():
        assert not torch.allclose(logits(ours.model), logits(theirs), atol=1e-1)
    other = load.load("tiny", dtype="float32", device="cpu")
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(2.0)
    with pytest.raises(WindfallError, match=r"the adapter comes with another '.*' than its base has"):
        lora.attach(other, Lora(path=tmp_path / "adapter"), base="", seed=0)


CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "tiny"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"peft_type": "IA3"}, r"peft_type = 'IA3' is not supported"),
        ({"r": 0}, r"r = 0 and lora_alpha = 4 must be above zero"),
        ({"lora_alpha": None}, r"lora_alpha = None must be above zero"),
        ({"use_dora": True}, r"use_dora = True is not supported"),
        ({"bias": "all"}, r"bias = 'all' is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern = \{'q_proj': 8\} is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
    ],
)
def test_adapter_that_windfall_does_not_compute_is_refused(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(WindfallError, match=expected):
        adapter_folder.read_config(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, "not json"])
def test_damaged_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(WindfallError, match="cannot be read"):
        adapter_folder.read_config(tmp_path)


def test_tensors_that_are_not_lora_matrices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="windfall reads no pickled files"):
        adapter_folder.read_tensors(tmp_path, {})
    path = tmp_path / "adapter_model.safetensors"
    save_file({"base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector": torch.zeros(2)}, str(path))
    with pytest.raises(WindfallError, match="lora_magnitude_vector' is not a LoRA matrix"):
        adapter_folder.read_tensors(tmp_path, {})
    path.write_bytes(b"12345678")
    with pytest.raises(WindfallError, match="cannot be read"):
        adapter_folder.read_tensors(tmp_path, {})


def test_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    adapted(rank=2).save_pretrained(tmp_path)
    config = adapter_folder.read_config(tmp_path)
    for base, expected in (("/no/such/model", "base model of this adapter: no model .*/no/such/model"),
                           ("", "does not name its base model"),
                           (str(tmp_path), "is an adapter itself")):  # fmt: skip
        tensors = adapter_folder.read_tensors(tmp_path, {})
        adapter_folder.write(tmp_path, AdapterConfig(rank=config.rank, alpha=config.alpha, base=base), tensors)
        with pytest.raises(WindfallError, match=expected):
            load.load(str(tmp_path), dtype="float32", device="cpu")
