"""Run pytest in several processes, which are forked from one that has collected all tests.

    python tests/run_in_parallel.py PROCESSES [arguments of pytest]

`pytest -n 4` (pytest-xdist) starts four processes, and each imports torch and other libraries and collects every test.
Here that happens once, and the processes share the memory.

- A process takes a group of tests whenever it has none: those of a file, or those of all FORKED_RANKS.
- A process that dies fails the test that it ran. Another one continues after that test.
- With `-x` or `--maxfail`, and on Ctrl-C, the processes are killed.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import warnings
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import pytest

from windfall.processes import fork_server
from windfall.processes.parent_death import die_with_parent

FORKABLE = {**fork_server.FORKABLE, "TOKENIZERS_PARALLELISM": "false"}
"""Environment variables that keep a process able to fork. Without the last, training a tokenizer starts threads."""
NAME = "run_in_parallel"
FORKED_RANKS = (
    "trainer/ranks/test_adapter_ranks.py",
    "trainer/ranks/test_policy_ranks.py",
    "trainer/ranks/test_rank_exchanges.py",
    "test_benchmarks.py",
    "trainer/test_given_losses.py",
    "trainer/test_layer_choice.py",
    "trainer/ranks/test_ranks.py",
    "trainer/ranks/test_remote_ranks.py",
    "trainer/test_sharded_layers.py",
    "weights/test_adapter_base.py",
    "weights/test_publish_ranks.py",
    "weights/test_pull_sources.py",
)
"""Files whose tests fork processes from multiprocessing's server, which imports torch in every test process that has
such tests: a single one runs them all."""
NUMBER = struct.Struct("<H")


class Process:
    """A test process, as the one that started it sees it."""

    def __init__(self, pid: int, messages: Connection) -> None:
        self.pid = pid
        self.messages = messages
        self.waiting: list[int] = []
        """The tests that it has taken and not begun."""
        self.running: int | None = None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class InParallel:
    """The plugin of pytest that runs the collected tests."""

    __name__ = NAME

    def __init__(self, count: int, added: list[str]) -> None:
        self._count = count
        self.added = added
        """Environment variables that are only for the collection."""
        self._session: pytest.Session
        self._groups: list[list[int]] = []
        self._processes: list[Process] = []
        self._messages: Connection | None = None
        """In a test process: to the one that started it."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # as pytest does it
        if (threads := fork_server.count_threads()) != 1:
            raise pytest.UsageError(f"collecting the tests started {threads - 1} threads, so no process can be forked")
        for name in self.added:
            del os.environ[name]
        self._session = session
        groups: dict[str, list[int]] = {}
        for n, item in enumerate(session.items):
            file = item.nodeid.split("::")[0]
            groups.setdefault("ranks" if file.removeprefix("tests/") in FORKED_RANKS else file, []).append(n)
        self._groups = list(groups.values())
        session.config._tmp_path_factory.getbasetemp()  # pyright: ignore  # one for all processes
        self._queue, feed = os.pipe()
        os.write(feed, b"".join(NUMBER.pack(n) for n in range(len(self._groups))))
        os.close(feed)
        try:
            for _ in range(min(self._count, len(self._groups))):
                self._start([])
            while self._processes:
                for ready in wait([each.messages for each in self._processes]):
                    self._receive(next(each for each in self._processes if each.messages is ready))
        finally:
            for process in self._processes:
                process.kill()
        return True

    def _start(self, tests: list[int]) -> None:
        """A process that runs these tests and then those of the queue."""
        ours, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                die_with_parent(parent, signal.SIGKILL)
                self._messages = theirs
                self._run(tests)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        process = Process(pid, ours)
        process.waiting += tests
        self._processes.append(process)

    def _receive(self, process: Process) -> None:
        try:
            kind, value = process.messages.recv()
        except (EOFError, OSError):
            self._ended(process)
            return
        hook = self._session.config.hook
        if kind == "group":
            process.waiting += self._groups[value]
        elif kind == "test":
            process.waiting.remove(value)
            process.running = value
        elif kind == "report":
            self._report(process, hook.pytest_report_from_serializable(config=self._session.config, data=value))
        elif kind == "warning":
            text, place = value
            warning = warnings.WarningMessage(UserWarning(text), UserWarning, *place)
            hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": warning, "nodeid": "", "when": "runtest", "location": None}
            )

    def _report(self, process: Process, report: Any) -> None:
        # What pytest writes of the process of a report, as pytest-xdist has it.
        report.node = SimpleNamespace(gateway=SimpleNamespace(id=process.pid), _workerinfocache=f"[{process.pid}]")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)

    def _ended(self, process: Process) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        self._processes.remove(process)
        if status == 0:
            return
        if process.running is not None:
            item = self._session.items[process.running]
            text = f"the process of this test ended with {_described(status)}"
            self._report(
                process, pytest.TestReport(item.nodeid, item.location, {}, outcome="failed", longrepr=text, when="call")
            )
        if process.waiting:
            self._start(process.waiting)

    # In a test process.

    def _run(self, tests: list[int]) -> None:
        capture: Any = self._session.config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are shared with the other processes
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # pytest writes here, too, how many tests have passed
        capture.start_global_capturing()
        capture.suspend_global_capture()
        items = self._taken(tests)
        n = next(items, None)
        while n is not None:
            following = next(items, None)
            self._send("test", n)
            item = self._session.items[n]
            after = None if following is None else self._session.items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            n = following

    def _taken(self, tests: list[int]) -> Iterator[int]:
        yield from tests
        while data := os.read(self._queue, NUMBER.size):
            (group,) = NUMBER.unpack(data)
            self._send("group", group)
            yield from self._groups[group]

    def _send(self, kind: str, value: Any) -> None:
        assert self._messages is not None
        self._messages.send((kind, value))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._messages is not None:
            config = self._session.config
            self._send("report", config.hook.pytest_report_to_serializable(config=config, report=report))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        if self._messages is not None:
            text = f"{warning_message.category.__name__}: {warning_message.message}"
            self._send("warning", (text, (warning_message.filename, warning_message.lineno)))


def _described(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def main() -> int:
    count, *arguments = sys.argv[1:]
    sys.path[0] = ""  # as with python -m pytest
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    added = [name for name in FORKABLE if name not in os.environ]
    os.environ.update({name: FORKABLE[name] for name in added})
    plugin = InParallel(int(count), added)
    return int(pytest.main(arguments, plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
