"""The groups that one step trains on, and what the step's event says about them. Pure."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from windfall.controller.tasks.selection import outcome
from windfall.training import NOT_FINITE, Report
from windfall.types import Group, Prompt

Scores = tuple[tuple[str, float], ...]
"""The parts of a reward, by name."""


@dataclass(kw_only=True)
class StepBatch:
    """The groups that one step has collected, and the seconds it has spent."""

    kept: list[Group] = field(default_factory=list)
    """Groups to train on, the replayed ones first."""
    replayed: list[Group] = field(default_factory=list)
    """Those that were trained on before."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of all responses, including those of groups that dynamic sampling replaced: the policy's true reward."""
    scores: list[Scores] = field(default_factory=list)
    """The parts of these rewards, as far as they are known."""
    lengths: dict[int, list[int]] = field(default_factory=dict)
    """By task: number of sampled tokens of each of its responses, including those of replaced groups. 0 for a response
    that was dropped because it was too old."""
    outcomes: dict[int, tuple[Prompt, str | None]] = field(default_factory=dict)
    """By task, including those of replaced groups: the prompt, and what the rewards say about it."""
    early_s: float = 0.0
    """Seconds the trainer trained on groups before the last one had arrived."""
    asked_s: float = 0.0
    """The same, including the messages to the trainer and back."""
    update_s: float = 0.0
    """Seconds of the optimizer updates and of publishing."""
    weights_bytes: int = 0
    """Bytes that a worker with the version before the step must pull for the one after it."""
    wait_s: float = 0.0
    """Seconds the trainer waited for groups after it had stopped generating."""
    starved_s: float = 0.0
    """Seconds of `wait_s` in which too few groups were finished."""
    missing: int = 0
    """Most groups that the trainer lacked when such a wait began."""
    spare: int = sys.maxsize
    """Fewest finished groups that the trainer did not need yet, over the moments at which it needed groups."""
    micro_batches: deque[list[Group]] = field(default_factory=deque)
    """Full micro-batches that are not trained yet. Where they are cut depends only on the groups, not on timing."""
    partial: list[Group] = field(default_factory=list)
    """Groups of the micro-batch that is not full yet."""

    def add(self, group: Group, size: int, micro_tokens: int) -> None:
        """Add a group to train on. `size`: responses per group."""
        self.note(group, size)
        self._keep(group, micro_tokens)

    def replay(self, group: Group, micro_tokens: int) -> None:
        """Add a group to train on again, before all others. Its rewards and lengths were counted before."""
        self.replayed.append(group)
        self._keep(group, micro_tokens)

    def _keep(self, group: Group, micro_tokens: int) -> None:
        self.kept.append(group)
        self.partial.append(group)
        if sum(r.length for g in self.partial for r in g.responses) >= micro_tokens:
            self.micro_batches.append(self.partial)
            self.partial = []

    def hand_over(self, ready: int) -> list[Group]:
        """The next groups for the trainer. `ready`: number of finished groups that are not in this batch."""
        if self.micro_batches:
            groups = self.micro_batches.popleft()
        else:
            groups, self.partial = self.partial, []
        if not groups or groups[-1] not in self.replayed:  # otherwise it did not need finished groups yet
            self.spare = min(self.spare, ready + sum(map(len, self.micro_batches)) + len(self.partial))
        return groups

    def completed(self, ready: int, *, pipelined: bool) -> None:
        """The batch has all its groups. Unless they are `pipelined`, the trainer takes all of them now."""
        if not pipelined:
            self.spare = min(self.spare, ready)

    def waited(self, seconds: float, *, missing: int, ready: int, pipelined: bool) -> None:
        """The trainer has waited. When it began to, the batch lacked `missing` groups, and `ready` other ones were held
        back for older groups that are about to become too old. If groups are `pipelined`, it needed only one."""
        self.wait_s += seconds
        needed = 1 if pipelined else missing
        if ready < needed:
            self.starved_s += seconds
            self.missing = max(self.missing, needed - ready)
        else:
            self.spare = min(self.spare, ready - needed)

    def note(self, group: Group, size: int) -> None:
        """Count the rewards and lengths of a group."""
        self.outcomes[group.index] = group.task.prompt, outcome(group)
        self.rewards += group.rewards
        self.scores += [r.scores for r in group.responses]
        lengths = [0] * size
        for r in group.responses:
            sibling = int(r.id.rpartition("/")[2].partition("+")[0])
            lengths[sibling] += r.sampled_count  # a policy may have several roles
        self.lengths[group.index] = lengths

    @property
    def tokens(self) -> int:
        """Sampled tokens of the groups to train on that are not replayed."""
        return sum(r.sampled_count for g in self.fresh for r in g.responses)

    @property
    def fresh(self) -> list[Group]:
        """The groups to train on that are not replayed."""
        return self.kept[len(self.replayed) :]

    def describe(self) -> dict[str, Any]:
        """Fields of the step's event."""
        responses = [r for g in self.kept for r in g.responses]
        return {
            "reward": mean(self.rewards),
            "responses": len(responses),
            "groups": len(self.kept),
            "mean_length": sum(r.sampled_count for r in responses) / max(1, len(responses)),
            "prompt_tokens": mean([len(r.prompt) for r in responses]),
            "replaced": sorted(set(self.lengths) - {g.index for g in self.kept}),
            "cut": sum(r.finish == "length" for r in responses) / max(1, len(responses)),
            "train_wait_s": self.wait_s,
            **describe_scores(self.scores),
        }

    def describe_staleness(self, version: int, bound: int) -> dict[str, Any]:
        """Fields of the step's event if versions may differ. `version`: the trainer's, before the step. `bound`: the
        highest staleness that is trained on."""
        responses = [r for g in self.fresh for r in g.responses if r.reward is not None]
        lags = [version - oldest for r in responses if (oldest := r.oldest_version) is not None]
        counts = Counter(lags)
        return {
            "staleness_mean": mean(lags),
            "staleness_max": max(lags, default=0),
            "staleness_bound": bound,
            "staleness_counts": [counts[n] for n in range(max(lags, default=-1) + 1)],
        }

    def describe_replay(self, version: int) -> dict[str, Any]:
        """Fields of the step's event about replayed groups. `version`: the trainer's, before the step."""
        responses = [r for g in self.replayed for r in g.responses]
        oldest = min((v for r in responses if (v := r.oldest_version) is not None), default=version)
        tokens = sum(r.sampled_count for r in responses)
        return {"replayed": len(self.replayed), "replayed_tokens": tokens, "replayed_age": version - oldest}


