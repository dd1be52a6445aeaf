"""The Kubernetes objects of the workers, as YAML that `kubectl apply` reads.

    Deployment       workers; the run itself sets the number of replicas
    PriorityClass    workers give way to other pods

- The guide (docs/guides/kubernetes.md) has the objects of a run that lives in the cluster, with the names used here.
- Workers dial out and hold nothing, so they have no Service and no volume.
- A worker's pod gets SIGTERM when it is removed or its spot node is taken. Its grace period is longer than the drain.
- The token is in a Secret that the user creates (docs/guides/kubernetes.md). It is in none of these objects.
- `replicas` of the Deployment is left out: applying the manifests again must not change the number of workers.
- Values of the recipe are written as JSON, which is YAML, so none of them can become markup.
"""

from __future__ import annotations

import json

from windfall.providers.kubernetes.section import Kubernetes
from windfall.providers.worker_command import TLS_PIN, TOKEN, arguments, plain_name

GRACE_MARGIN_S = 15
"""Seconds of a pod's grace period beyond the drain."""


class RunNames:
    """The names of a run's objects. A token is not needed for them: names are unique in a namespace."""

    def __init__(self, *, run: str) -> None:
        self.app = f"windfall-{plain_name(run, 40)}"
        self.workers = f"{self.app}-workers"
        self.secret = f"{self.app}-token"
        self.host = f"{self.app}-0.{self.app}"
        """The name at which workers in the same namespace reach the controller."""

    def selector(self, role: str) -> dict[str, str]:
        return {"app.kubernetes.io/name": "windfall", "app.kubernetes.io/instance": self.app, "windfall/role": role}


def deployment(source: Kubernetes, *, names: RunNames, url: str, certificate: str = "") -> str:
    """The workers, and their priority. No surge: a new version of the workers takes the places of the old ones."""
    labels = json.dumps(names.selector("worker"))
    priority = f"{source.namespace}-{names.workers}"  # it belongs to the whole cluster, so it names the namespace
    env = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": names.secret, "key": "token"}}},
        *([{"name": TLS_PIN, "value": certificate}] if certificate else []),
    ]
    asked = {"cpu": f"{source.cpus:g}", "memory": f"{round(source.memory_gib * 1024)}Mi"}
    limits = {"memory": asked["memory"], **({source.gpu_resource: str(source.gpus)} if source.gpus else {})}
    return f"""\
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {{name: {priority}, labels: {labels}}}
value: {source.priority}
preemptionPolicy: Never
description: "windfall workers: they may be evicted at any time without losing work"
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {names.workers}, namespace: {source.namespace}, labels: {labels}}}
spec:
  strategy: {{type: RollingUpdate, rollingUpdate: {{maxSurge: 0, maxUnavailable: 100%}}}}
  selector: {{matchLabels: {labels}}}
  template:
    metadata: {{labels: {labels}}}
    spec:
      terminationGracePeriodSeconds: {round(source.drain_s) + GRACE_MARGIN_S}
      priorityClassName: {priority}
      automountServiceAccountToken: false
      enableServiceLinks: false
      nodeSelector: {json.dumps(source.node_selector)}
      tolerations: {json.dumps(source.tolerations)}
      containers:
      - name: worker
        image: {json.dumps(source.image)}
        command: {json.dumps(["windfall", *arguments(source, url, "kubernetes-$(POD_NAME)")])}
        env: {json.dumps(env)}
        resources: {json.dumps({"requests": asked, "limits": limits})}
"""
