"""Print the table of model families: the result of windfall's self-test for each, and whether it is correct.

    python scripts/families.py                      # all decoders of transformers, and variants; about ten minutes
    python scripts/families.py gemma2 granite       # only these families and their variants
    python scripts/families.py --verify             # also run a longer, independent test; exit status 1 if a family
                                                    # is accepted but wrong
    python scripts/families.py --out docs/models.md # write the table into this file, between its two markers

The self-test uses one small random model per family. `--verify` uses others and compares more
thoroughly: greedy tokens with a full forward pass at every length, siblings, cut and preempted responses, and every
weight's gradient with finite differences of the loss in float64.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from model_families import configuration, families

from windfall.engine.selftest import judge
from windfall.engine.selftest.small_model import build_small_model
from windfall.engine.torch.engine import TorchEngine
from windfall.errors import WindfallError
from windfall.models import attention
from windfall.trainer import selftest
from windfall.trainer.model.gradients import Gradients, trained
from windfall.trainer.model.logprobs import Learner
from windfall.types import Request, Sampling

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
NATS, GRADIENT, TIE = 1e-3, 3e-2, 1e-3
ROUNDINGS = 4.0
"""A difference above NATS is accepted up to this many times transformers' own rounding error."""
STEPS = (1e-3, 1e-4, 1e-2)
"""Step sizes of finite differences. Norms round to float32 even in a float64 model, so smaller steps are useless."""


@dataclass(kw_only=True, slots=True)
class Row:
    name: str
    engine: str = ""
    trainer: str = ""
    deterministic: str = ""
    verified: str = ""
    engine_ok: bool = False
    trainer_ok: bool = False

    def cells(self) -> list[str]:
        return [self.name, self.engine, self.trainer, self.deterministic, self.verified]


def row_of(name: str, kind: str, fields: dict[str, Any], longest: int) -> Row:
    """The results of the same functions that the commands call."""
    row = Row(name=name)
    try:
        found = selftest.judge_trainer(configuration(kind, fields), device="cpu", longest=longest)
        row.trainer, row.trainer_ok = f"{found.nats:.0e}, {found.gradient:.0e}", True
    except WindfallError as e:
        row.trainer = reason(e)
    try:
        config = configuration(kind, fields)
        row.engine = f"{judge.judge_engine(config, TorchEngine, device='cpu', longest=longest).nats:.0e}"
        row.engine_ok = True
    except WindfallError as e:
        row.engine = reason(e)
    return row


def deterministic(made: Any, longest: int) -> str:
    if judge.neighbor_dependence(made):
        return "refused: shapes depend on tokens"
    same = judge.batch_invariant(made, partial(TorchEngine, deterministic=True), longest=longest)
    return "yes" if same else "refused: bits differ"


def reason(e: WindfallError) -> str:
    """The reason of a refusal, short enough for a table."""
    what = e.what.partition(" as transformers does: ")[2] or e.what.partition(": ")[2]
    return f"refused: {what.partition('; rounding')[0].partition(', which is not')[0][:100]}"


# The longer test. It shares only the small configuration with the self-test.


def verify(config: Any, row: Row, longest: int) -> str:
    try:
        wrong = faults(config, row, longest)
    except Exception as e:  # fault boundary: a model's code; a failure counts as wrong
        wrong = [f"{type(e).__name__}: {str(e).partition(chr(10))[0][:80]}"]
    return f"WRONG: {'; '.join(wrong)}" if wrong else "exact"


def faults(config: Any, row: Row, longest: int) -> list[str]:
    torch.manual_seed(11)
    how: dict[str, Any] = {"dtype": torch.float32}
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", **how).eval()
    for p in plain.parameters():
        p.data.add_(torch.randn_like(p) * (0.12 if p.dim() > 1 else 0.2))
    ours: Any = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=attention.NAME, **how
    ).eval()  # fmt: skip
    ours.load_state_dict(plain.state_dict())
    wrong = [*(engine_faults(plain, ours, longest) if row.engine_ok else ())]
    return wrong + (gradient_faults(plain, ours) if row.trainer_ok else [])


