"""Calls of a hostile environment through an EnvPool."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import environments as hostile
from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool.pool import EnvPool
from windfall.processes import reaper
from windfall.recipe.file import parse_recipe
from windfall.types import Feedback, Turn


def section(env: type | str, **options: Any) -> Any:
    named = env if isinstance(env, str) else hostile.factory(env)
    return parse_recipe({"env": {"name": "custom", "factory": named, "options": options}}, where="test").env


@contextlib.asynccontextmanager
async def hosting(env: type | str, *, build_s: float = 60.0, **options: Any) -> AsyncIterator[EnvPool]:
    async with EnvPool(section(env, **options), 0, build_s=build_s) as pool:
        await pool.ready()
        yield pool


async def ask(pool: EnvPool, index: int, text: str = "abc", limit_s: float = 20.0) -> Feedback:
    task = await pool.task(index, 20.0)
    return await pool.feedback(index, task, [Turn(text=text)], limit_s)


def environment_pid(pool: EnvPool) -> int:
    """The process of the environment: below its two reapers."""
    return reaper.descendants(pool.places[0].process.pid)[1]


async def failure(wait: Awaitable[Any]) -> EnvFailed:
    with pytest.raises(EnvFailed) as caught:
        await wait
    return caught.value


def alive(pids: Iterable[int]) -> list[int]:
    """Those that have not ended. A process whose parent has not asked for its status yet has ended."""
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for(condition: Callable[[], Any], what: str, within_s: float = 30.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return value


def run(test: Callable[[], Any]) -> Any:
    return asyncio.run(test())
