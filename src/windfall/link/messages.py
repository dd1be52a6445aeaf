"""What goes over a link: typed msgspec structs, msgpack arrays on the wire. Changing any of them changes PROTOCOL.

    controller ──▶ worker     Challenge, Welcome or Refused;  Assign, Cancel, Release, Load, Pause, Resume, Drain
    worker ──▶ controller     Hello;  Tokens, Released, Loaded, LoadFailed, Rejected, Notice, Stats, Left
    controller ──▶ trainer    Challenge, TrainerWelcome or Refused;  Prepare, Accumulate, Update, Save
    trainer ──▶ controller    TrainerHello;  Prepared, Done, Updated, Saved, Failed

A *handle* is the number of one assignment of one response to one worker. A response that moves gets a new one, so a
frame that comes too late is known by its handle alone.
"""

from __future__ import annotations

from array import array
from typing import Literal

import msgspec

from windfall.types import Finish, Lease, Sampling

PROTOCOL = 3
MAX_FRAME_BYTES = 8 << 20
"""Of a worker's frames: far above an engine step of thousands of responses."""
MAX_TRAINER_FRAME_BYTES = 256 << 20


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The common base. A message that lacks a field, or has one of another type, is refused when it is decoded."""


class Challenge(Message, frozen=True, tag=1):
    protocol: int
    run: str
    nonce: bytes


class Hello(Message, frozen=True, tag=2):
    """`proof` answers the challenge; `version` and `digest` say which weights the worker holds already (-1: none)."""

    protocol: int
    nonce: bytes
    proof: bytes
    name: str
    lease: Lease = Lease()
    model: str = ""
    """The fingerprint of the model that it has built; empty: none yet, it will take the run's."""
    version: int = -1
    digest: str = ""
    age_s: float = 0.0
    """How long its process has been running: it is paid for since then."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to build the run's engine. A value of 0 is worked out from its own memory."""

    model_config: str
    """The model's configuration as JSON. Its weights are pulled."""
    dtype: str
    kv_tokens: int
    page_size: int
    max_running: int
    max_rows: int
    deterministic: bool
    longest: int
    """Prompt and response together."""
    wanted: int
    """Responses of one step: no worker needs room for more."""
    checked: tuple[str, ...] = ()
    """What the trainer has found right of this model: see selftest/verdict.py."""


class Welcome(Message, frozen=True, tag=3):
    proof: bytes
    worker: str
    """What the controller calls it from now on."""
    model: str
    engine: EngineSpec
    heartbeat_s: float
    stalled_s: float = 60.0
    """An engine that has work and makes no step for so long is of no use, and its worker ends."""


class Refused(Message, frozen=True, tag=4):
    why: str
    again: bool = False
    """Worth dialling again later?"""


