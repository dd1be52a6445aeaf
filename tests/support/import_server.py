"""Shares the imports of the fork servers of all test runs: one process imports torch and the rest, and forks them.

    python -m tests.support.import_server SOCKET MODULE ...           the import server; MODULE as in fork_server.py
    WINDFALL_RUN_FORK_SERVER="-I -S tests/support/import_server.py SOCKET" windfall train ...

    fork client ── starts ──▶ this file as a program ── arguments, variables, connection and log ──▶ import server
                                  │ waits, and ends as the fork server does                              │ forks
                                  └── is killed: the import server kills the fork server                 ▼
                                                                                                    fork server

- The program must be a process like the import server: the same Python, rights, limits and namespaces, and the same
  values of the environment variables that imports read. Otherwise it is refused, and becomes a fork server itself.
  PYTHONPATH may have more folders in front, with modules that are not imported yet.
- A fork server ends when its connection closes, as always, and on SIGTERM when the import server ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

READ_BY_IMPORTS = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "HF_", "TRITON",
                   "TRANSFORMERS_", "TOKENIZERS_", "NVIDIA_", "MALLOC_", "MIMALLOC_", "XDG_", "TMPDIR",
                   "HOME")  # fmt: skip
"""How the names of environment variables begin that a library may read while it is imported. MIMALLOC_ is for torch's
allocator on aarch64."""
SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR",)
"""Environment variables that torch sets when it is imported, if they are not set."""
REQUEST_TIMEOUT_S = 30.0
"""Seconds within which a request must arrive, and the import server must fork."""


def runner(path: str) -> str:
    """The value of WINDFALL_RUN_FORK_SERVER for the import server at this socket."""
    return f"-I -S {__file__} {path}"


def _python_path(env: Mapping[str, str]) -> list[str]:
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _described(pid: int, env: Mapping[str, str]) -> dict[str, Any]:
    """What must be the same for a process and the import server. Rights and limits are read from the kernel."""
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    rights = ("Uid", "Gid", "Groups", "CapEff", "CapBnd", "CapInh", "Umask", "NoNewPrivs", "Seccomp", "Cpus_allowed")
    apart = (*SET_BY_IMPORTS, "PYTHONPATH")
    return {
        "variables": {n: env[n] for n in sorted(env) if n.startswith(READ_BY_IMPORTS) and n not in apart},
        "rights": {name: status.get(name, "").strip() for name in rights},
        "limits": dict(line.split("  ", 1) for line in (proc / "limits").read_text().splitlines()),
        "namespaces": {name: os.readlink(proc / "ns" / name) for name in sorted(os.listdir(proc / "ns"))},
        "control group": {"": (proc / "cgroup").read_text()},
        "priority": {"": os.getpriority(os.PRIO_PROCESS, pid)},
    }


def _lines(connection: socket.socket) -> Iterator[dict[str, Any]]:
    with connection.makefile("rb") as file:
        for line in file:
            yield json.loads(line)


# the program that stands for a fork server


def stand_for_fork_server(path: str, argv: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REQUEST_TIMEOUT_S)
        try:
            connection.connect(path)
            socket.send_fds(connection, [b" "], [0, 2])
            fields = {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "python": sys.version}
            connection.sendall(json.dumps(fields).encode() + b"\n")
            answers = _lines(connection)
            answer: dict[str, Any] = next(answers, {"refused": "it closed the connection"})
        except OSError as e:
            answer = {"refused": str(e)}
        if "pid" in answer:
            connection.settimeout(None)
            for fd in (0, 1):
                os.close(fd)  # the connection is that of the fork server

            def forward(*_: object) -> None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(answer["pid"], signal.SIGTERM)

            signal.signal(signal.SIGTERM, forward)
            code = next(answers, {"ended": -signal.SIGKILL})["ended"]
            if code < 0:
                if code != -signal.SIGKILL:
                    signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            os._exit(code)
    with contextlib.suppress(OSError):  # the disk may be full
        os.write(2, f"The import server {path} is not used: {answer['refused']}\n".encode())
    os.execv(sys.executable, [sys.executable, "-m", *argv])


# the import server


class ImportServer:
    def __init__(self, path: str) -> None:
        """Listen. Programs that connect before `serve` wait for it."""
        self._pid = os.getpid()
        self._python_path = _python_path(os.environ)
        self._variables = _described(self._pid, os.environ)["variables"]
        self._forked: dict[int, socket.socket] = {}
        """The connections of the programs that stand for fork servers, by the pid of the fork server."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        hidden = f"{path}.{self._pid}"  # the name appears when a program can connect, not earlier
        self._listener.bind(hidden)
        self._listener.listen()
        os.rename(hidden, path)

    def serve(self) -> list[str]:
        """Serve until a signal ends this process. In a forked fork server, return its arguments immediately."""
        self._described = _described(self._pid, os.environ) | {"variables": self._variables}
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # handled only to wake up the select
        while True:
            ready, _, _ = select.select([self._listener, self._wakeup_read, *self._forked.values()], [], [])
            if self._wakeup_read in ready:
                os.read(self._wakeup_read, 4096)
                self._reap()
            for pid in [pid for pid, connection in self._forked.items() if connection in ready]:
                os.kill(pid, signal.SIGKILL)  # the program that stands for it has ended
                self._forked.pop(pid).close()
            if self._listener in ready and (argv := self._accept()) is not None:
                return argv

    def _accept(self) -> list[str] | None:
        connection, _ = self._listener.accept()
        fds = list[int]()
        try:
            connection.settimeout(REQUEST_TIMEOUT_S)
            _, fds, _, _ = socket.recv_fds(connection, 1, 2)
            request = next(_lines(connection), {})
            connection.settimeout(None)
            folders = self._check(connection, request)
            if (pid := os.fork()) == 0:
                return self._become_fork_server(connection, request, fds, folders)
            self._forked[pid] = connection
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            with contextlib.suppress(OSError):  # the program is gone, so nothing waits for the answer
                connection.sendall(json.dumps({"refused": str(e)}).encode() + b"\n")
            connection.close()
        for fd in fds:
            os.close(fd)
        return None

    def _check(self, connection: socket.socket, request: dict[str, Any]) -> list[str]:
        """The folders that PYTHONPATH has in front of ours. Raises an error whose text says why it is refused."""
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if request["python"] != sys.version:
            raise ValueError("this process has another Python")
        yours = _described(pid, request["env"])
        for what, mine in self._described.items():
            if yours[what] != mine:
                names = sorted(n for n in {*mine, *yours[what]} if mine.get(n) != yours[what].get(n))
                raise ValueError(f"this process has other {what}: {', '.join(names)}")
        mine, path = self._python_path, _python_path(request["env"])
        count = max(0, len(path) - len(mine))
        if path[count:] != mine:
            raise ValueError(f"this process has another PYTHONPATH: {mine} there, {path} here")
        for folder in map(Path, path[:count]):
            names = {path.name.partition(".")[0] for path in folder.iterdir()} if folder.is_dir() else set()
            if found := sorted(names & {*sys.modules, "sitecustomize", "usercustomize"}):
                raise ValueError(f"this process has another PYTHONPATH, with its own {found[0]} in {folder}")
        return path[:count]

    def _become_fork_server(
        self, connection: socket.socket, request: dict[str, Any], fds: list[int], folders: list[str]
    ) -> list[str]:
        from windfall.processes.parent_death import die_with_parent

        try:
            # Before it serves anything: a program without this answer becomes a fork server on the same connection.
            connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
            os.setsid()
            die_with_parent(self._pid, signal.SIGTERM)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.chdir(request["cwd"])
            sys.path[0] = request["cwd"]
            sys.path[1:1] = folders
            os.environ.clear()
            os.environ.update(request["env"])
            Path("/proc/self/comm").write_text("fork server")
            for fd, to in zip(fds, (0, 2), strict=True):
                os.dup2(fd, to)
                os.close(fd)
            for opened in (connection, self._listener, *self._forked.values()):
                opened.close()
            for fd in (self._wakeup_read, self._wakeup_write):
                os.close(fd)
        except BaseException as e:  # a half set up process must not continue as a second import server
            print(f"cannot become a fork server: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            os._exit(1)
        return list(request["argv"])

    def _reap(self) -> None:
        """Report the fork servers that ended."""
        with contextlib.suppress(ChildProcessError):  # there are no more
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if (connection := self._forked.pop(ended[0], None)) is not None:
                    with connection, contextlib.suppress(OSError):  # the program may be gone
                        code = os.waitstatus_to_exitcode(ended[1])
                        connection.sendall(json.dumps({"ended": code}).encode() + b"\n")


def preload(name: str) -> None:
    """Import what runs of this model need."""
    from windfall.models import load
    from windfall.run import preload

    preload.import_modules()
    preload.build_empty(Path(load.resolve(name)))


def main() -> None:
    from windfall.processes import fork_server

    path, *modules = sys.argv[1:]
    os.environ.update(fork_server.FORKABLE)
    server = ImportServer(path)
    gc.disable()
    try:
        fork_server.import_all("windfall.processes.fork_server", modules)
    except ImportError as e:
        sys.exit(f"the import server did not start: {e}")
    gc.collect()
    gc.freeze()  # the memory stays shared with the fork servers
    gc.enable()
    sys.argv[1:] = server.serve()[1:]  # returns in every fork server
    fork_server.main()


if __name__ == "__main__":
    if sys.flags.isolated:
        stand_for_fork_server(sys.argv[1], sys.argv[2:])
    else:
        main()
