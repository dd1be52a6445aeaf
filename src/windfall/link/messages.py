"""The messages on a link: typed msgspec structs, encoded as msgpack arrays. Any change to them must change PROTOCOL.

    controller ──▶ worker     Challenge, Welcome or Refused;  Assign, Cancel, Release, Load, Routed, Pause, Resume,
                              SiblingTokens, Drain
    worker ──▶ controller     Hello;  Tokens, Released, AskRoute, Loaded, LoadFailed, Rejected, Notice, Stats, Capacity,
                              Left
    controller ──▶ trainer    Challenge, TrainerWelcome or Refused;  Forward, ForwardBackward, OptimStep, Publish, Save,
                              LoadCheckpoint, LoadAdapter, SaveAdapter, Score, UploadAgain
    trainer ──▶ controller    TrainerHello;  LogProbs, GradientAdded, Optimized, PublishedVersion, Uploaded, Saved,
                              AdapterLoaded, Scored, RefusedVerb, Failed
    supervisor ──▶ rank       Challenge, RankWelcome or Refused;  StartRank, RunEnded
    rank ──▶ supervisor       RankHello;  RankStarted, RankEnded

A *rank* is one process of a trainer on several machines (run/ranks/joined_ranks.py).

A *handle* is the number of one assignment of one response to one worker. A response that moves to another worker gets a
new handle, so a late frame is recognized by its handle alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from windfall.algorithms.given import Loss
from windfall.link.message_base import Challenge, Message, Refused, Value
from windfall.training import Adam, Sample
from windfall.types import Capabilities, Finish, Lease, Sampling

PROTOCOL = 20
MAX_FRAME_BYTES = 48 << 20  # size limit of a worker's frames: a prompt of 100,000 tokens with experts of 48 layers
MAX_TRAINER_FRAME_BYTES = 256 << 20


Ranges = tuple[tuple[int, int], ...]
"""Byte ranges (start, stop): sorted, disjoint, not adjacent, none empty (weights/ranges.py)."""


class FileRef(Value, frozen=True):
    """A file of weights: a full copy, the base of adapters, or a delta. Its digest names its bytes."""

    digest: str
    nbytes: int
    before: str = ""  # a delta: the full copy that it changes; an adapter: its base
    after: str = ""  # a delta: the full copy that results


class SourceRef(Value, frozen=True):
    """Something that answers byte ranges of files."""

    id: str
    kind: Literal["trainer", "peer", "bucket"]
    location: str  # URL; the host `_` stands for the controller's host, as the reader reaches it
    machine: str = ""  # which machine it is on: a reader there reads its memory


class RoutePart(Value, frozen=True):
    start: int
    stop: int
    source: int  # its number in `ReadRoute.sources`


class ReadRoute(Value, frozen=True):
    """Where a reader reads which bytes of a file."""

    sources: tuple[SourceRef, ...]
    parts: tuple[RoutePart, ...]  # in order, without overlap


class FileRoute(Value, frozen=True):
    file: FileRef
    route: ReadRoute


class Holding(Value, frozen=True):
    file: FileRef
    ranges: Ranges = ()  # empty: all of it


class SourceUse(Value, frozen=True):
    """What a reader got from a source."""

    source: str
    bytes: int
    s: float
    why: Literal["", "gone", "unreachable", "stalled", "slow", "wrong"] = ""  # why it stopped using it


class HolderFiles(Value, frozen=True):
    """What one machine of the trainer, or the bucket, has."""

    location: str  # URL of its weight server, or `PublishedFiles.bucket`
    holds: tuple[Holding, ...]
    machine: str = ""


class PublishedFiles(Value, frozen=True):
    """What the trainer publishes: all files that can still be read, and which of its machines has which bytes."""

    version: int
    digest: str  # of the full copy, or of the adapter
    files: tuple[FileRef, ...]
    holders: tuple[HolderFiles, ...]
    bucket: str = ""  # its URL, if the files are published there, too; what is being uploaded counts as held


class Hello(Message, frozen=True, tag=2):
    """Worker to controller: the answer to Challenge."""

    protocol: int  # PROTOCOL of the worker
    nonce: bytes  # random bytes that the controller's proof must cover
    proof: bytes  # HMAC that shows that the worker knows the run's token
    name: str  # name of the worker, 1 to 64 printable characters
    lease: Lease = Lease()
    model: str = ""  # Fingerprint of the model that the worker has built. Empty: none yet, it will build the run's.
    held: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)  # its engine's version and digest, by policy
    age_s: float = 0.0  # Seconds that the worker's process has been running. It is billed from its start.
    engine: Capabilities = Capabilities()  # what is known of the engine; a worker that has none yet knows it at Loaded
    lends: bool = False  # It serves requests of its own first (`windfall serve --lend`), and reports its Capacity.
    location: str = ""  # URL of its weight server; "": it only reads
    own_address: str = ""  # its IP address as it knows it; behind NAT, the controller sees another one
    machine: str = ""  # equal for processes that can read each other's memory
    holds: tuple[Holding, ...] = ()  # what its weight server can serve


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to build the run's engine. Where a number is 0, the worker chooses it from its own memory."""

    model_config: str  # The model's configuration as JSON. The weights are pulled separately.
    dtype: str
    kv_tokens: int  # capacity of the KV cache, in tokens
    page_size: int  # tokens in one page of the KV cache
    max_running: int  # upper limit for responses that are decoded at once
    max_rows: int  # upper limit for token rows in one forward pass
    deterministic: bool
    longest: int  # tokens of the longest possible sequence, prompt and response together
    wanted: int  # Responses of one training step. No worker needs room for more.
    engine: Literal["auto", "windfall", "vllm"] = "auto"  # which engine; a worker's own option comes first
    samplings: tuple[Sampling, ...] = ()  # how the run samples, in training and in evaluations
    speculation: Literal["auto", "off"] = "auto"  # whether the engine may draft tokens, which it then verifies
    kv_dtype: Literal["auto", "bf16", "fp8"] = "auto"  # dtype of the KV cache; "auto" and "bf16": that of the model
    checked: tuple[str, ...] = ()  # self-tests of this model that passed on the trainer; see engine/selftest/verdict.py
    adapters: int = 0  # adapters that the engine holds beside each other; 0: it merges the only one
    adapter_rank: int = 0  # the largest rank of these adapters; smaller ones are padded with zeros
    experts: bool = False  # return the chosen experts of every token


