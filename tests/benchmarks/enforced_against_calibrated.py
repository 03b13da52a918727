"""Do `enforced` and `calibrated` agree? Runs the demo fleet both ways and compares device seconds per client.

    python tests/benchmarks/enforced_against_calibrated.py [--set KEY=VALUE ...]

On a quiet host; prints the median compute time of each client's tasks under both and their ratio.
"""

from __future__ import annotations

import sqlite3
import statistics
import sys
import tempfile
from pathlib import Path

from fleetbed.emulator import run
from fleetbed.emulator.watch import Watch
from fleetbed.profiles.experiment import runs
from fleetbed.profiles.resolve import load_experiment

BAR = 0.10


def compute_s(folder: Path) -> dict[tuple[str, str, str], float]:
    """Median compute seconds in device time, by client."""
    with sqlite3.connect(folder / "run.sqlite") as db:
        rows = db.execute(
            "SELECT name, device, tasks.variant, compute_end_s - compute_start_s FROM tasks JOIN clients "
            "USING (client) WHERE outcome = 'ok'"
        ).fetchall()
    found: dict[tuple[str, str, str], list[float]] = {}
    for name, device, variant, seconds in rows:
        found.setdefault((name, device, variant), []).append(seconds)
    return {key: statistics.median(values) for key, values in found.items()}


def main() -> None:
    sets = [part for part in sys.argv[1:] if part != "--set"]
    with tempfile.TemporaryDirectory() as name:
        figures = {}
        for source in ("enforced", "calibrated"):
            asked = load_experiment("demo", (), ["algorithms=[{name: heteroavg}]", *sets, f"timing.source={source}"])
            folder = Path(name) / source
            run.start(runs(asked)[0], folder, search=(), command="benchmark", watch=Watch())
            figures[source] = compute_s(folder)
    print(f"{'client':8}{'device':28}{'variant':12}{'enforced s':>12}{'calibrated s':>14}{'ratio':>9}")
    worst = 0.0
    for key, enforced in sorted(figures["enforced"].items()):
        calibrated = figures["calibrated"][key]
        ratio = enforced / calibrated
        worst = max(worst, abs(ratio - 1))
        print(f"{key[0]:8}{key[1]:28}{key[2]:12}{enforced:12.3f}{calibrated:14.3f}{ratio:9.4f}")
    print(f"largest difference {worst:.2%}, bar {BAR:.0%}")


if __name__ == "__main__":
    main()
