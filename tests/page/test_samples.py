from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.support.runs.page_run import sample
from windfall.page import document
from windfall.page.samples import ResponseSampler, SampledResponse, SampleFile, describe
from windfall.types import Response, Task

TASK = Task(id="sums/1", prompt="1+1=")


def response(id: str, *workers: tuple[str, int], tokens: int = 4, observed: int = 0) -> Response:
    sampled = (False,) * observed + (True,) * tokens
    return Response(
        id=id, prompt=(1,), tokens=tuple(range(65, 65 + len(sampled))), logprobs=(-0.5,) * len(sampled),
        sampled=sampled, versions=tuple(3 if s else -1 for s in sampled), finish="stop", reward=1.0,
        workers=workers or (("a", tokens),),
    )  # fmt: skip


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def test_half_of_the_sample_moved_if_enough_did() -> None:
    sampler = ResponseSampler(4)
    for n in range(100):
        sampler.offer(TASK, response(f"{n}/0", *[("a", 2), ("b", 2)] if n % 2 else [("a", 4)]))
    chosen = sampler.take()
    assert len(chosen) == 4
    assert sum(s.moved for s in chosen) == 2
    assert sampler.take() == []


def test_the_sample_does_not_depend_on_the_order() -> None:
    a, b = ResponseSampler(3), ResponseSampler(3)
    for n in range(50):
        a.offer(TASK, response(f"{n}/0"))
        b.offer(TASK, response(f"{49 - n}/0"))
    assert [s.response.id for s in a.take()] == [s.response.id for s in b.take()]


def test_no_samples_if_the_recipe_says_so() -> None:
    sampler = ResponseSampler(0)
    sampler.offer(TASK, response("1/0"))
    assert sampler.take() == []


def test_every_token_has_its_worker_and_observations_have_none() -> None:
    s = SampledResponse(TASK, response("1/0", ("", 1), ("a", 2), ("b#2", 2), tokens=5, observed=2))
    line = describe(s, 7, 1.0, lambda role: decode)
    assert line["workers"] == [["", 2], ["journal", 1], ["a", 2], ["b#2", 2]]
    assert line["versions"] == [[-1, 2], [3, 5]]
    assert "".join(line["tokens"]) == "ABCDEFG"
    assert (line["step"], line["length"], line["moved"]) == (7, 5, True)


def test_agents_have_turns_tool_calls_and_segments() -> None:
    call = b'<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tokens = call + b"tool: 42" + b"It is 42."
    sampled = (True,) * len(call) + (False,) * 8 + (True,) * 9
    part = Response(
        id="1/0", prompt=tuple(b"user: 40+2?"), tokens=tuple(tokens), logprobs=(-0.5,) * len(tokens), sampled=sampled,
        versions=tuple(3 if s else -1 for s in sampled), finish="stop", reward=0.5, turns=2, agent=True,
        workers=(("a", len(call)), ("b", 9)),
    )  # fmt: skip
    both = replace(part, more=(replace(part, id="1/0+1", prompt=tuple(b"a summary")),), turns=4)
    s = SampledResponse(TASK, both)
    line = describe(s, 7, 1.0, lambda role: decode)
    assert not s.moved  # every turn has one worker
    assert (line["turns"], line["tools"], line["prompt"]) == (4, 2, "user: 40+2?")
    assert line["calls"] == [[0, "add", '{"a": 1}']]
    assert line["workers"] == [["a", len(call)], ["", 8], ["b", 9]]
    assert [(m["prompt"], "".join(m["tokens"])) for m in line["more"]] == [("a summary", tokens.decode())]
    assert SampledResponse(TASK, replace(part, workers=(("a", 2), ("b", len(call) + 7)))).moved


def test_the_file_stays_within_its_limit(tmp_path: Path) -> None:
    file = SampleFile(tmp_path, max_mb=0.02)
    for step in range(200):
        file.write([sample(step), sample(step, id="x")])
    assert file.path.stat().st_size < 20_000
    index = file.index()
    assert index
    assert max(entry["step"] for entry in index) >= 190
    read = file.read(index[-1]["at"])
    assert read is not None
    assert read["tokens"] == ["a", "b", "c", "d"]


def test_damaged_lines_and_wrong_places_are_no_samples(tmp_path: Path) -> None:
    file = SampleFile(tmp_path)
    assert file.index() == []
    file.write([sample(1)])
    with file.path.open("ab") as raw:
        raw.write(b"\xff\x00 not json\n" + json.dumps(sample(2)).encode() + b'\n{"step": 3, "tok')
    assert [entry["step"] for entry in file.index()] == [1, 2]
    assert file.read(5) is None
    assert file.read(-1) is None
    assert file.read(10**9) is None


def test_the_page_contains_no_markup_of_the_run() -> None:
    hostile = "</script><script>alert(1)</script><!--"
    text = document.html({"live": False, "runs": [{"name": hostile, "half": "\ud800"}]}, hostile)
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    text.encode()


def test_every_role_has_its_tokenizer_and_its_reward() -> None:
    solver = replace(response("1/0", ("a", 2), tokens=2), role="solver", rewards=(("solver", 1.0), ("verifier", 0.0)))
    both = replace(solver, more=(replace(solver, id="1/0+1", role="verifier", rewards=()),), reward=None)
    line = describe(SampledResponse(TASK, both), 7, 1.0, lambda role: lambda ids: role[0] * len(ids))
    assert (line["role"], line["tokens"]) == ("solver", ["s", "s"])
    assert [(m["role"], m["tokens"]) for m in line["more"]] == [("verifier", ["v", "v"])]
    assert (line["reward"], line["scores"][-2:]) == (0.5, [["solver", 1.0], ["verifier", 0.0]])