def describe_scores(scores: Sequence[Scores]) -> dict[str, Any]:
    """Field of an event: the mean of each part of the reward, by name. Nothing if rewards have no parts.

    >>> describe_scores([(("math", 1.0), ("format", 0.5)), (("math", 0.0),), ()])
    {'rewards': {'math': 0.5, 'format': 0.5}}
    """
    values: dict[str, list[float]] = {}
    for name, score in (pair for row in scores for pair in row):
        values.setdefault(name, []).append(score)
    return {"rewards": {name: mean(found) for name, found in values.items()}} if values else {}


def describe_updates(reports: Sequence[Report]) -> dict[str, Any]:
    """Fields of the step's event about its optimizer updates."""
    last = asdict(next((r for r in reversed(reports) if r.tokens), reports[-1]))
    skipped = [r.skipped for r in reports if r.skipped]
    return {
        **{k: v for k, v in last.items() if k not in ("responses", "tokens", "skipped")},
        "peak_bytes": max(r.peak_bytes for r in reports),
        **{key: sum(getattr(r, key) for r in reports) for key in ("update_s", "state_moved_bytes")},
        "trained": sum(r.tokens for r in reports),
        "updates_skipped": len(skipped),
        "updates_not_finite": skipped.count(NOT_FINITE),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
