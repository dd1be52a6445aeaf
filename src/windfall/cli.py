"""The commands. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from windfall import __version__, config
from windfall.errors import WindfallError, nearest

app = typer.Typer(
    help="Reinforcement learning of language models on whatever GPUs are cheap right now.",
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
)  # fmt: skip
bench = typer.Typer(help="Measure, on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe to run.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=value", help="Override a recipe key.")]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate chain (PEM) for workers that dial https.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its private key.")]
OUTSIDE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP}
"""What the file system refuses a command, at whatever file: no fault of the program."""
TOKEN = "A file that holds the run's token"


def _visible(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Warns of a token that the process list shows."""
    from windfall.link.auth import token_or_path

    source = context.get_parameter_source(str(parameter.name))
    if (
        value is not None
        and source is not None
        and source.name == "COMMANDLINE"
        and isinstance(token_or_path(value), str)
    ):
        said = "every user of this machine can read this token in the process list; give a file, or set WINDFALL_TOKEN"
        print(f"warning: --token: {said}", file=sys.stderr)
    return value


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
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token: Annotated[
        str | None,
        typer.Option(metavar="FILE", envvar="WINDFALL_TOKEN", callback=_visible, help=f"{TOKEN}; default: a new one."),
    ] = None,
) -> None:
    """Train by a recipe: starts controller, trainer and workers. Ctrl-C saves and says how to go on."""
    from windfall.launch import invitation, start, supervisor
    from windfall.run_folder import new_folder

    parsed = config.load(recipe, [*(set or []), *_tls(tls_cert, tls_key)])
    known = invitation.token(token) if token is not None else None
    said = supervisor.check(parsed)
    if dry_run:
        print(config.dump(parsed))
        print(f"# {said}")
        print("# all of the above is valid; nothing was started")
        return
    print(said)
    start.train(parsed, new_folder(parsed), token=known)


