"""Workers on Kubernetes: [fleet.kubernetes]. The preview is all objects of a run that lives in the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.errors import WindfallError
from windfall.providers.source_part import Employer, SourcePart

if TYPE_CHECKING:
    from windfall.providers.base import Provider
    from windfall.providers.kubernetes.section import Kubernetes
    from windfall.recipe.sections import Recipe


class KubernetesPart(SourcePart):
    name = "providers.kubernetes"
    logs = "kubectl logs"
    needs_ports = True

    def section(self) -> tuple[str, type[Kubernetes]]:
        from windfall.providers.kubernetes.section import Kubernetes

        return "fleet.kubernetes", Kubernetes

    def check(self, source: Kubernetes) -> None:
        from windfall.providers.job_queue import check_program
        from windfall.providers.kubernetes.provider import FIX

        del source
        check_program("kubectl", where="fleet.kubernetes", fix=FIX)

    def provider(self, source: Kubernetes, run: Employer) -> Provider:
        from windfall.providers.kubernetes.manifests import RunNames
        from windfall.providers.kubernetes.provider import KubernetesProvider

        return KubernetesProvider(source, RunNames(run=run.name), on_event=run.on_event)

    def host(self, recipe: Recipe) -> str:
        from windfall.providers.kubernetes.manifests import RunNames

        return RunNames(run=recipe.run.name).host

    def preview(self, source: Kubernetes, recipe: Recipe, *, label: str, url: str) -> str:
        from windfall.link import tls
        from windfall.providers.kubernetes.manifests import RunNames, manifests
        from windfall.recipe.file import dump_recipe

        del label
        f, names = recipe.fleet, RunNames(run=recipe.run.name)
        certificate = tls.first_certificate(f.tls_cert) if f.tls_cert else ""
        text = dump_recipe(recipe_in_pod(recipe, source))
        ports = (f.port, f.weights_port)
        objects = manifests(source, names=names, url=url, recipe=text, ports=ports, certificate=certificate)
        secret = (
            f"\n# before: windfall token {recipe.run.name}.token && kubectl --namespace {source.namespace} "
            f"create secret generic {names.secret} --from-file=token={recipe.run.name}.token"
        )
        if f.tls_cert:
            secret += (
                f"\n# and: kubectl --namespace {source.namespace} create secret tls {names.tls} "
                f"--cert={f.tls_cert} --key={f.tls_key}"
            )
        return f"{secret}\n{objects}"


def recipe_in_pod(recipe: Recipe, source: Kubernetes) -> Recipe:
    """The recipe for the run in the cluster: the certificate is at its place in the pod, and the pod's own service
    account reaches the API server. Raises WindfallError for other files of this machine."""
    from windfall.providers.kubernetes.manifests import TLS_FOLDER

    changed: dict[str, Any] = {"kubernetes": source.model_copy(update={"kubeconfig": None})}
    if recipe.fleet.tls_cert:
        changed |= {"tls_cert": Path(TLS_FOLDER) / "tls.crt", "tls_key": Path(TLS_FOLDER) / "tls.key"}
    made = recipe.model_copy(update={"fleet": recipe.fleet.model_copy(update=changed)})
    for key, path in _paths(made.model_dump()):
        if not path.is_absolute() and key != "run.folder":
            fix = "Put it into the image, and set the absolute path that it has there."
            raise WindfallError(f"the pod of the run does not have the file {str(path)!r}", where=key, fix=fix)
    return made


def _paths(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Path]]:
    """All paths in a recipe, with their keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
        elif isinstance(value, Path):
            yield f"{prefix}{key}", value


PART = KubernetesPart()
