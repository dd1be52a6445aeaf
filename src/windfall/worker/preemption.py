"""Preemption notices, from the metadata service of AWS, GCP or Azure, or as SIGTERM: the machine will be taken away.

    - Every event is reported once, no matter how often the service repeats it.
    - A service that is unreachable, slow, broken or hostile costs a poll, but never ends the watch: it is retried after
      a delay that doubles up to five poll intervals. It does not affect the other services.
    - No body over 64 KiB is read, redirects are not followed, no proxy is used, and every request has a timeout.

All three services use the same link-local address, so no name is resolved: a lookup can hang for longer than the 30 s
of warning that some services give. The answer shows which cloud it is.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import ClassVar, Literal

import aiohttp
import msgspec

from windfall.backoff import delay_s
from windfall.errors import WindfallError, nearest

ADDRESS = "http://169.254.169.254"
BODY_LIMIT_BYTES = 64 * 1024
MAX_WAIT_POLLS = 5  # longest delay before a failed service is retried, in poll intervals
AWS_TOKEN_S = 21600  # the longest lifetime that AWS allows
GCP_WAIT_S = 10  # length of a long poll. It is short because a broken connection is noticed only at its end
AZURE_FIRST_S = 125.0  # the first request enables Scheduled Events, and may take two minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNotice:
    source: str
    """"aws", "gcp", "azure", "sigterm" or "ctrl-c"."""
    left_s: float | None
    """Seconds until the machine is taken, or None if unknown."""
    detail: str


OnNotice = Callable[[PreemptionNotice], None]


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
        services = [SERVICES[n](session, (base_urls or {}).get(n, ADDRESS).rstrip("/"), timeout_s) for n in names]
        if clouds == "auto":
            present = await asyncio.gather(*(service.is_present() for service in services))
            services = [service for service, yes in zip(services, present, strict=True) if yes]
        async with asyncio.TaskGroup() as group:
            for service in services:
                group.create_task(_watch_service(service, on_notice, poll_s), name=f"spot warnings of {service.source}")


def on_sigterm(loop: asyncio.AbstractEventLoop, on_notice: OnNotice) -> None:
    """Turn SIGTERM into a notice instead of an exit. Repeats are ignored, because launchers often send it twice."""

    def report() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        on_notice(PreemptionNotice(source="sigterm", left_s=None, detail="SIGTERM"))

    loop.add_signal_handler(signal.SIGTERM, report)


async def _watch_service(service: _Service, on_notice: OnNotice, poll_s: float) -> None:
    loop, failures = asyncio.get_running_loop(), 0
    reported: deque[str] = deque(maxlen=256)  # bounded, in case a service invents events without end
    while True:
        began_s = loop.time()
        try:
            events = await service.poll()
            failures = 0
        except Exception:  # fault boundary: any error of a foreign service is a failed poll, never the end of the watch
            service.reset()
            events, failures = [], failures + 1
        for event, notice in events:
            if event not in reported:
                reported.append(event)
                on_notice(notice)
        # The interval includes the request, so the next poll follows immediately after a long one.
        spent_s = 0.0 if failures else loop.time() - began_s
        await asyncio.sleep(max(0.0, delay_s(failures, first_s=poll_s, limit_s=MAX_WAIT_POLLS * poll_s) - spent_s))


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


class _Service:
    """The metadata service of one cloud."""

    source: ClassVar[str]

    def __init__(self, session: aiohttp.ClientSession, base_url: str, timeout_s: float) -> None:
        self._session = session
        self._base_url = base_url
        self._timeout_s = timeout_s

    async def probe(self) -> None:
        """Raise unless the service of this cloud answers."""
        raise NotImplementedError

    async def poll(self) -> list[tuple[str, PreemptionNotice]]:
        """Return the current events, each as (key that identifies the event, notice). May raise anything."""
        raise NotImplementedError

    def reset(self) -> None:
        """After a failure: discard the state that the next request must not rely on."""

    async def is_present(self) -> bool:
        try:
            await self.probe()
        except Exception:  # fault boundary: any other answer means that this is not the cloud
            return False
        return True

    async def _request(self, path: str, *, method: str = "GET", timeout_s: float = 0.0, **headers: str) -> _Answer:
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.request(
            method, self._base_url + path, headers=named, timeout=timeout, allow_redirects=False
        ) as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(4096):
                body += chunk
                if len(body) > BODY_LIMIT_BYTES:
                    response.close()
                    raise ValueError(f"{path}: more than {BODY_LIMIT_BYTES} bytes")
            return _Answer(status=response.status, headers=response.headers, body=bytes(body))


class _AwsAction(msgspec.Struct, frozen=True, kw_only=True):
    action: str
    time: str = ""


class _Aws(_Service):
    """IMDSv2: needs a token, which is valid for six hours. 404 means that no event is planned."""

    source = "aws"
    _token = ""
    _renew_at_s = 0.0

    async def probe(self) -> None:
        await self._renew()

    async def poll(self) -> list[tuple[str, PreemptionNotice]]:
        body = await self._get("/latest/meta-data/spot/instance-action")
        if body is None:
            return []
        action = msgspec.json.decode(body, type=_AwsAction)
        detail = f"spot instance-action {action.action[:40]} at {action.time[:40]}"
        return [(detail, PreemptionNotice(source="aws", left_s=left_s(action.time), detail=detail))]

    async def _get(self, path: str) -> bytes | None:
        if asyncio.get_running_loop().time() >= self._renew_at_s:
            await self._renew()
        answer = await self._request(path, X_aws_ec2_metadata_token=self._token)
        if answer.status == 401:  # expired early: the machine was suspended, or the service was restarted
            await self._renew()
            answer = await self._request(path, X_aws_ec2_metadata_token=self._token)
        return None if answer.status == 404 else answer.ok()

    async def _renew(self) -> None:
        answer = await self._request(
            "/latest/api/token", method="PUT", X_aws_ec2_metadata_token_ttl_seconds=str(AWS_TOKEN_S)
        )
        self._token = answer.word()
        self._renew_at_s = asyncio.get_running_loop().time() + AWS_TOKEN_S / 2

    def reset(self) -> None:
        self._renew_at_s = 0.0


class _Gcp(_Service):
    """`preempted` becomes TRUE. The first request is plain; later ones are long polls that name the last state seen."""

    source = "gcp"
    _etag = ""

    async def probe(self) -> None:
        await self.poll()

    async def poll(self) -> list[tuple[str, PreemptionNotice]]:
        path, timeout_s = "/computeMetadata/v1/instance/preempted", self._timeout_s
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={GCP_WAIT_S}&last_etag={self._etag}"
            timeout_s += GCP_WAIT_S
        answer = await self._request(path, timeout_s=timeout_s, Metadata_Flavor="Google")
        preempted = answer.word()
        if answer.headers.get("Metadata-Flavor") != "Google" or preempted not in ("TRUE", "FALSE"):
            raise ValueError("this is not the metadata service of GCP")
        etag = answer.headers.get("ETag", "")
        self._etag = etag if etag.isalnum() else ""
        if preempted == "FALSE":
            return []
        return [("preempted", PreemptionNotice(source="gcp", left_s=None, detail="instance preempted"))]

    def reset(self) -> None:
        self._etag = ""


class _AzureEvent(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    event_id: str
    event_type: str
    event_status: str = ""
    resources: list[str] | None = None
    not_before: str | None = None


class _AzureEvents(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    events: list[_AzureEvent]


class _Azure(_Service):
    """Scheduled Events. In a scale set every machine gets the events of all machines, so an event must name this one.
    While its name is unknown, every event counts: an unnecessary move costs one prefill, a missed notice more."""

    source = "azure"
    _name = ""
    _answered = False

    async def probe(self) -> None:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        self._name = (await self._request(path, Metadata="true")).word()

    async def poll(self) -> list[tuple[str, PreemptionNotice]]:
        if not self._name:
            await self.is_present()
        answer = await self._request(
            "/metadata/scheduledevents?api-version=2020-07-01",
            timeout_s=self._timeout_s if self._answered else max(AZURE_FIRST_S, self._timeout_s),
            Metadata="true",
        )
        events = msgspec.json.decode(answer.ok(), type=_AzureEvents).events
        self._answered = True
        return [(event.event_id, self._notice(event)) for event in events if self._is_ours(event)]

    def _is_ours(self, event: _AzureEvent) -> bool:
        names = [name.lower() for name in event.resources or ()]
        taken = event.event_type in ("Preempt", "Terminate") and event.event_status in ("", "Scheduled", "Started")
        return taken and (not names or not self._name or self._name.lower() in names)

    def _notice(self, event: _AzureEvent) -> PreemptionNotice:
        left = 0.0 if event.event_status == "Started" else left_s(event.not_before or "")
        return PreemptionNotice(source="azure", left_s=left, detail=f"{event.event_type} {event.event_id[:80]}")


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


SERVICES: dict[str, type[_Service]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}
