"""From a recipe to real objects: works out what the recipe leaves open, builds everything, runs it.

    windfall train / resume  ──▶  open_run ──▶ train ──▶ Controller.run
    windfall eval / generate ──▶  engine_for

Only `train` and `engine_for` import torch, and only when called.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall import algorithms, config, envs, models
from windfall.config import Recipe
from windfall.console import Console
from windfall.errors import WindfallError
from windfall.events import EventLog, tensorboard
from windfall.text import Text
from windfall.train import checkpoint
from windfall.train.checkpoint import State


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """What the recipe left open."""

    device: str
    dtype: str
    kv_tokens: int
    max_running: int
    micro_tokens: int
    checkpoint_activations: bool


def check(recipe: Recipe) -> None:
    """Everything that can be found wrong before any work: the model's place, the environment and its options."""
    models.resolve(recipe.model.path)
    if recipe.run.device == "cuda":
        place(recipe)
    envs.make(recipe.env, recipe.run.seed).task(0)
    if recipe.log.tensorboard:
        import importlib.util

        if importlib.util.find_spec("tensorboard") is None:
            fix = "pip install 'windfall[tensorboard]'"
            raise WindfallError("tensorboard is not installed", where="log.tensorboard", fix=fix)


def new_folder(recipe: Recipe) -> Path:
    """runs/name, or runs/name-2, -3, ... when that is taken: a run never writes into another."""
    recipe = _anchored(recipe)
    wanted = recipe.run.folder / recipe.run.name
    for n in range(1, 10_000):
        folder = wanted if n == 1 else wanted.with_name(f"{wanted.name}-{n}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise WindfallError(f"cannot make the run's folder: {e}", where=str(folder), fix="Set run.folder.") from e
        write_recipe(recipe, folder)
        return folder
    raise WindfallError("ten thousand runs of this name exist", where=str(wanted), fix="Set run.name.")


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """What the run goes by from now on. Written whole or not at all."""
    work = folder / ".recipe.toml"
    work.write_text(config.dump(recipe), encoding="utf-8")
    work.replace(folder / "recipe.toml")


def _anchored(recipe: Recipe) -> Recipe:
    """Paths that exist made absolute: a run is resumed from any folder."""
    changes: dict[str, Any] = {}
    if Path(recipe.model.path).is_dir():
        changes["model"] = recipe.model.model_copy(update={"path": str(Path(recipe.model.path).resolve())})
    if isinstance(recipe.env, config.JsonLinesEnv):
        changes["env"] = recipe.env.model_copy(update={"path": recipe.env.path.resolve()})
    return recipe.model_copy(update=changes)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Only one process at a time may write to a run. The lock ends with the process, however it ends."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WindfallError("another process is running this", where=str(folder), fix="Stop it first.") from None
        yield


def derive(recipe: Recipe, model: Any, device: str, dtype: str, prompt_tokens: int) -> Derived:
    import torch

    c, o = model.config, recipe.rollout
    size = torch.finfo(model.dtype).bits // 8
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv_bytes = (
        2 * c.num_hidden_layers * (getattr(c, "num_key_value_heads", None) or c.num_attention_heads) * head * size
    )
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else _free_memory()
    running = recipe.engine.max_running or min(1024 if device == "cuda" else 256, o.groups * o.group_size)
    longest = prompt_tokens + o.max_tokens
    context = getattr(c, "max_position_embeddings", None)
    if context and longest > context:
        raise WindfallError(
            f"prompts of {prompt_tokens} tokens and rollout.max_tokens = {o.max_tokens} exceed the model's context of "
            f"{context}",
            where="rollout.max_tokens",
            fix=f"Set it to at most {max(1, context - prompt_tokens)}.",
        )
    wanted = recipe.engine.kv_tokens or max(2 * longest, min(running * longest, int(free * 0.4) // kv_bytes))
    micro = recipe.train.micro_tokens or max(longest, 32_768 if device == "cuda" else 4096)
    # Per token and layer a backward pass keeps about 12 vectors of the hidden size and 4 of the MLP's.
    kept = micro * c.num_hidden_layers * (12 * c.hidden_size + 4 * getattr(c, "intermediate_size", 4 * c.hidden_size))
    asked = recipe.train.checkpoint_activations
    return Derived(
        device=device, dtype=dtype, kv_tokens=wanted, max_running=running, micro_tokens=micro,
        checkpoint_activations=kept * size > 0.3 * free if asked == "auto" else asked,
    )  # fmt: skip


def _free_memory() -> int:
    """What Linux says is available; elsewhere, half of what there is."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        found = [line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
        if found:
            return int(found[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def place(recipe: Recipe) -> tuple[str, str]:
    """Device and dtype, and the number of threads set."""
    import torch

    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    device = recipe.run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise WindfallError("no CUDA device can be used", where="run.device", fix="Set it to 'cpu' or 'auto'.")
    if device == "cuda":
        # cuDNN's attention plans anew for every shape; continuous batching has a new shape at almost every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = recipe.model.dtype
    return device, ("bfloat16" if device == "cuda" else "float32") if dtype == "auto" else dtype


def text_for(name: str, model: Any) -> Text:
    stops = getattr(model.generation_config, "eos_token_id", None)
    return Text(models.load_tokenizer(name), stops if isinstance(stops, list) else [] if stops is None else [stops])


def engine_for(model: Any, recipe: Recipe, derived: Derived, version: int = 0) -> Any:
    from windfall.engine.engine import TorchEngine

    return TorchEngine(
        model,
        kv_tokens=derived.kv_tokens,
        page_size=recipe.engine.page_size,
        max_running=derived.max_running,
        max_rows=recipe.engine.max_rows,
        deterministic=recipe.run.deterministic,
        version=version,
    )


def train(recipe: Recipe, folder: Path, *, resume: bool = False, quiet: bool = False) -> None:
    """Run, or go on with, the run in `folder`, to its end or until it is stopped."""
    check(recipe)
    with owned(folder):
        console = Console(recipe, folder)
        events = EventLog(folder / "events.jsonl", [] if quiet else [console.show])
        if recipe.log.tensorboard:
            events.attach(tensorboard(folder / "tensorboard"))
        try:
            with console:
                state = _train(recipe, folder, events, resume)
        finally:
            events.close()
        if not quiet:
            console.summary(finished=state.step >= recipe.run.steps)


def _train(recipe: Recipe, folder: Path, events: EventLog, resume: bool) -> State:
    from windfall.train.trainer import TorchTrainer

    found = checkpoint.all_in(folder / "checkpoints") if resume else []
    source = str(found[-1]) if found else recipe.model.path
    state = checkpoint.read_state(found[-1]) if found else State(step=0, next_task=0)
    if resume:
        events.instant("resumed", step=state.step, checkpoint=source)
    with events.span("load", model=source):
        device, dtype = place(recipe)
        model = models.load(source, dtype=dtype, device=device)
        text = text_for(source, model)
        env = envs.make(recipe.env, recipe.run.seed)
        longest = max(len(text.prompt(env.task(i).prompt)) for i in range(64))
        derived = derive(recipe, model, device, dtype, longest)
        if derived.checkpoint_activations:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        reference = models.load(recipe.model.path, dtype=dtype, device=device) if recipe.algorithm.kl else None
        algorithm = algorithms.make(recipe.algorithm.name, **recipe.algorithm.options)
        trainer = TorchTrainer(model, algorithm, recipe, micro_tokens=derived.micro_tokens, reference=reference)
        if found:
            checkpoint.restore(found[-1], optimizer=trainer.optimizer, device=device)
    if resume:
        write_recipe(recipe, folder)  # what was changed with --set holds for the next resume, too; it works
    parameters = sum(p.numel() for p in model.parameters())
    events.instant("start", step=state.step, steps=recipe.run.steps, parameters=parameters,
                   **{f: getattr(derived, f) for f in Derived.__slots__})  # fmt: skip
    tokenizer = models.load_tokenizer(source)

    def save(now: State) -> Path:
        return checkpoint.save(
            folder / "checkpoints", now, model=model, tokenizer=tokenizer, optimizer=trainer.optimizer,
            keep=recipe.checkpoint.keep,
        )  # fmt: skip

    async def loop() -> State:
        from windfall.controller import Controller
        from windfall.rollout.manager import Rollout

        stop = asyncio.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="tensors") as threads, _signals(stop, events):
            engine = engine_for(model, recipe, derived, version=state.step)
            rollout = Rollout(
                engine, env, text, recipe.rollout, seed=recipe.run.seed, events=events, threads=threads, stop=stop
            )
            return await Controller(
                recipe=recipe, algorithm=algorithm, engine=engine, trainer=trainer, rollout=rollout, events=events,
                threads=threads, save=save, micro_tokens=derived.micro_tokens, state=state,
            ).run()  # fmt: skip

    reached = asyncio.run(loop())
    events.instant("end", step=reached.step, finished=reached.step >= recipe.run.steps)
    return reached


@contextmanager
def _signals(stop: asyncio.Event, events: EventLog) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the run to stop and save; the second ends it at once."""
    loop = asyncio.get_running_loop()

    def asked(number: int) -> None:
        stop.set()
        events.instant("stopping")
        loop.remove_signal_handler(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, asked, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
