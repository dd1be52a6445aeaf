"""Both directions of a link at once: sends what is in an outbox, and handles what arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from windfall.link.base import FrameTooLarge, Link, clip


async def exchange(
    link: Link, outbox: asyncio.Queue[Any], handle: Callable[[Any], None], unsendable: Callable[[Any, str], None]
) -> None:
    """Runs until the link ends, and raises LinkClosed then, or what `handle` raises. `unsendable` gets a message that
    cannot be encoded or is too large, and why; the link continues."""

    async def write() -> None:
        while True:
            message = await outbox.get()
            try:
                await link.send(message)
            except (FrameTooLarge, UnicodeError, OverflowError) as error:
                unsendable(message, clip(error))

    async def read() -> None:
        while True:
            handle(await link.receive())

    tasks = [asyncio.create_task(write()), asyncio.create_task(read())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
