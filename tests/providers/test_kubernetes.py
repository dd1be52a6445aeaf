"""Kubernetes: manifests against the published schemas (`make test-fleet`), credentials, and a difficult API server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.recorded_events import RecordedEvents
from tests.support.stand_ins.kubernetes import Cluster
from tests.support.worker_sources import COMMAND, DRAINING, TOKEN, Workers, running, source_path
from windfall import recipe as config
from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.providers.kubernetes import api, credentials
from windfall.providers.kubernetes.api import ApiServer
from windfall.providers.kubernetes.credentials import Credentials
from windfall.providers.kubernetes.manifests import RunNames, deployment, manifests
from windfall.providers.kubernetes.provider import KubernetesProvider
from windfall.recipe.worker_sources import Kubernetes
from windfall.run import worker_sources

NAMES = RunNames(run="Demo_1")
OPTIONS = Kubernetes(
    image="windfall:1", drain_s=30.0, node_selector={"cloud.google.com/gke-spot": "true"},
    tolerations=[{"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"}],
    storage_class="fast", trainer_node_selector={"pool": "reserved"},
)  # fmt: skip


def objects() -> list[dict[str, Any]]:
    return manifests(
        OPTIONS, COMMAND, names=NAMES, url="http://h:8700", recipe="[run]\n", ports=(8700, 8701), certificate="PEM"
    )


def test_manifests_keep_the_rules_of_workers() -> None:
    made = {(o["kind"], o["metadata"]["name"]): o for o in objects()}
    workers = made["Deployment", "windfall-demo-1-workers"]
    pod = workers["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > OPTIONS.drain_s
    assert pod["priorityClassName"] == made["PriorityClass", "default-windfall-demo-1-workers"]["metadata"]["name"]
    assert "replicas" not in workers["spec"]
    assert [kind for kind, _ in made].count("Service") == 1
    assert made["Service", "windfall-demo-1"]["spec"]["selector"]["windfall/role"] == "run"
    assert "Secret" not in [kind for kind, _ in made]
    assert TOKEN not in yaml.safe_dump(list(made.values()))
    secret = {"name": "windfall-demo-1-token", "key": "token"}
    for name, kind in (("windfall-demo-1-workers", "Deployment"), ("windfall-demo-1", "StatefulSet")):
        (container,) = made[kind, name]["spec"]["template"]["spec"]["containers"]
        (token,) = [e for e in container["env"] if e["name"] == "WINDFALL_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == secret
    rules = made["Role", "windfall-demo-1"]["rules"]
    assert rules[0]["resourceNames"] == ["windfall-demo-1-workers"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "patch", "list"}


def test_run_in_its_pod_gets_the_signal_to_stop(tmp_path: Path) -> None:
    (pod,) = [o["spec"]["template"]["spec"] for o in objects() if o["kind"] == "StatefulSet"]
    workers = Workers(tmp_path, "")
    code = f"trap 'touch {tmp_path}/saved; exit 0' TERM; touch {tmp_path}/started; while :; do sleep 0.05; done"
    (workers.bin / "windfall").write_text(f"#!/bin/sh\n{code}\n")
    shell = subprocess.Popen(pod["containers"][0]["command"], env={**os.environ, "PATH": workers.path})
    try:
        for _ in range(100):
            if (tmp_path / "started").exists():
                break
            time.sleep(0.05)
        shell.terminate()
        assert shell.wait(5.0) == 0
    finally:
        shell.kill()
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("version", ["1.28", "1.33"])
def test_manifests_are_valid_by_the_published_schemas(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for manifest in objects():
        validate.validate(manifest, version, strict=True)
    broken = deployment(OPTIONS, COMMAND, names=NAMES, url="http://h:1")
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, version, strict=True)


def serve(tmp_path: Path, use: Any) -> Any:
    async def main() -> Any:
        objects = deployment(Kubernetes(image="x", drain_s=1.0), COMMAND, names=NAMES, url="http://h:1")
        workers = Workers(tmp_path, DRAINING)
        async with Cluster(objects, token="t", secrets={NAMES.secret: TOKEN}, path=workers.path) as cluster:
            return await use(cluster, workers)

    return asyncio.run(main())


def test_refusal_in_mid_run_is_reported_and_the_workers_go_on(tmp_path: Path) -> None:
    async def use(cluster: Cluster, workers: Workers) -> None:
        events = RecordedEvents()
        provider = KubernetesProvider(
            Credentials(server=cluster.url, token="t"), NAMES, 1, namespace="default", drain_s=1.0, on_event=events,
            poll_s=0.05,
        )  # fmt: skip
        async with running(provider):
            (first,) = await workers.until(1)
            cluster.faults = [403]
            assert "needs the Role" in (await events.until(1, "spawn_failed"))[0]["error"]
            provider.target(2)
            assert first in await workers.until(2)

    serve(tmp_path, use)


def test_faults_that_pass_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FIRST_DELAY_S", 0.01)

    async def use(cluster: Cluster, workers: Workers) -> None:
        async with ApiServer(Credentials(server=cluster.url, token="t"), request_s=0.3) as server:
            for fault in (409, 500, 503, 401, 1.0):  # the last one answers too late
                cluster.faults = [fault]
                await server.scale("default", NAMES.workers, 1)
                assert not cluster.faults
            loop = asyncio.get_running_loop()
            began, cluster.faults = loop.time(), [429]
            await server.scale("default", NAMES.workers, 2)
            assert loop.time() - began >= 1.0, "Retry-After"
            assert await server.replicas("default", NAMES.workers) == 2
            cluster.faults = [503] * api.TRIES
            with pytest.raises(OSError, match="failed 6 times: status 503"):
                await server.replicas("default", NAMES.workers)

    serve(tmp_path, use)


@pytest.mark.parametrize(
    ("token", "name", "expected"),
    [("wrong", NAMES.workers, "does not accept the token"), ("t", "other", "kubectl apply")],
)
def test_what_needs_a_person_ends_the_provider(tmp_path: Path, token: str, name: str, expected: str) -> None:
    async def use(cluster: Cluster, workers: Workers) -> None:
        names = RunNames(run=name.removesuffix("-workers").removeprefix("windfall-"))
        provider = KubernetesProvider(
            Credentials(server=cluster.url, token=token), names, 1, namespace="default", drain_s=0.0, poll_s=0.1
        )
        with pytest.raises(WindfallError, match=expected):
            await asyncio.wait_for(provider.run(), 60)

    serve(tmp_path, use)


def test_forbidden_names_the_role(tmp_path: Path) -> None:
    async def use(cluster: Cluster, workers: Workers) -> None:
        cluster.faults = [403]
        async with ApiServer(Credentials(server=cluster.url, token="t")) as server:
            with pytest.raises(WindfallError, match="needs the Role"):
                await server.pods("default", {"a": "b"})

    serve(tmp_path, use)


def test_pod_that_is_evicted_counts_as_lost_and_foreign_changes_are_undone(tmp_path: Path) -> None:
    events = RecordedEvents()

    async def use(cluster: Cluster, workers: Workers) -> None:
        provider = KubernetesProvider(
            Credentials(server=cluster.url, token="t"), NAMES, 2, namespace="default", drain_s=1.0, poll_s=0.1,
            on_event=events,
        )  # fmt: skip
        task = asyncio.create_task(provider.run())
        await workers.until(2)
        await events.until(2, "started")
        cluster.evict(next(iter(cluster.pods.values())))
        await events.until(3, "started")
        await events.until(1, "exited")
        assert (provider.started, provider.lost) == (3, 1)
        await workers.until(3, of="all")
        cluster.scale(0)
        await workers.until(5, of="all")
        assert cluster.replicas == 2
        task.cancel()
        await asyncio.wait({task})
        assert cluster.replicas == 0
        assert not workers.alive()

    serve(tmp_path, use)


RECIPE = """
[run]
name = "Demo_1"
steps = 2
device = "cpu"
threads = 1
[rollout]
groups = 2
group_size = 2
max_tokens = 24
[eval]
tasks = 0
[fleet]
local = false
host = "0.0.0.0"
port = PORT
weights_port = WEIGHTS
[fleet.kubernetes]
image = "windfall"
workers = 2
gpus = 0
worker_threads = 1
server = "SERVER"
token_file = "api.token"
drain_s = 5.0
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


