"""The limit for the processes of a pool, and what a pool says about its load."""

from __future__ import annotations

import asyncio

from tests.support.hostile import environments as hostile
from tests.support.hostile.pool_calls import ask, run, section
from windfall.envs.process_pool.pool import EnvPool


def test_a_pool_grows_up_to_its_limit() -> None:
    async def main() -> None:
        async with EnvPool(section(hostile.Sleeps, s=0.3), 0, processes=2) as pool:
            await pool.ready()
            assert (pool.load().processes, pool.load().queued) == (1, 0)
            calls = [asyncio.create_task(ask(pool, n)) for n in range(14)]
            most = queued = 0
            while not all(call.done() for call in calls):
                await asyncio.sleep(0.05)
                most, queued = max(most, pool.load().processes), max(queued, pool.load().queued)
            assert [call.result().reward for call in calls] == [1.0] * 14
            assert (most, pool.load().limit) == (2, 2)
            assert queued >= 5
            assert pool.load().queued == 0

    run(main)
