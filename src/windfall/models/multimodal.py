"""Models that read images or sound beside text: they are refused by name, before anything starts.

windfall trains text models. Without this check, some of these models would load without their image part, and a
checkpoint would not be the model that the user gave. config.json tells: such a model has a configuration for its other
part, or a type that stands for one.

No torch and no transformers here: the command line checks a recipe before it starts anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windfall.errors import WindfallError

PARTS = {
    "vision_config": "images",
    "visual": "images",  # Qwen-VL
    "visual_tokenizer_config": "images",  # Ovis
    "img_processor": "images",  # Phi-3.5-vision
    "vq_config": "images",  # Chameleon, Emu3
    "mm_vision_tower": "images",  # LLaVA, as its authors publish it
    "vision_backbone": "images",
    "thinker_config": "images and sound",  # Qwen-Omni
    "audio_config": "sound",
}
"""Keys of config.json that only such models have, and what the part reads."""
TYPES = {
    "fuyu": "images", "gemma4": "images", "gemma4_unified": "images", "granite_speech": "sound", "molmo": "images",
    "phi4mm": "images and sound",
}  # fmt: skip
"""Model types that need not have such a key."""
TEXTS = ("text_config", "llm_config", "language_config")
"""Keys under which such a model has the configuration of its text model."""

TEXT_MODELS = {
    "cohere": ("cohere2", "CohereLabs/c4ai-command-r7b-12-2024"),
    "deepseek": ("deepseek_v3", "moonshotai/Moonlight-16B-A3B-Instruct"),
    "exaone": ("exaone4", "LGAI-EXAONE/EXAONE-4.0-1.2B"),
    "gemma": ("gemma3_text", "google/gemma-3-1b-it"),
    "glm": ("glm4", "zai-org/GLM-4-9B-0414"),
    "granite": ("granite", "ibm-granite/granite-3.3-8b-instruct"),
    "llama": ("llama", "meta-llama/Llama-3.1-8B-Instruct"),
    "mistral": ("mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
    "phi": ("phi3", "microsoft/Phi-4-mini-instruct"),
    "pixtral": ("mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
    "qwen": ("qwen3", "Qwen/Qwen3-8B"),
    "qwen2": ("qwen2", "Qwen/Qwen2.5-7B-Instruct"),
}
"""By a part of a model type: a family of text models that windfall trains instead (docs/models.md), and one of them."""


def refuse(config: Mapping[str, Any], name: str) -> None:
    """Raise WindfallError if this config.json is that of a model with images or sound. `name`: as the user gave it.

    >>> refuse({"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}}, "Qwen/Qwen2.5-VL-7B-Instruct")
    Traceback (most recent call last):
    windfall.errors.WindfallError: model.path = Qwen/Qwen2.5-VL-7B-Instruct: qwen2_5_vl reads images beside text, ...
    >>> refuse({"model_type": "gemma3_text", "vision_config": None}, "google/gemma-3-1b-it")
    """
    kind = str(config.get("model_type") or "this model")
    reads = next((found for key, found in PARTS.items() if config.get(key)), "") or TYPES.get(kind, "")
    if not reads:
        return
    what = f"{kind} reads {reads} beside text, and windfall trains text models only"
    raise WindfallError(what, where=f"model.path = {name}", fix=_instead(kind, config))


def _instead(kind: str, config: Mapping[str, Any]) -> str:
    """Which text models can be used: those of the family of its text part, or of its name."""
    texts = [config.get(key) for key in TEXTS]
    kinds = [str(text.get("model_type", "")) for text in texts if isinstance(text, Mapping)]
    for of in (*kinds, kind):
        named = max((key for key in TEXT_MODELS if key in of), key=len, default="")
        if named:
            family, example = TEXT_MODELS[named]
            return f"Use a text model of the family {family}, such as {example}; docs/models.md lists all families."
    return "Use a text model: docs/models.md lists the families that were checked."
