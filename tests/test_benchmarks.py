"""Benchmarks that the docs name keep running: those that need neither a GPU nor minutes, in a small form."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import calibrate_gpu
from benchmarks.fleet import agents, intake
from benchmarks.jobs import together
from benchmarks.papers import rose_table as table
from benchmarks.papers import seer_table
from benchmarks.plan import plan_fit
from benchmarks.serve import beside_vllm as bench
from benchmarks.serve import coserve
from benchmarks.staleness import age, curve, learning
from benchmarks.support import coserve_load as load_of
from benchmarks.train import long_context, rank_budget, ranks_one_gpu, scale
from benchmarks.train import publish_ranks as ranks
from benchmarks.train import slots as slots_benchmark
from tests.support.ranks.rank_processes import CONTEXT
from windfall.plan.model.cost_model import Efficiency
from windfall.providers import trace
from windfall.step_time import StepTime
from windfall.types import Task, Turn

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_benchmark_can_be_imported() -> None:
    triton_only = {"gpu_kernels"}
    for path in sorted(p for p in BENCHMARKS.glob("*/*.py") if p.stem not in triton_only):
        importlib.import_module(f"benchmarks.{path.parent.name}.{path.stem}")


def test_controller_takes_in_every_token_of_the_intake_benchmark(tmp_path: Path) -> None:
    taken = asyncio.run(intake.in_process(tmp_path, workers=3, each=4, count=2, rounds=2, journaled=True))
    assert taken.tok_per_s > 0


def test_defaults_of_the_cost_model_are_a_fit_that_predicts_held_out_figures() -> None:
    fitted, used = plan_fit.fit(), Efficiency()
    assert {f.name for f in fields(used)} == {f.name for f in fields(fitted)}
    for name, value in asdict(used).items():
        assert value == (pytest.approx(getattr(fitted, name), rel=1e-5) if isinstance(value, float) else value)
    for share in (used.weights, used.kv, used.decode, used.prefill, used.train):
        assert 0 < share <= 1
    done = plan_fit.held_out()
    assert used.held_out == ", ".join(f"{part} {error:.0%}" for part, error in done.by_part().items())
    by_part: dict[str, list[float]] = {}
    for p in done.predictions:
        by_part.setdefault(p.row.part, []).append(abs(p.error))
    assert len(done.predictions) >= 15
    assert max(by_part["decode"]) < 0.06
    assert max(by_part["rollout"]) < 0.10
    assert max(by_part["train"]) < 0.13
    assert done.mean < 0.13
    assert max(by_part["publish"]) < 1.0  # one row is fitted: its fixed part cannot be known


def test_benchmark_file_is_fitted_and_its_rollouts_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("decode", f"batch {b}", 2.0 + 0.01 * b, "ms") for b in (1, 16, 64, 256)]
    rows += [("prefill", "64 x 1024", 200_000.0, "tok/s"), ("rollout", "64 x 128 in, 256 out", 20_000.0, "tok/s")]
    figures = [{"model": "m", "engine": "e", "what": w, "case": c, "value": v, "unit": u} for w, c, v, u in rows]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"figures": figures, "training": ["packed   12.0 ms    50,000 tok/s"]}))
    monkeypatch.setattr(sys, "argv", ["calibrate_gpu.py", str(path)])
    calibrate_gpu.main()
    out = capsys.readouterr().out
    for key in ("fixed_s = 0.002", "each_s = 1e-05", "prefill_s = 5e-06", "train_s = 2e-05", "mean 0.0%"):
        assert key in out
    predicted = 64 * 256 / (256 * 0.00264 + 64 * 128 / 200_000)
    assert f"held out: 64 x 128 in, 256 out: {predicted:,.0f} tok/s, measured 20,000" in out


def test_engine_that_slows_down_and_kv_cache_reads_are_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of 2 ms, plus 0.01 ms per response up to 256 and 0.1 ms above. Half of the 0.01 ms is the KV cache."""

    def step_ms(batch: int) -> float:
        return 2.0 + 0.01 * batch + 0.09 * max(0, batch - 256)

    rows = [("decode", f"batch {b}", step_ms(b), "ms", (1.0 + 0.005 * b) / step_ms(b)) for b in (1, 16, 64, 256)]
    rows += [("rollout", "1024 x 128 in, 256 out", 1024 / step_ms(1024) * 1e3, "tok/s", None)]
    rows += [("group", "16 x 8, 512 in, to 2048 out, mean 602", 20_000.0, "tok/s", None)]
    names = ("what", "case", "value", "unit", "share")
    figures = [{"model": "m", "engine": "e"} | dict(zip(names, row, strict=True)) for row in rows]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"figures": figures}))
    monkeypatch.setattr(sys, "argv", ["calibrate_gpu.py", str(path)])
    calibrate_gpu.main()
    out = capsys.readouterr().out
    for key in ("fixed_s = 0.002", "each_s = 5e-06", "over_batch = 256", "over_s = 9e-05", "above 256 responses"):
        assert key in out, key
    assert f"context_s = {0.005e-3 / 272:.6g}" in out
    assert "held out: 16 x 8, 512 in" in out
    assert "held out: 1024" not in out, "this case was fitted"
    kept = {line.split(" = ")[0]: float(line.split(" = ")[1]) for line in out.splitlines() if " = " in line}
    assert StepTime(**kept).step_s(1024, context=1024 * 272) == pytest.approx(step_ms(1024) / 1e3)


