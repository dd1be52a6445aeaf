"""Compares the engine with transformers on a small model, and decides whether the full model passes.

It compares the log-probs of sampled tokens: after chunked prefill, beyond any window, of siblings on shared pages, of a
lone response, a resumed one and evicted ones. With `run.deterministic`, a response must also have the same bits
whatever else is in its batch. An engine that holds several adapters is compared with a model into which each of them is
merged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from windfall.engine.selftest.small_model import SmallModel, build_small_model
from windfall.engine.selftest.verdict import ADAPTER_RANK
from windfall.engine.torch.packed import Packed
from windfall.errors import WindfallError
from windfall.models import load
from windfall.types import Request, Sampling
from windfall.weights.adapter_folder import EMBEDDING
from windfall.weights.merged import LORA_A, LORA_B, MergedWeights, is_repeated

FIX = "Use another model: docs/models.md lists the families that were checked."
SEEDS = (0, 1)
"""Seeds of the random weights. In a model with experts, a rounding error may route a token to another expert, while a
real error shows with any weights. So such a model is refused only if it fails with all seeds."""
ROOMY = {"kv_tokens": 512, "page_size": 16, "max_running": 8, "max_rows": 24}
TIGHT = {"kv_tokens": 80, "page_size": 16, "max_running": 8, "max_rows": 64}

ADAPTER_SCALE = 0.5
"""Scale of the adapters in the test."""

EngineFactory = Callable[..., Any]
"""Builds an engine from (model, kv_tokens, page_size, max_running, max_rows)."""


class DifferenceLimits(NamedTuple):
    """Largest accepted differences. Measured rounding in float32 was up to 7e-4 nats (Granite, which does not scale its
    attention scores by default), mostly below 1e-4; the smallest difference of a refused model was 0.03 nats."""

    nats: float
    gradient: float


class Difference(NamedTuple):
    """The largest difference from transformers in one comparison."""

    size: float
    where: str  # the request or the weight that has this difference


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The differences measured on the small model. `refused`: why they are too large; empty if they are not."""

    nats: float = 0.0
    gradient: float = 0.0
    refused: str = ""


def limits(device: str) -> DifferenceLimits:
    """GPU kernels sum in other orders and may round to TF32, so their limits are larger."""
    return DifferenceLimits(1e-2, 2e-2) if device.startswith("cuda") else DifferenceLimits(2e-3, 5e-3)


def judge_engine(
    config: Any,
    make: EngineFactory,
    *,
    device: str,
    longest: int,
    deterministic: bool = False,
    names: Iterable[str] | None = None,
    adapters: bool = False,
) -> Measured:
    """Measure the engine that `make` builds. Raises WindfallError if it differs too much from transformers. `adapters`:
    the engine holds several policies, with adapters of a rank up to verdict.ADAPTER_RANK."""
    held = _holding(make, {"": {}}) if adapters else make
    what = f"windfall's engine does not compute {architecture(config)} as transformers does"

    def measure(small: SmallModel) -> Measured:
        if deterministic and (why := neighbor_dependence(small)):
            return Measured(refused=f"run.deterministic cannot hold for {architecture(config)}: {why}")
        limit, found = limits(device).nats, Difference(0.0, "nothing")
        differences = _engine_differences(small, held, longest)
        for difference in chain(differences, _adapter_differences(small, make, longest) if adapters else ()):
            found = max(found, difference, key=lambda d: d.size)
            if found.size > limit:
                why = f"log-probs differ by {found.size:.2g} nats ({found.where}); rounding is below {limit:g}"
                return Measured(nats=found.size, refused=f"{what}: {why}")
        if deterministic and not batch_invariant(small, held, longest=longest):
            why = f"run.deterministic does not hold for {architecture(config)}: results alone and in a batch differ"
            return Measured(nats=found.size, refused=why)
        return Measured(nats=found.size)

    return judge(measure, what, config, device, longest, names)


def judge(
    measure: Callable[[SmallModel], Measured],
    what: str,
    config: Any,
    device: str,
    longest: int,
    names: Iterable[str] | None,
) -> Measured:
    """Measure a small model. Raises WindfallError with `what` if it is refused."""
    first, names = None, None if names is None else list(names)
    for seed in SEEDS:
        try:
            small = build_small_model(config, names, longest=longest, device=device, seed=seed)
            measured = measure(small)
        except WindfallError as e:
            raise WindfallError(f"{what}: {e.what}", where="model.path", fix=FIX) from e
        except Exception as e:  # fault boundary: foreign model code
            error = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
            raise WindfallError(f"{what}: {error}", where="model.path", fix=FIX) from e
        if not measured.refused:
            return measured
        first = first or measured
        if neighbor_dependence(small) is None:
            break
    assert first is not None
    raise WindfallError(first.refused, where="model.path", fix=FIX)


