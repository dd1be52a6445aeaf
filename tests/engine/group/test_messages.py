"""Messages between a group and its children, and what the group remembers of a child that ended."""

from __future__ import annotations

import msgspec

from windfall.engine.base import Counters
from windfall.engine.group import messages as m
from windfall.engine.group.group import Child, PlacedResponse, add_counters
from windfall.errors import WindfallError
from windfall.types import Request, Sampling


def test_requests_survive_the_way() -> None:
    request = Request(
        id="12", prompt=(1, 2, 3), seed=5, max_tokens=9, position=4, sampling=Sampling(temperature=0.5, top_k=3),
        stop=frozenset({2, 7}),
    )  # fmt: skip
    message = m.StepEngine(add=[request], cancel=[3])
    data = m.encode(message)
    assert int.from_bytes(data[: m.LENGTH_BYTES], "big") == len(data) - m.LENGTH_BYTES
    assert msgspec.msgpack.decode(data[m.LENGTH_BYTES :], type=m.ToChild) == message


def test_errors_survive_the_way() -> None:
    error = m.ChildError(what="no room", where="fleet.local", fix="Lower it.", for_user=True).error()
    assert isinstance(error, WindfallError)
    assert (error.what, error.where, error.fix) == ("no room", "fleet.local", "Lower it.")
    assert isinstance(m.ChildError(what="KeyError: x").error(), m.ChildFailed)


def test_rest_of_a_response_continues_after_its_tokens() -> None:
    request = Request(id="a", prompt=(1, 2), seed=5, max_tokens=9, position=4)
    rest = PlacedResponse(request, 1, tokens=[8, 9]).rest()
    assert (rest.id, rest.prompt, rest.position, rest.max_tokens) == ("1", (1, 2, 8, 9), 6, 7)


def test_counters_of_a_dead_child_are_kept() -> None:
    child = Child(0, ready=True, counters=Counters(steps=3, generated=5, waiting=2))
    child.reset()
    assert (child.earlier, child.counters) == (Counters(steps=3, generated=5),) * 2
    assert not child.ready
    assert add_counters(child.earlier, Counters(steps=1, rows=2)) == Counters(steps=4, rows=2, generated=5)
