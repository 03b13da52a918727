"""What clients keep, as files on a node: of each client one version, and those that tasks are using.

The truth is the folder of the run on the head, which sends a version with a task if the node lacks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from fleetbed.emulator.wire.storage import write_atomically


class KeptFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._newest: dict[PurePath, str] = {}  # by the folder of the client
        self._users: Counter[str] = Counter()

    @contextmanager
    def in_use(self, name: str | None, content: bytes) -> Iterator[bool]:
        """Keep this file meanwhile, written if there is content; yields whether it is here. None: no file is needed."""
        if name is None:
            yield True
            return
        self._users[name] += 1
        try:
            if content:
                write_atomically(self._folder / name, lambda part: part.write_bytes(content))
                self._replace(name)
            yield (self._folder / name).exists()
        finally:
            self._users[name] -= 1
            self._drop(name)

    def read_new(self, name: str) -> bytes:
        """The content of a file that a client has just written; it replaces the version before."""
        self._replace(name)
        return (self._folder / name).read_bytes()

    def _replace(self, name: str) -> None:
        before = self._newest.get(PurePath(name).parent)
        self._newest[PurePath(name).parent] = name
        if before is not None:
            self._drop(before)

    def _drop(self, name: str) -> None:
        """Remove a file that is neither in use nor the newest of its client."""
        if self._users[name] <= 0 and self._newest.get(PurePath(name).parent) != name:
            del self._users[name]
            (self._folder / name).unlink(missing_ok=True)
