"""Advice is followed if two steps agree, for the workers of a source only, within its limits, the cool-down and the
price ceiling; the last worker stays."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from windfall.run.autoscale import Autoscaler, ScaledSource

KIND = "spot cpu at $1.00/h"


def snapshot(step: int, count: int, workers: list[str], lease: str = KIND, usd: float = 1.0) -> dict[str, Any]:
    rows = [{"worker": w, "state": "ready", "lease": KIND, "kind": "spot", "price_usd_per_h": usd} for w in workers]
    now = len(rows) - ("local" in workers)
    return {"advised": step, "workers": rows, "advice": [{"lease": lease, "now": now, "count": count, "why": ""}]}


class One:
    """An autoscaler with one source."""

    def __init__(self, count: int, limit: int, least: int = 0, **options: Any) -> None:
        source = ScaledSource(count=count, min_count=least, max_count=limit)
        self.scaler = Autoscaler({"local": source}, **options)

    def update(self, seen: dict[str, Any] | None, own: set[str], now_s: float = 0.0) -> int | None:
        return self.scaler.update(seen, {"local": own}, now_s).get("local")


def test_two_steps_in_a_row_must_agree() -> None:
    a = One(1, 8)
    assert a.update(snapshot(3, 2, ["w1.1"]), {"w1.1"}) is None
    assert a.update(snapshot(3, 2, ["w1.1"]), {"w1.1"}) is None  # the same step again
    assert a.update(snapshot(4, 3, ["w1.1"]), {"w1.1"}) is None  # different advice
    assert a.update(snapshot(5, 3, ["w1.1"]), {"w1.1"}) == 3
    assert a.update(snapshot(6, 3, ["w1.1"]), {"w1.1"}) is None  # already applied; the workers are still starting


def test_step_without_a_change_resets_the_advice() -> None:
    a = One(1, 8)
    a.update(snapshot(3, 2, ["w1.1"]), {"w1.1"})
    a.update(snapshot(4, 1, ["w1.1"]), {"w1.1"})
    assert a.update(snapshot(5, 2, ["w1.1"]), {"w1.1"}) is None


def test_limit_and_workers_of_others() -> None:
    a, wanted = One(1, 4), None
    for step in (1, 2):
        wanted = a.update(snapshot(step, 40, ["w1.1"]), {"w1.1"})
    assert wanted == 4
    a = One(2, 4)
    for step in (1, 2):  # two of the four surplus workers are not ours
        wanted = a.update(snapshot(step, 1, ["w1.1", "w2.1", "x", "y"]), {"w1.1", "w2.1"})
    assert wanted == 0
    for step in (3, 4):  # ours are gone, but their kind is remembered
        wanted = a.update(snapshot(step, 3, ["x"]), set())
    assert wanted == 2
    a = One(3, 8, least=2)
    for step in (1, 2):
        wanted = a.update(snapshot(step, 0, ["w1.1", "w2.1", "w3.1"]), {"w1.1", "w2.1", "w3.1"})
    assert wanted == 2


def test_reconnected_worker_counts_as_ours_and_the_trainer_does_not_count() -> None:
    a, wanted = One(2, 8), None
    for step in (1, 2):
        wanted = a.update(snapshot(step, 3, ["w1.1#2", "w2.1", "local"]), {"w1.1", "w2.1"})
    assert wanted == 3


def test_advice_on_other_kinds_is_ignored() -> None:
    a = One(1, 4)
    for step in (1, 2, 3):
        assert a.update(snapshot(step, 9, ["w1.1"], lease="spot H200"), {"w1.1"}) is None
    assert a.update(None, {"w1.1"}) is None


def test_no_second_change_within_the_cool_down() -> None:
    a = One(1, 8, cooldown_s=60.0)
    a.update(snapshot(1, 2, ["w1.1"]), {"w1.1"}, now_s=0.0)
    assert a.update(snapshot(2, 2, ["w1.1"]), {"w1.1"}, now_s=10.0) == 2
    own = {"w1.1", "w2.1"}
    assert [a.update(snapshot(3 + n, 5, ["w1.1", "w2.1"]), own, now_s=20.0 + 10 * n) for n in range(6)] == [
        None, None, None, None, None, 5,
    ]  # fmt: skip


def test_price_ceiling_limits_growth_over_all_sources() -> None:
    local, cloud = ScaledSource(count=1, max_count=8), ScaledSource(count=2, usd_per_h=0.5)
    a = Autoscaler({"local": local, "ray": cloud}, max_usd_per_h=4.0)
    own = {"local": {"w1.1"}}
    assert a.update(snapshot(1, 7, ["w1.1"]), own, 0.0) == {}
    assert a.update(snapshot(2, 7, ["w1.1"]), own, 1.0) == {"local": 3}  # 3 x $1 and 2 x $0.5
    unknown = One(1, 8, max_usd_per_h=100.0)
    for step in (1, 2, 3):
        assert unknown.update(snapshot(step, 5, ["w1.1"], usd=0.0), {"w1.1"}) is None


def test_rising_prices_shrink_the_most_expensive_source_at_once() -> None:
    sources = {"local": ScaledSource(count=4, max_count=8), "ray": ScaledSource(count=2, max_count=4, usd_per_h=9.0)}
    a = Autoscaler(sources, max_usd_per_h=13.0, cooldown_s=1e9, keep_one=True)
    names = [f"w{k}.1" for k in range(1, 5)]
    assert a.update(snapshot(1, 4, names, usd=1.0), {"local": names}, 0.0) == {"ray": 1}
    assert a.update(snapshot(1, 4, names, usd=2.0), {"local": names}, 1.0) == {"ray": 0}
    assert a.update(snapshot(1, 4, names, usd=20.0), {"local": names}, 2.0) == {"local": 1}  # it keeps the run alive


def two_sources(counts: tuple[int, int], running: tuple[int, int], advice: int, **options: Any) -> dict[str, int]:
    """The changes for two sources of the same kind, after two steps with the same advice."""
    sources = {name: ScaledSource(count=n, max_count=8) for name, n in zip(("ray", "slurm"), counts, strict=True)}
    a, changes = Autoscaler(sources, **options), {}
    own = {name: {f"{name}{k}.1" for k in range(n)} for name, n in zip(sources, running, strict=True)}
    a.update(snapshot(0, sum(running), [*{"ray0.1", "slurm0.1"}]), {"ray": {"ray0.1"}, "slurm": {"slurm0.1"}}, 0.0)
    for step in (1, 2):
        changes = a.update(snapshot(step, advice, sorted(own["ray"] | own["slurm"])), own, float(step))
    return changes


def test_sources_of_one_kind_share_one_advice() -> None:
    assert two_sources((1, 1), (1, 1), 6) == {"ray": 3, "slurm": 3}
    assert two_sources((5, 5), (5, 5), 6) == {"ray": 3, "slurm": 3}
    assert two_sources((3, 3), (3, 1), 3) == {"ray": 2, "slurm": 1}, "workers that have not joined go first"


def test_worker_that_was_only_asked_for_does_not_keep_the_run_alive() -> None:
    assert two_sources((1, 1), (1, 0), 0, keep_one=True) == {"slurm": 0}
    sources = {"ray": ScaledSource(count=1, max_count=8), "slurm": ScaledSource(count=1)}
    a = Autoscaler(sources, keep_one=True)
    for step in (1, 2, 3):
        assert a.update(snapshot(step, 0, ["ray1.1"]), {"ray": {"ray1.1"}}, float(step)) == {}


@given(
    st.lists(st.tuples(st.integers(0, 20), st.floats(0, 5), st.booleans()), max_size=40), st.integers(1, 6),
    st.integers(0, 3), st.floats(0, 12),
)  # fmt: skip
def test_limits_hold_for_every_advice(
    steps: list[tuple[int, float, bool]], count: int, least: int, ceiling: float
) -> None:
    least = min(least, count)
    a = One(count, 6, least=least, max_usd_per_h=ceiling, keep_one=True)
    running = count
    for n, (advised, usd, repeat) in enumerate(steps):
        own = {f"w{k}.1" for k in range(running)}
        wanted = a.update(snapshot(n - repeat, advised, sorted(own), usd=usd), own, now_s=float(n))
        if wanted is not None:
            assert max(1, least) <= wanted <= 6
            if ceiling and wanted > running:
                assert wanted * usd <= ceiling + 1e-6
            running = wanted
