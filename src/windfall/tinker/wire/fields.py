"""The JSON bodies of requests: which fields they have, and their types.

The limits of values are those of call_checks.py.

Rules:
- A field that would change the result is honored or refused, never ignored.
- A field that is not known here is refused, unless its value says that it is not used: null, false, 0 or empty. A newer
  SDK sends such fields with every request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from windfall.errors import nearest
from windfall.tinker.calls import MAX_NUMBER, Count, Metadata, Number, Refusal, Token, TtlSeconds

NO_TOKENS = "this server has no access tokens. The owner can call publish_checkpoint_from_tinker_path."
_LOGPROBS = "this is not supported. Log-probs of the tokens, of the prompt, and topk_prompt_logprobs are."
UNSUPPORTED = {
    "topk_sample_logprobs": _LOGPROBS, "target_prompt_logprobs": _LOGPROBS, "prompt_alt_tokens_k": _LOGPROBS,
    "record_stability_info": _LOGPROBS, "weights_access_token": NO_TOKENS,
}  # fmt: skip
"""Fields of the SDK that this server has no use for, and what to do instead."""
MAX_ECHO = 200
"""Characters of a client's text that an error repeats at most."""
Name = Annotated[str, Meta(min_length=1)]
Positive = Annotated[int, Meta(ge=1, lt=MAX_NUMBER)]
T = TypeVar("T")


class RequestBody(Struct):
    """The JSON body of a request.

    >>> ModelBody.read(b'{"model_id": "m", "type": "get_info", "new": null}')
    ModelBody(model_id='m')
    >>> ModelBody.read(b'{"model_id": "m", "modl": 3}')
    Traceback (most recent call last):
    windfall.tinker.calls.Refusal: modl: this field is not known. Did you mean 'model_id'?
    """

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Raises Refusal."""
        return convert(read_object(data), cls)


class CreateSession(RequestBody):
    tags: list[str] = []
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class LoraFields(Struct):
    rank: Number
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelBody(RequestBody):
    session_id: Name
    model_seq_id: Number
    base_model: Name
    user_metadata: Metadata | None = None
    lora_config: LoraFields | None = None
    optimizer_config: dict[str, Any] | None = None


class LoadWeightsBody(RequestBody):
    path: Name
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: dict[str, Any] | None = None


class ModelBody(RequestBody):
    model_id: Name


class AdamFields(Struct):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(RequestBody):
    model_id: Name
    seq_id: Number
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeightsBody(RequestBody):
    model_id: Name
    seq_id: Number
    path: str | None = None
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSamplerBody(RequestBody):
    model_id: Name
    seq_id: Number
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    ttl_seconds: TtlSeconds | None = None
    user_metadata: Metadata | None = None


class CreateSampler(RequestBody):
    session_id: Name
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(Struct):
    tokens: tuple[Token, ...]


class Prompt(Struct):
    chunks: list[dict[str, Any]]

    def ids(self) -> tuple[int, ...]:
        """The tokens of a prompt of text. Raises Refusal for images and audio."""
        ids: list[int] = []
        for n, chunk in enumerate(self.chunks):
            where = f"prompt.chunks[{n}]"
            if (kind := chunk.get("type", "encoded_text")) != "encoded_text":
                raise Refusal(400, f"{where}: {only_text(str(kind)[:MAX_ECHO])}")
            ids += convert(chunk, TextChunk, where).tokens
        return tuple(ids)


class SamplingFields(Struct):
    max_tokens: Positive | None = None
    seed: int | None = None
    stop: str | list[str | Token] | None = None
    temperature: float = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=MAX_NUMBER)] = -1
    top_p: float = 1.0


class SampleBody(RequestBody):
    sampling_session_id: Name
    seq_id: Number
    prompt: Prompt
    sampling_params: SamplingFields
    num_samples: Count = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Number = 0
    prompt_logprobs_last_n: Positive | None = None


class RetrieveBody(RequestBody):
    request_id: Name
    allow_metadata_only: bool = False


class FuturesTarget(Struct):
    sampling_session_id: Name
    type: str = "sampling_session"
    cloned_sampler_id: Number = 0


class RetrieveManyBody(RequestBody):
    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: Annotated[float, Meta(ge=0)] | None = None
    retrieved_request_ids: list[str] = []


class CopyWeightsBody(RequestBody):
    source_path: Name
    session_id: str | None = None
    model_seq_id: Number | None = None
    destination_project_id: str | None = None
    ttl_seconds: TtlSeconds | None = None


class TtlBody(RequestBody):
    ttl_seconds: TtlSeconds | None = None


class FinishBody(RequestBody):
    reason: dict[str, Any]
    detail: str | None = None


class SearchBody(RequestBody):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: Metadata = {}
    display_name: str | None = None
    owner: dict[str, Any] | None = None
    statuses: list[dict[str, Any]] | None = None
    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    cursor: dict[str, str] | None = None


def only(name: str) -> Callable[[bytes], str]:
    """Reads a body that has one field, which is a name.

    >>> only("session_id")(b'{"session_id": "s", "type": "session_heartbeat"}')
    's'
    """
    kind = msgspec.defstruct(name, [(name, Name)])
    return lambda data: getattr(convert(read_object(data), kind), name)


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises Refusal."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Refusal(400, f"the body is not a JSON object: {str(e)[:MAX_ECHO]}") from None


def convert(body: dict[str, Any], kind: type[T], where: str = "") -> T:
    """The fields of an object within a body, at `where`. Raises Refusal.

    >>> convert({"beta1": "2"}, AdamFields, "adam_params")
    Traceback (most recent call last):
    windfall.tinker.calls.Refusal: adam_params.beta1: Expected `float`, got `str`
    """
    _check_names(body, kind, where)
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as e:
        what, _, place = str(e).partition(" - at `$")
        place = (where + place.rstrip("`")).strip(".")
        raise Refusal(400, f"{place}: {what}"[: 2 * MAX_ECHO] if place else what) from None


def _check_names(body: dict[str, Any], kind: Any, where: str) -> None:
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in body.items():
        place = f"{where}.{name}" if where else name
        if name in types:
            for inner in (types[name], *get_args(types[name])):
                if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, Struct):
                    _check_names(value, inner, place)
        elif name != "type" and value not in (None, False, 0, "", [], {}):
            why = UNSUPPORTED.get(name) or f"this field is not known. {nearest(name[:MAX_ECHO], types)}"
            raise Refusal(400, f"{place[:MAX_ECHO]}: {why}")


def only_text(kind: str) -> str:
    """Why an input of another kind is refused."""
    return f"{kind!r} is not supported: this server trains and samples text models. Send tokens (encoded_text)."
