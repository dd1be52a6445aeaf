"""Which workers may get work, are suspect or gone: worked cases, and random lives compared with an independent
model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.controller.workers.members import HeldPolicy, Member, Members, Patience, WorkerState
from windfall.controller.workers.versions import PolicyVersions, VersionWindow
from windfall.link.messages import Stats
from windfall.types import Lease

ONE = PolicyVersions(window=VersionWindow().advance(1, "d", staleness=0))
PATIENCE = Patience(suspect_s=3.0, gone_s=8.0, stalled_s=60.0, tick_s=0.25)
TICK_S = PATIENCE.tick_s


def stats(idle_s: float = 0.0) -> Stats:
    return Stats(running=1, made=1, steps=1, idle_s=idle_s)


def ready(members: Members, name: str, now_s: float = 0.0, version: int = 1, digest: str = "d") -> Member:
    member = members.join(name, Lease(), now_s)
    members.pull(member.id, now_s)
    members.loaded(member.id, version, digest, 4, now_s)
    return member


def ticks(members: Members, start_s: float, end_s: float) -> list[tuple[str, str]]:
    """Calls `tick` like the controller: periodically, with `move` for every worker that is gone."""
    out, now = [], start_s
    while now <= end_s:
        for change in members.tick(now):
            out.append((change.id, change.what))
            if change.what == "gone":
                members.move(change.id, WorkerState.GONE, change.why)
        members.check()
        now += TICK_S
    return out


def test_any_message_ends_suspicion() -> None:
    members = Members(PATIENCE)
    ready(members, "a")
    assert ticks(members, 0.0, 2.75) == []
    assert ticks(members, 3.0, 5.0) == [("a", "suspect")]  # reported once
    assert members.routable(ONE) == []
    assert members.seen("a", 5.0)
    assert not members.seen("a", 5.1)
    assert [m.id for m in members.routable(ONE)] == ["a"]
    assert ticks(members, 5.25, 7.75) == []


def test_share_of_time_in_which_others_want_a_device_follows_the_heartbeats() -> None:
    """Half of what it was counts, and half of the newest heartbeat, at most all of its time."""
    members = Members(PATIENCE)
    member = ready(members, "a")
    shares = []
    for now_s, contended_s in ((1.0, 5.0), (2.0, 6.0), (3.0, 9.0), (4.0, 9.5), (5.0, 9.5), (6.0, 0.0)):
        members.seen("a", now_s, Stats(running=1, made=1, steps=1, idle_s=0.0, contended_s=contended_s))
        shares.append(member.contended)
    assert shares == [0.0, 0.5, 0.75, 0.625, 0.3125, 0.15625]


def test_silent_worker_becomes_suspect_then_gone() -> None:
    members = Members(PATIENCE)
    ready(members, "a")
    ready(members, "b")
    seen = []
    for n in range(80):
        now = n * TICK_S
        members.seen("b", now)
        seen += [(now, *change) for change in ticks(members, now, now)]
    assert seen == [(3.0, "a", "suspect"), (8.0, "a", "gone")]
    assert [m.id for m in members.here()] == ["b"]
    assert not members.all["a"].suspect
    assert "silent for 8.0 s" in members.all["a"].why


def test_stalled_engine_is_gone_although_it_sends_messages() -> None:
    members = Members(PATIENCE)
    ready(members, "a")
    members.tick(0.0)
    members.seen("a", 0.1, stats(idle_s=59.9))
    assert members.tick(0.2) == []
    members.seen("a", 0.3, stats(idle_s=60.0))
    (change,) = members.tick(0.4)
    assert (change.id, change.what, change.why) == ("a", "gone", "no engine step for 60 s")


@pytest.mark.parametrize("stall_s", [0.6, 5.0, 30.0, 3600.0])
def test_stall_of_the_controller_does_not_count_as_silence(stall_s: float) -> None:
    members = Members(PATIENCE)
    ready(members, "a")
    ready(members, "silent")
    for n in range(20):
        members.seen("a", n * TICK_S)
        ticks(members, n * TICK_S, n * TICK_S)
    assert members.all["silent"].suspect
    late_s = 19 * TICK_S + stall_s
    assert ticks(members, late_s, late_s) == [], "no worker was heard, because the controller was stalled"
    assert not members.all["a"].suspect
    # From then on time counts as before: the silent worker had 4.75 s of silence, and is gone at most 3.25 s later.
    assert ticks(members, late_s + TICK_S, late_s + 3.25) == [("a", "suspect"), ("silent", "gone")]


def test_stopped_clock_or_late_ticks_lose_no_worker() -> None:
    members = Members(PATIENCE)
    ready(members, "a")
    for now in (0.0, 0.0, 100.0, 100.0, 200.0, 300.0):  # every tick is far too late
        assert members.tick(now) == []


def test_worker_that_comes_back_is_a_new_member() -> None:
    members = Members(PATIENCE)
    first = ready(members, "a")
    members.move("a", WorkerState.GONE, "lost")
    second, third = members.join("a", Lease(), 1.0), members.join("a", Lease(), 1.0)
    assert [m.id for m in (first, second, third)] == ["a", "a#2", "a#3"]
    assert second.state is WorkerState.JOINING
    assert members.routable(ONE) == []
    assert members.join("b", Lease(), 1.0).id == "b"


def test_gone_is_final() -> None:
    members = Members(PATIENCE)
    ready(members, "a")
    members.move("a", WorkerState.GONE)
    for state in WorkerState:
        with pytest.raises(AssertionError, match="cannot become"):
            members.move("a", state)
    members.loaded("a", 2, "e", 4, 1.0)  # a message that was in flight
    assert members.all["a"].state is WorkerState.GONE


def test_number_of_remembered_gone_workers_is_bounded() -> None:
    members = Members(PATIENCE, remember=3)
    ready(members, "stays")
    for n in range(10):
        ready(members, f"w{n}")
        members.move(f"w{n}", WorkerState.GONE)
    assert list(members.all) == ["stays", "w7", "w8", "w9"]
    assert ready(members, "w0").id == "w0#2", "ids are not reused, even for forgotten workers"


def test_pulling_worker_counts_as_nearly_ready_for_a_limited_time() -> None:
    members = Members(PATIENCE)
    members.join("a", Lease(), 0.0)
    coming = lambda now_s: [m.id for m in members.nearly_ready(now_s)]  # noqa: E731
    assert coming(0.0) == [], "it is not pulling"
    members.pull("a", 0.0)
    assert coming(0.4) == [], "a worker that has never been ready may boot for long"
    members.loaded("a", 1, "d", 4, 30.0)
    assert members.pull_s == 0, "the first load includes building the engine"
    members.pull("a", 5.0)
    assert coming(5.4) == ["a"]
    assert coming(5.6) == [], "no pull has taken as long"
    members.loaded("a", 2, "e", 4, 3.0)
    members.pull("a", 10.0)
    assert coming(15.9) == ["a"]
    assert coming(16.1) == []
    members.all["a"].suspect = True
    assert coming(10.1) == []
    members.join("local", Lease(), 0.0)
    for n in (1, 2):
        members.pull("local", 20.0)
        members.loaded("local", n, "f", 4, 0.0)
    assert members.pull_s == 3.0, "local gets its weights from the trainer"


def test_token_rate_covers_at_least_one_second() -> None:
    members = Members(PATIENCE)
    member = ready(members, "a")
    member.generated = 50
    members.seen("a", 0.5, stats())
    assert member.tok_per_s == 0.0
    members.seen("a", 2.0, stats())
    assert member.tok_per_s == 25.0


STEPS = ["join", "seen", "busy", "pull", "pull", "load", "load", "pause", "resume", "drain", "leave", "offer",
         "stalled", "stall", *["tick"] * 12]  # fmt: skip


class Account:
    """An independent model of the workers."""

    def __init__(self) -> None:
        self.state: dict[str, WorkerState] = {}
        self.heard_s: dict[str, float] = {}
        self.idle_s: dict[str, float] = {}
        self.holds: dict[str, tuple[int, str]] = {}
        self.listening_s = 0.0
        """The controller's time without its own stalls; silence is measured in it."""
        self.routed = 0

    def silent_s(self, id: str) -> float:
        return self.listening_s - self.heard_s[id]


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_random_lives(data: st.DataObject) -> None:
    _live(lambda options: data.draw(st.sampled_from(options)), steps=40)


