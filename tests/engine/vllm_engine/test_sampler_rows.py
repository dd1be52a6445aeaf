"""Which batches windfall's sampler leaves to vLLM's. The runner is a stand-in, so this runs where vLLM is not
installed: a real runner never sends these batches, unless another version of vLLM changes what a batch is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windfall.engine.vllm.sampling import KEY, WindfallSampler, check_sampling
from windfall.errors import WindfallError
from windfall.types import Sampling

OURS = {KEY: (7, 0, 3, (1.0, 1.0, 0))}


def runner(*extras: dict[str, Any] | None) -> Any:
    """A model runner whose batch has one request with each of these `extra_args`."""
    ids = [str(n) for n in range(len(extras))]
    requests = {
        id: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=e)) for id, e in zip(ids, extras, strict=True)
    }
    batch = SimpleNamespace(req_ids=ids, num_reqs=len(ids), sampling_metadata=object())
    greedy = lambda logits, sampling_metadata: "vLLM's"  # noqa: E731
    return SimpleNamespace(
        sampler=greedy, input_batch=batch, requests=requests, optimistic_seq_lens_cpu=torch.full((len(ids),), 3)
    )


@pytest.mark.parametrize("extras", [(), (None,), (None, {})])
def test_dummy_batches_are_vllms(extras: tuple[Any, ...]) -> None:
    assert WindfallSampler(runner(*extras))(torch.zeros(4, 8), object()) == "vLLM's"


def test_rows_that_do_not_match_are_an_error() -> None:
    """Not greedy tokens, which would be trained on without a word."""
    r = runner(OURS, OURS)
    with pytest.raises(RuntimeError, match="3 rows while its batch has 2"):
        WindfallSampler(r)(torch.zeros(3, 8), r.input_batch.sampling_metadata)
    with pytest.raises(RuntimeError, match="other parameters"):
        WindfallSampler(r)(torch.zeros(2, 8), object())


def test_requests_of_others_in_the_batch_are_an_error() -> None:
    r = runner(OURS, None)
    with pytest.raises(RuntimeError, match="1 of 2 requests"):
        WindfallSampler(r)(torch.zeros(2, 8), r.input_batch.sampling_metadata)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (Sampling(top_p=0.9), r"top_p is 0\.9"),
        (Sampling(top_k=3), "top_k is 3"),
        (Sampling(temperature=0.005), r"temperature 0\.01 instead of 0\.005"),
        (Sampling(temperature=0.01), None),
        (Sampling(temperature=0.0), None),
    ],
)
def test_parameters_that_vllm_would_change_are_refused(wanted: Sampling, why: str | None) -> None:
    check_sampling(wanted, own=True, where="rollout")
    if why is None:
        check_sampling(wanted, own=False, where="rollout")
    else:
        with pytest.raises(WindfallError, match=why):
            check_sampling(wanted, own=False, where="rollout")