@torch.no_grad()
def engine_faults(plain: Any, ours: Any, longest: int) -> list[str]:
    rng, vocabulary = np.random.default_rng(5), plain.get_input_embeddings().num_embeddings
    prompts = [tuple(int(t) for t in rng.integers(3, vocabulary, n)) for n in (1, 9, 30, 30, 47, 3)]
    prompts[3] = prompts[2]
    asked = [
        Request(id=str(i), prompt=p, seed=i, max_tokens=28, sampling=Sampling(temperature=0.0 if i % 2 else 0.7))
        for i, p in enumerate(prompts)
    ]
    made = drain(TorchEngine(ours, kv_tokens=1024, max_running=8, max_rows=32), asked)
    crowded = drain(TorchEngine(ours, kv_tokens=96, max_running=8, max_rows=64), asked[:2] + asked[5:])
    found: list[str] = []
    for r in asked:
        for label, (tokens, logprobs) in (("together", made[r.id]), ("preempted", crowded.get(r.id, ([], [])))):
            found += at_every_length(plain, r, tokens, logprobs, label)
        for cut in (1, 13, 22) if r.id in "02" else ():
            so_far = tuple(made[r.id][0][:cut])
            rest = replace(r, prompt=r.prompt + so_far, position=cut, max_tokens=28 - cut)
            tokens, logprobs = drain(TorchEngine(ours, kv_tokens=256, max_rows=16), [rest])[r.id]
            found += at_every_length(plain, rest, tokens[:2], logprobs[:2], f"cut at {cut}")
    return found[:1]


def at_every_length(plain: Any, r: Request, tokens: list[int], logprobs: list[float], label: str) -> list[str]:
    """Compare with a full forward pass of transformers at each length, without a cache."""
    t = r.sampling.temperature or 1.0
    for n in range(0, len(tokens), 3):
        token, logprob = tokens[n], logprobs[n]
        ids = torch.tensor([[*r.prompt, *tokens[:n]]])
        theirs = torch.log_softmax(plain(input_ids=ids, use_cache=False).logits[0, -1].float() / t, -1)
        off = abs(float(theirs[token]) - logprob)
        if not off < NATS and not off < ROUNDINGS * rounding(plain, ids, theirs, t):
            return [f"{label}: token {n} of {len(ids[0])} off by {off:.2g} nats"]
        if r.sampling.temperature == 0.0 and float(theirs.max() - theirs[token]) > TIE:
            return [f"{label}: token {n} is not the most likely one"]
    return []


def rounding(plain: Any, ids: Any, theirs: Any, t: float) -> float:
    """The difference between transformers' own float32 and float64 results. Some configurations amplify rounding: by
    default, Granite does not scale its attention scores by the head size."""
    exact = copy.deepcopy(plain).double()
    logits = exact(input_ids=ids, use_cache=False).logits[0, -1].double()
    return float((torch.log_softmax(logits / t, -1) - theirs).abs().max())


def drain(engine: Any, asked: list[Request]) -> dict[str, tuple[list[int], list[float]]]:
    out: dict[str, tuple[list[int], list[float]]] = {r.id: ([], []) for r in asked}
    for r in asked:
        engine.add(r)
    while len(engine):
        for chunk in engine.step():
            out[chunk.id][0].extend(chunk.tokens)
            out[chunk.id][1].extend(chunk.logprobs)
        engine.check()
    return out


def gradient_faults(plain: Any, ours: Any) -> list[str]:
    """Compare the trainer's gradient along a random direction in each weight with a finite difference in float64."""
    rng, vocabulary = np.random.default_rng(6), plain.get_input_embeddings().num_embeddings
    samples = [selftest.random_sample(rng, vocabulary, n, first) for n, first in ((28, 5), (14, 1))]
    weights = [rng.normal(size=len(s.targets)) for s in samples]
    gradients = Gradients(trained(ours))
    learner = Learner(ours, gradients, say=lambda line: None)
    gradients.zero()
    learner.learn(samples, 1.0, lambda a, b, logp, entropy: np.concatenate(weights[a:b]))
    exact = plain.double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # the others do not support float64

    @torch.no_grad()
    def loss() -> float:
        total = 0.0
        for s, w in zip(samples, weights, strict=True):
            logits = exact(input_ids=torch.tensor([s.ids]), use_cache=False).logits[0].double()
            at = torch.tensor(s.targets)
            logp = torch.log_softmax(logits[at - 1], -1).gather(-1, torch.tensor(s.ids)[at][:, None])[:, 0]
            total -= float((torch.tensor(w) * logp).sum())
        return total

    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in ours.named_parameters()}
    whole = float(torch.stack([g.norm() for g in grads.values()]).norm())
    found: list[tuple[float, str]] = []
    for name, p in some(exact):
        g = grads[name].double()
        along = g / g.norm() if float(g.norm()) > 1e-6 * whole else torch.randn_like(p)
        along = along + 0.5 * torch.randn_like(along) * float(along.norm()) / along.numel() ** 0.5
        mine, off = float((g * along).sum()), float("inf")
        for step in STEPS:  # a step that routes a token to another expert gives no slope
            p.data.add_(step * along)
            high = loss()
            p.data.sub_(2 * step * along)
            slope = (high - loss()) / (2 * step)
            p.data.add_(step * along)
            size = max(abs(mine), abs(slope), 1e-3 * whole * float(along.norm()))
            off = min(off, abs(mine - slope) / size)
            if off < GRADIENT:
                break
        found.append((off, name))
    by, name = max(found)
    if not by < GRADIENT and routes(ours):
        by, name = autograd_apart(exact, samples, weights, grads, whole)
    return [f"gradient of {name} off by {by:.2g}"] if not by < GRADIENT else []


