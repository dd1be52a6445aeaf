"""What the server knows of sessions, models, samplers and saved weights, as the SDK lists it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from windfall.tinker.calls import LoraSpec, Refusal
from windfall.tinker.disk.saved_weights import PARTS
from windfall.tinker.wire.fields import SearchBody

if TYPE_CHECKING:
    from windfall.tinker.disk.records import NamedWeights, TinkerSession
    from windfall.tinker.models.model import TrainedModel

MAX_PAGE = 1000
T = TypeVar("T")


def when(epoch_s: float) -> str:
    """
    >>> when(0)
    '1970-01-01T00:00:00+00:00'
    """
    return datetime.fromtimestamp(epoch_s, UTC).isoformat()


def checkpoint(found: NamedWeights) -> dict[str, Any]:
    return {
        "checkpoint_id": found.path.removeprefix("tinker://").partition("/")[2], "checkpoint_type": found.kind,
        "time": when(found.created), "tinker_path": found.path, "size_bytes": found.bytes, "public": found.public,
        "user_metadata": found.info or None, "expires_at": None if found.expires is None else when(found.expires),
    }  # fmt: skip


def training_run(model: TrainedModel, saved: Sequence[NamedWeights]) -> dict[str, Any]:
    """`saved`: the weights of the model, newest first."""
    newest = {kind: next((p for p in saved if p.kind == kind), None) for kind in PARTS}
    last = {kind: None if found is None else checkpoint(found) for kind, found in newest.items()}
    return {
        "training_run_id": model.id, "base_model": model.shared.terms.base, "model_owner": model.account,
        "is_lora": True, "corrupted": False, "lora_rank": model.spec.rank, "last_request_time": when(model.seen),
        "last_checkpoint": last["training"], "last_sampler_checkpoint": last["sampler"],
        "user_metadata": model.metadata or None,
    }  # fmt: skip


def weights(base: str, spec: LoraSpec) -> dict[str, Any]:
    """What is needed to create a model that can load weights."""
    layers = {"train_unembed": spec.unembed, "train_mlp": spec.mlp, "train_attn": spec.attn}
    return {"base_model": base, "is_lora": True, "lora_rank": spec.rank} | layers


def storage(account: str, saved: Sequence[NamedWeights]) -> dict[str, Any]:
    """How much the saved weights of an account occupy."""
    size = sum(found.bytes for found in saved)
    return {"user_name": account, "checkpoint_count": len(saved), "size_bytes": size, "size_gigabytes": size / 1e9}


def session(found: TinkerSession, checkpoints: int) -> dict[str, Any]:
    """A session that is open, as a search finds it."""
    return {
        "session_id": found.id, "created_at": when(found.created), "owner": found.account, "project_id": "default",
        "status": {"type": "active"}, "checkpoints_count": checkpoints, **named(found),
    }  # fmt: skip


def named(found: TinkerSession) -> dict[str, Any]:
    """What the client has named a session."""
    return {"display_name": found.info.get("name") or None, "user_metadata": found.info.get("metadata") or None}


def matches(found: TinkerSession, search: SearchBody) -> bool:
    """Whether a search is for this session, which is open."""
    metadata, name = found.info.get("metadata", {}), str(found.info.get("name") or "").lower()
    words = (search.display_name or "").lower().split()
    named = (search.session_id, bool(words)) == (None, False)
    named = named or found.id == search.session_id or (bool(words) and all(word in name for word in words))
    active = search.statuses is None or any(status.get("type") == "active" for status in search.statuses)
    return named and active and all(metadata.get(key) == value for key, value in search.user_metadata.items())


def page(items: Sequence[T], query: Any, limit: int) -> tuple[Sequence[T], dict[str, int]]:
    """Some of the items, and where they are among all. `query`: that of the request. Raises Refusal.

    >>> page("abcdef", {"offset": "2", "limit": "3"}, limit=20)
    ('cde', {'offset': 2, 'limit': 3, 'total_count': 6})
    """
    offset, limit = _number(query, "offset", 0), min(MAX_PAGE, _number(query, "limit", limit))
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _number(query: Any, name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise Refusal(400, f"{name}: {text[:100]!r} is not a number from 0 on")
    return int(text)
