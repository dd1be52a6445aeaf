"""Which of the trainer's ranks a process is. It is in the environment, as torchrun and Slurm write it.

    torchrun, Ray, windfall   RANK  WORLD_SIZE  LOCAL_RANK  LOCAL_WORLD_SIZE  GROUP_RANK
    srun                      SLURM_PROCID  SLURM_NTASKS  SLURM_LOCALID  -  SLURM_NODEID

- One launcher says everything: torchrun's variables count if there are any, also inside a Slurm job, otherwise Slurm's.
- Variables that contradict each other are refused: a rank with a wrong number would only be noticed as a missing one.
- MASTER_ADDR and MASTER_PORT are not read: the supervisor names a new meeting point for every start of the trainer, so
  a rank that is left over from an earlier start never joins a later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from windfall.devices import Place
from windfall.errors import WindfallError
from windfall.recipe.sections import Recipe
from windfall.run_folder import trainer_role

RANK_LOST = 5
"""Exit status of a rank that ended because another one was lost."""
TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
SLURM_NAMES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NODEID")
WEIGHTS_KEY = "WINDFALL_WEIGHTS_KEY"
"""Environment variable with the key of the weight server, on machines that do not have the run's token."""
STARTED = "Start it with torchrun or srun. By hand, give each rank RANK (from 0), WORLD_SIZE and LOCAL_RANK."
RENDEZVOUS, HOST = "WINDFALL_RENDEZVOUS", "WINDFALL_RANK_HOST"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number of this rank among those of its machine."""
    local_size: int = 1
    """Ranks on this machine."""
    machine: int = 0
    """The machine of this rank; 0 has rank 0 and the run's folder."""
    rendezvous: str = ""
    """Where the ranks meet (trainer/ranks/ranks.py); "" for one rank alone."""
    host: str = ""
    """Where workers reach this machine, if it is not that of rank 0."""
    base: str = ""
    """The base that this trainer is for (`Recipe.bases`)."""

    @staticmethod
    def of(environment: Mapping[str, str], base: str = "") -> RankPlace:
        """The place of the process with these environment variables in the trainer of this base.

        >>> RankPlace.of({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}).rank
        5
        """

        names = next((n for n in (TORCH_NAMES, SLURM_NAMES) if any(environment.get(name) for name in n[:2])), None)
        if names is None:
            what, where = "no environment variable says which rank this is", "RANK and WORLD_SIZE"
            raise WindfallError(what, where=where, fix=f"{STARTED} For a trainer of one rank: RANK=0 WORLD_SIZE=1.")
        for name, other in (names[:2], names[1::-1]):
            if not environment.get(name):
                what = f"{other} is set, but {name} is not"
                raise WindfallError(what, where="environment variables of a rank", fix=STARTED)

        def number(i: int, default: int) -> int:
            found = environment.get(names[i]) or str(default)
            if not found.isdecimal():
                raise WindfallError(f"{found!r} is not a number", where=f"environment variable {names[i]}", fix=STARTED)
            return int(found)

        local_rank = number(2, 0)
        place = RankPlace(
            rank=number(0, 0), size=number(1, 1), local_rank=local_rank, local_size=number(3, local_rank + 1),
            machine=number(4, 0), rendezvous=environment.get(RENDEZVOUS, ""), host=environment.get(HOST, ""), base=base,
        )  # fmt: skip
        if what := _contradiction(place, names, environment):
            raise WindfallError(what, where="environment variables of a rank", fix=STARTED)
        return place

    def environment(self) -> dict[str, str]:
        """The variables from which `of` reads this place."""
        numbers = {
            "RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size, "GROUP_RANK": self.machine,
        }  # fmt: skip
        return {name: str(value) for name, value in numbers.items()} | {RENDEZVOUS: self.rendezvous, HOST: self.host}

    @property
    def role(self) -> str:
        """The name of the trainer that this rank belongs to."""
        return trainer_role(self.base)

    @property
    def name(self) -> str:
        """The name of the process; its log is NAME.log.

        >>> RankPlace(rank=1).name, RankPlace(base="solver").name, RankPlace(rank=1, base="solver").name
        ('rank-1', 'trainer-solver', 'rank-1-solver')
        """
        return self.role.replace("trainer", f"rank-{self.rank}", 1) if self.rank else self.role


