"""The summary at the end of a run: what it learned, generated, lost and cost. Pure: events in, text out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import msgspec
from rich.markup import escape

from windfall.controller.cost.bill import borrowed_value, reserved_only
from windfall.events.log import Event
from windfall.run.views import long_responses, trainer_memory
from windfall.run.views.figures import Labeled, graded, number, percent
from windfall.run.views.moved_weights import MOVED, moved_bytes
from windfall.run.views.policy_costs import PolicyCosts

BARS = "▁▂▃▄▅▆▇█"


def spark(values: list[float], width: int = 30) -> str:
    """A line chart in one line of text.

    >>> spark([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    return "".join(BARS[round((m - low) / ((high - low) or 1) * (len(BARS) - 1))] for m in means)


def summarize(events: list[Event]) -> list[Labeled]:
    """A summary in a few lines of rich markup, for a run that finished, was stopped, or died."""
    costs, scalars = PolicyCosts(), dict[str, list[Event]]()
    for event in events:
        costs.add(event)
        if event["kind"] == "scalar" and event["name"] in ("step", "eval"):
            scalars.setdefault(event.get("policy", ""), []).append(event)
    steps, usd_of = [e for e in events if e["kind"] == "scalar" and e["name"] == "step"], costs.usd_of()

    def each(part: Callable[[list[Event]], list[Labeled]]) -> list[Labeled]:
        """This part for every policy."""
        return [(f"{p}: {label}" if p else label, text) for p, own in scalars.items() for label, text in part(own)]

    named = [(p, _policy([e for e in own if e["name"] == "step"], usd_of.get(p))) for p, own in scalars.items() if p]
    learned = [*named, *each(_rewards), *_tokens(steps), *each(_staleness), *_memory(events, steps)]
    return [*learned, *_supervised(events), *_fleet(events, steps), *_cost(costs, steps), *_accounts(events, costs)]


def _supervised(events: list[Event]) -> list[Labeled]:
    """Losses of a supervised run; nothing for other runs."""
    out: list[Labeled] = []
    for name, label in (("sft", "training loss"), ("sft_eval", "evaluation loss")):
        losses = [e["loss"] for e in events if e["name"] == name and e["loss"] is not None]
        if losses:
            out.append((label, f"{losses[0]:.4f} first, {losses[-1]:.4f} last   {spark(losses)}"))
    return out


def _accounts(events: list[Event], costs: PolicyCosts) -> list[Labeled]:
    """What the accounts of a server cost; nothing for other runs."""
    parts = next((e["accounts"] for e in reversed(events) if e["name"] == "tinker_bill"), None)
    if parts is None:
        return []
    total = costs.bill.all.total_usd
    idle = total - sum(part["usd"] for part in parts.values())
    out = [("cost", f"${total:,.2f}, of it idle ${idle:,.2f}")]
    for name, part in parts.items():
        used = f"{part['trainer_s']:,.0f} s of the trainer, {part['worker_s']:,.0f} s of workers"
        out.append((f"cost of {escape(name)}", f"${part['usd']:,.2f}: {used}"))
    return out


def _policy(steps: list[Event], usd: float | None) -> str:
    """One of several policies in a line."""
    trained, waited_s = sum(e["trained"] for e in steps), sum(e.get("train_wait_s") or 0.0 for e in steps)
    cost = f", ${usd:,.2f}" if usd else ""
    waited = percent(waited_s, sum(e["s"] for e in steps))
    return f"{len(steps)} steps, {trained:,} tokens trained{cost}; waited {waited} of the time for responses"


def _rewards(scalars: list[Event]) -> list[Labeled]:
    out: list[Labeled] = []
    steps = [e for e in scalars if e["name"] == "step"]
    evals = [e for e in scalars if e["name"] == "eval" and e["reward"] is not None]
    if len(evals) > 1:
        last = evals[-1]
        first = next(e for e in evals if e.get("on") == last.get("on"))  # a resumed run may evaluate on other tasks
        on = f", on {escape(last['on'])}" if last.get("on") else ""
        before, after = (f"{e['reward']:.3f}{graded(e)}" for e in (first, last))
        out.append(("evaluation reward", after + on if first is last else f"{before} before, {after} after{on}"))
        passed = first.get("pass_at") or {}
        for k, value in (last.get("pass_at") or {}).items():
            if k in passed and first is not last:
                out.append((f"pass@{k}", f"{number(passed[k])} before, {number(value)} after"))
    if trained := [e["reward"] for e in steps if e["reward"] is not None]:
        out.append(("training reward", f"{trained[0]:.3f} first, {trained[-1]:.3f} last   {spark(trained)}"))
    if missing := sum(e["missing"] for e in steps):
        out.append(("rewards missing", f"{missing} (not trained on)"))
    return out


def _tokens(steps: list[Event]) -> list[Labeled]:
    if not steps:
        return []
    generated = sum(e["made"] - e.get("restored", 0) for e in steps)
    seconds: dict[str, float] = defaultdict(float)
    for e in steps:  # those of several policies overlap, unless they say how much time they count
        seconds["" if "counted_s" in e else e.get("policy", "")] += e.get("counted_s", e["s"])
    speed = generated / max(1e-9, *seconds.values())
    out = [("tokens", f"{generated:,} generated, {speed:,.0f} tok/s including training")]
    not_finite = sum(e.get("updates_not_finite", 0) for e in steps)
    skipped = sum(e.get("updates_skipped", 0) for e in steps) - not_finite
    if skipped:
        out.append(("updates skipped", f"{skipped} (no usable gradient; the weights did not change)"))
    if not_finite:
        out.append(("updates skipped", f"{not_finite} (gradient not finite; the weights did not change)"))
    return out


def _memory(events: list[Event], steps: list[Event]) -> list[Labeled]:
    """Nothing for a trainer without a GPU."""
    ready = next((e for e in reversed(events) if e["name"] == "trainer_ready"), {})
    text = trainer_memory.summary(ready, steps)
    return [("memory of the trainer", text)] if text else []


def _staleness(steps: list[Event]) -> list[Labeled]:
    """Nothing for a synchronous run. A run that became asynchronous when it was resumed counts only those steps."""
    steps = [e for e in steps if "staleness_mean" in e]
    if not steps:
        return []

    def total(key: str) -> float:
        return sum(e.get(key) or 0 for e in steps)

    counts = [(n, count) for e in steps for n, count in enumerate(e.get("staleness_counts") or [])]
    out: list[Labeled] = []
    if responses := sum(count for _, count in counts):
        mean, most = sum(n * count for n, count in counts) / responses, max(n for n, count in counts if count)
        out.append(("staleness", f"{mean:.2f} mean, {most} max, bound {steps[-1]['staleness_bound']}"))
    too_old, tokens, waited_s = total("too_old"), total("too_old_tokens"), total("train_wait_s")
    dropped = f"{percent(tokens, total('made'))} of sampled tokens: {tokens:,} in {too_old:,} responses"
    return [
        *out,
        ("dropped as too old", dropped),
        ("trainer waited", f"{percent(waited_s, total('s'))} of the time: {waited_s:,.1f} s"),
        ("generation held back", f"{total('held_s'):,.1f} s, to keep responses fresh"),
    ]


def _fleet(events: list[Event], steps: list[Event]) -> list[Labeled]:
    """How many workers joined and were lost, and what happened to their tokens."""
    joined, lost, left = ([e for e in events if e["name"] == f"worker_{n}"] for n in ("joined", "lost", "left"))
    if not joined:
        return []
    total = {k: sum(e.get(k) or 0 for e in steps) for k in ("moved", "lost_tokens", "repeated", "late")}
    kept = sum(e.get("kept_tokens") or 0 for e in lost)
    trainer_lost = sum(e["name"] == "trainer_lost" for e in events)
    again = f"; the trainer was lost {trainer_lost} times" if trainer_lost else ""
    sent = [e for e in events if e["name"] == "weights"]
    moved = moved_bytes({key: sum(e.get(key) or 0 for e in sent) for key in (*(f"{k}_bytes" for k in MOVED), "usd")})
    slowest = max((e["all_s"] for e in sent if e.get("all_s")), default=None)
    return [
        ("workers", f"{len(joined)} joined, {len(lost)} lost, {len(left)} left{again}"),
        ("responses moved", f"{total['moved']}, with all their tokens ({kept:,} from lost workers)"),
        ("tokens lost", f"{total['lost_tokens']}"),
        ("tokens generated twice", f"{total['repeated'] + total['late']}"),
        *([("weights moved", moved + (f"; slowest version: {slowest:,.1f} s" if slowest else ""))] if moved else []),
    ]


def _cost(costs: PolicyCosts, steps: list[Event]) -> list[Labeled]:
    """What the run cost and for what, compared with the same run on the trainer's machine alone."""
    total, out = costs.bill, list[Labeled]()
    trained, bought = sum(e["trained"] for e in steps), total.all
    per_million = total.usd_per_million(trained)
    if per_million is not None and bought.total_usd:
        note = ", at least: some workers have no price" if bought.unpriced_s > 0 else ""
        parts = sorted(bought.usd.items(), key=lambda item: -item[1])
        names = {"paused": "training"}
        shares = ", ".join(f"{names.get(b, b)} {usd / bought.total_usd:.0%}" for b, usd in parts if usd > 0)
        out.append(("cost", f"${bought.total_usd:,.2f}, ${per_million:,.2f} per million trained tokens{note}"))
        out.append(("", shares))
        alone = reserved_only(total, train_s=sum(costs.train_s.values()))
        if alone is not None and alone.usd:
            cost = f"${alone.usd:,.2f}, ${alone.usd_per_million(trained):,.2f} per million"
            out.append(("cost on the trainer alone", f"{cost}, by the tok/s measured on {alone.measured_on}"))
    if gathered := long_responses.gathering(msgspec.to_builtins(total.gathering)):
        out.append(("advice", gathered))
    if (value := borrowed_value(total)) is not None:
        saved = ""
        if value.saved_usd is not None:
            saved = f"; saved ${value.saved_usd:,.2f} at the price of {escape(value.priced_as)}"
        gave = f"{value.tokens:,} tokens ({value.share:.0%}) in {value.hours:,.1f} machine hours"
        out.append(("borrowed", f"{gave}{saved}"))
    return out
