"""The network lab of benchmarks: links have the rates and delays that were asked for, and bytes are counted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.support.network_lab import NetworkLab, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SEND = """
import socket, sys
listener = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
while True:
    client, _ = listener.accept()
    client.sendall(bytes(int(client.recv(9))))
    client.close()
"""
READ = """
import socket, sys, time
def ask(nbytes):
    began = time.monotonic()
    s = socket.create_connection((sys.argv[1], 7000))
    connected_s = time.monotonic() - began
    s.sendall(nbytes.encode())
    return s, connected_s
print(min(ask("0")[1] for _ in range(10)))  # a busy machine delays some
began = time.monotonic()
s, _ = ask(sys.argv[2])
while s.recv(1 << 20): pass
print(time.monotonic() - began)
"""


def test_links_have_their_rate_and_delay() -> None:
    nbytes = 3_000_000
    with NetworkLab([["a", "b"], ["c"]], near_bit_per_s=400e6, wide_bit_per_s=80e6, delay_s=0.03) as lab:
        machines = lab.machines
        sender = subprocess.Popen(machines["a"].command(sys.executable, "-c", SEND), stdout=subprocess.PIPE)
        try:
            assert sender.stdout is not None
            assert sender.stdout.readline() == b"ready\n"
            for reader, least_s, wide in (("b", nbytes / 50e6, 0), ("c", nbytes / 10e6 + 0.06, nbytes)):
                sent, crossed = machines["a"].sent_bytes(), lab.wide_bytes(1)
                command = machines[reader].command(sys.executable, "-c", READ, machines["a"].address, str(nbytes))
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                connected_s, took_s = map(float, done.stdout.split())
                assert (connected_s > 0.06) == bool(wide)
                assert 0.6 * least_s < took_s < least_s + 60.0  # a queue may be filled at once; the machine may be busy
                assert nbytes < machines["a"].sent_bytes() - sent < 1.5 * nbytes
                assert wide <= lab.wide_bytes(1) - crossed < 1.1 * wide + 20_000
        finally:
            sender.kill()
            sender.wait()
