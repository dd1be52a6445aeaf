"""The sections [fleet.ray], [fleet.kubernetes], [fleet.skypilot] and [fleet.slurm]: systems that workers come from.

`windfall fleet preview RECIPE.toml` prints what a recipe would start there. docs/guides/ has one page per system.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from windfall.recipe.section import Count, FilePath, Section

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A name as Kubernetes allows it."""


def _count(gpus: str) -> float:
    """The number of GPUs in "h100:4", "4" or "h100".

    >>> _count("h100:4"), _count("4"), _count("h100")
    (4.0, 4.0, 1.0)
    """
    last = gpus.rpartition(":")[2]
    return float(last) if last.replace(".", "", 1).isdecimal() else 1.0


class WorkerSource(Section):
    """The keys that all systems share."""

    workers: Count = 1
    """Workers to start with, and to keep running."""
    workers_min: int = Field(default=0, ge=0)
    """Lower limit for autoscaling."""
    workers_max: int = Field(default=0, ge=0)
    """Upper limit for autoscaling. 0 disables it; otherwise the run starts with `workers` and scales between
    `workers_min` and this limit by measured throughput and price."""
    kind: Literal["reserved", "spot", "borrowed"] = "spot"
    """Lease terms of these workers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of these workers. "auto" uses a GPU if the worker sees one."""
    region: str = ""
    """Cloud or region of these workers; it selects the price."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of one worker in $ per hour. 0 looks it up by device in the built-in price table."""
    worker_threads: int = Field(default=0, ge=0)
    """CPU threads of each worker. 0 uses all cores of its machine."""
    worker_memory: float = Field(default=0.4, gt=0, lt=1)
    """Share of a device's free memory for the KV cache of each worker."""
    engine: Literal["auto", "windfall", "vllm"] = "auto"
    """Engine of these workers. "auto" leaves the choice to `engine.name`."""
    tensor_parallel: Count = 1
    """GPUs that one engine of these workers spans. More than 1 needs vLLM, and as many GPUs per worker."""
    join_url: str = Field(default="", pattern=r"^(https?://[^/\s]+)?$")
    """Address at which these workers reach the controller, such as "https://train.example.com:8700". If left out: the
    address of this machine."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that a worker has to send its last tokens and leave when it is stopped. No effect with SkyPilot, which
    cannot signal a worker."""

    def gpu_counts(self) -> list[float]:
        """GPUs that one worker gets; several numbers if the machines that it may get differ."""
        return []

    @model_validator(mode="after")
    def _ranks(self) -> WorkerSource:
        fewest = min(self.gpu_counts(), default=None)
        if self.tensor_parallel > 1 and self.device != "cpu" and fewest is not None and fewest < self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} needs as many GPUs for each worker, which gets {fewest:g}"
            )
        return self

    @model_validator(mode="after")
    def _limits(self) -> WorkerSource:
        if self.workers_max and not self.workers_min <= self.workers <= self.workers_max:
            raise ValueError(
                f"workers = {self.workers} must be from workers_min = {self.workers_min} to "
                f"workers_max = {self.workers_max}"
            )
        return self


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

    def gpu_counts(self) -> list[float]:
        return [self.gpus]


class Kubernetes(WorkerSource):
    """Workers on Kubernetes: one Deployment, scaled through the API server."""

    image: str
    """Container image that has windfall installed."""
    namespace: Name = "default"
    """Namespace of all objects."""
    kubeconfig: FilePath | None = None
    """File with the address and the credentials of the API server. If left out: the service account of the pod that
    the run is in, otherwise `~/.kube/config`."""
    server: str = Field(default="", pattern=r"^(https?://\S+)?$")
    """Address of the API server, instead of the one in `kubeconfig`; for example that of `kubectl proxy`."""
    token_file: FilePath | None = None
    """File with the bearer token for `server`."""
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
    trainer_gpus: int = Field(default=1, ge=0)
    """GPUs of the pod with controller and trainer."""
    trainer_memory_gib: float = Field(default=64.0, gt=0)
    """Memory that the pod with controller and trainer requests, in GiB."""
    trainer_node_selector: dict[str, str] = Field(default={})
    """Labels of the nodes for the pod with controller and trainer."""
    storage_gib: Count = 200
    """Size of the volume for the folder of the run, in GiB."""
    storage_class: str = ""
    """Storage class of that volume. If left out: the cluster's default."""

    def gpu_counts(self) -> list[float]:
        return [self.gpus]


class SkyPilot(WorkerSource):
    """Workers from clouds through SkyPilot: one managed job per worker. Needs the program `sky`."""

    accelerators: str | list[str] = Field(default=[])
    """GPUs of a worker's machine, such as "H100:1". A list names alternatives. If left out: a machine without a GPU."""
    infra: str = ""
    """Where to look for machines, such as "aws/us-east-1". If left out: everywhere that SkyPilot has access to."""
    fallback: bool = True
    """Use an on-demand machine if no spot machine is available. Only for `kind` = "spot"."""
    on_demand_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of that on-demand machine in $ per hour. `fleet.max_usd_per_h` counts every worker at the higher price."""
    cpus: str = ""
    """CPUs of a machine, such as "8+"."""
    image: str = ""
    """Machine or container image. If left out: SkyPilot's default."""
    setup: str = ""
    """Shell commands that install windfall on a new machine. Needed unless `image` has it."""
    max_restarts: int = Field(default=3, ge=0)
    """Number of times that SkyPilot restarts a worker that fails. Preempted workers are always started again."""

    def gpu_counts(self) -> list[float]:
        names = [self.accelerators] if isinstance(self.accelerators, str) else self.accelerators
        return [_count(name) for name in names] or [0.0]


class Slurm(WorkerSource):
    """Workers on a Slurm cluster: job arrays that are requeued after preemption."""

    partition: str = ""
    """Partition. If left out: the cluster's default."""
    account: str = ""
    """Account to charge."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that a node must have."""
    cpus: Count = 4
    """CPUs of each worker."""
    gpus: str = "1"
    """GPUs of each worker, as for `--gres=gpu:`, such as "1" or "h100:1". "0" requests none."""
    memory_gib: float = Field(default=0.0, ge=0)
    """Memory of each worker in GiB. 0 uses the default of the partition."""
    time_limit_min: Count = 240
    """Time limit of a job in minutes. A worker that reaches it is drained and replaced."""
    warning_s: Count = 30
    """Seconds before the time limit at which a worker is told to drain. Slurm may do so up to a minute earlier."""
    setup: str = ""
    """Shell commands before the worker starts, such as `source ~/windfall/bin/activate`."""
    options: list[str] = Field(default=[])
    """Further options of sbatch, such as `["--exclude=node7"]`."""
    poll_s: float = Field(default=10.0, gt=0)
    """Seconds between two queries of the job queue."""

    def gpu_counts(self) -> list[float]:
        return [_count(self.gpus)]

    @model_validator(mode="after")
    def _warning(self) -> Slurm:
        if self.warning_s >= 60 * self.time_limit_min:
            raise ValueError(f"warning_s = {self.warning_s} must be below the time limit of {self.time_limit_min} min")
        return self


SOURCES: dict[str, type[WorkerSource]] = {
    "ray": Ray, "kubernetes": Kubernetes, "skypilot": SkyPilot, "slurm": Slurm,
}  # fmt: skip
