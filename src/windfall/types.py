"""The data types of a run. They are frozen and keyword-only, compute only from their own fields, and need no heavy
imports. The life of a token in these types:

    Task ──▶ Request ──▶ (engine) ──▶ Chunk, Chunk, ... ──▶ Response ──▶ Feedback ──▶ Group ──▶ (train)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Finish = Literal["stop", "length"]
LeaseKind = Literal["reserved", "spot", "borrowed"]
Prompt = str | Sequence[Mapping[str, Any]]
"""Text, or a conversation: messages with "role" and "content", and what else the model's chat template reads."""
LOCAL = "local"
"""Name of the worker that is the trainer's own engine. A trainer with several ranks has one on each: `local`,
`local-1`, ... No other worker has such a name."""


def policy_of(role: str) -> str:
    """The policy that speaks in this role: the part before the label. "" is the policy of a run that has one.

    >>> policy_of("player:black"), policy_of("verifier"), policy_of("")
    ('player', 'verifier', '')
    """
    return role.partition(":")[0]


def is_local(worker: str) -> bool:
    """Whether a worker with this name or id is an engine of the trainer.

    >>> [is_local(worker) for worker in ("local", "local#2", "local-3#2", "local.3", "localhost-1")]
    [True, True, True, False, False]
    """
    name, _, rank = worker.partition("#")[0].partition("-")
    return name == LOCAL and (not rank or rank.isdecimal())


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The terms on which the run holds a worker."""

    kind: LeaseKind = "spot"
    device: str = "cpu"
    region: str = ""
    price_usd_per_h: float = 0.0


ZONE_USD_PER_GB = 0.02
"""Dollars per GB between two regions or zones, unless the recipe or the cluster says otherwise: what large clouds
charge between zones (0.01 in each direction) and between near regions. Between continents, or over the internet, it is
0.05 to 0.09."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What an engine can do. A worker reports it to its controller, which decides accordingly."""

    name: str = ""
    """"torch", "cuda" or "vllm". Empty: not known yet, because a worker builds its engine after it has joined."""
    version: str = ""
    """Version of the engine, if it is not a part of windfall."""
    exact: bool = True
    """The next token depends only on the seed, the position and the logits. A response that continues on another worker
    of this kind gets the same tokens as without the move. Otherwise every continuation must have a fresh seed."""
    live_slots: bool = True
    """It takes new responses while others are running. Otherwise it gets work only when it is idle."""
    tensor_parallel: int = 1
    """Number of GPUs that share every layer."""
    drafts: bool = False
    """It drafts tokens from the texts of other responses (`Engine.remember`)."""
    kv_dtype: Literal["", "fp8"] = ""
    """Dtype of its KV cache; empty: that of the model."""
    experts: bool = False
    """It returns the chosen experts of every token (`Chunk.experts`)."""
    adapters: int = 0
    """Adapters of one base that it can hold beside each other, in one batch. 0: it merges the only one."""

    @property
    def label(self) -> str:
        """For tables and logs.

        >>> Capabilities(name="vllm", version="0.23.0", tensor_parallel=4, kv_dtype="fp8").label
        'vllm 0.23.0 x4 fp8'
        """
        ranks = f"x{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return " ".join(filter(None, (self.name, self.version, ranks, self.kv_dtype)))

    @property
    def rounding(self) -> str:
        """The name under which the log-probs of such engines are compared with the trainer's.

        >>> Capabilities(name="cuda", kv_dtype="fp8").rounding
        'cuda fp8'
        """
        return f"{self.name} {self.kv_dtype}".rstrip()


def in_fp8(rounding: str) -> bool:
    """Whether engines of this name (Capabilities.rounding) have a KV cache in fp8."""
    return rounding.endswith(" fp8")


