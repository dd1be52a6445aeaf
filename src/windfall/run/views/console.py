"""The console output of a run: lines while it runs, and a summary at the end. Reads only events."""

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

from windfall.controller.cost.bill import Totals, borrowed_value, reserved_only
from windfall.events.log import Event, read
from windfall.recipe.changes import KeyChange
from windfall.recipe.sections import Recipe
from windfall.run.views import lenders, rewards, staleness
from windfall.run.views.tables import Labeled, labeled

BARS = "▁▂▃▄▅▆▇█"
LARGE = ("lengths", "replaced", "speeds")
"""Fields of a step event that grow with the number of responses. The summary does not need them."""
MAX_ADVISED = 64
"""Maximum number of kinds of workers for which the last advice is remembered."""


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


class Console:
    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._recipe, self._folder = recipe, folder
        self._out = Terminal(highlight=False, soft_wrap=True)
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        # The progress bar is shown only on a terminal; a file gets only the lines.
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._out, disable=not self._out.is_terminal)
        self._task: Any = None
        self._advised: dict[str, int] = {}
        """The last advice shown: number of workers by kind."""
        self._too_small: set[str] = set()
        """Workers that were reported as too small for a response."""
        self._shown_gap = 0.0
        """The largest gap between engine and trainer shown so far (nats)."""

    def __enter__(self) -> Console:
        self._bar.start()
        return self

    def starting(self, preparation: str) -> None:
        """Shown while the trainer loads the model. `preparation`: what takes long at the first use of this model."""
        if preparation:
            self._out.print(f"{escape(preparation)} ...")
        self._out.print(f"starting the trainer with {escape(self._recipe.model.path)} ...")

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, event: Event) -> None:
        match event["name"]:
            case "start":
                r, adapters = self._recipe, ""
                if "adapter_rank" in event:
                    trained = f"{event['adapter_parameters'] / 1e6:.2f} M"
                    adapters = f"{trained} in adapters of rank {event['adapter_rank']}, "
                self._out.print(
                    f"[bold]{r.run.name}[/]: {escape(r.model.path)} ({event['parameters'] / 1e6:.1f} M parameters, "
                    f"{adapters}{event['dtype']} on {event['device']}) trains on {escape(_tasks(r.env))} with "
                    f"{r.algorithm.name}, {r.rollout.groups} x {r.rollout.group_size} responses per step; files in "
                    f"{escape(str(self._folder))}"
                )
                self._task = self._bar.add_task("training", total=event["steps"], completed=event["step"])
            case "resumed":
                self._out.print(f"continuing after step {event['step']}")
            case "eval":
                if event["kind"] == "scalar" and event["reward"] is not None:
                    on = f" on {escape(event['on'])}" if event.get("on") else ""
                    reward = (
                        f"{event['reward']:.3f}{rewards.graded(event)}{rewards.passes(event)}{rewards.parts(event)}"
                    )
                    self._out.print(f"eval after step {event['step']}: reward {reward}{on}")
            case "gateway":
                self._out.print(f"agents reach the policy at {event['url']}")
            case "eval_warning" | "agents_not_isolated":
                self._out.print(f"[yellow]warning[/]: {escape(event['why'])}")
            case "step":
                self._out.print(self._line(event))
                if self._task is not None:
                    self._bar.update(self._task, completed=event["step"])
            case "advice":
                self._advise(event)
            case "engine_gap":
                mean, most = (math.inf if event[k] is None else event[k] for k in ("mean", "max"))  # None: not finite
                if mean > 2 * self._shown_gap:
                    self._shown_gap = mean
                    limit = self._recipe.train.engine_gap_limit
                    self._out.print(
                        f"[yellow]engine and trainer disagree[/] in step {event['step']}: their log-probs differ by "
                        f"{mean:.3g} nats on average{_by_engine(event.get('engines'))}, {most:.3g} at most "
                        f"(shown again when it doubles; the run ends above train.engine_gap_limit = {limit:g})"
                    )
            case "trainer_lost":
                self._out.print(f"[red]trainer lost[/]: {escape(event['why'])}")
            case "stopping":
                self._out.print("stopping and saving; press Ctrl-C again to quit at once")
            case "reward_missing":
                self._out.print(f"[yellow]reward missing[/] for {event['response']}: {_failure(event)}")
            case "grading_slow":
                self._out.print(f"[yellow]rewards are slow[/]: {rewards.graders_of_snapshot(event)}")
            case "env_server_lost":
                moved = f"; {event['calls']} calls go to other servers" if event["calls"] else ""
                self._out.print(f"[yellow]environment server lost[/] {event['address']}: {escape(event['why'])}{moved}")
            case "env_server_joined":
                self._out.print(f"environment server {event['address']} connected, {event['slots']} calls at once")
            case "reward_retried":
                self._out.print(f"[yellow]grader failed[/], and graded {event['response']} later: {_failure(event)}")
            case "task_skipped":
                self._out.print(f"[yellow]task skipped[/]: {_failure(event)}")
            case "no_calls":
                agents = f"{event['agents']} agents ended without a call"
                self._out.print(f"[yellow]nothing was sampled[/] in step {event['step']}: {agents}")
            case "update_skipped":
                of = f" ({event['updates']} of {event['of']})" if event.get("of", 1) > 1 else ""
                self._out.print(f"[yellow]update skipped[/] in step {event['step']}{of}: {event['why']}")
            case _:
                self._show_fleet(event)
                self._show_damage(event)

    def _show_fleet(self, event: Event) -> None:
        """Show workers that join and leave, and refused connections."""
        match event["name"]:
            case "worker_joined":
                self._out.print(f"[green]+[/] {escape(event['worker'])} joined ({event['lease']}, {event['device']})")
            case "worker_lost":
                moved = (
                    f"; {event['moved']} responses moved to other workers, with their {event['kept_tokens']:,} tokens"
                )
                self._out.print(
                    f"[red]-[/] {escape(event['worker'])} lost: {escape(event['why'])}{moved if event['moved'] else ''}"
                )
            case "worker_left":
                moved = f"; {event['moved']} responses moved to other workers" if event["moved"] else ""
                self._out.print(f"[yellow]-[/] {escape(event['worker'])} left{moved}")
            case "worker_warned":
                self._out.print(f"[yellow]![/] {escape(event['worker'])} will be preempted ({event['source']})")
            case "worker_stuck":
                self._out.print(f"[red]-[/] {escape(event['worker'])} dismissed: {escape(event['why'])}")
            case "work_rejected":
                if event["worker"] not in self._too_small:
                    self._too_small.add(event["worker"])
                    self._out.print(
                        f"[yellow]![/] {escape(event['worker'])} cannot run responses of {event['tokens']} tokens; "
                        f"other workers get them: {escape(event['why'])}"
                    )
            case "no_room":
                self._out.print(
                    f"[yellow]no worker is large enough[/] for response {event['response']}: it needs room for "
                    f"{event['tokens']} tokens, and no worker has more than {event['most']:g}; waiting for a larger one"
                )
            case "worker_suspect":
                self._out.print(f"[yellow]?[/] {escape(event['worker'])} has been {event['why']}")
            case "no_workers":
                busy = f"; {event['lenders']} lenders need their machines" if event.get("lenders") else ""
                self._out.print(
                    f"[yellow]waiting for workers[/]: none for {event['s']:.0f} s, {event['queued']} responses queued"
                    f"{busy}"
                )
            case "sink_dropped":
                self._out.print(f"[yellow]{escape(event['sink'])} gets no more events[/]: {escape(event['why'])}")
            case "refused":
                more = f" ({event['repeats']} more since the last such line)" if event.get("repeats") else ""
                self._out.print(f"[yellow]refused[/] {escape(event['peer'])}: {escape(event['why'])}{more}")

    def _show_damage(self, event: Event) -> None:
        """Show damage to files of the run."""
        match event["name"]:
            case "checkpoint_damaged":
                self._out.print(
                    f"[red]checkpoint damaged[/]: {escape(event['what'])}; continuing from step {event['step']}; "
                    "later steps are repeated"
                )
            case "journal_lost":
                what = f"{event['responses']:,} responses with {event['tokens']:,} tokens are generated again"
                if not event["responses"]:
                    what = "its part of the current step is generated again"
                where = f"{escape(event['file'])}: {escape(event['why'])} ({event['bytes']:,} bytes)"
                self._out.print(f"[yellow]journal lost[/]: {where}; {what}")
            case "journal_strays":
                self._out.print(f"[yellow]not a journal file, skipped[/]: {escape(', '.join(event['files']))}")
            case "log_foreign":
                self.notice(
                    f"{self._folder / 'events.jsonl'}: skipped {event['lines']} lines that windfall did not write; the "
                    f"first is line {event['first']}"
                )
            case "log_gap":
                gap = f"steps {event['first']} to {event['last']} are missing"
                self.notice(f"{self._folder / 'events.jsonl'}: {gap}; the run continues without them in its totals")

    def _advise(self, e: Event) -> None:
        """Show advice to change the number of workers, but only once."""
        if e["count"] == e["now"] or self._advised.get(e["lease"]) == e["count"]:
            return
        self._advised[e["lease"]] = e["count"]
        if len(self._advised) > MAX_ADVISED:
            del self._advised[next(iter(self._advised))]
        gain = (e["tokens_per_usd_best"] or 0.0) / e["tokens_per_usd_now"] - 1 if e["tokens_per_usd_now"] else 0.0
        self._out.print(
            f"[cyan]advice[/]: {e['count']} workers ({escape(e['lease'])}) instead of {e['now']}: {escape(e['why'])}"
            + (f" ({gain:+.0%} tokens per dollar)" if gain else "")
        )

    def notice(self, line: str) -> None:
        self._out.print(f"[yellow]{escape(line)}[/]")

    def join(self, url: str, token: Path, *, remote: bool = False, ca: Path | None = None) -> None:
        """Show once, at the start, how to add a worker. `token`: the file that holds the token; the token itself on a
        command line would be visible in the process list. `remote`: other machines can connect."""
        trust = f" --tls-ca {_argument(ca)}" if ca else ""
        command = f"{_command()} worker --join {escape(url)} --token {_argument(token)}{trust}"
        self._out.print(f"add a worker from {'any machine' if remote else 'this machine'}: {command}")
        if remote:
            self._out.print("  (on another machine, --token names a copy of that file, readable by its owner only;")
            self._out.print("  the worker must also be able to reach the weights port, which fleet.weights_port sets)")

    def page(self, url: str) -> None:
        """Show once, at the start, where the page of the run is."""
        self._out.print(f"watch the run: {escape(url)}")

    def is_finished(self, steps: int) -> None:
        self._out.print(f"this run is finished: all {steps} steps are done, and nothing was started")
        more = f"{_command()} resume {_argument(self._folder)} --set run.steps={2 * steps}"
        self._out.print(f"  to extend it               {more}")

    def resuming(self, changes: Sequence[KeyChange], warnings: Sequence[str]) -> None:
        """Shown before a run is resumed. `changes`: recipe keys that have changed since its start."""
        for line in warnings:
            self.notice(line)
        if changes:
            self._out.print("changed since the start of the run:")
        for change in changes:
            self._out.print(f"  {escape(str(change))}")

    def _line(self, e: Event) -> str:
        reward, entropy, grad = ("    -" if e[k] is None else f"{e[k]:.3f}" for k in ("reward", "entropy", "grad_norm"))
        extras = ""
        bill = _bill(e)
        per_million = bill.usd_per_million(e["trained"]) if bill else None
        if per_million is not None:
            at_least = ">" if bill and bill.all.unpriced_s > 0 else ""
            alone = reserved_only(bill, train_s=e["train_s"]) if bill and "train_s" in e else None
            compared = (
                f" (on the trainer alone ${alone.usd_per_million(e['trained']):,.2f})" if alone and alone.usd else ""
            )
            extras += f"  {at_least}${per_million:,.2f}/M tok{compared}"
        extras += "".join(f"  {part}" for part in staleness.of_step(e))
        if e.get("experts_balance") is not None:
            unused = f", {e['experts_unused']:,} unused" if e["experts_unused"] else ""
            extras += f"  experts {e['experts_balance']:.2f} balanced{unused}"
        if len(e.get("engine_gaps") or {}) > 1:
            extras += f"  gap{_by_engine(e['engine_gaps'])}"
        extras += f"{rewards.parts(e)}{rewards.slow(e)}"
        if e["missing"]:
            extras += f"  rewards missing {e['missing']}"
        if e.get("skipped"):
            extras += f"  tasks skipped {e['skipped']}"
        if e.get("restored"):
            extras += f"  ({e['restored']:,} tokens from the journal)"
        return (
            f"step {e['step']:>4}/{self._recipe.run.steps}  reward [bold]{reward}[/]  length {e['mean_length']:6.1f}  "
            f"entropy {entropy}  grad {grad}  {e['tok_per_s']:>7,.0f} tok/s  "
            f"{e['s']:5.1f} s{extras}"
        )

    def summary(self, *, finished: bool) -> None:
        path = self._folder / "events.jsonl"
        # A run may be stopped before anything is logged.
        events = read(path, without=LARGE) if path.is_file() else []
        prompt = "12+34-5=" if self._recipe.env.name == "arithmetic" else "..."
        usable = without_damaged(events)
        if len(usable) < len(events):
            self.notice(f"{path}: {len(events) - len(usable)} events are damaged; the summary leaves them out")
        for line in summarize(usable, self._folder, finished=finished, prompt=prompt):
            self._out.print(line)