@pytest.mark.slow
def test_run_trains_on_pods_and_scales_them_to_zero(tmp_path: Path) -> None:
    """Real workers, started as the Deployment of the preview says."""
    port, weights = free_ports(2)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "windfall"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m windfall.run.cli "$@"\n')
    program.chmod(0o755)
    (tmp_path / "run.token").write_text(TOKEN)
    (tmp_path / "api.token").write_text("t\n")
    text = RECIPE.replace("PORT", str(port)).replace("WEIGHTS", str(weights))
    recipe = config.parse(tomllib.loads(text.replace("SERVER", "http://h")), where="test")
    shown = list(yaml.safe_load_all(worker_sources.preview(recipe)))
    (made,) = [o for o in shown if o and o["kind"] == "Deployment"]
    command = made["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[3] == f"http://windfall-demo-1-0.windfall-demo-1:{port}"
    command[3] = f"http://127.0.0.1:{port}"  # there is no DNS of a cluster here

    async def main() -> None:
        path = f"{program.parent}:{os.environ['PATH']}"
        async with Cluster(made, token="t", secrets={NAMES.secret: TOKEN}, path=path) as cluster:
            (tmp_path / "r.toml").write_text(text.replace("SERVER", cluster.url))
            train = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "windfall.run.cli", "train", "r.toml", "--token", "run.token", cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source_path()},
            )  # fmt: skip
            out, _ = await asyncio.wait_for(train.communicate(), 200)
            assert train.returncode == 0, out.decode()
            assert (cluster.replicas, len(cluster.pods)) == (0, 0)

    asyncio.run(main())
    events = read(tmp_path / "runs" / "Demo_1" / "events.jsonl")
    joined = {e["worker"] for e in events if e["name"] == "worker_joined"}
    assert joined
    assert all(name.startswith("kubernetes-windfall-demo-1-workers-") for name in joined)


