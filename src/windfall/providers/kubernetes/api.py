"""The part of the Kubernetes API that scaling needs: the scale of a Deployment, and its pods. Plain HTTP.

- 409 (conflict), 429 (too many requests; Retry-After is honored), 5xx, a timeout and a closed connection are retried
  with a growing delay. 401 is retried once, because the token may just have been replaced.
- 403 and 404 need a person: a WindfallError says which permission or object is missing.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

import aiohttp

from windfall import backoff
from windfall.errors import WindfallError
from windfall.providers.kubernetes.credentials import WHERE, Credentials

REQUEST_S = 20.0
TRIES = 6
FIRST_DELAY_S = 0.25
MAX_DELAY_S = 10.0
PAGE = 500
"""Number of pods in one answer."""
APPLY = "windfall fleet preview RECIPE.toml --only kubernetes | kubectl apply -f -"
Answer = dict[str, Any]


class ApiServer:
    """Used as `async with`."""

    def __init__(self, credentials: Credentials, *, request_s: float = REQUEST_S) -> None:
        self._credentials = credentials
        self._request_s = request_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._request_s))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def replicas(self, namespace: str, deployment: str) -> int:
        """The number of workers that the Deployment is to have."""
        answer = await self._request("GET", _scale(namespace, deployment))
        return int(answer.get("spec", {}).get("replicas", 0))  # the API leaves out a 0

    async def scale(self, namespace: str, deployment: str, replicas: int) -> None:
        await self._request("PATCH", _scale(namespace, deployment), {"spec": {"replicas": replicas}})

    async def pods(self, namespace: str, selector: dict[str, str]) -> list[Answer]:
        labels, items, page = ",".join(f"{k}={v}" for k, v in selector.items()), [], ""
        while True:
            query = {"labelSelector": labels, "limit": str(PAGE), **({"continue": page} if page else {})}
            answer = await self._request("GET", f"/api/v1/namespaces/{namespace}/pods", query=query)
            items += answer.get("items") or []
            page = answer.get("metadata", {}).get("continue", "")
            if not page:
                return items

    async def _request(
        self, method: str, path: str, body: Answer | None = None, query: dict[str, str] | None = None
    ) -> Answer:
        """One request, with retries. OSError: it failed every time."""
        failure, unauthorized = "", False
        for attempt in range(TRIES):
            delay_s = backoff.delay_s(attempt, first_s=FIRST_DELAY_S, limit_s=MAX_DELAY_S)
            try:
                status, answer, after_s = await self._send(method, path, body, query)
            except (aiohttp.ClientError, TimeoutError) as e:
                failure = f"{type(e).__name__}: {e}" if str(e) else f"no answer within {self._request_s:g} s"
            else:
                if status < 300:
                    return answer
                failure = f"status {status}: {answer.get('message') or 'no message'}"
                if status == 401 and not unauthorized:
                    unauthorized = True
                elif status < 500 and status not in (409, 429):
                    raise _refusal(status, f"{method} {path}", failure)
                delay_s = max(delay_s, after_s)
            if attempt < TRIES - 1:
                await asyncio.sleep(delay_s)
        raise OSError(f"{method} {self._credentials.server}{path} failed {TRIES} times: {failure}")

    async def _send(
        self, method: str, path: str, body: Answer | None, query: dict[str, str] | None
    ) -> tuple[int, Answer, float]:
        """Status, answer, and the seconds to wait that the server asks for."""
        assert self._session is not None, "only inside `async with`"
        headers = {"Accept": "application/json", **self._credentials.authorization()}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        async with self._session.request(
            method,
            self._credentials.server + path,
            json=body,
            params=query,
            headers=headers,
            ssl=self._credentials.ssl or True,
            allow_redirects=False,
        ) as response:
            try:
                answer = await response.json(content_type=None)
            except ValueError:  # a proxy in between answers in HTML
                answer = {}
            after = response.headers.get("Retry-After", "")
            known = answer if isinstance(answer, dict) else {}
            return response.status, known, min(MAX_DELAY_S, float(after)) if after.isdecimal() else 0.0


def _scale(namespace: str, deployment: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments/{deployment}/scale"


def _refusal(status: int, request: str, failure: str) -> WindfallError:
    fixes = {
        401: "The API server does not accept the token; check kubeconfig, or token_file.",
        403: f"The service account needs the Role of the manifests: {APPLY}",
        404: f"Create the objects first: {APPLY}",
    }
    fix = fixes.get(status, "See what the API server says.")
    return WindfallError(f"{request} failed with {failure}", where=WHERE, fix=fix)
