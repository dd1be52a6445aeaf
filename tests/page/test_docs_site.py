"""The docs site in a real browser. `make test-site` builds it and runs these; without Chromium and playwright they are
skipped."""

from __future__ import annotations

import functools
import threading
import tomllib
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.browser import CHROMIUM

ROOT = Path(__file__).parents[2]
SITE = ROOT / tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["site_dir"]
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 700}

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.site, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    assert (SITE / "index.html").is_file(), "run make site first"
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=SITE)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(60)


def pages() -> list[str]:
    return sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html") if p.name != "404.html")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_no_page_is_wider_than_the_window(page: Any, url: str, size: dict[str, int]) -> None:
    page.set_viewport_size(size)
    wide = dict[str, int]()
    for name in pages():
        page.goto(f"{url}/{name}")
        assert page.locator("h1").count() == 1, name
        if (width := page.evaluate("document.documentElement.scrollWidth")) > size["width"]:
            wide[name] = width
    assert not wide


def test_every_entry_of_the_navigation_opens(page: Any, url: str) -> None:
    page.goto(f"{url}/index.html")
    links = "links => links.map(link => link.href.split('#')[0])"
    linked = set(page.locator(".md-nav--primary a[href]").evaluate_all(links))
    assert {link.removeprefix(f"{url}/") or "index.html" for link in linked} == set(pages())
    for link in linked:
        answer = page.goto(link)
        assert answer.ok, link
        assert page.locator(".md-nav__link--active").count(), link


def test_pictures_are_shown_and_nothing_is_loaded_from_elsewhere(page: Any, url: str) -> None:
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url))
    for name in ("index.html", "benchmarks.html", "page.html"):
        page.goto(f"{url}/{name}")
        pictures = page.locator("article img")
        assert pictures.count()
        for n in range(pictures.count()):
            pictures.nth(n).scroll_into_view_if_needed()
            page.wait_for_function("n => document.querySelectorAll('article img')[n].naturalWidth > 0", arg=n)
    assert not [address for address in asked if not address.startswith((url, "data:", "blob:"))]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_search_finds_a_word(page: Any, url: str, size: dict[str, int]) -> None:
    page.set_viewport_size(size)
    page.goto(f"{url}/index.html")
    page.locator(".md-search__button, .md-header [for=__search]").filter(visible=True).click()
    page.locator("dialog[open] input").fill("staleness")
    page.wait_for_function(
        "[...document.querySelectorAll('*')].some(e => e.shadowRoot?.textContent.includes('What the keys mean'))"
    )


def test_dark_mode_switches(page: Any, url: str) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(f"{url}/index.html")
    color = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(color)
    page.get_by_title("Switch to dark mode").click()
    page.wait_for_function(f"{color} !== {light!r}")
    page.reload()
    assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
    page.get_by_title("Switch to light mode").click()
    page.wait_for_function(f"{color} === {light!r}")
