"""Compares a run whose processes are killed and frozen at random with the same run left alone: the results must match.

    python benchmarks/kills/soak.py --kills 100 --controller 5 --trainer 5 --seed 0      about five minutes on two cores
    python benchmarks/kills/soak.py --kills 10 --controller 1 --trainer 1 --steps 10     about a minute
    python benchmarks/kills/soak.py --kills 20 --controller 3 --trainer 3 --staleness 2  asynchronous
    python benchmarks/kills/soak.py --kills 20 --controller 2 --trainer 2 --experts      a model with experts

`windfall train` runs twice on one recipe (the tiny model, three local workers, deterministic). In the second run,
random workers get SIGKILL, or SIGSTOP and SIGCONT some seconds later, or SIGSTOP only; controller and trainer get
SIGKILL; with `--run`, so do all processes at once, and `windfall resume` follows. The signals are spread over the
steps: a run that is ahead of them is held (paced.py). Then all of these must hold, or the exit status is 1:

- the run ended by itself with status 0, and every step is in the log once, with the tokens and rewards of the
  reference; or the log says that it is missing (`log_gap`): a controller that is killed after the trainer was asked to
  publish a step, and before it has logged it, leaves none;
- no token was lost, and no token that was accepted before a kill was generated again;
- the last checkpoint, including the optimizer, is identical to that of the reference, bit for bit;
- no process of the run is left over.

With `--staleness N`, training is asynchronous, and what it trains on depends on timing. There is no reference then:
every step is in the log once, no response was staler than N, and the rules of journal_audit.py hold.

With `--experts`, a small Qwen3-MoE is trained, and every trained token must have been computed by the experts that its
engine recorded (expert_routes.py). Models with experts have no deterministic mode, so there is no reference, either.

Signals go only to descendants of the `windfall train` that was started here, by pidfd.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.kills import expert_routes
from benchmarks.kills.journal_audit import JournalCopy, audit
from windfall.events import log as events
from windfall.processes import parent_death

MARK = "WINDFALL_SOAK"
MAX_GAP = 1e-3
"""Largest difference between the log-probs of engine and trainer, in nats, if both have the same weights."""
RECIPE = """
[run]
name = "{name}"
folder = "{folder}"
steps = {steps}
seed = {seed}
threads = 1
device = "cpu"
deterministic = {deterministic}
[model]
path = "{model}"
[rollout]
groups = 4
group_size = 4
max_tokens = 96
staleness = {staleness}
on_new_weights = "{on_new_weights}"
[train]
lr = 1e-3
[checkpoint]
every = 4
[eval]
tasks = 4
every = 10
[fleet]
workers = {workers}
heartbeat_s = 0.3
suspect_s = 1.0
gone_s = 2.5
[env]
name = "custom"
factory = "benchmarks.kills.paced:{env}"
options = {{ hold = "{folder}/{name}.hold" }}
"""
MOST_DUE = 2.0
"""A run that is ahead of its signals by more than this number is held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    kills: int
    """Number of signals to workers."""
    controller: int
    trainer: int
    fork_server: int
    run: int
    seed: int
    steps: int
    workers: int
    staleness: int
    experts: bool
    on_new_weights: str
    gap_s: float
    """Maximum seconds between two signals."""
    patience_s: float
    """A run without a new step for this many seconds is stuck."""

    @property
    def deterministic(self) -> bool:
        return self.staleness == 0 and not self.experts

    @property
    def signals(self) -> int:
        return self.kills + self.controller + self.trainer + self.fork_server + self.run


@dataclass(kw_only=True, slots=True)
class Dealt:
    """The signals that were sent."""

    counts: dict[str, int] = field(default_factory=dict)
    frozen: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By pidfd: when the frozen process must continue, and which process it is. Not those that stay frozen."""

    def add(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


# processes


def family(root: int) -> dict[int, str]:
    """The live descendants of `root`, each with the name of the log it writes to: controller, trainer, w1.2, ..."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(path.name)] = int(parent)
    out: dict[int, str] = {}
    for pid in parents:
        up = pid
        while up in parents and up != root:
            up = parents[up]
        if up == root and pid != root:
            try:
                out[pid] = Path(os.readlink(f"/proc/{pid}/fd/1")).stem
            except OSError:
                continue
    return out


