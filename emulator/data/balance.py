"""Selects samples evenly from classes of unequal size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def balanced_counts(available: Sequence[int] | NDArray[np.int64], total: int) -> list[int]:
    """Return how many samples to select of each class, in equal shares as far as possible.

    A class with fewer samples gives all of them, and the others more. The remainder of the division goes to the first
    classes. `total` must not exceed the number of samples.
    """
    counts = [0] * len(available)
    left = total
    open_classes = sorted(range(len(available)), key=lambda c: (available[c], c))
    while open_classes:
        share, rest = divmod(left, len(open_classes))
        smallest = open_classes[0]
        if available[smallest] > share:  # then so has every other: each gives its share, the first ones one more
            for i, c in enumerate(sorted(open_classes)):
                counts[c] = share + (i < rest)
            break
        counts[smallest] = int(available[smallest])
        left -= counts[smallest]
        open_classes.pop(0)
    return counts
