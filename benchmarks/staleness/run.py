"""What asynchronous training is worth, by bound on staleness: simulated, on real processes, and in reward.

    python benchmarks/staleness/run.py curve      simulated: AReaL's curve of throughput over staleness
    python benchmarks/staleness/run.py processes  real processes whose engines sleep, with and without kills
    python benchmarks/staleness/run.py age        how old responses are, simulated and on real processes
    python benchmarks/staleness/run.py learning   the demo's model learns: reward after equal steps and equal time

The parts are in curve.py, processes.py, age.py and learning.py, which describe
what they measure. Runs that are compared are interleaved, so that other load on the machine hits all of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.staleness import age, curve, learning, processes

PARTS = {
    "curve": curve,
    "processes": processes,
    "age": age,
    "learning": learning,
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
