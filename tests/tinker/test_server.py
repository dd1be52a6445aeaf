"""The HTTP server, as the SDK sees it: keys, errors, long polls, large and compressed bodies."""

from __future__ import annotations

import json
import pickle
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import self_signed
from tests.support.tinker_memory import BASE, KEY, ServedMemory, served
from windfall.link import tls
from windfall.recipe.fleet import Fleet
from windfall.tinker import calls as c
from windfall.tinker.wire import server as wire

tinker = pytest.importorskip("tinker", reason="the SDK is not installed: pip install tinker")


@pytest.fixture(scope="module")
def memory() -> Iterator[ServedMemory]:
    with served(wait_s=0.2) as found:
        yield found


@pytest.fixture(scope="module")
def client(memory: ServedMemory) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=memory.url, api_key=KEY) as found:
        yield found


def ask(memory: ServedMemory, path: str, body: Any = None, *, key: str = KEY, **headers: str) -> tuple[int, Any]:
    """Status and body of the answer to a request."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"X-API-Key": key, "Content-Type": "application/json"} | headers
    request = urllib.request.Request(f"{memory.url}/api/v1{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())


def data(size: int = 2) -> list[Any]:
    ids = list(range(1, size + 2))
    inputs = {"target_tokens": ids[1:]}
    return [tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)]


def prompt() -> Any:
    return tinker.ModelInput.from_ints([1, 2, 3])


def test_keys_are_checked_before_anything_else(memory: ServedMemory) -> None:
    assert ask(memory, "/healthz", key="") == (200, {"status": "ok"})
    for key in ("", "tml-other"):
        for path in ("/client/config", "/create_session", "/sessions"):
            assert ask(memory, path, None if path == "/sessions" else {}, key=key)[0] == 401
    assert ask(memory, "/sessions", key="", Authorization=f"Bearer {KEY}")[0] == 200
    with pytest.raises(tinker.AuthenticationError, match="not one of the server's"):
        tinker.RestClient(base_url=memory.url, api_key="tml-other").list_sessions().result()


def test_errors_say_what_is_wrong(memory: ServedMemory) -> None:
    assert ask(memory, "/create_session", b"{")[1]["detail"].startswith("the body is not a JSON object")
    assert ask(memory, "/session_heartbeat", {"session_id": 3}) == (
        400,
        {"detail": "session_id: Expected `str`, got `int`"},
    )
    status, answer = ask(memory, "/fly", {})
    assert (status, answer["detail"][:45]) == (404, "POST /api/v1/fly: there is no such request in")
    assert ask(memory, "/sessions?limit=-3")[1] == {"detail": "limit: '-3' is not a number from 0 on"}
    assert ask(memory, "/forward_backward", {})[0] == 415
    assert ask(memory, "/audit") == (400, {"detail": f"GET /api/v1/audit: {wire.REFUSED['GET /audit']}"})
    assert ask(memory, "/retrieve_future", {"request_id": "x"})[0] == 410


def test_a_bug_is_answered_with_500(memory: ServedMemory, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("oops")

    memory.service.sessions_of, before = fail, memory.service.sessions_of
    try:
        assert ask(memory, "/sessions") == (500, {"detail": "GET /api/v1/sessions: ZeroDivisionError: oops"})
    finally:
        memory.service.sessions_of = before
    assert "GET /api/v1/sessions failed" in caplog.text


def test_a_call_that_is_refused_does_not_hold_up_the_ones_after_it(client: Any) -> None:
    training = client.create_lora_training_client(BASE, rank=4).result()
    wrong, update = training.forward_backward(data(), "gspo"), training.optim_step(tinker.AdamParams(learning_rate=0.5))
    with pytest.raises(tinker.RequestFailedError, match="loss_fn: 'gspo' is not supported") as caught:
        wrong.result(30)
    assert caught.value.category is tinker.types.RequestErrorCategory.User
    assert update.result(30).metrics == {"lr": 0.5}


def test_a_large_batch_arrives_in_parts(memory: ServedMemory, client: Any) -> None:
    """The SDK sends the first part last, and joins the results."""
    training = client.create_lora_training_client(BASE, rank=4).result()
    output = training.forward_backward(data(1000) * 1000, "cross_entropy").result(120)
    parts = [call for call in memory.service.submitted[-3:] if isinstance(call, c.ForwardBackwardCall)]
    assert [call.seq for call in parts] == [2, 3, 1]
    assert sum(len(call.samples) for call in parts) == len(output.loss_fn_outputs) == 1000
    assert output.metrics["loss:sum"] == pytest.approx(1000 * 1000 * 1001 / 8)


def test_a_large_result_is_announced_with_its_size(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "INLINE_BYTES", 10)
    training = client.create_lora_training_client(BASE, rank=4).result()
    assert len(training.forward(data(100), "cross_entropy").result(30).loss_fn_outputs[0]["logprobs"].data) == 100


def test_a_result_that_takes_longer_than_one_poll(memory: ServedMemory, client: Any) -> None:
    sampler = client.create_sampling_client(base_model=BASE).result()
    slow = sampler.sample(prompt(), 1, tinker.SamplingParams(max_tokens=2, seed=13))
    quick = sampler.sample(prompt(), 2, tinker.SamplingParams(max_tokens=2)).result(30)
    assert [s.tokens for s in quick.sequences] == [[0, 1], [1, 2]]
    assert not slow.future().done()
    request = slow_request(memory)
    assert ask(memory, "/retrieve_future", {"request_id": request}) == (
        408,
        {"type": "try_again", "request_id": request, "queue_state": "paused_capacity",
         "queue_state_reason": "all slots are in use"},
    )  # fmt: skip
    assert slow.future().cancel()
    for _ in range(200):
        status, answer = ask(memory, "/retrieve_future", {"request_id": request})
        if status == 200:
            break
    assert answer == {"error": "the call was canceled", "category": "user"}


def slow_request(memory: ServedMemory) -> str:
    (found,) = (call for call in memory.service.submitted if isinstance(call, c.SampleCall) and call.seed == 13)
    return f"{found.sampler}/{found.seq}"


def test_retrieved_results_are_acknowledged_and_sequences_have_names(memory: ServedMemory, client: Any) -> None:
    sampler = client.create_sampling_client(base_model=BASE).result()
    names = [
        s.sequence_id for s in sampler.sample(prompt(), 2, tinker.SamplingParams(max_tokens=1)).result(30).sequences
    ]
    request = names[0].rpartition("/")[0]
    assert names == [f"{request}/0", f"{request}/1"]
    assert request in memory.service.acknowledged


def test_a_copy_of_a_sampling_client_has_calls_of_its_own(client: Any) -> None:
    sampler = client.create_sampling_client(base_model=BASE).result()
    for number, copy in enumerate([pickle.loads(pickle.dumps(sampler)) for _ in range(2)], 1):
        (sequence,) = copy.sample(prompt(), 1, tinker.SamplingParams(max_tokens=1)).result(30).sequences
        assert sequence.sequence_id.split("/")[1] == str(number * 1_000_000_000)


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_sessions_can_be_searched(memory: ServedMemory) -> None:
    rest = tinker.RestClient(base_url=memory.url, api_key=KEY)
    names = ["red apple", "green apple", "red pear"]
    clients = [
        tinker.ServiceClient(
            base_url=memory.url, api_key=KEY, display_name=name, user_metadata={"color": name.split()[0]}
        )
        for name in names
    ]
    ids = [found.holder.get_session_id() for found in clients]

    def search(**asked: Any) -> list[str]:
        return [
            s.session_id for s in rest.search_sessions(tinker.types.SessionSearchRequest(**asked)).result(30).sessions
        ]

    assert search(display_name="APPLE") == [ids[1], ids[0]]
    assert search(user_metadata={"color": "red"}) == [ids[2], ids[0]]
    assert search(session_id=ids[1]) == [ids[1]]
    assert search(display_name="apple", statuses=[{"type": "failed"}]) == []
    page = rest.search_sessions(tinker.types.SessionSearchRequest(user_metadata={"color": "red"}, limit=1)).result(30)
    assert search(user_metadata={"color": "red"}, cursor=page.next_cursor) == [ids[0]]
    for found in clients:
        found.close("success").result(30)
    assert search(display_name="apple") == []
    assert rest.get_session(ids[0]).future().exception(30).status_code == 410


def test_keys_do_not_travel_in_clear_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = self_signed(tmp_path, "basicConstraints=critical,CA:FALSE")
    with served(tls.server_context(Fleet(tls_cert=cert, tls_key=key))) as memory:
        assert memory.url.startswith("https://")
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            ask(memory, "/sessions")
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        found = tinker.RestClient(base_url=memory.url, api_key=KEY).list_sessions().result(30)
    assert found.sessions == []
