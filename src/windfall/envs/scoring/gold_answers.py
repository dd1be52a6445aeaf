"""Checks before a run begins whether the gold answers of a JSONL file can be scored as mathematics.

If math-verify cannot compare a gold answer with anything, every response to its task is graded as wrong. math-verify
runs in a child process, because one answer may keep it busy for hours: the kernel then ends the child, and the next
child continues after that answer.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from typing import Any

from windfall.envs.data.table import TableRow
from windfall.envs.dataset import read_split
from windfall.envs.process_pool.child_process import child_environment
from windfall.envs.process_pool.limits import OVER
from windfall.envs.scoring.extract import is_number
from windfall.errors import WindfallError

CHECK_S = 20.0
"""Time limit (seconds) for checking gold answers at the start of a run. Each answer takes milliseconds."""
SHOWN = 5


def check_answers(
    section: Any, evaluation: dict[str, Any] | None = None, *, limit_s: float = CHECK_S, cpu_s: float = 5.0
) -> int:
    """Raise if math-verify cannot compare a gold answer with anything, so that no response could be right.

    `section` is a section of windfall.recipe with data; `evaluation` names a separate data set (hosting.py). Distinct
    answers are checked for up to `limit_s`. The others are checked when they are scored; a bad one is an error then,
    never a zero. Returns the number of checked answers.
    """
    if "math" not in (section.rewards if section.name == "dataset" else []):
        return 0
    split = read_split(section, evaluation)
    places: dict[str, TableRow] = {}
    for row in (*split.train, *split.evaluation):
        if not is_number(row.answer):
            places.setdefault(row.answer, row)
    # Sorted by hash: if there is not enough time for all, the checked ones are a fair sample.
    golds = sorted(places, key=lambda gold: hashlib.blake2b(gold.encode(), digest_size=8).digest())
    reasons, began = list[str](), time.monotonic()
    while len(reasons) < len(golds) and (left_s := limit_s - (time.monotonic() - began)) > 0:
        reasons += _reasons(golds[len(reasons) :], cpu_s, left_s)
    if any(reasons):
        raise _error({gold: why for gold, why in zip(golds, reasons, strict=False) if why}, places, len(reasons))
    return len(reasons)


def _reasons(golds: list[str], cpu_s: float, timeout_s: float) -> list[str]:
    """For as many answers as one child could check, in order: why the answer cannot be scored, or ''."""
    command = [sys.executable, "-W", "ignore", "-c", "from windfall.envs.scoring.math_answer import check; check()"]
    request = json.dumps({"golds": golds, "cpu_s": cpu_s}).encode()
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, env=child_environment(strict=True), stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        out, err = child.communicate(request, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        return [json.loads(line) for line in out.splitlines(keepends=True) if line.endswith(b"\n")]
    reasons = [json.loads(line) for line in out.splitlines()]
    if child.returncode == -OVER:
        return [*reasons, f"comparing it takes more than {cpu_s:g} s of CPU time"]
    if child.returncode:
        output = err.decode(errors="replace").strip().splitlines()[-3:]
        at = f" at {golds[len(reasons)]!r}" if len(reasons) < len(golds) else " after the last answer"
        what = f"the check of the right answers ended with status {child.returncode}{at}"
        raise WindfallError(what, where="env.rewards", fix="\n".join(output))
    return reasons


def _error(bad: dict[str, str], places: dict[str, TableRow], checked: int) -> WindfallError:
    rows = sorted(((places[gold], gold, why) for gold, why in bad.items()), key=lambda b: (str(b[0].file), b[0].line))
    shown = [f"{row.file}:{row.line}: {gold[:60]!r}: {why}" for row, gold, why in rows[:SHOWN]]
    more = [f"and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
    return WindfallError(
        "\n  ".join([f"{len(bad)} of {checked} right answers cannot be scored as mathematics:", *shown, *more]),
        where="env.rewards",
        fix='Set env.rewards = ["exact"] to compare text, or correct or remove these lines.',
    )
