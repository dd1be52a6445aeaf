"""The sections of a recipe: every key with its type, default and description.

docs/recipes.md is generated from this file by scripts/recipe_reference.py, so each description must make sense on its
own. Values that can be derived need no tuning: 0 or "auto" means that windfall chooses from the model, the device and
the memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from windfall.errors import WindfallError, nearest
from windfall.recipe import policies as policy_sections
from windfall.recipe.env_sections import AgentEnv, AgentLimits, ArithmeticEnv, DatasetEnv, Env
from windfall.recipe.fleet import Fleet
from windfall.recipe.lora import Lora
from windfall.recipe.policies import PolicyName, PolicySection
from windfall.recipe.section_base import (
    Beta,
    BucketUrl,
    Count,
    Device,
    Endpoint,
    FilePath,
    Section,
    Share,
    explained,
    with_parts,
)
from windfall.types import ZONE_USD_PER_GB, Sampling


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


class ChatSection(Section):
    """How prompts and observations are rendered for the model. By default, its own chat template is used."""

    enabled: bool = True
    """Render prompts with the chat template. Off, or with a model that has none, prompts must be text and are used as
    they are."""
    template: str = ""
    """Chat template that replaces the model's own: the path of a Jinja file, or the template itself. The run keeps the
    contents of the file as they are at its start. Empty uses the model's own."""
    arguments: dict[str, Any] = Field(default={})
    """Variables for the template, such as `{ enable_thinking = false }`."""

    def source(self) -> str | None:
        """The text of the template. None: the model's own."""
        if not self.template:
            return None
        if "{" in self.template:
            return self.template
        path = Path(self.template)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            fix = "Give the path of a text file, or a template, which contains a '{'."
            raise WindfallError(f"cannot read the template: {e}", where=f"chat.template = {path}", fix=fix) from e
        if "{" not in text:
            raise WindfallError("this is not a chat template", where=f"chat.template = {path}", fix="It has no '{'.")
        return text

    def trained(self) -> str | None:
        """The template that the model is trained with. None: its own."""
        return self.source() if self.enabled else None

    def with_source(self) -> ChatSection:
        """The same section with the contents of its file instead of the path."""
        return self.model_copy(update={"template": self.source() or ""})

    def options(self) -> dict[str, Any]:
        """Keyword arguments for models.text.Text."""
        return {"template": self.source(), "enabled": self.enabled, "arguments": self.arguments}


class AlgorithmSection(Section):
    name: str = "grpo"
    """Algorithm: grpo, dr_grpo, dapo, rloo, reinforce_pp, gspo or cispo."""
    options: dict[str, float | int | str] = Field(default={})
    """Parameters of the algorithm, such as clip_high; see src/windfall/algorithms."""
    kl: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL penalty toward the model that the run started from; for adapters, toward their base, also if
    they start from `train.lora.path`. 0 disables it."""
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
    turn_tokens: int = Field(default=0, ge=0)
    """Upper limit for the tokens that the policy samples in one turn. A turn that reaches it ends there, and the
    environment answers. 0: only `max_tokens` limits a turn. An agent's call may ask for fewer; its calls that have no
    limit of either kind are answered one after the other."""
    out_of_tokens: Annotated[float, Field(allow_inf_nan=False)] | Literal["missing"] = 0.0
    """Reward of a response that has no tokens left while its environment asks for another turn, if the environment does
    not say what it is worth. "missing" gives it no reward: it is counted and not trained on."""
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
    reward_processes: int = Field(default=0, ge=0)
    """Upper limit for the processes in which the environment runs; they are started as they are needed. 0 allows one
    per core for calls that compute, and up to 32 for calls that wait."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Texts that end the policy's turn, such as "</answer>", or special tokens, such as "<|im_end|>". The turn includes
    the text that ended it."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Timeout for one call to the environment (`feedback` or `task`), in seconds from when the call starts to run."""
    staleness: int = Field(default=0, ge=0)
    """Upper limit for the staleness of a response: the trainer's version minus the oldest version among the tokens of
    the response, when it is trained on. 0 is synchronous, on-policy training. Above 0, workers generate for later steps
    while the trainer trains (docs/async.md); `run.deterministic` must then be false."""
    replay: float = Field(default=0.0, ge=0, lt=1)
    """Share of `groups` that are replayed: the policy was trained on them in earlier steps, and they are not generated
    again (docs/async.md). Until there are enough of them, batches are smaller. 0 disables replay."""
    replay_age: Count = 8
    """Upper limit for the staleness of replayed responses; `staleness` limits the others, and must be lower."""
    select: Literal["off", "greso"] = "off"
    """Which prompts to generate responses for. "greso" skips prompts whose last groups had equal rewards: the more of
    them in a row, the more likely (docs/algorithms.md). "off" skips none."""
    on_new_weights: Literal["interrupt", "finish"] = "interrupt"
    """What a worker does with its running responses when there are new weights, if `staleness` is above 0. "interrupt"
    swaps the weights between two engine steps: the responses keep their tokens, are prefilled again and continue.
    "finish" completes them with the old weights, accepts no new work until then, and swaps afterwards."""

    order: Literal["context", "fifo"] = "fifo"
    """Order in which responses begin when workers do not have room for all of them. "context" begins with one response
    of every task, then takes those that are expected to be longest, by their siblings and by earlier epochs of the
    task. "fifo" takes them as they were drawn."""

    @property
    def fresh_groups(self) -> int:
        """Groups of a step that are generated. The others are replayed."""
        return max(1, self.groups - round(self.groups * self.replay))

    def sampling(self, temperature: float | None = None) -> Sampling:
        """Sampling parameters; `temperature`, if given, replaces that of the recipe."""
        chosen = self.temperature if temperature is None else temperature
        return Sampling(temperature=chosen, top_p=self.top_p, top_k=self.top_k)


