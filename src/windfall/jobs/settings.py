"""The file of a fleet, such as fleet.toml: which devices the jobs share, and within which limits."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from windfall import devices
from windfall.devices import Place
from windfall.errors import WindfallError, nearest
from windfall.recipe.section_base import Count, FilePath, Section
from windfall.turns.server import LIMIT_S
from windfall.turns.sharing import SLICE_S


class JobLimits(Section):
    """Limits for the processes that the environment and the agents of one job start. A job beyond them fails, alone."""

    memory_gb: float = Field(default=0.0, ge=0)
    """Upper limit for their memory together. 0: this machine's memory divided by `jobs_at_once`."""
    processes: Count = 256
    """Upper limit for their number."""


class FleetSettings(Section):
    host: str = "127.0.0.1"
    """Address on which the service and the controllers of the jobs listen. "0.0.0.0" lets other machines join."""
    port: int = Field(default=8765, ge=0, le=65535)
    """Port of the service. 0 chooses a free one."""
    tls_cert: FilePath | None = None
    """Certificate chain (PEM). With it, the service and the controllers of all jobs listen with TLS only. A relative
    path is relative to this file."""
    tls_key: FilePath | None = None
    """Private key (PEM) of `tls_cert`. Set both or neither."""
    folder: FilePath = Path("fleet")
    """Directory of the service, with the folder of every job. A relative one is relative to this file."""
    devices: Literal["auto", "cpu"] = "auto"
    """The devices of this machine that the jobs share. auto: all GPUs, or the CPU if there are none."""
    cpu_slots: Count = 2
    """Number of devices on a machine without GPUs: each is one thread of the CPU."""
    trainers: list[str] = Field(default_factory=list)
    """Devices on which trainers work, such as `["gpu0"]`. Empty: the first one. Workers use all others, and those of
    the trainers too if the recipe has fleet.local = false and there is no other device."""
    jobs_at_once: Count = 4
    """Upper limit for the jobs that run at the same time; the others wait in the queue."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of each device of this machine in $ per hour. 0: that of the built-in table; a CPU costs nothing."""
    slice_s: float = Field(default=SLICE_S, gt=0)
    """Seconds that a rollout worker keeps a device while another job waits for it."""
    turn_limit_s: float = Field(default=LIMIT_S, gt=0)
    """Upper limit (seconds) for a turn while other jobs wait; then its process is killed. A turn may be a pass over the
    samples of one message, a checkpoint, or the building of an engine or of a trainer's state."""
    co_running: bool = False
    """Let two jobs compute on one GPU at the same time where measurements show that both together are faster."""
    trainer_state_gb: Literal["auto"] | Annotated[float, Field(ge=0)] = "auto"
    """Upper limit for the memory of all trainers' states on one device. Those that do not fit wait in the memory of the
    host, or on its disk, until it is their turn. 0: they all fit. auto: by the memory of the GPU that is free besides
    weights and KV caches; on a CPU they all fit."""
    limits: JobLimits = JobLimits()

    @model_validator(mode="after")
    def _whole(self) -> FleetSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        return self

    @model_validator(mode="after")
    def _finite(self) -> FleetSettings:
        numbers = (*self.model_dump().values(), self.limits.memory_gb)
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            raise ValueError("all numbers must be finite")
        return self


def load(path: Path) -> FleetSettings:
    """Read the file of a fleet. Its paths become absolute."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as e:
        fix = "Create it; an empty file is a fleet of all devices of this machine. Keys: docs/jobs.md."
        raise WindfallError(f"cannot read the fleet's file: {e.strerror or e}", where=str(path), fix=fix) from e
    except ValueError as e:  # TOMLDecodeError and UnicodeDecodeError
        raise WindfallError(f"not valid TOML: {e}", where=str(path), fix="Correct the syntax there.") from e
    if {"model", "env"} & data.keys():
        fix = f"Train it with `windfall train {path}`, or give `windfall up` the file of a fleet (docs/jobs.md)."
        raise WindfallError("this is the recipe of a run, not the file of a fleet", where=str(path), fix=fix)
    try:
        found = FleetSettings.model_validate(data)
    except ValidationError as e:
        raise WindfallError("\n".join(map(_line, e.errors())), where=str(path), fix="Keys: docs/jobs.md.") from None
    here, paths = path.resolve().parent, {key: getattr(found, key) for key in ("folder", "tls_cert", "tls_key")}
    return found.model_copy(update={key: (here / value).resolve() for key, value in paths.items() if value})


def _line(error: Any) -> str:
    *path, last = [str(part) for part in error["loc"]] or [""]
    name = ".".join([*path, last])
    if error["type"] == "extra_forbidden":
        keys = (JobLimits if path == ["limits"] else FleetSettings).model_fields
        return f"unknown key '{name}'. {nearest(last, keys)}"
    message = error["msg"].removeprefix("Value error, ")
    return f"'{name}' = {error['input']!r}: {message}" if name else message


def places(settings: FleetSettings) -> tuple[list[Place], list[Place]]:
    """The devices of this machine, those of the trainers first; and those of the trainers."""
    gpus = [] if settings.devices == "cpu" else devices.gpu_places("auto")
    found = {f"gpu{n}": Place(device="cuda", gpu=place.gpu, name=f"gpu{n}") for n, place in enumerate(gpus)}
    found = found or {f"cpu{n}": Place(name=f"cpu{n}") for n in range(settings.cpu_slots)}
    names = settings.trainers or [next(iter(found))]
    for name in names:
        if name not in found:
            raise WindfallError(f"there is no device {name!r}", where="trainers", fix=nearest(name, found))
    trainers = [found[name] for name in dict.fromkeys(names)]
    return [*trainers, *(place for place in found.values() if place not in trainers)], trainers