class Welcome(Message, frozen=True, tag=3):
    """Controller to worker: the worker has joined the run."""

    proof: bytes  # HMAC that shows that the controller knows the run's token
    worker: str  # the controller's name for this worker
    model: str  # fingerprint of the run's model
    engine: EngineSpec
    heartbeat_s: float  # seconds between two Stats
    stalled_s: float = 60.0  # seconds without an engine step, despite work, after which the worker exits as stuck
    upload_bytes_per_s: float = 0.0  # upper limit for what the worker sends to other workers; 0: none
    policies: tuple[str, ...] = ("",)  # those whose weights it will be asked to load, all on one base


class Work(Value, frozen=True):
    """One response to generate, or to continue."""

    handle: int
    prompt: bytes  # prompt and the tokens generated so far: consecutive uint32
    position: int  # position of the first token to generate, counted within the response
    seed: int  # sampling is a function of the seed, the position and the logits
    max_tokens: int  # upper limit for the tokens to generate, from `position` on
    sampling: Sampling
    stop: tuple[int, ...]  # token ids that end the response
    group: str = ""  # its group, within which an engine may draft from other responses; "": none
    policy: str = ""  # which of the worker's policies generates it
    experts_known: int = 0  # number of leading tokens of `prompt` whose chosen experts need not be sent


class Assign(Message, frozen=True, tag=5):
    """Controller to worker: generate these responses."""

    work: tuple[Work, ...]


class Cancel(Message, frozen=True, tag=6):
    """Controller to worker: stop generating these responses. No answer is expected."""

    handles: tuple[int, ...]


