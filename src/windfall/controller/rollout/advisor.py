"""Advises after every step how many workers of each kind would pay off, with the rules of workers/worker_value.py.

Workers with the same terms, device and price are one kind. A kind with no workers left is remembered: its price and the
rate of its workers are known, so the advice may be to add workers of that kind again. Spot prices change all day, and
each price is a kind of its own, so only the newest kinds without workers are remembered.

Capacity is used cheapest first. Lenders cost nothing, so their number is advised first, within `fleet.borrowed_max`,
and the other kinds are advised beside that number of lenders.
"""

from __future__ import annotations

from dataclasses import replace

from windfall.controller.cost import prices
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.scheduling.local_time import StepMeasurement
from windfall.controller.workers.members import Member, WorkerState
from windfall.controller.workers.worker_value import RunMeasurements, WorkerAdvice, WorkerKind, advise

KINDS = 16
"""Number of kinds that are remembered, unless workers of more kinds are here."""
NEWEST = 0.5
"""Weight of the newest step in every average."""


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
        self._dispatch = dispatch
        self._max_count = max_count
        price = trainer_usd_per_h or None
        self._run = RunMeasurements(
            trainer_usd_per_h=price, responses=responses, overlap=overlap, asynchronous=asynchronous
        )
        self._ended_s: float | None = None
        """When the last step ended (loop time, seconds)."""
        self._kinds: dict[str, WorkerKind] = {}
        self._used: set[str] = set()
        """The lenders that the last step used."""

    @property
    def steps(self) -> int:
        """Number of steps that the advice follows from."""
        return self._run.steps

    def step(self, last: StepMeasurement, now_s: float, held_s: float = 0.0) -> dict[str, WorkerAdvice]:
        """A step has ended. Returns the advice that has changed. `held_s`: seconds of the step in which admission held
        generation back."""
        self._used = self._dispatch.borrowing.take_used()
        self._learn_run(last)
        self._learn_kinds(last, now_s)
        for kind in self._kinds.values():
            self._count(kind, now_s)
        step_s, self._ended_s = now_s - (now_s if self._ended_s is None else self._ended_s), now_s
        before, wait_s = self.advice, last.train_wait_s
        self.advice = self.advise(self._run, self._kinds, wait_s=wait_s, held_s=held_s, step_s=step_s)
        return {name: a for name, a in self.advice.items() if name not in before or not _same(a, before[name])}

    def advise(
        self, run: RunMeasurements, kinds: dict[str, WorkerKind], *, wait_s: float, held_s: float, step_s: float
    ) -> dict[str, WorkerAdvice]:
        """The advice for every kind, by its value. Other rules may also use how long a step took, for how long the
        trainer waited in it, and for how long admission held generation back."""
        del wait_s, held_s, step_s
        out: dict[str, WorkerAdvice] = {}
        for name in sorted(kinds, key=lambda name: not kinds[name].lends):
            out[name] = advise(run, kinds[name], [k for other, k in kinds.items() if other != name])
            if kinds[name].lends:
                kinds = kinds | {name: replace(kinds[name], now=out[name].count)}
        return out

    def _learn_run(self, last: StepMeasurement) -> None:
        run = self._run
        run.steps += 1
        run.tokens_per_step = _average(run.tokens_per_step, last.tokens)
        if last.train_s > 0:
            run.train_tok_per_s = _average(run.train_tok_per_s, last.tokens / last.train_s)
        if last.local_s > 0 and last.local_tokens:
            run.local_tok_per_s = _average(run.local_tok_per_s, last.local_tokens / last.local_s)
        engines = [m for m in self._dispatch.members.here() if m.local]
        run.trainer_usd_per_h = (
            run.trainer_usd_per_h or sum(prices.of(m.lease).if_known or 0.0 for m in engines) or None
        )
        if engines:
            run.local_engines = len(engines)
            run.local_profile = self._dispatch.placement.speeds.profile(engines[-1].id)

    def _learn_kinds(self, last: StepMeasurement, now_s: float) -> None:
        d, members = self._dispatch, list(self._dispatch.members.here())
        here = [m for m in members if not m.local and m.booted and self._counts(m)]
        sharing = len(here) + sum(m.local for m in members)
        step_s = max(last.remote_s, last.local_s, 1e-9)
        # In asynchronous training, workers go on generating while they pull.
        pulling_factor = 1.0 if self._run.asynchronous else max(0.0, 1 - d.members.pull_s / step_s)
        for member in here:
            name, price = _name(member), prices.of(member.lease).if_known
            kind = self._kinds.pop(name, None) or WorkerKind(name=name, usd_per_h=price, lends=member.lends)
            self._kinds[name] = kind  # the newest kinds are last
            # A lender may have no slot at this moment, but 0 would mean that any number of responses fits.
            kind.slots, kind.profile = max(1, member.lendable), d.placement.speeds.profile(member.id)
            if rate := d.placement.rate(member, self._run.responses, sharing):
                kind.tok_per_s = _average(kind.tok_per_s, rate * pulling_factor)
            if (boot_s := d.accounts.of(member.id, now_s).seconds.get("booting")) is not None:
                kind.boot_s = _average(kind.boot_s, boot_s)
        most = max(KINDS, len({_name(member) for member in here}))
        for name in list(self._kinds)[: max(0, len(self._kinds) - most)]:
            del self._kinds[name]

    def _counts(self, member: Member) -> bool:
        """Whether the worker is one of those that the run has: a lender only if it was in use."""
        return not member.lends or member.id in self._used

    def _count(self, kind: WorkerKind, now_s: float) -> None:
        """The loss rate is the preemptions of the workers that `members` remembers, per hour of their presence."""
        alike = [m for m in self._dispatch.members.all.values() if not m.local and _name(m) == kind.name]
        staying = [m for m in alike if m.state is not WorkerState.GONE]
        present_s = sum((m.seen_s if m.state is WorkerState.GONE else now_s) - m.joined_s for m in alike)
        kind.now = sum(map(self._counts, staying))
        kind.losses_per_h = sum(m.preempted for m in alike) * 3600 / present_s if present_s > 0 else 0.0
        kind.max_count = min(self._dispatch.borrowing.most, len(staying)) if kind.lends else self._max_count


def _same(a: WorkerAdvice, b: WorkerAdvice) -> bool:
    return (a.count, a.now, a.why) == (b.count, b.now, b.why)


def _name(member: Member) -> str:
    return prices.kind(member.lease, lends=member.lends)


def _average(old: float, new: float) -> float:
    return new if old == 0 else (1 - NEWEST) * old + NEWEST * new
