"""Environments on servers: real links, real child processes, and servers that die, lie or are not the right ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import environments as hostile
from tests.support.hostile.pool_calls import alive, wait_for
from tests.support.servers.ports import free_port
from windfall.envs.calls import MAX_MOVES
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import grade
from windfall.envs.process_pool.pool import EnvPool
from windfall.envs.remote import client as client_module
from windfall.envs.remote.client import EnvServers
from windfall.envs.remote.server import NAME, EnvService
from windfall.envs.remote.settings import settings_of
from windfall.errors import WindfallError
from windfall.link import auth, handshake
from windfall.link import env_messages as e
from windfall.link import messages as m
from windfall.link.socket import Port, Route
from windfall.recipe.env_sections import CustomEnv
from windfall.recipe.file import dump_recipe, parse_recipe
from windfall.types import Task, Turn

TOKEN = "a-token-for-tests-only"
SESSIONS = Path(__file__).parents[2] / "programs"
ENV: dict[str, Any] = {"name": "custom", "factory": "lighthouse:build"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SESSIONS))
    monkeypatch.setattr(client_module, "RETRY_S", 0.05)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "env.token").write_text(TOKEN)
    return tmp_path / "env.token"


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 180))


def section(**keys: Any) -> CustomEnv:
    return CustomEnv(**(ENV | keys))


def client(token: Path, *ports: int, start_s: float = 120.0, seed: int = 0, **keys: Any) -> EnvServers:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return EnvServers(section(servers=addresses, servers_token=token, **keys), seed, start_s=start_s)


@contextlib.asynccontextmanager
async def listening(attend: Callable[[Any], Any]) -> AsyncIterator[int]:
    route = Route(receives=e.ToEnvServer, max_frame_bytes=e.MAX_ENV_FRAME_BYTES, handler=attend, heartbeat_s=10.0)
    port = Port("127.0.0.1", 0, {"/env": route}, None)
    await port.open()
    try:
        yield port.port
    finally:
        await port.close()


@contextlib.asynccontextmanager
async def serving(*, slots: int = 16, **keys: Any) -> AsyncIterator[tuple[int, EnvPool]]:
    given = section(**keys)
    async with EnvPool(given, 0, max_calls=slots) as pool:
        await pool.ready()
        service = EnvService(pool, settings_of(given, 0, None), TOKEN, timeout_s=30.0)
        async with listening(service.attend) as port:
            yield port, pool


async def walk(host: EnvServers, index: int, pace: Callable[[int], Any]) -> list[str]:
    """Walk east to the light. Returns what was seen, and the reward as the last item."""
    task, turns, seen = await host.task(index, 10.0), list[Turn](), list[str]()
    while True:
        await pace(len(turns))
        graded = await grade(host, index, task, [*turns, Turn(text="east")], tries=3, timeout_s=10.0)
        assert graded.feedback is not None, graded.failure
        if graded.feedback.observation is None:
            return [*seen, str(graded.feedback.reward)]
        seen.append(graded.feedback.observation)
        turns.append(Turn(text="east", observation=graded.feedback.observation))


def expected(index: int) -> list[str]:
    return [*(f"at {n}" for n in range(1, index % 5 + 2)), "1.0"]


@contextlib.contextmanager
def server_process(folder: Path, token: Path, **keys: Any) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    recipe = parse_recipe({"env": {"name": "custom", "factory": "lighthouse:build", **keys}}, where="test")
    (folder / "recipe.toml").write_text(dump_recipe(recipe))
    port = free_port()
    command = [sys.executable, "-m", "windfall.run.cli", "env-server", "recipe.toml", "--token", str(token)]
    path = os.pathsep.join([str(SESSIONS), *filter(None, sys.path)])
    with subprocess.Popen(
        [*command, "--port", str(port)], cwd=folder, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.DEVNULL
    ) as process:  # fmt: skip
        try:
            yield process, port
        finally:
            process.kill()


def test_sessions_survive_a_killed_server(tmp_path: Path, token: Path) -> None:
    """Two servers as a user starts them, one killed while every session waits for its second turn."""

    async def main(first: subprocess.Popen[bytes], ports: list[int]) -> None:
        events: list[tuple[str, dict[str, Any]]] = []
        host = client(token, *ports)
        host._log = lambda name, **fields: events.append((name, fields))
        async with host:
            await host.ready()
            while not all(s.connected for s in host.load().servers):
                await asyncio.sleep(0.05)
            arrived, killed = 0, asyncio.Event()

            async def pace(turn: int) -> None:
                nonlocal arrived
                arrived += turn == 1
                if arrived == 10:
                    assert all(host.sessions.count(s) >= 4 for s in host.places)  # they are spread by load
                    first.send_signal(signal.SIGKILL)
                    arrived += 1
                    killed.set()
                elif turn == 1:
                    await killed.wait()

            seen = await asyncio.gather(*(walk(host, index, pace) for index in range(10)))
            assert seen == [expected(index) for index in range(10)]
            assert [(s.lost, s.connected) for s in host.load().servers] == [(1, False), (0, True)]
            assert [(name, f["address"]) for name, f in events if name == "env_server_lost"] == [
                ("env_server_lost", f"127.0.0.1:{ports[0]}")
            ]

    with server_process(tmp_path, token) as (first, one), server_process(tmp_path, token) as (_, two):
        run(main(first, [one, two]))


def test_nothing_survives_a_killed_server_and_its_output_is_limited(tmp_path: Path, token: Path) -> None:
    path = tmp_path / "pids"
    named = {"factory": hostile.factory(hostile.LeavesProcesses), "options": {"file": str(path), "says": "a word"}}

    async def main(process: subprocess.Popen[bytes], port: int) -> list[int]:
        async with client(token, port, **named) as host:
            await host.ready()
            task = await host.task(1, 60.0)
            assert (await host.feedback(1, task, [Turn(text="x")], 60.0)).reward == 1.0
            while not path.exists() or path.read_text().count("\n") < 12:
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            return [int(pid) for pid in path.read_text().split()]

    with server_process(tmp_path, token, **named) as (process, port):
        left = run(main(process, port))
    wait_for(lambda: not alive(left), "they have ended")
    assert "a word" in (tmp_path / "env.log").read_text()


def test_lost_session_that_cannot_be_replayed_is_missing(token: Path) -> None:
    async def main() -> None:
        keys = {"options": {"replayable": False}}
        async with serving(**keys) as (port, pool), client(token, port, **keys) as host:
            await host.ready()
            task = await host.task(3, 10.0)
            first = await host.feedback(3, task, [Turn(text="east")], 10.0)
            turns = [Turn(text="east", observation=first.observation)]
            assert len(pool.sessions) == 1
            host.places[0].drop("a test")
            while host.places[0].losses == 0:
                await asyncio.sleep(0.01)
            graded = await grade(host, 3, task, [*turns, Turn(text="east")], tries=3, timeout_s=10.0)
            assert graded.feedback is None
            assert "the session of task 'light/3' is gone after 1 turns, and Lighthouse cannot replay it" in str(
                graded.failure
            )
            assert graded.tries == 1

    run(main())


def test_sessions_end_with_their_link(token: Path, tmp_path: Path) -> None:
    async def main() -> None:
        log = tmp_path / "log"
        async with serving(options={"log": str(log)}) as (port, pool):
            async with client(token, port, options={"log": str(log)}) as host:
                await host.ready()
                task = await host.task(3, 10.0)
                await host.feedback(3, task, [Turn(text="east")], 10.0)
                ended = await host.feedback(3, task, [Turn(text="west")], 10.0)
                host.end_session(3, task, [Turn(text="west", observation=ended.observation)])
                while not log.exists():
                    await asyncio.sleep(0.01)
                assert log.read_text() == "closed\n"
            while log.read_text() != "closed\n" * 2:
                await asyncio.sleep(0.01)
            assert len(pool.sessions) == 0

    run(main())


def test_waiting_for_a_slot_counts_against_no_limit(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight calls of 0.2 s with a limit of 0.6 s, one at a time."""

    async def main() -> None:
        keys = {"factory": "lighthouse:Crowd"}
        async with serving(slots=1, **keys) as (port, _), client(token, port, **keys) as host:
            await host.ready()
            task = await host.task(0, 10.0)
            calls = [asyncio.create_task(host.feedback(0, task, [Turn(text="")], 0.6)) for _ in range(8)]
            await asyncio.sleep(0.05)
            assert host.load().limit == 1
            assert host.load().queued == 7
            got = await asyncio.gather(*calls)
            assert [f.reward for f in got] == [1.0] * 8  # calls at the same time

    run(main())


