"""A Ray cluster of several nodes on this machine. The head has no CPUs, so workers run on the other nodes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.fleets.worker_sources import source_path


@contextmanager
def cluster(nodes: int, *, dashboard: bool = False, **resources: Any) -> Iterator[Any]:
    """The cluster; its nodes are in `worker_nodes`. Its address is in TEST_RAY_ADDRESS. `dashboard`: it takes jobs."""
    from ray.cluster_utils import Cluster  # pyright: ignore

    os.environ["PYTHONPATH"] = f"{source_path()}:{os.environ.get('PYTHONPATH', '')}"  # what the nodes import
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": dashboard})
    os.environ["TEST_RAY_ADDRESS"] = made.address
    try:
        for _ in range(nodes):
            add_node(made, **resources)
        yield made
    finally:
        made.shutdown()


def add_node(cluster: Any, **resources: Any) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=80 * 1024 * 1024, **resources)  # Ray wants the main thread


def wait_until(
    condition: Callable[[], Any],
    what: str,
    *,
    running: subprocess.Popen[bytes] | None = None,
    out: Path = Path(os.devnull),
    within_s: float = 240.0,
) -> Any:
    """What the condition returns once it is true. Fails with the output in `out` if this process ends before."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert running is None or running.poll() is None, f"ended before {what}: {out.read_text()}"
        assert time.monotonic() < deadline_s, f"waited {within_s:g} s for {what}: {out.read_text()}"
        time.sleep(0.05)
    return found
