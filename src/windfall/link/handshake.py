"""The handshake on a new link. Both sides prove that they know the same secret; the secret never crosses the wire.

    controller ──▶ Challenge(nonce c)
    peer       ──▶ Hello(nonce p, proof = HMAC(secret, "hello", run, c, p))       a replayed Hello has the wrong c
    controller ──▶ Welcome(proof = HMAC(secret, "welcome", run, c, p))            a false controller cannot compute it
               or  Refused

A peer is a worker, which knows the run's token, or the trainer, which has a secret of its own. That secret stays in the
run's folder and with the ranks of the trainer, so a worker cannot pass for the trainer. Ranks on several machines join
the supervisor in the same way, with that secret. Use TLS against an attacker who can read or change traffic.

The controller calls `challenge` (link/gate.py), and so does the supervisor (run/ranks/joined_ranks.py). The peers call
`join` (worker/controller_client.py, trainer/service.py, run/ranks/join.py). Between a controller and an environment
server it is the server that listens and calls `challenge` (envs/remote/server.py), with a token of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windfall.link import auth
from windfall.link import env_messages as e
from windfall.link import messages as m
from windfall.link.base import Link, LinkClosed, clip

TIMEOUT_S = 10.0  # seconds that each side waits for the other to complete the handshake
SAME_VERSION = "install the same version of windfall on both"


@dataclass(frozen=True, slots=True)
class Role:
    """The messages of one kind of peer, and the purpose that each proof is bound to."""

    hello: type[Any]
    hello_purpose: str
    welcome: type[Any]
    welcome_purpose: str
    listener: str = "controller"
    """What the peer joins, for messages."""


WORKER = Role(m.Hello, "hello", m.Welcome, "welcome")
TRAINER = Role(m.TrainerHello, "trainer", m.TrainerWelcome, "trainer welcome")
RANK = Role(m.RankHello, "rank", m.RankWelcome, "rank welcome", listener="supervisor")
ENV_CLIENT = Role(e.EnvHello, "env client", e.EnvWelcome, "env welcome", listener="environment server")


class PeerRefused(Exception):
    """The controller refuses the peer; the text is the reason."""

    def __init__(self, why: str, *, again: bool = False) -> None:
        self.again = again  # True if a later attempt may succeed
        super().__init__(why)


class JoinRefused(LinkClosed):
    """The controller refused this peer, or this peer cannot join that controller; the text is the reason."""

    def __init__(self, why: str, *, again: bool) -> None:
        self.again = again  # True if a later attempt may succeed
        super().__init__(why)


class ControllerUnverified(LinkClosed):
    """The controller could not prove that it knows the secret of this run."""


async def challenge(link: Link, role: Role, run: str, secret: Callable[[Any], str]) -> tuple[Any, bytes]:
    """The controller's side. Return the peer's hello and the proof for the welcome, or raise PeerRefused.

    `secret` returns the secret that the sender of a hello must know. An empty secret accepts no peer.
    """
    nonce = auth.nonce()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await link.send(m.Challenge(protocol=m.PROTOCOL, run=run, nonce=nonce))
            hello: Any = await link.receive()
    except TimeoutError:
        raise PeerRefused(f"no hello within {TIMEOUT_S:g} s", again=True) from None  # its machine may be overloaded
    if not isinstance(hello, role.hello):
        raise PeerRefused(f"expected a {role.hello.__name__}, received a {type(hello).__name__}")
    if hello.protocol != m.PROTOCOL:
        raise PeerRefused(f"protocol {hello.protocol}, this run uses {m.PROTOCOL}: {SAME_VERSION}")
    needed = secret(hello)
    if (
        not needed
        or len(hello.nonce) != auth.NONCE_BYTES
        or not hmac.compare_digest(hello.proof, auth.proof(needed, role.hello_purpose, run, nonce, hello.nonce))
    ):
        raise PeerRefused("wrong token, or a proof for another challenge")
    return hello, auth.proof(needed, role.welcome_purpose, run, nonce, hello.nonce)


async def refuse(link: Link, why: str, *, again: bool = False) -> None:
    """Tell the peer why it may not join, if it still listens."""
    with contextlib.suppress(LinkClosed, TimeoutError):
        async with asyncio.timeout(1.0):
            await link.send(m.Refused(why=clip(why), again=again))


async def join(link: Link, role: Role, secret: str, hello: Callable[..., Any]) -> Any:
    """The peer's side (a worker or the trainer). Return the controller's verified welcome.

    `hello` builds the hello message from `protocol`, `nonce` and `proof`. Raises JoinRefused, ControllerUnverified, or
    LinkClosed if the controller does not answer in time or is not a controller at all.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            opening = await link.receive()
            if not isinstance(opening, m.Challenge):
                raise LinkClosed(f"{link.peer}: not a windfall {role.listener}")
            if opening.protocol != m.PROTOCOL:
                what = f"the {role.listener} uses protocol {opening.protocol}, this process uses {m.PROTOCOL}"
                raise JoinRefused(f"{what}: {SAME_VERSION}", again=False)
            nonce = auth.nonce()
            proof = auth.proof(secret, role.hello_purpose, opening.run, opening.nonce, nonce)
            await link.send(hello(protocol=m.PROTOCOL, nonce=nonce, proof=proof))
            answer: Any = await link.receive()
    except TimeoutError:
        raise LinkClosed(f"{link.peer}: waited {TIMEOUT_S:g} s for a {role.welcome.__name__}") from None
    if isinstance(answer, m.Refused):
        raise JoinRefused(clip(answer.why), again=answer.again)
    expected = auth.proof(secret, role.welcome_purpose, opening.run, opening.nonce, nonce)
    if not isinstance(answer, role.welcome) or not hmac.compare_digest(answer.proof, expected):
        raise ControllerUnverified(
            f"{link.peer}: does not know the secret, so it is not the {role.listener} of this run"
        )
    return answer