def marked(mark: str) -> list[int]:
    """Every process, started directly or indirectly, with this mark in its environment."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


@contextmanager
def training(
    plan: Plan, name: str, folder: Path, mark: str, *, resume: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `windfall train`, or `windfall resume`, which dies with this process."""
    recipe = folder / f"{name}.toml"
    recipe.write_text(
        RECIPE.format(
            name=name, folder=folder, steps=plan.steps, seed=plan.seed, workers=plan.workers, staleness=plan.staleness,
            on_new_weights=plan.on_new_weights, deterministic=str(plan.deterministic).lower(),
            model=folder / "experts" if plan.experts else "tiny", env="Digits" if plan.experts else "Paced",
        )
    )  # fmt: skip
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    more = expert_routes.variables(folder / "routes") if plan.experts else {"PYTHONPATH": path}
    what = ["resume", str(folder / name)] if resume else ["train", str(recipe)]
    command = [sys.executable, "-m", "windfall.run.cli", *what]
    guarded = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), str(int(signal.SIGTERM)), *command]
    with (folder / f"{name}.out").open("ab" if resume else "wb") as out:
        child = subprocess.Popen(
            guarded, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", **more},
        )  # fmt: skip
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


# the two runs


def progress(run: Path) -> tuple[int, int]:
    """The last step in the log, and the number of logged steps, including those lost by the death of a trainer."""
    log = run / "events.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else []
    found = [line for line in lines if '"kind":"scalar","name":"step"' in line and line.endswith("}")]
    return (json.loads(found[-1])["step"] if found else 0), len(found)


class Watch:
    """Prints the progress of a run, and gives up if there is none."""

    def __init__(self, run: Path, patience_s: float) -> None:
        self._run, self._patience_s = run, patience_s
        self._logged, self._since_s = -1, time.monotonic()

    def step(self) -> int:
        step, logged = progress(self._run)
        if logged != self._logged:
            self._logged, self._since_s = logged, time.monotonic()
        if time.monotonic() - self._since_s > self._patience_s:
            raise SystemExit(f"stuck: waited {self._patience_s:g} s for the step after {step}: see {self._run}")
        return step


def alone(plan: Plan, folder: Path) -> None:
    watch = Watch(folder / "alone", plan.patience_s)
    with training(plan, "alone", folder, uuid.uuid4().hex) as child:
        while child.poll() is None:
            watch.step()
            time.sleep(0.1)


def hunted(plan: Plan, folder: Path, mark: str) -> tuple[int, Dealt]:
    """Execute the run with signals. Returns its exit status, and the signals that were sent."""
    rng, dealt, watch = random.Random(plan.seed), Dealt(), Watch(folder / "hunted", plan.patience_s)
    targets = ["worker"] * plan.kills + ["controller"] * plan.controller
    targets += ["trainer"] * plan.trainer + ["fork_server"] * plan.fork_server + ["run"] * plan.run
    rng.shuffle(targets)
    copy, hold = JournalCopy(folder / "hunted" / "journal", folder / "hunted-journal"), folder / "hunted.hold"
    lives = plan.run + 1
    for life in range(lives):
        with training(plan, "hunted", folder, mark, resume=life > 0) as child:
            while child.poll() is None:
                thaw(dealt)
                copy.look()
                due = plan.signals * watch.step() / (0.85 * plan.steps) - (plan.signals - len(targets))
                if targets and due > MOST_DUE:
                    hold.touch()
                else:
                    hold.unlink(missing_ok=True)
                if targets and due > 0 and strike(child.pid, targets[-1], rng, dealt):
                    targets.pop()
                    # On a machine with fast steps, the signals also come faster.
                    time.sleep(rng.uniform(0.2, 1.8) * plan.gap_s * min(1.0, 3 / due))
                else:
                    time.sleep(0.05)
        if child.returncode != -signal.SIGKILL:
            break
    if targets:
        raise SystemExit(f"the run ended before {len(targets)} of {plan.signals} signals were sent: give more --steps")
    return child.returncode, dealt


def kill_all(root: int, dealt: Dealt) -> bool:
    """Kill every process of the run at once. Returns False if it is not complete yet."""
    there = family(root)
    if "trainer" not in there.values():
        return False
    for pid in [root, *there]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for fd in dealt.frozen:
        os.close(fd)
    dealt.frozen.clear()
    dealt.add("run kill")
    return True