class Work(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    handle: int
    prompt: bytes
    """Prompt and the tokens so far: uint32, one after the other."""
    position: int
    seed: int
    max_tokens: int
    sampling: Sampling
    stop: tuple[int, ...]


class Assign(Message, frozen=True, tag=5):
    work: tuple[Work, ...]


class Cancel(Message, frozen=True, tag=6):
    handles: tuple[int, ...]


class Load(Message, frozen=True, tag=7):
    """Pull this version. In `url`, the host `_` stands for the controller's, as the worker reaches it."""

    version: int
    digest: str
    url: str


class Pause(Message, frozen=True, tag=8):
    """Make no tokens until Resume. What is running stays."""


class Resume(Message, frozen=True, tag=9):
    pass


class Drain(Message, frozen=True, tag=10):
    """Stop between two engine steps, send what there is, say Left, and go."""

    why: str


class Release(Message, frozen=True, tag=29):
    """Give these back: after the tokens made so far, answer with Released."""

    handles: tuple[int, ...]


class Released(Message, frozen=True, tag=30):
    handles: tuple[int, ...]


class Tokens(Message, frozen=True, tag=11):
    """The new tokens of one engine step (or of a few), of all responses of a worker, in columns.

    Response `handles[i]` got `counts[i]` tokens (one each, where counts is empty), the first at `positions[i]`.
    """

    version: int
    handles: tuple[int, ...]
    positions: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: bytes
    """uint32, one after the other."""
    logprobs: bytes
    """float32."""
    finished: dict[int, Finish]
    """By index in `handles`."""


class Readied(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where the time until Loaded went. Parts go on side by side, so they add up to more than the whole. All but the
    last two are of a worker's start, and 0 from its second version on."""

    age_s: float = 0.0
    """How long its process has been running."""
    import_s: float = 0.0
    """Until what it computes with was imported, and the device found."""
    build_s: float = 0.0
    """The engine, its weights unset."""
    warm_s: float = 0.0
    """Kernels loaded or compiled, graphs captured."""
    pull_s: float = 0.0
    """The weights, verified."""
    swap_s: float = 0.0
    """Into the engine."""


class Loaded(Message, frozen=True, tag=12):
    version: int
    digest: str
    slots: int
    """How many responses it can run at once."""
    s: float
    """How long it took. The first time the engine may have had to be built meanwhile."""
    pulled_bytes: int
    parts: Readied = Readied()
    longest: int = 0
    """The most tokens, prompt and response together, that its engine has room for; 0: it does not say."""


class LoadFailed(Message, frozen=True, tag=13):
    version: int
    why: str


class Rejected(Message, frozen=True, tag=14):
    """The engine of this worker cannot take this work. Another worker may have the room."""

    handle: int
    why: str


class Notice(Message, frozen=True, tag=15):
    source: str
    left_s: float | None
    detail: str = ""


class Stats(Message, frozen=True, tag=16):
    """The heartbeat. `idle_s`: how long the engine has had work and made no step; 0 while it has none."""

    running: int
    made: int
    steps: int
    idle_s: float
    preemptions: int = 0
    reused_tokens: int = 0
    waiting: int = 0
    """Of those running: the engine has no room for them, and makes steps without them."""
    loading: Literal["", "pull", "build", "swap"] = ""
    """What the load of a version waits for: its bytes, the engine being built, or the engine taking the weights."""
    pulled_bytes: int = 0
    """Bytes of weights received since the process began. A pull in which this does not grow is stuck."""


class Left(Message, frozen=True, tag=17):
    why: str
    refused: bool = False
    """This worker cannot run the model, and would not be able to if it were started again."""


class SampleMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """train.sample.Sample as it travels: arrays are bytes of float64."""

    ids: tuple[int, ...]
    targets: tuple[int, ...]
    behaviour: bytes
    advantage: float
    limit: int
    old: bytes | None = None


class TrainerHello(Message, frozen=True, tag=18):
    protocol: int
    nonce: bytes
    proof: bytes
    step: int
    next_task: int
    micro_tokens: int
    model: str
    engine: EngineSpec
    version: int
    digest: str
    url: str
    facts: dict[str, int | float | str | bool]
    """For the event log: parameters, device, dtype, what was derived."""


class TrainerWelcome(Message, frozen=True, tag=31):
    """`proof`: that this is the run's controller, and no other process that took its port."""

    proof: bytes


class Prepare(Message, frozen=True, tag=19):
    samples: tuple[SampleMessage, ...]


class Prepared(Message, frozen=True, tag=20):
    old: tuple[bytes, ...]


class Accumulate(Message, frozen=True, tag=21):
    samples: tuple[SampleMessage, ...]


class Done(Message, frozen=True, tag=22):
    s: float


class Update(Message, frozen=True, tag=23):
    """One optimizer update with what was accumulated. With `step`, the step's last: its result is that version, and
    the run goes on with `next_task`."""

    step: int | None
    next_task: int | None


class Updated(Message, frozen=True, tag=24):
    report: dict[str, float | int | str]
    version: int
    digest: str
    s: float


class Save(Message, frozen=True, tag=25):
    pass


class Saved(Message, frozen=True, tag=26):
    path: str


class Failed(Message, frozen=True, tag=27):
    """What was asked for raised. The trainer's process ends after this."""

    error: str
    final: bool = False
    """A person has to put it right: another trainer would fail in the same way."""


FromWorker = Hello | Tokens | Released | Loaded | LoadFailed | Rejected | Notice | Stats | Left
ToWorker = Challenge | Welcome | Refused | Assign | Cancel | Release | Load | Pause | Resume | Drain
FromTrainer = TrainerHello | Prepared | Done | Updated | Saved | Failed
ToTrainer = Challenge | TrainerWelcome | Refused | Prepare | Accumulate | Update | Save

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


def columns(frame: Tokens) -> tuple[array[int], array[float]]:
    """The numbers of a Tokens frame. Raises ValueError where its columns do not fit each other."""
    tokens, logprobs = array("I"), array("f")
    tokens.frombytes(frame.tokens)
    logprobs.frombytes(frame.logprobs)
    rows = len(frame.handles)
    total = sum(frame.counts) if frame.counts else rows
    if len(frame.positions) != rows or (frame.counts and (len(frame.counts) != rows or min(frame.counts) < 1)):
        raise ValueError("handles, positions and counts differ in length, or a count is not 1 or more")
    if len(tokens) != total or len(logprobs) != total:
        raise ValueError(f"{total} tokens announced, {len(tokens)} tokens and {len(logprobs)} log-probs sent")
    if any(not 0 <= i < rows for i in frame.finished):
        raise ValueError("a finish for a response that is not in the frame")
    return tokens, logprobs
