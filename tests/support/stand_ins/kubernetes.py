"""The part of the Kubernetes API that kubectl uses for windfall, over real HTTP. Pods are processes on this machine.

What is like Kubernetes: discovery, the scale subresource with merge patches, pods that are restarted in place, SIGTERM
and the grace period, label selectors. `faults` holds statuses to answer first.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

RESTART_S = 0.1
REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound"}
DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [
            {
                "name": "apps",
                "versions": [{"groupVersion": "apps/v1", "version": "v1"}],
                "preferredVersion": {"groupVersion": "apps/v1", "version": "v1"},
            }
        ],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [{"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": ["list"]}],
    },
    "/apis/apps/v1": {
        "kind": "APIResourceList",
        "groupVersion": "apps/v1",
        "resources": [
            {
                "name": name,
                "singularName": "deployment",
                "namespaced": True,
                "kind": kind,
                "verbs": ["get", "patch"],
            }
            for name, kind in (("deployments", "Deployment"), ("deployments/scale", "Scale"))
        ],
    },
}
"""What kubectl asks first: which kinds of objects there are."""


class Pod:
    def __init__(self, name: str, template: dict[str, Any], secrets: dict[str, str], path: str) -> None:
        self.name, self.template = name, template
        self.status: dict[str, Any] = {"restartCount": 0, "state": {"waiting": {}}}
        self.leaving = False
        container = template["spec"]["containers"][0]
        self._argv = [word.replace("$(POD_NAME)", name) for word in container["command"]]
        self._env = {**os.environ, "PATH": path, "POD_NAME": name}
        for variable in container["env"]:
            source = variable.get("valueFrom", {}).get("secretKeyRef")
            if source:
                self._env[variable["name"]] = secrets[source["name"]]
        self.process: asyncio.subprocess.Process | None = None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self.leaving:
            self.process = await asyncio.create_subprocess_exec(*self._argv, env=self._env, start_new_session=True)
            self.status["state"] = {"running": {}}
            if self.leaving:
                self._kill(signal.SIGTERM)
            code = await self.process.wait()
            self._kill(signal.SIGKILL)
            ended = {"terminated": {"exitCode": code if code >= 0 else 128 - code}}
            if self.leaving:
                self.status["state"] = ended
                return
            restarts = self.status["restartCount"] + 1
            self.status = {"restartCount": restarts, "state": {"waiting": {}}, "lastState": ended}
            await asyncio.sleep(RESTART_S)

    def _kill(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    async def delete(self) -> None:
        self.leaving = True
        self._kill(signal.SIGTERM)
        done, _ = await asyncio.wait({self.task}, timeout=self.template["spec"]["terminationGracePeriodSeconds"])
        if not done:
            self._kill(signal.SIGKILL)
            await self.task

    def to_json(self) -> dict[str, Any]:
        metadata = {"name": self.name, "namespace": "default", "labels": self.template["metadata"]["labels"]}
        if self.leaving:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "status": {"phase": "Running", "containerStatuses": [self.status]},
        }


def _failure(status: int) -> web.Response:
    reason = REASONS.get(status, "ServerError")
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": f"fault {status}", "reason": reason}
    return web.json_response({**body, "code": status}, status=status)


class Cluster:
    """Used as `async with`."""

    def __init__(self, deployment: dict[str, Any], *, secrets: dict[str, str], path: str) -> None:
        self.deployment, self._secrets, self._path = deployment, secrets, path
        self.replicas, self.pods = 0, {}
        self.faults: list[int] = []
        self.requests: list[str] = []
        self.url = ""
        self._number = 0
        self._deletions: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Cluster:
        space, name = (self.deployment["metadata"][key] for key in ("namespace", "name"))
        workers = f"/apis/apps/v1/namespaces/{space}/deployments/{name}"
        app = web.Application(middlewares=[self._guard])
        for path in DISCOVERY:
            app.router.add_get(path, self._discover)
        app.router.add_get(workers, self._get_deployment)
        app.router.add_patch(f"{workers}/scale", self._patch_scale)
        app.router.add_get(f"/api/v1/namespaces/{space}/pods", self._get_pods)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # pyright: ignore
        return self

    def kubeconfig(self, folder: Path) -> Path:
        """A file with the address of this server, as JSON, which is YAML, too."""
        context = {"name": "c", "context": {"cluster": "k", "user": "u"}}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [context],
            "clusters": [{"name": "k", "cluster": {"server": self.url}}], "users": [{"name": "u", "user": {}}],
        }  # fmt: skip
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    async def __aexit__(self, *_: object) -> None:
        self.scale(0)
        await asyncio.gather(*self._deletions)
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if self.faults and request.path not in DISCOVERY:
            return _failure(self.faults.pop(0))
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return _failure(404)

    async def _discover(self, request: web.Request) -> web.Response:
        return web.json_response(DISCOVERY[request.path])

    async def _get_deployment(self, request: web.Request) -> web.Response:
        spec = {**self.deployment["spec"], "replicas": self.replicas}
        return web.json_response({**self.deployment, "spec": spec})

    async def _patch_scale(self, request: web.Request) -> web.Response:
        if request.content_type != "application/merge-patch+json":
            return web.json_response({"message": "unsupported media type"}, status=415)
        self.scale((await request.json())["spec"]["replicas"])
        metadata = self.deployment["metadata"]
        spec = {"replicas": self.replicas}
        return web.json_response({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec})

    async def _get_pods(self, request: web.Request) -> web.Response:
        wanted = dict(part.split("=") for part in request.query["labelSelector"].split(","))
        items = [pod.to_json() for pod in self.pods.values()]
        found = [i for i in items if wanted.items() <= i["metadata"]["labels"].items()]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found})

    def scale(self, replicas: int) -> None:
        self.replicas = replicas
        here = [pod for pod in self.pods.values() if not pod.leaving]
        for pod in here[replicas:]:
            self.remove(pod)
        for _ in range(replicas - len(here)):
            self._number += 1
            name = f"{self.deployment['metadata']['name']}-{self._number}"
            self.pods[name] = Pod(name, self.deployment["spec"]["template"], self._secrets, self._path)

    def remove(self, pod: Pod) -> None:
        async def delete() -> None:
            await pod.delete()
            del self.pods[pod.name]

        pod.leaving = True
        self._deletions.add(asyncio.create_task(delete()))

    def evict(self, pod: Pod) -> None:
        """Remove a pod, as when its node is taken away; the Deployment replaces it."""
        self.remove(pod)
        self.scale(self.replicas)