def strike(root: int, target: str, rng: random.Random, dealt: Dealt) -> bool:
    """Send one signal to a random process of this kind. Returns False if there is none at the moment."""
    if target == "run":
        return kill_all(root, dealt)
    frozen = {pid for _, pid in dealt.frozen.values()}
    there = [
        (pid, name) for pid, name in family(root).items()
        if (name == target or (target == "worker" and name.startswith("w"))) and pid not in frozen
    ]  # fmt: skip
    if not there:
        return False
    pid, name = rng.choice(sorted(there))
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    if family(root).get(pid) != name:  # it ended before we opened it, so the pid may belong to another process
        os.close(fd)
        return False
    kind = "kill" if target != "worker" else rng.choices(["kill", "pause", "freeze"], [6, 3, 1])[0]
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    except ProcessLookupError:
        os.close(fd)
        return False
    dealt.add(f"{target} {kind}")
    if kind == "pause":
        dealt.frozen[fd] = (time.monotonic() + rng.choice([0.3, 1.5, 4.0]), pid)
    else:
        os.close(fd)
    return True


def thaw(dealt: Dealt) -> None:
    for fd, (due, _) in list(dealt.frozen.items()):
        if time.monotonic() >= due:
            del dealt.frozen[fd]
            with suppress(ProcessLookupError):  # killed while it was frozen
                signal.pidfd_send_signal(fd, signal.SIGCONT)
            os.close(fd)


# what must hold


def steps(run: Path) -> list[dict[str, Any]]:
    return [e for e in events.read(run / "events.jsonl") if (e["kind"], e["name"]) == ("scalar", "step")]


def missing(run: Path) -> list[int]:
    """The steps of which the log says that it does not have them."""
    gaps = [e for e in events.read(run / "events.jsonl") if e["name"] == "log_gap"]
    return [step for e in gaps for step in range(e["first"], e["last"] + 1)]


