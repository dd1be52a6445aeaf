"""A process that dies with its parent: PR_SET_PDEATHSIG, set before the program begins.

    python -I -S guard.py PARENT_PID SIGNAL COMMAND ...

The kernel sends SIGNAL to the process as soon as the thread that started it is gone, however that ended: also by
SIGKILL, when no code of ours runs any more. The setting outlives exec; a fork clears it, so it does not reach
grandchildren. It has to be made in the child: that is why this small program stands before the real one (20 ms), where
a `preexec_fn` would run Python between fork and exec of a process with threads. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
ORPHAN = 113
"""The exit status when the parent was gone before we could ask to die with it."""


def die_with_parent(parent: int, death: int) -> None:
    """From now on `death` arrives when the parent ends. If it has ended already, end here."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(death), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        os._exit(ORPHAN)


def main() -> None:
    parent, death, *command = sys.argv[1:]
    die_with_parent(int(parent), int(death))
    # Python ignores SIGPIPE, and an ignored signal stays ignored through exec: begin with the default.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
