"""What a person sees of a run. Reads events only: live as a sink, and at the end from the log file."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console as Terminal
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from windfall.config import KeyChange, Recipe
from windfall.cost.bill import Totals, reserved_only
from windfall.events.log import Event, read

BARS = "▁▂▃▄▅▆▇█"
LARGE = ("lengths", "replaced", "speeds")
"""Fields of a step that grow with its responses; a summary needs none of them."""
ADVISED = 64
"""Kinds of workers of which it is remembered what was said."""


def spark(values: list[float], width: int = 30) -> str:
    """
    >>> spark([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    return "".join(BARS[round((m - low) / ((high - low) or 1) * (len(BARS) - 1))] for m in means)


class Console:
    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._recipe, self._folder = recipe, folder
        self._out = Terminal(highlight=False, soft_wrap=True)
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        # The bar redraws itself only on a terminal; in a file the lines alone remain.
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._out, disable=not self._out.is_terminal)
        self._task: Any = None
        self._advised: dict[str, int] = {}
        self._small: set[str] = set()
        """Workers that were said to be too small."""
        self._gap = 0.0
        """The widest gap between engine and trainer that was shown."""

    def __enter__(self) -> Console:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, event: Event) -> None:
        match event["name"]:
            case "start":
                r = self._recipe
                self._out.print(
                    f"[bold]{r.run.name}[/]: {escape(r.model.path)} ({event['parameters'] / 1e6:.1f} M parameters, "
                    f"{event['dtype']} on {event['device']}) learns {r.env.name} with {r.algorithm.name}, "
                    f"{r.rollout.groups} x {r.rollout.group_size} responses a step; log in {escape(str(self._folder))}"
                )
                self._task = self._bar.add_task("training", total=event["steps"], completed=event["step"])
            case "resumed":
                self._out.print(f"going on after step {event['step']}")
            case "eval":
                if event["kind"] == "scalar" and event["reward"] is not None:
                    on = f" on {escape(event['on'])}" if event.get("on") else ""
                    self._out.print(f"eval after step {event['step']}: reward {event['reward']:.3f}{on}")
            case "eval_warning":
                self._out.print(f"[yellow]warning[/]: {escape(event['why'])}")
            case "step":
                self._out.print(self._line(event))
                if self._task is not None:
                    self._bar.update(self._task, completed=event["step"])
            case "advice":
                self._advise(event)
            case "engine_gap":
                mean, most = (math.inf if event[k] is None else event[k] for k in ("mean", "max"))  # not finite
                if mean > 2 * self._gap:  # the same again is no news
                    self._gap = mean
                    self._out.print(
                        f"[yellow]engine and trainer disagree[/] in step {event['step']}: their log-probs differ by "
                        f"{mean:.3g} nats on average, {most:.3g} at most (said again when it doubles; "
                        f"the run ends above train.engine_gap_limit = {self._recipe.train.engine_gap_limit:g})"
                    )
            case "trainer_lost":
                self._out.print(f"[red]the trainer is gone[/]: {escape(event['why'])}")
            case "stopping":
                self._out.print("stopping and saving; press Ctrl-C again to end at once")
            case "reward_missing":
                self._out.print(f"[yellow]reward missing[/] for {event['response']}: {_failure(event)}")
            case "task_skipped":
                self._out.print(f"[yellow]task skipped[/]: {_failure(event)}")
            case "update_skipped":
                of = f" ({event['updates']} of {event['of']})" if event.get("of", 1) > 1 else ""
                self._out.print(f"[yellow]update skipped[/] in step {event['step']}{of}: {event['why']}")
            case _:
                self._show_fleet(event)
                self._show_damage(event)

    def _show_fleet(self, event: Event) -> None:
        """Workers that come and go, and who else dials."""
        match event["name"]:
            case "worker_joined":
                self._out.print(f"[green]+[/] {escape(event['worker'])} joined ({event['lease']}, {event['device']})")
            case "worker_lost":
                went = f"; {event['moved']} responses go on elsewhere, with their {event['kept_tokens']:,} tokens"
                self._out.print(
                    f"[red]-[/] {escape(event['worker'])} lost: {escape(event['why'])}{went if event['moved'] else ''}"
                )
            case "worker_left":
                went = f"; {event['moved']} responses go on elsewhere" if event["moved"] else ""
                self._out.print(f"[yellow]-[/] {escape(event['worker'])} left{went}")
            case "worker_warned":
                self._out.print(f"[yellow]![/] {escape(event['worker'])} will be taken ({event['source']})")
            case "worker_stuck":
                self._out.print(f"[red]-[/] {escape(event['worker'])} is sent away: {escape(event['why'])}")
            case "work_rejected":
                if event["worker"] not in self._small:
                    self._small.add(event["worker"])
                    self._out.print(
                        f"[yellow]![/] {escape(event['worker'])} cannot take responses of {event['tokens']} tokens; "
                        f"others make them: {escape(event['why'])}"
                    )
            case "no_room":
                self._out.print(
                    f"[yellow]no worker is large enough[/] for response {event['response']}: it needs room for "
                    f"{event['tokens']} tokens, and none has more than {event['most']:g}; waiting for another worker"
                )
            case "worker_suspect":
                self._out.print(f"[yellow]?[/] {escape(event['worker'])} is {event['why']}")
            case "no_workers":
                self._out.print(
                    f"[yellow]waiting for workers[/]: none for {event['s']:.0f} s, {event['queued']} responses queued"
                )
            case "refused":
                self._out.print(f"[yellow]refused[/] {escape(event['peer'])}: {escape(event['why'])}")

    def _show_damage(self, event: Event) -> None:
        """Files of the run that are not as they were written."""
        match event["name"]:
            case "checkpoint_damaged":
                self._out.print(
                    f"[red]checkpoint damaged[/]: {escape(event['what'])}; going on from step {event['step']}, later "
                    "steps are repeated"
                )
            case "checkpoint_unchecked":
                self._out.print(f"[yellow]checkpoint not verified[/]: {escape(event['what'])}")
            case "journal_lost":
                what = f"{event['responses']:,} responses with {event['tokens']:,} tokens are generated again"
                if not event["responses"]:
                    what = "what it held of the step under way is generated again"
                where = f"{escape(event['file'])}: {escape(event['why'])} ({event['bytes']:,} bytes)"
                self._out.print(f"[yellow]journal lost[/]: {where}; {what}")
            case "journal_strays":
                self._out.print(f"[yellow]not a journal file, skipped[/]: {escape(', '.join(event['files']))}")
            case "log_foreign":
                self.say(
                    f"{self._folder / 'events.jsonl'}: {event['lines']} lines are not windfall's and are skipped; the "
                    f"first is line {event['first']}"
                )
            case "log_gap":
                which = f"steps {event['first']} to {event['last']} are missing"
                self.say(f"{self._folder / 'events.jsonl'}: {which}; the run goes on, and figures leave them out")

    def _advise(self, e: Event) -> None:
        """Said when it asks for a change, once."""
        if e["count"] == e["now"] or self._advised.get(e["lease"]) == e["count"]:
            return
        self._advised[e["lease"]] = e["count"]
        if len(self._advised) > ADVISED:
            del self._advised[next(iter(self._advised))]
        gain = (e["tokens_per_usd_best"] or 0.0) / e["tokens_per_usd_now"] - 1 if e["tokens_per_usd_now"] else 0.0
        self._out.print(
            f"[cyan]advice[/]: {e['count']} of {escape(e['lease'])}, not {e['now']}: {escape(e['why'])}"
            + (f" ({gain:+.0%} tokens per dollar)" if gain else "")
        )

    def say(self, line: str) -> None:
        self._out.print(f"[yellow]{escape(line)}[/]")

    def join(self, url: str, token: Path, *, everywhere: bool = False, ca: Path | None = None) -> None:
        """Said once, at the start. `token`: the file that has it; a secret on a command line is in the process list.
        `everywhere`: other machines may dial."""
        trust = f" --tls-ca {_argument(ca)}" if ca else ""
        said = f"{_command()} worker --join {escape(url)} --token {_argument(token)}{trust}"
        self._out.print(f"join from {'anywhere' if everywhere else 'this machine'}: {said}")
        if everywhere:
            self._out.print("  (on another machine, --token names a copy of that file, readable by its owner only;")
            self._out.print("  a worker must reach the weights' port, too: fleet.weights_port sets it)")

    def is_finished(self, steps: int) -> None:
        self._out.print(f"this run is finished: it has all its {steps} steps, and nothing was started")
        more = f"{_command()} resume {_argument(self._folder)} --set run.steps={2 * steps}"
        self._out.print(f"  to extend it               {more}")

    def resuming(self, changes: Sequence[KeyChange], warnings: Sequence[str]) -> None:
        """Before a run goes on. `changes`: since it began."""
        for line in warnings:
            self.say(line)
        if changes:
            self._out.print("changed since the run began:")
        for change in changes:
            self._out.print(f"  {escape(str(change))}")

    def _line(self, e: Event) -> str:
        reward, entropy, grad = ("    -" if e[k] is None else f"{e[k]:.3f}" for k in ("reward", "entropy", "grad_norm"))
        missing = f"  missing {e['missing']}" if e["missing"] else ""
        bill = _bill(e)
        per_million = bill.usd_per_million(e["trained"]) if bill else None
        if per_million is not None:
            least = ">" if bill and bill.all.unpriced_s > 0 else ""
            alone = reserved_only(bill, train_s=e["train_s"]) if bill and "train_s" in e else None
            beside = f" (alone ${alone.usd_per_million(e['trained']):,.2f})" if alone and alone.usd else ""
            missing = f"  {least}${per_million:,.2f}/M{beside}{missing}"
        if e.get("skipped"):
            missing += f"  skipped {e['skipped']}"
        if e.get("restored"):
            missing += f"  ({e['restored']:,} tokens from the journal)"
        return (
            f"step {e['step']:>4}/{self._recipe.run.steps}  reward [bold]{reward}[/]  length {e['mean_length']:6.1f}  "
            f"entropy {entropy}  grad {grad}  {e['tok_per_s']:>7,.0f} tok/s  "
            f"{e['s']:5.1f} s{missing}"
        )

    def summary(self, *, finished: bool) -> None:
        path = self._folder / "events.jsonl"
        # It may have been stopped before there was anything to log.
        events = read(path, without=LARGE) if path.is_file() else []
        prompt = "12+34-5=" if self._recipe.env.name == "arithmetic" else "..."
        try:
            lines = summarise(events, self._folder, finished=finished, prompt=prompt)
        except Exception as e:  # fault boundary: somebody wrote to the log, and a view of a run must never fail it
            self.say(f"{path}: no summary can be made of this log: {type(e).__name__}: {e}")
            lines = summarise([], self._folder, finished=finished, prompt=prompt)
        for line in lines:
            self._out.print(line)


