"""The functions called are this module's own, by name, in child processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator

import pytest

from windfall.envs.apart import Apart, TooCostly
from windfall.errors import WindfallError

HERE = "apart_functions"
SOURCE = """
import os, signal, time
from windfall.envs.apart import cpu_limit
from windfall.errors import WindfallError

def add(a, b): return a + b
def pid(): return os.getpid()
def environment(): return dict(os.environ)
def fail(): raise KeyError("gone")
def refuse(): raise WindfallError("no", where="here", fix="do that")
def chatter():
    print("not a reply", flush=True)
    return ["reply", os.read(0, 10).decode()]
def sleep(seconds): time.sleep(seconds)
def die(): os.kill(os.getpid(), signal.SIGKILL)
def grow(): return len(bytearray(64 << 30))
def power():
    with cpu_limit(1): return 9**9**9 > 0
"""


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    folder = tmp_path_factory.mktemp("functions")
    (folder / f"{HERE}.py").write_text(SOURCE)
    sys.path.append(str(folder))
    made = Apart(children=2)
    yield made
    made.close()
    sys.path.remove(str(folder))


def test_calls_elsewhere_and_keeps_the_child(apart: Apart) -> None:
    assert apart.call(f"{HERE}:add", 1, 2) == 3
    first = apart.call(f"{HERE}:pid")
    assert first != os.getpid()
    assert asyncio.run(apart.acall(f"{HERE}:pid")) == first


def test_what_is_raised_arrives(apart: Apart) -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'gone'"):
        apart.call(f"{HERE}:fail")
    with pytest.raises(WindfallError, match="here: no\ndo that"):
        apart.call(f"{HERE}:refuse")
    with pytest.raises(RuntimeError, match="No module named"):
        apart.call("no_such_module:f")
    with pytest.raises(RuntimeError, match="ended with status -9"):
        apart.call(f"{HERE}:die")
    assert apart.call(f"{HERE}:add", 1, 2) == 3


def test_output_and_input_of_the_function_touch_no_messages(apart: Apart) -> None:
    assert apart.call(f"{HERE}:chatter") == ["reply", ""]


def test_limits(apart: Apart) -> None:
    with pytest.raises(TooCostly, match="CPU time"):
        apart.call(f"{HERE}:power")
    with pytest.raises(TooCostly, match="memory"):
        apart.call(f"{HERE}:grow")


def test_no_secrets_and_one_hash_seed(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    apart.close()
    monkeypatch.setenv("SECRET_KEY", "x")
    env = apart.call(f"{HERE}:environment")
    assert "SECRET_KEY" not in env
    assert env["PYTHONHASHSEED"] == "0"


def test_cancelling_kills_the_child_and_frees_its_place(apart: Apart) -> None:
    async def cancel_all() -> float:
        start = time.monotonic()
        for _ in range(2):
            sleepers = [asyncio.create_task(apart.acall(f"{HERE}:sleep", 60)) for _ in range(4)]  # two have to wait
            await asyncio.sleep(0.3)
            for sleeper in sleepers:
                sleeper.cancel()
            ends = await asyncio.gather(*sleepers, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        assert await apart.acall(f"{HERE}:add", 1, 2) == 3
        return time.monotonic() - start

    assert asyncio.run(cancel_all()) < 10
