"""Run pytest in several processes that are forked from one, which has imported the large libraries.

    python tests/run_in_parallel.py PROCESSES [arguments of pytest]

`pytest -n 3` starts three processes, and each imports torch, transformers and other libraries before it has collected
any test: more than half of the CPU time of a collection. Here that happens once. The rest is pytest-xdist as usual: it
sends its code to the standard input of each process, as to those that it starts itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
from typing import Any

import pytest
from execnet import gateway_io

from windfall.processes import fork_server
from windfall.processes.parent_death import die_with_parent

LIBRARIES = (
    "aiohttp.web", "datasets", "jinja2", "openai", "peft", "scipy.optimize", "torch", "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip


class ForkedProcess:
    """What pytest-xdist needs of a subprocess.Popen."""

    def __init__(self) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for fd, to in ((theirs_in, 0), (theirs_out, 1)):
                os.dup2(fd, to)
            os.closerange(3, max(theirs_in, ours_in, ours_out, theirs_out) + 1)
            die_with_parent(parent, signal.SIGKILL)
            try:
                exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")

    def wait(self) -> int:
        with contextlib.suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def main() -> int:
    count, *arguments = sys.argv[1:]
    sys.argv[1:] = arguments
    sys.path[0] = ""  # as with python -m pytest
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = dict(os.environ)
    os.environ.update(fork_server.FORKABLE)
    gc.disable()
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    for name in set(fork_server.FORKABLE) - set(before):
        del os.environ[name]
    if fork_server.count_threads() == 1:  # otherwise pytest-xdist starts its processes as usual
        processes = [ForkedProcess() for _ in range(int(count))]

        def take(self: Any, args: Any, execmodel: Any) -> None:
            self.popen = processes.pop(0)
            gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

        gateway_io.Popen2IOMaster.__init__ = take
    imported = "ignore:Module already imported so cannot be rewritten"
    return int(pytest.main(["-n", count, "-W", imported, *arguments]))


if __name__ == "__main__":
    sys.exit(main())
