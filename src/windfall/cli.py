"""The commands. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from windfall import __version__, config
from windfall.errors import WindfallError

app = typer.Typer(
    help="Reinforcement learning of language models on whatever GPUs are cheap right now.",
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
)  # fmt: skip
bench = typer.Typer(help="Measure, on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe to run.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=value", help="Override a recipe key.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"windfall {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    del version


@app.command(epilog="Example: windfall train recipes/demo.toml --set run.steps=50 --set train.lr=3e-4")
def train(
    recipe: RecipeFile,
    set: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the recipe, do nothing.")] = False,
) -> None:
    """Train by a recipe. Ctrl-C saves and says how to go on."""
    from windfall import launch

    parsed = config.load(recipe, set)
    launch.check(parsed)
    if dry_run:
        print(config.dump(parsed))
        print("# all of the above is valid; nothing was started")
        return
    launch.train(parsed, launch.new_folder(parsed))


@app.command(epilog="Example: windfall resume runs/demo --set run.steps=100")
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was stopped or killed.")],
    set: Overrides = None,
) -> None:
    """Go on with a run from its last checkpoint: the same weights, bit for bit, as if it had never stopped."""
    from windfall import launch

    parsed = config.load(_run_recipe(run), set)
    launch.train(parsed, run, resume=True)


@app.command(name="eval", epilog="Example: windfall eval runs/demo --tasks 200 --show 3")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a run (its newest), a model.")],
    recipe: Annotated[Path | None, typer.Option(help="Whose environment to use; default: the run's own.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="How many held-out tasks.")] = 200,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Default: the recipe's; 0 is greedy.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Print so many responses.")] = 0,
    set: Overrides = None,
) -> None:
    """Measure a checkpoint's reward on tasks that no training step draws."""
    from windfall import offline

    path, found = offline.find_checkpoint(checkpoint)
    source = recipe or found
    if source is None:
        raise WindfallError("no recipe beside this checkpoint", where=checkpoint, fix="Give one with --recipe.")
    offline.evaluate(path, config.load(source, set), tasks=tasks, temperature=temperature, show=show)


@app.command(epilog="Example: windfall generate tiny --prompt '12+34-5=' --n 4")
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="tiny, smollm2-135m, a folder, a run or a hub id.")],
    prompt: Annotated[list[str], typer.Option(help="May be given several times.")],
    n: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Sample responses, streamed as they are made."""
    from windfall import offline
    from windfall.types import Sampling

    path, _ = offline.find_checkpoint(model)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    offline.generate(path, prompt, n=n, max_tokens=max_tokens, sampling=sampling, seed=seed)


@bench.command(name="engine", epilog="Example: windfall bench engine --model smollm2-135m --requests 32")
def bench_engine(
    model: Annotated[str, typer.Option(help="tiny, smollm2-135m, a folder or a hub id.")] = "tiny",
    requests: Annotated[int, typer.Option(min=1)] = 64,
    max_tokens: Annotated[int, typer.Option(min=4, help="The longest response.")] = 160,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores.")] = 0,
) -> None:
    """The engine beside transformers' generate: useful tokens/s, equal and uneven lengths."""
    from windfall import measure

    measure.engine(model, requests=requests, max_tokens=max_tokens, threads=threads)


def _run_recipe(run: Path) -> Path:
    if not run.is_dir():
        from windfall.errors import nearest

        near = nearest(run.name, [p.name for p in run.parent.iterdir() if p.is_dir()]) if run.parent.is_dir() else ""
        raise WindfallError("no such run", where=str(run), fix=near)
    if not (run / "recipe.toml").is_file():
        raise WindfallError("not a run: it has no recipe.toml", where=str(run), fix="Give a folder such as runs/demo.")
    return run / "recipe.toml"


def main() -> None:
    """The entry point: an error that a person can put right is shown without a traceback."""
    try:
        app()
    except WindfallError as e:
        Console(stderr=True).print(f"[bold red]error[/] {escape(str(e))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
