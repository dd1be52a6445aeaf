"""Failed calls to an environment: a message for each, and a cause that is the same for repeats."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from windfall.types import Feedback, Task

MESSAGE_CHARS = 500
TRACEBACK_CHARS = 8000
TEXT_CHARS = 1 << 20
"""Longest prompt or observation, in characters: far beyond any model's context, and still quick to tokenize."""

ROLE_CHARS = 200
MAX_REWARD = 1e9
"""Largest absolute value of a reward. Sums of squares of thousands of such rewards still fit into float32."""


@dataclass(eq=False)
class EnvFailed(Exception):
    error: str
    cause: str
    """The same for all failures of the same kind, for any task, so that repeats can be counted together."""
    traceback: str = ""
    final: bool = False
    """True if the call has already been retried too often for another try."""

    def __str__(self) -> str:
        return self.error


def exception_failure(name: str, e: BaseException) -> EnvFailed:
    """The failure for an exception of an environment. Its traceback omits the frames of windfall."""
    if isinstance(e, RuntimeError) and isinstance(e.__cause__, StopIteration):
        e = e.__cause__  # Python has replaced it, because a coroutine cannot raise it
    trace = _skip_own_frames(e.__traceback__)
    frames = traceback.extract_tb(trace)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text, kind = "".join(traceback.format_exception(type(e), e, trace)), type(e).__name__
    return EnvFailed(f"{name} raised {kind}: {_shorten(message_of(e))}", f"{kind}{at}", text[-TRACEBACK_CHARS:])


def message_of(e: BaseException) -> str:
    """The message of an exception of the user, whose own code may fail, as text that can be printed."""
    try:
        return str(e).encode(errors="replace").decode()
    except BaseException as error:  # fault boundary: `__str__` is foreign code
        return f"(its text cannot be read: str() raised {type(error).__name__})"


def timeout_failure(name: str, timeout_s: float, trace: str = "") -> EnvFailed:
    return EnvFailed(f"waited {timeout_s:g} s for {name}", f"no answer within {timeout_s:g} s", trace)


def invalid_value(name: str, fault: str) -> EnvFailed:
    return EnvFailed(f"{name} is wrong: {fault}", f"wrong: {fault[:80]}")


def coroutine_stack(coroutine: Any) -> str:
    here, frames = str(Path(__file__).parent), list[tuple[FrameType, int]]()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if not frame.f_code.co_filename.startswith(here):
            frames.append((frame, frame.f_lineno))
        coroutine = coroutine.cr_await
    return "".join(traceback.StackSummary.extract(iter(frames)).format())[-TRACEBACK_CHARS:]


def source_location(e: BaseException) -> str:
    """file:line where the exception was raised, or "" if that is not in the environment's own code."""
    if isinstance(e, SyntaxError) and e.filename:
        return f"{e.filename}:{e.lineno}"
    frames = traceback.extract_tb(_skip_own_frames(e.__traceback__))
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    here = str(Path(__file__).parent)
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((here, "<frozen importlib")) and "/importlib/" not in file and "/asyncio/" not in file:
            break
        trace = trace.tb_next
    return trace


def _shorten(message: str) -> str:
    """Cut off a long message, because some exceptions contain a whole document."""
    return message if len(message) <= MESSAGE_CHARS else f"{message[:MESSAGE_CHARS]}... ({len(message):,} characters)"


def task_fault(task: object) -> str:
    if not isinstance(task, Task):
        return f"it is a {type(task).__name__}, not a Task"
    if not isinstance(task.id, str):
        return f"its id is a {type(task.id).__name__}, not text"
    if fault := _role_fault(task.role, "its role"):
        return fault
    if isinstance(task.prompt, str):
        return _text_fault(task.prompt, "its prompt")
    if not isinstance(task.prompt, list | tuple) or not task.prompt:
        return f"its prompt is a {type(task.prompt).__name__}, not text or a list of messages"
    for n, message in enumerate(task.prompt):
        parts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if fault := next((f for part in parts if (f := _text_fault(part, f"message {n} of its prompt"))), ""):
            return f'{fault}; a message is {{"role": "user", "content": "..."}}'
    return ""


def feedback_fault(feedback: object) -> str:
    """Why this is not a valid Feedback, or ''."""
    if not isinstance(feedback, Feedback):
        return f"it is a {type(feedback).__name__}, not a Feedback"
    reward, observation = feedback.reward, feedback.observation
    if reward is None and observation is None and not feedback.rewards:
        return "it has neither a reward nor an observation"
    if fault := _scores_fault(feedback.scores) or _role_fault(feedback.role, "its role"):
        return fault
    if not isinstance(feedback.rewards, Mapping):
        return f'its rewards are a {type(feedback.rewards).__name__}, not a mapping such as {{"solver": 1.0}}'
    for role, value in feedback.rewards.items():
        if fault := _role_fault(role, "a role of its rewards") or _reward_fault(value, f"the reward of {role!r}"):
            return fault
    if reward is not None and (fault := _reward_fault(reward, "the reward")):
        return fault
    return "" if observation is None else _text_fault(observation, "the observation")


def _reward_fault(reward: Any, what: str) -> str:
    # Numbers of other libraries, such as numpy.float32, are accepted.
    if isinstance(reward, str | bytes) or not hasattr(reward, "__float__"):
        return f"{what} is a {type(reward).__name__}, not a number"
    try:
        value = float(reward)
    except OverflowError:
        return f"{what} is a number too large for a float"
    except (TypeError, ValueError):  # for example an array of several numbers
        return f"{what} is a {type(reward).__name__} that is not one number"
    if not math.isfinite(value):
        return f"{what} is {value}"
    if abs(value) > MAX_REWARD:
        return f"{what} {value:g} is too large: its absolute value may be at most {MAX_REWARD:,.0f}"
    return ""


def _role_fault(role: object, what: str) -> str:
    fault = _text_fault(role, what)
    return fault or (f"{what} has more than {ROLE_CHARS} characters" if len(str(role)) > ROLE_CHARS else "")


def _text_fault(text: object, what: str) -> str:
    if not isinstance(text, str):
        return f"{what} is a {type(text).__name__}, not text"
    if len(text) > TEXT_CHARS:
        return f"{what} has {len(text):,} characters; at most {TEXT_CHARS:,} are accepted"
    try:
        text.encode()
    except UnicodeEncodeError as e:
        return f"{what} is not valid Unicode ({e.reason} at character {e.start})"
    return ""


def _scores_fault(scores: object) -> str:
    pairs = scores if isinstance(scores, list | tuple) else None
    valid = pairs is not None and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], int | float)
        and math.isfinite(pair[1])
        for pair in pairs
    )
    return "" if valid else 'its scores are not pairs of a name and a number, such as (("format", 0.5),)'
