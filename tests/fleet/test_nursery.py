"""The nursery: forked workers are like fresh ones, and nobody is left behind, whoever dies.

The workers here run small pieces of code, but for the last test, which is a real run. Torch in a forked worker is what
`python -m windfall.fleet.start_time` shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from windfall.errors import WindfallError
from windfall.fleet import nursery as nurseries
from windfall.fleet.base import Handle
from windfall.fleet.nursery import Nursery, NurseryLost

SLEEP = "import time; print('up'); time.sleep(60)"
FAMILY = (
    "import subprocess, sys, time; "
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(c.pid, 'child'); "
)
ABOUT = """
import json, os, signal, sys, threading
told = {
    "ids": [os.getpid(), os.getsid(0), os.getpgid(0)],
    "env": dict(os.environ),
    "argv": sys.argv[2:],
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "stdin": sys.stdin.read(),
    "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "interrupt": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
    "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "comm": open("/proc/self/comm").read().strip(),
    "loaded": "colorsys" in sys.modules,
}
print(json.dumps(told))
print("and this", file=sys.stderr)
"""
Start = Callable[..., Awaitable[Handle]]


@pytest.fixture
def within(tmp_path: Path, toy_env: dict[str, str]) -> Callable[..., None]:
    """Runs a test's coroutine with a nursery of toys: `test(nursery, start)`."""

    def run(test: Callable[[Nursery, Start], Awaitable[None]], *modules: str, entry: str = "toy:main") -> None:
        async def go() -> None:
            async with Nursery(entry=entry, modules=modules, log=tmp_path / "nursery.log", env=toy_env) as nursery:

                async def start(name: str, code: str, *args: str, env: dict[str, str] | None = None) -> Handle:
                    return await nursery.start(
                        name=name, argv=["windfall", code, *args], env=env or {}, log=tmp_path / f"{name}.log"
                    )

                await asyncio.wait_for(test(nursery, start), 20)

        asyncio.run(go())

    return run


def test_a_forked_worker_is_like_a_fresh_one(within: Callable[..., None], tmp_path: Path) -> None:
    pids: list[int] = []

    async def test(nursery: Nursery, start: Start) -> None:
        for name in ("w1", "w2"):
            worker = await start(name, ABOUT, "--join", "somewhere", env={"TOKEN": name})
            pids.append(worker.pid)
            assert os.getsid(worker.pid) == worker.pid
            assert await worker.wait() == 0

    within(test, "colorsys")
    for pid, name in zip(pids, ("w1", "w2"), strict=True):
        first, second = (tmp_path / f"{name}.log").read_text().splitlines()
        assert second == "and this"
        told = json.loads(first)
        assert told.pop("ids") == [pid, pid, pid]
        assert told == {
            "env": {"TOKEN": name},
            "argv": ["--join", "somewhere"],
            "fds": [0, 1, 2],
            "stdin": "",
            "term": True,
            "child": True,
            "interrupt": True,
            "blocked": [],
            "comm": name,
            "loaded": True,
        }


def test_how_a_worker_ended_is_told(within: Callable[..., None], tmp_path: Path) -> None:
    async def test(nursery: Nursery, start: Start) -> None:
        assert await (await start("three", "import sys; sys.exit(3)")).wait() == 3
        assert await (await start("wrong", "1 / 0")).wait() == 1
        worker = await start("self", "import os; os.kill(os.getpid(), 11)")
        assert await worker.wait() == -signal.SIGSEGV
        worker = await start("at-exit", "import atexit; atexit.register(print, 'last word')")
        assert await worker.wait() == 0

    within(test)
    assert "ZeroDivisionError" in (tmp_path / "wrong.log").read_text()
    assert (tmp_path / "at-exit.log").read_text() == "last word\n"
    assert (tmp_path / "nursery.log").read_text() == ""


