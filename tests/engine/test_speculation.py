"""Speculation changes how many tokens a step gives, and which only by rounding, as another batch does: windfall's
engines generate the same with drafts that are mostly right, often right and wrong, whatever else happens. Siblings on
other workers, whose texts an engine remembers, give the right drafts; the widths are random."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.support.engines.gpu_case import graph_engine
from tests.support.engines.small_models import MODELS, VOCABULARY, drain, engine, logprobs, tokens
from tests.support.quick_cases import quick_cases
from windfall.engine.cuda import texts
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.cuda.host_state import STOPS
from windfall.engine.draft_length import DraftLength
from windfall.engine.paged import PagedEngine
from windfall.types import Chunk, Request, Sampling

pytestmark = pytest.mark.usefixtures("any_width")
SAMPLINGS = [Sampling(temperature=t) for t in (0.0, 0.3, 1.0)] + [Sampling(temperature=0.8, top_k=20, top_p=0.9)]
ROOMY = {"kv_tokens": 4096, "max_running": 12, "max_rows": 256}
KIND_NAMES = ["deterministic", "torch", "cuda"]
KINDS = pytest.mark.parametrize("kind", KIND_NAMES)
MODELS_AND_KINDS = pytest.mark.parametrize(
    ("plain", "kind"),
    quick_cases(
        product(MODELS, KIND_NAMES),
        quick=[("mistral-window", "deterministic"), ("llama", "torch"), ("mistral-window", "cuda")],
    ),
    indirect=["plain"],
)


def build(kind: str, model: Any, **options: Any) -> PagedEngine:
    if kind == "cuda":
        return graph_engine(copy.deepcopy(model), **{**ROOMY, **options})
    return engine(model, **{**ROOMY, **options}, deterministic=kind == "deterministic")


def groups(seed: int) -> list[Request]:
    """Three groups of three, and one that is alone."""
    rng, out = random.Random(seed), []
    for g in range(4):
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 30)))
        how = rng.choice(SAMPLINGS)
        for n in range(3 if g < 3 else 1):
            out.append(
                Request(
                    id=f"{g}/{n}",
                    prompt=prompt,
                    seed=rng.randrange(2**63),
                    max_tokens=rng.randint(1, 50),
                    sampling=how,
                    group=str(g) if g < 3 else "",
                )
            )
    return out


def remember(e: PagedEngine, r: Request, said: list[int], rng: random.Random) -> None:
    """What a sibling elsewhere has said, in which some tokens differ."""
    wrong = [rng.randrange(VOCABULARY) if rng.random() < 0.1 else t for t in said]
    e.remember(r.group or r.id, f"{r.id} elsewhere", 0, wrong)


def run(
    e: PagedEngine, asked: list[Request], answers: dict[str, list[Chunk]], rng: random.Random
) -> dict[str, list[Chunk]]:
    """Add the requests at random times. Some are canceled, and the weights are swapped for the same ones."""
    out: dict[str, list[Chunk]] = {}
    waiting = list(asked)
    while waiting or len(e):
        if waiting and rng.random() < 0.5:
            r = waiting.pop(0)
            remember(e, r, tokens(answers[r.id]), rng)
            e.add(r)
        elif rng.random() < 0.03:
            e.swap(e.version + 1)
        elif rng.random() < 0.03:
            e.sleep()
        elif rng.random() < 0.05:
            id = rng.choice(asked).id
            e.cancel(id)
            e.add(replace(next(r for r in asked if r.id == id), id=f"{id} again"))
            e.cancel(f"{id} again")
            if id not in [r.id for r in waiting]:
                out.pop(id, None)
                waiting.append(next(r for r in asked if r.id == id))
        for chunk in e.step():
            out.setdefault(chunk.id, []).append(chunk)
        e.check()
    return out


def same(kind: str, asked: list[Request], one: dict[str, list[Chunk]], two: dict[str, list[Chunk]]) -> None:
    """All tokens are the same; bit for bit in deterministic mode. Otherwise a token may change where the random number
    is within rounding of a boundary: rare, as without speculation."""
    changed = 0
    for r in asked:
        a, b = tokens(one[r.id]), tokens(two[r.id])
        if kind == "deterministic":
            assert a == b
            assert logprobs(one[r.id]) == logprobs(two[r.id])
            continue
        n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        changed += a != b
        assert logprobs(one[r.id])[:n] == pytest.approx(logprobs(two[r.id])[:n], abs=1e-4)
    assert changed <= 1


@pytest.mark.parametrize(
    ("plain", "kind", "seed"),  # every pair of values without qwen3
    quick_cases(
        product(MODELS, KIND_NAMES, [0, 1]),
        quick=[
            ("llama", "deterministic", 0), ("llama", "torch", 1), ("llama", "cuda", 0),
            ("mistral-window", "deterministic", 1), ("mistral-window", "torch", 0), ("mistral-window", "cuda", 1),
        ],
    ),
    indirect=["plain"],
)  # fmt: skip
def test_random_runs_generate_the_same_tokens(model: Any, kind: str, seed: int) -> None:
    asked, rng = groups(seed), random.Random(seed)
    answers = drain(build(kind, model), asked)
    said = [t for chunks in answers.values() for t in tokens(chunks)]
    # With more stop tokens than the device checks, it generates beyond the end of a response.
    stop = frozenset({rng.choice(said), *(rng.sample(range(VOCABULARY), STOPS) if seed else ())})
    asked = [replace(r, stop=stop) if n % 2 else r for n, r in enumerate(asked)]
    expected = drain(build(kind, model), asked)
    e = build(kind, model, speculation=True)
    same(kind, asked, run(e, asked, answers, rng), expected)
    assert e.counters.accepted > 20
    assert e.counters.drafted > e.counters.accepted


@MODELS_AND_KINDS
def test_evicted_responses_generate_the_same_tokens(model: Any, kind: str) -> None:
    asked = [replace(r, prompt=r.prompt[:6], max_tokens=60) for r in groups(5)]
    answers = drain(build(kind, model), asked)
    e = build(kind, model, speculation=True, kv_tokens=224, max_rows=80)
    rng = random.Random(5)
    for r in asked:
        remember(e, r, tokens(answers[r.id]), rng)
    same(kind, asked, drain(e, asked), answers)
    assert e.counters.evictions > 0
    assert e.counters.accepted > 50


@MODELS_AND_KINDS
def test_right_drafts_need_fewer_steps(model: Any, kind: str) -> None:
    """A sibling that said the same, at the same temperature, by the same seed: every draft is right."""
    request = Request(id="1", prompt=tuple(range(3, 9)), seed=4, max_tokens=80, group="g")
    e = build(kind, model, speculation=True)
    plain = drain(build(kind, model), [request])["1"]
    assert tokens(drain(e, [request])["1"]) == tokens(plain)
    before = e.counters
    assert before.accepted < 20
    again = drain(e, [replace(request, id="2")])["2"]
    assert tokens(again) == tokens(plain)
    after = e.counters
    assert after.accepted - before.accepted > 40
    assert after.accepted - before.accepted == after.drafted - before.drafted
    if kind != "cuda":  # a launch of that engine has several steps
        assert after.steps - before.steps < 40
        assert len(again) < 40
        assert min(after.decode_s - before.decode_s, after.undrafted_s - before.undrafted_s) > 0


@KINDS
@pytest.mark.parametrize("plain", ["llama"], indirect=True)
def test_only_launches_without_a_prefill_are_measured(model: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A width counts as tried in the launches that are measured, and in no others."""
    launched, measured = list[tuple[int, int]](), list[tuple[int, int]]()
    monkeypatch.setattr(DraftLength, "launched", lambda self, *key: launched.append(key))
    monkeypatch.setattr(DraftLength, "observe_step", lambda self, *key: measured.append(key[:2]) or 0.0)
    e = build(kind, model, speculation=True)
    waiting = groups(2)
    for r in waiting[:3]:
        e.add(r)
    for r in waiting[3:]:  # a launch with a prefill in every turn
        e.step()
        e.add(r)
    e.step()
    assert not launched
    drain(e)
    assert launched == measured
    assert len({width for _, width in launched}) > 2


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
def test_response_that_began_without_a_text_gets_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are texts for two of four responses. When the first two have ended, the others get texts, which have all
    that they have said."""
    monkeypatch.setattr(texts, "MAX_TOKENS", 2 * 130)
    prompt = tuple(range(3, 9))
    asked = [Request(id=str(n), prompt=prompt, seed=n, max_tokens=20 if n < 2 else 120, group="g") for n in range(4)]
    plain = drain(build("cuda", model), asked)
    e = build("cuda", model, speculation=True, text_tokens=128, max_running=4, burst=2)
    assert isinstance(e, GraphEngine)
    for r in asked:
        e.add(r)
    chunks = [*e.step(), *e.step()]
    assert e._texts is not None
    assert list(e._texts.without) == ["2", "3"]
    rest = drain(e)
    for r in asked:
        assert tokens([c for c in chunks if c.id == r.id] + rest.get(r.id, [])) == tokens(plain[r.id])
    assert not e._texts.without
    on_device = e._device.texts
    assert on_device is not None
    found = [on_device.tokens[row, : on_device.length[row]].tolist() for row in range(2)]
    assert sorted(found) == sorted([*prompt, *tokens(plain[id])] for id in ("2", "3"))


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
def test_engine_that_does_not_speculate_remembers_nothing(model: Any) -> None:
    for kind in ("torch", "cuda"):
        e = build(kind, model)
        e.remember("g", "1", 0, [1, 2, 3])
        drain(e, groups(1))
        assert (e.counters.drafted, e.counters.accepted) == (0, 0)
