"""Whether two answers mean the same: runs in a child process, where math-verify is imported.

math-verify's own timeouts are signals handled in Python, so they cannot stop one long multiplication, and they fail
outside the main thread. They are switched off (0); the child's limit on CPU time takes their place.
"""

from __future__ import annotations

import json
import logging
import re
import sys

import math_verify

from windfall.envs.process_pool.limits import cpu_limit
from windfall.envs.scoring.extract import marked
from windfall.types import Feedback

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
_WORD, _MATHEMATICS = re.compile(r"[^\W\d_]{3,}"), re.compile(r"[\d\\$=+*/^<>{}()\[\]|_]")


def same(gold: str, text: str, cpu_s: float) -> bool:
    """Whether the answer in the text (what it marks as such, else what math-verify finds) means the same as `gold`."""
    with cpu_limit(cpu_s, Feedback(reward=0.0)):
        want, why = _read(gold)
        if why:
            raise ValueError(f"the right answer {gold!r} cannot be scored as mathematics: {why}: use scoring 'exact'")
        answer = marked(text)
        if gold == (text.strip() if answer is None else answer):
            return True
        got = math_verify.parse(text, parsing_timeout=0) if answer is None else _parse(answer)
        return bool(got) and math_verify.verify(want, got, timeout_seconds=0)


def check() -> None:
    """In a child: for every right answer on stdin, a line that says why it cannot be scored, or ''."""
    asked = json.load(sys.stdin)
    for gold in asked["golds"]:
        with cpu_limit(asked["cpu_s"], Feedback(reward=0.0)):
            want, why = _read(gold)
            if not why and not math_verify.verify(want, _parse(gold), timeout_seconds=0):
                why = "math-verify does not take it as equal to itself"
        print(json.dumps(why), flush=True)


def _read(gold: str) -> tuple[list, str]:
    """As math-verify has it; and why that is of no use, or ''."""
    if _WORD.search(gold) and not _MATHEMATICS.search(gold):
        # It would be the product of its letters, and equal to any other order of them.
        return [], "it is words, not mathematics"
    want = _parse(gold)
    return want, "" if want else "math-verify cannot read it"


def _parse(answer: str) -> list:
    """An answer on its own is mathematics from end to end, which math-verify takes only between dollar signs: it would
    read 2 out of a bare '2x+5'."""
    enclosed = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return math_verify.parse(enclosed, parsing_timeout=0) or math_verify.parse(answer, parsing_timeout=0)