@pytest.mark.slow
def test_simulated_bound_on_staleness_holds_and_the_gate_alone_exceeds_it() -> None:
    short = {"steps": 9, "first": 2, "last": 7}
    synchronous, bounded, gate = (
        curve.simulate(curve.Case(variant=variant, staleness=staleness, **short))
        for variant, staleness in (("windfall", 0), ("windfall", 1), ("gate", 1))
    )
    assert bounded.tok_per_s > 1.5 * synchronous.tok_per_s
    assert bounded.over == 0.0
    assert bounded.dropped < 0.01
    assert bounded.cut == pytest.approx(synchronous.cut, abs=0.01)  # the longest responses are not left out
    assert gate.over > 0.0
    assert len(curve.table([synchronous, bounded])) == 3


def test_age_of_responses_is_measured_once_the_lead_has_settled() -> None:
    step = {"kind": "scalar", "name": "step", "s": 2.0, "train_wait_s": 0.5}
    at_first = [{**step, "t": 2.0 * n, "staleness_counts": [0, 0, 8]} for n in range(20)]
    settled = [{**step, "t": 2.0 * n, "staleness_counts": [4, 2, 2]} for n in range(20, 30)]
    measured = age.measure([*at_first, *settled], 2)
    assert (measured.steps_per_s, measured.wait, measured.wait_s) == (0.5, 0.25, 0.5)
    assert (measured.mean, measured.at_bound) == (0.75, 0.25)
    assert measured.row("measured", measured).split() == [
        "measured",
        "0.5000",
        "1.0000",
        "25.0%",
        "0.50",
        "0.75",
        "25.0%",
    ]


def test_rewards_after_equal_time_are_interpolated() -> None:
    assert learning.reward_at([(0, 0.0, 0.2), (5, 10.0, 0.4), (10, 20.0, 0.8)], 15.0) == pytest.approx(0.6)
    common = {"importance": "truncate", "staleness_mean": 0.0, "too_old": 0.0, "capped": 0.0, "drift": 0.0, "load": 1.0}
    slow = {**common, "seed": 0, "staleness": 0, "evaluations": [(0, 0.0, 0.0), (2, 20.0, 0.8)], "steps_s": 20.0}
    fast = {**common, "seed": 0, "staleness": 1, "evaluations": [(0, 0.0, 0.0), (2, 10.0, 0.6)], "steps_s": 10.0}
    lines = learning.table([slow, fast])
    assert "0.800 (0.800 to 0.800)" in lines[1]  # after equal steps
    assert "0.400 (0.400 to 0.400)" in lines[1]  # after the 10 s that the faster run took
    assert lines[2].count("0.600 (0.600 to 0.600)") == 2


@pytest.mark.slow
def test_writers_of_the_publishing_benchmark_agree() -> None:
    one, two = (ranks.measure(size, mib=8, share=0.03, versions=4, device="cpu") for size in (1, 2))
    assert len({tuple(t.digest for t in times) for times in (*one, *two)}) == 1
    # Each writer has its own spans, and a span has a head of some bytes.
    assert 0 < one[0][-1].delta <= two[0][-1].delta < 1.001 * one[0][-1].delta < 0.1
    assert len(ranks.row(two, 8, 2, 0.03)) == 9


def test_memory_of_a_rank_falls_in_the_benchmark_of_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale.multiprocessing, "get_context", lambda how: CONTEXT)  # new ones would import again
    monkeypatch.setattr(sys, "argv", ["train_scale", "--model", "tiny", "--ranks", "2", "--steps", "1"])
    scale.main()
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert row[:3] == ["tiny", "fsdp2", "2"]
    speed, state, paper = (float(row[i].replace(",", "")) for i in (3, 6, 7))
    assert speed > 0
    assert state == pytest.approx(paper, rel=0.1)
    assert state == pytest.approx(scale.paper_bytes("tiny", 1) / 2e6, rel=0.1)


