"""Compares two answers by their meaning. Runs in a child process, which imports math-verify.

math-verify's own timeouts are signals handled in Python, so they cannot stop one long multiplication, and they fail
outside the main thread. They are disabled (0); the CPU time limit of the child replaces them.
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
WRONG = Feedback(reward=0.0)


def means_the_same(gold: str, text: str, cpu_s: float, verdict: Feedback = WRONG) -> bool:
    """Whether the answer in the text (as marked there, or else as math-verify finds it) means the same as `gold`.
    `verdict`: the result of the call if the comparison takes too long."""
    with cpu_limit(cpu_s, verdict):
        want, why = _parse_gold(gold)
        if why:
            raise ValueError(
                f"the right answer {gold!r} cannot be scored as mathematics: {why}: use the reward 'exact'"
            )
        answer = marked(text)
        if gold == (text.strip() if answer is None else answer):
            return True
        got = math_verify.parse(text, parsing_timeout=0) if answer is None else _parse(answer)
        return bool(got) and math_verify.verify(want, got, timeout_seconds=0)


def check() -> None:
    """The program of a child: for every gold answer on stdin, print the reason why it cannot be scored, or ''."""
    request = json.load(sys.stdin)
    for gold in request["golds"]:
        with cpu_limit(request["cpu_s"], Feedback(reward=0.0)):
            want, why = _parse_gold(gold)
            if not why and not math_verify.verify(want, _parse(gold), timeout_seconds=0):
                why = "math-verify does not consider it equal to itself"
        print(json.dumps(why), flush=True)


def _parse_gold(gold: str) -> tuple[list, str]:
    """The parsed answer, and why it cannot be scored, or ''."""
    if _WORD.search(gold) and not _MATHEMATICS.search(gold):
        # math-verify would read the product of its letters, which is equal for any order of the letters.
        return [], "it is words, not mathematics"
    want = _parse(gold)
    return want, "" if want else "math-verify cannot read it"


def _parse(answer: str) -> list:
    """Parse the whole answer as mathematics. Without $ signs around it, math-verify would read only the 2 of '2x+5'."""
    enclosed = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return math_verify.parse(enclosed, parsing_timeout=0) or math_verify.parse(answer, parsing_timeout=0)
