"""`windfall page`: serve the page of one or several runs, or write it as one HTML file that can be mailed."""

from __future__ import annotations

import asyncio
import secrets
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from windfall.errors import unwritable
from windfall.link.listener import Listener
from windfall.page import document
from windfall.page.feed import TICK_S, Feed
from windfall.page.runs import read_all, recipe_facts
from windfall.page.server import PageServer


def page(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folders of runs, in progress or ended; then simulations (windfall sim --out) to compare with.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Write one self-contained HTML file instead of serving.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0: any free one.")] = 0,
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    samples: Annotated[bool, typer.Option(help="Include the sampled responses in the file.")] = True,
) -> None:
    """Show a run, or several beside each other, in a browser: serve the page, or write it as one file."""
    if out is not None:
        print(write(runs, out, samples=samples))
        return
    try:
        asyncio.run(_serve(runs, host=host, port=port, open_browser=open))
    except KeyboardInterrupt:
        return


def write(runs: list[Path], out: Path, *, samples: bool = True) -> Path:
    """Write one self-contained file. `samples`: include the sampled responses."""
    data = {"live": False, "runs": [reader.describe(samples=samples) for reader in read_all(runs)]}
    text = document.html(data, f"{data['runs'][0]['name']} · windfall")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise unwritable("the page", out, e, "Set --out.") from e
    return out


async def _serve(runs: list[Path], *, host: str, port: int, open_browser: bool) -> None:
    """Serve the page until Ctrl-C. It follows the first run if that is still going on."""
    from aiohttp import web

    (reader, *rest), key = read_all(runs), secrets.token_urlsafe(16)
    others, name = [other.describe(samples=False) for other in rest], reader.name
    feed = Feed(reader.history, name=name, recipe=recipe_facts(reader.folder), status=lambda: reader.status)
    feed.snapshot = reader.snapshot()
    listener = Listener()
    server = PageServer(
        feed, reader.samples, key, title=f"{name} · windfall", others=others,
        welcome=lambda request: listener.authenticated(request.transport),
    )  # fmt: skip
    app = web.Application()
    for path, handler in server.handlers().items():
        app.router.add_get(path, handler)
    fix = "Choose another --port, or leave it out."
    runner, port = await listener.serve(app, host, port, None, fix, shutdown_timeout=1.0, handle_signals=False)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/page?key={key}"
    print(f"{url}\nCtrl-C ends the server, not the run.", flush=True)
    if open_browser:
        webbrowser.open(url)
    try:
        while True:
            await asyncio.sleep(TICK_S)
            if reader.read_new() or reader.status == "running":
                feed.snapshot = reader.snapshot()
            feed.tick()
    finally:
        listener.close()
        await runner.cleanup()
