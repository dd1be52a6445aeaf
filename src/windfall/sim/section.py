"""The section [sim]: the simulated machines and responses."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from windfall.recipe.section_base import Count, FilePath, Section

NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class SimKind(Section):
    """One kind of machine in a simulated trace that has several."""

    name: str = Field(min_length=1)
    """Device name of this kind, as leases, bills and advice show it."""
    share: Count = 1
    """Relative number of machines of this kind. Kinds are assigned to machines in rotation, by their shares."""
    worker: dict[str, float]
    """Speed formula of a machine of this kind, with the keys of `sim.worker`."""
    slots: Count = 256
    """Responses that a machine of this kind runs at once."""
    kv_tokens: int = Field(default=0, ge=0)
    """Tokens that fit into its KV cache. 0 means no limit."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of one machine of this kind in $ per hour. 0 uses the price of the trace."""


class SimRegion(Section):
    """A region with machines of a simulated run, and its link to the other regions."""

    name: str = Field(min_length=1)
    """Name of the region, as in leases. The trainer is in `weights.region`."""
    share: int = Field(default=1, ge=0)
    """Relative number of machines in this region. Regions are assigned to machines in rotation, by their shares."""
    bytes_per_s: float = Field(default=1.25e8, gt=0)
    """Bandwidth between this region and each other one, in bytes per second in each direction. Between two regions
    that have one, the lower counts."""
    latency_s: float = Field(default=0.08, ge=0)
    """Latency between this region and each other one in seconds. Between two regions, the higher counts."""


class SimPolicy(Section):
    """What differs for one policy of a recipe with [policies], in a table such as [sim.policies.verifier]. The other
    values are those of [sim]."""

    trainer: dict[str, float] = Field(default={})
    """Keys of `sim.trainer` that differ for the trainer of this policy."""
    worker: dict[str, float] = Field(default={})
    """Keys of `sim.worker` that differ for workers that have this policy. Policies on one base have the same ones."""
    median_tokens: float | None = Field(default=None, gt=0)
    """Median length of what the policy says at a time, in tokens. If left out: `sim.median_tokens`."""
    sigma: float | None = Field(default=None, ge=0)
    """Standard deviation of the logarithm of that length. If left out: `sim.sigma`."""
    prompt_tokens: Count | None = None
    """Tokens of the prompt with which a conversation of the policy begins. If left out: `sim.prompt_tokens`."""


