"""`python -m tests.chaos`: inject faults into small simulated runs and check that no invariant is broken."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.chaos import trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="Number of runs, each with its own seed.")
    parser.add_argument("--seed", type=int, default=0, help="First seed.")
    parser.add_argument("--faults", type=int, default=500, help="Number of faults per run.")
    parser.add_argument("--out", type=Path, help="Directory for the event logs.")
    options = parser.parse_args()
    trial.main(seeds=options.seeds, seed=options.seed, faults=options.faults, out=options.out)


if __name__ == "__main__":
    main()
