"""Which texts are sent to which workers, so that engines can draft from responses that other workers generate. Pure.

    Example: 7/0 runs on `a`, and 7/1 on `b`. In every round, `a` gets the new tokens of 7/1, and `b` those of 7/0. If
    an earlier group had the same prompt, in an earlier epoch or evaluation, both also get two of its responses.

Rules:
- A worker gets the texts of a group while it runs a response of that group, and only if its engine drafts.
- A worker gets no token that it has: it generated it, or it was assigned or sent it before.
- A worker gets at most BANDWIDTH bytes per second, and all workers together TOTAL_BANDWIDTH. What does not fit waits
  for a later round. A worker to which other messages wait to be sent gets nothing.
- Finished siblings come first, then responses of an earlier group, then running siblings.

A text is named by its response and by the position at which it begins: a worker that generated the first 120 tokens of
7/0 before that moved away gets the rest as the text "7/0@120".
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import xxhash

from windfall.controller.ledger.ledger import LedgerEntry
from windfall.link.messages import SiblingTokens

BANDWIDTH = 256 << 10
"""Bytes per second to one worker. Three other workers with 256 responses each, at 30 tokens per second, generate 90
KiB of tokens per second. The limit leaves room for finished texts, and is 2 % of a link of 100 Mbit/s."""
TOTAL_BANDWIDTH = 8 << 20
"""Bytes per second to all workers: less than a tenth of a link of 1 Gbit/s, which also carries the work itself."""
BURST_S = 1.0
"""What is not used is saved up for at most this long (seconds)."""
MESSAGE_BYTES = 256
"""What a message counts for beside its tokens: both ends spend time on it. A worker gets at most 1,000 per second."""
LEAST_TOKENS = 64
"""New tokens of an unfinished response are sent when there are at least this many: every message costs time."""
PAST_TEXTS = 2
"""Responses of an earlier group that are kept for each prompt: those that were closed last."""
PAST_BYTES = 64 << 20
"""Upper limit for the tokens of earlier groups in memory. The least recently used prompts are forgotten first."""
ROUND_GROUPS = 128
"""Upper limit for the groups of one round. With 8 responses on 3 workers each, a round takes 5 ms, and 20 ms if all of
them have new tokens. The next round goes on with the others."""
ALL = ""
"""Stands for all workers together. No worker has this name."""


@dataclass(slots=True)
class _Sent:
    """What a worker has of a text: it was sent the tokens from `start` to `end`, and has those before `start`."""

    start: int = 0
    end: int = 0


@dataclass(slots=True)
class _Text:
    id: str
    tokens: array[int]
    """Those of its episode, which grow."""
    entry: LedgerEntry | None = None
    """None for a response of an earlier group."""
    sent: dict[str, _Sent | None] = field(default_factory=dict)
    """By worker. None: the worker generates or generated it, and has all its tokens."""

    @property
    def rank(self) -> tuple[int, int]:
        """Texts with a lower one are sent first."""
        finished = self.entry is not None and self.entry.episode.finish is not None
        return (0 if finished else 1 if self.entry is None else 2), -len(self.tokens)


@dataclass(slots=True)
class _Group:
    texts: dict[str, _Text] = field(default_factory=dict)
    shared: bool = False
    """It has texts that one of its workers does not generate."""


class Siblings:
    def __init__(
        self, *, bandwidth: int = BANDWIDTH, total_bandwidth: int = TOTAL_BANDWIDTH, past_bytes: int = PAST_BYTES
    ) -> None:
        self._bandwidth, self._total_bandwidth = bandwidth, total_bandwidth
        self._past_limit = past_bytes
        self._drafting: set[str] = set()
        """Workers whose engines draft."""
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        """Open groups; the next round begins with the first."""
        self._roles: dict[str, list[str]] = {}
        """By task: its groups of roles that have a name."""
        self._credit: dict[str, float] = {}
        """Bytes that may be sent now, by worker."""
        self._refilled_s = 0.0
        self._past: OrderedDict[int, tuple[str, list[array[int]]]] = OrderedDict()
        """By prompt: the last group that had it, and responses of that group. The least recently used come first."""
        self.past_bytes = 0

    def assigned(self, worker: str, entries: Iterable[LedgerEntry], *, drafts: bool) -> None:
        """The worker gets these responses with all their tokens. `drafts`: whether its engine does."""
        if drafts:
            self._drafting.add(worker)
        if not self._drafting:
            return
        for entry in entries:
            episode = entry.episode
            if not episode.group:
                continue
            group = self._groups.get(episode.group) or self._open(entry)
            text = group.texts.setdefault(episode.id, _Text(episode.id, episode.tokens, entry))
            position = len(text.tokens)
            text.sent = {w: _Sent(position, position) if s is None else s for w, s in text.sent.items()}
            text.sent[worker] = None
            group.shared |= len(text.sent) > 1 or any(worker not in t.sent for t in group.texts.values())

    def closed(self, entry: LedgerEntry) -> None:
        """The response is finished, and part of its group: keep its text for the next group with this prompt."""
        episode = entry.episode
        if not self._drafting or not episode.group:
            return
        key = _key(entry)
        group, texts = self._past.pop(key, ("", []))
        self.past_bytes -= _bytes(texts)
        kept = [*texts, episode.tokens][-PAST_TEXTS:] if group == episode.group else [episode.tokens]
        self._past[key] = episode.group, kept
        self.past_bytes += _bytes(kept)
        while self.past_bytes > self._past_limit:
            self.past_bytes -= _bytes(self._past.popitem(last=False)[1][1])

    def done_with(self, group: str) -> None:
        """The group is complete, or was given up. So are those of its roles ("7@verifier" of "7")."""
        self._groups.pop(group, None)
        for name in self._roles.pop(group, ()):
            self._groups.pop(name, None)

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self._drafting.discard(worker)
        self._credit.pop(worker, None)

    def choose(self, now_s: float, idle: Callable[[str], bool]) -> list[tuple[str, SiblingTokens]]:
        """(worker, message) for everything that should be sent now. `idle`: whether no message to a worker waits."""
        if not self._drafting:
            return []
        self._refill(now_s)
        out: list[tuple[str, SiblingTokens]] = []
        for _ in range(min(ROUND_GROUPS, len(self._groups))):
            if self._credit[ALL] <= MESSAGE_BYTES:
                break
            name, group = next(iter(self._groups.items()))
            self._groups.move_to_end(name)
            if group.shared:
                self._choose_texts(name, group, idle, out)
        return out

    def _choose_texts(
        self, name: str, group: _Group, idle: Callable[[str], bool], out: list[tuple[str, SiblingTokens]]
    ) -> None:
        texts = sorted(group.texts.values(), key=lambda text: text.rank)
        for worker in dict.fromkeys(text.entry.worker for text in texts if text.entry is not None):
            if worker not in self._drafting or not idle(worker):
                continue
            for text in texts:
                sent = text.sent.setdefault(worker, _Sent())
                if sent is not None and (message := self._next(name, text, sent, worker)) is not None:
                    out.append((worker, message))

    def _next(self, group: str, text: _Text, sent: _Sent, worker: str) -> SiblingTokens | None:
        """The next tokens of a text for a worker, if there are enough and its bandwidth allows them."""
        have = len(text.tokens)
        sent.start, sent.end = min(sent.start, have), min(sent.end, have)  # the response may have been cut
        new = have - sent.end
        unfinished = text.entry is not None and text.entry.episode.finish is None
        if not new or (unfinished and new < LEAST_TOKENS):
            return None
        allowed = int(min(self._credit.setdefault(w, self._limit(w)) for w in (ALL, worker)) - MESSAGE_BYTES) // 4
        if allowed < min(new, LEAST_TOKENS):
            return None
        begin, sent.end = sent.end, sent.end + min(new, allowed)
        for w in (ALL, worker):
            self._credit[w] -= MESSAGE_BYTES + 4 * (sent.end - begin)
        return SiblingTokens(
            group=group,
            id=f"{text.id}@{sent.start}" if sent.start else text.id,
            position=begin - sent.start,
            tokens=text.tokens[begin : sent.end].tobytes(),
        )

    def _open(self, entry: LedgerEntry) -> _Group:
        name, key = entry.episode.group, _key(entry)
        group = self._groups[name] = _Group()
        if (task := entry.episode.id.rpartition("/")[0]) != name:
            self._roles.setdefault(task, []).append(name)
        before, texts = self._past.get(key, ("", []))
        if texts and before != name:
            self._past.move_to_end(key)
            ids = [f"epoch/{name}/{n}" for n in range(len(texts))]
            group.texts = {id: _Text(id, tokens) for id, tokens in zip(ids, texts, strict=True)}
        return group

    def _limit(self, worker: str) -> float:
        return BURST_S * (self._total_bandwidth if worker == ALL else self._bandwidth)

    def _refill(self, now_s: float) -> None:
        seconds, self._refilled_s = max(0.0, now_s - self._refilled_s), now_s
        self._credit.setdefault(ALL, self._limit(ALL))
        for worker, credit in self._credit.items():
            limit = self._limit(worker)
            self._credit[worker] = min(limit, credit + seconds / BURST_S * limit)


def _key(entry: LedgerEntry) -> int:
    """Equal for responses with the same prompt."""
    return xxhash.xxh3_64_intdigest(array("I", entry.episode.prompt).tobytes())


def _bytes(texts: Collection[array[int]]) -> int:
    return sum(MESSAGE_BYTES + 4 * len(tokens) for tokens in texts)
