"""The section [fleet.kubernetes]."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from windfall.recipe.section_base import FilePath
from windfall.recipe.worker_source import WorkerSource

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A name as Kubernetes allows it."""


class Kubernetes(WorkerSource):
    """Workers on Kubernetes: one Deployment, scaled by the program `kubectl`."""

    image: str
    """Container image that has windfall installed."""
    namespace: Name = "default"
    """Namespace of all objects."""
    kubeconfig: FilePath | None = None
    """File with the address and the credentials of the cluster. If left out: as `kubectl` chooses, which is
    `~/.kube/config`, or the service account of the pod that the run is in."""
    cpus: float = Field(default=4.0, gt=0)
    """CPUs that each worker requests."""
    memory_gib: float = Field(default=16.0, gt=0)
    """Memory that each worker requests, in GiB."""
    gpus: int = Field(default=1, ge=0)
    """GPUs that each worker requests."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the GPU resource."""
    node_selector: dict[str, str] = Field(default={})
    """Labels of the nodes for workers, such as `{ "cloud.google.com/gke-spot" = "true" }`."""
    tolerations: list[dict[str, str | int]] = Field(default=[])
    """Taints that workers tolerate, such as `[{ key = "cloud.google.com/gke-spot", operator = "Exists" }]`."""
    priority: int = Field(default=-10, le=1_000_000_000)
    """Priority of the workers' pods. Below 0, pods with the default priority can preempt them."""

    @model_validator(mode="before")
    @classmethod
    def _login(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.keys() & {"server", "token_file"}:
            raise ValueError("kubectl logs in to the cluster; set kubeconfig instead of server and token_file")
        return given

    def gpu_counts(self) -> list[float]:
        return [self.gpus]
