"""What recipes of tinker-cookbook read from the Hugging Face hub, made up: data sets with the columns of the real ones,
and a small model with the special tokens of Qwen's chat template, which answers questions with a digit in a box.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
WORDS = ["apples", "pears", "coins", "stones", "books", "lamps", "boats", "kites"]
NAMES = ["Ann", "Ben", "Cem", "Dana", "Eli", "Fay", "Gus", "Hana"]
CONTEXT = 4096
STEPS = 120
"""Updates of the model: enough that most answers are a box and end."""

Row = dict[str, Any]


def question(rng: random.Random) -> tuple[str, int]:
    """A question, and its answer from 1 to 4."""
    answer = rng.randint(1, 4)
    less = rng.randint(1, 5)
    name, thing = rng.choice(NAMES), rng.choice(WORDS)
    return f"{name} has {answer + less} {thing} and gives {less} away. How many {thing} are left?", answer


def _conversation(rng: random.Random) -> list[Row]:
    asked, answer = question(rng)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": f"\\boxed{{{answer}}}"}]


def _rows(count: int, rng: random.Random, row: Any) -> list[Row]:
    return [row(n, *question(rng)) for n in range(count)]


def write_data_sets(folder: Path) -> None:
    """The data sets of the recipes, in a folder that hub_stand_in serves."""
    rng = random.Random(0)
    box = "\\boxed{{{}}}".format

    def chat(n: int, asked: str, answer: int) -> Row:
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": box(answer)}]
        return {"prompt": asked, "prompt_id": str(n), "messages": messages, "category": "Closed QA"}

    def math(n: int, asked: str, answer: int) -> Row:
        return {"problem": asked, "solution": f"It is {box(answer)}.", "answer": str(answer)}

    def preference(n: int, asked: str, answer: int) -> Row:
        other = answer + (n < 64)  # recipes skip pairs of equal texts
        pair = (f"\n\nHuman: {asked}\n\nAssistant: {box(a)}" for a in (answer, other))
        return dict(zip(("chosen", "rejected"), pair, strict=True))

    def choice(n: int, asked: str, answer: int) -> Row:
        choices = {"label": list("ABCD"), "text": [str(a) for a in range(1, 5)]}
        details = {"level": "L3", "task": "counting", "subtask": "counting"}
        kind = {"domain": "Chemistry", "type": "mcq-4-choices", "details": details}
        return kind | {"question": asked, "choices": choices, "answerKey": "ABCD"[answer - 1]}

    def gsm8k(n: int, asked: str, answer: int) -> Row:
        return {"question": asked, "answer": f"We take away.\n#### {answer}"}

    def spoken(n: int, asked: str, answer: int) -> Row:
        said = [{"from": "human", "value": asked}, {"from": "gpt", "value": box(answer)}]
        return {"conversations": said, "difficulty": 1, "source": "made up", "domain": "math"}

    def helpful(n: int, asked: str, answer: int) -> Row:
        better = 1 - 2 * (n % 2) if n < 64 else 0  # recipes skip pairs that are equally good
        pair = {"response1": box(answer), "response2": box(answer + 1), "overall_preference": better}
        return {"context": [{"role": "user", "content": asked}], **pair}

    def chosen(n: int, asked: str, answer: int) -> Row:
        return {"instruction": asked, "chosen_response": box(answer), "rejected_response": box(answer + 1)}

    def deep(n: int, asked: str, answer: int) -> Row:
        return {"question": asked, "final_answer": str(answer), "difficulty": 1.0, "topic": "Arithmetic"}

    def sentence(n: int, asked: str, answer: int) -> Row:
        return {"text": f" {asked} {box(answer)} \n"}

    whole = "default"
    sets: dict[str, dict[str, dict[str, list[Row]]]] = {
        "HuggingFaceH4/no_robots": {whole: {"train": _rows(256, rng, chat), "test": _rows(128, rng, chat)}},
        "allenai/tulu-3-sft-mixture": {whole: {"train": _rows(1100, rng, chat)}},
        "openai/gsm8k": {"main": {"train": _rows(32, rng, gsm8k), "test": _rows(8, rng, gsm8k)}},
        "HuggingFaceH4/MATH-500": {whole: {"test": _rows(8, rng, math)}},
        "EleutherAI/hendrycks_math": {
            name: {"train": _rows(24, rng, math), "test": _rows(8, rng, math)} for name in ("algebra", "geometry")
        },
        "POLARIS-Project/Polaris-Dataset-53K": {whole: {"train": _rows(48, rng, math)}},
        "zwhe99/DeepMath-103K": {whole: {"train": _rows(48, rng, deep)}},
        "Anthropic/hh-rlhf": {whole: {"train": _rows(64, rng, preference), "test": _rows(1024, rng, preference)}},
        "nvidia/HelpSteer3": {
            "preference": {"train": _rows(64, rng, helpful), "validation": _rows(1024, rng, helpful)}
        },
        "argilla/ultrafeedback-binarized-preferences": {whole: {"train": _rows(1100, rng, chosen)}},
        "open-thoughts/OpenThoughts3-1.2M": {whole: {"train": _rows(64, rng, spoken)}},
        "hicai-zju/SciKnowEval": {whole: {"test": _rows(64, rng, choice)}},
        "Salesforce/wikitext": {"wikitext-103-raw-v1": {"train": _rows(6000, rng, sentence)}},
    }
    for name, configurations in sets.items():
        _write_data_set(folder / "datasets" / name, configurations)


def _write_data_set(folder: Path, configurations: dict[str, dict[str, list[Row]]]) -> None:
    lines = ["---", "configs:"]
    for name, splits in configurations.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, rows in splits.items():
            _write_lines(folder / name / f"{split}.jsonl", rows)
            lines += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_model(folder: Path, seed: int = 0) -> None:
    """A Qwen3 of two layers, trained for seconds on the CPU, in Hugging Face format."""
    texts = _texts(random.Random(seed))
    tokenizer = _tokenizer(texts)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        )
    )  # fmt: skip
    _train(model, [tokenizer.encode(text) for text in texts])
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train(model: Any, texts: Sequence[list[int]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        batch = [texts[(step * 16 + n) % len(texts)] for n in range(16)]
        longest = max(map(len, batch))
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in batch])
        labels = torch.tensor([ids + [-100] * (longest - len(ids)) for ids in batch])
        model(input_ids=ids, attention_mask=(labels >= 0).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _texts(rng: random.Random) -> list[str]:
    """Conversations in the templates of the renderers that recipes use. Answers are drawn: they are right at times."""
    out = list[str]()
    for n in range(STEPS * 16):
        asked, answer = question(rng)[0], f"\\boxed{{{rng.randint(1, 4)}}}"
        thought = ("<think>\n\n</think>\n\n", "<think>\nWe take away.\n</think>\n\n")[n % 2]
        chat = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{thought}{answer}<|im_end|>\n"
        out.append(chat if n % 3 else f"User: {asked}\n\nAssistant: {answer}\n\nUser:")
    return out


def _tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level BPE, with the special tokens of Qwen."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens(list(SPECIAL))
    inner.add_tokens(list(MARKS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def write_files(folder: Path) -> None:
    """Files that recipes read: conversations, tasks with rubrics, and markets to forecast."""
    rng = random.Random(1)
    _write_lines(folder / "conversations.jsonl", [{"messages": _conversation(rng)} for _ in range(24)])
    _write_lines(folder / "rubrics.jsonl", [_rubric(rng) for _ in range(16)])
    with (folder / "markets.csv").open("w", newline="") as file:
        rows = [_market(n) for n in range(40)]
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def _write_lines(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _rubric(rng: random.Random) -> Row:
    asked, answer = question(rng)
    rubric = {
        "rubric_str": f"Is the answer {answer}?",
        "extraction_regex": r"\{(\d)\}",
        "grader_output_format_instruction": "Answer with a number.",
    }
    return {"convo": [{"role": "user", "content": asked}], "rubric_items": [rubric]}


def _market(n: int) -> Row:
    """A market of October 2025; the last ones are open after the 20th."""
    day = 1 + n * 27 // 40
    market = f"{NAMES[n % 8]} wins"
    return {
        "submission_id": n, "event_ticker": f"EVENT-{n}", "title": f"Game {n}", "category": "Sports",
        "snapshot_time": f"2025-10-{day:02}T00:00:00Z", "close_time": f"2025-10-{day + 1:02}T00:00:00Z",
        "market_outcome": json.dumps({market: n % 2}), "markets": json.dumps([market]),
        "sources": json.dumps([{"title": "News", "summary": "They trained.", "ranking": 1}]),
    }  # fmt: skip