@pytest.mark.parametrize("seed", range(5))
def test_long_random_lives(seed: int) -> None:
    account = _live(random.Random(seed).choice, steps=1000)
    assert min(account.routed, sum(s is WorkerState.GONE for s in account.state.values())) >= 10


def _live(choose: Callable[[Sequence[Any]], Any], *, steps: int) -> Account:
    """Checks after every step: only workers that may get work are routable, no worker that sent messages is lost, and
    states change only as allowed."""
    members, account, now, version = Members(PATIENCE), Account(), 0.0, 1
    members.tick(now)
    for _ in range(steps):
        step, here = choose(STEPS), [m.id for m in members.here()]
        if step == "join":
            member = members.join(choose("ab"), Lease(), now, held={"": (5, "v5")})
            assert member.id not in account.state, "an id is used once"
            account.heard_s[member.id], account.holds[member.id] = account.listening_s, (5, "v5")
        elif step == "offer":
            version += 1
        elif step in ("tick", "stall"):
            took_s = TICK_S if step == "tick" else choose([1.0, 10.0, 1000.0])
            now += took_s
            account.listening_s += min(took_s, 2 * TICK_S)
            _tick(members, now, account)
        elif here:
            _act(members, step, choose(here), now, version, account)
        members.check()
        _compare(members, version, account)
    return account


def _tick(members: Members, now: float, account: Account) -> None:
    suspect_before = {m.id for m in members.here() if m.suspect}
    changes = {c.id: c.what for c in members.tick(now)}
    for member in members.here():
        silent_s, idle_s = account.silent_s(member.id), account.idle_s.get(member.id, 0.0)
        if silent_s >= PATIENCE.gone_s or idle_s >= PATIENCE.stalled_s:
            assert changes.get(member.id) == "gone"
        elif silent_s >= PATIENCE.suspect_s:
            assert changes.get(member.id) == (None if member.id in suspect_before else "suspect")
            assert member.suspect
        else:
            assert member.id not in changes
            assert not member.suspect
    for id, what in changes.items():
        if what == "gone":
            members.move(id, WorkerState.GONE)


