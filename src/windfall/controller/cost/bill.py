"""The bill of a step or a run: seconds and dollars by bucket, and what reserved machines alone would have cost.

These are plain sums. accounts.py computes them from the events of workers and defines the buckets.

Rules: seconds without a known price count in `unpriced_s`, not in dollars; the total in dollars is then a lower bound.
The machine that trains has an account of its own ("trainer"). The accounts of all other workers are added up by the
kind of their lease. Traffic of weights between regions and out of a bucket has dollars, but no seconds, and an account
of its own ("traffic").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

Bucket = Literal[
    "booting", "pulling", "generating", "prefill_again", "waiting", "paused", "draining", "lost", "traffic"
]  # fmt: skip
Holder = Literal["trainer", "reserved", "spot", "borrowed", "traffic"]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds, dollars and tokens of one worker, or of all workers of one holder."""

    seconds: dict[Bucket, float] = {}
    usd: dict[Bucket, float] = {}
    tokens: int = 0
    unpriced_s: float = 0.0
    """Seconds without a known price."""
    tokens_of: dict[str, int] = {}
    """Tokens by policy, for policies with a name."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def total_usd(self) -> float:
        return sum(self.usd.values())

    @property
    def tok_per_s(self) -> float | None:
        """Tokens per second of generating time; None if no tokens were generated."""
        generating_s = self.seconds.get("generating", 0.0)
        return self.tokens / generating_s if generating_s > 0 and self.tokens else None


def priced(
    seconds: dict[Bucket, float], usd_per_h: float | None, tokens: int, tokens_of: dict[str, int] | None = None
) -> Account:
    account = Account(seconds=seconds, tokens=tokens, tokens_of=dict(tokens_of or {}))
    if usd_per_h is None:
        return msgspec.structs.replace(account, unpriced_s=sum(seconds.values()))
    return msgspec.structs.replace(account, usd={b: s * usd_per_h / 3600 for b, s in seconds.items()})


class Gathering(msgspec.Struct, frozen=True, kw_only=True):
    """Moves of the last responses of a step, or of all steps, to workers where they end sooner, and what these brought.
    An estimate: it follows from predicted lengths and step times."""

    moves: int = 0
    released: int = 0
    """Workers that had no response left after the moves."""
    freed_s: float = 0.0
    """Seconds for which these workers would have been busy, over all of them."""
    sooner_s: float = 0.0
    """Seconds by which the last response ended sooner; negative: later."""
    usd: float = 0.0
    """What the workers and the trainer, which wait for the last response, cost in `sooner_s`."""

    def __add__(self, other: Gathering) -> Gathering:
        return self._combined(other, 1)

    def __sub__(self, earlier: Gathering) -> Gathering:
        return self._combined(earlier, -1)

    def _combined(self, other: Gathering, sign: int) -> Gathering:
        names = self.__struct_fields__
        return Gathering(**{name: getattr(self, name) + sign * getattr(other, name) for name in names})


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The accounts of a step or a run. `msgspec.to_builtins` converts it for the event log, `msgspec.convert` back."""

    holders: dict[Holder, Account] = {}
    gathering: Gathering = Gathering()
    trainers: dict[str, Account] = {}
    """The parts of the account "trainer", by base, for bases with a name."""

    @property
    def all(self) -> Account:
        """The sum over all holders."""
        return add(*self.holders.values())

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            holders=_added(self.holders, other.holders),
            gathering=self.gathering + other.gathering,
            trainers=_added(self.trainers, other.trainers),
        )

    def __sub__(self, earlier: Totals) -> Totals:
        return Totals(
            holders={h: _subtract(a, earlier.holders.get(h, Account())) for h, a in self.holders.items()},
            gathering=self.gathering - earlier.gathering,
            trainers={b: _subtract(a, earlier.trainers.get(b, Account())) for b, a in self.trainers.items()},
        )

    def usd_of(self, bases: Mapping[str, Sequence[str]], train_s: Mapping[str, float]) -> dict[str, float]:
        """What each policy costs; these add up to the bill. A policy pays for its trainer, or its share of the seconds
        that a shared one trained, and for every holder's workers by its share of their tokens; without tokens, all pay
        the same. `bases`: the policies of each; `train_s`: seconds of training by policy.

        >>> spot = priced({"generating": 3600}, 6.0, 300, {"solver": 200, "verifier": 100})
        >>> Totals(holders={"spot": spot}).usd_of({"solver": ("solver", "verifier")}, {})
        {'solver': 4.0, 'verifier': 2.0}
        """
        out = {name: 0.0 for names in bases.values() for name in names}
        for base, account in self.trainers.items():
            _split(out, account.total_usd, {name: train_s.get(name, 0.0) for name in bases.get(base, out)})
        for holder, account in self.holders.items():
            if holder != "trainer" or not self.trainers:
                _split(out, account.total_usd, {name: account.tokens_of.get(name, 0) for name in out})
        return out

    def usd_per_million(self, trained_tokens: int) -> float | None:
        """Dollars per million trained tokens, a lower bound if `all.unpriced_s` > 0; None without tokens or prices."""
        total = self.all
        return _per_million(total.total_usd if total.usd else None, trained_tokens)


