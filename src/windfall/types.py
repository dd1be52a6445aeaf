"""The nouns. Frozen, keyword-only, no behaviour beyond what follows from their own fields, no heavy imports.

The life of a token in these words:

    Task ──▶ Request ──▶ (engine) ──▶ Chunk, Chunk, ... ──▶ Response ──▶ Feedback ──▶ Group ──▶ (train)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Finish = Literal["stop", "length"]
Terms = Literal["reserved", "spot", "borrowed"]
Prompt = str | Sequence[Mapping[str, str]]
"""Text, or a conversation: messages with "role" and "content", for the model's chat template."""
LOCAL = "local"
"""The worker that is the trainer's own engine, and nobody else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """On what terms we hold a worker."""

    kind: Terms = "spot"
    device: str = "cpu"
    region: str = ""
    price_usd_per_h: float = 0.0


def prompt_key(prompt: Prompt) -> bytes:
    """The same for prompts that ask the same.

    >>> prompt_key([{"role": "user", "content": "3+4="}]) == prompt_key(({"content": "3+4=", "role": "user"},))
    True
    """
    if isinstance(prompt, str):
        return prompt.encode()
    return repr([sorted(message.items()) for message in prompt]).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What an environment asks.

    >>> Task(id="arithmetic/7", prompt="3+4=", answer=7).prompt
    '3+4='
    """

    id: str
    prompt: Prompt
    answer: Any = None
    """Whatever the environment needs to judge a response. It stays in the environment's own processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One exchange of an episode: what the policy said, and what the environment said back (None: it ended there)."""

    text: str
    observation: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """An environment's answer to a turn: the end with a reward, or the next observation. A reward beside an observation
    counts only if the response has no tokens left for another turn."""

    reward: float | None = None
    observation: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a token is drawn. Temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What an engine is asked to generate.

    `position` is the index, within its response, of the first token to make. A response that was cut after 5 tokens
    goes on as `prompt + those 5, position=5`: sampling depends on (seed, position) and the logits alone, so it
    continues exactly as it would have.
    """

    id: str
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    position: int = 0
    sampling: Sampling = Sampling()
    stop: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """New tokens of one response, the first of them at `position`. A stop token is part of the response.

    `logprobs` are natural logs under softmax(logits / temperature), before top-p and top-k cut anything off (at
    temperature 0, under softmax(logits)): the number a trainer can compute again.
    """

    id: str
    position: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A finished trajectory. `tokens` holds every token after the prompt; `sampled` says which of them the policy made
    (the others are observations); `logprobs` and `versions` are 0.0 and -1 where it did not."""

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled: tuple[bool, ...]
    versions: tuple[int, ...]
    finish: Finish
    reward: float | None = None
    """None: the reward is missing (its environment failed every try). Such a response is counted, not trained on."""
    turns: int = 1

    @property
    def made(self) -> int:
        """How many tokens the policy made."""
        return self.sampled.count(True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The responses to one task, in sibling order."""

    index: int
    task: Task
    responses: tuple[Response, ...] = field(default=())

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(r.reward for r in self.responses if r.reward is not None)
