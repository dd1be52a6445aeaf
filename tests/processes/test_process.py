"""One local worker process. Not covered: kernels without PR_SET_PDEATHSIG, and grandchildren of a killed supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from windfall.errors import WindfallError
from windfall.processes import process
from windfall.processes.process import Handle

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
FAMILY = (
    "import subprocess, sys, time; "
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(c.pid, 'child', flush=True); "
)


async def python(code: str, log: Path, **env: str) -> Handle:
    argv = [sys.executable, "-S", "-c", code]
    return process.start(name="w1", argv=argv, env={"PATH": os.environ["PATH"], **env}, log=log)


def test_process_has_its_own_session_and_the_given_environment(tmp_path: Path) -> None:
    code = (
        "import json, os, sys; "
        "print(json.dumps([os.getpid(), os.getsid(0), os.getpgid(0), dict(os.environ), sys.stdin.read(), sys.argv])); "
        "print('and this', file=sys.stderr); print(open('/proc/self/status').read()); sys.exit(7)"
    )
    log = tmp_path / "workers" / "w1.log"

    async def main() -> int:
        assert await (await python("print('before')", log)).wait() == 0
        worker = await python(code, log, TOKEN="secret", LC_CTYPE="C.UTF-8")
        assert worker.pid
        assert await worker.wait() == 7
        return worker.pid

    pid = asyncio.run(main())
    text = log.read_text()
    assert text.startswith("before\n")
    assert "and this\n" in text
    report = json.loads(next(line for line in text.splitlines() if line.startswith("[")))
    assert report[:3] == [pid, pid, pid]
    assert report[3] == {"PATH": os.environ["PATH"], "TOKEN": "secret", "LC_CTYPE": "C.UTF-8"}
    assert report[4:] == ["", ["-c"]]


def test_process_starts_with_default_signal_handlers(tmp_path: Path) -> None:
    async def main() -> int:
        argv = ["sh", "-c", "grep SigIgn /proc/self/status"]
        return await (process.start(name="w", argv=argv, env=dict(os.environ), log=tmp_path / "log")).wait()

    assert asyncio.run(main()) == 0
    assert int((tmp_path / "log").read_text().split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_kill_ends_the_whole_group(tmp_path: Path, gone: Callable[..., bool], read_when: Callable[..., str]) -> None:
    async def main() -> list[int]:
        worker = await python(FAMILY + "time.sleep(60)", tmp_path / "log")
        child = int(read_when(tmp_path / "log").split()[0])
        worker.kill()
        assert await asyncio.wait_for(worker.wait(), 240) == -signal.SIGKILL
        worker.kill()  # no effect after the end
        return [worker.pid, child]

    assert gone(asyncio.run(main()))


@pytest.mark.parametrize("pidfd", [True, False])
def test_rest_of_the_group_is_killed_when_the_leader_exits(
    tmp_path: Path, gone: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    def none(pid: int) -> int:
        raise OSError("no such call")

    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", none)

    async def main() -> None:
        worker = await python(FAMILY + "sys.exit(3)", tmp_path / "log")
        assert await asyncio.wait_for(worker.wait(), 240) == 3
        assert not worker.running

    asyncio.run(main())
    assert gone([int((tmp_path / "log").read_text().split()[0])])


def test_terminate_waits_for_the_grace_period_then_kills(tmp_path: Path, read_when: Callable[..., str]) -> None:
    polite = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('up', flush=True); time.sleep(60)"
    )
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); " + SLEEP

    async def main(code: str, log: str, grace_s: float) -> tuple[int, float]:
        worker = await python(code, tmp_path / log)
        read_when(tmp_path / log)
        began = time.monotonic()
        return await worker.terminate(grace_s), time.monotonic() - began

    assert asyncio.run(main(polite, "polite", 10.0))[0] == 5
    code, took_s = asyncio.run(main(deaf, "deaf", 0.3))
    assert code == -signal.SIGKILL
    assert 0.3 <= took_s < 20
    assert asyncio.run(main(polite, "no grace", 0.0))[0] == -signal.SIGKILL


def test_canceled_terminate_kills(tmp_path: Path, gone: Callable[..., bool], read_when: Callable[..., str]) -> None:
    async def main() -> int:
        worker = await python("import signal; signal.signal(15, signal.SIG_IGN); " + SLEEP, tmp_path / "log")
        read_when(tmp_path / "log")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.terminate(60.0), 0.2)
        await worker.wait()
        return worker.pid

    assert gone([asyncio.run(main())])


def test_missing_program_and_bad_log_are_user_errors(tmp_path: Path) -> None:
    async def main(argv: list[str], log: Path) -> None:
        process.start(name="w1", argv=argv, env={"PATH": "/bin"}, log=log)

    with pytest.raises(WindfallError, match="program 'no-such-thing' not found"):
        asyncio.run(main(["no-such-thing"], tmp_path / "log"))
    (tmp_path / "file").touch()
    with pytest.raises(WindfallError, match="cannot open the log"):
        asyncio.run(main(["sh"], tmp_path / "file" / "log"))


def test_process_dies_with_its_supervisor(
    tmp_path: Path, gone: Callable[..., bool], alive: Callable[[int], bool]
) -> None:
    """PR_SET_PDEATHSIG must do it: the supervisor gets SIGKILL and cannot act."""
    code = f"""
import asyncio, os, sys
from pathlib import Path
from windfall.processes import process

async def main():
    argv = [sys.executable, "-S", "-c", {SLEEP!r}]
    workers = [process.start(name=str(n), argv=argv, env=dict(os.environ), log=Path("log")) for n in range(3)]
    print(*(w.pid for w in workers), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert supervisor.stdout is not None
    with supervisor.stdout as out:
        pids = [int(word) for word in out.readline().split()]
    assert len(pids) == 3
    assert all(map(alive, pids))
    supervisor.kill()
    supervisor.wait()
    assert gone(pids)
