"""windfall.client: the verbs over HTTP, repeated calls, refusals, and a server that is not there."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.ports import free_port
from tests.support.tinker_server import ALICE, Server
from windfall.algorithms.given import Loss
from windfall.client import Client
from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.training import Adam, given
from windfall.types import Sampling
from windfall.verbs import Policy

SUM = Loss(name="cross_entropy")
SAMPLE = given([1, 2, 3], [1, 2], [1.0, 1.0])
FORWARD = c.ForwardCall(model="m", seq=1, samples=(SAMPLE,), loss=SUM)


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
    [{"seq": 1 << 63}, {"seq": -1}, {"n": 0}, {"n": 1 << 40}, {"prompt": (-1,)}, {"prompt": (1 << 40,)}],
)
def test_numbers_that_no_call_has_are_refused(server: Server, changed: dict[str, Any]) -> None:
    fields = {"sampler": "s", "seq": 0, "prompt": (1, 2), "n": 1, "max_tokens": 4, "sampling": Sampling()} | changed

    async def run() -> None:
        async with Client(server.url, server.key) as client:
            with pytest.raises(WindfallError, match="no call in msgpack"):
                await client.request("POST", "windfall/call", msgspec.msgpack.encode({"type": "SampleCall"} | fields))
            wrong = msgspec.structs.replace(FORWARD, samples=(replace(SAMPLE, labels=np.array([-5, 1])),))
            with pytest.raises(WindfallError, match="no call in msgpack"):
                await client.request("POST", "windfall/call", c.encode(wrong))

    asyncio.run(run())