class Load(Message, frozen=True, tag=7):
    """Controller to worker, for a new version: pull these weights and load them into the engine."""

    version: int
    digest: str  # digest that the pulled weights must have
    files: tuple[FileRoute, ...] = ()  # In the order of reading: the base of an adapter, then one full copy or deltas
    policy: str = ""  # Loads of different policies wait for each other; a later one of the same policy replaces it.


class AskRoute(Message, frozen=True, tag=55):
    """Worker to controller, during a load: a source failed or is slow, or another file is needed."""

    file: str  # digest
    used: tuple[SourceUse, ...] = ()  # what it got since its last report
    received: int = 0  # bytes of the file that it has verified
    policy: str = ""  # that of the load


class Routed(Message, frozen=True, tag=56):
    """Controller to worker: the answer to AskRoute. Also unasked, if a source has left."""

    file: str
    route: ReadRoute  # without sources: none is known; ask again after a second
    policy: str = ""  # that of the load


class Pause(Message, frozen=True, tag=8):
    """Controller to worker: generate no tokens until Resume. Running responses keep their state."""


class Resume(Message, frozen=True, tag=9):
    """Controller to worker: end a Pause."""


class Drain(Message, frozen=True, tag=10):
    """Controller to worker: stop after the current engine step, send the remaining tokens, send Left, and exit."""

    why: str
    again: bool = False  # Do not exit but join again: the next Welcome describes another engine.


class SiblingTokens(Message, frozen=True, tag=54):
    """Controller to worker: tokens of a response that this worker does not generate, to draft from. They change sampled
    tokens only by rounding, as another batch does, and a worker may ignore them."""

    group: str  # the responses that may draft from them are those with this `Work.group`
    id: str  # names the text; a later message with the same id continues it
    position: int  # position of the first token within the text
    tokens: bytes  # consecutive uint32


class Release(Message, frozen=True, tag=29):
    """Controller to worker: stop these responses, send the tokens generated so far, then answer with Released."""

    handles: tuple[int, ...]


class Released(Message, frozen=True, tag=30):
    """Worker to controller: the answer to Release. No more tokens of these responses will follow."""

    handles: tuple[int, ...]


class Tokens(Message, frozen=True, tag=11):
    """Worker to controller, after one or a few engine steps: the new tokens of all its responses, in columns.

    Response `handles[i]` got `counts[i]` tokens, the first of them at `positions[i]`. Empty `counts`: one token each.
    """

    version: int  # version of the weights that generated the tokens
    handles: tuple[int, ...]
    positions: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: bytes  # token ids of all responses, in the order of `handles`: consecutive uint32
    logprobs: bytes  # log-probs of these tokens: consecutive float32
    finished: dict[int, Finish]  # finish reasons of the responses that ended, by index in `handles`
    versions: dict[str, int] = msgspec.field(default_factory=dict)  # instead of `version`, if policies have names
    experts: bytes = b""  # in a model with experts: those of tokens of all responses, in the order of `handles`
    expert_counts: tuple[
        int, ...
    ] = ()  # for how many tokens: up to the one before the response's last. Empty: `counts`

    @property
    def by_policy(self) -> Mapping[str, int]:
        """The versions that generated the tokens, by policy."""
        return self.versions or {"": self.version}


class LoadTimes(Value, frozen=True):
    """Where the time until Loaded was spent. Parts overlap, so their sum exceeds the total. All but the last two belong
    to the start of the process, and are 0 from the worker's second version on."""

    age_s: float = 0.0  # seconds that the worker's process has been running
    import_s: float = 0.0  # seconds until the libraries were imported and the device was found
    build_s: float = 0.0  # seconds to build the engine, without weights
    warm_s: float = 0.0  # seconds to load or compile kernels and to capture graphs
    pull_s: float = 0.0  # seconds to pull and verify the weights
    swap_s: float = 0.0  # seconds to copy the weights into the engine


