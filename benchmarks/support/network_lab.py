"""Machines in several regions, as network namespaces of this one. Needs root, `ip`, `tc` and `cc`.

    machine ── veth ──┐                            ┌── veth ── machine
    machine ── veth ──┴ bridge ── wide_link.c ── bridge ┘
      `near_bit_per_s` each       `wide_bit_per_s` and `delay_s` each way, for every ordered pair of regions

Links within a region are shaped by the kernel (tbf), those between regions by a process that forwards packets between
TUN devices (wide_link.c: a rate, one queue, a delay). It is no real wide area network: no packet is lost but for a full
queue, none is reordered, and packets have up to 9 kB.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MTU = 9000
CLONE_NEWNET, CLONE_NEWPID = 0x40000000, 0x20000000
BURST_S = 0.002
"""What tbf lets through at once, as time at the full rate."""


def missing() -> str:
    """Why there can be no lab here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc", "cc") if shutil.which(name) is None]
    if absent or not Path("/dev/net/tun").exists():
        return f"not here: {', '.join(absent) or '/dev/net/tun'}"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LabMachine:
    name: str
    region: int
    address: str
    namespace: str

    def command(self, *words: str) -> list[str]:
        """The command that runs these words on the machine."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def sent_bytes(self) -> int:
        return _counted(self.namespace, "near", "tx")

    def sent_again_bytes(self) -> int:
        """Of these, what TCP had sent before."""
        names, numbers = _run(*self.command("grep", "^Tcp:", "/proc/net/snmp")).splitlines()
        return int(dict(zip(names.split(), numbers.split(), strict=True))["RetransSegs"]) * MTU


class NetworkLab:
    def __init__(
        self,
        regions: Sequence[Sequence[str]],
        *,
        near_bit_per_s: float = 10e9,
        wide_bit_per_s: float = 1e9,
        delay_s: float = 0.04,
    ) -> None:
        """`regions`: the names of the machines of each. `delay_s`: one way between regions."""
        self.machines: dict[str, LabMachine] = {}
        self._undo = ExitStack()
        self._id = f"lab{os.getpid()}"
        self._regions = [self._namespace(f"r{r}") for r in range(len(regions))]
        try:
            if len(regions) > 1:
                self._start_wide_link(wide_bit_per_s / 8, delay_s)
            for region, names in enumerate(regions):
                self._build_region(region, names, near_bit_per_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> NetworkLab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._undo.close()

    def wide_bytes(self, region: int) -> int:
        """Bytes that came into a region over wide links, with headers."""
        return _counted(self._regions[region], "wide", "rx") if len(self._regions) > 1 else 0

    def _namespace(self, name: str) -> str:
        made = f"{self._id}-{name}"
        _run("ip", "netns", "add", made)
        self._undo.callback(_run, "ip", "netns", "delete", made)
        _run("ip", "-n", made, "link", "set", "lo", "up")
        return made

    def _start_wide_link(self, bytes_per_s: float, delay_s: float) -> None:
        folder = self._undo.enter_context(tempfile.TemporaryDirectory())
        _run("cc", "-O2", "-o", f"{folder}/wide_link", str(Path(__file__).with_name("wide_link.c")))
        queue_bytes = max(1 << 20, bytes_per_s * 2 * delay_s)
        numbers = [str(int(n)) for n in (bytes_per_s, delay_s * 1e6, queue_bytes)]
        places = [f"/run/netns/{name}" for name in self._regions]
        process = subprocess.Popen([f"{folder}/wide_link", *numbers, *places], stdout=subprocess.PIPE)
        self._undo.callback(_end, process)
        if not process.stdout or process.stdout.readline() != b"ready\n":
            raise RuntimeError("wide_link did not start")
        for region, name in enumerate(self._regions):
            _run("ip", "-n", name, "link", "set", "wide", "mtu", str(MTU), "txqueuelen", "10000", "up")
            for other in range(len(self._regions)):
                if other != region:
                    _run("ip", "-n", name, "route", "add", f"10.{other}.0.0/16", "dev", "wide")

    def _build_region(self, region: int, names: Sequence[str], bit_per_s: float) -> None:
        place = self._regions[region]
        _run("ip", "-n", place, "link", "add", "bridge", "mtu", str(MTU), "type", "bridge")
        _run("ip", "-n", place, "address", "add", f"10.{region}.0.1/16", "dev", "bridge")
        _run("ip", "-n", place, "link", "set", "bridge", "up")
        _run("ip", "netns", "exec", place, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for i, name in enumerate(names):
            machine = LabMachine(
                name=name, region=region, address=f"10.{region}.1.{i + 1}", namespace=self._namespace(name)
            )
            far, mtu = f"port{i}", ("mtu", str(MTU))
            pair = ("name", far, "netns", place)
            _run("ip", "-n", machine.namespace, "link", "add", "near", *mtu, "type", "veth", "peer", *mtu, *pair)
            _run("ip", "-n", place, "link", "set", far, "master", "bridge", "up")
            _run("ip", "-n", machine.namespace, "address", "add", f"{machine.address}/16", "dev", "near")
            _run("ip", "-n", machine.namespace, "link", "set", "near", "up")
            _run("ip", "-n", machine.namespace, "route", "add", "default", "via", f"10.{region}.0.1")
            burst = str(int(max(256 << 10, bit_per_s / 8 * BURST_S)))
            for where, device in ((machine.namespace, "near"), (place, far)):
                shape = ("rate", f"{int(bit_per_s)}bit", "burst", burst, "latency", "50ms")
                _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *shape)
            self.machines[name] = machine


def enter(machine: LabMachine, *, processes: bool = False) -> None:
    """Move this thread to the network of a machine, with its later sockets. `processes`: its children get process
    numbers of their own, so that none of them counts as on one machine with another (weights/buffers.py:machine)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{machine.namespace}") as place:
        if libc.setns(place.fileno(), CLONE_NEWNET) or (processes and libc.unshare(CLONE_NEWPID)):
            raise OSError(ctypes.get_errno(), f"cannot enter {machine.namespace}")


def _counted(namespace: str, device: str, way: str) -> int:
    shown: Any = json.loads(_run("ip", "-n", namespace, "-s", "-j", "link", "show", device))
    return shown[0]["stats64"][way]["bytes"]


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