@app.command(epilog="Example: windfall resume runs/demo --set run.steps=100")
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was stopped or killed.")],
    set: Overrides = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Go on with a run that was stopped or killed: from its last checkpoint and its journal, with nothing lost."""
    from windfall.launch import start

    start.resume(config.load(_run_recipe(run), [*(set or []), *_tls(tls_cert, tls_key)]), run)


@app.command(epilog="Example: windfall token demo.token")
def token(file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to make.")]) -> None:
    """Make a token, to start workers before their run: give the file to `windfall train` and `windfall worker`."""
    from windfall.link.auth import make_token

    if file.exists():
        raise WindfallError("this file is there already", where=str(file), fix="Give another name, or use it as it is.")
    make_token(file)
    print(f"{file}: a token, readable by its owner only. Give this file as --token to the run and to its workers.")


@app.command(epilog="Example: windfall worker --join http://10.0.0.5:8700 --token demo.token --lease spot --price 2.63")
def worker(
    join: Annotated[str, typer.Option(metavar="URL", help="The controller's address; the run shows it at its start.")],
    token: Annotated[
        str, typer.Option(metavar="FILE", envvar="WINDFALL_TOKEN", callback=_visible, help=f"{TOKEN}, or will.")
    ],
    name: Annotated[str, typer.Option(help="What to call it; default: host and process number.")] = "",
    lease: Annotated[str, typer.Option(help="reserved, spot or borrowed.")] = "spot",
    price: Annotated[float, typer.Option(min=0.0, help="In $ per hour.")] = 0.0,
    region: Annotated[str, typer.Option(help="Where it is.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores.")] = 0,
    memory: Annotated[float, typer.Option(min=0.01, max=0.95, help="Share of free memory for the KV cache.")] = 0.4,
    clouds: Annotated[
        str, typer.Option(help="Whose spot warnings to watch: auto, none, or of aws,gcp,azure.")
    ] = "auto",
    tls_ca: Annotated[Path | None, typer.Option(help="Trust this certificate (PEM), too.")] = None,
    patience: Annotated[float, typer.Option(min=1.0, help="Seconds without a controller until it gives up.")] = 300.0,
) -> None:
    """Join a run from anywhere, at any time, and leave it in any way."""
    from windfall.launch.processes import worker as joining

    joining.main(
        join, token, name=name, kind=_one_of(lease, "--lease", ("reserved", "spot", "borrowed")),
        device=_one_of(device, "--device", ("auto", "cpu", "cuda")), region=region, price_usd_per_h=price,
        threads=threads, share=memory, clouds=clouds, ca=tls_ca, patience_s=patience,
    )  # fmt: skip


@app.command(epilog="Example: windfall top runs/demo")
def top(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, in progress or ended.")],
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
) -> None:
    """The fleet of a run: live while it runs, else as it was at the end."""
    from windfall.views import top

    _run_recipe(run)
    top.show(run, once=once)


@app.command(epilog="Example: windfall sim recipes/sim-harvest.toml --compare colocated,restart,windfall --out figures")
def sim(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE.toml | calibrate FILE... | chaos", help="What to simulate; or measurements."),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Simulate this run from its own log; predicted beside measured.")
    ] = None,
    fit: Annotated[
        str, typer.Option(help="Of --replay: fit to the first-half of the steps and predict the others, or to all.")
    ] = "first-half",
    seeds: Annotated[int, typer.Option(min=1, help="Simulate so many, from run.seed on: other tasks and traces.")] = 1,
    compare: Annotated[str, typer.Option(help="Variants, with commas between them, or all.")] = "windfall",
    out: Annotated[Path | None, typer.Option(help="Write figures (JSON, CSV, SVG) and event logs there.")] = None,
    set: Overrides = None,
    gpu: Annotated[str, typer.Option(help="Of calibrate: the GPU that was measured, such as H100.")] = "",
    to: Annotated[str, typer.Option(help="Of calibrate: scale to this GPU by published figures.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of chaos: the first seed.")] = 0,
    faults: Annotated[int, typer.Option(min=1, help="Of chaos: how many hit each run.")] = 500,
) -> None:
    """What a run would cost and yield, in virtual time: the real controller and policies with simulated machines."""
    if replay is not None:
        from windfall.sim.replay import command as replays

        if what:
            raise WindfallError("a run is replayed by its own recipe", where="--replay", fix=f"Leave out {what[0]}.")
        replays.main(replay, fit=fit, out=out, seeds=seeds)
        return
    if not what:
        raise WindfallError("nothing to simulate", where="windfall sim", fix="Give a recipe, or --replay RUN.")
    if what[0] == "calibrate":
        from windfall.sim.calibrate import command as calibrate

        calibrate.main([Path(w) for w in what[1:]], gpu=gpu, to=to)
        return
    if what[0] == "chaos":
        from windfall.sim.chaos import command as chaos_command

        if len(what) > 1:
            raise WindfallError(f"chaos takes no {what[1]!r}", where="windfall sim chaos", fix="Its runs are its own.")
        chaos_command.main(seeds=seeds, seed=seed, faults=faults, out=out)
        return
    from windfall.sim.report import command

    if len(what) > 1:
        raise WindfallError(f"one recipe at a time, not {len(what)}", where="windfall sim")
    command.main(config.load(Path(what[0]), set), seeds=seeds, names=compare, out=out)


@app.command(name="_controller", hidden=True)
def _controller(run: Path) -> None:
    from windfall.launch.processes import controller

    raise typer.Exit(controller.main(run))


@app.command(name="_trainer", hidden=True)
def _trainer(run: Path) -> None:
    from windfall.launch.processes import trainer

    raise typer.Exit(trainer.main(run))


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
    from windfall.commands import offline

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
    from windfall.commands import offline
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
    from windfall.commands import bench_engine as measure

    measure.engine(model, requests=requests, max_tokens=max_tokens, threads=threads)


def _tls(cert: Path | None, key: Path | None) -> list[str]:
    """The options as recipe keys."""
    given = {"fleet.tls_cert": cert, "fleet.tls_key": key}
    return [f"{name}={json.dumps(str(path.resolve()))}" for name, path in given.items() if path is not None]


def _one_of(word: str, where: str, known: tuple[str, ...]) -> str:
    if word not in known:
        raise WindfallError(f"{word!r} is none of them", where=where, fix=nearest(word, known))
    return word


def _run_recipe(run: Path) -> Path:
    if run.is_file():
        raise WindfallError("this is a file, not a run", where=str(run), fix="Give a folder such as runs/demo.")
    if not run.is_dir():
        try:
            near = nearest(run.name, [p.name for p in run.parent.iterdir() if p.is_dir()])
        except OSError:  # no such parent, or not for us to read
            near = ""
        raise WindfallError("no such run", where=str(run), fix=near)
    if not (run / "recipe.toml").is_file():
        raise WindfallError("not a run: it has no recipe.toml", where=str(run), fix="Give a folder such as runs/demo.")
    return run / "recipe.toml"


def _refuse(error: WindfallError) -> None:
    Console(stderr=True).print(f"[bold red]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    sys.exit(2)


def main() -> None:
    """The entry point: an error that a person can put right is shown without a traceback."""
    try:
        app()
    except WindfallError as e:
        _refuse(e)
    except OSError as e:
        if e.errno not in OUTSIDE or not e.filename:
            raise  # unexpected: whoever mends it needs the traceback
        _refuse(WindfallError(str(e.strerror), where=str(e.filename)))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
