"""The section [fleet]: the workers of a run, where they come from, and when they count as lost."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from windfall.recipe.section_base import Count, FilePath, Section, with_parts
from windfall.recipe.worker_source import WorkerSource


@with_parts("fleet.")
class Fleet(Section):
    local: bool = True
    """Let the trainer's own engine generate at the start of every step, and for the whole step if there is no other
    worker. With `false`, only workers generate."""
    trainer_price_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of the trainer's machine in $ per hour. 0 looks it up by device in the built-in price table."""
    workers: int = Field(default=0, ge=0)
    """Worker processes that the run starts on this machine, and restarts when they end. Each uses one GPU, the one with
    the fewest processes of this run. Other workers may join."""
    workers_max: int = Field(default=0, ge=0)
    """Upper limit for autoscaling of the workers on this machine. 0 disables it; otherwise the run starts with
    `workers` and scales between 0 and this limit by measured throughput and price."""
    cooldown_s: float = Field(default=60.0, ge=0)
    """Shortest time in seconds between two autoscaling changes of the same source of workers."""
    max_usd_per_h: float = Field(default=0.0, ge=0)
    """Price ceiling for autoscaling: the workers that this run starts, on this machine and elsewhere, cost at most this
    much together in $ per hour. 0 sets no ceiling. Sources elsewhere then need a price in the recipe."""
    borrowed_max: int = Field(default=64, ge=0)
    """Upper limit for the lenders (`windfall serve --lend`) that the run uses at once. It uses those whose owners have
    needed their memory least, and only as many as the step needs. 0: lenders are refused."""
    worker_threads: Count = 1
    """CPU threads of each worker on this machine."""
    worker_memory: float = Field(default=0.0, ge=0, lt=1)
    """Share of a device's free memory for the KV cache of each worker. 0 uses 0.4, divided by the number of workers
    that share a GPU."""
    kind: Literal["reserved", "spot", "borrowed"] = "reserved"
    """Lease terms of the workers on this machine."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of one worker on this machine in $ per hour. 0 looks it up by device in the built-in price table."""
    host: str = "127.0.0.1"
    """Address on which the controller and the weight server listen. "0.0.0.0" lets other machines join."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the controller. 0 chooses a free one."""
    weights_port: int = Field(default=0, ge=0, le=65535)
    """Port of the weight server. 0 chooses a free one."""
    max_workers: Count = 2000
    """Upper limit for the workers in the fleet; further workers are refused."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Seconds between two heartbeats of a worker."""
    suspect_s: float = Field(default=3.0, gt=0)
    """Seconds without a heartbeat after which a worker gets no new work. Must be above `heartbeat_s`."""
    gone_s: float = Field(default=8.0, gt=0)
    """Seconds without a heartbeat after which a worker counts as lost and its responses move to other workers. Must be
    above `suspect_s`."""
    stalled_s: float = Field(default=60.0, gt=0)
    """Seconds without progress after which a worker counts as lost although it sends heartbeats: it has work but makes
    no engine step, or it pulls weights but receives no bytes."""
    tls_cert: FilePath | None = None
    """Certificate chain (PEM) of the controller and the weight server. If set, workers connect over https."""
    tls_key: FilePath | None = None
    """Private key (PEM) of `tls_cert`. Set both or neither."""

    @property
    def sources(self) -> dict[str, WorkerSource]:
        """The systems other than this machine that the run starts workers on, by name."""
        return {name: value for name, value in self if isinstance(value, WorkerSource)}

    @model_validator(mode="after")
    def _consistent(self) -> Fleet:
        if not self.heartbeat_s < self.suspect_s < self.gone_s:
            raise ValueError(
                "heartbeat_s < suspect_s < gone_s must hold: each limit must span several intervals of the previous one"
            )
        if self.workers_max and not 1 <= self.workers <= self.workers_max:
            raise ValueError(f"workers = {self.workers} must be from 1 to workers_max = {self.workers_max}")
        if (most := max(self.workers, self.workers_max) + self.local) > self.max_workers:
            raise ValueError(
                f"max_workers = {self.max_workers} refuses some of {most} workers that this run starts on this machine"
                f"{' (the engine of the trainer is one)' if self.local else ''}. Raise it, or start fewer."
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        return self
