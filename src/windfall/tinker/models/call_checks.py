"""Why a call of a model will fail, as far as it can be known before its turn. Pure."""

from __future__ import annotations

import numpy as np

from windfall.tinker import calls as c
from windfall.training import Adam, Sample

MAX_SETTING = 1e6
"""Largest setting of the optimizer. Larger ones leave the range of float32 within one update, which ends
the trainer."""


def why_not(call: c.ModelCall, *, context: int, vocabulary: int) -> str:
    """ "" if nothing is wrong. `context`: most tokens of a sample. `vocabulary`: token ids are below it.

    >>> why_not(c.SaveWeights(model="m", seq=1, name="../up"), context=8, vocabulary=100)
    "'../up' is no name for weights: use letters, digits, '.', '_' and '-'"
    """
    match call:
        case c.SaveWeights() | c.SaveForSampler() if not _is_name(call.name, call):
            return f"{call.name!r} is no name for weights: use letters, digits, '.', '_' and '-'"
        case c.OptimStepCall(adam=adam):
            return _wrong_setting(adam)
        case c.LossCall():
            wrong = (_wrong_sample(sample, context, vocabulary) for sample in call.samples)
            return next((f"data[{n}]: {why}" for n, why in enumerate(wrong) if why), "")
    return ""


def _is_name(name: str, call: c.Call) -> bool:
    if not name:
        return isinstance(call, c.SaveForSampler)
    return len(name) <= 128 and name[0] != "." and all(ch.isalnum() or ch in "._-" for ch in name) and name.isascii()


def _wrong_setting(adam: Adam) -> str:
    settings = (adam.lr, adam.eps, adam.weight_decay, adam.clip_norm)
    if not all(0 <= each <= MAX_SETTING for each in settings):  # a NaN fails every comparison
        names = "learning_rate, eps, weight_decay and grad_clip_norm"
        return f"adam_params: {names} are at least 0 and at most {MAX_SETTING:g}"
    return "" if all(0 <= beta < 1 for beta in adam.betas) else "adam_params: beta1 and beta2 are from 0 to below 1"


def _wrong_sample(sample: Sample, context: int, vocabulary: int) -> str:
    """What no pass over the model can compute."""
    if not sample.ids:
        return "it has no tokens"
    if len(sample.ids) > context:
        return f"{len(sample.ids)} tokens are more than the context of {context}"
    for name, values in (("advantages or weights", sample.advantages), ("logprobs", sample.behavior)):
        if values is not None and not (values.dtype == np.float64 and np.isfinite(values).all()):
            return f"{name} are not all finite numbers"
    if sample.labels is not None and sample.labels.dtype != np.uint32:
        return "target_tokens are not token ids"
    largest = max(max(sample.ids), 0 if sample.labels is None else int(sample.labels.max(initial=0)))
    return f"token {largest} is not one of the model's {vocabulary}" if largest >= vocabulary else ""
