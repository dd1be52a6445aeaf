"""What clients ask of the server and what it answers: the seam between the wire (wire/) and the service (service.py).

A *call* is a request that takes time. The service journals it, answers with an id at once, and performs it later: its
*outcome* can be asked for with that id, also after a restart of the server.

    call                               result          performed
    CreateModel, UnloadModel           ModelReady      in the order of arrival
    ForwardCall, ForwardBackwardCall   ForwardResult   in the order of `seq` of the model
    OptimStepCall                      Stepped         "
    SaveWeights, SaveForSampler        WeightsSaved    "
    LoadWeights                        ModelReady      "
    RefusedCall                        (fails)         "
    SampleCall                         Sampled         together with others

A call that is made again with the same model or sampler and the same `seq` gets the id of the first one. If it says
anything else than the first one, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import xxhash

from windfall.algorithms.given import Loss
from windfall.training import Adam, Sample
from windfall.types import Sampling

Metadata = dict[str, str]
MAX_NUMBER = 1 << 53
Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
"""A whole number, such as that of a call of a model or a sampler."""
MAX_TOKEN = 1 << 31
Token = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOKEN)]
TtlSeconds = Annotated[int, msgspec.Meta(ge=3600, le=10 * 366 * 86400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""The number of responses to one prompt."""


class LoraSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter of a model."""

    rank: int
    seed: int = 0
    attn: bool = True
    """Adapt the attention layers."""
    mlp: bool = True
    unembed: bool = True
    """Adapt the head."""


class CallBase(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The common base of calls and results."""


class ModelCallBase(CallBase, frozen=True):
    """A call of a model, in the order of `seq`."""

    repeated: ClassVar[bool] = False
    """It changes what the trainer has of the model. A trainer that has lost that is asked again."""
    short: ClassVar[bool] = True
    """The trainer performs it in milliseconds, once the model is in a slot."""
    model: str
    seq: Number


class CreateModel(CallBase, frozen=True):
    session: str
    seq: Number
    """Number of the model in its session."""
    base: str
    """Name of the base model, as the server serves it; may be empty with `path`."""
    lora: LoraSpec | None = None
    """None: that of `path`."""
    path: str = ""
    """Start with these weights instead of new ones."""
    optimizer: bool = False
    """Also take the state of the optimizer from `path`."""
    metadata: Metadata = {}


class UnloadModel(CallBase, frozen=True):
    model: str


class LossCall(ModelCallBase, frozen=True):
    short = False
    samples: tuple[Sample, ...]
    loss: Loss
    width: int = 0
    """Targets of each position: they stand together, and log-probs are a matrix. 0: one, and they are a list."""


class ForwardCall(LossCall, frozen=True):
    """Compute log-probs and loss."""


class ForwardBackwardCall(LossCall, frozen=True):
    """The same, and add the gradient."""

    repeated = True


class OptimStepCall(ModelCallBase, frozen=True):
    repeated = True
    adam: Adam


class SaveWeights(ModelCallBase, frozen=True):
    """Save a checkpoint to continue from, with the state of the optimizer."""

    name: str
    ttl_s: TtlSeconds | None = None
    """Seconds after which it is deleted. None: never."""
    overwrite: bool = False
    """Replace a checkpoint of this name; otherwise, it is an error that there is one."""
    metadata: Metadata = {}


class SaveForSampler(ModelCallBase, frozen=True):
    """Save weights to sample from."""

    name: str = ""
    """Empty: they exist as long as the sampler that is made with them."""
    sampler_seq: int | None = None
    """The number of the sampler in its session, if the weights have no name."""
    live: bool = False
    """All samplers of this kind follow the newest save of the model. Only for weights without a name."""
    ttl_s: TtlSeconds | None = None
    metadata: Metadata = {}


class LoadWeights(ModelCallBase, frozen=True):
    path: str
    optimizer: bool = False


class RefusedCall(ModelCallBase, frozen=True):
    """A call that the wire refuses: it fails with this message in its turn. The SDK does not repeat its number, so the
    calls after it would wait for it."""

    message: str


class SampleCall(CallBase, frozen=True):
    sampler: str
    """A sampling session."""
    seq: Number
    prompt: tuple[Token, ...]
    n: Count
    max_tokens: Number | None
    """None: as many as fit."""
    sampling: Sampling
    seed: int | None = None
    stop_ids: tuple[Token, ...] = ()
    stop_texts: tuple[str, ...] = ()
    eos: bool = True
    """The stop tokens of the model end a sequence, too."""
    prompt_logprobs: bool = False
    prompt_last: Number = 0
    """Only the last tokens of the prompt get log-probs: this many. The others are NaN. 0: all."""
    prompt_top_k: Number = 0


TrainerCall = ForwardCall | ForwardBackwardCall | OptimStepCall | LoadWeights
SaveCall = SaveWeights | SaveForSampler
ModelCall = TrainerCall | SaveCall | RefusedCall
Call = CreateModel | UnloadModel | ModelCall | SampleCall


class ModelReady(CallBase, frozen=True):
    model: str
    path: str = ""
    """The weights that were loaded."""


class ForwardResult(CallBase, frozen=True):
    logprobs: tuple[np.ndarray, ...]
    """The log-probs of the targets of each sample (float64)."""
    metrics: dict[str, float]
    width: int = 0
    """The width of the call."""


class Stepped(CallBase, frozen=True):
    metrics: dict[str, float]


class WeightsSaved(CallBase, frozen=True):
    path: str
    sampler: str = ""
    """The sampling session that was made with them, if they have no name."""


class SampledSequence(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    """It ended with a stop token or a stop text, not at the limit."""


class Sampled(CallBase, frozen=True):
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    """Log-prob of each token of the prompt (float64); NaN for the first one."""
    prompt_top_ids: tuple[tuple[int, ...], ...] = ()
    """The most likely tokens in the place of each token of the prompt; empty for the first one."""
    prompt_top_logprobs: tuple[tuple[float, ...], ...] = ()


Result = ModelReady | ForwardResult | Stepped | WeightsSaved | Sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    why: str = ""
    """What the call waits for; "" if it is being performed or is next."""
    state: Literal["active", "paused_capacity"] = "active"


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    result: Result
    size: int
    """Bytes of the result."""


class FailedCall(msgspec.Struct, frozen=True, kw_only=True):
    """The call was refused or failed; it changed nothing."""

    message: str
    user: bool = True
    """The caller can correct it."""


Outcome = Pending | Done | FailedCall


class Refusal(Exception):
    """A request that the server refuses at once. The message says what was wrong, where, and how to correct it."""

    def __init__(self, status: int, message: str) -> None:
        """`status`: of HTTP."""
        super().__init__(message)
        self.status = status


def _encode_array(value: object) -> tuple[str, bytes]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot be encoded: {type(value).__name__}")
    return value.dtype.str, value.tobytes()


def _decode_array(kind: type, value: Any) -> np.ndarray:
    dtype, data = value
    if dtype not in ("<f8", "<u4"):
        raise ValueError(f"an array of {dtype!r} is none of a call")
    return np.frombuffer(data, np.dtype(dtype))


encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
decode_call: Callable[[bytes], Call] = msgspec.msgpack.Decoder(Call, dec_hook=_decode_array).decode
decode_result: Callable[[bytes], Result] = msgspec.msgpack.Decoder(Result, dec_hook=_decode_array).decode
decode_failed: Callable[[bytes], FailedCall] = msgspec.msgpack.Decoder(FailedCall).decode


digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest
"""Equal for encoded calls that are the same in everything."""
