"""Whether the broker's memory grows with rounds: its resident memory after every tenth round.

python tests/benchmarks/memory_over_rounds.py [--rounds 200] [--clients 50]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from fleet_runs import MIB, Asked, Running, print_markdown, smaps, spread

EVERY = 10


def measure(asked: Asked) -> list[float]:
    """MiB after each tenth round."""
    with tempfile.TemporaryDirectory() as name:
        run = Running(asked, Path(name))
        found = []
        for number in range(EVERY, asked.rounds - EVERY + 1, EVERY):  # it may be gone once the last is done
            run.wait_for_round(number)
            found.append(smaps(run.process.pid)["Rss"] / MIB)
        run.wait()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    asked = Asked(clients=arguments.clients, rounds=arguments.rounds + EVERY, source="modelled")
    found = [measure(asked) for _ in range(arguments.repetitions)]
    rounds = range(EVERY, arguments.rounds + 1, EVERY)
    print_markdown(
        ["after round", "broker RSS MiB"],
        [(number, spread(each, 1)) for number, each in zip(rounds, zip(*found, strict=True), strict=True)],
    )
    growth = [max(each) / min(each) - 1 for each in found]
    print(f"largest over smallest: {statistics.median(growth):+.1%}, the bar is 5 %")


if __name__ == "__main__":
    main()
