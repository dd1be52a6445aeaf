"""Workers on Kubernetes: sets the number of replicas of one Deployment, and watches its pods.

    target(n) ──▶ PATCH deployments/NAME/scale ──▶ Kubernetes starts, restarts and drains pods
                  GET pods, every poll_s        ──▶ started, exited, refused

- Kubernetes keeps the pods running, and restarts a worker in its pod under its old name. The provider only sets the
  number of pods, and sets it again if something else changed it.
- A pod that vanishes without a smaller target counts as lost.
- If a worker exits with status 3 (refused), the others would be refused, too: they have the same image. The Deployment
  is scaled to 0 and stays there until the next `target`.
- A refusal of the API server (401, 403, 404) ends the provider only before its first answer. Later it is reported, and
  the request is repeated: the workers that run go on.
- Canceling `run()` scales to 0 and waits until the pods are gone, but not longer than their grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from windfall.errors import WindfallError
from windfall.processes.process import EXIT_REFUSED
from windfall.providers.base import OnEvent, ignore_event
from windfall.providers.kubernetes.api import ApiServer
from windfall.providers.kubernetes.credentials import Credentials
from windfall.providers.kubernetes.manifests import GRACE_MARGIN_S, RunNames

POLL_S = 5.0
PREFIX = "kubernetes-"
"""A worker's name is this prefix and the name of its pod."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    name: str
    started: bool
    """The worker has been started at least once."""
    restarts: int
    exit_code: int | None
    """Exit status of the last worker in it, if one has ended."""
    leaving: bool


def parse_pods(items: Iterable[dict[str, Any]]) -> dict[str, Pod]:
    """The pods in an answer of the API server, by name. Pods whose workers have ended for good are left out."""
    pods: dict[str, Pod] = {}
    for item in items:
        metadata, status = item.get("metadata", {}), item.get("status", {})
        container = next(iter(status.get("containerStatuses") or []), {})
        states = [container.get(key, {}).get("terminated") for key in ("state", "lastState")]
        codes = [state["exitCode"] for state in states if state]
        restarts = int(container.get("restartCount", 0))
        if status.get("phase") in ("Succeeded", "Failed") and EXIT_REFUSED not in codes:
            continue  # evicted; the Deployment replaces it
        pods[metadata["name"]] = Pod(
            name=metadata["name"],
            started=bool(codes or restarts or "running" in container.get("state", {})),
            restarts=restarts,
            exit_code=codes[0] if codes else None,
            leaving="deletionTimestamp" in metadata,
        )
    return pods


class KubernetesProvider:
    name = "kubernetes"

    def __init__(
        self,
        credentials: Credentials,
        names: RunNames,
        count: int,
        *,
        namespace: str,
        drain_s: float,
        on_event: OnEvent = ignore_event,
        poll_s: float = POLL_S,
        api: ApiServer | None = None,
    ) -> None:
        self.started = 0
        self.lost = 0
        self._api = api or ApiServer(credentials)
        self._names = names
        self._namespace = namespace
        self._on_event = on_event
        self._poll_s = poll_s
        self._leave_s = drain_s + GRACE_MARGIN_S
        self._seen: dict[str, Pod] = {}
        self._surplus = 0
        """Number of pods beyond a smaller target that are not gone yet."""
        self._refused = False
        self._changed = asyncio.Event()
        self._count = 0
        self.target(count)

    def target(self, n: int) -> None:
        if n < 0:
            raise WindfallError(f"{n} workers were requested", where="fleet.kubernetes", fix="Request 0 or more.")
        self._surplus += max(0, self._count - n)
        self._count = n
        self._refused = False
        self._changed.set()

    def owns(self, worker: str) -> bool:
        return worker.startswith(PREFIX)

    async def run(self) -> None:
        reached = False
        async with self._api:
            try:
                while True:
                    self._changed.clear()
                    try:
                        await self._set_replicas(0 if self._refused else self._count)
                        self._update(parse_pods(await self._pods()))
                        reached = True
                    except (OSError, WindfallError) as e:  # no answer, or a refusal; the workers go on
                        if isinstance(e, WindfallError) and not reached:
                            raise
                        self._on_event("spawn_failed", worker=self._names.workers, error=str(e))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), self._poll_s)
            finally:
                await asyncio.shield(self._stop())

    async def _set_replicas(self, wanted: int) -> None:
        if await self._api.replicas(self._namespace, self._names.workers) != wanted:
            await self._api.scale(self._namespace, self._names.workers, wanted)

    async def _pods(self) -> list[dict[str, Any]]:
        return await self._api.pods(self._namespace, self._names.selector("worker"))

    def _update(self, pods: dict[str, Pod]) -> None:
        """Compare the pods with those seen before, and report what has changed."""
        for name, pod in pods.items():
            before = self._seen.get(name)
            if pod.started and not (before and before.started):
                self.started += 1
                self._on_event("started", worker=PREFIX + name, pid=0)
            restarted = pod.restarts > (before.restarts if before else 0) and not pod.leaving
            if restarted and pod.exit_code != EXIT_REFUSED:
                self.started = self.started + 1
                self.lost = self.lost + 1
                self._ended(name, pod.exit_code, by="itself")
                self._on_event("restarted", worker=PREFIX + name, pid=0, instead_of=PREFIX + name, after_s=0.0)
        for name in [name for name in self._seen if name not in pods]:
            self._gone(self._seen.pop(name))
        self._seen.update(pods)
        if not self._refused and any(pod.exit_code == EXIT_REFUSED for pod in pods.values()):
            for pod in pods.values():
                if pod.exit_code == EXIT_REFUSED:
                    self._on_event("refused", worker=PREFIX + pod.name)
            self._refused = True
            self._surplus += len(pods)
            self._changed.set()

    def _gone(self, pod: Pod) -> None:
        asked = self._surplus > 0
        self._surplus -= asked
        if pod.started:
            self.lost += not asked
            self._ended(pod.name, pod.exit_code, by="stopped" if asked else "itself")

    def _ended(self, name: str, code: int | None, *, by: str) -> None:
        fields = {"code": 0 if code is None else code, "by": by, "lost": by == "itself", "pid": 0}
        self._on_event("exited", worker=PREFIX + name, **fields)

    async def _stop(self) -> None:
        """Scale to 0 and wait until the pods are gone. If that fails, report that workers are left."""
        self.target(0)
        deadline = time.monotonic() + self._leave_s
        try:
            await self._set_replicas(0)
            while time.monotonic() < deadline:
                self._update(parse_pods(await self._pods()))
                if not self._seen:
                    return
                await asyncio.sleep(min(1.0, self._poll_s))
            left = f"{len(self._seen)} pods are left after {self._leave_s:g} s"
        except (OSError, WindfallError) as e:
            left = f"the workers could not be scaled to 0: {e}"
        self._on_event("stuck", worker=self._names.workers, pid=0, error=left)