def architecture(config: Any) -> str:
    """The name of the model's class, for messages."""
    return (getattr(config, "architectures", None) or [config.model_type])[0]


def _engine_differences(small: SmallModel, make: EngineFactory, longest: int) -> Iterator[Difference]:
    rng = np.random.default_rng(1)

    def prompt(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(3, small.vocabulary, n))

    def ask(id: str, ids: tuple[int, ...], tokens: int) -> Request:
        tokens = max(1, min(tokens, longest - len(ids)))
        return Request(id=id, prompt=ids, seed=len(id) + tokens, max_tokens=tokens, sampling=Sampling(temperature=1.0))

    twice = prompt(34)
    pair, one = [ask("sibling 1", twice, 8), ask("sibling 2", twice, 5)], ask("from one token", prompt(1), 6)
    together = drain(make(small.model, **ROOMY), [*pair, one])
    yield from (_against_reference(small, f"{r.id}, among others", r, together[r.id]) for r in (*pair, one))
    long = ask("long", prompt(4), 36)
    alone = drain(make(small.model, **ROOMY), [long])["long"]
    yield _against_reference(small, "long, alone", long, alone)
    cut = tuple(alone[0][:19])
    rest = replace(long, prompt=long.prompt + cut, position=len(cut), max_tokens=long.max_tokens - len(cut))
    if rest.max_tokens > 0:
        resumed = drain(make(small.model, **ROOMY), [one, rest])["long"]
        yield _against_reference(small, "long, cut and resumed among others", rest, resumed)
    tight = [replace(ask(f"evicted {i}", prompt(6), 30), seed=i) for i in range(3)]
    crowded = drain(make(small.model, **TIGHT), tight)
    yield from (_against_reference(small, r.id, r, crowded[r.id]) for r in tight)


def _holding(make: EngineFactory, adapters: Mapping[str, Mapping[str, Tensor]]) -> EngineFactory:
    """Makes engines that hold these adapters by policy."""

    def made(model: Any, **how: Any) -> Any:
        engine = make(model, **how)
        for policy, adapter in adapters.items():
            weights = MergedWeights(model.state_dict(), adapter, ADAPTER_SCALE, base_is_loaded=True)
            engine.swap(0, weights, policy=policy)
        return engine

    return made


def _adapter_differences(small: SmallModel, make: EngineFactory, longest: int) -> Iterator[Difference]:
    """Two adapters and none in one batch, on one prompt. Each is compared with a reference that it is merged into."""
    adapters = {"one": random_adapter(small.model, 1), "two": random_adapter(small.model, 2), "none": {}}
    ids = tuple(range(3, 3 + min(20, longest - 1)))
    asked = [
        Request(id=f"{policy} {n}", prompt=ids, seed=n, max_tokens=max(1, min(6, longest - len(ids))), policy=policy)
        for n in range(2)
        for policy in adapters
    ]
    made = drain(_holding(make, adapters)(small.model, **ROOMY), asked)
    for policy, adapter in adapters.items():
        compared = merged(small, adapter)
        for r in asked:
            if r.policy == policy:
                yield _against_reference(compared, f"adapter {r.id}, beside others", r, made[r.id])


def merged(small: SmallModel, adapter: Mapping[str, Tensor]) -> SmallModel:
    """The same model, with a reference that this adapter is merged into."""
    out = copy.copy(small)
    out.reference = copy.deepcopy(small.reference)
    if any(not is_repeated(name) for name in adapter):
        load.untie(out.reference)
    out.reference.load_state_dict(MergedWeights(small.reference.state_dict(), adapter, ADAPTER_SCALE))
    return out


