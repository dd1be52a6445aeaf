"""The part of the Kubernetes API that windfall uses, over real HTTP. Pods are real processes on this machine.

What is like Kubernetes: bearer tokens, the scale subresource with merge patches, pods that are restarted in place,
SIGTERM and the grace period, label selectors. `faults` holds answers to give first: a status, or seconds to wait.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

from aiohttp import web

RESTART_S = 0.1


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
        metadata = {"name": self.name, "labels": self.template["metadata"]["labels"]}
        if self.leaving:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return {"metadata": metadata, "status": {"phase": "Running", "containerStatuses": [self.status]}}


class Cluster:
    """Used as `async with`."""

    def __init__(self, deployment: dict[str, Any], *, token: str, secrets: dict[str, str], path: str) -> None:
        self.deployment, self.token, self._secrets, self._path = deployment, token, secrets, path
        self.replicas, self.pods = 0, {}
        self.faults: list[int | float] = []
        self.requests: list[str] = []
        self.url = ""
        self._number = 0
        self._deletions: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Cluster:
        space, name = (self.deployment["metadata"][key] for key in ("namespace", "name"))
        scale = f"/apis/apps/v1/namespaces/{space}/deployments/{name}/scale"
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(scale, self._get_scale)
        app.router.add_patch(scale, self._patch_scale)
        app.router.add_get(f"/api/v1/namespaces/{space}/pods", self._get_pods)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # pyright: ignore
        return self

    async def __aexit__(self, *_: object) -> None:
        self.scale(0)
        await asyncio.gather(*self._deletions)
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, float):
                await asyncio.sleep(fault)
            else:
                headers = {"Retry-After": "1"} if fault == 429 else {}
                return web.json_response({"kind": "Status", "message": f"fault {fault}"}, status=fault, headers=headers)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)

    async def _get_scale(self, request: web.Request) -> web.Response:
        spec = {"replicas": self.replicas} if self.replicas else {}
        return web.json_response({"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": spec})

    async def _patch_scale(self, request: web.Request) -> web.Response:
        if request.content_type != "application/merge-patch+json":
            return web.json_response({"message": "unsupported media type"}, status=415)
        self.scale((await request.json())["spec"]["replicas"])
        return await self._get_scale(request)

    async def _get_pods(self, request: web.Request) -> web.Response:
        wanted = dict(part.split("=") for part in request.query["labelSelector"].split(","))
        items = [pod.to_json() for pod in self.pods.values()]
        found = [i for i in items if wanted.items() <= i["metadata"]["labels"].items()]
        return web.json_response({"kind": "PodList", "metadata": {}, "items": found})

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
