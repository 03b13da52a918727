"""How many steps a client makes and on how many samples: one rule for the plan and for the loop that carries it out."""

from __future__ import annotations

from fleetbed.profiles.experiment import Training


def batch_of(samples: int, batch: int) -> int:
    """The batch that a client with so many samples really uses."""
    return min(batch, samples)


def steps_of(samples: int, training: Training) -> int:
    """Full batches only: the last incomplete one is dropped unless it is the only one."""
    steps = training.epochs * (samples // batch_of(samples, training.batch))
    return steps if training.max_steps is None else min(steps, training.max_steps)


def held_out_of(samples: int, share: float) -> int:
    """How many of a client's samples are set aside for validation: at least one, but never the last one."""
    return min(samples - 1, max(1, round(share * samples)))
