"""Workers on Kubernetes: [fleet.kubernetes]."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        from windfall.providers.kubernetes.manifests import RunNames, deployment

        del label
        names = RunNames(run=recipe.run.name)
        certificate = tls.first_certificate(recipe.fleet.tls_cert) if recipe.fleet.tls_cert else ""
        secret = (
            f"\n# before: windfall token {recipe.run.name}.token && kubectl --namespace {source.namespace} "
            f"create secret generic {names.secret} --from-file=token={recipe.run.name}.token"
        )
        return f"{secret}\n{deployment(source, names=names, url=url, certificate=certificate)}"


PART = KubernetesPart()