class Sim(Section):
    """The machines of `windfall sim`, as formulas. The rest of the recipe means the same as in a real run."""

    trainer: dict[str, float] = Field(default={})
    """Speed formula of the trainer's machine, in seconds: fixed_s, each_s, context_s, over_batch, over_s, prefill_s,
    train_s, update_s; see docs/sim.md. `windfall sim calibrate` prints it."""
    worker: dict[str, float] = Field(default={})
    """Speed formula of a worker, with the same keys. `windfall sim calibrate` prints it."""
    trainer_slots: Count = 1024
    """Responses that the trainer's engine runs at once."""
    worker_slots: Count = 256
    """Responses that a worker runs at once."""
    worker_kv_tokens: int = Field(default=0, ge=0)
    """Tokens that fit into a worker's KV cache, prompts included; responses that do not fit wait. 0 means no limit."""
    kinds: list[SimKind] = Field(default=[])
    """Kinds of machines in the trace, each in a [[sim.kinds]] table. If empty, all machines are like `sim.worker`."""
    regions: list[SimRegion] = Field(default=[])
    """Regions of the machines, each in a [[sim.regions]] table. If empty, all are where the trainer is."""
    worker_spread: float = Field(default=0.0, ge=0)
    """Spread of the speeds of machines: the standard deviation of the logarithm of the speed. 0 makes all equal."""
    boot_s: float = Field(default=60.0, ge=0)
    """Seconds from the start of a machine until its worker connects."""
    weights_bytes: float = Field(default=16e9, ge=0)
    """Size of a full copy of the weights in bytes."""
    adapter_bytes: float = Field(default=1e8, ge=0)
    """Size of one version of a policy that is an adapter, in bytes, with [policies]. Its base is read once."""
    delta_bytes: float = Field(default=0.0, ge=0)
    """Size of the delta between two versions in bytes. 0: there are none, and each version is read as a full copy."""
    egress_bytes_per_s: float = Field(default=25e9, gt=0)
    """Upload bandwidth of the trainer in bytes per second, shared by all that read weights from it."""
    ingress_bytes_per_s: float = Field(default=6.25e9, gt=0)
    """Bandwidth of one worker in bytes per second, in each direction. `weights.upload_gbit_per_s` limits what it sends
    further."""
    latency_s: float = Field(default=0.0, ge=0)
    """Latency of one message in seconds, in either direction."""
    notice_s: float = Field(default=0.0, ge=0)
    """Seconds of warning before a machine is preempted. 0 means no warning."""
    save_s: float = Field(default=0.0, ge=0)
    """Seconds to save one checkpoint."""
    prompt_tokens: Count = 256
    """Tokens in the prompt of every task."""
    median_tokens: float = Field(default=1000.0, gt=0)
    """Median length of a response in tokens. Lengths are log-normal, cut off at `rollout.max_tokens`."""
    sigma: float = Field(default=0.7, ge=0)
    """Standard deviation of the logarithm of the response length."""
    alike: float = Field(default=0.5, ge=0, le=1)
    """Correlation of the logarithms of the response lengths within a group."""
    turns: float = Field(default=1.0, ge=1)
    """Mean number of turns of a response; geometrically distributed. With more than one, `median_tokens`, `sigma` and
    `lengths_file` are those of a turn."""
    script: list[Annotated[tuple[str, Share], Field(strict=False)]] = Field(default=[])
    """Who speaks in a response, with [policies]: roles in order, each with the probability that it follows, such as
    [["solver", 1.0], ["verifier", 1.0], ["solver:again", 0.4]]. A response ends with the first role that does not
    follow. If empty, every policy speaks once."""
    policies: dict[str, SimPolicy] = Field(default={})
    """What differs between policies, each in a [sim.policies.NAME] table."""
    in_turns: bool = False
    """Train the policies of all bases in turn, on one machine. If false, each base has a machine of its own."""
    env_s: float = Field(default=1.0, ge=0)
    """Median seconds that the environment works between two turns. Times are log-normal."""
    env_sigma: float = Field(default=0.0, ge=0)
    """Standard deviation of the logarithm of that time."""
    observation_tokens: float = Field(default=100.0, gt=0)
    """Median length of an observation, the environment's answer to a turn, in tokens. Lengths are log-normal."""
    observation_sigma: float = Field(default=0.0, ge=0)
    """Standard deviation of the logarithm of that length."""
    acceptance: list[Annotated[tuple[NotNegative, Annotated[float, Field(ge=1)]], Field(strict=False)]] = Field(
        default=[]
    )
    """Speculative decoding: tokens per step by the number of siblings to draft from, as pairs of both, such as
    [[0, 1.7], [1, 2.04], [5, 2.32], [15, 2.53]]. Empty simulates engines that do not draft; see docs/sim.md."""
    verify_rows: Count = 4
    """Rows that each response has in a step that verifies drafts. An engine drafts only while that is faster."""
    lengths_file: FilePath | None = None
    """File to draw response lengths from, instead of a log-normal: one number per line, or the event log of a run."""
    reward_mean: float = Field(default=0.5, ge=0, le=1)
    """Probability that the reward of a response is 1; otherwise it is 0."""
    reward_s: float = Field(default=0.0, ge=0)
    """Seconds to compute one reward."""
    granule: int = Field(default=0, ge=0)
    """Real tokens per simulated token. 1 is exact and slow; 0 chooses 1/32 of the median length."""
    seconds: float = Field(default=0.0, ge=0)
    """Virtual seconds after which the simulation stops. 0 stops after `run.steps`."""
    skip_steps: int = Field(default=2, ge=0)
    """Steps at the start that the figures leave out, because speeds are still being measured."""
