"""What the page costs: for its viewer, and for the controller that serves it.

    python benchmarks/fleet/page.py open      a log of 24 hours with 200 workers in headless Chromium (needs playwright)
    python benchmarks/fleet/page.py intake    tokens per second that a controller accepts, with and without 50 viewers

`open` aims at less than 2 s until the timeline is drawn and less than 60 MB of JavaScript heap. `intake` alternates
between no viewer and 50 viewers, who are in another process, within one run of one controller, and compares the CPU
time of the controller per round; it aims at less than 2 % more. The history has the size of that same long log and
grows, and the fleet of 200 workers has a new snapshot every second.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` and `tests` are found

from benchmarks.fleet import intake
from tests.support.runs.page_run import write_long_run  # pyright: ignore[reportMissingImports]
from windfall.link import messages as m
from windfall.link.socket import Port
from windfall.page import command as pages
from windfall.page.feed import TICK_S, Feed
from windfall.page.runs import RunReader
from windfall.page.samples import SampleFile
from windfall.page.server import PageServer
from windfall.types import Lease

KEY = "a key for this benchmark only"


def open_page(folder: Path, workers: int, hours: float) -> None:
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    run = write_long_run(folder / "long", workers=workers, hours=hours)
    size = (run / "events.jsonl").stat().st_size
    began = time.perf_counter()
    html = pages.write([run], folder / "page.html")
    wrote_s = time.perf_counter() - began
    print(f"log of {hours:g} h with {workers} workers: {size / 1e6:.0f} MB; page written in {wrote_s:.1f} s, "
          f"{html.stat().st_size / 1e6:.1f} MB")  # fmt: skip
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for turn in range(3):
            tab = browser.new_page(viewport={"width": 1400, "height": 900})
            began = time.perf_counter()
            tab.goto(html.as_uri() + "#timeline")
            tab.wait_for_function("window.windfall?.timeline?.drawn > 0", polling=10)
            opened_s = time.perf_counter() - began
            times = tab.evaluate(
                """async () => { const t = windfall.timeline, out = []; for (let n = 0; n < 60; n++) {
                n < 20 ? t.zoom(0.8) : t.pan(n % 2 ? 0.2 : -0.1);
                await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r))); out.push(t.drawMs); }
                t.all(); await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)));
                return [out.sort((a, b) => a - b)[30], Math.max(...out), t.drawMs]; }"""
            )
            session = tab.context.new_cdp_session(tab)
            session.send("HeapProfiler.collectGarbage")
            heap = session.send("Runtime.getHeapUsage")
            heap_mb = (heap["usedSize"] + heap.get("backingStorageSize", 0)) / 1e6
            print(f"  {turn + 1}: opened in {opened_s:.2f} s; heap {heap_mb:.1f} MB; a frame takes "
                  f"{times[0]:.1f} ms (median), {times[1]:.1f} ms (worst), {times[2]:.1f} ms for all")  # fmt: skip
            tab.close()
        browser.close()


async def measure_intake(folder: Path, workers: int, hours: float, viewers: int, rounds: int, blocks: int) -> None:
    """One controller in this process; viewers in another. Blocks of rounds alternate between no viewer and all."""
    reader = RunReader(write_long_run(folder / "long", workers=workers, hours=hours))
    feed = Feed(reader.history, name="long", recipe={}, status=lambda: "running")
    server = PageServer(feed, SampleFile(folder), KEY, title="benchmark")
    port = Port("127.0.0.1", 0, {}, None, pages=server.handlers())
    server.welcome = port.welcome
    await port.open()
    d = intake.dispatch(folder, True)
    members = []
    handles = []
    for w in range(workers):
        member = d.members.join(f"w{w}", Lease(), 0.0)
        d.members.pull(member.id, 0.0)
        d.members.loaded(member.id, 0, "d", 20, 0.0)
        d.accounts.join(0.0, member.id, kind="spot", usd_per_h=None)
        members.append(member)
        names = {}
        for r in range(20):
            d.ledger.open(intake.episode(f"{w}/{r}"))
            d.ledger.queues[""].popleft()
            names[d.ledger.assign(f"{w}/{r}", member.id, 0).handle] = f"{w}/{r}"
        assert d.journal is not None
        d.journal.write_assigned(names)
        handles.append(tuple(names))
    decode, journal = msgspec.msgpack.Decoder(m.FromWorker).decode, d.journal
    assert journal is not None
    command = [sys.executable, __file__, "_view", "--url", f"http://127.0.0.1:{port.port}", "--viewers", str(viewers)]
    took: dict[bool, list[float]] = {False: [], True: []}
    position = 0
    ticks: list[float] = []
    ticking = asyncio.create_task(_live(feed, workers, ticks))
    for n, watched in enumerate((False, *(False, True, True, False) * (blocks // 4))):
        process = subprocess.Popen(command) if watched else None
        deadline = time.monotonic() + 60
        joining = time.process_time()
        while len(feed._following) < (viewers if watched else 0) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)  # until every viewer has everything: that happens once per viewer
        joining = time.process_time() - joining
        if watched:
            print(f"  {viewers} viewers got everything: {joining:.2f} s of CPU time")
        await asyncio.sleep(3.0)
        assert feed.viewers == (viewers if watched else 0), feed.viewers
        began, used = time.perf_counter(), 0.0
        for _ in range(rounds):
            frames = [intake.frame(h, position, 1) for h in handles]
            position += 1
            cpu = time.process_time()
            for member, data in zip(members, frames, strict=True):
                d._handle(member, decode(data))
            journal.flush()
            await asyncio.sleep(0)  # the page gets its turn here
            used += time.process_time() - cpu
        if n:  # the first block warms up
            took[watched].append(used / rounds)
        print(f"  {viewers if watched else 0:3} viewers: {workers * 20 * rounds / used:,.0f} tok/s of CPU time, "
              f"{time.perf_counter() - began:.1f} s", flush=True)  # fmt: skip
        if process is not None:
            process.terminate()
            process.wait()
            while feed.viewers:
                await asyncio.sleep(0.1)
    ticking.cancel()
    await port.close()
    tick_s = statistics.mean(ticks)
    print(f"one tick for {viewers} viewers takes {1000 * tick_s:.2f} ms of CPU time (mean of {len(ticks)}): "
          f"{tick_s / TICK_S:.2%} of a busy controller's core")  # fmt: skip
    pairs = [b / a - 1 for a, b in zip(took[False], took[True], strict=True)]
    print(f"CPU time per round with {viewers} viewers: {statistics.median(pairs):+.2%} (median of {len(pairs)} pairs: "
          f"{', '.join(f'{x:+.1%}' for x in pairs)})")  # fmt: skip


async def _live(feed: Feed, workers: int, ticks: list[float]) -> None:
    """The run goes on, with and without viewers: every second some workers change, and the fleet has a new snapshot.
    `ticks` gets the CPU time of sending that to the viewers."""
    second = 0
    start_t = feed.history.end_t
    while True:
        await asyncio.sleep(TICK_S)
        second += 1
        rows = {f"gpu-{w}": [[6.0, "waiting"], [3.0, "generating"]] for w in range(second % 10, workers, 10)}
        moves = [["gpu-1", "gpu-2", 3, 0.5]]
        feed.history.add({"t": start_t + second, "m": 0.0, "kind": "instant", "name": "activity", "rows": rows,
                          "moves": moves})  # fmt: skip
        fleet = [
            {"worker": f"gpu-{w}", "lease": "spot H100", "kind": "spot", "device": "H100", "state": "ready",
             "version": second, "running": 20, "slots": 256, "tok_per_s": 1000.0 + second, "age_s": float(second),
             "price_usd_per_h": 2.5, "why": "", "made": second, "moved": 0}
            for w in range(workers)
        ]  # fmt: skip
        feed.snapshot = {"t": start_t + second, "step": second, "open": 20 * workers, "queued": 0, "workers": fleet}
        cpu = time.process_time()
        feed.tick()
        if feed.viewers:
            ticks.append(time.process_time() - cpu)


async def view(url: str, viewers: int) -> None:
    """The process of the viewers: reads everything that the page sends, forever."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            async with session.get(f"{url}/page/stream", params={"key": KEY}) as answer:
                async for _ in answer.content.iter_any():
                    pass

        await asyncio.gather(*(one() for _ in range(viewers)))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    p.add_argument("what", choices=("open", "intake", "_view"))
    p.add_argument("--url", default="")
    for name, default in (("--workers", 200), ("--viewers", 50), ("--rounds", 800), ("--blocks", 8)):
        p.add_argument(name, type=int, default=default)
    p.add_argument("--hours", type=float, default=24.0)
    a = p.parse_args()
    if a.what == "_view":
        asyncio.run(view(a.url, a.viewers))
        return
    with tempfile.TemporaryDirectory(prefix="windfall-") as folder:
        if a.what == "open":
            open_page(Path(folder), a.workers, a.hours)
        else:
            asyncio.run(measure_intake(Path(folder), a.workers, a.hours, a.viewers, a.rounds, a.blocks))


if __name__ == "__main__":
    main()
