"""Converts texts to rows of token numbers. The vocabulary comes from the training split alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2

_WORD = re.compile(r"\w+(?:'\w+)*")


def words(text: str) -> list[str]:
    """Return the runs of letters and digits, in lower case; an apostrophe inside a word belongs to it."""
    return _WORD.findall(text.lower())


def vocabulary(texts: Iterable[str], size: int) -> list[str]:
    """Return the `size` most frequent words, ties in alphabetical order; word i has the number FIRST_WORD + i."""
    counts = Counter(word for text in texts for word in words(text))
    return sorted(counts, key=lambda word: (-counts[word], word))[:size]


def encode(texts: Sequence[str], known: Sequence[str], tokens: int) -> NDArray[np.int32]:
    """Return one row per text, cut to `tokens` words or padded at the end."""
    number = {word: FIRST_WORD + i for i, word in enumerate(known)}
    rows = np.full((len(texts), tokens), PADDING, np.int32)
    for row, text in zip(rows, texts, strict=True):
        numbers = [number.get(word, UNKNOWN) for word in words(text)[:tokens]]
        row[: len(numbers)] = numbers
    return rows