def prompt_key(prompt: Prompt) -> bytes:
    """A key that is equal for equal prompts.

    >>> prompt_key([{"role": "user", "content": "3+4="}]) == prompt_key(({"content": "3+4=", "role": "user"},))
    True
    """
    if isinstance(prompt, str):
        return prompt.encode()
    return repr([sorted(message.items()) for message in prompt]).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What an environment asks the policy.

    >>> Task(id="arithmetic/7", prompt="3+4=", answer=7).prompt
    '3+4='
    """

    id: str
    prompt: Prompt
    answer: Any = None
    """What the environment needs to grade a response. It stays in the environment's own processes."""
    role: str = ""
    """The role that begins. Empty: the first policy of the recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One exchange of an episode: the policy's text, and the environment's observation (None: the episode ended)."""

    text: str
    observation: str | None = None
    tokens: tuple[int, ...] = field(default=(), compare=False)
    """The token ids of the text, if the environment needs them."""
    role: str = ""
    """The role that spoke."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """An environment's answer to a turn: a reward, which ends the episode, or the next observation. A reward given
    together with an observation counts only if the response has no tokens left for another turn."""

    reward: float | None = None
    observation: str | None = None
    scores: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    """The parts of the reward before they are weighted, by name, if there are several."""
    role: str = ""
    """With an observation: the role that it is for, and that speaks next. Empty: the role of the last turn."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by role. A role that is not named here gets `reward`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a token is sampled. Temperature 0 is greedy; top_k 0 and top_p 1 cut nothing off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What an engine is asked to generate.

    `position` is the index, within its response, of the first token to generate. A response that was interrupted after
    5 tokens continues with `prompt + those 5, position=5`. Sampling depends only on (seed, position) and the logits, so
    the response continues exactly as it would have without the interruption.
    """

    id: str
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    position: int = 0
    sampling: Sampling = Sampling()
    stop: frozenset[int] = frozenset()
    group: str = ""
    """Responses of one group have the same prompt. An engine may draft tokens of one from the others' texts; sampled
    tokens then change only by rounding, as with another batch."""
    policy: str = ""
    """The policy that generates, if the engine holds several."""
    experts_known: int = 0
    """Number of leading tokens of `prompt` whose chosen experts need not be returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """New tokens of one response; the first is at `position`. A stop token is part of the response.

    `logprobs` are natural logs under softmax(logits / temperature), before top-p and top-k cut anything off (at
    temperature 0, under softmax(logits)). A trainer can compute the same values.
    """

    id: str
    position: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish | None = None
    experts: bytes = b""
    """In a model with experts: those of the tokens that were computed for these tokens and not returned before
    (chosen_experts.py). The last of them is the one before the chunk's last token."""
    expert_tokens: int = 0
    """Number of tokens in `experts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A finished trajectory. `tokens` holds every token after the prompt. `sampled` says which of them the policy
    sampled; the others are observations, for which `logprobs` is 0.0 and `versions` is -1.

    An agent may edit its history. Then its response has several segments: this one, and those in `more`, with ids such
    as "7/0+1". Each has its own prompt and tokens, and all have the same reward. A session with several roles has at
    least one segment for each role; `of` gives what one policy is trained on."""

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled: tuple[bool, ...]
    versions: tuple[int, ...]
    finish: Finish
    reward: float | None = None
    """None: the reward is missing (the environment failed every try). Such a response is counted, not trained on."""
    turns: int = 1
    scores: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    """The parts of the reward, by name (see Feedback). Empty if they are not known, for example after a restart."""
    engines: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    """(engine, number of tokens) of consecutive stretches of the sampled tokens. An empty name: the engine is unknown,
    because the tokens were read from a journal. Responses that differ only in this are equal."""
    workers: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    """The same for the workers that generated them."""
    more: tuple[Response, ...] = ()
    """Further segments. They have no further segments of their own."""
    agent: bool = False
    """An agent's session: only its sampled tokens count toward the limit of a response."""
    role: str = ""
    """The role that sampled the tokens of this segment."""
    rewards: tuple[tuple[str, float], ...] = ()
    """Rewards by role (see Feedback), of all segments."""
    experts: bytes = b""
    """In a model with experts: those of every token of prompt and response but the last (chosen_experts.py). Empty:
    not known."""

    @property
    def segments(self) -> tuple[Response, ...]:
        """All segments, in the order in which they were begun."""
        return (self, *self.more)

    @property
    def sampled_count(self) -> int:
        """Number of tokens that the policy sampled, in all segments."""
        return sum(segment.sampled.count(True) for segment in self.segments)

    @property
    def length(self) -> int:
        return sum(len(segment.prompt) + len(segment.tokens) for segment in self.segments)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that sampled one of its tokens. None: no token was sampled, as for an agent that ended
        without a call."""
        return min((v for segment in self.segments for v in set(segment.versions) if v >= 0), default=None)

    @property
    def newest_version(self) -> int | None:
        return max((v for segment in self.segments for v in set(segment.versions) if v >= 0), default=None)

    def of(self, policy: str) -> tuple[Response, ...]:
        """What this policy sampled: one response for each of its roles, with the segments and the reward of that role.
        A response of one role is itself."""
        roles = dict.fromkeys(segment.role for segment in self.segments)
        if not self.rewards and len(roles) == 1:
            return (self,) if policy_of(self.role) == policy else ()
        return tuple(self._of_role(role) for role in roles if policy_of(role) == policy)

    def _of_role(self, role: str) -> Response:
        first, *more = (segment for segment in self.segments if segment.role == role)
        rewards = dict(self.rewards)
        turns = self.turns - sum(s.turns for s in self.more) if first is self else first.turns  # those of all segments
        return replace(
            first,
            finish=(more or [first])[-1].finish,
            reward=rewards.get(role, self.reward),
            rewards=(),
            scores=() if role in rewards else self.scores,
            turns=turns + sum(s.turns for s in more),
            more=tuple(more),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The responses to one task, in sibling order."""

    index: int
    task: Task
    responses: tuple[Response, ...] = field(default=())

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(r.reward for r in self.responses if r.reward is not None)

    def of(self, policy: str) -> Group:
        """The group as this policy is trained on it: what it sampled, with the rewards of its roles."""
        return replace(self, responses=tuple(part for r in self.responses for part in r.of(policy)))

    def by_role(self) -> dict[str, Group]:
        """The group of one policy, split by its roles, such as both players of a game."""
        roles = dict.fromkeys(r.role for r in self.responses)
        return {role: replace(self, responses=tuple(r for r in self.responses if r.role == role)) for role in roles}
