"""What differs between providers: the number of local workers, and the times of a trace. Also: no orphan processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windfall.backoff import RestartDelay
from windfall.errors import WindfallError
from windfall.processes import process
from windfall.processes.process import Handle
from windfall.providers.slots import SlotProvider
from windfall.providers.trace import Change, synthetic
from windfall.providers.trace_provider import TraceProvider
from windfall.types import Lease

SLEEP = "import time; time.sleep(60)"


class Recorder:
    """Starts sleeping workers, and records the events of the provider with their times."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.began = folder, time.monotonic()
        self.events: list[tuple[float, str, dict[str, Any]]] = []
        self.leases: list[Lease] = []
        self.now: set[str] = set()

    async def spawn(self, name: str, lease: Lease) -> Handle:
        self.leases.append(lease)
        argv = [sys.executable, "-S", "-c", SLEEP]
        return process.start(name=name, argv=argv, env={"PATH": "/bin"}, log=self.folder / f"{name}.log")

    def __call__(self, name: str, /, **fields: Any) -> None:
        self.events.append((time.monotonic() - self.began, name, fields))
        (self.now.discard if name == "exited" else self.now.add)(fields["worker"])

    def times(self, name: str) -> dict[str, float]:
        return {fields["worker"]: at_s for at_s, events, fields in self.events if events == name}

    async def until(self, *workers: str) -> None:
        for _ in range(6000):
            if self.now == set(workers):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"waited 60 s for {workers}: {self.events}")

    async def watch(self, provider: SlotProvider | TraceProvider, *last: str) -> None:
        """Run the provider until these are its workers."""
        self.began = time.monotonic()
        run = asyncio.create_task(provider.run())
        try:
            await self.until(*last)
        finally:
            run.cancel()
            await asyncio.wait({run})