def without_damaged(events: list[Event]) -> list[Event]:
    """The events without those that cannot be summarized, so that a view never fails the run, whatever its log
    contains."""
    if _can_summarize(events):
        return events
    # Twice each: some lines compare the first event with the last.
    usable = [e for e in events if _can_summarize([e, e])]
    return usable if _can_summarize(usable) else []


def _can_summarize(events: list[Event]) -> bool:
    try:
        summarize(events, Path(), finished=True)
    except Exception:  # fault boundary: whatever the events contain
        return False
    return True


def summarize(events: list[Event], folder: Path, *, finished: bool, prompt: str = "...") -> list[str]:
    """A summary in a few lines of rich markup, for a run that finished, was stopped, or died."""
    steps = [e for e in events if e["kind"] == "scalar" and e["name"] == "step"]
    evals = [e for e in events if e["kind"] == "scalar" and e["name"] == "eval" and e["reward"] is not None]
    trained = [e["reward"] for e in steps if e["reward"] is not None]
    title = "[bold green]finished[/]" if finished else "[bold yellow]stopped; all progress is saved[/]"
    out: list[Labeled] = []
    if len(evals) > 1:
        on = f", on {escape(evals[-1]['on'])}" if evals[-1].get("on") else ""
        before, after = (f"{e['reward']:.3f}{rewards.graded(e)}" for e in (evals[0], evals[-1]))
        out.append(("evaluation reward", f"{before} before, {after} after{on}"))
        out += rewards.passes_of_run(evals[0], evals[-1])
    if trained:
        out.append(("training reward", f"{trained[0]:.3f} first, {trained[-1]:.3f} last   {spark(trained)}"))
    if steps:
        generated = sum(e["made"] - e.get("restored", 0) for e in steps)
        speed = generated / max(1e-9, sum(e.get("counted_s", e["s"]) for e in steps))
        asynchronous = "staleness_max" in steps[-1]  # generation and training overlap
        including = "" if asynchronous else " including training"
        out.append(("tokens", f"{generated:,} generated, {speed:,.0f} tok/s{including}"))
        spans = [e for e in events if e["kind"] == "span" and "error" not in e]  # an aborted step does not count
        rollout = sum(e.get("s") or 0.0 for e in spans if e["name"] == "rollout")
        early = sum(e.get("early_s") or 0.0 for e in spans if e["name"] == "train")
        if not asynchronous:
            alone = generated / max(1e-9, rollout - early)
            out.append(("", f"{alone:,.0f} tok/s while generating"))
        out += _prefill(steps)
        if updates := [e["weights_bytes"] for e in steps if e.get("weights_bytes")]:
            out.append(("weights per update", f"{sum(updates) / len(updates) / 1e6:,.2f} MB to pull for each worker"))
        not_finite = sum(e.get("updates_not_finite", 0) for e in steps)
        skipped = sum(e.get("updates_skipped", 0) for e in steps) - not_finite
        if skipped:
            out.append(("updates skipped", f"{skipped} (no gradient; the weights did not change)"))
        if not_finite:
            out.append(("updates skipped", f"{not_finite} (gradient not finite; the weights did not change)"))
        missing = sum(e["missing"] for e in steps)
        if missing:
            out.append(("rewards missing", f"{missing} (not trained on)"))
        out += rewards.graders_of_run(steps)
    out += [*staleness.of_run(steps), *_engine_gaps(steps), *_fleet(events, steps), *_dollars(events, steps)]
    out += lenders.of_run(borrowed_value(_total(events)))
    out.append(("files", f"{escape(str(folder))}  (events.jsonl, recipe.toml, checkpoints/)"))
    if not finished:
        out.append(("resume with", f"{_command()} resume {_argument(folder)}"))
        return ["", title, *labeled(out)]
    model = _argument(next((e["path"] for e in reversed(events) if e["name"] == "checkpoint" and "path" in e), folder))
    out.append(("try next", f"{_command()} generate {model} --prompt '{prompt}'"))
    out.append(("", f"{_command()} eval {model}"))
    return ["", title, *labeled(out)]


