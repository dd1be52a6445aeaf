"""Runs with several policies: what the step line, the summary and `windfall top` say of each, and that the dollars of
all policies add up to the bill."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as Terminal
from rich.text import Text

from windfall.controller.cost.bill import Account, Holder, Totals, priced
from windfall.events.log import Event
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.run.views import figures, top
from windfall.run.views.console import Console
from windfall.run.views.policy_costs import PolicyCosts
from windfall.run.views.summary import summarize

BASES = {"solver": ["solver", "verifier"], "judge": ["judge"]}


def recipe() -> Recipe:
    adapter = {"lora": {"rank": 4}}
    return parse_recipe({"policies": {"solver": adapter, "verifier": adapter}, "run": {"steps": 9}}, where="here")


def event(kind: str, name: str, **fields: Any) -> Event:
    return {"t": 1.0, "m": 1.0, "kind": kind, "name": name, **fields}


def bill(trainer_usd: float, spot_usd: float, **tokens: int) -> dict[str, Any]:
    """A trainer that both policies share, and workers with the tokens of each."""
    trainer = Account(seconds={"paused": 1.0}, usd={"paused": trainer_usd})
    spot = Account(
        seconds={"generating": 1.0}, usd={"generating": spot_usd}, tokens=sum(tokens.values()), tokens_of=tokens
    )
    return msgspec.to_builtins(Totals(holders={"trainer": trainer, "spot": spot}, trainers={"solver": trainer}))


def step(policy: str, number: int, **fields: Any) -> Event:
    plain = {
        "reward": 0.5, "missing": 0, "mean_length": 12.5, "made": 1000, "s": 10.0, "tok_per_s": 500.0,
        "grad_norm": 0.1, "entropy": 0.7, "trained": 1_000_000, "train_wait_s": 4.0,
    }  # fmt: skip
    return event("scalar", "step", policy=policy, step=number, **(plain | fields))


def two_steps() -> list[Event]:
    """Two steps of each policy. The verifier's come right after the solver's, so almost all of a bill is in those."""
    events = [event("instant", "start", step=0, steps=9, bases={"solver": ["solver", "verifier"]})]
    events += [event("scalar", "eval", step=0, policy=p, reward=0.1) for p in ("solver", "verifier")]
    for n in (1, 2):
        events += [event("span", "train", policy=p, step=n, s=s) for p, s in (("solver", 3.0), ("verifier", 1.0))]
        events.append(step("solver", n, reward=n / 10, bill=bill(4.0, 6.0, solver=20, verifier=10)))
        late = bill(0.0, 0.0, solver=0, verifier=0)
        events.append(step("verifier", n, reward=n / 5, made=0, trained=500_000, train_wait_s=8.0, bill=late))
    return events


def test_step_line_has_the_policy_its_wait_and_its_own_dollars() -> None:
    console = Console(recipe(), Path("runs/two"))
    with console._out.capture() as captured:
        for e in two_steps():
            if e["name"] != "start":
                console.show(e)
        console.show(event("instant", "resumed", step=1, policy="verifier"))
    lines = captured.get().splitlines()
    assert lines[1] == "eval of verifier after step 0: reward 0.100"
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split("  reward")[0] for line in steps] == [
        "step    1/9 solver  ", "step    1/9 verifier", "step    2/9 solver  ", "step    2/9 verifier",
    ]  # fmt: skip
    assert "  $7.00/M tok  waited 4.0 s" in steps[2]  # 3 / 4 of the trainer's $4, 2 / 3 of the workers' $6
    assert "  $6.00/M tok  waited 8.0 s" in steps[3]  # $1 + $2 for half a million tokens
    assert lines[-1] == "verifier: continuing after step 1"


def test_summary_has_every_policy() -> None:
    text = [Text.from_markup(line).plain for line in figures.labeled(summarize(two_steps()))]
    assert [line.split()[0] for line in text[:2]] == ["solver", "verifier"]
    assert "2 steps, 2,000,000 tokens trained, $14.00; waited 40.0% of the time" in text[0]
    assert "2 steps, 1,000,000 tokens trained, $6.00; waited 80.0% of the time" in text[1]
    found = {line[2:28].rstrip(): line[29:] for line in text}
    assert found["solver: training reward"].startswith("0.100 first, 0.200 last")
    assert found["verifier: training reward"].startswith("0.200 first, 0.400 last")
    assert found["tokens"] == "2,000 generated, 100 tok/s including training"  # steps of both overlap: 20 s
    assert found["cost"].startswith("$20.00, $6.67 per million")


amounts = st.floats(0, 1e3)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["solver", "verifier", "judge"]), st.sampled_from(["step", "void", "eval", "end"]),
            amounts, amounts, st.dictionaries(st.sampled_from(["solver", "verifier", "judge"]), st.integers(0, 999)),
            amounts,
        ),
        max_size=8,
    )
)  # fmt: skip
def test_dollars_of_policies_add_up_to_the_bill(
    story: list[tuple[str, str, float, float, dict[str, int], float]],
) -> None:
    """Two trainers, of which two policies share one; bills of steps, of steps that a resume made void, of evaluations
    and of the end of a run; workers with tokens of some policies or of none; traffic, that belongs to nobody."""
    costs = PolicyCosts()
    costs.add(event("instant", "start", step=0, bases=BASES))
    shown = 0.0
    for policy, name, trainer_s, spot_s, tokens, train_s in story:
        base = "judge" if policy == "judge" else "solver"
        trainer = priced({"paused": trainer_s}, 36.0, 0)
        holders: dict[Holder, Account] = {
            "trainer": trainer, "spot": priced({"generating": spot_s}, 3.6, sum(tokens.values()), tokens),
            "traffic": Account(usd={"traffic": spot_s / 100}),
        }  # fmt: skip
        costs.add(event("span", "train", policy=policy, step=1, s=train_s))
        made = msgspec.to_builtins(Totals(holders=holders, trainers={base: trainer}))
        costs.add(event("scalar", name, policy=policy, step=1, bill=made))
        shown += costs.since_shown(policy) or 0.0
    shown += sum(costs.since_shown(policy) or 0.0 for policy in ("solver", "verifier", "judge"))
    assert sum(costs.usd_of().values()) == pytest.approx(costs.bill.all.total_usd)
    assert shown == pytest.approx(costs.bill.all.total_usd)


def test_top_has_a_line_for_every_policy_and_versions_of_all() -> None:
    stale = {"bound": 2, "counts": [3], "mean": 0.4, "max": 1, "train_wait_s": 1.2, "held_s": 0.0}
    policies = {
        "solver": {"step": 3, "version": 3, "staleness": stale, "train_wait_s": 1.2, "weights": {}},
        "verifier": {"step": 5, "version": 5, "staleness": None, "train_wait_s": 0.7, "weights": {}},
        "reference": {"step": None, "version": 0, "staleness": None, "train_wait_s": None, "weights": {}},
    }
    worker = {
        "worker": "w1", "kind": "spot", "device": "H200", "price_usd_per_h": 0.0, "state": "ready", "running": 5,
        "slots": 8, "tok_per_s": 10.0, "made": 7, "moved": 0, "age_s": 3.0, "why": "", "version": 3,
    }  # fmt: skip
    held = {"base": "solver", "versions": {"solver": 3, "verifier": 4, "reference": -1}}
    counts = {"moved": 4, "accepted": 1000, "repeated": 1, "late": 2}
    snapshot = {
        "t": time.time(), "run": "r", "steps": 9, "ended": False, "queued": 7, "open": 12, "lost": 1, "counts": counts,
        "policies": policies, **policies["solver"], "workers": [worker | held],
    }  # fmt: skip
    out = Terminal(width=160, highlight=False)
    with out.capture() as captured:
        out.print(top.table(snapshot, live=True, run=Path("runs/r")))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert lines[0] == "r: running"
    assert lines[2:5] == [
        "solver: step 3/9, version 3; stale 0.4 (max 1, bound 2); waited 1.2 s",
        "verifier: step 5/9, version 5; waited 0.7 s",
        "reference: not trained, version 0",
    ]
    assert "solver 3/4/-" in lines[-1]
