"""A whole run on a Ray cluster: `windfall ray`."""

from __future__ import annotations

from collections.abc import Sequence

from windfall.parts import Command, ProgramPart


class OnRayPart(ProgramPart):
    name = "on_ray"
    needs = ("providers.ray",)

    def commands(self) -> Sequence[Command]:
        from windfall.on_ray.command import ray

        return [Command(panel="Train", example="ray recipes/demo.toml --gpus 0", function=ray)]


PART = OnRayPart()
