"""The warning that this worker's machine will be taken: from the metadata service of AWS, GCP or Azure, or by SIGTERM.

    - Every event is told once, however often the service repeats it.
    - A service that is away, slow, broken or hostile costs a poll, never the watch: it is asked again after a wait that
      doubles up to five polls, and disturbs no other service.
    - No body over 64 KiB is read, no redirect followed, no proxy asked; every request has a timeout.

All three answer on the same link-local address, so no name is looked up: a lookup can hang for longer than the 30 s
that some of them grant. Which cloud it is shows in how it answers.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import ClassVar, Literal

import aiohttp
import msgspec

from windfall.errors import WindfallError, nearest

ADDRESS = "http://169.254.169.254"
BODY_LIMIT_BYTES = 64 * 1024
MAX_WAIT_POLLS = 5  # between tries of a service that fails
AWS_TOKEN_S = 21600  # the longest it grants
GCP_WAIT_S = 10  # one long poll: if its connection dies unseen, some of the 30 s of warning are left
AZURE_FIRST_S = 125.0  # the first request switches Scheduled Events on, and may take two minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNotice:
    """`left_s`: time until the machine is taken, where that is said. `advice`: it is at risk, nothing is decided."""

    source: str  # "aws", "gcp", "azure" or "sigterm"
    left_s: float | None
    detail: str
    advice: bool = False


async def watch(
    on_notice: Callable[[PreemptionNotice], None],
    *,
    clouds: Sequence[str] | Literal["auto"],
    base_urls: Mapping[str, str] | None = None,
    poll_s: float = 2.0,
    timeout_s: float = 1.0,
) -> None:
    """Until cancelled. With "auto", one probe finds the services that are there; where none is, it returns."""
    names = list(SERVICES) if clouds == "auto" else list(dict.fromkeys(clouds))
    for name in names:
        if name not in SERVICES:
            raise WindfallError(f"no cloud {name!r}", where="spot warnings", fix=nearest(name, SERVICES))
    async with aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,  # a small body must not become a large one
        headers={"Accept-Encoding": "identity"},
    ) as session:
        found = [SERVICES[n](session, (base_urls or {}).get(n, ADDRESS).rstrip("/"), timeout_s) for n in names]
        if clouds == "auto":
            here = await asyncio.gather(*(service.is_here() for service in found))
            found = [service for service, yes in zip(found, here, strict=True) if yes]
        async with asyncio.TaskGroup() as group:
            for service in found:
                group.create_task(_follow(service, on_notice, poll_s), name=f"spot warnings of {service.source}")


def on_sigterm(loop: asyncio.AbstractEventLoop, on_notice: Callable[[PreemptionNotice], None]) -> None:
    """SIGTERM becomes a notice instead of the end. Repeats are ignored: launchers often send it twice."""
    told = False

    def tell() -> None:
        nonlocal told
        if not told:
            told = True
            on_notice(PreemptionNotice(source="sigterm", left_s=None, detail="SIGTERM"))

    loop.add_signal_handler(signal.SIGTERM, tell)


async def _follow(service: _Service, on_notice: Callable[[PreemptionNotice], None], poll_s: float) -> None:
    loop, failures = asyncio.get_running_loop(), 0
    told: deque[str] = deque(maxlen=256)  # bounded, should a service invent events without end
    while True:
        began_s = loop.time()
        try:
            events = await service.poll()
            failures = 0
        except Exception:  # whatever a foreign service answers is a failed poll, never the end of the watch
            service.reset()
            events, failures = [], failures + 1
        for event, notice in events:
            if event not in told:
                told.append(event)
                on_notice(notice)
        # Time spent in the request counts: a long poll that has waited is followed by the next at once.
        spent_s = 0.0 if failures else loop.time() - began_s
        await asyncio.sleep(max(0.0, poll_s * min(2.0 ** min(failures, 10), MAX_WAIT_POLLS) - spent_s))


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
        """A body that is one short word: a token, a name, a truth value."""
        text = self.ok().decode("ascii").strip()
        if not text.isprintable() or not 0 < len(text) <= 1024 or " " in text:
            raise ValueError("not a word")
        return text


class _Service:
    """One cloud's metadata service. `poll` returns (what makes an event distinct, notice); it may raise anything."""

    source: ClassVar[str]

    def __init__(self, session: aiohttp.ClientSession, base_url: str, timeout_s: float) -> None:
        self._session, self._base_url, self._timeout_s = session, base_url, timeout_s

    async def probe(self) -> None:
        """Raises unless this cloud's service answers."""
        raise NotImplementedError

    async def poll(self) -> list[tuple[str, PreemptionNotice]]:
        raise NotImplementedError

    def reset(self) -> None:
        """After a failure: forget what the next request must not build on."""

    async def is_here(self) -> bool:
        try:
            await self.probe()
        except Exception:  # any answer but the right one means: not this cloud
            return False
        return True

    async def _ask(self, path: str, *, method: str = "GET", timeout_s: float = 0.0, **headers: str) -> _Answer:
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


