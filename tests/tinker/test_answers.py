"""What the SDK's decoders make of results is what the results say."""

from __future__ import annotations

import numpy as np
import pytest

from windfall.tinker import calls as c
from windfall.tinker.wire import answers

tinker = pytest.importorskip("tinker", reason="the SDK is not installed: pip install tinker")


def message(result: c.Result) -> bytes:
    found = answers.of(c.decode_result(c.encode(result)))
    assert isinstance(found, bytes)
    return found


def test_log_probs_of_each_target_come_back_with_the_metrics() -> None:
    from tinker.proto.response_conv import deserialize_forward_backward_output

    scored = c.ForwardResult(logprobs=(np.array([-0.5, -1.25]), np.array([-2.0])), metrics={"loss:sum": 3.75})
    output = deserialize_forward_backward_output(message(scored))
    assert output.metrics == {"loss:sum": 3.75}
    assert [out["logprobs"].tolist() for out in output.loss_fn_outputs] == [[-0.5, -1.25], [-2.0]]
    assert [out["logprobs"].shape for out in output.loss_fn_outputs] == [[2], [1]]
    assert output.loss_fn_outputs[0]["logprobs"].dtype == "float32"
    several = c.ForwardResult(logprobs=(np.array([-1.0, -2.0, -3.0, -4.0]),), metrics={}, width=2)
    (found,) = deserialize_forward_backward_output(message(several)).loss_fn_outputs
    assert found["logprobs"].shape == [2, 2]


def test_results_of_several_requests_are_joined_by_the_sdk() -> None:
    """It sends a large batch in parts, and combines the metrics by the second part of their names."""
    from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
    from tinker.proto.response_conv import deserialize_forward_backward_output

    parts = [c.ForwardResult(logprobs=(np.array([-1.0]),), metrics={"loss:sum": loss}) for loss in (1.5, 2.0)]
    whole = combine_fwd_bwd_output_results([deserialize_forward_backward_output(message(part)) for part in parts])
    assert whole.metrics == {"loss:sum": 3.5}
    assert len(whole.loss_fn_outputs) == 2


def test_sequences_and_why_they_ended() -> None:
    from tinker.proto.response_conv import deserialize_sample_response

    sequences = (
        c.SampledSequence(tokens=(3, 4), logprobs=(-0.5, -0.25), stopped=True),
        c.SampledSequence(tokens=(5,), logprobs=(-1.0,), stopped=False),
    )
    response = deserialize_sample_response(message(c.Sampled(sequences=sequences)))
    assert [list(s.tokens) for s in response.sequences] == [[3, 4], [5]]
    assert [list(s.logprobs or ()) for s in response.sequences] == [[-0.5, -0.25], [-1.0]]
    assert [s.stop_reason for s in response.sequences] == ["stop", "length"]
    assert response.prompt_logprobs is None
    assert response.topk_prompt_logprobs is None


def test_log_probs_of_a_prompt_have_none_for_the_first_token() -> None:
    from tinker.proto.response_conv import deserialize_sample_response

    sampled = c.Sampled(
        sequences=(c.SampledSequence(tokens=(), logprobs=(), stopped=False),),
        prompt_logprobs=np.array([np.nan, -0.5, -2.0]),
        prompt_top_ids=((), (7, 8), (9,)),
        prompt_top_logprobs=((), (-0.5, -1.0), (-0.25,)),
    )
    response = deserialize_sample_response(message(sampled))
    assert response.prompt_logprobs == [None, -0.5, -2.0]
    assert response.topk_prompt_logprobs == [None, [(7, -0.5), (8, -1.0)], [(9, -0.25)]]


@pytest.mark.parametrize(
    ("result", "kind", "expected"),
    [
        (c.ModelReady(model="s:train:0"), "CreateModelResponse", {"model_id": "s:train:0"}),
        (c.ModelReady(model="m", path="p"), "LoadWeightsResponse", {"path": "p", "model_id": "m"}),
        (c.Stepped(metrics={"lr": 0.5, "gap": float("nan")}), "OptimStepResponse", {"metrics": {"lr": 0.5}}),
        (c.WeightsSaved(path="p"), "SaveWeightsResponse", {"path": "p"}),
        (c.WeightsSaved(path="p", sampler="s"), "SaveWeightsForSamplerResponseInternal", {"sampling_session_id": "s"}),
    ],
)
def test_other_results(result: c.Result, kind: str, expected: dict[str, object]) -> None:
    from tinker.lib._pydantic_conv import deserialize_json_response

    answer = answers.of(result)
    assert isinstance(answer, dict)
    found = deserialize_json_response(answer, getattr(tinker.types, kind)).model_dump()
    assert {name: found[name] for name in expected} == expected


def test_the_category_of_a_failure_is_one_that_the_sdk_knows() -> None:
    for user, category in ((True, "User"), (False, "Server")):
        found = answers.failed(c.FailedCall(message="no", user=user))
        assert found["error"] == "no"
        assert tinker.types.RequestErrorCategory(found["category"]).name == category
