"""The processes of a trainer. Rank 0 is the main one: model, optimizer, checkpoints, and the weight server.

A run has a trainer for each base (`Recipe.bases`). It trains one policy, or the adapters of several, which share a
module, a thread for tensors and a weight server; each has a link of its own to the controller (service.py). If one of
them ends, the process ends: all policies of the base continue from their last checkpoints.

Rank 0 loads the model, chooses what the recipe leaves open, and gives the order to build; the other ranks (`follow`)
wait for it, build their part, and follow its orders from then on.

A rank on another machine (`RankPlace.machine`) has a folder of its own with only the recipe (run/ranks/join.py). It
opens no file of the run: tensors, adapters and the state of the optimizer come from rank 0. The first rank of such a
machine has a weight server for the rows of that machine.

Every rank but the first ends quietly if another one is lost: the reason is in that one's log, and the supervisor
restarts all of them together (run/ranks/rank_group.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from windfall import algorithms, devices, errors
from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.link import auth, listener, network, tls
from windfall.link import messages as m
from windfall.link.invitation import ALL_INTERFACES
from windfall.link.socket import Dialer
from windfall.models import load
from windfall.models import tokenizer as tokenizers
from windfall.processes import process
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.trainer import checkpoint, derived, trained_weights
from windfall.trainer.model.logprobs import PolicyModule
from windfall.trainer.policy_part import PolicyPart
from windfall.trainer.ranks import ulysses
from windfall.trainer.ranks.rank_place import RANK_LOST, WEIGHTS_KEY, RankPlace
from windfall.trainer.ranks.ranks import Orders, RankLost, TrainerRanks
from windfall.trainer.ranks.sharding import sharded_policy
from windfall.trainer.ranks.state_layout import StateLayout, moment_bytes
from windfall.trainer.ranks.ulysses import ContextGroup
from windfall.trainer.service import EngineTerms, OwnEngine, TrainerService, cannot_load, run_beside
from windfall.trainer.sleep import SleepingState
from windfall.trainer.slots.slot import Slot, SlotModule
from windfall.trainer.slots.slot_service import SlotService
from windfall.trainer.trained_weights import TrainedWeights
from windfall.trainer.trainer import TorchTrainer
from windfall.training import CheckpointState
from windfall.weights.bucket import BucketStore, bucket_of_policy, bucket_of_run
from windfall.weights.held_files import HeldFiles, JoinedFiles
from windfall.weights.publishing.meeting import PublishFailed
from windfall.weights.publishing.publish import Publisher
from windfall.weights.publishing.uploads import BucketUploads
from windfall.weights.serve import serve, serve_in_thread


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySetup:
    """What rank 0 tells the others about a policy."""

    micro_tokens: int
    checkpoint: Path | None = None
    """The checkpoint to continue from. Ranks on other machines cannot open it."""
    adapter: Any = None
    """The AdapterConfig of its adapters, or None if it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What rank 0 tells the others, so that all build the same trainer."""

    model_config: Any
    dtype: str
    checkpoint_activations: bool
    onednn: bool
    policies: dict[str, PolicySetup]
    context: int = 1
    """Ranks that compute a pack together."""
    host_share: float = 0.0
    """How much of masters and moments is in host memory."""
    whole_base: bool = False
    """Whether each rank has the whole base of the adapters."""
    bucket: str = ""
    """Name of the run in the bucket, if there is one."""


def choose_device(recipe: Recipe, place: RankPlace) -> tuple[str, str]:
    """The device and dtype of this rank. A rank sees only its own GPU, if it has one. Ranks on CPUs share the cores."""
    threads = recipe.run.threads or max(1, (os.cpu_count() or 1) // place.local_size)
    return devices.resolve(recipe.run.device.partition(":")[0], recipe.model.dtype, threads)


def join(recipe: Recipe, place: RankPlace, device: str) -> Orders:
    """The Orders by which this rank acts together with the others; waits for them."""
    if not place.rendezvous:
        return Orders(TrainerRanks.alone(device))
    ranks = TrainerRanks.join(
        place.rank,
        place.size,
        place.rendezvous,
        device=device,
        timeout_s=recipe.train.rank_timeout_s,
        machine=place.machine,
    )
    return Orders(ranks)


class RankPart:
    """One rank's part of the trainer. All ranks run its public methods together."""

    policies: dict[str, PolicyPart]
    """The policies by name; those that are trained come first."""
    address = ""
    """Where its weights are served: the first rank of a machine does that."""
    pids: list[int]
    """The process ids of all ranks, in order."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        orders: Orders,
        *,
        place: RankPlace | None = None,
        loaded: Mapping[str, TrainedWeights] | None = None,
        reference: Any = None,
    ) -> None:
        """Rank 0 passes the weights of the policies and the reference model that it has loaded."""
        self.recipe = recipe
        self.folder = folder
        self.orders = orders
        self.ranks = orders.ranks
        self.place = place or RankPlace()
        self._loaded = loaded or {}
        self._reference = reference
        self.policies = {}
        self.state = SleepingState(self._state, folder, lent_bytes=lambda: self.engine.lent_bytes)
        """What can sleep while other jobs train on this device."""
        self.engine = OwnEngine(first=self.place.rank == 0, state=self.state)
        """The engine of this rank. The rank has its turn while it follows an order."""
        orders.add(self)

    def build(self, setup: Setup) -> None:
        torch.backends.mkldnn.enabled = setup.onednn  # pyright: ignore[reportAttributeAccessIssue]
        if self.ranks.distributed:
            model, found, reference = _shard(self.recipe, setup, self.ranks, self._loaded, self._reference)
        else:
            found, reference = self._loaded, self._reference
            model = PolicyModule(next(iter(found.values())).model)
        slots = SlotModule(model, self.recipe) if self.recipe.has_slots else None
        shared: dict[str, Any] = {"reference": reference, "slots": slots}
        shared["context"] = ContextGroup.of(self.ranks, setup.context)
        for name in setup.policies:
            self.policies[name] = self._build_policy(name, setup, model, found[name], **shared)
        if self.place.machine and self.place.local_rank == 0:
            self.address = serve_weights(self.files, self.recipe, self.place.host)
        trainers = {name: part.trainer for name, part in self.policies.items() if part.trainer is not None}
        learners = [trainer.learner for trainer in trainers.values()] + ([slots.learner] if slots is not None else [])
        if setup.checkpoint_activations and any(learner.has_graph for learner in learners):
            model.model.gradient_checkpointing_enable({"use_reentrant": False})
        for name, trainer in trainers.items():
            if (path := setup.policies[name].checkpoint) is not None:
                trainer.restore_optimizer(path / checkpoint.OPTIMIZER)
        self.pids = self.ranks.all_gather(os.getpid())

    def _build_policy(
        self, name: str, setup: Setup, model: PolicyModule, weights: TrainedWeights, *, reference: Any,
        slots: SlotModule | None, context: ContextGroup,
    ) -> PolicyPart:  # fmt: skip
        view, ranks, trainer = self.recipe.of(name), self.ranks, None
        if self.recipe.is_trained(name):
            trainer = TorchTrainer(
                model,
                algorithms.make(view.algorithm.name, **view.algorithm.options),
                view,
                micro_tokens=setup.policies[name].micro_tokens,
                reference=(weights.adapters or reference) if view.algorithm.kl else None,
                orders=self.orders,
                adapters=weights.adapters,
                context=context,
                host_share=setup.host_share,
            )
        publisher = Publisher(
            self.folder,
            ranks=ranks.quick,
            dtype=setup.dtype if ranks.distributed else None,
            on_machine=f"machine {ranks.machine}",
            read_here=ranks.distributed and view.fleet.local and not self.several_machines,
            beside=next((part.publisher for part in self.policies.values()), None),
        )
        original = self.policies.get(self.recipe.policies[name].copy_of) if name else None
        part = PolicyPart(recipe=view, weights=weights, trainer=trainer, publisher=publisher, original=original)
        if slots is not None:
            own = {"micro_tokens": setup.policies[name].micro_tokens, "orders": self.orders}
            part.slot = Slot(name, self.recipe.slot(name), slots, weights, view, **own)
        if setup.bucket and self.place.local_rank == 0:
            store = bucket_of_policy(BucketStore(view.weights.bucket, setup.bucket), name)
            part.uploads = BucketUploads(store, lambda done: part.report(done), first=self.place.rank == 0)
        return part

    def _state(self) -> Iterator[torch.Tensor]:
        for part in self.policies.values():
            trainer = part.trainer if part.slot is None else part.slot.trainer
            if trainer is not None:
                yield from trainer.optimizer.tensors()

    @property
    def files(self) -> HeldFiles:
        """What this rank serves."""
        return JoinedFiles(part.publisher.files for part in self.policies.values())

    @property
    def several_machines(self) -> bool:
        return self.place.local_size < self.place.size

    def publish(self, policy: str, version: int, order: m.Publish) -> Any:
        """Publish the present weights of a policy as this version. Returns their manifest. A copy follows its original
        while the weights of that belong to a version, from its own first version on. It is published as the version
        that it has, or not again."""
        part = self.policies[policy]
        current, original = part.publisher.current, part.original
        if original is not None and current is not None:
            version = original.published.version
            if version == current.version:
                return current
        for copy in self.policies.values():
            if copy.original is part and copy.publisher.current is not None:
                copy.weights.follow(part.weights)
        manifest = part.publish(version, order, self.ranks, address=self.address, copied=self.engine.release)
        if original is not None and current is None:  # no policy has been updated yet
            part.weights.follow(original.weights)
        return manifest

    def upload_again(self, policy: str, files: Collection[str]) -> None:
        self.policies[policy].upload_again(files, self.ranks)

    def build_engine(self, terms: EngineTerms) -> None:
        """Build the engines of the ranks on the machine of rank 0, at the same time: a rank that builds cannot train,
        and the others would wait for it only for `rank_timeout_s`."""
        if not self.ranks.remote:
            self.engine.build(terms)
        self.ranks.barrier()

    def collect(self, policy: str) -> Any:
        """See trained_weights.collect."""
        return trained_weights.collect(self.policies[policy].publisher, self.ranks)

    def close(self) -> None:
        """Withdraw all versions; the base, which belongs to the first policy, as the last file."""
        for part in reversed(self.policies.values()):
            part.close()


MakeEngine = Callable[[RankPart], OwnEngine]


def _shard(
    recipe: Recipe, setup: Setup, ranks: Any, loaded: Mapping[str, TrainedWeights], reference: Any
) -> tuple[Any, dict[str, TrainedWeights], Any]:
    """The module of all ranks, what of it each policy trains, and the reference model of the KL penalty, if any."""
    first = recipe.of(next(iter(setup.policies)))
    options: dict[str, Any] = {"dtype": getattr(torch, setup.dtype)}
    weights: dict[str, TrainedWeights] = {}

    def attach(model: Any) -> None:
        # The values come from rank 0, so that the others need neither the base model nor the checkpoint.
        for name, own in setup.policies.items():
            adapters = trained_weights.attach_empty(model, own.adapter, name) if own.adapter is not None else None
            weights[name] = TrainedWeights(model=model, adapters=adapters, frozen=not recipe.is_trained(name))

    source = _tensors(next(iter(loaded.values())).model) if loaded else None
    policy = sharded_policy(setup.model_config, source, ranks, prepare=attach, whole_base=setup.whole_base, **options)
    if first.algorithm.kl and not any(each.adapters for each in weights.values()):
        source = None if reference is None else _tensors(reference)
        reference = sharded_policy(setup.model_config, source, ranks, trained=False, **options)
    return policy, weights, reference


def _tensors(model: Any) -> Mapping[str, Any]:
    """All parameters and buffers of a model, by name."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def follow(folder: Path, place: RankPlace, make_engine: MakeEngine) -> int:
    """Follow rank 0. Exit status: 0 it said stop, RANK_LOST another rank was lost, 1 or 2 this one failed.
    `make_engine`: see `main`."""

    def run() -> int:
        recipe = load_recipe(folder / "recipe.toml")
        device, _ = choose_device(recipe, place)
        orders = join(recipe, place, device)
        part = RankPart(recipe, folder, orders, place=place)
        if recipe.fleet.local:
            part.engine = make_engine(part)
        try:  # TorchTrainer's methods compute; those of RankPart only read the weights.
            orders.follow(lambda target: part.engine.trainer_works(room=isinstance(target, TorchTrainer)))
        finally:
            for policy in part.policies.values():
                policy.stop_uploads()
        return 0

    return run_rank(folder, place, run)


