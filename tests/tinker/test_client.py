"""windfall.client: the verbs over HTTP, repeated calls, refusals, and a server that is not there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.runs.tinker_server import ALICE, Server
from tests.support.servers.ports import free_port
from windfall import client as client_module
from windfall.algorithms.given import Loss
from windfall.client import Client, RemotePolicy
from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.accounts.keys import ApiAccount
from windfall.tinker.disk.call_log import Entry
from windfall.training import NOTHING, Adam, given
from windfall.types import Sampling
from windfall.verbs import Policy

SUM = Loss(name="cross_entropy")
SAMPLE = given([1, 2, 3], [1, 2], [1.0, 1.0])
FORWARD = c.ForwardCall(model="m", seq=1, samples=(SAMPLE,), loss=SUM)
ADAM = Adam(lr=0.5)
UNKNOWN = replace(SAMPLE, labels=np.array([-5, 1]))
"""The server refuses a call with this sample."""
WAIT_S = 60.0


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[RemotePolicy]:
    async with asyncio.timeout(WAIT_S), Client(server.url, server.key) as client:
        yield await client.create(rank=4)


def test_the_verbs_of_a_model(server: Server) -> None:
    async def run() -> None:
        async with Client(server.url, server.key) as client:
            policy: Policy = await client.create(rank=4)
            responses = await policy.sample([1, 2, 3], 2, id="a", max_tokens=4)
            assert [r.id for r in responses] == ["a/0", "a/1"]
            samples = [given([1, 2, 3], [1, 2], [1.0, 1.0])]
            gradient = await policy.forward_backward(samples, SUM, id="b")
            assert len(gradient.logprobs) == 1
            (scored,) = await policy.forward(samples, SUM, id="c")
            assert scored.old is not None
            assert np.array_equal(scored.old, gradient.logprobs[0])
            assert (await policy.optim_step(adam=Adam(lr=0.5), id="d")).lr == 0.5
            assert (await policy.publish(id="e")).version == 2
            assert (await policy.save(id="step 3/weights")).endswith("step-3-weights")
            assert (await client.usage())["trained_tokens"] >= 6

    asyncio.run(run())


def test_a_call_with_the_same_id_is_the_same_call(server: Server) -> None:
    async def run() -> None:
        before = len(server.submitted)
        async with Client(server.url, server.key) as client:
            policy = await client.create(rank=4)
            samples = [given([1, 2, 3], [1, 2], [1.0, 1.0])]
            for _ in range(2):
                await policy.forward_backward(samples, SUM, id="b")
                await policy.sample([1, 2, 3], 1, id="a", max_tokens=4)
            with pytest.raises(WindfallError, match="was made before with other content"):
                await policy.sample([1, 2, 4], 1, id="a", max_tokens=4)
            await policy.optim_step(adam=Adam(lr=0.5), id="c")
        made = [
            call.seq for call in server.submitted[before:] if isinstance(call, c.ForwardBackwardCall | c.OptimStepCall)
        ]
        assert made == [1, 1, 3]  # the sampler was the second call
        assert [call.seq for call in server.submitted[before:] if isinstance(call, c.SampleCall)] == [0, 0, 0]

    asyncio.run(run())


def test_the_same_publish_is_the_same_version(server: Server) -> None:
    async def run() -> None:
        async with opened(server) as policy:
            first = await policy.publish(id="1")
            assert await policy.publish(id="1") == first
            second, newest = await policy.publish(id="2"), policy.sampler
            assert second.version == first.version + 1
            assert await policy.publish(id="1") == first
            assert policy.sampler == newest
            await policy.optim_step(adam=ADAM, id="step")

    asyncio.run(run())


def test_other_content_under_a_used_id_is_refused_and_the_next_call_is_performed(server: Server) -> None:
    async def run() -> None:
        async with opened(server) as policy:
            await policy.optim_step(adam=ADAM, id="a")
            with pytest.raises(WindfallError, match="was made before with other content"):
                await policy.optim_step(adam=Adam(lr=0.1), id="a")
            assert (await policy.optim_step(adam=Adam(lr=0.2), id="b")).lr == 0.2

    asyncio.run(run())


@pytest.mark.parametrize("arrives", [True, False])
def test_a_call_without_an_answer_is_made_again_before_the_next_one(
    server: Server, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    async def run() -> None:
        async with opened(server) as policy:
            accept = policy.client.accept

            async def unanswered(call: c.Call) -> str:
                if arrives:
                    await accept(call)
                raise WindfallError("waited for the server")

            with monkeypatch.context() as patch:
                patch.setattr(policy.client, "accept", unanswered)
                with pytest.raises(WindfallError, match="waited for the server"):
                    await policy.forward_backward([SAMPLE], SUM, id="a")
            await policy.optim_step(adam=ADAM, id="b")
            gradient = await policy.forward_backward([SAMPLE], SUM, id="a")
            assert len(gradient.logprobs) == 1
            made = {c.encode(call) for call in server.submitted if getattr(call, "model", "") == policy.model}
            assert len(made) == 2

    asyncio.run(run())


def test_a_refused_call_does_not_hold_up_the_one_that_was_made_with_it(server: Server) -> None:
    async def run() -> None:
        async with opened(server) as policy:
            refused, report = await asyncio.gather(
                policy.forward_backward([UNKNOWN], SUM, id="a"),
                policy.optim_step(adam=ADAM, id="b"),
                return_exceptions=True,
            )
            assert isinstance(refused, WindfallError)
            assert "no call in msgpack" in str(refused)
            assert not isinstance(report, BaseException)
            assert (report.lr, report.skipped) == (0.5, NOTHING)
            await policy.forward_backward([SAMPLE], SUM, id="a")
            assert not (await policy.optim_step(adam=ADAM, id="c")).skipped

    asyncio.run(run())


def test_a_large_batch_is_sent_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PART_BYTES", 2 * len(c.encode(SAMPLE)))

    async def run() -> None:
        async with opened(server) as policy:
            gradient, _ = await asyncio.gather(
                policy.forward_backward([SAMPLE] * 5, SUM, id="a"), policy.optim_step(adam=ADAM, id="b")
            )
            made = [call for call in server.submitted if getattr(call, "model", "") == policy.model]
            sizes = [len(call.samples) if isinstance(call, c.LossCall) else 0 for call in made]
            assert sizes == [2, 2, 1, 0]
            assert len(gradient.logprobs) == 5
            expected = -sum(logprobs.sum() for logprobs in gradient.logprobs)
            assert gradient.loss == pytest.approx(expected)

    asyncio.run(run())


def test_an_error_of_the_server_is_not_an_error_of_the_call(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose disk is full answers with 500. The next one continues."""
    submit, failed = server.service.submit, []

    async def fails_once(account: ApiAccount, call: c.Call, body: bytes) -> Entry:
        if not failed:
            failed.append(call)
            raise WindfallError("tinker.sqlite cannot be written")
        return await submit(account, call, body)

    async def run() -> None:
        async with opened(server) as policy:
            monkeypatch.setattr(server.service, "submit", fails_once)
            await policy.optim_step(adam=ADAM, id="a")
            assert failed

    asyncio.run(run())


