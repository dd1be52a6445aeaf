"""The page of licenses names the packages that windfall installs, with the licenses that they have here."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import licenses
import pytest

ROOT = Path(__file__).parent.parent
REFUSED = re.compile(r"AGPL|(?<!L)GPL|SSPL|BUSL|Commons Clause|see the package")


def rows() -> dict[str, str]:
    found = re.findall(r"^\|(?: [\w-]+ \|)? ([\w-]+) \| ([^|]+) \|$", (ROOT / "docs" / "licenses.md").read_text(), re.M)
    return {name: license for name, license in found if name != "package"}


def pinned() -> set[str]:
    """The packages that are here in the versions that the page was made with."""
    pins = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints" / "cpu.txt").read_text(), re.M)
    return {name for name, exact in pins if licenses.installed(name) and version(name).partition("+")[0] == exact}


def test_page_of_licenses_is_up_to_date() -> None:
    named = {licenses.canonical(name) for name in licenses.required()}
    named |= {name for packages in licenses.extras().values() for name in packages}
    assert named <= rows().keys(), "make licenses"
    here = {name: licenses.installed(name) for name in named & pinned()}
    assert "torch" in here or "+cpu" not in version("torch")
    assert here == {name: rows()[name] for name in here}, "make licenses"


def test_no_package_has_a_license_that_windfall_cannot_use() -> None:
    here = {name: str(licenses.installed(name)) for name in licenses.closure(licenses.required())}
    assert "aiohttp" in here
    assert not {name: license for name, license in (here | rows()).items() if REFUSED.search(license)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"classifier": ["License :: OSI Approved :: MIT License", "Framework :: x"]}, "MIT"),
        ({"license": "Copyright (c) 2020 ...\n" * 9, "classifier": ["License :: OSI Approved :: BSD License"]}, "BSD"),
        ({}, "see the package"),
    ],
)
def test_license_is_read_from_what_a_package_says(fields: dict[str, object], expected: str) -> None:
    assert licenses.license_of(fields) == expected
