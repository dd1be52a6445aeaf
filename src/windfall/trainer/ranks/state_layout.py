"""Where the trainer keeps its state: bytes on the GPU and in host memory, and bytes that an update moves. Pure.

Bytes per trained parameter, in a model that computes in half precision:

                                  one rank     split over N ranks: an Nth each
    weight                        2            - (gathered from the masters)
    sum of the gradients          4            4
    master                        4  *         4
    Adam's two moments            8  *         8  *     (adamw_8bit: 2)

Adapters are not split: each rank has those of one rank. Frozen weights are stored once, in the compute dtype; with
several ranks they are whole on each of them if they fit there, because then nothing is gathered.

What is marked * may be in host memory, in whole or in part: an update then copies it to the GPU, chunk by chunk, and
back (trainer/adam/weight_state.py). A float32 model is its own master.

`choose` finds the layout with the least in host memory that fits: all these layouts give the same weights bit for bit,
and what an update moves is what they cost. Moments in 8 bits give others, so only the recipe can choose them; an error
names them where they would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from windfall.errors import WindfallError

STATE_BYTES = 16
"""What an update reads of a parameter: gradient, master and two moments."""
EIGHT_BIT_BYTES = 460
"""The bytes that would take as long as an update with moments in 8 bits was measured to take: it is a chain of
operations, and each reads all numbers."""
GRADIENT_BYTES = MASTER_BYTES = 4
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 8 / 256}
"""Both moments of a parameter together, by train.optimizer: in 8 bits, 256 numbers share a float32 scale. Vectors have
float32 moments, and some weights smaller blocks; they are few."""


def moment_bytes(optimizer: str, *, adapters: bool) -> float:
    """Bytes of both moments of a trained parameter. `optimizer`: as in the recipe. Many weights of adapters are too
    small for 8 bits."""
    return MOMENT_BYTES["adamw" if adapters else optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """Bytes are those of one rank.

    >>> alone = StateLayout(trained=1000)
    >>> alone.gpu_bytes, alone.host_bytes, alone.moved_bytes
    (18000.0, 0.0, 0.0)
    >>> half = replace(alone, host_share=0.5)
    >>> half.gpu_bytes, half.host_bytes, half.moved_bytes
    (12000.0, 6000.0, 12000.0)
    >>> replace(half, ranks=2, sharded=True).gpu_bytes
    6000.0
    >>> adapters = StateLayout(trained=16, frozen=1000, ranks=4)
    >>> adapters.gpu_bytes, replace(adapters, sharded=True).gpu_bytes
    (2288.0, 788.0)
    """

    trained: int
    """Parameters that are trained."""
    frozen: int = 0
    value_bytes: int = 2
    """Bytes of one number in the compute dtype."""
    moment_bytes: float = MOMENT_BYTES["adamw"]
    ranks: int = 1
    sharded: bool = False
    """Whether weights are split with FSDP2, maybe over one rank. If adapters are trained, only the base is split."""
    host_share: float = 0.0
    """How much of what may be in host memory is there."""

    @property
    def own_masters(self) -> bool:
        """Whether the weights are their own masters: those that are split over ranks are in float32."""
        return (self.sharded and not self.frozen) or self.value_bytes == MASTER_BYTES

    @property
    def trained_here(self) -> float:
        """Parameters whose state this rank has."""
        return self.trained / (self.ranks if self.sharded and not self.frozen else 1)

    @property
    def movable(self) -> float:
        """Bytes that may be in host memory."""
        return self.trained_here * (self.moment_bytes + MASTER_BYTES * (not self.own_masters))

    @property
    def gpu_bytes(self) -> float:
        fixed = GRADIENT_BYTES + (MASTER_BYTES if self.own_masters else self.value_bytes)
        frozen = self.frozen * self.value_bytes / (self.ranks if self.sharded else 1)
        return self.trained_here * fixed + frozen + self.movable - self.host_bytes

    @property
    def host_bytes(self) -> float:
        return self.movable * self.host_share

    @property
    def moved_bytes(self) -> float:
        """By an update, in both directions together."""
        return 2 * self.host_bytes

    @property
    def update_bytes(self) -> float:
        """What an update reads on the GPU, and writes again."""
        return self.trained_here * (EIGHT_BIT_BYTES if self.moment_bytes < MOMENT_BYTES["adamw"] else STATE_BYTES)

    @property
    def training_bytes(self) -> float:
        """On the GPU, besides the weights: what can sleep while other jobs train."""
        return self.trained_here * GRADIENT_BYTES + self.movable - self.host_bytes

    def fitted(self, gpu_bytes: float) -> StateLayout:
        """With as little in host memory as fits into this many bytes of the GPU; maybe that does not suffice.

        >>> layout = StateLayout(trained=1000)
        >>> [layout.fitted(room).host_share for room in (18_000, 15_000, 6000, 5000)]
        [0.0, 0.25, 1.0, 1.0]
        """
        over = replace(self, host_share=0.0).gpu_bytes - gpu_bytes
        return replace(self, host_share=min(1.0, max(0.0, over / self.movable if self.movable else 0.0)))

    def describe(self) -> str:
        """
        >>> StateLayout(trained=8_190_000_000).fitted(100e9).describe()
        '100.0 GB of state on the GPU; 47.4 GB of masters and moments in host memory, 95 GB moved by an update'
        >>> StateLayout(trained=4 * 10**7, frozen=8 * 10**9, ranks=2).describe()
        '16.7 GB of state on each GPU, with the whole base'
        """
        on = "each GPU" if self.ranks > 1 else "the GPU"
        if self.frozen and self.ranks > 1:
            on += f", with 1/{self.ranks} of the base" if self.sharded else ", with the whole base"
        what = "8-bit moments" if self.moment_bytes < MOMENT_BYTES["adamw"] else "moments"
        what = what if self.own_masters else f"masters and {what}"
        host, moved = self.host_bytes / 1e9, self.moved_bytes / 1e9
        away = f"; {host:.1f} GB of {what} in host memory, {moved:.0f} GB moved by an update" if host else ""
        return f"{self.gpu_bytes / 1e9:.1f} GB of state on {on}{away}"


Offload = bool | Literal["auto"]


def choose(
    layout: StateLayout, offload: Offload, *, gpu_bytes: float, host_bytes: float, wanted: float, least: float,
    others: Sequence[str] = (),
) -> StateLayout:  # fmt: skip
    """The layout with the least in host memory that fits into `gpu_bytes` beside the `wanted` bytes, or at least beside
    `least`: activations, and what else is on the GPU. A frozen base that would be split is whole if that fits beside
    `wanted`. Raises WindfallError if there is none, which says what would fit; `others`: what the caller knows of that.
    `offload`: as in the recipe; True puts into host memory what may be there, False nothing. `host_bytes`: free there,
    for each rank.

    >>> options = {"gpu_bytes": 141e9, "host_bytes": 100e9, "wanted": 30e9, "least": 5e9}
    >>> round(choose(StateLayout(trained=8_190_000_000), "auto", **options).host_share, 2)
    0.37
    """

    def chosen(layout: StateLayout) -> StateLayout:
        if offload == "auto":
            return layout.fitted(gpu_bytes - wanted)
        return replace(layout, host_share=float(offload))

    def fits(layout: StateLayout, host: float = host_bytes) -> bool:
        return layout.gpu_bytes + least <= gpu_bytes and layout.host_bytes <= host

    if layout.frozen and layout.sharded:
        whole = chosen(replace(layout, sharded=False))
        if whole.gpu_bytes + wanted <= gpu_bytes and whole.host_bytes <= host_bytes:
            return whole
    found = chosen(layout)
    if fits(found):
        return found
    if offload == "auto" and fits(closer := layout.fitted(gpu_bytes - least)):
        return closer  # host memory is short, too: smaller packs
    on = f"{found.gpu_bytes / 1e9:.0f} GB on {'each GPU' if layout.ranks > 1 else 'the GPU'}"
    host, have = "", f"{gpu_bytes / 1e9:.0f} GB"
    if found.host_bytes > host_bytes:
        host, have = f", and {found.host_bytes / 1e9:.0f} GB of host memory", f"{have} and {host_bytes / 1e9:.0f} GB"
    # More ranks on the same machine share its memory.
    more = _more_ranks(layout, lambda n: fits(chosen(n), host_bytes * layout.ranks / n.ranks))
    options = [*others, *([f"train.ranks = {more}"] if more else [])]
    smaller = replace(layout, moment_bytes=MOMENT_BYTES["adamw_8bit"])
    if not layout.frozen and smaller != layout and fits(chosen(smaller)):
        options.insert(0, 'train.optimizer = "adamw_8bit"')
    if offload is not True and not found.host_bytes and fits(replace(layout, host_share=1.0)):
        options.insert(0, 'train.offload = "auto"')
    if not layout.frozen:
        options.append("adapters ([train.lora])")
    raise WindfallError(
        f"the trainer's state does not fit: it needs {'at least ' if offload == 'auto' else ''}{on}, "
        f"{least / 1e9:.0f} GB besides, mostly for activations{host}; {have} can be used",
        where="train",
        fix=f"What fits: {', or '.join(options or ['GPUs with more memory'])}.",
    )


def _more_ranks(layout: StateLayout, fits: Callable[[StateLayout], bool]) -> int:
    """The smallest power of two of ranks that suffices; 0 if there is none."""
    sizes = (n for n in (1 << power for power in range(1, 11)) if n > layout.ranks)
    return next((n for n in sizes if fits(replace(layout, ranks=n, sharded=True))), 0)


def put_away(sizes: Sequence[int], share: float) -> list[bool]:
    """Which of the weights of these sizes have their state in host memory: together at least this share, and little
    more. Large ones are first, because their copies are fast.

    >>> put_away([10, 1, 40, 3, 40], 0.45)
    [False, True, True, True, False]
    >>> put_away([10, 1], 0.0), put_away([10, 1], 1.0)
    ([False, False], [True, True])
    """
    left, out = share * sum(sizes), [False] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    for i in order:
        if 0 < sizes[i] <= left:
            out[i], left = True, left - sizes[i]
    for i in reversed(order):  # the smallest that covers the rest
        if left > 0 and not out[i] and sizes[i] >= left:
            out[i], left = True, 0.0
    return out
