"""The section [fleet.ray]."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from windfall.recipe.worker_source import WorkerSource


class Ray(WorkerSource):
    """Workers on a Ray cluster: one actor per worker. Needs the extra `ray`."""

    address: str = "auto"
    """Address of the Ray cluster, as for `ray.init`. "auto" is the cluster that this machine belongs to."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for each worker."""
    gpus: float = Field(default=1.0, ge=0)
    """GPUs that Ray reserves for each worker. The worker sees only these."""
    resources: dict[str, float] = Field(default={})
    """Custom Ray resources that each worker needs, such as `{ spot = 1.0 }`."""
    labels: dict[str, str] = Field(default={})
    """Labels that a node must have, such as `{ "ray.io/accelerator-type" = "H100" }`."""
    runtime_env: dict[str, Any] = Field(default={})
    """Ray's runtime environment of the workers. Not for secrets: Ray's dashboard shows it."""

    def of_actor(self) -> dict[str, Any]:
        """The options of each worker's actor, as Ray names them."""
        given = {"resources": self.resources, "label_selector": self.labels, "runtime_env": self.runtime_env}
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, **{k: v for k, v in given.items() if v}}

    def gpu_counts(self) -> list[float]:
        return [self.gpus]
