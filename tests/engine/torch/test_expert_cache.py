"""The engine returns, for every token of prompt and response but the last, the experts that transformers' own model
chooses for the sequence: with chunked prefills, siblings, drafts, evictions and continued responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.engines.expert_case import expected, received
from tests.support.engines.small_models import drain, engine, experts_model, requests, tokens
from windfall.engine.draft_length import DraftLength
from windfall.engine.engine_thread import MAX_EXPERT_BYTES, frame_parts, tokens_frame
from windfall.models.attention import NAME
from windfall.types import Chunk


def model(experts: int = 8) -> Any:
    made = experts_model(experts)
    made.set_attn_implementation(NAME)
    return made


@pytest.mark.parametrize(
    ("experts", "options"),
    [
        pytest.param(8, {}, id="plain"),
        pytest.param(300, {}, id="many experts"),
        pytest.param(8, {"max_rows": 9, "max_running": 4}, id="short prefills"),
        pytest.param(8, {"kv_tokens": 192}, id="evictions"),
        pytest.param(8, {"speculation": True}, id="drafts"),
    ],
)
def test_every_token_has_the_experts_of_transformers(
    options: dict[str, Any], experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLength, "choose", lambda self, *_, **__: 4)
    reference, e = experts_model(experts), engine(model(experts), experts=True, **options)
    assert e.capabilities.experts
    asked = [replace(r, max_tokens=40) for r in requests(8, temperature=0.0)]
    chunks = drain(e, asked)
    for request in asked:
        sequence = (*request.prompt, *tokens(chunks[request.id]))
        found = received(request, chunks[request.id])
        assert found.end == len(sequence) - 1 - len(request.prompt)
        rows = np.frombuffer(found.data, np.uint8 if experts < 256 else np.uint16).reshape(len(sequence) - 1, 2, 2)
        np.testing.assert_array_equal(rows, expected(reference, sequence[:-1]))
    assert e.counters.reused_tokens > 0, "siblings find their prompt in the cache"
    assert ("kv_tokens" in options) == (e.counters.evictions > 0)
    assert ("speculation" in options) == (e.counters.accepted > 0)


def test_a_continued_response_sends_only_what_is_new() -> None:
    whole = requests(1, longest=30, seed=3)[0]
    whole = replace(whole, max_tokens=20)
    chunks = drain(engine(model(), experts=True), [whole])[whole.id]
    first = received(whole, chunks[:7])
    rest = replace(whole, prompt=(*whole.prompt, *tokens(chunks[:7])), position=7, max_tokens=13,
                   experts_known=len(whole.prompt) + first.end)  # fmt: skip
    others = drain(engine(model(), experts=True), [rest])[whole.id]
    assert [c.expert_tokens for c in others] == [1] * 13
    assert received(whole, others, first).data == received(whole, chunks).data


def test_after_an_observation_its_experts_come_with_the_next_token() -> None:
    first = replace(requests(1, seed=4)[0], max_tokens=5)
    chunks = drain(engine(model(), experts=True), [first])[first.id]
    known = received(first, chunks)
    sequence = (*first.prompt, *tokens(chunks), 7, 8, 9)
    turn = replace(first, prompt=sequence, position=8, max_tokens=3, experts_known=len(first.prompt) + known.end)
    more = drain(engine(model(), experts=True), [turn])[first.id]
    assert [c.expert_tokens for c in more] == [4, 1, 1], "the last token of the turn, and three of the observation"
    sequence = (*sequence, *tokens(more))
    rows = np.frombuffer(received(first, more, known).data, np.uint8).reshape(-1, 2, 2)
    np.testing.assert_array_equal(rows, expected(experts_model(), sequence[:-1]))


def test_nothing_is_recorded_or_sent_unless_it_is_asked_for() -> None:
    e = engine(model())
    assert not e.capabilities.experts
    chunks = next(iter(drain(e, requests(1)).values()))
    frame = tokens_frame([replace(c, id="1") for c in chunks])
    assert (frame.experts, frame.expert_counts) == (b"", ())


def test_experts_of_long_prompts_are_divided_among_frames() -> None:
    def chunk(size: int) -> Chunk:
        return Chunk(id="1", position=0, tokens=(1,), logprobs=(0.0,), version=0, experts=bytes(size), expert_tokens=1)

    sizes = [MAX_EXPERT_BYTES // 2, MAX_EXPERT_BYTES // 2, 1, 2 * MAX_EXPERT_BYTES, 5]
    assert [[len(c.experts) for c in part] for part in frame_parts([chunk(n) for n in sizes])] == [
        sizes[:2], sizes[2:3], sizes[3:4], sizes[4:],
    ]  # fmt: skip