class ReservedOnly(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated time and cost of a run on the trainer's machine alone."""

    tok_per_s: float
    """The generation speed on which the estimate is based."""
    measured_on: Literal["the trainer", "reserved workers"]
    s: float
    """Seconds of the run."""
    usd: float | None
    """None if the trainer's price is not known."""

    def usd_per_million(self, trained_tokens: int) -> float | None:
        return _per_million(self.usd, trained_tokens)


def reserved_only(totals: Totals, *, train_s: float) -> ReservedOnly | None:
    """What the same tokens would have cost on the trainer's machine alone, by the measured rates:

        s   = tokens of all workers / tok_per_s of the trainer's own engine + train_s
        usd = s * the trainer's price

    tok_per_s is the engine's tokens / its generating seconds. If the engine never generated, the rate of an average
    reserved worker is used; if there is no such worker, the result is None. `train_s`: measured seconds of training
    without waits. The estimate leaves out booting, the transfer of the weights to the trainer's own engine, and the
    small batches at the end of a rollout (the rate is measured while batches are full). All of these would make
    reserved machines more expensive, so the comparison does not favor windfall.

    A trainer at $84 per hour generated 1M tokens in 100 s, then trained; two spot workers at $6 generated 2M in 300 s:

    >>> run = Totals(holders={
    ...     "trainer": priced({"generating": 100, "paused": 200}, 84.0, 1_000_000),
    ...     "spot": priced({"generating": 600}, 6.0, 2_000_000),
    ... })
    >>> round(run.all.total_usd, 6)  # 300 s at 84 + 2 * 6 $ per hour
    8.0
    >>> reserved_only(run, train_s=180)  # 3M tokens / 10,000 tok/s + 180 s = 480 s at $84 per hour
    ReservedOnly(tok_per_s=10000.0, measured_on='the trainer', s=480.0, usd=11.2)
    """
    trainer, workers = totals.holders.get("trainer", Account()), totals.holders.get("reserved", Account())
    rate = trainer.tok_per_s or workers.tok_per_s
    if rate is None:
        return None
    s = totals.all.tokens / rate + train_s
    known = trainer.total_s > 0 and not trainer.unpriced_s
    return ReservedOnly(
        tok_per_s=rate,
        measured_on="the trainer" if trainer.tok_per_s else "reserved workers",
        s=s,
        usd=round(s * trainer.total_usd / trainer.total_s, 9) if known else None,
    )


class BorrowedValue(msgspec.Struct, frozen=True, kw_only=True):
    """What borrowed workers generated, and what the same tokens would have cost on machines that the run pays for."""

    tokens: int
    share: float
    """Share of all tokens."""
    hours: float
    """Hours in which they generated, over all of them."""
    saved_usd: float | None
    """None if no other machine with a known price has generated."""
    priced_as: str = ""


def borrowed_value(totals: Totals) -> BorrowedValue | None:
    """None without tokens of borrowed workers. They are valued at the lowest price per token of the other machines, for
    the time in which these generated: their booting and waiting are left out, so the saving is not overstated.

    Lenders generated 1M tokens; spot workers at $6 per hour generated 2M in 1,200 s:

    >>> borrowed_value(Totals(holders={
    ...     "spot": priced({"generating": 1200, "waiting": 600}, 6.0, 2_000_000),
    ...     "borrowed": priced({"generating": 900}, 0.0, 1_000_000),
    ... })).saved_usd
    1.0
    """
    lent = totals.holders.get("borrowed", Account())
    if not lent.tokens:
        return None
    names: dict[Holder, str] = {
        "spot": "spot workers",
        "reserved": "reserved workers",
        "trainer": "the trainer's engine",
    }
    rates = [
        (account.usd["generating"] / account.tokens, name)
        for holder, name in names.items()
        if (account := totals.holders.get(holder)) and account.tokens and account.usd.get("generating")
    ]
    each, name = min(rates, default=(None, ""))
    return BorrowedValue(
        tokens=lent.tokens,
        share=lent.tokens / totals.all.tokens,
        hours=lent.seconds.get("generating", 0.0) / 3600,
        saved_usd=None if each is None else round(lent.tokens * each - lent.total_usd, 9),
        priced_as=name,
    )


def add(*accounts: Account) -> Account:
    seconds: dict[Bucket, float] = {}
    usd: dict[Bucket, float] = {}
    for account in accounts:
        for total, part in ((seconds, account.seconds), (usd, account.usd)):
            for bucket, amount in part.items():
                total[bucket] = total.get(bucket, 0.0) + amount
    tokens, unpriced_s = sum(a.tokens for a in accounts), sum(a.unpriced_s for a in accounts)
    tokens_of = sum((Counter(a.tokens_of) for a in accounts if a.tokens_of), Counter[str]())
    return Account(seconds=seconds, usd=usd, tokens=tokens, unpriced_s=unpriced_s, tokens_of=dict(tokens_of))


K = TypeVar("K", bound=str)


def _added(one: dict[K, Account], other: dict[K, Account]) -> dict[K, Account]:
    return {k: add(*(accounts[k] for accounts in (one, other) if k in accounts)) for k in {**one, **other}}


def _split(out: dict[str, float], usd: float, shares: Mapping[str, float]) -> None:
    """Add the dollars to those of the policies, by these shares."""
    total = sum(shares.values())
    for name, share in shares.items():
        out[name] += usd * (share / total if total else 1 / len(shares))


def _subtract(now: Account, before: Account) -> Account:
    # When a worker leaves, sums are added in a different order and rounded differently: tiny negatives become 0.
    return Account(
        seconds={bucket: max(0.0, s - before.seconds.get(bucket, 0.0)) for bucket, s in now.seconds.items()},
        usd={bucket: max(0.0, usd - before.usd.get(bucket, 0.0)) for bucket, usd in now.usd.items()},
        tokens=now.tokens - before.tokens,
        unpriced_s=max(0.0, now.unpriced_s - before.unpriced_s),
        tokens_of={policy: n - before.tokens_of.get(policy, 0) for policy, n in now.tokens_of.items()},
    )


def _per_million(usd: float | None, trained_tokens: int) -> float | None:
    return usd / trained_tokens * 1e6 if usd is not None and trained_tokens > 0 else None