def summarise(events: list[Event], folder: Path, *, finished: bool, prompt: str = "...") -> list[str]:
    """The end of a run in a few lines of rich's markup, for a run that ended, was stopped, or died."""
    steps = [e for e in events if e["kind"] == "scalar" and e["name"] == "step"]
    evals = [e for e in events if e["kind"] == "scalar" and e["name"] == "eval" and e["reward"] is not None]
    rewards = [e["reward"] for e in steps if e["reward"] is not None]
    out = ["", "[bold green]done[/]" if finished else "[bold yellow]stopped; everything up to here is saved[/]"]
    if len(evals) > 1:
        on = f", on {escape(evals[-1]['on'])}" if evals[-1].get("on") else ""
        before, after = evals[0]["reward"], evals[-1]["reward"]
        out.append(f"  reward in evaluation       {before:.3f} before, {after:.3f} after{on}")
    if rewards:
        out.append(f"  reward in training         {rewards[0]:.3f} first, {rewards[-1]:.3f} last   {spark(rewards)}")
    if steps:
        made, seconds = sum(e["made"] - e.get("restored", 0) for e in steps), max(1e-9, sum(e["s"] for e in steps))
        out.append(f"  tokens                     {made:,} made, {made / seconds:,.0f} tok/s with training included")
        spans = [e for e in events if e["kind"] == "span" and "error" not in e]  # a step given up made no tokens
        rollout = sum(e["s"] for e in spans if e["name"] == "rollout")
        early = sum(e.get("early_s", 0.0) for e in spans if e["name"] == "train")
        out.append(f"                             {made / max(1e-9, rollout - early):,.0f} tok/s while generating")
        broken = sum(e.get("updates_not_finite", 0) for e in steps)
        skipped = sum(e.get("updates_skipped", 0) for e in steps) - broken
        if skipped:
            out.append(f"  updates skipped            {skipped} (no gradient; the weights stayed as they were)")
        if broken:
            out.append(f"  updates skipped            {broken} (gradient not finite; the weights stayed as they were)")
        missing = sum(e["missing"] for e in steps)
        if missing:
            out.append(f"  rewards missing            {missing} (counted, not trained on)")
    out += [*_fleet(events, steps), *_dollars(events, steps)]
    out.append(f"  written to                 {escape(str(folder))}  (events.jsonl, recipe.toml, checkpoints/)")
    if not finished:
        out.append(f"  go on with                 {_command()} resume {_argument(folder)}")
        return out
    saved = _argument(next((e["path"] for e in reversed(events) if e["name"] == "checkpoint" and "path" in e), folder))
    out.append(f"  try next                   {_command()} generate {saved} --prompt '{prompt}'")
    out.append(f"                             {_command()} eval {saved}")
    return out


