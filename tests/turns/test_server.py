"""Server and clients over real sockets: one holder per device, whatever a process does or however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.support.runs.turn_server import WAIT_S, Served, served, until
from windfall.errors import WindfallError
from windfall.turns.client import FREE, SharedDevice, SharedDevices, of_environment
from windfall.turns.residence import WORTH
from windfall.turns.server import MAX_OF_JOB, TurnServer

HOLD = "assert turn.take(60)\nprint('turn')\nimport time\ntime.sleep(600)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns"


@pytest.fixture
def server(path: Path) -> Iterator[Served]:
    with served(path, ("gpu", "gpu2"), slice_s=0.02) as own:
        yield own


@contextlib.contextmanager
def closed(*clients: SharedDevice) -> Iterator[None]:
    try:
        yield
    finally:
        for client in clients:
            client.close()


def test_a_turn_passes_from_one_process_to_the_next(server: Served) -> None:
    a, b = server.client("a"), server.client("b")
    with closed(a, b):
        assert a.take(WAIT_S, rows=3)
        assert not a.wanted
        assert not b.take(0.05)
        until(lambda: a.wanted, "the slice to end")
        assert a.take(0.0), "it has the turn until it gives it"
        a.give(work=7)
        assert b.take(WAIT_S)
        assert not a.take(0.0)
        b.give()
        assert a.take(WAIT_S)
        turns = list(server.turns)
    assert [(t["job"], t["kind"], t["work"], t["beside"]) for t in turns] == [
        ("a", "rollout", 7, ""),
        ("b", "rollout", 0, ""),
    ]
    assert turns[0]["start_s"] < turns[0]["end_s"] <= turns[1]["start_s"] + 0.001


def test_a_process_knows_for_how_long_other_jobs_want_its_device(server: Served) -> None:
    """Whether it has the turn, waits for it, or has nothing to do. Jobs with a lower priority do not count, and neither
    does its own trainer."""
    a, b, trainer = server.client("a"), server.client("b"), server.client("a", "train")
    with closed(a, b, trainer):
        assert a.take(WAIT_S)
        assert not trainer.take(0.05)
        assert a.contended_s == 0.0
        began_s = time.monotonic()
        assert not b.take(0.05)
        until(lambda: a.contended_s >= 0.05, "the holder to hear of the other job")
        assert b.contended_s > 0.0, "it waits for the other job"
        a.give()
        trainer.give()
        assert b.take(WAIT_S)
        idle_s = a.contended_s
        until(lambda: a.contended_s > idle_s, "time of the other job's turn")
        server.call(server.server.update, "a", priority=1)
        until(lambda: _stands_still(a), "a lower priority to count no more")
        assert a.contended_s <= time.monotonic() - began_s
        b.give()
        until(lambda: _stands_still(b), "the end of all other turns")


def _stands_still(client: SharedDevice) -> bool:
    before_s = client.contended_s
    time.sleep(0.02)
    return client.contended_s == before_s


def test_who_does_not_wait_any_more_gets_no_turn(server: Served) -> None:
    a, b = server.client("a"), server.client("b")
    with closed(a, b):
        assert a.take(WAIT_S)
        assert not b.take(0.05)
        b.give()
        until(lambda: not server.waiting(), "b to leave the queue")
        a.give()
        until(lambda: not server.holder(), "a to give its turn")
        assert b.take(WAIT_S), "and may come back"


def test_one_holder_and_all_time_charged(server: Served) -> None:
    holders, most, stop = [0], [0], threading.Event()

    def work(client: SharedDevice) -> None:
        while not stop.is_set():
            if client.take(0.05):
                holders[0] += 1
                most[0] = max(most[0], holders[0])
                time.sleep(0.003)
                holders[0] -= 1
                if client.wanted:
                    client.give(1)

    clients = [server.client(job, kind) for job in "abc" for kind in ("rollout", "train")]
    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    with closed(*clients):
        for thread in threads[::2]:
            thread.start()
        until(lambda: {t["job"] for t in server.turns} == set("abc"), "turns of all jobs")
        server.call(server.server.update, "c", share=3.0)
        until(lambda: len(server.turns) > 60, "60 turns")
        stop.set()
        for thread in threads[::2]:
            thread.join(WAIT_S)
    assert most == [1]
    before_ns = time.monotonic_ns()
    charged = server.call(server.server.charged)
    assert sum(charged["gpu"].values()) == sum(charged["gpu2"].values())
    assert sum(charged["gpu"].values()) >= before_ns - server.server.accounts._since_ns["gpu"]
    assert min(charged["gpu"][job] for job in "abc") > 0


def test_the_turn_of_a_killed_process_ends(server: Served) -> None:
    process, b = server.process(HOLD, "a"), server.client("b")
    with closed(b):
        assert process.stdout is not None
        assert process.stdout.readline() == "turn\n"
        assert not b.take(0.05)
        process.kill()
        assert b.take(WAIT_S)
        process.communicate()


def test_the_turn_ends_with_the_process_though_a_child_holds_the_socket(server: Served) -> None:
    forks = "import os, time\nif not os.fork(): time.sleep(30); os._exit(0)\n"
    process, b = server.process(f"assert turn.take(60)\n{forks}print('turn')\ntime.sleep(30)", "a"), server.client("b")
    with closed(b):
        assert process.stdout is not None
        assert process.stdout.readline() == "turn\n"
        process.kill()
        process.wait()
        assert b.take(WAIT_S)


def test_a_process_that_hangs_in_its_turn_is_killed(path: Path) -> None:
    with served(path, slice_s=0.02, limit_s=0.5) as server:
        process, b = server.process(HOLD, "a", "train"), server.client("b")
        with closed(b):
            assert process.stdout is not None
            assert process.stdout.readline() == "turn\n"
            time.sleep(0.7)
            assert process.poll() is None, "nobody waits"
            process.send_signal(signal.SIGSTOP)
            assert b.take(WAIT_S)
            assert process.wait(WAIT_S) == -signal.SIGKILL
        ((name, fields),) = until(lambda: server.events, "the event")
        assert (name, fields["job"], fields["pid"], fields["device"]) == ("hung", "a", process.pid, "gpu")
        assert fields["held_s"] >= 0.5


def test_a_process_that_was_stopped_in_the_queue_is_killed_in_its_turn(path: Path) -> None:
    with served(path, slice_s=0.02, limit_s=1.0) as server:
        b = server.client("b")
        with closed(b):
            assert b.take(WAIT_S)
            process = server.process(HOLD, "a")
            until(lambda: server.waiting() == ["a"], "a to wait")
            process.send_signal(signal.SIGSTOP)
            b.give()
            until(lambda: server.holder() == "a", "a to be next")
            assert b.take(WAIT_S)
            assert process.wait(WAIT_S) == -signal.SIGKILL


WAITS_TOO = """
import os, time
from windfall.turns.client import SharedDevice
turn.take(30)
second = SharedDevice(os.environ["WINDFALL_TURNS"], os.environ["WINDFALL_TURN_KEY"], "train", {device!r})
second.take(0.0)
print("turn")
time.sleep(60)
"""


@pytest.mark.parametrize("device", ["gpu", "gpu2"])
def test_a_process_that_hangs_is_killed_although_it_waits_for_another_turn(path: Path, device: str) -> None:
    """On the same device, or on one whose holder hangs as well, but nobody else waits there."""
    with served(path, ("gpu", "gpu2"), slice_s=0.02, limit_s=0.5) as server:
        b, c = server.client("b"), server.client("c", "train", "gpu2")
        with closed(b, c):
            assert c.take(WAIT_S)
            process = server.process(WAITS_TOO.format(device=device), "a", "train")
            assert process.stdout is not None
            assert process.stdout.readline() == "turn\n"
            c.give()
            assert c.take(WAIT_S)
            assert b.take(WAIT_S)
            assert process.wait(WAIT_S) == -signal.SIGKILL


def test_several_devices_are_taken_together(server: Served) -> None:
    both = SharedDevices([server.client("a", "train", device) for device in ("gpu2", "gpu")])
    first, second = server.client("b"), server.client("c", device="gpu2")
    with closed(first, second):
        try:
            assert second.take(WAIT_S)
            assert not both.take(0.1)
            assert server.holder("gpu") == "a", "in the order of their names"
            until(lambda: second.wanted, "a slice to end")
            second.give()
            assert both.take(WAIT_S)
            assert not first.take(0.05)
            both.give(work=10)
            assert first.take(WAIT_S)
            assert second.take(WAIT_S)
        finally:
            both.close()
    assert sorted((t["device"], t["work"]) for t in server.turns if t["job"] == "a") == [("gpu", 5), ("gpu2", 5)]


def test_clients_wait_while_the_server_is_away_and_go_on(server: Served, capfd: pytest.CaptureFixture[str]) -> None:
    a, b = server.client("a"), server.client("b")
    with closed(a, b):
        assert a.take(WAIT_S)
        assert not b.take(0.01)
        server.stop()
        until(lambda: not a.take(0.0), "a to notice that it has no turn")
        assert not b.take(0.3)
        server.start()
        until(lambda: a.take(0.01) or b.take(0.01), "a turn of the next server")
        holder, other = (a, b) if a.take(0.0) else (b, a)
        until(lambda: holder.wanted, "both to be known to the next server")
        holder.give()
        assert other.take(WAIT_S)
    said = capfd.readouterr().err.splitlines()
    assert all("no turns of gpu" in line and str(server.path) in line for line in said)
    assert len(said) <= 6, "each client says each reason once"


def test_a_forgotten_job_has_no_turn_and_no_connection(server: Served, capfd: pytest.CaptureFixture[str]) -> None:
    a, second, b = server.client("a"), server.client("a", "train"), server.client("b")
    with closed(a, second, b):
        assert a.take(WAIT_S)
        assert not second.take(0.05)
        assert not b.take(0.05)
        server.call(server.server.forget, "a")
        assert b.take(WAIT_S)
        until(lambda: "refused: no job has this key now" in capfd.readouterr().err, "a to say why")
        server.call(server.server.register, "key-a", "a", priority=1)
        until(lambda: b.wanted, "a to come back")
        assert server.call(server.server.charged)["gpu"]["a"] > 0


BAD = [
    b"\n",
    b"{}\n",
    b"[]\n",
    b"7\n",
    b'"take"\n',
    b"\xff\xfe\n",
    b"[" * 4000 + b"\n",
    b"x" * 100_000,
    b'{"take": -1, "rows": 0}\n',
    b'{"take": 1e999, "rows": 0}\n',
    b'{"take": 1, "rows": 0}\n{"take": 2, "rows": 0}\n',
    b'{"take": 1, "rows": 0}\n{"give": 1, "work": NaN}\n',
    b'{"take": 1, "rows": 0}\n{"give": 1, "work": -5}\n',
    b'{"take": 1, "rows": "many"}\n',
    b'{"take": 1, "rows": ' + b"9" * 4000 + b"}\n",
    b'{"take": 1}\n',
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("greets", [True, False])
def test_a_bad_line_ends_only_its_connection(server: Served, bad: bytes, greets: bool) -> None:
    a = server.client("a")
    with closed(a), socket.socket(socket.AF_UNIX) as liar:
        liar.connect(str(server.path))
        liar.settimeout(WAIT_S)
        if greets:
            liar.sendall(json.dumps({"hello": "key-c", "kind": "train", "device": "gpu"}).encode() + b"\n")
        with contextlib.suppress(OSError):
            liar.sendall(bad)
            while liar.recv(4096):
                pass
        assert a.take(WAIT_S)
        assert not server.waiting()


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"hello": "key-x"}, "no job has this key"),
        ({"device": "gpu9"}, "no device 'gpu9'; it has gpu, gpu2"),
        ({"kind": "all"}, "expected one of: rollout, train"),
    ],
)
def test_what_is_refused_is_told(server: Served, hello: dict[str, str], why: str) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(server.path))
        peer.settimeout(WAIT_S)
        whole = {"hello": "key-a", "kind": "train", "device": "gpu", **hello}
        peer.sendall(json.dumps(whole).encode() + b"\n")
        assert why in json.loads(peer.makefile().readline())["refused"]


def test_give_without_take_changes_nothing(server: Served) -> None:
    a = server.client("a")
    with closed(a), socket.socket(socket.AF_UNIX) as liar:
        assert a.take(WAIT_S)
        liar.connect(str(server.path))
        liar.sendall(b'{"hello": "key-c", "kind": "rollout", "device": "gpu"}\n' + b'{"give": 1, "work": 5}\n' * 50)
        time.sleep(0.1)
        assert server.holder() == "a"
        assert a.take(0.0)
        assert not server.turns


def test_thousands_of_connections(server: Served) -> None:
    with contextlib.ExitStack() as stack:
        a = server.client("a")
        stack.enter_context(closed(a))
        assert a.take(WAIT_S)
        for n in range(2000):  # 150 are open at any time
            if n % 150 == 0:
                peers = stack.enter_context(contextlib.ExitStack())
            peer = peers.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(str(server.path))
            if n % 2:
                peer.sendall(b'{"hello": "key-c", "kind": "rollout", "device": "gpu"}\n{"take": 1, "rows": 1}\n')
            if n % 150 == 149:
                peers.close()
        peers.close()  # one that stays would get the next turn
        a.give()
        assert a.take(WAIT_S)
        until(lambda: server.snapshot()["jobs"]["c"]["processes"] == 0, "connections to end")
    assert MAX_OF_JOB < 2000


def test_only_the_user_can_open_the_socket(server: Served, tmp_path: Path) -> None:
    assert server.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(WindfallError, match="at most 100 bytes"):
        asyncio.run(TurnServer(["gpu"]).start(tmp_path / ("x" * 100)))


def test_turns_of_the_environment() -> None:
    assert of_environment("train", {}) is FREE
    assert FREE.take(0.0)
    assert not FREE.wanted
    names = {"WINDFALL_TURNS": "/x", "WINDFALL_TURN_KEY": "k", "WINDFALL_TURN_DEVICES": "b,a"}
    both, second = of_environment("train", names), of_environment("rollout", names, device=1)
    assert isinstance(both, SharedDevices)
    assert [turn.device for turn in both._turns] == ["a", "b"]
    assert isinstance(second, SharedDevice)
    assert second.device == "a"
    for missing in ("WINDFALL_TURN_KEY", "WINDFALL_TURN_DEVICES"):
        with pytest.raises(WindfallError, match=missing):
            of_environment("train", {**names, missing: ""})


def test_co_running_pairs_have_the_device_together(path: Path) -> None:
    """Beside each other, both do 90 % of what they do alone."""
    stop = threading.Event()
    with served(path, slice_s=0.02, co_running=True) as server:

        def work(client: SharedDevice, turn_s: float, rest_s: float) -> None:
            while not stop.is_set():
                if client.take(0.05, rows=8):
                    began_s, speed = time.monotonic(), 1.0
                    while time.monotonic() < began_s + turn_s and not client.wanted:
                        time.sleep(0.002)
                    if server.snapshot()["devices"]["gpu"]["beside"]:
                        speed = 0.9
                    client.give(1000 * speed * (time.monotonic() - began_s))
                    time.sleep(rest_s)

        trainer, rollout = server.client("a", "train"), server.client("b")
        threads = [
            threading.Thread(target=work, args=(trainer, 0.1, 0.05)),
            threading.Thread(target=work, args=(rollout, 10.0, 0.0)),
        ]
        with closed(trainer, rollout):
            for thread in threads:
                thread.start()
            until(lambda: server.snapshot()["devices"]["gpu"]["beside"], "both to have the device")
            until(
                lambda: {t["job"] for t in server.turns if t["beside"]} == {"a", "b"}, "turns of both beside the other"
            )
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
        measured = server.snapshot()["co_running"]
        charged = server.call(server.server.charged)["gpu"]
    assert {row["side"]["kind"] for row in measured} == {"rollout", "train"}
    assert min(charged.values()) > 0


def test_a_device_has_one_holder_unless_co_running_is_on(server: Served) -> None:
    a, b = server.client("a", "train"), server.client("b")
    with closed(a, b):
        for _ in range(5):
            assert a.take(WAIT_S)
            assert not b.take(0.02)
            a.give(100)
            assert b.take(WAIT_S)
            b.give(100)
    assert not any(turn["beside"] for turn in server.turns)


class KeptState:
    """A trainer's state that says where it is."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.awake = True
        self.moved_s = 0.0
        self.device: list[KeptState] = []
        """All states that share a device of 200 bytes, of which 60 are used for something else."""

    def room(self) -> tuple[int, int]:
        return (140 - sum(state.nbytes for state in self.device if state.awake) if self.device else 0), 0

    def sleep(self) -> None:
        began_s, self.awake = time.monotonic(), False
        time.sleep(0.002)
        self.moved_s += time.monotonic() - began_s

    def wake(self) -> bool:
        slept, self.awake = not self.awake, True
        return slept


