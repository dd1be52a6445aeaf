"""The workers of a run and their states. Decides which workers may get work and which are lost. No clock, no I/O.

    JOINING ▶ PULLING ▶ READY ⇄ PAUSED ▶ DRAINING ▶ GONE        every state may go straight to GONE
                 ▲────────┘  (a newer version)

Rules:
- Only a READY worker that is not suspect and holds a version in the window of a policy gets work of this policy.
- A worker without work pulls a new version in the state PULLING, unless it holds the newest version of another policy:
  then it stays READY for that one. With `on_new_weights = "interrupt"`, a worker with work stays READY and goes on
  generating while it pulls; its engine takes the new weights between two steps.
- A worker that is silent for `suspect_s` becomes suspect and gets no new work until its next message. A worker that is
  silent for `gone_s`, or has work but makes no engine step for `stalled_s`, is gone. So is a lender that has work and
  sends no token of it for `stalled_s`: it does not count the steps of its engine, which waits for its service, but it
  returns responses for which it has no time.
- A PULLING worker that receives no byte of the weights for `stalled_s` is stuck, even if it sends messages and retries;
  it is drained. Every received byte extends the deadline, and so does any time in which no process serves the weights
  (`extend_deadlines`). Building the engine and swapping in the weights have their own limits, which the worker
  enforces; LOADING_S applies to a worker that fails to do so.
- A worker that was asked to drain and is still connected after LEAVING_S is gone.
- GONE is final: a worker that comes back is a new worker with a new id.
- A stall of the controller itself counts against no worker: after a late tick every deadline is extended by the delay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Literal

from windfall.controller.workers.versions import PolicyVersions
from windfall.link.messages import Capacity, Stats
from windfall.types import Capabilities, Lease, is_local

LOADING_S = {"build": 960.0, "swap": 150.0}
"""Maximum seconds in these parts of a load: a little more than the worker's own limits (worker/worker_link.py)."""
LEAVING_S = 20.0
"""Maximum seconds from the Drain message until the worker has left; it should take 8 s at most."""
NEWEST = 0.5
"""Weight of the newest heartbeat in the share of time in which a device is contended."""


UNKNOWN_ENGINE = Capabilities()


class WorkerState(StrEnum):
    JOINING = "joining"
    PULLING = "pulling"
    READY = "ready"
    PAUSED = "paused"
    DRAINING = "draining"
    GONE = "gone"


