"""A turn ends with the token that completes a stop string, whenever that is noticed, and also after a restart."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.engines.scripted_engine import Asks, Scripted, run
from windfall.controller.ledger.journal_format import TokenRun, TurnGraded
from windfall.controller.rollout.stop_strings import StopStrings
from windfall.types import Feedback, Task, Turn


async def right(task: Task, turns: Sequence[Turn]) -> Feedback:
    return Feedback(reward=1.0)


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def test_the_response_ends_after_the_stop_string(tmp_path: Path) -> None:
    engine = Scripted(lambda request: "so <a>7</a> and on" + "." * 3000 if request.id == "0/0" else "short")
    env = Asks(right)
    groups, rollout = run(engine, env, tmp_path, tasks=[0], size=2, max_tokens=5000, stop=["</a>", "##"])
    stopped, other = groups[0].responses
    assert decode(stopped.tokens) == "so <a>7</a>"
    assert len(stopped.tokens) == len(stopped.logprobs) == len(stopped.sampled) == len(stopped.versions)
    assert stopped.finish == "stop"
    assert decode(other.tokens[:-1]) == "short"
    assert ("n/0", (Turn(text="so <a>7</a>"),)) in env.heard
    assert rollout.dispatch.ledger.counts.discarded > 0


def test_a_turn_that_ended_by_itself_is_cut_too(tmp_path: Path) -> None:
    groups, _ = run(Scripted(lambda request: "ab##c"), Asks(right), tmp_path, tasks=[0], stop=["#"])
    assert decode(groups[0].responses[0].tokens) == "ab#"


@given(st.text(alphabet="ab", max_size=30), st.lists(st.integers(1, 7), max_size=12))
def test_the_end_does_not_depend_on_when_tokens_arrive(text: str, steps: list[int]) -> None:
    tokens = [ord(c) for c in text]
    whole = StopStrings(["aab", "bb"], decode).end("x", tokens, 0, whole=True)
    found = [text.find(stop) + len(stop) for stop in ("aab", "bb") if stop in text]
    assert whole == (min(found) if found else None)
    stops, length, end = StopStrings(["aab", "bb"], decode), 0, None
    for step in [*steps, len(tokens)]:
        length = min(length + step, len(tokens))
        end = stops.end("x", tokens[:length], 0)
        if end is not None:
            break
    assert end == whole


def test_a_restored_response_is_cut_at_the_same_place(tmp_path: Path) -> None:
    """The journal has the tokens that were accepted before the cut, and the grade of what was left."""
    import asyncio

    from tests.support.engines.scripted_engine import rolling
    from windfall.types import Sampling

    def tokens(text: str, position: int) -> TokenRun:
        ids = array("I", [ord(c) for c in text])
        return TokenRun(position=position, tokens=ids, logprobs=array("f", [0.0] * len(ids)), version=0)

    async def main() -> None:
        engine = Scripted(lambda request: "never" * 50)
        async with rolling(engine, Asks(right), tmp_path, max_tokens=300, stop=["##"]) as rollout:
            graded = TurnGraded(id="0/0", reward=0.5, observation=None, error="")
            rollout.history = {
                "0/0": [tokens("ab##", 0), tokens("cd", 4), graded],
                "0/1": [tokens("abc#", 0), tokens("#x", 4)],  # the controller died before it was graded
            }
            (group,) = [g async for g in rollout.groups([0], size=2, sampling=lambda policy: Sampling())]
            assert [decode(r.tokens) for r in group.responses] == ["ab##", "abc##"]
            assert group.rewards == (0.5, 1.0)
            assert not engine.requests

    asyncio.run(main())
