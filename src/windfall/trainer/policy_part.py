"""What one rank has of one policy: the weights, their trainer, and what workers can read of them.

    base ──┬─ PolicyPart solver      adapters, TorchTrainer, Publisher ─┐
           ├─ PolicyPart verifier    adapters, TorchTrainer, Publisher ─┼─ one module, one base, one weight server
           └─ PolicyPart reference   -         -             Publisher ─┘

A policy is trained, frozen, a copy of another one, or a slot (docs/policies.md). A copy has adapters of its own in the
module. They follow those of the original whenever that publishes, and are published when the controller asks for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from windfall.link import messages as m
from windfall.recipe.sections import Recipe
from windfall.trainer.slots.slot import Slot
from windfall.trainer.trained_weights import TrainedWeights
from windfall.trainer.trainer import TorchTrainer
from windfall.weights import buffers
from windfall.weights.publishing.publish import Publisher
from windfall.weights.publishing.uploads import BucketUploads


@dataclass(kw_only=True, eq=False)
class PolicyPart:
    recipe: Recipe
    """The recipe as this policy sees it."""
    weights: TrainedWeights
    trainer: TorchTrainer | None
    """None: this policy is not trained."""
    publisher: Publisher
    original: PolicyPart | None = None
    """The policy that this one is a copy of, if it is one."""
    slot: Slot | None = None
    """If the policy is a slot, or frozen beside slots."""
    published: m.PublishedFiles = field(init=False)
    """What workers can read."""
    uploads: BucketUploads | None = None
    """To the bucket, by the first rank of each machine."""
    report: Callable[[m.Uploaded], None] = field(init=False)
    """Called after each upload, by any thread. By default, rank 0 reports it when the next version is published."""
    _reports: deque[m.Uploaded] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self.report = self._reports.append

    def publish(self, version: int, order: m.Publish, ranks: Any, *, address: str, copied: Callable[[], None]) -> Any:
        """Publish the present weights as this version. Returns their manifest. All ranks call this together.
        `address`: of the weight server of this rank. `copied` is called once the weights may change again."""
        manifest = self.weights.publish(self.publisher, version, copied=copied, pack=order.pack)
        mine = m.HolderFiles(location=address, holds=self.publisher.describe(), machine=buffers.machine())
        holders = tuple(each for each in ranks.quick.all_gather(mine) if each.holds)
        self._upload(order.keep, (), ranks)
        bucket = ""
        if self.uploads is not None:
            bucket = self.uploads.store.location
            holders = (*holders, m.HolderFiles(location=bucket, holds=self.uploads.holds()))
        files = {holding.file.digest: holding.file for each in holders for holding in each.holds}
        self.published = m.PublishedFiles(
            version=version, digest=manifest.digest, files=tuple(files.values()), holders=holders, bucket=bucket
        )
        return manifest

    def upload_again(self, files: Collection[str], ranks: Any) -> None:
        """Replace files that are damaged in the bucket, or upload the newest version as a copy instead of them."""
        held = self.uploads.holds() if self.uploads is not None else ()
        self._upload([each.file.digest for each in held], files, ranks)

    def _upload(self, keep: Collection[str], wrong: Collection[str], ranks: Any) -> None:
        """Upload the newest version to the bucket, if there is one. All machines upload the same files."""
        if not self.recipe.weights.bucket:
            return
        unfinished = self.uploads.unfinished() if self.uploads is not None else {}
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        machines, reported = zip(*ranks.quick.all_gather((unfinished, reports)), strict=True)
        if ranks.first:
            for done in chain.from_iterable(reported):
                self.report(done)
        if self.uploads is not None:
            base = self.publisher.base.held if self.publisher.base else None
            newest = self.publisher.readable[0].held if self.publisher.readable else base  # a frozen policy is its base
            assert newest is not None
            delta = self.publisher.delta
            self.uploads.publish(newest, delta, base=base, keep=keep, wrong=wrong, machines=machines)

    def stop_uploads(self) -> None:
        if self.uploads is not None:
            self.uploads.close()

    def close(self) -> None:
        self.stop_uploads()
        self.publisher.close()
