"""What the page of a run shows, computed from its events one at a time. Pure.

    event ──▶ RunHistory.add ──▶ timeline (timeline.py), series and evaluations of every policy (policy_series.py),
                                  money, advice, problems, moves
              RunHistory.full()                 everything, for a viewer that has just come
              RunHistory.changes()              what has changed since the last call, for viewers that have the rest

Rules: memory does not grow with the run. Lists of problems and moves keep the newest. Steps that a resume
made void are removed from the series, and their cost stays. An event whose fields have other types than windfall
writes is left out and counted: a page must open whatever is in the log. Time never goes back, also if the wall clock
is set (events/steady_time.py).
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from windfall.controller.cost.bill import borrowed_value, reserved_only
from windfall.events.steady_time import SteadyTime
from windfall.page.policy_series import PolicySeries, finite
from windfall.page.timeline import ABSENT, CODE, READY, STATES, TENTHS, TRAINER, Timeline, TimelineRow, clean
from windfall.run.views import long_responses, moved_weights
from windfall.run.views.policy_costs import PolicyCosts

Event = dict[str, Any]

MAX_PROBLEMS, MAX_MOVES, MAX_POLICIES = 200, 20_000, 64
PROBLEMS = {
    "worker_lost", "worker_stuck", "worker_suspect", "trainer_lost", "trainer_frozen", "load_failed", "no_workers",
    "no_room", "work_rejected", "engine_gap", "kv_dtype", "reward_missing", "task_skipped", "update_skipped", "refused",
    "checkpoint_damaged", "journal_lost", "log_gap", "chat_warning", "eval_warning", "sink_dropped",
    "source_dropped",
}  # fmt: skip
ALIVE = {
    "activity", "advice", "checkpoint", "eval", "plan", "rollout", "step", "train", "trainer_lost", "trainer_ready",
    "worker_lost", "worker_ready", "worker_suspect", "worker_well",
}  # fmt: skip
"""Events of a controller that has a trainer. The last one before a resume says how long the previous one lived."""
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading fields of other types raises."""
MAX_SENT_MOVES = 2000
MAX_TEXT = 400
"""Characters of a text from the log that the page shows."""


