"""The segments of one session: which of them a call continues, and the ids of each. Pure, except for the tokenizer.

    place(messages, tools, role)   a new PlacedCall: it continues a segment or opens one, which is busy until the answer
    answer(call, ids)              the sampled ids of the call: the segment grows by one turn
    abandon(call)                  the call was not answered: the segment is as it was before, or ends there

`place` may run in a thread, one call at a time: the other methods change only the segment of their call, and while that
is busy, `place` does not read it.

Rules:
- A segment's ids only grow. Ids that were sampled are kept as they were sampled.
- A call continues a segment if its messages are all those of the segment, in order, and at least one more, none of them
  from the assistant, and the tools and the role are the same. If several segments match, the longest one is continued.
- Every other call opens a new segment: edited history, other tools, another role, a segment that is busy with another
  call, or a template that does not allow a continuation (chat.py).
- Messages are compared by their meaning (`message_key`): an absent field equals null, parts of text equal their joined
  text, the arguments of tool calls are compared as JSON, and white space around an assistant's text does not count,
  because clients remove it.
- The messages of a session take a limited amount of memory, whatever fields they have. Beyond KEPT_CHARS, the segments
  that were continued least recently forget theirs: they are trained, but not continued.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windfall.models.chat import Chat, Message, normalize
from windfall.types import policy_of

KEPT_CHARS = 32 << 20
"""Upper limit for the characters of all messages of clients that a session keeps, as JSON."""


@dataclass(slots=True)
class Segment:
    """A sequence of ids that is trained as one sample."""

    index: int
    settings: str
    """Key of the tools and the role. A call with others does not continue this segment."""
    prompt: tuple[int, ...]
    role: str = ""
    messages: list[Message] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended_with: int | None = None
    """The stop token of the last turn; None if it was cut off."""
    busy: bool = False
    chars: int = 0
    last_call: int = 0
    """Number of the last call that continued this segment."""

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)

    def retire(self) -> None:
        """Forget the messages: the segment is not continued any more."""
        self.messages = []
        self.keys = []
        self.chars = 0
        self.busy = True


@dataclass(frozen=True, slots=True)
class PlacedCall:
    segment: Segment
    new: tuple[int, ...]
    """The ids that the call adds to the segment before its turn. Empty for the first turn: they are its prompt."""
    messages: tuple[Message, ...]
    """The messages that are new in the segment."""
    chars: int = 0

    @property
    def prompt(self) -> tuple[int, ...]:
        return (*self.segment.ids, *self.new)


class SessionHistory:
    def __init__(self, chats: Mapping[str, Chat | None]) -> None:
        """`chats`: by policy; None for one that is sent only plain text or ids."""
        self._chats = chats
        self.segments: list[Segment] = []
        self._calls = 0

    def place(self, messages: Sequence[Message], tools: Sequence[Message] | None = None, role: str = "") -> PlacedCall:
        """Choose the segment of a call. Raises WindfallError if the messages cannot be rendered."""
        chat = self._chats[policy_of(role)]
        assert chat is not None, "this policy has no chat template"
        keys, settings = [message_key(m) for m in messages], _settings(tools, role)
        known = [s for s in self.segments if not s.busy and s.settings == settings and _extends(s, keys, messages)]
        for segment in sorted(known, key=lambda s: (-len(s.keys), -s.index)):
            new = messages[len(segment.keys) :]
            ids = chat.continuation(segment.messages, new, tools, segment.ended_with)
            if ids is not None:
                segment.busy = True
                break
        else:
            ids, new = (), messages
            segment = self._open(settings, chat.prompt(messages, tools), role)
        self._calls += 1
        segment.last_call = self._calls
        call = PlacedCall(segment, ids, tuple(new), chars=len(json.dumps(new)))
        self._forget(call.chars)
        return call

    def _forget(self, needed: int) -> None:
        kept = needed + sum(segment.chars for segment in self.segments)
        for segment in sorted(self.segments, key=lambda s: s.last_call):
            if kept <= KEPT_CHARS:
                break
            if segment.chars and not segment.busy:
                kept -= segment.chars
                segment.retire()

    def place_ids(self, ids: Sequence[int], role: str = "") -> PlacedCall:
        """Choose the segment of a call that sends ids: it continues the longest segment that is a prefix of them."""
        ids = tuple(ids)
        known = [s for s in self.segments if not s.busy and not s.keys and s.role == role]
        known = [s for s in known if len(ids) > len(s.ids) and ids[: len(s.ids)] == s.ids]
        if not known:
            return PlacedCall(self._open("ids", ids, role), (), ())
        segment = max(known, key=lambda s: len(s.ids))
        segment.busy = True
        return PlacedCall(segment, ids[len(segment.ids) :], ())

    def _open(self, settings: str, prompt: tuple[int, ...], role: str) -> Segment:
        segment = Segment(len(self.segments), settings, prompt, role, busy=True)
        self.segments.append(segment)
        return segment

    def answer(self, call: PlacedCall, ids: Sequence[int], reply: Message | None) -> None:
        """Add the sampled ids. `reply`: the assistant's message that the client gets for them; None for plain text."""
        segment = call.segment
        assert segment.busy, "the call was answered already"
        segment.tokens += [*call.new, *ids]
        if reply is not None:
            segment.messages.extend([*call.messages, reply])
            segment.chars += call.chars
            segment.keys.extend(message_key(m) for m in (*call.messages, reply))
        chat = self._chats[policy_of(segment.role)]
        stop = chat.stop if chat is not None else frozenset()
        segment.ended_with = ids[-1] if ids and ids[-1] in stop else None
        segment.busy = False

    def abandon(self, call: PlacedCall, *, begun: bool = False) -> None:
        """The call has no answer. `begun`: sampling had begun, so the segment is not continued any more. Neither is a
        segment without a turn."""
        if begun or not call.segment.tokens:
            call.segment.retire()
        else:
            call.segment.busy = False


def _extends(segment: Segment, keys: Sequence[str], messages: Sequence[Message]) -> bool:
    count = len(segment.keys)
    if not 0 < count < len(keys) or list(keys[:count]) != segment.keys:
        return False
    return all(message.get("role") != "assistant" for message in messages[count:])


def _settings(tools: Sequence[Message] | None, role: str) -> str:
    return hashlib.blake2b(json.dumps([role, *(tools or ())], sort_keys=True).encode()).hexdigest()


def message_key(message: Message) -> str:
    """A key that is equal for messages that mean the same.

    >>> a = message_key({"role": "assistant", "content": "12 ", "tool_calls": None})
    >>> a == message_key({"role": "assistant", "content": [{"type": "text", "text": "12"}], "refusal": None})
    True
    """
    normal = normalize(message)
    content: Any = normal.get("content") or ""
    if normal["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    calls = [
        [call.get("id"), (function := call.get("function") or {}).get("name"), function.get("arguments")]
        for call in normal.get("tool_calls", ())
    ]
    return json.dumps([normal["role"], content, calls, normal.get("tool_call_id"), normal.get("name")], sort_keys=True)