@pytest.mark.parametrize(("nbytes", "limit", "most_awake"), [(60, 130, 2), (60, None, 1), (40, None, 2), (20, None, 3)])
def test_trainers_whose_states_do_not_fit_together_replace_each_other(
    path: Path, nbytes: int, limit: int | None, most_awake: int
) -> None:
    """Without a limit, by the free memory: of 140 bytes, 98 are for states."""
    states = {job: KeptState(nbytes) for job in "abc"}
    for state in states.values():
        state.awake, state.device = False, [*states.values()]  # they must still be built
    stop, failures = threading.Event(), []

    def train(job: str, client: SharedDevice) -> None:
        while not stop.is_set():
            if client.take(0.05):
                if not states[job].awake:
                    failures.append(f"{job} works without its state")
                time.sleep(0.002)
                client.give(1)

    with served(path, slice_s=0.01, state_bytes=limit) as server:
        clients = {job: SharedDevice(str(path), f"key-{job}", "train", "gpu", states[job]) for job in "abc"}
        threads = [threading.Thread(target=train, args=item) for item in clients.items()]
        with closed(*clients.values()):
            for thread in threads:
                thread.start()
            until(lambda: len(server.turns) >= 200, "200 turns")
            until(lambda: {t["job"] for t in server.turns[-100:]} == set("abc"), "turns of all jobs among the last")
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
            assert sum(state.awake for state in states.values()) <= most_awake
            asleep = server.snapshot()["devices"]["gpu"]["asleep"]
            assert len(asleep) == 3 - most_awake
            assert not any(states[job].awake for job in asleep)
            worked_s = sum(turn["end_s"] - turn["start_s"] for turn in server.turns)
    assert not failures
    moved_s = sum(state.moved_s for state in states.values())
    assert (moved_s > 0) == (most_awake < 3)
    assert worked_s > WORTH / 2 * moved_s, "a state that was fetched works for a while before it leaves"