def _prefill(steps: list[Event]) -> list[Labeled]:
    """For the summary: the prefill that the prefix caches of the workers saved, and where the next turns went."""
    saved, computed = (sum(e.get(key, 0) for e in steps) for key in ("prefill_saved", "prefilled"))
    if not saved:
        return []
    out = [("prefill saved", f"{saved / (saved + computed):.0%}: {saved:,} of {saved + computed:,} tokens")]
    sessions = [e["sessions"] for e in steps if e.get("sessions")]
    if routed := sum(s["routed"] for s in sessions):
        there = sum(s["to_holder"] for s in sessions)
        out.append(("turns", f"{there:,} of {routed:,} went to the worker that has their tokens"))
    return out


def _by_engine(gaps: dict[str, float | None] | None) -> str:
    """The engine gap of each engine in nats, if there are several.

    >>> _by_engine({"cuda": 0.0012, "vllm": None}), _by_engine({"torch": 0.1})
    (' (cuda 0.0012, vllm not finite)', '')
    """
    if not gaps or len(gaps) < 2:
        return ""
    shown = (f"{escape(name)} {'not finite' if gap is None else f'{gap:.2g}'}" for name, gap in sorted(gaps.items()))
    return f" ({', '.join(shown)})"


def _engine_gaps(steps: list[Event]) -> list[Labeled]:
    """For the summary: how far each engine was from the trainer, if the run had several."""
    values: dict[str, list[float]] = {}
    for e in steps:
        for name, gap in (e.get("engine_gaps") or {}).items():
            if isinstance(gap, int | float):
                values.setdefault(name, []).append(gap)
    if len(values) < 2:
        return []
    means = _by_engine({name: sum(gaps) / len(gaps) for name, gaps in values.items()})
    return [("engines and trainer", f"log-probs differ by{means} nats on average")]


