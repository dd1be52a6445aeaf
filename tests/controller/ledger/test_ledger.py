"""Whatever happens to frames and workers, every response ends with its correct tokens, each position once.

A worker here generates the one token that is correct for (response, position). What it sends may be lost, duplicated,
delayed, reordered, of another version, overlapping, or malformed. After every action the ledger's counts are compared
with the test's own account of what must have happened to every token.

Not covered: a worker that sends wrong tokens in valid frames; they cannot be told from correct ones.
"""

from __future__ import annotations

import copy
import math
import random
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windfall.controller.ledger import ledger as ledgers
from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.ledger import Ledger, LedgerCounts, Malformed
from windfall.link.messages import Tokens
from windfall.types import Sampling

STOP, VOCABULARY, MAX_TOKENS = 0, 1000, 24
WORKERS = ["a", "b", "c"]
ACTIONS = ["open", "assign", "assign", "send", "send", "send", "send", "deliver", "deliver", "grade", "grade",
           "lose", "requeue", "withdraw", "spoil", "lie"]  # fmt: skip


def _hash(*values: object) -> int:
    return xxhash.xxh32_intdigest(repr(values).encode())


def token(id: str, position: int) -> int:
    """The one correct token. Some are STOP, so that there are turns."""
    return STOP if _hash(id, position, "stop") % 7 == 0 else 1 + _hash(id, position) % (VOCABULARY - 1)


def logprob(id: str, position: int) -> float:
    return -(_hash(id, position, "p") % 64) / 8


def experts(id: str, first: int, last: int) -> bytes:
    """The correct experts of these tokens: two bytes for each."""
    return b"".join((_hash(id, p, "experts") % 1000).to_bytes(2, "little") for p in range(first, last))


def turns(id: str) -> int:
    return 1 + _hash(id) % 3


@dataclass
class Work:
    """One assignment, as its worker sees it."""

    id: str
    handle: int
    worker: str
    version: int
    start: int
    turn: int = 0
    """Position at which its turn began."""
    experts: int = -2
    """Position of the first token whose experts the ledger does not have."""

    def end(self) -> int:
        """Position after the last token of this turn."""
        at = self.start
        while at + 1 < MAX_TOKENS and token(self.id, at) != STOP:
            at += 1
        return at + 1

    def row(self, position: int, count: int) -> tuple[int, int, list[int], list[float], str | None, bytes]:
        where = range(position, position + count)
        finish = None
        if where[-1] + 1 == self.end():
            finish = "stop" if token(self.id, where[-1]) == STOP else "length"
        first = min(self.experts, position - 1) if position <= self.start else position - 1
        chosen = experts(self.id, first, position + count - 1)
        return (self.handle, position, [token(self.id, p) for p in where], [logprob(self.id, p) for p in where], finish,
                chosen)  # fmt: skip


