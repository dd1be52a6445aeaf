"""Preemption notices, from the metadata service of AWS, GCP or Azure, or as SIGTERM: the machine will be taken away.

    - Every event is reported once, no matter how often the service repeats it.
    - A service that is unreachable, slow, broken or hostile costs a poll, but never ends the watch: it is retried after
      a delay that doubles up to five poll intervals. It does not affect the other services.
    - No body over 64 KiB is read, redirects are not followed, no proxy is used, and every request has a timeout.
    - A poll depends on nothing that an earlier poll has found.

All three services use the same link-local address, so no name is resolved: a lookup can hang for longer than the 30 s
of warning that some services give. The answer shows which cloud it is.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal

import aiohttp
import msgspec

from windfall.backoff import delay_s
from windfall.errors import WindfallError, nearest

ADDRESS = "http://169.254.169.254"
BODY_LIMIT_BYTES = 64 * 1024
MAX_WAIT_POLLS = 5  # longest delay before a failed service is retried, in poll intervals
AZURE_FIRST_S = 125.0  # the first request enables Scheduled Events, and may take two minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNotice:
    source: str
    """"aws", "gcp", "azure", "sigterm" or "ctrl-c"."""
    left_s: float | None
    """Seconds until the machine is taken, or None if unknown."""
    detail: str


OnNotice = Callable[[PreemptionNotice], None]
Events = dict[str, PreemptionNotice]
"""The current events of a service, by a key that identifies the event."""


async def watch(
    on_notice: OnNotice,
    *,
    clouds: Sequence[str] | Literal["auto"],
    base_urls: Mapping[str, str] | None = None,
    poll_s: float = 2.0,
    timeout_s: float = 1.0,
) -> None:
    """Watch until cancelled. With "auto", one probe finds the services that exist; if there are none, it returns."""
    names = list(SERVICES) if clouds == "auto" else list(dict.fromkeys(clouds))
    for name in names:
        if name not in SERVICES:
            raise WindfallError(f"unknown cloud {name!r}", where="spot warnings", fix=nearest(name, SERVICES))
    async with aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,  # a small body must not become a large one
        headers={"Accept-Encoding": "identity"},
    ) as session:
        asked = {n: _Metadata(session, (base_urls or {}).get(n, ADDRESS).rstrip("/"), timeout_s) for n in names}
        if clouds == "auto":
            probes = [SERVICES[name].probe(metadata) for name, metadata in asked.items()]
            answers = await asyncio.gather(*probes, return_exceptions=True)
            # Any error means that this is not the cloud.
            found = [name for name, e in zip(asked, answers, strict=True) if not isinstance(e, BaseException)]
            asked = {name: asked[name] for name in found}
        async with asyncio.TaskGroup() as group:
            for name, metadata in asked.items():
                watching = _watch_service(SERVICES[name], metadata, on_notice, poll_s)
                group.create_task(watching, name=f"spot warnings of {name}")


def on_sigterm(loop: asyncio.AbstractEventLoop, on_notice: OnNotice) -> None:
    """Turn SIGTERM into a notice instead of an exit. Repeats are ignored, because launchers often send it twice."""

    def report() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        on_notice(PreemptionNotice(source="sigterm", left_s=None, detail="SIGTERM"))

    loop.add_signal_handler(signal.SIGTERM, report)


async def _watch_service(service: _Service, metadata: _Metadata, on_notice: OnNotice, poll_s: float) -> None:
    failures, usual_s = 0, metadata.timeout_s
    reported: deque[str] = deque(maxlen=256)  # bounded, in case a service invents events without end
    metadata.timeout_s = max(usual_s, service.first_s)
    while True:
        try:
            events = await service.poll(metadata)
            failures = 0
        except Exception:  # fault boundary: any error of a foreign service is a failed poll, never the end of the watch
            events, failures = {}, failures + 1
        metadata.timeout_s = usual_s
        for event, notice in events.items():
            if event not in reported:
                reported.append(event)
                on_notice(notice)
        await asyncio.sleep(delay_s(failures, first_s=poll_s, limit_s=MAX_WAIT_POLLS * poll_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def ok(self) -> bytes:
        if self.status != 200:
            raise ValueError(f"status {self.status}")
        return self.body

    def word(self) -> str:
        """The body, if it is one short word: a token, a name, TRUE or FALSE."""
        text = self.ok().decode("ascii").strip()
        if not text.isprintable() or not 0 < len(text) <= 1024 or " " in text:
            raise ValueError("not a word")
        return text


@dataclass(slots=True)
class _Metadata:
    """The metadata service of this machine, as one cloud would answer."""

    session: aiohttp.ClientSession
    base_url: str
    timeout_s: float

    async def get(self, path: str, *, method: str = "GET", **headers: str) -> _Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with self.session.request(
            method, self.base_url + path, headers=named, timeout=timeout, allow_redirects=False
        ) as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(4096):
                body += chunk
                if len(body) > BODY_LIMIT_BYTES:
                    response.close()
                    raise ValueError(f"{path}: more than {BODY_LIMIT_BYTES} bytes")
            return _Answer(status=response.status, headers=response.headers, body=bytes(body))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Service:
    """How one cloud answers. Both functions may raise anything."""

    probe: Callable[[_Metadata], Awaitable[object]]
    """Raises unless the service of this cloud answers."""
    poll: Callable[[_Metadata], Awaitable[Events]]
    first_s: float = 0.0
    """Seconds that the first poll may take, if that is longer than the usual timeout."""


class _AwsAction(msgspec.Struct, frozen=True, kw_only=True):
    action: str
    time: str = ""


async def _aws_token(metadata: _Metadata) -> str:
    """IMDSv2 answers only with a token."""
    return (await metadata.get("/latest/api/token", method="PUT", X_aws_ec2_metadata_token_ttl_seconds="60")).word()


async def _aws(metadata: _Metadata) -> Events:
    token = await _aws_token(metadata)
    answer = await metadata.get("/latest/meta-data/spot/instance-action", X_aws_ec2_metadata_token=token)
    if answer.status == 404:  # no event is planned
        return {}
    action = msgspec.json.decode(answer.ok(), type=_AwsAction)
    detail = f"spot instance-action {action.action[:40]} at {action.time[:40]}"
    return {detail: PreemptionNotice(source="aws", left_s=left_s(action.time), detail=detail)}


async def _gcp(metadata: _Metadata) -> Events:
    answer = await metadata.get("/computeMetadata/v1/instance/preempted", Metadata_Flavor="Google")
    preempted = answer.word()
    if answer.headers.get("Metadata-Flavor") != "Google" or preempted not in ("TRUE", "FALSE"):
        raise ValueError("this is not the metadata service of GCP")
    if preempted == "FALSE":
        return {}
    return {"preempted": PreemptionNotice(source="gcp", left_s=None, detail="instance preempted")}


class _AzureEvent(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    event_id: str
    event_type: str
    event_status: str = ""
    resources: list[str] | None = None
    not_before: str | None = None


class _AzureEvents(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    events: list[_AzureEvent]


async def _azure_name(metadata: _Metadata) -> str:
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    return (await metadata.get(path, Metadata="true")).word()


async def _azure(metadata: _Metadata) -> Events:
    """Scheduled Events. In a scale set every machine gets the events of all machines, so an event must name this one.
    While its name is unknown, every event counts: an unnecessary move costs one prefill, a missed notice more."""
    try:
        name = (await _azure_name(metadata)).lower()
    except Exception:  # fault boundary: see above
        name = ""
    answer = await metadata.get("/metadata/scheduledevents?api-version=2020-07-01", Metadata="true")
    found: Events = {}
    for event in msgspec.json.decode(answer.ok(), type=_AzureEvents).events:
        taken = event.event_type in ("Preempt", "Terminate") and event.event_status in ("", "Scheduled", "Started")
        named = [resource.lower() for resource in event.resources or ()]
        if taken and (not named or not name or name in named):
            left = 0.0 if event.event_status == "Started" else left_s(event.not_before or "")
            detail = f"{event.event_type} {event.event_id[:80]}"
            found[event.event_id] = PreemptionNotice(source="azure", left_s=left, detail=detail)
    return found


def left_s(when: str) -> float | None:
    """Seconds until a time given in ISO 8601 or in the format of HTTP headers. None if it is in neither format.

    >>> left_s("2017-09-18T08:22:00Z"), left_s("Mon, 19 Sep 2016 18:29:47 GMT"), left_s("soon")
    (0.0, 0.0, None)
    """
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            at = read(when)
            at = at if at.tzinfo else at.replace(tzinfo=UTC)
            return max(0.0, (at - datetime.now(UTC)).total_seconds())
        except (ValueError, TypeError, OverflowError):
            continue
    return None


SERVICES = {
    "aws": _Service(probe=_aws_token, poll=_aws),
    "gcp": _Service(probe=_gcp, poll=_gcp),
    "azure": _Service(probe=_azure_name, poll=_azure, first_s=AZURE_FIRST_S),
}