class RunHistory:
    def __init__(self) -> None:
        self.start_t: float | None = None
        """Wall time of the first event, in seconds."""
        self.end_t = 0.0
        self.number = 0
        """Number of events so far."""
        self.unreadable = 0
        """Events that were left out because their fields are not those of windfall."""
        self._time = SteadyTime()
        self.timeline = Timeline()
        self.policies = {"": PolicySeries()}
        """By name. A run with [policies] has only those with a name."""
        self.problems: deque[dict[str, Any]] = deque(maxlen=MAX_PROBLEMS)
        self.moves: deque[tuple[float, str, str, int]] = deque(maxlen=MAX_MOVES)
        """(seconds, from, to, responses)"""
        self.moves_seen = 0
        self.advice: dict[str, dict[str, Any]] = {}
        self.costs = PolicyCosts()
        self.notes: list[str] = []
        """Sentences about the last step."""
        self._weights: dict[str, str] = {}
        """By policy: a sentence about the last version."""
        self.facts: dict[str, Any] = {}
        """The fields of the event `start`."""
        self.step = self.lost = 0
        """The last step; the number of workers that were lost."""
        self.ended: dict[str, Any] | None = None
        """The event `end`."""
        self._losses: dict[str, int] = {}
        """By row: when its worker was lost last (tenths of a second)."""
        self._alive_t: float | None = None
        """Time of the last event that only a controller with a trainer writes, in seconds."""
        self._trainers: set[str] = set()
        """Policies whose trainer the present controller has seen, and not lost."""
        self._sent: dict[str, bytes] = {}
        """The sections as of the last `changes`, encoded."""
        self._moves_sent = 0
        self._handlers: dict[str, Callable[[Event], None]] = {
            "start": self._start, "step": self._step, "eval": self._eval, "resumed": self._resumed,
            "worker_joined": self._joined, "worker_ready": self._ready, "worker_suspect": self._suspect,
            "worker_well": self._well, "worker_lost": self._gone, "worker_left": self._gone, "activity": self._activity,
            "train": self._train, "checkpoint": self._checkpoint, "advice": self._advise, "end": self._end,
            "trainer_ready": self._trainer_ready, "trainer_lost": self._trainer_lost, "worker_warned": self._warned,
            "weights": self._moved,
        }  # fmt: skip

    def add(self, event: Event) -> None:
        self.number += 1
        try:
            t = self._time.at(float(event["t"]), float(event["m"]))
            self._add(event if t == event["t"] else {**event, "t": t})
        except UNREADABLE:  # another version of windfall, or another program
            self.unreadable += 1

    def _add(self, event: Event) -> None:
        t, name = event["t"], event["name"]
        if self.start_t is None:
            self.start_t = t
        self.end_t = max(self.end_t, t)
        if name in PROBLEMS:
            self.problems.append({"t": self._seconds(t), "name": name, **_short(event)})
        with suppress(msgspec.ValidationError):  # a bill of another version of windfall
            self.costs.add(event)
        handler = self._handlers.get(name)
        if handler is not None:
            handler(event)
        if name in ALIVE:
            self._alive_t = t

    @property
    def shift_s(self) -> float:
        """What to add to a wall time of now to get the time of the page: not 0 after the wall clock was set."""
        return self._time.shift_s

    @property
    def simulated(self) -> bool:
        """Whether a simulation wrote the log. It predicts times and costs, and learns nothing."""
        return self.facts.get("device") == "simulated"

    def _seconds(self, t: float) -> float:
        return round(max(0.0, t - (self.start_t or t)), 2)

    def _tenths(self, t: float) -> int:
        return round((t - (self.start_t or t)) * TENTHS)

    # The run.

    def _start(self, e: Event) -> None:
        self.facts = _short(e, limit=64) | {key: finite(e.get(key)) for key in ("parameters", "steps")}
        self.ended = None

    def _resumed(self, e: Event) -> None:
        self.step, self.ended = e["step"], None
        # A new controller; otherwise the workers have gone on without this trainer.
        if e.get("policy", "") in self._trainers:
            self.timeline.absent(self._tenths(self._alive_t if self._alive_t is not None else e["t"]))
            self._losses.clear()
            self._trainers.clear()
        self._policy(e).fall_back(e["step"])

    def _policy(self, e: Event) -> PolicySeries:
        name = e.get("policy", "")
        if name not in self.policies:
            if len(self.policies) >= MAX_POLICIES:
                raise ValueError("too many policies")
            self.policies.pop("", None)
            self.policies[clean(name, 64)] = PolicySeries()
        return self.policies[name]

    def _end(self, e: Event) -> None:
        self.ended = {"step": e.get("step"), "finished": bool(e.get("finished"))}
        self.timeline.absent(self._tenths(e["t"]))

    # Series.

    def _step(self, e: Event) -> None:
        if e["kind"] != "scalar":
            return
        policy, self.step = self._policy(e), e["step"]
        policy.add(e, self._seconds(e["t"]), self.costs.since_shown(e.get("policy", "")), simulated=self.simulated)
        notes = (long_responses.drafts(e), long_responses.predicted(e.get("predicted") or {}), *self._weights.values())
        self.notes = [clean(note, MAX_TEXT) for note in notes if note]

    def _moved(self, e: Event) -> None:
        whose = f" of {e['policy']}" if e.get("policy") else ""
        moved = moved_weights.of_version(e)
        self._weights[whose] = f"weights{whose}: {moved}" if moved else ""

    def _eval(self, e: Event) -> None:
        if e["kind"] == "scalar" and not self.simulated:
            reward, graded, responses = (finite(e.get(key)) for key in ("reward", "graded", "responses"))
            self._policy(e).evals.append((e.get("step", 0), self._seconds(e["t"]), reward, graded, responses))
        elif e["kind"] == "span":
            self._trained(e, finite(e.get("s")) or 0.0, "evaluating")

    def _train(self, e: Event) -> None:
        # What it trained on while groups were missing was interleaved with waits; it is drawn in one piece at the end.
        self._trained(e, (finite(e.get("s")) or 0.0) + (finite(e.get("early_s")) or 0.0), "training")

    def _checkpoint(self, e: Event) -> None:
        self._trained(e, finite(e.get("s")) or 0.0, "saving")

    def _trained(self, e: Event, s: float, what: str) -> None:
        """The trainer has done this for the last `s` seconds."""
        end = self._tenths(e["t"])
        self._trainer(e).paint(end - round(s * TENTHS), end, CODE[what])

    def _trainer(self, e: Event) -> TimelineRow:
        """The row of the policy's trainer."""
        return self.timeline.row(f"{TRAINER} {e['policy']}" if e.get("policy") else TRAINER)

    # Workers.

    def _joined(self, e: Event) -> None:
        row = self.timeline.row(e["worker"], newest=e["worker"])
        row.describe(_short(e, limit=64) | {"usd_per_h": finite(e.get("usd_per_h"))})
        age_s = max(0.0, float(finite(e.get("age_s")) or 0.0))
        start = self._tenths(e["t"] - age_s)
        if row.changes and row.changes[-1] >> 4 > start:
            start = self._tenths(e["t"])
        row.put(start, CODE["booting"])

    def _ready(self, e: Event) -> None:
        row, t = self.timeline.row(e["worker"]), self._tenths(e["t"])
        if row.state == CODE["booting"]:
            row.put(t, CODE["ready"])

    def _suspect(self, e: Event) -> None:
        self.timeline.row(e["worker"]).put(self._tenths(e["t"]), CODE["silent"])

    def _well(self, e: Event) -> None:
        self.timeline.row(e["worker"]).put(self._tenths(e["t"]), CODE["ready"])

    def _warned(self, e: Event) -> None:
        self.timeline.row(e["worker"]).put(self._tenths(e["t"]), CODE["draining"])

    def _gone(self, e: Event) -> None:
        row, t = self.timeline.row(e["worker"]), self._tenths(e["t"])
        self.lost += e["name"] == "worker_lost"
        if row.worker in ("", e["worker"]):  # otherwise it has joined again under a newer id
            if e["name"] == "worker_lost":
                row.put(t - 1, CODE["lost"])
                self._losses[row.name] = t
            row.put(t, ABSENT)

    def _activity(self, e: Event) -> None:
        now_s, lost, rows, code = e["t"] - (self.start_t or e["t"]), CODE["lost"], self.timeline.rows, CODE.get
        for worker, changes in (e.get("rows") or {}).items():
            row = rows.get(worker) or self.timeline.row(worker)
            for ago_s, bucket in changes:
                t = round((now_s - ago_s) * TENTHS)
                if not bucket and abs(t - self._losses.get(row.name, -TENTHS)) <= TENTHS and row.state != lost:
                    row.put(t - 1, lost)  # it was lost right after its last frame: no time is lost
                row.put(t, code(bucket, READY))
        for source, target, count, ago_s in e.get("moves") or ():
            self.moves.append((self._seconds(e["t"] - ago_s), clean(source, 64), clean(target, 64), int(count)))
            self.moves_seen += 1

    def _trainer_ready(self, e: Event) -> None:
        self._trainers.add(e.get("policy", ""))
        row = self._trainer(e)
        row.describe({"lease": "trainer", "pid": finite(e.get("pid"))})
        row.put(self._tenths(e["t"]), CODE["waiting"])

    def _trainer_lost(self, e: Event) -> None:
        self._trainers.discard(e.get("policy", ""))
        row = self._trainer(e)
        row.put(self._tenths(e["t"]) - 1, CODE["lost"])
        row.put(self._tenths(e["t"]), ABSENT)

    # Money.

    def _advise(self, e: Event) -> None:
        keys = ("now", "count", "tokens_per_usd_now", "tokens_per_usd_best")
        if len(self.advice) < 64 or e.get("lease") in self.advice:
            numbers = {key: finite(e.get(key)) for key in keys}
            self.advice[clean(e.get("lease"), 64)] = {**numbers, "why": clean(e.get("why", ""), MAX_TEXT)}

    # What viewers get.

    def full(self) -> dict[str, Any]:
        """Everything. A viewer may get this at any time and then every later `changes`: parts that it has already are
        replaced."""
        return {
            **self._sections(), "rows": self._rows(everything=True),
            "moves": self._moves(max(0, self.moves_seen - MAX_SENT_MOVES)),
            "series": {name: {"from": 0, **policy.columns} for name, policy in self.policies.items()},
        }  # fmt: skip

    def forget_changes(self) -> None:
        """The next `changes` begin here."""
        self.changes()

    def changes(self) -> dict[str, Any]:
        """What has changed since the last call."""
        sections = {key: msgspec.json.encode(value) for key, value in self._sections().items()}
        out: dict[str, Any] = {
            key: msgspec.Raw(data) for key, data in sections.items() if self._sent.get(key) != data
        }  # fmt: skip
        self._sent = sections
        changed = {name: policy.changes() for name, policy in self.policies.items()}
        if series := {name: points for name, points in changed.items() if points is not None}:
            out["series"] = series
        if rows := self._rows(everything=False):
            out["rows"] = rows
        for row in self.timeline.rows.values():
            row.changed = len(row.changes) + 1
        if self._moves_sent < self.moves_seen:
            out["moves"] = self._moves(max(self._moves_sent, self.moves_seen - MAX_SENT_MOVES))
            self._moves_sent = self.moves_seen
        return out

    def _rows(self, *, everything: bool) -> list[dict[str, Any]]:
        out = []
        for row in self.timeline.rows.values():
            first = 0 if everything else row.changed
            if first <= len(row.changes):
                data = b64encode(row.changes[first:].tobytes()).decode()
                out.append({"name": row.name, "from": first, "slice": row.slice, "data": data, "facts": row.facts})
        return out

    def _moves(self, first: int) -> dict[str, Any]:
        """The moves from number `first` on."""
        kept = self.moves_seen - len(self.moves)
        first = max(first, kept)
        return {"from": first, "list": [self.moves[n - kept] for n in range(first, self.moves_seen)]}

    def _sections(self) -> dict[str, Any]:
        """What is sent as a whole when it changes."""
        return {
            "number": self.number, "start_t": self.start_t, "end_s": self._seconds(self.end_t), "states": STATES,
            "step": self.step, "lost": self.lost, "facts": self.facts, "ended": self.ended,
            "policies": {name: policy.describe() for name, policy in self.policies.items()},
            "problems": list(self.problems)[-50:], "advice": self.advice,
            "money": self.money(), "dropped_rows": self.timeline.dropped,
            "unreadable": self.unreadable, "notes": self.notes,
        }  # fmt: skip

    def money(self) -> dict[str, Any]:
        """Where every dollar went, beside what the trainer's machine alone would have cost."""
        bill, trained = self.costs.bill, sum(policy.trained for policy in self.policies.values())
        holders = {
            holder: {"usd": a.usd, "seconds": a.seconds, "tokens": a.tokens, "unpriced_s": a.unpriced_s}
            for holder, a in bill.holders.items()
        }
        alone = reserved_only(bill, train_s=sum(self.costs.train_s.values()))
        per_million = alone.usd_per_million(trained) if alone else None
        return {
            "holders": holders, "usd": bill.all.total_usd, "trained": trained,
            "usd_per_million": bill.usd_per_million(trained),
            "unpriced_s": bill.all.unpriced_s, "borrowed": msgspec.to_builtins(borrowed_value(bill)),
            "alone": {**msgspec.to_builtins(alone), "usd_per_million": per_million} if alone else None,
            "policies": self.costs.usd_of(),
            "gathering": clean(long_responses.gathering(msgspec.to_builtins(bill.gathering)), MAX_TEXT),
        }  # fmt: skip


def _short(event: Event, limit: int = MAX_TEXT) -> dict[str, Any]:
    """The short fields of an event: what a person may want to read."""
    out: dict[str, Any] = {}
    for key, value in event.items():
        if key in ("t", "m", "kind", "name") or value is None:
            continue
        if isinstance(value, str):
            out[clean(key, 64)] = clean(value, limit)
        elif isinstance(value, bool) or finite(value) is not None:
            out[clean(key, 64)] = value
        if len(out) >= 24:
            break
    return out
