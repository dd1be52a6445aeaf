"""Workers from clouds through SkyPilot: [fleet.skypilot]."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from windfall.errors import WindfallError
from windfall.providers.source_part import Employer, SourcePart

if TYPE_CHECKING:
    from windfall.providers.base import Provider
    from windfall.providers.skypilot.section import SkyPilot
    from windfall.recipe.sections import Recipe


class SkyPilotPart(SourcePart):
    name = "providers.skypilot"
    logs = "sky jobs logs"
    needs_ports = True

    def section(self) -> tuple[str, type[SkyPilot]]:
        from windfall.providers.skypilot.section import SkyPilot

        return "fleet.skypilot", SkyPilot

    def check(self, source: SkyPilot) -> None:
        from windfall.providers.job_queue import check_program
        from windfall.providers.skypilot.provider import FIX

        check_program("sky", where="fleet.skypilot", fix=FIX)
        if not (source.setup or source.image):
            fix = (
                "Set fleet.skypilot.setup to the commands that install it, or fleet.skypilot.image to an image with it."
            )
            raise WindfallError("new machines would not have windfall", where="fleet.skypilot", fix=fix)

    def provider(self, source: SkyPilot, run: Employer) -> Provider:
        from windfall.providers.job_queue import JobProvider
        from windfall.providers.skypilot.provider import CANCEL_S, POLL_S, SkyPilotQueue

        queue = SkyPilotQueue(source=source, run=run)
        return JobProvider(queue, source, poll_s=POLL_S, grace_s=CANCEL_S, on_event=run.on_event)

    def preview(self, source: SkyPilot, recipe: Recipe, *, label: str, url: str) -> str:
        from windfall.providers.skypilot.provider import task

        del recipe
        line = f"# for each: sky jobs launch --name {label}-sky1-1 --secret WINDFALL_TOKEN sky1.1.yaml"
        return f"\n{line}\n{json.dumps(task(source, url=url, worker='sky1.1'), indent=2)}\n"  # JSON is YAML


PART = SkyPilotPart()
