"""What the SDK's requests say, in JSON, becomes calls of the service; what cannot be honored is refused in words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from windfall.tinker import calls as c
from windfall.tinker.call_checks import why_not
from windfall.tinker.calls import Refusal
from windfall.tinker.wire import fields, requests
from windfall.training import Adam
from windfall.types import Sampling

tinker = pytest.importorskip("tinker", reason="the SDK is not installed: pip install tinker")


def sent(request: Any) -> dict[str, Any]:
    """The body that the SDK sends for a request."""
    from tinker._compat import model_dump

    body = model_dump(request, exclude_unset=False, exclude_none=True, mode="json")
    return fields.read_object(json.dumps(body).encode())


def why(convert: Callable[[dict[str, Any]], c.Call], request: Any) -> str:
    """Why a request is refused at once."""
    try:
        call = requests.model_call(sent(request), convert)
    except Refusal as e:
        return f"{e}" if e.status == 400 else f"{e.status}"
    assert isinstance(call, c.SampleCall)
    return why_not(call, context=8, vocabulary=100)


def create_model(**fields: Any) -> Any:
    lora = tinker.types.LoraConfig(rank=8, **fields.pop("lora", {}))
    asked = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": lora} | fields
    return tinker.types.CreateModelRequest(**asked)


def sample(**more: Any) -> Any:
    params = more.pop("params", {})
    return tinker.types.SampleRequest(
        sampling_session_id="s:sample:0",
        seq_id=1_000_000_002,
        prompt=more.pop("prompt", tinker.ModelInput.from_ints([1, 2, 3])),
        sampling_params=tinker.types.SamplingParams(**params),
        **more,
    )


def test_a_model_is_created_with_the_layers_and_the_seed_that_were_asked_for() -> None:
    asked = create_model(lora={"seed": 3, "train_mlp": False}, user_metadata={"run": "a"})
    call = requests.create_model(sent(asked))
    spec = c.LoraSpec(rank=8, seed=3, attn=True, mlp=False, unembed=True)
    assert call == c.CreateModel(session="s", seq=0, base="tiny", lora=spec, metadata={"run": "a"})


def test_a_model_without_a_seed_gets_the_same_one_if_the_request_is_repeated() -> None:
    first, again, other = (requests.create_model(sent(create_model(model_seq_id=n))).lora for n in (0, 0, 1))
    assert first == again != other


def test_a_model_is_created_from_weights_with_one_request() -> None:
    asked = tinker.types.LoadWeightsRequest(session_id="s", model_seq_id=2, path="tinker://m/weights/a", optimizer=True)
    expected = c.CreateModel(session="s", seq=2, base="", path="tinker://m/weights/a", optimizer=True)
    assert requests.load_weights(sent(asked)) == expected
    asked = tinker.types.LoadWeightsRequest(model_id="m", seq_id=1, path="tinker://m/weights/a", optimizer=False)
    assert requests.load_weights(sent(asked)) == c.LoadWeights(model="m", seq=1, path="tinker://m/weights/a")


def test_an_update_has_the_settings_of_adam() -> None:
    params = tinker.AdamParams(learning_rate=0.01, beta1=0.8, weight_decay=0.1, grad_clip_norm=2.0)
    asked = tinker.types.OptimStepRequest(optim_params=params, model_id="m", seq_id=4)
    adam = Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-12, weight_decay=0.1, clip_norm=2.0)
    assert requests.optim_step(sent(asked)) == c.OptimStepCall(model="m", seq=4, adam=adam)


def test_weights_are_saved_by_name_or_for_a_sampler() -> None:
    asked = tinker.types.SaveWeightsRequest(model_id="m", seq_id=4, path="a", ttl_seconds=3600, overwrite=True)
    expected = c.SaveWeights(model="m", seq=4, name="a", ttl_s=3600, overwrite=True)
    assert requests.save_weights(sent(asked)) == expected
    kind = tinker.types.SaveWeightsForSamplerRequest
    named, unnamed = kind(model_id="m", seq_id=4, path="a"), kind(model_id="m", seq_id=5, sampling_session_seq_id=0)
    live = kind(model_id="m", seq_id=6, sampling_session_seq_id=1, kind="inflight")
    assert requests.save_for_sampler(sent(named)) == c.SaveForSampler(model="m", seq=4, name="a")
    assert requests.save_for_sampler(sent(unnamed)) == c.SaveForSampler(model="m", seq=5, sampler_seq=0)
    assert requests.save_for_sampler(sent(live)) == c.SaveForSampler(model="m", seq=6, sampler_seq=1, live=True)


def test_a_sample() -> None:
    params = {"max_tokens": 5, "seed": 7, "temperature": 0.5, "top_k": 10, "top_p": 0.9, "stop": ["\n", "END"]}
    call = requests.sample(sent(sample(params=params, num_samples=3, prompt_logprobs=True, prompt_logprobs_last_n=2)))
    assert call == c.SampleCall(
        sampler="s:sample:0",
        seq=1_000_000_002,
        prompt=(1, 2, 3),
        n=3,
        max_tokens=5,
        sampling=Sampling(temperature=0.5, top_p=0.9, top_k=10),
        seed=7,
        stop_texts=("\n", "END"),
        prompt_logprobs=True,
        prompt_last=2,
    )


@pytest.mark.parametrize(
    ("stop", "ids", "texts", "eos"),
    [(None, (), (), True), ("a", (), ("a",), True), ([5, 6], (5, 6), (), True), ([], (), (), False)],
)
def test_what_ends_a_sequence(stop: Any, ids: tuple[int, ...], texts: tuple[str, ...], eos: bool) -> None:
    call = requests.sample(sent(sample(params={"stop": stop})))
    assert (call.stop_ids, call.stop_texts, call.eos) == (ids, texts, eos)
    assert call.sampling == Sampling()


def test_what_is_asked_for_beside_tokens_is_refused_if_it_is_not_supported() -> None:
    for field, value in (("topk_sample_logprobs", 2), ("prompt_alt_tokens_k", 1), ("record_stability_info", True)):
        assert why(requests.sample, sample(**{field: value})).startswith(f"{field}: this is not supported")
    image = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=1)
    assert "'image' is not supported" in why(requests.sample, sample(prompt=tinker.ModelInput(chunks=[image])))
    assert "it has no tokens" in why(requests.sample, sample(prompt=tinker.ModelInput.empty()))
    assert "at most 2 tokens" in why(requests.sample, sample(prompt_logprobs=True, prompt_logprobs_last_n=3))
    assert "1025 tokens are more than 100" in why(requests.sample, sample(topk_prompt_logprobs=1025))
    assert "would end every sequence" in why(requests.sample, sample(params={"stop": [""]}))
    for params in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 1 << 31}):
        assert why(requests.sample, sample(params=params)).startswith("sampling_params: temperature is at least 0")
    assert "Give at most 64" in why(requests.sample, sample(params={"stop": ["a"] * 65}))
    assert "together they have at most 8" in why(requests.sample, sample(params={"max_tokens": 6}))
    assert why(requests.sample, sample()) == ""


def test_models_that_this_server_cannot_train_are_refused() -> None:
    dimuon = tinker.types.DimuonOptimizerConfig()
    assert "'dimuon' is not supported" in why(requests.create_model, create_model(optimizer_config=dimuon))
    token = tinker.types.LoadWeightsRequest(
        session_id="s", model_seq_id=0, path="p", optimizer=True, weights_access_token="x"
    )
    assert "no access tokens" in why(requests.load_weights, token)


def test_a_refused_call_of_a_model_keeps_its_place() -> None:
    params = tinker.types.DimuonParams(learning_rate=0.1)
    asked = tinker.types.OptimStepRequest(optim_params=params, model_id="m", seq_id=4)
    call = requests.model_call(sent(asked), requests.optim_step)
    assert isinstance(call, c.RefusedCall)
    assert (call.model, call.seq) == ("m", 4)
    assert "the optimizer 'dimuon' is not supported" in call.message
    external = tinker.types.SaveWeightsExternalRequest(model_id="m", seq_id=5, path="a")
    call = requests.model_call(sent(external), requests.save_external)
    assert isinstance(call, c.RefusedCall)
    assert call.message.startswith("save_weights_external is not supported")


def test_fields_of_a_newer_sdk_are_refused_only_if_they_are_used() -> None:
    body = sent(sample())
    assert requests.sample(body | {"logit_mask": None, "best_of": 0}) == requests.sample(body)
    with pytest.raises(Refusal, match="logit_mask: this field is not known"):
        requests.sample(body | {"logit_mask": [1]})
    with pytest.raises(Refusal, match=r"sampling_params\.min_p: this field is not known"):
        requests.sample(body | {"sampling_params": {"min_p": 0.1}})


def test_calls_of_windfalls_own_client_have_the_same_limits() -> None:
    save = c.SaveWeights(model="m", seq=1, name="a", ttl_s=3600)
    assert requests.native(c.encode(save))[0] == save
    for ttl_s in (1, 1 << 40, math.inf):
        with pytest.raises(Refusal, match="ttl_s"):
            requests.native(c.encode({"type": "SaveWeights", "model": "m", "seq": 1, "name": "a", "ttl_s": ttl_s}))
    with pytest.raises(Refusal, match="no call in msgpack"):
        requests.native(b"\x82\xa4type\xabUnloadModel\xa1x" + b"\x91" * 100_000)


def test_numbers_that_cannot_be_stored_are_refused() -> None:
    assert "<=" in why(requests.sample, sample().model_copy(update={"seq_id": 1 << 63}))
    assert "<=" in why(requests.sample, sample(params={"top_k": 1 << 64}))
    for seq in (1 << 63, 1 << 53, -1, True, 2.5):
        with pytest.raises(Refusal, match="seq_id"):
            requests.model_call({"model_id": "m", "seq_id": seq, "path": "a"}, requests.save_weights)
