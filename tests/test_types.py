"""Responses of several roles: what each policy is trained on."""

from __future__ import annotations

from typing import Any

from windfall.types import Group, Response, Task


def segment(id: str, role: str = "", **fields: Any) -> Response:
    made: dict[str, Any] = {"prompt": (1,), "tokens": (2,), "logprobs": (0.0,), "sampled": (True,), "versions": (0,)}
    made |= {"finish": "stop", **fields}
    return Response(id=id, role=role, **made)


def debate(**fields: Any) -> Response:
    """A solver speaks twice, in two segments, and a verifier once between them."""
    checked = segment("7/0+1", "verifier", turns=1)
    again = segment("7/0+2", "solver", turns=2, finish="length")
    return segment("7/0", "solver", more=(checked, again), turns=6, **fields)


def test_policy_gets_its_segments_with_the_reward_of_its_role() -> None:
    group = Group(index=7, task=Task(id="t", prompt=""), responses=(debate(rewards=(("solver", 1.0),), reward=0.5),))
    (solver,), (verifier,) = group.of("solver").responses, group.of("verifier").responses
    assert ([s.id for s in solver.segments], solver.reward, solver.turns) == (["7/0", "7/0+2"], 1.0, 5)
    assert ([s.id for s in verifier.segments], verifier.reward, verifier.turns) == (["7/0+1"], 0.5, 1)
    assert (solver.finish, verifier.finish) == ("length", "stop")
    assert group.of("proposer").responses == ()
    assert group.of("solver").of("solver") == group.of("solver")


def test_role_without_a_reward_has_none() -> None:
    (verifier,) = debate(rewards=(("solver", 1.0),)).of("verifier")
    assert verifier.reward is None


def test_labels_are_responses_of_one_policy() -> None:
    game = segment("7/0", "player:white", more=(segment("7/0+1", "player:black"),))
    white, black = game.of("player")
    assert (white.id, white.more, black.id) == ("7/0", (), "7/0+1")


def test_response_of_one_role_is_itself() -> None:
    plain, agent = segment("7/0", reward=1.0), segment("7/1", more=(segment("7/1+1"),), reward=0.0)
    group = Group(index=7, task=Task(id="t", prompt=""), responses=(plain, agent))
    assert all(a is b for a, b in zip(group.of("").responses, group.responses, strict=True))
    assert group.of("solver").responses == ()
