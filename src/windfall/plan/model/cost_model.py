"""Seconds and bytes of the parts of a run on given GPUs. Pure.

Rollout, one replica of `tp` GPUs (a decode step; the terms of HexGen, and a term for reading the KV cache):

    launch x layers + max(weights / bandwidth, batch x 2 P / FLOP/s) + batch x context x KV bytes / bandwidth
    + batch x sampling + 2 all-reduces per layer if tp > 1

Training, per step: FSDP over n GPUs of one type (trainer/ranks/rank_budget.py for memory and bytes), computation and
communication overlapped.

A weight update costs the rollout side a pull and, for running responses, one prefill of their context.

`Efficiency` holds what hardware reaches of its data sheet, fitted to an H200. For other GPUs the same shares are
assumed, and every plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from windfall.controller.directory.routes import CHUNK_BYTES
from windfall.errors import WindfallError
from windfall.plan.model.devices import Gpu
from windfall.plan.model.workload import VALUE_BYTES, AddedWorkload, Workload, kv_bytes
from windfall.step_time import StepTime
from windfall.trainer.model import activation_memory
from windfall.trainer.ranks import state_layout
from windfall.trainer.ranks.rank_budget import ModelShape, RankBudget, rank_budget
from windfall.trainer.ranks.state_layout import StateLayout

ENGINE_MEMORY = 0.88
"""Share of a GPU's memory that an engine uses for weights and KV cache."""
REPLICA_SIZES = (1, 2, 4, 8)
MAX_RUNNING = 1024
"""Responses in one engine step."""
ALL_REDUCE_S = 12e-6
"""Latency of one all-reduce among the GPUs of a machine. Assumed."""
LINK_SHARE = 0.8
"""Share of a link's bandwidth that collectives reach. Assumed."""
LOOPBACK = 16e9
"""Bytes per second at which all engines on the trainer's machine pull together: 4 to 16 readers on 16 cores beside an
H200 (docs/weights.md)."""
HOST_BYTES_PER_S = 48e9
"""Bytes per second between a GPU and the memory of its host, in each direction at the same time. Measured on an H200
(docs/ranks.md)."""
RECOMPUTE = 4 / 3
"""Work of a training step, relative to one without recomputation, if every layer is computed twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """What hardware reaches of its data sheet: the fit of benchmarks/plan/plan_fit.py to an H200."""

    launch_s: float = 3.64254e-5
    """Seconds per layer and decode step, whatever the batch."""
    weights: float = 1.0
    """Share of memory bandwidth reached while reading weights."""
    kv: float = 0.841258
    """Share of memory bandwidth reached while reading the KV cache."""
    decode: float = 0.68432
    """Share of peak FLOP/s in the matrix products of decoding."""
    sample_s: float = 0.0
    """Seconds per response and step for sampling."""
    prefill: float = 0.679682
    train: float = 0.939256
    """Share of peak FLOP/s in training."""
    elementwise: float = 62_183.0
    """Time of training outside of matrix products, in FLOP at peak speed, per token, layer, hidden value and pass
    (forward, and two of the backward pass). Counted in FLOP, so that a model reaches the same share of peak FLOP/s on
    every GPU; by bandwidth, GPUs with much of it would look too good at training (docs/plan.md)."""
    publish_bytes_per_s: float = 19.523e9
    """Bytes per second at which a trainer's GPU makes new weights available."""
    publish_s: float = 0.0609454
    """Seconds of publishing, whatever the size."""
    slower: float = 1.0
    """Factor on all times, fitted to one measured figure of a system."""
    source: str = "fitted to docs/engine-gpu.md, one H200, 2026-11-16"
    held_out: str = "decode 4%, rollout 5%, group 10%, prefill 21%, train 10%, publish 86%"
    """Mean errors of a fit to some of the figures on the others (benchmarks/plan/plan_fit.py)."""


def elementwise_s(shape: ModelShape, gpu: Gpu, e: Efficiency) -> float:
    """Seconds per token of one pass of training outside of matrix products."""
    return e.elementwise * shape.layers * shape.hidden / gpu.flops


def optimizer_s(state_bytes: float, bandwidth: float, e: Efficiency) -> float:
    """Seconds of Adam: its state is read and written once."""
    return 2 * state_bytes / (bandwidth * e.weights)


def state_s(layout: StateLayout, gpu: Gpu, e: Efficiency) -> float:
    """Seconds of an update: on the GPU, and for what it copies from and to host memory."""
    return optimizer_s(layout.update_bytes, gpu.bandwidth, e) + layout.host_bytes / HOST_BYTES_PER_S


