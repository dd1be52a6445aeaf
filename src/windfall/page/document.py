"""The page of runs as one HTML file (html_page.py) with its script and style."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from windfall import html_page

STATIC = Path(__file__).parent / "static"


@cache
def _asset(name: str) -> str:
    return (STATIC / name).read_text("utf-8")


@cache
def content_policy() -> str:
    return html_page.content_policy(_asset("page.js"))


def html(data: Any, title: str) -> str:
    """The page. `data`: {"live": whether it follows a server, "runs": what `runs.describe` returned for each run}."""
    return html_page.html(title=title, style=_asset("page.css"), script=_asset("page.js"), data=data)