def _act(members: Members, step: str, id: str, now: float, version: int, account: Account) -> None:
    """A message of a worker, or an action of the controller, if the state of the worker allows it."""
    state = members.all[id].state
    if step in ("seen", "busy", "stalled", "load"):
        was_suspect = members.all[id].suspect
        idle_s = {"busy": 0.5, "stalled": 61.0}.get(step)
        assert members.seen(id, now, None if idle_s is None else stats(idle_s)) == was_suspect
        account.heard_s[id] = account.listening_s
        if idle_s is not None:
            account.idle_s[id] = idle_s
        if step == "load":
            members.loaded(id, version, f"v{version}", 2, now)
            account.holds[id] = (version, f"v{version}")
    elif step == "pull" and state in (WorkerState.JOINING, WorkerState.PULLING, WorkerState.READY, WorkerState.PAUSED):
        members.pull(id, now)
    elif step == "pause" and state is WorkerState.READY:
        members.move(id, WorkerState.PAUSED)
    elif step == "resume" and state is WorkerState.PAUSED:
        members.move(id, WorkerState.READY)
    elif step == "drain" and state is not WorkerState.DRAINING:
        members.move(id, WorkerState.DRAINING)
    elif step == "leave":
        members.move(id, WorkerState.GONE, "left")


NEXT: dict[Any, str] = {
    WorkerState.JOINING: "joining pulling draining gone", WorkerState.PULLING: "pulling ready draining gone",
    WorkerState.READY: "ready pulling paused draining gone", WorkerState.PAUSED: "paused ready pulling draining gone",
    WorkerState.DRAINING: "draining gone", WorkerState.GONE: "gone",
}  # fmt: skip


def _compare(members: Members, version: int, account: Account) -> None:
    routable = {
        m.id
        for m in members.routable(PolicyVersions(window=VersionWindow().advance(version, f"v{version}", staleness=0)))
    }
    account.routed += len(routable)
    assert not members.routable(PolicyVersions(window=VersionWindow().advance(version, "another digest", staleness=0)))
    for id, member in members.all.items():
        before = account.state.get(id, WorkerState.JOINING)
        assert member.state in NEXT[before].split(), f"{before} to {member.state}"
        account.state[id] = member.state
        expected = (
            member.state is WorkerState.READY and not member.suspect and account.holds[id] == (version, f"v{version}")
        )
        assert (id in routable) == expected
    assert {m.id for m in members.here()} == {i for i, s in account.state.items() if s is not WorkerState.GONE}


def test_only_allowed_state_changes_are_accepted() -> None:
    for before in WorkerState:
        for state in WorkerState:
            members = Members(PATIENCE)
            members.join("a", Lease(), 0.0).state = before
            if state in NEXT[before].split() and (state is not before or state is WorkerState.PULLING):
                members.move("a", state)
            else:
                with pytest.raises(AssertionError, match="cannot become"):
                    members.move("a", state)


def test_routable_workers_are_ready_with_exactly_these_weights() -> None:
    members = Members(PATIENCE)
    members.join("had it before joining", Lease(), 0.0, held={"": (1, "d")})
    ready(members, "right")
    ready(members, "older", version=0)
    ready(members, "same version, other digest", digest="e")
    ready(members, "suspect").suspect = True
    for state in WorkerState:
        ready(members, f"is {state}").state = state
    assert [m.id for m in members.routable(ONE)] == ["right", "is ready"]


@pytest.mark.parametrize(
    "change",
    [{"held": {"": HeldPolicy()}}, {"slots": 0}, {"id": "other"}, {"state": WorkerState.GONE, "suspect": True}],
)
def test_check_finds_broken_rules(change: dict[str, Any]) -> None:
    members = Members(PATIENCE)
    member = ready(members, "a")
    members.check()
    for name, value in change.items():
        setattr(member, name, value)
    with pytest.raises(AssertionError):
        members.check()


def test_lender_that_neither_generates_nor_returns_its_responses_is_given_up() -> None:
    """Its heartbeat goes on, and says nothing of its engine."""
    members = Members(Patience(gone_s=8.0, stalled_s=60.0))
    for name in ("lender", "own"):
        member = members.join(name, Lease(), 0.0, lends=name == "lender")
        member.last_tokens_s = 10.0

    def look(now_s: float, running: int) -> list[str]:
        members._ticked_s = now_s - 0.25
        for name in ("lender", "own"):
            members.seen(name, now_s)
        return [c.id for c in members.tick(now_s, lambda worker: running)]

    assert look(69.0, running=3) == []
    assert look(70.0, running=0) == []
    assert look(70.0, running=3) == ["lender"]
    members.seen("lender", 200.0)
    members.seen("own", 200.0)
    assert members.tick(200.0, lambda worker: 3) == [], "the controller itself stood still"
