"""Where the command `windfall` and `python -m windfall` begin. Ctrl-C during the imports, which take a second or more,
ends them without a traceback."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from windfall.run import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
