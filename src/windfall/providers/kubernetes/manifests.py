"""The Kubernetes objects of a run, as `kubectl apply` reads them.

    StatefulSet, headless Service, volume    supervisor, controller and trainer in one pod that keeps its name
    Deployment                               workers; the run itself sets the number of replicas
    PriorityClass, ServiceAccount, Role      workers give way to other pods; the run may scale its workers, nothing else

- Workers dial out and hold nothing, so they have no Service and no volume.
- A worker's pod gets SIGTERM when it is removed or its spot node is taken. Its grace period is longer than the drain.
- The token is in a Secret that the user creates (docs/guides/kubernetes.md). It is in none of these objects.
- `replicas` of the Deployment is left out: applying the manifests again must not change the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windfall.providers.kubernetes.section import Kubernetes
from windfall.providers.worker_command import TLS_PIN, TOKEN, arguments, plain_name

GRACE_MARGIN_S = 15
"""Seconds of a pod's grace period beyond the drain."""
RUN_FOLDER = "/runs"
RECIPE_FOLDER = "/recipe"
TLS_FOLDER = "/tls"
"""Where the pod of the run has its certificate and key, as `tls.crt` and `tls.key`."""
Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNames:
    """The names of a run's objects. A token is not needed for them: names are unique in a namespace."""

    run: str
    """Name of the run."""

    @property
    def app(self) -> str:
        return f"windfall-{plain_name(self.run, 40)}"

    @property
    def workers(self) -> str:
        return f"{self.app}-workers"

    def priority_class(self, namespace: str) -> str:
        """It belongs to the whole cluster, so the namespace is part of its name."""
        return f"{namespace}-{self.workers}"

    @property
    def secret(self) -> str:
        return f"{self.app}-token"

    @property
    def tls(self) -> str:
        """The Secret with the certificate and the key of the controller, which the user creates."""
        return f"{self.app}-tls"

    @property
    def host(self) -> str:
        """The name at which workers in the same namespace reach the controller."""
        return f"{self.app}-0.{self.app}"

    def selector(self, role: str) -> dict[str, str]:
        return {"app.kubernetes.io/name": "windfall", "app.kubernetes.io/instance": self.app, "windfall/role": role}


def manifests(
    source: Kubernetes,
    *,
    names: RunNames,
    url: str,
    recipe: str,
    ports: tuple[int, int],
    certificate: str = "",
) -> list[Manifest]:
    """All objects of a run. `recipe`: the recipe file as text. `ports`: of the controller and of the weight server."""
    return [
        _priority_class(source, names),
        *_permissions(source, names),
        _recipe(source, names, recipe),
        _service(source, names, ports),
        _stateful_set(source, names, ports, tls=bool(certificate)),
        deployment(source, names=names, url=url, certificate=certificate),
    ]


def deployment(source: Kubernetes, *, names: RunNames, url: str, certificate: str = "") -> Manifest:
    """The workers."""
    container: Manifest = {
        "name": "worker",
        "image": source.image,
        "command": ["windfall", *arguments(source, url, "kubernetes-$(POD_NAME)")],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            _token(names),
            *([{"name": TLS_PIN, "value": certificate}] if certificate else []),
        ],
        "resources": _resources(source, cpus=source.cpus, memory_gib=source.memory_gib, gpus=source.gpus),
    }
    pod: Manifest = {
        "terminationGracePeriodSeconds": round(source.drain_s) + GRACE_MARGIN_S,
        "priorityClassName": names.priority_class(source.namespace),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        **({"nodeSelector": dict(source.node_selector)} if source.node_selector else {}),
        **({"tolerations": [dict(t) for t in source.tolerations]} if source.tolerations else {}),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(source, names, "worker", name=names.workers),
        "spec": {
            # No surge: a new version of the workers takes the places of the old ones.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"}},
            "selector": {"matchLabels": names.selector("worker")},
            "template": {"metadata": {"labels": names.selector("worker")}, "spec": pod},
        },
    }


