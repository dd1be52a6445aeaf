"""`windfall push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windfall.run.commands.options import Policy


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as runs/demo.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the hub, as OWNER/NAME.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step whose checkpoint is pushed. Default: the newest.")
    ] = None,
    policy: Policy = "",
    merged: Annotated[
        bool, typer.Option("--merged", help="Push the base with the adapter merged into it, not the adapter.")
    ] = False,
    base: Annotated[
        str, typer.Option(metavar="OWNER/NAME", help="Name the base model by its id on the hub. Default: from the run.")
    ] = "",
    public: Annotated[
        bool, typer.Option("--public", help="Make a repository that is created here public, not private.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what the repository holds, whatever it is.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder that would be pushed; use no network.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder that --dry-run creates. Default: exports/push-STEP in the run's folder.")
    ] = None,
) -> None:
    """Push the model of a run to the Hugging Face hub, with a model card written from the run.

    The token is that of `hf auth login`, or HF_TOKEN. After an interruption, give the same command again: files that
    are already there are not sent again, and the repository shows nothing before it is complete.
    """
    from windfall.errors import WindfallError
    from windfall.hub.contents import contents
    from windfall.hub.repository import Repository
    from windfall.run_folder import named, recipe_file

    if out is not None and not dry_run:
        raise WindfallError("only for --dry-run", where="--out", fix="Add --dry-run, or leave out --out.")
    run = named(run)
    recipe_file(run)
    to = Repository(repo, private=not public, overwrite=overwrite)
    if not dry_run:
        to.check()
    with contents(run, repo, step=step, policy=policy, merged=merged, base=base) as pushed:
        if dry_run:
            print(f"wrote {pushed.write(out)}: this is what would be pushed to {repo}")
        else:
            print(to.send(pushed))
