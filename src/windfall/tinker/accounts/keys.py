"""Accounts: who may use the server, within which limits, and what each has used.

A file of accounts is TOML, with a table for each (AccountTable). It is read again when it changes. With a mistake in
it, the accounts stay as they were. Without a file there is one account, with a key that the server makes.
"""

from __future__ import annotations

import hmac
import os
import secrets
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windfall.errors import WindfallError
from windfall.tinker.calls import Refusal

PREFIX = "tml-"
"""Clients accept only keys that begin so."""
ONLY = "default"
"""The account of a server without a file of accounts."""
KEY_FILE = "tinker.key"
"""The file in the folder of the run with the key of this account."""
OPEN_BYTES = 1 << 30
"""Most bytes of an account's calls without a result: the server has them in memory."""
Usage = dict[str, float]


Limit = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A limit; 0: there is none."""


class AccountTable(BaseModel):
    """The table of an account in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str = Field(pattern=rf"^{PREFIX}[\x21-\x7e]{{8,}}$")
    models: int = Field(default=0, ge=0)
    """Most models at the same time. 0: no limit."""
    calls: int = Field(default=0, ge=0)
    """Most calls without a result. 0: no limit."""
    max_usd: Limit = 0.0
    """Its bill above which it can make no more calls."""
    disk_gb: Limit = 0.0
    """Size of its saved weights above which it can save no more."""


class ApiAccount(AccountTable):
    name: str


class Keys:
    def __init__(self, accounts: Mapping[str, ApiAccount], file: Path | None = None) -> None:
        """`file`: from which they come."""
        self._accounts, self._file = dict(accounts), file
        self._read: tuple[int, ...] | None = ()
        """The state of the file that was read last."""
        self._usage: dict[str, Usage] = {}
        self.open_calls, self.open_bytes = Counter[str](), Counter[str]()
        """How many calls of each account have no result, and how many bytes these have."""
        self.usd: Callable[[str], float] = lambda account: 0.0
        """The bill of an account."""

    @property
    def names(self) -> list[str]:
        return list(self._accounts)

    def read_again(self) -> bool:
        """Whether the file has changed since it was read; then its accounts are those of the server. Raises
        WindfallError, once, if they cannot be: then these stay."""
        if self._file is None or (state := _state(self._file)) == self._read:
            return False
        self._read = state
        self._accounts = _accounts(self._file)
        return True

    def account(self, key: str) -> ApiAccount:
        """Who has this key. Raises Refusal."""
        sent = key.encode(errors="replace")
        found = [a for a in self._accounts.values() if hmac.compare_digest(a.key.encode(), sent)]  # always all of them
        if found:
            return found[0]
        raise Refusal(401, "this API key is not one of the server's. Set TINKER_API_KEY to the key that it printed.")

    def check_models(self, account: ApiAccount, models: int) -> None:
        self._check_usd(account)
        if account.models and models >= account.models:
            what = f"account {account.name} has {models} models, which is its limit"
            raise Refusal(429, f"{what}. Unload one, or end its session.")

    def check_calls(self, account: ApiAccount, size: int, *, awaited: bool = False) -> None:
        """Raises Refusal if the account may not make one more call, of `size` bytes. `awaited`: all its calls wait for
        this one, so there will never be more room for it."""
        self._check_usd(account)
        if awaited:
            return
        if account.calls and (count := self.open_calls[account.name]) >= account.calls:
            raise Refusal(429, f"account {account.name} has {count} calls without a result, which is its limit")
        if (held := self.open_bytes[account.name]) + size > OPEN_BYTES:
            what = f"account {account.name} has {held >> 20} MiB of calls without a result, of at most"
            raise Refusal(429, f"{what} {OPEN_BYTES >> 20}; send this call again later")

    def _check_usd(self, account: ApiAccount) -> None:
        usd = self.usd(account.name)
        if account.max_usd and usd >= account.max_usd:
            what = f"account {account.name} has used ${usd:,.2f}, and its limit is ${account.max_usd:,.2f}"
            raise Refusal(402, f"{what}. Ask the operator of this server for a higher one (max_usd).")

    def check_disk(self, account: str, saved_bytes: int) -> None:
        """Raises Refusal if an account with `saved_bytes` of saved weights may save no more."""
        most = 0.0 if (found := self._accounts.get(account)) is None else found.disk_gb
        if most and saved_bytes >= most * 1e9:
            what = f"account {account} has {saved_bytes / 1e9:,.2f} GB of saved weights, and its limit is {most:g} GB"
            raise Refusal(400, f"{what} (disk_gb). Delete some, or let them expire.")

    def count(self, account: str, **amounts: float) -> None:
        """Add to what an account has used."""
        usage = self._usage.setdefault(account, {})
        for name, amount in amounts.items():
            usage[name] = usage.get(name, 0.0) + amount

    def usage(self, account: str) -> Usage:
        return self._usage.get(account, {})

    def total(self, name: str) -> float:
        """What all accounts have used together."""
        return sum(usage.get(name, 0.0) for usage in self._usage.values())

    def restore(self, usage: Mapping[str, Usage]) -> None:
        self._usage = dict(usage)


def load(file: Path | None, folder: Path) -> Keys:
    """The accounts of a file, or the only one, whose key is in the folder of the run."""
    if file is None:
        return Keys({ONLY: _account(ONLY, {"key": make_key(folder)}, folder / KEY_FILE)})
    found = Keys({}, file)
    found.read_again()
    return found


def _state(file: Path) -> tuple[int, ...] | None:
    """What changes when a file is written or replaced."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _accounts(file: Path) -> dict[str, ApiAccount]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as e:
        raise WindfallError(f"cannot be read: {e}", where=str(file), fix="See docs/tinker.md, Accounts.") from e
    accounts = {name: _account(name, table, file) for name, table in tables.items()}
    if not accounts:
        raise WindfallError("there is no account", where=str(file), fix='Add one: [alice] with key = "tml-...".')
    if len({account.key for account in accounts.values()}) < len(accounts):
        raise WindfallError("two accounts have the same key", where=str(file), fix="Give each a key of its own.")
    return accounts


def _account(name: str, table: Any, file: Path) -> ApiAccount:
    try:
        return ApiAccount(name=name, **AccountTable.model_validate(table).model_dump())
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, (name, *first["loc"])))
        fix = f'A key is "{PREFIX}" and at least 8 printable characters; limits are numbers from 0 on.'
        raise WindfallError(first["msg"], where=f"{file}: {where}", fix=fix) from e


def make_key(folder: Path) -> str:
    """The key of the only account: that of the last start, or a new one."""
    path = folder / KEY_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with os.fdopen(descriptor, "w") as file:
        key = PREFIX + secrets.token_urlsafe(24)
        file.write(key + "\n")
    return key
