"""Tokens and their file, a worker that dials the wrong controller, and joining over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.listening_controller import Pulling
from tests.support.servers.certificates import self_signed
from windfall.errors import WindfallError
from windfall.link import auth, handshake, tls
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.handshake import JoinRefused
from windfall.link.memory import pair
from windfall.recipe.fleet import Fleet
from windfall.types import Lease
from windfall.worker.controller_client import ControllerClient

OpenGate = Any
TOKEN = "a-token-for-the-tests-of-links"


def test_token_is_created_once_and_readable_by_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = auth.make_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(token) >= 32
    assert auth.make_token(path) == auth.read_token(path) == token
    assert auth.make_token(tmp_path / "another") != token


def test_concurrent_creation_yields_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process creates the file between the check and the write."""
    path = tmp_path / "token"
    token = auth.make_token(path)
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    assert auth.make_token(path) == token


def test_invalid_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="cannot be read"):
        auth.read_token(tmp_path / "token")
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(WindfallError, match="not a token") as caught:
        auth.make_token(tmp_path / "token")
    assert caught.value.where == str(tmp_path / "token")
    assert "Delete" in caught.value.fix


def test_proof_depends_on_all_its_parts() -> None:
    proof = auth.proof("token", "hello", "run", b"ab", b"c")
    assert len(proof) == 32
    others = [("other", "hello", "run", b"ab", b"c"), ("token", "welcome", "run", b"ab", b"c"),
              ("token", "hello", "nur", b"ab", b"c"), ("token", "hello", "run", b"a", b"bc"),
              ("token", "hello", "run", b"abc"), ("token", "hellorun", "", b"ab", b"c")]  # fmt: skip
    for token, purpose, run, *nonces in others:
        assert proof != auth.proof(token, purpose, run, *nonces)
    assert auth.weights_key("token") != "token"
    assert len({auth.nonce() for _ in range(100)}) == 100


def worker(url: str = "http://127.0.0.1:1", token: str = TOKEN, **options: Any) -> tuple[ControllerClient, list[str]]:
    """An client that fails to build an engine, and the lines that it logs."""
    lines: list[str] = []

    def build(engine: m.EngineSpec) -> Any:
        raise WindfallError("accepted, and asked to build")

    client = ControllerClient(
        url, token, name="w", lease=Lease(), build=build, puller=Pulling(), say=lines.append, **options
    )
    return client, lines


def join(play: Callable[[Any], Any], token: str = TOKEN) -> m.Welcome:
    """Let a worker's client join a controller that behaves like `play`."""

    async def run() -> m.Welcome:
        ours, theirs = pair("worker", "controller")
        client, _ = worker(token=token)
        playing = asyncio.create_task(play(theirs))
        try:
            return await client._handshake(ours)  # type: ignore[arg-type]
        finally:
            playing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await playing

    return asyncio.run(run())


def controller(token: str = TOKEN, purpose: str = "welcome", replay: bool = False) -> Callable[[Any], Any]:
    """A controller that knows `token`. With `replay`, it sends a welcome that was valid on another connection."""

    async def play(link: Any) -> None:
        nonce = auth.nonce()
        await link.send(m.Challenge(protocol=m.PROTOCOL, run="demo", nonce=nonce))
        hello = await link.receive()
        proof = auth.proof(token, purpose, "demo", nonce, auth.nonce() if replay else hello.nonce)
        engine = m.EngineSpec(
            model_config="{}", dtype="float32", kv_tokens=1, page_size=1, max_running=1, max_rows=1,
            deterministic=True, longest=1, wanted=1,
        )  # fmt: skip
        await link.send(m.Welcome(proof=proof, worker="w", model="x", engine=engine, heartbeat_s=1.0, stalled_s=60.0))

    return play


def test_worker_joins_the_right_controller() -> None:
    assert join(controller()).worker == "w"


@pytest.mark.parametrize(
    "play", [controller(token="a-guess"), controller(purpose="hello"), controller(replay=True)],
    ids=["does not know the token", "reflects the worker's own proof", "replays an old welcome"],
)  # fmt: skip
def test_worker_refuses_an_unverified_controller(play: Callable[[Any], Any]) -> None:
    with pytest.raises(JoinRefused, match="does not know the secret") as caught:
        join(play)
    assert not caught.value.again


