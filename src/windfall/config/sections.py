"""The sections of a recipe: every key with its type, default and description.

docs/recipes.md is generated from this file by scripts/recipe_reference.py, so each description must make sense on its
own. Values that can be derived need no tuning: 0 or "auto" means that windfall chooses from the model, the device and
the memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from windfall.config.log import Log
from windfall.config.lora import Lora
from windfall.config.section import Beta, Count, Device, FilePath, Section, Share
from windfall.errors import WindfallError
from windfall.types import Sampling


class RunSection(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: letters, digits, dots, dashes and underscores; it starts with a letter or a digit."""
    folder: FilePath = Path("runs")
    """Directory that holds the runs. This run is written to `folder`/`name`."""
    seed: int = Field(default=0, ge=0)
    """Random seed for tasks and sampled tokens."""
    steps: Count = 20
    """Total number of training steps."""
    deterministic: bool = False
    """Make every response the same bit for bit, whatever else is in its batch. Slower."""
    device: Device = "auto"
    """Device for the trainer and the workers of this machine: "auto", "cpu", "cuda", or one GPU such as "cuda:1".
    "auto" uses the GPUs if there are any."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the trainer for tensor operations. 0 uses all cores."""


class Model(Section):
    path: str = "tiny"
    """Model to train: "tiny" (ships with windfall), "smollm2-135m", a directory in Hugging Face format, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the weights. "auto" is bfloat16 on a GPU and float32 on a CPU."""


class ArithmeticEnv(Section):
    name: Literal["arithmetic"]
    mean_steps: float = Field(default=6.0, gt=0)
    """Mean number of steps of a chain of sums after the first step. The number is exponentially distributed."""
    max_steps: Count = 16
    """Upper limit for the steps of one chain."""


class GymEnv(Section):
    name: Literal["gym"]
    task: str
    """Name of a reasoning-gym task, such as "chain_sum"."""
    options: dict[str, Any] = Field(default={})
    """Options of that reasoning-gym task, such as `{ min_terms = 2 }`."""
    instruction: str | None = None
    """Line appended to every question. If left out, the default instruction is used."""
    partial: bool = False
    """Use the task's partial score of the extracted answer as the reward, instead of only right or wrong."""


class JsonLinesEnv(Section):
    name: Literal["jsonl"]
    path: FilePath
    """File of tasks, one JSON object per line."""
    prompt_field: str = "prompt"
    """Name of the field that holds the prompt: text, or a list of messages with "role" and "content"."""
    answer_field: str = "answer"
    """Name of the field that holds the correct answer."""
    scoring: Literal["math", "exact"] = "math"
    """How answers are compared. "math": mathematically equal (math-verify); "exact": the same text."""
    eval_path: FilePath | None = None
    """File of tasks for evaluation only, in the same format; never trained on. Not together with `held_out`."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rows of `path` that is kept for evaluation and never trained on, chosen by a hash of the prompt. Not
    together with `eval_path`."""

    @model_validator(mode="after")
    def _one_evaluation_source(self) -> JsonLinesEnv:
        if self.eval_path is not None and self.held_out:
            raise ValueError("set eval_path or held_out, not both")
        return self


class GuessEnv(Section):
    name: Literal["guess"]
    low: int = 1
    """Smallest number that may have to be guessed."""
    high: int = 20
    """Largest number that may have to be guessed."""
    max_turns: Count = 6
    """Number of guesses allowed per task."""


class CustomEnv(Section):
    name: Literal["custom"]
    factory: str = Field(pattern=r"^[\w.]+:\w+$")
    """Function that returns an Env, as "package.module:function". It is called with `seed` and the options."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments for the factory."""


Env = Annotated[ArithmeticEnv | GymEnv | JsonLinesEnv | GuessEnv | CustomEnv, Field(discriminator="name")]
ENVS: dict[str, type[Section]] = {
    "arithmetic": ArithmeticEnv, "gym": GymEnv, "jsonl": JsonLinesEnv, "guess": GuessEnv, "custom": CustomEnv,
}  # fmt: skip


