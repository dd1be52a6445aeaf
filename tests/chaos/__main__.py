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
    parser.add_argument("--policies", default="1", help="Numbers of policies from 1 to 3, used in turn, such as 1,2,3.")
    parser.add_argument("--out", type=Path, help="Directory for the event logs.")
    options = parser.parse_args()
    policies = [int(number) for number in options.policies.split(",")]
    trial.main(seeds=options.seeds, seed=options.seed, faults=options.faults, policies=policies, out=options.out)


if __name__ == "__main__":
    main()
