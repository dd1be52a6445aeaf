"""Results leave the machine: `windfall push` sends the model of a run to the Hugging Face hub, with a model card."""

from __future__ import annotations

from collections.abc import Sequence

from windfall.parts import Command, ProgramPart


class HubPart(ProgramPart):
    name = "hub"

    def commands(self) -> Sequence[Command]:
        from windfall.hub.command import push

        return [Command(panel="Use the result", example="push runs/demo owner/name --dry-run", function=push)]


PART = HubPart()