def _tasks(env: Any) -> str:
    """Where the tasks come from, for the header: "arithmetic tasks", "problems.jsonl", ..."""
    match env.name:
        case "dataset":
            return env.path.name
        case "gym":
            return f"{env.task} tasks of reasoning-gym"
        case "custom":
            return f"tasks of {env.factory}"
        case "agent":
            return f"the agent {env.function or env.command}"
    return f"{env.name} tasks"


def _failure(event: Event) -> str:
    count = event.get("count", 1)
    return escape(event["error"]) + (f" ({count:,} of this kind so far)" if count > 1 else "")


def _bill(step: Event) -> Totals | None:
    return msgspec.convert(step["bill"], Totals) if step.get("bill") else None


def _total(events: list[Event]) -> Totals:
    return sum((b for b in map(_bill, events) if b), Totals())


def _dollars(events: list[Event], steps: list[Event]) -> list[Labeled]:
    """What the run cost and for what, compared with the same run on the trainer's machine alone."""
    total = _total(events)
    trained, bought = sum(e["trained"] for e in steps), total.all
    per_million = total.usd_per_million(trained)
    if per_million is None or bought.total_usd == 0:
        return []
    note = ", at least: some workers have no price" if bought.unpriced_s > 0 else ""
    parts = sorted(bought.usd.items(), key=lambda item: -item[1])
    names = {"paused": "training"}
    shares = ", ".join(f"{names.get(b, b)} {usd / bought.total_usd:.0%}" for b, usd in parts if usd > 0)
    out = [
        ("cost", f"${bought.total_usd:,.2f}, ${per_million:,.2f} per million trained tokens{note}"),
        ("", shares),
    ]
    spans = [e for e in events if e["kind"] == "span" and e["name"] == "train" and "error" not in e]
    alone = reserved_only(total, train_s=sum((e.get("s") or 0.0) + (e.get("early_s") or 0.0) for e in spans))
    if alone is not None and alone.usd:
        cost = f"${alone.usd:,.2f}, ${alone.usd_per_million(trained):,.2f} per million"
        out.append(("cost on the trainer alone", f"{cost}, by the tok/s measured on {alone.measured_on}"))
    return out


