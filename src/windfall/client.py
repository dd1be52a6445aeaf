"""A client of `windfall tinker` without an SDK: the verbs of verbs.py, over HTTP.

    async with Client("http://127.0.0.1:8900", key) as client:
        policy = await client.create(rank=16)
        responses = await policy.sample(prompt_ids, 8, id="1/0", max_tokens=64)
        await policy.forward_backward(samples, Loss(name="importance_sampling"), id="1/gradient")
        await policy.optim_step(adam=Adam(lr=1e-4), id="1/step")
        await policy.publish(id="1/publish")

Every verb has an id, which the loop chooses. A verb that is called again with its id is not performed again.

If the server does not answer, requests are repeated for `patience_s`: a server that was killed continues with the calls
that it has accepted. A call may be performed all the same if it got no answer, because its task was canceled or
`patience_s` was over. examples/rl_loop.py uses this client with `--on URL`.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import threading
import time
import urllib.request
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
from windfall.training import NOT_FINITE, NOTHING, Adam, CheckpointState, Gradient, NewVersion, Report, Sample
from windfall.types import Response, Sampling

HEARTBEAT_S = 10.0
REQUEST_S = 60.0
"""Timeout of one request. The server answers a request for an outcome after 30 s, whatever came of it."""
CLOSE_S = 10.0
"""Seconds for which the server may take to end the session."""
AGAIN = (408, 409, 429, *range(500, 600))
"""Status codes after which a request is made again, as the SDK does. A server whose disk is full answers 500."""
PART_BYTES = 16 << 20
"""A larger batch is sent in several calls. The server accepts 64 MiB, and all of a call must arrive within 60 s."""


class ServerRefused(WindfallError):
    """The server has refused a request, and has not accepted its call."""


class Client:
    """A session of an account on a server."""

    def __init__(self, url: str, key: str, *, patience_s: float = 600.0) -> None:
        """`key`: that of the account. `patience_s`: for how long a server may not answer."""
        self._url, self._key, self._patience_s = url.rstrip("/"), key, patience_s
        self._http: aiohttp.ClientSession | None = None
        self._over = threading.Event()
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
        threading.Thread(target=self._heartbeat, name="heartbeat of a client", daemon=True).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the session: its models leave the server. Weights that were saved with a name stay."""
        assert self._http is not None, "the client was not entered"
        self._over.set()
        try:
            with contextlib.suppress(WindfallError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self.request("POST", f"sessions/{self.session}/finish", {"reason": {"type": "success"}})
        finally:
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
        body: dict[str, Any] = {"session_id": self.session, "sampling_session_seq_id": self._samplers - 1}
        body |= {"model_path": path} if path else {"base_model": self.about["base"]}
        return (await self.request("POST", "create_sampling_session", body))["sampling_session_id"]

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
        """Make a call. Returns its id. Raises ServerRefused if it is refused."""
        return (await self.request("POST", "windfall/call", c.encode(call)))["request_id"]

    async def result(self, call: str) -> c.Result:
        """Wait for the result of a call. Raises WindfallError if it fails."""
        id = quote(call, safe="/:")
        while True:
            found = await self.request("GET", f"windfall/outcome/{id}")
            if isinstance(found, c.FailedCall):
                raise WindfallError(found.message, where=f"call {call}")
            if found is not None:
                return found

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request: JSON, a result, a FailedCall, or None if there is none yet."""
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
                raise ServerRefused(await _why(answer), where=f"{self._url}, {path}")
            if answer.status == 204:
                return None
            if answer.content_type != "application/msgpack":
                return await answer.json()
            data = await answer.read()
            return c.decode_failed(data) if "windfall-failed" in answer.headers else c.decode_result(data)

    def _heartbeat(self) -> None:
        """Runs in a thread of its own: a loop that computes rewards without awaiting anything keeps its session."""
        headers = {"X-API-Key": self._key, "Content-Type": "application/json"}
        body = json.dumps({"session_id": self.session}).encode()
        beat = urllib.request.Request(f"{self._url}/api/v1/session_heartbeat", body, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # aiohttp uses no proxy, either
        while not self._over.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError, http.client.HTTPException):  # the next call says what is wrong
                opener.open(beat, timeout=REQUEST_S).close()


@dataclass(kw_only=True, eq=False)
class RemotePolicy:
    """A model on a server. Implements verbs.Policy; every loss must be given, and the settings of every update."""

    client: Client
    model: str
    sampler: str = ""
    """What `sample` samples from: the weights of the last `publish`."""
    version: int = 0
    _seqs: dict[str, int] = field(default_factory=dict)
    """The numbers of calls that the server has accepted, by id."""
    _unanswered: tuple[str, c.ModelCall] | None = None
    """The id and the call that were sent last, if the server has neither accepted nor refused it."""
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    _published: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The samplers' numbers and the versions of calls of `publish`, by id."""
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
        _, logprobs = await self._compute(c.ForwardCall, samples, loss, id)
        return [replace(sample, old=old) for sample, old in zip(samples, logprobs, strict=True)]

    async def forward_backward(self, samples: Sequence[Sample], loss: Loss | None = None, *, id: str) -> Gradient:
        """Add the gradient of these samples."""
        total, logprobs = await self._compute(c.ForwardBackwardCall, samples, loss, id)
        return Gradient(s=0.0, loss=total, logprobs=logprobs)

    async def optim_step(self, state: CheckpointState | None = None, adam: Adam | None = None, *, id: str) -> Report:
        """Change the weights. `adam` is needed, because a server has no learning rate; `state` has no effect."""
        if adam is None:
            raise WindfallError("no settings of the optimizer", where="optim_step", fix="Pass adam=Adam(lr=...).")
        (result,) = await self._call(c.OptimStepCall, id, {"adam": adam})
        number, norm = result.metrics.get, result.metrics.get("grad_norm", 0.0)
        skipped = "" if not number("skipped") else NOT_FINITE if norm else NOTHING
        return Report(tokens=int(number("tokens", 0)), responses=0, grad_norm=norm, lr=adam.lr, skipped=skipped)

    async def publish(self, *, id: str) -> NewVersion:
        """Sample with the present weights from now on."""
        async with self._publishing:
            return await self._publish(id)

    async def _publish(self, id: str) -> NewVersion:
        new = self.client.next_sampler(), len(self._published) + 1
        number, version = self._published.setdefault(id, new)
        (result,) = await self._call(c.SaveForSampler, id, {"sampler_seq": number})
        if version > self.version:
            self.sampler, self.version = result.sampler, version
        return NewVersion(version=version, digest=result.path)

    async def save(self, *, id: str) -> str:
        """Save the weights and the optimizer, with the id as their name. Returns their path, for `load` and
        `Client.create`."""
        name = "".join(char if char.isalnum() or char in "._-" else "-" for char in id)
        (result,) = await self._call(c.SaveWeights, id, {"name": name})
        return result.path

    async def load(self, path: str, *, id: str) -> NewVersion:
        """Continue from saved weights with their optimizer, and publish them."""
        await self._call(c.LoadWeights, id, {"path": path, "optimizer": True})
        return await self.publish(id=f"{id}/publish")

    async def connected(self, timeout_s: float) -> None:
        """The server waits for its trainer by itself."""

    async def _compute(
        self, kind: type[c.LossCall], samples: Sequence[Sample], loss: Loss | None, id: str
    ) -> tuple[float, tuple[Any, ...]]:
        """The loss of these samples, and the log-probs of each one."""
        given = _given(loss)
        found = await self._call(kind, id, *({"samples": part, "loss": given} for part in _parts(samples)))
        logprobs = tuple(itertools.chain.from_iterable(part.logprobs for part in found))
        return sum(part.metrics["loss:sum"] for part in found), logprobs

    async def _call(self, kind: type[Any], id: str, *parts: dict[str, Any]) -> list[Any]:
        """Make a call in one or more parts, which have these fields, and wait for their results. No other call of the
        model comes between the parts."""
        async with self._sending:
            ids = [f"{id}/part {n}" if n else id for n in range(len(parts))]
            accepted = [await self._accept(kind, each, part) for each, part in zip(ids, parts, strict=True)]
        return [await self.client.result(each) for each in accepted]

    async def _accept(self, kind: type[Any], id: str, fields: dict[str, Any]) -> str:
        """Send a call. The server performs calls by their numbers, without a gap. So a new one gets the number after
        those that were accepted, and what may have been accepted is sent again before it."""
        if self._unanswered is not None:
            with contextlib.suppress(ServerRefused):
                await self._send(*self._unanswered)
        seq = self._seqs.get(id, len(self._seqs) + 1)
        return await self._send(id, kind(model=self.model, seq=seq, **fields))

    async def _send(self, id: str, call: c.ModelCall) -> str:
        self._unanswered = id, call
        try:
            accepted = await self.client.accept(call)
        except ServerRefused:
            self._unanswered = None
            raise
        self._unanswered, self._seqs[id] = None, call.seq
        return accepted


def _response(id: str, prompt: tuple[int, ...], found: c.SampledSequence, version: int) -> Response:
    count = len(found.tokens)
    return Response(
        id=id, prompt=prompt, tokens=found.tokens, logprobs=found.logprobs, sampled=(True,) * count,
        versions=(version,) * count, finish="stop" if found.stopped else "length",
    )  # fmt: skip


def _parts(samples: Sequence[Sample]) -> list[tuple[Sample, ...]]:
    """The samples of each call: PART_BYTES of them at most, or a single one."""
    parts, total = [list[Sample]()], 0
    for sample in samples:
        size = len(c.encode(sample))
        if parts[-1] and total + size > PART_BYTES:
            parts.append([])
            total = 0
        parts[-1].append(sample)
        total += size
    return [tuple(part) for part in parts]


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
