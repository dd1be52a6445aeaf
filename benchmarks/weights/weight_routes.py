"""Time until all workers of several regions have a version, and bytes over the wide link and out of the trainer.

    python benchmarks/weights/weight_routes.py --regions 2,3 --readers 16
    python benchmarks/weights/weight_routes.py --case astraflow

Every machine is a network namespace (support/network_lab.py): the trainer with a real Publisher, the controller with a
real Dispatch and its directory, and workers with a real ControllerClient and Puller, whose engine does nothing. The
trainer, the controller and the bucket are in the first region; workers are spread evenly over all. Each run is a new
tree of processes: all workers join, then get a full copy, then a delta. Figures are medians.

    star        every worker reads from the trainer: weights.peers = "off"
    peers       workers feed each other, and nothing is known of regions
    regions     the same with regions
    bucket      workers reach a bucket (moto's S3 server, in Python), but not the trainer, and do not feed each other
    bucket-regions      the same, but they feed each other, with regions

The wide link is a process with a rate, a queue and a delay; it is no real network. With less than one core per machine,
rates above some 100 MB/s in sum measure the cores, not the links: the default rates and sizes are a tenth of real ones.

`--case astraflow`: 4 Gbit/s and 300 ms between two regions, as in AstraFlow's cross-region figures for 28 GB (a full
copy 52 to 58 s, a delta 2.5 to 6 s), with one worker in each. `--scale 0.1` takes a tenth of the rate and of the bytes,
and the same 300 ms, so that the times are the same but for the first seconds, in which a connection gets faster.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.network_lab import LabMachine, NetworkLab, enter, missing

ROOT = Path(__file__).resolve().parents[2]
MODES = ("star", "peers", "regions", "bucket", "bucket-regions")
TOKEN = "a-key-of-the-benchmark"
WEIGHTS_PORT, CONTROLLER_PORT, BUCKET_PORT = 7000, 7001, 7002
WAIT_S = 300.0
ASTRAFLOW_BYTES, ASTRAFLOW_BIT_PER_S = 28 * 10**9, 4e9
fork = multiprocessing.get_context("fork")


class Child:
    """A process on a machine of the lab. It runs `work(connection, *args)`."""

    def __init__(self, machine: LabMachine, work: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=self._run, args=(machine, work, theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    @staticmethod
    def _run(machine: LabMachine, work: Callable[..., None], pipe: Connection, *args: Any) -> None:
        from windfall.processes import parent_death

        parent_death.die_with_parent(os.getppid(), signal.SIGKILL)
        enter(machine, processes=True)
        if child := os.fork():
            os.waitpid(child, 0)
            os._exit(0)
        parent_death.die_with_parent(0, signal.SIGKILL)
        work(pipe, *args)

    def ask(self, *what: Any) -> Any:
        self.pipe.send(what)
        return self.answer()

    def answer(self) -> Any:
        if not self.pipe.poll(WAIT_S):
            raise TimeoutError(f"no answer for {WAIT_S:g} s")
        return self.pipe.recv()


def change(tensors: dict[str, Any], share: float, seed: int) -> None:
    """Change this share of the elements."""
    import torch

    random = torch.Generator().manual_seed(seed)
    for t in tensors.values():
        if share == 1.0:
            t.add_(1)
        else:
            t[torch.randint(len(t), (int(len(t) * share),), generator=random)] += 1


def make_tensors(mib: int) -> dict[str, Any]:
    import torch

    return {f"layer{i}": torch.zeros(2 << 20, dtype=torch.int16) for i in range(mib // 4)}


def trainer(pipe: Connection, mib: int, address: str, bucket: str, only_bucket: bool) -> None:
    """`bucket`: its URL, if the weights are uploaded, too. `only_bucket`: the controller is told of nothing else."""
    from windfall.link import auth
    from windfall.link import messages as m
    from windfall.weights.bucket import BucketStore
    from windfall.weights.publishing.publish import Publisher
    from windfall.weights.publishing.uploads import BucketUploads
    from windfall.weights.serve import serve_in_thread

    publisher, tensors = Publisher(), make_tensors(mib)
    serve_in_thread(publisher.files, host="0.0.0.0", port=WEIGHTS_PORT, key=auth.weights_key(TOKEN))
    uploads = BucketUploads(BucketStore(bucket, "benchmark"), lambda done: None) if bucket else None
    for version in range(1 << 30):
        (share,) = pipe.recv()
        change(tensors, share, version)
        made = publisher.publish(version, tensors)
        copy, delta = publisher.readable[0].held, publisher.delta
        holds = publisher.files.describe()
        files, holders = [holding.file for holding in holds], []
        if not only_bucket:
            holders.append(m.HolderFiles(location=f"http://{address}:{WEIGHTS_PORT}", holds=holds))
        if uploads is not None:
            assert copy is not None
            uploads.publish(copy, delta)
            holders.append(m.HolderFiles(location=uploads.store.location, holds=uploads.holds()))
            files += [h.file for h in uploads.holds() if h.file not in files]
        told = m.PublishedFiles(
            version=version,
            digest=made.digest,
            files=tuple(files),
            holders=tuple(holders),
            bucket=uploads.store.location if uploads else "",
        )
        pipe.send((told, made.nbytes, delta.manifest.nbytes if delta else 0))


def controller(pipe: Connection, readers: int, peers: bool, region: str) -> None:
    from windfall.controller.directory.directory import Directory
    from windfall.controller.directory.traffic import TrafficPrices
    from windfall.controller.rollout.dispatch import Dispatch
    from windfall.controller.workers.members import Patience, WorkerState
    from windfall.controller.workers.versions import Offer, PolicyVersions
    from windfall.events.log import EventLog
    from windfall.link import messages as m
    from windfall.link.gate import Gate, Terms
    from windfall.link.socket import Port, Route

    async def run(folder: str) -> None:
        events = EventLog(Path(folder) / "events.jsonl")
        directory = Directory(TrafficPrices(), peers="all" if peers else "none", region=region)
        patience = Patience(suspect_s=60, gone_s=120)
        versions = [PolicyVersions(staleness=1)]  # loads at once
        dispatch = Dispatch(events=events, patience=patience, directories={"": directory}, versions=versions)
        gate = Gate("benchmark", TOKEN, log=events.instant, max_workers=readers)
        gate.terms = {"": Terms(model="model", engine=engine_spec(), heartbeat_s=1.0)}
        route = Route(
            receives=m.FromWorker,
            max_frame_bytes=m.MAX_FRAME_BYTES,
            handler=lambda link: gate.worker(link, dispatch.attend),
        )
        port = Port("0.0.0.0", CONTROLLER_PORT, {"/worker": route}, None)
        await port.open()
        watching = asyncio.create_task(dispatch.watch())
        members = dispatch.members.all
        while len(members) < readers:
            await asyncio.sleep(0.02)
        pipe.send("joined")
        while True:
            (told,) = await asyncio.to_thread(pipe.recv)
            began, times = time.monotonic(), {}
            dispatch.weights.publish(told)
            dispatch.set_offer(Offer(version=told.version, digest=told.digest))
            while len(times) < readers and not watching.done():
                await asyncio.sleep(0.002)
                for id, member in members.items():
                    if member.state is WorkerState.READY and member.first.digest == told.digest:
                        times.setdefault(id, time.monotonic() - began)
            pipe.send(sorted(times.values()))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(folder))


def engine_spec() -> Any:
    from windfall.link import messages as m

    sizes: dict[str, Any] = {
        "kv_tokens": 0,
        "page_size": 16,
        "max_running": 0,
        "max_rows": 64,
        "longest": 100,
        "wanted": 8,
    }
    return m.EngineSpec(model_config="{}", dtype="float32", deterministic=False, **sizes)


def worker(pipe: Connection, url: str, name: str, region: str) -> None:
    from collections import Counter

    from tests.support.engines.hashing_engine import Hashing
    from windfall.link import auth
    from windfall.types import Lease
    from windfall.weights.pulling.pull import Puller
    from windfall.worker.controller_client import ControllerClient

    puller = Puller(key=auth.weights_key(TOKEN))
    client = ControllerClient(
        url,
        TOKEN,
        name=name,
        lease=Lease(region=region),
        build=lambda spec: (Hashing(Counter()), 4),
        puller=puller,
        files=puller.files,
        say=lambda line: print(f"{name}: {line}", file=sys.stderr) if os.environ.get("LAB_LOG") else None,
    )
    asyncio.run(client.run())
    del pipe


class Site:
    """Trainer, controller and workers."""

    def __init__(self, mode: str, lab: NetworkLab, readers: list[LabMachine], mib: int) -> None:
        for module in (
            "windfall.weights.publishing.uploads",
            "windfall.controller.rollout.dispatch",
            "windfall.link.gate",
            "windfall.worker.controller_client",
        ):
            importlib.import_module(module)
        machines, url = lab.machines, ""
        self.children: list[Child] = []
        if "bucket" in mode:
            environment = {"AWS_ACCESS_KEY_ID": "lab", "AWS_SECRET_ACCESS_KEY": "lab", "AWS_REGION": "us-east-1"}
            endpoint = f"http://{machines['bucket'].address}:{BUCKET_PORT}"
            os.environ.update(environment, AWS_ENDPOINT_URL=endpoint)
            url = "s3://bucket/weights"
            self._start(machines["bucket"], bucket_server).answer()
        names = {r.name: f"region-{r.region}" if "regions" in mode else "" for r in readers}
        self.controller = self._start(
            machines["controller"], controller, len(readers), mode not in ("star", "bucket"), names[readers[0].name]
        )
        at = f"http://{machines['controller'].address}:{CONTROLLER_PORT}"
        for reader in readers:
            self._start(reader, worker, at, reader.name, names[reader.name])
        address = machines["trainer"].address
        self.trainer = self._start(machines["trainer"], trainer, mib, address, url, bool(url))
        assert self.controller.answer() == "joined"

    def _start(self, machine: LabMachine, work: Callable[..., None], *args: Any) -> Child:
        self.children.append(Child(machine, work, *args))
        return self.children[-1]

    def publish(self, share: float) -> tuple[int, int]:
        self.told, nbytes, delta = self.trainer.ask(share)
        return nbytes, delta

    def load(self) -> list[float]:
        return self.controller.ask(self.told)

    def close(self) -> None:
        for child in self.children:
            child.process.kill()
            child.process.join()


def bucket_server(pipe: Connection) -> None:
    """moto's S3 server, with a bucket named `bucket`."""
    import threading
    import urllib.request

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    ThreadedMotoServer("0.0.0.0", BUCKET_PORT, verbose=False).start()
    request = urllib.request.Request(f"http://127.0.0.1:{BUCKET_PORT}/bucket", method="PUT")
    urllib.request.urlopen(request, timeout=60).close()
    pipe.send("ready")
    threading.Event().wait()


