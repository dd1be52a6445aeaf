"""What `windfall tinker` refuses before it starts a process or makes a folder."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from windfall.errors import WindfallError
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.run import recipe_check
from windfall.tinker.command import served


def recipe(port: int = 0, accounts: Path | None = None) -> Recipe:
    return served(
        parse_recipe({}, where="here"), model=None, port=port, name=None, rank=4, models=1, samplers=1, context=None,
        workers=0, accounts=accounts,
    )  # fmt: skip


def test_accounts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "accounts.toml"
    with pytest.raises(WindfallError, match=r"accounts\.toml"):
        recipe_check.check(recipe(accounts=file))
    file.write_text('[alice]\nkey = "x"\n')
    with pytest.raises(WindfallError, match=r"alice\.key"):
        recipe_check.check(recipe(accounts=file))
    file.write_text('[alice]\nkey = "tml-alice-0123"\n')
    report = recipe_check.check(recipe(accounts=file))
    assert "on tiny" in report
    assert "environment" not in report, "a server has none"


def test_a_port_that_is_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(WindfallError, match=rf"127\.0\.0\.1:{port}: cannot listen(.|\n)*--port"):
            recipe_check.check(recipe(port))
