"""The sections of a recipe: every key, its type, its default and what it means (docs/recipes.md is made from this).

What can be derived is no knob: a value of 0 or "auto" means that it is worked out from the model, the device and the
memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from windfall.config.base import Beta, Count, FilePath, Section, Share
from windfall.config.sim_kind import SimKind
from windfall.errors import WindfallError
from windfall.types import Sampling


class RunSection(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Letters, digits, dot, dash and underscore."""
    folder: FilePath = Path("runs")
    """Runs are written to folder/name."""
    seed: int = Field(default=0, ge=0)
    """Decides tasks and tokens."""
    steps: Count = 20
    """Training steps in all."""
    deterministic: bool = False
    """Bit for bit the same whatever shares a batch. Slower."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one."""
    threads: int = Field(default=0, ge=0)
    """CPU threads for tensor work; 0 takes all cores."""


class Model(Section):
    path: str = "tiny"
    """"tiny" (ships with windfall), "smollm2-135m", a folder in Hugging Face format, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""


class ArithmeticEnv(Section):
    name: Literal["arithmetic"]
    mean_steps: float = Field(default=6.0, gt=0)
    """Steps of a chain, less one, on average; exponentially distributed."""
    max_steps: Count = 16
    """The longest chain."""


class GymEnv(Section):
    name: Literal["gym"]
    task: str
    """One of reasoning-gym's tasks, such as "chain_sum"."""
    options: dict[str, Any] = Field(default={})
    """That task's own options."""
    instruction: str | None = None
    """A line put after every question; None takes the default one."""
    partial: bool = False
    """Reward the task's own partial score of the extracted answer, not only right or wrong."""


class JsonLinesEnv(Section):
    name: Literal["jsonl"]
    path: FilePath
    """One JSON object per line."""
    prompt_field: str = "prompt"
    """Where the prompt is in each object: text, or a list of messages with "role" and "content"."""
    answer_field: str = "answer"
    """Where the right answer is."""
    scoring: Literal["math", "exact"] = "math"
    """math: equal as mathematics, by math-verify; exact: equal as text."""
    eval_path: FilePath | None = None
    """A file with rows to evaluate on, none of them trained on."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rows of `path` to evaluate on and not to train on, chosen by a hash of the prompt."""

    @model_validator(mode="after")
    def _one_of_them(self) -> JsonLinesEnv:
        if self.eval_path is not None and self.held_out:
            raise ValueError("set eval_path or held_out, not both")
        return self


class GuessEnv(Section):
    name: Literal["guess"]
    low: int = 1
    """The smallest number it may be."""
    high: int = 20
    """The largest."""
    max_turns: Count = 6
    """Guesses allowed."""


class CustomEnv(Section):
    name: Literal["custom"]
    factory: str = Field(pattern=r"^[\w.]+:\w+$")
    """"package.module:function", called with seed and the options; returns an Env."""
    options: dict[str, Any] = Field(default={})
    """Passed on as keyword arguments."""


Env = Annotated[ArithmeticEnv | GymEnv | JsonLinesEnv | GuessEnv | CustomEnv, Field(discriminator="name")]
ENVS: dict[str, type[Section]] = {
    "arithmetic": ArithmeticEnv, "gym": GymEnv, "jsonl": JsonLinesEnv, "guess": GuessEnv, "custom": CustomEnv,
}  # fmt: skip


class AlgorithmSection(Section):
    name: str = "grpo"
    """grpo, dr_grpo, dapo, rloo, reinforce_pp, gspo or cispo."""
    options: dict[str, float | int | str] = Field(default={})
    """The algorithm's own parameters, such as clip_high: see windfall/algorithms."""
    kl: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL term to the model that the run started from."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Truncated importance sampling where trainer and engine disagree on a log-prob."""


