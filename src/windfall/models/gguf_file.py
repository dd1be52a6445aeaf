"""A model as one GGUF file, which llama.cpp and programs built on it read: weights, sizes, tokenizer, chat template.

Names of tensors and keys are those of the package gguf. Models whose file would compute something else are refused by
name: other architectures, scaled rotary embeddings, biases that the format does not have, sliding windows, tokenizers
that are no byte-level BPE.

llama.cpp rotates neighboring elements of a head, transformers the two halves. For the architecture "llama" the rows of
queries and keys are therefore reordered in the file; for "qwen2" and "qwen3" they are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, install_command
from windfall.models import load

DTYPES = ("f32", "f16", "bf16", "q8_0")
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""By model_type of transformers, the name in llama.cpp."""
OTHER = "Export the folder (without --gguf), and convert it with llama.cpp's own script."
QWEN_DIGITS, LLAMA3_DIGITS = r"|\p{N}|", r"|\p{N}{1,3}|"


def write(model: str, out: Path, dtype: str) -> None:
    """Write a model, or an adapter with its base, as one file. `dtype`: of the matrices; vectors stay in float32."""
    try:
        import gguf
    except ImportError as e:
        raise WindfallError("the package gguf is not installed", where="--gguf", fix=install_command("gguf")) from e
    read, tokenizer = load.load(model, dtype="float32", device="cpu"), load.load_tokenizer(model)
    config = read.config
    name = _check(config, model)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    writer = gguf.GGUFWriter(out, name)
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{dtype.upper()}" if dtype != "f32" else "ALL_F32"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer, config.vocab_size, model)
    names, weights = gguf.get_tensor_name_map(arch, config.num_hidden_layers), read.state_dict()
    for key, tensor in weights.items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise WindfallError(f"GGUF has no name for the weight {key!r} of {name}", where=model, fix=OTHER)
        data = tensor.float().numpy()
        if name == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            data = data.reshape(heads, 2, data.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)
        kind = _kind(gguf, dtype, data)
        writer.add_tensor(target, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(gguf: Any, dtype: str, data: Any) -> Any:
    """The type of a tensor: float32 for vectors, float16 for rows that are not whole blocks of a quantization."""
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    if data.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.F16 if data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def _check(config: Any, model: str) -> str:
    """The architecture in llama.cpp. Raises WindfallError for a model that a file would not describe completely."""
    name, rope = ARCHITECTURES.get(config.model_type), getattr(config, "rope_parameters", None) or {}
    what = ""
    if name is None:
        what = f"the architecture {config.model_type!r} (those that can be: {', '.join(ARCHITECTURES)})"
    elif rope.get("rope_type", "default") != "default":
        what = f"the rotary embedding {rope['rope_type']!r}"
    elif name != "qwen2" and (getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)):
        what = f"biases of the linear layers of {name}"
    elif getattr(config, "use_sliding_window", False):
        what = "a sliding window"
    elif config.hidden_act != "silu":
        what = f"the activation {config.hidden_act!r}"
    if what:
        raise WindfallError(f"windfall cannot write {what} into a GGUF", where=model, fix=OTHER)
    return str(name)


def _add_tokenizer(writer: Any, tokenizer: Any, size: int, model: str) -> None:
    from gguf import TokenType

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = _pre(backend)
    if not pre:
        kind = backend["model"]["type"]
        what = f"windfall cannot write this tokenizer ({kind}) into a GGUF: it is no byte-level BPE that it knows"
        raise WindfallError(what, where=model, fix=OTHER)
    added = {entry["id"]: entry for entry in backend["added_tokens"]}
    found = {id: token for token, id in backend["model"]["vocab"].items()}
    found |= {id: entry["content"] for id, entry in added.items()}
    kinds = list[TokenType]()
    for n in range(size):
        if n in added:
            kinds.append(TokenType.CONTROL if added[n]["special"] else TokenType.USER_DEFINED)
        else:
            kinds.append(TokenType.NORMAL if n in found else TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([found.get(n, f"[PAD{n}]") for n in range(size)])
    writer.add_token_types(kinds)
    merges = backend["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    for key in ("bos", "eos", "pad"):
        if (id := getattr(tokenizer, f"{key}_token_id")) is not None:
            getattr(writer, f"add_{key}_token_id")(id)
    writer.add_add_bos_token(bool(ids := tokenizer("a")["input_ids"]) and ids[0] == tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _pre(backend: dict[str, Any]) -> str:
    """llama.cpp's name for how a byte-level BPE splits text first. Empty: none that is known here."""
    if backend["model"]["type"] != "BPE" or backend["model"].get("byte_fallback"):
        return ""
    first = backend.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    if not steps or steps[-1].get("type") != "ByteLevel":
        return ""
    match [step["type"] for step in steps]:
        case ["ByteLevel"] if steps[0].get("use_regex", True):
            return "gpt-2"
        case ["Digits", "ByteLevel"] if steps[0]["individual_digits"] and steps[1].get("use_regex", True):
            return "smollm"
        case ["Split", "ByteLevel"]:
            pattern = steps[0]["pattern"].get("Regex", "")
            return "llama-bpe" if LLAMA3_DIGITS in pattern else "qwen2" if QWEN_DIGITS in pattern else ""
    return ""
