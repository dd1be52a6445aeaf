"""What asynchronous training is worth, by bound on staleness: simulated, on real processes, and in reward.

    python benchmarks/staleness.py curve         simulated: AReaL's curve of throughput over staleness
    python benchmarks/staleness.py processes     real processes whose engines and trainer sleep, with and without kills
    python benchmarks/staleness.py age           how old responses are below the bound, simulated and on real processes
    python benchmarks/staleness.py learning      the demo's model learns: reward after equal steps and equal time

The parts are in staleness_curve.py, staleness_processes.py, staleness_age.py and staleness_learning.py, which describe
what they measure. Runs that are compared are interleaved, so that other load on the machine hits all of them.
"""

from __future__ import annotations

import argparse

import staleness_age
import staleness_curve
import staleness_learning
import staleness_processes

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