class RolloutSection(Section):
    groups: Count = 32
    """Tasks per step."""
    group_size: Count = 8
    """Responses to each task."""
    max_tokens: Count = 160
    """The most tokens of a response, the environment's words within it included."""
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Divides the logits before a token is drawn."""
    top_p: Share = 1.0
    """Draw from the likeliest tokens that make up this share; 1 cuts nothing."""
    top_k: int = Field(default=0, ge=0)
    """Draw from so many likeliest tokens; 0 cuts nothing."""
    max_draws: Count = 3
    """Dynamic sampling draws at most this many times `groups` tasks in one step."""
    reward_tries: Count = 3
    """A reward that fails so often is missing."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Limit for one call of the environment (`feedback` or `task`), counted from when the call begins to run."""

    def sampling(self, temperature: float | None = None) -> Sampling:
        """How tokens are drawn, at another temperature if one is given."""
        chosen = self.temperature if temperature is None else temperature
        return Sampling(temperature=chosen, top_p=self.top_p, top_k=self.top_k)


class Train(Section):
    lr: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    """The learning rate of AdamW."""
    warmup: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up; linear and cosine end at 0."""
    clip_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to at most this norm."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """AdamW's."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    """AdamW's."""
    minibatches: Count = 1
    """Optimizer updates per step."""
    micro_tokens: int = Field(default=0, ge=0)
    """Tokens that go through the model at once; 0 chooses."""
    checkpoint_activations: bool | Literal["auto"] = "auto"
    """Compute activations again in the backward pass; auto: when they would take much of the memory."""
    engine_gap_alarm: float = Field(default=0.05, gt=0)
    """Warn when the mean gap of a step, in nats, between the log-probs of engine and trainer is above this."""
    engine_gap_limit: float = Field(default=0.3, gt=0)
    """Above this, the update is not made and the run ends: engine and trainer do not compute the same model."""

    @model_validator(mode="after")
    def _gaps_in_order(self) -> Train:
        if self.engine_gap_alarm > self.engine_gap_limit:
            raise ValueError("engine_gap_alarm must not be above engine_gap_limit")
        return self


class Checkpoint(Section):
    every: Count = 10
    """Steps between two checkpoints; the last step always has one."""
    keep: Count = 2
    """How many of the newest are kept."""


class Eval(Section):
    tasks: int = Field(default=64, ge=0)
    """Held-out tasks, one response each, before the first and after the last step; 0: no evaluation. A JSONL file has
    held-out rows with env.eval_path or env.held_out."""
    every: int = Field(default=0, ge=0)
    """Also after every so many steps."""
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """None: the same as rollout.temperature."""


class EngineSection(Section):
    kv_tokens: int = Field(default=0, ge=0)
    """Tokens that the KV cache holds; 0: as many as a step's responses can need, within the memory there is."""
    page_size: Count = 16
    """Tokens per page of the KV cache."""
    max_running: int = Field(default=0, ge=0)
    """Responses in one engine step; 0 chooses."""
    max_rows: Count = 2048
    """Tokens in one engine step, prompts included."""


