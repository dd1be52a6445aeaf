"""Every public method of the SDK is called on a server, and does what docs/tinker-methods.md says of it."""

from __future__ import annotations

import asyncio
import datetime
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.tinker_server import MODEL, Server
from windfall.models.load import TINY

tinker = pytest.importorskip("tinker", reason="the SDK is not installed: pip install tinker")

import tinker_methods as table  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "tinker-methods.md"
TRACED = {"logprobs": 1, "weights": 1}


class Clients:
    """The clients of one user, with a model and its saved weights."""

    def __init__(self, server: Server) -> None:
        self.where = {"base_url": server.url, "api_key": server.key}
        self.service = self.new_service()
        self.rest, self.admin = tinker.RestClient(**self.where), tinker.AdminClient(**self.where)
        self.session = self.service.holder.get_session_id()
        self.training = self.new_model()
        self.model = self.training.model_id
        self.count = 0
        self.weights = self.training.save_state("start").result(60).path
        self.sampler_weights = self.training.save_weights_for_sampler("start").result(60).path
        self.sampler = self.service.create_sampling_client(model_path=self.sampler_weights).result(60)

    def new_service(self, project: str | None = None) -> Any:
        return tinker.ServiceClient(**self.where, user_metadata={"of": "test"}, project_id=project)

    def new_model(self) -> Any:
        return self.service.create_lora_training_client(MODEL, rank=4, seed=1).result(60)

    def saved(self) -> str:
        """Weights that no other call uses."""
        return self.training.save_state(self.name()).result(60).path

    def name(self) -> str:
        self.count += 1
        return f"name-{self.count}"


@pytest.fixture(scope="module")
def clients(server: Server) -> Iterator[Clients]:
    found = Clients(server)
    yield found
    found.service.close("success").result(60)


def prompt() -> Any:
    return tinker.ModelInput.from_ints([1, 2, 3])


def data() -> list[Any]:
    inputs = {"target_tokens": [2, 3], "weights": [1.0, 0.5]}
    return [tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)]


