"""The session of an agent as a Python object: its roles speak, each in a conversation of its own.

    async def run(task, session):
        answer = await session.sample("solver", task["prompt"])
        verdict = await session.sample("verifier", f"{task['prompt']} Is {answer} right?")
        return {"rewards": {"solver": ..., "verifier": ...}}

An agent whose function has a parameter `session` gets one. It calls the gateway as OpenAI's client would
(docs/agents.md), with nothing but Python's own library. Agents may use both.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any


class RoleSession:
    def __init__(self, url: str, key: str) -> None:
        """`url`, `key`: OPENAI_BASE_URL and OPENAI_API_KEY of the agent."""
        self._url = url
        self._key = key
        self._messages: dict[str, list[Mapping[str, Any]]] = {}

    @classmethod
    def from_environment(cls) -> RoleSession:
        return cls(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])

    async def sample(
        self,
        role: str = "",
        prompt: str | Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> str:
        """Let a role speak, and return what it said. `role`: a policy, or a policy and a label ("player:black"); empty:
        the first policy. `prompt`: a user's message, or messages. They continue the conversation of this role, which
        begins with its first call. Raises RuntimeError if the gateway refuses the call, for example because the role
        has no tokens left."""
        new = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages = [*self._messages.get(role, ()), *new]
        body: dict[str, Any] = {"model": role, "messages": messages}
        body |= ({"max_tokens": max_tokens} if max_tokens else {}) | ({"stop": list(stop)} if stop else {})
        answer = (await asyncio.to_thread(self._post, body))["choices"][0]["message"]
        self._messages[role] = [*messages, {"role": "assistant", "content": answer["content"]}]
        return answer["content"] or ""

    def _post(self, body: Mapping[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as e:
            said = e.read().decode(errors="replace")
            raise RuntimeError(f"the gateway refused a call for the role {body['model']!r} ({e.code}): {said}") from e
