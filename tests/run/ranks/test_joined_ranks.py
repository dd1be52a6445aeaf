"""A trainer on two machines: a rank that shares nothing but the network with rank 0.

The second machine is a network namespace of its own where that is possible (root on Linux), otherwise another loopback
address. In both cases it has its own folder and knows only the address of the run and the secret of the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from safetensors.torch import load_file

from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.link import auth, handshake, network
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.socket import Dialer, SocketLink
from windfall.processes.process import EXIT_REFUSED
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.run.ranks import join as join_module
from windfall.run.ranks.joined_ranks import JoinedRanks
from windfall.run.ranks.rank_group import RankGroup
from windfall.trainer import checkpoint
from windfall.trainer.ranks.rank_place import RANK_LOST, RankPlace

RECIPE = """
[run]
name = "r"
steps = {steps}
threads = 1
deterministic = true
[env]
name = "arithmetic"
mean_steps = 1.5
[rollout]
groups = 3
group_size = 4
max_tokens = 24
temperature = 1.4
[train]
lr = 1e-3
minibatches = 3
{train}
[checkpoint]
every = 2
[eval]
tasks = 0
[fleet]
local = false
workers = 1
"""

FIRST_OF_3 = {"RANK": "0", "WORLD_SIZE": "3"}


@pytest.fixture
def two_networks() -> Iterator[tuple[str, list[str], str]]:
    """The address of machine 0, how to start a command on machine 1, and the address of machine 1."""
    name, number = f"windfall-{os.getpid()}", os.getpid() % 200
    main, other = f"10.213.{number}.1", f"10.213.{number}.2"
    inside = ["ip", "netns", "exec", name]
    steps = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", f"wf{number}a", "type", "veth", "peer", "name", f"wf{number}b", "netns", name],
        ["ip", "addr", "add", f"{main}/24", "dev", f"wf{number}a"],
        ["ip", "link", "set", f"wf{number}a", "up"],
        [*inside, "ip", "addr", "add", f"{other}/24", "dev", f"wf{number}b"],
        [*inside, "ip", "link", "set", f"wf{number}b", "up"],
        [*inside, "ip", "link", "set", "lo", "up"],
    ]
    try:
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        _remove(name, number)
        yield "127.0.0.1", [], "127.0.0.2"
        return
    yield main, inside, other
    _remove(name, number)


def _remove(name: str, number: int) -> None:
    for command in (["ip", "link", "del", f"wf{number}a"], ["ip", "netns", "del", name]):
        with contextlib.suppress(OSError):
            subprocess.run(command, check=False, capture_output=True, timeout=20)


def free_port(host: str) -> int:
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]


def run_windfall(
    folder: Path, *args: str, before: tuple[str, ...] = (), out: str = "out.txt",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:  # fmt: skip
    (folder / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), **environment}
    command = [*before, sys.executable, "-m", "windfall.run.cli", *args]
    return subprocess.Popen(command, stdout=(folder / out).open("ab"), stderr=subprocess.STDOUT, env=env)


def train(folder: Path, *args: str, steps: int = 4, **keys: Any) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    text = "\n".join(f"{key} = {value!r}".replace("'", '"') for key, value in keys.items())
    (folder / "r.toml").write_text(RECIPE.format(steps=steps, train=text))
    return run_windfall(folder, "train", str(folder / "r.toml"), "--set", f"run.folder={folder}", *args)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [e for e in read(path) if e["name"] == name] if path.is_file() else []


def wait_for(what: str, done: Callable[[], bool], running: subprocess.Popen[bytes], out: Path) -> None:
    deadline_s = time.monotonic() + 240
    while not done():
        assert running.poll() is None, out.read_text()
        assert time.monotonic() < deadline_s, f"waited 240 s for {what}: {out.read_text()}"
        time.sleep(0.05)


def weights(run: Path) -> str:
    return hashlib.sha256((checkpoint.latest(run).path / "model.safetensors").read_bytes()).hexdigest()


class TwoMachines:
    """A run whose trainer has one rank on each of two machines. `join(0)` is on the machine of the run."""

    def __init__(self, folder: Path, networks: tuple[str, list[str], str], steps: int) -> None:
        host, self._inside, self._other = networks
        self._endpoint, self._secret, self._folder = f"{host}:{free_port(host)}", folder / "secret", folder
        auth.make_token(self._secret)
        self.run, self.out = folder / "two" / "r", folder / "two" / "out.txt"
        self.trainer = train(
            folder / "two", "--trainer-token", str(self._secret), "--set", f"fleet.host={host}", steps=steps, ranks=2,
            rendezvous=self._endpoint,
        )  # fmt: skip
        self.started = [self.trainer]

    def join(self, rank: int, name: str) -> subprocess.Popen[bytes]:
        here = self._folder / name
        here.mkdir()
        command = ["trainer", "--join", f"http://{self._endpoint}", "--token", str(self._secret)]
        command += ["--folder", str(here / "logs"), *(["--host", self._other] if rank else [])]
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": str(rank)}
        process = run_windfall(here, *command, before=tuple(self._inside) if rank else (), environment=place)
        self.started.append(process)
        return process

    def wait_for_start(self, count: int) -> list[int]:
        """Wait until the trainer was started this many times. Returns the processes of its ranks."""
        done = lambda: len(events(self.run, "trainer_ready")) >= count  # noqa: E731
        wait_for(f"start {count}", done, self.trainer, self.out)
        return events(self.run, "trainer_ready")[-1]["rank_pids"]

    def finish(self, **ranks: subprocess.Popen[bytes]) -> None:
        assert self.trainer.wait(240) == 0, self.out.read_text()
        for name, process in ranks.items():
            assert process.wait(240) == 0, (self._folder / name / "out.txt").read_text()
            assert not (self._folder / name / "logs" / "checkpoints").exists()

    def kill(self) -> None:
        for process in self.started:
            process.kill()


@pytest.mark.slow
def test_run_on_two_machines(tmp_path: Path, two_networks: tuple[str, list[str], str]) -> None:
    two = TwoMachines(tmp_path, two_networks, steps=2)
    try:
        ranks = {"first": two.join(0, "first"), "second": two.join(1, "second")}
        assert len(two.wait_for_start(1)) == 2
        two.finish(**ranks)
    finally:
        two.kill()
    assert "rank 1 of 2" in two.out.read_text()
    trained = [e for e in events(two.run, "step") if e["kind"] == "scalar"]
    assert [e["step"] for e in trained] == [1, 2]
    assert any(e["grad_norm"] > 0 for e in trained)
    checkpoint.check(checkpoint.latest(two.run).path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_machine_is_lost_and_replaced(tmp_path: Path, two_networks: tuple[str, list[str], str]) -> None:
    """The process of each rank is killed, then the command of the other machine is stopped and another one started. The
    run ends with the weights of two ranks on one machine, and its checkpoint resumes on one rank."""
    one, two = train(tmp_path / "one", ranks=2), TwoMachines(tmp_path, two_networks, steps=4)
    try:
        first, second = two.join(0, "first"), two.join(1, "second")
        os.kill(two.wait_for_start(1)[1], signal.SIGKILL)
        os.kill(two.wait_for_start(2)[0], signal.SIGKILL)
        two.wait_for_start(3)
        assert (first.poll(), second.poll()) == (None, None)
        second.terminate()
        assert second.wait(240) == 0, (tmp_path / "second" / "out.txt").read_text()
        two.finish(first=first, third=two.join(1, "third"))
        assert one.wait(240) == 0, (tmp_path / "one" / "out.txt").read_text()
    finally:
        two.kill()
        one.kill()
    folder, run = tmp_path / "two", two.run
    assert "has left the trainer" in two.out.read_text()
    assert weights(run) == weights(tmp_path / "one" / "r")
    optimizers = [load_file(checkpoint.latest(r).path / checkpoint.OPTIMIZER) for r in (run, tmp_path / "one" / "r")]
    assert all((value == optimizers[1][name]).all() for name, value in optimizers[0].items())
    resumed = run_windfall(
        folder, "resume", str(run), "--set", "run.steps=6", "--set", "train.ranks=1", "--set", "train.rendezvous=",
        out="resumed.txt",
    )  # fmt: skip
    assert resumed.wait(240) == 0, (folder / "resumed.txt").read_text()
    assert [e["step"] for e in events(run, "step") if e["kind"] == "scalar"][-2:] == [5, 6]


@pytest.mark.slow
def test_run_says_which_ranks_are_missing(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    trainer = train(tmp_path, ranks=3, rendezvous=endpoint, machine_timeout_s=3.0)
    wrong = run_windfall(
        tmp_path, "trainer", "--join", f"http://{endpoint}", "--token", "a-token-of-another-run", out="rank.txt",
        environment=FIRST_OF_3,
    )  # fmt: skip
    assert trainer.wait(120) == 2
    said = " ".join((tmp_path / "out.txt").read_text().split())
    assert "waited 3 s for the trainer's ranks: ranks 0, 1, 2 of 0 to 2 did not join" in said
    assert f"Run for each: windfall trainer --join http://{endpoint} --token" in said
    wrong.kill()


# the supervisor's side alone


SECRET = "a-secret-of-the-trainer"


def recipe(port: int, **train: Any) -> Recipe:
    keys = {"ranks": 3, "rendezvous": f"127.0.0.1:{port}", **train}
    return parse_recipe({"train": keys}, where="test")


@contextlib.asynccontextmanager
async def listening(folder: Path, **train: Any) -> AsyncIterator[tuple[JoinedRanks, Dialer, list[str]]]:
    auth.make_token(folder / "token", "the-token-of-the-workers")
    auth.make_token(folder / "trainer.secret", SECRET)
    port, said = free_port("127.0.0.1"), list[str]()
    dialer = Dialer(f"http://127.0.0.1:{port}", "/ranks", m.ToRank, ssl=None)
    async with JoinedRanks(recipe(port, **train), folder, said.append) as ranks:
        try:
            yield ranks, dialer, said
        finally:
            await dialer.close()


async def join(
    dialer: Dialer,
    rank: int = 0,
    machine: str = "a",
    secret: str = SECRET,
    size: int = 3,
    local_rank: int | None = None,
) -> SocketLink:
    link, place = await dialer.dial(), {"local_rank": rank if local_rank is None else local_rank}
    hello = lambda **fields: m.RankHello(name="other", rank=rank, size=size, machine=machine, **place, **fields)  # noqa: E731
    welcome = await handshake.join(link, handshake.RANK, secret, hello)
    assert "[train]" in welcome.recipe
    assert welcome.weights_key == auth.weights_key("the-token-of-the-workers")
    return link


async def start(ranks: JoinedRanks) -> RankGroup:
    return await asyncio.wait_for(ranks.start(), 240)


async def receive(link: SocketLink) -> Any:
    return await asyncio.wait_for(link.receive(), 240)


def test_all_ranks_start_and_end_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as (ranks, dialer, said):
            starting = asyncio.create_task(start(ranks))
            links = [await join(dialer, 2, "b"), await join(dialer, 0, "a"), await join(dialer, 1, "b")]
            group = await starting
            orders = [await receive(link) for link in links]
            assert [(o.machine, o.local_rank, o.local_size) for o in orders] == [(1, 1, 2), (0, 0, 1), (1, 0, 2)]
            assert len({o.rendezvous for o in orders}) == 1
            await links[1].send(m.RankStarted(pid=77))
            await links[0].send(m.RankEnded(code=1, what="rank 2 failed: out of memory", where="rank-2.log"))
            await links[1].send(m.RankEnded(code=RANK_LOST))
            with pytest.raises(LinkClosed, match="this start of the trainer ends"):
                await receive(links[2])
            assert await asyncio.wait_for(group.wait(), 240) == 1
            assert (group.cause, group.ranks[0].pid) == ("rank-2", 77)
            failure = (tmp_path / ".trainer.failure").read_text()
            assert "rank 2 failed: out of memory" in failure
            assert "rank 2 on other: rank-2.log" in failure
            restarting = asyncio.create_task(start(ranks))
            links = [await join(dialer, 2, "b"), await join(dialer, 0, "a"), await join(dialer, 1, "b")]
            again = await restarting
            order = await receive(links[0])
            assert order.rendezvous != orders[0].rendezvous
            again.kill()
            assert await asyncio.wait_for(again.wait(), 240) == -signal.SIGKILL
            ending = asyncio.create_task(ranks.__aexit__())
            for rank in range(3):  # each comes back, and learns that it is not needed any more
                assert await receive(await join(dialer, rank)) == m.RunEnded(why="the run has ended")
            await ending
            assert not any("has left" in line for line in said)
            assert sum("waiting for" in line for line in said) == 1, "only before the first start"
            assert "rank 1 of 3 (other) has joined the trainer" in said

    asyncio.run(main())


def test_lost_rank_ends_its_process_and_another_takes_its_place(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path, ranks="auto") as (ranks, dialer, said):
            first = await join(dialer, size=1)
            group = await start(ranks)
            with pytest.raises(handshake.JoinRefused, match="rank 0 has already joined") as refused:
                await join(dialer, size=1)
            assert refused.value.again
            await first.close()
            assert await asyncio.wait_for(group.wait(), 240) == -signal.SIGKILL
            waiting = asyncio.create_task(start(ranks))
            async with asyncio.timeout(30):
                while "waiting for all ranks of the trainer; run for each: windfall trainer --join" not in said[-1]:
                    await asyncio.sleep(0.01)
            second = await join(dialer, size=1)
            await waiting
            assert isinstance(await receive(second), m.StartRank)
            ending = asyncio.create_task(ranks.__aexit__())
            assert await receive(second) == m.RunEnded(why="the run has ended")
            await ending

    asyncio.run(main())


def test_spare_rank_waits_as_long_as_the_run_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_module, "MAX_RETRY_S", 0.3)

    async def main() -> None:
        async with listening(tmp_path, ranks=1) as (ranks, dialer, _):
            first = await join(dialer, size=1)
            own = Dialer(dialer.url, "/ranks", m.ToRank, ssl=None)
            spare = join_module.JoiningRank(own, SECRET, RankPlace(), folder=tmp_path, patience_s=1.0)
            (tmp_path / "recipe.toml").write_text('[run]\nname = "r"\n')
            waiting = asyncio.create_task(spare.run())
            await asyncio.sleep(2.5)
            assert not waiting.done()
            await first.close()
            async with asyncio.timeout(60):
                while not ranks._joined:
                    await asyncio.sleep(0.01)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting

    asyncio.run(main())


def test_rank_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path, ranks=1) as (ranks, dialer, _):
            await join(dialer, size=1)
            group = await start(ranks)
            assert await asyncio.wait_for(group.terminate(0.0), 240) == -signal.SIGKILL
            ranks._returning.clear()

    asyncio.run(main())


@pytest.mark.parametrize("secret", ["the-token-of-the-workers", "some-other-token"])
def test_only_the_secret_of_the_trainer_is_accepted(tmp_path: Path, secret: str) -> None:
    async def main() -> None:
        async with listening(tmp_path, machine_timeout_s=0.5) as (ranks, dialer, _):
            with pytest.raises(handshake.JoinRefused, match=r"needs trainer.secret of the run, not its token") as e:
                await join(dialer, secret=secret)
            assert not e.value.again
            with pytest.raises(WindfallError, match=r"ranks 0, 1, 2 of 0 to 2 did not join .*problem: .*wrong token"):
                await ranks.start()

    asyncio.run(main())


def test_number_of_ranks_must_be_that_of_the_recipe(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as (_, dialer, _):
            with pytest.raises(handshake.JoinRefused, match="one of 4 ranks, but this trainer has 3") as refused:
                await join(dialer, size=4)
            assert not refused.value.again

    asyncio.run(main())


def test_two_ranks_of_a_machine_with_one_local_rank_are_refused(tmp_path: Path) -> None:
    """Both would compute on the same GPU."""

    async def main() -> None:
        async with listening(tmp_path) as (_, dialer, _):
            await join(dialer, 0, "a", local_rank=0)
            await join(dialer, 1, "b", local_rank=0)
            with pytest.raises(handshake.JoinRefused, match=r"rank 0 is on the same machine .* own LOCAL_RANK") as e:
                await join(dialer, 2, "a", local_rank=0)
            assert not e.value.again
            await join(dialer, 2, "a", local_rank=1)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_whose_ranks_are_started_by_torchrun(tmp_path: Path) -> None:
    """torchrun itself, with two ranks: which rank a process is comes from its environment alone."""
    endpoint, secret = f"127.0.0.1:{free_port('127.0.0.1')}", tmp_path / "secret"
    auth.make_token(secret)
    trainer = train(tmp_path, "--trainer-token", str(secret), steps=1, ranks="auto", rendezvous=endpoint)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "windfall.run.cli"]
    command = [*launch, "trainer", "--join", f"http://{endpoint}", "--token", str(secret)]
    with (tmp_path / "torchrun.txt").open("ab") as out:
        torchrun = subprocess.Popen([sys.executable, "-m", *command], stdout=out, stderr=out)
    try:
        assert trainer.wait(240) == 0, (tmp_path / "out.txt").read_text()
        assert torchrun.wait(60) == 0, (tmp_path / "torchrun.txt").read_text()
    finally:
        trainer.kill()
        torchrun.terminate()
    assert "rank 1 of 2" in (tmp_path / "out.txt").read_text()
    assert len(events(tmp_path / "r", "trainer_ready")[-1]["rank_pids"]) == 2


def test_rank_that_cannot_take_part_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path, ranks=1, machine_timeout_s=0.5) as (ranks, dialer, said):
            link = await join(dialer, size=1)
            await link.send(m.RankEnded(code=2, what="local rank 4 needs a GPU"))
            with contextlib.suppress(LinkClosed):
                await receive(link)
            with pytest.raises(WindfallError, match="last problem: other: local rank 4 needs a GPU"):
                await ranks.start()
            assert "rank 0 cannot join the trainer: other: local rank 4 needs a GPU" in said

    asyncio.run(main())


def test_command_refused_by_the_run_exits(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as (_, dialer, _):
            argv = ["trainer", "--join", dialer.url, "--token", "some-other-token", "--folder", str(tmp_path / "logs")]
            process = run_windfall(tmp_path, *argv, environment=FIRST_OF_3)
            assert await asyncio.to_thread(process.wait, 60) == EXIT_REFUSED

    asyncio.run(main())
    assert "not its token" in (tmp_path / "out.txt").read_text()


def test_rendezvous_is_an_address() -> None:
    with pytest.raises(WindfallError, match="Did you mean 'rendezvous'"):
        parse_recipe({"train": {"machines": 2}}, where="test")
    with pytest.raises(WindfallError, match="write it as HOST:PORT"):
        parse_recipe({"train": {"rendezvous": "10.0.0.5"}}, where="test")


def test_interface_of_an_address() -> None:
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("203.0.113.77") is None
    own = network.address_toward("192.0.2.1", 9) if Path("/sys/class/net/eth0").exists() else ""
    if own:
        assert network.interface_of(own) in {name for _, name in socket.if_nameindex()}
    found = network.socket_environment("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7"})
    assert found == {"NCCL_SOCKET_IFNAME": "=lo"}
