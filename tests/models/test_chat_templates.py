"""Chat templates of public model families, from the files that TRL ships: windfall renders what transformers renders,
and a conversation that continues sampled ids has the ids that the template gives the whole conversation.

TRL is not imported. Without it, the tests of the families are skipped.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from windfall.models import tokenizer as light
from windfall.models.chat import Chat
from windfall.models.history import SessionHistory
from windfall.models.tool_calls import parse

_spec = importlib.util.find_spec("trl")
FOLDER = Path(_spec.origin).parent / "chat_templates" if _spec and _spec.origin else None
FAMILIES = {
    "qwen2_5": ("<|im_end|>",),
    "qwen3": ("<|im_end|>",),
    "llama3_1": ("<|eot_id|>", "<|eom_id|>"),
    "deepseekv3": ("<｜end▁of▁sentence｜>",),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "lfm2_v2": ("<|im_end|>",),
}
"""The stop tokens of each family."""
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
REWRITES = {
    "qwen3": HERMES,
    "glm4moe": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Zürich"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
"""Their templates write a turn differently from what was sampled: with an empty block of reasoning, or without it. The
ids of a session differ there from those of the template, because ids are kept as they were sampled. The values are what
a policy samples to call the tool."""
pytestmark = pytest.mark.skipif(FOLDER is None, reason="TRL is not installed; it carries the templates")
SPECIAL = re.compile(r"<[|｜][\w▁]+[|｜]>|\[gMASK\]|<sop>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Say <what> the weather is & "will" be.',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = {
    "id": "abc123def",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'},
}
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain in Zürich?"}]
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "rain, 12 °C", "tool_call_id": "abc123def", "name": "weather"}
SAYS = {"role": "assistant", "content": "Yes, 12 °C."}
THANKS = {"role": "user", "content": "And tomorrow?"}
CONVERSATIONS = {
    "text": ([*ASK], None),
    "tools": ([*ASK], TOOLS),
    "call and result": ([*ASK, CALLS, RESULT], TOOLS),
    "everything": ([*ASK, CALLS, RESULT, SAYS, THANKS], TOOLS),
    "reasoning": ([*ASK, {**SAYS, "reasoning": "Look at the sky."}, THANKS], None),
}


@cache
def hub(family: str) -> Any:
    assert FOLDER is not None
    template = (FOLDER / f"{family}.jinja").read_text()
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    t.decoder = decoders.ByteLevel()  # pyright: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = ["assistant user system tool weather Rain in tomorrow", '{"name": "weather", "arguments": {']
    t.train_from_iterator(words * 3, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    names = sorted({*SPECIAL.findall(template), *FAMILIES[family], "<bos>"})
    t.add_special_tokens([AddedToken(name, special=True) for name in names])
    out = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<bos>", eos_token=FAMILIES[family][0])
    out.chat_template = template
    return out


def chat(family: str, **more: Any) -> Chat:
    t = hub(family)
    return Chat(t, frozenset(t.convert_tokens_to_ids(list(FAMILIES[family]))), **more)


def as_template(family: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as each family's template documents them: DeepSeek's takes the arguments as text."""
    out = [dict(m) for m in messages]
    for m in out:
        if "tool_calls" in m and family != "deepseekv3":
            m["tool_calls"] = [{**CALL, "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}]
    return out


@pytest.mark.parametrize("name", list(CONVERSATIONS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_prompts_are_those_of_transformers(family: str, name: str, tmp_path: Path) -> None:
    messages, tools = CONVERSATIONS[name]
    theirs = hub(family)
    theirs.save_pretrained(tmp_path)
    ours = light.load(tmp_path)
    given = as_template(family, messages)
    for more in ({}, {"enable_thinking": False}):
        expected = theirs.apply_chat_template(
            given, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **more
        )
        for t in (theirs, ours):
            assert list(Chat(t, frozenset(), arguments=more).prompt(messages, tools)) == expected
        rendered = theirs.apply_chat_template(given, tools=tools, tokenize=False, **more)
        assert ours.apply_chat_template(given, tools=tools, **more) == rendered


def turn_ids(family: str, before: list[dict[str, Any]], turn: dict[str, Any], follows: dict[str, Any]) -> list[int]:
    """What a policy that follows its template samples: the turn, up to and including a stop token."""
    t, c = hub(family), chat(family)
    whole = t.apply_chat_template(as_template(family, [*before, turn, follows]), tools=TOOLS, tokenize=False)
    start = t.apply_chat_template(as_template(family, before), tools=TOOLS, tokenize=False, add_generation_prompt=True)
    if family in REWRITES:
        glm = "<|observation|>" if follows["role"] == "tool" else "<|user|>"
        stop = glm if family == "glm4moe" else FAMILIES[family][0]
        text = (REWRITES[family] if "tool_calls" in turn else turn["content"]) + stop
    else:
        assert whole.startswith(start)
        text = whole[len(start) :]
    ids = t.encode(text, add_special_tokens=False)
    return ids[: 1 + next(i for i, token in enumerate(ids) if token in c.stop)]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_session_continues_its_ids_as_the_template_would(family: str) -> None:
    t, c = hub(family), chat(family)
    history = SessionHistory({"": c})
    messages = list(ASK)
    for turn, follows in ((CALLS, RESULT), (SAYS, THANKS)):
        call = history.place(messages, TOOLS)
        expected = list(c.prompt(messages, TOOLS))
        if family not in REWRITES:
            assert list(call.prompt) == expected
        assert expected[-len(call.new) :] == list(call.new) or not call.new
        history.answer(call, turn_ids(family, messages, turn, follows), turn)
        messages += [turn, follows]
    call = history.place(messages, TOOLS)
    assert len(history.segments) == 1
    segment = history.segments[0]
    if family not in REWRITES:
        assert list(call.prompt) == t.encode(
            t.apply_chat_template(
                as_template(family, messages), tools=TOOLS, tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )
    assert segment.tokens[-len(said := turn_ids(family, [*ASK, CALLS, RESULT], SAYS, THANKS)) :] == list(said)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_tool_calls_are_read_from_what_the_template_writes(family: str) -> None:
    t, c = hub(family), chat(family)
    whole = t.apply_chat_template(as_template(family, [*ASK, CALLS, RESULT]), tools=TOOLS, tokenize=False)
    start = t.apply_chat_template(as_template(family, ASK), tools=TOOLS, tokenize=False, add_generation_prompt=True)
    same = 0
    while same < len(start) and whole[same] == start[same]:
        same += 1
    same -= whole[same - 1] == "<"  # the start of a token
    ids = t.encode(whole[same:], add_special_tokens=False)
    ids = ids[: 1 + next(i for i, token in enumerate(ids) if token in c.stop)]
    parsed = parse(c.decode(ids), {"weather"})
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
        ("weather", '{"city": "Zürich", "days": 2}')
    ], c.decode(ids)


def test_a_turn_that_was_cut_off_is_closed_by_the_template() -> None:
    c = chat("qwen2_5")
    history = SessionHistory({"": c})
    call = history.place(ASK)
    cut = hub("qwen2_5").encode("Yes, 12 °C.", add_special_tokens=False)
    history.answer(call, cut, SAYS)
    assert list(history.place([*ASK, SAYS, THANKS]).prompt) == list(c.prompt([*ASK, SAYS, THANKS]))


def test_another_end_than_the_template_writes_opens_a_segment() -> None:
    c = chat("llama3_1")
    history = SessionHistory({"": c})
    call = history.place(ASK)
    history.answer(call, hub("llama3_1").encode("Yes, 12 °C.<|eom_id|>", add_special_tokens=False), SAYS)
    assert history.place([*ASK, SAYS, THANKS]).prompt == c.prompt([*ASK, SAYS, THANKS])
    assert len(history.segments) == 2
