"""The section [tinker]: a server for loops of your own."""

from __future__ import annotations

from pydantic import Field, model_validator

from windfall.recipe.section_base import Count, FilePath, Section


class TinkerSection(Section):
    """A server of the Tinker API (docs/tinker.md): clients train adapters on one base with loops of their own. The
    command `windfall tinker` writes this section. Without `port`, it has no effect."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the server. 0: any that is free, the same after a restart."""
    host: str = ""
    """Address on which it listens. "0.0.0.0" lets other machines reach it. Empty: fleet.host."""
    tls_cert: FilePath | None = None
    """Certificate chain (PEM), so that keys and data are encrypted on their way. If left out, that of the run,
    fleet.tls_cert, if it has one."""
    tls_key: FilePath | None = None
    """Private key (PEM) of `tls_cert`. Set both or neither."""
    name: str = ""
    """Name under which clients find the base model. Empty: `model.path`."""
    accounts: FilePath | None = None
    """File of accounts, with their keys and limits. It is read again when it changes. If left out, there is one
    account, with a key in tinker.key of the run's folder."""
    session_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a sign of life from a client after which its session ends. The client sends one every 10 s."""
    save_updates: Count = 20
    """Updates of a model after which the server saves it. If a trainer is lost, this many are repeated at most."""

    @model_validator(mode="after")
    def _whole(self) -> TinkerSection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        return self
