"""Workers that refuse the model: the run ends only if no worker can be expected to run it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.scripted_engine import Asks, CharacterText
from tests.support.fleets.listening_controller import Site, Worker, opened
from windfall.controller.rollout import loading
from windfall.controller.rollout.loading import REFUSALS, REFUSED_S, Refusals
from windfall.controller.rollout.stream import Rollout
from windfall.controller.workers.members import Member, Members, WorkerState
from windfall.engine.factory import engine_sizes
from windfall.envs.in_process import InProcess
from windfall.errors import WindfallError
from windfall.recipe.sections import Recipe
from windfall.recipe.sections import RolloutSection as Options
from windfall.types import Feedback, Lease, Sampling

REASON = WindfallError(
    "log-probs differ by 3 nats", where="model.path", fix="Use another model. " + "x" * 300 + " End."
)


async def right(task: Any, turns: Any) -> Feedback:
    return Feedback(reward=1.0)


def rollout_of(site: Site) -> Rollout:
    text: Any = CharacterText()
    options = Options(max_tokens=8, reward_tries=1)
    return Rollout(
        site.dispatch, InProcess(Asks(right)), {"": text}, Recipe(rollout=options), seed=1, events=site.events
    )


async def groups(rollout: Rollout) -> list[int]:
    async with asyncio.timeout(60):
        return [g.index async for g in rollout.groups(range(3), size=2, sampling=lambda policy: Sampling())]


def refusing(worker: Worker, reason: WindfallError = REASON) -> Worker:
    worker.build_error = reason
    return worker


def test_run_ends_with_the_reason_when_every_worker_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real agents, gate, dispatch and rollout over sockets; one of the reasons comes from the real memory check."""
    monkeypatch.setattr(loading, "REFUSED_S", 1.0)

    async def main() -> None:
        async with opened(tmp_path) as (site, start):
            first, second = refusing(start(name="a")), start(name="b")
            second._build = second.client.build = lambda spec: engine_sizes(spec, 10**15, "cpu", 0.4)
            began = time.monotonic()
            with pytest.raises(WindfallError) as caught:
                await groups(rollout_of(site))
            assert time.monotonic() - began > 1.0
            assert (await first.ends(), await second.ends()) == (3, 3)
            said = str(caught.value)
            assert said.startswith(
                "fleet: no worker can run the model: 2 refused it, and none has ever been ready (waited 1 s)"
            )
            if "Worker a says" in said:
                assert str(REASON) in said, "with its fix"
            else:
                assert "Worker b says: fleet.worker_memory: the KV cache may use" in said
                assert "Raise it, run fewer workers" in said
            assert said.endswith("Then continue with `windfall resume`.")

    asyncio.run(main())


@pytest.mark.parametrize("when", ["ready before", "starts slowly", "comes late"])
def test_one_refusing_worker_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    monkeypatch.setattr(loading, "REFUSED_S", 0.3 if when != "comes late" else 3.0)

    async def main() -> None:
        async with opened(tmp_path) as (site, start):
            able = None
            if when != "comes late":
                able = start(name="able")
            if able and when == "ready before":
                await site.until(lambda: site.named("worker_ready"), "it is ready")
                await able.close()
            if able and when == "starts slowly":
                able.may_build.clear()
            odd = refusing(start(name="odd"))
            rolling = asyncio.create_task(groups(rollout_of(site)))
            assert await odd.ends() == 3
            await asyncio.sleep(0.7)
            assert not rolling.done()
            if able and when == "starts slowly":
                able.may_build.set()
            else:
                start(name="later")
            assert sorted(await rolling) == [0, 1, 2]

    asyncio.run(main())


class Fleet:
    """Members whose events a test decides."""

    def __init__(self) -> None:
        self.members, self.refusals = Members(), Refusals()

    def join(self, name: str, now_s: float) -> Member:
        return self.members.join(name, Lease(), now_s)

    def leave(self, member: Member, now_s: float, why: str) -> None:
        self.refusals.refused(member, why, now_s)
        self.members.move(member.id, WorkerState.GONE, why)

    def ends(self, now_s: float) -> bool:
        return self.refusals.check(self.members.here(), now_s) is not None


def test_workers_that_are_restarted_forever_do_not_keep_the_run_alive() -> None:
    """A worker joins every 20 s and refuses 25 s later, so that one is always starting."""
    fleet, starting, ended_s = Fleet(), [], 0.0
    for now_s in range(0, 2000, 5):
        if now_s % 20 == 0:
            starting.append(fleet.join(f"w{now_s}", now_s))
        if starting and now_s - starting[0].joined_s == 25:
            fleet.leave(starting.pop(0), now_s, "no")
        if fleet.ends(now_s):
            ended_s = now_s
            break
    assert fleet.refusals.count >= REFUSALS
    assert 25 + REFUSED_S <= ended_s <= 25 + REFUSED_S + 20 * REFUSALS


def test_run_waits_for_a_worker_that_starts_slower_than_others_refuse() -> None:
    fleet = Fleet()
    slow = fleet.join("slow", 0.0)
    for n in range(2 * REFUSALS):
        fleet.leave(fleet.join(f"odd{n}", 10.0 * n), 10.0 * n + 5.0, "no")
    assert not fleet.ends(900.0)
    fleet.leave(slow, 900.0, "no")
    assert fleet.ends(900.0)