class Fleet(Section):
    local: bool = True
    """The trainer's own engine rolls out, too, at the start of every step; alone, if no other worker is there."""
    offload: Literal["predict", "feedback", "feedback-no-memory"] = "predict"
    """How it is decided until when: computed from what was measured; RLBoost's Algorithm 1; that without its memory."""
    first_seed_s: float = Field(default=150.0, ge=0)
    """What "feedback" starts from."""
    trainer_price_usd_per_h: float = Field(default=0.0, ge=0)
    """Of the trainer's machine."""
    workers: int = Field(default=0, ge=0)
    """Worker processes that the run starts on this machine, and starts again when they end. Others may join."""
    workers_max: int = Field(default=0, ge=0)
    """Not 0: the run begins with `workers`, then keeps between 0 and so many, by what measured rates and prices say."""
    worker_threads: Count = 1
    """CPU threads of each of them."""
    worker_memory: float = Field(default=0.4, gt=0, lt=1)
    """The part of a GPU's free memory that the KV cache of each of them may take; several on one GPU need less each."""
    kind: Literal["reserved", "spot", "borrowed"] = "reserved"
    """On what terms this machine's workers are held."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """Of one of them."""
    host: str = "127.0.0.1"
    """Where the controller and the weight server listen; "0.0.0.0" lets other machines join."""
    port: int = Field(default=0, ge=0, le=65535)
    """The controller's; 0 chooses one."""
    weights_port: int = Field(default=0, ge=0, le=65535)
    """The weight server's; 0 chooses one."""
    max_workers: Count = 2000
    """More than so many are not let in."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """How often a worker says that it lives."""
    suspect_s: float = Field(default=3.0, gt=0)
    """Silent for so long, a worker gets no new work."""
    gone_s: float = Field(default=8.0, gt=0)
    """Silent for so long, it is given up, and its responses go on elsewhere."""
    stalled_s: float = Field(default=60.0, gt=0)
    """So is one that has work and makes no engine step, or pulls weights and gets no byte of them, for this long."""
    tls_cert: FilePath | None = None
    """Certificate chain (PEM): workers then dial https."""
    tls_key: FilePath | None = None
    """Its private key."""

    @model_validator(mode="after")
    def _in_order(self) -> Fleet:
        if not self.heartbeat_s < self.suspect_s < self.gone_s:
            raise ValueError("heartbeat_s < suspect_s < gone_s must hold: each waits for several of the one before")
        if self.workers_max and not 1 <= self.workers <= self.workers_max:
            raise ValueError(f"workers = {self.workers} must be from 1 to workers_max = {self.workers_max}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self


class Techniques(Section):
    """What each is worth can be measured by leaving it out (benchmarks/harvest.py). Otherwise leave them on."""

    seeding: bool = True
    """The trainer's own engine generates at the start of a step; off: only when no other worker is there."""
    migration: bool = True
    """Responses of a lost worker go on from their last token; off: from zero."""
    balancing: bool | Literal["algorithm2"] = True
    """Placing by measured speed, and moving what runs; off: in turn, and nothing moves; or RLBoost's Algorithm 2."""
    pipelining: bool = True
    """Groups are trained on while others are still being made; off: when all are."""


