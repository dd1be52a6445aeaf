"""The import server: one process of a machine that has imported torch and the rest, and forks fork servers from it.

    python -m windfall.processes.fork_server --listen SOCKET MODULE ...     MODULE as in fork_server.py
    WINDFALL_IMPORT_SERVER=SOCKET windfall train ...

Every run imports torch and transformers once, in its fork server, which takes seconds of CPU time. Where many runs
start on one machine, such as a sweep of small runs or the tests of windfall, this process does it once for all of them.

    fork client                       import server                       fork server
      {"argv", "env", ...} ─────────────▶ fork ──────────────────────────────▶ requests of fork_server.py, on the
      ◀──────────────────────────────────────────────────────────── {"pid"}    same connection
      ◀─────────────────── {"refused"} or, after the fork server, {"ended"}

- Only the same user may connect. The socket should be in a folder of that user.
- The client must be a process like the import server: the same program, rights, limits and namespaces, and the same
  values of the environment variables that imports read. Otherwise it is refused, and starts a fork server of its own.
  PYTHONPATH may have more folders in front, with modules that are not imported yet.
- A fork server ends when its connection closes, as always, and on SIGTERM when the import server ends.
- Files that changed after the import server read them stay as they were: start it anew after an update of windfall.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windfall.processes import process
from windfall.processes.handle import Handle
from windfall.processes.parent_death import die_with_parent

VARIABLE = "WINDFALL_IMPORT_SERVER"
READ_BY_IMPORTS = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "HF_", "TRITON",
                   "TRANSFORMERS_", "TOKENIZERS_", "NVIDIA_", "MALLOC_", "MIMALLOC_", "XDG_", "TMPDIR",
                   "HOME")  # fmt: skip
"""How the names of environment variables begin that a library may read while it is imported. MIMALLOC_ is for torch's
allocator on aarch64."""
SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR",)
"""Environment variables that torch sets when it is imported, if they are not set."""
FORKABLE = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment variables that keep a process with torch able to fork. Without the first, importing numpy starts threads.
Without the second, a library that asks torch for a GPU initializes CUDA, which a forked process cannot use."""
REQUEST_TIMEOUT_S = 30.0
"""Seconds within which a client must send its request, and the import server must fork."""
LATE_END_S = 2.0
"""Seconds after the end of a fork server within which the import server must report it."""


class Refused(ConnectionError):
    """The import server cannot fork a fork server for this process."""


def _program(env: Mapping[str, str]) -> dict[str, Any]:
    """What a client says about itself: the program, and the variables that its imports would have read."""
    apart = (*SET_BY_IMPORTS, "PYTHONPATH")
    names = sorted(name for name in env if name.startswith(READ_BY_IMPORTS) and name not in apart)
    return {
        "program": [sys.executable, sys.version, str(Path(__file__).resolve())],
        "variables": {name: env[name] for name in names},
    }


def _python_path(env: Mapping[str, str]) -> list[str]:
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _new_folders(mine: list[str], yours: list[str]) -> list[str]:
    """The folders that PYTHONPATH has in front of mine. Raises a ValueError if an import that was made without them
    could differ from one with them."""
    count = max(0, len(yours) - len(mine))
    if yours[count:] != mine:
        raise ValueError(f"this process has another PYTHONPATH: {mine} there, {yours} here")
    for folder in map(Path, yours[:count]):
        names = {path.name.partition(".")[0] for path in folder.iterdir()} if folder.is_dir() else set()
        if found := sorted(names & {*sys.modules, "sitecustomize", "usercustomize"}):
            raise ValueError(f"this process has another PYTHONPATH, with its own {found[0]} in {folder}")
    return yours[:count]


def _surroundings(pid: int) -> dict[str, Any]:
    """What a fork server would get from the import server instead of from its client: the rights and limits of a
    process. They are read from the kernel, because a process in a sandbox could claim anything."""
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    rights = ("Uid", "Gid", "Groups", "CapEff", "CapBnd", "CapInh", "Umask", "NoNewPrivs", "Seccomp", "Cpus_allowed")
    return {
        "rights": {name: status.get(name, "").strip() for name in rights},
        "limits": dict(line.split("  ", 1) for line in (proc / "limits").read_text().splitlines()),
        "namespaces": {name: os.readlink(proc / "ns" / name) for name in sorted(os.listdir(proc / "ns"))},
        "control group": (proc / "cgroup").read_text(),
        "priority": os.getpriority(os.PRIO_PROCESS, pid),
    }


# the client's side


async def connect(
    path: str, *, argv: Sequence[str], env: Mapping[str, str], log: Path
) -> tuple[Handle, asyncio.StreamReader, asyncio.StreamWriter]:
    """Have a fork server forked, with `argv` as its arguments. Raises an OSError if that is not possible."""
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
    except TimeoutError:
        raise TimeoutError(f"waited {REQUEST_TIMEOUT_S:g} s for a connection") from None
    try:
        fields = {"argv": list(argv), "env": dict(env), "cwd": os.getcwd(), "log": str(log.resolve())}
        writer.write(json.dumps(fields | _program(env)).encode() + b"\n")
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                line = await reader.readline()
        except TimeoutError:
            raise TimeoutError(f"waited {REQUEST_TIMEOUT_S:g} s for a fork server") from None
        answer = json.loads(line or b'{"refused": "it closed the connection"}')
        if "pid" not in answer:
            raise Refused(str(answer.get("refused")))
        return _watched(answer["pid"], writer), reader, writer
    except BaseException:  # raised again: a fork server without a connection ends
        writer.close()
        raise


