"""Traces: all formats, errors, and the rules that hold for every trace that is read, generated or cut."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windfall.errors import WindfallError
from windfall.providers import trace
from windfall.providers.trace import Change
from windfall.providers.trace_formats import parse

DATA = Path(os.environ.get("WINDFALL_TRACES", "traces"))
"""Folder with the public traces, unchanged."""
NODES = st.sampled_from(["n1", "n2", "n3", "n4"])


def up(at_s: float, node: str) -> Change:
    return Change(at_s=at_s, node=node, up=True)


def down(at_s: float, node: str) -> Change:
    return Change(at_s=at_s, node=node, up=False)


@st.composite
def traces(draw: st.DrawFn) -> list[Change]:
    """Times are whole milliseconds. Each drawn name flips the state of that node."""
    moments = sorted(draw(st.lists(st.integers(0, 50_000), min_size=1, max_size=30)))
    state: set[str] = set()
    changes = []
    for ms in moments:
        node = draw(NODES)
        changes.append(Change(at_s=ms / 1000, node=node, up=node not in state))
        state ^= {node}
    return changes


def state_at(changes: list[Change], at_s: float) -> set[str]:
    state: set[str] = set()
    for change in changes:
        if change.at_s <= at_s:
            (state.add if change.up else state.remove)(change.node)
    return state


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_lines_with_node_names_are_parsed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "0,add,node1\r", "0,add,node2\r", "", "1500,remove,node1\r", "2000,add,node1\r")
    assert trace.read(path) == [up(0, "node1"), up(0, "node2"), down(1.5, "node1"), up(2, "node1")]


def test_counts_become_named_nodes(tmp_path: Path) -> None:
    lines = ["2021-12-11, 23:59:50, 3", "2021-12-12, 00:00:00, 3", "2021-12-12, 00:00:10, 1", "2021-12-12, 00:01:00, 4"]
    changes = trace.read(write(tmp_path / "t.txt", *lines))
    assert changes[:3] == [up(0, "n1"), up(0, "n2"), up(0, "n3")]
    gone = changes[3:5]
    assert [(c.at_s, c.up) for c in gone] == [(20.0, False)] * 2
    # The lowest numbers that are down come up, in order.
    assert changes[5:] == [up(70, n) for n in [*sorted(c.node for c in gone), "n4"]]
    assert changes == trace.read(tmp_path / "t.txt")


def test_json_counts_become_named_nodes() -> None:
    said = json.dumps({"metadata": {"gap_seconds": 300}, "data": [0, 2, 2, 1, 3]})
    at = [(c.at_s, c.up) for c in parse(said, "skypilot.json")]
    assert at == [(300, True), (300, True), (900, False), (1200, True), (1200, True)]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("{", "not a valid JSON trace"),
        ("{}", "'metadata' is missing"),
        ('{"metadata": {"gap_seconds": 1}}', "'data' is missing"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds is 0"),
        ('{"metadata": {"gap_seconds": 1}, "data": [1, -1]}', r"data\[1\] is -1"),
        ('{"metadata": {"gap_seconds": 1}, "data": [1, true]}', r"data\[1\] is True"),
        ('{"metadata": {"gap_seconds": 1}, "data": 5}', "not a valid JSON trace"),
        ('{"metadata": {"gap_seconds": 1}, "data": [0, 0]}', "no node is ever up"),
    ],
)
def test_invalid_json_is_refused(said: str, why: str) -> None:
    with pytest.raises(WindfallError, match=why):
        parse(said, "skypilot.json")


def test_falling_count_takes_down_random_nodes() -> None:
    lines = [f"2021-12-11, 00:{m:02}:00, {8 - m % 2}" for m in range(60)]
    lost = [c.node for c in trace.parse("\n".join(lines), "t") if not c.up]
    assert len(lost) == 30
    assert len(set(lost)) >= 6


@pytest.mark.parametrize(
    ("lines", "ordered"),
    [
        (["7,add,a", "5,add,b", "9,remove,b"], ["5,add,b", "7,add,a", "9,remove,b"]),
        (
            ["2021-12-10, 13:09:45, 3", "2021-12-10, 13:08:45, 1", "2021-12-10, 13:10:45, 2"],
            ["2021-12-10, 13:08:45, 1", "2021-12-10, 13:09:45, 3", "2021-12-10, 13:10:45, 2"],
        ),
        (["5,add,a", "5,remove,a", "5,add,a"], ["5,add,a", "5,remove,a", "5,add,a"]),
    ],
)
def test_lines_out_of_order_are_sorted(tmp_path: Path, lines: list[str], ordered: list[str]) -> None:
    """Bamboo's trace of Google's V100s is like this, because two pollers wrote it."""
    changes = trace.read(write(tmp_path / "t.csv", *lines))
    assert changes == trace.parse("\n".join(ordered), "in order")
    assert changes[0].at_s == (0.005 if "add" in lines[0] else 0.0)


@pytest.mark.parametrize(
    ("lines", "line", "what"),
    [
        (["0,add,a", "5,add"], 2, "2 fields instead of 3"),
        (["0,add,a", "x,add,b"], 2, "'x' is not a number of milliseconds"),
        (["0,add,a", "-5,add,b"], 2, "'-5' is not a number"),
        (["0,add,a", "nan,add,b"], 2, "'nan' is not a number"),
        (["0,add,a", "5,drop,a"], 2, "'drop' is neither add nor remove"),
        (["0,add,"], 1, "the node has no name"),
        (["7,add,a", "", "5,remove,a"], 3, "node a is removed but not up"),
        (["0,add,a", "5,remove,b"], 2, "node b is removed but not up"),
        (["0,add,a", "5,add,a"], 2, "node a is already up"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], 1, "'ContextTokens' is neither"),
        (["2021-12-11, 11:11:30, 5", "0,add,a"], 2, "does not match"),
        (["2021-12-11, 11:11:30, 1000000000"], 1, "is not a number of nodes from 0 to 10000"),
        (["2021-12-11, 11:11:30, 2.5"], 1, "is not a number of nodes"),
        (["2021-13-11, 11:11:30, 2"], 1, "does not match"),
        (["0,add,a", "1" * 5000 + ",add,b"], 2, "is not a number of milliseconds"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, lines: list[str], line: int, what: str) -> None:
    path = write(tmp_path / "t.csv", *lines)
    with pytest.raises(WindfallError) as refused:
        trace.read(path)
    assert refused.value.where == f"{path}, line {line}"
    assert what in refused.value.what
    assert "All lines must be" in refused.value.fix


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="the trace is empty"):
        trace.read(write(tmp_path / "t", "", "  "))
    with pytest.raises(WindfallError, match="no node is ever up"):
        trace.read(write(tmp_path / "t", "2021-12-11, 11:11:30, 0"))
    with pytest.raises(WindfallError, match="No such file"):
        trace.read(tmp_path / "none")
    (tmp_path / "t").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WindfallError, match="not UTF-8 text"):
        trace.read(tmp_path / "t")


@given(traces())
def test_changes_are_parsed_exactly(changes: list[Change]) -> None:
    lines = [f"{round(c.at_s * 1000)},{'add' if c.up else 'remove'},{c.node}" for c in changes]
    assert trace.parse("\n".join(lines), "t") == changes


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40).filter(any))
def test_number_of_nodes_matches_every_line(counts: list[int]) -> None:
    lines = [f"2021-12-11, {m // 60:02}:{m % 60:02}:00, {count}" for m, count in enumerate(counts)]
    changes = trace.parse("\n".join(lines), "t")
    trace.check(changes)
    assert [len(state_at(changes, 60.0 * m)) for m in range(len(counts))] == counts


@given(st.text(alphabet="0123456789,-: \nadremov", max_size=80))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        changes = trace.parse(text, "t")
    except WindfallError:
        return
    trace.check(changes)


@given(
    nodes=st.integers(1, 12),
    mean_up_s=st.floats(1.0, 500.0),
    mean_down_s=st.floats(1.0, 500.0),
    seconds=st.floats(1.0, 1000.0),
    seed=st.integers(0, 2**40),
)
def test_synthetic_traces_are_valid(
    nodes: int, mean_up_s: float, mean_down_s: float, seconds: float, seed: int
) -> None:
    kw = {"nodes": nodes, "mean_up_s": mean_up_s, "mean_down_s": mean_down_s, "seconds": seconds, "seed": seed}
    changes = trace.synthetic(**kw)  # pyright: ignore[reportArgumentType]
    trace.check(changes)
    assert state_at(changes, 0.0)
    assert all(0 <= c.at_s < seconds for c in changes)
    assert {c.node for c in changes} <= {f"n{k + 1}" for k in range(nodes)}
    assert changes == trace.synthetic(**kw)  # pyright: ignore[reportArgumentType]


def test_synthetic_traces_have_the_requested_rates() -> None:
    hours = 400.0
    changes = trace.synthetic(nodes=20, mean_up_s=1800, mean_down_s=600, seconds=hours * 3600, seed=1)
    found = trace.summary(changes, hours * 3600)
    assert found.losses_per_node_hour == pytest.approx(2.0, rel=0.05)  # 12,000 losses: 5 % is 5 standard deviations
    assert found.mean_up == pytest.approx(15.0, rel=0.02)
    assert changes != trace.synthetic(nodes=20, mean_up_s=1800, mean_down_s=600, seconds=hours * 3600, seed=2)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"nodes": 0}, "number of nodes is 0"),
        ({"mean_up_s": 0.0}, "mean_up_s is 0.0"),
        ({"mean_down_s": float("nan")}, "mean_down_s is nan"),
        ({"seconds": float("inf")}, "seconds is inf"),
        ({"mean_up_s": 1e-9, "mean_down_s": 1e-9}, "more than 1000000 changes"),
    ],
)
def test_synthetic_refuses_invalid_options(wrong: dict[str, float], what: str) -> None:
    right = {"nodes": 2, "mean_up_s": 10.0, "mean_down_s": 10.0, "seconds": 100.0, "seed": 0}
    with pytest.raises(WindfallError, match=what):
        trace.synthetic(**{**right, **wrong})  # pyright: ignore[reportArgumentType]


@given(traces(), st.integers(0, 60), st.integers(1, 60))
def test_window_has_the_same_nodes(changes: list[Change], start_s: int, length_s: int) -> None:
    cut = trace.window(changes, start_s, length_s)
    if cut:
        trace.check(cut)
    assert all(0 <= c.at_s < length_s for c in cut)
    for k in range(10 * length_s):
        between_s = k / 10 + 0.0337  # between two changes, which are at hundredths, apart from rounding
        assert state_at(cut, between_s) == state_at(changes, start_s + between_s), k


@given(traces(), st.integers(1, 4))
def test_as_many_slots_are_taken_as_nodes_are_up(changes: list[Change], nodes: int) -> None:
    slots = trace.slots(changes, nodes)
    if slots:
        trace.check(slots)
    for at_s in {c.at_s for c in changes}:
        assert len(state_at(slots, at_s)) == min(nodes, len(state_at(changes, at_s)))
    assert {c.node for c in slots} <= {f"s{k + 1}" for k in range(nodes)}
    spans = [(c.at_s, d.at_s) for c, d in pairwise(sorted(slots, key=lambda c: c.node)) if c.up and c.node == d.node]
    assert all(start_s < end_s for start_s, end_s in spans), "no slot is taken by a node that goes down at once"


def test_free_slot_is_taken_by_the_node_that_waits_longest() -> None:
    changes = [up(0, "a"), up(0, "b"), up(1, "c"), up(1, "d"), down(2, "a"), down(3, "d"), down(4, "b"), down(5, "c")]
    assert trace.slots(changes, 2) == [
        up(0, "s1"), up(0, "s2"), down(2, "s1"), up(2, "s1"), down(4, "s2"), down(5, "s1"),
    ]  # fmt: skip


def test_trace_nodes_are_there_if_the_file_has_them(tmp_path: Path) -> None:
    """Three of 8 to 12 machines, some of which are lost every few minutes."""
    minutes = [
        f"2026-01-0{1 + n // 1440}, {n // 60 % 24:02}:{n % 60:02}:00, {8 + n // 10 * 7 % 5}" for n in range(2880)
    ]
    file = write(tmp_path / "counts.txt", *minutes)
    changes = trace.resolve(nodes=3, file=file, start_s=3600.0, generate=list)
    found = trace.summary(changes, 86400.0)
    assert (found.mean_up, found.max_up) == (3.0, 3)
    assert found.losses > 20


def test_summary_counts_node_hours() -> None:
    changes = [up(1800, "a"), up(3600, "b"), down(3600, "a"), up(5400, "a"), down(9000, "b")]
    assert trace.summary(changes, 7200) == trace.Summary(
        seconds=7200,
        nodes=2,
        losses=1,
        node_hours=2.0,
        losses_per_node_hour=0.5,
        mean_up=1.0,
        min_up=0,
        max_up=2,
    )
    assert trace.summary([], 10).mean_up == 0
    with pytest.raises(WindfallError, match="cannot summarize 0 s"):
        trace.summary(changes, 0)


@pytest.mark.skipif(not DATA.exists(), reason="WINDFALL_TRACES names no folder with the public traces")
def test_public_traces_are_read() -> None:
    p3 = trace.read(DATA / "bamboo-p3-trace.csv")
    found = trace.summary(p3, p3[-1].at_s)
    assert (len(p3), found.nodes, found.max_up) == (344, 177, 32)
    assert len({c.node for c in trace.slots(p3, 8)}) == 8
    a100 = trace.read(DATA / "bamboo-gcp-a100.txt")
    found = trace.summary(a100, a100[-1].at_s)
    assert (found.nodes, found.min_up, found.max_up) == (64, 17, 64)
    with pytest.raises(WindfallError, match=r"line 1: 'ContextTokens' is neither add nor remove"):
        trace.read(DATA / "azure-llm-2023-conv.csv")