class AlgorithmSection(Section):
    name: str = "grpo"
    """Algorithm: grpo, dr_grpo, dapo, rloo, reinforce_pp, gspo or cispo."""
    options: dict[str, float | int | str] = Field(default={})
    """Parameters of the algorithm, such as clip_high; see src/windfall/algorithms."""
    kl: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL penalty toward the model that the run started from. 0 disables it."""
    importance: Literal["truncate", "mask", "off"] = "truncate"
    """Correction for tokens sampled by older weights, or by an engine that rounds differently: each is weighted by the
    ratio of the trainer's probability to that of the sampling policy. "truncate" limits the weight to `importance_cap`;
    "mask" ignores tokens whose ratio is above `importance_cap` or below its inverse; "off" does not correct."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Upper limit for the importance weight of a token. With `importance` = "mask" it must be above 1; with "off" it
    has no effect."""

    @model_validator(mode="after")
    def _mask_keeps_something(self) -> AlgorithmSection:
        if self.importance == "mask" and self.importance_cap <= 1:
            raise ValueError(
                f"importance = 'mask' needs an importance_cap above 1, not {self.importance_cap:g}: it keeps the "
                "tokens whose ratio is between 1 / importance_cap and importance_cap"
            )
        return self


class RolloutSection(Section):
    groups: Count = 32
    """Tasks per step. Must be a multiple of `train.minibatches`."""
    group_size: Count = 8
    """Responses per task."""
    max_tokens: Count = 160
    """Upper limit for the tokens of one response, including those that the environment adds to it."""
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Sampling temperature: logits are divided by it."""
    top_p: Share = 1.0
    """Sample only from the most likely tokens whose probabilities add up to this share. 1 disables the cut."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from this many most likely tokens. 0 disables the cut."""
    max_draws: Count = 3
    """Upper limit for dynamic sampling: at most `max_draws` * `groups` tasks are drawn in one step."""
    reward_tries: Count = 3
    """Attempts at computing one reward. After that many failures the reward counts as missing."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Timeout for one call to the environment (`feedback` or `task`), in seconds from when the call starts to run."""
    staleness: int = Field(default=0, ge=0)
    """Upper limit for the staleness of a response: the trainer's version minus the oldest version among the tokens of
    the response, when it is trained on. 0 is synchronous, on-policy training. Above 0, workers generate for later steps
    while the trainer trains (docs/async.md); `run.deterministic` must then be false."""
    on_new_weights: Literal["interrupt", "finish"] = "interrupt"
    """What a worker does with its running responses when there are new weights, if `staleness` is above 0. "interrupt"
    swaps the weights between two engine steps: the responses keep their tokens, are prefilled again and continue.
    "finish" completes them with the old weights, accepts no new work until then, and swaps afterwards."""

    def sampling(self, temperature: float | None = None) -> Sampling:
        """Sampling parameters; `temperature`, if given, replaces that of the recipe."""
        chosen = self.temperature if temperature is None else temperature
        return Sampling(temperature=chosen, top_p=self.top_p, top_k=self.top_k)