def _failure(event: Event) -> str:
    count = event.get("count", 1)
    return escape(event["error"]) + (f" ({count:,} of this kind so far)" if count > 1 else "")


def _bill(step: Event) -> Totals | None:
    return msgspec.convert(step["bill"], Totals) if step.get("bill") else None


def _dollars(events: list[Event], steps: list[Event]) -> list[str]:
    """What it cost and where that went, beside the same run on the trainer's machine alone."""
    total = sum((b for b in map(_bill, events) if b), Totals())
    trained, bought = sum(e["trained"] for e in steps), total.all
    per_million = total.usd_per_million(trained)
    if per_million is None or bought.total_usd == 0:
        return []
    least = " at least: some workers have no price" if bought.unpriced_s > 0 else ""
    parts = sorted(bought.usd.items(), key=lambda item: -item[1])
    names = {"paused": "training"}
    shares = ", ".join(f"{names.get(b, b)} {usd / bought.total_usd:.0%}" for b, usd in parts if usd > 0)
    out = [
        f"  dollars                    ${bought.total_usd:,.2f}, ${per_million:,.2f} per million trained tokens{least}",
        f"                             {shares}",
    ]
    spans = [e for e in events if e["kind"] == "span" and e["name"] == "train" and "error" not in e]
    alone = reserved_only(total, train_s=sum(e["s"] + e.get("early_s", 0.0) for e in spans))
    if alone is not None and alone.usd:
        on = f"${alone.usd:,.2f}, ${alone.usd_per_million(trained):,.2f} per million"
        out.append(f"  on the trainer alone       {on}, by the rates measured on {alone.measured_on}")
    return out


def _fleet(events: list[Event], steps: list[Event]) -> list[str]:
    """What became of the workers, and of the tokens they had made."""
    joined, lost, left = ([e for e in events if e["name"] == f"worker_{n}"] for n in ("joined", "lost", "left"))
    if not joined:
        return []
    total = {k: sum(e.get(k, 0) for e in steps) for k in ("moved", "lost_tokens", "repeated", "late")}
    kept = sum(e["kept_tokens"] for e in lost)
    killed = sum(e["name"] == "trainer_lost" for e in events)
    return [
        f"  workers                    {len(joined)} joined, {len(lost)} lost, {len(left)} left"
        + (f"; the trainer was lost {killed} times" if killed else ""),
        f"  responses moved            {total['moved']}, with all their tokens ({kept:,} of lost workers)",
        f"  tokens lost                {total['lost_tokens']}",
        f"  tokens generated twice     {total['repeated'] + total['late']}",
    ]


def _command() -> str:
    """How this program can be called from here: by its name, or as it was called when it is not on the path."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "windfall" and shutil.which("windfall") is None else "windfall"


def _argument(path: Path | str) -> str:
    """As a shell takes it, to be copied."""
    return escape(shlex.quote(str(path)))