def test_kill_terminate_and_a_leader_that_ends_leave_nothing(
    within: Callable[..., None], tmp_path: Path, gone: Callable[..., bool], read_when: Callable[..., str]
) -> None:
    async def test(nursery: Nursery, start: Start) -> None:
        worker = await start("kill", FAMILY + "time.sleep(60)")
        read_when(tmp_path / "kill.log")
        worker.kill()
        assert await worker.wait() == -signal.SIGKILL
        assert await (await start("leave", FAMILY + "sys.exit(4)")).wait() == 4
        worker = await start("polite", "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); " + SLEEP)
        read_when(tmp_path / "polite.log")
        assert await worker.terminate(10.0) == 5
        worker = await start("deaf", "import signal; signal.signal(15, signal.SIG_IGN); " + SLEEP)
        read_when(tmp_path / "deaf.log")
        assert await worker.terminate(0.1) == -signal.SIGKILL
        worker = await start("at once", SLEEP)  # no handler of the nursery's may swallow it
        assert await worker.terminate(10.0) == -signal.SIGTERM

    within(test)
    assert gone([int((tmp_path / f"{name}.log").read_text().split()[0]) for name in ("kill", "leave")])


def test_killing_the_nursery_ends_its_workers_and_the_next_request_starts_another(
    within: Callable[..., None], tmp_path: Path, gone: Callable[..., bool], read_when: Callable[..., str]
) -> None:
    async def test(nursery: Nursery, start: Start) -> None:
        workers = [await start("a", FAMILY + "time.sleep(60)"), await start("b", SLEEP)]
        child = int(read_when(tmp_path / "a.log").split()[0])
        first = nursery.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert [await w.wait() for w in workers] == [-signal.SIGKILL] * 2
        assert gone([first, child, *(w.pid for w in workers)])
        again = await start("c", "print('hello')")
        assert await again.wait() == 0
        assert nursery.pid not in (None, first)

    within(test)
    assert (tmp_path / "c.log").read_text() == "hello\n"


def test_a_request_under_way_when_the_nursery_dies_fails(within: Callable[..., None]) -> None:
    async def test(nursery: Nursery, start: Start) -> None:
        await nursery.ready()
        assert nursery.pid is not None
        os.kill(nursery.pid, signal.SIGSTOP)
        request = asyncio.ensure_future(start("a", SLEEP))
        await asyncio.sleep(0.1)
        os.kill(nursery.pid, signal.SIGKILL)
        with pytest.raises(NurseryLost):
            await request

    within(test)


def test_a_request_that_is_cancelled_leaves_no_worker(within: Callable[..., None]) -> None:
    async def test(nursery: Nursery, start: Start) -> None:
        await nursery.ready()
        assert nursery.pid is not None
        os.kill(nursery.pid, signal.SIGSTOP)
        request = asyncio.ensure_future(start("a", SLEEP))
        await asyncio.sleep(0.1)
        request.cancel()
        os.kill(nursery.pid, signal.SIGCONT)
        assert await (await start("b", "pass")).wait() == 0  # so the request before it was answered
        children = Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children")
        while children.read_text():
            await asyncio.sleep(0.01)

    within(test)


def test_a_request_cancelled_as_its_answer_comes_leaves_no_worker(within: Callable[..., None]) -> None:
    async def test(nursery: Nursery, start: Start) -> None:
        await nursery.ready()
        children = Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children")
        request = asyncio.ensure_future(start("a", SLEEP))
        await asyncio.sleep(0)
        while not children.read_text():  # without letting the loop run
            pass
        time.sleep(0.1)  # now the answer lies in the socket
        loop = asyncio.get_running_loop()
        loop.call_later(0, lambda: loop.call_soon(request.cancel))
        with contextlib.suppress(asyncio.CancelledError):
            (await request).kill()  # the answer was quicker than the cancel: then it is whoever asked that has it
        while children.read_text():
            await asyncio.sleep(0.01)

    within(test)


def test_closing_ends_all(within: Callable[..., None], gone: Callable[..., bool]) -> None:
    async def test(nursery: Nursery, start: Start) -> None:
        workers = [await start(str(n), "import signal; signal.signal(15, signal.SIG_IGN); " + SLEEP) for n in range(5)]
        pids = [w.pid for w in workers] + [nursery.pid]
        await nursery.close()
        assert [await w.wait() for w in workers] == [-signal.SIGKILL] * 5
        assert gone(pids)

    within(test)


def test_what_cannot_be_imported_is_said(within: Callable[..., None], tmp_path: Path) -> None:
    async def test(nursery: Nursery, start: Start) -> None:
        await start("w1", "pass")

    (tmp_path / "broken.py").write_text("print('noise')\nraise ValueError('not today')")
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(5,), daemon=True).start()"
    )
    with pytest.raises(WindfallError, match="cannot import no_such_module: ModuleNotFoundError"):
        within(test, "json", "no_such_module")
    with pytest.raises(WindfallError, match="cannot import broken: ValueError: not today"):
        within(test, "broken")
    with pytest.raises(WindfallError, match="toy has no function other"):
        within(test, entry="toy:other")
    with pytest.raises(WindfallError, match="after importing threaded there are 2 threads"):
        within(test, "threaded")


