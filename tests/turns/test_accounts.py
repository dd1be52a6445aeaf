"""Every nanosecond of every device is charged to one job, or to idle."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from windfall.turns.accounts import DeviceAccounts

HELD = st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 100.0), max_size=3)


@given(st.integers(0, 10**18), st.lists(st.tuples(st.sampled_from("xy"), HELD, st.integers(0, 10**15)), max_size=30))
def test_what_is_charged_adds_up_to_the_time_that_passed(
    start_ns: int, changes: list[tuple[str, dict[str, float], int]]
) -> None:
    accounts, now_ns, missed_ns = DeviceAccounts("xy", start_ns), start_ns, 0
    for n, (device, held, after_ns) in enumerate(changes):
        now_ns += after_ns
        if n % 7 == 6:  # the server starts again, a second later
            saved = json.loads(json.dumps(accounts.saved(now_ns)))
            now_ns, missed_ns = now_ns + 10**9, missed_ns + 10**9
            accounts = DeviceAccounts.restored(saved, "xy", now_ns)
        accounts.hold(device, held, now_ns)
    for jobs in accounts.charged(now_ns).values():
        assert sum(jobs.values()) == now_ns - start_ns - missed_ns
        assert min(jobs.values()) >= 0


def test_common_time_is_split_by_weight() -> None:
    accounts = DeviceAccounts(["x"], 0)
    accounts.hold("x", {"a": 3.0, "b": 1.0}, 0)
    assert accounts.charged(1001) == {"x": {"": 0, "a": 751, "b": 250}}


def test_devices_that_are_gone_keep_their_charges() -> None:
    accounts = DeviceAccounts(["x"], 0)
    accounts.hold("x", {"a": 1.0}, 0)
    later = DeviceAccounts.restored(accounts.saved(5), ["y"], 100)
    assert later.charged(107) == {"x": {"": 0, "a": 5}, "y": {"": 7}}
