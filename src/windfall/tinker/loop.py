"""The loop of a server: it answers clients until the run is stopped. It runs in the controller's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from windfall import run_folder as folders
from windfall.controller.assembly import ControllerLife
from windfall.controller.rollout.stream import Stopped
from windfall.controller.workers.versions import Offer
from windfall.errors import WindfallError, run_until_first
from windfall.events.log import scan
from windfall.link import network, tls
from windfall.link.invitation import ALL_INTERFACES
from windfall.models import tokenizer
from windfall.models.load import resolve
from windfall.models.text import Text
from windfall.recipe.lora import DEFAULT_RANK
from windfall.recipe.sections import Recipe
from windfall.tinker.accounts import keys
from windfall.tinker.accounts.bill import AccountBill
from windfall.tinker.accounts.report import ServerReport
from windfall.tinker.calls import LoraSpec
from windfall.tinker.command import BASE
from windfall.tinker.disk.call_log import CallLog
from windfall.tinker.disk.store import TinkerStore
from windfall.tinker.fleet_sampler import FleetSampler
from windfall.tinker.models.adapter_slots import SampleSlots, Trainers, TrainSlots
from windfall.tinker.part import FIX_PORT
from windfall.tinker.service import TinkerService
from windfall.tinker.shared import ServerTerms, SharedParts
from windfall.tinker.wire.server import TinkerServer
from windfall.training import AdapterSpec, CheckpointState

ALPHA = 32.0
"""The alpha of all adapters, as clients of the Tinker API expect: B A is multiplied by alpha / rank."""


class TinkerLoop:
    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.section, self.folder = recipe, recipe.tinker, folder
        self._report: ServerReport | None = None
        slots = {name: own.slot for name, own in recipe.policies.items()}
        self._train = [name for name, slot in slots.items() if slot == "train"]
        self._sample = [name for name, slot in slots.items() if slot == "sample"]

    async def run(self, life: ControllerLife, text: Callable[[str], Text]) -> CheckpointState:
        """Answer clients until the run is stopped."""
        try:
            async with self.service(life, text) as service:
                server, report = TinkerServer(service), self._report
                assert report is not None, "`service` has made it"
                context = tls.server_context(self.recipe.fleet.model_copy(update=self._certificate()))
                host = self.section.host or self.recipe.fleet.host
                port = await server.listen(host, self._port(), FIX_PORT, context)
                try:
                    folders.replace(self.folder / "tinker.json", json.dumps({"port": port}))
                    reached = network.in_url("127.0.0.1" if host in ALL_INTERFACES else host)
                    report.url = url = f"{'https' if context else 'http'}://{reached}:{port}"
                    models = sum(1 for model in service.models.all.values() if not model.unloaded)
                    life.events.instant("tinker_ready", serves=url, base=service.terms.base, models=models)
                    await life.unless_stopped(run_until_first(service.run(), report.run()))
                finally:
                    await server.stop_listening()
        except Stopped:
            life.events.instant("stopped", step=0)
        return CheckpointState(step=0, next_task=0)

    def snapshot(self) -> dict[str, Any]:
        """What the server does, for fleet.json."""
        return {} if self._report is None else {"server": self._report.describe()}

    def _certificate(self) -> dict[str, Any]:
        """That of the server, instead of that of the run."""
        own = self.section
        return {} if own.tls_cert is None else {"tls_cert": own.tls_cert, "tls_key": own.tls_key}

    @contextlib.asynccontextmanager
    async def service(self, life: ControllerLife, text: Callable[[str], Text]) -> AsyncIterator[TinkerService]:
        """What the server asks, continued from the store."""
        self._life = life
        life.dispatch.journal = None  # a call that has no result is performed again as a whole
        lost = lambda why: life.events.instant("trainer_lost", step=0, why=why)  # noqa: E731
        trainers = Trainers({name: policy.trainer for name, policy in life.policies.items()}, self._connect, lost)
        self._store = store = TinkerStore(self.folder)
        try:
            sample = SampleSlots(trainers, self._sample, self._load)
            counted = store.rows("select value from counter where name = 'version'")
            self._version = next((row["value"] for row in counted), 0)
            await trainers.ready()
            sampler, accounts = self._sampler(text(BASE)), keys.load(self.section.accounts, self.folder)
            shared = SharedParts(
                store=store, keys=accounts, calls=CallLog(store, accounts), terms=self._terms(), trainers=trainers,
                log=life.events.instant,
            )  # fmt: skip
            service = TinkerService(
                self.folder / "tinker", shared, TrainSlots(trainers, self._train, shared.turns), sample, sampler,
                base_policy=BASE, save_updates=self.section.save_updates,
                progress=lambda calls: life.events.scalar("tinker", step=calls),
            )  # fmt: skip
            service.restore()
            service.bill = await asyncio.to_thread(lambda: AccountBill.restored(scan(life.events.path)))
            self._report = ServerReport(service, sampler, life)
            try:
                yield service
            finally:
                await service.stop()
                self._report.write()
        finally:
            await store.close()

    async def _connect(self) -> Mapping[str, object]:
        """Wait for the trainer, and offer the base to workers. Raises TrainerLost."""
        for policy in self._life.policies.values():
            await policy.connected()
        self._life.policies[BASE].announce()
        return {name: policy.hello for name, policy in self._life.policies.items()}

    def _terms(self) -> ServerTerms:
        config = json.loads(self._life.policies[BASE].hello.engine.model_config)
        loras = [self.recipe.of(slot).train.lora for slot in (*self._train, *self._sample)]
        limits = [self.recipe.rollout.max_tokens, config.get("max_position_embeddings")]
        hub = model if isinstance(model := resolve(self.recipe.model.path), str) else ""
        return ServerTerms(
            base=self.section.name or self.recipe.model.path, tokenizer=hub or str(self._tokenizer()),
            context=min(limit for limit in limits if limit), vocabulary=config["vocab_size"],
            rank=min(lora.rank or DEFAULT_RANK for lora in loras if lora is not None), adapter=self._adapter,
            session_timeout_s=self.section.session_timeout_s,
        )  # fmt: skip

    def _adapter(self, lora: LoraSpec) -> AdapterSpec:
        """The adapter that a client means. Layers are named by the modules that they are in. Raises WindfallError."""
        if lora.unembed and self.recipe.engine.name == "vllm":
            what = "the workers of this server run vLLM, which holds no adapters of the head beside each other"
            raise WindfallError(what, where="lora_config", fix="Create the model with train_unembed=False.")
        wanted = {"self_attn": lora.attn, "mlp": lora.mlp, "lm_head": lora.unembed}
        targets = tuple(name for name, trained in wanted.items() if trained)
        return AdapterSpec(rank=lora.rank, alpha=ALPHA, seed=lora.seed, targets=targets)

    def _tokenizer(self) -> Path:
        """The trainer wrote it before it connected."""
        return folders.policy_folder(self.folder.resolve(), BASE) / "tokenizer"

    def _sampler(self, text: Text) -> FleetSampler:
        decode = partial(
            tokenizer.load(self._tokenizer()).decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        context = self._terms().context
        return FleetSampler(self._life.dispatch, stop=text.stop, decode=lambda ids: decode(list(ids)), context=context)

    async def _load(self, slot: str, folder: Path) -> None:
        """Put weights into a slot and offer them to workers, as a version that this slot never had."""
        policy = self._life.policies[slot]
        self._version = version = self._version + 1
        await self._store.write(self._store.put("counter", name="version", value=version))
        await policy.trainer.load_adapter(path=str(folder), id=f"{slot}/{version}/load")
        published = await policy.trainer.publish(version=version, id=f"{slot}/{version}/publish")
        offer = Offer(version=published.version, digest=published.digest)
        self._life.dispatch.set_offer(offer, policy.trainer.weights, policy=slot)

    def _port(self) -> int:
        """The port of the recipe, or that of the last start."""
        return self.section.port or int((folders.read_json(self.folder / "tinker.json") or {}).get("port", 0))
