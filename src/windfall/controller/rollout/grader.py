"""Asks the environment for its verdict on turns, and counts what that takes and how it fails (grading.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from windfall.controller.rollout.env_failures import EnvFailures
from windfall.controller.rollout.grading import Grading
from windfall.controller.rollout.open_group import OpenGroup
from windfall.envs.base import EnvHost
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import Graded, grade
from windfall.recipe.sections import RolloutSection
from windfall.types import Turn


class Grader:
    def __init__(self, env: EnvHost, options: RolloutSection, grading: Grading, failures: EnvFailures) -> None:
        self._env, self._options, self._grading, self._failures = env, options, grading, failures

    async def grade(self, id: str, group: OpenGroup, turns: Sequence[Turn], *, counted: bool) -> Graded:
        """`id`: the response that the turns belong to. `counted`: it belongs to a step, not to an evaluation beside
        it."""
        loop, o = asyncio.get_running_loop(), self._options
        number = self._grading.begin(loop.time())
        try:
            graded = await grade(
                self._env, group.index, group.task, turns, tries=o.reward_tries, timeout_s=o.reward_timeout_s
            )
            failed = graded.feedback is None
            self._grading.end(number, loop.time(), tries=graded.tries, failed=failed, counted=counted)
        finally:
            self._grading.abandon(number)
        if graded.tries > 1 and not failed:
            self._failures.retry(id, EnvFailed(graded.error, graded.cause, graded.traceback))
        return graded
