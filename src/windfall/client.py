"""A client of `windfall tinker` without an SDK: the verbs of verbs.py, over HTTP.

    async with Client("http://127.0.0.1:8900", key) as client:
        policy = await client.create(rank=16)
        responses = await policy.sample(prompt_ids, 8, id="1/0", max_tokens=64)
        await policy.forward_backward(samples, Loss(name="importance_sampling"), id="1/gradient")
        await policy.optim_step(adam=Adam(lr=1e-4), id="1/step")
        await policy.publish(id="1/publish")

Every verb has an id, which the loop chooses. A verb that is called again with its id is not performed again.

If the server does not answer, requests are repeated for `patience_s`: a server that was killed continues with the calls
that it has accepted. examples/rl_loop.py uses this client with `--on URL`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import aiohttp

from windfall import backoff
from windfall.algorithms.given import Loss
from windfall.errors import WindfallError
from windfall.recipe.lora import DEFAULT_RANK
from windfall.tinker import calls as c
from windfall.training import Adam, CheckpointState, Gradient, NewVersion, Report, Sample
from windfall.types import Response, Sampling

HEARTBEAT_S = 10.0
REQUEST_S = 60.0
"""Timeout of one request. The server answers a request for an outcome after 30 s, whatever came of it."""
AGAIN = (408, 429, 502, 503, 504)
"""Status codes after which a request is made again."""


class Client:
    """A session of an account on a server."""

    def __init__(self, url: str, key: str, *, patience_s: float = 600.0) -> None:
        """`key`: that of the account. `patience_s`: for how long a server may not answer."""
        self._url, self._key, self._patience_s = url.rstrip("/"), key, patience_s
        self._http: aiohttp.ClientSession | None = None
        self._beating: asyncio.Task[None] | None = None
        self.session = ""
        self._models = self._samplers = 0
        """How many were created in this session."""
        self.about: dict[str, Any] = {}
        """What the server offers: base, context, rank."""

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=connector, headers={"X-API-Key": self._key})
        try:
            self.about = await self.request("GET", "windfall/about")
            answer = await self.request("POST", "create_session", {"tags": ["windfall.client"], "sdk_version": ""})
        except BaseException:  # raised again: nobody will close the connections
            await self._http.close()
            raise
        self.session = answer["session_id"]
        self._beating = asyncio.create_task(self._heartbeat(), name="heartbeat of a client")
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the session: its models leave the server. Weights that were saved with a name stay."""
        assert self._http is not None, "the client was not entered"
        if self._beating is not None:
            self._beating.cancel()
        with contextlib.suppress(WindfallError):
            await self.request("POST", f"sessions/{self.session}/finish", {"reason": {"type": "success"}})
        await self._http.close()

    async def create(
        self, *, rank: int | None = None, seed: int = 0, attn: bool = True, mlp: bool = True, unembed: bool = False,
        path: str = "", optimizer: bool = False,
    ) -> RemotePolicy:  # fmt: skip
        """A new model with an adapter. `rank`: 16 by default, or the server's limit if that is lower. `path`: begin
        with saved weights; `optimizer`: and with their optimizer."""
        self._models += 1
        rank = rank or min(DEFAULT_RANK, self.about["rank"])
        lora = None if path else c.LoraSpec(rank=rank, seed=seed, attn=attn, mlp=mlp, unembed=unembed)
        call = c.CreateModel(
            session=self.session, seq=self._models - 1, base=self.about["base"], lora=lora, path=path,
            optimizer=optimizer,
        )  # fmt: skip
        ready = await self.perform(call)
        assert isinstance(ready, c.ModelReady)
        return RemotePolicy(client=self, model=ready.model)

    async def sampler(self, path: str = "") -> str:
        """The id of a sampler of saved weights; without `path`, of the base."""
        self._samplers += 1
        body = {"session": self.session, "seq": self._samplers - 1, "path": path}
        return (await self.request("POST", "windfall/sampler", body))["sampler"]

    def next_sampler(self) -> int:
        """The number of a sampler that is made together with its weights."""
        self._samplers += 1
        return self._samplers - 1

    async def usage(self) -> dict[str, float]:
        """What the account has used: `usd`, and its limit `max_usd` (0: none); tokens; seconds of the trainer and
        of workers."""
        return await self.request("GET", "windfall/usage")

    async def perform(self, call: c.Call) -> c.Result:
        """Make a call, and wait for its result. Raises WindfallError if it fails."""
        return await self.result(await self.accept(call))

    async def accept(self, call: c.Call) -> str:
        """Make a call. Returns its id. Raises WindfallError if it is refused."""
        return (await self.request("POST", "windfall/call", c.encode(call)))["request"]

    async def result(self, call: str) -> c.Result:
        """Wait for the result of a call. Raises WindfallError if it fails."""
        id = quote(call, safe="/:")
        while True:
            found = await self.request("GET", f"windfall/outcome/{id}")
            if isinstance(found, c.CallFailed):
                raise WindfallError(found.message, where=f"call {call}")
            if found is not None:
                return found

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request: JSON, a result, a CallFailed, or None if there is none yet."""
        began_s, tries, why = time.monotonic(), 0, ""
        while True:
            try:
                return await self._request_once(method, path, body)
            except (aiohttp.ClientError, TimeoutError) as e:
                why = f"{type(e).__name__}: {e}"
            if time.monotonic() - began_s > self._patience_s:
                what = f"waited {self._patience_s:g} s for the server: {why}"
                fix = "Is `windfall tinker` running, and is this its address?"
                raise WindfallError(what, where=f"{self._url}, {path}", fix=fix)
            tries += 1
            await asyncio.sleep(backoff.delay_s(tries, first_s=0.1, limit_s=5.0))

    async def _request_once(self, method: str, path: str, body: Any) -> Any:
        assert self._http is not None, "use the client in `async with`"
        sent: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        if body is None:
            sent = {}
        async with self._http.request(method, f"{self._url}/api/v1/{path}", **sent) as answer:
            if answer.status in AGAIN:
                raise aiohttp.ClientError(f"{answer.status} {(await answer.text())[:200]}")
            if answer.status >= 400:
                raise WindfallError(await _why(answer), where=f"{self._url}, {path}")
            if answer.status == 204:
                return None
            if answer.content_type != "application/msgpack":
                return await answer.json()
            data = await answer.read()
            return c.decode_failed(data) if "windfall-failed" in answer.headers else c.decode_result(data)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with contextlib.suppress(WindfallError):  # the next call says that the session has ended
                await self.request("POST", "session_heartbeat", {"session_id": self.session})


@dataclass(kw_only=True, eq=False)
class RemotePolicy:
    """A model on a server. Implements verbs.Policy; every loss must be given, and the settings of every update."""

    client: Client
    model: str
    sampler: str = ""
    """What `sample` samples from: the weights of the last `publish`."""
    version: int = 0
    _seqs: dict[str, int] = field(default_factory=dict)
    """The numbers of calls of the model, by id."""
    _samples: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """The samplers, numbers and versions of calls of `sample`, by id."""
    _publishing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def sample(
        self, prompt: Sequence[int], n: int, *, id: str, max_tokens: int, sampling: Sampling | None = None
    ) -> list[Response]:
        """Generate `n` responses with the weights of the last `publish`."""
        async with self._publishing:
            if not self.sampler:
                await self._publish("before the first update")
        sampler, seq, version = self._samples.setdefault(id, (self.sampler, len(self._samples), self.version))
        call = c.SampleCall(
            sampler=sampler, seq=seq, prompt=tuple(prompt), n=n, max_tokens=max_tokens,
            sampling=sampling or Sampling(),
        )  # fmt: skip
        result = await self.client.perform(call)
        assert isinstance(result, c.Sampled)
        return [_response(f"{id}/{k}", call.prompt, each, version) for k, each in enumerate(result.sequences)]

    async def forward(self, samples: Sequence[Sample], loss: Loss | None = None, *, id: str) -> list[Sample]:
        """The samples with the log-probs of the present weights as `old`."""
        result = await self._call(c.ForwardCall, id, samples=tuple(samples), loss=_given(loss))
        assert isinstance(result, c.ForwardResult)
        return [replace(sample, old=old) for sample, old in zip(samples, result.logprobs, strict=True)]

    async def forward_backward(self, samples: Sequence[Sample], loss: Loss | None = None, *, id: str) -> Gradient:
        """Add the gradient of these samples."""
        result = await self._call(c.ForwardBackwardCall, id, samples=tuple(samples), loss=_given(loss))
        assert isinstance(result, c.ForwardResult)
        return Gradient(s=0.0, loss=result.metrics["loss:sum"], logprobs=result.logprobs)

    async def optim_step(self, state: CheckpointState | None = None, adam: Adam | None = None, *, id: str) -> Report:
        """Change the weights. `adam` is needed, because a server has no learning rate; `state` has no effect."""
        if adam is None:
            raise WindfallError("no settings of the optimizer", where="optim_step", fix="Pass adam=Adam(lr=...).")
        result = await self._call(c.OptimStepCall, id, adam=adam)
        assert isinstance(result, c.Stepped)
        number = result.metrics.get
        return Report(tokens=int(number("tokens", 0)), responses=0, grad_norm=number("grad_norm", 0), lr=adam.lr)

    async def publish(self, *, id: str) -> NewVersion:
        """Sample with the present weights from now on."""
        async with self._publishing:
            return await self._publish(id)

    async def _publish(self, id: str) -> NewVersion:
        seq = self.client.next_sampler()
        result = await self._call(c.SaveForSampler, id, sampler_seq=seq)
        assert isinstance(result, c.WeightsSaved)
        self.sampler, self.version = result.sampler, self.version + 1
        return NewVersion(version=self.version, digest=result.path)

    async def save(self, *, id: str) -> str:
        """Save the weights and the optimizer, with the id as their name. Returns their path, for `load` and
        `Client.create`."""
        name = "".join(char if char.isalnum() or char in "._-" else "-" for char in id)
        result = await self._call(c.SaveWeights, id, name=name)
        assert isinstance(result, c.WeightsSaved)
        return result.path

    async def load(self, path: str, *, id: str) -> NewVersion:
        """Continue from saved weights with their optimizer, and publish them."""
        await self._call(c.LoadWeights, id, path=path, optimizer=True)
        return await self.publish(id=f"{id}/publish")

    async def connected(self, timeout_s: float) -> None:
        """The server waits for its trainer by itself."""

    async def _call(self, kind: type[Any], id: str, **fields: Any) -> c.Result:
        seq = self._seqs.setdefault(id, len(self._seqs) + 1)
        try:
            accepted = await self.client.accept(kind(model=self.model, seq=seq, **fields))
        except WindfallError:
            if seq == len(self._seqs):  # it was refused: the server waits for this number
                del self._seqs[id]
            raise
        return await self.client.result(accepted)


def _response(id: str, prompt: tuple[int, ...], found: c.SampledSequence, version: int) -> Response:
    count = len(found.tokens)
    return Response(
        id=id, prompt=prompt, tokens=found.tokens, logprobs=found.logprobs, sampled=(True,) * count,
        versions=(version,) * count, finish="stop" if found.stopped else "length",
    )  # fmt: skip


def _given(loss: Loss | None) -> Loss:
    if loss is None:
        fix = 'Pass loss=Loss(name="importance_sampling") or another of algorithms/given.py.'
        raise WindfallError("a server has no algorithm of its own", where="loss", fix=fix)
    return loss


async def _why(answer: aiohttp.ClientResponse) -> str:
    try:
        return str((await answer.json())["detail"])
    except (ValueError, KeyError, TypeError, aiohttp.ClientError):
        return f"the server answered {answer.status}"
