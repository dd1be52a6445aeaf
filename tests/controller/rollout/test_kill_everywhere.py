"""Workers are lost in every state and between any two callbacks of the event loop: the same groups come out.

`crew` says what is real here and what is not. By default the moments are sampled; `-m slow` runs every one of them.
Not covered: threads and real sockets (tests/worker), real processes (the soak test), several faults at once, a lost
trainer or controller (tests/chaos/test_chaos.py). Only here: several turns, and every state of a worker by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.fleets.virtual_fleet import SIZE, TASKS, Crew, Hand, Once, at, later, relieve, roll, state_of
from windfall.controller.scheduling import placement
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer
from windfall.types import Response

ENGINE_STEP = len(TASKS) * SIZE
"""Upper limit for the tokens that one step of all engines generates."""


@cache
def undisturbed() -> tuple[dict[str, Response], int]:
    """The responses of a run without faults, and its number of callbacks."""
    with TemporaryDirectory() as folder:
        crew = roll(Path(folder))
    assert len(crew.responses) == len(TASKS) * SIZE
    assert set(crew.made.values()) == {1}
    missing = [r for r in crew.responses.values() if r.reward is None]
    turns = {r.turns for r in crew.responses.values()}
    assert missing and {1, 3} <= turns, "the run should have all kinds of responses"  # noqa: PT018
    return crew.responses, crew.callbacks


def assert_same(crew: Crew, *, again: int) -> None:
    """The responses are those of a run without faults; at most `again` tokens were generated twice."""
    expected, _ = undisturbed()
    assert crew.responses == expected
    ledger = crew.dispatch.ledger
    assert (len(ledger), ledger.lost_tokens(), list(ledger.queues[""])) == (0, 0, [])
    tokens = sum(r.sampled_count for r in expected.values())
    assert ledger.counts.accepted == ledger.counts.closed == tokens == len(crew.made)
    assert sum(crew.made.values()) - tokens <= again
    assert max(crew.env.asked.values()) <= 2, "a turn is graded once, and once more if that failed"


# Faults that happen at one moment. `again`: tokens that had been generated and had not arrived.


def kill_one(crew: Crew) -> None:
    crew.hands[0].kill()


def kill_one_with_its_frames(crew: Crew) -> None:
    crew.hands[0].kill(lossy=True)


def kill_two(crew: Crew) -> None:
    crew.hands[0].kill()
    crew.hands[1].kill(lossy=True)


def kill_all(crew: Crew) -> None:
    """Another worker joins later."""
    for hand in crew.hands:
        hand.kill(lossy=True)
    later(crew, 3.0, lambda: crew.hire("d"))


def flap(crew: Crew, times: int = 8) -> None:
    """A worker is lost and rejoins at once, again and again, under the same name."""
    crew.hands[-1].kill(lossy=True)
    crew.hire("a")
    if times:
        later(crew, 0.013, lambda: flap(crew, times - 1))


def freeze(crew: Crew) -> None:
    """The worker is silent forever; only the heartbeat timeout reveals it."""
    crew.hands[0].freeze()


def freeze_for_a_while(crew: Crew) -> None:
    """The worker becomes suspect, but is not yet given up."""
    crew.hands[0].freeze()
    later(crew, 4.0, crew.hands[0].thaw)


def freeze_all_too_long(crew: Crew) -> None:
    """The workers are given up, others join, and then the first ones send messages again."""
    for hand in crew.hands[:3]:
        hand.freeze()
        later(crew, 11.0, hand.thaw)
    later(crew, 9.5, lambda: crew.hire("d"))


def drain(crew: Crew) -> None:
    if member := crew.hands[0].member:
        crew.dispatch.drain(member.id, "asked to")


def pause_and_resume(crew: Crew) -> None:
    member = crew.hands[0].member
    if member and member.state is WorkerState.READY:
        crew.dispatch.pause(member.id)
        later(crew, 0.1, lambda: member.state is WorkerState.PAUSED and crew.dispatch.resume(member.id))


def join_late(crew: Crew) -> None:
    """New workers are idle, so they get some of the responses that others run."""
    crew.hire("d")
    crew.hire("e")


EVENTS: dict[Callable[[Crew], None], int] = {
    kill_one: 2, kill_one_with_its_frames: 3, kill_two: 3, kill_all: 3, flap: 9 * 3, freeze: 2, freeze_for_a_while: 0,
    freeze_all_too_long: 3, drain: 0, pause_and_resume: 0, join_late: 0,
}  # fmt: skip
"""Each fault, and how many engine steps of all responses may be generated again."""


@pytest.mark.parametrize("happens", EVENTS)
def test_fault_at_sampled_moments(happens: Callable[[Crew], None], tmp_path: Path) -> None:
    _, callbacks = undisturbed()
    first = 1 + 10 * list(EVENTS).index(happens)
    moments = range(first, callbacks, 113)
    assert len(moments) >= 10
    for k in moments:
        _happens_at(k, happens, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("happens", EVENTS)
def test_fault_at_every_moment(happens: Callable[[Crew], None], tmp_path: Path) -> None:
    for k in range(1, undisturbed()[1]):
        _happens_at(k, happens, tmp_path)


def _happens_at(k: int, happens: Callable[[Crew], None], folder: Path) -> None:
    moment = at(k, happens)
    try:
        crew = roll(folder, moment, check_from=k)
        assert moment.happened
        assert_same(crew, again=EVENTS[happens] * ENGINE_STEP)
    except BaseException as e:
        e.add_note(f"{happens.__name__} at callback {k}")
        raise


@pytest.mark.parametrize("again_s", [0.0, 0.05])
def test_new_weights_at_sampled_moments(again_s: float, tmp_path: Path) -> None:
    """Responses continue with the new weights, and every token carries the version that generated it."""
    expected, callbacks = undisturbed()

    def offer(crew: Crew, version: int = 1) -> None:
        crew.dispatch.set_offer(Offer(version=version, digest=f"d{version}"))
        if again_s and version == 1:
            later(crew, again_s, lambda: offer(crew, 2))

    mixed = 0
    for k in range(3, callbacks, 113):
        crew = roll(tmp_path, at(k, offer), check_from=k)
        for id, response in crew.responses.items():
            assert (response.tokens, response.logprobs) == (expected[id].tokens, expected[id].logprobs), f"{id} at {k}"
            assert response.sampled == expected[id].sampled
            versions = [v for v in response.versions if v >= 0]
            assert versions == sorted(versions)
            mixed += len(set(versions)) > 1
        assert crew.dispatch.ledger.lost_tokens() == 0
    assert mixed > 10, "some responses should have tokens of two versions"


# A worker is lost in every state.


def _running(crew: Crew, hand: Hand) -> int:
    return crew.dispatch.ledger.running(hand.member.id) if hand.member else 0


def _in(state: WorkerState) -> Callable[[Crew], bool]:
    return lambda crew: bool(crew.hands) and state_of(crew.hands[0]) is state


def _idle(crew: Crew) -> bool:
    """The first worker has sent its last token and may get more work: others still run."""
    hand = crew.hands[0]
    return state_of(hand) is WorkerState.READY and not _running(crew, hand) and bool(crew.dispatch.ledger.entries)


def _busy(crew: Crew) -> bool:
    member = crew.hands[0].member if crew.hands else None
    return (
        member is not None
        and member.state is WorkerState.READY
        and member.generated >= 3
        and _running(crew, crew.hands[0]) > 0
    )


def _suspect(crew: Crew) -> bool:
    member = crew.hands[0].member
    return member is not None and member.suspect and _running(crew, crew.hands[0]) > 0


STATES: dict[str, tuple[Callable[[Crew], object] | None, Callable[[Crew], bool]]] = {
    # By state: what to do to a busy worker, and the condition that it is in this state.
    "joining": (None, _in(WorkerState.JOINING)),
    "pulling": (None, _in(WorkerState.PULLING)),
    "ready and idle": (None, _idle),
    "ready and running": (None, _busy),
    "suspect": (lambda crew: crew.hands[0].freeze(), _suspect),
    "paused, not yet released": (
        lambda crew: crew.dispatch.pause("a"), lambda c: _in(WorkerState.PAUSED)(c) and _running(c, c.hands[0]) > 0
    ),
    "paused": (
        lambda crew: crew.dispatch.pause("a"), lambda c: _in(WorkerState.PAUSED)(c) and not _running(c, c.hands[0])
    ),
    "draining": (
        lambda crew: crew.dispatch.drain("a", "why"),
        lambda c: _in(WorkerState.DRAINING)(c) and _running(c, c.hands[0]) > 0,
    ),
    "asked to release": (lambda crew: crew.hire("d"), lambda crew: bool(crew.dispatch._releasing)),
}  # fmt: skip


@pytest.mark.parametrize("lossy", [False, True], ids=["frames arrive", "frames lost"])
@pytest.mark.parametrize("name", STATES)
def test_worker_lost_in_every_state(name: str, lossy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "asked to release":
        monkeypatch.setattr(placement, "rebalance", relieve)
    bring_about, in_state = STATES[name]
    begin = Once(_busy, bring_about or (lambda crew: None))
    lost: list[Hand] = []

    def lose(crew: Crew) -> None:
        releasing = {e.worker for e in crew.dispatch.ledger.entries.values() if e.handle in crew.dispatch._releasing}
        lost.append(next((h for h in crew.hands if h.member and h.member.id in releasing), crew.hands[0]))
        lost[0].kill(lossy=lossy)

    end = Once(lambda crew: (bring_about is None or begin.happened) and in_state(crew), lose)

    def moment(crew: Crew) -> None:
        begin(crew)
        end(crew)

    crew = roll(tmp_path, moment)
    assert end.happened, f"no worker was ever {name}"
    assert_same(crew, again=3 * ENGINE_STEP)
    member = lost[0].member
    assert member is not None
    assert member.state is WorkerState.GONE
    assert crew.dispatch.members.lost >= (name != "draining")


def test_rebalancing_continues_after_a_release_that_never_came(tmp_path: Path) -> None:
    """A worker was asked to release a response, which moved for another reason (a gap), and the worker was lost."""

    def ask(crew: Crew) -> None:
        entry = next(e for e in crew.dispatch.ledger.held("a") if e.episode.tokens)
        crew.dispatch._request_release("a", [entry])
        crew.dispatch.ledger.requeue(entry)
        crew.hands[0].freeze()

    crew = roll(tmp_path, Once(_busy, ask))
    assert_same(crew, again=3 * ENGINE_STEP)
    assert not crew.dispatch._releasing, "no worker would ever be asked to release again"
