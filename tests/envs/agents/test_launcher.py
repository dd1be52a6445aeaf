"""The process that starts agents: one bad agent harms no other, nothing survives its agent, and secrets stay hidden."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from windfall.envs.agents import isolation
from windfall.envs.agents.launcher import AgentExit, AgentLauncher, AgentProgram
from windfall.errors import WindfallError
from windfall.processes import fork_client, reaper

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


PROGRAMS = str(Path(__file__).parents[2] / "programs")


def program(**changes: Any) -> AgentProgram:
    return AgentProgram(**{"function": "launched:act", "directory": PROGRAMS, **changes})


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 240))


async def start(launcher: AgentLauncher, do: str, kill: asyncio.Future[str] | None = None, **options: Any) -> AgentExit:
    kill = kill or asyncio.get_running_loop().create_future()
    return await launcher.run({"do": do, "options": options}, {"KEY": "mine"}, kill)


@pytest.mark.parametrize(
    ("do", "options", "said"),
    [
        ("fork_and_return", {}, ""),
        ("write", {"data": "xx"}, "not JSON"),
        ("write", {"data": "[" * 60_000}, "not JSON"),
    ],
)
def test_result_of_one_agent_harms_no_other(do: str, options: dict[str, Any], said: str) -> None:
    async def main() -> None:
        async with AgentLauncher(program()) as launcher:
            other = asyncio.create_task(start(launcher, "value", after_s=0.5))
            bad = await start(launcher, do, **options)
            assert said in bad.why
            assert bool(bad.failure) == bool(said)
            assert bad.failure or bad.value == 0.5
            assert (await other).value == 0.5

    run(main())


@linux
def test_agent_that_cannot_be_started_harms_no_other() -> None:
    async def main() -> None:
        async with AgentLauncher(program()) as launcher:
            await launcher.ready()
            server = launcher.pid
            assert server is not None
            pid = reaper.descendants(server)[1]  # below its two reapers
            other = asyncio.create_task(start(launcher, "value", after_s=0.5))
            await asyncio.sleep(0.2)
            soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
            refused = await start(launcher, "value")
            assert "could not be started: too many open files" in refused.why
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
            assert (await other).failure is None
            assert launcher.pid == server
            assert (await start(launcher, "value")).failure is None

    run(main())


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pids)


async def pids_in(path: Path) -> list[int]:
    while not (path.exists() and path.read_text().count(" ") == 2):
        await asyncio.sleep(0.01)
    return [int(word) for word in path.read_text().split()]


@linux
@pytest.mark.parametrize("how", ["returns", "killed", "server killed", "its reaper killed", "launcher ends"])
def test_nothing_survives_its_agent(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        path, kill = tmp_path / "pids", asyncio.get_running_loop().create_future()
        async with AgentLauncher(program()) as launcher:
            wait_s = 0.0 if how == "returns" else 60.0
            running = asyncio.create_task(start(launcher, "escape", kill, path=str(path), wait_s=wait_s))
            pids = await pids_in(path)
            if how == "killed":
                kill.set_result("is too slow")
            elif how in ("server killed", "its reaper killed"):
                assert launcher.pid is not None
                pids += (tree := [launcher.pid, *reaper.descendants(launcher.pid)])
                os.kill(tree[0 if how == "its reaper killed" else 2], signal.SIGKILL)
            if how != "launcher ends":
                ended = await running
                said = {"killed": "is too slow", "returns": ""}
                assert said.get(how, "the process that starts agents was lost") in ended.why
                assert (await start(launcher, "value")).value == 0.5, "the next agent runs"
        wait_for_end(pids)
        if how == "launcher ends":
            assert (await running).failure is not None

    run(main())


@linux
@pytest.mark.parametrize("how", ["launcher ends", "server killed"])
def test_nothing_that_the_module_started_survives_the_launcher(tmp_path: Path, how: str) -> None:
    (tmp_path / "with_helper.py").write_text(
        "import pathlib, subprocess\n"
        "helper = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "pathlib.Path('helper').write_text(str(helper.pid))\n"
        "def run(task): return 0.5\n"
    )

    async def main() -> None:
        async with AgentLauncher(AgentProgram(function="with_helper:run", directory=str(tmp_path))) as launcher:
            await launcher.ready()
            assert launcher.pid is not None
            if how == "server killed":
                os.kill(reaper.descendants(launcher.pid)[1], signal.SIGKILL)
                wait_for_end([int((tmp_path / "helper").read_text())])

    run(main())
    wait_for_end([int((tmp_path / "helper").read_text())])


STUCK = """
import os, pathlib, time
with open("starts", "a") as file: file.write(f"{os.getpid()} ")
while not pathlib.Path("go").exists(): time.sleep(0.01)
def run(task): return 0.5
"""


@linux
@pytest.mark.parametrize("kills", [1, 3])
def test_server_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    monkeypatch.setattr(fork_client, "RESTART_S", 0.01)
    monkeypatch.setattr(fork_client, "MAX_LOST_STARTS", 3)
    (tmp_path / "stuck.py").write_text(STUCK)
    starts = tmp_path / "starts"

    async def main() -> None:
        async with AgentLauncher(AgentProgram(function="stuck:run", directory=str(tmp_path))) as launcher:
            ready = asyncio.create_task(launcher.ready())
            for number in range(kills):
                while len(started := starts.read_text().split() if starts.exists() else []) <= number:
                    await asyncio.sleep(0.01)
                os.kill(int(started[-1]), signal.SIGKILL)
            if kills == 3:
                with pytest.raises(WindfallError, match=r"was killed \(SIGKILL\) while it started \(3 times in a row"):
                    await ready
                return
            (tmp_path / "go").touch()
            await ready
            never = asyncio.get_running_loop().create_future()
            assert (await launcher.run({}, {}, never)).value == 0.5

    run(main())


@linux
def test_nothing_survives_a_killed_reaper(tmp_path: Path) -> None:
    async def main() -> None:
        async with AgentLauncher(program(isolation="off")) as launcher:
            path = tmp_path / "pids"
            ended = await start(launcher, "kill_reaper", path=str(path))
            assert ended.code == -signal.SIGKILL
            deadline = time.monotonic() + 60
            while alive(await pids_in(path)) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            assert not alive(await pids_in(path))
            assert (await start(launcher, "value")).value == 0.5, "the next agent runs"

    run(main())


@linux
def test_agent_does_not_find_keys_of_others_in_its_memory() -> None:
    """An agent that is a function runs in a copy of the process that starts all of them."""

    async def main() -> None:
        async with AgentLauncher(program()) as launcher:
            await launcher.ready()
            keys = [f"sk-{letter * 20}" for letter in "ABCDEFGH"]
            never = asyncio.get_running_loop().create_future()
            task = {"do": "value", "options": {"after_s": 0.5}}
            others = [asyncio.create_task(launcher.run({**task, "text": key}, {"KEY": key}, never)) for key in keys]
            await asyncio.sleep(0.2)
            own = "sk-" + "Z" * 20
            ended = await launcher.run({"do": "keys_in_memory"}, {"KEY": own}, never)
            assert ended.value == [own]
            assert [(await other).value for other in others] == [0.5] * 8

    run(main())


@linux
def test_order_to_end_that_comes_before_the_agent_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM reaches the reaper just before it forks the agent."""
    pid = os.fork()
    if pid == 0:
        early = lambda parent, death: os.kill(os.getpid(), death) if death == signal.SIGTERM else None  # noqa: E731
        monkeypatch.setattr(reaper, "die_with_parent", early)
        status = reaper.run(lambda: time.sleep(60) or os._exit(0), parent=os.getppid())  # type: ignore[func-returns-value]
        reaper.end_as(status)
    deadline = time.monotonic() + 45
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        reaper.kill_descendants(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == -signal.SIGKILL


def in_process_of_another_user(check: Callable[[], bool]) -> bool:
    """Run a check in a forked process without root's rights."""
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.chdir("/")
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@linux
@pytest.mark.skipif(
    not in_process_of_another_user(lambda: isolation._own_proc_files() or isolation.available().mounts),
    reason="this system allows no user namespaces",
)
def test_process_that_cannot_be_traced_knows_its_protections() -> None:
    def check() -> bool:
        isolation.forbid_tracing()  # as the process that starts agents does
        return isolation.available().mounts

    assert in_process_of_another_user(check)


@linux
def test_folders_that_cannot_be_listed_hide_only_their_own_files() -> None:
    """As /home on a shared machine."""
    with tempfile.TemporaryDirectory() as top:
        closed, hidden = Path(top) / "home", Path(top) / "home" / "me" / "runs" / "one"
        hidden.mkdir(parents=True)
        (closed / "me" / "data").write_text("data")
        Path(top).chmod(0o755)
        closed.chmod(0o311)

        def check() -> bool:
            found = set(isolation._outside([str(hidden)]))
            above = {str(path) for path in (hidden, *hidden.parents)}
            return str(closed / "me" / "data") in found and not found & above

        try:
            assert in_process_of_another_user(check)
        finally:
            closed.chmod(0o755)


@linux
def test_agent_that_dies_by_a_signal_says_so() -> None:
    async def main() -> None:
        command = ["sh", "-c", "kill -SEGV $$"]
        async with AgentLauncher(AgentProgram(command=command)) as launcher:
            ended = await start(launcher, "value")
            assert ended.code == -signal.SIGSEGV
        async with AgentLauncher(AgentProgram(command=["sh", "-c", "exit 7"])) as launcher:
            assert (await start(launcher, "value")).code == 7

    run(main())


@linux
@pytest.mark.skipif(not isolation.available().mounts, reason="this system allows no mount namespaces")
@pytest.mark.parametrize("command", [False, True])
def test_agent_cannot_read_the_run_and_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: bool
) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "token").write_text("hush")
    (tmp_path / "data").write_text("data")
    (tmp_path / "link").symlink_to(folder)
    paths = [folder / "token", tmp_path / "link" / "token", Path(f"/proc/{os.getpid()}/environ")]
    paths += [Path(f"/proc/{os.getpid()}/root{folder}/token"), tmp_path / "data"]
    given = program(hidden=[str(folder)])
    if command:
        given = AgentProgram(command=["cat", *map(str, paths)], hidden=[str(folder)])

    async def main() -> None:
        async with AgentLauncher(given) as launcher:
            ended = await start(launcher, "read", paths=[str(path) for path in paths])
            assert launcher.hides_files
            if command:
                assert (ended.code, ended.value) == (1, "data")
                return
            assert ended.value == {"reward": 1, "text": "data"}
            assert (folder / "token").read_text() == "hush", "only the agent is in that namespace"
            own = await start(launcher, "read", paths=["/proc/self/environ"])
            assert own.value["reward"] == 1

    run(main())


