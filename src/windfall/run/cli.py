"""The command line. A command imports its modules only when it runs, so that `windfall --help` stays fast."""

from __future__ import annotations

import difflib
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from windfall import __version__, parts
from windfall.defaults import KV_SHARE
from windfall.errors import WindfallError, file_system_error, nearest
from windfall.run import submission
from windfall.run.commands.doctor import doctor
from windfall.run.commands.env_server import env_server
from windfall.run.commands.options import Json, Overrides, Policy, RecipeFile, service_ca_option, token_option
from windfall.run.commands.recipes import examples, new
from windfall.run.commands.recipes import recipe as recipe_keys
from windfall.run.submission import Submission
from windfall.types import LeaseKind


class _Commands(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`windfall help train` is `windfall train --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Suggest a command for one that does not exist; never one that the help does not show."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            shown = [name for name, command in self.commands.items() if not command.hidden]
            fix = parts.restore(args[0]) or nearest(args[0], shown)
            raise WindfallError(f"unknown command {args[0]!r}", where="windfall", fix=fix)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands, help="Train language models with reinforcement learning on GPUs that come and go.",
    no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
)  # fmt: skip
fleet = typer.Typer(help="Preview workers on clusters and clouds.", no_args_is_help=True)

JOB = "Options for a job of a service (windfall up)"

TrainerToken = Annotated[
    str,
    token_option(
        help="Copy of trainer.secret in the run's folder; it may be created after this command starts.",
        envvar="WINDFALL_TRAINER_TOKEN",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"windfall {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def train(
    recipe: RecipeFile,
    set: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print what differs from defaults; start nothing.")
    ] = False,
    token: Annotated[str | None, token_option("; by default a new one is created")] = None,
    trainer_token: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File that holds the secret for `windfall trainer`; by default a new one."),
    ] = None,
    on: Annotated[
        str,
        typer.Option(metavar="URL", rich_help_panel=JOB, help="Submit it as a job to the service at this address."),
    ] = "",
    name: Annotated[str, typer.Option(rich_help_panel=JOB, help="Name of the job. Default: run.name.")] = "",
    share: Annotated[
        float, typer.Option(min=0.01, rich_help_panel=JOB, help="Share of the devices, relative to other jobs.")
    ] = 1.0,
    priority: Annotated[
        int, typer.Option(rich_help_panel=JOB, help="Jobs with a higher one have the devices first.")
    ] = 0,
    max_usd: Annotated[
        float, typer.Option(min=0.0, rich_help_panel=JOB, help="Stop the job when its bill reaches this. 0: no limit.")
    ] = 0.0,
    deadline: Annotated[
        str, typer.Option(metavar="TIME", rich_help_panel=JOB, help='When it should end, as "2026-11-20T08:00".')
    ] = "",
    tls_ca: Annotated[Path | None, service_ca_option(JOB)] = None,
) -> None:
    """Train with a recipe: start a controller, a trainer and workers. Ctrl-C saves and shows how to resume."""
    from windfall.link import invitation
    from windfall.recipe.file import dump_recipe, load_recipe
    from windfall.run import recipe_check, start

    parsed = load_recipe(recipe, set)
    parsed.refuse_slots()
    if on and not dry_run:
        job = Submission(
            on=on, token=token, ca=tls_ca, name=name, share=share, priority=priority, max_usd=max_usd, deadline=deadline
        )
        submission.part().submit(parsed, job)
        return
    if not on:
        submission.refuse_options(name=name, share=share != 1.0, priority=priority, max_usd=max_usd, deadline=deadline)
    chosen = invitation.token(token) if token is not None else None
    report = recipe_check.check(parsed)
    if dry_run:  # what is printed is a recipe itself
        print(dump_recipe(parsed, all_keys=False))
        print(f"# {report}\n# checked: {recipe_check.CHECKED}")
        print(f"# not checked: {recipe_check.not_checked(parsed)}; nothing was started")
        return
    print(report)
    secret = invitation.token(trainer_token) if trainer_token is not None else None
    raise typer.Exit(start.train(parsed, start.new_folder(parsed), token=chosen, secret=secret))


def demo(set: Overrides = None) -> None:
    """Train a tiny model for about two minutes on a CPU, while its workers are killed and come back."""
    from windfall.recipe import shipped

    train(shipped.root() / "recipes" / "demo.toml", set)


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that was stopped or killed; or a job.")],
    set: Overrides = None,
    on: Annotated[
        str, typer.Option(metavar="URL", rich_help_panel=JOB, help="Address of the service whose job RUN is.")
    ] = "",
    token: Annotated[
        str | None, token_option(help="File with the fleet's token, or the job's.", envvar="", panel=JOB)
    ] = None,
    max_usd: Annotated[
        float | None, typer.Option(min=0.0, rich_help_panel=JOB, help="New limit for the bill of the job.")
    ] = None,
    tls_ca: Annotated[Path | None, service_ca_option(JOB)] = None,
) -> None:
    """Resume a run that was stopped or killed, from its last checkpoint and its journal. Nothing is lost."""
    from windfall.recipe.file import load_recipe
    from windfall.run import start
    from windfall.run_folder import named, recipe_file

    if on:
        submission.part().resume(str(run), on, token, tls_ca, max_usd)
        return
    submission.refuse_options(token=token, max_usd=max_usd is not None)
    run = named(run)
    raise typer.Exit(start.resume(load_recipe(recipe_file(run), set), run))


def token(file: Annotated[Path, typer.Argument(metavar="FILE", help="File to create.")]) -> None:
    """Create a token, so that workers can start before their run. Give the file to `train` and `worker` as --token."""
    from windfall.link.auth import make_token

    if file.exists():
        raise WindfallError("this file already exists", where=str(file), fix="Choose another name, or use this file.")
    make_token(file)
    print(f"created {file}, readable by its owner only; give it as --token to the run and to its workers")


def worker(
    join: Annotated[str, typer.Option(metavar="URL", help="Address of the controller; the run prints it at startup.")],
    token: Annotated[str, token_option("; it may be created after the worker starts")],
    name: Annotated[str, typer.Option(help="Name of the worker. Default: host name and process id.")] = "",
    lease: Annotated[LeaseKind, typer.Option(help="Lease terms.")] = "spot",
    price: Annotated[
        float, typer.Option(min=0.0, help="Price of this machine in $ per hour. 0: look it up in the price table.")
    ] = 0.0,
    region: Annotated[str, typer.Option(help="Cloud or region of this machine; it selects the price.")] = "",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, or one GPU such as cuda:1.")] = "auto",
    gpus: Annotated[
        str, typer.Option(metavar="all|0,2", help="Start one worker for each of these GPUs, named NAME-0, NAME-2.")
    ] = "",
    engine: Annotated[
        Literal["auto", "windfall", "vllm"], typer.Option(help="Engine. auto: what the recipe says (engine.name).")
    ] = "auto",
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Number of GPUs that share every layer of one engine. Above 1 it must be vLLM.")
    ] = 1,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of each worker. 0: all cores.")] = 0,
    memory: Annotated[
        float, typer.Option(min=0.01, max=0.95, help="Share of the free memory for the KV cache.")
    ] = KV_SHARE,
    clouds: Annotated[
        str, typer.Option(help="Clouds whose preemption notices to watch: auto, none, or a list such as aws,gcp,azure.")
    ] = "auto",
    tls_ca: Annotated[Path | None, typer.Option(help="Additional certificate (PEM) to trust.")] = None,
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a controller after which the worker exits.")
    ] = 300.0,
    weights_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port where other workers read weights from this one. 0: any free one."),
    ] = 0,
    weights_address: Annotated[
        str,
        typer.Option(help="Address at which other workers reach this machine. Default: the one that reaches the run."),
    ] = "",
) -> None:
    """Join a run as a worker, from any machine and at any time. The worker may also leave at any time."""
    from windfall.worker import process as worker_process

    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        fix = "Give auto, cpu, cuda, or one GPU such as cuda:1."
        raise WindfallError(f"unknown value {device!r}", where="--device", fix=fix)
    if gpus:
        from windfall.worker import worker_group

        if device not in ("auto", "cuda") or tensor_parallel > 1 or weights_port:
            fix = "Leave out --device, --tensor-parallel and --weights-port, or --gpus."
            raise WindfallError("--gpus starts one worker for each GPU", where="windfall worker", fix=fix)
        options = {
            "--join": join, "--lease": lease, "--price": price, "--region": region, "--threads": threads,
            "--engine": engine, "--memory": memory, "--clouds": clouds, "--patience": patience,
            **({"--tls-ca": tls_ca} if tls_ca else {}),
            **({"--weights-address": weights_address} if weights_address else {}),
        }  # fmt: skip
        raise typer.Exit(worker_group.main(worker_group.find_places(gpus), options, name=name, token=token))
    worker_process.main(
        join, token, name=name, kind=lease, device=device, region=region, price_usd_per_h=price, threads=threads,
        share=memory, clouds=clouds, ca=tls_ca, patience_s=patience, engine=engine, tensor_parallel=tensor_parallel,
        weights_port=weights_port, weights_address=weights_address,
    )  # fmt: skip


def trainer(
    join: Annotated[str, typer.Option(metavar="URL", help="http://HOST:PORT with the run's train.rendezvous.")],
    token: TrainerToken,
    host: Annotated[
        str, typer.Option(help="Address at which workers reach this machine. Default: the one that reaches the run.")
    ] = "",
    folder: Annotated[Path | None, typer.Option(help="Directory for the log. Default: a new temporary one.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Additional certificate (PEM) to trust.")] = None,
    set: Overrides = None,
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a place in the run after which the command exits.")
    ] = 600.0,
) -> None:
    """Join a run as one rank of its trainer, for a run with train.rendezvous, until that run ends.

    Start one for every GPU, with torchrun, srun or by hand. Its number is in the environment: RANK, WORLD_SIZE and
    LOCAL_RANK, or those of Slurm. --set changes keys for this machine only, such as fleet.tls_cert.
    """
    from windfall.run.ranks import join as joining

    raise typer.Exit(
        joining.main(join, token, host=host, folder=folder, ca=tls_ca, overrides=set or (), patience_s=patience)
    )


def top(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a run, in progress or ended; or of a service (windfall up)."),
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the table once and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show the fleet of a run: live while it runs, otherwise its last state."""
    from windfall.run.views import top
    from windfall.run_folder import named, recipe_file

    run = named(run)
    if top.view_of_part(run) is None:
        recipe_file(run)
    top.show(run, once=once, as_json=as_json)


@app.command(name="_controller", hidden=True)
def _controller(run: Path) -> None:
    from windfall.controller import process as controller
    from windfall.controller.observer import ObserverPart
    from windfall.controller.own_loop import LoopPart
    from windfall.envs.agents import isolation
    from windfall.processes import process

    process.tolerate_full_log()
    isolation.forbid_tracing()  # the run's secrets are in this process, and agents may be of the same user
    observing = [part for part in parts.found() if isinstance(part, ObserverPart)]
    looping = [part for part in parts.found() if isinstance(part, LoopPart)]
    raise typer.Exit(controller.main(run, observing, looping))


@app.command(name="_trainer", hidden=True)
def _trainer(run: Path, base: Annotated[str, typer.Argument()] = "") -> None:
    """Run the rank that the environment names."""
    from windfall.processes import process
    from windfall.run import local_worker
    from windfall.trainer import process as trainer_process
    from windfall.trainer.ranks.rank_place import RankPlace

    process.tolerate_full_log()
    place = RankPlace.of(os.environ, base)
    start = trainer_process.follow if place.rank else trainer_process.main
    raise typer.Exit(start(run, place, local_worker.LocalWorker))


def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Checkpoint, run (its newest checkpoint) or model.")
    ],
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe with the environment. Default: the recipe of the run.")
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of held-out tasks.")] = 200,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Sampling temperature; 0 is greedy. Default: eval.temperature of the recipe."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Number of responses to print.")] = 0,
    set: Overrides = None,
    policy: Policy = "",
    as_json: Json = False,
) -> None:
    """Measure the reward of a checkpoint on held-out tasks, which are never trained on."""
    from windfall.recipe.file import load_recipe
    from windfall.run.commands import offline

    checkpoint = offline.named(checkpoint)
    if any(text.partition("=")[0].strip() == "eval.tasks" for text in set or ()):
        raise WindfallError("eval.tasks is for the evaluations of a run", where="--set", fix="Give --tasks instead.")
    parsed = load_recipe(recipe or offline.find_recipe(checkpoint), set)
    models = offline.find_models(checkpoint, parsed, policy)
    own = policy if policy in models else ""
    offline.evaluate(models, parsed, policy=own, tasks=tasks, temperature=temperature, show=show, as_json=as_json)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run (its newest checkpoint), checkpoint or adapter.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder to create. Default: exports/STEP in the run's folder.")
    ] = None,
    policy: Policy = "",
    gguf: Annotated[
        str, typer.Option(metavar="DTYPE", help="Write a GGUF for llama.cpp instead: f32, f16, bf16 or q8_0.")
    ] = "",
) -> None:
    """Write the model of a run as a folder in Hugging Face format, with its adapter merged if it trains one."""
    from windfall.run.commands import export as exports
    from windfall.run_folder import named

    print(exports.export(named(run), out, policy, gguf))


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model: tiny, smollm2-135m, a directory, a run or a hub id.")
    ],
    prompt: Annotated[list[str], typer.Option(help="Prompt; may be repeated.")],
    n: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Upper limit for the tokens of a response.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample only from the k most likely tokens. 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    policy: Policy = "",
    as_json: Json = False,
) -> None:
    """Sample responses from a model. A single response is streamed."""
    from windfall.run.commands import offline
    from windfall.types import Sampling

    name = offline.named(model)
    path, chat = offline.find_checkpoint(name, policy), offline.find_chat(name, policy)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    limits = {"n": n, "max_tokens": max_tokens}
    offline.generate(path, prompt, chat=chat, sampling=sampling, seed=seed, as_json=as_json, **limits)


@fleet.command(name="preview", epilog="Example: windfall fleet preview recipe.toml --only kubernetes")
def fleet_preview(
    recipe: RecipeFile, set: Overrides = None,
    only: Annotated[str, typer.Option(metavar="NAME", help="Print only this source, such as kubernetes.")] = "",
) -> None:  # fmt: skip
    """Print what a recipe would start on other systems; start nothing.

    Ray options, Kubernetes manifests, SkyPilot tasks and Slurm batch files. The token of the run is in none of them.
    """
    from windfall.recipe.file import load_recipe
    from windfall.run import worker_sources

    print(worker_sources.preview(load_recipe(recipe, set), only), end="")


COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {
        "demo --set run.steps=10": demo,
        "examples my-folder": examples,
        "doctor --json": doctor,
        "new --model Qwen/Qwen3-8B --data train.jsonl recipe.toml": new,
        "recipe rollout": recipe_keys,
        "train recipes/demo.toml --set run.steps=50 --set train.lr=3e-4": train,
        "resume runs/demo --set run.steps=100": resume,
    },
    "Watch": {"top runs/demo": top},
    "Use the result": {
        "eval runs/demo --tasks 200 --show 3": evaluate,
        "generate tiny --prompt '12+34-5=' --n 4": generate,
        "export runs/demo models/demo": export,
    },
    "Several jobs": {},
    "Plan": {},
    "Add machines": {
        "token demo.token": token,
        "worker --join http://10.0.0.5:8700 --token demo.token --lease spot --price 2.63": worker,
        "trainer --join http://10.0.0.5:29400 --token trainer.secret": trainer,
        "env-server recipe.toml --token env.token --host 0.0.0.0 --port 9000": env_server,
    },
}
"""The commands of the program in the panels of `windfall --help`, by an example that starts with their name, in the
order in which a user meets them. Parts add theirs."""


def _add_commands() -> None:
    panels = {panel: list(commands.items()) for panel, commands in COMMANDS.items()}
    for command in [command for part in parts.found() for command in part.commands()]:
        panels.setdefault(command.panel, []).append((command.example, command.function))
    for panel, commands in panels.items():
        for example, function in commands:
            app.command(example.split()[0], epilog=f"Example: windfall {example}", rich_help_panel=panel)(function)


_add_commands()
app.add_typer(fleet, name="fleet", rich_help_panel="Add machines")


def _exit_with(error: WindfallError) -> None:
    Console(stderr=True).print(f"[bold red]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    sys.exit(2)


UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # pyright: ignore[reportAssignmentType]
"""What typer raises for wrong arguments: click's own class in older versions of typer, a copy of it in newer ones."""


def _usage_error(error: Any) -> WindfallError:
    """An error of typer in the words of windfall's errors: what, in which command, and what to do."""
    if not error.format_message():  # no command was given, so typer has printed the help
        sys.exit(2)
    what = error.format_message().partition(" (Possible options")[0].replace("Value error, ", "").rstrip(".")
    command = error.ctx.command_path if error.ctx else "windfall"
    known = [name.lstrip("-") for p in error.ctx.command.params for name in p.opts] if error.ctx else []
    close = difflib.get_close_matches(getattr(error, "option_name", "").lstrip("-"), known, n=1)
    fix = f"Did you mean '--{close[0]}'?" if close else f"`{command} --help` says what it takes."
    return WindfallError(what[:1].lower() + what[1:], where=command, fix=fix)


def main() -> None:
    """The entry point. An error that the user can fix is shown without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a text from a log must not end a command
    try:
        sys.exit(app(prog_name="windfall", standalone_mode=False))
    except UsageError as e:
        _exit_with(_usage_error(e))
    except WindfallError as e:
        _exit_with(e)
    except OSError as e:
        if (error := file_system_error(e, Path.cwd())) is None:
            raise  # unexpected: a bug report needs the traceback
        _exit_with(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)


if __name__ == "__main__":
    main()
