"""Are tokens trained with the experts that the engines recorded? For a run whose processes are killed (soak.py).

    python benchmarks/kills/soak.py --experts --kills 20 --controller 2 --trainer 2 --run 1

soak.py starts the run with this file in all its processes (`variables`): the trainer then writes down, for every sample
that it trains on, which experts its own pass chose for each token. `compare` looks for the response in the copy of the
journal, which has the frames of the engines, and compares token by token. A moved response has the experts of several
workers, a resumed run those from its journal, and an asynchronous one those of older weights.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAYERS, CHOSEN = 2, 2
TARGET = "windfall.trainer.trainer"
FOLDER = "WINDFALL_SOAK_ROUTES"
"""Environment variable with the folder for what trainers write down."""


def write_model(folder: Path) -> None:
    """A small Qwen3-MoE with random weights, and the tokenizer of the model that ships with windfall."""
    import shutil

    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from windfall.models import load

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts": 8,
        "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    }  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(load.TINY / name, folder)


# within the processes of the run


def variables(folder: Path) -> dict[str, str]:
    """Environment variables with which the processes of a run write down their routes into this folder."""
    hook = folder / "hook"
    hook.mkdir(parents=True, exist_ok=True)
    (hook / "sitecustomize.py").write_text("from benchmarks.kills import expert_routes\nexpert_routes.install()\n")
    paths = [str(hook), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), FOLDER: str(folder)}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the trainer when its module is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != TARGET:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        assert found is not None
        assert found.loader is not None
        run = found.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            begin = module.TorchTrainer.__init__

            def recorded(trainer: Any, *args: Any, **options: Any) -> None:
                begin(trainer, *args, **options)
                _record(trainer.learner)

            module.TorchTrainer.__init__ = recorded

        found.loader.exec_module = exec_module
        return found


def install() -> None:
    sys.meta_path.insert(0, _Finder())


def _record(learner: Any) -> None:
    """Write down what the model chooses in each pass."""
    from windfall.models.experts import ExpertReader

    learn, score, reader = learner.learn, learner.score, ExpertReader(learner.policy.model)

    def write(samples: Any, found: Any, **more: Any) -> None:
        import torch

        rows, start = torch.stack(found[:LAYERS], 1).cpu().numpy(), 0
        with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
            for s in samples:
                prompt, end = s.targets[0], start + len(s.ids) - 1
                if len(s.ids) > 2:  # not what a rank without work computes
                    line = {"response": s.ids[prompt:], "prompt": prompt, "known": len(s.experts), **more}
                    file.write(json.dumps(line | {"routes": rows[start:end].tolist()}) + "\n")
                start = end + 1

    def recorded_learn(samples: Any, *rest: Any) -> None:
        with reader.reading() as found:
            learn(samples, *rest)
        write(samples, found)

    def recorded_score(samples: Any, *rest: Any, replay: bool = True) -> Any:
        with reader.reading() as found:
            out = score(samples, *rest, replay=replay)
        if not replay:
            write(samples, found, replay=False)
        return out

    learner.learn, learner.score = recorded_learn, recorded_score


# afterwards


@dataclass(slots=True)
class Routes:
    """How the trainer's experts compare with those of the engines."""

    samples: int = 0
    tokens: int = 0
    different: int = 0
    """Tokens that the trainer computed with other experts than the engine."""
    unknown: int = 0
    """Samples without experts."""
    not_found: int = 0
    """Samples that are not in the journal."""
    compared: int = 0
    """Tokens for which the trainer's own choice is known, without replay."""
    own_differs: int = 0
    """Those of them for which it is another one."""
    wrong: list[str] = field(default_factory=list)


def journal_routes(copy: Path) -> dict[tuple[int, ...], list[dict[int, bytes]]]:
    """By the tokens of a response: the experts of its tokens by position, for every response with these tokens."""
    from windfall.controller.ledger.journal_format import Accepted, Assigned, Started, read_records
    from windfall.link.messages import columns, expert_columns

    tokens: dict[str, dict[int, int]] = defaultdict(dict)
    experts: dict[str, dict[int, bytes]] = defaultdict(dict)
    for path in sorted(copy.glob("*.wal")):
        owners: dict[int, str] = {}
        for _, record in read_records(path):
            match record:
                case Started():
                    owners.clear()
                case Assigned(handles=handles):
                    owners |= handles
                case Accepted(frame=frame):
                    ids, _ = columns(frame)
                    _add(frame, owners, array("I", ids), tokens, experts, expert_columns(frame))
    found: dict[tuple[int, ...], list[dict[int, bytes]]] = defaultdict(list)
    for name, at in tokens.items():
        found[tuple(at[i] for i in sorted(at))].append(experts[name])
    return found


def _add(frame: Any, owners: Any, ids: Any, tokens: Any, experts: Any, found: Any) -> None:
    width, chosen = found
    end = 0
    counts = frame.counts or (1,) * len(frame.handles)
    for handle, position, count, (start, data) in zip(frame.handles, frame.positions, counts, chosen, strict=True):
        end += count
        name = owners.get(handle, f"no owner {handle}")
        for n, token in enumerate(ids[end - count : end]):
            tokens[name][position + n] = token
        for n in range(len(data) // width):
            experts[name].setdefault(start + n, bytes(data[n * width : (n + 1) * width]))


def compare(copy: Path, folder: Path) -> Routes:
    """`copy`: all files of the journal. `folder`: what the trainers wrote."""
    known, out = journal_routes(copy), Routes()
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # otherwise the trainer was killed while it wrote
                _compare(json.loads(line), known, out)
    if not out.tokens:
        out.wrong.append("no trained token was compared")
    if out.different:
        out.wrong.append(f"{out.different} of {out.tokens} tokens were trained with other experts than the engine's")
    if out.unknown:
        out.wrong.append(f"{out.unknown} of {out.samples} samples were trained without the engine's experts")
    if out.not_found:
        out.wrong.append(f"{out.not_found} of {out.samples} samples are not in the journal")
    return out


def _compare(line: dict[str, Any], known: Any, out: Routes) -> None:
    engines = known.get(tuple(line["response"]), [])
    ours = {n - line["prompt"]: bytes(e for layer in row for e in layer) for n, row in enumerate(line["routes"])}
    differ = min((sum(ours[at] != there.get(at) for at in ours) for there in engines), default=0)
    if line.get("replay") is False:
        out.compared += len(ours) if engines else 0
        out.own_differs += differ
        return
    out.samples += 1
    out.unknown += not line["known"]
    out.not_found += not engines
    out.tokens += len(ours)
    out.different += differ
