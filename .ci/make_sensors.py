"""Rebuild emulator/data/sensors.npz: make_sensors.py OUT.npz

Synthetic vibrations of 20 rotating machines in 5 states, as an 8-bit accelerometer with three axes on each of them
would record them: windows of half a second at 256 Hz. Machines differ in speed, gain, noise, the orientation of the
sensor, and in how often they are in which state, so that each is a client with data of its own. Every rebuild gives
the same file. Nothing in it was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

MACHINES, LENGTH, RATE_HZ = 20, 128, 256
EACH = {"train": 80, "test": 20}  # windows of a machine
STATES = ("normal", "imbalance", "misalignment", "bearing fault", "looseness")
#: amplitude of the harmonics 0.5, 1, 2 and 3 of the rotation: radial, and along the shaft
RADIAL = np.array(
    [[0, 0.4, 0.15, 0.05], [0, 1.4, 0.2, 0.1], [0, 0.6, 0.9, 0.3], [0, 0.45, 0.2, 0.1], [0.7, 0.6, 0.4, 0.4]]
)
AXIAL = np.array([[0, 0.1, 0.05, 0], [0, 0.2, 0.05, 0], [0, 0.5, 0.8, 0.2], [0, 0.1, 0.1, 0], [0.2, 0.2, 0.2, 0.2]])
HARMONICS = np.array([0.5, 1, 2, 3])
BEARING_RATIO, RINGING_HZ = 3.58, 95.0


def window(state: int, speed_hz: float, rng: np.random.Generator) -> np.ndarray:
    """One window [3, LENGTH] in the machine's own axes: two radial ones and the shaft."""
    t = np.arange(LENGTH) / RATE_HZ
    speed = speed_hz * rng.normal(1, 0.02)
    angles = 2 * np.pi * HARMONICS[:, None] * speed * t + rng.uniform(0, 2 * np.pi, (4, 1))
    spread = rng.lognormal(0, 0.25, (2, 4, 1))
    radial = (RADIAL[state][:, None] * spread[0] * np.sin(angles)).sum(0)
    across = (RADIAL[state][:, None] * spread[0] * np.cos(angles)).sum(0)
    axial = (AXIAL[state][:, None] * spread[1] * np.sin(angles)).sum(0)
    if STATES[state] == "bearing fault":
        since = np.mod(t * speed * BEARING_RATIO + rng.uniform(), 1) / (speed * BEARING_RATIO)
        ringing = rng.lognormal(0, 0.25) * np.exp(-since * 60) * np.sin(2 * np.pi * RINGING_HZ * since)
        radial, across = radial + ringing, across + 0.5 * ringing
    return np.stack([radial, across, axial])


def main(out: Path) -> None:
    rng = np.random.default_rng(20)
    arrays: dict[str, list[np.ndarray]] = {f"{name}_{split}": [] for name in ("values", "y", "user") for split in EACH}
    for machine in range(MACHINES):
        speed, gain, noise = rng.uniform(17, 31), rng.uniform(18, 30), rng.uniform(0.15, 0.45)
        mounting = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        frequency = 0.3 / len(STATES) + 0.7 * rng.dirichlet(np.ones(len(STATES)))
        for split, count in EACH.items():
            states = rng.choice(len(STATES), count, p=frequency)
            windows = np.stack([mounting @ window(state, speed, rng) for state in states])
            counts = gain * (windows + noise * rng.normal(size=windows.shape))
            arrays[f"values_{split}"].append(counts.round().clip(-128, 127).astype(np.int8))
            arrays[f"y_{split}"].append(states.astype(np.uint8))
            arrays[f"user_{split}"].append(np.full(count, machine, np.uint8))
    np.savez_compressed(out, **{name: np.concatenate(parts) for name, parts in arrays.items()})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
