"""Kubernetes: manifests against the published schemas (`make test-fleet`), and kubectl with a difficult API server."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.fleets.recorded_events import RecordedEvents
from tests.support.fleets.worker_sources import DRAINING, TOKEN, Workers, programs, running, source_path
from tests.support.servers.ports import free_port
from tests.support.stand_ins.kubernetes import Cluster
from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.providers.kubernetes.manifests import RunNames, deployment
from windfall.providers.kubernetes.provider import KubernetesProvider
from windfall.providers.kubernetes.section import Kubernetes
from windfall.recipe.file import parse_recipe
from windfall.run import worker_sources

NAMES = RunNames(run="Demo_1")
OPTIONS = Kubernetes(
    image="windfall:1", drain_s=30.0, node_selector={"cloud.google.com/gke-spot": "true"},
    tolerations=[{"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"}],
)  # fmt: skip
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "kubernetes.md"
SMALL = Kubernetes(image="x", drain_s=1.0)


def workers_of(names: RunNames = NAMES) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(deployment(OPTIONS, names=names, url="http://h:8700", certificate="P\nE")))


def objects_of_the_guide() -> list[dict[str, Any]]:
    """The run's own objects, which a user adapts."""
    text = GUIDE.read_text().partition("```yaml\n")[2].partition("```")[0]
    return list(yaml.safe_load_all(text))


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(o["kind"], o["metadata"]["name"]): o for o in objects}