def run_rank(folder: Path, place: RankPlace, work: Callable[[], int]) -> int:
    """Returns the exit status of `work`. If it fails, the error is recorded in the folder."""
    log, who = folder / f"{place.name}.log", f"rank {place.rank}" if place.rank else f"the {place.role}"
    try:
        return work()
    except WindfallError as e:
        return folders.fail(folder, place.role, e, 2, first=place.rank > 0)
    except (RankLost, PublishFailed) as e:
        print(f"{who} ends: {e}", file=sys.stderr, flush=True)
        if not place.rank:  # the rank that was lost may have recorded why
            traceback.print_exc()
            folders.fail(folder, place.role, crashed(who, e, log), first=True)
        return RANK_LOST
    except Exception as e:  # fault boundary: the traceback goes to the log, its last line to the supervisor
        traceback.print_exc()
        if (denied := errors.file_system_error(e, folder)) is not None:
            return folders.fail(folder, place.role, denied, 2, first=True)
        return folders.fail(folder, place.role, crashed(who, e, log), first=True)


def serve_weights(files: HeldFiles, recipe: Recipe, host: str) -> str:
    """Serve the rows of this machine to workers until the process ends. Returns the address of the server."""
    f = recipe.fleet
    server = serve_in_thread(
        files,
        host=f.host if f.host in ALL_INTERFACES else host,
        port=f.weights_port,
        key=os.environ[WEIGHTS_KEY],
        ssl=tls.server_context(f),
    )
    return f"{'https' if f.tls_cert else 'http'}://{network.in_url(host)}:{server.port}"