@linux
@pytest.mark.skipif(isolation.available().landlock < 6, reason="this kernel's Landlock has no signals")
def test_agents_cannot_reach_each_other_or_the_controller(tmp_path: Path) -> None:
    async def main() -> None:
        async with AgentLauncher(program()) as launcher:
            kill = asyncio.get_running_loop().create_future()
            other = asyncio.create_task(start(launcher, "escape", kill, path=str(tmp_path / "pids"), wait_s=60.0))
            agent = (await pids_in(tmp_path / "pids"))[2]
            assert launcher.pid is not None
            for pid in (os.getpid(), launcher.pid, agent):
                assert (await start(launcher, "read", paths=[f"/proc/{pid}/environ"])).value["reward"] == 0
                assert (await start(launcher, "signals", pid=pid)).value is False
            kill.set_result("is not needed")
            await other

    run(main())


@linux
@pytest.mark.skipif(not isolation.available().landlock, reason="this kernel has no Landlock")
def test_landlock_alone_hides_files_if_strict(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "token").write_text("hush")
    (tmp_path / "data").write_text("data")
    (tmp_path / "work").mkdir()

    def denied(act: Callable[[], object]) -> bool:
        try:
            act()
        except PermissionError:
            return True
        return False

    def check() -> bool:
        isolation.isolate([str(folder)], isolation.Protections(landlock=isolation.available().landlock), strict=True)
        (tmp_path / "work" / "new").write_text((tmp_path / "data").read_text())
        (tmp_path / "work" / "new").rename(tmp_path / "work" / "newer")
        (tmp_path / "data").write_text("other data")
        Path(os.devnull).write_text("")
        acts = (
            (folder / "token").read_text, (folder / "token").unlink, (folder / "more").mkdir,
            lambda: (folder / "token").write_text("mine"), lambda: (folder / "new").write_text("mine"),
            lambda: os.truncate(folder / "token", 0),
        )  # fmt: skip
        return all(map(denied, acts))

    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            code = int(not check())
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (folder / "token").read_text() == "hush"
    assert (tmp_path / "work" / "newer").read_text() == "data"


