"""Limits inside a child process, for graders that evaluate what the policy wrote.

One answer of `9**9**9` keeps the interpreter busy for hours without releasing its lock. Under `cpu_limit` the kernel
ends the process instead; no Python code has to run for that. It limits CPU time, not time on the clock, so a verdict
does not depend on how busy the machine is.

The limit is a timer (ITIMER_PROF), not RLIMIT_CPU: that one is absolute, and the kernel holds it against a count that
drifts away from what a process can read of its CPU time. In a process that has graded for a minute, it ended calls
that had taken a tenth of a second.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator

from windfall.types import Feedback

MEMORY_BYTES = 4 << 30
OVER = signal.SIGPROF
"""What ends a process that is over its limit of CPU time."""

announce: Callable[[Feedback], None] = lambda verdict: None  # noqa: E731
"""Tells the parent what the current call is worth if the kernel ends this process; set by `child`."""


@contextlib.contextmanager
def cpu_limit(cpu_s: float, verdict: Feedback) -> Iterator[None]:
    """Over the limit the process ends by OVER, and the call under way gets `verdict`."""
    announce(verdict)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def limit_memory() -> None:
    """No core dumps, and a MemoryError beyond MEMORY_BYTES."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has the name but not the limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
