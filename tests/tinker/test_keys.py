"""Accounts: who may use the server, and within which limits."""

from pathlib import Path

import pytest

from windfall.errors import WindfallError
from windfall.tinker.accounts import keys
from windfall.tinker.calls import Refusal


def test_the_only_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    key = keys.make_key(tmp_path)
    assert key.startswith("tml-")
    assert keys.make_key(tmp_path) == key
    assert (tmp_path / "tinker.key").stat().st_mode & 0o077 == 0
    assert keys.load(None, tmp_path).account(key).name == keys.ONLY


def test_a_wrong_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="TINKER_API_KEY") as e:
        keys.load(None, tmp_path).account("tml-of-somebody-else")
    assert e.value.status == 401


def test_limits_of_an_account(tmp_path: Path) -> None:
    file = tmp_path / "accounts.toml"
    file.write_text('[alice]\nkey = "tml-alice-0123"\nmodels = 1\ncalls = 2\n[bob]\nkey = "tml-bob-012345"\n')
    found = keys.load(file, tmp_path)
    alice, bob = found.account("tml-alice-0123"), found.account("tml-bob-012345")
    found.open_calls["alice"] = found.open_calls["bob"] = 2
    with pytest.raises(Refusal, match="1 models, which is its limit"):
        found.check_models(alice, 1)
    with pytest.raises(Refusal, match="2 calls without a result"):
        found.check_calls(alice, 1)
    found.check_calls(alice, 1, awaited=True)
    found.check_models(bob, 1)
    found.check_calls(bob, 1)


def test_an_account_whose_saved_weights_are_large_saves_no_more(tmp_path: Path) -> None:
    file = tmp_path / "accounts.toml"
    file.write_text('[alice]\nkey = "tml-alice-0123"\ndisk_gb = 0.5\n[bob]\nkey = "tml-bob-012345"\n')
    found = keys.load(file, tmp_path)
    found.check_disk("alice", 499_999_999)
    found.check_disk("bob", 10**12)
    with pytest.raises(Refusal, match=r"has 0.50 GB of saved weights, and its limit is 0.5 GB"):
        found.check_disk("alice", 500_000_000)


def test_an_account_over_its_budget_makes_no_more_calls(tmp_path: Path) -> None:
    file = tmp_path / "accounts.toml"
    file.write_text('[alice]\nkey = "tml-alice-0123"\nmax_usd = 2\n')
    found = keys.load(file, tmp_path)
    found.usd = lambda account: 2.5
    alice = found.account("tml-alice-0123")
    for check in (
        lambda account: found.check_calls(account, 1, awaited=True),
        lambda account: found.check_models(account, 0),
    ):
        with pytest.raises(Refusal, match=r"has used \$2.50, and its limit is \$2.00") as e:
            check(alice)
        assert e.value.status == 402


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "accounts.toml"
    alice, bob = '[alice]\nkey = "tml-alice-0123"\n', '[bob]\nkey = "tml-bob-012345"\n'
    file.write_text(alice)
    found = keys.load(file, tmp_path)
    assert not found.read_again()
    file.write_text(alice + bob)
    assert found.read_again()
    assert found.account("tml-bob-012345").name == "bob"
    file.write_text(bob + "[carol")
    with pytest.raises(WindfallError, match="cannot be read"):
        found.read_again()
    assert not found.read_again()  # it was reported
    assert found.names == ["alice", "bob"]
    file.write_text(bob + "models = 2\n")
    assert found.read_again()
    with pytest.raises(Refusal):
        found.account("tml-alice-0123")
    file.unlink()
    with pytest.raises(WindfallError, match="No such file"):
        found.read_again()
    assert found.account("tml-bob-012345").models == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "there is no account"),
        ("[a]\nkey = 'short'", "a.key"),
        ("[a]\nkey = 'tml-0123456789'\nmodel = 1", "a.model"),
        ("[a]\nkey = 'tml-0123456789'\n[b]\nkey = 'tml-0123456789'", "the same key"),
        ("[a", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "accounts.toml"
    file.write_text(text)
    with pytest.raises(WindfallError, match=what):
        keys.load(file, tmp_path)
