"""Calls of a hostile environment through an EnvPool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from hostile import environments as hostile
from windfall import config
from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool.pool import EnvPool
from windfall.types import Feedback, Turn


def section(env: type | str, **options: Any) -> Any:
    named = env if isinstance(env, str) else hostile.factory(env)
    return config.parse({"env": {"name": "custom", "factory": named, "options": options}}, where="test").env


@contextlib.asynccontextmanager
async def hosting(env: type | str, *, build_s: float = 60.0, **options: Any) -> AsyncIterator[EnvPool]:
    async with EnvPool(section(env, **options), 0, build_s=build_s) as pool:
        await pool.ready()
        yield pool


async def ask(pool: EnvPool, index: int, text: str = "abc", limit_s: float = 20.0) -> Feedback:
    task = await pool.task(index, 20.0)
    return await pool.feedback(index, task, [Turn(text=text)], limit_s)


async def failure(wait: Awaitable[Any]) -> EnvFailed:
    with pytest.raises(EnvFailed) as caught:
        await wait
    return caught.value


def run(test: Callable[[], Any]) -> Any:
    return asyncio.run(test())
