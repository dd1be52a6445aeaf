"""What the console shows, from events alone. Numbers and paths are checked, rarely the wording around them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console as Terminal
from rich.text import Text as Plain

from windfall.controller.cost.bill import Gathering, Totals, priced
from windfall.events.log import Event, EventLog, read
from windfall.recipe.sections import Recipe
from windfall.run.views import figures
from windfall.run.views.console import LINES, Console
from windfall.run.views.summary import BARS, spark, summarize

FOLDER = Path("runs/a [/b] c")  # invalid as markup, and three words in a shell


def scalar(name: str, **fields: Any) -> Event:
    return {"t": 1.0, "m": 1.0, "kind": "scalar", "name": name, **fields}


def span(name: str, **fields: Any) -> Event:
    return {"t": 1.0, "m": 1.0, "kind": "span", "name": name, **fields}


def step(number: int, reward: float | None, **fields: Any) -> Event:
    return scalar("step", step=number, reward=reward, **{
        "responses": 4, "groups": 2, "missing": 0, "mean_length": 12.5, "cut": 0.0, "made": 1000, "s": 2.0,
        "tok_per_s": 500.0, "grad_norm": 0.1, "lr": 1e-4, "entropy": 0.7, "engine_gap": 0.0, "engine_gap_max": 0.0,
        "clipped": 0.0, "kl": 0.0, "trained": 1000} | fields)  # fmt: skip


def test_start_says_what_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    Console(Recipe(), FOLDER).starting("converting [x] into /cache: once")
    assert capsys.readouterr().out.splitlines() == [
        "converting [x] into /cache: once ...",
        "starting the trainer with tiny ...",
    ]


def summary(events: list[Event]) -> str:
    return "\n".join(Plain.from_markup(line).plain for line in figures.labeled(summarize(events)))


def printed(events: list[Event], folder: Path, *, finished: bool) -> str:
    """The whole summary, as the run of this folder ends with it."""
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    console = Console(Recipe(), folder)
    with console._out.capture() as captured:
        console.summary(finished=finished)
    return captured.get()


def bill(**holders: tuple[float, float | None]) -> dict[str, Any]:
    """A bill from the seconds of generation and the $ per hour of each holder."""
    made = {h: priced({"generating": s}, usd, 1000) for h, (s, usd) in holders.items()}
    return msgspec.to_builtins(Totals(holders=made))


def test_skipped_updates_are_summed_by_cause() -> None:
    events = [step(1, 0.5, updates_skipped=3, updates_not_finite=2), step(2, 0.5, updates_skipped=1)]
    text = summary(events)
    assert "2 (no usable gradient;" in text
    assert "2 (gradient not finite;" in text


def test_damaged_log_costs_the_summary_and_not_the_run(tmp_path: Path) -> None:
    events = [step(1, 0.5), step(2, 0.5, bill={"holders": [1]})]
    text = printed(events, tmp_path / "run", finished=False)
    assert "some events are damaged, so there is no summary" in text
    assert "resume with" in text


def test_cost_per_step_and_per_run(capsys: pytest.CaptureFixture[str]) -> None:
    cost = bill(trainer=(3600.0, 20.0), spot=(3600.0, 5.0))
    void = {"t": 1.0, "m": 1.0, "kind": "scalar", "name": "void", "bill": bill(spot=(3600.0, 5.0))}
    end = {"t": 1.0, "m": 1.0, "kind": "instant", "name": "end", "bill": bill(trainer=(1800.0, 20.0))}
    events = [step(1, 0.5, bill=cost, trained=1_000_000), void, step(2, 0.5, bill=cost, trained=1_000_000), end]
    assert "$65.00, $32.50 per million trained tokens" in summary(events)  # 2 x 25, 5 for a void step, 10
    assert "at least" not in summary(events)
    unknown = step(3, 0.5, bill=bill(trainer=(3600.0, 20.0), spot=(3600.0, None)), trained=1_000_000)
    assert "at least" in summary([*events, unknown])
    with Console(Recipe(), FOLDER) as console:
        console.show(events[0])
        console.show(unknown)
        out = capsys.readouterr().out
    assert "  $25.00/M tok" in out
    assert "  at least $20.00/M tok" in out


def test_advice_is_shown_once_when_it_asks_for_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    def advice(now: int, count: int) -> Event:
        figures = {"tokens_per_usd_now": 100.0, "tokens_per_usd_best": 126.0}
        return {
            "kind": "instant",
            "name": "advice",
            "lease": "spot H200",
            "now": now,
            "count": count,
            "why": "so",
        } | figures

    with Console(Recipe(), FOLDER) as console:
        for now, count in ((1, 1), (1, 3), (2, 3), (3, 3), (3, 2)):
            console.show(advice(now, count))
    lines = [line for line in capsys.readouterr().out.splitlines() if "advice" in line]
    assert [line.split()[1] for line in lines] == ["3", "2"]
    assert "(+26% tokens per dollar)" in lines[0]


def test_summary_of_a_finished_run(tmp_path: Path) -> None:
    events = [
        scalar("eval", step=0, reward=0.125, tasks=8),
        span("rollout", step=1, s=1.5),
        span("train", step=1, s=0.5, early_s=0.5),
        step(1, 0.25),
        span("rollout", step=2, s=1.5),
        span("train", step=2, s=0.5, early_s=0.5),
        step(2, 0.75),
        span("checkpoint", step=2, s=0.1, path=f"{FOLDER}/checkpoints/step-000002"),
        span("checkpoint", step=2, s=0.1, error="OSError"),
        scalar("eval", step=2, reward=0.875, tasks=8),
    ]
    text = printed(events, tmp_path / FOLDER, finished=True)
    assert "0.125 before, 0.875 after" in text
    assert f"0.250 first, 0.750 last   {BARS[0]}{BARS[-1]}" in text
    assert "2,000 generated, 500 tok/s" in text
    assert f"windfall generate '{tmp_path / FOLDER}' --prompt '12+34-5='" in text
    assert f"windfall eval '{tmp_path / FOLDER}'" in text
    assert "resume" not in text


def test_summary_of_a_stopped_run_says_how_to_resume(tmp_path: Path) -> None:
    aborted = span("rollout", step=2, s=60.0, error="Stopped")
    text = printed([step(1, 0.5, missing=3), aborted], tmp_path / FOLDER, finished=False)
    assert f"windfall resume '{tmp_path / FOLDER}'" in text
    assert "rewards missing            3" in text
    assert "generate " not in text


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    "events",
    [
        [],
        [scalar("eval", step=0, reward=None, tasks=0)],
        [step(1, None, s=0.0, made=0)],
        [step(1, None), step(2, 0.5), step(3, None)],
    ],
    ids=["empty", "no reward in eval", "nothing made", "some rewards"],
)
def test_summary_of_runs_with_few_events(events: list[Event], finished: bool, tmp_path: Path) -> None:
    text = printed(events, tmp_path / FOLDER, finished=finished)
    assert str(FOLDER) in text
    assert "nan" not in text
    assert ("0.500 first, 0.500 last" in text) == (len(events) == 3)


def test_spark_by_hand() -> None:
    assert spark([]) == ""
    assert spark([3.0]) == BARS[0]
    assert spark([2.0, 2.0]) == BARS[0] * 2
    assert spark([float(i) for i in range(8)]) == BARS
    assert spark([0.0, 0.0, 4.0, 4.0], width=2) == BARS[0] + BARS[-1]


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 50))
def test_spark_fits_and_touches_both_ends(values: list[float], width: int) -> None:
    line = spark(values, width)
    assert 1 <= len(line) <= width
    assert BARS[0] in line
    assert (BARS[-1] in line) == (len(set(line)) > 1)


EVENTS = [
    span("load", model="tiny", s=0.1),
    {"kind": "instant", "name": "start", "step": 0, "steps": 2, "parameters": 800_256, "device": "cpu",
     "dtype": "float32", "kv_tokens": 288, "max_running": 4, "micro_tokens": 4096, "checkpoint_activations": False},
    {"kind": "instant", "name": "resumed", "step": 0, "checkpoint": "x"},
    span("eval", step=0, s=0.1),
    scalar("eval", step=0, reward=0.5, tasks=4),
    scalar("eval", step=0, reward=0.25, tasks=4, on="4 rows of [test].jsonl"),
    scalar("eval", step=0, reward=None, tasks=0),
    {"kind": "instant", "name": "eval_warning", "why": "rows of [train].jsonl"},
    {"kind": "instant", "name": "chat_warning", "why": "chat.arguments.[x] has no effect"},
    {"kind": "instant", "name": "journal_lost", "step": 2, "file": "000002.wal", "why": "it is damaged at byte 9 of 90",
     "bytes": 81},
    {"kind": "instant", "name": "journal_lost", "step": 2, "file": "000002.wal", "why": "it is gone", "bytes": 0},
    {"kind": "instant", "name": "kv_dtype", "step": 2, "kv_dtype": "bf16", "gap": None, "why": "in fp8, [x]"},
    {"kind": "instant", "name": "reward_missing", "response": "0/1", "error": "list[/] index [bold out of range"},
    span("rollout", step=1, tokens=7, s=0.1),
    span("train", step=1, early_s=0.0, s=0.1),
    {"kind": "instant", "name": "update_skipped", "step": 1, "why": "the gradient was not finite"},
    step(1, 0.5, missing=1),
    step(2, None, grad_norm=None, entropy=None, mean_length=0.0),
    span("checkpoint", step=2, path="x", s=0.1),
    {"kind": "instant", "name": "stopped", "step": 2},
    {"kind": "instant", "name": "end", "step": 2, "finished": True},
    {"kind": "instant", "name": "of a later windfall"},
]  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_console_shows_every_kind_of_event(terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(
        "windfall.run.views.console.Terminal", lambda **o: Terminal(**o, file=out, force_terminal=terminal)
    )
    folder = tmp_path / FOLDER.name.replace("/", "")
    console = Console(Recipe(), folder)
    with console:
        console.show(step(1, 0.5))  # before the start there is no bar yet
        for event in EVENTS:
            console.show(event)
    text = out.getvalue()
    assert "list[/] index [bold out of range" in text
    for line in (
        "eval after step 0: reward 0.250 on 4 rows of [test].jsonl",
        "rows of [train].jsonl",
        "the KV cache is in bf16 from now on, after step 2: in fp8, [x]",
        "000002.wal: it is damaged at byte 9 of 90 (81 bytes); what was in them is generated again",
    ):
        assert terminal or line in text.replace("\n", ""), line
    assert folder.name in text.replace("\n", "")
    log = EventLog(folder / "events.jsonl")
    log.close()
    console.summary(finished=False)
    assert read(log.path) == []


def test_ids_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Console(Recipe(), tmp_path).show(scalar("tinker_model", account="alice", model="1b:train:0", rank=4))
    assert "alice: model 1b:train:0, rank 4" in capsys.readouterr().out


def test_step_without_a_gradient_shows_zero() -> None:
    line = Console(Recipe(), FOLDER)._line(step(1, 0.0, grad_norm=0.0))
    assert "nan" not in line
    assert "grad 0.000" in line


def test_gap_is_shown_again_only_when_it_has_doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("windfall.run.views.console.Terminal", lambda **o: Terminal(**o, file=out, width=300))
    console = Console(Recipe(), tmp_path)
    for step, mean in enumerate((0.06, 0.07, 0.1, 0.13, 0.14, None), 1):
        console.show({"kind": "instant", "name": "engine_gap", "step": step, "mean": mean, "max": 1.0, "alarm": 0.05})
    lines = out.getvalue().splitlines()
    assert ["step 1:" in lines[0], "step 4:" in lines[1], len(lines)] == [True, True, 3]
    assert "in step 6: their log-probs differ by inf nats" in lines[2]
    assert "train.engine_gap_limit = 0.3" in lines[0]


def test_worker_that_is_too_small_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("windfall.run.views.console.Terminal", lambda **o: Terminal(**o, file=out, width=300))
    console = Console(Recipe(), tmp_path)
    for n in range(5):
        event = {"kind": "instant", "name": "work_rejected", "worker": "w1", "response": f"{n}/0", "tokens": 99}
        console.show({**event, "why": "does not fit"})
    console.show({"kind": "instant", "name": "no_room", "response": "1/0", "tokens": 99, "most": 40.0})
    console.show({"kind": "instant", "name": "worker_stuck", "worker": "w2", "why": "no byte in 60 s"})
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert "w1 cannot run responses of 99 tokens" in lines[0]
    assert "no worker has more than 40" in lines[1]
    assert "w2 dismissed: no byte in 60 s" in lines[2]


def stale_step(number: int, counts: list[int], **fields: Any) -> Event:
    """A step of an asynchronous run, with the fields that the controller writes."""
    values = [n for n, count in enumerate(counts) for _ in range(count)]
    return step(number, 0.5, **{
        "staleness_mean": sum(values) / len(values) if values else None, "staleness_max": max(values, default=0),
        "staleness_counts": counts, "too_old": 0, "too_old_tokens": 0, "held_s": 0.0, "train_wait_s": 0.0,
        "train_s": 1.0, "capped": 0.0, "drift": 0.0, "staleness_bound": 2} | fields)  # fmt: skip


def step_line(event: Event) -> str:
    return Plain.from_markup(Console(Recipe(), FOLDER)._line(event)).plain


def test_step_line_shows_what_staleness_cost() -> None:
    lost = {"too_old": 3, "too_old_tokens": 1204, "train_wait_s": 1.2, "held_s": 0.44}
    line = step_line(stale_step(7, [6, 4], **lost))
    assert line.endswith("2.0 s  stale 0.4 (max 1, bound 2)  too old 3 (1,204 tok)  waited 1.2 s  held 0.4 s")
    assert step_line(stale_step(7, [0, 0, 8], held_s=2.0)).endswith("stale 2.0 (max 2, bound 2)  held 2.0 s")
    fresh = step_line(stale_step(7, [8, 0], train_wait_s=0.04, held_s=0.04))
    assert fresh.endswith("2.0 s  stale 0.0 (max 0, bound 2)")


@pytest.mark.parametrize(
    "quiet",
    [
        step(7, 0.5, train_wait_s=3.0, capped=0.1, drift=0.2),
        stale_step(7, []),
    ],
    ids=["synchronous", "nothing trained"],
)
def test_step_line_is_the_same_where_staleness_says_nothing(quiet: Event) -> None:
    assert step_line(quiet) == step_line(step(7, 0.5))


def test_step_line_shows_drafts_that_help() -> None:
    fields = {"drafted": 1000, "drafts_accepted": 381, "tokens_per_step": 1.42}
    line = step_line(step(7, 0.5, **fields, drafts_gain=1.214))
    assert line.endswith("drafts: 1.42 tokens per step, 38% of 1,000 accepted, 1.21x as fast as without")
    for unhelpful in ({**fields, "drafts_gain": 1.01}, fields, {}):
        assert "drafts" not in step_line(step(7, 0.5, **unhelpful))


def test_step_line_says_what_came_from_the_journal() -> None:
    assert "  from the journal  " in step_line(step(7, 0.5, restored=1000, tok_per_s=0.2))
    for generated in ({"restored": 1000}, {"restored": 0, "tok_per_s": 0.0}):
        assert " tok/s  " in step_line(step(7, 0.5, **generated))


def test_summary_says_what_gathering_brought() -> None:
    bills = [msgspec.to_builtins(Totals(gathering=Gathering(moves=n, sooner_s=2.0 * n, usd=0.1))) for n in (1, 2)]
    line = "moving the last responses of steps together saved about 6.0 s and $0.20 (3 moves)"
    assert line in summary([step(n, 0.5, bill=bill) for n, bill in enumerate(bills)])
    assert "moving" not in summary([step(1, 0.5)])
    nothing = msgspec.to_builtins(Totals(gathering=Gathering(moves=2, sooner_s=0.01)))
    assert "moving" not in summary([step(1, 0.5, bill=nothing)])


def test_summary_adds_up_staleness_over_the_run() -> None:
    events = [
        stale_step(1, [8], made=3000, s=4.0, train_wait_s=2.0, trained=3000),
        stale_step(2, [1, 5, 2], too_old=2, too_old_tokens=60, held_s=0.5, capped=0.04, trained=1000, s=4.0),
        stale_step(3, [], made=2000, too_old=1, too_old_tokens=30, held_s=1.0, s=2.0, trained=0, capped=None),
    ]
    lines = summary(events).splitlines()
    first = next(i for i, line in enumerate(lines) if "staleness" in line)
    assert lines[first : first + 4] == [
        "  staleness                  0.56 mean, 2 max, bound 2",  # (5 + 2 * 2) / 16
        "  dropped as too old         1.5% of sampled tokens: 90 in 3 responses",  # of 3,000 + 1,000 + 2,000
        "  trainer waited             20.0% of the time: 2.0 s",  # of 4 + 4 + 2
        "  generation held back       1.5 s, to keep responses fresh",
    ]


def test_summary_of_a_synchronous_run_does_not_mention_staleness() -> None:
    plain = [step(1, 0.5), step(2, 0.5)]
    measured = [{**e, "train_wait_s": 1.0, "capped": 0.1, "drift": 0.1} for e in plain]
    assert summary(measured) == summary(plain)


def test_summary_of_a_run_that_became_asynchronous_counts_only_those_steps() -> None:
    """`rollout.staleness` may change on resume."""
    text = summary([step(1, 0.5, train_wait_s=2.0), stale_step(2, [4], train_wait_s=1.0)])
    assert "trainer waited             50.0% of the time: 1.0 s" in text  # 1 of the 2 s of step 2


def test_summary_of_stale_steps_without_trained_responses() -> None:
    text = summary([stale_step(1, [], made=0, s=0.0, trained=0)])
    assert "mean" not in text
    assert "dropped as too old         0% of sampled tokens" in text


@pytest.mark.parametrize("name", LINES)
def test_templates_use_fields_of_their_event(name: str) -> None:
    """The documentation of the event log names every event that is shown."""
    assert f"`{name}`" in (Path(__file__).parents[3] / "docs" / "events.md").read_text(encoding="utf-8")