def crashed(who: str, error: Exception, log: Path) -> WindfallError:
    """The error for the user if restarts do not help."""
    line = errors.last_line(error)
    fix = "The traceback is at the end of that file. `windfall resume` continues from the last checkpoint."
    if "out of memory" in line.lower() or isinstance(error, MemoryError):
        less = "Lower train.micro_tokens or fleet.worker_memory, or set train.checkpoint_activations = true"
        smaller = "more ranks, train.optimizer = 'adamw_8bit' or train.offload = true"
        fix = f"{less}; {smaller} make the trainer's part of each GPU smaller. {fix}"
    return WindfallError(f"{who} failed: {line}", where=str(log), fix=fix)


def main(folder: Path, place: RankPlace, make_engine: MakeEngine) -> int:
    """Returns the exit status. `make_engine`: makes the engine of a rank, if the recipe wants one."""

    def run() -> int:
        recipe = load_recipe(folder / "recipe.toml")
        with folders.owned(folder, place.role, timeout_s=10.0):
            return asyncio.run(errors.guard(_main(recipe, folder, place, make_engine)))

    return run_rank(folder, place, run)


async def _main(recipe: Recipe, folder: Path, place: RankPlace, make_engine: MakeEngine) -> int:
    device, dtype = choose_device(recipe, place)
    if not recipe.trains(place.base):  # the weights are only read
        device = "cpu"
    orders = join(recipe, place, device)
    loaded = await _load(recipe, folder, place, device, dtype)
    f, token, secret = recipe.fleet, auth.read_token(folder / "token"), auth.make_token(folder / "trainer.secret")
    weights = {name: each.weights for name, each in loaded.policies.items()}
    part = RankPart(recipe, folder, orders, place=place, loaded=weights, reference=loaded.reference)
    if f.local:
        part.engine = make_engine(part)
    if part.ranks.distributed:
        _build(loaded, part, token)
    else:  # in the trainer's turn: where several jobs train, states of others make room for this one
        part.state.expected_bytes = _state_bytes(recipe, loaded)
        with part.engine.trainer_works(room=False):
            _build(loaded, part, token)
    listener.raise_file_limit()
    port = f.weights_port + list(recipe.bases()).index(place.base) if f.weights_port else 0
    server = await serve(part.files, host=f.host, port=port, key=auth.weights_key(token), ssl=tls.server_context(f))
    part.address = f"{'https' if f.tls_cert else 'http'}://_:{server.port}"
    address = await _address(folder)
    terms = EngineTerms(
        spec=loaded.engine, url=address, secret=secret, weights_key=auth.weights_key(token), folder=folder.resolve()
    )
    services: list[TrainerService] = []
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="tensors") as threads:
            for name in part.policies:
                dialer = Dialer(
                    address,
                    "/trainer",
                    m.ToTrainer,
                    ssl=tls.client_context(address, pinned=f.tls_cert),
                    max_frame_bytes=m.MAX_TRAINER_FRAME_BYTES,
                )
                options = {"dialer": dialer, "secret": secret, "threads": threads, "engine": part.engine}
                services.append(_service(loaded, part, name, address=address, **options))
            return await run_beside([each.run() for each in services], part.engine.run(services[0], terms))
    finally:
        for each in services:
            await each.dialer.close()
        await server.close()
        part.close()


