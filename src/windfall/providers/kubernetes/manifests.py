"""The Kubernetes objects of a run, as YAML that `kubectl apply` reads.

    StatefulSet, headless Service, volume    supervisor, controller and trainer in one pod that keeps its name
    Deployment                               workers; the run itself sets the number of replicas
    PriorityClass, ServiceAccount, Role      workers give way to other pods; the run may scale its workers, nothing else

- Workers dial out and hold nothing, so they have no Service and no volume.
- A worker's pod gets SIGTERM when it is removed or its spot node is taken. Its grace period is longer than the drain.
- The token is in a Secret that the user creates (docs/guides/kubernetes.md). It is in none of these objects.
- `replicas` of the Deployment is left out: applying the manifests again must not change the number of workers.
- Values of the recipe are written as JSON, which is YAML, so none of them can become markup.
"""

from __future__ import annotations

import json
from textwrap import indent
from typing import Any

from windfall.providers.kubernetes.section import Kubernetes
from windfall.providers.worker_command import TLS_PIN, TOKEN, arguments, plain_name

GRACE_MARGIN_S = 15
"""Seconds of a pod's grace period beyond the drain."""
TLS_FOLDER = "/tls"
"""Where the pod of the run has its certificate and key, as `tls.crt` and `tls.key`."""


class RunNames:
    """The names of a run's objects. A token is not needed for them: names are unique in a namespace."""

    def __init__(self, *, run: str) -> None:
        self.run = run
        self.app = f"windfall-{plain_name(run, 40)}"
        self.workers = f"{self.app}-workers"
        self.secret = f"{self.app}-token"
        self.tls = f"{self.app}-tls"
        """The Secret with the certificate and the key of the controller, which the user creates."""
        self.host = f"{self.app}-0.{self.app}"
        """The name at which workers in the same namespace reach the controller."""

    def selector(self, role: str) -> dict[str, str]:
        return {"app.kubernetes.io/name": "windfall", "app.kubernetes.io/instance": self.app, "windfall/role": role}


def manifests(
    source: Kubernetes, *, names: RunNames, url: str, recipe: str, ports: tuple[int, int], certificate: str = ""
) -> str:
    """All objects of a run. `recipe`: the recipe file as text. `ports`: of the controller and of the weight server."""
    return _run(source, names, recipe, ports, tls=bool(certificate)) + deployment(
        source, names=names, url=url, certificate=certificate
    )


def _run(source: Kubernetes, names: RunNames, recipe: str, ports: tuple[int, int], *, tls: bool) -> str:
    """Everything but the workers. Workers must find the pod of the run before it is ready."""
    metadata = {"name": names.app, "namespace": source.namespace, "labels": names.selector("run")}
    run = f"/runs/{names.run}"
    storage = f", storageClassName: {json.dumps(source.storage_class)}" if source.storage_class else ""
    return f"""\
---
apiVersion: v1
kind: ServiceAccount
metadata: {json.dumps(metadata)}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {json.dumps(metadata)}
rules:
- {{apiGroups: [apps], resources: [deployments], resourceNames: [{names.workers}], verbs: [get]}}
- {{apiGroups: [apps], resources: [deployments/scale], resourceNames: [{names.workers}], verbs: [patch]}}
- {{apiGroups: [""], resources: [pods], verbs: [list]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {json.dumps(metadata)}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: {names.app}}}
subjects:
- {{kind: ServiceAccount, name: {names.app}, namespace: {source.namespace}}}
---
apiVersion: v1
kind: ConfigMap
metadata: {json.dumps(metadata)}
data:
  recipe.toml: |
{indent(recipe, "    ")}
---
apiVersion: v1
kind: Service
metadata: {json.dumps(metadata)}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {json.dumps(names.selector("run"))}
  ports:
  - {{name: controller, port: {ports[0]}}}
  - {{name: weights, port: {ports[1]}}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {json.dumps(metadata)}
spec:
  serviceName: {names.app}
  replicas: 1
  selector: {{matchLabels: {json.dumps(names.selector("run"))}}}
  template:
    metadata: {{labels: {json.dumps(names.selector("run"))}}}
    spec:
      serviceAccountName: {names.app}
      terminationGracePeriodSeconds: 120
      nodeSelector: {json.dumps(source.trainer_node_selector)}
      containers:
      - name: run
        image: {json.dumps(source.image)}
        command:
        - sh
        - -c
        - |
          # The shell is process 1 and must pass SIGTERM on: the run then stops and saves.
          trap 'asked=1; stopped=1; kill -TERM "$run" 2>/dev/null' TERM
          if [ -e "{run}/recipe.toml" ]; then windfall resume "{run}" &
          else windfall train /recipe/recipe.toml --set run.folder="/runs" & fi
          run=$!; [ -z "$stopped" ] || kill -TERM "$run"
          asked=; wait "$run"; status=$?
          while [ -n "$asked" ]; do asked=; wait "$run"; status=$?; done
          if [ -n "$stopped" ] || [ "$status" != 0 ]; then exit "$status"; fi
          # The pod would be restarted if it ended. Waiting leaves its volume readable.
          echo 'finished; copy the model, then delete this StatefulSet'
          trap 'exit 0' TERM; sleep infinity & wait
        env: {json.dumps([_token(names)])}
        ports:
        - {{name: controller, containerPort: {ports[0]}}}
        - {{name: weights, containerPort: {ports[1]}}}
        resources: {json.dumps(_resources(source, source.trainer_memory_gib, source.trainer_gpus))}
        volumeMounts:
        - {{name: runs, mountPath: /runs}}
        - {{name: recipe, mountPath: /recipe, readOnly: true}}
        {f"- {{name: tls, mountPath: {TLS_FOLDER}, readOnly: true}}" if tls else ""}
      volumes:
      - {{name: recipe, configMap: {{name: {names.app}}}}}
      {f"- {{name: tls, secret: {{secretName: {names.tls}}}}}" if tls else ""}
  volumeClaimTemplates:
  - metadata: {{name: runs}}
    spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: {source.storage_gib}Gi}}}}{storage}}}
"""


def deployment(source: Kubernetes, *, names: RunNames, url: str, certificate: str = "") -> str:
    """The workers, and their priority. No surge: a new version of the workers takes the places of the old ones."""
    labels = json.dumps(names.selector("worker"))
    priority = f"{source.namespace}-{names.workers}"  # it belongs to the whole cluster, so it names the namespace
    env = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        _token(names),
        *([{"name": TLS_PIN, "value": certificate}] if certificate else []),
    ]
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
        resources: {json.dumps(_resources(source, source.memory_gib, source.gpus))}
"""


def _token(names: RunNames) -> dict[str, Any]:
    return {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": names.secret, "key": "token"}}}


def _resources(source: Kubernetes, memory_gib: float, gpus: int) -> dict[str, dict[str, str]]:
    asked = {"cpu": f"{source.cpus:g}", "memory": f"{round(memory_gib * 1024)}Mi"}
    limits = {"memory": asked["memory"], **({source.gpu_resource: str(gpus)} if gpus else {})}
    return {"requests": asked, "limits": limits}