def _watched(pid: int, writer: asyncio.StreamWriter) -> Handle:
    """A handle of a process that is not our child. Who reads the connection calls `ended` when the import server
    reports the end; if it does not, because it is gone too, the handle ends a little later."""
    loop, fd = asyncio.get_running_loop(), os.pidfd_open(pid)

    def send(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, number)

    handle = Handle(name="fork server", pid=pid, send=send)

    def give_up() -> None:
        if handle.running:
            handle.ended(-signal.SIGKILL)
            writer.transport.abort()

    def on_end() -> None:
        loop.remove_reader(fd)
        loop.call_later(LATE_END_S, give_up)

    def close() -> None:
        loop.remove_reader(fd)
        os.close(fd)

    loop.add_reader(fd, on_end)
    handle.when_ended(close)
    return handle


# the server's side


class ImportServer:
    def __init__(self, path: str) -> None:
        """Listen. Clients that connect before `serve` wait for it."""
        self._pid = os.getpid()
        self._program = json.loads(json.dumps(_program(os.environ)))
        self._python_path = _python_path(os.environ)
        self._forked: dict[int, socket.socket] = {}
        """The connections of the fork servers, by pid: the end of each is reported there."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        hidden = f"{path}.{self._pid}"  # the name appears when a client can connect, not earlier
        self._listener.bind(hidden)
        self._listener.listen()
        os.rename(hidden, path)

    def serve(self) -> list[str]:
        """Serve until a signal ends this process. In a forked fork server, return its arguments immediately."""
        self._surroundings = _surroundings(self._pid)
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # handled only to wake up the select
        while True:
            ready, _, _ = select.select([self._listener, self._wakeup_read], [], [])
            if self._wakeup_read in ready:
                os.read(self._wakeup_read, 4096)
                self._reap()
            if self._listener in ready:
                connection, _ = self._listener.accept()
                try:
                    request = self._read(connection)
                    if (pid := os.fork()) == 0:
                        return self._become_fork_server(connection, request)
                    self._forked[pid] = connection
                except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
                    with contextlib.suppress(OSError):  # the client is gone, so nothing waits for the answer
                        connection.sendall(json.dumps({"refused": str(e)}).encode() + b"\n")
                    connection.close()

    def _read(self, connection: socket.socket) -> dict[str, Any]:
        """The request. Raises an error whose text says why it is refused."""
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if uid != os.getuid():
            raise PermissionError("it belongs to another user")
        connection.settimeout(REQUEST_TIMEOUT_S)
        data = b""
        while not data.endswith(b"\n"):
            if not (more := connection.recv(1 << 16)):
                raise ValueError("the request is incomplete")
            data += more
        connection.settimeout(None)
        request = json.loads(data)
        yours = {"program": request["program"], "variables": request["variables"], **_surroundings(pid)}
        for what, mine in {**self._program, **self._surroundings}.items():
            if yours[what] != mine:
                raise ValueError(f"this process has other {what}: {_differences(mine, yours[what])}")
        _new_folders(self._python_path, _python_path(request["env"]))  # refuses some
        return request

    def _become_fork_server(self, connection: socket.socket, request: dict[str, Any]) -> list[str]:
        try:
            os.setsid()
            die_with_parent(self._pid, signal.SIGTERM)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.chdir(request["cwd"])
            if not sys.flags.safe_path:
                sys.path[0] = request["cwd"]
            sys.path[1:1] = _new_folders(self._python_path, _python_path(request["env"]))
            os.environ.clear()
            os.environ.update(request["env"])
            Path("/proc/self/comm").write_text("fork server")
            log = process.open_log(Path(request["log"]))
            for fd, to in ((connection.fileno(), 0), (connection.fileno(), 1), (log, 2)):
                os.dup2(fd, to)
            os.close(log)
            os.write(1, json.dumps({"pid": os.getpid()}).encode() + b"\n")
            for opened in (connection, self._listener, *self._forked.values()):
                opened.close()
            for fd in (self._wakeup_read, self._wakeup_write):
                os.close(fd)
        except BaseException as e:  # fault boundary: a half set up process must not continue as a second import server
            print(f"cannot become a fork server: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            os._exit(1)
        return list(request["argv"])

    def _reap(self) -> None:
        """Report the fork servers that ended."""
        while (ended := process.reap(self._forked, os.WNOHANG)) is not None:
            pid, code = ended
            if (connection := self._forked.pop(pid, None)) is not None:
                with connection, contextlib.suppress(OSError):  # the client may be gone
                    connection.sendall(json.dumps({"ended": code}).encode() + b"\n")


def _differences(mine: Any, yours: Any) -> str:
    """
    >>> _differences({"A": "1", "B": "2"}, {"A": "1", "B": "3", "C": "4"})
    'B, C'
    >>> _differences(["a"], ["b"])
    "['a'] there, ['b'] here"
    """
    if isinstance(mine, dict) and isinstance(yours, dict):
        return ", ".join(sorted(name for name in {*mine, *yours} if mine.get(name) != yours.get(name)))
    return f"{mine} there, {yours} here"
