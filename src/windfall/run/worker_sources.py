"""From the sections [fleet.ray], [fleet.kubernetes], [fleet.skypilot] and [fleet.slurm] to providers, and to text.

recipe ──▶ check()      before anything starts: is the system's software installed, can workers reach the controller
       ──▶ providers()  what the supervisor runs
       ──▶ preview()    the same objects as text, for `windfall fleet preview`
"""

from __future__ import annotations

import functools
import ipaddress
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from windfall import recipe as config
from windfall.errors import WindfallError
from windfall.link import invitation, tls
from windfall.providers.base import OnEvent, Provider
from windfall.providers.job_queue import JobProvider
from windfall.providers.kubernetes import credentials
from windfall.providers.kubernetes.manifests import TLS_FOLDER, RunNames, manifests
from windfall.providers.kubernetes.provider import KubernetesProvider
from windfall.providers.ray import provider as ray_provider
from windfall.providers.ray.provider import RayClient, RayProvider
from windfall.providers.skypilot import provider as skypilot_provider
from windfall.providers.skypilot.provider import SkyPilotQueue
from windfall.providers.skypilot.task import task
from windfall.providers.slots import SlotProvider
from windfall.providers.slurm import provider as slurm_provider
from windfall.providers.slurm.provider import SlurmQueue
from windfall.providers.slurm.script import script
from windfall.providers.worker_command import WorkerCommand, run_label, secrets
from windfall.recipe import Recipe
from windfall.recipe.worker_sources import Kubernetes, Ray, SkyPilot, Slurm, WorkerSource
from windfall.run.autoscale import Autoscaler, ScaledSource
from windfall.types import Lease

Url = Callable[[], Awaitable[str]]
PROGRAMS = {"skypilot": ("sky", skypilot_provider.FIX), "slurm": ("sbatch", slurm_provider.FIX)}
"""The program that must be installed for a source, and what to do if it is not."""


LOGS = {
    "ray": "Ray's logs, and ray_driver.log", "kubernetes": "kubectl logs", "skypilot": "sky jobs logs",
    "slurm": "workers/slurm-*.log",
}  # fmt: skip
"""Where to find the output of workers that run elsewhere."""


def check(recipe: Recipe) -> None:
    """Raise WindfallError if a source cannot work: its software is missing, or its workers could not reach the run."""
    for name, section in recipe.fleet.sources.items():
        if isinstance(section, Ray):
            ray_provider.check_installed()
        program, fix = PROGRAMS.get(name, ("", ""))
        if program and shutil.which(program) is None:
            raise WindfallError(f"program '{program}' not found", where=f"fleet.{name}", fix=fix)
        if isinstance(section, Kubernetes):
            credentials.find(section.kubeconfig, section.server, section.token_file)
        if isinstance(section, SkyPilot) and not (section.setup or section.image):
            fix = (
                "Set fleet.skypilot.setup to the commands that install it, or fleet.skypilot.image to an image with it."
            )
            raise WindfallError("new machines would not have windfall", where="fleet.skypilot", fix=fix)
        check_reachable(recipe, name, section)
    _check_ceiling(recipe)


def _check_ceiling(recipe: Recipe) -> None:
    """Refuse a run whose first workers cost more than the ceiling, or workers elsewhere whose price is not known."""
    f = recipe.fleet
    if not f.max_usd_per_h:
        return
    for name, s in f.sources.items():
        if not _dearest(s) and s.kind != "borrowed":
            what = "the price of these workers is not known, so fleet.max_usd_per_h cannot be kept"
            raise WindfallError(what, where=f"fleet.{name}", fix=f"Set fleet.{name}.price_usd_per_h.")
        if isinstance(s, SkyPilot) and s.kind == "spot" and s.fallback and not s.on_demand_usd_per_h:
            what = "the price of an on-demand machine is not known, so fleet.max_usd_per_h cannot be kept"
            fix = "Set fleet.skypilot.on_demand_usd_per_h, or fallback = false."
            raise WindfallError(what, where="fleet.skypilot", fix=fix)
    priced = [(f.workers, f.price_usd_per_h), *((s.workers, _dearest(s)) for s in f.sources.values())]
    usd_per_h = sum(count * price for count, price in priced)
    if usd_per_h > f.max_usd_per_h:
        what = f"the workers that the run starts with cost ${usd_per_h:g} per hour, more than ${f.max_usd_per_h:g}"
        raise WindfallError(what, where="fleet.max_usd_per_h", fix="Start with fewer workers, or raise the ceiling.")


def _dearest(section: WorkerSource) -> float:
    """Highest price of one worker in $ per hour, from the recipe; 0: not known."""
    if isinstance(section, SkyPilot) and section.kind == "spot" and section.fallback:
        return max(section.price_usd_per_h, section.on_demand_usd_per_h)
    return section.price_usd_per_h