class Loaded(Message, frozen=True, tag=12):
    """Worker to controller: the answer to Load. The engine holds this version."""

    version: int
    digest: str
    slots: int  # responses that the worker can run at once
    s: float  # Seconds that the load took. The first one may include building the engine.
    pulled_bytes: int  # bytes received for this version
    parts: LoadTimes = LoadTimes()
    longest: int = 0  # tokens of the longest sequence, prompt included, that fits into the engine; 0 if unknown
    engine: Capabilities = Capabilities()  # what the engine can do
    kv_tokens: int = 0  # tokens for which its KV cache has room, over all responses; 0 if unknown
    used: tuple[SourceUse, ...] = ()  # what it got from each source since its last report
    apply_s: float = 0.0  # seconds to apply deltas, within `parts.pull_s`
    policy: str = ""


class LoadFailed(Message, frozen=True, tag=13):
    """Worker to controller: the answer to a Load that failed. The controller may send it again."""

    version: int
    why: str
    policy: str = ""


class Rejected(Message, frozen=True, tag=14):
    """Worker to controller: this worker's engine has no room for this work. Another worker may have it."""

    handle: int
    why: str
    invalid: bool = False  # The engine has room: the work itself is invalid, and every worker would reject it.


class Notice(Message, frozen=True, tag=15):
    """Worker to controller: the worker's machine will be preempted."""

    source: str  # the cloud or signal that gave the notice
    left_s: float | None  # seconds until the machine is taken; None if unknown
    detail: str = ""


class Stats(Message, frozen=True, tag=16):
    """Worker to controller, every `heartbeat_s`: the heartbeat. Counters start with the process."""

    running: int  # responses assigned to the engine and not finished
    made: int  # tokens generated
    steps: int  # engine steps
    idle_s: float  # seconds since the last engine step while the engine has work; 0 while it has none
    evictions: int = 0  # responses that the engine evicted from its KV cache
    reused_tokens: int = 0  # tokens that were not prefilled because the prefix cache had them
    waiting: int = 0  # responses among `running` that the engine has no room for at present
    loading: Literal["", "pull", "build", "swap"] = ""  # what a load waits for: bytes, building the engine, the swap
    pulled_bytes: int = 0  # Bytes of weights received. A pull during which this does not grow is stuck.
    prefilled: int = 0  # tokens that were prefilled
    lookups: int = 0  # responses and turns that were looked up in the prefix cache
    hits: int = 0  # those of them that found tokens there
    drafted: int = 0  # tokens that were drafted and verified
    accepted: int = 0  # those of them that were right
    kv_restored: int = 0  # tokens of evicted responses whose KV came back from host memory and was not prefilled again
    decode_s: float = 0.0  # time of the decode steps that were measured, if the engine may draft
    undrafted_s: float = 0.0  # time that the same tokens would have taken without drafts, by estimate
    sent_bytes: int = 0  # bytes of weights sent to other workers
    policy: str = ""  # the policy of the load that `loading` describes
    contended_s: float = 0.0  # seconds in which another job wanted the device of this worker, or had it


class Capacity(Message, frozen=True, tag=40):
    """Lender to controller, about once per second, and before a Released that the controller did not ask for: what it
    can take beside its service now."""

    slots: int  # responses that it can run now
    state: Literal["normal", "pressure", "frozen"]  # its memory state (serve/memory_policy.py)
    use: float  # share of its KV memory that serving has held over about the last minute
    lent: float  # share of about the last minute in which steps of the run were computed
    slack_s: float | None = None  # slack of its tightest request in seconds; None: it has no request


class Left(Message, frozen=True, tag=17):
    """Worker to controller, last message on a link: the worker exits."""

    why: str
    refused: bool = False  # True if this worker cannot run the model, and a restart would not help


