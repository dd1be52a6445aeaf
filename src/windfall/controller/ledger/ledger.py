"""Holds every token of every open response exactly once, who generates the next one, and what was rejected. Pure.

    response:  QUEUED ⇄ RUNNING ▶ TURN ▶ closed        TURN: a turn has ended and the environment is asked; if it
                 ▲                  │                   returns an observation, the response is QUEUED again
                 └──────────────────┘

Rules, all in `check()`:
- A position is accepted once and in order, from the worker that holds the response. Its version is the one that the
  response was assigned with or, if the worker has reported that it swapped in new weights, a newer one within the
  window. A response with a fixed version (`Episode.version`) accepts only that one.
- Every assignment has its own handle. Tokens for a handle that has ended are counted, and change nothing else.
- Every policy has its own queue, window and vocabulary. A frame says the version of each policy whose tokens it has.
- A response that lost its worker keeps its tokens, and is queued before responses that have not begun. So are those
  with a fixed version.
- No accepted token is ever lost: accepted = in open responses + closed + withdrawn + discarded (`LedgerCounts`).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Literal

from windfall.controller.ledger.episode import Episode, Malformed, check_end
from windfall.link.messages import Tokens, columns, expert_columns
from windfall.types import Finish

EntryState = Literal["queued", "running", "turn"]
MAX_LOST_IN_A_ROW = 12
"""A response is fatal after this many workers in a row were lost before they generated one token of it."""
MIN_LOST_NAMES = 3
"""At least this many of them must be different workers: a single worker may just keep reconnecting."""
UNLIMITED = 1 << 32
"""Size of a vocabulary that is not known."""
MAX_ENDED_HANDLES = 1 << 16
"""Number of ended handles that are remembered, to classify late tokens. Tokens for an older handle count as late."""


ExpertRows = list[tuple[int, memoryview]]
"""See link.messages.expert_columns."""


@dataclass(slots=True)
class LedgerCounts:
    """What the ledger counted over a run, in tokens unless the name says otherwise."""

    accepted: int = 0
    closed: int = 0
    withdrawn: int = 0
    repeated: int = 0
    """Tokens that had been accepted before: a frame arrived twice."""
    late: int = 0
    """Tokens that arrived from a worker after their response was reassigned or given up."""
    unwanted: int = 0
    """Tokens of canceled responses."""
    gaps: int = 0
    """Frames, not tokens, that did not continue at the next position. The response is requeued from its last token."""
    stale: int = 0
    """Tokens of a version that is not allowed for the response."""
    moved: int = 0
    """Responses that lost their worker and continued elsewhere."""
    discarded: int = 0
    """Tokens that were accepted, then discarded: with their lost worker, if there is no migration, or because their
    turn was cut short."""
    prefilled_again: int = 0
    """Tokens, prompts included, that had to be prefilled again because a response moved."""


@dataclass(slots=True)
class Acceptance:
    """What the ledger accepted of one frame."""

    tokens: int = 0
    """Number of accepted tokens."""
    tokens_of: Counter[str] = field(default_factory=Counter)
    """The same by policy, for policies with a name."""
    ended_turns: list[str] = field(default_factory=list)
    """Ids of the responses whose turn ended."""
    dropped: list[int] = field(default_factory=list)
    """Handles that the worker should cancel: their responses continue elsewhere."""
    complete: bool = True
    """Every token of the frame was accepted."""
    rows: list[int] = field(default_factory=list)
    """If not `complete`: the rows of the frame that were accepted."""


@dataclass(slots=True)
class LedgerEntry:
    """An open response, and its assignment to a worker if it has one."""

    episode: Episode
    policy: str = ""
    number: int = 0
    """Responses that were opened earlier have a lower one."""
    state: EntryState = "queued"
    handle: int = -1
    worker: str = ""
    last_worker: str = ""
    version: int = -1
    recorded: int = 0
    """Number of tokens whose version is recorded in `episode.version_runs`. Later tokens have `version`."""
    moves: int = 0
    moved: bool = False
    """The response lost its last worker in this turn, so the next worker has to prefill it again."""
    lost_in_a_row: int = 0
    """Number of workers in a row that were lost before they generated one token of this response."""
    lost_names: frozenset[str] = frozenset()
    """Names of these workers. A worker that reconnects has another id and the same name."""


class Ledger:
    def __init__(self, vocabulary: int = UNLIMITED, *, migrate: bool = True) -> None:
        """`vocabulary`: of the policy without a name."""
        self.vocabularies, self._migrate = {"": vocabulary}, migrate
        """By policy: token ids are below this number."""
        self.entries: dict[str, LedgerEntry] = {}
        self.queues: defaultdict[str, deque[str]] = defaultdict(deque)
        """By policy: the ids of the responses that wait for a worker."""
        self.running_of: Counter[str] = Counter()
        """By policy: number of responses that run."""
        self.counts = LedgerCounts()
        self._running: dict[int, LedgerEntry] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()
        """The newest ended handles, and how they ended: moved, canceled or finished."""
        self._by_worker: dict[str, dict[int, LedgerEntry]] = {}
        self._context: dict[str, int] = {}
        self._next_handle = self._opened = 0
        self._stops: set[int] = set()
        """The stop tokens of all responses so far."""
        self._shortest = math.inf
        """Smallest `end` of any turn so far."""
        self.longest = 0
        """Largest room, in tokens, that any response so far needs (see `room`)."""
        self._windows: dict[str, range] = {}
        """By policy: the versions that tokens may have. None: only the version that a response is assigned with."""
        self.engines: dict[str, str] = {}
        """By worker: the name of its engine, for the tokens that it generates."""

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def queued(self) -> int:
        """Number of responses that wait for a worker."""
        return sum(map(len, self.queues.values()))

    def running(self, worker: str) -> int:
        """Number of responses that the worker runs."""
        return len(self._by_worker.get(worker, ()))

    def context(self, worker: str) -> int:
        """Tokens in the context of the worker's running responses, prompts included."""
        return self._context.get(worker, 0)

    def held(self, worker: str, policy: str | None = None) -> list[LedgerEntry]:
        """The responses that the worker runs, those of one policy or all."""
        held = self._by_worker.get(worker, {}).values()
        return [entry for entry in held if policy is None or entry.policy == policy]

    def held_with(self, worker: str, handle: int) -> LedgerEntry | None:
        """The response that the worker has under this handle, if it has one."""
        return self._by_worker.get(worker, {}).get(handle)

    def open(self, episode: Episode) -> None:
        """Add a response with the tokens it already has: it may have begun earlier."""
        if episode.id in self.entries:
            raise ValueError(f"{episode.id} is already open")
        self._opened += 1
        entry = LedgerEntry(episode, episode.policy, self._opened, recorded=len(episode.tokens))
        self.entries[episode.id] = entry
        self._stops |= episode.stop
        self._shortest = min(self._shortest, episode.end)
        self.longest = max(self.longest, room(episode))
        self.counts.accepted += _generated(episode)
        self._enqueue(entry)

    def assign(self, id: str, worker: str, version: int) -> LedgerEntry:
        """Assign a response to a worker. The caller must have removed it from the queue."""
        entry = self.entries[id]
        assert entry.state == "queued" and entry.episode.finish is None, f"{id} is {entry.state}"
        self._next_handle += 1
        entry.state, entry.handle, entry.worker, entry.version = "running", self._next_handle, worker, version
        entry.recorded = len(entry.episode.tokens)
        self._running[entry.handle] = entry
        self.running_of[entry.policy] += 1
        self._by_worker.setdefault(worker, {})[entry.handle] = entry
        self._context[worker] = self.context(worker) + context_of(entry)
        if entry.moved:
            self.counts.moved += worker != entry.last_worker
            self.counts.prefilled_again += len(entry.episode.prompt) + len(entry.episode.tokens)
        return entry

    def set_window(self, policy: str, oldest: int, newest: int) -> dict[str, list[int]]:
        """From now on, tokens of this policy may have these versions. Its responses that are assigned with an older
        version are queued again. Returns the handles to cancel, by worker."""
        self._windows[policy] = range(oldest, newest + 1)
        handles: dict[str, list[int]] = {}
        for entry in list(self._running.values()):
            if entry.policy == policy and entry.version < oldest and entry.episode.version is None:
                handles.setdefault(entry.worker, []).append(entry.handle)
                self.requeue(entry)
        return handles

    def oldest_version(self, id: str) -> int | None:
        """The oldest version among the tokens of an open response; None if it has none."""
        entry = self.entries[id]
        versions = [version for version, _ in entry.episode.version_runs if version >= 0]
        if len(entry.episode.tokens) > entry.recorded:
            versions.append(entry.version)
        return min(versions, default=None)

    def sampled(self, id: str) -> int:
        """Number of tokens that the policy has sampled so far for an open response."""
        entry = self.entries[id]
        return _generated(entry.episode, entry.recorded)

    def accept(self, worker: str, frame: Tokens, *, loaded: Mapping[str, int] | None = None) -> Acceptance:
        """Take in a worker's tokens. If this raises Malformed, nothing was accepted. `loaded`: by policy, the version
        that the worker last reported as loaded, and the only one that it may have swapped in; None: any."""
        try:
            tokens, logprobs = columns(frame)
            width, experts = expert_columns(frame) if frame.experts else (0, [])
        except ValueError as e:
            raise Malformed(str(e)) from e
        vocabulary = min(self.vocabularies.get(policy, UNLIMITED) for policy in frame.by_policy)
        if tokens and max(tokens) >= vocabulary:
            raise Malformed(f"token id {max(tokens)} is outside the vocabulary of {vocabulary}")
        if logprobs and not (max(logprobs) <= 1e-3 and math.isfinite(sum(logprobs))):  # one NaN makes the sum NaN
            raise Malformed(f"invalid log-prob{self._owner_of_invalid(worker, frame, logprobs)}")
        held = self._by_worker.get(worker) or {}
        _check_experts(held, frame, width, experts)
        row_ends = list(accumulate(frame.counts or repeat(1, len(frame.handles))))
        entries = _expected_entries(held, frame)
        if entries is None:
            _check_policies(held, frame)
            if self._follow_swap(held, frame, loaded):
                entries = _expected_entries(held, frame)
        if entries is None:
            self._check_rows(held, frame, tokens, row_ends)
            return self._accept_rows(worker, frame, tokens, logprobs, width, experts)
        # Nearly every frame takes this path, mostly with one token per response. Its speed limits how many tokens per
        # second a controller can accept.
        self._check_ends(entries, frame, tokens, row_ends)
        if not frame.counts:
            for entry, token, logprob in zip(entries, tokens, logprobs, strict=True):
                episode = entry.episode
                episode.tokens.append(token)
                episode.logprobs.append(logprob)
        else:
            for entry, end, count in zip(entries, row_ends, frame.counts, strict=True):
                episode = entry.episode
                if count == 1:
                    episode.tokens.append(tokens[end - 1])
                    episode.logprobs.append(logprobs[end - 1])
                else:
                    episode.tokens.extend(tokens[end - count : end])
                    episode.logprobs.extend(logprobs[end - count : end])
        for entry, (start, data) in zip(entries, experts, strict=False):
            entry.episode.take_experts(start, data, width)
        self.counts.accepted += len(tokens)
        self._context[worker] = self.context(worker) + len(tokens)
        accepted = Acceptance(tokens=len(tokens), rows=list(range(len(entries))))
        for entry, count in zip(entries, frame.counts or repeat(1), strict=False) if frame.versions else ():
            accepted.tokens_of[entry.policy] += count
        for row in sorted(frame.finished):
            self._end_turn(entries[row], frame.finished[row])
            accepted.ended_turns.append(entries[row].episode.id)
        return accepted

    def _follow_swap(self, held: dict[int, LedgerEntry], frame: Tokens, loaded: Mapping[str, int] | None) -> bool:
        """The worker may have swapped in newer versions of the windows. If so, the next tokens of its responses have
        these versions. Returns whether anything has changed."""
        newer = {
            policy: version for policy, version in frame.by_policy.items()
            if version in self._windows.get(policy, ()) and (loaded is None or loaded.get(policy) == version)
        }  # fmt: skip
        behind = [e for h in frame.handles if (e := held.get(h)) and e.version < newer.get(e.policy, -1)]
        behind = [e for e in behind if e.episode.version is None]
        for entry in behind:
            self._record_version(entry)
            entry.version = newer[entry.policy]
        return bool(behind)

    def _owner_of_invalid(self, worker: str, frame: Tokens, logprobs: array[float]) -> str:
        """Name the response that has the first invalid log-prob."""
        bad = next((i for i, x in enumerate(logprobs) if not -math.inf < x <= 1e-3), 0)
        row = next(
            (r for r, end in enumerate(accumulate(frame.counts or repeat(1, len(frame.handles)))) if bad < end), 0
        )
        entry = self._by_worker.get(worker, {}).get(frame.handles[row])
        return f", in {entry.episode.id}" if entry else ""

    def _accept_rows(
        self, worker: str, frame: Tokens, tokens: array[int], logprobs: array[float], width: int, experts: ExpertRows
    ) -> Acceptance:
        """Accept row by row, because some rows do not continue at the next position, or a response occurs twice."""
        held = self._by_worker.get(worker) or {}
        accepted, counts, at = Acceptance(), frame.counts, 0
        versions, finished, positions = frame.by_policy, frame.finished, frame.positions
        for row, handle in enumerate(frame.handles):
            count = counts[row] if counts else 1
            entry = held.get(handle)
            version = versions[entry.policy] if entry is not None else -1
            if entry is None or entry.version != version or positions[row] != len(entry.episode.tokens):
                accepted.complete = False
                skip = self._tokens_to_skip(entry, handle, positions[row], count, version, accepted)
                if skip == count:
                    at += count
                    continue
            else:
                skip = 0
            episode = entry.episode  # type: ignore[union-attr]
            episode.tokens.extend(tokens[at + skip : at + count])
            episode.logprobs.extend(logprobs[at + skip : at + count])
            if experts:
                episode.take_experts(*experts[row], width)
            self._context[worker] += count - skip
            accepted.tokens += count - skip
            if frame.versions:
                accepted.tokens_of[entry.policy] += count - skip  # type: ignore[union-attr]
            at += count
            accepted.rows.append(row)
            if row in finished:
                self._end_turn(entry, finished[row])  # type: ignore[arg-type]
                accepted.ended_turns.append(episode.id)
        self.counts.accepted += accepted.tokens
        return accepted

    def _check_ends(self, entries: list[LedgerEntry], frame: Tokens, tokens: array[int], row_ends: list[int]) -> None:
        """Raise Malformed for a wrong or missing finish reason. It can occur only in a row with a finish reason, a stop
        token or the last allowed token."""
        doubtful = set(frame.finished)
        if not self._stops.isdisjoint(tokens):
            stops = self._stops
            doubtful.update(bisect_right(row_ends, at) for at, token in enumerate(tokens) if token in stops)
        if max(frame.positions) + max(frame.counts, default=1) >= self._shortest:
            doubtful.update(range(len(entries)))
        for row in sorted(doubtful):
            check_end(entries[row].episode, frame, row, tokens, row_ends[row])

    def _check_rows(self, held: dict[int, LedgerEntry], frame: Tokens, tokens: array[int], row_ends: list[int]) -> None:
        """The same check for those rows whose response this worker holds."""
        versions = frame.by_policy
        for row, (handle, position) in enumerate(zip(frame.handles, frame.positions, strict=True)):
            entry = held.get(handle)
            if entry is not None and entry.version == versions[entry.policy]:
                if position < 0:
                    raise Malformed(f"{entry.episode.id}: a token at position {position}")
                check_end(entry.episode, frame, row, tokens, row_ends[row])

    def _tokens_to_skip(
        self, entry: LedgerEntry | None, handle: int, position: int, count: int, version: int, accepted: Acceptance
    ) -> int:
        """How many of a row's `count` tokens to skip. Each of them is counted."""
        c = self.counts
        if entry is None:
            how = self._ended.get(handle)
            if how == "canceled":
                c.unwanted += count
            elif how == "finished":
                c.repeated += count
            else:
                c.late += count
            return count
        if version < entry.version and position + count <= entry.recorded:
            c.repeated += count
            return count
        if entry.version != version:
            c.stale += count
            accepted.dropped.append(handle)
            self.requeue(entry)
            return count
        have = len(entry.episode.tokens)
        if position > have:
            c.gaps += 1
            accepted.dropped.append(handle)
            self.requeue(entry)
            return count
        old = min(count, have - position)
        c.repeated += old
        return old

    def _end_turn(self, entry: LedgerEntry, finish: Finish) -> None:
        self._end_assignment(entry, "finished")
        entry.state = "turn"
        entry.episode.finish = finish

    def _end_assignment(self, entry: LedgerEntry, how: str = "moved") -> None:
        self._record_version(entry)
        del self._running[entry.handle], self._by_worker[entry.worker][entry.handle]
        self.running_of[entry.policy] -= 1
        self._context[entry.worker] -= context_of(entry)
        self._ended[entry.handle] = how
        if len(self._ended) > MAX_ENDED_HANDLES:
            self._ended.popitem(last=False)
        entry.handle, entry.worker, entry.last_worker = -1, "", entry.worker

    def _record_version(self, entry: LedgerEntry) -> None:
        count = len(entry.episode.tokens) - entry.recorded
        entry.episode.record(count, entry.version, self.engines.get(entry.worker, ""), entry.worker)
        entry.recorded += count

    def requeue(self, entry: LedgerEntry) -> None:
        """Take a running response from its worker and queue it for another one."""
        self._end_assignment(entry)
        entry.moves += 1
        entry.moved = True
        self._enqueue(entry)

    def _enqueue(self, entry: LedgerEntry) -> None:
        entry.state = "queued"
        if entry.episode.finish is not None:
            entry.state = "turn"
        elif entry.episode.tokens or entry.episode.version is not None:  # training waits for an evaluation
            self.queues[entry.policy].appendleft(entry.episode.id)
        else:
            self.queues[entry.policy].append(entry.episode.id)

    def release(self, worker: str) -> None:
        """The worker is gone. Queue its responses again, each with every token it has."""
        for entry in reversed(self.held(worker)):
            if len(entry.episode.tokens) == entry.recorded:
                entry.lost_in_a_row += 1
                entry.lost_names |= {worker.partition("#")[0]}
            else:
                entry.lost_in_a_row = 0
                entry.lost_names = frozenset()
            self.requeue(entry)
            if not self._migrate:
                self._discard(entry, entry.episode.turn_start)
        self._by_worker.pop(worker, None)
        self._context.pop(worker, None)
        self.engines.pop(worker, None)

    def cut(self, id: str, length: int) -> dict[str, list[int]]:
        """End the turn of an open response after its first `length` tokens, and discard the later ones. Only tokens of
        this turn can be discarded. Returns the handles to cancel, by worker."""
        entry = self.entries[id]
        assert entry.episode.turn_start <= length <= len(entry.episode.tokens), f"{id} cannot be cut to {length}"
        handles: dict[str, list[int]] = {}
        if entry.state == "running":
            handles[entry.worker] = [entry.handle]
            self._end_assignment(entry, "canceled")
        elif entry.state == "queued":
            self.queues[entry.policy].remove(id)
        self._discard(entry, length)
        entry.state, entry.episode.finish = "turn", "stop"
        return handles

    def _discard(self, entry: LedgerEntry, length: int) -> None:
        """Discard the tokens after the first `length`, which the policy sampled in this turn."""
        self.counts.discarded += entry.episode.cut(length)
        entry.recorded = len(entry.episode.tokens)

    def find_fatal(self, entries: Iterable[LedgerEntry]) -> LedgerEntry | None:
        """Return one of these responses, which have just lost their worker, if it is fatal to workers; None if none is.
        With fewer than MIN_LOST_NAMES different workers, far more losses are required."""
        for entry in entries:
            limit = MAX_LOST_IN_A_ROW if len(entry.lost_names) >= MIN_LOST_NAMES else MIN_LOST_NAMES * MAX_LOST_IN_A_ROW
            if entry.lost_in_a_row >= limit:
                return entry
        return None

    def next_turn(self, id: str) -> None:
        """Queue the response again: the environment has returned an observation."""
        entry = self.entries[id]
        assert entry.state == "turn" and entry.episode.finish is None, f"{id} is {entry.state}"
        entry.recorded, entry.moved = len(entry.episode.tokens), False
        self._shortest = min(self._shortest, entry.episode.end)
        self.longest = max(self.longest, room(entry.episode))  # a turn may have another limit than the one before
        self._enqueue(entry)

    def close(self, id: str) -> None:
        """Remove a response that is finished and part of its group."""
        entry = self.entries.pop(id)
        assert entry.state == "turn", f"{id} is {entry.state}"
        self.counts.closed += _generated(entry.episode)

    def withdraw(self, ids: Iterable[str]) -> dict[str, list[int]]:
        """Remove responses that the run no longer needs. Returns the handles to cancel, by worker."""
        handles, removed = dict[str, list[int]](), dict[str, set[str]]()
        for id in ids:
            entry = self.entries.pop(id, None)
            if entry is None:
                continue
            removed.setdefault(entry.policy, set()).add(id)
            if entry.state == "running":
                handles.setdefault(entry.worker, []).append(entry.handle)
                self._end_assignment(entry, "canceled")
            self.counts.withdrawn += _generated(entry.episode)
        for policy, ids in removed.items():
            self.queues[policy] = deque(i for i in self.queues[policy] if i not in ids)
        return handles

    def lost_tokens(self) -> int:
        """Number of accepted tokens that are in no response. This is always 0."""
        return self._lost(sum(_generated(e.episode, e.recorded) for e in self.entries.values()))

    def _lost(self, open_tokens: int) -> int:
        return self.counts.accepted - open_tokens - self.counts.closed - self.counts.withdrawn - self.counts.discarded

    def check(self) -> None:
        """Raise AssertionError if a rule above is broken. Tests call it after every callback of a loop: one pass."""
        queued, running = set[tuple[str, str]](), dict[int, LedgerEntry]()
        contexts, policies = dict.fromkeys(self._by_worker, 0), dict[str, int]()
        open_tokens = 0
        for id, e in self.entries.items():
            episode, state = e.episode, e.state
            n = len(episode.tokens)
            if state == "queued":
                queued.add((e.policy, id))
            elif state == "running":
                running[e.handle] = e
                contexts[e.worker] = contexts.get(e.worker, 0) + len(episode.prompt) + n
                policies[e.policy] = policies.get(e.policy, 0) + 1
                window = self._windows.get(e.policy, ())
                in_window = not window or e.version in window or e.version == episode.version
                assert in_window, f"{id}: assigned with version {e.version}, not in the window"
            recorded = sampled = named = 0
            for version, count in episode.version_runs:
                recorded += count
                sampled += count if version >= 0 else 0
                allowed = episode.version is None or version in (-1, episode.version)
                assert allowed, f"{id}: tokens of another version than {episode.version}"
            for _, count in episode.engine_runs:
                named += count
            open_tokens += sampled + n - e.recorded
            assert n == len(episode.logprobs) <= episode.max_tokens, f"{id}: wrong lengths"
            assert recorded == e.recorded <= n, f"{id}: wrong versions"
            assert (episode.finish is not None) == (state == "turn"), f"{id} is {state}"
            assert named <= sampled, f"{id}: {named} tokens have an engine"
            assert state == "running" or recorded == n, f"{id}: tokens without a version"
        assert self._lost(open_tokens) == 0, f"{self._lost(open_tokens)} tokens lost: {self.counts}"
        waiting = [(policy, id) for policy, queue in self.queues.items() for id in queue]
        assert len(waiting) == len(set(waiting)), "a response is queued twice"
        assert queued == set(waiting), "queues and entries disagree"
        assert running == self._running, "the running responses and their handles disagree"
        assert sum(map(len, self._by_worker.values())) == len(running), "workers hold responses that do not run"
        held = all(self._by_worker.get(e.worker, {}).get(handle) is e for handle, e in running.items())
        assert held, "a running response is not held by its worker"
        assert {policy: n for policy, n in self.running_of.items() if n} == policies, "wrong counts of running ones"
        assert not any(handle in self._ended for handle in running), "a handle has ended and is running"
        assert all(self.context(worker) == tokens for worker, tokens in contexts.items()), "wrong sums of contexts"


