"""Accounts of one server see nothing of each other, except for weights that one has published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.runs.tinker_server import ALICE, BOB, MODEL, Server

tinker = pytest.importorskip("tinker", reason="the SDK is not installed: pip install tinker")


def refused(call: Callable[[], Any]) -> int:
    with pytest.raises(tinker.APIStatusError) as caught:
        call().result(60)
    return caught.value.status_code


def test_an_account_reaches_only_what_it_owns_or_what_is_public(server: Server) -> None:
    where = {account.name: account.key for account in (ALICE, BOB)}
    clients = {name: tinker.ServiceClient(base_url=server.url, api_key=key) for name, key in where.items()}
    rests = {name: tinker.RestClient(base_url=server.url, api_key=key) for name, key in where.items()}
    model = clients["alice"].create_lora_training_client(MODEL, rank=2).result(60)
    path = model.save_state("mine").result(60).path
    sampler = model.save_weights_for_sampler("mine").result(60).path
    bob, other = clients["bob"], rests["bob"]
    session = clients["alice"].holder.get_session_id()
    for call in (
        lambda: other.get_training_run(model.model_id),
        lambda: other.list_checkpoints(model.model_id),
        lambda: other.get_session(session),
        lambda: other.get_weights_info_by_tinker_path(path),
        lambda: other.delete_checkpoint_from_tinker_path(path),
        lambda: bob.create_training_client_from_state(path),
        lambda: bob.create_sampling_client(model_path=sampler),
    ):
        assert refused(call) == 404
    assert other.list_training_runs().result(60).training_runs == []
    assert other.list_user_checkpoints().result(60).checkpoints == []
    assert session not in other.list_sessions().result(60).sessions

    rests["alice"].publish_checkpoint_from_tinker_path(path).result(60)
    assert other.get_weights_info_by_tinker_path(path).result(60).lora_rank == 2
    copy = bob.create_training_client_from_state_with_optimizer(path).result(60)
    assert copy.get_info().lora_rank == 2
    assert refused(lambda: other.delete_checkpoint_from_tinker_path(path)) == 403
    assert [run.training_run_id for run in other.list_training_runs().result(60).training_runs] == [copy.model_id]
    for found in clients.values():
        found.close("success").result(60)
