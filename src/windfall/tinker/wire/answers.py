"""Results of calls as the SDK expects them: samples and scores as protobuf, all others as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from windfall.tinker.calls import FailedCall, ForwardResult, ModelReady, Pending, Result, Sampled, Stepped, WeightsSaved
from windfall.tinker.wire import messages

NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""What stands in cells of the most likely tokens that are empty."""


def of(result: Result) -> bytes | dict[str, Any]:
    """The result as a message, or as an object: the SDK knows from its request what it is.

    >>> of(ModelReady(model="s:train:0"))
    {'model_id': 's:train:0'}
    """
    match result:
        case ForwardResult():
            return _scored(result)
        case Sampled():
            return _sampled(result)
        case ModelReady():
            return {"model_id": result.model} | ({"path": result.path} if result.path else {})
        case Stepped():
            return {"metrics": {key: value for key, value in result.metrics.items() if math.isfinite(value)}}
        case WeightsSaved():
            return {"path": result.path} | ({"sampling_session_id": result.sampler} if result.sampler else {})


def failed(outcome: FailedCall) -> dict[str, Any]:
    return {"error": outcome.message, "category": "user" if outcome.user else "server"}


def pending(request: str, outcome: Pending) -> dict[str, Any]:
    answer = {"type": "try_again", "request_id": request, "queue_state": outcome.state}
    return answer | ({"queue_state_reason": outcome.why} if outcome.why else {})


def _bytes(values: Any, dtype: str = "<f4") -> bytes:
    return np.asarray(values, dtype).tobytes()


def _scored(result: ForwardResult) -> bytes:
    logprobs = [_bytes(values) for values in result.logprobs]
    ends = np.cumsum([0, *map(len, logprobs)], dtype="<i8")
    tensor = messages.new(
        "BatchedTensor", data=b"".join(logprobs), offsets=ends.tobytes(), dtype=messages.FLOAT32,
        trailing_shape=[result.width] if result.width else [],
    )  # fmt: skip
    fields = [messages.new("NamedArrays", key="logprobs", value=tensor)]
    record = messages.new("ArrayRecord", type_tag="ArrayRecord", fields=fields, num_datums=len(logprobs))
    metrics = [messages.new("Metric", key=key, value=value) for key, value in result.metrics.items()]
    output = messages.new(
        "ForwardBackwardOutput", loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics
    )
    return output.SerializeToString()


def _sampled(result: Sampled) -> bytes:
    sequences = [
        messages.new(
            "SampledSequence", stop_reason=messages.STOP if sequence.stopped else messages.LENGTH,
            tokens=_bytes(sequence.tokens, "<i4"), logprobs=_bytes(sequence.logprobs),
        )
        for sequence in result.sequences
    ]  # fmt: skip
    answer = messages.new("SampleResponse", sequences=sequences)
    if result.prompt_logprobs is not None:
        answer.prompt_logprobs = _bytes(result.prompt_logprobs)
    if result.prompt_top_ids:
        answer.topk_prompt_logprobs.CopyFrom(_most_likely(result.prompt_top_ids, result.prompt_top_logprobs))
    return answer.SerializeToString()


def _most_likely(ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> Any:
    """The most likely tokens in the place of each token, as two matrices: one row per token."""
    size, k = len(ids), max(len(row) for row in ids)
    tokens, values = np.full((size, k), NO_TOKEN, "<i4"), np.full((size, k), NO_LOGPROB, "<f4")
    for n, (row, scores) in enumerate(zip(ids, logprobs, strict=True)):
        tokens[n, : len(row)], values[n, : len(row)] = row, scores
    return messages.new("TopkLogprobs", token_ids=tokens.tobytes(), logprobs=values.tobytes(), k=k, length=size)
