"""What every kind of link keeps: in memory, and over a real port seen from either end.

Not covered: a link between two machines, and what a network may do to it (the weights' tests have a proxy for that).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from windfall.link import messages as m
from windfall.link.base import BadFrame, LinkClosed

Links = Callable[[], Any]
AT_ONCE_S = 0.5


def left(n: object) -> m.Left:
    return m.Left(why=str(n))


def test_order_is_kept_both_ways(links: Links) -> None:
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
    """Send until nothing goes any more: the task that is stuck, and how many it has sent."""
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


def test_the_sender_waits_for_the_reader(links: Links) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            sending, sent = await _fill(ours)
            assert not sending.done()
            assert 1 < sent[0] < 1000, "nobody reads, and it has room for ever"
            stuck = sent[0]
            for n in range(stuck + 20):  # what waited, and what can be sent because of that
                assert (await theirs.receive()).why[:6] == f"{n:06d}"
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            assert sent[0] >= stuck + 20

    asyncio.run(run())


@pytest.mark.parametrize("who", ["ours", "theirs"])
def test_a_sender_that_waits_learns_of_the_close(links: Links, who: str) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            sending, _ = await _fill(ours)
            started = time.monotonic()
            await (ours if who == "ours" else theirs).close("enough")  # nobody reads it: as with a frozen peer
            with pytest.raises(LinkClosed):
                await asyncio.wait_for(sending, 5)
            assert time.monotonic() - started < 2.0, "more than the closing handshake may take"

    asyncio.run(run())


def test_a_close_is_seen_at_once_with_its_reason(links: Links) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            waiting = asyncio.create_task(theirs.receive())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            started = time.monotonic()
            await ours.close("the run is over")
            with pytest.raises(LinkClosed, match="the run is over"):
                await asyncio.wait_for(waiting, 5)
            assert time.monotonic() - started < AT_ONCE_S

    asyncio.run(run())


def test_who_waits_on_the_closed_end_itself_is_freed(links: Links) -> None:
    """The controller gives a worker up while its own loop waits for that worker's next message."""

    async def run() -> None:
        async with links() as (ours, theirs):
            waiting = asyncio.create_task(ours.receive())
            await asyncio.sleep(0.05)
            reading = asyncio.create_task(theirs.receive())
            started = time.monotonic()
            await ours.close("silent for 8 s")
            for task in (waiting, reading):
                with pytest.raises(LinkClosed):
                    await asyncio.wait_for(task, 5)
            assert time.monotonic() - started < AT_ONCE_S

    asyncio.run(run())


def test_messages_before_the_close_arrive(links: Links) -> None:
    async def run() -> None:
        async with links() as (ours, theirs):
            for n in range(100):
                await ours.send(left(n))
            closing = asyncio.create_task(ours.close("enough"))
            assert [(await theirs.receive()).why for _ in range(100)] == [str(n) for n in range(100)]
            for _ in range(3):  # and it stays closed
                with pytest.raises(LinkClosed):
                    await theirs.receive()
            await closing

    asyncio.run(run())


def test_a_message_and_the_close_right_behind_it(links: Links) -> None:
    """The reader waits already: the last word must not be lost to the close that comes with it."""

    async def run() -> None:
        async with links() as (ours, theirs):
            reading = asyncio.create_task(theirs.receive())
            await asyncio.sleep(0.05)
            await ours.send(left("the last word"))
            closing = asyncio.create_task(ours.close())
            assert await asyncio.wait_for(reading, 5) == left("the last word")
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
                await link.close("again")  # does no harm

    asyncio.run(run())


@pytest.mark.parametrize("why", ["ä" * 200, "a" + "漢" * 100, "plain " * 50, ""])
def test_any_text_can_be_a_reason(links: Links, why: str) -> None:
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
            started = time.monotonic()
            await asyncio.gather(ours.close("a"), theirs.close("b"))
            assert time.monotonic() - started < 2.5
            for link in (ours, theirs):
                with pytest.raises(LinkClosed):
                    await link.receive()

    asyncio.run(run())


def test_a_peer_that_dies_is_seen_at_once(sockets: Links) -> None:
    """No closing handshake: its kernel closes the connection, as after kill -9."""

    async def run() -> None:
        async with sockets() as (ours, theirs):
            assert ours.peer.startswith("http://127.0.0.1:")
            assert theirs.peer == "127.0.0.1"
            waiting = asyncio.create_task(theirs.receive())
            await asyncio.sleep(0.02)
            started = time.monotonic()
            ours._socket._response.connection.transport.abort()
            with pytest.raises(LinkClosed) as caught:
                await asyncio.wait_for(waiting, 5)
            assert not isinstance(caught.value, BadFrame)
            assert time.monotonic() - started < AT_ONCE_S
            with pytest.raises(LinkClosed):
                await theirs.send(left(1))

    asyncio.run(run())