def test_worker_distinguishes_no_controller_from_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def other_protocol(link: Any) -> None:
        await link.send(m.Challenge(protocol=m.PROTOCOL + 1, run="demo", nonce=b"n"))

    async def no_controller(link: Any) -> None:
        await link.send(m.Cancel(handles=()))

    async def silent(link: Any) -> None:
        await asyncio.sleep(10)

    async def refuses(link: Any) -> None:
        await link.send(m.Challenge(protocol=m.PROTOCOL, run="demo", nonce=b"n"))
        await link.receive()
        await link.send(m.Refused(why="full", again=True))

    with pytest.raises(JoinRefused, match="install the same version"):
        join(other_protocol)
    with pytest.raises(LinkClosed, match="not a windfall controller"):
        join(no_controller)
    with pytest.raises(JoinRefused, match="full") as caught:
        join(refuses)
    assert caught.value.again
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.1)
    with pytest.raises(LinkClosed, match=r"waited 0.1 s for a Welcome"):
        join(silent)


def test_worker_with_the_wrong_token_exits_with_3(open_gate: OpenGate) -> None:
    async def run() -> None:
        async with open_gate().open() as d:
            client, lines = worker(d.url, token="not-the-token-of-this-run")
            assert await client.run() == 3
            assert any("wrong token" in line for line in lines)
            assert not any("not-the-token" in line for line in lines)
            assert len(d.logged) == 1

    asyncio.run(run())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Self-signed, for 127.0.0.1."""
    cert, key = self_signed(tmp_path_factory.mktemp("tls"))
    return Fleet(tls_cert=cert, tls_key=key)


def test_worker_joins_over_tls_only_with_the_certificate(
    open_gate: OpenGate, certificate: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async def outcome(url: str, **trust: Any) -> tuple[int, str]:
        client, lines = worker(url, ssl=tls.client_context(url, **trust), patience_s=0.0)
        return await client.run(), "\n".join(lines)

    async def run() -> None:
        async with open_gate().open(ssl=tls.server_context(certificate)) as d:
            assert d.url.startswith("https://")
            for trust in ({"ca": certificate.tls_cert}, {"pinned": certificate.tls_cert}):
                code, log = await outcome(d.url, **trust)
                assert (code, "accepted, and asked to build" in log) == (3, True), log
            code, log = await outcome(d.url)
            assert code == 5
            assert "the certificate is not accepted: self-signed certificate. Set --tls-ca" in log
            by_name = d.url.replace("127.0.0.1", "localhost")
            code, log = await outcome(by_name, ca=certificate.tls_cert)
            assert code == 5, "the certificate is for another name"
            assert "Hostname mismatch, certificate is not valid for 'localhost'" in log
            assert (await outcome(by_name, pinned=certificate.tls_cert))[0] == 3
            code, log = await outcome(d.url.replace("https", "http"))
            assert code == 5, "a port with TLS accepted a connection without"
            assert "If the run has TLS, its address begins with https://" in log
            assert d.logged == []
        async with open_gate().open() as d:
            code, log = await outcome(d.url.replace("http", "https"), ca=certificate.tls_cert)
            assert code == 5
            assert "If the run has no TLS, its address begins with http://" in log

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    logged = [r for r in caplog.records if r.name.startswith(("windfall", "aiohttp"))]
    assert len(logged) == 1, "TLS on a port without it: one line, however often it dials"
    assert not any(r.exc_info for r in logged)


class Chain:
    """A root, an intermediate issued by it, and a certificate for 127.0.0.1 issued by the intermediate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._issue("root", None, "CA:TRUE")
        self._issue("middle", "root", "CA:TRUE")
        self._issue("leaf", "middle", "CA:FALSE", "subjectAltName=IP:127.0.0.1")
        self._issue("sibling", "middle", "CA:FALSE", "subjectAltName=IP:127.0.0.1")
        for leaf in ("leaf", "sibling"):
            (folder / f"{leaf}-chain.pem").write_text(self.pem(leaf).read_text() + self.pem("middle").read_text())

    def pem(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def fleet(self, leaf: str = "leaf") -> Fleet:
        """The server presents the whole chain, like one with a purchased certificate."""
        return Fleet(tls_cert=self.pem(f"{leaf}-chain"), tls_key=self.folder / f"{leaf}.key")

    def _issue(self, name: str, by: str | None, *extensions: str, days: int = 2) -> None:
        kind, rest = extensions[0], extensions[1:]
        at = self.folder / name
        extension_lines = "\n".join((f"basicConstraints=critical,{kind}", *rest))
        at.with_suffix(".ext").write_text(extension_lines)
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"]
        self._run("req", *new, "-keyout", f"{at}.key", "-out", f"{at}.csr")
        signer = ["-signkey", f"{at}.key"] if by is None else [
            "-CA", str(self.pem(by)), "-CAkey", f"{self.folder / by}.key", "-CAcreateserial"]  # fmt: skip
        self._run("x509", "-req", "-in", f"{at}.csr", *signer, "-days", str(days), "-extfile", f"{at}.ext", "-out",
                  str(self.pem(name)))  # fmt: skip

    def _run(self, *args: str) -> None:
        subprocess.run(["openssl", *args], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return Chain(tmp_path_factory.mktemp("chain"))


def test_issued_certificate_can_be_pinned(open_gate: OpenGate, chain: Chain) -> None:
    async def joins(url: str, **trust: Any) -> bool:
        client, lines = worker(url, ssl=tls.client_context(url, **trust), patience_s=0.0)
        code = await client.run()
        assert (code == 3) == ("accepted, and asked to build" in "".join(lines)), lines
        return code == 3

    async def run() -> None:
        async with open_gate().open(ssl=tls.server_context(chain.fleet())) as d:
            by_name = d.url.replace("127.0.0.1", "localhost")
            assert await joins(by_name, pinned=chain.pem("leaf"))
            assert await joins(by_name, pinned=chain.pem("leaf-chain")), "followed by its issuer"
            for ca in ("root", "middle", "leaf", "leaf-chain"):
                assert await joins(d.url, ca=chain.pem(ca)), ca
                assert not await joins(by_name, ca=chain.pem(ca)), "the certificate is for another name"
            assert not await joins(d.url, ca=chain.pem("sibling"))
        async with open_gate().open(ssl=tls.server_context(chain.fleet("sibling"))) as d:
            for pinned in ("leaf", "leaf-chain"):
                assert not await joins(d.url, pinned=chain.pem(pinned)), "another certificate of the same issuer"
            assert await joins(d.url, pinned=chain.pem("sibling-chain"))

    asyncio.run(run())


def test_expired_certificate_is_refused_at_the_start(chain: Chain) -> None:
    """Otherwise a run would wait for its own trainer, which does not accept it."""
    chain._issue("old", "middle", "CA:FALSE", days=-1)
    with pytest.raises(WindfallError, match=r"old\.pem: nothing can connect .* certificate has expired"):
        tls.server_context(Fleet(tls_cert=chain.pem("old"), tls_key=chain.folder / "old.key"))


def test_ca_is_trusted_in_addition_to_those_of_the_system(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(chain.pem("root")))  # instead of the system's
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)

    def trusted(**options: Any) -> set[str]:
        context = tls.client_context("https://127.0.0.1", **options)
        assert context is not None
        return {dict(pair[0] for pair in c["subject"])["commonName"] for c in context.get_ca_certs()}  # type: ignore

    assert "root" in trusted()
    assert {"root", "middle"} <= trusted(ca=chain.pem("middle"))
    assert "root" not in trusted(pinned=chain.pem("leaf-chain"))


def test_unusable_certificates_are_refused(certificate: Fleet, tmp_path: Path) -> None:
    assert certificate.tls_cert is not None
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    with pytest.raises(WindfallError, match="cannot use the certificate") as caught:
        tls.server_context(Fleet(tls_cert=certificate.tls_cert, tls_key=wrong))
    assert str(wrong) in caught.value.where
    for trust in ({"ca": wrong}, {"pinned": wrong}, {"ca": tmp_path / "none"}, {"pinned": tmp_path / "none"}):
        with pytest.raises(WindfallError, match="cannot use the certificate"):
            tls.client_context("https://127.0.0.1", **trust)
    assert tls.client_context("http://127.0.0.1", ca=wrong) is None
    assert tls.server_context(Fleet()) is None