def some(model: Any) -> list[tuple[str, Any]]:
    """Every kind of weight twice: from its first layer and from its last."""
    kinds: dict[str, list[tuple[str, Any]]] = {}
    for name, p in model.named_parameters():
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append((name, p))
    return [one for same in kinds.values() for one in dict([same[0], same[-1]]).items()]


def routes(model: Any) -> bool:
    """Whether the model routes tokens to experts. Then the loss jumps where a token changes its expert, and a finite
    difference may not be the slope."""
    vocabulary = model.get_input_embeddings().num_embeddings
    return (
        judge.neighbor_dependence(cast(Any, SimpleNamespace(model=model, vocabulary=vocabulary, device="cpu")))
        is not None
    )


def autograd_apart(exact: Any, samples: Any, weights: Any, grads: dict[str, Any], whole: float) -> tuple[float, str]:
    """Compare each weight's gradient with transformers' own in float64."""
    exact.zero_grad()
    for s, w in zip(samples, weights, strict=True):
        at = torch.tensor(s.targets)
        logp = torch.log_softmax(exact(input_ids=torch.tensor([s.ids]), use_cache=False).logits[0].double()[at - 1], -1)
        (-(torch.tensor(w) * logp.gather(-1, torch.tensor(s.ids)[at][:, None])[:, 0]).sum()).backward()
    both = [(n, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in exact.named_parameters()]
    return max((float((grads[n] - g).norm()) / max(float(g.norm()), 1e-3 * whole), n) for n, g in both)


def quiet() -> None:
    """Set up a process that tests families."""
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)


def one(case: tuple[str, str, dict[str, Any], int], *, verified: bool) -> tuple[Row, float]:
    """The row of one family, and the seconds it took."""
    name, kind, fields, longest = case
    began = time.monotonic()
    row = row_of(name, kind, fields, longest)
    if row.engine_ok or row.trainer_ok:
        made = build_small_model(configuration(kind, fields), None, longest=longest, device="cpu", seed=0)
        row.deterministic = deterministic(made, longest) if row.engine_ok else ""
        row.verified = verify(made.config, row, longest) if verified else ""
    return row, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FAMILY")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [case for case in families() if not options.names or {case[0], case[1]} & set(options.names)]
    rows: list[Row] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), initializer=quiet) as pool:
        for row, took_s in pool.map(partial(one, verified=options.verify), cases):
            rows.append(row)
            print(f"{took_s:5.1f} s  " + " | ".join(row.cells()), flush=True)
    if options.names and not rows:
        raise SystemExit(f"no such family: {', '.join(options.names)}")
    table = markdown(rows)
    print(table)
    if options.out:
        text = options.out.read_text()
        head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        options.out.write_text(f"{head}\n{table}\n{tail}")
    wrong = [r.name for r in rows if r.verified.startswith("WRONG")]
    both = sum(r.engine_ok and r.trainer_ok for r in rows)
    print(f"{len(rows)} families: {both} can be trained, {len(wrong)} accepted and wrong {wrong or ''}")
    return 1 if wrong else 0


def markdown(rows: list[Row]) -> str:
    head = ["family", "engine: nats", "trainer: nats, gradient", "deterministic", "verified"]
    lines = [f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *(r.cells() for r in rows))]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
