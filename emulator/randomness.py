"""Randomness keyed by what it is for, never a stream shared by several."""

from __future__ import annotations

import hashlib

import torch
from numpy.random import Generator, Philox  # by name: numpy loads them late, which would be in every client


def derive(seed: int, *key: int | str) -> int:
    """A 63-bit seed from the run's seed and a key such as (client, task, "batches"); the same on every host."""
    text = "/".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def numpy_rng(seed: int, *key: int | str) -> Generator:
    return Generator(Philox(derive(seed, *key)))


def torch_rng(seed: int, *key: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, *key))
