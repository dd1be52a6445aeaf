"""Workers on Kubernetes, by the program kubectl: sets the number of replicas of one Deployment, and watches its pods.

    target(n) ──▶ kubectl scale             ──▶ Kubernetes starts, restarts and drains pods
                  kubectl get, every poll_s ──▶ started, exited, refused

- kubectl knows every way to log in to a cluster: certificates, tokens, programs that print credentials, and the service
  account of a pod.
- Kubernetes keeps the pods running, and restarts a worker in its pod under its old name. The provider only sets the
  number of pods, and sets it again if something else changed it.
- A pod that vanishes without a smaller target counts as lost.
- If a worker exits with status 3 (refused), the others would be refused, too: they have the same image. The Deployment
  is scaled to 0 and stays there until the next `target`.
- A refusal of the API server ends the provider only before its first answer. Later it is reported, as is any other
  failure, and the request is repeated with a growing delay: the workers that run go on.
- Canceling `run()` scales to 0 and waits until the pods are gone, but not longer than their grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from windfall import backoff
from windfall.errors import WindfallError
from windfall.processes.process import EXIT_REFUSED
from windfall.providers.base import OnEvent, ignore_event
from windfall.providers.job_queue import command
from windfall.providers.kubernetes.manifests import GRACE_MARGIN_S, RunNames
from windfall.providers.kubernetes.section import Kubernetes

WHERE = "fleet.kubernetes"
FIX = "Install kubectl on this machine, or in the image of the run."
APPLY = "windfall fleet preview RECIPE.toml --only kubernetes | kubectl apply -f -"
REFUSALS = {
    "(Unauthorized)": "The cluster does not accept the credentials; check kubeconfig.",
    "(Forbidden)": "The service account needs the Role in docs/guides/kubernetes.md.",
    "(NotFound)": f"Create the objects first: {APPLY}",
}
"""What a person must do, by how kubectl ends or names the reason of a failure."""
REQUEST_S = 20
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
        self, source: Kubernetes, names: RunNames, *, on_event: OnEvent = ignore_event, poll_s: float = POLL_S
    ) -> None:
        self.started = 0
        self.lost = 0
        self._source = source
        self._names = names
        self._on_event = on_event
        self._poll_s = poll_s
        self._seen: dict[str, Pod] = {}
        self._surplus = 0
        """Number of pods beyond a smaller target that are not gone yet."""
        self._refused = False
        self._changed = asyncio.Event()
        self._count = 0
        self.target(source.workers)

    def target(self, n: int) -> None:
        if n < 0:
            raise WindfallError(f"{n} workers were requested", where=WHERE, fix="Request 0 or more.")
        self._surplus += max(0, self._count - n)
        self._count = n
        self._refused = False
        self._changed.set()

    def owns(self, worker: str) -> bool:
        return worker.startswith(PREFIX)

    async def run(self) -> None:
        reached, failures = False, 0
        try:
            while True:
                self._changed.clear()
                try:
                    await self._reconcile(0 if self._refused else self._count)
                    reached, failures = True, 0
                except (OSError, WindfallError) as e:  # no answer, or a refusal; the workers go on
                    if isinstance(e, WindfallError) and not reached:
                        raise
                    self._on_event("spawn_failed", worker=self._names.workers, error=str(e))
                    failures += 1
                with contextlib.suppress(TimeoutError):
                    wait_s = backoff.delay_s(failures, first_s=self._poll_s, limit_s=10 * self._poll_s)
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
        finally:
            await asyncio.shield(self._stop())

    async def _reconcile(self, wanted: int) -> None:
        """Set the number of replicas, and see which pods there are."""
        workers = f"deployment/{self._names.workers}"
        deployment = json.loads(await self._kubectl("get", workers, "--output=json"))
        if deployment["spec"].get("replicas", 1) != wanted:
            await self._kubectl("scale", workers, f"--replicas={wanted}")
        selector = ",".join(f"{key}={value}" for key, value in self._names.selector("worker").items())
        pods = json.loads(await self._kubectl("get", "pods", f"--selector={selector}", "--output=json"))
        self._update(parse_pods(pods["items"]))

    async def _kubectl(self, *argv: str) -> str:
        config = [f"--kubeconfig={self._source.kubeconfig}"] if self._source.kubeconfig else []
        options = [f"--namespace={self._source.namespace}", f"--request-timeout={REQUEST_S}s", *config]
        try:
            return await command("kubectl", *argv, *options, where=WHERE, fix=FIX, timeout_s=2 * REQUEST_S)
        except OSError as e:
            for reason, fix in REFUSALS.items():
                if reason in str(e):
                    raise WindfallError(str(e), where=WHERE, fix=fix) from e
            raise

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
        leave_s = self._source.drain_s + GRACE_MARGIN_S
        deadline = time.monotonic() + leave_s
        left = ""
        while time.monotonic() < deadline:
            try:
                await self._reconcile(0)
                if not self._seen:
                    return
                left = f"{len(self._seen)} pods are left after {leave_s:g} s"
            except OSError as e:
                left = f"the workers could not be scaled to 0: {e}"
            except WindfallError as e:
                left = f"the workers could not be scaled to 0: {e}"
                break
            await asyncio.sleep(min(1.0, self._poll_s))
        self._on_event("stuck", worker=self._names.workers, pid=0, error=left)
