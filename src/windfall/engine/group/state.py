"""What an engine group knows of its children and of the responses that they generate."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields, replace

from windfall.engine.base import Counters
from windfall.engine.group import messages as m
from windfall.types import Request
from windfall.weights.shared import OpenVersion


class ChildState(enum.Enum):
    DOWN = "down"
    UP = "up"
    BUILDING = "building"
    BUILT = "built"


@dataclass(eq=False, slots=True)
class PlacedResponse:
    request: Request
    handle: int
    tokens: list[int] = field(default_factory=list)
    """Tokens that have arrived; `step` may not have returned all of them yet."""
    ended: bool = False
    """Whether the last token has arrived."""

    def rest(self) -> Request:
        """What a child must generate. It keeps nothing for a next turn, which may go to another child."""
        r, done = self.request, len(self.tokens)
        return replace(
            r,
            id=str(self.handle),
            prompt=r.prompt + tuple(self.tokens),
            position=r.position + done,
            max_tokens=r.max_tokens - done,
            session="",
            keep_s=0.0,
        )


@dataclass(eq=False, slots=True)
class Child:
    number: int
    state: ChildState = ChildState.DOWN
    built: m.Built = field(default_factory=lambda: m.Built(slots=0, limit=0, vocabulary=0))
    """The limits that it reported when it last built its engine."""
    digest: str = ""
    """Digest of the weights in its engine; empty if it has none, or parts of two versions."""
    held: OpenVersion | None = None
    """The version as which it uses these weights; None if it cannot make a step with them."""
    asleep: bool = False
    granted: int = 0
    unread: int = 0
    """Frames that `step` has not returned yet."""
    order: int = 0
    """Number of the order that it has not answered yet; 0 if none."""
    loading: OpenVersion | None = None
    responses: dict[int, PlacedResponse] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    earlier: Counters = field(default_factory=Counters)
    """Sums of the processes before this one."""
    since_s: float = 0.0
    """When it began what it does, or last made a step (monotonic clock, seconds)."""
    failures: int = 0
    """Ends in a row without a token in between."""
    error: Exception | None = None
    """What it reported before it ended."""
    killed: bool = False
    """Whether the group has killed it, and has not yet learned of its end."""

    @property
    def ready(self) -> bool:
        return self.state is ChildState.BUILT

    @property
    def busy(self) -> bool:
        return bool(self.granted or self.order) or self.state is ChildState.BUILDING

    def reset(self) -> None:
        """The process is gone."""
        self.earlier = replace(add_counters(self.earlier, self.counters), waiting=0)
        self.state = ChildState.DOWN
        self.counters = Counters()
        self.error = None
        self.digest = ""
        self.held = None
        self.asleep = False
        self.loading = None
        self.granted = 0
        self.order = 0
        self.responses = {}


def add_counters(a: Counters, b: Counters) -> Counters:
    return Counters(**{f.name: getattr(a, f.name) + getattr(b, f.name) for f in fields(Counters)})
