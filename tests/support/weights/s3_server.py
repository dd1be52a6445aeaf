"""A real S3 server (moto's) in a process of its own, on loopback."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.servers.ports import free_port

SECRET = "a-secret-key-that-nobody-may-see"
BUCKET = "weights"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment with which a client reaches the server's bucket."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        request(f"{url}/{BUCKET}", "PUT", wait_s=30.0)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
    finally:
        server.kill()
        server.wait()


def request(url: str, method: str, *, wait_s: float = 0.0) -> None:
    """`wait_s`: how long the server may take to start."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60).close()
            return
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
