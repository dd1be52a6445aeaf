"""Which texts go to which workers, for any course of assignments, moves, tokens and rounds."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.ledger import LedgerEntry
from windfall.controller.scheduling import siblings as siblings_module
from windfall.controller.scheduling.siblings import LEAST_TOKENS, MESSAGE_BYTES, PAST_TEXTS, Siblings
from windfall.types import Sampling

EVERYONE = lambda worker: True  # noqa: E731


def entry(id: str, tokens: int = 0, prompt: tuple[int, ...] = (1, 2)) -> LedgerEntry:
    episode = Episode(id=id, prompt=prompt, seed=0, max_tokens=10**6, sampling=Sampling(), stop=frozenset())
    grow(out := LedgerEntry(episode), tokens)
    return out


def grow(entry: LedgerEntry, count: int) -> None:
    """Tokens that tell which response and position they are of."""
    have, salt = len(entry.episode.tokens), hash(entry.episode.id) & 0xFFF
    entry.episode.tokens.extend((salt << 20) + have + n for n in range(count))


def assign(policy: Siblings, worker: str, *entries: LedgerEntry, drafts: bool = True) -> None:
    for e in entries:
        e.worker = worker
    policy.assigned(worker, entries, drafts=drafts)


def sent(policy: Siblings, now_s: float, idle: Any = EVERYONE) -> list[tuple[str, str, int, int]]:
    """(worker, text, position, number of tokens) of a round."""
    return [(worker, m.id, m.position, len(m.tokens) // 4) for worker, m in policy.choose(now_s, idle)]


def test_siblings_on_two_workers_get_each_other_and_only_what_is_new() -> None:
    policy, a, b = Siblings(), entry("7/0", 100), entry("7/1")
    assign(policy, "a", a)
    assign(policy, "b", b)
    assert sent(policy, 1.0) == [("b", "7/0", 0, 100)]
    assert sent(policy, 2.0) == []
    grow(a, LEAST_TOKENS - 1)
    assert sent(policy, 3.0) == [], "too few for a message"
    grow(a, 1)
    grow(b, 90)
    assert sorted(sent(policy, 4.0)) == [("a", "7/1", 0, 90), ("b", "7/0", 100, LEAST_TOKENS)]
    grow(a, 1)
    a.episode.finish = "stop"
    assert sent(policy, 5.0) == [("b", "7/0", 100 + LEAST_TOKENS, 1)], "the end of a finished one is sent at once"
    policy.done_with("7")
    grow(b, 500)
    assert sent(policy, 6.0) == []


def test_nothing_is_sent_to_an_engine_that_does_not_draft_or_a_busy_link() -> None:
    policy, a, b = Siblings(), entry("7/0", 100), entry("7/1", 100)
    assign(policy, "a", a)
    assign(policy, "b", b, drafts=False)
    assert sent(policy, 1.0, lambda worker: worker != "a") == []
    assert sent(policy, 2.0) == [("a", "7/1", 0, 100)], "what the other engine generates helps this one"
    assert Siblings().choose(0.0, EVERYONE) == []


def test_finished_siblings_come_first_then_the_last_epoch() -> None:
    policy, old = Siblings(bandwidth=1000), entry("1/0", 100)
    assign(policy, "a", old)
    old.worker = ""
    policy.closed(old)
    policy.done_with("1")
    running, finished, own = entry("9/0", 100), entry("9/1", 100), entry("9/2")
    assign(policy, "a", running, finished)
    assign(policy, "b", own)
    finished.episode.finish, finished.worker = "stop", ""
    rounds = [[text for worker, text, *_ in sent(policy, float(n)) if worker == "b"] for n in range(1, 6)]
    order = [text for texts in rounds for text in texts]
    assert list(dict.fromkeys(order)) == ["9/1", "epoch/9/0", "9/0"]
    assert len(rounds[0]) < 3, "the bandwidth does not allow all at once"


def test_response_that_moved_continues_as_a_text_of_its_own() -> None:
    policy, a, b = Siblings(), entry("7/0", 120), entry("7/1")
    assign(policy, "a", a, b)
    assign(policy, "b", a)
    grow(a, 80)
    assert sent(policy, 1.0) == [("a", "7/0@120", 0, 80)], "it has generated the first 120 itself"
    assign(policy, "a", a)
    grow(a, 100)
    assert sent(policy, 2.0) == []


def test_earlier_groups_are_forgotten_when_memory_is_full() -> None:
    policy = Siblings(past_bytes=3 * (MESSAGE_BYTES + 400))
    assign(policy, "a", entry("x/0"))
    for task in range(5):
        for sibling in range(4):
            policy.closed(entry(f"{task}/{sibling}", 100, prompt=(task,)))
            assert policy.past_bytes <= 3 * (MESSAGE_BYTES + 400)
    for task in range(5):
        assign(policy, "a", entry(f"{10 + task}/0", prompt=(task,)))
    texts = sorted(text for _, text, *_ in sent(policy, 1.0))
    assert texts == ["epoch/14/0", "epoch/14/1"], "the newest prompt, and at most two of its responses"
    assert len(texts) == PAST_TEXTS


def test_texts_of_the_same_group_are_not_those_of_an_earlier_one() -> None:
    policy = Siblings()
    assign(policy, "a", entry("1/0", 100))
    policy.closed(entry("1/1", 100))
    assign(policy, "a", entry("1/2"))
    assert sent(policy, 1.0) == []


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(600, 6000), st.integers(1, 4))
def test_every_course(seed: int, bandwidth: int, workers: int) -> None:
    """Budgets are kept; no worker gets a token twice, or one that it generated; texts have no gaps and are true."""
    rng, total = random.Random(seed), 2 * bandwidth
    policy, now = Siblings(bandwidth=bandwidth, total_bandwidth=total), 0.0
    names = [f"w{n}" for n in range(workers)]
    entries = {f"{g}/{n}": entry(f"{g}/{n}", prompt=(g % 2,)) for g in range(3) for n in range(3)}
    generated: dict[tuple[str, str], set[int]] = defaultdict(set)
    received: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    spent: list[tuple[float, str, int]] = []
    for _ in range(120):
        e = entries[rng.choice(sorted(entries))]
        match rng.randrange(6):
            case 0 if e.episode.finish is None:
                assign(policy, rng.choice(names), e)
                generated[e.worker, e.episode.id] |= set(range(len(e.episode.tokens)))
            case 1 if e.worker:
                e.episode.finish, e.worker = "stop", ""
                policy.closed(e)
            case 2 if e.worker and rng.random() < 0.2:
                gone = e.worker
                policy.forget(gone)
                names[names.index(gone)] = f"{gone}#2" if "#" not in gone else f"{gone}2"
                for other in entries.values():
                    other.worker = "" if other.worker == gone else other.worker
            case 3 if rng.random() < 0.1:
                policy.done_with(e.episode.group)
                for other in [o for o in entries.values() if o.episode.group == e.episode.group]:
                    other.episode.finish, other.worker = "stop", ""
            case 4 | 5:
                now += rng.random()
                for worker, message in policy.choose(now, EVERYONE):
                    spent.append((now, worker, MESSAGE_BYTES + len(message.tokens)))
                    new = array("I", message.tokens)
                    have = received[worker, message.id]
                    assert message.position == (have[-1][1] if have else 0), "a gap, or twice the same"
                    have.append((message.position, message.position + len(new)))
                    check_true(entries, generated, worker, message, new)
        for e in entries.values():
            if e.worker:
                before = len(e.episode.tokens)
                grow(e, rng.randrange(60))
                generated[e.worker, e.episode.id] |= set(range(before, len(e.episode.tokens)))
    for who, limit in [*((name, bandwidth) for _, name, _ in spent), ("", total)]:
        rows = [(t, size) for t, worker, size in spent if who in ("", worker)]
        for i, (begin, _) in enumerate(rows):
            for j in range(i, len(rows)):
                assert sum(size for _, size in rows[i : j + 1]) <= limit * (rows[j][0] - begin + 1) + 1
    if workers == 1 and names == ["w0"]:
        assert not [m for m in received if not m[1].startswith("epoch/")], "a group on one worker needs nothing"


def check_true(entries: dict[str, LedgerEntry], generated: Any, worker: str, message: Any, new: array[int]) -> None:
    """The tokens are those of the response, and not tokens that this worker has generated."""
    if message.id.startswith("epoch/"):
        return
    id, _, start = message.id.partition("@")
    begin = int(start or 0) + message.position
    assert entries[id].episode.tokens[begin : begin + len(new)] == new
    assert message.group == entries[id].episode.group
    assert not generated[worker, id] & set(range(begin, begin + len(new)))


def test_round_is_short_in_a_large_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of a round are limited, and the next round goes on with the others."""
    monkeypatch.setattr(siblings_module, "ROUND_GROUPS", 2)
    policy = Siblings()
    for group in range(5):
        assign(policy, "a", entry(f"{group}/0", 100))
        assign(policy, "b", entry(f"{group}/1"))
    rounds = [{text for _, text, *_ in sent(policy, float(n))} for n in range(3)]
    assert rounds == [{"0/0", "1/0"}, {"2/0", "3/0"}, {"4/0"}]
