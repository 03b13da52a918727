"""How many optimiser steps a client makes: one rule for the plan and for the loop that carries it out."""

from __future__ import annotations

from fleetbed.profiles.experiment import Training


def batch_of(samples: int, batch: int) -> int:
    """The batch that a client with so many samples really uses."""
    return min(batch, samples)


def steps_of(samples: int, training: Training) -> int:
    """Full batches only: the last incomplete one is dropped unless it is the only one."""
    steps = training.epochs * (samples // batch_of(samples, training.batch))
    return steps if training.max_steps is None else min(steps, training.max_steps)