class DoesNotFit(Exception):
    """This model does not fit on these GPUs. The message says what is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One engine on `tp` GPUs of a machine."""

    gpu: Gpu
    tp: int
    service: StepTime
    slots: int
    """Responses that run at once."""
    kv_tokens: int
    memory_bytes: float
    """Per GPU: weights and a full KV cache."""

    def tok_per_s(self, batch: float, work: Workload) -> float:
        """Tokens per second at this batch size, prefill included."""
        batch = max(1.0, min(batch, self.slots))
        step_s = self.service.step_s(batch, batch * work.mean_context)
        prompt_s = self.service.prefill_s * work.prompt_tokens / work.mean_tokens
        return 1 / (step_s / batch + prompt_s)


def decode_service(shape: ModelShape, gpu: Gpu, tp: int, e: Efficiency, kv_value_bytes: int = VALUE_BYTES) -> StepTime:
    """Step times of a replica. The larger of reading the weights and computing is a bend at one batch size.

    >>> from windfall.plan.model.devices import find
    >>> from windfall.plan.model.workload import MODELS
    >>> s = decode_service(MODELS["Qwen3-8B"], find("H200"), 1, Efficiency())
    >>> s.step_s(1) < s.step_s(64) < s.step_s(512)
    True
    """
    weights_s = VALUE_BYTES * shape.parameters / (tp * gpu.bandwidth * e.weights)
    token_s = 2 * shape.active_parameters / (tp * gpu.flops * e.decode)
    fixed_s, each_s = e.launch_s * shape.layers + weights_s, e.sample_s
    if tp > 1:
        sent = 2 * (tp - 1) / tp * shape.hidden * VALUE_BYTES
        fixed_s += 2 * shape.layers * ALL_REDUCE_S
        each_s += 2 * shape.layers * sent / (gpu.link * LINK_SHARE)
    context_s = kv_bytes(shape, kv_value_bytes) / (tp * gpu.bandwidth * e.kv)
    return StepTime(
        fixed_s=fixed_s, each_s=max(each_s, 1e-9), context_s=context_s,
        prefill_s=2 * shape.active_parameters / (tp * gpu.flops * e.prefill), over_batch=weights_s / token_s,
        over_s=token_s,
    ).slower(e.slower)  # fmt: skip


