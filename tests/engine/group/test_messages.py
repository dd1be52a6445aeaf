"""Messages between a group and its children: whatever pieces the bytes arrive in, and columns of tokens and back."""

from __future__ import annotations

from windfall.engine.base import Counters
from windfall.engine.group import messages as m
from windfall.engine.group.group import Child, ChildState, PlacedResponse, add_counters
from windfall.errors import WindfallError
from windfall.types import Chunk, Request, Sampling

CHUNKS = [
    Chunk(id="7", position=3, tokens=(5, 6), logprobs=(-0.5, -0.25), version=2),
    Chunk(id="9", position=0, tokens=(1,), logprobs=(-1.0,), version=2, finish="stop"),
]


def test_messages_are_cut_out_of_any_pieces() -> None:
    sent = [
        m.Stepped(chunks=CHUNKS, counters=Counters(steps=4)),
        m.Stepped(chunks=[], counters=Counters()), m.OrderDone(order=8), m.ChildError(what="x" * 1000),
    ]  # fmt: skip
    data = b"".join(map(m.encode, sent))
    for size in (1, 3, 100, len(data)):
        receiver = m.Receiver(m.FromChild)
        got = [x for at in range(0, len(data), size) for x in receiver.messages(data[at : at + size])]
        assert got == sent


def test_requests_survive_the_way() -> None:
    request = Request(
        id="12", prompt=(1, 2, 3), seed=5, max_tokens=9, position=4, sampling=Sampling(temperature=0.5, top_k=3),
        stop=frozenset({2, 7}),
    )  # fmt: skip
    assert list(m.Receiver(m.ToChild).messages(m.encode(m.Add(request=request)))) == [m.Add(request=request)]


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
    child = Child(0, ChildState.BUILT, counters=Counters(steps=3, generated=5, waiting=2), granted=2)
    child.reset()
    assert (child.earlier, child.counters) == (Counters(steps=3, generated=5), Counters())
    assert not child.busy
    assert add_counters(child.earlier, Counters(steps=1, rows=2)) == Counters(steps=4, rows=2, generated=5)