@pytest.mark.slow
def test_ranks_on_one_device_agree_with_one_rank(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ranks_one_gpu", "--device", "cpu", "--dtype", "float32"])
    with pytest.raises(SystemExit) as ended:
        ranks_one_gpu.main()
    out = capfd.readouterr().out
    assert ended.value.code == 0, out
    assert "a rank is killed in a pass: noticed" in out
    assert "one rank from the checkpoint of several: the same version" in out


@pytest.mark.slow
def test_a_long_response_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["long_context", "--device", "cpu", "--model", "tiny", "--tokens", "40"])
    long_context.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[2] for line in lines] == ["what", "recompute"]
    assert all(float(line[-4].replace(",", "")) > 0 for line in lines)


@pytest.mark.slow
def test_slots_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["slots", "--rank", "4", "--samples", "2", "--tokens", "16"])
    slots_benchmark.main()
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.endswith(" ms")]
    half = len(lines) // 2
    assert lines[:half] == lines[half:], "the same for both kinds of adapters"
    assert {"a new adapter", "load with optimizer", "publish", "forward_backward, 32 tokens"} <= set(lines)


def test_budget_on_paper_is_shown_for_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    rank_budget.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 * 2 * 3
    assert any(line.startswith("8B") and line.endswith("fits") for line in lines)


@pytest.mark.slow
def test_affinity_saves_most_of_the_prefill_in_the_benchmark_of_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "VARIANTS", {n: agents.VARIANTS[n] for n in ("affinity", "round robin")})
    affinity, round_robin = agents.simulated(4, groups=1, cache=48_000)
    assert affinity.sampled == round_robin.sampled
    assert affinity.computed < 0.5 * round_robin.computed
    assert affinity.saved > 0.85 > round_robin.saved
    assert agents.Workload().prefill_share == pytest.approx(0.8, abs=0.03)


def test_real_engines_in_the_benchmark_of_agents() -> None:
    args = Namespace(workers=1, device="cpu", model="tiny", cache=0.5)
    work = agents.Workload(sessions=2, turns=2, prompt=32, sampled=4, observed=8, env_s=0.01)

    def measure(vocabulary: int) -> Any:
        engines, slots = agents.make_engines(args, work)
        return asyncio.run(agents.measure("affinity", engines, slots, work, {}, vocabulary))

    assert agents.vocabulary_of(args, work) == 99
    row = measure(99)
    assert (row.sampled, len(row.turn_s)) == (16, 2)
    with pytest.raises(RuntimeError, match=r"a worker was lost: .*outside the vocabulary of 1"):
        measure(1)  # it would wait forever