@lru_cache(maxsize=4096)
def replica(work: Workload, gpu: Gpu, tp: int, e: Efficiency) -> Replica:
    """The engine that this many GPUs can run; raises DoesNotFit."""
    shape, token_bytes = work.shape, kv_bytes(work.shape, work.kv_value_bytes)
    _check_measured(gpu, gpu.worker, tp)
    room = tp * ENGINE_MEMORY * gpu.memory_bytes - work.weights_bytes
    kv_tokens = int(room // token_bytes)
    longest = work.prompt_tokens + work.max_tokens
    if kv_tokens < longest:
        need = (work.weights_bytes + longest * token_bytes) / tp / 1e9
        raise DoesNotFit(
            f"an engine on {tp} {gpu.name} needs {need:.0f} GB per GPU for the weights and one response of "
            f"{longest:,} tokens; {ENGINE_MEMORY * gpu.memory_bytes / 1e9:.0f} GB can be used"
        )
    if shape.kv_heads % tp and tp > 1:
        raise DoesNotFit(f"{shape.kv_heads} KV heads cannot be split over {tp} GPUs")
    slots = max(1, min(MAX_RUNNING, int(kv_tokens / work.mean_context)))
    used = min(kv_tokens, slots * work.mean_context) * token_bytes + work.weights_bytes
    service = gpu.worker or decode_service(shape, gpu, tp, e, work.kv_value_bytes)
    return Replica(gpu=gpu, tp=tp, service=service, slots=slots, kv_tokens=kv_tokens, memory_bytes=used / tp)


def _check_measured(gpu: Gpu, times: StepTime | None, gpus: int) -> None:
    if times is None and gpu.measured_only:
        raise DoesNotFit(f"the speed of {gpu.name} is not known: measure it with a short run and --measured RUN")
    if times is not None and gpus > 1:
        raise DoesNotFit(f"the times of {gpu.name} were measured on one, not on {gpus}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTrainer:
    """A trainer on `gpus` GPUs of one type."""

    gpu: Gpu
    layout: str
    """How the GPUs divide the work, such as "fsdp 8"."""
    gpus: int
    compute_s: float
    send_s: float
    """Seconds of communication per step; overlapped with computation for FSDP."""
    update_s: float
    """Optimizer and publishing, per step."""
    step_s: float
    memory_bytes: float
    """Per GPU, with the activations that it keeps at least."""
    pack_tokens: int
    host_bytes: float = 0.0
    """Masters and moments in host memory, per GPU."""
    sent_bytes: float = 0.0
    """Bytes that leave every machine per step, to the next one."""
    last_share: float = 0.0
    """Share of a step's training in its last pack."""


def _token_s(work: Workload, gpu: Gpu, e: Efficiency, recompute: float) -> float:
    """Seconds of training per token on one GPU. A backward pass takes twice as long as a forward pass; frozen weights
    save half of it in the matrix products with weights. A reference model (KL), and the proximal policy of a step with
    several updates, are one more forward pass each."""
    shape = work.shape
    attention = 4 * shape.layers * shape.heads * shape.head * work.mean_trained_context
    others = attention / (gpu.flops * e.train) + elementwise_s(shape, gpu, e)
    weights = 2 * shape.active_parameters / (gpu.flops * e.train)
    more = work.kl + (work.minibatches > 1)
    return recompute * ((2 if work.adapter_parameters else 3) * weights + 3 * others) + more * (weights + others)


@lru_cache(maxsize=65536)
def fsdp(work: Workload, gpu: Gpu, gpus: int, per_machine: int, network: float, e: Efficiency) -> PlannedTrainer:
    """Training with FSDP on `gpus` GPUs, `per_machine` of them in one machine; raises DoesNotFit. Several bases have
    equal numbers of them, and the slowest trainer counts."""
    if isinstance(work, AddedWorkload) and not work.one_base:
        count = sum(part.trained for part in work.parts)
        if gpus % count:
            raise DoesNotFit(f"{gpus} {gpu.name} cannot be divided equally among {count} trainers")
        each = [fsdp(part, gpu, gpus // count, per_machine, network, e) for part in work.parts if part.trained]
        slowest = max(each, key=lambda trained: trained.step_s)
        memory = max(trained.memory_bytes for trained in each)
        sent = sum(trained.sent_bytes for trained in each)
        layout = f"{count} trainers, {slowest.layout} each" if count > 1 else slowest.layout
        return replace(slowest, gpus=gpus, layout=layout, memory_bytes=memory, sent_bytes=sent)
    _check_measured(gpu, gpu.trainer, gpus)
    longest, context = work.prompt_tokens + work.max_tokens, work.context_parallel
    if gpus % context:
        raise DoesNotFit(f"{gpus} {gpu.name} cannot be divided into groups of train.context_parallel = {context}")
    if work.shape.heads % context:
        raise DoesNotFit(f"train.context_parallel = {context} ranks cannot divide {work.shape.heads} heads equally")
    usable = activation_memory.MAX_MEMORY_SHARE * gpu.memory_bytes

    def budget(tokens: int, *, whole_base: bool = False) -> RankBudget:
        return rank_budget(
            work.shape, gpus, pack_tokens=tokens, kl=work.kl, adapter_parameters=work.adapter_parameters,
            whole_base=whole_base, context=context,
        )  # fmt: skip

    asked = min(work.micro_tokens, longest * work.responses)
    smallest = max(longest, asked)  # a response is never split over packs
    least, kept = budget(smallest), work.shape.kept(VALUE_BYTES)
    others = least.gathered + least.reference
    try:  # the memory of machines is not known
        layout = state_layout.choose(
            replace(least.layout, moment_bytes=work.moment_bytes), work.offload, gpu_bytes=usable, host_bytes=math.inf,
            least=others + least.least_activations,
            wanted=others + budget(smallest if asked else max(longest, activation_memory.SMALL_PACK)).all_activations,
        )  # fmt: skip
    except WindfallError as error:
        raise DoesNotFit(f"training on {gpus} {gpu.name}: {error.what}") from error
    whole_base = layout.frozen > 0 and not layout.sharded
    rank, pack = replace(budget(smallest, whole_base=whole_base), layout=layout), asked
    if not asked:
        left, of_rank = gpu.memory_bytes - rank.fixed, -(-longest // context)
        pack = context * activation_memory.pack_tokens(left, work.shape.layers, kept, of_rank)
        rank = replace(budget(pack, whole_base=whole_base), layout=layout)
    share = max(0.0, min(1.0, (usable - rank.fixed - rank.least_activations) / max(1.0, rank.all_activations)))
    recompute = RECOMPUTE - (RECOMPUTE - 1) * share
    tokens = work.trained_tokens
    compute_s = tokens * _token_s(work, gpu, e, recompute) / gpus
    # All ranks of a machine share its network. In a ring one of them sends to the next machine, as much as each of them
    # sends to its neighbor; with several rings, each carries a part of that.
    link = (gpu.link if gpus <= per_machine else min(gpu.link, network)) * LINK_SHARE
    packs = math.ceil(tokens * context / gpus / pack)
    send_s = packs * rank.sent_per_pack / link if gpus > 1 else 0.0
    update_s = state_s(layout, gpu, e) + e.publish_s + work.update_bytes / gpus / e.publish_bytes_per_s
    if gpu.trainer is not None:  # measured times are as they are
        compute_s, send_s, update_s = gpu.trainer.train_s * work.tokens, 0.0, gpu.trainer.update_s
        e = replace(e, slower=1.0)
    step_s = (max(compute_s, send_s) + update_s) * e.slower
    return PlannedTrainer(
        gpu=gpu, layout=f"fsdp {gpus}", gpus=gpus, compute_s=compute_s * e.slower, send_s=send_s * e.slower,
        update_s=update_s * e.slower, step_s=step_s, memory_bytes=rank.fixed + rank.least_activations, pack_tokens=pack,
        sent_bytes=packs * rank.sent_per_pack, last_share=1 / packs, host_bytes=layout.host_bytes,
    )  # fmt: skip


class ZonePull(NamedTuple):
    """Machines of one zone that get new weights: one of them from the trainer, the others from each other."""

    link: float
    """Bytes per second from the trainer."""
    engines: float = 1.0
    """Most engines on one of them."""
    machines: int = 1
    inside: float = math.inf
    """Bytes per second between two of them."""
    share: float = 1.0
    """Part of the weights that they lack."""


def pull_s(work: Workload, zones: Sequence[ZonePull], sources: int, local: int = 0) -> float:
    """Seconds until all engines hold new weights. Each zone reads one copy from the trainer, and its machines pass it
    on chunk by chunk. The `sources`, the trainer's machines, share the sending. `local`: engines on the trainer's
    machine. Engines of one machine read its memory. A delta saves bytes on the network only: to apply and verify it
    takes as long as a copy on loopback (docs/weights.md).

    >>> from windfall.plan.model.workload import MODELS
    >>> work = Workload(shape=MODELS["Qwen3-8B"])
    >>> one, many = (pull_s(work, [ZonePull(12.5e9, machines=n, inside=12.5e9)], 1) for n in (1, 20))
    >>> one < many < 1.02 * one, pull_s(work, [ZonePull(1e9)] * 4, 1) > 2 * pull_s(work, [ZonePull(1e9)], 1)
    (True, True)
    """
    sent_s = [zone.share * work.pull_bytes / (zone.link * LINK_SHARE) for zone in zones]
    passed_s = [
        (work.pull_bytes * (zone.machines > 1) + CHUNK_BYTES * (zone.machines - 1)) / (zone.inside * LINK_SHARE)
        for zone in zones
    ]
    network_s = max([sum(sent_s) / sources, *map(max, sent_s, passed_s)])
    most = max([zone.engines for zone in zones], default=0.0)
    return max(max(local, most) * work.update_bytes / LOOPBACK, network_s + most * apply_s(work))


def apply_s(work: Workload) -> float:
    """Seconds to apply and verify a delta in one engine."""
    return work.update_bytes / LOOPBACK if work.delta < 1 else 0.0


def own_engine(work: Workload, trained: PlannedTrainer, gpus: int, e: Efficiency) -> Replica:
    """The trainer's own engine (`fleet.local`): one on each of these GPUs, all together as one worker. Beside the
    trainer's state, each needs a KV cache and, if the trainer has several ranks or trains adapters, a copy of the
    weights. Raises DoesNotFit."""
    if isinstance(work, AddedWorkload):
        raise DoesNotFit("trainers of several policies do not generate")
    gpu, shape = trained.gpu, work.shape
    copies = work.weights_bytes if trained.gpus > 1 or work.adapter_parameters else 0.0
    value_bytes = work.kv_value_bytes if trained.gpus == 1 else VALUE_BYTES  # with ranks, that of the model
    token_bytes = kv_bytes(shape, value_bytes)
    room = ENGINE_MEMORY * gpu.memory_bytes - trained.memory_bytes - copies
    kv_tokens = int(room // token_bytes)
    _check_measured(gpu, gpu.worker, 1)
    longest = work.prompt_tokens + work.max_tokens
    if kv_tokens < longest:
        held, least = trained.memory_bytes + copies, longest * token_bytes
        raise DoesNotFit(
            f"beside {held / 1e9:.0f} GB of training state and weights on each {gpu.name}, the trainer's own engine "
            f"needs {least / 1e9:.1f} GB for one response of {longest:,} tokens; "
            f"{ENGINE_MEMORY * gpu.memory_bytes / 1e9:.0f} GB can be used"
        )
    s = gpu.worker or decode_service(shape, gpu, 1, e, value_bytes)
    service = replace(
        s, each_s=s.each_s / gpus, context_s=s.context_s / gpus, prefill_s=s.prefill_s / gpus,
        over_batch=s.over_batch * gpus, over_s=s.over_s / gpus,
    )  # fmt: skip
    slots = gpus * max(1, min(MAX_RUNNING, int(kv_tokens / work.mean_context)))
    memory = trained.memory_bytes + copies + slots / gpus * work.mean_context * token_bytes
    return Replica(gpu=gpu, tp=gpus, service=service, slots=slots, kv_tokens=gpus * kv_tokens, memory_bytes=memory)