def _fleet(events: list[Event], steps: list[Event]) -> list[Labeled]:
    """How many workers joined and were lost, and what happened to their tokens."""
    joined, lost, left = ([e for e in events if e["name"] == f"worker_{n}"] for n in ("joined", "lost", "left"))
    if not joined:
        return []
    total = {k: sum(e.get(k) or 0 for e in steps) for k in ("moved", "lost_tokens", "repeated", "late")}
    kept = sum(e.get("kept_tokens") or 0 for e in lost)
    trainer_lost = sum(e["name"] == "trainer_lost" for e in events)
    again = f"; the trainer was lost {trainer_lost} times" if trainer_lost else ""
    return [
        ("workers", f"{len(joined)} joined, {len(lost)} lost, {len(left)} left{again}"),
        ("responses moved", f"{total['moved']}, with all their tokens ({kept:,} from lost workers)"),
        ("tokens lost", f"{total['lost_tokens']}"),
        ("tokens generated twice", f"{total['repeated'] + total['late']}"),
    ]


def _command() -> str:
    """How to call this program from here: by its name, or by its full path if it is not on PATH."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "windfall" and shutil.which("windfall") is None else "windfall"


def _argument(path: Path | str) -> str:
    """Quoted for a shell, so that the command can be copied."""
    return escape(shlex.quote(str(path)))