def test_a_call_that_leaves_a_thread_is_left_out(within: Callable[..., None], tmp_path: Path) -> None:
    """What is called before the fork is for speed: it may not keep a run from starting."""

    async def test(nursery: Nursery, start: Start) -> None:
        assert await (await start("w1", "import eager; print(eager.called, end='')")).wait() == 0

    (tmp_path / "eager.py").write_text(
        "import threading, time\ncalled = []\n"
        "def call(word):\n    called.append(word)\n"
        "def start(word):\n    call(word)\n    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "def harmless(word):\n    start(word)\n    thread = threading.enumerate()[-1].native_id\n"
        "    open(f'/proc/self/task/{thread}/comm', 'w').write('jemalloc_bg_thd')\n"
    )
    within(test, "eager:call:a:b c")
    assert (tmp_path / "w1.log").read_text() == "['a:b c']"
    assert (tmp_path / "nursery.log").read_text() == ""
    (tmp_path / "w1.log").unlink()
    within(test, "eager:start:x")
    assert (tmp_path / "w1.log").read_text() == "[]"
    assert "there are 2 threads" in (tmp_path / "nursery.log").read_text()
    (tmp_path / "w1.log").unlink()
    within(test, "eager:harmless:x")  # its library knows about forks
    assert (tmp_path / "w1.log").read_text() == "['x']"


def test_an_import_that_never_ends_is_given_up(toy_env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("import time; time.sleep(60)")

    async def go() -> None:
        log = tmp_path / "nursery.log"
        nursery = Nursery(entry="toy:main", modules=["stuck"], log=log, env=toy_env, import_timeout_s=0.3)
        with pytest.raises(WindfallError, match=r"waited 0.3 s for the imports"):
            await nursery.ready()
        assert nursery.pid is None
        await nursery.close()

    asyncio.run(go())


def test_a_name_is_used_by_one_worker_at_a_time(within: Callable[..., None]) -> None:
    async def test(nursery: Nursery, start: Start) -> None:
        await start("w1", SLEEP)
        with pytest.raises(WindfallError, match="there is a worker 'w1' already"):
            await start("w1", SLEEP)

    within(test)


def test_nonsense_does_not_end_the_nursery(toy_env: dict[str, str], tmp_path: Path) -> None:
    """The process by itself, spoken to over pipes, as its description says."""
    (tmp_path / "noisy.py").write_text("print('this must not get between the answers')")
    argv = [sys.executable, "-m", "windfall.fleet.forker", "toy:main", "noisy"]
    nursery = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=toy_env
    )
    good = {"name": "w", "argv": ["x", "import sys; sys.exit(6)"], "env": {}, "log": str(tmp_path / "w.log")}
    nonsense = ["{", "[]", "7", "{}", '{"signal": 9}', '{"signal": 9, "pid": 1}', json.dumps({**good, "argv": [1]})]
    out, _ = nursery.communicate("\n".join([*nonsense, json.dumps(good)]) + "\n", timeout=20)
    answers = [json.loads(line) for line in out.splitlines()]
    assert "ready" in answers[0]
    assert sum("no such request" in a.get("error", "") for a in answers) == len(nonsense) - 1  # pid 1 is no worker
    assert [a for a in answers if "pid" in a and "exit" not in a]
    assert answers[-1]["exit"] in (6, -signal.SIGKILL)  # input closed at once: it may not have come to its end