def test_a_loop_that_awaits_nothing_keeps_its_session(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HEARTBEAT_S", 0.02)

    async def run() -> None:
        async with Client(server.url, server.key) as client:
            session = server.service.sessions.open[client.session]
            began, deadline = session.seen, time.monotonic() + WAIT_S
            while session.seen == began:  # a grader that blocks the event loop
                assert time.monotonic() < deadline, "no heartbeat while the event loop was blocked"
                time.sleep(0.01)

    asyncio.run(run())


def test_a_client_does_not_wait_for_a_lost_server_to_end_its_session(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CLOSE_S", 0.1)

    async def run() -> None:
        async with asyncio.timeout(WAIT_S), Client(server.url, server.key) as client:
            monkeypatch.setattr(client, "_url", f"http://127.0.0.1:{free_port()}")

    asyncio.run(run())


def test_refusals_are_errors_in_words(server: Server) -> None:
    async def run() -> None:
        with pytest.raises(WindfallError, match="not one of the server's"):
            async with Client(server.url, "tml-other"):
                pass
        async with Client(server.url, server.key) as client:
            policy = await client.create(rank=4)
            with pytest.raises(WindfallError, match="no algorithm of its own"):
                await policy.forward_backward([given([1, 2], [1], [1.0])], id="b")
            with pytest.raises(WindfallError, match="no settings of the optimizer"):
                await policy.optim_step(id="c")
            with pytest.raises(WindfallError, match="no call in msgpack"):
                await client.request("POST", "windfall/call", b"\x93\x01")

    asyncio.run(run())


def test_a_server_that_is_not_there_is_named() -> None:
    async def run() -> None:
        with pytest.raises(WindfallError, match="for the server: Client"):
            async with Client(f"http://127.0.0.1:{free_port()}", ALICE.key, patience_s=0.3):
                pass

    asyncio.run(run())


@pytest.mark.parametrize(
    "changed",
    [
        *({"seq": 1 << 63}, {"seq": -1}, {"n": 0}, {"n": 1 << 40}, {"prompt": (-1,)}, {"prompt": (1 << 40,)}),
        *({"max_tokens": -1}, {"prompt_last": -1}, {"prompt_top_k": -1}),
    ],
)
def test_numbers_that_no_call_has_are_refused(server: Server, changed: dict[str, Any]) -> None:
    fields = {"sampler": "s", "seq": 0, "prompt": (1, 2), "n": 1, "max_tokens": 4, "sampling": Sampling()} | changed

    async def run() -> None:
        async with Client(server.url, server.key) as client:
            with pytest.raises(WindfallError, match="no call in msgpack"):
                await client.request("POST", "windfall/call", msgspec.msgpack.encode({"type": "SampleCall"} | fields))
            wrong = msgspec.structs.replace(FORWARD, samples=(UNKNOWN,))
            with pytest.raises(WindfallError, match="no call in msgpack"):
                await client.request("POST", "windfall/call", c.encode(wrong))

    asyncio.run(run())