def _service(loaded: LoadedBase, part: RankPart, name: str, *, address: str, **options: Any) -> TrainerService:
    """The service of a policy. `address`: of the controller when the trainer started."""
    own, policy, orders, folder = loaded.policies[name], part.policies[name], part.orders, part.folder
    save = partial(_save, loaded, part, name)
    can_load = policy.trainer is not None and own.weights.adapters is None and not part.ranks.distributed

    def publish(version: int, order: m.Publish) -> Any:
        manifest = orders.call(part.publish, name, version, order)
        if policy.original and manifest.version:  # nobody else would know again which version the copy is
            save(CheckpointState(step=manifest.version, next_task=0))
        return manifest

    make = TrainerService if policy.slot is None else partial(SlotService, slot=policy.slot)
    service = make(
        trainer=policy.trainer,
        state=own.state,
        hello=_hello(loaded, part, name),
        publish=publish,
        weights=lambda: policy.published,
        upload_again=lambda files: orders.call(part.upload_again, name, files),
        save=save,
        load=partial(trained_weights.load_into, own.weights.model, policy.trainer) if can_load else cannot_load,
        address=lambda: (folders.address(folder) or {}).get("url", address),
        copies=policy.original is not None,
        **options,
    )
    policy.report = service.tell
    return service


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPolicy:
    """What rank 0 has loaded of a policy, and chosen where the recipe leaves it open."""

    tokenizer: Any
    weights: TrainedWeights
    setup: PolicySetup
    state: CheckpointState
    chosen: derived.Derived


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedBase:
    """A base with all its policies."""

    model: Any
    reference: Any
    """The model of the KL penalty, if all weights are trained."""
    engine: m.EngineSpec
    policies: dict[str, LoadedPolicy]


