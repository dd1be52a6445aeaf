"""Workers on a Ray cluster: [fleet.ray]."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from windfall.providers.source_part import Employer, SourcePart

if TYPE_CHECKING:
    from windfall.providers.base import Provider
    from windfall.providers.ray.section import Ray
    from windfall.recipe.sections import Recipe


class RayPart(SourcePart):
    name = "providers.ray"
    logs = "Ray's logs, and workers/ray*.log"

    def section(self) -> tuple[str, type[Ray]]:
        from windfall.providers.ray.section import Ray

        return "fleet.ray", Ray

    def check(self, source: Ray) -> None:
        from windfall.providers.ray.provider import check_installed

        del source
        check_installed()

    def provider(self, source: Ray, run: Employer) -> Provider:
        from windfall.providers.ray.provider import RayProvider

        return RayProvider(source, run)

    def preview(self, source: Ray, recipe: Recipe, *, label: str, url: str) -> str:
        from windfall.providers.worker_command import arguments

        del recipe, label
        shown = {"ray.init": {"address": source.address}, "actor": source.of_actor()}
        line = " ".join(["windfall", *arguments(source, url, "ray1.1")])
        return f"; one actor each\n{json.dumps(shown, indent=2)}\n# in each actor:\n# {line}\n"


PART = RayPart()
