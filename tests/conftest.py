"""Fixtures for tests that run the command line, the order of the test files, and what test processes share."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest

from tests import run_in_parallel
from tests.run_in_parallel import FORKED_RANKS
from tests.support import import_server
from windfall.processes import fork_client, parent_death
from windfall.run import cli

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in a background job of a shell, as would every process of a test
    signal.signal(signal.SIGINT, signal.default_int_handler)
SMALL = """
[run]
name = "small"
steps = 2
device = "cpu"
threads = 1
[rollout]
groups = 2
group_size = 2
max_tokens = 24
[eval]
tasks = 4
"""

# A busy machine is not a fault, and whether the tests pass is no matter of luck. `--hypothesis-profile=windfall` tries
# all examples, and `--hypothesis-profile=explore` draws others every time.
hypothesis.settings.register_profile("windfall", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("windfall")
QUICK_SHARE, QUICK_LEAST = 0.25, 10
"""Of the examples of a property test: `make test` tries this share of them, at least so many, and `make slow` all."""

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Start an import server for all test processes, so that not every run of a test imports torch. Without
    run_in_parallel.py there is none, and every run starts as a user's run does."""
    parallel = config.pluginmanager.get_plugin(run_in_parallel.NAME)
    if parallel is None:
        return
    folder = tempfile.mkdtemp(prefix="windfall-tests-")
    path = f"{folder}/imports"
    os.environ[fork_client.RUNNER] = import_server.runner(path)
    preload = "tests.support.import_server:preload:tiny"
    command = [sys.executable, "-m", "tests.support.import_server", path, preload]
    server = subprocess.Popen(
        [sys.executable, parent_death.__file__, str(os.getpid()), str(int(signal.SIGTERM)), *command],
        start_new_session=True,  # Ctrl-C is for the tests; it ends with them
        env={name: value for name, value in os.environ.items() if name not in parallel.added},
        cwd=HERE.parent,
    )

    def stop() -> None:
        server.terminate()
        server.wait(timeout=240)
        shutil.rmtree(folder)

    config.add_cleanup(stop)


LONGEST_FIRST = (
    *FORKED_RANKS,  # one process runs all of them
    "run",
    "jobs/test_service.py",
    "trainer/test_checkpoint.py",
    "runs/test_runs.py",
    "engine/test_contract.py",
    "engine/selftest",
    "engine/cuda/test_engine.py",
    "chaos",
    "envs/process_pool",
    "sim/core",
    "runs/test_adapters.py",
    "controller/gateway/test_agent_runs.py",
    "envs/test_hostile_runs.py",
    "trainer",
    "sim",
    "controller/rollout/test_kill_everywhere.py",
    "providers",
)
"""Files and folders that take the most time. Begun last, one of them would run alone at the end."""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    gc.disable()  # nothing that collecting the tests makes is garbage; looking for it takes a tenth of the time
    try:
        return (yield)
    finally:
        gc.freeze()  # the garbage collector need not look at the imported libraries again and again
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("hypothesis_profile", None) is None:
        _try_fewer_examples(items)
    rank = {HERE / name: n for n, name in enumerate(LONGEST_FIRST)}

    def place(item: pytest.Item) -> int:
        found = (rank[path] for path in (item.path, *item.path.parents) if path in rank)
        return next(found, len(rank))

    items.sort(key=place)


def _try_fewer_examples(items: list[pytest.Item]) -> None:
    name = "_hypothesis_internal_use_settings"
    tests = {item.function for item in items if isinstance(item, pytest.Function)}
    for test in tests:
        if found := getattr(test, name, None):
            fewer = max(QUICK_LEAST, round(found.max_examples * QUICK_SHARE))
            setattr(test, name, hypothesis.settings(found, max_examples=min(found.max_examples, fewer)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _seed()


def _seed() -> None:
    """A test draws the same numbers, with one thread, whatever tests have run before it in its process: the threads of
    several processes would wait for each other, which takes ten times the CPU time."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)
    if draws := sys.modules.get("numpy.random"):
        draws.seed(0)


@pytest.fixture(scope="session")
def small_recipe() -> str:
    """A run of two steps that takes a second."""
    return SMALL


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe in it and nothing else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


@pytest.fixture
def windfall(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process through the real entry point; returns exit status, output and errors."""

    def command(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["windfall", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (int(end.value.code or 0), *capsys.readouterr())

    return command