def test_two_runs_share_one_server(token: Path) -> None:
    """One slot and one session: a run that waits for the session does not hold the slot."""

    async def main() -> None:
        keys = {"options": {"replayable": False}, "max_sessions": 1}
        async with (
            serving(slots=1, **keys) as (port, _),
            client(token, port, **keys) as one,
            client(token, port, **keys) as two,
        ):
            await one.ready()
            await two.ready()
            task = await one.task(0, 10.0)
            first = await one.feedback(0, task, [Turn(text="east")], 10.0)
            waiting = asyncio.create_task(two.feedback(0, task, [Turn(text="west")], 0.5))
            await asyncio.sleep(0.2)
            turns = [Turn(text="east", observation=first.observation)]
            assert (await one.feedback(0, task, [*turns, Turn(text="east")], 10.0)).reward == 1.0
            assert (await waiting).observation == "at -1"

    run(main())


def test_calls_that_are_canceled_free_their_slot(token: Path) -> None:
    async def main() -> None:
        keys = {"factory": "lighthouse:Crowd", "options": {"s": 1e6}}
        async with serving(slots=2, **keys) as (port, _), client(token, port, **keys) as host:
            await host.ready()
            task = await host.task(0, 10.0)
            for _ in range(3):
                calls = [asyncio.create_task(host.feedback(0, task, [Turn(text="")], 10.0)) for _ in range(4)]
                await asyncio.sleep(0.05)
                for call in calls:
                    call.cancel()
            assert (await host.task(1, 10.0)).id

    run(main())


