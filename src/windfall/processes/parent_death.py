"""A process that dies with its parent: sets PR_SET_PDEATHSIG, then runs the real program.

    python -I -S parent_death.py PARENT_PID SIGNAL COMMAND ...

The kernel sends SIGNAL to the process as soon as the thread that started it is gone, no matter how that thread ended:
even after SIGKILL, when none of our code can run. The setting survives exec. A fork clears it, so grandchildren do not
inherit it. It must be set in the child process, so this small program runs before the real one, which takes 20 ms. The
alternative, a `preexec_fn`, would run Python between fork and exec of a process with threads. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 113
"""Exit status if the parent was gone before the signal was set."""


def die_with_parent(parent: int, death: int) -> None:
    """Ask the kernel to send the signal `death` when the parent ends. Exit here if it has already ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(death), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        os._exit(EXIT_ORPHANED)


def main() -> None:
    parent, death, *command = sys.argv[1:]
    die_with_parent(int(parent), int(death))
    # Python ignores SIGPIPE, and an ignored signal stays ignored after exec, so restore the default.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
