"""Segments of a session: what continues, what opens a new one, and that sampled ids are never changed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from windfall.models.chat import Chat
from windfall.models.history import SessionHistory, message_key

CHATML = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "one"}
REPLY = {"role": "assistant", "content": "two"}
NEXT = {"role": "user", "content": "three"}
TOOL = [{"type": "function", "function": {"name": "add"}}]


def tokenizer() -> Any:
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    t.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator(["one two three user assistant"] * 3, trainer)
    t.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    out = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>")
    out.chat_template = CHATML
    return out


HUB = tokenizer()
STOP = HUB.convert_tokens_to_ids("<|im_end|>")


def history() -> SessionHistory:
    return SessionHistory({"": Chat(HUB, frozenset([STOP]))})


def ids(text: str) -> list[int]:
    return [*HUB.encode(text, add_special_tokens=False), STOP]


def begun(reply: dict[str, Any] = REPLY, tools: Any = None) -> SessionHistory:
    h = history()
    h.answer(h.place([USER], tools), ids("two"), reply)
    return h


def test_a_call_that_extends_continues_the_segment() -> None:
    h = begun()
    call = h.place([USER, {"role": "assistant", "content": " two\n", "refusal": None}, NEXT])
    assert call.segment is h.segments[0]
    assert HUB.decode(call.new) == "\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    h.answer(call, ids("four"), {"role": "assistant", "content": "four"})
    assert h.segments[0].tokens == [*ids("two"), *call.new, *ids("four")]


def test_edits_open_a_segment() -> None:
    for messages, tools in (
        ([{"role": "user", "content": "uno"}, REPLY, NEXT], None),  # edited
        ([REPLY, NEXT], None),  # trimmed
        ([USER, {"role": "assistant", "content": "zwei"}, NEXT], None),  # the reply was changed
        ([USER, REPLY, NEXT, REPLY, NEXT], None),  # a turn that was not sampled here
        ([USER, REPLY, NEXT], TOOL),  # other tools
        ([USER], None),  # the same prompt once more
    ):
        h = begun()
        call = h.place(messages, tools)
        assert call.segment.index == 1
        assert not call.new


def test_a_busy_segment_is_not_continued() -> None:
    h = begun()
    first, second = h.place([USER, REPLY, NEXT]), h.place([USER, REPLY, {"role": "user", "content": "other"}])
    assert (first.segment.index, second.segment.index) == (0, 1)


def test_an_abandoned_call_leaves_nothing() -> None:
    h = begun()
    before = h.segments[0].ids
    h.abandon(h.place([USER, REPLY, NEXT]))
    h.abandon(h.place([NEXT]))
    assert [s.ids for s in h.segments if s.tokens] == [before]
    assert h.place([NEXT]).segment is not h.segments[1]
    assert h.place([USER, REPLY, NEXT]).segment is h.segments[0]


def test_ids_continue_the_longest_prefix() -> None:
    h = SessionHistory({"": None})
    h.answer(h.place_ids([1, 2]), [3, 4], None)
    call = h.place_ids([1, 2, 3, 4, 5])
    assert (call.segment.index, call.new, call.prompt) == (0, (5,), (1, 2, 3, 4, 5))
    assert h.place_ids([1, 2, 9]).segment.index == 1


def test_tool_calls_are_compared_as_json() -> None:
    def message(arguments: str) -> dict[str, Any]:
        call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    assert message_key(message('{"a":1,"b":2}')) == message_key({**message('{"b": 2, "a": 1}'), "content": ""})
    assert message_key(message('{"a": 1}')) != message_key(message('{"a": 2}'))


texts = st.text("ab \n<|>é", max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, st.lists(st.integers(0, 290), max_size=5), st.booleans(), st.booleans()), max_size=5))
def test_sampled_ids_are_kept_whatever_happens(calls: list[tuple[str, list[int], bool, bool]]) -> None:
    """A client that extends, edits or repeats; every sampled id is in one segment, after the ids of its call."""
    h, messages, said = history(), list[dict[str, Any]](), list[tuple[Any, tuple[int, ...]]]()
    for text, tokens, stop, edit in calls:
        if edit:
            messages = messages[2:]
        messages.append({"role": "user", "content": text})
        before = {s.index: s.ids for s in h.segments}
        call = h.place(messages)
        assert call.prompt[: len(before.get(call.segment.index, ()))] == before.get(call.segment.index, ())
        tokens = tokens + [STOP] * stop
        reply = {"role": "assistant", "content": HUB.decode(tokens, skip_special_tokens=True)}
        said.append((call.segment, (*call.prompt, *tokens)))
        h.answer(call, tokens, reply)
        messages.append(reply)
        for s in h.segments:
            assert s.ids[: len(before.get(s.index, ()))] == before.get(s.index, ())
    assert all(segment.ids[: len(known)] == known for segment, known in said)


def test_messages_that_a_session_keeps_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in fields that no template renders. The segments that were continued least recently are given up."""
    monkeypatch.setattr("windfall.models.history.KEPT_CHARS", 100_000)
    made = history()
    first = [{"role": "user", "content": "begin"}]
    made.answer(made.place(first), ids("ok"), REPLY)
    for n in range(20):
        made.answer(made.place([{"role": "user", "content": str(n), "note": "x" * 30_000}]), ids("ok"), REPLY)
        first += [REPLY, {"role": "user", "content": "more"}]
        call = made.place(first)
        assert call.segment is made.segments[0], "it is continued all the time"
        made.answer(call, ids("ok"), REPLY)
    assert len(made.segments) == 21
    assert sum(len(message.get("note", "")) for s in made.segments for message in s.messages) == 90_000
    assert all(s.tokens for s in made.segments), "their tokens are kept"
