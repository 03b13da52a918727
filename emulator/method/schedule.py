"""How many steps a client makes and on how many samples: one rule for the plan and for the loop that carries it out."""

from __future__ import annotations

from fleetbed.profiles.experiment import Training


def batch_of(samples: int, batch: int) -> int:
    """Return the batch size of a client with this many samples."""
    return min(batch, samples)


def steps_of(samples: int, training: Training) -> int:
    """Return the number of steps: the last incomplete batch is dropped unless it is the only one."""
    steps = training.epochs * (samples // batch_of(samples, training.batch))
    return steps if training.max_steps is None else min(steps, training.max_steps)


def held_out_of(samples: int, share: float) -> int:
    """Return how many of a client's samples are set aside: at least one, but never all of them."""
    return min(samples - 1, max(1, round(share * samples)))
