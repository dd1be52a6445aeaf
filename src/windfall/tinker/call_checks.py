"""Why a call will fail, as far as it can be known when it arrives. Pure.

These are the limits of values, for every client. What only the SDK can say wrong is refused in wire/.
"""

from __future__ import annotations

import math

import numpy as np

from windfall.algorithms.given import Loss
from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.training import MAX_TOP, Adam, Sample, check_given

MAX_STOPS = 64
MAX_TOP_K = (1 << 31) - 1
MAX_SETTING = 1e6
"""Largest setting of the optimizer. Larger ones leave the range of float32 within one update, which ends
the trainer."""


def why_not(call: c.ModelCall | c.SampleCall, *, context: int, vocabulary: int) -> str:
    """ "" if nothing is wrong. `context`: most tokens of a sample, or of prompt and response together. `vocabulary`:
    token ids are below it.

    >>> why_not(c.SaveWeights(model="m", seq=1, name="../up"), context=8, vocabulary=100)
    "'../up' is no name for weights: use letters, digits, '.', '_' and '-'"
    """
    match call:
        case c.SaveWeights() | c.SaveForSampler() if not _is_name(call.name, call):
            return f"{call.name!r} is no name for weights: use letters, digits, '.', '_' and '-'"
        case c.OptimStepCall(adam=adam):
            return _wrong_setting(adam)
        case c.LossCall():
            wrong = (_wrong_sample(sample, call.loss, context, vocabulary) for sample in call.samples)
            return next((f"data[{n}]: {why}" for n, why in enumerate(wrong) if why), "")
        case c.SampleCall():
            return _wrong_prompt(call, context, vocabulary) or _wrong_sampling(call)
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


def _wrong_sample(sample: Sample, loss: Loss, context: int, vocabulary: int) -> str:
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
    if largest >= vocabulary:
        return f"token {largest} is not one of the model's {vocabulary}"
    try:
        check_given(sample, loss, "")
    except WindfallError as e:
        return e.what
    return ""


def _wrong_prompt(call: c.SampleCall, context: int, vocabulary: int) -> str:
    if not call.prompt:
        return "prompt: it has no tokens. Send at least one, such as the token that begins a text."
    wrong = next((id for id in (*call.prompt, *call.stop_ids) if not 0 <= id < vocabulary), None)
    if wrong is not None:
        return f"token {wrong} is not one of the model's {vocabulary}"
    room = context - len(call.prompt)
    if room < 1:
        return f"the prompt has {len(call.prompt)} tokens, but prompt and response have at most {context}"
    if call.max_tokens is not None and call.max_tokens > room:
        have = f"prompt and max_tokens are {len(call.prompt)} + {call.max_tokens} tokens"
        return f"{have}, but together they have at most {context}"
    if call.prompt_top_k > min(MAX_TOP, vocabulary):
        return f"topk_prompt_logprobs: {call.prompt_top_k} tokens are more than {min(MAX_TOP, vocabulary)}"
    if call.prompt_last and not (call.prompt_logprobs and call.prompt_last < len(call.prompt)):
        what = f"prompt_logprobs_last_n: {call.prompt_last} of a prompt of {len(call.prompt)} tokens"
        return f"{what}. It needs prompt_logprobs, and at most {len(call.prompt) - 1} tokens."
    return ""


def _wrong_sampling(call: c.SampleCall) -> str:
    """
    >>> from windfall.types import Sampling
    >>> _wrong_sampling(c.SampleCall(sampler="s", seq=1, prompt=(5,), n=1, max_tokens=1, sampling=Sampling(top_p=0.0)))
    'sampling_params: temperature is at least 0, top_p is above 0 and at most 1, and top_k is below 2147483648'
    """
    sampling, stops = call.sampling, len(call.stop_ids) + len(call.stop_texts)
    if not (0 <= sampling.temperature < math.inf and 0 < sampling.top_p <= 1 and 0 <= sampling.top_k <= MAX_TOP_K):
        ranges = f"temperature is at least 0, top_p is above 0 and at most 1, and top_k is below {MAX_TOP_K + 1}"
        return f"sampling_params: {ranges}"
    if stops > MAX_STOPS:
        return f"sampling_params.stop: {stops} sequences. Give at most {MAX_STOPS}."
    return "sampling_params.stop: an empty text would end every sequence at once" if "" in call.stop_texts else ""
