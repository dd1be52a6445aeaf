"""The invariants of asynchronous training of one policy (`rollout.staleness` above 0). They are checked against records
that are kept here: which version and digest a worker had when it generated a token, and which weights were trained from
which.

- window: a token is accepted only if the weights that generated it, by version and digest, are within the bound when it
  is accepted. Only workers that have reported such weights get work;
- bound: no token is trained on with a lag above the bound, and the trainer is told the true lag;
- lost: every admitted task is trained on, still open, or given up for a reason that these records confirm: all its
  responses are too old, or nothing can be learned from them. The same holds for a response that is missing from its
  group in a batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from itertools import chain, repeat

from tests.chaos import InvariantBroken
from tests.chaos.inject import FaultInjector, FaultyLink
from windfall.controller.ledger.ledger import LedgerEntry
from windfall.controller.rollout.stream import seed_of
from windfall.controller.tasks.admission import Admission
from windfall.controller.workers.versions import Offer
from windfall.sim.core.token_schedule import id_token_of
from windfall.training import Sample
from windfall.types import policy_of


class StalenessInvariants:
    def __init__(self, injector: FaultInjector, policy: str, segments: Mapping[int, tuple[str, str]]) -> None:
        """`segments`: by first token of a response, or of a role's part of it: its id and role."""
        recipe = injector.simulation.scenario.recipe.of(policy)
        self._injector = injector
        self._trainer = injector.simulation.trainers[policy]
        self._policy, self._segments = policy, segments
        self._recipe = recipe
        self.bound = recipe.rollout.staleness
        self._size = recipe.rollout.group_size
        self._previous: dict[str, tuple[int, str]] = {}
        """By digest: its version, and the digest of the weights that it was trained from."""
        self._digest = ""
        """Digest of the trainer's weights."""
        self._versions: dict[int, array[int]] = {}
        """By first token of a response, which identifies it: the version of each of its accepted tokens."""
        self._trained_in: dict[int, int] = {}
        """By first token of a response: the step, in the weights' history, that trained on it."""

    # the weights' history

    def trainer_started(self) -> None:
        weights = self._trainer.weights
        self._digest = weights.digest
        self._previous.setdefault(weights.digest, (weights.state.step, ""))

    def _window(self, offer: Offer) -> Iterator[tuple[int, str]]:
        """Version and digest of the weights that may generate tokens."""
        digest = offer.digest
        for _ in range(self.bound + 1):
            if not digest:
                return
            version, previous = self._previous[digest]
            yield version, digest
            digest = previous

    # window

    def check_tokens(self, entry: LedgerEntry, offer: Offer | None, checked: int, *, restored: bool) -> None:
        """Check the tokens of this entry from position `checked` on. `restored`: they come from the journal and were
        accepted before."""
        episode, window = entry.episode, set(self._window(offer) if offer is not None else ())
        if entry.handle >= 0 and not any(entry.version in (v, episode.version) for v, _ in window):
            raise InvariantBroken("window", f"{episode.id} is assigned with version {entry.version}, not in {window}")
        versions = array("q", chain.from_iterable(repeat(v, n) for v, n in episode.version_runs))
        versions.extend(repeat(entry.version, len(episode.tokens) - len(versions)))
        id_token = id_token_of(episode.seed)
        known = self._versions.setdefault(id_token, array("q"))
        for position in () if restored else range(checked, len(versions)):
            if versions[position] < 0:  # an observation
                continue
            generated = self._injector.generated.get((id_token, position), set())
            true = {(v, d) for v, d in generated if v == versions[position]}
            if not true & window and versions[position] != episode.version:
                what = (
                    f"{episode.id}: token {position} is accepted with version {versions[position]}; it was generated "
                    f"by {sorted(generated)}, and the window is {sorted(window)}"
                )
                raise InvariantBroken("window", what)
        scoped = ":" in episode.id  # an evaluation generates the same responses again
        too_old = offer is not None and self.is_too_old(id_token, offer.version)  # the journal may have forgotten it
        if restored and not scoped and not too_old and versions[: len(known)] != known[: len(versions)]:
            what = f"{episode.id}: restored with versions {versions.tolist()}, but had {known.tolist()}"
            raise InvariantBroken("window", what)
        self._versions[id_token] = versions

    def forget_tokens(self, kept: Mapping[str, int]) -> None:
        """The controller was killed. `kept`: by response, the number of tokens that were certainly on disk."""
        tokens = {id: id_token for id_token, (id, _) in self._segments.items()}
        for id, count in kept.items():
            if ":" not in id:
                del self._versions.get(tokens[id], array("q"))[count:]

    def _id_tokens(self, task: int) -> list[int]:
        """The first tokens of what this policy says in a task, as far as it is known: without roles, all of it."""
        if not self._policy:
            return [id_token_of(seed_of(self._recipe.run.seed, task, n)) for n in range(self._size)]
        return [
            id_token for id_token, (id, role) in self._segments.items()
            if id.partition("/")[0] == str(task) and policy_of(role) == self._policy
        ]  # fmt: skip

    def _first_token(self, id_token: int) -> int:
        """The first token of the response that this part of it belongs to."""
        if not self._policy:
            return id_token
        task, sibling = self._segments[id_token][0].partition("+")[0].split("/")
        return id_token_of(seed_of(self._recipe.run.seed, int(task), int(sibling)))

    def is_too_old(self, id_token: int, version: int) -> bool:
        """Whether the response already has tokens that a trainer at this version cannot train on."""
        versions = [v for v in self._versions.get(id_token, ()) if v >= 0]
        return bool(versions) and not version - self.bound <= min(versions) <= max(versions) <= version

    def check_assignment(self, link: FaultyLink, offer: Offer) -> None:
        if link.loaded.get(self._policy) not in set(self._window(offer)):
            raise InvariantBroken("window", f"{link.peer} gets work with {link.loaded}; the newest version is {offer}")

    # bound, lost

    def check_batch(self, step: int, samples: list[Sample]) -> None:
        digest = self._trainer.weights.digest
        self._previous[digest] = (step, self._digest)
        self._digest = digest
        self._trained_in = {t: s for t, s in self._trained_in.items() if s < step}
        for sample in samples:
            id_token = sample.ids[sample.targets[0]]
            lags = sample.lag.tolist() if sample.lag is not None else [0] * len(sample.targets)
            if max(lags) > self.bound:
                raise InvariantBroken("bound", f"step {step} trains on {id_token} with a lag of {max(lags)}")
            true = [step - 1 - version for version in self._versions.get(id_token, ()) if version >= 0]
            if lags != true:
                what = f"step {step} trains on {id_token} with the lags {lags}, but they are {true}"
                raise InvariantBroken("bound", what)
            self._trained_in[id_token] = step

    def check_lost(self, admission: Admission, version: int) -> None:
        """`version`: the trainer's version when a group was last taken or dropped."""
        here = {*admission.open_tasks, *admission.taken}
        for task in set(range(admission.next_task)) - here:
            id_tokens = self._id_tokens(task)
            steps = {self._trained_in[t] for t in id_tokens if t in self._trained_in}
            at = min(steps, default=version + 1) - 1
            left = [t for t in id_tokens if t not in self._trained_in and not self.is_too_old(t, at)]
            if left and not steps and self._replaceable(task, left):
                continue
            if left := [t for t in left if not self._injector.env.missing(self._first_token(t))]:
                how = f"was trained on in step {min(steps)}" if steps else "is neither trained on nor open"
                had = [self._versions.get(t, array("q")).tolist() for t in left]
                raise InvariantBroken("lost", f"task {task} {how}; at version {at} it had responses of versions {had}")

    def _replaceable(self, task: int, left: list[int]) -> bool:
        """Whether nothing can be learned from these responses, according to DAPO."""
        if any(t not in self._versions for t in left):
            return False
        env, rewards = self._injector.env, dict[str, set[float]]()
        for id_token in left:
            first, role = self._first_token(id_token), self._segments[id_token][1]
            if not env.missing(first):
                rewards.setdefault(role, set()).add(env.reward(f"sim/{task}", role, str(first)))
        return self._recipe.algorithm.name == "dapo" and all(len(each) < 2 for each in rewards.values())
