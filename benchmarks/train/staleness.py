"""What asynchronous training is worth, by bound on staleness: simulated, on real processes, and in reward.

    python benchmarks/train/staleness.py curve      simulated: AReaL's curve of throughput over staleness
    python benchmarks/train/staleness.py processes  real processes whose engines sleep, with and without kills
    python benchmarks/train/staleness.py age        how old responses are, simulated and on real processes
    python benchmarks/train/staleness.py learning   the demo's model learns: reward after equal steps and equal time

The parts are in staleness_curve.py, staleness_processes.py, staleness_age.py and staleness_learning.py, which describe
what they measure. Runs that are compared are interleaved, so that other load on the machine hits all of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.train import staleness_age, staleness_curve, staleness_learning, staleness_processes

PARTS = {
    "curve": staleness_curve,
    "processes": staleness_processes,
    "age": staleness_age,
    "learning": staleness_learning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="part", required=True)
    for name, part in PARTS.items():
        part.add_arguments(commands.add_parser(name, help=str(part.__doc__).split("\n")[0]))
    options = parser.parse_args()
    PARTS[options.part].main(options)


if __name__ == "__main__":
    main()