class TrainerHello(Message, frozen=True, tag=18):
    """Trainer to controller: the answer to Challenge."""

    protocol: int  # PROTOCOL of the trainer
    nonce: bytes  # random bytes that the controller's proof must cover
    proof: bytes  # HMAC that shows that the trainer knows its secret
    step: int  # steps completed
    next_task: int  # index of the first task that was not drawn yet
    micro_tokens: int  # tokens in one forward and backward pass
    model: str  # fingerprint of the model
    engine: EngineSpec  # the engine that workers must build
    version: int  # version of the published weights
    digest: str  # digest of the published weights
    facts: dict[str, int | float | str | bool]  # for the event log: parameters, device, dtype, derived settings
    open_tasks: tuple[int, ...] = ()  # tasks before `next_task` that were drawn but not trained on
    replay: tuple[int, ...] = ()  # tasks whose groups may be replayed
    selection: tuple[int, ...] = ()  # what is known about prompts
    weights: PublishedFiles | None = None  # the files of this version
    policy: str = ""  # the policy that this link trains; a trainer of several adapters has a link for each


class TrainerWelcome(Message, frozen=True, tag=31):
    """Controller to trainer: the trainer has joined the run."""

    proof: bytes  # HMAC that shows that this is the run's controller, not another process that took over its port


class Forward(Message, frozen=True, tag=19):
    """Controller to trainer: compute the log-probs of the samples, at the start of a step that makes several updates,
    or for a loop of one's own.

    Every verb has an id. A trainer that has performed a verb answers it again from memory if it arrives again."""

    id: str
    samples: tuple[Sample, ...]
    loss: Loss | None = None  # given: log-probs at a temperature of 1, not that of the recipe


class LogProbs(Message, frozen=True, tag=20):
    """Trainer to controller: the answer to Forward."""

    old: tuple[np.ndarray, ...]  # log-probs of each sample: float64


class ForwardBackward(Message, frozen=True, tag=21):
    """Controller to trainer, when groups are ready: add the gradient of these samples."""

    id: str
    samples: tuple[Sample, ...]
    loss: Loss | None = None  # None: that of the recipe's algorithm


class GradientAdded(Message, frozen=True, tag=22):
    """Trainer to controller: the answer to ForwardBackward."""

    s: float  # seconds that it took
    logprobs: tuple[np.ndarray, ...] = ()  # with a given loss: log-probs of each sample: float64


class OptimStep(Message, frozen=True, tag=23):
    """Controller to trainer: make one optimizer update with the gradients that were added."""

    id: str
    step: int | None = None  # on the last update of a step: the number of the step, which is the next version
    next_task: int = 0  # with `step`: index of the first task that was not drawn yet
    open_tasks: tuple[int, ...] = ()  # with `step`: tasks before `next_task` that were drawn but not trained on
    replay: tuple[int, ...] = ()  # with `step`: tasks whose groups may be replayed
    selection: tuple[int, ...] = ()  # with `step`: what is known about prompts
    adam: Adam | None = None  # settings of this update; None: those of the recipe


class Optimized(Message, frozen=True, tag=24):
    """Trainer to controller: the answer to OptimStep."""

    report: dict[str, float | int | str | dict[str, Any] | None]  # fields of a training.Report


class Publish(Message, frozen=True, tag=51):
    """Controller to trainer, after the last update of a step: publish the weights as its version."""

    id: str
    keep: tuple[str, ...] = ()  # digests of files that workers may still read
    pack: bool = False  # compress the delta: links are slower than packing and unpacking
    version: int = 0  # for a slot: the version that its adapter is from now on


class PublishedVersion(Message, frozen=True, tag=52):
    """Trainer to controller: the answer to Publish."""

    version: int
    digest: str
    weights: PublishedFiles | None = None


class Uploaded(Message, frozen=True, tag=57):
    """Trainer to controller, unasked: one of its machines has uploaded its part of a file to the bucket, or failed."""

    file: str
    bytes: int
    s: float
    ranges: Ranges = ()  # its part; empty: all of the file
    error: str = ""


class UploadAgain(Message, frozen=True, tag=58):
    """Controller to trainer, unasked, without an answer: these files are damaged in the bucket."""

    files: tuple[str, ...]  # digests