def _tokenizer(view: Recipe, folder: Path, begins: Any, model: Any) -> Any:
    """A policy's tokenizer with the model's own chat template. The run keeps it in `folder`, where the controller reads
    it without torch, because a checkpoint has the template of the recipe. `begins`: the checkpoint to begin with."""
    tokenizer = load.load_tokenizer(str(begins.path) if begins else view.model.path)
    if begins and folder.is_dir():
        with suppress(WindfallError):  # it is damaged, and written again
            tokenizer.chat_template = tokenizers.load(folder).chat_template
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return tokenizer


async def _load(recipe: Recipe, folder: Path, place: RankPlace, device: str, dtype: str) -> LoadedBase:
    """Load the newest checkpoint of every policy, or else what the recipe names. Sharded, the model is loaded into host
    memory."""
    sharded, names = bool(place.rendezvous), recipe.bases()[place.base]
    views = {name: recipe.of(name) for name in names}
    found = {name: None if recipe.slot(name) else _newest(recipe, folder, name) for name in names}
    first, where = views[place.base], "cpu" if sharded else device
    check = None
    if recipe.trains(place.base) and recipe.train.context_parallel > 1:
        check = partial(ulysses.check, recipe.train.context_parallel, place.size)
    model = load.load(trained_weights.model_to_load(first, found[place.base]), dtype=dtype, device=where, check=check)
    if device == "cpu":
        devices.choose_matmul_library()
    texts, chosen = {}, {}
    trains = [name for name in names if recipe.is_trained(name) or recipe.slot(name) == "train"]
    for name, view in views.items():
        if not recipe.slot(name):  # the texts of a slot are those of its base
            texts[name] = _tokenizer(view, folders.policy_folder(folder, name) / "tokenizer", found[name], model)
        # Beside slots, rollout.max_tokens is for prompt and response together: the prompts are not known.
        planned = derived.planned_prompts
        prompts = [0] if recipe.has_slots else await planned(view, folder, texts[name], model)
        if name in texts and (template := view.chat.trained()) is not None:
            texts[name].chat_template = template  # a checkpoint has the template that it was trained with
        others = [other.train.lora for n, other in views.items() if n != name and n in trains]
        chosen[name] = derived.derive(
            view, model, device, dtype, prompts, ranks=place.size, local_ranks=place.local_size, sharded=sharded,
            trains=name in trains, beside=[lora for lora in others if lora is not None],
        )  # fmt: skip
    longest = {name: each.longest for name, each in chosen.items()}
    must_replay = any(view.train.replay_routing is True for view in views.values())
    spec = derived.base_spec(recipe, names, model.config, dtype, longest)
    engine = derived.checked(spec, device, model, must_replay=must_replay)
    digest = ""
    policies: dict[str, LoadedPolicy] = {}
    for name, view in views.items():
        begins, trained = found[name], recipe.is_trained(name)
        options: dict[str, Any] = {"trained": trained, "slot": bool(recipe.slot(name)), "digest": digest}
        weights = trained_weights.prepare(model, view, begins, dtype=dtype, policy=name, **options)
        digest = weights.base.digest if weights.base else digest
        policies[name] = LoadedPolicy(
            tokenizer=texts.get(name),
            weights=weights,
            setup=PolicySetup(
                micro_tokens=chosen[name].micro_tokens,
                checkpoint=begins.path if begins and trained else None,
                adapter=weights.adapters.config if weights.adapters else None,
            ),
            state=begins.state if begins else CheckpointState(step=0, next_task=0),
            chosen=chosen[name],
        )
    whole = policies[place.base].weights
    compares = first.algorithm.kl and whole.adapters is None and not whole.frozen
    reference = load.load(first.model.path, dtype=dtype, device=where) if compares else None
    return LoadedBase(model=model, reference=reference, engine=engine, policies=policies)