def _stateful_set(source: Kubernetes, names: RunNames, ports: tuple[int, int], *, tls: bool) -> Manifest:
    run = f"{RUN_FOLDER}/{names.run}"
    start = "\n".join(
        [
            # The shell is process 1 and must pass SIGTERM on: the run then stops and saves.
            """trap 'asked=1; stopped=1; kill -TERM "$run" 2>/dev/null' TERM""",
            f'if [ -e "{run}/recipe.toml" ]; then windfall resume "{run}" &',
            f'else windfall train {RECIPE_FOLDER}/recipe.toml --set run.folder="{RUN_FOLDER}" & fi',
            'run=$!; [ -z "$stopped" ] || kill -TERM "$run"',
            'asked=; wait "$run"; status=$?',
            'while [ -n "$asked" ]; do asked=; wait "$run"; status=$?; done',
            'if [ -n "$stopped" ] || [ "$status" != 0 ]; then exit "$status"; fi',
            # The pod would be restarted if it ended. Waiting leaves its volume readable.
            "echo 'finished; copy the model, then delete this StatefulSet'",
            "trap 'exit 0' TERM; sleep infinity & wait",
        ]
    )
    container: Manifest = {
        "name": "run",
        "image": source.image,
        "command": ["sh", "-c", start],
        "env": [_token(names)],
        "ports": [
            {"name": "controller", "containerPort": ports[0]},
            {"name": "weights", "containerPort": ports[1]},
        ],
        "resources": _resources(
            source, cpus=source.cpus, memory_gib=source.trainer_memory_gib, gpus=source.trainer_gpus
        ),
        "volumeMounts": [
            {"name": "runs", "mountPath": RUN_FOLDER},
            {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
            *([{"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True}] if tls else []),
        ],
    }
    pod: Manifest = {
        "serviceAccountName": names.app,
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
        "volumes": [
            {"name": "recipe", "configMap": {"name": names.app}},
            *([{"name": "tls", "secret": {"secretName": names.tls}}] if tls else []),
        ],
        **({"nodeSelector": dict(source.trainer_node_selector)} if source.trainer_node_selector else {}),
    }
    claim: Manifest = {
        "metadata": {"name": "runs"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{source.storage_gib}Gi"}},
            **({"storageClassName": source.storage_class} if source.storage_class else {}),
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(source, names, "run"),
        "spec": {
            "serviceName": names.app,
            "replicas": 1,
            "selector": {"matchLabels": names.selector("run")},
            "template": {"metadata": {"labels": names.selector("run")}, "spec": pod},
            "volumeClaimTemplates": [claim],
        },
    }


def _service(source: Kubernetes, names: RunNames, ports: tuple[int, int]) -> Manifest:
    """Gives the pod of the run its name. Workers must find it before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(source, names, "run"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector("run"),
            "ports": [{"name": "controller", "port": ports[0]}, {"name": "weights", "port": ports[1]}],
        },
    }


def _recipe(source: Kubernetes, names: RunNames, recipe: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(source, names, "run"),
        "data": {"recipe.toml": recipe},
    }


def _priority_class(source: Kubernetes, names: RunNames) -> Manifest:
    labels = names.selector("worker")
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": names.priority_class(source.namespace), "labels": labels},
        "value": source.priority,
        "preemptionPolicy": "Never",
        "description": "windfall workers: they may be evicted at any time without losing work",
    }


def _permissions(source: Kubernetes, names: RunNames) -> list[Manifest]:
    """What the run may do: set the number of its own workers, and see pods."""
    group = "rbac.authorization.k8s.io"
    own = {"resourceNames": [names.workers]}
    rules: list[Manifest] = [
        {"apiGroups": ["apps"], "resources": ["deployments"], **own, "verbs": ["get"]},
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], **own, "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(source, names, "run")},
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": _metadata(source, names, "run"),
            "rules": rules,
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": _metadata(source, names, "run"),
            "roleRef": {"apiGroup": group, "kind": "Role", "name": names.app},
            "subjects": [{"kind": "ServiceAccount", "name": names.app, "namespace": source.namespace}],
        },
    ]


def _metadata(source: Kubernetes, names: RunNames, role: str, name: str = "") -> Manifest:
    return {"name": name or names.app, "namespace": source.namespace, "labels": names.selector(role)}


def _token(names: RunNames) -> Manifest:
    return {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": names.secret, "key": "token"}}}


def _resources(source: Kubernetes, *, cpus: float, memory_gib: float, gpus: int) -> Manifest:
    asked: Manifest = {"cpu": f"{cpus:g}", "memory": f"{round(memory_gib * 1024)}Mi"}
    limits: Manifest = {"memory": asked["memory"], **({source.gpu_resource: str(gpus)} if gpus else {})}
    return {"requests": asked, "limits": limits}
