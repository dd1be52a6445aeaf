"""A service of the Tinker API that keeps everything in memory and computes nothing, for tests of the wire: results are
simple functions of the calls. With it, a server in a thread of its own, for the SDK.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ssl import SSLContext
from types import SimpleNamespace
from typing import Any

import numpy as np

from windfall.tinker import calls as c
from windfall.tinker.calls import Refusal
from windfall.tinker.wire.server import TinkerServer

KEY = "tml-in-memory"
BASE = "tiny"
CLONE = 1_000_000_000


class MemoryService:
    def __init__(self) -> None:
        self.terms = SimpleNamespace(base=BASE, tokenizer=BASE, context=2048, rank=64)
        self.sessions: dict[str, Any] = {}
        self.ended: set[str] = set()
        self.models: dict[str, Any] = {}
        self.samplers: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}
        self.calls: dict[str, Any] = {}
        self.completed: dict[tuple[str, int], list[Any]] = defaultdict(list)
        self.submitted: list[c.Call] = []
        self.acknowledged: set[str] = set()
        self.held = asyncio.Event()
        """Samples with a `seed` of 13 wait for it."""

    def account(self, key: str) -> Any:
        if key != KEY:
            raise Refusal(401, "this API key is not one of the server's")
        return SimpleNamespace(name="default")

    def usage(self, account: Any) -> dict[str, float]:
        return {"usd": 1.5, "calls": float(len(self.submitted))}

    async def create_session(self, account: Any, *, tags: Any, metadata: Any, sdk: str, name: str) -> Any:
        info = {"tags": tags, "metadata": metadata or {}, "sdk": sdk, "name": name}
        id = str(uuid.uuid4())
        self.sessions[id] = SimpleNamespace(id=id, account=account.name, created=time.time(), info=info)
        return self.sessions[id]

    def session(self, account: Any, id: str) -> Any:
        if id not in self.sessions:
            raise Refusal(410 if id in self.ended else 404, f"there is no session {id!r}")
        return self.sessions[id]

    def sessions_of(self, account: Any) -> list[Any]:
        return list(reversed(self.sessions.values()))

    def heartbeat(self, account: Any, id: str) -> None:
        self.session(account, id)

    async def end_session(self, session: Any) -> None:
        self.ended.add(self.sessions.pop(session.id).id)

    def model(self, account: Any, id: str) -> Any:
        if id not in self.models:
            raise Refusal(404, f"there is no model {id!r}")
        return self.models[id]

    def models_of(self, account: Any) -> list[Any]:
        return list(reversed(self.models.values()))

    def weights(self, account: Any, path: str) -> Any:
        if path not in self.saved:
            raise Refusal(404, f"there are no weights {path!r}")
        return self.saved[path]

    def checkpoints_of(self, account: Any, model: str = "") -> list[Any]:
        return [found for found in reversed(self.saved.values()) if model in ("", found.model)]

    async def delete(self, account: Any, path: str) -> None:
        del self.saved[self.weights(account, path).path]

    async def change(self, account: Any, path: str, *, expires_s: Any = False, public: bool | None = None) -> None:
        found = self.weights(account, path)
        if expires_s is not False:
            found.expires = None if expires_s is None else time.time() + expires_s
        found.public = found.public if public is None else public

    async def create_sampler(self, account: Any, session: str, seq: int, *, path: str = "", base: str = "") -> Any:
        self.session(account, session)
        if path:
            self.weights(account, path)
        elif base != BASE:
            raise Refusal(400, f"the base model {base!r} is not served here; this server has {BASE!r}")
        return self._sampler(session, seq, path)

    def _sampler(self, session: str, seq: int | None, path: str = "") -> Any:
        id = f"{session}:sample:{seq}"
        found = SimpleNamespace(id=id, account="default", session=session, path=path, base=BASE, clones=0)
        return self.samplers.setdefault(id, found)

    def sampler(self, account: Any, id: str) -> Any:
        if id not in self.samplers:
            raise Refusal(404, f"there is no sampling session {id!r}")
        return self.samplers[id]

    async def join_sampler(self, account: Any, id: str) -> int:
        self.samplers[id].clones += 1
        return self.samplers[id].clones

    async def submit(self, account: Any, call: c.Call) -> Any:
        self.submitted.append(call)
        match call:
            case c.CreateModel():
                return self._create(account, call)
            case c.SampleCall():
                entry = self._entry(f"{call.sampler}/{call.seq}", sampler=self.sampler(account, call.sampler).id)
                entry.seq, entry.task = call.seq, asyncio.ensure_future(self._sample(entry, call))
                return entry
            case c.UnloadModel():
                return self._done(self._entry(f"{call.model}/unload"), c.ModelReady(model=call.model))
            case _:
                model = self.model(account, call.model)
                entry = self._entry(f"{call.model}/{call.seq}", model=model.id)
                model.waiting[call.seq] = (entry, call)
                while (found := model.waiting.pop(model.next_seq, None)) is not None:
                    model.next_seq += 1
                    self._done(found[0], self._performed(model, found[1]))
                return entry

    def _create(self, account: Any, call: c.CreateModel) -> Any:
        id, lora = f"{self.session(account, call.session).id}:train:{call.seq}", call.lora
        if call.base not in ("", BASE):
            raise Refusal(400, f"the base model {call.base!r} is not served here; this server has {BASE!r}")
        if call.path:
            lora = self.models[self.weights(account, call.path).model].spec
        self.models[id] = SimpleNamespace(
            id=id, account="default", session=call.session, base=BASE, spec=lora, created=time.time(), seen=time.time(),
            metadata=call.metadata, next_seq=1, waiting={},
        )  # fmt: skip
        return self._done(self._entry(f"{id}/0", model=id), c.ModelReady(model=id, path=call.path))

    def _performed(self, model: Any, call: c.Call) -> c.Result | c.CallFailed:
        match call:
            case c.RefusedCall():
                return c.CallFailed(message=call.message)
            case c.LossCall():
                logprobs = tuple(-np.arange(1, len(s.targets) + 1) / 4 for s in call.samples)
                losses = [-float(np.sum(s.advantages * x)) for s, x in zip(call.samples, logprobs, strict=True)]
                return c.ForwardResult(logprobs=logprobs, metrics={"loss:sum": sum(losses)})
            case c.OptimStepCall():
                return c.Stepped(metrics={"lr": call.adam.lr})
            case c.LoadWeights():
                return c.ModelReady(model=model.id, path=call.path)
            case c.SaveWeights() | c.SaveForSampler():
                return self._saved(model, call)
            case _:
                raise AssertionError(call)

    def _saved(self, model: Any, call: c.SaveWeights | c.SaveForSampler) -> c.WeightsSaved:
        part, kind = ("weights", "training") if isinstance(call, c.SaveWeights) else ("sampler_weights", "sampler")
        path = f"tinker://{model.id}/{part}/{call.name or call.seq}"
        if not call.name and isinstance(call, c.SaveForSampler):
            return c.WeightsSaved(path=path, sampler=self._sampler(model.session, call.sampler_seq).id)
        self.saved[path] = SimpleNamespace(
            path=path, account="default", model=model.id, kind=kind, created=time.time(), bytes=10, public=False,
            expires=call.ttl_s and time.time() + call.ttl_s, metadata=call.metadata,
        )  # fmt: skip
        return c.WeightsSaved(path=path)

    async def _sample(self, entry: Any, call: c.SampleCall) -> None:
        if call.seed == 13:
            await self.held.wait()
        count, rest = call.max_tokens or 3, len(call.prompt) - 1
        tokens = [tuple(range(n, n + count)) for n in range(call.n)]
        prompt = np.array([np.nan, *[-1.0] * rest]) if call.prompt_logprobs else None
        if prompt is not None and call.prompt_last:
            prompt[: -call.prompt_last] = np.nan
        top = call.prompt_top_k
        sampled = c.Sampled(
            sequences=tuple(c.SampledSequence(tokens=t, logprobs=(-0.5,) * count, stopped=False) for t in tokens),
            prompt_logprobs=prompt,
            prompt_top_ids=((), *[tuple(range(1, top + 1))] * rest) if top else (),
            prompt_top_logprobs=((), *[(-0.5,) * top] * rest) if top else (),
        )
        self._done(entry, sampled)

    def _entry(self, id: str, model: str = "", sampler: str = "") -> Any:
        entry = SimpleNamespace(id=id, model=model, sampler=sampler, seq=0, result=b"", failed=False, done=None)
        entry.event = asyncio.Event()
        return self.calls.setdefault(id, entry)

    def _done(self, entry: Any, result: c.Result | c.CallFailed) -> Any:
        entry.outcome, entry.failed, entry.result = result, isinstance(result, c.CallFailed), c.encode(result)
        entry.size = len(entry.result)
        entry.event.set()
        if entry.sampler:
            self.completed[entry.sampler, entry.seq // CLONE].append(entry)
        return entry

    async def outcome(self, account: Any, id: str, wait_s: float) -> c.Outcome:
        if id not in self.calls:
            raise Refusal(410, f"there is no call {id!r}")
        entry = self.calls[id]
        try:
            await asyncio.wait_for(entry.event.wait(), wait_s)
        except TimeoutError:
            return c.Pending(why="all slots are in use", state="paused_capacity")
        return entry.outcome if entry.failed else c.Done(result=c.decode_result(entry.result), size=entry.size)

    def retrieved(self, account: Any, ids: Sequence[str]) -> None:
        self.acknowledged |= set(ids)

    async def completions(
        self, account: Any, sampler: str, clone: int, cursor: int, wait_s: float
    ) -> tuple[int, list[Any]]:
        deadline = time.monotonic() + wait_s
        while not (found := self.completed[sampler, clone][cursor:]) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        return cursor + len(found), found

    async def cancel(self, account: Any, id: str) -> None:
        self.calls[id].task.cancel()
        self._done(self.calls[id], c.CallFailed(message="the call was canceled"))


class ServedMemory:
    url: str
    service: MemoryService
    key = KEY


@contextmanager
def served(context: SSLContext | None = None, **options: Any) -> Iterator[ServedMemory]:
    """A server with such a service, with TLS if there is a context. `options`: of the server."""
    found, ready, loop = ServedMemory(), threading.Event(), asyncio.new_event_loop()
    over: asyncio.Event

    async def serve() -> None:
        nonlocal over
        over, found.service = asyncio.Event(), MemoryService()
        server: Any = TinkerServer(found.service, **options)  # pyright: ignore[reportArgumentType]
        port = await server.listen("127.0.0.1", 0, "", context)
        found.url = f"{'https' if context else 'http'}://127.0.0.1:{port}"
        ready.set()
        await over.wait()
        await server.stop_listening()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="tinker server")
    thread.start()
    assert ready.wait(30), "the server does not listen after 30 s"
    yield found
    loop.call_soon_threadsafe(over.set)
    thread.join(30)
    assert not thread.is_alive(), "the server does not end within 30 s"
    loop.close()
