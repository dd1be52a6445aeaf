"""Train the tiny base model of the demo: `python scripts/make_tiny_model.py OUT_FOLDER`.

It is a Llama of 0.8 M parameters with one token per character, trained from scratch on worked arithmetic chains, in
which a share of the steps is wrong. So the model knows the method and makes as many mistakes as its training data: at
temperature 1 it solves a minority of the tasks, but the correct step is the most likely one, so reinforcement learning
can improve it. Training takes minutes on a GPU and an hour on two CPU cores; the progress line shows the loss and the
share of tasks solved.
"""

from __future__ import annotations

import argparse
import copy
import random
import string
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from windfall.envs.arithmetic import Arithmetic, draw

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


def worked_response(chain: list[str], slip: float = 0.0, rng: random.Random | None = None) -> str:
    """The response that solves the chain. Each step is wrong with probability `slip`; later steps build on the error.

    >>> worked_response(['37', '+58', '-12'])
    '37+58=95;95-12=83;#83'
    """
    rng = rng or random.Random(0)
    running, steps = int(chain[0]), []
    for term in chain[1:]:
        result = running + int(term)
        if rng.random() < slip:
            result = rng.randint(0, 99)
        steps.append(f"{running}{term}={result};")
        running = result
    return "".join(steps) + f"#{running}"


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline."""
    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    vocab = {t: i for i, t in enumerate([PAD, BOS, EOS, *characters])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS, model_max_length=512
    )


def fresh(vocab: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def batch(tok: PreTrainedTokenizerFast, rng: random.Random, size: int, longest: int, slip: float):
    rows = []
    for _ in range(size):
        chain = draw(rng, rng.randint(1, longest))
        prompt = tok.encode("".join(chain) + "=")
        rows.append((prompt, [*tok.encode(worked_response(chain, slip, rng)), tok.eos_token_id]))
    width = max(len(p) + len(r) for p, r in rows)
    ids = torch.zeros(size, width, dtype=torch.long)
    labels = torch.full((size, width), -100)
    for i, (p, r) in enumerate(rows):
        ids[i, : len(p) + len(r)] = torch.tensor(p + r)
        labels[i, len(p) : len(p) + len(r)] = torch.tensor(r)
    return ids, labels


@torch.no_grad()
def solved(model: Any, tok: PreTrainedTokenizerFast, temperature: float, tasks: int = 256) -> float:
    """Share of the demo's tasks that are solved."""
    model.eval()
    tasks_ = [Arithmetic(seed=7).task(i) for i in range(tasks)]
    tok.padding_side = "left"
    inputs = tok([str(t.prompt) for t in tasks_], return_tensors="pt", padding=True).to(model.device)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(**inputs, max_new_tokens=160, **how)
    right = 0
    for task, row in zip(tasks_, out[:, inputs["input_ids"].shape[1] :], strict=True):
        right += str(tok.decode(row, skip_special_tokens=True)).rpartition("#")[2] == str(task.answer)
    model.train()
    return right / tasks


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=8000)
    p.add_argument("--slip", type=float, default=0.25)
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    rng, tok = random.Random(args.seed), tokenizer()
    model = fresh(len(tok)).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, args.steps, pct_start=0.05)
    start = time.time()
    for step in range(1, args.steps + 1):
        longest = min(2 + step * 24 // args.steps, 16)
        slip = args.slip if step > args.steps * 0.7 else 0.02  # first learn the method, then the mistakes
        ids, labels = (x.to(args.device) for x in batch(tok, rng, 128, longest, slip))
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 1000 == 0:
            rates = f"solved {solved(model, tok, 1.0):.2f} sampled, {solved(model, tok, 0.0):.2f} greedy"
            print(f"step {step}/{args.steps} loss {loss.item():.3f} {rates} {time.time() - start:.0f} s", flush=True)
    copy.deepcopy(model).half().save_pretrained(args.out)
    tok.padding_side = "right"
    tok.save_pretrained(args.out)


if __name__ == "__main__":
    main()