def _newest(recipe: Recipe, folder: Path, policy: str) -> checkpoint.VerifiedCheckpoint | None:
    """The checkpoint that a policy continues from. Checkpoints of a copy that are newer than that of its original are
    of weights that no longer exist."""
    where = folders.policy_folder(folder, policy) / "checkpoints"
    if original := recipe.policies[policy].copy_of if policy else "":
        begins = checkpoint.newest(folders.policy_folder(folder, original) / "checkpoints", optimizer=False)
        checkpoint.remove_after(where, begins.state.step if begins else 0)
    return checkpoint.newest(where)


def _build(loaded: LoadedBase, part: RankPart, token: str) -> None:
    """Let all ranks build their parts."""
    url = part.recipe.weights.bucket
    setup = Setup(
        model_config=loaded.model.config,
        dtype=loaded.engine.dtype,
        checkpoint_activations=any(each.chosen.checkpoint_activations for each in loaded.policies.values()),
        onednn=bool(torch.backends.mkldnn.enabled),
        bucket=bucket_of_run(url, part.recipe.run.name, token).run if url else "",
        policies={name: each.setup for name, each in loaded.policies.items()},
        context=part.recipe.train.context_parallel if part.recipe.trains(part.place.base) else 1,
        host_share=loaded.policies[part.place.base].chosen.host_share,
        whole_base=loaded.policies[part.place.base].chosen.whole_base,
    )
    part.orders.call(part.build, setup)
    if part.ranks.distributed:
        loaded.model.to("meta")  # the ranks have the weights; the module is still needed to write checkpoints
        if isinstance(loaded.reference, torch.nn.Module):
            loaded.reference.to("meta")