class Train(Section):
    lr: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    """Learning rate of AdamW."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """What keeps Adam's moments. "adamw" keeps them in float32, 8 bytes per trained weight; "adamw_8bit" in 8 bits, 2
    bytes. Masters stay in float32."""
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
    """Processes of the trainer, each with its own GPU and its own part of the model. "auto" uses every GPU of the
    machine, and one process without a GPU; with `rendezvous` it is the number that torchrun or srun has started."""
    context_parallel: Count = 1
    """Ranks that compute a pack together, each a part of its tokens: for responses whose activations do not fit on one
    GPU. It must divide the number of ranks and of the model's attention heads."""
    rendezvous: Endpoint = ""
    """Address of this machine, as HOST:PORT, at which the ranks of a trainer on several machines find it. Use an
    address of a private network. The run then starts no ranks itself: `windfall trainer --join` does."""
    machine_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that the run waits for the ranks that join it, at the start and after a machine was lost. Then the run
    ends, and can be resumed."""
    offload: bool | Literal["auto"] = "auto"
    """Keep float32 masters and Adam's moments in host memory instead of on the GPU. "auto" does so with as many as do
    not fit on the GPU beside activations; true with all; false with none. The weights come out the same bit for bit; an
    update takes longer, by what it copies to the GPU and back."""
    rank_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds after which a rank that does not take part in an exchange of weights or gradients counts as lost. The
    trainer then restarts from its last checkpoint."""
    replay_routing: bool | Literal["auto"] = "auto"
    """In a model with experts, let every token be computed by the experts that computed it when it was generated.
    "auto" does so for tokens whose engine has recorded them (docs/models.md); true ends the run if one has not."""
    lora: Lora | None = None
    """Train adapters instead of all weights: the keys of [train.lora] below."""
    engine_gap_alarm: float = Field(default=0.05, gt=0)
    """Warn if the mean gap between the log-probs of engine and trainer in one step is above this (nats)."""
    engine_gap_limit: float = Field(default=0.3, gt=0)
    """End the run before the update if that mean gap is above this (nats): the engine and the trainer then do not
    compute the same model. With engine.kv_dtype = "fp8", skip the update and go back to "bf16" first."""

    @model_validator(mode="after")
    def _gaps_in_order(self) -> Train:
        if self.engine_gap_alarm > self.engine_gap_limit:
            raise ValueError("engine_gap_alarm must not be above engine_gap_limit")
        return self

    @model_validator(mode="after")
    def _context_groups_of_ranks(self) -> Train:
        if self.ranks != "auto" and self.ranks % self.context_parallel:
            raise ValueError(
                f"context_parallel = {self.context_parallel} must divide the number of ranks, and ranks = {self.ranks}"
            )
        return self