def frame(version: int, rows: list[Any]) -> Tokens:
    """A frame as engine/engine_thread.py builds it."""
    counts = () if all(len(r[2]) == 1 for r in rows) else tuple(len(r[2]) for r in rows)
    return Tokens(
        version=version, handles=tuple(r[0] for r in rows), positions=tuple(r[1] for r in rows), counts=counts,
        tokens=array("I", [t for r in rows for t in r[2]]).tobytes(),
        logprobs=array("f", [x for r in rows for x in r[3]]).tobytes(),
        finished={n: r[4] for n, r in enumerate(rows) if r[4]},
        experts=b"".join(r[5] for r in rows),
        expert_counts=tuple(len(r[5]) // 2 for r in rows) if any(len(r[5]) != 2 * len(r[2]) for r in rows) else (),
    )  # fmt: skip


def episode(id: str) -> Episode:
    return Episode(id, prompt=(5, 6), seed=1, max_tokens=MAX_TOKENS, sampling=Sampling(), stop=frozenset([STOP]))


@dataclass
class Truth:
    """What the test knows of an open response."""

    versions: list[int] = field(default_factory=list)
    turns: int = 0
    lost_by: str = ""
    """The worker that last lost it in this turn."""


def _spoiled(sent: Tokens, how: int, at: int) -> Tokens:
    """The frame with one error, at the place that `at` selects."""
    row, counts = at % len(sent.handles), sent.counts or (1,) * len(sent.handles)
    where = at % sum(counts)

    def put(data: bytes, kind: str, value: float) -> bytes:
        return data[: 4 * where] + struct.pack(kind, value) + data[4 * where + 4 :]

    changes: list[dict[str, Any]] = [
        {"positions": sent.positions[1:]}, {"handles": (*sent.handles, 1)}, {"counts": (*counts, 1)},
        {"counts": (*counts[:row], 0, *counts[row + 1 :])}, {"counts": (*counts[:row], -1, *counts[row + 1 :])},
        {"tokens": sent.tokens[:-4]}, {"tokens": sent.tokens[:-1]}, {"tokens": b""}, {"logprobs": sent.logprobs[4:]},
        {"logprobs": sent.logprobs + b"\0\0\0\0"}, {"finished": {len(sent.handles): "stop"}},
        {"finished": {-1: "stop"}}, {"expert_counts": (*counts, 1)},
        {"tokens": put(sent.tokens, "I", VOCABULARY)}, {"tokens": put(sent.tokens, "I", 2**32 - 1)},
        *({"logprobs": put(sent.logprobs, "f", x)} for x in (math.nan, math.inf, -math.inf, 0.5)),
    ]  # fmt: skip
    return msgspec.structs.replace(sent, **changes[how % len(changes)])


def _everything(ledger: Ledger) -> Any:
    """The whole state of the ledger, for comparison."""
    entries = {
        id: (e.state, e.handle, e.worker, e.version, e.recorded, e.moves, asdict(e.episode))
        for id, e in ledger.entries.items()
    }
    held = {worker: list(handles) for worker, handles in ledger._by_worker.items()}
    return copy.deepcopy(
        (
            entries,
            list(ledger.queues[""]),
            asdict(ledger.counts),
            held,
            list(ledger._running),
            ledger._ended,
            ledger._next_handle,
        )
    )


class World:
    """A run, its workers and the network between them. `choose` picks an item of a list, by hypothesis or at random."""

    def __init__(self, choose: Callable[[Sequence[Any]], Any]) -> None:
        self.choose = choose
        self.ledger = Ledger(VOCABULARY)
        self.opened = 0
        self.works: list[Work] = []
        self.sent: list[tuple[str, Tokens]] = []
        """Frames on the way, newest last. Delivered frames stay in the list and may be delivered again."""
        self.truth: dict[str, Truth] = {}
        self.live: dict[int, Work] = {}
        self.ended: dict[int, str] = {}
        self.expected = LedgerCounts()
        self.offered = self.restored = self.in_gaps = 0
        """Tokens in all frames; tokens that the journal had; tokens in rows that began after a gap."""
        self.closed = self.withdrawn = 0
        self.with_experts = 0

    def step(self) -> None:
        action = self.choose(ACTIONS)
        needs = {
            "assign": self.ledger.queued, "grade": self._turns(), "withdraw": self.ledger.entries, "requeue": self.live,
            "send": self.works, "deliver": self.sent, "spoil": self.sent, "lie": self.live,
        }  # fmt: skip
        getattr(self, action if needs.get(action, True) else "open")()
        self.check()

    # Actions of the run.

    def open(self) -> None:
        """Open a response. The journal may have `past` tokens of it."""
        past = self.choose([0, 0, 0, 1, 4, 20])
        id = f"{self.opened // 4}/{self.opened % 4}"
        self.opened += 1
        new, known = episode(id), Truth()
        work = Work(id, 0, "", 0, 0)
        if past := min(past, work.end()):
            _, position, tokens, logprobs, finish, _ = work.row(0, past)
            new.take(position, tokens, logprobs, 3, finish)  # type: ignore[arg-type]
            known.versions += [3] * past
        self.ledger.open(new)
        self.truth[id] = known
        self.expected.accepted += past
        self.restored += past

    def assign(self) -> None:
        for _ in range(self.choose([1, 2, 4])):
            if self.ledger.queues[""]:
                self._assign(self.choose(WORKERS), self.choose([1, 1, 2]))

    def _assign(self, worker: str, version: int) -> Work:
        id = self.ledger.queues[""].popleft()
        entry = self.ledger.assign(id, worker, version)
        self.expected.moved += self.truth[id].lost_by not in ("", worker)
        assert entry.handle not in self.live
        assert entry.handle not in self.ended
        start = len(entry.episode.tokens)
        work = self.live[entry.handle] = Work(
            id, entry.handle, worker, version, start, entry.episode.turn_start, entry.episode.experts_end
        )
        self.works = [*self.works[-11:], work]
        return work

    def _turns(self) -> list[str]:
        return sorted(i for i, e in self.ledger.entries.items() if e.state == "turn")

    def grade(self) -> None:
        """The environment answers: another turn, or the end."""
        self._grade(self.choose(self._turns()))

    def _grade(self, id: str) -> None:
        entry, known = self.ledger.entries[id], self.truth[id]
        assert entry.episode.finish is not None
        known.turns += 1
        if entry.episode.finish == "stop" and known.turns < turns(id):
            at = len(entry.episode.tokens)
            if entry.episode.observe([token(id, at), token(id, at + 1)]):
                known.versions += [-1, -1]
                self.ledger.next_turn(id)
                known.lost_by = ""
                return
        self.ledger.close(id)
        self._check_tokens(entry.episode)
        self.closed += 1
        del self.truth[id]
        with pytest.raises(KeyError):
            self.ledger.close(id)

    def _check_tokens(self, done: Episode) -> None:
        known = self.truth[done.id]
        response = done.close(1.0)
        assert response.versions == tuple(known.versions)
        where = range(len(response.tokens))
        assert response.tokens == tuple(token(done.id, p) for p in where)
        right = tuple(logprob(done.id, p) if response.sampled[p] else 0.0 for p in where)
        assert response.logprobs == right
        assert response.sampled == tuple(v >= 0 for v in known.versions)
        assert response.experts in (b"", experts(done.id, -2, len(where) - 1))
        assert response.experts or set(known.versions) == {3}, "only what the journal had has none"
        self.with_experts += bool(response.experts)

    def withdraw(self) -> None:
        ids = [self.choose(sorted(self.ledger.entries)) for _ in range(self.choose([1, 2]))]
        cancel = self.ledger.withdraw([*ids, "never opened"])
        held = {h: w for h, w in self.live.items() if w.id in ids}
        assert {(w, h) for w, handles in cancel.items() for h in handles} == {(w.worker, h) for h, w in held.items()}
        for handle in held:
            self._end(handle, "canceled")
        for id in set(ids):
            self.expected.withdrawn += sum(v >= 0 for v in self.truth.pop(id).versions)
            self.withdrawn += 1

    # Actions of workers.

    def _end(self, handle: int, how: str) -> None:
        work = self.live.pop(handle)
        self.ended[handle] = how
        if how == "moved":
            self.truth[work.id].lost_by = work.worker

    def lose(self) -> None:
        self._lose(self.choose(WORKERS))

    def _lose(self, worker: str) -> None:
        held = [h for h, w in self.live.items() if w.worker == worker]
        begun = [self.live[h].id for h in held if self.ledger.entries[self.live[h].id].episode.tokens]
        assert {e.episode.id for e in self.ledger.held(worker)} == {self.live[h].id for h in held}
        self.ledger.release(worker)
        assert list(self.ledger.queues[""])[: len(begun)] == begun, (
            "responses that have begun are queued first, in their order"
        )
        for handle in held:
            self._end(handle, "moved")
        assert self.ledger.running(worker) == 0

    def requeue(self) -> None:
        handle = self.choose(sorted(self.live))
        self.ledger.requeue(self.ledger.entries[self.live[handle].id])
        self._end(handle, "moved")

    def send(self) -> None:
        """A worker builds a frame, whether it still holds its work or not. The frame may begin anywhere in the turn."""
        works = [self.choose(self.works) for _ in range(self.choose([1, 2, 4]))]
        first, rows = works[0], []
        for work in [w for w in works if (w.worker, w.version) == (first.worker, first.version)]:
            entry = self.ledger.entries.get(work.id)
            have = len(entry.episode.tokens) if entry and entry.handle == work.handle else work.start
            last = work.end() - 1
            wanted = self.choose([have, have, have, work.start, have + 1, have - 2, work.turn])
            position = max(work.turn, min(last, wanted))
            rows.append(work.row(position, self.choose(range(1, min(8, last + 1 - position) + 1))))
        wrong = self.choose([False] * 9 + [True])
        self.sent = [*self.sent[-19:], (first.worker, frame(first.version + wrong, rows))]
        if self.choose([True, True, False]):
            self._deliver(*self.sent[-1])

    def deliver(self) -> None:
        """Deliver a frame late or again, in any order. A frame that is never chosen is lost."""
        self._deliver(*self.choose(self.sent))

    def _deliver(self, worker: str, sent: Tokens) -> None:
        lengths = sent.counts or (1,) * len(sent.handles)
        self.offered += sum(lengths)
        ended, dropped, fresh, rows = [], [], 0, []
        for row, (handle, position, count) in enumerate(zip(sent.handles, sent.positions, lengths, strict=True)):
            new = self._expect(worker, sent.version, handle, position, count, row in sent.finished, ended, dropped)
            fresh += new
            rows += [row] if new else []
        accepted = self.ledger.accept(worker, sent)
        assert (accepted.tokens, accepted.ended_turns, accepted.dropped) == (fresh, ended, dropped)
        assert accepted.complete == (fresh == sum(lengths))
        assert accepted.complete or accepted.rows == rows

    def _expect(
        self, worker: str, version: int, handle: int, position: int, count: int, finished: bool, ended: list[str],
        dropped: list[int],
    ) -> int:  # fmt: skip
        """Account for one row. Returns how many of its tokens are new."""
        e, work = self.expected, self.live.get(handle)
        if work is None or work.worker != worker:
            how = self.ended.get(handle)
            name = {"canceled": "unwanted", "finished": "repeated"}.get(how or "", "late")
            setattr(e, name, getattr(e, name) + count)
            return 0
        known = self.truth[work.id].versions
        if version != work.version or position > len(known):
            e.stale += count if version != work.version else 0
            e.gaps += version == work.version
            self.in_gaps += count if version == work.version else 0
            dropped.append(handle)
            self._end(handle, "moved")
            return 0
        new = max(0, position + count - len(known))
        e.repeated += count - new
        e.accepted += new
        known += [version] * new
        if finished and new:
            ended.append(work.id)
            self._end(handle, "finished")
        return new

    def spoil(self) -> None:
        worker, sent = self.choose(self.sent)
        self._refuse(worker, _spoiled(sent, self.choose(range(19)), self.choose(range(32))))

    def lie(self) -> None:
        """Send a valid frame, except for one row that ends where it must not, or does not end where it must."""
        works = [self.live[h] for h in sorted(self.live)]
        bad = self.choose(works)
        have = len(self.ledger.entries[bad.id].episode.tokens)
        row = list(bad.row(have, self.choose(range(1, bad.end() - have + 1))))
        match self.choose(["finish", "negative", "after the stop", "too long"]):
            case "finish":
                row[4] = self.choose([f for f in (None, "stop", "length") if f != row[4]])
            case "negative":
                row[1:] = -1, [7, 7], [-1.0, -1.0], None, b""
            case "after the stop":
                row[2:] = [7, STOP, 7], [-1.0] * 3, None, b""
            case "too long":
                count = MAX_TOKENS + 1 - have
                row[2:] = [7] * count, [-1.0] * count, None, b""
        others = [w for w in works if (w.worker, w.version) == (bad.worker, bad.version) and w is not bad]
        good = [w.row(len(self.ledger.entries[w.id].episode.tokens), 1) for w in others]
        self._refuse(bad.worker, frame(bad.version, [*good, row]))

    def _refuse(self, worker: str, bad: Tokens) -> None:
        """A malformed frame raises and changes nothing at all."""
        before = _everything(self.ledger)
        with pytest.raises(Malformed):
            self.ledger.accept(worker, bad)
        assert _everything(self.ledger) == before

    # What always holds.

    def check(self) -> None:
        self.ledger.check()
        counts, e = self.ledger.counts, self.expected
        for name in ("accepted", "repeated", "late", "unwanted", "stale", "gaps", "moved", "withdrawn"):
            assert getattr(counts, name) == getattr(e, name), name
        seen = counts.repeated + counts.late + counts.unwanted + counts.stale + self.in_gaps
        assert self.offered == counts.accepted - self.restored + seen, "a token is unaccounted for"
        assert self.ledger.lost_tokens() == 0
        assert self.opened == len(self.ledger) + self.closed + self.withdrawn
        begun = [bool(self.ledger.entries[i].episode.tokens) for i in self.ledger.queues[""]]
        assert begun == sorted(begun, reverse=True), "responses that have begun are queued first"
        assert {w: self.ledger.running(w) for w in WORKERS} == {
            w: sum(x.worker == w for x in self.live.values()) for w in WORKERS
        }

    def finish(self) -> None:
        """Let a correct worker finish all open responses: each must have its correct tokens."""
        for worker in WORKERS:
            self._lose(worker)
        while self.ledger.entries:
            while self.ledger.queues[""]:
                work = self._assign("a", 3)
                self._deliver("a", frame(3, [work.row(work.start, work.end() - work.start)]))
            for id in self._turns():
                self._grade(id)
            self.check()
        assert self.opened == self.closed + self.withdrawn


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_response_ends_with_its_correct_tokens(data: st.DataObject) -> None:
    world = World(lambda options: data.draw(st.sampled_from(options)))
    for _ in range(data.draw(st.integers(1, 30))):
        world.step()
    world.finish()


@pytest.mark.parametrize("seed", range(3))
def test_long_random_run_ends_with_the_correct_tokens(seed: int) -> None:
    world = World(random.Random(seed).choice)
    for _ in range(1000):
        world.step()
    world.finish()
    assert world.with_experts > 0
    c = world.ledger.counts
    assert min(c.accepted, c.repeated, c.late, c.unwanted, c.stale, c.gaps, c.moved, world.closed) >= 3, c
    assert c.accepted == c.closed + c.withdrawn


def test_frame_of_a_forgotten_handle_counts_as_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of ended handles that are remembered is bounded."""
    monkeypatch.setattr(ledgers, "MAX_ENDED_HANDLES", 2)
    ledger = Ledger()
    works = []
    for n in range(4):
        ledger.open(episode(f"{n}/0"))
        entry = ledger.assign(ledger.queues[""].popleft(), "a", 1)
        works.append(Work(f"{n}/0", entry.handle, "a", 1, 0))
    ledger.withdraw([w.id for w in works])
    for work in works:
        ledger.accept("a", frame(1, [work.row(0, 1)]))
    assert (ledger.counts.late, ledger.counts.unwanted) == (2, 2)
    assert len(ledger._ended) == 2
    ledger.check()


def test_response_is_opened_once_and_assigned_once() -> None:
    ledger = Ledger()
    ledger.open(episode("1/0"))
    with pytest.raises(ValueError, match="already open"):
        ledger.open(episode("1/0"))
    ledger.assign(ledger.queues[""].popleft(), "a", 1)
    with pytest.raises(AssertionError):
        ledger.assign("1/0", "b", 1)
    with pytest.raises(AssertionError):
        ledger.close("1/0")


def test_check_finds_every_broken_rule() -> None:
    """The rules can fail: each of these changes breaks the ledger."""

    def broken(how: Callable[[Ledger], object]) -> None:
        ledger = Ledger()
        for n in (2, 3):
            ledger.open(episode(f"{n}/0"))
        entry = ledger.assign(ledger.queues[""].popleft(), "a", 1)
        ledger.accept("a", frame(1, [Work("2/0", entry.handle, "a", 1, 0).row(0, 2)]))
        ledger.check()
        how(ledger)
        with pytest.raises(AssertionError):
            ledger.check()

    broken(lambda x: x.entries["2/0"].episode.tokens.pop())
    broken(lambda x: x.entries["2/0"].episode.logprobs.append(0.0))
    broken(lambda x: x.entries.pop("2/0"))
    broken(lambda x: x.queues[""].append("3/0"))
    broken(lambda x: x.queues[""].append("2/0"))
    broken(lambda x: x.queues[""].clear())
    broken(lambda x: x._by_worker.clear())
    broken(lambda x: x._running.clear())
    broken(lambda x: x._ended.update(dict.fromkeys(x._running, "moved")))
    broken(lambda x: setattr(x.entries["2/0"].episode, "finish", "stop"))
    broken(lambda x: x.entries["2/0"].episode.version_runs.append((1, 1)))
