"""One process of benchmarks/serve/coserve.py: a host that serves (and lends), or a rollout without a service.

python benchmarks/support/coserve_host.py host JOB         phases of the job in turn; one line of JSON for each figure
python benchmarks/support/coserve_host.py rollout JOB      generates until it is killed; writes how many to a file
"""

from __future__ import annotations

import functools
import json
import math
import random
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.coserve_load import Arrival, Served, latencies, requests, schedule
from benchmarks.support.gpu_job import SHAPES
from windfall import devices
from windfall.link.messages import EngineSpec, Released, Tokens, Work
from windfall.serve import build
from windfall.serve.host import Host
from windfall.serve.rollout_tenant import RolloutTenant
from windfall.serve.slo import Objectives
from windfall.types import Chunk, Request, Sampling

WAIT_S = 120.0
"""Time limit for everything that is waited for, except the load itself."""


def emit(what: str, load: str, **values: float) -> None:
    print("FIGURE " + json.dumps({"what": what, "load": load, "values": values}), flush=True)


def shape_of(name: str) -> dict[str, Any]:
    return SHAPES[name]


def spec_of(job: dict[str, Any], model: str, *, longest: int, running: int, kv_tokens: int) -> EngineSpec:
    dtype = devices.resolve(job["device"], "auto", job["threads"])[1]
    return EngineSpec(
        model_config=json.dumps(shape_of(model)), dtype=dtype, kv_tokens=kv_tokens, page_size=16, max_running=running,
        max_rows=2048, deterministic=False, longest=longest, wanted=running,
    )  # fmt: skip