def test_a_trainer_that_does_not_sleep_when_asked_is_killed(path: Path) -> None:
    program = """
class Stuck:
    nbytes, awake = 60, True
    def room(self): return 0, 0
    def wake(self): return False
    def sleep(self):
        while True: time.sleep(1)
import time
from windfall.turns.client import SharedDevice
turn = SharedDevice(turn._path, "key-a", "train", "gpu", Stuck())
assert turn.take(60)
turn.give()
print("given")
time.sleep(600)
"""
    with served(path, limit_s=0.5, state_bytes=100) as server:
        process, b = server.process(program, "a", "train"), KeptState(60)
        client = SharedDevice(str(path), "key-b", "train", "gpu", b)
        with closed(client):
            assert process.stdout is not None
            assert process.stdout.readline() == "given\n"
            assert client.take(WAIT_S)
            assert process.wait(WAIT_S) == -signal.SIGKILL
            process.communicate()
            until(lambda: [event for event, _ in server.events] == ["hung"], "the event")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_clients_do_a_device_never_has_two_holders_and_never_stands_still(server: Served, seed: int) -> None:
    random = Random(seed)
    clients = [server.client(job, kind) for job in "abc" for kind in ("rollout", "train")]
    asked = set[SharedDevice]()
    with closed(*clients):
        for _ in range(120):
            client, action = random.choice(clients), random.choice(["take", "take", "give", "close", "update"])
            if action == "take":
                client.take(0.002, rows=random.randrange(100))
                asked.add(client)
            elif action == "update":
                terms = {"share": random.uniform(0.1, 5.0), "priority": random.randrange(2)}
                server.call(server.server.update, random.choice("abc"), **terms)
            else:
                client.give(random.uniform(0, 10)) if action == "give" else client.close()
                asked.discard(client)
            has = [each for each in asked if each.take(0.0)]
            assert len(has) <= 1
            if asked:
                until(lambda: any(each.take(0.0) for each in asked), "one of those that wait to have the turn")
        while asked:  # each has the turn in the end, whatever its priority
            holder = until(lambda: next((each for each in asked if each.take(0.0)), None), "the next turn")
            holder.give()
            asked.discard(holder)
        charged = server.call(server.server.charged)
    assert sum(charged["gpu"].values()) == sum(charged["gpu2"].values())
    until(lambda: not server.holder(), "the last turn to end")


def test_a_state_that_cannot_sleep_stays_and_nobody_waits_for_it(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Pinned(KeptState):
        def sleep(self) -> None:
            raise RuntimeError("no pinned memory")

    with served(path, slice_s=0.01, state_bytes=100) as server:
        stays, other = Pinned(60), KeptState(60)
        a = SharedDevice(str(path), "key-a", "train", "gpu", stays)
        b = SharedDevice(str(path), "key-b", "train", "gpu", other)
        with closed(a, b):
            assert a.take(WAIT_S)
            a.give(1)
            assert b.take(WAIT_S)
            b.give(1)
            assert server.snapshot()["devices"]["gpu"]["asleep"] == []
            assert a.take(WAIT_S), "now the other one sleeps"
            a.give(1)
        assert stays.awake
        assert not other.awake
    assert "stays on gpu: no pinned memory" in capfd.readouterr().err
