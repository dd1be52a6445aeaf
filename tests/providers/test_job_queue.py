"""Jobs of a batch system, with a queue that fails in ways that the programs of tests/support/stand_ins do not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tests.support.fleets.recorded_events import RecordedEvents
from tests.support.fleets.worker_sources import running
from windfall.backoff import RestartDelay
from windfall.providers.job_queue import ClusterJob, JobProvider
from windfall.recipe.worker_source import WorkerSource


class ScriptedQueue:
    """A queue whose answers a test decides: each is the state of all jobs that were submitted and not canceled."""

    name = prefix = "slurm"
    together = True

    def __init__(self, *answers: ClusterJob | Exception) -> None:
        self.answers = list(answers)
        self.there: set[str] = set()
        self.canceled: list[str] = []
        self.cancels = True
        """Whether jobs end when they are canceled."""

    async def submit(self, workers: Sequence[str]) -> Mapping[str, str]:
        self.there.update(workers)
        return {worker: worker for worker in workers}

    async def jobs(self) -> Mapping[str, ClusterJob]:
        if not self.there:
            return {}
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        listed = dict.fromkeys(self.there, answer)
        if answer.code is not None:
            self.there.clear()
        return listed

    async def drain(self, ids: Sequence[str]) -> None:
        await self.cancel(ids)

    async def cancel(self, ids: Sequence[str]) -> None:
        self.canceled += ids
        if self.cancels:
            self.there.difference_update(ids)


def provider(queue: ScriptedQueue, events: RecordedEvents, *, poll_s: float = 0.001) -> JobProvider:
    return JobProvider(queue, WorkerSource(workers=1), poll_s=poll_s, grace_s=0.1, on_event=events)


def test_any_error_of_a_query_is_a_failed_answer() -> None:
    async def main() -> None:
        events = RecordedEvents()
        errors = [ValueError("not a number") for _ in range(5)]
        async with running(provider(ScriptedQueue(*errors, ClusterJob(code=7), ClusterJob()), events)):
            assert (await events.until(1, "exited"))[0]["code"] == 7
        assert "ValueError: not a number" in events.of("stuck")[0]["error"]

    asyncio.run(main())


def test_time_in_the_queue_is_not_part_of_the_life_of_a_worker() -> None:
    """Jobs that wait longer than `young_s` and then fail are started less and less often."""
    waits = [ClusterJob(waiting=True)] * 8
    queue = ScriptedQueue(*[*waits, ClusterJob(code=1)] * 3, ClusterJob(waiting=True))

    async def main() -> None:
        events = RecordedEvents()
        made = provider(queue, events, poll_s=0.05)
        made.delay = lambda: RestartDelay(first_s=0.05, young_s=0.1)
        async with running(made):
            restarted = await events.until(3, "restarted")
        assert [event["after_s"] for event in restarted] == [0.05, 0.1, 0.2]
        assert all(event["lived_s"] == 0.0 for event in events.of("exited")[:3])

    asyncio.run(main())


def test_jobs_that_belong_to_no_worker_are_canceled() -> None:
    """One was left by a killed supervisor, another appears during the run: its submission had failed."""

    async def main() -> None:
        queue, events = ScriptedQueue(ClusterJob()), RecordedEvents()
        queue.there = {"left"}
        async with running(provider(queue, events)):
            await events.until(1, "started")
            assert queue.canceled == ["left"]
            queue.there.add("late")
            while "late" in queue.there:
                await asyncio.sleep(0.001)
            assert queue.there == {"slurm1.1"}
        assert not queue.there
        assert not events.of("stuck")

    asyncio.run(asyncio.wait_for(main(), 60.0))


def test_jobs_that_cannot_be_canceled_are_reported() -> None:
    async def main() -> None:
        queue, events = ScriptedQueue(ClusterJob()), RecordedEvents()
        queue.there, queue.cancels = {"left"}, False
        made = provider(queue, events)
        made.target(0)
        async with running(made):
            assert "may be left" in (await events.until(1, "stuck"))[0]["error"]

    asyncio.run(main())
