"""Several choices in one answer: `n`, lists of prompts, their seeds, streams, usage and limits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from tests.support.servers.serving import TOKENIZER, Server, run, serving, until
from windfall.serve.request_fields import choice_seed

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "3+4="}]}
LONG = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}


def tokens(answer: dict[str, Any]) -> list[list[int]]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["token_ids"] for choice in answer["choices"]]


async def chat(s: Server, **more: Any) -> dict[str, Any]:
    status, body = await s.post("/v1/chat/completions", {**CHAT, **LONG, **more})
    assert status == 200, body
    return body


def test_choices_differ_and_a_seed_repeats_them() -> None:
    async def main() -> None:
        async with serving() as s:
            first, again, other = [await chat(s, n=3, seed=seed) for seed in (7, 7, 8)]
            assert tokens(first) == tokens(again)
            assert len({tuple(t) for t in tokens(first) + tokens(other)}) == 6
            assert tokens(await chat(s, seed=7))[0] == tokens(first)[0], "choice 0 is the answer without n"
            assert first["usage"]["completion_tokens"] == 36
            assert first["usage"]["prompt_tokens"] == len(first["prompt_token_ids"]), "the prompt counts once"
            seeds: list[int] = []
            submit = s.host.submit

            def record(request: Any, *a: Any, **kw: Any) -> None:
                seeds.append(request.seed)
                submit(request, *a, **kw)

            s.host.submit = record  # a tiny model may draw the same tokens from different seeds
            assert len(tokens(await chat(s, n=4))) == 4
            assert len(set(seeds)) == 4, "without a seed every choice has its own"
            greedy = await s.complete(n=2, temperature=0, **LONG)
            assert tokens(greedy)[0] == tokens(greedy)[1]
            assert s.host.requests == 0

    run(main)


def test_seeds_of_choices_are_distinct() -> None:
    seeds = [choice_seed(seed, number) for seed in range(20) for number in range(20)]
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert choice_seed(None, 0) != choice_seed(None, 0)


def test_several_prompts_are_answered_as_if_they_were_sent_alone() -> None:
    async def main() -> None:
        async with serving() as s:
            prompts = ["3+4=", TOKENIZER.encode("10-2="), "3+4=5"]
            alone = [await s.complete(p, n=2, seed=5, **LONG) for p in prompts]
            answer = await s.complete(prompts, n=2, seed=5, **LONG)
            assert tokens(answer) == [t for one in alone for t in tokens(one)]
            assert [c["text"] for c in answer["choices"]] == [c["text"] for one in alone for c in one["choices"]]
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert answer["usage"][name] == sum(one["usage"][name] for one in alone)
            ids = await s.complete([TOKENIZER.encode("3+4="), TOKENIZER.encode("10-2=")], seed=5, **LONG)
            assert tokens(ids) == [tokens(one)[0] for one in alone[:2]]

    run(main)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_of_several_choices_have_the_same_content(path: str) -> None:
    async def main() -> None:
        async with serving() as s:
            prompt = {} if "chat" in path else {"prompt": ["3+4=", "10-2="]}
            body = {**(CHAT if "chat" in path else {}), **prompt, **LONG, "n": 2, "seed": 3, "logprobs": 1}
            if "chat" in path:
                body["logprobs"] = True
            _, whole = await s.post(path, body)
            usage = {"stream_options": {"include_usage": True}}
            events = await s.stream(path, {**body, **usage})
            assert events[-1] == "[DONE]"
            assert (events[-2]["choices"], events[-2]["usage"]) == ([], whole["usage"])
            found: dict[int, list[Any]] = defaultdict(list)
            for event in events[:-2]:
                assert event["usage"] is None
                assert event["id"] == events[0]["id"]
                (choice,) = event["choices"]
                found[choice["index"]].append(choice)
            assert sorted(found) == list(range(len(whole["choices"])))
            for want in whole["choices"]:
                mine = found[want["index"]]
                ids = [id for c in mine for id in c.get("token_ids") or []]
                assert ids == want["token_ids"]
                ends = [c["finish_reason"] for c in mine]
                assert (ends[-1], set(ends[:-1])) == (want["finish_reason"], {None})
                if "chat" in path:
                    assert mine[0]["delta"]["role"] == "assistant"
                    text = "".join(c["delta"].get("content") or "" for c in mine)
                    assert text == want["message"]["content"]
                else:
                    assert "".join(c["text"] for c in mine) == want["text"]

    run(main)


def test_every_chunk_has_its_usage_if_the_client_wants_it() -> None:
    async def main() -> None:
        async with serving() as s:
            wanted = {"include_usage": True, "continuous_usage_stats": True}
            events = await s.stream("/v1/completions", {"prompt": "3+4=", **LONG, "stream_options": wanted})
            counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
            assert counts == sorted(counts)
            assert counts[-1] == 12
            plain = await s.stream("/v1/completions", {"prompt": "3+4=", **LONG})
            assert not any("usage" in event for event in plain[:-1])

    run(main)


def test_one_wrong_prompt_is_refused_before_the_stream_begins() -> None:
    async def main() -> None:
        async with serving() as s:
            for stream in (False, True):
                body = {"prompt": ["3+4=", [5] * 400], "stream": stream, **LONG, "max_tokens": 200}
                status, refused = await s.post("/v1/completions", body)
                assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
                await until(lambda: s.host.requests == 0, "the other prompt is canceled")
            for prompt in ([], ["3+4=", ""], ["3+4=", 5], [[]], [[5], [-1]], [None, "3"], [[5, "3"]]):
                status, refused = await s.post("/v1/completions", {"prompt": prompt})
                assert (status, refused["error"]["param"].partition("[")[0]) == (400, "prompt"), prompt

    run(main)


def test_every_choice_counts_as_a_request() -> None:
    async def main() -> None:
        async with serving(max_requests=4) as s:
            slow = {"prompt": "3+4=", "max_tokens": 240, "ignore_eos": True}
            for more in ({"n": 5}, {"n": 3, "prompt": ["3", "4"]}, {"prompt": ["3"] * 5}):
                status, refused = await s.post("/v1/completions", {**slow, **more})
                assert (status, refused["error"]["param"]) == (400, "n"), more
            running = asyncio.create_task(s.post("/v1/completions", {**slow, "n": 3}))
            await until(lambda: s.host.requests == 3, "three choices run")
            status, refused = await s.post("/v1/completions", {**slow, "n": 2})
            assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")
            assert (await s.post("/v1/completions", {**slow, "max_tokens": 2}))[0] == 200
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await until(lambda: s.host.requests == 0, "all choices are canceled with their client")
            assert len(tokens(await s.complete(n=4, **LONG))) == 4, "nothing is counted any more"
            for n in (0, -1, 1.0, "2", True, [2], 10**30):
                status, refused = await s.post("/v1/completions", {"prompt": "3+4=", "n": n})
                assert (status, refused["error"]["param"]) == (400, "n"), n

    run(main)


def test_a_failed_choice_ends_the_stream_with_an_error() -> None:
    async def main() -> None:
        async with serving() as s:
            body = {"prompt": "3+4=", "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 3}
            async with s.http.post(s.url + "/v1/completions", json=body) as answer:
                await answer.content.readline()
                s.host.end_requests("the requests were dropped")
                rest = (await asyncio.wait_for(answer.content.read(), 240)).decode()
            assert "the requests were dropped" in rest.strip().rpartition("\n\n")[2]
            assert "[DONE]" not in rest
            await until(lambda: s.host.requests == 0, "all choices have ended")

    run(main)


def test_list_of_long_prompts_is_not_refused_for_its_size() -> None:
    """More token ids in one body than a context has, as evaluation harnesses send them."""

    async def main() -> None:
        async with serving() as s:
            prompts = [[5] * 200] * 250
            status, answer = await s.post("/v1/completions", {"prompt": prompts, "max_tokens": 1, "n": 2})
            assert (status, answer["error"]["param"]) == (400, "n"), "it was read, and has too many choices"

    run(main)
