"""The HTTP server, as the SDK sees it: keys, errors, long polls, large and compressed bodies."""

from __future__ import annotations

import asyncio
import json
import pickle
import queue
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.tinker_server import ALICE, BOB, MODEL, Server
from tests.support.servers.certificates import self_signed
from windfall.link import tls
from windfall.recipe.fleet import Fleet
from windfall.tinker import calls as c
from windfall.tinker.wire import server as wire

tinker = pytest.importorskip("tinker", reason="the SDK is not installed: pip install tinker")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=server.url, api_key=ALICE.key) as found:
        yield found


def ask(server: Server, path: str, body: Any = None, *, key: str = ALICE.key, **headers: str) -> tuple[int, Any]:
    """Status and body of the answer to a request."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"X-API-Key": key, "Content-Type": "application/json"} | headers
    request = urllib.request.Request(f"{server.url}/api/v1{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())


def data(size: int = 2) -> list[Any]:
    ids = [1 + n % 90 for n in range(size + 1)]
    inputs = {"target_tokens": ids[1:]}
    return [tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)]


def prompt() -> Any:
    return tinker.ModelInput.from_ints([1, 2, 3])


def test_keys_are_checked_before_anything_else(server: Server) -> None:
    assert ask(server, "/healthz", key="") == (200, {"status": "ok"})
    for key in ("", "tml-other"):
        for path in ("/client/config", "/create_session", "/sessions"):
            assert ask(server, path, None if path == "/sessions" else {}, key=key)[0] == 401
    assert ask(server, "/sessions", key="", Authorization=f"Bearer {ALICE.key}")[0] == 200
    with pytest.raises(tinker.AuthenticationError, match="not one of the server's"):
        tinker.RestClient(base_url=server.url, api_key="tml-other").list_sessions().result()


def test_errors_say_what_is_wrong(server: Server) -> None:
    assert ask(server, "/create_session", b"{")[1]["detail"].startswith("the body is not a JSON object")
    assert ask(server, "/session_heartbeat", {"session_id": 3}) == (
        400,
        {"detail": "session_id: Expected `str`, got `int`"},
    )
    status, answer = ask(server, "/fly", {})
    assert (status, answer["detail"][:45]) == (404, "POST /api/v1/fly: there is no such request in")
    assert ask(server, "/sessions?limit=-3")[1] == {"detail": "limit: '-3' is not a number from 0 on"}
    assert ask(server, "/forward_backward", {})[0] == 415
    assert ask(server, "/audit") == (400, {"detail": f"GET /api/v1/audit: {wire.REFUSED['GET /audit']}"})
    assert ask(server, "/retrieve_future", {"request_id": "x"})[0] == 410


def test_a_bug_is_answered_with_500(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("oops")

    sessions = server.service.sessions
    monkeypatch.setattr(sessions, "of", fail)
    assert ask(server, "/sessions") == (500, {"detail": "GET /api/v1/sessions: ZeroDivisionError: oops"})
    assert "GET /api/v1/sessions failed" in caplog.text


def test_a_client_that_vanishes_while_it_sends_is_no_bug(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused, refusal = queue.SimpleQueue[int](), wire._refusal

    def told(request: Any, error: Exception) -> c.Refusal:
        found = refusal(request, error)
        refused.put(found.status)
        return found

    monkeypatch.setattr(wire, "_refusal", told)
    url = urllib.parse.urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.key}\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b'{"a":')
    assert refused.get(timeout=60) == 400
    assert "failed" not in caplog.text


def test_a_call_that_is_refused_does_not_hold_up_the_ones_after_it(client: Any) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    wrong, update = training.forward_backward(data(), "gspo"), training.optim_step(tinker.AdamParams(learning_rate=0.5))
    with pytest.raises(tinker.RequestFailedError, match="loss_fn: 'gspo' is not supported") as caught:
        wrong.result(30)
    assert caught.value.category is tinker.types.RequestErrorCategory.User
    assert update.result(30).metrics["lr"] == 0.5


def test_a_large_batch_arrives_in_parts(server: Server, client: Any) -> None:
    """The SDK sends the first part last, and joins the results."""
    training = client.create_lora_training_client(MODEL, rank=4).result()
    output = training.forward_backward(data(1) * 1025, "cross_entropy").result(120)
    made = [call for call in server.submitted if isinstance(call, c.LossCall) and call.model == training.model_id]
    parts = list({call.seq: call for call in made}.values())  # it repeats a request that was not answered in time
    assert sorted(call.seq for call in parts) == [1, 2]
    assert parts[-1].seq == 1
    assert sum(len(call.samples) for call in parts) == len(output.loss_fn_outputs) == 1025
    assert output.metrics["loss:sum"] == pytest.approx(-1025 * output.loss_fn_outputs[0]["logprobs"].data[0], rel=1e-4)


def test_a_large_result_is_announced_with_its_size(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "INLINE_BYTES", 10)
    training = client.create_lora_training_client(MODEL, rank=4).result()
    assert len(training.forward(data(100), "cross_entropy").result(30).loss_fn_outputs[0]["logprobs"].data) == 100


def test_a_result_that_takes_longer_than_one_poll(server: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = server.service.samplers._fleet
    sample = fleet.sample

    async def hold_one(id: str, account: str, call: c.SampleCall, place: Callable[[], Any]) -> Any:
        if call.seed == 131313:
            async with place():
                await asyncio.sleep(600)
        return await sample(id, account, call, place)

    monkeypatch.setattr(wire, "WAIT_S", 0.2)
    monkeypatch.setattr(fleet, "sample", hold_one)
    sampler = client.create_sampling_client(base_model=MODEL).result()
    slow = sampler.sample(prompt(), 1, tinker.SamplingParams(max_tokens=2, seed=131313))
    quick = sampler.sample(prompt(), 2, tinker.SamplingParams(max_tokens=2, stop=[])).result(30)
    assert [len(s.tokens) for s in quick.sequences] == [2, 2]
    assert not slow.future().done()
    request = slow_request(server)
    assert ask(server, "/retrieve_future", {"request_id": request}) == (
        408,
        {"type": "try_again", "request_id": request, "queue_state": "active"},
    )
    assert slow.future().cancel()
    status, answer = ask(server, "/retrieve_future", {"request_id": request})
    while status == 408:
        status, answer = ask(server, "/retrieve_future", {"request_id": request})
    assert answer == {"error": "the call was canceled", "category": "user"}


def slow_request(server: Server) -> str:
    (found,) = (call for call in server.submitted if isinstance(call, c.SampleCall) and call.seed == 131313)
    return f"{found.sampler}/{found.seq}"


def test_retrieved_results_are_acknowledged_and_sequences_have_names(server: Server, client: Any) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    names = [
        s.sequence_id for s in sampler.sample(prompt(), 2, tinker.SamplingParams(max_tokens=1)).result(30).sequences
    ]
    request = names[0].rpartition("/")[0]
    assert names == [f"{request}/0", f"{request}/1"]
    entry = server.service.calls.get(request)
    assert entry is not None
    assert entry.retrieved


def test_a_copy_of_a_sampling_client_has_calls_of_its_own(client: Any) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    for number, copy in enumerate([pickle.loads(pickle.dumps(sampler)) for _ in range(2)], 1):
        (sequence,) = copy.sample(prompt(), 1, tinker.SamplingParams(max_tokens=1)).result(30).sequences
        assert sequence.sequence_id.split("/")[1] == str(number * 1_000_000_000)


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_sessions_can_be_searched(server: Server) -> None:
    rest = tinker.RestClient(base_url=server.url, api_key=ALICE.key)
    names = ["red apple", "green apple", "red pear"]
    clients = [
        tinker.ServiceClient(
            base_url=server.url, api_key=ALICE.key, display_name=name, user_metadata={"color": name.split()[0]}
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


def test_keys_do_not_travel_in_clear_text(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = self_signed(tmp_path, "basicConstraints=critical,CA:FALSE")
    context = tls.server_context(Fleet(tls_cert=cert, tls_key=key))

    async def listen(server: Server) -> tuple[wire.TinkerServer, int]:
        secure = wire.TinkerServer(server.service)
        return secure, await secure.listen("127.0.0.1", 0, "", context)

    secure, port = server.play(listen)
    url = f"https://127.0.0.1:{port}"
    try:
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=30)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        tinker.RestClient(base_url=url, api_key=BOB.key).list_sessions().result(30)
    finally:
        server.play(lambda server: secure.stop_listening())
