"""A small sample of responses, for the page: samples.jsonl in the run's folder, one response per line.

    stream ──finished response──▶ ResponseSampler.offer   keeps a few per step: half of them moved, if any did
    step event ──▶ ResponseSampler.take ──▶ SampleFile.write   in a thread: decodes every token and appends the lines

Rules: at most `log.samples` responses per step, MAX_TOKENS tokens of each, and `log.samples_mb` in all. When the file
is full, every second step in it is removed. `log.samples = 0` writes nothing. Which responses are kept depends only on
their ids, not on their reward or their speed, so the sample is fair except for the share of moved ones.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import xxhash

from windfall import run_folder as folders
from windfall.models.tool_calls import parse
from windfall.types import Response, Task

FILE = "samples.jsonl"
MAX_TOKENS = 4096
MAX_PROMPT_CHARS = 20_000
MAX_INDEX = 5000
"""Upper limit for the samples that the page lists: the newest."""
INDEX_FIELDS = ("step", "t", "id", "task", "reward", "finish", "length", "turns", "tools", "moved", "oldest")
MAX_LINE = 8 << 20
MAX_SEGMENTS, MAX_CALLS = 16, 200
JOURNAL = "journal"
"""Shown as the worker of tokens that a restart read from the journal."""


@dataclass(frozen=True, slots=True)
class SampledResponse:
    task: Task
    response: Response

    @property
    def moved(self) -> bool:
        """Whether a worker continued a turn that another one had begun. The worker n1#2 is n1, connected again."""
        for segment in self.response.segments:
            makers = iter([worker.partition("#")[0] for worker, count in segment.workers for _ in range(count)])
            for start, end in turns(segment.sampled):
                if len(set(islice(makers, end - start)) - {""}) > 1:
                    return True
        return False


class ResponseSampler:
    """Chooses the sample of a step."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: dict[bool, list[tuple[int, SampledResponse]]] = {True: [], False: []}

    def offer(self, task: Task, response: Response) -> None:
        sample = SampledResponse(task, response)
        kept = self._kept[sample.moved]
        kept.append((xxhash.xxh3_64_intdigest(response.id.encode()), sample))
        kept.sort(key=itemgetter(0))
        del kept[self._size :]

    def take(self) -> list[SampledResponse]:
        """The sample since the last call."""
        moved, others = self._kept[True], self._kept[False]
        self._kept = {True: [], False: []}
        half = max(self._size // 2, self._size - len(others))
        chosen = moved[:half]
        return [sample for _, sample in chosen + others[: self._size - len(chosen)]]


def pieces(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each token. If several tokens share a character, the first has it and the others are empty.

    >>> pieces([0xC3, 0xA9, 0x41], lambda ids: bytes(ids).decode(errors="replace"))
    ['é', '', 'A']
    """
    out: list[str] = []
    n = 0
    while n < len(tokens):
        for width in range(1, 5):
            text = decode(list(tokens[n : n + width]))
            if "\N{REPLACEMENT CHARACTER}" not in text or n + width >= len(tokens):
                break
        else:
            width, text = 1, decode([tokens[n]])
        out += [text, *[""] * (min(width, len(tokens) - n) - 1)]
        n += width
    return out


def describe(
    sample: SampledResponse, step: int, t: float, decoder: Callable[[str], Callable[[list[int]], str]]
) -> dict[str, Any]:
    """A sample as a line of the file. An agent that edited its history, and a response of several roles, has further
    segments in `more`. `decoder`: the tokenizer of a role."""
    r, prompt = sample.response, sample.task.prompt
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)
    segments, left = [], MAX_TOKENS
    for segment in r.segments[:MAX_SEGMENTS]:
        segments.append(_segment(segment, decoder(segment.role), left))
        left = max(0, left - len(segment.tokens))
    first, *more = segments
    reward = r.reward
    if reward is None and r.rewards:  # those of its roles are among the scores
        reward = sum(x for _, x in r.rewards) / len(r.rewards)
    if r.agent:  # it has written its own prompts; that of the task says only what it was asked for
        prompt = first["prompt"]
    return {
        "step": step, "t": t, "id": r.id, "task": sample.task.id[:200], "reward": _finite(reward), "finish": r.finish,
        "length": r.sampled_count, "turns": r.turns, "tools": sum(len(s["calls"]) for s in segments),
        "moved": sample.moved, "oldest": r.oldest_version,
        "scores": [[n, _finite(x)] for n, x in (*r.scores, *r.rewards)[:16]],
        **first, "prompt": prompt[:MAX_PROMPT_CHARS], "more": more,
    }  # fmt: skip


