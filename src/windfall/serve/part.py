"""The inference server: `windfall serve`."""

from __future__ import annotations

from collections.abc import Sequence

from windfall.parts import Command, ProgramPart


class ServePart(ProgramPart):
    name = "serve"

    def commands(self) -> Sequence[Command]:
        from windfall.serve.command import serve

        example = "serve tiny --port 8000 --lend http://10.0.0.5:8700 --token demo.token"
        return [Command(panel="Add machines", example=example, function=serve)]


PART = ServePart()