class _AwsAdvice(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    notice_time: str


class _Aws(_Service):
    """IMDSv2: a token first, good for six hours. 404 means that nothing is planned."""

    source = "aws"
    _token = ""
    _renew_at_s = 0.0

    async def probe(self) -> None:
        await self._renew()

    async def poll(self) -> list[tuple[str, PreemptionNotice]]:
        events: list[tuple[str, PreemptionNotice]] = []
        if body := await self._get("/latest/meta-data/spot/instance-action"):
            said = msgspec.json.decode(body, type=_AwsAction)
            detail = f"spot instance-action {said.action[:40]} at {said.time[:40]}"
            events.append((detail, PreemptionNotice(source="aws", left_s=left_s(said.time), detail=detail)))
        with suppress(Exception):  # advice that cannot be had must not hold up the warning
            if body := await self._get("/latest/meta-data/events/recommendations/rebalance"):
                at = msgspec.json.decode(body, type=_AwsAdvice).notice_time
                detail = f"rebalance recommended at {at[:40]}"
                events.append((detail, PreemptionNotice(source="aws", left_s=None, detail=detail, advice=True)))
        return events

    async def _get(self, path: str) -> bytes | None:
        if asyncio.get_running_loop().time() >= self._renew_at_s:
            await self._renew()
        answer = await self._ask(path, X_aws_ec2_metadata_token=self._token)
        if answer.status == 401:  # expired before its time: the machine slept, or the service was restarted
            await self._renew()
            answer = await self._ask(path, X_aws_ec2_metadata_token=self._token)
        return None if answer.status == 404 else answer.ok()

    async def _renew(self) -> None:
        answer = await self._ask(
            "/latest/api/token", method="PUT", X_aws_ec2_metadata_token_ttl_seconds=str(AWS_TOKEN_S)
        )
        self._token = answer.word()
        self._renew_at_s = asyncio.get_running_loop().time() + AWS_TOKEN_S / 2

    def reset(self) -> None:
        self._renew_at_s = 0.0


class _Gcp(_Service):
    """`preempted` turns TRUE. Asked plainly once, then by long polls that name the state already seen."""

    source = "gcp"
    _etag = ""

    async def probe(self) -> None:
        await self.poll()

    async def poll(self) -> list[tuple[str, PreemptionNotice]]:
        path, timeout_s = "/computeMetadata/v1/instance/preempted", self._timeout_s
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={GCP_WAIT_S}&last_etag={self._etag}"
            timeout_s += GCP_WAIT_S
        answer = await self._ask(path, timeout_s=timeout_s, Metadata_Flavor="Google")
        preempted = answer.word()
        if answer.headers.get("Metadata-Flavor") != "Google" or preempted not in ("TRUE", "FALSE"):
            raise ValueError("not the metadata service of GCP")
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
    """Scheduled Events. A scale set tells every machine the events of all, so an event must name us. While our name
    cannot be had, each is taken as ours: a move too many costs a prefill, a warning missed costs more."""

    source = "azure"
    _name = ""
    _answered = False

    async def probe(self) -> None:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        self._name = (await self._ask(path, Metadata="true")).word()

    async def poll(self) -> list[tuple[str, PreemptionNotice]]:
        if not self._name:
            await self.is_here()
        answer = await self._ask(
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
    """Seconds until a time as the services write it: ISO 8601, or as in HTTP headers. None if it is neither.

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
