"""The trainer's processes. Rank 0 is the main one: model, optimizer, checkpoints, and the weight server.

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
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
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
from windfall.processes import process
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.trainer import checkpoint, derived, trained_weights
from windfall.trainer.ranks.rank_place import RANK_LOST, WEIGHTS_KEY, RankPlace
from windfall.trainer.ranks.ranks import Orders, RankLost, TrainerRanks
from windfall.trainer.ranks.sharding import sharded_policy
from windfall.trainer.service import EngineTerms, OwnEngine, TrainerService, cannot_load, run_beside
from windfall.trainer.trained_weights import TrainedWeights
from windfall.trainer.trainer import TorchTrainer
from windfall.training import CheckpointState
from windfall.weights import buffers
from windfall.weights.bucket import BucketStore, bucket_of_run
from windfall.weights.meeting import PublishFailed
from windfall.weights.publish import Publisher
from windfall.weights.serve import serve, serve_in_thread
from windfall.weights.uploads import BucketUploads


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What rank 0 tells the others, so that all build the same trainer."""

    model_config: Any
    dtype: str
    micro_tokens: int
    checkpoint_activations: bool
    checkpoint: Path | None
    """The checkpoint to continue from. Ranks on other machines cannot open it."""
    adapter: Any
    """The AdapterConfig of the adapters, or None if the whole model is trained."""
    onednn: bool
    bucket: str = ""
    """Name of the run in the bucket, if there is one."""


def choose_device(recipe: Recipe, place: RankPlace) -> tuple[str, str]:
    """The device and dtype of this rank. A rank sees only its own GPU, if it has one. Ranks on CPUs share the cores."""
    device = recipe.run.device.partition(":")[0]
    return devices.resolve(device, recipe.model.dtype, cpu_threads(recipe, place))


