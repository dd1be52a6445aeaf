"""Every message survives a round trip. Any frame that is not a message is refused and closes only its own link."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import Callable
from typing import Any, Literal, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from windfall.link import messages as m
from windfall.link.base import BadFrame, LinkClosed
from windfall.training import Sample
from windfall.types import Capabilities, Lease, Sampling

KINDS: list[Any] = [k for k in vars(m).values() if isinstance(k, type) and issubclass(k, m.Message) and k != m.Message]
UNIONS = {
    "FromWorker": m.FromWorker, "ToWorker": m.ToWorker, "FromTrainer": m.FromTrainer, "ToTrainer": m.ToTrainer,
    "FromRank": m.FromRank, "ToRank": m.ToRank,
}  # fmt: skip
NUMBER = st.integers(-(2**63), 2**63 - 1)
TEXT, BYTES = st.text(max_size=20), st.binary(max_size=20)
REAL = st.floats(allow_nan=False)
LEASES = st.builds(Lease, kind=st.sampled_from(["reserved", "spot", "borrowed"]), device=TEXT, price_usd_per_h=REAL)
SAMPLING = st.builds(Sampling, temperature=REAL, top_p=REAL, top_k=NUMBER)
FINISHED = st.dictionaries(st.integers(0, 9), st.sampled_from(["stop", "length"]), max_size=3)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: NUMBER, float: REAL, str: TEXT, bytes: BYTES, Lease: LEASES, Sampling: SAMPLING,
    np.ndarray: st.lists(REAL, max_size=3).map(lambda values: np.array(values, np.float64)),
    Capabilities: st.builds(Capabilities, name=TEXT, version=TEXT, exact=st.booleans(), tensor_parallel=NUMBER),
}  # fmt: skip


def instances(kind: Any) -> st.SearchStrategy[Any]:
    """Any instance of a struct, built from the types of its fields."""
    return st.builds(kind, **{f.name: _field(f.type) for f in msgspec.structs.fields(kind)})


def _field(type_: Any) -> st.SearchStrategy[Any]:
    args = get_args(type_)
    if type_ in BY_TYPE:
        return BY_TYPE[type_]
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return instances(type_)
    if type_ is Sample:
        return st.builds(Sample, **{name: _field(kind) for name, kind in get_type_hints(Sample).items()})
    if getattr(type_, "__origin__", None) is Literal:
        return st.sampled_from(args)
    if getattr(type_, "__origin__", None) is tuple and args[-1] is not Ellipsis:
        return st.tuples(*map(_field, args))
    if getattr(type_, "__origin__", None) is tuple:
        return st.lists(_field(args[0]), max_size=3).map(tuple)
    if getattr(type_, "__origin__", None) is dict:
        return FINISHED if args[0] is int else st.dictionaries(TEXT, _field(args[1]), max_size=3)
    if type_ in (bool, type(None)):
        return st.booleans() if type_ is bool else st.none()
    return st.one_of(*map(_field, args))  # a union


MESSAGES = st.one_of(*map(instances, KINDS))


def unions(kind: Any) -> list[Any]:
    return [union for union in UNIONS.values() if kind in get_args(union)]


def test_every_message_is_in_a_union_and_has_its_own_tag() -> None:
    assert set(KINDS) == {kind for union in UNIONS.values() for kind in get_args(union)}
    assert len({k.__struct_config__.tag for k in KINDS}) == len(KINDS)


@given(message=MESSAGES)
@settings(max_examples=200, deadline=None)
def test_round_trip(message: Any) -> None:
    for union in unions(type(message)):
        back = m.decoder(union)(m.encode(message))
        assert type(back) is type(message)
        assert m.encode(back) == m.encode(message)


WRONG: dict[Any, list[Any]] = {
    int: ["text", 1.5, None, b"1", []], float: ["text", None, [1.0]], str: [1, None, ["text"], {}],
    bytes: [1, None, [0, 1], {}], bool: [1, 0, "true", None], Lease: [1, "spot", None, {"kind": "gift"}],
    Sampling: [1, None, {"temperature": "hot"}], tuple: [1, "text", None, [["x"]]], dict: [1, [], {"a": b"\0"}],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_missing_or_mistyped_field_is_refused(kind: Any, data: st.DataObject) -> None:
    plain = msgspec.msgpack.decode(m.encode(data.draw(instances(kind))))
    fields = msgspec.structs.fields(kind)
    bad: list[Any] = [plain[: 1 + n] for n in range(sum(f.required for f in fields))]
    bad += [[99, *plain[1:]], [None, *plain[1:]], dict(enumerate(plain)), plain[0], []]
    for at, field in enumerate(fields, 1):
        for wrong in WRONG.get(getattr(field.type, "__origin__", field.type), []):
            bad.append([*plain[:at], wrong, *plain[at + 1 :]])
    for wrong in bad:
        for union in unions(kind):
            with pytest.raises(msgspec.ValidationError):
                m.decoder(union)(msgspec.msgpack.encode(wrong))


@given(message=instances(m.Tokens), data=st.data())
@settings(max_examples=150, deadline=None)
@example(message=None, data=None)
def test_columns_match_or_are_refused(message: m.Tokens | None, data: Any) -> None:
    if message is None:  # a valid frame written by hand
        right = _tokens(handles=(7, 8), positions=(0, 3), counts=(2, 1), tokens=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0])
        tokens, logprobs = m.columns(right)
        assert (tokens.tolist(), logprobs.tolist()) == ([1, 2, 3], [-1.0, -2.0, -3.0])
        return
    try:
        tokens, logprobs = m.columns(message)
    except ValueError:
        return
    rows = len(message.handles)
    assert len(message.positions) == rows
    assert len(tokens) == len(logprobs) == (sum(message.counts) if message.counts else rows)
    assert all(0 <= i < rows for i in message.finished)


def _tokens(*, tokens: list[int], logprobs: list[float], **fields: Any) -> m.Tokens:
    packed: dict[str, Any] = {"tokens": array("I", tokens).tobytes(), "logprobs": array("f", logprobs).tobytes()}
    return m.Tokens(**{"version": 1, "counts": (), "finished": {}} | packed | fields)


@pytest.mark.parametrize(
    "change",
    [
        {"positions": (0,)}, {"positions": (0, 0, 0)}, {"handles": (7,)}, {"counts": (2,)}, {"counts": (3, 0)},
        {"counts": (4, -1)}, {"counts": (2, 2)}, {"counts": (2**62, 2**62)}, {"tokens": b"\0" * 11},
        {"tokens": b"\0" * 8}, {"logprobs": b""}, {"logprobs": b"\0" * 13}, {"finished": {2: "stop"}},
        {"finished": {-1: "stop"}}, {"counts": ()}, {"handles": (), "positions": (), "counts": ()},
    ],
)  # fmt: skip
def test_mismatched_columns_are_refused(change: dict[str, Any]) -> None:
    right = _tokens(handles=(7, 8), positions=(0, 3), counts=(2, 1), tokens=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0])
    m.columns(right)
    with pytest.raises(ValueError, match=r"."):
        m.columns(msgspec.structs.replace(right, **change))


STATS = m.encode(m.Stats(running=1, made=2, steps=3, idle_s=0.5))
INVALID_FRAMES = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "torn": STATS[:-3],
    "trailing bytes": STATS + b"\0",
    "a message of the other direction": m.encode(m.Assign(work=())),
    "unknown tag": b"\x92\x63\xa1x",
    "invalid UTF-8": b"\x92\x11\xa1\xff",
    "endless nesting": b"\x93\x11\xa1x" + b"\x91" * 50_000,
    "four billion handles": b"\x98\x0b\x01\xdd\xff\xff\xff\xff",
    "four billion fields": b"\xdd\xff\xff\xff\xff\x0b",
    "a map": b"\x81\xa1a\x01",
    "too long": m.encode(m.Left(why="x" * (1 << 20))),
}


@pytest.mark.parametrize("frame", list(INVALID_FRAMES.values()), ids=list(INVALID_FRAMES))
def test_invalid_frame_closes_only_its_own_link(sockets: Callable[[], Any], frame: bytes) -> None:
    async def run() -> None:
        async with sockets() as (ours, theirs), sockets() as (other, others):
            theirs._decode = msgspec.msgpack.Decoder(m.FromWorker).decode
            await ours.send(m.Left(why="before"))
            await ours._socket.send_bytes(frame)
            with pytest.raises(LinkClosed):  # the sender is notified, and cannot send any more
                await asyncio.wait_for(_until_closed(ours, theirs), 240)
            with pytest.raises(LinkClosed):
                await theirs.send(m.Left(why="after"))
            await other.send(m.Left(why="still here"))
            assert await others.receive() == m.Left(why="still here")

    asyncio.run(run())


async def _until_closed(ours: Any, theirs: Any) -> None:
    assert await theirs.receive() == m.Left(why="before")
    reading = asyncio.create_task(ours.receive())
    with pytest.raises(BadFrame) as caught:
        await theirs.receive()
    assert "127.0.0.1" in str(caught.value)
    assert "not a message" in str(caught.value) or "Message size" in str(caught.value)
    await reading


def test_randomly_damaged_frame_is_a_message_or_an_error() -> None:
    """Bytes of valid frames are changed, removed or duplicated: the result is a message of the right type, or an error
    that the link handles."""
    rng, decode = random.Random(0), msgspec.msgpack.Decoder(m.FromWorker).decode
    frames = [STATS, m.encode(_tokens(handles=(1, 2), positions=(0, 0), tokens=[1, 2], logprobs=[-1.0, -1.0]))]
    frames.append(
        m.encode(m.Hello(protocol=1, nonce=b"n" * 32, proof=b"p" * 32, name="wörker", lease=Lease(device="x")))
    )
    refused = 0
    for _ in range(20_000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(frame) or 1)
            match rng.randrange(3):
                case 0:
                    frame[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    del frame[at : at + rng.randint(1, 4)]
                case _:
                    frame[at:at] = frame[at : at + rng.randint(1, 9)]
        try:
            assert isinstance(decode(bytes(frame)), get_args(m.FromWorker))
        except (ValueError, RecursionError):  # SocketLink.receive turns these into BadFrame
            refused += 1
    assert 5_000 < refused < 20_000


def test_nan_is_transmitted_unchanged() -> None:
    """The ledger checks values, not the link."""
    frame = _tokens(handles=(1,), positions=(0,), tokens=[1], logprobs=[math.nan])
    back = msgspec.msgpack.decode(m.encode(frame), type=m.FromWorker)
    assert math.isnan(m.columns(back)[1][0])


@pytest.mark.parametrize("array_", [5, ["d"], ["O", b"12345678"], ["d", b"123"], ["d", "text"], {"d": b""}])
def test_array_of_another_kind_is_refused(array_: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decoder(m.LogProbs)(msgspec.msgpack.encode([20, [array_]]))
