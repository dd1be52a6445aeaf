"""The TurnSampler interface: what the gateway needs from the rest of windfall. It never sees text or messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from windfall.types import Finish

Progress = Callable[[Sequence[int], Sequence[float]], int | None]
"""Called with the tokens of the turn that are new since the last call, which may be none, and their log-probs. If it
returns a number, the turn ends after that many tokens of the turn; later tokens are discarded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """One turn that is to be sampled."""

    session: str
    segment: int
    """Number of the segment within its session."""
    prompt: tuple[int, ...]
    """All ids before the turn."""
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTurn:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


class TurnSampler(Protocol):
    model: str
    """Name of the model in the API."""
    context: int
    """Largest number of tokens of prompt and turn together."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model."""
        ...

    async def sample(self, request: TurnRequest, progress: Progress) -> SampledTurn:
        """Sample a turn. Raises WindfallError if that is not possible. Canceling it withdraws the turn."""
        ...

    def retract(self, request: TurnRequest) -> None:
        """The session has ended, and no client has received the answer to this request, the last one of its segment."""
        ...