def digests(run: Path) -> dict[str, str]:
    """The digests of all files of the last checkpoint."""
    last = max((run / "checkpoints").glob("step-*"))
    files = sorted(p for p in last.rglob("*") if p.is_file())
    return {str(p.relative_to(last)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def wrongs(plan: Plan, folder: Path, status: int, mark: str) -> list[str]:
    """The rules that do not hold."""
    right = folder / "hunted"
    out = [] if status == 0 else [f"exit status {status}: see {folder}/hunted.out"]
    after, gaps = steps(right), missing(right)
    if sorted([*(e["step"] for e in after), *gaps]) != list(range(1, plan.steps + 1)):
        out.append(f"steps in the log: {[e['step'] for e in after]}, missing by the log: {gaps}")
    if lost := sum(e["lost_tokens"] for e in after):
        out.append(f"{lost} tokens lost")
    counts = json.loads((right / "fleet.json").read_text())
    c = counts["counts"]
    if counts["open"] or c["accepted"] != c["closed"] + c["withdrawn"]:
        out.append(f"the ledger does not add up: {counts['open']} open, {c}")
    out += unlike_reference(folder) if plan.deterministic else without_reference(plan, folder)
    give_up = time.monotonic() + 5.0
    while (pids := marked(mark)) and time.monotonic() < give_up:
        time.sleep(0.1)
    return out + [f"process {pid} is left over" for pid in pids]


def raw_events(run: Path) -> list[dict[str, Any]]:
    """All events, including those of steps that were trained again later."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if line.startswith("{")]


def without_reference(plan: Plan, folder: Path) -> list[str]:
    """The rules of a run that depends on timing that do not hold."""
    raw = [e for e in raw_events(folder / "hunted") if (e["kind"], e["name"]) == ("scalar", "step")]
    stale = [e for e in raw if e.get("staleness_max", 0) > plan.staleness]
    out = [f"step {e['step']}: staleness {e['staleness_max']}" for e in stale]
    out += [f"step {e['step']}: engine gap {e['engine_gap_max']}" for e in raw if e["engine_gap_max"] > MAX_GAP]
    out += [f"step {e['step']}: more tokens restored than there are" for e in raw if e["restored"] > e["made"]]
    lost = [e for e in raw_events(folder / "hunted") if e["name"] == "journal_lost"]
    out += [f"a part of the journal was lost: {e['file']}: {e['why']}" for e in lost]
    if plan.staleness:
        out += audit(folder / "hunted-journal", folder / "hunted", staleness=plan.staleness)
    if plan.experts:
        out += [f"step {e['step']}: experts of some tokens are unknown" for e in raw if e["replayed_experts"] != 1]
        out += expert_routes.compare(folder / "hunted-journal", folder / "routes").wrong
    return out


def unlike_reference(folder: Path) -> list[str]:
    """How the run with signals differs from the one without."""
    left, right, out = folder / "alone", folder / "hunted", list[str]()
    before, after = steps(left), {e["step"]: e for e in steps(right)}
    for a in before:
        b = after.get(a["step"], a)
        differ = [k for k in ("reward", "made", "responses", "trained", "missing") if a[k] != b[k]]
        if differ:
            out.append(f"step {a['step']}: {', '.join(f'{k} {a[k]} alone, {b[k]} hunted' for k in differ)}")
    fresh = sum(e["made"] - e["restored"] for e in raw_events(right) if (e["kind"], e["name"]) == ("scalar", "step"))
    if fresh > sum(e["made"] for e in before):
        out.append(f"{fresh} tokens were generated for {sum(e['made'] for e in before)}")
    if digests(left) != digests(right):
        files = [name for name, digest in digests(left).items() if digests(right).get(name) != digest]
        out.append(f"the last checkpoints differ in {', '.join(files) or 'their files'}")
    return out


def table(plan: Plan, folder: Path, dealt: Dealt, alone_s: float, hunted_s: float) -> None:
    run = folder / "hunted"
    raw = raw_events(run)
    names = [e["name"] for e in raw]
    done = steps(run)
    rows = {
        "signals sent": ", ".join(f"{n} {what}" for what, n in sorted(dealt.counts.items())),
        "steps": f"{len(done)} of {plan.steps} in the log; {names.count('step') - len(done)} trained again",
        "workers": f"{names.count('worker_joined')} joined, {names.count('worker_lost')} lost",
        "responses moved": sum(e["moved"] for e in raw if e["name"] in ("worker_lost", "worker_left")),
        "tokens": f"{sum(e['made'] for e in done)} trained on, 0 lost",
        "late, repeated, stale": ", ".join(str(sum(e[k] for e in done)) for k in ("late", "repeated", "stale")),
        "time": f"{alone_s:.0f} s alone, {hunted_s:.0f} s hunted",
        "last checkpoint": "bit for bit the same",
    }
    if plan.experts:
        found = expert_routes.compare(folder / "hunted-journal", folder / "routes")
        rows |= {
            "experts": f"{found.tokens} tokens trained with those of the engine, {found.different} with others",
            "without replay": f"{found.own_differs} of {found.compared} tokens would have had others",
            "gap of log-probs": f"{max(e['engine_gap'] for e in done):.1e} nats with replay, "
            f"{max(e['router_gap'] for e in done):.1e} without (largest mean of a step)",
        }
    if not plan.deterministic:
        del rows["last checkpoint"]
        rows["time"] = f"{hunted_s:.0f} s"
    if plan.staleness:
        too_old = sum(e["too_old_tokens"] for e in done)
        rows |= {
            "tokens": f"{sum(e['trained'] for e in done)} trained on, {too_old} too old, 0 lost, 0 generated twice",
            "staleness": f"at most {max(e['staleness_max'] for e in done)}; the bound is {plan.staleness}",
        }
    for what, value in rows.items():
        print(f"  {what:22} {value}")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=100, help="number of signals to workers")
    p.add_argument("--controller", type=int, default=5, help="number of SIGKILLs to the controller")
    p.add_argument("--trainer", type=int, default=5, help="number of SIGKILLs to the trainer")
    p.add_argument("--fork-server", type=int, default=0, help="number of SIGKILLs to the fork server")
    p.add_argument("--run", type=int, default=0, help="number of SIGKILLs to all processes, each followed by resume")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--steps", type=int, default=0, help="default: enough for the signals")
    p.add_argument("--workers", type=int, default=3)
    p.add_argument("--staleness", type=int, default=0, help="bound on staleness; above 0, training is asynchronous")
    p.add_argument("--experts", action="store_true", help="train a model with experts, and compare their choice")
    p.add_argument("--on-new-weights", choices=["interrupt", "finish"], default="interrupt")
    p.add_argument("--gap-s", type=float, default=0.7, help="mean seconds between two signals")
    p.add_argument("--patience-s", type=float, default=90.0, help="a run without a step for this many seconds is stuck")
    p.add_argument("--keep", type=Path, help="write the runs to this folder and leave them there")
    a = vars(p.parse_args())
    keep = a.pop("keep")
    a["steps"] = a["steps"] or 10 + a["kills"] // 2
    plan = Plan(**a)
    with tempfile.TemporaryDirectory(prefix="windfall-soak-") as temporary:
        folder = (keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        mark, began = uuid.uuid4().hex, time.monotonic()
        if plan.experts:
            expert_routes.write_model(folder / "experts")
        if plan.deterministic:
            alone(plan, folder)
        alone_s = time.monotonic() - began
        status, dealt = hunted(plan, folder, mark)
        wrong = wrongs(plan, folder, status, mark)
        if not wrong:
            table(plan, folder, dealt, alone_s, time.monotonic() - began - alone_s)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