def test_load_of_the_serving_benchmarks(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{n:02d}.5000000,{300 + n},{40 + n}" for n in range(40)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    found = load_of.requests(trace, 30, max_prompt=310, max_output=64)
    assert [r.prompt for r in found[:12]] == [*range(302, 311), 310, 310, 310], "without the first twentieth"
    assert found[-1].at_s == pytest.approx(30.0), "one request per second"
    made = load_of.requests(None, 4000, max_prompt=10_000, max_output=10_000)
    assert 1000 < sum(r.prompt for r in made) / 4000 < 1350, "Azure's conversations have 1,155 on average"
    assert 180 < sum(r.tokens for r in made) / 4000 < 240, "and 211 generated tokens"
    plan = load_of.schedule(made, 10.0, 30.0, 4.0)
    middle = [a for a in plan if 10.0 <= a.at_s < 20.0]
    assert len(middle) == pytest.approx(400, rel=0.2)
    assert len(plan) - len(middle) == pytest.approx(200, rel=0.3)


def test_table_of_co_serving() -> None:
    times = {"requests": 10, "ttft_p50_ms": 9, "ttft_p99_ms": 20, "tpot_p50_ms": 2, "violations": 0}
    figures = [
        {"what": "rollout idle", "load": "", "values": {"rollout_tok_per_s": 1000}},
        {"what": "alone", "load": "40%", "values": {**times, "tpot_p99_ms": 2.0, "busy": 0.4, "rollout_tok_per_s": 0}},
        {"what": "windfall", "load": "40%",
         "values": {**times, "tpot_p99_ms": 2.2, "busy": 0.45, "rollout_tok_per_s": 480}},
    ]  # fmt: skip
    lines = coserve.table(figures)
    assert "+10%" in lines[2]
    assert lines[2].endswith("80%"), "480 of the 600 that an idle share of 60 % allows"


def test_no_prompt_is_sent_twice_to_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    async def ask(http: Any, url: str, arrival: Any, seed: int, vocabulary: int) -> Any:
        seeds.append(seed)
        served = bench.Served(0.0, 1)
        served.got(0.1, 1)
        return served

    async def ready() -> float:
        return 0.0

    monkeypatch.setattr(bench, "ask", ask)
    options = Namespace(
        trace=None, max_prompt=64, max_output=8, timeout=5.0, at_once=8, rates=[200.0], seconds=0.1, ttft_ms=1.0,
        tpot_ms=1.0,
    )  # fmt: skip
    asyncio.run(bench.measure("x", Namespace(url="", ready=ready), options, 100))
    assert len(seeds) == len(set(seeds)) > 40


def test_small_market_of_roses_table_has_as_large_a_share_up() -> None:
    windows, _ = table.market(None)
    for changes in windows.values():
        up = table.mean_up(trace.slots(changes, 16), 2000.0)
        quarter = table.mean_up(trace.slots(table.thinned(changes, 4), 4), 2000.0)
        assert quarter == pytest.approx(up / 4, rel=0.25), "the machines that are up first would be 3.3 to 4 of 4"
        assert table.thinned(changes, 1) == changes


@pytest.mark.slow
def test_seers_table_in_a_small_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert seer_table.median_tokens(22_000, 0.9, 10**9) == pytest.approx(22_000 / math.exp(0.9**2 / 2), rel=1e-6)
    small = replace(seer_table.SETTINGS["Moonlight"], engines=3, groups=15, size=4, mean_tokens=4000, max_tokens=12_000)
    rows = [("baseline", 1.0), ("divided", 1.41), ("speculation", 1.9)]
    seer_table.report("Moonlight", small, rows, alike=0.7, sigma=0.9, steps=2, seeds=1)
    baseline, divided, speculation = (line.split() for line in capsys.readouterr().out.splitlines())
    times = [float(row[-7].removesuffix("x")) for row in (baseline, divided, speculation)]
    assert times[0] == 1.0
    assert times[1] > 0.95
    assert times[2] > 1.4 * times[1]


def test_speeds_of_jobs_together_are_compared_with_those_alone(tmp_path: Path) -> None:
    def ran(*progress: tuple[float, float]) -> together.Ran:
        return together.Ran(folder=tmp_path, progress=list(progress))

    alone = {"a": ran((10.0, 0.0), (20.0, 1000.0)), "b": ran((30.0, 0.0), (40.0, 2000.0))}
    assert together.row(together.ALONE, alone, alone, None, False).split()[-4:] == ["150", "1.00x", "1.00", "1.00"]
    both = {
        "a": ran((50.0, 100.0), (70.0, 1100.0), (80.0, 1600.0)),
        "b": ran((60.0, 0.0), (70.0, 1600.0), (99.0, 1700.0)),
    }
    turns = tmp_path / "turns.jsonl"
    turns.write_text("".join(
        json.dumps({"device": "cpu0", "start_s": start, "end_s": end, "woke_s": woke}) + "\n"
        for start, end, woke in ((50.0, 62.0, 0.25), (61.0, 65.0, 0.0), (75.0, 90.0, 0.5))
    ))  # fmt: skip
    line = together.row(together.TURNS, alone, both, turns, False)
    # From 60 to 80: a does 50 of its 100 tokens per second, b 81.7 of its 200.
    assert "0.91x   2.00 2.45   over 20 s; busy: cpu0 50%; 2 switches, 0.8 s" in line
    with pytest.raises(RuntimeError, match="give more --steps"):
        together.window([ran((0.0, 0.0), (5.0, 1.0)), ran((6.0, 0.0), (9.0, 1.0))])


def test_environments_of_jobs_together_end_responses() -> None:
    env, task = together.Chatter(seed=1, grade_s=0.0), Task(id="1", prompt="?")
    assert env.task(3) == env.task(3) != env.task(4)
    turns, lengths = [Turn(text=str(n)) for n in range(together.PARTS)], Counter[int]()
    for first in range(600):
        mine = [Turn(text=f"{first} {turn.text}") for turn in turns]
        lengths[next(n for n in range(1, len(mine) + 1) if env.feedback(task, mine[:n]).observation is None)] += 1
    assert lengths[1] == pytest.approx(200, rel=0.3)
    assert lengths[together.PARTS] > 10, "the tail is long"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jobs_together_have_the_weights_that_they_have_alone(tmp_path: Path) -> None:
    words = ["--jobs", "2", "--steps", "4", "--groups", "2", "--tokens", "24", "--turns-only"]
    lines = together.measure(together.arguments(words), tmp_path)
    assert lines[-1].startswith(together.TURNS)
    assert lines[-1].endswith("weights equal")
