"""The SDK on a server: what users of the API rely on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.runs.tinker_server import MODEL, Server

tinker = pytest.importorskip("tinker", reason="the SDK is not installed: pip install tinker")

TEXT = [1, 7, 11, 5, 9]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as found:
        yield found


@pytest.fixture
def model(client: Any) -> Any:
    return new_model(client)


def new_model(client: Any, seed: int = 1) -> Any:
    return client.create_lora_training_client(MODEL, rank=4, seed=seed).result(60)


def datum(ids: list[int], **inputs: Any) -> Any:
    inputs = {"target_tokens": ids[1:], **inputs}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def scored(model: Any, ids: list[int] = TEXT) -> list[float]:
    """The log-prob of each token after the first, as the trainer says."""
    (output,) = model.forward([datum(ids)], "cross_entropy").result(60).loss_fn_outputs
    return output["logprobs"].tolist()


def trained(model: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model.forward_backward([datum(TEXT)], "cross_entropy")
        model.optim_step(tinker.AdamParams(learning_rate=0.02)).result(60)


def sample(sampler: Any, n: int = 1, *, ids: list[int] = TEXT, **params: Any) -> Any:
    more = {name: params.pop(name) for name in list(params) if name.startswith(("include", "topk"))}
    return sampler.sample(tinker.ModelInput.from_ints(ids), n, tinker.SamplingParams(**params), **more).result(60)


def test_a_loop_lowers_the_loss_and_its_samplers_keep_their_weights(client: Any, model: Any) -> None:
    first = model.save_weights_and_get_sampling_client().result(60)
    before = scored(model)
    assert first.compute_logprobs(tinker.ModelInput.from_ints(TEXT)).result(60)[1:] == pytest.approx(before, abs=1e-5)
    trained(model, 3)
    after = scored(model)
    assert sum(after) > sum(before) + 1
    second = model.save_weights_and_get_sampling_client().result(60)
    for sampler, expected in ((first, before), (second, after)):
        found = sampler.compute_logprobs(tinker.ModelInput.from_ints(TEXT)).result(60)
        assert found[0] is None
        assert found[1:] == pytest.approx(expected, abs=1e-5)


def test_inflight_samplers_follow_the_newest_weights(model: Any) -> None:
    early = model.save_weights_and_get_sampling_client(kind="inflight").result(60)
    trained(model)
    late = model.save_weights_and_get_sampling_client(kind="inflight").result(60)
    for sampler in (early, late):
        found = sampler.compute_logprobs(tinker.ModelInput.from_ints(TEXT)).result(60)
        assert found[1:] == pytest.approx(scored(model), abs=1e-5)


def test_gradients_of_several_calls_add_up(client: Any) -> None:
    other = [3, 2, 8, 8, 4]
    together, apart = new_model(client), new_model(client)
    loss = together.forward_backward([datum(TEXT), datum(other)], "cross_entropy").result(60).metrics["loss:sum"]
    parts = [apart.forward_backward([datum(ids)], "cross_entropy").result(60) for ids in (TEXT, other)]
    assert sum(part.metrics["loss:sum"] for part in parts) == pytest.approx(loss)
    norms = [m.optim_step(tinker.AdamParams()).result(60).metrics["grad_norm"] for m in (together, apart)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert scored(together) == pytest.approx(scored(apart), abs=1e-4)


def test_a_custom_loss_has_the_gradient_of_the_same_loss_on_the_server(client: Any) -> None:
    def negative(data: Any, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -sum(x.sum() for x in logprobs), {}

    own, given = new_model(client), new_model(client)
    mine = own.forward_backward_custom([datum(TEXT)], negative).result(60).metrics["loss:sum"]
    theirs = given.forward_backward([datum(TEXT)], "cross_entropy").result(60).metrics["loss:sum"]
    assert mine == pytest.approx(theirs, rel=1e-5)
    norms = [m.optim_step(tinker.AdamParams()).result(60).metrics["grad_norm"] for m in (own, given)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_ratio_of_tokens_that_the_model_sampled_is_one(model: Any) -> None:
    sampler = model.save_weights_and_get_sampling_client().result(60)
    (sequence,) = sample(sampler, max_tokens=6, seed=3).sequences
    ids = TEXT + list(sequence.tokens)
    unseen = len(TEXT) - 1
    inputs = {
        "logprobs": [0.0] * unseen + list(sequence.logprobs),
        "advantages": [0.0] * unseen + [1.0] * len(sequence.tokens),
    }
    found = model.forward_backward([datum(ids, **inputs)], "importance_sampling").result(60)
    assert found.metrics["loss:sum"] == pytest.approx(-len(sequence.tokens), rel=1e-3)


def test_targets_may_be_other_tokens_than_the_next_ones(model: Any) -> None:
    first, *_ = scored(model, [1, 7])
    inputs = {"target_tokens": [7, 7]}
    data = [tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)]
    (output,) = model.forward(data, "cross_entropy").result(60).loss_fn_outputs
    assert output["logprobs"].tolist()[0] == pytest.approx(first, abs=1e-5)
    assert output["logprobs"].tolist()[1] == pytest.approx(scored(model, [1, 2, 7])[1], abs=1e-5)


def test_state_is_saved_with_and_without_the_optimizer(client: Any, model: Any) -> None:
    trained(model, 2)
    path = model.save_state("middle").result(60).path
    trained(model, 2)
    same = client.create_training_client_from_state_with_optimizer(path).result(60)
    fresh = client.create_training_client_from_state(path).result(60)
    for each in (same, fresh):
        trained(each, 2)
    assert scored(same) == scored(model)
    assert scored(fresh) != scored(model)


def test_a_copy_of_weights_outlives_them(client: Any, model: Any) -> None:
    rest = tinker.RestClient(client._get_rest_holder())
    trained(model)
    path = model.save_state("original").result(60).path
    copy = rest.copy_weights(path, "project", ttl_seconds=3600).result(60)
    assert copy != rest.copy_weights(path, "project").result(60) != path
    rest.delete_checkpoint_from_tinker_path(path).result(60)
    same = client.create_training_client_from_state_with_optimizer(copy).result(60)
    assert scored(same) == scored(model)
    run = rest.get_training_run_by_tinker_path(copy).result(60)
    assert run.last_checkpoint.tinker_path == copy
    with pytest.raises(tinker.NotFoundError):
        rest.copy_weights(path, "project").result(60)
    with pytest.raises(tinker.BadRequestError, match="no access tokens"):
        rest.copy_weights(copy, "project", weights_access_token="x").result(60)


def test_weights_whose_files_are_gone_are_refused(server: Server, client: Any, model: Any) -> None:
    path = model.save_state("lost").result(60).path
    (folder,) = server.folder.rglob("weights/lost-*")
    shutil.rmtree(folder)
    for load in (client.create_training_client_from_state, tinker.RestClient(client._get_rest_holder()).copy_weights):
        refused = (tinker.BadRequestError, tinker.RequestFailedError)
        with pytest.raises(refused, match=r"cannot be copied.*\n*.*Save the weights again"):
            load(path, MODEL).result(60)


def test_seeds_greedy_tokens_and_what_ends_a_sequence(client: Any) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result(60)
    drawn = [[s.tokens for s in sample(sampler, 3, max_tokens=5, seed=7, temperature=4.0).sequences] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in drawn[0]}) > 1
    (greedy,) = sample(sampler, ids=[1, 2], max_tokens=5, temperature=0.0).sequences
    (stopped,) = sample(sampler, ids=[1, 2], max_tokens=5, temperature=0.0, stop=[greedy.tokens[1]]).sequences
    assert (stopped.tokens, stopped.stop_reason) == (greedy.tokens[:2], "stop")
    (endless,) = sample(sampler, max_tokens=60, stop=[]).sequences
    assert (len(endless.tokens), endless.stop_reason) == (60, "length")


def test_log_probs_of_a_prompt(client: Any) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result(60)
    asked = {"max_tokens": 1, "include_prompt_logprobs": True, "topk_prompt_logprobs": 3}
    response = sample(sampler, **asked)
    assert response.topk_prompt_logprobs[0] is None
    for row, token, logprob in zip(
        response.topk_prompt_logprobs[1:], TEXT[1:], response.prompt_logprobs[1:], strict=True
    ):
        assert [value for _, value in row] == sorted((value for _, value in row), reverse=True)
        assert dict(row).get(token, row[-1][1]) >= logprob - 1e-5
    last = sampler.compute_logprobs(tinker.ModelInput.from_ints(TEXT), prompt_logprobs_last_n=2).result(60)
    assert last == [None] * 3 + response.prompt_logprobs[3:]


def test_tokens_that_the_model_does_not_have_are_refused(client: Any, model: Any) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result(60)
    with pytest.raises(tinker.RequestFailedError, match="token 99999 is not one of"):
        model.forward_backward([datum([1, 99999])], "cross_entropy").result(60)
    with pytest.raises(tinker.BadRequestError, match="token 99999 is not one of"):
        sampler.sample(tinker.ModelInput.from_ints([99999]), 1, tinker.SamplingParams(max_tokens=1)).result(60)
    with pytest.raises(tinker.BadRequestError, match="at most 128"):
        sampler.sample(tinker.ModelInput.from_ints([1] * 200), 1, tinker.SamplingParams()).result(60)
    assert len(scored(model)) == 4


def test_the_tokenizer_is_that_of_the_base(model: Any) -> None:
    text = "1 + 2 ="
    tokenizer = model.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
