"""The recipe: everything a run depends on, in one TOML file."""

from windfall.config.changes import RULES, KeyChange, changes, token_settings
from windfall.config.env_sections import AgentEnv, AgentLimits, DatasetEnv, JsonLinesEnv
from windfall.config.file import dump, load, parse
from windfall.config.lora import Lora
from windfall.config.sections import Fleet, Recipe, RolloutSection, RunSection, SimKind, SimLenders, Techniques, Train

__all__ = [
    "RULES", "AgentEnv", "AgentLimits", "DatasetEnv", "Fleet", "JsonLinesEnv", "KeyChange", "Lora", "Recipe",
    "RolloutSection", "RunSection", "SimKind", "SimLenders", "Techniques", "Train", "changes", "dump", "load", "parse",
    "token_settings",
]  # fmt: skip