class Save(Message, frozen=True, tag=25):
    """Controller to trainer: write a checkpoint of the published version."""

    id: str


class Saved(Message, frozen=True, tag=26):
    """Trainer to controller: the answer to Save."""

    path: str


class LoadCheckpoint(Message, frozen=True, tag=53):
    """Controller to trainer: continue from this checkpoint. Answered with PublishedVersion."""

    id: str
    path: str


class LoadAdapter(Message, frozen=True, tag=67):
    """Controller to trainer, for a slot: it has another adapter from now on."""

    id: str
    path: str = ""  # a folder in PEFT format; empty: a new adapter
    rank: int = 0  # 0: that of the folder
    alpha: float = 0.0  # 0: that of the folder
    seed: int = 0  # of the random numbers of a new one
    targets: tuple[str, ...] = ()  # its layers; empty: those of the folder, or all
    optimizer: bool = False  # also read the state of the optimizer from the folder; otherwise Adam starts anew


class AdapterLoaded(Message, frozen=True, tag=68):
    """Trainer to controller: the answer to LoadAdapter."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    parameters: int


class SaveAdapter(Message, frozen=True, tag=69):
    """Controller to trainer, for a slot: write its adapter into a folder in PEFT format. Answered with Saved."""

    id: str
    path: str
    optimizer: bool = False  # also write the state of the optimizer


class Score(Message, frozen=True, tag=70):
    """Controller to trainer, for a slot or a frozen policy beside slots: what it predicts for each token."""

    id: str
    sequences: tuple[tuple[int, ...], ...]
    top_k: int = 0  # also the most likely tokens at each position


class ScoredTokens(Value, frozen=True):
    """What a policy predicts for each token of a sequence after the first."""

    logprobs: np.ndarray  # float64
    top_ids: np.ndarray  # uint32: `top_k` for each token, most likely first
    top_logprobs: np.ndarray  # float64: those of `top_ids`


class Scored(Message, frozen=True, tag=71):
    """Trainer to controller: the answer to Score."""

    sequences: tuple[ScoredTokens, ...]


class RefusedVerb(Message, frozen=True, tag=72):
    """Trainer to controller: the answer to a verb of a slot that cannot be performed as it was given. The slot is as it
    was, or empty if `what` says so, and the trainer goes on."""

    what: str
    where: str = ""
    fix: str = ""


class Failed(Message, frozen=True, tag=27):
    """Trainer to controller: the requested work raised an error. The trainer's process ends after this message."""

    error: str
    final: bool = False  # True if a person must fix the cause: another trainer would fail in the same way


class RankHello(Message, frozen=True, tag=32):
    """Rank to supervisor: the answer to Challenge."""

    protocol: int  # PROTOCOL of the rank
    nonce: bytes  # random bytes that the supervisor's proof must cover
    proof: bytes  # HMAC that shows that the rank knows the secret of the trainer
    name: str  # its host, for messages to people
    rank: int
    size: int  # number of all ranks
    machine: str  # equal for ranks on the same machine
    local_rank: int  # its number among the ranks of its machine, as its environment says it


class RankWelcome(Message, frozen=True, tag=33):
    """Supervisor to rank: it is one of the trainer's ranks."""

    proof: bytes  # HMAC that shows that the supervisor knows the secret of the trainer
    recipe: str  # the recipe of the run, as TOML
    folder: str  # the folder of the run, on the machine of rank 0
    weights_key: str  # what workers send to the weight server of this machine


class StartRank(Message, frozen=True, tag=34):
    """Supervisor to rank: start its process. To end the process, the supervisor closes the link."""

    rendezvous: str  # where all ranks meet (trainer/ranks/ranks.py)
    machine: int  # number of its machine; that of rank 0 is 0
    local_rank: int  # its number among the ranks of its machine
    local_size: int  # ranks of its machine


class RankStarted(Message, frozen=True, tag=35):
    """Rank to supervisor: the answer to StartRank."""

    pid: int