def _state_bytes(recipe: Recipe, loaded: LoadedBase) -> int:
    """Bytes on the device that only training needs, for all policies."""
    total = 0.0
    for name, each in loaded.policies.items():
        if not recipe.is_trained(name):
            continue
        own = each.weights
        tensors = list(own.model.parameters() if own.adapters is None else own.adapters.weights().values())
        layout = StateLayout(
            trained=sum(t.numel() for t in tensors), value_bytes=tensors[0].itemsize, host_share=each.chosen.host_share,
            moment_bytes=moment_bytes(recipe.of(name).train.optimizer, adapters=own.adapters is not None),
        )  # fmt: skip
        total += layout.training_bytes
    return int(total)


def _hello(loaded: LoadedBase, part: RankPart, name: str) -> Callable[..., m.TrainerHello]:
    """Makes what rank 0 says to the controller from the fields of the handshake."""
    chosen, policy = loaded.policies[name].chosen, part.policies[name]
    if policy.trainer is None or not policy.trainer.learner.has_graph:  # it decides for every pack what to keep
        chosen = replace(chosen, checkpoint_activations=False)
    facts = policy.weights.facts() | {"rank_pids": " ".join(map(str, part.pids)) if part.ranks.distributed else ""}
    facts["machine"] = devices.describe(chosen.device, part.ranks.size)

    def hello(**more: Any) -> m.TrainerHello:
        now = {"pid": os.getpid(), "age_s": process.age_s(), **asdict(chosen)}
        return m.TrainerHello(
            micro_tokens=chosen.micro_tokens,
            model=derived.fingerprint(loaded.engine),
            engine=loaded.engine,
            facts=facts | now,
            policy=name,
            **more,
        )

    return hello


def _save(loaded: LoadedBase, part: RankPart, name: str, state: CheckpointState) -> Path:
    policy = part.policies[name]
    write = policy.weights.saved.save_pretrained
    if part.ranks.distributed:
        collect = lambda: part.orders.call(part.collect, name)  # noqa: E731
        write = partial(policy.weights.write_published, loaded.model, policy.publisher, collect)
    return checkpoint.save(
        folders.policy_folder(part.folder, name) / "checkpoints",
        state,
        tokenizer=loaded.policies[name].tokenizer,
        write_optimizer=policy.trainer.write_optimizer if policy.trainer is not None else checkpoint.no_optimizer,
        write_model=write,
        keep=part.recipe.checkpoint.keep,
        base=loaded.policies[name].weights.base,
    )


async def _address(folder: Path, timeout_s: float = 120.0) -> str:
    for _ in range(int(timeout_s * 10)):
        found = folders.address(folder)
        if found is not None:
            return found["url"]
        await asyncio.sleep(0.1)
    what = f"waited {timeout_s:g} s for the controller's address"
    raise WindfallError(what, where=str(folder / "address.json"), fix="See controller.log.")
