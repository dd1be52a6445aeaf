"""The section [fleet.slurm]."""

from __future__ import annotations

from pydantic import Field, model_validator

from windfall.recipe.section_base import Count
from windfall.recipe.worker_source import WorkerSource, gpu_count


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
        return [gpu_count(self.gpus)]

    @model_validator(mode="after")
    def _warning(self) -> Slurm:
        if self.warning_s >= 60 * self.time_limit_min:
            raise ValueError(f"warning_s = {self.warning_s} must be below the time limit of {self.time_limit_min} min")
        return self