SUPERVISOR = """
import asyncio, os, sys
from pathlib import Path
from windfall.fleet.nursery import Nursery

async def main():
    nursery = Nursery(entry="toy:main", modules=[], log=Path("nursery.log"))
    workers = [
        await nursery.start(name=f"w{n}", argv=["x", sys.argv[1]], env=dict(os.environ), log=Path(f"w{n}.log"))
        for n in range(3)
    ]
    print(nursery.pid, *(w.pid for w in workers), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_killing_the_supervisor_ends_the_nursery_its_workers_and_their_children(
    tmp_path: Path, toy_env: dict[str, str], gone: Callable[..., bool], read_when: Callable[..., str]
) -> None:
    argv = [sys.executable, "-c", SUPERVISOR, FAMILY + "time.sleep(60)"]
    supervisor = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=toy_env)
    assert supervisor.stdout is not None
    with supervisor.stdout as out:
        pids = [int(word) for word in out.readline().split()]
    assert len(pids) == 4
    pids += [int(read_when(tmp_path / f"w{n}.log").split()[0]) for n in range(3)]
    supervisor.kill()
    supervisor.wait()
    assert gone(pids)


def test_killing_supervisor_and_nursery_at_once_ends_the_workers(
    tmp_path: Path, toy_env: dict[str, str], gone: Callable[..., bool]
) -> None:
    """By PR_SET_PDEATHSIG alone."""
    argv = [sys.executable, "-c", SUPERVISOR, SLEEP]
    supervisor = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=toy_env)
    assert supervisor.stdout is not None
    with supervisor.stdout as out:
        nursery, *workers = [int(word) for word in out.readline().split()]
    supervisor.send_signal(signal.SIGSTOP)  # it must not help
    os.kill(nursery, signal.SIGKILL)
    assert gone([nursery, *workers])
    supervisor.kill()
    supervisor.wait()


def test_a_nursery_that_stands_still_is_killed_and_started_again(
    within: Callable[..., None], monkeypatch: pytest.MonkeyPatch, gone: Callable[..., bool]
) -> None:
    monkeypatch.setattr("windfall.fleet.nursery.PING_S", 0.05)

    async def test(nursery: Nursery, start: Start) -> None:
        worker = await start("a", SLEEP)
        await asyncio.sleep(0.6)  # more pings than may stay without an answer
        first = nursery.pid
        assert first is not None
        assert worker.running
        os.kill(first, signal.SIGSTOP)
        assert await worker.wait() == -signal.SIGKILL
        assert gone([first, worker.pid])
        assert await (await start("a", "pass")).wait() == 0

    within(test)


def test_a_fork_that_takes_too_long_is_an_oserror_and_can_be_asked_for_again(
    within: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windfall.fleet.nursery.FORK_TIMEOUT_S", 0.2)

    async def test(nursery: Nursery, start: Start) -> None:
        await nursery.ready()
        assert nursery.pid is not None
        os.kill(nursery.pid, signal.SIGSTOP)
        with pytest.raises(OSError, match="to fork a"):
            await start("a", SLEEP)
        monkeypatch.setattr("windfall.fleet.nursery.FORK_TIMEOUT_S", 10.0)
        while nursery.pid is not None:
            await asyncio.sleep(0.01)
        assert await (await start("a", "pass")).wait() == 0

    within(test)


TELL_IMPORTS = """
import os, sys

class Tell:
    def find_spec(self, name, path=None, target=None):
        os.write(2, f"imports {name}\\n".encode())

os.register_at_fork(after_in_child=lambda: sys.meta_path.insert(0, Tell()))
"""
ROOT = Path(__file__).parent.parent.parent
MOST_IMPORTS = 20
"""The command line's parser, codecs of an address, and packages that are looked for and not installed: about ten."""


@pytest.mark.timeout(180)
def test_a_real_worker_and_a_real_trainer_import_next_to_nothing_after_the_fork(tmp_path: Path) -> None:
    """Every process of a real run says what it looks for on the disk after it was forked, from its start to its end."""
    (tmp_path / "sitecustomize.py").write_text(TELL_IMPORTS)
    changes = ["run.steps=1", "rollout.groups=2", "rollout.group_size=2", "rollout.max_tokens=8", "eval.tasks=0",
               "trace.nodes=0", "fleet.workers=1", f"run.folder={tmp_path}"]  # fmt: skip
    command = [sys.executable, "-m", "windfall.cli", "train", str(ROOT / "recipes" / "demo.toml")]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    done = subprocess.run(
        [*command, *(word for c in changes for word in ("--set", c))],
        env=env, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    workers = sorted((tmp_path / "demo" / "workers").iterdir())
    for log in (workers[0], tmp_path / "demo" / "trainer.log"):
        imported = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("imports ")]
        assert imported, "the process told nothing: is the hook of this test in place?"
        assert len(imported) <= MOST_IMPORTS, f"{log.name}: {len(imported)} modules: {imported}"


def test_a_process_that_outlives_sigkill_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nurseries, "KILL_TIMEOUT_S", 0.05)
    asyncio.run(nurseries._gone(os.getpid()))
    assert f"worker process {os.getpid()} to end by SIGKILL" in caplog.text
