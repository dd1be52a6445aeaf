"""From the sections [fleet.NAME] of the recipe to providers, and to text. The parts of these systems do the work.

recipe ──▶ check()      before anything starts: is the system's software installed, can workers reach the controller
       ──▶ providers()  what the supervisor runs
       ──▶ preview()    the same objects as text, for `windfall fleet preview`
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from windfall import parts
from windfall.errors import WindfallError
from windfall.link import invitation, tls
from windfall.providers.base import OnEvent, Provider
from windfall.providers.slots import SlotProvider
from windfall.providers.source_part import Employer, SourcePart
from windfall.providers.worker_command import run_label, secrets
from windfall.recipe.sections import Recipe
from windfall.recipe.worker_source import WorkerSource
from windfall.run.autoscale import Autoscaler, ScaledSource

Url = Callable[[], Awaitable[str]]


def _part(source: WorkerSource) -> SourcePart:
    return next(p for p in parts.found() if isinstance(p, SourcePart) and isinstance(source, p.section()[1]))


def check(recipe: Recipe) -> None:
    """Raise WindfallError if a source cannot work: its software is missing, or its workers could not reach the run."""
    for name, source in recipe.fleet.sources.items():
        _part(source).check(source)
        check_reachable(recipe, name, source)
    _check_ceiling(recipe)


def _check_ceiling(recipe: Recipe) -> None:
    """Refuse a run whose first workers cost more than the ceiling, or workers elsewhere whose price is not known."""
    f = recipe.fleet
    if not f.max_usd_per_h:
        return
    for name, source in f.sources.items():
        if key := source.missing_price():
            what = "the price of these workers is not known, so fleet.max_usd_per_h cannot be kept"
            raise WindfallError(what, where=f"fleet.{name}", fix=f"Set fleet.{name}.{key}.")
    elsewhere = sum(source.workers * source.highest_usd_per_h() for source in f.sources.values())
    usd_per_h = f.workers * f.price_usd_per_h + elsewhere
    if usd_per_h > f.max_usd_per_h:
        what = f"the workers that the run starts with cost ${usd_per_h:g} per hour, more than ${f.max_usd_per_h:g}"
        raise WindfallError(what, where="fleet.max_usd_per_h", fix="Start with fewer workers, or raise the ceiling.")


def check_reachable(recipe: Recipe, name: str, source: WorkerSource) -> None:
    f, where = recipe.fleet, f"fleet.{name}"
    if not source.join_url and _is_loopback(f.host):
        what = f"these workers run on other machines, and fleet.host = {f.host!r} lets no other machine connect"
        raise WindfallError(what, where=where, fix=f'Set fleet.host = "0.0.0.0", or {where}.join_url.')
    if _part(source).needs_ports and not (f.port and f.weights_port):
        what = "these workers need to know the ports of the controller and of the weight server before the run starts"
        raise WindfallError(what, where=where, fix="Set fleet.port and fleet.weights_port, such as 8700 and 8701.")
    scheme = urlsplit(source.join_url).scheme
    if scheme and scheme != ("https" if f.tls_cert else "http"):
        have = "has" if f.tls_cert else "has no"
        what = f"join_url = {source.join_url!r}, but the controller {have} certificate"
        raise WindfallError(what, where=where, fix="Change join_url, or fleet.tls_cert and fleet.tls_key.")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def providers(recipe: Recipe, folder: Path, token: str, *, url: Url, on_event: OnEvent) -> dict[str, Provider]:
    """The providers of all sources, by name. `url`: waits for the address at which workers reach the controller."""
    certificate = tls.first_certificate(recipe.fleet.tls_cert) if recipe.fleet.tls_cert else ""
    made: dict[str, Provider] = {}
    for name, source in recipe.fleet.sources.items():
        part = _part(source)
        run = Employer(
            name=recipe.run.name, label=run_label(recipe.run.name, token), folder=folder, url=_url_of(source, url),
            secrets=secrets(token, certificate), on_event=functools.partial(on_event, log=part.logs),
        )  # fmt: skip
        made[name] = part.provider(source, run)
    return made


def _url_of(source: WorkerSource, url: Url) -> Url:
    async def fixed() -> str:
        await url()  # a worker that starts before the controller listens would only wait
        return source.join_url

    return fixed if source.join_url else url


def autoscaler(recipe: Recipe, *, elsewhere: bool = True) -> Autoscaler:
    """The autoscaler for all sources of the recipe, or with `elsewhere` = False only for the workers of this machine.
    If the trainer's own engine does not generate, one worker must stay."""
    f = recipe.fleet
    sources = {
        name: ScaledSource(
            count=s.workers,
            min_count=s.workers_min,
            max_count=s.workers_max,
            usd_per_h=s.highest_usd_per_h() or None,
            least_usd_per_h=s.highest_usd_per_h(),
        )
        for name, s in (f.sources if elsewhere else {}).items()
    }
    if f.workers:
        price = f.price_usd_per_h or None
        sources[SlotProvider.name] = ScaledSource(count=f.workers, max_count=f.workers_max, usd_per_h=price)
    return Autoscaler(sources, cooldown_s=f.cooldown_s, max_usd_per_h=f.max_usd_per_h, keep_one=not f.local)


# the preview


def preview(recipe: Recipe, only: str = "") -> str:
    """What the recipe would start, as text. `only`: one source; the text is then what its system reads."""
    sources = {name: source for name, source in recipe.fleet.sources.items() if only in ("", name)}
    if only and not sources:
        known = ", ".join(recipe.fleet.sources) or "none"
        raise WindfallError(f"the recipe has no [fleet.{only}]", where="--only", fix=f"Its sources: {known}.")
    if not sources:
        known = [p.section()[0] for p in parts.found() if isinstance(p, SourcePart)]
        fix = f"Add one of {', '.join(f'[{section}]' for section in known)}; docs/guides/ has examples."
        raise WindfallError("the recipe starts workers only on this machine", where="fleet", fix=fix)
    return "\n".join(_preview(recipe, name, source) for name, source in sources.items())


def _preview(recipe: Recipe, name: str, source: WorkerSource) -> str:
    check_reachable(recipe, name, source)
    label = run_label(recipe.run.name, "token")[:-9]
    at_most = f", at most {source.workers_max}" if source.workers_max else ""
    head = f"# {name}: {source.workers} worker{'' if source.workers == 1 else 's'}{at_most}"
    return head + _part(source).preview(source, recipe, label=label, url=preview_url(recipe, source))


def preview_url(recipe: Recipe, source: WorkerSource) -> str:
    """The address that workers would dial, as far as it is known before the run starts."""
    f = recipe.fleet
    if source.join_url:
        return source.join_url
    own = invitation.own_address() if f.host in invitation.ALL_INTERFACES else f.host
    scheme = "https" if f.tls_cert else "http"
    return f"{scheme}://{_part(source).host(recipe) or own}:{f.port or 'PORT'}"
