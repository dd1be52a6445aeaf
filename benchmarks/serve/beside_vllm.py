"""`windfall serve` beside vLLM's server: the same model, the same requests over HTTP, one server after the other.

    python benchmarks/serve/beside_vllm.py --device cuda --vllm FOLDER                      vLLM is in FOLDER
    python benchmarks/serve/beside_vllm.py --device cuda --vllm-python PATH                 vLLM in its own environment
    python benchmarks/serve/beside_vllm.py --device cpu --model tiny --rates 2 --seconds 5  windfall alone: a check

Random weights in the shape of Qwen3, written to a temporary folder that both servers load. Streamed completions of
token ids, lengths as in coserve_load.py, `ignore_eos`, temperature 1. First at given rates (requests/s): latencies
at equal load. Then all requests at once: throughput. vLLM keeps its defaults but for the share of the memory, the
longest context, and no log of requests. The client is a process of its own: this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

import aiohttp

from benchmarks.support.coserve_host import shape_of
from benchmarks.support.coserve_load import Arrival, Served, latencies, requests, schedule

ROOT = Path(__file__).parents[2]
START_S = 240.0
"""Time limit for the start of a server."""
NAME = "bench"


def write_model(folder: Path, shape: dict[str, Any], dtype: str, device: str) -> None:
    """A model folder with random weights, and a tokenizer with a word for every token id."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**shape, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    weights = {n: t.contiguous().cpu() for n, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    del model, weights
    if device != "cpu":
        torch.cuda.empty_cache()
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(shape["vocab_size"])}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    end = f"w{shape['eos_token_id']}"
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end, "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


