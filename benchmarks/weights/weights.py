"""Throughput of weight transfer: a full pull beside a plain socket copy, many concurrent readers, and deltas of real
training steps.

    python benchmarks/weights/weights.py                     about five minutes on two cores
    python benchmarks/weights/weights.py --device cuda       publishes and trains from a GPU
    python benchmarks/weights/weights.py --models "" --baseline PATH      beside another checkout, in the same run
    python benchmarks/weights/weights.py --models "" --readers "" --generate      tokens/s of a worker that serves

All transfers use loopback between separate processes: one serves the weights, one is a plain sender (a thread per
connection, sendfile from the same kind of memory), and one per reader. Pulls and plain copies alternate; figures are
medians. The buffer of a reader has been used before, except in the row "first pull". A pull verifies every chunk; a
plain copy verifies nothing. "socket" is a pull as from another machine; "memory" one as on the trainer's machine, where
readers copy from the memory of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from windfall.errors import WindfallError
from windfall.link.messages import FileRef, FileRoute, Load, ReadRoute, RoutePart, SourceRef
from windfall.weights.buffers import Buffer, machine
from windfall.weights.pulling.pull import Puller

KEY = "benchmark"
CHECKOUT = Path(__file__).resolve().parents[2]
ALL_READERS_MIB = 4096
"""Maximum for the readers of all kinds together, which keep their copies; with more readers, each one pulls less."""


class Child:
    """This file in another role. A request is one line of JSON, and so is its answer."""

    def __init__(self, role: str, *args: str, checkout: Path = CHECKOUT) -> None:
        self.role = role
        self.process = subprocess.Popen(
            [sys.executable, str(checkout / "benchmarks/weights/weights.py"), "--role", role, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        )

    def ask(self, **what: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise WindfallError("a process of the benchmark ended", where=self.role)
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(20)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def role_plain(mib: int) -> None:
    """Send the range of the buffer that each connection requests with two numbers."""
    buffer = Buffer(mib << 20)
    buffer.data[:] = 7
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    say(port=listener.getsockname()[1])

    def send(c: socket.socket) -> None:
        at, end = struct.unpack("<QQ", c.recv(16, socket.MSG_WAITALL))
        while at < end:
            at += os.sendfile(c.fileno(), buffer.fd, at, end - at)
        c.close()

    def accept() -> None:
        while True:
            threading.Thread(target=send, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


def role_serve(mib: int, device: str) -> None:
    """Serve two versions in which every element differs, so that a pull from one to the other is a full copy."""
    import torch

    from windfall.weights.publishing.publish import Publisher
    from windfall.weights.serve import serve

    publisher, digests, seconds, copied = Publisher(), [], [], []
    tensors = {f"layer{i}.weight": torch.randn(4 << 18, device=device) for i in range(mib // 4)}
    for version in range(4):
        for t in tensors.values():
            t.add_(1.0)
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        made = publisher.publish(version, tensors, copied=lambda: copied.append(time.perf_counter()))
        seconds.append(time.perf_counter() - began)
        copied[-1] -= began
        digests.append(made.digest)

    async def main() -> None:
        server = await serve(publisher.files, host="127.0.0.1", port=0, key=KEY)
        versions = {str(v): digests[v] for v in (2, 3)}
        say(port=server.port, versions=versions, first_s=seconds[0], then_s=min(seconds[2:]), copied_s=min(copied[2:]))
        await asyncio.to_thread(sys.stdin.read)
        await server.close()

    asyncio.run(main())


def role_read(parallel: int) -> None:
    import aiohttp.web  # noqa: F401  (a worker has imported it before its first pull)

    puller, buffers = Puller(key=KEY, parallel=parallel), {}
    for line in sys.stdin:
        ask = json.loads(line)
        received, deltas, began = puller.bytes_received, puller.delta_used, time.perf_counter()
        if ask["op"] == "pull":
            puller.pull(load_from(ask["port"], ask["version"], ask["files"], in_memory=ask["in_memory"]))
        elif ask["op"] == "repeat":
            for i in range(1 << 30):
                if time.perf_counter() - began > ask["s"]:
                    break
                puller.pull(load_from(ask["port"], i, ask["versions"][i % 2 :][:1], in_memory=False))
        elif ask["op"] == "plain":
            if ask["nbytes"] not in buffers or ask.get("fresh"):
                buffers[ask["nbytes"]] = mmap.mmap(-1, ask["nbytes"])
            _plain(memoryview(buffers[ask["nbytes"]]), ask["port"], ask["connections"])
        took = time.perf_counter() - began
        say(s=took, received=puller.bytes_received - received, delta=puller.delta_used > deltas)


def role_generate(mib: int, gbit_per_s: float) -> None:
    """A worker that generates on one core, and serves two versions from the same process."""
    import torch

    from windfall.engine.torch.engine import TorchEngine
    from windfall.models import load
    from windfall.types import Request
    from windfall.weights.held_files import UploadLimit
    from windfall.weights.publishing.publish import Publisher
    from windfall.weights.serve import serve_in_thread

    torch.set_num_threads(1)
    load.fetch("tiny")
    engine = TorchEngine(load.load("tiny", dtype="float32", device="cpu"), kv_tokens=8192)
    publisher, versions = Publisher(), {}
    for version in (0, 1):
        tensors = {f"layer{i}.weight": torch.full((4 << 18,), float(version)) for i in range(mib // 4)}
        versions[version] = publisher.publish(version, tensors).digest
    limit, count = UploadLimit(gbit_per_s * 1e9 / 8), 0
    server = serve_in_thread(publisher.files, host="127.0.0.1", port=0, key=KEY, limit=limit)
    say(port=server.port, versions=versions)
    for line in sys.stdin:
        ends_s, tokens, sent = time.perf_counter() + json.loads(line)["s"], 0, limit.sent_bytes
        while time.perf_counter() < ends_s:
            while len(engine) < 16:
                count += 1
                engine.add(Request(id=str(count), prompt=tuple(range(3, 13)), seed=count, max_tokens=64))
            tokens += sum(len(chunk.tokens) for chunk in engine.step())
        say(tokens=tokens, sent=limit.sent_bytes - sent)


def generate(out: Console, mib: int, repeats: int, seconds: float = 3.0) -> None:
    """The worker has the first core for itself, and the reader the last one. With and without the reader in turn."""
    cores = sorted(os.sched_getaffinity(0))
    table = Table(title=f"a worker that generates on one core (tiny, 16 responses), medians of {repeats}")
    for column in ("limit, Gbit/s", "tokens/s alone", "tokens/s while it serves", "of alone", "it sends, GB/s"):
        table.add_column(column, justify="right")
    for gbit_per_s in (0.0, 1.0):
        worker = Child("generate", "--mib", str(mib), "--gbit", str(gbit_per_s))
        reader = Child("read", "--parallel", "4")
        told, rates = worker.answer(), {False: [], True: []}
        os.sched_setaffinity(worker.process.pid, cores[:1])
        os.sched_setaffinity(reader.process.pid, cores[-1:])
        sent = []
        for i in range(2 * repeats + 1):
            serves = i % 2 == 1
            worker.ask(s=seconds)
            if serves:
                reader.ask(op="repeat", s=seconds, port=told["port"], versions=list(told["versions"].values()))
            got = worker.answer()
            if serves:
                reader.answer()
                sent.append(got["sent"] / seconds / 1e9)
            if i:  # the first one warms up
                rates[serves].append(got["tokens"] / seconds)
        for child in (worker, reader):
            child.close()
        alone, serving = (statistics.median(rates[serves]) for serves in (False, True))
        table.add_row(
            f"{gbit_per_s:g}" if gbit_per_s else "none",
            f"{alone:.0f}",
            f"{serving:.0f}",
            f"{serving / alone:.1%}",
            f"{statistics.median(sent):.2f}",
        )
    out.print(table)


def load_from(port: int, version: int, files: list[str], *, in_memory: bool) -> Load:
    """The last one of these files, from the server at this port. A delta is named as DIGEST:BEFORE:AFTER."""
    location, on = f"http://127.0.0.1:{port}", machine() if in_memory else ""
    source = SourceRef(id="trainer", kind="trainer", location=location, machine=on)
    route = ReadRoute(sources=(source,), parts=(RoutePart(start=0, stop=1 << 62, source=0),))
    refs = [
        FileRef(digest=d, nbytes=0, before=b, after=a) for d, b, a in (f"{name}::".split(":")[:3] for name in files)
    ]
    digest = refs[-1].after or refs[-1].digest
    return Load(version=version, digest=digest, files=tuple(FileRoute(file=ref, route=route) for ref in refs))


def _plain(view: memoryview, port: int, connections: int) -> None:
    def part(n: int) -> None:
        at, end = len(view) * n // connections, len(view) * (n + 1) // connections
        with socket.create_connection(("127.0.0.1", port)) as c:
            c.sendall(struct.pack("<QQ", at, end))
            while at < end:
                at += c.recv_into(view[at : min(end, at + (1 << 20))])

    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(part, range(connections)))


def full(
    out: Console, mib: int, readers: list[int], repeats: int, parallel: int, device: str, baseline: Path | None
) -> None:
    cores = len(os.sched_getaffinity(0))
    table = Table(title=f"full pull, float32, {parallel} connections per reader, {cores} cores, GB/s in sum")
    plains = ("plain, 1 conn.", f"plain, {parallel} conn.")
    for column in ("readers (processes)", "MiB each", *plains, "socket", "memory", "baseline", "of plain (memory)"):
        table.add_column(column, justify="right")
    for count in readers:
        each = min(mib, ALL_READERS_MIB // (count * (3 if baseline else 2)))
        options = ("--mib", str(each), "--device", device)
        plain, server = Child("plain", "--mib", str(each)), Child("serve", *options)
        other = Child("serve", *options, checkout=baseline) if baseline else None
        try:
            port, told = plain.answer()["port"], server.answer()
            before = other.answer() if other else None
            if each == mib and count == readers[0]:
                first, then = (each / 953.67 / told[k] for k in ("first_s", "then_s"))
                out.print(
                    f"publish {each} MiB from {device}: {first:.2f} GB/s the first time, then {then:.2f} "
                    f"(the tensors may change again after {told['copied_s']:.3f} of {told['then_s']:.3f} s)"
                )
            for name, took in _readers(count, each << 20, port, told, repeats, parallel, baseline, before).items():
                rates = {k: count * (each << 20) / 1e9 / statistics.median(v) for k, v in took.items() if v}
                shares = f"{rates['memory'] / rates['one']:.0%} / {rates['memory'] / rates['several']:.0%}"
                shown = (f"{rates[k]:.2f}" if k in rates else "-" for k in took)
                table.add_row(f"{count}{name}", str(each), *shown, shares)
        finally:
            for child in (plain, server, other):
                if child:
                    child.close()
    out.print(table)


def _readers(
    count: int,
    nbytes: int,
    plain: int,
    told: dict[str, Any],
    repeats: int,
    parallel: int,
    baseline: Path | None,
    before: dict[str, Any] | None,
) -> dict[str, dict[str, list[float]]]:
    """Seconds from the start until the last reader is done, by kind of transfer; first into fresh memory, then
    again. `told`, `before`: what the servers of this checkout and of the baseline said."""
    kinds = ("one", "several", "socket", "memory", "baseline")
    again: dict[str, list[float]] = {kind: [] for kind in kinds}
    fresh: dict[str, list[float]] = {kind: [] for kind in kinds}
    versions = list(told["versions"].items())
    for _ in range(3 if count == 1 else 1):
        groups = {
            kind: [Child("read", "--parallel", str(parallel), checkout=checkout) for _ in range(count)]
            for kind, checkout in (("socket", CHECKOUT), ("memory", CHECKOUT), ("baseline", baseline))
            if checkout
        }
        for children in groups.values():
            _all(children, op="nothing")
        for i in range(repeats + 1):
            copy = {"op": "plain", "port": plain, "nbytes": nbytes, "fresh": i == 0}
            version, digest = versions[i % 2]
            keep = again if i else fresh
            keep["one"].append(_all(groups["socket"], **copy, connections=1))
            for kind in ("socket", "memory"):
                ask = {"op": "pull", "port": told["port"], "version": int(version), "files": [digest]}
                keep[kind].append(_all(groups[kind], **ask, in_memory=kind == "memory"))
            if before is not None:
                number, name = list(before["versions"].items())[i % 2]
                ask = {"op": "pull", "port": before["port"], "version": int(number), "digest": name}
                keep["baseline"].append(_all(groups["baseline"], **ask))
            keep["several"].append(_all(groups["socket"], **copy, connections=parallel))
        for child in (child for children in groups.values() for child in children):
            child.close()
    return {"": again, ", first pull": fresh} if count == 1 else {"": again}


def _all(children: list[Child], **what: Any) -> float:
    began = time.perf_counter()
    for c in children:
        c.ask(**what)
    answers = [c.answer() for c in children]
    return answers[0]["s"] if len(children) == 1 else time.perf_counter() - began


def samples(model: Any, count: int, tokens: int) -> list[Any]:
    """Responses of the model, sampled by the engine, with advantages of +1 or -1."""
    import numpy as np

    from windfall.engine.torch.engine import TorchEngine
    from windfall.training import Sample
    from windfall.types import Request

    rng, engine = random.Random(0), TorchEngine(model, kv_tokens=8192)
    prompts = {str(i): tuple(rng.randrange(3, 13) for _ in range(16)) for i in range(count)}
    said: dict[str, list[tuple[int, float]]] = {i: [] for i in prompts}
    for n, (i, prompt) in enumerate(prompts.items()):
        engine.add(Request(id=i, prompt=prompt, seed=n, max_tokens=tokens))
    while len(engine):
        for c in engine.step():
            said[c.id] += zip(c.tokens, c.logprobs, strict=True)
    return [
        Sample(
            ids=(*prompts[i], *(t for t, _ in said[i])), targets=tuple(range(16, 16 + len(said[i]))),
            behavior=np.array([lp for _, lp in said[i]]), advantage=float(n % 2 * 2 - 1), limit=tokens,
        )
        for n, i in enumerate(prompts)
    ]  # fmt: skip


async def deltas(out: Console, names: list[str], lrs: list[float], steps: int, device: str) -> None:
    import torch

    from windfall import algorithms
    from windfall.models import load
    from windfall.recipe.file import parse_recipe
    from windfall.trainer.trainer import TorchTrainer
    from windfall.weights.publishing.publish import Publisher
    from windfall.weights.serve import serve

    table = Table(title=f"the step from update {steps - 1} to {steps} (float32 model, AdamW, GRPO, constant rate)")
    for column in (
        "model",
        "lr",
        "published as",
        "changed",
        "full MB",
        "delta",
        "publish s",
        "full pull s",
        "delta pull s",
    ):
        table.add_column(column, justify="right")
    for name, lr in ((n, r) for n in names for r in lrs):
        try:
            load.fetch(name)
        except WindfallError as e:
            out.print(f"{name} left out: {e}")
            continue
        model = load.load(name, dtype="float32", device=device)
        recipe = parse_recipe({"train": {"lr": lr, "engine_gap_limit": 99.0}}, where="benchmark")
        trainer = TorchTrainer(model, algorithms.make("grpo"), recipe, micro_tokens=512)
        both = {d: Publisher(dtype=d) for d in ("float32", "bfloat16")}
        for step in range(1, steps + 1):
            if step >= steps:
                for p in both.values():
                    p.publish(step - 1, model.state_dict())
            trainer.forward_backward(samples(model, 8, 32))
            trainer.optim_step()
        for dtype, p in both.items():
            began = time.perf_counter()
            made = await asyncio.to_thread(p.publish, steps, model.state_dict())
            took = time.perf_counter() - began
            old, new = (x.buffer.data.view(f"<u{4 if dtype == 'float32' else 2}") for x in reversed(p.readable))
            server = await serve(p.files, host="127.0.0.1", port=0, key=KEY)
            pulls = await asyncio.to_thread(_pull_both, server.port, p)
            await server.close()
            blob = p.delta and p.delta.manifest
            size = f"{blob.nbytes / made.nbytes:.1%} ({blob.nbytes / 1e6:.2f} MB)" if blob else "not smaller: full"
            row = [name, f"{lr:g}", dtype, f"{float((old != new).mean()):.2%}", f"{made.nbytes / 1e6:.1f}", size]
            table.add_row(*row, f"{took:.3f}", f"{pulls[0]:.3f}", f"{pulls[1]:.3f}" if blob else "-")
            p.close()
        del model, trainer
        if device == "cuda":
            torch.cuda.empty_cache()
    out.print(table)


def _pull_both(port: int, publisher: Any) -> tuple[float, float]:
    """Seconds to pull the previous version in full, and to pull the current one by its delta."""
    new, old = (p.manifest for p in publisher.readable)
    blob = publisher.delta and publisher.delta.manifest
    update = f"{blob.digest}:{blob.before}:{blob.after}" if blob else new.digest
    took: dict[int, list[float]] = {old.version: [], new.version: []}
    reader = Child("read", "--parallel", "4")
    for _ in range(6):
        for made, file in ((old, old.digest), (new, update)):
            reader.ask(op="pull", port=port, version=made.version, files=[file], in_memory=False)
            took[made.version].append(reader.answer()["s"])
    reader.close()
    return statistics.median(took[old.version][1:]), statistics.median(took[new.version][1:])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mib", type=int, default=1024, help="size of the weights for the full pull")
    p.add_argument("--readers", default="1,4,16")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--parallel", type=int, default=4, help="connections per puller")
    p.add_argument(
        "--models", default="tiny,smollm2-135m", help="models whose training steps are measured; empty for none"
    )
    p.add_argument("--lr", default="1e-6,1e-5")
    p.add_argument("--step", type=int, default=4, help="update of the training that is published as a delta")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--baseline", type=Path, help="another checkout, whose full pulls are measured in the same run")
    p.add_argument("--generate", action="store_true", help="measure tokens/s of a worker that serves")
    p.add_argument("--gbit", type=float, default=0.0, help=argparse.SUPPRESS)
    p.add_argument("--role", choices=["serve", "plain", "read", "generate"], help=argparse.SUPPRESS)
    args = p.parse_args()
    match args.role:
        case "serve":
            return role_serve(args.mib, args.device)
        case "plain":
            return role_plain(args.mib)
        case "read":
            return role_read(args.parallel)
        case "generate":
            return role_generate(args.mib, args.gbit)
    out = Console()
    if not out.is_terminal:
        out.width = 150  # do not wrap tables in a log file
    if args.readers:
        readers = [int(n) for n in args.readers.split(",")]
        full(out, args.mib, readers, args.repeats, args.parallel, args.device, args.baseline)
    if args.generate:
        generate(out, min(args.mib, 256), args.repeats)
    if args.models:
        rates = [float(x) for x in args.lr.split(",")]
        asyncio.run(deltas(out, args.models.split(","), rates, args.step, args.device))
    return None


if __name__ == "__main__":
    main()
