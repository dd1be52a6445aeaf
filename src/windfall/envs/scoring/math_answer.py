"""Compares two answers by their meaning. Runs in a child process, which imports math-verify.

math-verify's own timeouts are signals handled in Python, so they cannot stop one long multiplication, and they fail
outside the main thread. They are disabled (0); the CPU time limit of the child replaces them.
"""

from __future__ import annotations

import logging
import re

import math_verify

from windfall.envs.process_pool.limits import cpu_limit
from windfall.envs.scoring.extract import is_words, marked
from windfall.types import Feedback

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
WRONG = Feedback(reward=0.0)


def means_the_same(gold: str, text: str, cpu_s: float, verdict: Feedback = WRONG) -> bool:
    """Whether the answer in the text (as marked there, or else as math-verify finds it) means the same as `gold`.
    `verdict`: the result of the call if the comparison takes too long."""
    want = [] if is_words(gold) else _parse(gold)  # not under the limit: the response is not to blame
    if not want:
        raise ValueError(f"the right answer {gold!r} cannot be scored as mathematics: use the reward 'exact'")
    with cpu_limit(cpu_s, verdict):
        answer = marked(text)
        if gold == (text.strip() if answer is None else answer):
            return True
        got = math_verify.parse(_bare(text), parsing_timeout=0) if answer is None else _parse(answer)
        return bool(got) and math_verify.verify(want, got, timeout_seconds=0)


def _parse(answer: str) -> list:
    """Parse the whole answer as mathematics. Without $ signs around it, math-verify would read only the 2 of '2x+5'."""
    answer = _bare(answer)
    enclosed = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return math_verify.parse(enclosed, parsing_timeout=0) or math_verify.parse(answer, parsing_timeout=0)


def _bare(text: str) -> str:
    """Without dollar signs that begin no formula: math-verify reads no number after them."""
    return re.sub(r"(?<!\\)\\\$", "", text)
