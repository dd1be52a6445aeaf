"""The console output of a run while it runs. Reads only events; `LINES` has one template for each kind of event."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from windfall.events.log import Event, read
from windfall.recipe.changes import KeyChange
from windfall.recipe.sections import Recipe
from windfall.run.views import figures, long_responses, trainer_memory
from windfall.run.views.policy_costs import PolicyCosts, bill_of
from windfall.run.views.summary import summarize

LARGE = ("lengths", "replaced", "speeds")
"""Fields of a step event that grow with the number of responses. The summary does not need them."""
SHOWN_GAIN = 1.05
"""Drafts that make decoding less than this much faster are not shown."""
LINES = {
    "resumed": "continuing after step {step}",
    "gateway": "agents reach the policy at {url}",
    "chat_warning": "[yellow]warning[/]: {why}",
    "eval_warning": "[yellow]warning[/]: {why}",
    "agents_not_isolated": "[yellow]warning[/]: {why}",
    "trainer_lost": "[red]trainer lost[/]: {why}",
    "stopping": "stopping and saving; press Ctrl-C again to quit at once",
    "reward_missing": "[yellow]reward missing[/] for {response}: {error}",
    "reward_retried": "[yellow]grader failed[/], and graded {response} later: {error}",
    "task_skipped": "[yellow]task skipped[/]: {error}",
    "env_server_lost": "[yellow]environment server lost[/] {address}: {why}; {calls} calls go to other servers",
    "env_server_joined": "environment server {address} connected, {slots} calls at once",
    "update_skipped": "[yellow]update skipped[/] in step {step}: {why}",
    "worker_joined": "[green]+[/] {worker} joined ({lease}, {device})",
    "worker_lost": "[red]-[/] {worker} lost: {why}; {moved} responses with {kept_tokens:,} tokens moved to others",
    "worker_left": "[yellow]-[/] {worker} left; {moved} responses moved to others",
    "worker_warned": "[yellow]![/] {worker} will be preempted ({source})",
    "worker_stuck": "[red]-[/] {worker} dismissed: {why}",
    "worker_suspect": "[yellow]?[/] {worker} has been {why}",
    "work_rejected": "[yellow]![/] {worker} cannot run responses of {tokens} tokens; other workers get them: {why}",
    "no_room": "[yellow]no worker is large enough[/] for response {response}: it needs {tokens} tokens, and no worker "
    "has more than {most:g}; waiting for a larger one",
    "source_dropped": "[yellow]weights of {source} are not used any more[/]: {why}, says {by}",
    "no_workers": "[yellow]waiting for workers[/]: none for {s:.0f} s, {queued} responses queued",
    "sink_dropped": "[yellow]{sink} gets no more events[/]: {why}",
    "refused": "[yellow]refused[/] {peer}: {why}",
    "kv_dtype": "[yellow]the KV cache is in {kv_dtype} from now on[/], after step {step}: {why}",
    "journal_lost": "[yellow]journal lost[/]: {file}: {why} ({bytes:,} bytes); what was in them is generated again",
    "sft_start": "[bold]fine-tuning[/] {model} ({dtype} on {device}) on {rows:,} rows of {file} with {targets:,} "
    "tokens in completions, {steps} steps",
    "sft": "step {step:>4}/{steps}  loss [bold]{loss:.4f}[/]  grad {grad_norm:.3f}  lr {lr:.2e}  "
    "{tok_per_s:>7,.0f} tok/s  {s:5.1f} s",
    "sft_eval": "eval after step {step}: loss {loss:.4f}",
    "tinker_ready": "[bold]serving {base}[/] at {serves} to programs of the Tinker SDK; models: {models}",
    "tinker_model": "{account}: model {model}, rank {rank}",
    "tinker_accounts": "accounts: {accounts}",
    "tinker_accounts_wrong": "[red]the accounts stay as they were[/]: {why}",
    "tinker_session_ended": "{account}: session {session} has ended",
    "log_gap": "[yellow]steps {first} to {last} are missing in events.jsonl[/]; the run continues without them",
}
"""What is shown for an event, by its name, from its fields. Other events are not shown."""


class Console:
    def __init__(self, recipe: Recipe, folder: Path, resume: str = "resume") -> None:
        """`resume`: the command that continues the run."""
        self._recipe, self._folder, self._resume = recipe, folder, resume
        self._out = Terminal(highlight=False, soft_wrap=True, emoji=False)  # an id may have ":train:" in it
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        # The progress bar is shown only on a terminal; a file gets only the lines.
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._out, disable=not self._out.is_terminal)
        self._task: Any = None
        self._costs = PolicyCosts(recipe.bases())
        self._reached: dict[str, int] = {}
        """By policy that is trained: its last step."""
        self._name_width = max(map(len, recipe.names()))
        self._advised: dict[str, int] = {}
        """The last advice shown: number of workers by kind."""
        self._too_small: set[str] = set()
        """Workers that were reported as too small for a response."""
        self._shown_gap = 0.0
        """The largest gap between engine and trainer shown so far (nats)."""

    def __enter__(self) -> Console:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def starting(self, preparation: str) -> None:
        """Shown while the trainer loads the model. `preparation`: what takes long at the first use of this model."""
        if preparation:
            self._out.print(f"{escape(preparation)} ...")
        self._out.print(f"starting the trainer with {escape(self._recipe.model.path)} ...")

    def show(self, event: Event) -> None:
        name, policy = event["name"], event.get("policy", "")
        self._costs.add(event)
        match name:
            case "start":
                self._show_start(event)
            case "eval" if event["kind"] == "scalar" and event["reward"] is not None:
                on = f" on {escape(event['on'])}" if event.get("on") else ""
                more = f"{figures.graded(event)}{figures.passes(event)}{figures.reward_parts(event)}"
                of = f" of {policy}" if policy else ""
                self._out.print(f"eval{of} after step {event['step']}: reward {event['reward']:.3f}{more}{on}")
            case "step":
                self._out.print(self._line(event))
                self._reached[policy] = event["step"]
                if self._task is not None:
                    self._bar.update(self._task, completed=min(self._reached.values()))
            case "trainer_ready" if event.get("memory"):
                self._out.print(f"memory of the trainer: {escape(event['memory'])}")
            case "advice":
                self._advise(event)
            case "engine_gap":
                self._show_gap(event)
            case "grading_slow":
                self._out.print(f"[yellow]rewards are slow[/]: {figures.graders(event)}")
            case "work_rejected" if event["worker"] in self._too_small:
                pass
            case _ if name in LINES:
                if name == "work_rejected":
                    self._too_small.add(event["worker"])
                fields = {key: _text(value) for key, value in event.items()}
                count = event.get("count", 1)
                more = f" ({count:,} of this kind so far)" if count > 1 else ""
                whose = f"{policy}: " if policy else ""
                self._out.print(whose + LINES[name].format_map(fields) + more)

    def _show_start(self, event: Event) -> None:
        r, adapters = self._recipe, ""
        if "adapter_rank" in event:
            adapters = f"{event['adapter_parameters'] / 1e6:.2f} M in adapters of rank {event['adapter_rank']}, "
        self._out.print(
            f"[bold]{r.run.name}[/]: {escape(r.model.path)} ({event['parameters'] / 1e6:.1f} M parameters, "
            f"{adapters}{event['dtype']} on {event['device']}) trains on {escape(_tasks(r.env))} with "
            f"{r.algorithm.name}, {r.rollout.groups} x {r.rollout.group_size} responses per step; files in "
            f"{escape(str(self._folder))}"
        )
        self._reached = {name: event["step"] for name in r.names() if r.is_trained(name)}
        self._task = self._bar.add_task("training", total=event["steps"], completed=event["step"])

    def _show_gap(self, event: Event) -> None:
        """Show the gap between engine and trainer when it is twice what was shown last."""
        mean, most = (math.inf if event[key] is None else event[key] for key in ("mean", "max"))  # None: not finite
        if mean <= 2 * self._shown_gap:
            return
        self._shown_gap = mean
        engines = event.get("engines") or {}
        each = ", ".join(f"{escape(name)} {figures.number(gap)}" for name, gap in sorted(engines.items()))
        limit = f"train.engine_gap_limit = {self._recipe.train.engine_gap_limit:g}"
        self._out.print(
            f"[yellow]engine and trainer disagree[/] in step {event['step']}: their log-probs differ by {mean:.3g} "
            f"nats on average{f' ({each})' if len(engines) > 1 else ''}, {most:.3g} at most (shown again when it "
            f"doubles; above {limit} the run ends, or leaves fp8)"
        )

    def _advise(self, e: Event) -> None:
        """Show advice to change the number of workers, but only once."""
        if e["count"] == e["now"] or self._advised.get(e["lease"]) == e["count"]:
            return
        self._advised[e["lease"]] = e["count"]
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
        self._out.print(f"watch the run: {escape(url)}")

    def name_is_taken(self, before: Path, state: str) -> None:
        """Shown at the start of a run that has another folder than its name says, because an older run has that."""
        resume = f"; `{_command()} {self._resume} {shlex.quote(str(before))}` continues it"
        more = "" if state.startswith(("running", "finished")) else resume
        self.notice(f"{before} exists ({state}){more}. This is a new run: {self._folder}")

    def is_finished(self, steps: int) -> None:
        self._out.print(f"this run is finished: all {steps} steps are done, and nothing was started")
        more = f"{_command()} {self._resume} {_argument(self._folder)} --set run.steps={2 * steps}"
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
        extras, policy = "", e.get("policy", "")
        bill, usd = bill_of(e).all, self._costs.since_shown(policy)
        if usd is not None and e["trained"]:
            extras += f"  {'at least ' if bill.unpriced_s > 0 else ''}${usd / e['trained'] * 1e6:,.2f}/M tok"
        # With several policies, those that wait much do so for the others.
        last = figures.staleness(e) or (figures.waits(e) if policy else [])
        extras += "".join(f"  {part}" for part in last) + figures.reward_parts(e)
        drafts = long_responses.drafts(e) if (e.get("drafts_gain") or 0.0) >= SHOWN_GAIN else ""
        extras += "".join(f"  {text}" for text in (drafts, trainer_memory.update(e)) if text)
        for key, what in (("missing", "rewards missing"), ("grader_errors", "grader errors"), ("skipped", "skipped")):
            if e.get(key):
                extras += f"  {what} {e[key]}"
        of = f" {policy:<{self._name_width}}" if policy else ""
        rate = f"{e['tok_per_s']:>7,.0f} tok/s"
        if e.get("restored") and round(e["tok_per_s"]) == 0:
            rate = "from the journal"
        return (
            f"step {e['step']:>4}/{self._recipe.run.steps}{of}  reward [bold]{reward}[/]  "
            f"length {e['mean_length']:6.1f}  entropy {entropy}  grad {grad}  "
            f"{rate}  {e['s']:5.1f} s{extras}"
        )

    def summary(self, *, finished: bool) -> None:
        path = self._folder / "events.jsonl"
        # A run may be stopped before anything is logged.
        events = read(path, without=LARGE) if path.is_file() else []
        try:
            out = summarize(events)
        except Exception as e:  # fault boundary: a view must never fail the run, whatever its log contains
            self.notice(f"{path}: some events are damaged, so there is no summary: {type(e).__name__}: {e}")
            out = []
        models = "policies/" if self._recipe.policies else "checkpoints/"
        out.append(("files", f"{escape(str(self._folder))}  (events.jsonl, recipe.toml, {models})"))
        if finished:
            run = _argument(self._folder)
            trained = [name for name in self._recipe.names() if self._recipe.is_trained(name)]
            prompt = "12+34-5=" if self._recipe.env.name == "arithmetic" else "..."
            policies = [f" --policy {name}" if name else "" for name in trained]
            tries = [*(f"generate {run}{policy} --prompt '{prompt}'" for policy in policies), f"eval {run}"]
            out += [("" if n else "try next", f"{_command()} {what}") for n, what in enumerate(tries)]
        else:
            out.append(("resume with", f"{_command()} {self._resume} {_argument(self._folder)}"))
        title = "[bold green]finished[/]" if finished else "[bold yellow]stopped; all progress is saved[/]"
        for line in ("", title, *figures.labeled(out)):
            self._out.print(line)


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return escape(", ".join(map(str, value)))
    return escape(value) if isinstance(value, str) else value


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


def _command() -> str:
    """How to call this program from here: by its name, or by its full path if it is not on PATH."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "windfall" and shutil.which("windfall") is None else "windfall"


def _argument(path: Path | str) -> str:
    """Quoted for a shell, so that the command can be copied."""
    return escape(shlex.quote(str(path)))
