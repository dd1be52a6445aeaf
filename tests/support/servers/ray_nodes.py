"""A Ray cluster of several nodes on this machine. The head has no CPUs, so workers run on the other nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
            made.add_node(num_cpus=1, object_store_memory=80 * 1024 * 1024, **resources)
        yield made
    finally:
        made.shutdown()