def _segment(r: Response, decode: Callable[[list[int]], str], most: int) -> dict[str, Any]:
    """The first `most` tokens of a segment, and its tool calls as [position of the turn, name, arguments]."""
    shown = r.tokens[:most]
    by_token = [worker or JOURNAL for worker, count in r.workers for _ in range(count)]
    makers = iter(by_token)
    workers = [next(makers, JOURNAL) if sampled else "" for sampled in r.sampled[:most]]
    calls = [[start, *call] for start, end in turns(r.sampled[:most]) for call in _calls(r, start, end, decode)]
    return {
        "prompt": decode(list(r.prompt[:MAX_PROMPT_CHARS]))[:MAX_PROMPT_CHARS] if r.agent or r.role else "",
        "cut": len(r.tokens) - len(shown), "tokens": pieces(shown, decode), "versions": runs(r.versions[:most]),
        "logprobs": [_finite(x) for x in r.logprobs[:most]], "workers": runs(workers), "calls": calls[:MAX_CALLS],
        **({"role": r.role} if r.role else {}),
    }  # fmt: skip


def turns(sampled: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Start and end of every stretch of sampled tokens: the turns of the policy.

    >>> list(turns([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    at = 0
    for is_sampled, count in runs(sampled):
        if is_sampled:
            yield at, at + count
        at += count


def _calls(r: Response, start: int, end: int, decode: Callable[[list[int]], str]) -> Iterator[tuple[str, str]]:
    if r.agent:
        for call in parse(decode(list(r.tokens[start:end])), None).tool_calls:
            yield call.name[:200], call.arguments[:2000]


def _finite(value: float | None) -> float | None:
    return round(value, 3) if value is not None and math.isfinite(value) else None


def runs(values: Iterable[Any]) -> list[list[Any]]:
    """Consecutive equal values as [value, count].

    >>> runs("aab")
    [['a', 2], ['b', 1]]
    """
    return [[value, len(list(same))] for value, same in groupby(values)]


class SampleFile:
    """The file and its index. Threads may use it at the same time."""

    def __init__(self, folder: Path, max_mb: float = 64.0) -> None:
        self.path, self._max_bytes = folder / FILE, int(max_mb * 1e6)
        self._lock = threading.Lock()
        self._index: list[dict[str, Any]] = []
        self._indexed = 0
        """Bytes of the file that are in the index."""

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        with self._lock:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
            if self.path.stat().st_size > self._max_bytes:
                self._thin()

    def _thin(self) -> None:
        kept = [line for line in self.path.read_text("utf-8", errors="replace").splitlines() if _step(line) % 2 == 0]
        while sum(map(len, kept)) > self._max_bytes // 2 and kept:
            kept = kept[1::2]
        folders.replace(self.path, "".join(line + "\n" for line in kept))
        self._index, self._indexed = [], 0

    def index(self) -> list[dict[str, Any]]:
        """The newest samples without their tokens; `at` is where `read` finds the rest."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    file.seek(self._indexed)
                    while line := file.readline(MAX_LINE):
                        if not line.endswith(b"\n"):
                            break
                        entry = _parse(line)
                        if entry is not None:
                            self._index.append({k: entry.get(k) for k in INDEX_FIELDS} | {"at": self._indexed})
                        self._indexed += len(line)
            except OSError:  # there is no sample yet
                return []
            del self._index[:-MAX_INDEX]
            return list(self._index)

    def read(self, at: int) -> dict[str, Any] | None:
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    if at < 0 or at >= self._indexed:
                        return None
                    file.seek(at)
                    return _parse(file.readline(MAX_LINE))
            except OSError:
                return None


def _step(line: str) -> int:
    entry = _parse(line.encode())
    return int(entry["step"]) if entry else 1


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    valid = isinstance(entry, dict) and type(entry.get("step")) is int and isinstance(entry.get("tokens"), list)
    return entry if valid else None
