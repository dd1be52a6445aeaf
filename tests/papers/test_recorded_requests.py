"""Requests of simulated lenders from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.support import recorded_requests
from windfall.errors import WindfallError


def test_requests_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "requests.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{n},{100 + n},50\n" for n in range(40)))
    load = recorded_requests.read(file, lenders=2, per_s=0.0)
    assert [r.prompt for r in load.arrivals(1, 0.0, 4.0)] == [101, 103]
    assert [r.prompt for r in load.arrivals(1, 40.0, 44.0)] == [101, 103], "the file repeats"
    fast = recorded_requests.read(file, lenders=2, per_s=2.0)
    assert sum(len(fast.arrivals(n, 0.0, 10.0)) for n in range(2)) == pytest.approx(40, abs=2)
    wrong = {
        "nothing\n": "at least two requests", "1,2,3\n0,2,3\n": "in order of time", "nan,2,3\n1,2,3\n": "in order",
        "0,5,5\n1,5,many\n": "not a list of requests", "0,5,5\nsoon,5,5\n": "not a list of requests",
    }  # fmt: skip
    for text, message in wrong.items():
        file.write_text(text)
        with pytest.raises(WindfallError, match=message):
            recorded_requests.read(file, lenders=2, per_s=0.0)
    with pytest.raises(WindfallError, match="cannot read the requests"):
        recorded_requests.read(tmp_path / "missing.csv", lenders=2, per_s=0.0)