def random_adapter(model: Any, seed: int) -> dict[str, Tensor]:
    """An adapter of all layers that can have one, which changes their outputs by about a third."""
    noise, out = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        linear = type(layer) is torch.nn.Linear and (is_repeated(name) or layer is head)
        if linear or (type(layer) is torch.nn.Embedding and name.endswith(f".{EMBEDDING}")):
            outputs, inputs = layer.weight.shape
            size = float(layer.weight.detach().std()) * (inputs / ADAPTER_RANK) ** 0.5 / (3 * ADAPTER_SCALE)
            out[name + LORA_A] = torch.randn(ADAPTER_RANK, inputs, generator=noise) / inputs**0.5
            out[name + LORA_B] = size * torch.randn(outputs, ADAPTER_RANK, generator=noise)
    return out


def drain(engine: Any, requests: Sequence[Request]) -> dict[str, tuple[list[int], list[float]]]:
    """Run all requests to their end. Returns tokens and log-probs by request id."""
    out: dict[str, tuple[list[int], list[float]]] = {r.id: ([], []) for r in requests}
    for r in requests:
        engine.add(r)
    for _ in range(10_000):
        if not len(engine):
            return out
        for chunk in engine.step():
            out[chunk.id][0].extend(chunk.tokens)
            out[chunk.id][1].extend(chunk.logprobs)
    raise WindfallError("the engine did not finish within 10,000 steps")


@torch.no_grad()
def _against_reference(
    small: SmallModel, where: str, request: Request, generated: tuple[list[int], list[float]]
) -> Difference:
    tokens, logprobs = generated
    if len(tokens) != request.max_tokens or not all(0 <= t < small.vocabulary for t in tokens):
        counts = f"{len(tokens)} of {request.max_tokens}"
        raise WindfallError(f"{where}: the engine generated tokens {tokens[:8]}..., {counts}")
    logits = small.logits((*request.prompt, *tokens))[len(request.prompt) - 1 : -1].float()
    theirs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return largest(where, (torch.tensor(logprobs) - theirs.cpu()).abs())


def largest(where: str, differences: Any) -> Difference:
    """The largest of these differences; infinite if one is not a number."""
    size = float(differences.max()) if differences.numel() else 0.0
    return Difference(size if size == size else float("inf"), where)


def batch_invariant(small: SmallModel, make: EngineFactory, *, longest: int) -> bool:
    """Whether a response has the same log-probs, bit for bit, alone and in a batch with others."""
    ids = tuple(range(3, 15))
    one = Request(id="one", prompt=ids, seed=1, max_tokens=max(1, min(24, longest - len(ids))))
    others = [replace(one, id=f"other {n}", prompt=ids[n:], seed=n) for n in (2, 3, 4)]
    alone, batched = (drain(make(small.model, **ROOMY), requests)["one"] for requests in ([one], [*others, one]))
    return alone == batched


class _OperationRecorder(TorchDispatchMode):
    """Records the name and the input shapes of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen.append((str(func), [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def neighbor_dependence(small: SmallModel) -> str | None:
    """Why the bits of a row depend on the other rows of a step; None if they do not. They do not if every operation has
    the same shapes whichever tokens the step contains: then no row's sums depend on the experts that other rows are
    routed to."""
    operations = []
    for step in (1, 7):
        ids = torch.tensor([[3 + step * n % (small.vocabulary - 3) for n in range(16)]], device=small.device)
        batch = Packed.of([1] * 16, small.device)
        with _OperationRecorder() as recorder:
            small.model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False, batch=batch)
        operations.append(recorder.seen)
    if operations[0] == operations[1] and not any("grouped_mm" in name for name, _ in operations[0]):
        return None
    why = "the shapes of its operations depend on the tokens (as in a mixture of experts)"
    return f"{why}, so a row's bits depend on its neighbors"


@torch.no_grad()
def weights_difference(model: Any) -> float:
    """Mean difference of log-probs, in nats, between windfall's attention and plain attention, over a few tokens."""
    count = model.get_input_embeddings().num_embeddings
    ids = torch.tensor([[(7 * i + 3) % count for i in range(12)]], device=model.device)
    at = torch.arange(ids.shape[1], device=model.device)[None]
    logprobs, own = [], model.config._attn_implementation
    for attention, more in ((own, {"batch": Packed.of([ids.shape[1]], model.device)}), ("eager", {})):
        model.set_attn_implementation(attention)
        try:
            logits = model(input_ids=ids, position_ids=at, use_cache=False, **more).logits[0, :-1].float()
        finally:
            model.set_attn_implementation(own)
        logprobs.append(torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]))
    return float((logprobs[0] - logprobs[1]).abs().mean())
