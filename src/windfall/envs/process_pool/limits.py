"""Limits inside a child process, for graders that evaluate text of the policy.

One answer of `9**9**9` keeps the interpreter busy for hours without releasing its lock. Under `cpu_limit` the kernel
ends the process instead, without running any Python code. It limits CPU time, not wall time, so a verdict does not
depend on how busy the machine is.

The limit is a timer (ITIMER_PROF), not RLIMIT_CPU: that limit counts from the start of the process, and the kernel
compares it with a counter that drifts away from the CPU time that a process can read. In a process that had graded for
a minute, it ended calls that had taken a tenth of a second.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator

from windfall.types import Feedback

MEMORY_BYTES = 4 << 30
OVER = signal.SIGPROF
"""The signal that ends a process over its CPU time limit."""

announce: Callable[[Feedback], None] = lambda verdict: None  # noqa: E731
"""Tells the parent the result of the current call in case the kernel ends this process. Set by child_main.py."""


@contextlib.contextmanager
def cpu_limit(cpu_s: float, verdict: Feedback) -> Iterator[None]:
    """Over the limit, the process ends by the signal OVER, and the result of the current call is `verdict`."""
    announce(verdict)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def limit_memory(most: int) -> None:
    """Disable core dumps, and raise MemoryError beyond this many bytes of address space. 0: no limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if most:
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