def squares(data: Any, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    return sum((x * x).sum() for x in logprobs), {"count": float(len(logprobs))}


def traced(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/loss:sum": loss}


def traced_too(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    loss = -(logprobs * weights).mean()
    return loss, {"custom/loss:mean": loss}


def hours(count: int) -> datetime.datetime:
    return datetime.datetime(2026, 1, 1, count, tzinfo=datetime.UTC)


Call = Callable[[Clients, str], Any]
"""Calls a method by its name (its own, or that of its twin)."""
CALLS: dict[str, tuple[Call, str]] = {
    "ServiceClient.close": (lambda k, m: getattr(k.new_service(), m)("success"), ""),
    "ServiceClient.copy_weights": (lambda k, m: getattr(k.new_service("project"), m)(k.weights), "title"),
    "ServiceClient.create_custom_loss": (lambda k, m: getattr(k.service, m)(traced, TRACED), "input_names"),
    "ServiceClient.create_lora_training_client": (lambda k, m: getattr(k.service, m)(MODEL, rank=4), "model_id"),
    "ServiceClient.create_rest_client": (lambda k, m: getattr(k.service, m)(), "holder"),
    "ServiceClient.create_sampling_client": (lambda k, m: getattr(k.service, m)(base_model=MODEL), "sample"),
    "ServiceClient.create_training_client_from_state": (lambda k, m: getattr(k.service, m)(k.weights), "model_id"),
    "ServiceClient.create_training_client_from_state_with_optimizer": (
        lambda k, m: getattr(k.service, m)(k.weights),
        "model_id",
    ),
    "ServiceClient.get_console_url": (lambda k, m: getattr(k.service, m)(), "title"),
    "ServiceClient.get_server_capabilities": (lambda k, m: getattr(k.service, m)(), "supported_models"),
    "ServiceClient.get_telemetry": (lambda k, m: getattr(k.service, m)(), ""),
    "TrainingClient.create_sampling_client": (lambda k, m: getattr(k.training, m)(k.sampler_weights), "sample"),
    "TrainingClient.forward": (lambda k, m: getattr(k.training, m)(data(), "cross_entropy"), "metrics"),
    "TrainingClient.forward_backward": (lambda k, m: getattr(k.training, m)(data(), "cross_entropy"), "metrics"),
    "TrainingClient.forward_backward_custom": (lambda k, m: getattr(k.training, m)(data(), squares), "metrics"),
    "TrainingClient.get_console_url": (lambda k, m: getattr(k.training, m)(), "title"),
    "TrainingClient.get_info": (lambda k, m: getattr(k.training, m)(), "model_id"),
    "TrainingClient.get_telemetry": (lambda k, m: getattr(k.training, m)(), ""),
    "TrainingClient.get_tokenizer": (lambda k, m: getattr(k.training, m)(), "encode"),
    "TrainingClient.load_state": (lambda k, m: getattr(k.training, m)(k.weights), "path"),
    "TrainingClient.load_state_with_optimizer": (lambda k, m: getattr(k.training, m)(k.weights), "path"),
    "TrainingClient.optim_step": (lambda k, m: getattr(k.training, m)(tinker.AdamParams()), "metrics"),
    "TrainingClient.save_state": (lambda k, m: getattr(k.training, m)(k.name()), "path"),
    "TrainingClient.save_weights_and_get_sampling_client": (lambda k, m: getattr(k.training, m)(), "sample"),
    "TrainingClient.save_weights_external": (lambda k, m: getattr(k.training, m)(k.name()), "Save with save_state or"),
    "TrainingClient.save_weights_for_sampler": (lambda k, m: getattr(k.training, m)(k.name()), "path"),
    "SamplingClient.compute_logprobs": (lambda k, m: getattr(k.sampler, m)(prompt()), "count"),
    "SamplingClient.create": (
        lambda k, m: getattr(tinker.SamplingClient, m)(k.service.holder, base_model=MODEL),
        "sample",
    ),
    "SamplingClient.from_sampler_handle": (
        lambda k, m: getattr(tinker.SamplingClient, m)(k.sampler.get_sampler_handle(), api_key=k.where["api_key"]),
        "sample",
    ),
    "SamplingClient.get_base_model": (lambda k, m: getattr(k.sampler, m)(), "title"),
    "SamplingClient.get_sampler_handle": (lambda k, m: getattr(k.sampler, m)(), "title"),
    "SamplingClient.get_telemetry": (lambda k, m: getattr(k.sampler, m)(), ""),
    "SamplingClient.get_tokenizer": (lambda k, m: getattr(k.sampler, m)(), "encode"),
    "SamplingClient.on_queue_state_change": (
        lambda k, m: getattr(k.sampler, m)(tinker.lib.api_future_impl.QueueState.ACTIVE, None),
        "",
    ),
    "SamplingClient.sample": (
        lambda k, m: getattr(k.sampler, m)(prompt(), 2, tinker.SamplingParams(max_tokens=2)),
        "sequences",
    ),
    "RestClient.assign_session_project": (lambda k, m: getattr(k.rest, m)(k.session, "project"), "no projects"),
    "RestClient.copy_weights": (lambda k, m: getattr(k.rest, m)(k.weights, "project"), "title"),
    "RestClient.delete_checkpoint": (
        lambda k, m: getattr(k.rest, m)(k.model, "weights/" + k.saved().rpartition("/")[2]),
        "",
    ),
    "RestClient.delete_checkpoint_from_tinker_path": (lambda k, m: getattr(k.rest, m)(k.saved()), ""),
    "RestClient.export_session_trace": (lambda k, m: getattr(k.rest, m)(k.session), "exports no traces"),
    "RestClient.get_audit_log": (lambda k, m: getattr(k.rest, m)(), "this server has no audit log"),
    "RestClient.get_billing_usage": (
        lambda k, m: getattr(k.rest, m)(hours(1), hours(2)),
        "windfall.client has Client.usage",
    ),
    "RestClient.get_current_checkpoint_storage_usage": (lambda k, m: getattr(k.rest, m)(), "data"),
    "RestClient.get_external_weights_urls": (
        lambda k, m: getattr(k.rest, m)(f"tinker://{k.model}/external_weights/a"),
        "there are no external weights",
    ),
    "RestClient.get_sampler": (lambda k, m: getattr(k.rest, m)(k.sampler._sampling_session_id), "base_model"),
    "RestClient.get_server_capabilities": (lambda k, m: getattr(k.rest, m)(), "supported_models"),
    "RestClient.get_session": (lambda k, m: getattr(k.rest, m)(k.session), "training_run_ids"),
    "RestClient.get_telemetry": (lambda k, m: getattr(k.rest, m)(), ""),
    "RestClient.get_training_run": (lambda k, m: getattr(k.rest, m)(k.model), "lora_rank"),
    "RestClient.get_training_run_by_tinker_path": (lambda k, m: getattr(k.rest, m)(k.weights), "lora_rank"),
    "RestClient.get_weights_info_by_tinker_path": (lambda k, m: getattr(k.rest, m)(k.weights), "lora_rank"),
    "RestClient.list_checkpoints": (lambda k, m: getattr(k.rest, m)(k.model), "checkpoints"),
    "RestClient.list_sessions": (lambda k, m: getattr(k.rest, m)(), "sessions"),
    "RestClient.list_training_runs": (lambda k, m: getattr(k.rest, m)(), "training_runs"),
    "RestClient.list_user_checkpoints": (lambda k, m: getattr(k.rest, m)(), "checkpoints"),
    "RestClient.publish_checkpoint_from_tinker_path": (lambda k, m: getattr(k.rest, m)(k.saved()), ""),
    "RestClient.search_sessions": (
        lambda k, m: getattr(k.rest, m)(tinker.types.SessionSearchRequest(session_id=k.session)),
        "sessions",
    ),
    "RestClient.set_checkpoint_ttl_from_tinker_path": (lambda k, m: getattr(k.rest, m)(k.saved(), 3600), ""),
    "RestClient.unpublish_checkpoint_from_tinker_path": (lambda k, m: getattr(k.rest, m)(k.saved()), ""),
    "RestClient.whoami": (lambda k, m: getattr(k.rest, m)(), "requires JWT auth"),
    "AdminClient.get_audit_log": (lambda k, m: getattr(k.admin, m)(), "this server has no audit log"),
    "AdminClient.get_billing_usage": (
        lambda k, m: getattr(k.admin, m)(hours(1), hours(2)),
        "windfall.client has Client.usage",
    ),
    "AdminClient.get_current_checkpoint_storage_usage": (lambda k, m: getattr(k.admin, m)(), "data"),
    "AdminClient.get_telemetry": (lambda k, m: getattr(k.admin, m)(), ""),
    "APIFuture.coroutine": (lambda k, m: getattr(k.rest.list_sessions(), m)(), "sessions"),
    "APIFuture.future": (lambda k, m: getattr(k.rest.list_sessions(), m)(), "sessions"),
    "APIFuture.result": (lambda k, m: getattr(k.rest.list_sessions(), m)(30), "sessions"),
    "APIFuture.result_async": (lambda k, m: getattr(k.rest.list_sessions(), m)(30), "sessions"),
}
"""How each method is called, and an attribute that its result has, or words of its refusal."""


async def awaited(found: Any) -> Any:
    return await asyncio.wait_for(found, 60)


def outcome(call: Call, clients: Clients, method: str) -> Any:
    """What a method returns in the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most methods with twins, and some without, warn that they are deprecated
        found = call(clients, method)
        if inspect.isawaitable(found) and not hasattr(found, "result"):
            found = asyncio.run(awaited(found))
        for _ in range(2):  # a twin may return a future
            found = found.result(60) if hasattr(found, "result") else found
    return found


@pytest.mark.parametrize("method", table.methods())
def test_method(clients: Clients, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, expected = CALLS[table.base_of(method)]
    monkeypatch.chdir(TINY.parent)  # where transformers finds the base by its name
    short = method.partition(".")[2]
    if table.state_of(method) == table.REFUSED:
        refused = (tinker.BadRequestError, tinker.RequestFailedError, RuntimeError)
        with pytest.raises(refused, match=re.escape(expected)):
            outcome(call, clients, short)
        return
    found = outcome(call, clients, short)
    assert not expected or hasattr(found, expected)


def test_the_page_is_current() -> None:
    if version("tinker") != "0.38.0":
        pytest.skip(f"the page is that of tinker 0.38.0; here is {version('tinker')}")
    assert {table.base_of(method) for method in table.methods()} == set(table.STATE), "scripts/tinker_methods.py"
    assert set(table.STATE) == set(CALLS)
    assert all(CALLS[method][1] for method, (state, _) in table.STATE.items() if state == table.REFUSED)
    assert PAGE.read_text() == table.page(), "python scripts/tinker_methods.py > docs/tinker-methods.md"
