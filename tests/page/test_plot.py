from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_run import event, small_log, write_run
from windfall.errors import WindfallError
from windfall.page.plot import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = small_log(5)
    for name in ("w10", "w3"):
        log.insert(6, event(1, "instant", "worker_joined", worker=name, lease="spot", device="cpu", age_s=0.5))
    return write_run(tmp_path / "run", log)


def test_runs_are_lines_of_one_figure(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", small_log(3))
    text = main([run, other], tmp_path / "figure.svg", panels=[], by_time=False).read_text()
    for word in ("run", "other", "reward", "throughput (tok/s)", "cost so far ($)"):
        assert f">{word}</text>" in text, word
    assert ">2.5</text>" not in text  # half a step
    assert "staleness" not in text  # no run has it


def test_legend_names_the_held_out_dots(run: Path, tmp_path: Path) -> None:
    log = [*small_log(3), event(9, "scalar", "eval", step=3, reward=0.5)]
    evaluated = write_run(tmp_path / "evaluated", log)
    text = main([evaluated], tmp_path / "one.svg", panels=[], by_time=False).read_text()
    assert all(f">{word}</text>" in text for word in ("training tasks", "held-out tasks"))
    assert "held-out" not in main([run], tmp_path / "none.svg", panels=[], by_time=False).read_text()


def test_the_timeline_of_several_runs_is_that_of_the_first(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", small_log(3))
    text = main([run, other], tmp_path / "figure.svg", panels=["timeline"], by_time=False).read_text()
    names = [text.index(f">{name}</text>") for name in ("trainer", "w0", "w1", "w2", "w3", "w10")]
    assert names == sorted(names)


def test_an_evaluation_with_missing_rewards_says_so(tmp_path: Path) -> None:
    counts = [{}, {"graded": 4, "responses": 4}, {"graded": 3, "responses": 4}]  # the first: of an older version
    evals = [event(20 + n, "scalar", "eval", step=n, reward=0.5, **count) for n, count in enumerate(counts)]
    run = write_run(tmp_path / "run", [*small_log(5), *evals])
    text = main([run], tmp_path / "figure.svg", panels=["reward"], by_time=False).read_text()
    assert text.count(" graded</text>") == text.count(">3 of 4 graded</text>") == 1


def test_png_and_pdf(run: Path, tmp_path: Path) -> None:
    for suffix, begin in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
        assert main([run], tmp_path / f"f{suffix}", panels=["reward"], by_time=True).read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("out", "panels", "error"),
    [
        ("a.jpg", [], "unknown format '.jpg'"),
        ("a.png", ["rewrd"], "unknown panel 'rewrd'"),
        ("file/a.png", [], "cannot write the figure"),
    ],
)
def test_what_cannot_be_drawn_is_refused(run: Path, tmp_path: Path, out: str, panels: list[str], error: str) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(WindfallError, match=error):
        main([run], tmp_path / out, panels=panels, by_time=False)


@pytest.mark.parametrize("panels", [[], ["timeline"], ["reward"]])
def test_a_run_without_steps_is_refused(tmp_path: Path, panels: list[str]) -> None:
    with pytest.raises(WindfallError, match="nothing to plot yet"):
        main([write_run(tmp_path / "run", [])], tmp_path / "a.png", panels=panels, by_time=False)
