"""The model card of a run: its README.md on the hub. Pure: recipe and events in, text out.

The card says what the event log says, with the words of the summary at the end of a run (run/views/summary.py). Of the
recipe it shows the sections that say what was trained, without hosts and without folders of this machine.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from rich.text import Text

from windfall import __version__
from windfall.events.log import Event
from windfall.recipe.file import dump_recipe, to_toml
from windfall.recipe.sections import Recipe
from windfall.run.views.summary import spark, summarize

SHOWN = ("run", "model", "env", "sft", "algorithm", "rollout", "train", "eval")
"""Sections of the recipe in the card. The others say where and how the run was computed."""
HIDDEN = {"folder", "servers", "servers_token", "rendezvous"}
"""Keys of these sections that name machines and files of the one who pushes."""
ROWS = 20
"""Upper limit for the rows of the table of rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """What the run learned: training reward by step, or the loss of a supervised run."""

    label: str
    points: list[tuple[int, float]]
    evaluated_label: str = ""
    evaluated: list[tuple[int, float]]


def curve(events: list[Event], policy: str) -> Curve | None:
    """None: the run has neither rewards nor losses."""
    own = [e for e in events if e["kind"] == "scalar" and e.get("policy", "") == policy]

    def series(name: str, key: str) -> list[tuple[int, float]]:
        return [(e["step"], e[key]) for e in own if e["name"] == name and e.get(key) is not None and "step" in e]

    for label, name, evaluation, key in (("reward", "step", "eval", "reward"), ("loss", "sft", "sft_eval", "loss")):
        if points := series(name, key):
            return Curve(
                label=f"training {label}", points=points,
                evaluated_label=f"evaluation {label}", evaluated=series(evaluation, key),
            )  # fmt: skip
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    repo: str
    recipe: Recipe
    """As the policy sees it."""
    policy: str
    step: int
    events: list[Event]
    base: str
    """Hub id of the base model. Empty: the hub does not have it, as far as is known."""
    kind: Literal["model", "adapter"]
    merged: bool
    license: str
    """License of the base model; empty if it is not known."""
    curve: Curve | None
    picture: str
    """File with the picture of the curve. Empty: there is none."""

    def __str__(self) -> str:
        parts = [
            _front_matter(self._metadata()),
            f"# {self.repo.rpartition('/')[2]}",
            self._what(),
            f"## How to load it\n\n{self._loading()}",
            f"## Results\n\n{self._results()}",
            self._curve(),
            self._machines(),
            f"## Recipe\n\nHosts, prices and folders are left out.\n\n```toml\n{shown_recipe(self.recipe)}\n```",
            f"## License\n\n{self._license()}",
            f"## Versions\n\n{self._versions()}",
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _metadata(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"library_name": "peft" if self.kind == "adapter" else "transformers"}
        fields["pipeline_tag"] = "text-generation"
        if self.base:
            fields["base_model"] = self.base
            fields["base_model_relation"] = "adapter" if self.kind == "adapter" else "finetune"
        if self.license:
            fields["license"] = self.license
        how = ["sft"] if self._supervised() else ["reinforcement-learning", self.recipe.algorithm.name]
        return {**fields, "tags": ["windfall", *how]}

    def _supervised(self) -> bool:
        return self.curve is not None and "loss" in self.curve.label

    def _what(self) -> str:
        base = (
            f"[{self.base}](https://huggingface.co/{self.base})" if self.base else f"`{short(self.recipe.model.path)}`"
        )
        what = {"adapter": "A LoRA adapter of", "model": "A model made from"}[self.kind]
        how = "by supervised fine-tuning"
        if not self._supervised():
            how = f"by reinforcement learning ({self.recipe.algorithm.name}) on {self._data()}"
        steps = f"This is step {self.step} of {self.recipe.run.steps}"
        of = f", of the policy `{self.policy}`" if self.policy else ""
        merged = " The adapter that was trained is merged into it." if self.merged else ""
        return f"{what} {base}, trained {how} with windfall. {steps}{of}.{merged}"

    def _data(self) -> str:
        env = self.recipe.env.model_dump(exclude_none=True)
        data = next((short(str(env[key])) for key in ("path", "dataset", "factory", "task") if env.get(key)), "")
        return f"the environment `{env['name']}`" + (f" with `{data}`" if data else "")

    def _loading(self) -> str:
        if self.kind == "adapter":
            return (
                "```python\nfrom peft import PeftModel\n"
                "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
                f'base = AutoModelForCausalLM.from_pretrained("{self.base}")\n'
                f'model = PeftModel.from_pretrained(base, "{self.repo}")\n'
                f'tokenizer = AutoTokenizer.from_pretrained("{self.repo}")\n```'
            )
        return (
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{self.repo}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{self.repo}")\n```'
        )

    def _results(self) -> str:
        rows = [("steps", f"{self.step}")]
        learned = [row for row in summarize(self.events) if row[0] != "advice"]
        rows += [(label, Text.from_markup(text).plain) for label, text in learned]
        return _table(("", "value"), rows)

    def _curve(self) -> str:
        if self.curve is None:
            return ""
        title = f"## {self.curve.label.capitalize()}"
        if self.picture:
            return f"{title}\n\n![{self.curve.label} over the steps]({self.picture})"
        points = self.curve.points
        size = max(1, -(-len(points) // ROWS))
        shown = [points[min(n + size, len(points)) - 1] for n in range(0, len(points), size)]
        line = spark([y for _, y in points])
        return f"{title}\n\n`{line}`\n\n" + _table(("step", self.curve.label), [(f"{x}", f"{y:.4f}") for x, y in shown])

    def _machines(self) -> str:
        joined = [e for e in self.events if e["name"] == "worker_joined"]
        trainer = next((e for e in self.events if e["name"] == "start"), {})
        rows = [("trainer", str(trainer["device"]), "", "1")] if trainer.get("device") else []
        kinds = Counter((str(e.get("lease")), str(e.get("device")), e.get("usd_per_h")) for e in joined)
        for (lease, device, price), count in sorted(kinds.items(), key=str):
            rows.append((f"{lease} worker", device, "unknown" if price is None else f"{price:,.2f}", f"{count}"))
        return "## Machines\n\n" + _table(("", "device", "USD per hour", "joined"), rows) if rows else ""

    def _license(self) -> str:
        if self.license:
            return f"The base model's: {self.license}."
        return "That of the base model, which is not known to the program that wrote this card."

    def _versions(self) -> str:
        engines = sorted({str(e["engine"]) for e in self.events if e["name"] == "worker_ready" and e.get("engine")})
        used = f" Engines of the workers: {', '.join(engines)}." if engines else ""
        start = next((e for e in self.events if isinstance(e.get("versions"), dict)), {"versions": {}})
        trained = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
        return (f"Trained with {trained}. " if trained else "") + f"Pushed with windfall {__version__}.{used}"


def short(name: str) -> str:
    """A model or a data set without the folders of this machine.

    >>> short("/home/me/models/small"), short("owner/name"), short("/data/grade.py:score")
    ('small', 'owner/name', 'grade.py:score')
    """
    return PurePath(name).name if name.startswith(("/", "~", "./", "../")) else name


def shown_recipe(recipe: Recipe) -> str:
    """The part of the recipe that says what was trained, as TOML."""
    sections = tomllib.loads(dump_recipe(recipe, all_keys=False))
    for name, key, value in (("model", "path", recipe.model.path), ("env", "name", recipe.env.name)):
        sections[name] = {key: value, **sections.get(name, {})}  # said even if they are the defaults
    lines: list[str] = []
    for name in SHOWN:
        values = {key: value for key, value in sections.get(name, {}).items() if key not in HIDDEN}
        if values:
            lines += [f"[{name}]", *(f"{key} = {to_toml(_public(value))}" for key, value in values.items()), ""]
    return "\n".join(lines).strip()


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(own) for key, own in value.items() if key not in HIDDEN}
    if isinstance(value, list):
        return [_public(own) for own in value]
    return short(value) if isinstance(value, str) else value


def _front_matter(fields: dict[str, Any]) -> str:
    lines = ["---"]
    for key, value in fields.items():
        lines += (
            [f"{key}:", *(f"- {to_toml(own)}" for own in value)]
            if isinstance(value, list)
            else [f"{key}: {to_toml(value)}"]
        )
    return "\n".join([*lines, "---"])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
