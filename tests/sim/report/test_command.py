"""The command `windfall sim`: the table, the files, rejected input, and calibration."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windfall.errors import WindfallError
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.run import cli
from windfall.sim.core.scenario import build, read_lengths
from windfall.sim.report import variants
from windfall.step_time import StepPoint, fit

HARVEST = str(Path(__file__).parent.parent.parent.parent / "recipes" / "sim-harvest.toml")
QUICK = ["--set", "run.steps=3", "--set", "rollout.groups=8", "--set", "sim.skip_steps=1"]


def run_sim(*words: str) -> str:
    done = CliRunner().invoke(cli.app, ["sim", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


@pytest.mark.slow
def test_variants_are_compared(tmp_path: Path) -> None:
    out = run_sim(HARVEST, *QUICK, "--compare", "colocated,restart,windfall", "--seeds", "2", "--out", str(tmp_path))
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.count("%") == 4}
    assert list(rows) == ["colocated", "restart", "windfall"]
    assert rows["colocated"][1] == rows["colocated"][3] == "1.00"
    assert "virtual s in" in out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["windfall"]["runs"]) == 2
    assert figures["windfall"]["spreads"]["tok_per_s"]["mean"] > figures["colocated"]["spreads"]["tok_per_s"]["mean"]
    logs = {f"{name}-{seed}.jsonl" for name in rows for seed in (0, 1)}
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json", *logs}


def test_failing_variant_does_not_stop_the_others(tmp_path: Path) -> None:
    """Workers boot longer than the simulation runs, so a trainer that only trains gets no samples."""
    late = ["--set", "sim.seconds=12", "--set", "run.steps=100", "--set", "sim.boot_s=1000"]
    words = [HARVEST, *QUICK, *late, "--out", str(tmp_path), "--compare"]
    out = run_sim(*words, "colocated,disaggregated,windfall")
    rows = [line.split()[0] for line in out.splitlines() if line.count("%") == 4]
    assert rows == ["colocated", "windfall"]
    assert "no figures for disaggregated: sim: only 0 steps were completed, and 1 are skipped. Raise run.steps" in out
    assert list(json.loads((tmp_path / "figures.json").read_text())) == ["colocated", "windfall"]
    with pytest.raises(WindfallError, match="0 steps were completed"):
        run_sim(*words, "disaggregated")


def test_every_variant_builds() -> None:
    recipe = load_recipe(Path(HARVEST))
    for name in variants.VARIANTS:
        assert build(variants.apply(recipe, name)).granule == 1
    assert variants.names("all") == list(variants.VARIANTS)
    assert not build(variants.apply(recipe, "colocated")).changes


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--compare", "colocatd"], "Did you mean 'colocated'"),
        (["--set", "sim.trainer={fixed=1.0}"], "unknown key 'fixed'"),
        (["--set", "sim.worker={fixed_s=1.0}"], "each_s must be above 0"),
        (["--set", "sim.trainer={fixed_s=1.0,each_s=1.0}"], "train_s must be above 0"),
        (["--set", "sim.worker={fixed_s=-1.0,each_s=1.0}"], "fixed_s is -1.0"),
        (["--set", "sim.medain_tokens=3"], "median_tokens"),
        (["--set", "sim.lengths_file=nowhere.txt"], "cannot read the lengths"),
        (["--set", "sim.prices_file=prices.txt"], "trace.price_usd_per_h"),
        (["--set", "sim.trainer_mean_up_s=3600"], "does not lose its trainer"),
        (["--set", "trace.nodes=0", "--set", "fleet.local=false"], "nothing could be generated"),
        (["--set", "run.steps=1"], "1 steps were completed"),
        (["second.toml"], "second.toml"),
    ],
)
def test_wrong_input_is_rejected(words: list[str], why: str) -> None:
    with pytest.raises(WindfallError, match=why):
        run_sim(HARVEST, *words)


def test_lengths_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("40\n40\n40\n")
    recipe = load_recipe(Path(HARVEST), [f"sim.lengths_file={tmp_path / 'lengths.txt'}"])
    assert build(recipe).policies[""].lengths.draw(12, 7) == 40


def test_lengths_from_a_run(tmp_path: Path) -> None:
    run_sim(HARVEST, *QUICK, "--out", str(tmp_path))
    log = tmp_path / "windfall-0.jsonl"
    found = read_lengths(log)
    assert len(found) == 3 * 8 * 8
    assert 50 < statistics.median(found) < 110, "drawn with a median of 75"
    assert build(load_recipe(Path(HARVEST), [f"sim.lengths_file={log}"])).policies[""].lengths.draw(12, 7) in found
    log.write_text(log.read_text().replace('"lengths"', '"length"'))
    with pytest.raises(WindfallError, match="not a list of lengths"):
        read_lengths(log)


# calibration


@pytest.mark.slow
def test_log_of_a_run_reproduces_its_service_times(tmp_path: Path) -> None:
    run_sim(HARVEST, "--set", "run.steps=8", "--set", "sim.granule=2", "--out", str(tmp_path))
    out = run_sim("calibrate", str(tmp_path / "windfall-0.jsonl"))
    tables = {}
    for row in out.splitlines():
        if row.startswith("[sim."):
            tables[row.strip("[]")] = kept = {}
        elif " = " in row and not row.startswith("#"):
            key, _, value = row.partition(" = ")
            kept[key] = float(value)
    assert tables["sim.trainer"]["train_s"] == pytest.approx(0.000185, rel=0.05)
    for name, fixed_s, each_s in (("sim.trainer", 0.006, 0.00012), ("sim.worker", 0.008, 0.0006)):
        for batch in (4, 64):
            found = tables[name]["fixed_s"] + tables[name]["each_s"] * batch
            assert found == pytest.approx(fixed_s + each_s * batch, rel=0.15)
    assert "set sim.lengths_file" in out


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"t": 1}\n'])
def test_file_without_measurements_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(WindfallError, match=r"events\.jsonl"):
        run_sim("calibrate", str(path))


def test_fit_is_never_negative() -> None:
    flat = fit([StepPoint(1, 0.01), StepPoint(100, 0.005)], 1e-4)
    assert flat.each_s == pytest.approx(1e-4 * flat.fixed_s), "faster with a larger batch: fitted as flat"
    assert fit([StepPoint(1, 0.001), StepPoint(100, 0.2)], 1e-4).fixed_s > 0
    assert fit([StepPoint(8, 0.5)], 1e-4).step_s(8) == pytest.approx(0.5)


def test_small_recipe_is_valid(recipe: Callable[..., Recipe]) -> None:
    assert build(recipe()).quantum_s == 0.0
    assert build(recipe(sim={"granule": 4})).quantum_s > 0
