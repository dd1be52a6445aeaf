"""The fork server: forked workers are like fresh processes, and no process is left behind when another one dies.

The workers here run small pieces of code, except in the test with a real run. `python benchmarks/fleet/start_time.py`
tests torch in a forked worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.processes import fork_client
from windfall.processes.fork_client import ForkClient, ForkServerLost
from windfall.processes.process import Handle

SLEEP = "import time; print('up'); time.sleep(60)"
FAMILY = (
    "import subprocess, sys, time; "
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(c.pid, 'child'); "
)
ABOUT = """
import json, os, signal, sys, threading
report = {
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
print(json.dumps(report))
print("and this", file=sys.stderr)
"""
Start = Callable[..., Awaitable[Handle]]


@pytest.fixture
def within(tmp_path: Path, toy_env: dict[str, str]) -> Callable[..., None]:
    """Runs the coroutine `test(client, start)` of a test with a fork server for `toy:main`."""

    def run(test: Callable[[ForkClient, Start], Awaitable[None]], *modules: str, entry: str = "toy:main") -> None:
        async def main() -> None:
            async with ForkClient(
                entry=entry, modules=modules, log=tmp_path / "fork_server.log", env=toy_env
            ) as client:

                async def start(name: str, code: str, *args: str, env: dict[str, str] | None = None) -> Handle:
                    return await client.start(
                        name=name, argv=["windfall", code, *args], env=env or {}, log=tmp_path / f"{name}.log"
                    )

                await asyncio.wait_for(test(client, start), 240)

        asyncio.run(main())

    return run


def test_forked_worker_is_like_a_fresh_process(within: Callable[..., None], tmp_path: Path) -> None:
    pids: list[int] = []

    async def test(client: ForkClient, start: Start) -> None:
        for name in ("w1", "w2"):
            worker = await start(name, ABOUT, "--join", "somewhere", env={"TOKEN": name})
            pids.append(worker.pid)
            assert await worker.wait() == 0

    within(test, "colorsys")
    for pid, name in zip(pids, ("w1", "w2"), strict=True):
        first, second = (tmp_path / f"{name}.log").read_text().splitlines()
        assert second == "and this"
        report = json.loads(first)
        assert report.pop("ids") == [pid, pid, pid]
        assert report == {
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


def test_exit_status_of_a_worker_is_reported(within: Callable[..., None], tmp_path: Path) -> None:
    async def test(client: ForkClient, start: Start) -> None:
        assert await (await start("three", "import sys; sys.exit(3)")).wait() == 3
        assert await (await start("wrong", "1 / 0")).wait() == 1
        worker = await start("self", "import os; os.kill(os.getpid(), 11)")
        assert await worker.wait() == -signal.SIGSEGV
        worker = await start("at-exit", "import atexit; atexit.register(print, 'last word')")
        assert await worker.wait() == 0

    within(test)
    assert "ZeroDivisionError" in (tmp_path / "wrong.log").read_text()
    assert (tmp_path / "at-exit.log").read_text() == "last word\n"
    assert (tmp_path / "fork_server.log").read_text() == ""


def test_no_process_is_left_after_kill_terminate_or_exit(
    within: Callable[..., None], tmp_path: Path, gone: Callable[..., bool], read_when: Callable[..., str]
) -> None:
    async def test(client: ForkClient, start: Start) -> None:
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
        worker = await start("at once", SLEEP)  # no handler of the fork server may catch the signal
        assert await worker.terminate(10.0) == -signal.SIGTERM

    within(test)
    assert gone([int((tmp_path / f"{name}.log").read_text().split()[0]) for name in ("kill", "leave")])


def test_killed_fork_server_ends_its_workers_and_the_next_request_starts_another(
    within: Callable[..., None], tmp_path: Path, gone: Callable[..., bool], read_when: Callable[..., str]
) -> None:
    async def test(client: ForkClient, start: Start) -> None:
        workers = [await start("a", FAMILY + "time.sleep(60)"), await start("b", SLEEP)]
        child = int(read_when(tmp_path / "a.log").split()[0])
        first = client.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert [await w.wait() for w in workers] == [-signal.SIGKILL] * 2
        assert gone([first, child, *(w.pid for w in workers)])
        again = await start("c", "print('hello')")
        assert await again.wait() == 0
        assert client.pid not in (None, first)

    within(test)
    assert (tmp_path / "c.log").read_text() == "hello\n"


def test_pending_request_fails_when_the_fork_server_dies(within: Callable[..., None]) -> None:
    async def test(client: ForkClient, start: Start) -> None:
        await client.ready()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        request = asyncio.ensure_future(start("a", SLEEP))
        await asyncio.sleep(0.1)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(ForkServerLost):
            await request

    within(test)


STUCK = """
import os, pathlib, sys, time
with open({folder!r} + "/starts", "a") as file: file.write(f"{{os.getpid()}} {{sys.argv}}\\n")
def wait(word="", go=pathlib.Path({folder!r}, "go")):
    while not go.exists(): time.sleep(0.01)
if not {calls}: wait()
"""


async def kill_starting(tmp_path: Path, number: int) -> str:
    """Kill the fork server of this start while it imports. Returns its arguments."""
    path = tmp_path / "starts"
    while not path.exists() or path.read_text().count("\n") <= number:
        await asyncio.sleep(0.01)
    pid, _, argv = path.read_text().splitlines()[number].partition(" ")
    os.kill(int(pid), signal.SIGKILL)
    return argv


def test_fork_server_killed_while_it_starts_is_replaced(within: Callable[..., None], tmp_path: Path) -> None:
    """Requests that wait for it get a worker of the next one."""
    (tmp_path / "stuck.py").write_text(STUCK.format(folder=str(tmp_path), calls=False))

    async def test(client: ForkClient, start: Start) -> None:
        requests = [asyncio.ensure_future(start(name, "print('hello')")) for name in "ab"]
        await kill_starting(tmp_path, 0)
        (tmp_path / "go").touch()
        for request in requests:
            assert await (await request).wait() == 0

    within(test, "stuck")
    assert (tmp_path / "a.log").read_text() == "hello\n"


def test_fork_server_killed_at_every_start_is_an_error(
    within: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second start on it makes no calls, which may be the cause."""
    monkeypatch.setattr(fork_client, "RESTART_S", 0.1)
    (tmp_path / "stuck.py").write_text(STUCK.format(folder=str(tmp_path), calls=True))
    arguments = list[str]()

    async def test(client: ForkClient, start: Start) -> None:
        request = asyncio.ensure_future(start("a", SLEEP))
        arguments.append(await kill_starting(tmp_path, 0))
        (tmp_path / "stuck.py").write_text(STUCK.format(folder=str(tmp_path), calls=False))
        for number in range(1, fork_client.MAX_LOST_STARTS):
            arguments.append(await kill_starting(tmp_path, number))
        with pytest.raises(WindfallError, match=r"was killed \(SIGKILL\) while it started \(4 times in a row\)"):
            await request

    within(test, "stuck:wait:x")
    assert ["stuck:wait:x" in argv for argv in arguments] == [True, False, False, False]


def test_canceled_request_leaves_no_worker(within: Callable[..., None]) -> None:
    async def test(client: ForkClient, start: Start) -> None:
        await client.ready()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        request = asyncio.ensure_future(start("a", SLEEP))
        await asyncio.sleep(0.1)
        request.cancel()
        os.kill(client.pid, signal.SIGCONT)
        assert await (await start("b", "pass")).wait() == 0  # so the earlier request was answered
        children = Path(f"/proc/{client.pid}/task/{client.pid}/children")
        while children.read_text():
            await asyncio.sleep(0.01)

    within(test)


def test_request_canceled_while_its_answer_arrives_leaves_no_worker(within: Callable[..., None]) -> None:
    async def test(client: ForkClient, start: Start) -> None:
        await client.ready()
        children = Path(f"/proc/{client.pid}/task/{client.pid}/children")
        request = asyncio.ensure_future(start("a", SLEEP))
        await asyncio.sleep(0)
        while not children.read_text():  # without running the event loop
            pass
        time.sleep(0.1)  # now the answer is in the socket
        loop = asyncio.get_running_loop()
        loop.call_later(0, lambda: loop.call_soon(request.cancel))
        with contextlib.suppress(asyncio.CancelledError):
            (await request).kill()  # the answer came before the cancellation: then the caller has the worker
        while children.read_text():
            await asyncio.sleep(0.01)

    within(test)


def test_close_ends_all_processes(within: Callable[..., None], gone: Callable[..., bool]) -> None:
    async def test(client: ForkClient, start: Start) -> None:
        workers = [await start(str(n), "import signal; signal.signal(15, signal.SIG_IGN); " + SLEEP) for n in range(5)]
        pids = [w.pid for w in workers] + [client.pid]
        await client.close()
        assert [await w.wait() for w in workers] == [-signal.SIGKILL] * 5
        assert gone(pids)

    within(test)


def test_failed_import_is_reported(within: Callable[..., None], tmp_path: Path) -> None:
    async def test(client: ForkClient, start: Start) -> None:
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


def test_preload_call_that_leaves_a_thread_is_skipped(
    within: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls before the fork only save time: they must not prevent a run from starting."""

    async def test(client: ForkClient, start: Start) -> None:
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
    assert (tmp_path / "fork_server.log").read_text() == ""
    (tmp_path / "w1.log").unlink()
    within(test, "eager:start:x")
    assert (tmp_path / "w1.log").read_text() == "[]"
    assert "there are 2 threads" in caplog.text
    (tmp_path / "w1.log").unlink()
    within(test, "eager:harmless:x")  # this thread's library handles forks
    assert (tmp_path / "w1.log").read_text() == "['x']"


def test_import_that_never_ends_times_out(toy_env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("import time; time.sleep(60)")

    async def main() -> None:
        log = tmp_path / "fork_server.log"
        client = ForkClient(entry="toy:main", modules=["stuck"], log=log, env=toy_env, import_timeout_s=0.3)
        with pytest.raises(WindfallError, match=r"waited 0.3 s for the imports"):
            await client.ready()
        assert client.pid is None
        await client.close()

    asyncio.run(main())


def test_name_is_used_by_one_worker_at_a_time(within: Callable[..., None]) -> None:
    async def test(client: ForkClient, start: Start) -> None:
        await start("w1", SLEEP)
        with pytest.raises(WindfallError, match="there is already a worker 'w1'"):
            await start("w1", SLEEP)

    within(test)


def test_invalid_requests_do_not_end_the_fork_server(toy_env: dict[str, str], tmp_path: Path) -> None:
    """Talks to the process in the format of its docstring."""
    (tmp_path / "noisy.py").write_text("print('this must not be mixed with the answers')")
    argv = [sys.executable, "-m", "windfall.processes.fork_server", "toy:main", "noisy"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=toy_env
        )
    good = {"name": "w", "argv": ["x", "import sys; sys.exit(6)"], "env": {}}
    invalid = ["{", "[]", "7", "{}", '{"signal": 9}', '{"signal": 9, "pid": 1}', json.dumps({**good, "argv": [1]})]
    answers = list[dict[str, Any]]()
    with ours, (tmp_path / "w.log").open("wb") as log:
        ours.settimeout(20)
        for request in (*invalid, json.dumps(good)):  # the last one lacks its log
            ours.send(request.encode())
        socket.send_fds(ours, [json.dumps(good).encode()], [log.fileno()])
        while not answers or "exit" not in answers[-1]:
            answers.append(json.loads(ours.recv(1 << 16)))
    server.wait(timeout=240)
    assert "ready" in answers[0]
    # The request with pid 1 gets no answer: it is valid, but pid 1 is not a worker.
    assert sum("invalid request" in a.get("error", "") for a in answers) == len(invalid)
    assert [a for a in answers if "pid" in a and "exit" not in a]
    assert answers[-1]["exit"] == 6


def test_what_a_worker_leaves_behind_is_killed(
    within: Callable[..., None], tmp_path: Path, gone: Callable[..., bool]
) -> None:
    """Also a daemon with a session of its own, and also if the worker is killed."""
    daemon = FAMILY.replace("60)'])", "60)'], start_new_session=True)")

    async def test(client: ForkClient, start: Start) -> None:
        assert await (await start("ends", daemon)).wait() == 0
        worker = await start("killed", daemon + "time.sleep(60)")
        while "child" not in (tmp_path / "killed.log").read_text():
            await asyncio.sleep(0.01)
        worker.kill()
        assert await worker.wait() == -signal.SIGKILL
        assert gone([int((tmp_path / f"{name}.log").read_text().split()[0]) for name in ("ends", "killed")])

    within(test)


def test_variables_that_are_too_large_are_a_user_error(within: Callable[..., None]) -> None:
    async def test(client: ForkClient, start: Start) -> None:
        with pytest.raises(WindfallError, match="environment variables of w cannot be sent"):
            await start("w", "pass", env={"LARGE": "x" * (1 << 20)})
        assert await (await start("w", "pass", env={"LARGE": "x" * (1 << 16)})).wait() == 0

    within(test)


def test_worker_talks_over_the_channel_of_its_request(within: Callable[..., None], tmp_path: Path) -> None:
    code = "from windfall.processes import fork_server; fork_server.channel().sendall(b'hello')"

    async def test(client: ForkClient, start: Start) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            worker = await client.start(
                name="w", argv=["x", code], env={}, log=tmp_path / "w.log", channel=theirs
            )  # fmt: skip
            assert await worker.wait() == 0, (tmp_path / "w.log").read_text()
            assert ours.recv(100) == b"hello"

    within(test)


SUPERVISOR = """
import asyncio, os, sys
from pathlib import Path
from windfall.processes.fork_client import ForkClient

async def main():
    client = ForkClient(entry="toy:main", modules=[], log=Path("fork_server.log"))
    workers = [
        await client.start(name=f"w{n}", argv=["x", sys.argv[1]], env=dict(os.environ), log=Path(f"w{n}.log"))
        for n in range(3)
    ]
    print(client.pid, *(w.pid for w in workers), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_killed_supervisor_ends_the_fork_server_its_workers_and_their_children(
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


def test_workers_end_when_supervisor_and_fork_server_are_killed_together(
    tmp_path: Path, toy_env: dict[str, str], gone: Callable[..., bool]
) -> None:
    """Only PR_SET_PDEATHSIG can do it."""
    argv = [sys.executable, "-c", SUPERVISOR, SLEEP]
    supervisor = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=toy_env)
    assert supervisor.stdout is not None
    with supervisor.stdout as out:
        server, *workers = [int(word) for word in out.readline().split()]
    supervisor.send_signal(signal.SIGSTOP)  # the supervisor must not help
    os.kill(server, signal.SIGKILL)
    assert gone([server, *workers])
    supervisor.kill()
    supervisor.wait()


def test_stopped_fork_server_is_killed_and_restarted(
    within: Callable[..., None], monkeypatch: pytest.MonkeyPatch, gone: Callable[..., bool]
) -> None:
    monkeypatch.setattr("windfall.processes.fork_client.PING_S", 0.2)

    async def test(client: ForkClient, start: Start) -> None:
        worker = await start("a", SLEEP)
        await asyncio.sleep(1.5)  # longer than it takes to reach the limit of unanswered pings
        first = client.pid
        assert first is not None
        assert worker.running
        os.kill(first, signal.SIGSTOP)
        assert await worker.wait() == -signal.SIGKILL
        assert gone([first, worker.pid])
        assert await (await start("a", "pass")).wait() == 0

    within(test)


def test_slow_fork_raises_oserror_and_can_be_retried(
    within: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windfall.processes.fork_client.FORK_TIMEOUT_S", 0.2)

    async def test(client: ForkClient, start: Start) -> None:
        await client.ready()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(OSError, match="to fork a"):
            await start("a", SLEEP)
        monkeypatch.setattr("windfall.processes.fork_client.FORK_TIMEOUT_S", 10.0)
        while client.pid is not None:
            await asyncio.sleep(0.01)
        assert await (await start("a", "pass")).wait() == 0

    within(test)


REPORT_IMPORTS = """
import os, sys

class Report:
    def find_spec(self, name, path=None, target=None):
        os.write(2, f"imports {name}\\n".encode())

os.register_at_fork(after_in_child=lambda: sys.meta_path.insert(0, Report()))
"""
ROOT = Path(__file__).parent.parent.parent
MAX_IMPORTS = 20
"""About ten are expected: the command line parser, codecs for an address, and optional packages not installed."""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_real_worker_and_trainer_import_almost_nothing_after_the_fork(tmp_path: Path) -> None:
    """Every process of a real run logs each module that it looks for on the disk after the fork."""
    (tmp_path / "sitecustomize.py").write_text(REPORT_IMPORTS)
    changes = ["run.steps=1", "rollout.groups=2", "rollout.group_size=2", "rollout.max_tokens=8", "eval.tasks=0",
               "trace.nodes=0", "fleet.workers=1", f"run.folder={tmp_path}"]  # fmt: skip
    command = [sys.executable, "-m", "windfall.run.cli", "train", str(ROOT / "recipes" / "demo.toml")]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    done = subprocess.run(
        [*command, *(word for c in changes for word in ("--set", c))],
        env=env, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    workers = sorted((tmp_path / "demo" / "workers").iterdir())
    for log in (workers[0], tmp_path / "demo" / "trainer.log"):
        imported = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("imports ")]
        assert imported, "the process logged no imports: is the hook of this test installed?"
        assert len(imported) <= MAX_IMPORTS, f"{log.name}: {len(imported)} modules: {imported}"


def test_process_that_survives_sigkill_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_client, "KILL_TIMEOUT_S", 0.05)
    asyncio.run(fork_client._wait_for_end(os.getpid()))
    assert f"worker process {os.getpid()} to end by SIGKILL" in caplog.text
