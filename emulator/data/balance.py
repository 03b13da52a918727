"""Taking samples evenly from classes of unequal size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def balanced_counts(available: Sequence[int] | NDArray[np.int64], total: int) -> list[int]:
    """How many to take of each class: equal shares; a class that has fewer gives all it has, the others more.

    What does not divide goes to the first classes. `total` must not exceed what is there.
    """
    counts = [0] * len(available)
    left = total
    open_classes = sorted(range(len(available)), key=lambda c: (available[c], c))
    while open_classes:
        share, rest = divmod(left, len(open_classes))
        smallest = open_classes[0]
        if available[smallest] > share:  # so has every other one: all take the share, and the first ones the rest
            for i, c in enumerate(sorted(open_classes)):
                counts[c] = share + (i < rest)
            break
        counts[smallest] = int(available[smallest])
        left -= counts[smallest]
        open_classes.pop(0)
    return counts
