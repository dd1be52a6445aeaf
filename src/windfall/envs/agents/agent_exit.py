"""What an agent left behind when its process ended: its value, its output, and what that means for the reward. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from windfall.envs import failures
from windfall.envs.failures import EnvFailed
from windfall.errors import describe_exit
from windfall.types import Feedback


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentExit:
    code: int
    """Exit status; a negative number is the signal that ended the process."""
    value: Any = None
    """What the function returned, or the last line that the command printed, parsed as JSON if it is JSON."""
    output: str = ""
    """The end of what it printed."""
    why: str = ""
    """Why it was killed, if it was."""

    @property
    def failure(self) -> EnvFailed | None:
        """The failure if the agent did not end normally."""
        if self.why:
            return EnvFailed(f"the agent {self.why}", self.why, self.output)
        if self.code != 0:
            last = next((line for line in reversed(self.output.splitlines()) if line.strip()), "")
            how = describe_exit(self.code)
            cause = f"the agent {how}"
            return EnvFailed(f"{cause}: {last[: failures.MESSAGE_CHARS]}" if last else cause, cause, self.output)
        return None

    @property
    def reward(self) -> float | None:
        """The reward that the agent returned. Raises EnvFailed if its value is not a reward.

        >>> AgentExit(code=0, value={"reward": 0.5}).reward, AgentExit(code=0, value=True).reward
        (0.5, 1.0)
        """
        value = self.value.get("reward") if isinstance(self.value, dict) else self.value
        if value is None or isinstance(value, str):
            return None
        if fault := failures.feedback_fault(Feedback(reward=value)):
            raise failures.invalid_value("the value that the agent returned", fault)
        return float(value)

    @property
    def text(self) -> str:
        """The agent's answer, for a grader."""
        value = self.value.get("text") if isinstance(self.value, dict) else self.value
        return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def last_line(output: str) -> Any:
    """The last line that is not empty: its value if it is JSON, otherwise its text.

    >>> last_line('thinking\\n{"reward": 1}\\n\\n'), last_line("done")
    ({'reward': 1}, 'done')
    """
    line = next((line for line in reversed(output.splitlines()) if line.strip()), "").strip()
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line or None