class RankEnded(Message, frozen=True, tag=37):
    """Rank to supervisor, last message on a link: its process has ended, or cannot be started."""

    code: int  # exit status, or the negative number of the fatal signal
    what: str = ""  # what happened, if the process wrote it down
    where: str = ""
    fix: str = ""  # what to do


class RunEnded(Message, frozen=True, tag=38):
    """Supervisor to rank, last message on a link: the rank is not needed any more."""

    why: str


FromWorker = Hello | Tokens | Released | AskRoute | Loaded | LoadFailed | Rejected | Notice | Stats | Capacity | Left
ToWorker = (
    Challenge | Welcome | Refused | Assign | Cancel | Release | Load | Routed | Pause | Resume | Drain | SiblingTokens
)
FromTrainer = (
    TrainerHello | LogProbs | GradientAdded | Optimized | PublishedVersion | Uploaded | Saved | AdapterLoaded | Scored
    | RefusedVerb | Failed
)  # fmt: skip
Verb = Forward | ForwardBackward | OptimStep | Publish | Save | LoadCheckpoint | LoadAdapter | SaveAdapter | Score
ToTrainer = Challenge | TrainerWelcome | Refused | Verb | UploadAgain
FromRank = RankHello | RankStarted | RankEnded
ToRank = Challenge | RankWelcome | Refused | StartRank | RunEnded

ARRAYS = ("d", "H", "I")  # dtypes of arrays in messages: float64, uint16 and uint32


def _encode_array(value: object) -> tuple[str, bytes]:
    if not isinstance(value, np.ndarray) or value.dtype.char not in ARRAYS:
        raise TypeError(f"a message cannot contain {value!r}")
    return value.dtype.char, value.tobytes()


def _decode_array(kind: type, value: Any) -> np.ndarray:
    code, data = value
    if kind is not np.ndarray or code not in ARRAYS:
        raise ValueError(f"not an array: {kind}, {code!r}")
    return np.frombuffer(data, code)


encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode


def decoder(receives: Any) -> Callable[[bytes], Any]:
    """Decodes the messages of a union. Raises ValueError for anything else."""
    return msgspec.msgpack.Decoder(receives, dec_hook=_decode_array).decode


def expert_columns(frame: Tokens) -> tuple[int, list[tuple[int, memoryview]]]:
    """The chosen experts in a frame that has some: bytes of a token, and for each of `handles` the position of its
    first token with its bytes. Raises ValueError if they do not match the other columns."""
    rows = len(frame.handles)
    tokens = frame.counts or (1,) * rows
    counts = frame.expert_counts or tokens
    total = sum(counts)
    if len(counts) != rows or min(counts, default=0) < 0 or not total or len(frame.experts) % total:
        raise ValueError(f"{len(frame.experts)} bytes of experts for {total} tokens of {rows} responses")
    width, at, data = len(frame.experts) // total, 0, memoryview(frame.experts)
    found: list[tuple[int, memoryview]] = []
    for position, new, count in zip(frame.positions, tokens, counts, strict=True):
        found.append((position + new - 1 - count, data[at : at + count * width]))
        at += count * width
    return width, found


def columns(frame: Tokens) -> tuple[array[int], array[float]]:
    """Decode the tokens and log-probs of a frame. Raises ValueError if its columns do not match each other."""
    tokens, logprobs = array("I"), array("f")
    tokens.frombytes(frame.tokens)
    logprobs.frombytes(frame.logprobs)
    rows = len(frame.handles)
    total = sum(frame.counts) if frame.counts else rows
    if len(frame.positions) != rows or (frame.counts and (len(frame.counts) != rows or min(frame.counts) < 1)):
        raise ValueError("handles, positions and counts differ in length, or a count is less than 1")
    if len(tokens) != total or len(logprobs) != total:
        raise ValueError(f"expected {total} tokens, received {len(tokens)} tokens and {len(logprobs)} log-probs")
    if any(not 0 <= i < rows for i in frame.finished):
        raise ValueError("a finish reason for a response that is not in the frame")
    return tokens, logprobs
