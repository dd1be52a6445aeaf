"""Workers on a Slurm cluster: [fleet.slurm]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windfall.providers.source_part import Employer, SourcePart

if TYPE_CHECKING:
    from windfall.providers.base import Provider
    from windfall.providers.slurm.section import Slurm
    from windfall.recipe.sections import Recipe


class SlurmPart(SourcePart):
    name = "providers.slurm"
    logs = "workers/slurm-*.log"

    def section(self) -> tuple[str, type[Slurm]]:
        from windfall.providers.slurm.section import Slurm

        return "fleet.slurm", Slurm

    def check(self, source: Slurm) -> None:
        from windfall.providers.job_queue import check_program
        from windfall.providers.slurm.provider import FIX

        del source
        check_program("sbatch", where="fleet.slurm", fix=FIX)

    def provider(self, source: Slurm, run: Employer) -> Provider:
        from windfall.providers.job_queue import JobProvider
        from windfall.providers.slurm.provider import SlurmQueue

        queue = SlurmQueue(source=source, run=run)
        return JobProvider(queue, source, poll_s=source.poll_s, grace_s=source.drain_s, on_event=run.on_event)

    def preview(self, source: Slurm, recipe: Recipe, *, label: str, url: str) -> str:
        from windfall.providers.slurm.provider import script

        del recipe
        names = [f"slurm{k + 1}.1" for k in range(source.workers)]
        text = script(source, label=label, url=url, workers=names, log="workers/slurm-%A_%a.log")
        return f"; sbatch with this file\n{text}"


PART = SlurmPart()
