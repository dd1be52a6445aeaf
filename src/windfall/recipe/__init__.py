"""The recipe: everything a run depends on, in one TOML file."""

from windfall.recipe.changes import RULES, KeyChange, changes, token_settings
from windfall.recipe.env_sections import AgentEnv, AgentLimits, DatasetEnv, JsonLinesEnv
from windfall.recipe.file import dump, load, parse
from windfall.recipe.lora import Lora
from windfall.recipe.planned import PlannedWorkers, PlanSection
from windfall.recipe.sections import Fleet, Recipe, RolloutSection, RunSection, SimKind, SimLenders, Techniques, Train

__all__ = [
    "RULES", "AgentEnv", "AgentLimits", "DatasetEnv", "Fleet", "JsonLinesEnv", "KeyChange", "Lora", "PlanSection",
    "PlannedWorkers", "Recipe",
    "RolloutSection", "RunSection", "SimKind", "SimLenders", "Techniques", "Train", "changes", "dump", "load", "parse",
    "token_settings",
]  # fmt: skip
