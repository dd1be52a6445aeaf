"""The import server of the tests: fork servers from it have what it imported. Processes that differ from it are
refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from windfall.processes import fork_client
from windfall.processes.fork_client import ForkClient

SLEEP = "import time; print('up'); time.sleep(60)"
PARENTS = """
from pathlib import Path
up = os.getppid()
print(up, Path(f"/proc/{up}/stat").read_text().rpartition(")")[2].split()[1], imported_by)
"""
ONE_WORKER = """
import asyncio, os, sys
from pathlib import Path
from windfall.processes.fork_client import ForkClient

async def main():
    async with ForkClient(entry="toy:main", modules=["toy"], log=Path("fork_server.log")) as client:
        worker = await client.start(name="w", argv=["x", sys.argv[1]], env={}, log=Path("w.log"))
        print(await worker.wait())

asyncio.run(main())
"""
Server = subprocess.Popen[bytes]


@pytest.fixture
def toy_env(tmp_path: Path, toy_env: dict[str, str]) -> dict[str, str]:
    """The toy remembers which process imported it."""
    with (tmp_path / "toy.py").open("a") as toy:
        toy.write("\nimported_by = os.getpid()\n")
    return toy_env


def with_client(tmp_path: Path, env: dict[str, str], test: Callable[[ForkClient], Awaitable[None]]) -> str:
    """Run a test with a fork client, and return the log of its fork server."""
    log = tmp_path / "fork_server.log"

    async def main() -> None:
        async with ForkClient(entry="toy:main", modules=["toy"], log=log, env=env) as client:
            await asyncio.wait_for(test(client), 240)

    asyncio.run(main())
    return log.read_text()


def parents(tmp_path: Path, env: dict[str, str]) -> tuple[list[int], str]:
    """The fork server of a worker, the parent of that fork server, and the process that imported the toy; and the log
    of the fork server."""
    code = PARENTS.replace("imported_by", "__import__('toy').imported_by")

    async def test(client: ForkClient) -> None:
        worker = await client.start(name="w", argv=["x", "import os" + code], env={}, log=tmp_path / "w.log")
        assert await worker.wait() == 0

    log = with_client(tmp_path, env, test)
    return [int(word) for word in (tmp_path / "w.log").read_text().splitlines()[-1].split()], log


def test_workers_have_what_the_import_server_imported(
    tmp_path: Path, toy_env: dict[str, str], toy_import_server: Server
) -> None:
    (fork_server, above, imported_by), log = parents(tmp_path, toy_env)
    assert above == imported_by == toy_import_server.pid != fork_server
    assert log == ""


@pytest.mark.skipif(fork_client.RUNNER not in os.environ, reason="only tests/run_in_parallel.py has an import server")
def test_runs_of_tests_get_their_fork_server_from_the_import_server(tmp_path: Path, toy_env: dict[str, str]) -> None:
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    assert parents(tmp_path, env)[1] == ""


def test_more_folders_in_front_of_pythonpath(
    tmp_path: Path, toy_env: dict[str, str], toy_import_server: Server
) -> None:
    """A module from such a folder can be imported; one that would replace an imported module cannot."""
    more = tmp_path / "more"
    more.mkdir()
    (more / "extra.py").write_text("")
    env = {**toy_env, "PYTHONPATH": f"{more}:{toy_env['PYTHONPATH']}"}

    async def test(client: ForkClient) -> None:
        worker = await client.start(name="w", argv=["x", "import extra"], env={}, log=tmp_path / "w.log")
        assert await worker.wait() == 0, (tmp_path / "w.log").read_text()

    assert with_client(tmp_path, env, test) == ""
    for name in ("toy", "sitecustomize"):
        (more / f"{name}.py").write_text((tmp_path / "toy.py").read_text())
        (fork_server, _, imported_by), log = parents(tmp_path, env)
        assert fork_server == imported_by
        assert f"another PYTHONPATH, with its own {name} in {more}" in log
        (more / f"{name}.py").unlink()
    _, log = parents(tmp_path, {**toy_env, "PYTHONPATH": f"{toy_env['PYTHONPATH']}:/more"})
    assert "this process has another PYTHONPATH: [" in log


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_NUM_THREADS", "7"), ("HF_HOME", "/elsewhere"), ("MIMALLOC_PURGE_DELAY", "0")]
)
def test_process_with_other_variables_starts_its_own_fork_server(
    tmp_path: Path, toy_env: dict[str, str], toy_import_server: Server, name: str, value: str
) -> None:
    (fork_server, above, imported_by), log = parents(tmp_path, {**toy_env, name: value})
    assert fork_server == imported_by
    assert above == os.getpid()
    assert log == f"The import server {tmp_path}/imports is not used: this process has other variables: {name}\n"


@pytest.mark.parametrize(
    ("wrapper", "refusal"),
    [
        (["prlimit", "--nofile=300:300"], "other limits: Max open files"),
        (["nice", "-n", "3"], "other priority"),
        (["unshare", "--user", "--net"], "other"),
    ],
)
def test_process_with_other_rights_or_limits_starts_its_own_fork_server(
    tmp_path: Path, toy_env: dict[str, str], toy_import_server: Server, wrapper: list[str], refusal: str
) -> None:
    if subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip(f"{wrapper[0]} does not work here")
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", ONE_WORKER, "import os; print(os.getppid())"],
        cwd=tmp_path, env=toy_env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "0\n", done.stderr
    assert refusal in (tmp_path / "fork_server.log").read_text()


def test_fork_servers_end_with_the_import_server_and_the_next_is_started_without_it(
    tmp_path: Path, toy_env: dict[str, str], toy_import_server: Server, gone: Callable[..., bool]
) -> None:
    async def test(client: ForkClient) -> None:
        worker = await client.start(name="a", argv=["x", SLEEP], env={}, log=tmp_path / "a.log")
        first = client.pid
        toy_import_server.kill()
        toy_import_server.wait()
        assert await worker.wait() == -signal.SIGKILL
        assert gone([first, worker.pid])
        while client.pid is not None:  # wait_for limits this
            await asyncio.sleep(0.01)
        again = await client.start(name="b", argv=["x", "pass"], env={}, log=tmp_path / "b.log")
        assert await again.wait() == 0

    assert "is not used: [Errno 111] Connection refused" in with_client(tmp_path, toy_env, test)


def test_fork_server_ends_with_the_program_that_stands_for_it(
    tmp_path: Path, toy_env: dict[str, str], toy_import_server: Server, gone: Callable[..., bool]
) -> None:
    async def test(client: ForkClient) -> None:
        worker = await client.start(name="a", argv=["x", SLEEP], env={}, log=tmp_path / "a.log")
        fork_server = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert fork_server != client.pid
        client.kill()
        assert await worker.wait() == -signal.SIGKILL
        assert gone([fork_server, worker.pid])
        again = await client.start(name="b", argv=["x", "pass"], env={}, log=tmp_path / "b.log")
        assert await again.wait() == 0

    assert with_client(tmp_path, toy_env, test) == ""