def _contradiction(place: RankPlace, names: Sequence[str], environment: Mapping[str, str]) -> str:
    """What cannot be true of this place; "" if nothing. `names`: the variables that it was read from.

    >>> _contradiction(RankPlace(rank=2, size=2), TORCH_NAMES, {})
    'RANK is 2 and WORLD_SIZE is 2: ranks are counted from 0'
    """
    rank, size, local_rank, local_size, _ = names
    if place.rank >= place.size:
        return f"{rank} is {place.rank} and {size} is {place.size}: ranks are counted from 0"
    if place.local_rank > place.rank:
        return f"{local_rank} is {place.local_rank} and {rank} is {place.rank}: a machine has no more ranks than all"
    if environment.get(local_size) and not place.local_rank < place.local_size <= place.size:
        said = f"{local_rank} is {place.local_rank}, {local_size} is {place.local_size} and {size} is {place.size}"
        return f"{said}: at least one of them is wrong"
    if steps := environment.get("SLURM_STEP_NUM_TASKS"):
        if names is SLURM_NAMES and steps != str(place.size):
            return f"{size} is {place.size}, but srun has started {steps} tasks (SLURM_STEP_NUM_TASKS)"
        number = environment.get("SLURM_PROCID", "")
        launched = "TORCHELASTIC_RUN_ID" in environment or RENDEZVOUS in environment
        if not launched and names is TORCH_NAMES and steps == str(place.size) and number != str(place.rank):
            return f"{rank} is {place.rank}, but srun started this as task {number} of {steps} (SLURM_PROCID)"
    return ""


def trainer_devices(recipe: Recipe, gpus: Sequence[Place]) -> dict[str, list[Place]]:
    """Where each rank of the trainer of each base computes on this machine. The trainers get equal parts of the GPUs,
    and share them if there are too few. A base that is not trained is only read, on the CPU.

    >>> one = {"model": "tiny"}
    >>> recipe = Recipe.model_validate({"policies": {"a": one, "b": one, "c": {"model": "x", "frozen": True}}})
    >>> gpus = [Place(device="cuda", gpu=str(i)) for i in range(5)]
    >>> {base: [place.gpu for place in places] for base, places in trainer_devices(recipe, gpus).items()}
    {'a': ['0', '1'], 'b': ['2', '3'], 'c': ['']}
    >>> {base: [place.gpu for place in places] for base, places in trainer_devices(recipe, gpus[:1]).items()}
    {'a': ['0'], 'b': ['0'], 'c': ['']}
    """
    bases = recipe.bases()
    trained = [base for base in bases if recipe.trains(base)]  # trained policies come first
    each = len(gpus) // len(trained)
    found = {base: [Place()] for base in bases}
    for i, base in enumerate(trained):
        own = gpus[i * each : (i + 1) * each] if each else [gpus[i % len(gpus)]] if gpus else []
        found[base] = rank_devices(recipe, own)
    return found


def rank_devices(recipe: Recipe, gpus: Sequence[Place]) -> list[Place]:
    """Where each rank of a trainer on this machine computes. `gpus`: those that it may use."""
    wanted = 1 if recipe.has_slots else recipe.train.ranks
    if not gpus:
        return [Place()] * (1 if wanted == "auto" else wanted)
    if wanted == "auto" or recipe.train.rendezvous:
        return list(gpus)
    if wanted > len(gpus):
        what = f"{wanted} ranks need as many GPUs, but this machine has {len(gpus)} for this trainer"
        raise WindfallError(what, where="train.ranks", fix="Lower it, or set it to 'auto'.")
    return list(gpus[:wanted])
