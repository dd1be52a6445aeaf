from __future__ import annotations

import json
from pathlib import Path

from run_case import sample

from windfall.page import document
from windfall.page.samples import Sample, SampleFile, Sampler, describe
from windfall.types import Response, Task

TASK = Task(id="sums/1", prompt="1+1=")


def response(id: str, tokens: int = 4, observed: int = 0) -> Response:
    sampled = (False,) * observed + (True,) * tokens
    return Response(
        id=id, prompt=(1,), tokens=tuple(range(65, 65 + len(sampled))), logprobs=(-0.5,) * len(sampled),
        sampled=sampled, versions=tuple(3 if s else -1 for s in sampled), finish="stop", reward=1.0,
    )  # fmt: skip


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def test_half_of_the_sample_moved_if_enough_did() -> None:
    sampler = Sampler(4)
    for n in range(100):
        sampler.offer(TASK, response(f"{n}/0"), [("a", 2), ("b", 2)] if n % 2 else [("a", 4)])
    chosen = sampler.take()
    assert len(chosen) == 4
    assert sum(s.moved for s in chosen) == 2
    assert sampler.take() == []


def test_the_sample_does_not_depend_on_the_order() -> None:
    a, b = Sampler(3), Sampler(3)
    for n in range(50):
        a.offer(TASK, response(f"{n}/0"), [("a", 4)])
        b.offer(TASK, response(f"{49 - n}/0"), [("a", 4)])
    assert [s.response.id for s in a.take()] == [s.response.id for s in b.take()]


def test_no_samples_if_the_recipe_says_so() -> None:
    sampler = Sampler(0)
    sampler.offer(TASK, response("1/0"), [("a", 4)])
    assert sampler.take() == []


def test_every_token_has_its_worker_and_observations_have_none() -> None:
    s = Sample(TASK, response("1/0", tokens=5, observed=2), [("a", 2), ("b#2", 2)])  # one token is from the journal
    line = describe(s, 7, 1.0, decode)
    assert line["workers"] == [["", 2], ["journal", 1], ["a", 2], ["b#2", 2]]
    assert line["versions"] == [[-1, 2], [3, 5]]
    assert "".join(line["tokens"]) == "ABCDEFG"
    assert (line["step"], line["length"], line["moved"]) == (7, 5, True)


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