def check_reachable(recipe: Recipe, name: str, section: WorkerSource) -> None:
    f, where = recipe.fleet, f"fleet.{name}"
    if not section.join_url and _is_loopback(f.host):
        what = f"these workers run on other machines, and fleet.host = {f.host!r} lets no other machine connect"
        raise WindfallError(what, where=where, fix=f'Set fleet.host = "0.0.0.0", or {where}.join_url.')
    if isinstance(section, Kubernetes | SkyPilot) and not (f.port and f.weights_port):
        what = "these workers need to know the ports of the controller and of the weight server before the run starts"
        raise WindfallError(what, where=where, fix="Set fleet.port and fleet.weights_port, such as 8700 and 8701.")
    scheme = urlsplit(section.join_url).scheme
    if scheme and scheme != ("https" if f.tls_cert else "http"):
        have = "has" if f.tls_cert else "has no"
        what = f"join_url = {section.join_url!r}, but the controller {have} certificate"
        raise WindfallError(what, where=where, fix="Change join_url, or fleet.tls_cert and fleet.tls_key.")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def providers(recipe: Recipe, folder: Path, token: str, *, url: Url, on_event: OnEvent) -> dict[str, Provider]:
    """The providers of all sources, by name. `url`: waits for the address at which workers reach the controller."""
    made: dict[str, Provider] = {}
    certificate = tls.first_certificate(recipe.fleet.tls_cert) if recipe.fleet.tls_cert else ""
    environment, label = secrets(token, certificate), run_label(recipe.run.name, token)
    for name, section in recipe.fleet.sources.items():
        worker = command(section)
        made[name] = _provider(
            recipe, section, folder, worker, label=label, url=_url_of(section, url), environment=dict(environment),
            on_event=functools.partial(on_event, log=LOGS[name]),
        )  # fmt: skip
    return made


def _provider(
    recipe: Recipe, section: WorkerSource, folder: Path, worker: WorkerCommand, *, label: str, url: Url,
    environment: dict[str, str], on_event: OnEvent,
) -> Provider:  # fmt: skip
    workers, grace_s = (folder / "workers").resolve(), section.drain_s
    match section:
        case Ray():
            client = RayClient(section, log=folder / "ray_driver.log")
            return RayProvider(
                client, worker, section.workers, url=url, secrets=environment, grace_s=grace_s, on_event=on_event
            )
        case Slurm():
            queue = SlurmQueue(
                options=section, worker=worker, label=label, folder=workers, url=url, secrets=environment
            )
            return JobProvider(
                queue, worker.lease, section.workers, poll_s=section.poll_s, grace_s=grace_s, on_event=on_event
            )
        case SkyPilot():
            sky = SkyPilotQueue(
                options=section, worker=worker, label=label, folder=workers, url=url, secrets=environment
            )
            return JobProvider(
                sky,
                worker.lease,
                section.workers,
                poll_s=skypilot_provider.POLL_S,
                grace_s=skypilot_provider.CANCEL_S,
                on_event=on_event,
            )
        case Kubernetes():
            found = credentials.find(section.kubeconfig, section.server, section.token_file)
            return KubernetesProvider(
                found, RunNames(run=recipe.run.name), section.workers, namespace=section.namespace, drain_s=grace_s,
                on_event=on_event,
            )  # fmt: skip
    raise AssertionError(type(section))


def autoscaler(recipe: Recipe, *, elsewhere: bool = True) -> Autoscaler:
    """The autoscaler for all sources of the recipe, or with `elsewhere` = False only for the workers of this machine.
    If the trainer's own engine does not generate, one worker must stay."""
    f = recipe.fleet
    sources = {
        name: ScaledSource(
            count=s.workers,
            min_count=s.workers_min,
            max_count=s.workers_max,
            usd_per_h=_dearest(s) or None,
            least_usd_per_h=_dearest(s),
        )
        for name, s in (f.sources if elsewhere else {}).items()
    }
    if f.workers:
        price = f.price_usd_per_h or None
        sources[SlotProvider.name] = ScaledSource(count=f.workers, max_count=f.workers_max, usd_per_h=price)
    return Autoscaler(sources, cooldown_s=f.cooldown_s, max_usd_per_h=f.max_usd_per_h, keep_one=not f.local)


def command(section: WorkerSource) -> WorkerCommand:
    lease = Lease(kind=section.kind, region=section.region, price_usd_per_h=section.price_usd_per_h)
    return WorkerCommand(
        lease=lease, device=section.device, threads=section.worker_threads, memory=section.worker_memory,
        engine=section.engine, tensor_parallel=section.tensor_parallel,
    )  # fmt: skip


