"""Advises after every step how many workers of each kind would pay off, with the rules of scheduling/worker_value.py.

Workers with the same terms, device and price are one kind. A kind with no workers left is remembered: its price and the
rate of its workers are known, so the advice may be to add workers of that kind again. Spot prices change all day, and
each price is a kind of its own, so only the newest kinds without workers are remembered.

Capacity is used cheapest first. Lenders cost nothing, so their number is advised first, within `fleet.borrowed_max`,
and the other kinds are advised beside that number of lenders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from windfall.controller.cost import prices
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.scheduling.local_time import StepMeasurement
from windfall.controller.scheduling.members import Member, WorkerState
from windfall.controller.scheduling.worker_value import RunMeasurements, WorkerAdvice, WorkerKind, advise
from windfall.step_time import StepTime
from windfall.types import LOCAL, Lease

KINDS = 16
"""Number of kinds that are remembered, unless workers of more kinds are here."""
NEWEST = 0.5
"""Weight of the newest step in every average."""


@dataclass(slots=True, kw_only=True)
class _KindMeasurement:
    """The measurements of one kind so far."""

    lease: Lease
    lends: bool = False
    tok_per_s: float = 0.0
    """Tokens per second of one worker while it has work; time spent on pulls is included."""
    boot_s: float = 0.0
    """Seconds from the start of a worker until it is ready, including its first pull."""
    profile: StepTime | None = None
    slots: int = 0


class Advisor:
    def __init__(
        self, dispatch: Dispatch, *, responses: int, trainer_usd_per_h: float, max_count: int, overlap: bool = True,
        asynchronous: bool = False,
    ) -> None:  # fmt: skip
        """`responses`: number of responses in a step. `trainer_usd_per_h`: if 0, the price of the trainer's device is
        used, if its engine reports one. `max_count`: largest number of workers of one kind that is available.
        `overlap`: groups are trained on while others are generated."""
        self.advice: dict[str, WorkerAdvice] = {}
        """The newest advice, by kind."""
        self._dispatch, self._responses, self._max_count, self._overlap = dispatch, responses, max_count, overlap
        self._asynchronous = asynchronous
        self._ended_s: float | None = None
        """When the last step ended (loop time, seconds)."""
        self._trainer_usd_per_h = trainer_usd_per_h or None
        self._steps = 0
        self._tokens = self._train = self._local = 0.0
        """Averages: tokens per step, tokens per second of training, tokens per second of the trainer's engine."""
        self._kinds: dict[str, _KindMeasurement] = {}
        self._local_profile: StepTime | None = None
        self._used: set[str] = set()
        """The lenders that the last step used."""

    def step(self, last: StepMeasurement, now_s: float, held_s: float = 0.0) -> dict[str, WorkerAdvice]:
        """A step has ended. Returns the advice that has changed. `held_s`: seconds of the step in which admission held
        generation back."""
        self._learn(last, now_s)
        step_s, self._ended_s = now_s - (now_s if self._ended_s is None else self._ended_s), now_s
        run = RunMeasurements(
            steps=self._steps, tokens_per_step=self._tokens, train_tok_per_s=self._train,
            local_tok_per_s=self._local, trainer_usd_per_h=self._trainer_usd_per_h, responses=self._responses,
            local_profile=self._local_profile, overlap=self._overlap, asynchronous=self._asynchronous,
        )  # fmt: skip
        kinds = {name: self._kind(name, measured, now_s) for name, measured in self._kinds.items()}
        advice = self.advise(run, kinds, wait_s=last.train_wait_s, held_s=held_s, step_s=step_s)
        changed = {n: a for n, a in advice.items() if not self._same(n, a)}
        self.advice = advice
        return changed

    def advise(
        self, run: RunMeasurements, kinds: dict[str, WorkerKind], *, wait_s: float, held_s: float, step_s: float
    ) -> dict[str, WorkerAdvice]:
        """The advice for every kind, by its value. Other rules may also use how long a step took, for how long the
        trainer waited in it, and for how long admission held generation back."""
        del wait_s, held_s, step_s
        return advise_all(run, kinds, lent={n for n, k in self._kinds.items() if k.lends})

    def _same(self, name: str, advice: WorkerAdvice) -> bool:
        before = self.advice.get(name)
        return before is not None and (before.count, before.now, before.why) == (advice.count, advice.now, advice.why)

    def _learn(self, last: StepMeasurement, now_s: float) -> None:
        self._steps += 1
        self._tokens = _average(self._tokens, last.tokens)
        if last.train_s > 0:
            self._train = _average(self._train, last.tokens / last.train_s)
        if last.local_s > 0 and last.local_tokens:
            self._local = _average(self._local, last.local_tokens / last.local_s)
        local = [m for m in self._dispatch.members.here() if m.name == LOCAL]
        self._used = self._dispatch.borrowing.take_used()
        here = [m for m in self._dispatch.members.here() if m.name != LOCAL and m.booted and self._counts(m)]
        for member in local:
            self._trainer_usd_per_h = self._trainer_usd_per_h or prices.of(member.lease).if_known
            self._local_profile = self._dispatch.placement.speeds.profile(member.id)
        step_s = max(last.remote_s, last.local_s, 1e-9)
        # In asynchronous training, workers go on generating while they pull.
        pulling_factor = 1.0 if self._asynchronous else max(0.0, 1 - self._dispatch.members.pull_s / step_s)
        for member in here:
            kind = _name(member)
            # popped and inserted again, so that the newest kinds are last
            known = self._kinds[kind] = self._kinds.pop(kind, None) or _KindMeasurement(
                lease=member.lease, lends=member.lends
            )
            # A lender may have no slot at this moment, but 0 would mean that any number of responses fits.
            known.slots, known.profile = max(1, member.lendable), self._dispatch.placement.speeds.profile(member.id)
            if rate := self._dispatch.placement.rate(member, self._responses, len(here) + len(local)):
                known.tok_per_s = _average(known.tok_per_s, rate * pulling_factor)
            if (boot_s := self._dispatch.accounts.of(member.id, now_s).seconds.get("booting")) is not None:
                known.boot_s = _average(known.boot_s, boot_s)
        most = max(KINDS, len({_name(member) for member in here}))
        for kind in list(self._kinds)[: max(0, len(self._kinds) - most)]:
            del self._kinds[kind]

    def _counts(self, member: Member) -> bool:
        """Whether the worker is one of those that the run has: a lender only if it was in use."""
        return not member.lends or member.id in self._used

    def _kind(self, name: str, measured: _KindMeasurement, now_s: float) -> WorkerKind:
        """The loss rate is the preemptions of the workers that `members` remembers, per hour of their presence."""
        alike = [m for m in self._dispatch.members.all.values() if m.name != LOCAL and _name(m) == name]
        staying = [m for m in alike if m.state is not WorkerState.GONE]
        here, most = [m for m in staying if self._counts(m)], self._max_count
        if measured.lends:
            most = min(self._dispatch.borrowing.most, len(staying))
        present_s = sum((m.seen_s if m.state is WorkerState.GONE else now_s) - m.joined_s for m in alike)
        lost = sum(m.preempted for m in alike)
        return WorkerKind(
            name=name, now=len(here), tok_per_s=measured.tok_per_s, usd_per_h=prices.of(measured.lease).if_known,
            boot_s=measured.boot_s, max_count=most, profile=measured.profile, slots=measured.slots,
            losses_per_h=lost * 3600 / present_s if present_s > 0 else 0.0,
        )  # fmt: skip


def advise_all(
    run: RunMeasurements, kinds: Mapping[str, WorkerKind], *, lent: Collection[str]
) -> dict[str, WorkerAdvice]:
    """The advice for every kind. `lent`: the kinds of lenders, which come first."""
    kinds, out = dict(kinds), {}
    for name in sorted(kinds, key=lambda name: name not in lent):
        out[name] = advise(run, kinds[name], [k for other, k in kinds.items() if other != name])
        if name in lent:
            kinds[name] = replace(kinds[name], now=out[name].count)
    return out


def _name(member: Member) -> str:
    return prices.kind(member.lease, lends=member.lends)


def _average(old: float, new: float) -> float:
    return new if old == 0 else (1 - NEWEST) * old + NEWEST * new
