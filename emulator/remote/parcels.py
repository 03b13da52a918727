"""What is sent to nodes: small content with the call, large content through Ray's object store, once to each node.

Many tasks get the same message, such as the model of a round. It is put into the store once, and each node fetches it
once, however many of its tasks need it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

#: what is smaller travels with the call
STORE_FROM_BYTES = 1 << 16
#: how many different contents are remembered: the messages of a round, by variant
MOST_REMEMBERED = 8


class Parcels:
    def __init__(self) -> None:
        self._recent: deque[tuple[bytes, Any]] = deque(maxlen=MOST_REMEMBERED)

    def of(self, content: bytes) -> Any:
        """What to pass to an actor for this content: itself, or a reference to it."""
        if len(content) < STORE_FROM_BYTES:
            return content
        for known, reference in self._recent:
            if known == content:  # compares no more than the first bytes of another message
                return reference
        import ray

        reference = ray.put(content)
        self._recent.append((content, reference))
        return reference
