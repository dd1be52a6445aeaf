"""Turns the data and the loss of a forward or forward_backward call into the samples that a trainer takes.

    model_input      x_0 x_1 ... x_(N-1)         ids of the sample: x_0 ... x_(N-1) y_(N-1)
    target_tokens    y_0 y_1 ... y_(N-1)         targets: all positions 1 ... N

y_i is the token whose log-prob is wanted after x_0 ... x_i. Mostly it is x_(i+1); else the sample has labels. With
cross entropy, y_i may be several tokens, as many for each i: the sample has each position so many times. The other
inputs of a loss have one number per target: `weights` of cross entropy, and `advantages` and `logprobs` (of the policy
that sampled) of the others.

What is refused here fails in its turn (calls.RefusedCall): the SDK goes on with the next number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from windfall.algorithms.given import Loss, LossName
from windfall.errors import nearest
from windfall.tinker.calls import MAX_TOKEN, ForwardBackwardCall, ForwardCall, Refusal, RefusedCall
from windfall.tinker.wire import messages
from windfall.tinker.wire.fields import MAX_ECHO, only_text
from windfall.training import Sample, given

TARGETS, WEIGHTS, ADVANTAGES, BEHAVIOR = "target_tokens", "weights", "advantages", "logprobs"
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "ppo": {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"},
    "cispo": {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"},
    "dro": {"beta": "beta"},
}
"""Names of the settings of each loss, and the fields of `Loss` that they are."""
ELSEWHERE = {
    "custom": "create_custom_loss: run it on the client, as forward_backward_custom does with a function",
    "gspo": "use importance_sampling, ppo or cispo, or forward_backward_custom",
    "stable_reinforce": "use importance_sampling, ppo or cispo, or forward_backward_custom",
}
"""Losses of the SDK that are not supported, and what to use instead."""
_TYPES = {
    messages.FLOAT32: np.dtype("<f4"),
    messages.INT64: np.dtype("<i8"),
    messages.INT32: np.dtype("<i4"),
    messages.BFLOAT16: np.dtype("<u2"),
}


def forward_call(data: bytes) -> ForwardCall | ForwardBackwardCall | RefusedCall:
    """The call in a body. Raises Refusal if it does not say whose call it is."""
    try:
        request = messages.read("ForwardBackwardRequest", data)
    except ValueError as e:
        raise Refusal(415, f"the body is {e}. Use an SDK from 0.35 on.") from None
    if not request.model_id or request.seq_id < 1:
        raise Refusal(400, "the body has no model_id, or no seq_id from 1 on")
    try:
        loss = _loss(request)
        read = [_sample(datum, loss, f"data[{n}]") for n, datum in enumerate(request.data)]
        if not read:
            raise Refusal(400, "data: it is empty. Send at least one datum.")
        samples, (width, *others) = tuple(sample for sample, _ in read), dict.fromkeys(width for _, width in read)
        if others:
            what = f"data: {max(1, width)} and {max(1, others[0])} targets per position in one call"
            raise Refusal(400, f"{what}. Send them in calls of their own.")
    except Refusal as e:
        return RefusedCall(model=request.model_id, seq=request.seq_id, message=str(e))
    kind = ForwardCall if request.forward_only else ForwardBackwardCall
    return kind(model=request.model_id, seq=request.seq_id, samples=samples, loss=loss, width=width)


def _loss(request: Any) -> Loss:
    name, known = request.loss_fn, get_args(LossName)
    if name not in known:
        fix = f"Instead, {ELSEWHERE[name]}." if name in ELSEWHERE else nearest(name[:MAX_ECHO], known)
        raise Refusal(400, f"loss_fn: {name[:MAX_ECHO]!r} is not supported. {fix}")
    settings = {entry.key: entry.value for entry in request.loss_fn_config}
    for entry in request.loss_fn_config_v2:
        if entry.value.HasField("text"):
            raise Refusal(400, f"loss_fn_config.{entry.key[:MAX_ECHO]}: expected a number, not a text")
        settings[entry.key] = entry.value.number
    fields, values = SETTINGS.get(name, {}), dict[str, Any]()
    for key, value in settings.items():
        if key not in fields:
            what = f"loss_fn_config.{key[:MAX_ECHO]}: {name} has no such setting."
            raise Refusal(400, f"{what} {nearest(key[:MAX_ECHO], fields)}".rstrip())
        if not (np.isfinite(value) and value >= 0):
            raise Refusal(400, f"loss_fn_config.{key}: {value} is not a number from 0 on")
        values[fields[key]] = value
    loss = Loss(name=name, **values)
    if loss.clip_low > loss.clip_high:
        what = f"clip_low_threshold {loss.clip_low:g} is above clip_high_threshold {loss.clip_high:g}"
        raise Refusal(400, f"loss_fn_config: {what}. Both are bounds of the ratio, such as 0.8 and 1.2.")
    return loss


def _sample(datum: Any, loss: Loss, where: str) -> tuple[Sample, int]:
    """The sample of a datum, and how many targets its positions have. 0: one."""
    inputs = {entry.key: entry.value for entry in datum.loss_fn_inputs}
    needed = {TARGETS, ADVANTAGES, BEHAVIOR} if loss.needs_behavior else {TARGETS}
    allowed = needed if loss.needs_behavior else {TARGETS, WEIGHTS}
    for key in inputs:
        if key not in allowed:
            what = f"{where}.loss_fn_inputs.{key[:MAX_ECHO]}: {loss.name} has no such input."
            raise Refusal(400, f"{what} Its inputs are {', '.join(sorted(allowed))}.")
    if missing := sorted(needed - inputs.keys()):
        raise Refusal(400, f"{where}.loss_fn_inputs: {loss.name} needs {' and '.join(missing)}")
    tokens = _model_input(datum, where)
    width = _width(inputs[TARGETS], loss, f"{where}.{TARGETS}")
    shape = (len(tokens), width) if width else (len(tokens),)
    targets = _numbers(inputs[TARGETS], shape, f"{where}.{TARGETS}")
    if targets.dtype.kind != "i" or targets.min() < 0 or targets.max() >= MAX_TOKEN:
        raise Refusal(400, f"{where}.{TARGETS}: expected token ids, which are integers from 0 on")
    advantages = np.ones(len(targets))
    for key in (WEIGHTS, ADVANTAGES):
        if key in inputs:
            advantages = _numbers(inputs[key], shape, f"{where}.{key}")
    behavior = _numbers(inputs[BEHAVIOR], shape, f"{where}.{BEHAVIOR}") if BEHAVIOR in inputs else ()
    labels = None if not width and np.array_equal(targets[:-1], tokens[1:]) else targets
    ids = [*tokens.tolist(), int(targets[-1])]
    positions = np.repeat(np.arange(1, len(tokens) + 1), max(1, width))
    return given(ids, positions.tolist(), advantages, behavior, labels), width


def _width(tensor: Any, loss: Loss, where: str) -> int:
    """How many targets each position has, if there is a row for each; otherwise 0. Raises Refusal."""
    if len(tensor.shape) < 2:
        return 0
    if loss.needs_behavior or len(tensor.shape) > 2 or tensor.shape[1] < 1:
        fix = "Give one token for each of model_input; with cross_entropy, also several for each."
        raise Refusal(400, f"{where}: it has the shape {_shape(tensor.shape)}. {fix}")
    return int(tensor.shape[1])


def _shape(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape)


def _model_input(datum: Any, where: str) -> np.ndarray:
    parts = list[np.ndarray]()
    for n, chunk in enumerate(datum.model_input):
        place = f"{where}.model_input[{n}]"
        if not chunk.HasField("encoded_text"):
            kind = "image" if chunk.HasField("image") else "audio"
            raise Refusal(400, f"{place}: {only_text(kind)}")
        parts.append(_raw(chunk.encoded_text.tokens, _TYPES[messages.INT32], place))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not tokens.size:
        raise Refusal(400, f"{where}.model_input: it has no tokens")
    if tokens.min() < 0:
        raise Refusal(400, f"{where}.model_input: a token id is negative")
    return tokens


def _numbers(tensor: Any, shape: tuple[int, ...], where: str) -> np.ndarray:
    """The numbers of a tensor of this shape: one, or one row, per token of the input. Raises Refusal."""
    if tensor.HasField("sparse_csr"):
        raise Refusal(400, f"{where}: sparse tensors are not supported. Send a dense one.")
    if len(tensor.shape) > 1 and tuple(tensor.shape) != shape:
        raise Refusal(400, f"{where}: it has the shape {_shape(tensor.shape)}, but expected {_shape(shape)}")
    if tensor.dtype not in _TYPES:
        raise Refusal(400, f"{where}: unknown type {tensor.dtype} of its numbers")
    values = _raw(tensor.dense, _TYPES[tensor.dtype], where)
    if tensor.dtype == messages.BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if len(values) != math.prod(shape):
        many = f"{_shape(shape)} targets" if len(shape) > 1 else f"{_shape(shape)} tokens of model_input"
        raise Refusal(400, f"{where}: it has {len(values)} numbers for {many}")
    if not np.isfinite(values).all():
        raise Refusal(400, f"{where}: a number is not finite")
    return values


def _raw(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise Refusal(400, f"{where}: {len(data)} bytes are not a whole number of {dtype.itemsize}-byte numbers")
    return np.frombuffer(data, dtype)