class Checkpoint(Section):
    every: Count = 10
    """Steps between two checkpoints. The last step is always saved."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""


class Eval(Section):
    tasks: int = Field(default=64, ge=0)
    """Held-out tasks, with one response each, to evaluate before the first and after the last step. 0 disables
    evaluation. A "dataset" environment has held-out tasks only if [eval] names a data set, or `env.held_out` is set."""
    every: int = Field(default=0, ge=0)
    """Steps between two additional evaluations. 0 evaluates only before the first and after the last step."""
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Sampling temperature for evaluation; 0 is greedy. If left out, `rollout.temperature` is used."""
    responses: int = Field(default=0, ge=0)
    """Responses per task. 0 uses as many as the largest number in `pass_at` needs, or 1."""
    pass_at: list[Count] = Field(default=[])
    """Report pass@k for each of these k: the probability that at least one of k responses passes, as the unbiased
    estimate from all responses of a task."""
    pass_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Smallest reward with which a response passes."""
    path: FilePath | None = None
    """Data set for evaluation only, in the same format as `env.path` of a "dataset" environment."""
    split: str | None = None
    """Split for evaluation only, such as "test", of `path` or else of `env.path`."""
    subset: str | None = None
    """Subset of the data set for evaluation. If left out, that of [env] if `path` is left out, too."""

    @property
    def samples(self) -> int:
        return self.responses or max(self.pass_at, default=1)

    @model_validator(mode="after")
    def _enough_responses(self) -> Eval:
        if self.responses and max(self.pass_at, default=1) > self.responses:
            raise ValueError(f"pass@{max(self.pass_at)} needs at least as many responses, not {self.responses}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("with temperature 0, all responses to a task are the same; set it above 0")
        return self


class EngineSection(Section):
    name: Literal["auto", "windfall", "vllm"] = "auto"
    """Engine of the workers. "windfall" is its own: fast on a GPU for the Llama family, plain torch otherwise. "vllm"
    needs the extra `vllm`. "auto" uses vLLM only on a GPU where it is installed and windfall's own GPU engine
    cannot run the model. A worker's `--engine` comes first. The trainer's own engine is always windfall's."""
    kv_tokens: int = Field(default=0, ge=0)
    """Tokens that the KV cache can hold. 0 covers what the responses of a step can need, within the free memory."""
    page_size: Count = 16
    """Tokens per page of the KV cache."""
    max_running: int = Field(default=0, ge=0)
    """Upper limit for the responses in one engine step. 0 derives it from the device and the responses per step."""
    max_rows: Count = 2048
    """Upper limit for the tokens in one engine step, including prefill."""
    speculation: Literal["auto", "off"] = "auto"
    """Whether windfall's engines draft tokens from the responses of the same group, and verify several in one step.
    Sampled tokens change only by rounding, as with another batch, and not at all with `run.deterministic`. "auto"
    drafts where measured times and hits say that it is faster; "off" never. Lenders never do."""
    kv_dtype: Literal["auto", "bf16", "fp8"] = "auto"
    """Dtype of the workers' KV cache. "auto" and "bf16" are the same: the dtype of the model, which is always that of
    lenders and of the engines of a trainer with several ranks. "fp8" has room for twice as many tokens and reads half
    as many bytes; it needs GPUs of compute capability 8.9 or higher. If its log-probs differ from the trainer's by more
    than `train.engine_gap_alarm`, the run goes back to "bf16"."""


class Techniques(Section):
    """Switches for measuring the benefit of each technique (benchmarks/fleet/harvest.py). Otherwise leave all on."""

    trainer_generates: bool = True
    """Let the trainer's own engine generate at the start of a step. Off: it generates only if there is no other
    worker."""
    migration: bool = True
    """Continue the responses of a lost worker from their last token. Off: they start again from the prompt."""
    balancing: bool = True
    """Place responses by measured speed, and move running ones. Off: workers take turns, and nothing moves."""
    affinity: bool = True
    """Send the next turn of a response to the worker that has its tokens in the KV cache, and siblings to the worker
    that has their prompt, if that pays. Off: placement ignores what the workers have in their caches."""
    pipelining: bool = True
    """Train on finished groups while others are still being generated. Off: train when all groups are finished."""


class WeightsSection(Section):
    peers: Literal["auto", "off"] = "auto"
    """Let workers send weights that they hold to other workers, unencrypted. With `fleet.tls_cert`, only to workers on
    the same machine. With "off", all weights come from the trainer or the bucket."""
    bucket: BucketUrl = ""
    """Object store or folder to publish weights to, such as s3://bucket/path, gs://..., az://... or file:///folder.
    Workers that cannot reach the trainer read from it. Credentials come from the environment."""
    region: str = ""
    """Region of the trainer, written as in leases. Workers in another region count as behind a wide link, which one of
    them crosses for all. Empty: not known, and no price is counted."""
    upload_gbit_per_s: float = Field(default=0.0, ge=0)
    """Upper limit for what one worker sends to others, in Gbit/s. 0 sets none."""
    across_regions_usd_per_gb: float = Field(default=ZONE_USD_PER_GB, ge=0)
    """Price of traffic between two regions in $ per GB, for the bill and for the choice of sources."""
    bucket_usd_per_gb: float = Field(default=0.0, ge=0)
    """Price of reading from the bucket in $ per GB, for the bill and for the choice of sources."""