class Trace(Section):
    nodes: int = Field(default=0, ge=0)
    """Machines that come and go, each with one worker that is really started and really killed; 0: no trace."""
    file: FilePath | None = None
    """An availability trace, `milliseconds,add|remove,node` or `date, time, count`; none: one is drawn."""
    start_s: float = Field(default=0.0, ge=0)
    """Where in the file to begin."""
    mean_up_s: float = Field(default=60.0, gt=0)
    """Of a drawn trace: how long a machine stays, on average; exponentially distributed."""
    mean_down_s: float = Field(default=30.0, gt=0)
    """And how long it stays away."""
    seed: int = Field(default=0, ge=0)
    """Of a drawn trace."""
    speedup: float = Field(default=1.0, gt=0)
    """Trace seconds per second."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """Of one machine while it is there."""


class Sim(Section):
    """For `windfall sim`: the machines as formulas. Everything else of the recipe means what it means in a real run."""

    trainer: dict[str, float] = Field(default={})
    """The trainer's machine: fixed_s, each_s, context_s, prefill_s, train_s, update_s; see docs/sim.md."""
    worker: dict[str, float] = Field(default={})
    """A worker's, likewise; `windfall sim calibrate` prints either."""
    trainer_slots: Count = 1024
    """Responses that the trainer's engine runs at once."""
    worker_slots: Count = 256
    """And a worker's."""
    worker_kv_tokens: int = Field(default=0, ge=0)
    """Tokens that a worker has room for, prompts included: what has none waits there; 0: there is room for all."""
    kinds: list[SimKind] = Field(default=[])
    """Several kinds of machines in the trace, each a [[sim.kinds]]; none: all are as sim.worker says."""
    worker_spread: float = Field(default=0.0, ge=0)
    """How much machines differ in speed: the standard deviation of its logarithm."""
    boot_s: float = Field(default=60.0, ge=0)
    """From a machine's start until its worker dials in."""
    weights_bytes: float = Field(default=16e9, ge=0)
    """Of one pull."""
    egress_bytes_per_s: float = Field(default=25e9, gt=0)
    """What the trainer sends, shared by all who pull."""
    ingress_bytes_per_s: float = Field(default=6.25e9, gt=0)
    """What one worker takes in."""
    latency_s: float = Field(default=0.0, ge=0)
    """Of a message, in either direction."""
    notice_s: float = Field(default=0.0, ge=0)
    """A machine is warned so long before it is taken; 0: it is not."""
    save_s: float = Field(default=0.0, ge=0)
    """Of a checkpoint."""
    trainer_mean_up_s: float = Field(default=0.0, ge=0)
    """The trainer's process is lost after so long on average, and goes on from its last checkpoint; 0: never."""
    trainer_down_s: float = Field(default=60.0, ge=0, lt=600)
    """Until the next one is there."""
    controller_mean_up_s: float = Field(default=0.0, ge=0)
    """So is the controller's, which goes on from its journal; 0: never."""
    controller_down_s: float = Field(default=5.0, ge=0)
    """Until the next one listens."""
    prompt_tokens: Count = 256
    """Of every task."""
    median_tokens: float = Field(default=1000.0, gt=0)
    """Response lengths are log-normal with this median, cut off at rollout.max_tokens."""
    sigma: float = Field(default=0.7, ge=0)
    """The standard deviation of their logarithm."""
    alike: float = Field(default=0.5, ge=0, le=1)
    """Its correlation within a group."""
    lengths_file: FilePath | None = None
    """Draw lengths from these instead: a number per line, or the event log of a run."""
    reward_mean: float = Field(default=0.5, ge=0, le=1)
    """Rewards are 1 with this probability, else 0."""
    reward_s: float = Field(default=0.0, ge=0)
    """How long a reward takes."""
    market: Literal["machines", "poisson", "bursts", "diurnal"] = "machines"
    """How machines come and go where [trace] names no file (docs/sim.md)."""
    arrivals_per_h: float = Field(default=10.0, ge=0)
    """Of poisson: machines that are given per hour, at most trace.nodes at a time."""
    bursts_per_h: float = Field(default=1.0, ge=0)
    """Of bursts."""
    burst_share: Share = 0.5
    """Of bursts: of the machines that are up, so many are taken at once."""
    day_s: float = Field(default=86400.0, gt=0)
    """Of diurnal: how long a day is."""
    prices_file: FilePath | None = None
    """Price of a machine of the trace over time, lines of `seconds,usd_per_h`; none: trace.price_usd_per_h."""
    granule: int = Field(default=0, ge=0)
    """Real tokens that a simulated one stands for; 0: a thirty-second of the median length, 1: exact and slow."""
    seconds: float = Field(default=0.0, ge=0)
    """Stop after so many virtual seconds; 0: after run.steps."""
    skip_steps: int = Field(default=2, ge=0)
    """Steps at the start that figures leave out: rates are still being measured."""


class Log(Section):
    tensorboard: bool = False
    """Also write every number for TensorBoard (`pip install 'windfall[tensorboard]'`)."""


class Recipe(Section):
    run: RunSection = RunSection()
    model: Model = Model()
    env: Env = ArithmeticEnv(name="arithmetic")
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    engine: EngineSection = EngineSection()
    fleet: Fleet = Fleet()
    trace: Trace = Trace()
    techniques: Techniques = Techniques()
    sim: Sim = Sim()
    log: Log = Log()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        from windfall.algorithms import make

        try:
            make(self.algorithm.name, **self.algorithm.options)
        except WindfallError as e:
            raise ValueError(str(e).replace("\n", ". ")) from e
        if self.rollout.groups % self.train.minibatches:
            raise ValueError(
                f"rollout.groups = {self.rollout.groups} cannot be split into train.minibatches = "
                f"{self.train.minibatches} equal parts. Make the first a multiple of the second."
            )
        return self