def _expected_entries(held: dict[int, LedgerEntry], frame: Tokens) -> list[LedgerEntry] | None:
    """The entries of the rows. None unless every row continues its response and no response is in the frame twice."""
    try:
        entries = [held[handle] for handle in frame.handles]
    except KeyError:
        return None
    usual = (
        {(entry.policy, entry.version) for entry in entries} <= frame.by_policy.items()
        and tuple([len(entry.episode.tokens) for entry in entries]) == frame.positions
        and len(set(frame.handles)) == len(entries) > 0
    )
    return entries if usual else None


def _check_experts(held: dict[int, LedgerEntry], frame: Tokens, width: int, experts: ExpertRows) -> None:
    """Raise Malformed if chosen experts do not belong to the responses of their rows."""
    for handle, (start, _) in zip(frame.handles, experts, strict=False):
        if (entry := held.get(handle)) is not None:
            e = entry.episode
            if start < -len(e.prompt) or (e.experts is not None and e.experts.width != width):
                raise Malformed(f"{e.id}: experts of tokens from {start} on, {width} bytes for each")


def _check_policies(held: dict[int, LedgerEntry], frame: Tokens) -> None:
    """Raise Malformed if the frame does not say the version of a policy whose tokens it has."""
    for handle in frame.handles:
        if (entry := held.get(handle)) is not None and entry.policy not in frame.by_policy:
            raise Malformed(f"{entry.episode.id}: tokens of policy {entry.policy!r} without its version")


def room(episode: Episode) -> int:
    """Tokens that a worker must have room for to generate this response, from whatever position it continues."""
    return len(episode.prompt) + episode.max_tokens


def context_of(entry: LedgerEntry) -> int:
    """Tokens of its context, prompt included."""
    return len(entry.episode.prompt) + len(entry.episode.tokens)


def _generated(episode: Episode, recorded: int | None = None) -> int:
    """Tokens that the policy sampled: those with a recorded version, and those of the current assignment."""
    sampled = sum(count for version, count in episode.version_runs if version >= 0)
    return sampled + (0 if recorded is None else len(episode.tokens) - recorded)