def test_session_of_a_turn_that_is_canceled_in_the_queue_ends(token: Path) -> None:
    async def main() -> None:
        async with serving(slots=1) as (port, pool), client(token, port) as host:
            await host.ready()
            task = await host.task(3, 10.0)
            for _ in range(2):
                await host.feedback(3, task, [Turn(text="east")], 10.0)
            turns = [Turn(text="east", observation="at 1")]
            assert len(pool.sessions) == 2
            first = asyncio.create_task(host.feedback(3, task, [*turns, Turn(text="wait")], 10.0))
            second = asyncio.create_task(host.feedback(3, task, [*turns, Turn(text="east")], 10.0))
            await asyncio.sleep(0.1)
            second.cancel()
            assert (await first).observation == "at 1"
            while len(pool.sessions) != 1:
                await asyncio.sleep(0.01)

    run(main())


@pytest.mark.parametrize(
    ("client_keys", "words"),
    [
        (
            {"options": {"noisy": True}},
            "it hosts another environment: env.options is {} there and {'noisy': True} here",
        ),
        ({"seed": 1}, "it hosts another environment: run.seed is 0 there and 1 here"),
    ],
)
def test_server_of_another_environment_is_refused(token: Path, client_keys: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with serving() as (port, _), client(token, port, **client_keys) as host:
            with pytest.raises(WindfallError) as caught:
                await host.ready()
            assert words in str(caught.value)
            assert f"environment server 127.0.0.1:{port}" in str(caught.value)

    run(main())


def test_wrong_token_and_other_protocol_are_refused(
    token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.token").write_text("not-the-token-of-it")

    async def refusal(token: Path, attend: Callable[[Any], Any]) -> str:
        async with listening(attend) as port, client(token, port) as host:
            with pytest.raises(WindfallError) as caught:
                await host.ready()
            return str(caught.value)

    async def newer(link: Any) -> None:
        await link.send(m.Challenge(protocol=m.PROTOCOL + 1, run=NAME, nonce=auth.nonce()))
        await link.receive()

    async def impostor(link: Any) -> None:
        """Does not know the token."""
        await link.send(m.Challenge(protocol=m.PROTOCOL, run=NAME, nonce=auth.nonce()))
        await link.receive()
        await link.send(welcome(b"no proof"))

    async def main() -> None:
        service = EnvService(EnvPool(section(), 0), {}, TOKEN, timeout_s=1.0)
        assert "wrong token" in await refusal(tmp_path / "other.token", service.attend)
        assert f"the environment server uses protocol {m.PROTOCOL + 1}" in await refusal(token, newer)
        assert "does not know the secret" in await refusal(token, impostor)

    run(main())


def test_unreachable_servers_are_named(token: Path) -> None:
    port = free_port()

    async def main() -> None:
        async with client(token, port, start_s=0.5) as host:
            with pytest.raises(WindfallError) as caught:
                await host.ready()
        said = str(caught.value)
        assert f"waited 0.5 s for an environment server: 127.0.0.1:{port}: " in said
        assert "Connect" in said

    run(main())


def test_calls_fail_when_no_server_is_left(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LOST_S", 0.3)

    async def main() -> None:
        async with client(token, free_port()) as host:
            graded = await grade(host, 0, Task(id="0", prompt=""), [Turn(text="")], tries=1, timeout_s=1.0)
            assert graded.feedback is None
            assert "no environment server has been reachable for 0.3 s: 127.0.0.1" in str(graded.failure)

    run(main())


def welcome(proof: bytes) -> e.EnvWelcome:
    return e.EnvWelcome(
        proof=proof, name="Lighthouse", settings=settings_of(section(), 0, None), stateful=True, replayable=True,
        needs_tokens=False, slots=4, sessions=8,
    )  # fmt: skip


LIES: dict[str, Callable[[Any, int], Any]] = {
    "NaN": lambda link, n: link.send(e.CallGraded(number=n, reward=float("nan"), observation=None, scores=())),
    "nothing": lambda link, n: link.send(e.CallGraded(number=n, reward=None, observation=None, scores=())),
    "another number": lambda link, n: link.send(e.CallGraded(number=n + 99, reward=0.0, observation=None, scores=())),
    "a task": lambda link, n: link.send(e.TaskMade(number=n, id="light/0", prompt="x")),
    "garbage": lambda link, n: link._socket.send_bytes(b"\xc1garbage"),
    "text": lambda link, n: link._socket.send_str("{}"),
    "a large frame": lambda link, n: link._socket.send_bytes(bytes(e.MAX_ENV_FRAME_BYTES + 1)),
    "silence": lambda link, n: link.send(e.CallBegan(number=n)),
}


def liar(lie: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
    async def attend(link: Any) -> None:
        _, proof = await handshake.challenge(link, handshake.ENV_CLIENT, NAME, lambda _: TOKEN)
        link.authenticated()
        await link.send(welcome(proof))
        while True:
            message = await link.receive()
            if isinstance(message, e.FeedbackCall):
                await lie(link, message.number)

    return attend


def test_servers_that_lie_do_not_hurt(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them answers tasks, lies about the first turn, and is as fast as can be. One server is honest."""
    monkeypatch.setattr(client_module, "GRACE_S", -6.0)  # twice the limit of 5 s, less this

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            honest, _ = await stack.enter_async_context(serving())
            false = [await stack.enter_async_context(listening(liar(lie))) for lie in LIES.values()]
            host = await stack.enter_async_context(client(token, *false, honest))
            await host.ready()
            task = Task(id="light/3", prompt="Find the light.")
            turns = [Turn(text="east", observation="at 1")]
            calls = [grade(host, 3, task, [*turns, Turn(text="east")], tries=1, timeout_s=5.0) for _ in range(60)]
            graded = await asyncio.gather(*calls)
            assert {(g.failure, g.feedback.observation if g.feedback else None) for g in graded} == {(None, "at 2")}
            lost = dict(zip(LIES, (s.lost for s in host.load().servers), strict=False))
            assert all(lost.values()), lost
            assert host.load().servers[-1].lost == 0

    run(main())


def test_call_is_not_blamed_for_servers_that_lie(token: Path) -> None:
    """It goes to more of them than servers may be lost with a call."""

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            false = [await stack.enter_async_context(listening(liar(LIES["NaN"]))) for _ in range(MAX_MOVES + 2)]
            honest, _ = await stack.enter_async_context(serving())
            host = await stack.enter_async_context(client(token, *false, honest))
            await host.ready()
            while not all(s.connected for s in host.load().servers):
                await asyncio.sleep(0.05)
            task, turns = Task(id="light/3", prompt="Find the light."), [Turn(text="east", observation="at 1")]
            graded = await grade(host, 3, task, [*turns, Turn(text="east")], tries=1, timeout_s=60.0)
            assert graded.feedback is not None, graded.failure
            assert graded.feedback.observation == "at 2"
            assert [s.lost for s in host.load().servers] == [1] * len(false) + [0]

    run(main())


def test_server_that_fails_its_calls_gets_few(token: Path) -> None:
    """It fails at once, so it would always have the lowest load."""

    async def attend(link: Any) -> None:
        _, proof = await handshake.challenge(link, handshake.ENV_CLIENT, NAME, lambda _: TOKEN)
        link.authenticated()
        await link.send(welcome(proof))
        while True:
            message: Any = await link.receive()
            await link.send(e.CallFailed(number=message.number, error="full", cause="", traceback="", final=False))

    async def main() -> None:
        async with listening(attend) as sick, serving(slots=1) as (port, _), client(token, sick, port) as host:
            await host.ready()
            task = Task(id="light/3", prompt="Find the light.")
            turns = [Turn(text="east", observation="at 1"), Turn(text="east")]
            graded = await asyncio.gather(
                *(grade(host, 3, task, turns, tries=3, timeout_s=5.0, backoff_s=0.01) for _ in range(60))
            )
            assert sum(g.feedback is None for g in graded) <= 5
            assert host.load().servers[0].errors < 20

    run(main())


def test_a_call_that_ends_every_server_fails(token: Path) -> None:
    async def attend(link: Any) -> None:
        _, proof = await handshake.challenge(link, handshake.ENV_CLIENT, NAME, lambda _: TOKEN)
        link.authenticated()
        await link.send(welcome(proof))
        await link.receive()

    async def main() -> None:
        async with listening(attend) as port, client(token, port) as host:
            await host.ready()
            with pytest.raises(
                EnvFailed, match=r"6 environment servers were lost during Lighthouse.task\(0\)"
            ) as caught:
                await host.task(0, 10.0)
            assert caught.value.final

    run(main())
