"""Whether two answers mean the same: runs in a child process, where math-verify is imported.

math-verify's own timeouts are signals handled in Python, so they cannot stop one long multiplication, and they fail
outside the main thread. They are switched off (0); the child's limit on CPU time takes their place.
"""

from __future__ import annotations

import logging

import math_verify

from windfall.envs.extract import marked
from windfall.envs.limits import cpu_limit
from windfall.types import Feedback

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off


def same(gold: str, text: str, cpu_s: float) -> bool:
    """Whether the answer in the text (what it marks as such, else what math-verify finds) means the same as `gold`."""
    want = _parse(gold)
    if not want:
        raise ValueError(f"math-verify cannot read the right answer {gold!r}: use scoring 'exact'")
    with cpu_limit(cpu_s, Feedback(reward=0.0)):
        answer = marked(text)
        got = math_verify.parse(text, parsing_timeout=0) if answer is None else _parse(answer)
        return bool(got) and math_verify.verify(want, got, timeout_seconds=0)


def _parse(answer: str) -> list:
    """An answer on its own is mathematics from end to end, which math-verify takes only between dollar signs: it would
    read 2 out of a bare '2x+5'."""
    enclosed = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return math_verify.parse(enclosed, parsing_timeout=0) or math_verify.parse(answer, parsing_timeout=0)
