"""Limits inside a child process, for graders that evaluate what the policy wrote.

One answer of `9**9**9` keeps the interpreter busy for hours without releasing its lock. Under `cpu_limit` the kernel
ends the process instead; no Python code has to run for that. It limits CPU time, not time on the clock, so a verdict
does not depend on how busy the machine is.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Callable, Iterator

from windfall.types import Feedback

MEMORY_BYTES = 4 << 30

announce: Callable[[Feedback], None] = lambda verdict: None  # noqa: E731
"""Tells the parent what the current call is worth if the kernel ends this process; set by `child`."""


@contextlib.contextmanager
def cpu_limit(cpu_s: float, verdict: Feedback) -> Iterator[None]:
    """Over the limit (whole seconds, rounded up) the process ends, and the call under way gets `verdict`."""
    announce(verdict)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + cpu_s), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def limit_memory() -> None:
    """No core dumps, and a MemoryError beyond MEMORY_BYTES."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has the name but not the limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