def cpu_threads(recipe: Recipe, place: RankPlace) -> int:
    """CPU threads of this rank."""
    return recipe.run.threads or max(1, (os.cpu_count() or 1) // place.local_size)


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

    trainer: TorchTrainer
    publisher: Publisher
    weights: TrainedWeights
    published: m.PublishedFiles
    """What workers can read."""
    address = ""
    """Of its weight server, on the first rank of a machine."""
    pids: list[int]
    """Processes of all ranks, in order."""
    uploads: BucketUploads | None = None
    """To the bucket, by the first rank of each machine."""
    report: Callable[[m.Uploaded], None]
    """Called after each upload, by any thread. By default, rank 0 reports it when the next version is published."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        orders: Orders,
        *,
        place: RankPlace | None = None,
        loaded: TrainedWeights | None = None,
        reference: Any = None,
    ) -> None:
        """Rank 0 passes the weights and the reference that it has loaded."""
        self.recipe = recipe
        self.folder = folder
        self.orders = orders
        self.ranks = orders.ranks
        self.place = place or RankPlace()
        self._loaded = loaded
        self._reference = reference
        self._reports: deque[m.Uploaded] = deque()
        self.report = self._reports.append
        self.engine = OwnEngine()
        """The engine of this rank. The rank has its turn while it follows an order."""
        orders.add(self)

    def build(self, setup: Setup) -> None:
        recipe, ranks = self.recipe, self.ranks
        torch.backends.mkldnn.enabled = setup.onednn  # pyright: ignore[reportAttributeAccessIssue]
        if ranks.distributed:
            model, self.weights, reference = _shard(recipe, setup, ranks, self._loaded, self._reference)
        else:
            assert self._loaded is not None
            model, self.weights, reference = self._loaded.model, self._loaded, self._reference
        self.trainer = TorchTrainer(
            model,
            algorithms.make(recipe.algorithm.name, **recipe.algorithm.options),
            recipe,
            micro_tokens=setup.micro_tokens,
            reference=reference,
            orders=self.orders,
        )
        self.publisher = Publisher(
            self.folder,
            ranks=ranks.quick,
            dtype=setup.dtype if ranks.distributed else None,
            on_machine=f"machine {ranks.machine}",
            read_here=ranks.distributed and recipe.fleet.local and not self.several_machines,
        )
        if self.place.machine and self.place.local_rank == 0:
            self.address = serve_weights(self.publisher, recipe, self.place.host)
        if setup.bucket and self.place.local_rank == 0:
            store = BucketStore(recipe.weights.bucket, setup.bucket)
            self.uploads = BucketUploads(store, lambda done: self.report(done), first=self.place.rank == 0)
        if setup.checkpoint_activations and self.trainer.learner.has_graph:
            self.trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        if setup.checkpoint is not None:
            self.trainer.restore_optimizer(setup.checkpoint / checkpoint.OPTIMIZER)
        self.pids = ranks.all_gather(os.getpid())

    @property
    def several_machines(self) -> bool:
        return self.place.local_size < self.place.size

    def publish(self, version: int, order: m.Publish) -> Any:
        """Publish the present weights as this version. Returns their manifest."""
        manifest = self.weights.publish(self.publisher, version, copied=self.engine.release, pack=order.pack)
        mine = m.HolderFiles(location=self.address, holds=self.publisher.files.describe(), machine=buffers.machine())
        holders = tuple(each for each in self.ranks.quick.all_gather(mine) if each.holds)
        self._upload(order.keep)
        bucket = ""
        if self.uploads is not None:
            bucket = self.uploads.store.location
            holders = (*holders, m.HolderFiles(location=bucket, holds=self.uploads.holds()))
        files = {holding.file.digest: holding.file for each in holders for holding in each.holds}
        self.published = m.PublishedFiles(
            version=version, digest=manifest.digest, files=tuple(files.values()), holders=holders, bucket=bucket
        )
        return manifest

    def upload_again(self, files: Collection[str]) -> None:
        """Replace files that are damaged in the bucket, or upload the newest version as a copy instead of them."""
        held = self.uploads.holds() if self.uploads is not None else ()
        self._upload([each.file.digest for each in held], files)

    def _upload(self, keep: Collection[str], wrong: Collection[str] = ()) -> None:
        """Upload the newest version to the bucket, if there is one. All machines upload the same files."""
        if not self.recipe.weights.bucket:
            return
        unfinished = self.uploads.unfinished() if self.uploads is not None else {}
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        machines, reported = zip(*self.ranks.quick.all_gather((unfinished, reports)), strict=True)
        if self.ranks.first:
            for done in chain.from_iterable(reported):
                self.report(done)
        if self.uploads is not None:
            newest, base = self.publisher.readable[0].held, self.publisher.base
            assert newest is not None
            delta, base = self.publisher.delta, base and base.held
            self.uploads.publish(newest, delta, base=base, keep=keep, wrong=wrong, machines=machines)

    def build_engine(self, terms: EngineTerms) -> None:
        """Build the engines of the ranks on the machine of rank 0, at the same time: a rank that builds cannot train,
        and the others would wait for it only for `rank_timeout_s`."""
        if not self.ranks.remote:
            self.engine.build(terms)
        self.ranks.barrier()

    def collect(self) -> Any:
        """See trained_weights.collect."""
        return trained_weights.collect(self.publisher, self.ranks)


MakeEngine = Callable[[RankPart], OwnEngine]


def _shard(
    recipe: Recipe, setup: Setup, ranks: Any, loaded: TrainedWeights | None, reference: Any
) -> tuple[Any, TrainedWeights, Any]:
    """The policy of all ranks, what of it is trained, and the reference of the KL penalty, if there is one."""
    options: dict[str, Any] = {"dtype": getattr(torch, setup.dtype), "offload": recipe.train.offload}
    weights: list[TrainedWeights] = []

    def attach(model: Any) -> None:
        # The values come from rank 0, so that the others need neither the base model nor the checkpoint.
        adapters = trained_weights.attach_empty(model, setup.adapter) if setup.adapter is not None else None
        weights.append(TrainedWeights(model=model, adapters=adapters))

    source = None if loaded is None else _tensors(loaded.model)
    policy = sharded_policy(setup.model_config, source, ranks, prepare=attach, **options)
    if recipe.algorithm.kl and weights[0].adapters is not None:
        reference = weights[0].adapters
    elif recipe.algorithm.kl:
        source = None if reference is None else _tensors(reference)
        reference = sharded_policy(setup.model_config, source, ranks, trained=False, **options)
    return policy, weights[0], reference


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
            orders.follow(lambda kind: part.engine.trainer_works(room=kind is TorchTrainer))
        finally:
            if part.uploads is not None:
                part.uploads.close()
        return 0

    return run_rank(folder, place, run)


def run_rank(folder: Path, place: RankPlace, work: Callable[[], int]) -> int:
    """Returns the exit status of `work`. If it fails, the error is recorded in the folder."""
    log, who = folder / f"{place.name}.log", f"rank {place.rank}" if place.rank else "the trainer"
    try:
        return work()
    except WindfallError as e:
        return folders.fail(folder, "trainer", e, 2, first=place.rank > 0)
    except (RankLost, PublishFailed) as e:
        print(f"{who} ends: {e}", file=sys.stderr, flush=True)
        if not place.rank:  # the rank that was lost may have recorded why
            traceback.print_exc()
            folders.fail(folder, "trainer", crashed(who, e, log), first=True)
        return RANK_LOST
    except Exception as e:  # fault boundary: the traceback goes to the log, its last line to the supervisor
        traceback.print_exc()
        if (denied := errors.file_system_error(e, folder)) is not None:
            return folders.fail(folder, "trainer", denied, 2, first=True)
        return folders.fail(folder, "trainer", crashed(who, e, log), first=True)


def serve_weights(publisher: Publisher, recipe: Recipe, host: str) -> str:
    """Serve the rows of this machine to workers until the process ends. Returns the address of the server."""
    f = recipe.fleet
    server = serve_in_thread(
        publisher.files,
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
        fix = f"{less}; train.ranks and train.offload make the trainer's part of each GPU smaller. {fix}"
    return WindfallError(f"{who} failed: {line}", where=str(log), fix=fix)


def main(folder: Path, place: RankPlace, make_engine: MakeEngine) -> int:
    """Returns the exit status. `make_engine`: makes the engine of a rank, if the recipe wants one."""

    def run() -> int:
        recipe = load_recipe(folder / "recipe.toml")
        with folders.owned(folder, "trainer", timeout_s=10.0):
            return asyncio.run(errors.guard(_main(recipe, folder, place, make_engine)))

    return run_rank(folder, place, run)


async def _main(recipe: Recipe, folder: Path, place: RankPlace, make_engine: MakeEngine) -> int:
    device, dtype = choose_device(recipe, place)
    orders = join(recipe, place, device)
    loaded = await _load(recipe, folder, place, device, dtype)
    f, token, secret = recipe.fleet, auth.read_token(folder / "token"), auth.make_token(folder / "trainer.secret")
    part = RankPart(recipe, folder, orders, place=place, loaded=loaded.weights, reference=loaded.reference)
    _build(loaded, part, token)
    listener.raise_file_limit()
    server = await serve(
        part.publisher.files, host=f.host, port=f.weights_port, key=auth.weights_key(token), ssl=tls.server_context(f)
    )
    part.address = f"{'https' if f.tls_cert else 'http'}://_:{server.port}"
    address = await _address(folder)
    where = lambda: (folders.address(folder) or {}).get("url", address)  # noqa: E731
    dialer = Dialer(
        address,
        "/trainer",
        m.ToTrainer,
        ssl=tls.client_context(address, pinned=f.tls_cert),
        max_frame_bytes=m.MAX_TRAINER_FRAME_BYTES,
    )
    if f.local:
        part.engine = make_engine(part)
    terms = EngineTerms(
        spec=loaded.engine, url=address, secret=secret, weights_key=auth.weights_key(token), folder=folder.resolve()
    )
    host = TrainerService(
        trainer=part.trainer,
        state=loaded.state,
        secret=secret,
        dialer=dialer,
        hello=_hello(loaded, part),
        engine=part.engine,
        publish=lambda version, order: orders.call(part.publish, version, order),
        weights=lambda: part.published,
        upload_again=lambda files: orders.call(part.upload_again, files),
        save=lambda now: _save(loaded, part, now),
        load=partial(trained_weights.load_into, loaded.weights.model, part.trainer) if loaded.can_load else cannot_load,
        address=where,
    )
    try:
        part.report = host.tell
        return await run_beside(host.run(), part.engine.run(host, terms))
    finally:
        if part.uploads is not None:
            part.uploads.close()
        await dialer.close()
        await server.close()
        part.publisher.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRun:
    """What rank 0 has loaded, and chosen where the recipe leaves it open."""

    sharded: bool
    tokenizer: Any
    weights: TrainedWeights
    reference: Any
    checkpoint: Path | None
    state: CheckpointState
    chosen: derived.Derived
    engine: m.EngineSpec

    @property
    def can_load(self) -> bool:
        """Whether a checkpoint can be loaded into the module while the trainer runs."""
        return not self.sharded and self.weights.adapters is None


async def _load(recipe: Recipe, folder: Path, place: RankPlace, device: str, dtype: str) -> LoadedRun:
    """Load the newest checkpoint, or else the model of the recipe. Sharded, it is loaded into host memory."""
    sharded = bool(place.rendezvous)
    found = checkpoint.newest(folder / "checkpoints")
    where = "cpu" if sharded else device
    model = load.load(trained_weights.model_to_load(recipe, found), dtype=dtype, device=where)
    if device == "cpu":
        devices.choose_matmul_library()
    tokenizer = load.load_tokenizer(str(found.path) if found else recipe.model.path)
    tokenizer.save_pretrained(folder / "tokenizer")  # for the controller, which reads it without torch
    model.generation_config.save_pretrained(folder / "tokenizer")
    prompts = await derived.planned_prompts(recipe, folder, tokenizer, model)
    chosen = derived.derive(recipe, model, device, dtype, prompts, ranks=place.size, sharded=sharded)
    engine = derived.checked(derived.spec(recipe, model.config, dtype, chosen.longest), device, model)
    weights = trained_weights.prepare(model, recipe, found, dtype=dtype)
    return LoadedRun(
        sharded=sharded,
        tokenizer=tokenizer,
        weights=weights,
        reference=weights.reference(recipe, dtype=dtype, device=where) if recipe.algorithm.kl else None,
        checkpoint=found.path if found else None,
        state=found.state if found else CheckpointState(step=0, next_task=0),
        chosen=chosen,
        engine=engine,
    )


def _build(loaded: LoadedRun, part: RankPart, token: str) -> None:
    """Let all ranks build their parts."""
    model, adapters, url = loaded.weights.model, loaded.weights.adapters, part.recipe.weights.bucket
    setup = Setup(
        model_config=model.config,
        dtype=loaded.chosen.dtype,
        micro_tokens=loaded.chosen.micro_tokens,
        checkpoint_activations=loaded.chosen.checkpoint_activations,
        onednn=bool(torch.backends.mkldnn.enabled),
        checkpoint=loaded.checkpoint,
        adapter=adapters.config if adapters else None,
        bucket=bucket_of_run(url, part.recipe.run.name, token).run if url else "",
    )
    part.orders.call(part.build, setup)
    if loaded.sharded:
        model.to("meta")  # the ranks have the weights; the module is still needed to write checkpoints
        if isinstance(loaded.reference, torch.nn.Module):
            loaded.reference.to("meta")


def _hello(loaded: LoadedRun, part: RankPart) -> Callable[..., m.TrainerHello]:
    """From the fields of the handshake to what rank 0 says to the controller."""
    chosen = loaded.chosen
    if not part.trainer.learner.has_graph:  # it decides for every pack which activations to keep
        chosen = replace(chosen, checkpoint_activations=False)
    facts = part.weights.facts() | {"rank_pids": " ".join(map(str, part.pids)) if loaded.sharded else ""}
    facts["machine"] = devices.describe(chosen.device, part.ranks.size)

    def hello(**more: Any) -> m.TrainerHello:
        now = {"pid": os.getpid(), "age_s": process.age_s(), **asdict(chosen)}
        return m.TrainerHello(
            micro_tokens=chosen.micro_tokens,
            model=derived.fingerprint(loaded.engine),
            engine=loaded.engine,
            facts=facts | now,
            **more,
        )

    return hello


def _save(loaded: LoadedRun, part: RankPart, state: CheckpointState) -> Path:
    write = part.weights.saved.save_pretrained
    if loaded.sharded:
        collect = lambda: part.orders.call(part.collect)  # noqa: E731
        write = partial(part.weights.write_published, loaded.weights.model, part.publisher, collect)
    return checkpoint.save(
        part.folder / "checkpoints",
        state,
        tokenizer=loaded.tokenizer,
        write_optimizer=part.trainer.write_optimizer,
        write_model=write,
        keep=part.recipe.checkpoint.keep,
        base=loaded.weights.base,
    )


async def _address(folder: Path, timeout_s: float = 120.0) -> str:
    for _ in range(int(timeout_s * 10)):
        found = folders.address(folder)
        if found is not None:
            return found["url"]
        await asyncio.sleep(0.1)
    what = f"waited {timeout_s:g} s for the controller's address"
    raise WindfallError(what, where=str(folder / "address.json"), fix="See controller.log.")
