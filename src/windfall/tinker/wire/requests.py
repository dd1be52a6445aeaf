"""From the bodies of requests to calls of the service. What cannot be honored is refused in words.

A call of a model that is refused still takes its place in the order of the calls of the model (calls.RefusedCall).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from windfall.tinker import calls as c
from windfall.tinker.calls import Refusal
from windfall.tinker.wire import fields as f
from windfall.tinker.wire import samples
from windfall.tinker.wire.fields import MAX_ECHO
from windfall.training import Adam
from windfall.types import Sampling

SEEDS = 1 << 63


Encoded = tuple[c.Call, bytes]
"""A call, and how it is stored."""


def native(data: bytes) -> Encoded:
    """The call in a body of windfall.client. Raises Refusal."""
    try:
        return c.decode_call(data), data
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise Refusal(400, f"the body is no call in msgpack: {e}. Use windfall.client of this version.") from e


def forward(data: bytes) -> Encoded:
    """The call in a protobuf body. Raises Refusal."""
    call = samples.forward_call(data)
    return call, c.encode(call)


def call(convert: Callable[[dict[str, Any]], c.Call], data: bytes) -> Encoded:
    """The call in a JSON body. Raises Refusal."""
    found = model_call(f.read_object(data), convert)
    return found, c.encode(found)


def model_call(body: dict[str, Any], convert: Callable[[dict[str, Any]], c.Call]) -> c.Call:
    """The call in a body. If it is refused, it fails in its turn, as far as the body says whose turn that is."""
    try:
        return convert(body)
    except Refusal as e:
        model, seq = body.get("model_id"), body.get("seq_id")
        if isinstance(model, str) and model and type(seq) is int and 1 <= seq < c.MAX_NUMBER:
            return c.RefusedCall(model=model, seq=seq, message=str(e))
        raise


def create_model(body: dict[str, Any]) -> c.CreateModel:
    fields = f.convert(body, f.CreateModelBody)
    _check_optimizer(fields.optimizer_config)
    spec = None
    if (lora := fields.lora_config) is not None:
        seed = zlib.crc32(f"{fields.session_id}/{fields.model_seq_id}".encode()) if lora.seed is None else lora.seed
        spec = c.LoraSpec(
            rank=lora.rank, seed=seed % SEEDS, attn=lora.train_attn, mlp=lora.train_mlp, unembed=lora.train_unembed
        )
    return c.CreateModel(
        session=fields.session_id, seq=fields.model_seq_id, base=fields.base_model, lora=spec,
        metadata=fields.user_metadata or {},
    )  # fmt: skip


def load_weights(body: dict[str, Any]) -> c.CreateModel | c.LoadWeights:
    """Weights for a model that exists, or for a new one: then the body names the session and not the model."""
    fields = f.convert(body, f.LoadWeightsBody)
    _check_optimizer(fields.optimizer_config)
    if fields.session_id and fields.model_seq_id is not None:
        return c.CreateModel(
            session=fields.session_id, seq=fields.model_seq_id, base=fields.base_model or "", path=fields.path,
            optimizer=fields.optimizer, metadata=fields.user_metadata or {},
        )  # fmt: skip
    if not fields.model_id or not fields.seq_id:
        raise Refusal(400, "expected model_id and seq_id, or session_id and model_seq_id")
    return c.LoadWeights(model=fields.model_id, seq=fields.seq_id, path=fields.path, optimizer=fields.optimizer)


def unload_model(body: dict[str, Any]) -> c.UnloadModel:
    return c.UnloadModel(model=f.convert(body, f.ModelBody).model_id)


def optim_step(body: dict[str, Any]) -> c.OptimStepCall:
    fields = f.convert(body, f.OptimStepBody)
    if fields.optimizer_params is not None or fields.adam_params is None:
        kind = (fields.optimizer_params or {}).get("type", "without adam_params")
        raise _other_optimizer("optimizer_params", kind)
    adam = f.convert(fields.adam_params, f.AdamFields, "adam_params")
    settings = Adam(
        lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay,
        clip_norm=max(0.0, adam.grad_clip_norm),
    )  # fmt: skip
    return c.OptimStepCall(model=fields.model_id, seq=fields.seq_id, adam=settings)


def save_weights(body: dict[str, Any]) -> c.SaveWeights:
    fields = f.convert(body, f.SaveWeightsBody)
    return c.SaveWeights(
        model=fields.model_id, seq=fields.seq_id, name=fields.path or "", ttl_s=fields.ttl_seconds,
        overwrite=fields.overwrite, metadata=fields.user_metadata or {},
    )  # fmt: skip


def save_for_sampler(body: dict[str, Any]) -> c.SaveForSampler:
    fields = f.convert(body, f.SaveForSamplerBody)
    if fields.kind not in ("snapshot", "inflight"):
        raise Refusal(400, f"kind: {fields.kind[:MAX_ECHO]!r} is not known. Known: inflight, snapshot.")
    if bool(fields.path) == (fields.sampling_session_seq_id is not None):
        raise Refusal(400, "expected either path, which names the weights, or sampling_session_seq_id")
    live = fields.kind == "inflight"
    if live and fields.path is not None:
        raise Refusal(400, "kind: weights with a name do not change. Leave path out, or kind.")
    return c.SaveForSampler(
        model=fields.model_id, seq=fields.seq_id, name=fields.path or "", sampler_seq=fields.sampling_session_seq_id,
        live=live, ttl_s=fields.ttl_seconds, metadata=fields.user_metadata or {},
    )  # fmt: skip


def save_external(body: dict[str, Any]) -> c.Call:
    fix = "Save with save_state or save_weights_for_sampler: both are PEFT folders on the server's disk."
    raise Refusal(400, f"save_weights_external is not supported. {fix}")


def sample(body: dict[str, Any]) -> c.SampleCall:
    fields = f.convert(body, f.SampleBody)
    params = fields.sampling_params
    stop = params.stop
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    top_k = 0 if params.top_k == -1 else params.top_k
    return c.SampleCall(
        sampler=fields.sampling_session_id, seq=fields.seq_id, prompt=fields.prompt.ids(), n=fields.num_samples,
        max_tokens=params.max_tokens, seed=None if params.seed is None else params.seed % SEEDS,
        sampling=Sampling(temperature=params.temperature, top_p=params.top_p, top_k=top_k),
        stop_ids=tuple(s for s in stops if isinstance(s, int)),
        stop_texts=tuple(s for s in stops if isinstance(s, str)), eos=stop is None or bool(stops),
        prompt_logprobs=bool(fields.prompt_logprobs), prompt_last=fields.prompt_logprobs_last_n or 0,
        prompt_top_k=fields.topk_prompt_logprobs,
    )  # fmt: skip


def _check_optimizer(config: dict[str, Any] | None) -> None:
    if config is not None and (kind := config.get("type")) != "adamw":
        raise _other_optimizer("optimizer_config", kind)


def _other_optimizer(field: str, kind: object) -> Refusal:
    what = f"{field}: the optimizer {str(kind)[:MAX_ECHO]!r} is not supported: this server has AdamW"
    return Refusal(400, f"{what} (AdamParams).")
