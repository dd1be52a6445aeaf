"""Both directions of a link at once: sends what is in an outbox, and handles what arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from windfall.errors import run_until_first
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

    await run_until_first(write(), read())