class Train(Section):
    lr: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    """Learning rate of AdamW."""
    warmup: int = Field(default=0, ge=0)
    """Optimizer updates over which the learning rate rises to `lr`. 0 starts at `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. "linear" and "cosine" decay to 0 at the last step."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Upper limit for the norm of the gradient; a longer gradient is scaled down to it."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight decay of AdamW."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    """Beta coefficients of AdamW."""
    minibatches: Count = 1
    """Optimizer updates per step. The groups of a step are split evenly among them."""
    micro_tokens: int = Field(default=0, ge=0)
    """Tokens per forward and backward pass. 0 fits it to the memory; lower it if the trainer runs out of memory."""
    checkpoint_activations: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass to save memory. "auto" does so if they would fill much of it."""
    ranks: Count | Literal["auto"] = "auto"
    """Processes of the trainer on each of its machines, each with its own GPU and its own part of the model. "auto"
    uses every GPU of the machine, and one process without a GPU."""
    machines: Count = 1
    """Machines of the trainer. On each one beyond the first, run `windfall ranks`."""
    rendezvous: str = ""
    """Address of this machine, as HOST:PORT, at which the other machines of the trainer find it. Use an address of a
    private network. Needed if `machines` is above 1."""
    machine_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that the trainer waits for its other machines, at the start and after one was lost. Then the run ends,
    and can be resumed."""
    offload: bool = False
    """Keep the float32 weights and the state of the optimizer in the memory of the host instead of the GPU. Slower, but
    larger models fit."""
    rank_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds after which a rank that does not take part in an exchange of weights or gradients counts as lost. The
    trainer then restarts from its last checkpoint."""
    lora: Lora | None = None
    """Train adapters instead of all weights: the keys of [train.lora] below."""
    engine_gap_alarm: float = Field(default=0.05, gt=0)
    """Warn if the mean gap between the log-probs of engine and trainer in one step is above this (nats)."""
    engine_gap_limit: float = Field(default=0.3, gt=0)
    """End the run before the update if that mean gap is above this (nats): the engine and the trainer then do not
    compute the same model."""

    @model_validator(mode="after")
    def _machines_can_meet(self) -> Train:
        host, _, port = self.rendezvous.rpartition(":")
        if self.rendezvous and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"rendezvous must be HOST:PORT, such as '10.0.0.5:29400', not {self.rendezvous!r}")
        if self.machines > 1 and not self.rendezvous:
            raise ValueError("machines above 1 needs rendezvous: the address of this machine, such as '10.0.0.5:29400'")
        return self

    @model_validator(mode="after")
    def _gaps_in_order(self) -> Train:
        if self.engine_gap_alarm > self.engine_gap_limit:
            raise ValueError("engine_gap_alarm must not be above engine_gap_limit")
        return self


class Checkpoint(Section):
    every: Count = 10
    """Steps between two checkpoints. The last step is always saved."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""


class Eval(Section):
    tasks: int = Field(default=64, ge=0)
    """Held-out tasks, with one response each, to evaluate before the first and after the last step. 0 disables
    evaluation. A "jsonl" environment has held-out tasks only if `env.eval_path` or `env.held_out` is set."""
    every: int = Field(default=0, ge=0)
    """Steps between two additional evaluations. 0 evaluates only before the first and after the last step."""
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Sampling temperature for evaluation; 0 is greedy. If left out, `rollout.temperature` is used."""


class EngineSection(Section):
    kv_tokens: int = Field(default=0, ge=0)
    """Tokens that the KV cache can hold. 0 covers what the responses of a step can need, within the free memory."""
    page_size: Count = 16
    """Tokens per page of the KV cache."""
    max_running: int = Field(default=0, ge=0)
    """Upper limit for the responses in one engine step. 0 derives it from the device and the responses per step."""
    max_rows: Count = 2048
    """Upper limit for the tokens in one engine step, including prefill."""


