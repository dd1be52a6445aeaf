"""The jobs of a service on disk. A kill at any moment loses no job that was accepted.

    FOLDER/jobs/NAME/          the folder of a run (run_folder.py), and
    FOLDER/jobs/NAME/job.json  the job: written last when a job is submitted, and replaced as a whole afterwards

    queued ──▶ running ──▶ done | stopped | failed | over_budget
       ▲          │                     │
       └──────────┴──── service ended ──┴── resumed by a user (not a job that is done)

Rules:
- A job exists if its job.json exists. A folder without one is what a kill left of a submission; it is removed.
- A job that was running when the service ended continues when the service starts again, before those in the queue.
- `ending` is written before a job is stopped, so that a kill in between does not start it again.
- A job that is removed is first renamed, so a kill leaves it whole or leaves a folder that the next start removes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Literal, get_args

import msgspec

from windfall.errors import WindfallError, nearest, unwritable

State = Literal["queued", "running", "done", "stopped", "failed", "over_budget"]
STATES: tuple[str, ...] = get_args(State)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}")


class Job(msgspec.Struct, kw_only=True):
    name: str
    number: int
    """Order of submission."""
    state: State = "queued"
    share: float = 1.0
    priority: int = 0
    max_usd: float = 0.0
    """0: no limit."""
    deadline_s: float = 0.0
    """Unix time; 0: none."""
    directory: str = ""
    """Where the job was submitted: modules of its environment may be there."""
    submitted_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    steps: int = 0
    """The number of steps in its recipe."""
    step: int = 0
    """The last one that the service has seen."""
    reason: str = ""
    """Why it is in this state."""
    ending: State | Literal[""] = ""
    """The state that it gets when its processes have ended; empty: it shall run."""

    @property
    def active(self) -> bool:
        return self.state in ("queued", "running")


BEGUN = ".begun-"
"""Name of the file that marks a job's folder as unfinished, before the name of the job. Only such folders are removed:
others may be somebody's own."""


GONE = ".gone-"
"""How the names of folders of removed jobs begin."""


class Store:
    """Methods that write may be called in another thread, one at a time. None but `load` changes `jobs`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "jobs"
        self.jobs: dict[str, Job] = {}
        self.unsaved: set[str] = set()
        """Jobs whose last change could not be written."""

    def load(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for marker in self.folder.glob(f"{BEGUN}*"):  # a kill interrupted the submission
            self.abandon(marker.name.removeprefix(BEGUN))
        for gone in self.folder.glob(f"{GONE}*"):  # a kill interrupted the removal
            shutil.rmtree(gone, ignore_errors=True)
        for path in sorted(self.folder.iterdir()):
            if not (path / "job.json").is_file():
                continue
            try:
                job = msgspec.json.decode((path / "job.json").read_bytes(), type=Job)
            except (OSError, msgspec.DecodeError) as e:  # ValidationError is a DecodeError
                job = Job(name=path.name, number=0, state="failed", reason=f"{path / 'job.json'} is damaged: {e}")
            self.jobs[path.name] = job

    def get(self, name: str) -> Job:
        if name not in self.jobs:
            raise WindfallError(f"there is no job {name!r}", where="jobs", fix=nearest(name, self.jobs))
        return self.jobs[name]

    def path(self, name: str) -> Path:
        return self.folder / name

    def check_name(self, name: str) -> None:
        if not NAME.fullmatch(name):
            fix = "Use up to 48 letters, digits, '.', '_' and '-', such as --name arithmetic-2."
            raise WindfallError(f"{name!r} cannot be the name of a job", where="--name", fix=fix)
        if name in self.jobs:
            fix = f"Choose another --name, or continue it: windfall resume {name} --on URL"
            raise WindfallError(f"there is a job {name!r} already ({self.jobs[name].state})", where="--name", fix=fix)

    def begin(self, name: str) -> None:
        """A folder for a new job of this name is about to be created. Until `record`, it counts as unfinished."""
        self.check_name(name)
        if self.path(name).exists():
            fix = "Choose another --name, or remove it."
            raise WindfallError("there is something that is no job", where=str(self.path(name)), fix=fix)
        try:
            self._marker(name).touch()
        except OSError as e:
            raise unwritable("the job", self.folder, e, "Free disk space, then submit it again.") from e

    def record(self, job: Job) -> None:
        """Write a new job, whose folder is complete. Raises WindfallError if that fails."""
        try:
            self._write(job)
            self._marker(job.name).unlink(missing_ok=True)
        except OSError as e:
            raise unwritable("the job", self.path(job.name), e, "Free disk space, then submit it again.") from e

    def abandon(self, name: str) -> None:
        """Remove what was created since `begin`, unless the job was recorded."""
        if not (self.path(name) / "job.json").is_file():
            shutil.rmtree(self.path(name), ignore_errors=True)
        self._marker(name).unlink(missing_ok=True)

    def set_aside(self, name: str) -> Path:
        """Rename the folder of a job that is no longer in `jobs`. Returns its path, which may be deleted."""
        gone = self.folder / f"{GONE}{secrets.token_hex(4)}-{name}"
        try:
            self.path(name).rename(gone)
        except OSError as e:
            fix = "Check the permissions of the folder, then try again."
            raise WindfallError(f"cannot remove the job: {e.strerror or e}", where=str(self.path(name)), fix=fix) from e
        self.unsaved.discard(name)
        return gone

    def _marker(self, name: str) -> Path:
        return self.folder / f"{BEGUN}{name}"

    def save(self, job: Job) -> None:
        """Write a change of a job. If that fails, the change holds in memory and `retry` writes it later."""
        try:
            self._write(job)
            self.unsaved.discard(job.name)
        except OSError:
            self.unsaved.add(job.name)

    def retry(self) -> None:
        for name in list(self.unsaved):
            self.save(self.jobs[name])

    def _write(self, job: Job) -> None:
        write(self.path(job.name) / "job.json", msgspec.json.encode(job))

    def next_number(self) -> int:
        return 1 + max((job.number for job in self.jobs.values()), default=0)

    def waiting(self) -> list[Job]:
        """Those that shall run and do not, in the order in which they start."""
        found = [job for job in self.jobs.values() if job.state == "queued" and not job.ending]
        return sorted(found, key=lambda job: (-job.priority, not job.started_s, job.number))


def write(path: Path, data: bytes) -> None:
    """Replace a file as a whole, also if the machine loses its power."""
    temporary = path.with_name(f".{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
