"""Adapters of several policies in the GPU engine: the Triton kernels against the reference (with TRITON_INTERPRET=1 in
Triton's interpreter, or on a GPU), and the engine with captured graphs against merged models. Not covered: speed
(benchmarks/engine/adapters.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.cuda.test_kernels import CUDA, DEVICE, DTYPES, kernels  # noqa: F401
from tests.support.engines import reference_kernels as reference
from tests.support.engines.adapter_case import PARTS, RANK, given, merged, random_adapter
from tests.support.engines.gpu_case import Case, cases
from tests.support.engines.small_models import drain, logprobs, requests, tokens
from windfall.engine.cuda.adapters import ProjectionAdapters, RowGroups
from windfall.engine.cuda.state import DeviceState

MIXES = {
    "one": [0] * 20,
    "sorted": [0] * 17 + [1] * 3 + [3] * 16,
    "mixed": [n * 7 % 5 - 1 for n in range(50)],  # also rows without an adapter
    "none": [-1] * 8,
}


def projection(inputs: int, outputs: tuple[int, ...], dtype: torch.dtype, rank: int = 16) -> ProjectionAdapters:
    noise, how = torch.Generator().manual_seed(inputs), {"device": DEVICE, "dtype": dtype}
    return ProjectionAdapters(
        weight=torch.randn(sum(outputs) + 4 * len(outputs) * rank, inputs, generator=noise).div(inputs**0.5).to(**how),
        bias=None,
        b=torch.randn(4, sum(outputs), rank, generator=noise).div(rank**0.5).to(**how),
        scale=torch.tensor([1.0, 2.0, 0.5, 3.0], device=DEVICE),
        outputs=outputs,
    )


def state_of(numbers: list[int]) -> tuple[torch.Tensor, DeviceState]:
    """Slots in another order than rows, and a state in which they have these adapters."""
    state = DeviceState.new(len(numbers), 1, DEVICE)
    slots = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)
    state.adapter[slots.long()] = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    return slots, state


def listed(groups: RowGroups) -> list[tuple[int, list[int]]]:
    tiles = [t for t in groups.tiles.tolist() if t[2]]
    return [(adapter, groups.order[first : first + count].tolist()) for adapter, first, count in tiles]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("width", [1, 3])
def test_every_row_is_in_one_group_of_its_adapter(kernels: Any, mix: str, width: int) -> None:  # noqa: F811
    slots, state = state_of(MIXES[mix])
    groups = kernels.group_rows(slots, state, 4, width)
    assert listed(groups) == listed(reference.group_rows(slots, state, 4, width))
    wanted = [(number % 5, n * width + k) for n, number in enumerate(MIXES[mix]) for k in range(width)]
    assert sorted((adapter, row) for adapter, rows in listed(groups) for row in rows) == sorted(wanted)
    assert all(len(rows) <= groups.tile for _, rows in listed(groups))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(48, (48, 32, 32)), (96, (48,)), (640, (130, 130)), (1100, (64,))])
@pytest.mark.parametrize("mix", MIXES)
def test_grouped_products(kernels: Any, dtype: torch.dtype, inputs: int, outputs: Any, mix: str) -> None:  # noqa: F811
    """Inputs of one split and of several, outputs that are no multiple of a block, one to three parts."""
    slots, state = state_of(MIXES[mix])
    adapters, noise = projection(inputs, outputs, dtype), torch.Generator().manual_seed(2)
    y = torch.randn(len(slots), inputs, generator=noise).to(DEVICE, dtype) @ adapters.weight.T
    groups = kernels.group_rows(slots, state, 4)
    made, expected = kernels.add_adapters(y, adapters, groups), reference.add_adapters(y, adapters, groups)
    close = 1e-4 if dtype == torch.float32 else 0.1
    assert torch.allclose(made, expected, atol=close, rtol=0.02)
    base, alone = y[:, : sum(outputs)], (torch.tensor(MIXES[mix]) < 0).to(DEVICE)
    assert torch.equal(made[alone], base[alone])
    assert alone.all() or not torch.allclose(made, base, atol=10 * close)
    adapters.scale[0] = 0.0
    logits, before = y.clone(), y.clone()
    made, expected = (
        kernels.add_adapters_in_place(logits, adapters, groups),
        reference.add_adapters(y, adapters, groups),
    )
    assert made.data_ptr() == logits.data_ptr()
    assert torch.allclose(made, expected, atol=close, rtol=0.02)
    untouched = (torch.tensor(MIXES[mix]) < 1).to(DEVICE)
    assert torch.equal(logits[untouched], before[untouched])
    assert torch.equal(logits[:, sum(outputs) :], before[:, sum(outputs) :])
    adapters.scale[0] = 1.0
    if len(set(outputs)) == 1 and len(outputs) == 2:
        made = kernels.add_adapters_swiglu(y, adapters, groups)
        assert torch.allclose(made, reference.add_adapters_swiglu(y, adapters, groups), atol=close, rtol=0.02)


def test_larger_tiles_of_a_prefill(kernels: Any) -> None:  # noqa: F811
    numbers = [n // 300 - 1 for n in range(1100)]
    slots, state = state_of(numbers)
    groups = kernels.group_rows(slots, state, 4)
    assert groups.tile == 64
    assert listed(groups) == listed(reference.group_rows(slots, state, 4))
    adapters = projection(48, (48,), torch.float32, rank=32)
    y = torch.randn(1100, 48, device=DEVICE) @ adapters.weight.T
    made, expected = kernels.add_adapters(y, adapters, groups), reference.add_adapters(y, adapters, groups)
    assert torch.allclose(made, expected, atol=1e-3)


@pytest.mark.parametrize("case", cases(["llama", "qwen3", "qwen2-bias"]))
def test_log_probs_are_those_of_merged_models(case: Any) -> None:
    """Three policies in one batch, one of them without an adapter; one is swapped while all run."""
    own = Case(*case)
    e = own.engine(adapters=3, adapter_rank=RANK, max_running=8, burst=3)
    policies = ("solver", "verifier", "reference")
    ends = (*PARTS, "lm_head", "embed_tokens")
    adapters: dict[str, Any] = {
        "solver": random_adapter(own.model, 1),
        "verifier": random_adapter(own.model, 2, parts=ends),
    }
    for n, policy in enumerate(policies):
        e.swap(0, given(own.model, adapters.get(policy, {}), loaded=n > 0), policy=policy)
    wanted = [replace(r, policy=policies[n % 3], max_tokens=20) for n, r in enumerate(requests(9, seed=3))]
    for r in wanted:
        e.add(r)
    made = {r.id: [] for r in wanted}
    for _ in range(4):
        for c in e.step():
            made[c.id].append(c)
    adapters["solver again"] = random_adapter(own.model, 3)
    e.swap(1, given(own.model, adapters["solver again"], loaded=True), policy="solver")
    for id, chunks in drain(e).items():
        made[id] += chunks
    oracles = {name: merged(own.plain, {k: t.float() for k, t in a.items()}) for name, a in adapters.items()}
    oracles["reference"] = own.plain
    seen = set()
    for r in wanted:
        said, count = tokens(made[r.id]), len(tokens(c for c in made[r.id] if c.version == 0))
        assert len(said) == 20
        for name, span in ((r.policy, slice(0, count)), ("solver again", slice(count, 20))):
            if not said[span]:
                continue
            seen.add(name)
            with torch.no_grad():
                logits = oracles[name](torch.tensor([[*r.prompt, *said]])).logits[0, len(r.prompt) - 1 : -1]
            oracle = torch.log_softmax(logits, -1)[torch.arange(20), said][span]
            # An adapter as large as these changes log-probs by several nats.
            assert logprobs(made[r.id])[span] == pytest.approx(oracle.tolist(), abs=3 * own.close)
    assert seen == oracles.keys()


@pytest.mark.skipif(not CUDA, reason="there is no GPU")
def test_swaps_capture_no_graph_again() -> None:
    own = Case("llama", "cuda", torch.bfloat16)
    e = own.engine(adapters=2, adapter_rank=RANK)
    asked = [replace(r, policy="solver") for r in requests(4, seed=3)]
    for version in range(3):
        e.swap(version, given(own.model, random_adapter(own.model, version), loaded=version > 0), policy="solver")
        drain(e, asked)
        if version == 0:
            graphs = {key: id(graph) for key, graph in e._device._graphs._captured.items()}
    assert graphs
    assert graphs.items() <= {key: id(graph) for key, graph in e._device._graphs._captured.items()}.items()
