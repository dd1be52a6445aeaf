"""The contract of every kind of link: in memory, and over a real port from either end.

Not covered: a link between two machines, and network faults (the tests of weights/ have a proxy for those).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import quiet_loop
from windfall.link import messages as m
from windfall.link.base import BadFrame, LinkClosed

Links = Callable[[], Any]
AT_ONCE_S = 0.5


def left(n: object) -> m.Left:
    return m.Left(why=str(n))


def test_order_is_kept_in_both_directions(links: Links) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):

            async def send(link: Any) -> None:
                for n in range(500):
                    await link.send(left(n))

            async def read(link: Any) -> list[str]:
                return [(await link.receive()).why for _ in range(500)]

            got = await asyncio.gather(read(ours), read(theirs), send(ours), send(theirs))
            assert got[0] == got[1] == [str(n) for n in range(500)]

    asyncio.run(run())


async def _fill(link: Any) -> tuple[asyncio.Task[None], list[int]]:
    """Send until the sender blocks. Returns the blocked task, and the number of messages that it has sent."""
    sent = [0]

    async def send() -> None:
        while True:
            await link.send(left(f"{sent[0]:06d}{'x' * 60_000}"))
            sent[0] += 1

    sending, before = asyncio.create_task(send()), -1
    async with asyncio.timeout(10):
        while sent[0] != before and not sending.done():
            before = sent[0]
            await asyncio.sleep(0.15)
    return sending, sent


def test_sender_waits_for_the_reader(links: Links) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            sending, sent = await _fill(ours)
            assert not sending.done()
            assert 1 < sent[0] < 1000, "the sender never waits for a reader"
            stuck = sent[0]
            for n in range(stuck + 20):  # the messages in flight, and those that they held up
                assert (await theirs.receive()).why[:6] == f"{n:06d}"
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            assert sent[0] >= stuck + 20

    asyncio.run(run())


@pytest.mark.parametrize("closing_end", ["ours", "theirs"])
def test_waiting_sender_is_interrupted_by_a_close(links: Links, closing_end: str) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            sending, _ = await _fill(ours)
            started = quiet_loop.now_s()
            await (ours if closing_end == "ours" else theirs).close("enough")  # no reader, as with a frozen peer
            with pytest.raises(LinkClosed):
                await asyncio.wait_for(sending, 240)
            assert quiet_loop.now_s() - started < 2.0, "longer than the limit of the closing handshake"

    asyncio.run(run())


def test_close_is_seen_at_once_with_its_reason(links: Links) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            waiting = asyncio.create_task(theirs.receive())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            started = quiet_loop.now_s()
            await ours.close("the run is over")
            with pytest.raises(LinkClosed, match="the run is over"):
                await asyncio.wait_for(waiting, 240)
            assert quiet_loop.now_s() - started < AT_ONCE_S

    asyncio.run(run())


def test_receiver_on_the_closing_end_is_interrupted(links: Links) -> None:
    """The controller drops a worker while its own loop waits for that worker's next message."""

    async def run() -> None:
        async with links() as (ours, theirs):
            waiting = asyncio.create_task(ours.receive())
            await asyncio.sleep(0.05)
            reading = asyncio.create_task(theirs.receive())
            started = quiet_loop.now_s()
            await ours.close("silent for 8 s")
            for task in (waiting, reading):
                with pytest.raises(LinkClosed):
                    await asyncio.wait_for(task, 240)
            assert quiet_loop.now_s() - started < AT_ONCE_S

    asyncio.run(run())


def test_messages_before_the_close_arrive(links: Links) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            for n in range(100):
                await ours.send(left(n))
            closing = asyncio.create_task(ours.close("enough"))
            assert [(await theirs.receive()).why for _ in range(100)] == [str(n) for n in range(100)]
            for _ in range(3):  # it stays closed
                with pytest.raises(LinkClosed):
                    await theirs.receive()
            await closing

    asyncio.run(run())


def test_message_right_before_a_close_arrives(links: Links) -> None:
    """A reader is waiting: the close must not overtake the last message."""

    async def run() -> None:
        async with links() as (ours, theirs):
            reading = asyncio.create_task(theirs.receive())
            await asyncio.sleep(0.05)
            await ours.send(left("the last message"))
            closing = asyncio.create_task(ours.close())
            assert await asyncio.wait_for(reading, 240) == left("the last message")
            with pytest.raises(LinkClosed):
                await theirs.receive()
            await closing

    asyncio.run(run())


def test_nothing_can_be_sent_after_the_close(links: Links) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            reading = asyncio.create_task(theirs.receive())
            await ours.close("enough")
            with pytest.raises(LinkClosed):
                await reading
            for link in (ours, theirs):
                with pytest.raises(LinkClosed):
                    await link.send(left(1))
                with pytest.raises(LinkClosed):
                    await link.receive()
                await link.close("again")  # has no effect

    asyncio.run(run())


@pytest.mark.parametrize("why", ["ä" * 200, "a" + "漢" * 100, "plain " * 50, ""])
def test_any_text_may_be_a_close_reason(links: Links, why: str) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            reading = asyncio.create_task(theirs.receive())
            await ours.close(why)
            with pytest.raises(LinkClosed) as caught:
                await reading
            assert why[:30] in str(caught.value)

    asyncio.run(run())


def test_both_close_at_once(links: Links) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            started = quiet_loop.now_s()
            await asyncio.gather(ours.close("a"), theirs.close("b"))
            assert quiet_loop.now_s() - started < 2.5
            for link in (ours, theirs):
                with pytest.raises(LinkClosed):
                    await link.receive()

    asyncio.run(run())


def test_dead_peer_is_detected_at_once(sockets: Links) -> None:
    """No closing handshake: its kernel closes the connection, as after kill -9."""

    async def run() -> None:
        async with sockets() as (ours, theirs):
            assert ours.peer.startswith("http://127.0.0.1:")
            assert theirs.peer == "127.0.0.1"
            waiting = asyncio.create_task(theirs.receive())
            await asyncio.sleep(0.02)
            started = quiet_loop.now_s()
            ours._socket._response.connection.transport.abort()
            with pytest.raises(LinkClosed) as caught:
                await asyncio.wait_for(waiting, 240)
            assert not isinstance(caught.value, BadFrame)
            assert quiet_loop.now_s() - started < AT_ONCE_S
            with pytest.raises(LinkClosed):
                await theirs.send(left(1))

    asyncio.run(run())
