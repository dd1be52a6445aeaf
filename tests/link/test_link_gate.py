"""Which peers the gate accepts, over a real port, while an accepted worker must not be disturbed.

Not covered: a peer with more connections than the system has file descriptors.
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
from windfall.link import auth, gate, handshake
from windfall.link import messages as m
from windfall.link.base import BadFrame, LinkClosed
from windfall.link.gate import Gate, Terms
from windfall.link.memory import pair
from windfall.types import Lease

OpenGate = Any
PRICELESS = Lease(price_usd_per_h=math.nan)
ToWorker = msgspec.msgpack.Decoder(m.ToWorker)


async def refusal(link: Any) -> str:
    """The reason of the refusal. The link must be closed after it."""
    answer = await link.receive()
    assert isinstance(answer, m.Refused), answer
    with pytest.raises(LinkClosed):
        await link.receive()
    await link.close()
    return answer.why


async def send_hello(open_gate: OpenGate, make: Callable[[m.Challenge], object]) -> str:
    link, challenge = await open_gate.dial()
    await link.send(make(challenge))
    return await refusal(link)


async def send_raw(open_gate: OpenGate, frame: bytes | str) -> str:
    """Send a frame that is not a message. The close has the reason."""
    async with open_gate.session.ws_connect(f"{open_gate.url}/worker") as socket:
        assert isinstance(ToWorker.decode((await socket.receive()).data), m.Challenge)
        await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
        answer = await socket.receive()
        assert answer.type is WSMsgType.CLOSE
        return f"{answer.data} {answer.extra}"


async def replayed(open_gate: OpenGate) -> str:
    """The bytes of a valid Hello, recorded by an attacker and sent on another connection."""
    link, challenge = await open_gate.dial()
    recorded = open_gate.hello(challenge, name="recorded")
    await link.send(recorded)
    assert isinstance(await link.receive(), m.Welcome)
    await link.close()
    return await send_hello(open_gate, lambda challenge: recorded)


def trainer_hello(open_gate: OpenGate, nonce: bytes = b"n" * 32, proof: bytes = b"p" * 32) -> m.TrainerHello:
    return m.TrainerHello(
        protocol=m.PROTOCOL, nonce=nonce, proof=proof, step=0, next_task=0, micro_tokens=1, model="x",
        engine=open_gate.gate.terms[""].engine, version=0, digest="", facts={},
    )  # fmt: skip


def short_nonce(open_gate: OpenGate, challenge: m.Challenge) -> m.Hello:
    """From a peer that knows the token but sends an empty nonce."""
    proof = auth.proof("a-token-for-the-tests-of-links", "hello", challenge.run, challenge.nonce, b"")
    return open_gate.hello(challenge, nonce=b"", proof=proof)


REFUSED: dict[str, tuple[Callable[[OpenGate], Awaitable[str]], str]] = {
    "wrong token": (lambda d: send_hello(d, lambda c: d.hello(c, token="the-token-of-another-run")), "wrong token"),
    "no proof": (lambda d: send_hello(d, lambda c: d.hello(c, proof=b"")), "wrong token"),
    "no nonce": (lambda d: send_hello(d, lambda c: d.hello(c, nonce=b"")), "wrong token"),
    "a short nonce": (lambda d: send_hello(d, lambda c: short_nonce(d, c)), "wrong token"),
    "the nonce of another": (lambda d: send_hello(d, lambda c: d.hello(c, nonce=b"n" * 32)), "wrong token"),
    "the challenge as its own nonce": (lambda d: send_hello(d, lambda c: d.hello(c, nonce=c.nonce)), "wrong token"),
    "replayed": (replayed, "another challenge"),
    "a long region": (lambda d: send_hello(d, lambda c: d.hello(c, lease=Lease(region="r" * 129))), "128 characters"),
    "a long digest": (lambda d: send_hello(d, lambda c: d.hello(c, held={"": (1, "d" * 129)})), "128 characters"),
    "wrong protocol": (
        lambda d: send_hello(d, lambda c: d.hello(c, protocol=99)),
        f"99, this run uses {m.PROTOCOL}: ins",
    ),
    "wrong model": (
        lambda d: send_hello(d, lambda c: d.hello(c, model="model-2", lends=True)),
        "trains model model-1, this worker has",
    ),
    "empty name": (lambda d: send_hello(d, lambda c: d.hello(c, name="")), "name must be 1 to 64"),
    "long name": (lambda d: send_hello(d, lambda c: d.hello(c, name="n" * 65)), "name must be 1 to 64"),
    "name with a number sign": (lambda d: send_hello(d, lambda c: d.hello(c, name="a#2")), "name must be 1 to 64"),
    "name with a line break": (lambda d: send_hello(d, lambda c: d.hello(c, name="a\nb")), "name must be 1 to 64"),
    "an invalid price": (lambda d: send_hello(d, lambda c: d.hello(c, lease=PRICELESS)), "invalid price: nan $"),
    "not a Hello": (lambda d: send_hello(d, lambda c: m.Left(why="hi")), "expected a Hello, received a Left"),
    "a trainer": (lambda d: send_raw(d, m.encode(trainer_hello(d))), "not a message"),
    "garbage": (lambda d: send_raw(d, b"\xc1 garbage"), "not a message"),
    "text": (lambda d: send_raw(d, '{"hello": 1}'), "only binary frames"),
    "bad text inside": (lambda d: send_raw(d, b"\x92\x11\xa1\xff"), "not a message"),
    "endless nesting": (lambda d: send_raw(d, b"\x93\x11\xa1x" + b"\x91" * 50_000), "not a message"),
    "oversized": (lambda d: send_raw(d, b"\0" * 70_000), "1009"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_peer_gets_the_reason_and_is_logged_once(
    open_gate: OpenGate, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    attempt, why = REFUSED[case]

    async def run() -> None:
        async with open_gate().open() as d, d.undisturbed():
            assert why in await attempt(d)
            await asyncio.sleep(0.02)
            assert len(d.logged) == 1, d.logged
            assert d.logged[0]["peer"] == "127.0.0.1"
            if not why.isdigit():
                assert why in d.logged[0]["why"] or "TEXT frame" in d.logged[0]["why"]
            assert d.gate.workers == 1
            assert set(d.links) <= {"good", "recorded"}

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert not caplog.records, "a refused peer wrote to the process's own log"


def test_silent_peer_is_refused(open_gate: OpenGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.2)

    async def run() -> None:
        async with open_gate().open() as d, d.undisturbed():
            link, _ = await d.dial()
            assert "no hello within 0.2 s" in await refusal(link)
            assert len(d.logged) == 1

    asyncio.run(run())


def test_peer_that_disconnects_is_not_logged(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate().open() as d, d.undisturbed():
            link, _ = await d.dial()
            await link.close("changed my mind")
            await asyncio.sleep(0.05)
            assert d.logged == []

    asyncio.run(run())


def test_full_run_asks_worker_to_retry(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate(max_workers=2).open() as d, d.undisturbed():
            second = await d.join("second")
            link, challenge = await d.dial()
            await link.send(d.hello(challenge))
            answer = await link.receive()
            assert answer == m.Refused(why="the run has its maximum of 2 workers (fleet.max_workers)", again=True)
            await link.close()
            await second.close()
            async with asyncio.timeout(5):
                while d.gate.workers > 1:
                    await asyncio.sleep(0.005)
            await (await d.join("third")).close()
            assert d.logged == []

    asyncio.run(run())


def test_run_that_borrows_from_none_refuses_lenders(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate(borrows=False).open() as d, d.undisturbed():
            link, challenge = await d.dial()
            await link.send(d.hello(challenge, lends=True))
            answer = await link.receive()
            assert answer == m.Refused(why="the run borrows from no lender (fleet.borrowed_max is 0)", again=False)

    asyncio.run(run())


def test_worker_is_asked_to_retry_before_the_model_is_known(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate().open() as d:
            d.gate.terms = {}
            link, challenge = await d.dial()
            await link.send(d.hello(challenge))
            answer = await link.receive()
            assert isinstance(answer, m.Refused)
            assert answer.again
            await link.close()

    asyncio.run(run())


@pytest.mark.parametrize("model", ["", "model-1"])
def test_worker_with_the_right_model_or_none_is_accepted(open_gate: OpenGate, model: str) -> None:
    async def run() -> None:
        async with open_gate().open() as d:
            await (await d.join("w", model=model)).close()

    asyncio.run(run())


def test_refusals_are_logged_with_a_rate_limit(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate().open() as d, d.undisturbed():
            started = time.monotonic()
            for turn in range(8):
                models = [f"model-{n}" for n in range(10 * turn + 2, 10 * turn + 12)]
                reasons = await asyncio.gather(
                    *(send_hello(d, lambda c, model=model: d.hello(c, model=model, lends=True)) for model in models)
                )
                assert all(model in why for model, why in zip(models, reasons, strict=True))  # each gets its reason
            most = gate.MAX_LOGGED_PER_S * (1 + math.ceil(time.monotonic() - started))
            assert 1 <= len(d.logged) <= most
            assert d.gate.workers == 1

    asyncio.run(run())


def test_same_refusal_is_not_logged_again_and_again(open_gate: OpenGate, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with open_gate().open() as d:
            for _ in range(3):
                assert "wrong token" in await send_hello(d, lambda c: d.hello(c, token="wrong"))
                assert "not a message" in await send_raw(d, b"\xc1 garbage")
            assert len([e for e in d.logged if "wrong token" in e["why"]]) == 1
            assert len([e for e in d.logged if "not a message" in e["why"]]) == 1
            monkeypatch.setattr(gate, "REPEAT_S", 0.0)
            await send_hello(d, lambda c: d.hello(c, token="wrong"))
            assert [e.get("repeats") for e in d.logged if "wrong token" in e["why"]] == [None, 2]

    asyncio.run(run())


async def _http(open_gate: OpenGate, head: bytes, body: bytes = b"") -> bytes:
    """The first bytes of the answer to a plain HTTP request, which must arrive soon."""
    host, port = open_gate.url.removeprefix("http://").split(":")
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
def test_plain_http_is_refused(open_gate: OpenGate, what: str, caplog: pytest.LogCaptureFixture) -> None:
    head, status = HTTP[what]

    async def run() -> None:
        async with open_gate().open() as d, d.undisturbed():
            answer = await _http(d, head, b"\0" * (4 << 20) if what == "big post" else b"")
            assert status in answer.split(b"\r\n")[0]
            assert what != "get" or b"windfall worker --join" in answer

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    records = [record for record in caplog.records if record.name.startswith(("windfall", "aiohttp"))]
    logged = [record.getMessage() for record in records]
    assert len(logged) == (what in ("not http", "endless header")), "what is not HTTP is logged, in one line"
    assert all(len(line) < 300 and "\n" not in line for line in logged)
    assert not any(record.exc_info for record in records)


def test_bad_frame_after_the_welcome_closes_only_that_link(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate().open() as d, d.undisturbed():
            link = await d.join("bad")
            await link._socket.send_bytes(b"\xc1")
            with pytest.raises(LinkClosed, match="not a message"):
                await link.receive()
            async with asyncio.timeout(5):
                while d.gate.workers > 1:
                    await asyncio.sleep(0.005)
            await link.close()

    asyncio.run(run())


def test_token_is_in_no_event_and_on_no_wire(open_gate: OpenGate, tmp_path: Path) -> None:
    wire: list[bytes] = []

    async def run(events: EventLog) -> None:
        d = open_gate(log=events.instant)
        for token in (None, "a-wrong-token-of-a-stranger"):
            ours, theirs = pair()
            serving = asyncio.create_task(d.gate.worker(ours, d.serve))
            challenge = await theirs.receive()
            hello = d.hello(challenge, **({"token": token} if token else {}))
            await theirs.send(hello)
            wire.extend(map(m.encode, [challenge, hello, await theirs.receive()]))
            await theirs.close()
            with contextlib.suppress(LinkClosed):
                await serving

    events = EventLog(tmp_path / "events.jsonl")
    asyncio.run(run(events))
    events.close()
    lines = (tmp_path / "events.jsonl").read_text()
    assert [json.loads(line)["name"] for line in lines.splitlines()] == ["refused"]
    shown = b"".join(wire) + lines.encode()
    assert b"a-token-for-the-tests" not in shown
    assert b"a-wrong-token" not in shown


def test_trainer_needs_its_own_secret(open_gate: OpenGate) -> None:
    """A process with the workers' token must not be able to determine the run's weights."""

    async def is_accepted(secret: str, purpose: str) -> bool:
        ours, theirs = pair()
        accepted = asyncio.Event()

        async def serve(link: object, hello: object) -> None:
            accepted.set()

        d = open_gate()
        serving = asyncio.create_task(d.gate.trainer(ours, serve))
        challenge: Any = await theirs.receive()
        nonce = auth.nonce()
        proof = auth.proof(secret, purpose, challenge.run, challenge.nonce, nonce)
        await theirs.send(trainer_hello(d, nonce, proof))
        answer: Any = await theirs.receive()
        await serving
        if accepted.is_set():
            proof = auth.proof(secret, "trainer welcome", challenge.run, challenge.nonce, nonce)
            assert answer == m.TrainerWelcome(proof=proof)
        else:
            assert isinstance(answer, m.Refused)
            assert not answer.again
        assert accepted.is_set() or len(d.logged) == 1
        return accepted.is_set()

    secret = "a-secret-that-only-the-trainer-has"
    assert asyncio.run(is_accepted(secret, "trainer"))
    assert not asyncio.run(is_accepted(secret, "hello")), "accepted the proof of a worker"
    assert not asyncio.run(is_accepted("another", "trainer"))
    assert not asyncio.run(is_accepted("a-token-for-the-tests-of-links", "trainer")), "accepted a worker as the trainer"


def test_gate_without_a_secret_accepts_no_trainer() -> None:
    async def run() -> None:
        ours, theirs = pair()

        async def serve(link: object, hello: object) -> None:
            raise AssertionError

        alone = gate.Gate("demo", "a-token-for-the-tests-of-links", log=lambda *_, **__: None, max_workers=1)
        await alone.trainer(ours, serve)
        assert isinstance(await theirs.receive(), m.Refused)

    asyncio.run(run())


def test_bad_frame_is_a_closed_link() -> None:
    """Code that handles LinkClosed handles a bad frame, too."""
    assert issubclass(BadFrame, LinkClosed)


@pytest.mark.parametrize(("knows", "accepted"), [("token", False), ("trainer secret", True), ("nothing", False)])
def test_only_the_trainers_process_may_be_named_local(knows: str, accepted: bool) -> None:
    """A worker of that name is paused during training, and billed as the trainer."""

    async def main() -> None:
        names: list[str] = []

        async def serve(link: object, hello: m.Hello, base: str) -> None:
            names.append(hello.name)

        gated = Gate("run", "the token", log=lambda name, **fields: None, max_workers=9, trainer_secret="its secret")
        engine: Any = None
        gated.terms = {"": Terms(model="m", engine=engine, heartbeat_s=1.0)}
        ours, theirs = pair()
        serving = asyncio.create_task(gated.worker(ours, serve))
        challenge: Any = await theirs.receive()
        nonce, secret = auth.nonce(), {"token": "the token", "trainer secret": "its secret", "nothing": ""}[knows]
        proof = auth.proof(secret, "hello", challenge.run, challenge.nonce, nonce)
        await theirs.send(m.Hello(protocol=m.PROTOCOL, nonce=nonce, proof=proof, name="local"))
        answer: Any = await theirs.receive()
        await serving
        assert isinstance(answer, m.Welcome if accepted else m.Refused)
        assert names == (["local"] if accepted else [])

    asyncio.run(main())


def test_without_a_trainer_secret_no_worker_may_be_named_local() -> None:
    async def main() -> None:
        async def serve(link: object, hello: m.Hello, base: str) -> None:
            raise AssertionError("accepted")

        gated = Gate("run", "the token", log=lambda name, **fields: None, max_workers=9)
        ours, theirs = pair()
        serving = asyncio.create_task(gated.worker(ours, serve))
        challenge: Any = await theirs.receive()
        nonce = auth.nonce()
        proof = auth.proof("", "hello", challenge.run, challenge.nonce, nonce)
        await theirs.send(m.Hello(protocol=m.PROTOCOL, nonce=nonce, proof=proof, name="local"))
        assert isinstance(await theirs.receive(), m.Refused)
        await serving

    asyncio.run(main())


def test_worker_that_was_welcomed_with_old_terms_dials_again() -> None:
    """The run leaves fp8 while the Welcome is on its way: the worker is not a member yet, so nobody would drain it."""

    async def main() -> None:
        served: list[str] = []

        async def serve(link: object, hello: m.Hello, base: str) -> None:
            served.append(hello.name)

        def terms(model: str) -> Terms:
            engine: Any = None
            return Terms(model=model, engine=engine, heartbeat_s=1.0)

        gated = Gate("run", "the token", log=lambda name, **fields: None, max_workers=9)
        gated.terms = {"": terms("old")}

        async def dial() -> tuple[Any, Any]:
            """The worker's link and its Welcome. The terms change while that is being sent."""
            ours, theirs = pair()
            send = ours.send

            async def slow(message: object) -> None:
                await send(message)
                if isinstance(message, m.Welcome):
                    gated.terms = {"": terms("new")}

            ours.send = slow  # pyright: ignore
            serving = asyncio.create_task(gated.worker(ours, serve))
            challenge: Any = await theirs.receive()
            nonce = auth.nonce()
            proof = auth.proof("the token", "hello", challenge.run, challenge.nonce, nonce)
            await theirs.send(m.Hello(protocol=m.PROTOCOL, nonce=nonce, proof=proof, name="w"))
            welcome = await theirs.receive()
            await serving
            return theirs, welcome

        link, welcome = await dial()
        assert (welcome.model, served, gated.workers) == ("old", [], 0)
        with pytest.raises(LinkClosed, match="wants another engine"):
            await link.receive()
        assert ((await dial())[1].model, served) == ("new", ["w"]), "equal terms are not new ones"

    asyncio.run(main())