class Trace(Section):
    nodes: int = Field(default=0, ge=0)
    """Upper limit for the machines of the trace that are up at once. Each is one worker process that is started and
    killed as the trace says. If `file` has more machines, the others replace those that are lost: this many are up
    whenever the file has them. 0 disables the trace."""
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


class LogSection(Section):
    page: bool = True
    """Serve a read-only page of the run on the controller's port. Its link, with a key, is printed at the start."""
    samples: int = Field(default=8, ge=0, le=256)
    """Responses per step to keep for the page, with the text, log-prob, version and worker of every token, in
    samples.jsonl. 0 keeps none: use it if tasks or responses are confidential."""
    samples_mb: float = Field(default=64.0, gt=0)
    """Upper limit for the size of samples.jsonl in MB. When it is reached, every second step in the file is removed."""
    tensorboard: bool = False
    """Also write every scalar for TensorBoard (the extra `tensorboard`)."""
    wandb: str = ""
    """Project of Weights & Biases that also gets every scalar (the extra `wandb`). Empty: none."""
    prometheus: Endpoint = ""
    """Address, as HOST:PORT, at which Prometheus can scrape the newest scalars under /metrics. Empty: none."""


def _check_slot(name: str, view: Recipe) -> None:
    """`view`: the recipe as the slot sees it."""
    lora = view.train.lora
    if lora is None:
        raise ValueError(f"policies.{name}.slot: slots are for adapters. Set `lora`, whose rank is the upper limit.")
    for key in ("path", "alpha"):
        if getattr(lora, key) is not None:
            raise ValueError(f"policies.{name}.lora.{key}: a slot begins empty. Give it with each adapter instead.")
    if lora.targets != "all":
        raise ValueError(f"policies.{name}.lora.targets: give them with each adapter of a slot instead.")


