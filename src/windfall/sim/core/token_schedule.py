"""The length of every simulated response and its progress in real tokens, independent of the worker that generates it.

A simulated token stands for `granule` real tokens. The ledger counts whole granules only. The remainder is kept here,
so that a response that moves to another worker continues at the exact token, as a real one would.

A response with several turns (draws.py) is a sequence of rows: one per turn, whose prompt is everything before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import xxhash

from windfall.link.messages import Work
from windfall.sim.core.draws import SessionShape, turn_seed
from windfall.sim.machines.acceptance import DraftAcceptance, GroupProgress
from windfall.sim.machines.decode import FILLER, DecodeRow, simulated


def id_token_of(seed: int) -> int:
    """The first token of the response with this seed. It identifies the response."""
    return 16 + seed % (1 << 31)


class LengthDistribution(Protocol):
    """Draws the length of a response from its seed and group."""

    def draw(self, seed: int, group: int = 0) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """What a policy generates, in real tokens."""

    lengths: LengthDistribution
    """With several turns, those of turns."""
    prompt_tokens: int
    max_tokens: int


class TokenSchedule:
    def __init__(
        self, policies: Mapping[str, PolicyTokens], *, granule: int, sessions: SessionShape | None = None,
        acceptance: DraftAcceptance | None = None,
    ) -> None:  # fmt: skip
        """`acceptance`: of drafts from siblings; None: no engine drafts."""
        self.acceptance = acceptance
        self._begun: set[int] = set()
        """Seeds of the responses that have begun, if engines draft."""
        self.policies, self.granule, self._sessions = policies, granule, sessions or SessionShape()
        self._generated: dict[int, tuple[int, int]] = {}
        """By seed, for unfinished turns that no worker holds: where the turn begins (`DecodeRow.base`), and the real
        tokens of it generated so far."""
        self._finished_lengths: dict[int, int] = {}
        self._finished_turns: set[tuple[int, int]] = set()
        """(first token of the response, where the turn begins) of every finished turn."""
        self.real_tokens = 0
        """Real tokens of all finished responses."""

    def row(self, work: Work) -> tuple[DecodeRow, int]:
        """The row that an engine starts from, and the group that the prompt belongs to."""
        g, own = self.granule, self.policies[work.policy]
        prompt_and_sent = array("I", work.prompt)
        prompt = prompt_and_sent[: len(prompt_and_sent) - work.position]
        number = array("I", [id for id in prompt if id != FILLER])  # the padding depends on the granule
        group = xxhash.xxh3_64_intdigest(number.tobytes())
        base, before, drawn = self._turn(work, group)
        left = work.position + work.max_tokens - base
        limit = own.max_tokens if left == simulated(own.max_tokens, g) else left * g
        length, early = min(drawn, limit), work.seed % g
        known_base, known = self._generated.get(work.seed, (0, 0))
        known = known if known_base == base else 0
        last = min(simulated(length, g), left)
        sent = min((known + early) // g, last - 1)
        row = DecodeRow(
            handle=work.handle, seed=work.seed, id_token=id_token_of(work.seed), prompt=own.prompt_tokens + before,
            generated=known if sent == work.position - base else (work.position - base) * g, length=length,
            cut=drawn >= limit, sent=work.position - base, early=early, base=base, last=last, group=group,
            policy=work.policy,
        )  # fmt: skip
        if self.acceptance is not None and work.seed not in self._begun:
            self._begun.add(work.seed)
            self.acceptance.groups.setdefault(group, GroupProgress()).begun += 1
        return row, group

    def _turn(self, work: Work, group: int) -> tuple[int, int, int]:
        """The turn that this work belongs to: where it begins, in simulated tokens; the real tokens before it, without
        the prompt; and its drawn length in real tokens."""
        turn = base = before = 0
        lengths = self.policies[work.policy].lengths
        drawn, id_token = lengths.draw(work.seed, group), id_token_of(work.seed)
        while self._sessions.continues:
            observed = self._sessions.observation(id_token, turn)
            end = base + simulated(drawn, self.granule) + -(-observed // self.granule)
            if work.position < end:
                break
            turn, base, before = turn + 1, end, before + drawn + observed
            drawn = lengths.draw(turn_seed(work.seed, turn), group)
        return base, before, drawn

    def stopped(self, row: DecodeRow) -> None:
        """Keep the progress of a response that an engine dropped before its end."""
        self._generated[row.seed] = (row.base, row.generated)

    def finished(self, row: DecodeRow) -> None:
        self._generated.pop(row.seed, None)
        if (row.id_token, row.base) not in self._finished_turns:  # else its last frame was lost: it finishes again
            self._finished_turns.add((row.id_token, row.base))
            self._finished_lengths[row.id_token] = self._finished_lengths.get(row.id_token, 0) + row.length
            self.real_tokens += row.length
            if self.acceptance is not None and not row.base:
                self.acceptance.groups[row.group].ended += 1

    def length(self, id_token: int) -> int:
        """Real tokens that were sampled in a finished response."""
        return self._finished_lengths[id_token]