# Runs and figures


def run_once(mode: str, args: argparse.Namespace, regions: int) -> list[dict[str, Any]]:
    """A full copy, then a delta: seconds until half and until all workers had it, and bytes as shares of what one
    worker reads."""
    names = [[f"w{i}" for i in range(args.readers) if i % regions == r] for r in range(regions)]
    names[0] = ["trainer", "controller", "bucket", *names[0]]
    links = {"near_bit_per_s": args.near_gbit * 1e9, "wide_bit_per_s": args.wide_gbit * 1e9}
    with NetworkLab(names, delay_s=args.rtt_ms / 2e3, **links) as lab:
        for module in (
            "torch",
            "windfall.weights.pulling.pull",
            "windfall.weights.publishing.publish",
            "windfall.weights.serve",
        ):
            importlib.import_module(module)  # here, so that no child does it while it is measured
        readers = [lab.machines[f"w{i}"] for i in range(args.readers)]
        site = Site(mode, lab, readers, args.mib)
        try:
            rows = []
            for kind, share in (("full", 1.0), ("delta", args.changed)):
                before = counters(lab, regions)
                nbytes, delta = site.publish(share)
                times = site.load()
                after = counters(lab, regions)
                each = delta or nbytes
                wide, trainer, again, bucket = ((b - a) / each for a, b in zip(before, after, strict=True))
                half_s, all_s = times[(len(times) - 1) // 2], times[-1]
                rows.append(
                    {"mode": mode, "kind": kind, "regions": regions, "readers": args.readers, "nbytes": each}
                    | {"half_s": half_s, "all_s": all_s, "wide": wide, "trainer": trainer, "again": again}
                    | {"bucket": bucket}
                )
            return rows
        finally:
            site.close()


def counters(lab: NetworkLab, regions: int) -> tuple[float, int, int, int]:
    """Bytes over wide links per region that has no trainer; bytes that the trainer has sent, and of these the ones that
    TCP had sent before; bytes that the bucket has sent."""
    wide = sum(lab.wide_bytes(r) for r in range(1, regions)) / max(1, regions - 1)
    trainer = lab.machines["trainer"]
    return wide, trainer.sent_bytes(), trainer.sent_again_bytes(), lab.machines["bucket"].sent_bytes()


def start(mode: str, args: argparse.Namespace, regions: int) -> list[dict[str, Any]]:
    """`run_once` in a process of its own."""
    options = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in RUN_OPTIONS]
    done = subprocess.run(
        [sys.executable, __file__, "--role", mode, "--regions", str(regions), *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"},  # forks cannot share a pool
    )
    if done.returncode:
        raise SystemExit(f"{mode} failed")
    return json.loads(done.stdout.splitlines()[-1])


RUN_OPTIONS = ("readers", "mib", "changed", "near-gbit", "wide-gbit", "rtt-ms")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--regions", default="2,3")
    p.add_argument("--readers", type=int, default=16)
    p.add_argument("--modes", default="all", help=f"of {', '.join(MODES)}")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--mib", type=int, default=128, help="size of a full copy")
    p.add_argument("--changed", type=float, default=0.02, help="share of the elements that a delta changes")
    p.add_argument("--near-gbit", type=float, default=1.0, help="link of each machine")
    p.add_argument("--wide-gbit", type=float, default=0.1, help="link between two regions, each way")
    p.add_argument("--rtt-ms", type=float, default=80.0, help="between regions")
    p.add_argument("--case", choices=["astraflow"])
    p.add_argument("--scale", type=float, default=0.1, help="of the rate and the bytes of a case")
    p.add_argument("--role", choices=MODES, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.role:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and remove the lab
        print(json.dumps(run_once(args.role, args, int(args.regions))))
        return
    if why := missing():
        raise SystemExit(why)
    if args.case == "astraflow":
        astraflow(args)
        return
    modes = list(MODES) if args.modes == "all" else args.modes.split(",")
    rows: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for _ in range(args.repeats):
        for regions in map(int, args.regions.split(",")):
            for mode in modes:
                for row in start(mode, args, regions):
                    print(json.dumps(row), file=sys.stderr)
                    rows.setdefault((regions, row["kind"], mode), []).append(row)
    print_table(args, rows)


def astraflow(args: argparse.Namespace) -> None:
    args.readers, args.near_gbit, args.rtt_ms, args.changed = 2, 10.0, 300.0, 0.033
    args.wide_gbit, args.mib = ASTRAFLOW_BIT_PER_S * args.scale / 1e9, int(ASTRAFLOW_BYTES * args.scale) >> 20
    found = [start("regions", args, 2) for _ in range(args.repeats)]
    print_table(args, {(2, row["kind"], "regions"): [run[i] for run in found] for i, row in enumerate(found[0])})


def print_table(args: argparse.Namespace, rows: dict[tuple[int, str, str], list[dict[str, Any]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{args.readers} workers, {args.near_gbit:g} Gbit/s each, between regions {args.wide_gbit:g} Gbit/s and "
    table = Table(title=f"{title}{args.rtt_ms:g} ms; medians of {args.repeats}; load {os.getloadavg()[0]:.1f}")
    for column in ("regions", "update", "MB", "mode", "half s", "all s", "wide, copies per region", "out of trainer"):
        table.add_column(column, justify="right")
    for column in ("of it again", "out of bucket"):
        table.add_column(column, justify="right")
    for (regions, kind, mode), found in sorted(rows.items(), key=lambda item: (item[0][0], item[0][1] != "full")):
        middle = {k: statistics.median(row[k] for row in found) for k in found[0] if k not in ("mode", "kind")}
        figures = [f"{middle[k]:.2f}" for k in ("half_s", "all_s", "wide", "trainer", "again", "bucket")]
        table.add_row(str(regions), kind, f"{middle['nbytes'] / 1e6:.1f}", mode, *figures)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main()
