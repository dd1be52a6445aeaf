"""Two agents with a tool, over the OpenAI API: one calculates (GSM8K), one searches (HotpotQA). Each asks the policy
until it answers without a call of its tool, and returns this answer, which the environment of the tasks grades.

Train them: windfall train recipes/tools/qwen3-1.7b-lora.toml, and windfall train recipes/search/qwen3-1.7b-lora.toml
"""

from __future__ import annotations

import ast
import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from windfall.envs.base import HELD_OUT
from windfall.types import Feedback, Task, Turn

HTTP = DefaultHttpxClient()  # made once: every run of an agent is a fork of the process that imported this module
CALLS = 6
"""Turns of one agent. After the last one its answer is whatever it has said."""
OPERATIONS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg,
}  # fmt: skip


def calculating(task: dict[str, Any]) -> str:
    asked = "Calculate with the tool. Put the final answer within \\boxed{}."
    return converse(f"{task['prompt']}\n{asked}", tool("calculate", "Calculate (17 + 5) * 3.", "expression"), calculate)


def searching(task: dict[str, Any]) -> str:
    """The prompt of a task of `Questions` has the paragraphs to search in; the policy sees what it finds of them."""
    given = json.loads(task["prompt"])
    asked = "Search for what you need. The last line of your response is the answer alone, in a few words."
    described = tool("search", "Find paragraphs of an encyclopedia.", "query")
    return converse(f"{given['question']}\n{asked}", described, lambda query: search(query, given["paragraphs"]))


def tool(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def converse(prompt: str, described: Any, use: Callable[[str], str]) -> str:
    api, model = OpenAI(http_client=HTTP), os.environ["OPENAI_MODEL"]
    messages: list[Any] = [{"role": "user", "content": prompt}]
    text = ""
    for _ in range(CALLS):
        reply: Any = api.chat.completions.create(model=model, messages=messages, tools=[described]).choices[0].message
        text = reply.content or text
        if not reply.tool_calls:
            break
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": used(use, call.function.arguments)})
    return text


def used(use: Callable[[str], str], arguments: str) -> str:
    """What the tool returns. A call that cannot be understood is answered, so that the policy can repeat it.

    >>> used(calculate, '{"expression": "2 * (3 + 4)"}'), used(calculate, '{"expression": "2 *"}')
    ('14', 'error: invalid syntax')
    """
    try:
        (value,) = json.loads(arguments).values()
        return use(str(value))
    except (ValueError, TypeError, AttributeError, SyntaxError, ArithmeticError, RecursionError) as e:
        return f"error: {getattr(e, 'msg', e)}"


def calculate(expression: str) -> str:
    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.operand))
        raise ValueError("only numbers, + - * / // % and parentheses")

    return f"{value(ast.parse(expression[:200].replace(',', ''), mode='eval').body):.10g}"


def search(query: str, paragraphs: Sequence[str], most: int = 2) -> str:
    """The paragraphs that share the most words with the query; rare words count more.

    >>> search("capital of France", ["Paris: the capital of France.", "Berlin: the capital of Germany."], 1)
    'Paris: the capital of France.'
    """
    words = [Counter(normal(p).split()) for p in paragraphs]
    known = Counter(word for each in words for word in each)
    asked = set(normal(query).split())
    scores = [sum(math.log(1 + len(words) / known[word]) for word in asked & each.keys()) for each in words]
    best = sorted(range(len(words)), key=lambda n: -scores[n])[:most]
    return "\n\n".join(paragraphs[n] for n in best if scores[n]) or "nothing found"


class Questions:
    """Questions of HotpotQA, each with the ten paragraphs that come with it: two that are needed, and eight others.
    `path`: the folder with the parquet files of the hub's repository. The validation split is for evaluation."""

    def __init__(self, seed: int = 0, *, path: str) -> None:
        self._seed = seed
        self._files = {name: sorted(Path(path).glob(f"{name}-*.parquet")) for name in ("train", "validation")}
        if missing := [name for name, files in self._files.items() if not files]:
            raise FileNotFoundError(f"{path}: no file {missing[0]}-*.parquet; recipes/search/README.md says what to do")

    def task(self, index: int) -> Task:
        held_out = index >= HELD_OUT
        files = tuple(self._files["validation" if held_out else "train"])
        row = read_row(files, index - HELD_OUT if held_out else index * 7919 + self._seed)
        told = row["context"]
        paragraphs = [f"{t}: {''.join(lines)}" for t, lines in zip(told["title"], told["sentences"], strict=True)]
        prompt = json.dumps({"question": row["question"], "paragraphs": paragraphs})
        return Task(id=f"{row['id']}/{index}", prompt=prompt, answer=row["answer"])

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        lines = turns[-1].text.strip().splitlines() or [""]
        return Feedback(reward=float(normal(lines[-1]) == normal(task.answer)))


def normal(text: str) -> str:
    """
    >>> normal("The Eiffel-Tower, Paris.")
    'eiffel tower paris'
    """
    return " ".join(word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the"))


def read_row(files: tuple[Path, ...], number: int) -> dict[str, Any]:
    """Row `number` of all files together, which begin again after the last row. Reads one group of rows."""
    groups = row_groups(files)
    number %= sum(rows for _, _, rows in groups)
    for file, group, rows in groups:
        if number < rows:
            return rows_of(file, group)[number]
        number -= rows
    raise AssertionError("the number is below the sum of all rows")


@lru_cache
def row_groups(files: tuple[Path, ...]) -> list[tuple[Path, int, int]]:
    from pyarrow import parquet

    found = [(file, parquet.ParquetFile(file).metadata) for file in files]
    return [(file, g, data.row_group(g).num_rows) for file, data in found for g in range(data.num_row_groups)]


@lru_cache(maxsize=4)
def rows_of(file: Path, group: int) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return parquet.ParquetFile(file).read_row_group(group).to_pylist()