@with_parts("")
class Recipe(Section):
    run: RunSection = RunSection()
    model: Model = Model()
    env: Env = ArithmeticEnv(name="arithmetic")
    chat: ChatSection = ChatSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    engine: EngineSection = EngineSection()
    fleet: Fleet = Fleet()
    weights: WeightsSection = WeightsSection()
    trace: Trace = Trace()
    techniques: Techniques = Techniques()
    log: LogSection = LogSection()
    policies: dict[PolicyName, PolicySection] = Field(default={})
    """Several policies in one run."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A section of a part, such as `recipe.sim`. Only the part knows its class."""

    @property
    def task_env(self) -> Env:
        """The environment that gives the tasks: [env], or [env.tasks] if that is an agent with such a section."""
        return self.env.tasks or self.env if isinstance(self.env, AgentEnv) else self.env

    def names(self) -> tuple[str, ...]:
        """The policies, those that are trained first, and slots last; ("",) without [policies]. The first one is the
        lead."""
        own = self.policies
        return tuple(sorted(own, key=lambda name: (not own[name].trained, bool(own[name].slot)))) or ("",)

    def is_trained(self, policy: str) -> bool:
        """Whether a policy is trained, or only answers."""
        return not policy or self.policies[policy].trained

    def slot(self, policy: str) -> Literal["", "train", "sample"]:
        """Whether this policy is a slot for adapters, and for which."""
        return self.policies[policy].slot if policy else ""

    @property
    def has_slots(self) -> bool:
        return any(own.slot for own in self.policies.values())

    def refuse_slots(self) -> None:
        """Raise WindfallError if there are slots. For everything that needs the steps of policies."""
        if self.has_slots:
            what = "nothing fills the slots of this recipe: they are for a loop of your own"
            raise WindfallError(what, where="policies", fix="Remove `slot`, or use the command of that loop.")

    def answering(self) -> tuple[str, ...]:
        """The policies that workers may hold: all but slots to train in."""
        return tuple(name for name in self.names() if self.slot(name) != "train")

    def trains(self, base: str) -> bool:
        """Whether the trainer of this base trains anything; otherwise it only reads weights, or scores with them."""
        return any(self.is_trained(name) or self.slot(name) for name in self.bases()[base])

    def of(self, policy: str) -> Recipe:
        """The recipe as this policy sees it: with its own keys, and without [policies]. "" sees it as it is."""
        if not policy:
            return self
        values: dict[str, Any] = {**dict(self), "policies": {}}
        for section, keys in policy_sections.changes(self.policies, policy, self.algorithm.name).items():
            values[section] = {**dict(values[section]), **keys}
        return type(self).model_validate(values)

    def bases(self) -> dict[str, tuple[str, ...]]:
        """The policies on each base, by the name of the first: one trainer and one kind of engine for each."""
        found: dict[tuple[str, str], tuple[str, ...]] = {}
        for name in self.names():
            view, own = self.of(name), self.policies.get(name)
            shares = own is not None and (not own.trained or view.train.lora is not None)
            base = view.model.path, "" if shares else name
            found[base] = (*found.get(base, ()), name)
        return {names[0]: names for names in found.values()}

    @model_validator(mode="before")
    @classmethod
    def _several_without_local(cls, data: Any) -> Any:
        """With several policies, the trainers do not generate unless the recipe asks for it, which is refused."""
        if isinstance(data, dict) and data.get("policies") and isinstance(data.get("fleet", {}), dict):
            return {**data, "fleet": {"local": False, **data.get("fleet", {})}}
        return data

    @model_validator(mode="after")
    def _several(self) -> Recipe:
        policy_sections.check(self.policies)
        for name in self.policies:
            try:
                view = self.of(name)
            except ValidationError as e:
                error = e.errors()[0]
                where, what = ".".join(map(str, ("policies", name, *error["loc"]))), explained(error["msg"])
                if error["type"] == "extra_forbidden":
                    section, key = map(str, error["loc"][:2])
                    what = f"unknown key. {nearest(key, dict(getattr(self, section)))}"
                raise ValueError(f"{where}: {what}") from None
            if self.policies[name].copy_of and view.train.lora is None:
                raise ValueError(
                    f"policies.{name}.copy_of: {self.policies[name].copy_of!r} trains all weights, and only adapters "
                    "are copied. Give it a `lora`, or set `model` to a checkpoint folder and `frozen` here."
                )
            if self.policies[name].slot:
                _check_slot(name, view)
        if alone := [base for base in self.bases() if self.slot(base)]:
            raise ValueError(
                f"policies.{alone[0]}.slot: slots need a frozen policy of their model, which workers and trainer have "
                f"once for all of them. Add one: [policies.base] with frozen = true and that model."
            )
        offload = self.train.offload is True
        if self.has_slots and (self.train.ranks not in ("auto", 1) or offload or self.train.rendezvous):
            key = "rendezvous" if self.train.rendezvous else "offload" if offload else "ranks"
            raise ValueError(f"train.{key}: slots are for a trainer with one rank. Remove train.{key}.")
        if self.policies and self.fleet.local:
            raise ValueError("fleet.local = true is for runs with one policy; with [policies], set it to false")
        if self.train.rendezvous and len(found := self.bases()) > 1:
            raise ValueError(
                f"train.rendezvous is for one trainer, and these policies need {len(found)}: {', '.join(found)}. "
                "Remove it, or have all policies train adapters of one model."
            )
        return self

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
        if self.rollout.replay and self.rollout.replay_age <= self.rollout.staleness:
            raise ValueError(
                f"rollout.replay_age = {self.rollout.replay_age} must be above rollout.staleness = "
                f"{self.rollout.staleness}: a group is at least one version older when it is replayed."
            )
        own = [key for key in ("path", "split", "subset") if getattr(self.eval, key) is not None]
        if own and not isinstance(self.task_env, DatasetEnv):
            raise ValueError(f"eval.{own[0]} needs env.name = 'dataset'")
        if own and isinstance(self.task_env, DatasetEnv) and self.task_env.held_out:
            raise ValueError(f"set eval.{own[0]} or env.held_out, not both")
        if self.rollout.stop and isinstance(self.env, AgentLimits):
            raise ValueError("rollout.stop has no effect on agents: have the agent send `stop` with its calls")
        if self.run.deterministic and self.rollout.staleness > 0:
            raise ValueError(
                f"run.deterministic = true excludes rollout.staleness = {self.rollout.staleness}: in asynchronous "
                "training, the order in which responses finish decides what each step is trained on, so the run cannot "
                "be repeated bit for bit. Set rollout.staleness = 0, or run.deterministic = false."
            )
        if self.run.deterministic and self.engine.kv_dtype == "fp8":
            raise ValueError(
                "run.deterministic = true excludes engine.kv_dtype = 'fp8', which plain torch does not have. "
                "Set engine.kv_dtype = 'auto', or run.deterministic = false."
            )
        return self