class Fleet(Section):
    local: bool = True
    """Let the trainer's own engine generate at the start of every step, and for the whole step if there is no other
    worker. With `false`, only workers generate."""
    offload: Literal["predict", "feedback", "feedback-no-memory"] = "predict"
    """How long the trainer's own engine generates in each step. "predict" computes it from measured speeds; "feedback"
    is RLBoost's Algorithm 1; "feedback-no-memory" is Algorithm 1 without its memory."""
    first_seed_s: float = Field(default=150.0, ge=0)
    """Initial seconds of generation by the trainer's own engine, if `offload` is one of the feedback policies."""
    trainer_price_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of the trainer's machine in $ per hour. 0 looks it up by device in the built-in price table."""
    workers: int = Field(default=0, ge=0)
    """Worker processes that the run starts on this machine, and restarts when they end. Each uses one GPU, the one with
    the fewest processes of this run. Other workers may join."""
    workers_max: int = Field(default=0, ge=0)
    """Upper limit for autoscaling of the workers on this machine. 0 disables it; otherwise the run starts with
    `workers` and scales between 0 and this limit by measured throughput and price."""
    autoscale: Literal["value", "wait_share"] = "value"
    """Rule for how many workers are worth their price. "value" computes tokens per dollar from measured throughput and
    prices; "wait_share" is AstraFlow's rule, which looks only at how long the trainer waits, and needs
    `rollout.staleness` above 0."""
    worker_threads: Count = 1
    """CPU threads of each worker on this machine."""
    worker_memory: float = Field(default=0.0, ge=0, lt=1)
    """Share of a device's free memory for the KV cache of each worker. 0 uses 0.4, divided by the number of workers
    that share a GPU."""
    kind: Literal["reserved", "spot", "borrowed"] = "reserved"
    """Lease terms of the workers on this machine."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of one worker on this machine in $ per hour. 0 looks it up by device in the built-in price table."""
    host: str = "127.0.0.1"
    """Address on which the controller and the weight server listen. "0.0.0.0" lets other machines join."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the controller. 0 chooses a free one."""
    weights_port: int = Field(default=0, ge=0, le=65535)
    """Port of the weight server. 0 chooses a free one."""
    max_workers: Count = 2000
    """Upper limit for the workers in the fleet; further workers are refused."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Seconds between two heartbeats of a worker."""
    suspect_s: float = Field(default=3.0, gt=0)
    """Seconds without a heartbeat after which a worker gets no new work. Must be above `heartbeat_s`."""
    gone_s: float = Field(default=8.0, gt=0)
    """Seconds without a heartbeat after which a worker counts as lost and its responses move to other workers. Must be
    above `suspect_s`."""
    stalled_s: float = Field(default=60.0, gt=0)
    """Seconds without progress after which a worker counts as lost although it sends heartbeats: it has work but makes
    no engine step, or it pulls weights but receives no bytes."""
    tls_cert: FilePath | None = None
    """Certificate chain (PEM) of the controller and the weight server. If set, workers connect over https."""
    tls_key: FilePath | None = None
    """Private key (PEM) of `tls_cert`. Set both or neither."""

    @model_validator(mode="after")
    def _consistent(self) -> Fleet:
        if not self.heartbeat_s < self.suspect_s < self.gone_s:
            raise ValueError(
                "heartbeat_s < suspect_s < gone_s must hold: each limit must span several intervals of the previous one"
            )
        if self.workers_max and not 1 <= self.workers <= self.workers_max:
            raise ValueError(f"workers = {self.workers} must be from 1 to workers_max = {self.workers_max}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        return self


class Techniques(Section):
    """Switches for measuring the benefit of each technique (benchmarks/harvest.py). Otherwise leave all of them on."""

    seeding: bool = True
    """Let the trainer's own engine generate at the start of a step. Off: it generates only if there is no other
    worker."""
    migration: bool = True
    """Continue the responses of a lost worker from their last token. Off: they start again from the prompt."""
    balancing: bool | Literal["algorithm2"] = True
    """Place responses by measured speed, and move running ones. Off: workers take turns, and nothing moves.
    "algorithm2" is RLBoost's Algorithm 2."""
    pipelining: bool = True
    """Train on finished groups while others are still being generated. Off: train when all groups are finished."""


class Trace(Section):
    nodes: int = Field(default=0, ge=0)
    """Upper limit for the machines of the trace that are up at once. Each is one worker process that is started and
    killed as the trace says. 0 disables the trace."""
    file: FilePath | None = None
    """Availability trace to replay: lines of `milliseconds,add,node` (or `remove`), lines of `date, time, count`, or
    SkyPilot's JSON. If left out, a random trace is generated."""
    start_s: float = Field(default=0.0, ge=0)
    """Seconds to skip at the start of `file`."""
    mean_up_s: float = Field(default=60.0, gt=0)
    """Mean seconds that a machine of a generated trace stays up; exponentially distributed."""
    mean_down_s: float = Field(default=30.0, gt=0)
    """Mean seconds that a machine of a generated trace stays down; exponentially distributed."""
    seed: int = Field(default=0, ge=0)
    """Random seed of a generated trace."""
    speedup: float = Field(default=1.0, gt=0)
    """Seconds of the trace that pass in one second of the run."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of one machine of the trace in $ per hour, while it is up. 0 looks it up in the built-in price table."""


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
    worker_spread: float = Field(default=0.0, ge=0)
    """Spread of the speeds of machines: the standard deviation of the logarithm of the speed. 0 makes all equal."""
    boot_s: float = Field(default=60.0, ge=0)
    """Seconds from the start of a machine until its worker connects."""
    weights_bytes: float = Field(default=16e9, ge=0)
    """Bytes that a worker downloads for one version of the weights."""
    egress_bytes_per_s: float = Field(default=25e9, gt=0)
    """Upload bandwidth of the trainer in bytes per second, shared by all workers that pull weights."""
    ingress_bytes_per_s: float = Field(default=6.25e9, gt=0)
    """Download bandwidth of one worker in bytes per second."""
    latency_s: float = Field(default=0.0, ge=0)
    """Latency of one message in seconds, in either direction."""
    notice_s: float = Field(default=0.0, ge=0)
    """Seconds of warning before a machine is preempted. 0 means no warning."""
    save_s: float = Field(default=0.0, ge=0)
    """Seconds to save one checkpoint."""
    trainer_mean_up_s: float = Field(default=0.0, ge=0)
    """Mean seconds until the trainer process is lost; it then restarts from its last checkpoint. 0 means never."""
    trainer_down_s: float = Field(default=60.0, ge=0, lt=600)
    """Seconds until a lost trainer process has been replaced."""
    controller_mean_up_s: float = Field(default=0.0, ge=0)
    """Mean seconds until the controller process is lost; it then restarts from its journal. 0 means never."""
    controller_down_s: float = Field(default=5.0, ge=0)
    """Seconds until the replacement of a lost controller accepts connections."""
    prompt_tokens: Count = 256
    """Tokens in the prompt of every task."""
    median_tokens: float = Field(default=1000.0, gt=0)
    """Median length of a response in tokens. Lengths are log-normal, cut off at `rollout.max_tokens`."""
    sigma: float = Field(default=0.7, ge=0)
    """Standard deviation of the logarithm of the response length."""
    alike: float = Field(default=0.5, ge=0, le=1)
    """Correlation of the logarithms of the response lengths within a group."""
    lengths_file: FilePath | None = None
    """File to draw response lengths from, instead of a log-normal: one number per line, or the event log of a run."""
    reward_mean: float = Field(default=0.5, ge=0, le=1)
    """Probability that the reward of a response is 1; otherwise it is 0."""
    reward_s: float = Field(default=0.0, ge=0)
    """Seconds to compute one reward."""
    market: Literal["machines", "poisson", "bursts", "diurnal"] = "machines"
    """How machines come and go if `trace.file` is not set; see docs/sim.md."""
    arrivals_per_h: float = Field(default=10.0, ge=0)
    """Machines that arrive per hour if `market` is "poisson". At most `trace.nodes` are up at once."""
    bursts_per_h: float = Field(default=1.0, ge=0)
    """Bursts of preemptions per hour if `market` is "bursts"."""
    burst_share: Share = 0.5
    """Share of the running machines that one burst preempts if `market` is "bursts"."""
    day_s: float = Field(default=86400.0, gt=0)
    """Length of a day in seconds if `market` is "diurnal"."""
    prices_file: FilePath | None = None
    """File with the price of a machine of the trace over time, in lines of `seconds,usd_per_h`. If left out,
    `trace.price_usd_per_h` applies throughout."""
    granule: int = Field(default=0, ge=0)
    """Real tokens per simulated token. 1 is exact and slow; 0 chooses 1/32 of the median length."""
    seconds: float = Field(default=0.0, ge=0)
    """Virtual seconds after which the simulation stops. 0 stops after `run.steps`."""
    skip_steps: int = Field(default=2, ge=0)
    """Steps at the start that the figures leave out, because speeds are still being measured."""


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
                f"{self.train.minibatches} equal parts. Set rollout.groups to a multiple of train.minibatches."
            )
        if self.fleet.autoscale == "wait_share" and self.rollout.staleness == 0:
            raise ValueError(
                "fleet.autoscale = 'wait_share' needs rollout.staleness above 0: in synchronous training the trainer's "
                "wait does not show how many workers it needs. Set rollout.staleness, or fleet.autoscale = 'value'."
            )
        if self.run.deterministic and self.rollout.staleness > 0:
            raise ValueError(
                f"run.deterministic = true excludes rollout.staleness = {self.rollout.staleness}: in asynchronous "
                "training, the order in which responses finish decides what each step is trained on, so the run cannot "
                "be repeated bit for bit. Set rollout.staleness = 0, or run.deterministic = false."
            )
        return self