def random_model(job: dict[str, Any], name: str) -> Any:
    import torch

    from windfall.engine import factory

    device, dtype = devices.resolve(job["device"], "auto", job["threads"])
    spec = spec_of(job, name, longest=64, running=1, kv_tokens=0)
    model = factory.build_model(spec, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    del dtype
    return model


def until(holds: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end_s:
            raise SystemExit(f"waited {timeout_s:g} s until {what}")
        time.sleep(0.005)


def rollout_work(handle: int, vocabulary: int, most: int) -> Work:
    rng = random.Random(handle)
    prompt = array("I", (rng.randrange(3, vocabulary) for _ in range(min(128, most // 2)))).tobytes()
    tokens = rng.randrange(max(2, most // 4), most)
    return Work(handle=handle, prompt=prompt, position=0, seed=handle, max_tokens=tokens, sampling=Sampling(), stop=())


class Rollout:
    """A rollout tenant with a constant number of responses in flight."""

    def __init__(self, host: Host, job: dict[str, Any], model: str, responses: int) -> None:
        self._host, self._next, self._vocabulary = host, 0, shape_of(model)["vocab_size"]
        self._most = job["rollout_tokens"]
        device, _ = devices.resolve(job["device"], "auto", job["threads"])
        spec = spec_of(job, model, longest=128 + self._most + 16, running=responses, kv_tokens=0)
        began_s = time.monotonic()
        self.tenant = RolloutTenant(host, make=lambda: build.build_rollout(host, spec, device))
        self.tenant.start()
        self.tenant.attach(self._emit)
        until(lambda: self.tenant.built or self.tenant.failed, "the rollout's engine is built")
        if self.tenant.failed is not None:
            raise SystemExit(f"the rollout tenant failed: {self.tenant.failed!r}")
        self.build_s = time.monotonic() - began_s
        self.responses = responses

    def activate(self, seed: int = 1) -> tuple[float, float]:
        """(seconds of the copy to the device, seconds until the first token)"""
        import torch

        engine: Any = self.tenant.engine
        ready, done = getattr(engine, "ready_weights", None), threading.Event()
        finished = lambda error: done.set()  # noqa: E731
        began_s = time.monotonic()
        if ready is None:
            self.tenant.swap(seed, dict(engine.model.state_dict()), finished)
        else:
            if not ready.loaded:
                parameters = list(ready._in_host.parameters())
                with torch.no_grad():
                    for parameter in parameters:
                        flat = parameter.view(-1)
                        part = torch.randn(min(flat.numel(), 1 << 20), dtype=torch.float32).to(flat.dtype) * 0.02
                        for start in range(0, flat.numel(), len(part)):
                            flat[start : start + len(part)] = part[: flat.numel() - start]
                        if parameter.dim() == 1:
                            parameter.fill_(1.0)
                ready.loaded = True
            began_s = time.monotonic()
            copied = functools.partial(self.tenant._copied, seed, "", finished)
            self.tenant._orders.put(functools.partial(self.tenant._in_thread, ready.activate, copied))
        if not done.wait(WAIT_S):
            raise SystemExit("the weights were not activated")
        copied_s = time.monotonic() - began_s
        before = self._host.metrics.rollout_tokens
        self._add(self.responses)
        until(lambda: self._host.metrics.rollout_tokens > before, "the rollout generates")
        return copied_s, time.monotonic() - began_s

    def _emit(self, message: object) -> None:
        if isinstance(message, Tokens):
            self._add(len(message.finished))
        elif isinstance(message, Released):
            time.sleep(0.1)
            self._add(len(message.handles))

    def _add(self, count: int) -> None:
        if count:
            self.tenant.add([rollout_work(self._next + n, self._vocabulary, self._most) for n in range(count)])
            self._next += count

    def close(self) -> None:
        self._emit = lambda message: None
        self.tenant.close()


class Bench:
    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        device, _ = devices.resolve(job["device"], "auto", job["threads"])
        began_s = time.monotonic()
        model = random_model(job, job["serving"])
        self._vocabulary = shape_of(job["serving"])["vocab_size"]
        self.objectives = Objectives(
            ttft_s=job["ttft_ms"] / 1000, tpot_s=job["tpot_ms"] / 1000, max_slowdown=job["max_slowdown"] or math.inf
        )
        longest = job["max_prompt"] + job["max_output"] + 16
        spec = spec_of(job, job["serving"], longest=longest, running=job["running"], kv_tokens=job["kv_tokens"])
        self.host = build.build_host(spec, model, device, self.objectives)
        self.host.start()
        trace = Path(job["trace"]) if job["trace"] else None
        self.base = requests(trace, 4000, max_prompt=job["max_prompt"], max_output=job["max_output"])
        emit("built", "", seconds=time.monotonic() - began_s)
        self._sent = 0

    def send(self, arrival: Arrival) -> Served:
        n = self._sent = self._sent + 1
        rng, served = random.Random(n), Served(time.monotonic(), arrival.tokens)
        prompt = tuple(rng.randrange(3, self._vocabulary) for _ in range(arrival.prompt))

        def listen(what: Chunk | Exception) -> None:
            if isinstance(what, Chunk):
                served.got(time.monotonic(), len(what.tokens))
            else:
                served.error = str(what)

        served.arrival_s = time.monotonic()
        self.host.submit(Request(id=str(n), prompt=prompt, seed=n, max_tokens=arrival.tokens), listen)
        return served

    def request_s(self) -> float:
        """Mean time of a request that is alone."""
        times: list[float] = []
        for count, arrival in enumerate(self.base[:14]):
            served = self.send(arrival)
            until(lambda s=served: s.done, "a request has ended")
            if count >= 4:
                times.append(served.last_s - served.arrival_s)
        return sum(times) / len(times)

    def run(self, what: str, load: str, rate: float, burst: float) -> dict[str, float]:
        """One run of the load; emits and returns its figures."""
        host, metrics = self.host, self.host.metrics
        plan = schedule(self.base, rate, self.job["seconds"], burst)
        served: list[Served] = []
        began_s, lent, busy_s = time.monotonic(), metrics.rollout_tokens, metrics.serving_seconds
        for arrival in plan:
            time.sleep(max(0.0, began_s + arrival.at_s - time.monotonic()))
            served.append(self.send(arrival))
        until(lambda: all(s.done for s in served), "all requests have ended")
        took_s = max(time.monotonic() - began_s, self.job["seconds"] * 0.5)
        values = latencies(served, took_s, ttft_s=self.objectives.ttft_s, tpot_s=self.objectives.tpot_s)
        values["rate"] = rate
        values["busy"] = (metrics.serving_seconds - busy_s) / took_s
        values["rollout_tok_per_s"] = (metrics.rollout_tokens - lent) / took_s
        values["step_error"] = host.rollout_time.error
        emit(what, load, **values)
        return values

    def loads(self, what: str) -> dict[str, dict[str, float]]:
        out: dict[str, dict[str, float]] = {}
        for load in self.job["loads"]:
            out[f"{load:.0%}"] = self.run(what, f"{load:.0%}", self.rate(load), 1.0)
        if self.job["burst"] > 1:
            name = f"{self.job['loads'][0]:.0%}, burst {self.job['burst']:g}x"
            out[name] = self.run(what, name, self.rate(self.job["loads"][0]), self.job["burst"])
        return out

    def rate(self, load: float) -> float:
        """Requests per second with which serving is busy for this share of the time: with random arrivals, no request
        is there for the share exp(-rate * time of a request)."""
        return -math.log(1.0 - load) / self.each_s

    def main(self) -> None:
        job = self.job
        self.each_s = job["request_s"] or self.request_s()
        emit("request", "", seconds=self.each_s)
        if "naive" in job["phases"]:
            self.naive()
        if "alone" in job["phases"]:
            self.alone = self.loads("alone")
        if "windfall" in job["phases"]:
            self.windfall()
        if "activation" in job["phases"]:
            self.activation()

    def windfall(self) -> None:
        rollout = Rollout(self.host, self.job, self.job["rollout"], self.job["responses"])
        copied_s, first_s = rollout.activate()
        emit("activation", self.job["rollout"], build_s=rollout.build_s, copy_s=copied_s, first_token_s=first_s)
        emit("rollout idle", "", rollout_tok_per_s=self.rollout_rate(self.job["seconds"] / 2))
        self.loads("windfall")
        rollout.close()

    def rollout_rate(self, seconds: float) -> float:
        """Rollout tokens per second without serving requests."""
        metrics = self.host.metrics
        time.sleep(min(3.0, seconds / 2))
        before, began_s = metrics.rollout_tokens, time.monotonic()
        time.sleep(seconds)
        return (metrics.rollout_tokens - before) / (time.monotonic() - began_s)

    def activation(self) -> None:
        """How long another model takes until it generates, while requests are served."""
        name = self.job["activation"]
        rollout = Rollout(self.host, self.job, name, 8)
        copied_s, first_s = rollout.activate()
        emit("activation", name, build_s=rollout.build_s, copy_s=copied_s, first_token_s=first_s)
        copied_s, first_s = rollout.activate(2)
        emit("activation", f"{name}, again", copy_s=copied_s, first_token_s=first_s)
        rollout.close()

    def naive(self) -> None:
        """Serving beside a process that rolls out, whose tokens are counted in a file."""
        for load in self.job["loads"]:
            self._naive(f"{load:.0%}", load, 1.0)
        if self.job["burst"] > 1:
            load = self.job["loads"][0]
            self._naive(f"{load:.0%}, burst {self.job['burst']:g}x", load, self.job["burst"])

    def _naive(self, name: str, load: float, burst: float) -> None:
        counter = Path(self.job["counter"])
        before, began_s = int(counter.read_text() or 0), time.monotonic()
        self.run("naive serving", name, self.rate(load), burst)
        made = int(counter.read_text() or 0) - before
        emit("naive", name, rollout_tok_per_s=made / (time.monotonic() - began_s))


def rollout_process(job: dict[str, Any]) -> None:
    """Generate as fast as the engine can, as a worker would."""
    from windfall.engine import factory
    from windfall.engine.engine_thread import request_of

    device, _ = devices.resolve(job["device"], "auto", job["threads"])
    model = random_model(job, job["rollout"])
    longest = 128 + job["rollout_tokens"] + 16
    spec = spec_of(job, job["rollout"], longest=longest, running=job["responses"], kv_tokens=longest * job["responses"])
    engine, _ = factory.build_engine(spec, device, model=model)
    vocabulary, made, handle, written_s = shape_of(job["rollout"])["vocab_size"], 0, 0, 0.0
    counter = Path(job["counter"])
    while True:
        while len(engine) < job["responses"]:
            engine.add(request_of(rollout_work(handle, vocabulary, job["rollout_tokens"])))
            handle += 1
        made += sum(len(chunk.tokens) for chunk in engine.step())
        if time.monotonic() - written_s > 0.05:
            written_s = time.monotonic()
            temporary = counter.with_suffix(".new")
            temporary.write_text(str(made))
            temporary.replace(counter)


def main() -> None:
    role, job = sys.argv[1], json.loads(sys.argv[2])
    if role == "rollout":
        rollout_process(job)
    bench = Bench(job)
    bench.main()
    bench.host.close()
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