def test_kubeconfig(tmp_path: Path) -> None:
    def write(user: dict[str, Any], **cluster: Any) -> Path:
        path = tmp_path / "config"
        path.write_text(
            yaml.safe_dump(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                    "clusters": [{"name": "k", "cluster": {"server": "https://k8s:6443/", **cluster}}],
                    "users": [{"name": "u", "user": user}],
                }
            )
        )
        return path

    found = credentials.find(write({"token": "abc"}), "", None)
    assert (found.server, found.authorization()) == ("https://k8s:6443", {"Authorization": "Bearer abc"})
    assert found.ssl is not None
    (tmp_path / "t").write_text("from-file\n")
    assert credentials.find(write({"tokenFile": "t"}), "", None).authorization() == {
        "Authorization": "Bearer from-file"
    }
    with pytest.raises(WindfallError, match="kubectl proxy"):
        credentials.find(write({"exec": {"command": "aws"}}), "", None)
    bad = base64.b64encode(b"no certificate").decode()
    with pytest.raises(WindfallError, match="cannot use a certificate"):
        credentials.find(write({}, **{"certificate-authority-data": bad}), "", None)
    with pytest.raises(WindfallError, match="cannot read the kubeconfig"):
        credentials.find(tmp_path / "none", "", None)
    (tmp_path / "config").write_text("clusters: []")
    with pytest.raises(WindfallError, match="not a kubeconfig"):
        credentials.find(tmp_path / "config", "", None)
    proxy = credentials.find(None, "http://127.0.0.1:8001", None)
    assert (proxy.ssl, proxy.authorization()) == (None, {})
