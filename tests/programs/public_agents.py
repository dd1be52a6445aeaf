"""Agents that are written with public packages, which are used as they are. Each adds two numbers with a tool."""

from __future__ import annotations

import importlib
import json
import os
from functools import partial
from typing import Any

QUESTION = "2 plus 3?"


def openai_client(task: dict[str, Any]) -> float:
    """OpenAI's client: streaming, tools, and the result of a tool in the next call."""
    import openai

    api = openai.OpenAI()
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    model = api.models.list().data[0].id
    for _ in range(3):
        said, calls = "", {}
        for chunk in api.chat.completions.create(
            model=model, messages=messages, tools=[tool], stream=True, max_tokens=120
        ):
            delta = chunk.choices[0].delta
            said += delta.content or ""
            for call in delta.tool_calls or ():
                calls[call.index] = call
        message: dict[str, Any] = {"role": "assistant", "content": said or None}
        if not calls:
            break
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in calls.values()
        ]
        messages.append(message)
        for c in calls.values():
            result = sum(json.loads(c.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": c.id, "content": str(result)})
    return float("5" in said)


def smolagents_agent(task: dict[str, Any]) -> float:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    @tool
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: a
            b: b
        """
        return a + b

    templates: Any = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Use tools."}
    model = OpenAIServerModel(model_id=os.environ["OPENAI_MODEL"], max_tokens=120)
    agent = ToolCallingAgent(tools=[add], model=model, prompt_templates=templates, max_steps=3, verbosity_level=0)
    return float("5" in str(agent.run(QUESTION)))


async def openai_agents(task: dict[str, Any]) -> float:
    from agents import Agent, MaxTurnsExceeded, ModelSettings, Runner, function_tool, set_default_openai_api
    from agents import set_tracing_disabled as set_tracing

    set_tracing(True)
    set_default_openai_api("chat_completions")

    @function_tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    settings = ModelSettings(max_tokens=120)
    agent = Agent(
        name="adder", instructions="Use tools.", tools=[add], model=os.environ["OPENAI_MODEL"], model_settings=settings
    )
    try:
        result = await Runner.run(agent, QUESTION, max_turns=3)
    except MaxTurnsExceeded:
        return 0.0
    return float("5" in str(result.final_output))


# Imported once, before agents are forked: importing takes seconds.
openai_client.prepare = partial(importlib.import_module, "openai")  # type: ignore[attr-defined]
smolagents_agent.prepare = partial(importlib.import_module, "smolagents")  # type: ignore[attr-defined]
openai_agents.prepare = partial(importlib.import_module, "agents")  # type: ignore[attr-defined]
