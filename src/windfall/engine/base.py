"""The Engine interface: requests in, a stream of tokens out. It imports no torch, because the controller uses it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from windfall.errors import WindfallError
from windfall.types import Capabilities, Chunk, Request


@dataclass(kw_only=True, slots=True)
class Counters:
    steps: int = 0  # model steps since the start
    rows: int = 0  # tokens computed since the start, in prefill and decode
    generated: int = 0  # tokens generated since the start
    reused_tokens: int = 0  # tokens found in the prefix cache since the start
    prefilled: int = 0  # tokens computed before a response could continue, since the start
    lookups: int = 0  # responses and turns admitted since the start
    hits: int = 0  # those of them that found tokens in the prefix cache
    evictions: int = 0  # times that a running response lost its pages to others, since the start
    kv_restored: int = 0  # tokens whose KV came back from host memory after an eviction, since the start
    waiting: int = 0  # responses that are waiting for room now
    drafted: int = 0  # tokens drafted and verified since the start
    accepted: int = 0  # those of them that were right
    decode_s: float = 0.0  # time of the decode steps that were measured since the start, if the engine may draft
    undrafted_s: float = 0.0  # time that the same tokens would have taken without drafts, by estimate


class Engine(Protocol):
    """A generator of tokens. `tests/engine/test_contract.py` defines what every implementation must do."""

    capabilities = Capabilities()
    version = 0
    """Version of the weights. They are unset until the first swap, unless the engine was built with a model."""
    versions: Mapping[str, int] = {}
    """The same by policy, for engines that know policies: those that were swapped in and are still there."""
    limit = 0
    """Tokens of the longest sequence, prompt included, that fits. 0: unknown."""
    kv_tokens = 0
    """Tokens of all sequences together for which the KV cache has room. 0: unknown, or it changes."""
    waiting = False
    """Whether the engine waits for a trainer that shares its weights. This is not a fault."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of responses whose last token has not been returned."""

    @property
    def counters(self) -> Counters:
        return Counters()

    @abstractmethod
    def add(self, request: Request) -> None:
        """Begin a response, between two steps. Raises WindfallError if the request is invalid or does not fit, or if
        the weights of its policy were never swapped in."""

    @abstractmethod
    def cancel(self, id: str) -> None:
        """Stop a response and return no more chunks of it. An unknown id is not an error: it may just have finished."""

    def remember(self, group: str, id: str, position: int, tokens: Sequence[int]) -> None:
        """Tokens of a response of this group that was generated elsewhere; the first is at `position`. An engine may
        draft from them, and may forget them."""

    @abstractmethod
    def step(self) -> list[Chunk]:
        """Compute, and return new tokens, at most one chunk for every response. All chunks of one policy have the same
        version."""

    def collect(self) -> list[list[Chunk]]:
        """Wait for what the device still computes, and return the new tokens by launch. Nothing is launched until the
        next `step`, so another process may use the device."""
        return []

    @abstractmethod
    def swap(self, version: int, weights: Mapping[str, Any] | None = None, *, policy: str = "") -> None:
        """Use `weights` for this policy from now on (None: the engine has them already). Its running responses keep
        their tokens and are prefilled again. After a WindfallError nothing has changed; after any other error the
        weights may be mixed.

        An engine with `capabilities.adapters` holds several policies of one base: it takes the adapter of a
        `MergedWeights` as it is, and the responses of other policies are not touched. Weights without an adapter are
        those of the base. Any other engine holds one policy; the next one takes its place."""

    def sleep(self) -> None:
        """Free the memory that the next step can allocate again. Responses keep their tokens."""

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""

    def close(self) -> None:
        """End the processes of the engine, if it has any. It cannot be used any more."""


def check_request(request: Request, vocabulary: int, limit: int) -> None:
    """Raise WindfallError for a request that is invalid or that does not fit into an engine of this size."""
    where = f"request {request.id}"
    if not request.prompt or min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
        raise WindfallError(f"the prompt must be 1 or more token ids below {vocabulary}", where=where)
    if request.max_tokens < 1 or request.position < 0:
        raise WindfallError("max_tokens must be at least 1 and position at least 0", where=where)
    s = request.sampling
    if not (s.temperature >= 0 and 0 < s.top_p <= 1 and s.top_k >= 0):
        raise WindfallError(f"needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0, but got {s}", where=where)
    if len(request.prompt) + request.max_tokens > limit:
        need = f"{len(request.prompt)} prompt tokens + {request.max_tokens} new tokens"
        fix = "Raise engine.kv_tokens, or lower rollout.max_tokens."
        raise WindfallError(f"{need} do not fit into a KV cache of {limit} tokens", where=where, fix=fix)


def check_policy(request: Request, versions: Mapping[str, int]) -> None:
    """Raise WindfallError for a request of a policy whose weights the engine does not have."""
    if request.policy not in versions:
        held = ", ".join(map(repr, versions)) or "none"
        what = f"the weights of policy {request.policy!r} are not loaded; loaded are: {held}"
        raise WindfallError(what, where=f"request {request.id}")


def duplicate_id(request: Request) -> WindfallError:
    return WindfallError("this id is already being generated", where=f"request {request.id}")