@linux
def test_processes_with_secrets_cannot_be_traced() -> None:
    """Another process of the same user, without root's rights, reads neither memory nor variables."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        isolation.forbid_tracing()
        os.write(writing, b"1")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(reading, 1)
        assert os.stat(f"/proc/{pid}/environ").st_uid == 0
        other = os.fork()
        if other == 0:
            code = 1
            try:
                isolation._drop_capabilities()
                Path(f"/proc/{pid}/environ").read_bytes()
            except PermissionError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_agent_runs_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("import os\ndef run(task):\n    return os.getcwd()\n")

    async def main() -> None:
        async with AgentLauncher(AgentProgram(function="only_here:run", directory=str(tmp_path))) as launcher:
            assert (await start(launcher, "")).value == str(tmp_path)
        gone = AgentLauncher(AgentProgram(function="only_here:run", directory=str(tmp_path / "gone")))
        with pytest.raises(WindfallError, match="cannot start agents in") as e:
            await gone.ready()
        assert e.value.where == "env.directory"

    run(main())


@linux
def test_stopped_reaper_does_not_hold_up_the_end_of_a_run() -> None:
    async def main() -> None:
        async with AgentLauncher(program()) as launcher:
            await launcher.ready()
            assert launcher.pid is not None
            tree = [launcher.pid, *reaper.descendants(launcher.pid)]
            os.kill(tree[0], signal.SIGSTOP)
        assert not [pid for pid in tree if os.path.exists(f"/proc/{pid}")]

    run(main())