def test_manifests_keep_the_rules_of_workers() -> None:
    made = by_name(workers_of())
    workers = made["Deployment", "windfall-demo-1-workers"]
    pod = workers["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > OPTIONS.drain_s
    assert pod["priorityClassName"] == made["PriorityClass", "default-windfall-demo-1-workers"]["metadata"]["name"]
    assert "replicas" not in workers["spec"]
    assert len(made) == 2
    assert TOKEN not in yaml.safe_dump(list(made.values()))
    (container,) = pod["containers"]
    (token,) = [e for e in container["env"] if e["name"] == "WINDFALL_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "windfall-demo-1-token", "key": "token"}


def test_guide_uses_the_names_of_the_preview() -> None:
    names, made = RunNames(run="demo"), by_name(objects_of_the_guide())
    rules = made["Role", names.app]["rules"]
    allowed = {(what, verb) for rule in rules for what in rule["resources"] for verb in rule["verbs"]}
    assert allowed == {("deployments", "get"), ("deployments/scale", "patch"), ("pods", "list")}
    assert all(rule.get("resourceNames") == [names.workers] for rule in rules[:2])
    run = made["StatefulSet", names.app]["spec"]
    assert names.host == f"{names.app}-0.{run['serviceName']}"
    labels = run["template"]["metadata"]["labels"]
    assert labels == run["selector"]["matchLabels"] == made["Service", names.app]["spec"]["selector"]
    assert labels.items() <= names.selector("run").items()
    (container,) = run["template"]["spec"]["containers"]
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": names.secret, "key": "token"}


def test_run_in_its_pod_gets_the_signal_to_stop(tmp_path: Path) -> None:
    (pod,) = [o["spec"]["template"]["spec"] for o in objects_of_the_guide() if o["kind"] == "StatefulSet"]
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
        assert shell.wait(60.0) == 0
    finally:
        shell.kill()
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("version", ["1.28", "1.33"])
def test_manifests_are_valid_by_the_published_schemas(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for manifest in [*workers_of(), *objects_of_the_guide()]:
        validate.validate(manifest, version, strict=True)
    _, broken = yaml.safe_load_all(deployment(OPTIONS, names=NAMES, url="http://h:1"))
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, version, strict=True)


def serve(tmp_path: Path, use: Any, *, real: bool = False) -> Any:
    async def main() -> Any:
        _, objects = yaml.safe_load_all(deployment(SMALL, names=NAMES, url="http://h:1"))
        workers = Workers(tmp_path, DRAINING)
        async with Cluster(objects, secrets={NAMES.secret: TOKEN}, path=workers.path) as cluster:
            return await use(cluster, workers)

    with nullcontext() if real else programs(tmp_path, "kubectl", {"kubectl": ""}):
        return asyncio.run(main())


def provider(cluster: Cluster, folder: Path, count: int, run: str = "Demo_1", **options: Any) -> KubernetesProvider:
    source = SMALL.model_copy(update={"kubeconfig": cluster.kubeconfig(folder), "workers": count})
    return KubernetesProvider(source, RunNames(run=run), poll_s=0.05, **options)


def test_failures_in_mid_run_are_reported_and_the_workers_go_on(tmp_path: Path) -> None:
    async def use(cluster: Cluster, workers: Workers) -> None:
        events = RecordedEvents()
        made = provider(cluster, tmp_path, 1, on_event=events)
        async with running(made):
            (first,) = await workers.until(1)
            await events.until(1, "started")
            cluster.faults = [403, 503]
            refused, failed = await events.until(2, "spawn_failed")
            assert "needs the Role" in refused["error"]
            assert "fault 503" in failed["error"]
            made.target(2)
            assert first in await workers.until(2)

    serve(tmp_path, use)


@pytest.mark.parametrize(
    ("fault", "run", "expected"),
    [(401, "Demo_1", "check kubeconfig"), (403, "Demo_1", "needs the Role"), (0, "other", "kubectl apply")],
)
def test_what_needs_a_person_ends_the_provider(tmp_path: Path, fault: int, run: str, expected: str) -> None:
    async def use(cluster: Cluster, workers: Workers) -> None:
        cluster.faults = [fault] * 2 if fault else []
        with pytest.raises(WindfallError, match=expected):
            await asyncio.wait_for(provider(cluster, tmp_path, 1, run).run(), 240)

    serve(tmp_path, use)


@pytest.mark.parametrize("real", [False, True])
def test_pod_that_is_evicted_counts_as_lost_and_foreign_changes_are_undone(tmp_path: Path, real: bool) -> None:
    if real and shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    events = RecordedEvents()

    async def use(cluster: Cluster, workers: Workers) -> None:
        made = provider(cluster, tmp_path, 2, on_event=events)
        task = asyncio.create_task(made.run())
        await workers.until(2)
        await events.until(2, "started")
        cluster.evict(next(iter(cluster.pods.values())))
        await events.until(3, "started")
        await events.until(1, "exited")
        assert (made.started, made.lost) == (3, 1)
        await workers.until(3, of="all")
        cluster.scale(0)
        await workers.until(5, of="all")
        assert cluster.replicas == 2
        task.cancel()
        await asyncio.wait({task})
        assert cluster.replicas == 0
        assert not workers.alive()

    serve(tmp_path, use, real=real)


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
kubeconfig = "kubeconfig"
drain_s = 5.0
"""


@pytest.mark.slow
def test_run_trains_on_pods_and_scales_them_to_zero(tmp_path: Path) -> None:
    """Real workers, started as the Deployment of the preview says."""
    port, weights = free_port(), free_port()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "windfall"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m windfall.run.cli "$@"\n')
    program.chmod(0o755)
    (tmp_path / "run.token").write_text(TOKEN)
    text = RECIPE.replace("PORT", str(port)).replace("WEIGHTS", str(weights))
    recipe = parse_recipe(tomllib.loads(text), where="test")
    shown = list(yaml.safe_load_all(worker_sources.preview(recipe)))
    (made,) = [o for o in shown if o and o["kind"] == "Deployment"]
    command = made["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[3] == f"http://windfall-demo-1-0.windfall-demo-1:{port}"
    command[3] = f"http://127.0.0.1:{port}"  # there is no DNS of a cluster here

    async def main() -> None:
        path = f"{program.parent}:{os.environ['PATH']}"
        async with Cluster(made, secrets={NAMES.secret: TOKEN}, path=path) as cluster:
            cluster.kubeconfig(tmp_path)
            (tmp_path / "r.toml").write_text(text)
            train = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "windfall.run.cli", "train", "r.toml", "--token", "run.token", cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source_path()},
            )  # fmt: skip
            out, _ = await asyncio.wait_for(train.communicate(), 200)
            assert train.returncode == 0, out.decode()
            assert (cluster.replicas, len(cluster.pods)) == (0, 0)

    with programs(tmp_path, "kubectl", {"kubectl": ""}):
        asyncio.run(main())
    events = read(tmp_path / "runs" / "Demo_1" / "events.jsonl")
    joined = {e["worker"] for e in events if e["name"] == "worker_joined"}
    assert joined
    assert all(name.startswith("kubernetes-windfall-demo-1-workers-") for name in joined)