def _url_of(section: WorkerSource, url: Url) -> Url:
    async def fixed() -> str:
        await url()  # a worker that starts before the controller listens would only wait
        return section.join_url

    return fixed if section.join_url else url


# the preview


def preview(recipe: Recipe, only: str = "") -> str:
    """What the recipe would start, as text. `only`: one source; the text is then what its system reads."""
    sources = {name: section for name, section in recipe.fleet.sources.items() if only in ("", name)}
    if only and not sources:
        known = ", ".join(recipe.fleet.sources) or "none"
        raise WindfallError(f"the recipe has no [fleet.{only}]", where="--only", fix=f"Its sources: {known}.")
    parts = [_preview(recipe, name, section) for name, section in sources.items()]
    if not parts:
        fix = "Add one of [fleet.ray], [fleet.kubernetes], [fleet.skypilot], [fleet.slurm]; docs/guides/ has examples."
        raise WindfallError("the recipe starts workers only on this machine", where="fleet", fix=fix)
    return "\n".join(parts)


def _preview(recipe: Recipe, name: str, section: WorkerSource) -> str:
    check_reachable(recipe, name, section)
    worker, url, label = command(section), preview_url(recipe, section), run_label(recipe.run.name, "token")[:-9]
    at_most = f", at most {section.workers_max}" if section.workers_max else ""
    head = f"# {name}: {section.workers} worker{'' if section.workers == 1 else 's'}{at_most}"
    match section:
        case Ray():
            shown = {"ray.init": {"address": section.address}, "actor": ray_provider.actor_options(section)}
            line = " ".join(["windfall", *worker.arguments(url, "ray1.1")])
            return f"{head}; one actor each\n{json.dumps(shown, indent=2)}\n# in each actor:\n# {line}\n"
        case Slurm():
            names = [f"slurm{k + 1}.1" for k in range(section.workers)]
            text = script(section, worker, label=label, url=url, workers=names, log="workers/slurm-%A_%a.log")
            return f"{head}; sbatch with this file\n{text}"
        case SkyPilot():
            described = task(section, worker, url=url, worker="sky1.1")
            line = f"# for each: sky jobs launch --name {label}-sky1-1 --secret WINDFALL_TOKEN sky1.1.yaml"
            return f"{head}\n{line}\n{to_yaml(described)}"
        case Kubernetes():
            return f"{head}\n{_preview_kubernetes(recipe, section, worker, url)}"
    raise AssertionError(type(section))


def preview_url(recipe: Recipe, section: WorkerSource) -> str:
    """The address that workers would dial, as far as it is known before the run starts."""
    f = recipe.fleet
    if section.join_url:
        return section.join_url
    scheme = "https" if f.tls_cert else "http"
    if isinstance(section, Kubernetes):
        return f"{scheme}://{RunNames(run=recipe.run.name).host}:{f.port}"
    host = invitation.own_address() if f.host in invitation.ALL_INTERFACES else f.host
    return f"{scheme}://{host}:{f.port or 'PORT'}"


def _preview_kubernetes(recipe: Recipe, section: Kubernetes, worker: WorkerCommand, url: str) -> str:
    f, names = recipe.fleet, RunNames(run=recipe.run.name)
    certificate = tls.first_certificate(f.tls_cert) if f.tls_cert else ""
    objects = manifests(
        section, worker, names=names, url=url, recipe=config.dump(recipe_in_pod(recipe)),
        ports=(f.port, f.weights_port), certificate=certificate,
    )  # fmt: skip
    secret = (
        f"# before: windfall token {recipe.run.name}.token && kubectl --namespace {section.namespace} "
        f"create secret generic {names.secret} --from-file=token={recipe.run.name}.token"
    )
    if f.tls_cert:
        secret += (
            f"\n# and: kubectl --namespace {section.namespace} create secret tls {names.tls} "
            f"--cert={f.tls_cert} --key={f.tls_key}"
        )
    return "\n".join([secret, *(f"---\n{to_yaml(manifest)}" for manifest in objects)])


def recipe_in_pod(recipe: Recipe) -> Recipe:
    """The recipe for the run in the cluster: the certificate is at its place in the pod, and the pod's own service
    account reaches the API server. Raises WindfallError for other files of this machine."""
    f = recipe.fleet
    assert f.kubernetes is not None
    inside = f.kubernetes.model_copy(update={"kubeconfig": None, "token_file": None, "server": ""})
    tls_files = {"tls_cert": Path(TLS_FOLDER) / "tls.crt", "tls_key": Path(TLS_FOLDER) / "tls.key"}
    made = recipe.model_copy(
        update={"fleet": f.model_copy(update={"kubernetes": inside, **(tls_files if f.tls_cert else {})})}
    )
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


class _Dumper(yaml.SafeDumper):
    """Writes text with several lines as a block."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def to_yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000)
