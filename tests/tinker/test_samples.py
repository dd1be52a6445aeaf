"""What the SDK's encoder makes of data and losses is read as the samples that a trainer takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from windfall.algorithms.given import Loss
from windfall.tinker import calls as c
from windfall.tinker.calls import Refusal
from windfall.tinker.wire import messages, samples

tinker = pytest.importorskip("tinker", reason="the SDK is not installed: pip install tinker")


def datum(ids: list[int], **inputs: Any) -> Any:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids), loss_fn_inputs=inputs)


def body(data: list[Any], loss: str = "cross_entropy", config: Any = None, *, forward: bool = False) -> bytes:
    from tinker.proto.request_conv import forward_backward_request_to_proto

    given = tinker.types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = tinker.types.ForwardBackwardRequest(forward_backward_input=given, model_id="s:train:0", seq_id=7)
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward
    return message.SerializeToString()


def refused(data: list[Any], loss: str = "cross_entropy", config: Any = None) -> str:
    call = samples.forward_call(body(data, loss, config))
    assert isinstance(call, c.RefusedCall)
    assert (call.model, call.seq) == ("s:train:0", 7)
    return call.message


def test_weighted_tokens_become_a_sample_with_all_positions_as_targets() -> None:
    data = [datum([5, 6, 7], target_tokens=[6, 7, 8], weights=[0.0, 0.5, 1.0]), datum([1], target_tokens=[2])]
    call = samples.forward_call(body(data))
    assert isinstance(call, c.ForwardBackwardCall)
    assert (call.model, call.seq, call.loss) == ("s:train:0", 7, Loss(name="cross_entropy"))
    first, second = call.samples
    assert first.labels is None
    assert (first.ids, first.targets) == ((5, 6, 7, 8), (1, 2, 3))
    assert first.advantages is not None
    assert first.advantages.tolist() == [0.0, 0.5, 1.0]
    assert (second.ids, second.targets) == ((1, 2), (1,))
    assert second.advantages is not None
    assert second.advantages.tolist() == [1.0]


def test_a_forward_pass_is_another_call() -> None:
    assert isinstance(samples.forward_call(body([datum([1], target_tokens=[2])], forward=True)), c.ForwardCall)


@pytest.mark.parametrize(
    ("loss", "config", "expected"),
    [
        ("importance_sampling", None, Loss(name="importance_sampling")),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, Loss(name="ppo", clip_low=0.9, clip_high=1.1)),
        ("cispo", {"clip_high_threshold": 5}, Loss(name="cispo", clip_high=5.0)),
        ("dro", {"beta": 0.1}, Loss(name="dro", beta=0.1)),
    ],
)
def test_losses_of_reinforcement_learning(loss: str, config: Any, expected: Loss) -> None:
    logprobs, advantages = np.float32([-0.1, -0.2]), np.float32([1, -1])
    call = samples.forward_call(
        body([datum([1, 2], target_tokens=[2, 3], logprobs=logprobs, advantages=advantages)], loss, config)
    )
    assert isinstance(call, c.ForwardBackwardCall)
    assert call.loss == expected
    (sample,) = call.samples
    assert sample.advantages is not None
    assert sample.advantages.tolist() == [1, -1]
    assert sample.behavior.tolist() == logprobs.tolist()


def test_chunks_of_an_input_are_one_text() -> None:
    chunks = [tinker.types.EncodedTextChunk(tokens=[1, 2]), tinker.types.EncodedTextChunk(tokens=[3])]
    data = tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": [2, 3, 4]})
    call = samples.forward_call(body([data]))
    assert isinstance(call, c.ForwardBackwardCall)
    assert call.samples[0].ids == (1, 2, 3, 4)


def test_other_targets_than_the_next_tokens_become_labels() -> None:
    call = samples.forward_call(body([datum([5, 6], target_tokens=[9, 8])]))
    assert isinstance(call, c.ForwardBackwardCall)
    (sample,) = call.samples
    assert sample.ids == (5, 6, 8)
    assert sample.labels is not None
    assert sample.labels.tolist() == [9, 8]


def test_several_targets_of_a_position() -> None:
    weights = np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)
    call = samples.forward_call(body([datum([5, 6], target_tokens=np.array([[6, 9], [7, 8]]), weights=weights)]))
    assert isinstance(call, c.ForwardBackwardCall)
    (sample,) = call.samples
    assert (call.width, sample.ids[:2], sample.targets) == (2, (5, 6), (1, 1, 2, 2))
    assert sample.labels is not None
    assert sample.labels.tolist() == [6, 9, 7, 8]
    assert sample.advantages is not None
    assert sample.advantages.tolist() == [0.75, 0.25, 0.5, 0.5]


def test_calls_survive_the_journal() -> None:
    call = samples.forward_call(body([datum([5, 6], target_tokens=[9, 8], weights=[0.25, 1.0])]))
    again = c.decode_call(c.encode(call))
    assert isinstance(again, c.ForwardBackwardCall)
    (sample,) = again.samples
    assert (sample.ids, sample.targets) == ((5, 6, 8), (1, 2))
    assert sample.advantages is not None
    assert sample.advantages.tolist() == [0.25, 1.0]
    assert sample.labels is not None
    assert sample.labels.tolist() == [9, 8]


def test_what_is_not_supported_is_refused_in_words() -> None:
    plain = datum([1, 2], target_tokens=[2, 3])
    scored = datum([1], target_tokens=[2], logprobs=[-0.5], advantages=[1.0])
    image = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=1)
    seen = tinker.Datum(model_input=tinker.ModelInput(chunks=[image]), loss_fn_inputs={"target_tokens": [2]})
    top = datum([1, 2], target_tokens=np.array([[2, 3], [3, 4]]))
    short = datum([1, 2], target_tokens=np.array([[2, 3]]))
    matrices = {"logprobs": np.ones((2, 2), np.float32), "advantages": np.ones((2, 2), np.float32)}
    ranked = datum([1, 2], target_tokens=np.array([[2, 3], [3, 4]]), **matrices)
    assert refused([seen]).startswith("data[0].model_input[0]: 'image' is not supported")
    assert "data[0].target_tokens: it has the shape 2x2. Give one token" in refused([ranked], "ppo")
    assert refused([short]) == "data[0].target_tokens: it has the shape 1x2, but expected 2x2"
    assert refused([top, plain]).startswith("data: 2 and 1 targets per position in one call")
    assert "loss_fn: 'gspo' is not supported. Instead, use importance_sampling" in refused([plain], "gspo")
    assert "loss_fn: 'stable_reinforce' is not supported" in refused([plain], "stable_reinforce")
    assert "forward_backward_custom" in refused([plain], "custom", {"loss_id": "x"})
    assert (
        refused([scored], "dro", {"beto": 1.0}) == "loss_fn_config.beto: dro has no such setting. Did you mean 'beta'?"
    )
    assert refused([scored], "dro", {"beta": "much"}) == "loss_fn_config.beta: expected a number, not a text"
    assert "is above clip_high_threshold" in refused([scored], "ppo", {"clip_low_threshold": 1.5})


def test_inputs_that_do_not_fit_are_refused_in_words() -> None:
    assert refused([datum([1, 2], target_tokens=[2])]) == (
        "data[0].target_tokens: it has 1 numbers for 2 tokens of model_input"
    )
    assert "data[1].loss_fn_inputs: cross_entropy needs target_tokens" in refused(
        [datum([1], target_tokens=[2]), datum([1], weights=[1.0])]
    )
    assert "ppo needs advantages and logprobs" in refused([datum([1], target_tokens=[2])], "ppo")
    assert "cross_entropy has no such input. Its inputs are target_tokens, weights." in refused(
        [datum([1], target_tokens=[2], advantages=[1.0])]
    )
    assert "a number is not finite" in refused([datum([1], target_tokens=[2], weights=[float("nan")])])
    assert "integers from 0 on" in refused([datum([1], target_tokens=[-100])])
    assert "integers from 0 on" in refused([datum([1], target_tokens=np.float32([2.0]))])
    assert "a token id is negative" in refused([datum([-1], target_tokens=[2])])
    assert "it has no tokens" in refused([datum([], target_tokens=[])])
    assert refused([]) == "data: it is empty. Send at least one datum."


def test_a_body_that_names_no_call_is_refused_at_once() -> None:
    for data in (b"\xff\xff\xff", b"", messages.new("ForwardBackwardRequest", model_id="m").SerializeToString()):
        with pytest.raises(Refusal):
            samples.forward_call(data)
