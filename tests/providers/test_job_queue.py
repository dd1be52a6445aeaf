"""Jobs of a batch system, with a queue that fails in ways that the programs of tests/fleet/stand_ins do not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from tests.support.recorded_events import RecordedEvents
from tests.support.worker_sources import running
from windfall.providers.base import ignore_event
from windfall.providers.job_queue import Job, JobSpawner
from windfall.providers.slots import SlotProvider
from windfall.types import Lease


class ScriptedQueue:
    """A queue whose answers a test decides."""

    together = True

    def __init__(self, *answers: Job | Exception) -> None:
        self.answers, self.submitted, self.leftovers = list(answers), [], [0]

    async def submit(self, workers: Sequence[str]) -> Mapping[str, str]:
        self.submitted += workers
        return {worker: worker for worker in workers}

    async def states(self, ids: Iterable[str]) -> Mapping[str, Job]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict.fromkeys(ids, answer)

    async def drain(self, id: str, job: Job | None) -> None:
        self.answers = [Job(code=0)]

    async def cancel(self, id: str) -> None:
        self.answers = [Job(code=-9)]

    async def cancel_leftovers(self) -> int:
        return self.leftovers.pop(0) if len(self.leftovers) > 1 else self.leftovers[0]


def test_any_error_of_a_query_is_a_failed_answer() -> None:
    async def main() -> None:
        events = RecordedEvents()
        errors = [ValueError("not a number") for _ in range(5)]
        async with JobSpawner(ScriptedQueue(*errors, Job(code=7)), poll_s=0.001, on_event=events) as jobs:
            handle = await jobs.spawn("slurm1.1", Lease())
            assert await asyncio.wait_for(handle.wait(), 60.0) == 7
        assert "ValueError: not a number" in events.of("stuck")[0]["error"]

    asyncio.run(main())


def test_time_in_the_queue_is_not_part_of_the_life_of_a_worker() -> None:
    """Jobs that wait longer than `young_s` and then fail are started less and less often."""
    waits = [Job(waiting=True)] * 8
    queue = ScriptedQueue(*[*waits, Job(code=1)] * 3, Job(waiting=True))

    async def main() -> None:
        events = RecordedEvents()
        jobs = JobSpawner(queue, poll_s=0.05)

        class Provider(SlotProvider):
            async def run(self) -> None:
                async with jobs:
                    await super().run()

        def delay() -> object:
            made = jobs.restart_delay()
            made.young_s = 0.1
            return made

        provider = Provider(jobs.spawn, 1, terms=Lease(), on_event=events, grace_s=0.0, delay=delay)  # pyright: ignore
        async with running(provider):
            restarted = await events.until(3, "restarted")
        assert [event["after_s"] for event in restarted] == [0.05, 0.1, 0.2]
        assert all(event["lived_s"] == 0.0 for event in events.of("exited")[:3])

    asyncio.run(main())


def test_leftovers_are_canceled_until_none_is_listed() -> None:
    async def main() -> None:
        queue, events = ScriptedQueue(Job()), RecordedEvents()
        queue.leftovers = [2, 1, 0]
        async with JobSpawner(queue, poll_s=0.001, on_event=events):
            assert queue.leftovers == [0]
        assert not events.all
        queue.leftovers = [1]
        async with JobSpawner(queue, poll_s=0.001, on_event=ignore_event):
            pass
        async with JobSpawner(queue, poll_s=0.001, on_event=events):
            pass
        assert "may be left" in events.of("stuck")[0]["error"]

    asyncio.run(main())
