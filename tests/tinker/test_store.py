"""What the server's store keeps, and what it says when it cannot."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.tinker.disk.records import Sampler
from windfall.tinker.disk.store import FORMAT, TinkerStore
from windfall.tinker.models.model import TrainedModel


def test_a_write_that_was_awaited_is_there_after_a_restart(tmp_path: Path) -> None:
    async def write() -> None:
        store = TinkerStore(tmp_path)
        first = store.write(store.put("counter", name="a", value=1), store.put("counter", name="b", value=2))
        await store.write(store.put("counter", name="a", value=3))
        assert first.done()
        # Not closed: as if the process had been killed.

    async def read() -> list[tuple[str, int]]:
        store = TinkerStore(tmp_path)
        rows = [(row["name"], row["value"]) for row in store.rows("select * from counter order by name")]
        await store.close()
        return rows

    asyncio.run(write())
    assert asyncio.run(read()) == [("a", 3), ("b", 2)]


def test_statements_that_fail_leave_nothing_and_end_the_store(tmp_path: Path) -> None:
    async def run() -> None:
        store = TinkerStore(tmp_path)
        with pytest.raises(WindfallError, match="cannot be written"):
            await store.write(store.put("counter", name="a", value=1), ("insert into nowhere values (1)", ()))
        with pytest.raises(WindfallError, match="cannot be written"):  # it would be built on what was lost
            await store.write(store.put("counter", name="b", value=1))
        assert list(store.rows("select * from counter")) == []
        await store.close()

    asyncio.run(run())


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    async def start() -> None:
        await TinkerStore(tmp_path).close()

    asyncio.run(start())
    with sqlite3.connect(tmp_path / "tinker.sqlite") as connection:
        connection.execute(f"pragma user_version = {FORMAT + 1}")
    with pytest.raises(WindfallError, match="newer windfall"):
        asyncio.run(start())


def test_rows_of_earlier_versions_name_the_base() -> None:
    of = {"id": "s:train:0", "account": "alice", "session": "s", "created": 1.0}
    weights = {"key": "", "folder": "", "path": "", "base": "tiny"}
    assert Sampler.read({**of, "weights": weights, "clones": 2}).clones == 2
    spec = {"lora": {"rank": 4}, "base": "tiny", "metadata": {}, "optimizer": False}
    anything: Any = None
    row = {**of, "spec": spec, "saved_seq": 0, "folder": "", "next_seq": 3, "unloaded": 0}
    assert TrainedModel.read(row, anything, anything).next_seq == 3
