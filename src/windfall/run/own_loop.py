"""A policy for a training loop of your own, in one process: model, optimizer, ledger and one worker.

    async with open_policy(recipe) as opened:
        responses = await opened.policy.sample(opened.text.prompt("1+1="), 8, id="0/0", max_tokens=32)

Everything is what a run uses (dispatch, ledger, trainer behind its link, worker behind its link), with links in memory
instead of sockets. The worker's engine shares the trainer's module, so a new version costs nothing. See verbs.py for
what the verbs promise, and examples/rl_loop.py for a complete loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from windfall import algorithms, devices
from windfall.controller.policy import FleetPolicy
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.versions import Offer
from windfall.engine.factory import build_engine
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.link import messages as m
from windfall.link.base import Link
from windfall.link.gate import Gate
from windfall.link.memory import pair
from windfall.models import load
from windfall.models.text import Text
from windfall.recipe.sections import Recipe
from windfall.run.commands.in_process import in_process_worker
from windfall.trainer import checkpoint, trained_weights
from windfall.trainer.derived import base_spec, checked, derive, fingerprint, text_for
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerWeights
from windfall.trainer.service import TrainerService, cannot_load
from windfall.trainer.trained_weights import TrainedWeights
from windfall.training import CheckpointState

SECRET = "one process"
"""Both ends of the trainer's link are in this process."""
START_S = 60.0
"""Timeout for the trainer to publish its first version, in seconds."""


@dataclass(frozen=True, kw_only=True)
class OpenedPolicy:
    policy: FleetPolicy
    text: Text
    """Turns prompts into token ids, and token ids into text."""


@dataclass(frozen=True)
class _LocalVersion:
    """What the publisher of a run would return: the engine has the weights of every version already."""

    version: int

    @property
    def digest(self) -> str:
        return f"version {self.version}"


class _MemoryDialer:
    """Connects the trainer to the controller's proxy of it, with the handshake that a run uses."""

    url = "this process"

    def __init__(self, gate: Gate, policy: FleetPolicy) -> None:
        self._gate = gate
        self._policy = policy
        self._serving: set[asyncio.Task[None]] = set()

    async def dial(self, timeout_s: float) -> Link:
        del timeout_s
        controllers_end, trainers_end = pair("controller", "trainer")
        task = asyncio.create_task(self._gate.trainer(controllers_end, self._policy.attend))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return trainers_end


@contextlib.asynccontextmanager
async def open_policy(recipe: Recipe, *, longest_prompt: int = 256) -> AsyncIterator[OpenedPolicy]:
    """Open the model of the recipe for training. Of the recipe, [run], [model], [algorithm], [rollout], [train] and
    [engine] count; checkpoints go to run.folder/run.name. `longest_prompt`: in tokens. Raises WindfallError for what
    needs the processes or the loop of a run."""
    from windfall.trainer.trainer import TorchTrainer

    _check(recipe)
    device, dtype = devices.resolve(recipe.run.device, recipe.model.dtype, recipe.run.threads)
    model = load.load(recipe.model.path, dtype=dtype, device=device)
    tokenizer = load.load_tokenizer(recipe.model.path)
    text = text_for(tokenizer, model, recipe.chat.options())
    if (template := recipe.chat.trained()) is not None:
        tokenizer.chat_template = template  # a checkpoint has the template that it was trained with
    derived = derive(recipe, model, device, dtype, [longest_prompt])
    must_replay = recipe.train.replay_routing is True
    engine_spec = base_spec(recipe, recipe.names(), model.config, dtype, {"": derived.longest})
    engine_spec = checked(engine_spec, device, model, must_replay=must_replay)
    weights = trained_weights.prepare(model, recipe, None, dtype=dtype)
    algorithm, reference = algorithms.make(recipe.algorithm.name, **recipe.algorithm.options), None
    if recipe.algorithm.kl:
        reference = weights.adapters or load.load(recipe.model.path, dtype=dtype, device=device)
    trainer = TorchTrainer(
        model, algorithm, recipe, micro_tokens=derived.micro_tokens, host_share=derived.host_share,
        adapters=weights.adapters, reference=reference,
    )  # fmt: skip
    if derived.checkpoint_activations and trainer.learner.has_graph:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    events = EventLog(Path("/dev/null"))
    dispatch = Dispatch(events=events, vocabulary=model.config.vocab_size, order=recipe.rollout.order)
    policy = FleetPolicy(dispatch, stop=text.stop, sampling=recipe.rollout.sampling(), seed=recipe.run.seed)
    gate = Gate(recipe.run.name, SECRET, log=_ignore_event, max_workers=1, trainer_secret=SECRET)

    def hello(**more: Any) -> m.TrainerHello:
        return m.TrainerHello(
            micro_tokens=derived.micro_tokens,
            model=fingerprint(engine_spec),
            engine=engine_spec,
            facts=asdict(derived),
            **more,
        )

    service = TrainerService(
        trainer=trainer,
        state=CheckpointState(step=0, next_task=0),
        secret=SECRET,
        dialer=_MemoryDialer(gate, policy),  # pyright: ignore[reportArgumentType]
        hello=hello,
        publish=lambda version, order: _LocalVersion(version),
        save=partial(_save, recipe, weights, tokenizer, trainer),
        load=partial(trained_weights.load_into, model, trainer) if weights.adapters is None else cannot_load,
        address=lambda: _MemoryDialer.url,
    )
    merged, published = weights.merged(), TrainerWeights(lambda: service.manifest)
    engine, slots = build_engine(engine_spec, device, model=model if merged is None else merged.module)
    shared = TrainerEngine(
        engine, service.engine.turn, published=published.published, share_memory=device == "cuda", merged=merged
    )
    service.engine.engine = shared
    pull = lambda order, stop: published.pull(order, stop=stop)  # noqa: E731
    serving = asyncio.create_task(service.run(), name="trainer")
    try:
        first = await policy.connected(START_S)
        dispatch.set_offer(Offer(version=first.version, digest=first.digest))
        async with in_process_worker(dispatch, shared, slots, pull=pull, on_failure=policy.fail):
            yield OpenedPolicy(policy=policy, text=text)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        events.close()


def _check(recipe: Recipe) -> None:
    """Raise WindfallError for options that a loop in one process cannot have."""
    if recipe.engine.kv_dtype == "fp8":  # only the loop of a run goes back from it
        what = "a loop of your own cannot use a KV cache in fp8: nothing would leave fp8 if log-probs differ too much"
        raise WindfallError(what, where="engine.kv_dtype", fix="Set engine.kv_dtype = 'auto'.")
    train, fix = recipe.train, "Remove it, or use `windfall train`."
    if recipe.policies:
        raise WindfallError("a loop of your own has one policy", where="policies", fix=fix)
    if train.ranks not in ("auto", 1) or train.context_parallel > 1 or train.rendezvous:
        key = "rendezvous" if train.rendezvous else "context_parallel" if train.context_parallel > 1 else "ranks"
        raise WindfallError("a loop of your own trains in its own process, alone", where=f"train.{key}", fix=fix)


def _save(recipe: Recipe, weights: TrainedWeights, tokenizer: Any, trainer: Any, state: CheckpointState) -> Path:
    folder = Path(recipe.run.folder) / recipe.run.name / "checkpoints"
    return checkpoint.save(
        folder,
        state,
        write_model=weights.saved.save_pretrained,
        tokenizer=tokenizer,
        write_optimizer=trainer.write_optimizer,
        keep=recipe.checkpoint.keep,
        base=weights.base,
    )


def _ignore_event(*_: Any, **__: Any) -> None:
    """The gate's log: there is no run that could read it."""