async def _for(provider: SlotProvider | TraceProvider, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(provider.run(), seconds)


def test_local_provider_follows_its_target(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    terms = Lease(kind="borrowed", device="H100", region="here", price_usd_per_h=1.5)

    async def main() -> SlotProvider:
        provider = SlotProvider(recorder.spawn, 2, terms=terms, on_event=recorder)
        run = asyncio.create_task(provider.run())
        await recorder.until("w1.1", "w2.1")
        provider.target(4)
        await recorder.until("w1.1", "w2.1", "w3.1", "w4.1")
        provider.target(1)
        await recorder.until("w1.1")
        provider.target(2)
        await recorder.until("w1.1", "w2.2")
        provider.target(0)
        provider.target(1)  # before the provider could act, so w1 is not affected
        await recorder.until("w1.1")
        run.cancel()
        await asyncio.wait({run})
        return provider

    provider = asyncio.run(main())
    assert (provider.started, provider.lost) == (5, 0)
    assert recorder.leases[0] == terms
    with pytest.raises(WindfallError, match="-1 workers were requested"):
        provider.target(-1)


def test_restart_delay_doubles_up_to_its_limit_and_resets() -> None:
    delay = RestartDelay()
    waits = [delay.after_death(lived_s=0.1) for _ in range(9)]
    assert waits[:3] == [0.2, 0.4, 0.8]
    assert waits[-1] == waits[-2] == 10.0
    assert delay.after_death(lived_s=10.0) == 0.0
    assert delay.after_death(lived_s=9.9) == 0.2


def _up(at_s: float, node: str) -> Change:
    return Change(at_s=at_s, node=node, up=True)


def _down(at_s: float, node: str) -> Change:
    return Change(at_s=at_s, node=node, up=False)


def test_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    """At ten times the speed, n1 is down from 0.5 s to 0.8 s, and n2 comes up at 0.3 s."""
    changes = [_up(0, "n1"), _up(3, "n2"), _down(5, "n1"), _up(8, "n1")]
    recorder = Recorder(tmp_path)

    async def main() -> TraceProvider:
        provider = TraceProvider(recorder.spawn, changes, speedup=10.0, on_event=recorder)
        await recorder.watch(provider, "n1.2", "n2.1")
        return provider

    provider = asyncio.run(main())
    assert (provider.started, provider.lost) == (3, 1)
    expected = {"n1.1": 0.0, "n2.1": 0.3, "n1.2": 0.8}
    started = recorder.times("started")
    assert set(started) == set(expected)
    # Never early, but late if the machine is busy.
    assert all(0 <= started[worker] - at_s < 20.0 for worker, at_s in expected.items())
    (_, _, killed), *others = [events for events in recorder.events if events[1] == "exited"]
    assert (killed["worker"], killed["code"], killed["by"], killed["lost"]) == ("n1.1", -signal.SIGKILL, "killed", True)
    assert 0.5 <= recorder.times("exited")["n1.1"] < started["n1.2"]
    assert [fields["by"] for _, _, fields in others] == ["stopped"] * 2
    assert all(lease.kind == "spot" for lease in recorder.leases)


def test_busy_trace_never_has_two_workers_on_a_node(tmp_path: Path, gone: Callable[..., bool]) -> None:
    changes = synthetic(nodes=4, mean_up_s=1.0, mean_down_s=0.2, seconds=1200.0, seed=3)
    recorder = Recorder(tmp_path)
    crowds: list[set[str]] = []

    def listen(name: str, /, **fields: Any) -> None:
        recorder(name, **fields)
        crowds.append(set(recorder.now))

    async def main() -> TraceProvider:
        provider = TraceProvider(recorder.spawn, changes, speedup=10.0, on_event=listen)
        run, end_s = asyncio.create_task(provider.run()), time.monotonic() + 120
        while provider.lost < 15 and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        run.cancel()
        await asyncio.wait([run])
        return provider

    provider = asyncio.run(main())
    assert provider.lost >= 15
    assert all(len({worker.partition(".")[0] for worker in crowd}) == len(crowd) for crowd in crowds)
    pids = [fields["pid"] for _, name, fields in recorder.events if name in ("started", "restarted")]
    assert len(pids) == provider.started
    assert gone(pids, within_s=0.1)


def test_invalid_traces_are_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with pytest.raises(WindfallError, match="no node is ever up"):
        TraceProvider(recorder.spawn, [], speedup=1.0)
    with pytest.raises(WindfallError, match="n1 is removed but not up"):
        TraceProvider(recorder.spawn, [_down(0, "n1")], speedup=1.0)
    with pytest.raises(WindfallError, match="the speedup is 0"):
        TraceProvider(recorder.spawn, [_up(0, "n1")], speedup=0.0)


@pytest.mark.parametrize("provider", ["SlotProvider(spawn, 3)", "TraceProvider(spawn, changes, speedup=1.0)"])
@pytest.mark.parametrize("how", ["process", "fork server"])
def test_killing_the_process_of_a_provider_leaves_no_worker(
    tmp_path: Path, toy_env: dict[str, str], gone: Callable[..., bool], provider: str, how: str
) -> None:
    code = f"""
import asyncio, os, sys
from pathlib import Path
from windfall.processes import process
from windfall.providers.slots import SlotProvider
from windfall.processes.fork_client import ForkClient
from windfall.providers.trace_provider import TraceProvider
from windfall.providers.trace import Change

changes = [Change(at_s=0.0, node=f"n{{k}}", up=True) for k in range(3)]
client = ForkClient(entry="toy:main", modules=[], log=Path("fork_server.log"))

async def spawn(name, lease):
    code = {SLEEP!r}
    argv = ["x", code] if {how!r} == "fork server" else [sys.executable, "-S", "-c", code]
    async def start(**how):
        return await client.start(**how) if {how!r} == "fork server" else process.start(**how)
    handle = await start(name=name, argv=argv, env=dict(os.environ), log=Path(name + ".log"))
    print(handle.pid, flush=True)
    return handle

asyncio.run({provider}.run())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path, env=toy_env)
    assert supervisor.stdout is not None
    with supervisor.stdout as out:
        pids = [int(out.readline()) for _ in range(3)]
    supervisor.kill()
    supervisor.wait()
    assert gone(pids)
