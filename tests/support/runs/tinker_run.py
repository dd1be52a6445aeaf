"""`windfall tinker` with all its processes, which can be killed, and clients in processes of their own."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.kills.soak import family
from windfall.processes import parent_death

LOOP = Path(__file__).parents[2] / "programs" / "tinker_loop.py"
WAIT_S = 120.0
T = TypeVar("T")
RECIPE = """
[run]
name = "tinker"
folder = "{folder}"
deterministic = true
threads = 1
device = "cpu"
[rollout]
max_tokens = 256
[fleet]
heartbeat_s = 0.3
suspect_s = 1.0
gone_s = 2.5
[tinker]
save_updates = 3
"""
KINDS: dict[str, Callable[[str], bool]] = {
    "controller": lambda name: name == "controller",
    "trainer": lambda name: name.startswith("trainer"),
    "worker": lambda name: name.startswith("w"),
    "run": lambda name: name != "fork_server",
}
"""The processes of each kind, by the name of their logs."""


class TinkerRun:
    def __init__(self, folder: Path, *options: str, recipe: str = RECIPE) -> None:
        self.folder, self.path = folder, folder / "tinker"
        self._recipe = folder / "tinker.toml"
        self._recipe.write_text(recipe.format(folder=folder))
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TinkerRun:
        given = ["--model", "tiny", "--port", "0", "--recipe", str(self._recipe), *self._options]
        self._start("tinker", *given)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def resume(self) -> None:
        self._start("resume", str(self.path))

    def _start(self, *arguments: str) -> None:
        self._process = _popen(self.folder / "out", "-m", "windfall.run.cli", *arguments)

    def stop(self) -> int:
        """As with Ctrl-C. Returns the exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Wait until it has ended."""
        assert self._process is not None
        try:
            return self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    @property
    def url(self) -> str:
        found = self.until(lambda: _json(self.path / "tinker.json"), "is listening")
        return f"http://127.0.0.1:{found['port']}"

    @property
    def key(self) -> str:
        return self.until(lambda: _text(self.path / "tinker.key"), "has a key").strip()

    def output(self) -> str:
        """What the run has printed."""
        return (self.folder / "out").read_text()

    def until(self, look: Callable[[], T], what: str, timeout_s: float = WAIT_S) -> T:
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            assert time.monotonic() < deadline, f"after {timeout_s:g} s, no run that {what}\n{self.output()[-3000:]}"
            time.sleep(0.05)
        return found

    def kill(self, kind: str, rng: random.Random) -> None:
        """Kill -9 a process of this kind; "run": all at once, and resume."""
        assert self._process is not None
        root = self._process.pid

        def there() -> list[int]:
            return sorted(pid for pid, name in family(root).items() if KINDS[kind](name))

        found = self.until(there, f"has a {kind}")
        for pid in [root, *family(root)] if kind == "run" else [rng.choice(found)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind == "run":
            self._process.wait(WAIT_S)
            self.resume()

    def client(self, output: Path, *arguments: str, program: Path = LOOP) -> subprocess.Popen[bytes]:
        return _popen(output.with_suffix(".log"), str(program), self.url, self.key, str(output), *arguments)

    def weights(self, path: str) -> dict[str, bytes]:
        """The files of saved weights."""
        model, _, name = path.removeprefix("tinker://").partition("/weights/")
        (folder,) = (self.path / "tinker" / "models" / model.replace(":", "_") / "weights").glob(f"{name}-*")
        files = (p for p in folder.rglob("*") if p.is_file())
        return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def lines(output: Path) -> list[dict[str, Any]]:
    """What a client has written so far."""
    text = output.read_text() if output.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def ended(client: subprocess.Popen[bytes], output: Path, timeout_s: float) -> Sequence[dict[str, Any]]:
    """Wait for a client to end well. Returns what it has written."""
    try:
        status = client.wait(timeout_s)
    finally:
        client.kill()
    assert status == 0, output.with_suffix(".log").read_text()[-3000:]
    return lines(output)


def _popen(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A Python program that dies with this process."""
    guard = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), str(int(signal.SIGTERM))]
    with log.open("ab") as out:
        return subprocess.Popen(
            [*guard, sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
