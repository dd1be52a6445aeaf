"""Serves the page of a service's folder: `python -m tests.support.servers.jobs_page_server FOLDER`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiohttp import web

from windfall.jobs.views import page

TOKEN = "0123456789abcdef0123456789abcdef"


async def main(folder: Path) -> None:
    app = web.Application()
    for path, handler in page.JobsPage(folder, TOKEN).handlers().items():
        app.router.add_get(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(page.link(f"http://127.0.0.1:{runner.addresses[0][1]}", TOKEN), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
