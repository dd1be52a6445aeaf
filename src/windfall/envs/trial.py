"""One call of each kind before a run begins, so that a broken environment is named at once and not after a step."""

from __future__ import annotations

from windfall.envs.base import Host
from windfall.envs.failures import EnvFailed
from windfall.errors import WindfallError
from windfall.types import Turn


async def trial(host: Host, timeout_s: float) -> str:
    """Task 0, and its feedback on an empty response: once each, as a call may cost money. Says what came back."""
    async with host:
        await host.ready()
        where = f"environment {host.name}"
        try:
            task = await host.task(0, timeout_s)
            said = await host.feedback(0, task, [Turn(text="")], timeout_s)
        except EnvFailed as e:
            told = f"{e.traceback.rstrip()}\n" if e.traceback else ""
            if e.cause.startswith("no answer"):
                fix = f"{told}Make it faster, or raise rollout.reward_timeout_s."
            else:
                fix = f"{told}A policy may write anything: every task must be made, and every response judged."
            raise WindfallError(f"{e.error} (a trial call with an empty response)", where=where, fix=fix) from e
    what = f"an observation of {len(said.observation)} characters" if said.observation is not None else ""
    reward = f"reward {said.reward:g}" if said.reward is not None else ""
    answer = " and ".join(part for part in (reward, what) if part)
    return f"environment {host.name}: task '{task.id}' was made; an empty response to it got {answer}"
