"""Who is let in and who is not, over a real port, while a good worker inside must not notice.

Not covered: a stranger with more connections than the system has file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import WSMsgType

from windfall.events.log import EventLog
from windfall.link import auth, gate
from windfall.link import messages as m
from windfall.link.base import BadFrame, LinkClosed
from windfall.link.gate import Gate, Terms
from windfall.link.memory import pair
from windfall.types import Lease

Door = Any
PRICELESS = Lease(price_usd_per_h=math.nan)
ToWorker = msgspec.msgpack.Decoder(m.ToWorker)


async def hears(link: Any) -> str:
    """Why it is refused. That must be the last it hears: the link is closed then."""
    answer = await link.receive()
    assert isinstance(answer, m.Refused), answer
    with pytest.raises(LinkClosed):
        await link.receive()
    await link.close()
    return answer.why


async def says(door: Door, make: Callable[[m.Challenge], object]) -> str:
    link, challenge = await door.dial()
    await link.send(make(challenge))
    return await hears(link)


async def says_raw(door: Door, frame: bytes | str) -> str:
    """For those whose frame is no message: the reason comes with the close."""
    async with door.session.ws_connect(f"{door.url}/worker") as socket:
        assert isinstance(ToWorker.decode((await socket.receive()).data), m.Challenge)
        await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
        answer = await socket.receive()
        assert answer.type is WSMsgType.CLOSE
        return f"{answer.data} {answer.extra}"


async def replayed(door: Door) -> str:
    """The bytes of a good Hello, as somebody could have recorded them, on a connection of his own."""
    link, challenge = await door.dial()
    recorded = door.hello(challenge, name="recorded")
    await link.send(recorded)
    assert isinstance(await link.receive(), m.Welcome)
    await link.close()
    return await says(door, lambda challenge: recorded)


def trainer_hello(door: Door, nonce: bytes = b"n" * 32, proof: bytes = b"p" * 32) -> m.TrainerHello:
    return m.TrainerHello(
        protocol=m.PROTOCOL, nonce=nonce, proof=proof, step=0, next_task=0, micro_tokens=1, model="x",
        engine=door.gate.terms.engine, version=0, digest="", url="", facts={},
    )  # fmt: skip


def short(door: Door, challenge: m.Challenge) -> m.Hello:
    """From somebody who knows the token, but leaves out his part of the secret."""
    proof = auth.proof("a-token-for-the-tests-of-links", "hello", challenge.run, challenge.nonce, b"")
    return door.hello(challenge, nonce=b"", proof=proof)


STRANGERS: dict[str, tuple[Callable[[Door], Awaitable[str]], str]] = {
    "wrong token": (lambda d: says(d, lambda c: d.hello(c, token="somebody-else's-token")), "wrong token"),
    "no proof": (lambda d: says(d, lambda c: d.hello(c, proof=b"")), "wrong token"),
    "no nonce": (lambda d: says(d, lambda c: d.hello(c, nonce=b"")), "wrong token"),
    "a short nonce": (lambda d: says(d, lambda c: short(d, c)), "wrong token"),
    "the nonce of another": (lambda d: says(d, lambda c: d.hello(c, nonce=b"n" * 32)), "wrong token"),
    "the challenge as its own nonce": (lambda d: says(d, lambda c: d.hello(c, nonce=c.nonce)), "wrong token"),
    "replayed": (replayed, "another challenge"),
    "a long region": (lambda d: says(d, lambda c: d.hello(c, lease=Lease(region="r" * 129))), "128 characters"),
    "wrong protocol": (
        lambda d: says(d, lambda c: d.hello(c, protocol=99)),
        f"99, this run speaks {m.PROTOCOL}: ins",
    ),
    "wrong model": (lambda d: says(d, lambda c: d.hello(c, model="model-2")), "trains model model-1, this worker has"),
    "no name": (lambda d: says(d, lambda c: d.hello(c, name="")), "name is 1 to 64"),
    "long name": (lambda d: says(d, lambda c: d.hello(c, name="n" * 65)), "name is 1 to 64"),
    "name with a number sign": (lambda d: says(d, lambda c: d.hello(c, name="a#2")), "name is 1 to 64"),
    "name with a line break": (lambda d: says(d, lambda c: d.hello(c, name="a\nb")), "name is 1 to 64"),
    "a price that is none": (lambda d: says(d, lambda c: d.hello(c, lease=PRICELESS)), "a price of nan $"),
    "not a Hello": (lambda d: says(d, lambda c: m.Left(why="hi")), "a Hello was expected, not a Left"),
    "a trainer": (lambda d: says_raw(d, m.encode(trainer_hello(d))), "not a message"),
    "garbage": (lambda d: says_raw(d, b"\xc1 garbage"), "not a message"),
    "text": (lambda d: says_raw(d, '{"hello": 1}'), "only binary frames"),
    "bad text inside": (lambda d: says_raw(d, b"\x92\x11\xa1\xff"), "not a message"),
    "endless nesting": (lambda d: says_raw(d, b"\x93\x11\xa1x" + b"\x91" * 50_000), "not a message"),
    "oversized": (lambda d: says_raw(d, b"\0" * 70_000), "1009"),
}


@pytest.mark.parametrize("who", list(STRANGERS))
def test_a_stranger_is_told_why_and_logged_once(door: Door, who: str, caplog: pytest.LogCaptureFixture) -> None:
    knock, why = STRANGERS[who]

    async def run() -> None:
        async with door().open() as d, d.undisturbed():
            assert why in await knock(d)
            await asyncio.sleep(0.02)
            assert len(d.logged) == 1, d.logged
            assert d.logged[0]["peer"] == "127.0.0.1"
            if not why.isdigit():
                assert why in d.logged[0]["why"] or "TEXT frame" in d.logged[0]["why"]
            assert d.gate.workers == 1
            assert set(d.inside) <= {"good", "recorded"}

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert not caplog.records, "a stranger got into the process's own log"


def test_who_says_nothing_is_sent_away(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "SHAKE_S", 0.2)

    async def run() -> None:
        async with door().open() as d, d.undisturbed():
            link, _ = await d.dial()
            assert "said nothing for 0.2 s" in await hears(link)
            assert len(d.logged) == 1

    asyncio.run(run())


def test_who_hangs_up_is_not_worth_a_line(door: Door) -> None:
    async def run() -> None:
        async with door().open() as d, d.undisturbed():
            link, _ = await d.dial()
            await link.close("changed my mind")
            await asyncio.sleep(0.05)
            assert d.logged == []

    asyncio.run(run())


def test_a_full_house_says_come_again(door: Door) -> None:
    async def run() -> None:
        async with door(most_workers=2).open() as d, d.undisturbed():
            second = await d.join("second")
            link, challenge = await d.dial()
            await link.send(d.hello(challenge))
            answer = await link.receive()
            assert answer == m.Refused(why="the run has its 2 workers (fleet.max_workers)", again=True)
            await link.close()
            await second.close()
            async with asyncio.timeout(5):
                while d.gate.workers > 1:
                    await asyncio.sleep(0.005)
            await (await d.join("third")).close()
            assert d.logged == []

    asyncio.run(run())


def test_before_there_is_a_model_workers_come_again(door: Door) -> None:
    async def run() -> None:
        async with door().open() as d:
            d.gate.terms = None
            link, challenge = await d.dial()
            await link.send(d.hello(challenge))
            answer = await link.receive()
            assert isinstance(answer, m.Refused)
            assert answer.again
            await link.close()

    asyncio.run(run())


@pytest.mark.parametrize("model", ["", "model-1"])
def test_the_right_model_or_none_is_let_in(door: Door, model: str) -> None:
    async def run() -> None:
        async with door().open() as d:
            await (await d.join("w", model=model)).close()

    asyncio.run(run())


def test_a_flood_of_strangers_does_not_flood_the_log(door: Door) -> None:
    async def run() -> None:
        async with door().open() as d, d.undisturbed():
            started = time.monotonic()
            for _ in range(8):
                said = await asyncio.gather(*(says(d, lambda c: d.hello(c, token="wrong")) for _ in range(10)))
                assert all("wrong token" in why for why in said)  # each is told all the same
            most = gate.LOGGED_PER_S * (1 + math.ceil(time.monotonic() - started))
            assert 1 <= len(d.logged) <= most
            assert d.gate.workers == 1

    asyncio.run(run())


async def _http(door: Door, head: bytes, body: bytes = b"") -> bytes:
    """The first bytes of the answer to a plain HTTP request, and that it came soon."""
    host, port = door.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + body)
    try:
        async with asyncio.timeout(2):
            return await reader.read(4096)
    finally:
        writer.transport.abort()


HTTP = {
    "get": (b"GET /worker HTTP/1.1\r\nHost: x\r\n\r\n", b" 426 "),
    "big post": (b"POST /worker HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n", b" 405 "),
    "no such path": (b"GET /etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", b" 404 "),
    "not http": (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\r\n\r\n", b" 400 "),
    "endless header": (b"GET /worker HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", b" 400 "),
}


@pytest.mark.parametrize("what", list(HTTP))
def test_plain_http_is_refused(door: Door, what: str, caplog: pytest.LogCaptureFixture) -> None:
    head, status = HTTP[what]

    async def run() -> None:
        async with door().open() as d, d.undisturbed():
            answer = await _http(d, head, b"\0" * (4 << 20) if what == "big post" else b"")
            assert status in answer.split(b"\r\n")[0]
            assert what != "get" or b"windfall worker --join" in answer

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert not caplog.records, "a stranger got into the process's own log"


def test_who_goes_wrong_after_the_welcome_hurts_himself_only(door: Door) -> None:
    async def run() -> None:
        async with door().open() as d, d.undisturbed():
            link = await d.join("bad")
            await link._socket.send_bytes(b"\xc1")
            with pytest.raises(LinkClosed, match="not a message"):
                await link.receive()
            async with asyncio.timeout(5):
                while d.gate.workers > 1:
                    await asyncio.sleep(0.005)
            await link.close()

    asyncio.run(run())


def test_the_token_is_in_no_event_and_on_no_wire(door: Door, tmp_path: Path) -> None:
    wire: list[bytes] = []

    async def run(events: EventLog) -> None:
        d = door(log=events.instant)
        for token in (None, "a-wrong-token-of-a-stranger"):
            ours, theirs = pair()
            meeting = asyncio.create_task(d.gate.worker(ours, d.attend))
            challenge = await theirs.receive()
            hello = d.hello(challenge, **({"token": token} if token else {}))
            await theirs.send(hello)
            wire.extend(map(m.encode, [challenge, hello, await theirs.receive()]))
            await theirs.close()
            with contextlib.suppress(LinkClosed):
                await meeting

    events = EventLog(tmp_path / "events.jsonl")
    asyncio.run(run(events))
    events.close()
    lines = (tmp_path / "events.jsonl").read_text()
    assert [json.loads(line)["name"] for line in lines.splitlines()] == ["refused"]
    shown = b"".join(wire) + lines.encode()
    assert b"a-token-for-the-tests" not in shown
    assert b"a-wrong-token" not in shown


def test_a_trainer_needs_its_own_secret(door: Door) -> None:
    """Whoever has the workers' token must not be able to say what the run's weights are."""

    async def meet(secret: str, said: str) -> bool:
        ours, theirs = pair()
        let_in = asyncio.Event()

        async def attend(link: object, hello: object) -> None:
            let_in.set()

        d = door()
        meeting = asyncio.create_task(d.gate.trainer(ours, attend))
        challenge: Any = await theirs.receive()
        nonce = auth.nonce()
        proof = auth.proof(secret, said, challenge.run, challenge.nonce, nonce)
        await theirs.send(trainer_hello(d, nonce, proof))
        answer: Any = await theirs.receive()
        await meeting
        if let_in.is_set():
            proof = auth.proof(secret, "trainer welcome", challenge.run, challenge.nonce, nonce)
            assert answer == m.TrainerWelcome(proof=proof)
        else:
            assert isinstance(answer, m.Refused)
            assert not answer.again
        assert let_in.is_set() or len(d.logged) == 1
        return let_in.is_set()

    secret = "a-secret-that-only-the-trainer-has"
    assert asyncio.run(meet(secret, "trainer"))
    assert not asyncio.run(meet(secret, "hello")), "a worker's proof is no trainer's"
    assert not asyncio.run(meet("another", "trainer"))
    assert not asyncio.run(meet("a-token-for-the-tests-of-links", "trainer")), "a worker passes for the trainer"


def test_a_gate_without_a_secret_lets_no_trainer_in() -> None:
    async def run() -> None:
        ours, theirs = pair()

        async def attend(link: object, hello: object) -> None:
            raise AssertionError

        alone = gate.Gate("demo", "a-token-for-the-tests-of-links", log=lambda *_, **__: None, most_workers=1)
        await alone.trainer(ours, attend)
        assert isinstance(await theirs.receive(), m.Refused)

    asyncio.run(run())


def test_bad_frames_are_links_that_end() -> None:
    """Whoever handles LinkClosed has handled a bad frame."""
    assert issubclass(BadFrame, LinkClosed)


@pytest.mark.parametrize(("knows", "let_in"), [("token", False), ("trainer secret", True), ("nothing", False)])
def test_only_the_trainers_process_is_local(knows: str, let_in: bool) -> None:
    """A worker of that name would be paused with training, and billed as the trainer."""

    async def main() -> None:
        came: list[str] = []

        async def attend(link: object, hello: m.Hello) -> None:
            came.append(hello.name)

        porter = Gate("run", "the token", log=lambda name, **fields: None, most_workers=9, trainer_secret="its secret")
        engine: Any = None
        porter.terms = Terms(model="m", engine=engine, heartbeat_s=1.0)
        ours, theirs = pair()
        meeting = asyncio.create_task(porter.worker(ours, attend))
        challenge: Any = await theirs.receive()
        nonce, secret = auth.nonce(), {"token": "the token", "trainer secret": "its secret", "nothing": ""}[knows]
        proof = auth.proof(secret, "hello", challenge.run, challenge.nonce, nonce)
        await theirs.send(m.Hello(protocol=m.PROTOCOL, nonce=nonce, proof=proof, name="local"))
        answer: Any = await theirs.receive()
        await meeting
        assert isinstance(answer, m.Welcome if let_in else m.Refused)
        assert came == (["local"] if let_in else [])

    asyncio.run(main())


def test_without_a_trainers_secret_nobody_is_local() -> None:
    async def main() -> None:
        async def attend(link: object, hello: m.Hello) -> None:
            raise AssertionError("let in")

        porter = Gate("run", "the token", log=lambda name, **fields: None, most_workers=9)
        ours, theirs = pair()
        meeting = asyncio.create_task(porter.worker(ours, attend))
        challenge: Any = await theirs.receive()
        nonce = auth.nonce()
        proof = auth.proof("", "hello", challenge.run, challenge.nonce, nonce)
        await theirs.send(m.Hello(protocol=m.PROTOCOL, nonce=nonce, proof=proof, name="local"))
        assert isinstance(await theirs.receive(), m.Refused)
        await meeting

    asyncio.run(main())
