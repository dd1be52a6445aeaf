"""Derives configurations of the same architecture that are so small that a model can be tested in a second.

The operations of a model do not depend on its size, so windfall's engine and trainer are tested on a small random one.
Sizes are recognized by their names in the configuration; everything else (rotary embeddings, caps, scales, norms,
biases, activation functions, head sizes) stays unchanged. Windows become shorter than the sequences of the test.

Rules:
- the small model has every kind of layer of the full model: `same_weight_kinds` compares the names of their weights,
  and lists with one entry per layer keep all of their values;
- if a configuration cannot be shrunk in one way, others are tried (LEVELS); the last one shrinks only the vocabulary
  and windows.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

VOCABULARY = 128
WINDOW = 20  # Tokens. The sequences of the test are longer, so a missing window is noticed.
ROPE_CHANGE = 24  # tokens after which a rotary embedding changes in the test, if it also changes in the run
WIDTH, RANK, HIDDEN = 48, 16, 64
DEPTHS = (4, 6, 8, 12, 16)
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"depth", "width", "heads", "experts"}),
    frozenset({"depth", "width", "heads", "more heads", "experts"}), frozenset({"depth", "width", "experts"}),
    frozenset({"depth"}),
    frozenset(),
)  # fmt: skip
"""What is shrunk besides vocabulary and windows. The first level that can be built is used."""

_VOCABULARY = re.compile(r"vocab_size")
_TOKEN = re.compile(r"token_ids?$|token_index$")
_WIDTH = re.compile(r"intermediate|ffn|n_inner|inner_dim|feed_forward_dim|shared_expert_size|expert_hidden")
_RANK = re.compile(r"_rank$")
_WINDOW = re.compile(r"sliding_window(_size)?$|attention_chunk_size$|^window_size$|attention_window|local_window")
_DEPTH = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|num_decoder_layers|decoder_layers)$")
_EXPERTS = re.compile(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$")
_CHOSEN = re.compile(r"experts_per_tok|top_?k$|moe_k$")
_GROUPS = re.compile(r"^n_group$|^num_expert_groups?$")


def small_configs(config: Any, *, longest: int) -> Iterator[dict[str, Any]]:
    """The fields of smaller configurations, smallest first. `longest`: the longest sequence of the run, in tokens."""
    for what in LEVELS:
        for depth in DEPTHS if "depth" in what else (None,):
            fields = copy.deepcopy(config.to_dict())
            if depth is not None and not _covers(fields, depth):
                continue
            yield _shrink_fields(fields, config, what, depth, longest)


def _shrink_fields(fields: dict[str, Any], config: Any, what: frozenset[str], depth: int | None, longest: int) -> Any:
    """Shrink `fields` in place, including nested configurations."""
    for name, value in fields.items():
        inner = getattr(config, name, None)
        if isinstance(value, dict) and hasattr(inner, "to_dict"):
            fields[name] = _shrink_fields(value, inner, what, depth, longest)
    if "heads" in what:
        _heads(fields, getattr(config, "attribute_map", {}), 4 if "more heads" in what else 2)
    layers = _layers(fields)
    for name, value in fields.items():
        fields[name] = _size(name, value, what)
    if "experts" in what:
        _experts(fields)
    if depth is not None and layers is not None:
        _shrink_depth(fields, layers, min(depth, layers))
    _move_rope_change(fields, longest)
    return fields


def _size(name: str, value: Any, what: frozenset[str]) -> Any:
    many = isinstance(value, list) and all(type(v) is int for v in value)
    if many and (_TOKEN.search(name) or _WIDTH.search(name) or _WINDOW.search(name)):
        return [_size(name, v, what) for v in value]
    if type(value) is not int or value <= 0:
        return value
    if _TOKEN.search(name) and not _VOCABULARY.search(name):
        return value if value < VOCABULARY else 0
    limits = {_VOCABULARY: VOCABULARY, _WINDOW: WINDOW} | ({_WIDTH: WIDTH, _RANK: RANK} if "width" in what else {})
    return next((min(value, limit) for pattern, limit in limits.items() if pattern.search(name)), value)


def _heads(fields: dict[str, Any], names: dict[str, str], few: int) -> None:
    """Fewer heads of the same size, with at most two query heads per key head."""
    heads, kv, hidden = (names.get(n, n) for n in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    count, size = fields.get(heads), fields.get(hidden)
    if type(count) is not int or type(size) is not int:
        return
    head = fields.get("head_dim") or size // count
    keys = fields.get(kv)
    share = min(2, count // keys) if type(keys) is int and keys else 1
    fewer = min(count, few * share)
    fields[heads] = fewer
    if type(keys) is int:
        fields[kv] = max(1, fewer // share) if keys > 1 else 1
    fields[hidden] = fewer * head if head * count == size else min(size, HIDDEN)


def _experts(fields: dict[str, Any]) -> None:
    chosen = max([v for n, v in fields.items() if _CHOSEN.search(n) and type(v) is int], default=1)
    groups = max([v for n, v in fields.items() if _GROUPS.match(n) and type(v) is int], default=1)
    for name, value in fields.items():
        if _EXPERTS.match(name) and type(value) is int and value > 0:
            least = max(4, 2 * chosen, 2 * groups)
            fields[name] = min(value, -(-least // groups) * groups)


def _covers(fields: dict[str, Any], depth: int) -> bool:
    """Whether the first `depth` layers include every value of every list with one entry per layer."""
    layers = _layers(fields)
    if layers is None:
        return all(_covers(v, depth) for v in fields.values() if isinstance(v, dict))
    lists = [v for v in fields.values() if isinstance(v, list) and len(v) == layers and not _indices(v)]
    return all({str(x) for x in v} == {str(x) for x in v[:depth]} for v in lists)


def _layers(fields: dict[str, Any]) -> int | None:
    return next((v for n, v in fields.items() if _DEPTH.match(n) and isinstance(v, int)), None)


def _indices(value: list[Any]) -> bool:
    """Whether a list holds layer indices, not one value per layer."""
    return len(value) > 1 and all(type(v) is int for v in value) and all(a < b for a, b in pairwise(value))


def _shrink_depth(fields: dict[str, Any], layers: int, depth: int) -> None:
    for name, value in fields.items():
        if _DEPTH.match(name) and value == layers:
            fields[name] = depth
        elif isinstance(value, list) and _indices(value) and max(value) < layers:
            fields[name] = [v for v in value if v < depth]
        elif isinstance(value, list) and len(value) == layers:
            fields[name] = value[:depth]
        elif type(value) is int and "shared_layers" in name:
            fields[name] = min(value, depth // 2)


def _move_rope_change(fields: dict[str, Any], longest: int) -> None:
    """If a rotary embedding changes at some length within the run, make it change within the test."""
    for rope, before in _changing_ropes(fields):
        if longest <= before:
            continue
        rope["original_max_position_embeddings"] = ROPE_CHANGE
        if fields.get("original_max_position_embeddings"):
            fields["original_max_position_embeddings"] = ROPE_CHANGE
        if fields.get("max_position_embeddings"):
            fields["max_position_embeddings"] = max(256, fields["max_position_embeddings"] * ROPE_CHANGE // before)


def fixed_rope_tokens(fields: Mapping[str, Any]) -> int | None:
    """Number of tokens after which the rotary embedding changes; None if it never does."""
    return min((before for _, before in _changing_ropes(fields)), default=None)


def rope_changes_within(fields: Mapping[str, Any], longest: int) -> bool:
    """Whether a rotary embedding changes within `longest` tokens."""
    return any(longest > before for _, before in _changing_ropes(fields))


def _changing_ropes(fields: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """The parameters of each rotary embedding that changes with the length, and the tokens before it changes."""
    rope = fields.get("rope_parameters")
    for one in [rope, *rope.values()] if isinstance(rope, dict) else []:
        if isinstance(one, dict) and one.get("rope_type") == "longrope":
            before = one.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
            if before:
                yield one, before


def same_weight_kinds(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether two models have the same kinds of weights, regardless of the number of layers and experts."""
    a, b = ({re.sub(r"\.\d+(?=\.|$)", ".*", n) for n in each} for each in (names, others))
    return a == b