class Server:
    def __init__(self, command: list[str], port: int, log: Path, env: dict[str, str]) -> None:
        self.url, self._log = f"http://127.0.0.1:{port}", log
        self._began_s = time.monotonic()
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    async def ready(self) -> float:
        """Wait until it answers. Returns the seconds that it took."""
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < self._began_s + START_S:
                if (code := self._process.poll()) is not None:
                    raise RuntimeError(f"the server ended with status {code} while it started{self._tail()}")
                try:
                    async with http.get(self.url + "/health", timeout=aiohttp.ClientTimeout(2)) as answer:
                        if answer.status == 200:
                            return time.monotonic() - self._began_s
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(0.25)
        raise RuntimeError(f"the server did not answer within {START_S:g} s{self._tail()}")

    def _tail(self) -> str:
        return "".join(f"\n    | {line}" for line in self._log.read_text(errors="replace").splitlines()[-25:])

    def stop(self) -> None:
        """End the server and the processes that it has started: they are a session of their own."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


async def ask(http: aiohttp.ClientSession, url: str, arrival: Arrival, seed: int, vocabulary: int) -> Served:
    rng = random.Random(seed)
    prompt = [rng.randrange(3, vocabulary - 1000 if vocabulary > 2000 else vocabulary) for _ in range(arrival.prompt)]
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": arrival.tokens, "temperature": 1.0, "seed": seed, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    served = Served(time.monotonic(), arrival.tokens)
    try:
        async with http.post(url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                served.error = f"{answer.status}: {(await answer.text())[:200]}"
                return served
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    served.error = str(event["error"])
                elif event.get("usage") and not event.get("choices"):
                    served.tokens = event["usage"]["completion_tokens"]
                elif event.get("choices"):
                    served.got(time.monotonic(), 1)
    except (aiohttp.ClientError, TimeoutError) as e:
        served.error = f"{type(e).__name__}: {e}"
    return served


async def run(
    url: str, plan: list[Arrival], vocabulary: int, timeout_s: float, seeds: Iterator[int]
) -> tuple[list[Served], float]:
    limits = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as http:
        began_s, tasks = time.monotonic(), list[asyncio.Task[Served]]()
        for arrival in plan:
            await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.monotonic()))
            tasks.append(asyncio.create_task(ask(http, url, arrival, next(seeds), vocabulary)))
        served = await asyncio.gather(*tasks)
        return served, time.monotonic() - began_s


async def measure(name: str, server: Server, options: argparse.Namespace, vocabulary: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    base = requests(options.trace, 4000, max_prompt=options.max_prompt, max_output=options.max_output)
    start_s = await server.ready()
    out.append({"server": name, "load": "start", "values": {"seconds": start_s}})
    seeds = count()  # no prompt is sent twice: a prefix cache would make it free
    warm = [Arrival(0.05 * n, a.prompt, min(a.tokens, 16)) for n, a in enumerate(base[:24])]
    await run(server.url, warm, vocabulary, options.timeout, seeds)
    full = [Arrival(0.0, a.prompt, 16) for a in base[: options.at_once]]
    await run(server.url, full, vocabulary, options.timeout, seeds)
    plans = [(f"{rate:g}/s", schedule(base, rate, options.seconds)) for rate in options.rates]
    plans.append((f"{options.at_once} at once", [Arrival(0.0, a.prompt, a.tokens) for a in base[: options.at_once]]))
    for load, plan in plans:
        served, took_s = await run(server.url, plan, vocabulary, options.timeout, seeds)
        values = latencies(served, took_s, ttft_s=options.ttft_ms / 1000, tpot_s=options.tpot_ms / 1000)
        out.append({"server": name, "load": load, "values": values})
        errors = {s.error for s in served if s.error}
        print(line(out[-1]) + (f"  errors: {sorted(errors)[:2]}" if errors else ""), flush=True)
    return out


def line(row: dict[str, Any]) -> str:
    v = row["values"]
    return (
        f"{row['server']:9s} {row['load']:>12s} {v['requests']:5.0f} {v['tok_per_s']:9.0f} {v['ttft_p50_ms']:9.1f} "
        f"{v['ttft_p99_ms']:8.1f} {v['tpot_p50_ms']:9.2f} {v['tpot_p99_ms']:8.2f} {v['violations']:5.0f}"
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def windfall_server(folder: Path, options: argparse.Namespace, context: int) -> Server:
    port = free_port()
    command = [
        sys.executable, "-c", "from windfall.run.cli import main; main()", "serve", str(folder), "--port", str(port),
        "--name", NAME, "--device", options.device, "--max-running", str(options.running), "--max-requests", "4096",
        "--memory", "0.6", "--kv-tokens", str(context * options.running),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return Server(command, port, folder / "windfall.log", {**os.environ, "PYTHONPATH": path})


def vllm_server(folder: Path, options: argparse.Namespace, context: int) -> Server:
    port = free_port()
    command = [
        options.vllm_python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--port", str(port), "--served-model-name", NAME, "--max-model-len", str(context), "--max-num-seqs",
        str(options.running),
    ]  # fmt: skip
    if options.device != "cpu":
        command += ["--gpu-memory-utilization", "0.6"]
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    env["PYTHONPATH"] = options.vllm
    return Server(command, port, folder / "vllm.log", env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="0.6b", help="shape: 0.6b, 1.7b, 8b or tiny")
    parser.add_argument("--vllm", default="", help="folder, or PYTHONPATH, in which vLLM is installed")
    parser.add_argument("--vllm-python", default="", help="Python of an environment with vLLM")
    parser.add_argument("--rates", type=float, nargs="*", default=[4.0, 16.0])
    parser.add_argument("--at-once", type=int, default=256, help="requests that are sent at once")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--max-prompt", type=int, default=2048)
    parser.add_argument("--max-output", type=int, default=256)
    parser.add_argument("--running", type=int, default=256, help="requests that are decoded at once")
    parser.add_argument("--ttft-ms", type=float, default=500.0)
    parser.add_argument("--tpot-ms", type=float, default=150.0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one run of the load")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    options = parser.parse_args()
    if options.model == "tiny":
        options.max_prompt, options.max_output = min(options.max_prompt, 200), min(options.max_output, 64)
        options.running, options.at_once = min(options.running, 16), min(options.at_once, 24)
    shape, rows = shape_of(options.model), list[dict[str, Any]]()
    context = options.max_prompt + options.max_output + 16
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = {**shape, "max_position_embeddings": context}
        write_model(folder, shape, "bfloat16" if options.device != "cpu" else "float32", options.device)
        print(f"{'server':9s} {'load':>12s}   req     tok/s  TTFT p50   p99 ms  TPOT p50   p99 ms  late", flush=True)
        makers = [("windfall", windfall_server)]
        if options.vllm or options.vllm_python:
            makers.append(("vLLM", vllm_server))
        failed = False
        for server_name, make in makers:
            server = make(folder, options, context)
            try:
                rows += asyncio.run(measure(server_name, server, options, shape["vocab_size"]))
            except RuntimeError as e:
                failed = True
                print(f"{server_name}: {e}", flush=True)
            finally:
                server.stop()
    for row in rows:
        if row["load"] == "start":
            print(f"{row['server']} answered {row['values']['seconds']:.1f} s after its start")
    if options.out is not None:
        chosen = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        options.out.write_text(json.dumps({"options": chosen, "figures": rows}, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