_NEXT = {
    WorkerState.JOINING: {WorkerState.PULLING, WorkerState.DRAINING, WorkerState.GONE},
    WorkerState.PULLING: {WorkerState.READY, WorkerState.PULLING, WorkerState.DRAINING, WorkerState.GONE},
    WorkerState.READY: {WorkerState.PULLING, WorkerState.PAUSED, WorkerState.DRAINING, WorkerState.GONE},
    WorkerState.PAUSED: {WorkerState.READY, WorkerState.PULLING, WorkerState.DRAINING, WorkerState.GONE},
    WorkerState.DRAINING: {WorkerState.GONE},
    WorkerState.GONE: set(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a worker may be silent, and how often the controller checks."""

    suspect_s: float = 3.0
    """Seconds of silence after which a worker gets no new work."""
    gone_s: float = 8.0
    """Seconds of silence after which a worker is gone."""
    stalled_s: float = 60.0
    """Seconds without an engine step, or without a byte of the weights, after which a worker is given up."""
    tick_s: float = 0.25
    """Seconds between two checks."""


@dataclass(slots=True)
class PrefillCounts:
    """What the workers' prefix caches saved, over a run."""

    prefilled: int = 0
    """Tokens that were prefilled."""
    reused: int = 0
    """Tokens that were not prefilled, because they were in the KV cache."""
    lookups: int = 0
    """Responses and turns that were looked up in the prefix cache."""
    hits: int = 0
    """Those of them that found tokens there."""
    evictions: int = 0
    """Times that an engine evicted a running response from its KV cache."""
    kv_restored: int = 0
    """Tokens of such responses whose KV came back from host memory."""

    def add(self, before: Stats, now: Stats) -> None:
        """Add what a worker counted between two of its messages."""
        self.prefilled += max(0, now.prefilled - before.prefilled)
        self.reused += max(0, now.reused_tokens - before.reused_tokens)
        self.lookups += max(0, now.lookups - before.lookups)
        self.hits += max(0, now.hits - before.hits)
        self.evictions += max(0, now.evictions - before.evictions)
        self.kv_restored += max(0, now.kv_restored - before.kv_restored)


@dataclass(slots=True)
class DraftCounts:
    """What engines drafted, over a run."""

    generated: int = 0
    """Tokens that were generated."""
    drafted: int = 0
    """Tokens that were drafted and verified."""
    accepted: int = 0
    """Those of them that were right: each saved its response one step."""
    decode_s: float = 0.0
    undrafted_s: float = 0.0
    """Time of decode steps, and what their tokens would have taken without drafts, by estimate of the engines."""

    def add(self, before: Stats, now: Stats) -> None:
        """Add what a worker counted between two of its messages."""
        self.generated += max(0, now.made - before.made)
        self.drafted += max(0, now.drafted - before.drafted)
        self.accepted += max(0, now.accepted - before.accepted)
        self.decode_s += max(0.0, now.decode_s - before.decode_s)
        self.undrafted_s += max(0.0, now.undrafted_s - before.undrafted_s)

    def since(self, before: DraftCounts) -> DraftCounts:
        return DraftCounts(**{name: count - getattr(before, name) for name, count in asdict(self).items()})

    def describe(self) -> dict[str, float]:
        """Fields of an event or a snapshot. Nothing if nothing was drafted.

        >>> DraftCounts(generated=142, drafted=111, accepted=42, decode_s=2.0, undrafted_s=2.5).describe()
        {'drafted': 111, 'drafts_accepted': 42, 'tokens_per_step': 1.42, 'drafts_gain': 1.25}
        >>> DraftCounts(generated=100).describe()
        {}
        """
        if not self.drafted:
            return {}
        steps = max(1, self.generated - self.accepted)  # of single responses
        gain = {"drafts_gain": self.undrafted_s / self.decode_s} if self.decode_s else {}
        tokens_per_step = self.generated / steps
        return {"drafted": self.drafted, "drafts_accepted": self.accepted, "tokens_per_step": tokens_per_step, **gain}


@dataclass(slots=True)
class HeldPolicy:
    """What a worker has of a policy."""

    version: int = -1
    """The version that it holds."""
    digest: str = ""
    requested: tuple[int, str] = (-1, "")
    """Version and digest that it was last asked to load."""
    failed: int = 0
    """Failed loads in a row."""

    @property
    def pending(self) -> bool:
        """Whether it was asked for something that it does not hold yet."""
        return self.requested not in ((-1, ""), (self.version, self.digest))


@dataclass(slots=True, kw_only=True)
class Member:
    id: str
    name: str
    lease: Lease
    joined_s: float
    """When it joined (loop time, seconds)."""
    seen_s: float
    """When its last message arrived (loop time, seconds)."""
    engine: Capabilities = UNKNOWN_ENGINE
    """What its engine can do."""
    state: WorkerState = WorkerState.JOINING
    suspect: bool = False
    base: str = ""
    """The base that its engine is built for."""
    held: dict[str, HeldPolicy] = field(default_factory=lambda: {"": HeldPolicy()})
    """By policy that it is to hold: all that are on its base, or one of them if its engine holds no more."""
    slots: int = 0
    """Responses that it can run at once; 0 until it has been ready."""
    stats: Stats | None = None
    """Its last Stats message."""
    lends: bool = False
    """It serves requests of its own first, and lends the run what these leave (`windfall serve --lend`)."""
    capacity: Capacity | None = None
    """What a lender last reported that it can take; None for other workers."""
    able_s: float = -math.inf
    """When a lender last reported slots (loop time, seconds)."""
    in_use: bool = True
    """False for a lender from which the run does not borrow at the moment (controller/workers/borrowing.py)."""
    pulled_before: int = 0
    """Bytes of weights that it had received when its current load began, by its Stats."""
    pulls: str = ""
    """The policy of its current load, or the last one, by its Stats."""
    pull_started_s: float = 0.0
    """When its current pull began (loop time, seconds)."""
    progress_s: float = 0.0
    """When its current pull last made progress (loop time, seconds)."""
    drain_sent_s: float = math.inf
    """When it was asked to drain (loop time, seconds)."""
    longest: float = math.inf
    """Upper limit for the tokens, prompt and response together, that it has room for; infinite if unknown."""
    kv_tokens: int = 0
    """Tokens for which its KV cache has room; 0: not known, or it changes."""
    generated: int = 0
    """Tokens that the ledger accepted from it."""
    frame_versions: dict[str, int] = field(default_factory=dict)
    """By policy: the version of its last frame."""
    last_tokens_s: float = 0.0
    """When its last tokens arrived (loop time, seconds)."""
    moved: int = 0
    """Unfinished responses that it lost or released."""
    contended: float = 0.0
    """Share of about the last two heartbeats in which another job waited for its device or had it."""
    tok_per_s: float = 0.0
    """Tokens per second over the last second or more."""
    why: str = ""
    """Why it is gone or draining."""
    preempted: bool = False
    """Its machine was taken away, with or without a notice."""
    _rate_from: tuple[float, int] = field(default=(0.0, 0))
    _stats_s: float = 0.0
    """When its last Stats arrived (loop time, seconds)."""

    @property
    def local(self) -> bool:
        """Whether it is an engine of the trainer."""
        return is_local(self.name)

    @property
    def booted(self) -> bool:
        """Whether it has ever been ready."""
        return self.slots > 0

    @property
    def lendable(self) -> int:
        """Responses that it can run at once now: a lender takes fewer while its service needs the machine, and none
        before its first report."""
        return min(self.slots, self.capacity.slots if self.capacity else 0) if self.lends else self.slots

    @property
    def open_slots(self) -> int:
        """Responses that the run may have there at once."""
        return self.lendable if self.in_use else 0

    @property
    def first(self) -> HeldPolicy:
        """The first of its policies."""
        return next(iter(self.held.values()))

    @property
    def loading(self) -> bool:
        """Whether it has been asked for a version that it does not hold yet."""
        return any(map(self.loads, self.held.values()))

    def loads(self, held: HeldPolicy) -> bool:
        """The same for one of its policies."""
        return self.state is WorkerState.PULLING or (self.state is WorkerState.READY and held.pending)


@dataclass(frozen=True, slots=True)
class MemberChange:
    id: str
    what: Literal["suspect", "well", "gone", "stuck"]
    why: str = ""


class Members:
    def __init__(self, patience: Patience | None = None, *, remember: int = 1000) -> None:
        self.patience = patience or Patience()
        self.all: dict[str, Member] = {}
        """Workers that are here, and the newest of those that are gone, by id."""
        self._here: dict[str, Member] = {}
        self._gone: deque[str] = deque()
        self.lost = 0
        """Number of workers that were lost without draining."""
        self._remember = remember
        self._generation: dict[str, int] = {}
        """How often a worker of each name has joined."""
        self._ticked_s: float | None = None
        self.pull_s = 0.0
        """Seconds that the last pull took."""
        self.prefill = PrefillCounts()
        self.drafts = DraftCounts()

    def here(self) -> Iterator[Member]:
        return iter(self._here.values())

    @property
    def count(self) -> int:
        """Number of workers that are here."""
        return len(self._here)

    def join(
        self, name: str, lease: Lease, now_s: float, *, held: Mapping[str, tuple[int, str]] | None = None,
        base: str = "", policies: tuple[str, ...] = ("",), lends: bool = False,
    ) -> Member:  # fmt: skip
        """Adds a new member, even if a worker of this name was here before. `held`: versions and digests that it says
        it has. `policies`: those that it is to hold."""
        self._generation[name] = n = self._generation.get(name, 0) + 1
        id = name if n == 1 else f"{name}#{n}"
        if len(self._generation) > 100 * self._remember:
            del self._generation[next(iter(self._generation))]
        has = {policy: HeldPolicy(*(held or {}).get(policy, (-1, ""))) for policy in policies}
        member = Member(
            id=id, name=name, lease=lease, joined_s=now_s, seen_s=now_s, base=base, held=has, lends=lends,
            in_use=not lends, pulls=policies[0],
        )  # fmt: skip
        member._rate_from = (now_s, 0)
        self.all[id] = self._here[id] = member
        return member

    def move(self, id: str, state: WorkerState, why: str = "") -> None:
        member = self.all[id]
        assert state in _NEXT[member.state], f"{id}: {member.state} cannot become {state}"
        if state is WorkerState.GONE and member.state is not WorkerState.DRAINING:
            self.lost += 1
            member.preempted = True
        member.state = state
        member.why = why or member.why
        if state is WorkerState.GONE:
            member.suspect = False
            del self._here[id]
            self._gone.append(id)
            if len(self._gone) > self._remember:
                del self.all[self._gone.popleft()]

    def pull(self, id: str, now_s: float) -> None:
        self.move(id, WorkerState.PULLING)
        self.all[id].pull_started_s = self.all[id].progress_s = now_s

    def extend_deadlines(self, now_s: float, policy: str = "") -> None:
        """No process serves the weights of this policy at the moment, so workers that pull them are not expected to
        make progress."""
        for member in self.here():
            if policy in member.held:
                member.progress_s = now_s

    def loaded(self, id: str, version: int, digest: str, slots: int, s: float, policy: str = "") -> None:
        """A worker has loaded a version in `s` seconds. The first load includes building the engine, and local has the
        weights already; neither is used as a pull time."""
        member = self.all[id]
        if member.booted and not member.local and 0 <= s < math.inf:
            self.pull_s = s
        member.slots, held = slots, member.held[policy]
        held.version, held.digest, held.failed = version, digest, 0
        if member.state is WorkerState.PULLING:
            self.move(id, WorkerState.READY)

    def nearly_ready(self, now_s: float) -> list[Member]:
        """Workers that should be ready soon, judged by the duration of the last pull. Workers that have never been
        ready are not included, because their boot time is not known."""
        soon_s = max(0.5, 2 * self.pull_s)
        return [
            m for m in self._here.values()
            if m.state is WorkerState.PULLING and m.booted and not m.suspect and now_s - m.pull_started_s < soon_s
        ]  # fmt: skip

    def seen(self, id: str, now_s: float, stats: Stats | None = None) -> bool:
        """A message has arrived from a worker. Returns True if the worker was suspect until now."""
        member = self.all[id]
        member.seen_s = now_s
        if stats is not None:
            before, member.stats = member.stats, stats
            if before is not None:  # a worker sends its first Stats before it has any work from this controller
                self.prefill.add(before, stats)
                self.drafts.add(before, stats)
                share = (stats.contended_s - before.contended_s) / max(1e-3, now_s - member._stats_s)
                member.contended += NEWEST * (max(0.0, min(1.0, share)) - member.contended)
            member._stats_s = now_s
            if before is None or (before.pulled_bytes, _part(before)) != (stats.pulled_bytes, _part(stats)):
                member.progress_s = now_s
            since_s, generated = member._rate_from
            if now_s - since_s >= 1.0:
                member.tok_per_s = (member.generated - generated) / (now_s - since_s)
                member._rate_from = (now_s, member.generated)
        was_suspect, member.suspect = member.suspect, False
        return was_suspect

    def tick(self, now_s: float, running: Callable[[str], int] = lambda worker: 0) -> list[MemberChange]:
        """Called every `tick_s`. Returns the workers that became suspect, stuck or gone; the caller then calls `move`.
        `running`: the number of responses that a worker has."""
        p = self.patience
        late_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s - 2 * p.tick_s
        if late_s > 0:
            for member in self.here():  # no message could be received while the controller itself was stalled
                member.seen_s = min(now_s, member.seen_s + late_s)
                member.progress_s = min(now_s, member.progress_s + late_s)
                member.drain_sent_s += late_s
        self._ticked_s = now_s
        changes = []
        for member in self.here():
            silent_s = now_s - member.seen_s
            if silent_s >= p.gone_s:
                changes.append(MemberChange(member.id, "gone", f"silent for {silent_s:.1f} s"))
            elif member.stats is not None and member.stats.idle_s >= p.stalled_s:
                changes.append(MemberChange(member.id, "gone", f"no engine step for {member.stats.idle_s:.0f} s"))
            elif member.lends and late_s <= 0 and running(member.id) and now_s - member.last_tokens_s >= p.stalled_s:
                changes.append(MemberChange(member.id, "gone", f"no token for {now_s - member.last_tokens_s:.0f} s"))
            elif now_s - member.drain_sent_s >= LEAVING_S:
                why = f"asked to drain, and still connected after {LEAVING_S:g} s"
                changes.append(MemberChange(member.id, "gone", why))
            elif why := self._stuck(member, now_s):
                changes.append(MemberChange(member.id, "stuck", why))
            elif silent_s >= p.suspect_s and not member.suspect:
                member.suspect = True
                changes.append(MemberChange(member.id, "suspect", f"silent for {silent_s:.1f} s"))
        return changes

    def _stuck(self, member: Member, now_s: float) -> str:
        """Why the member's load is given up; empty if it may still complete."""
        if not member.loading or member.local:  # local gets its weights from the trainer
            return ""
        part = _part(member.stats) if member.stats is not None else ""
        still_s = now_s - member.progress_s
        if still_s < LOADING_S.get(part, self.patience.stalled_s):
            return ""
        doing = {"build": "it has been building its engine", "swap": "it has been swapping in the weights"}.get(part)
        loading = {policy: held for policy, held in member.held.items() if member.loads(held)}
        held = loading.get(member.pulls) or next(iter(loading.values()))
        version = held.requested[0]
        if doing:
            return f"{doing} for {still_s:.0f} s and is not ready with version {version}"
        failed = f", and {held.failed} attempts failed" if held.failed else ""
        return f"it has received no byte of version {version} for {still_s:.0f} s{failed}"

    def routable(self, versions: PolicyVersions) -> list[Member]:
        """Workers that may get work of this policy."""
        name, window = versions.name, versions.window
        return [
            m for m in self._here.values()
            if m.state is WorkerState.READY and not m.suspect
            and (held := m.held.get(name)) is not None and window.allows(held.version, held.digest)
        ]  # fmt: skip

    def outdated(self, versions: PolicyVersions, *, needed: bool, offered: Collection[str] = ()) -> list[Member]:
        """Workers that do not hold the newest version of this policy and should pull it: new workers at once, others if
        `needed`. A pull of a version that is allowed is not abandoned for a newer one while its weights are `offered`
        (digests; the newest two, if none are known)."""
        name, window, here = versions.name, versions.window, self._here.values()
        if not needed:
            return [m for m in here if m.state is WorkerState.JOINING and name in m.held]
        offered = offered or {d for v, d in window.digests.items() if v >= window.newest - 1}
        newest = (window.newest, window.digests.get(window.newest))
        idle = ((-1, ""), newest)
        out = []
        for m in here:
            held, ready = m.held.get(name), m.state is WorkerState.READY
            if held is None or (ready and held.requested in idle and (held.version, held.digest) == newest):
                continue  # nearly all of them
            if (
                m.state is WorkerState.JOINING
                or (ready and not window.is_newest(held.version, held.digest) and not m.loads(held))
                or (m.loads(held) and not (held.requested[1] in offered and window.allows(*held.requested)))
            ):
                out.append(m)
        return out

    def check(self) -> None:
        """Raise AssertionError if the recorded states contradict each other."""
        for id, m in self.all.items():
            assert id == m.id
            has = m.slots > 0 and any(held.version >= 0 for held in m.held.values())
            assert m.state is not WorkerState.READY or has, f"{id} is ready without a version"
            assert m.state is not WorkerState.GONE or not m.suspect, f"{id} is both gone and suspect"
            assert (m.state is not WorkerState.GONE) == (id in self._here) == (id not in self._gone), (
                f"{id} must be either here or gone"
            )


def _part(stats: Stats) -> str:
    """The part of the load if it does not wait for bytes; empty otherwise. A pull that starts again is no progress."""
    return stats.loading if stats.loading in LOADING_S else ""
