"""A digest over the records that are final, kept in every checkpoint: what was recorded then must still be there.

A row is hashed when nothing can change it any more. The hashes are added up, so that rows may become final in any
order and none is read twice, however long the run is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.tables import ADDED_SCORES, EvaluationRow, columns

MODULUS = 1 << 128
#: without the scores that came later, so that the digests in older checkpoints hold
SCORED = ", ".join(name for name in columns(EvaluationRow) if name not in ADDED_SCORES)


class Seal:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._sum = 0
        self._open: list[int] = []  # tasks that were under way at the last checkpoint
        self._next_task = 0
        self._version: int | None = None

    def upto(self, version: int, next_task: int, under_way: Collection[int]) -> str:
        """The digest of all that is final after this merge, with these tasks under way and no others."""
        if self._version is None:
            self._add("clients", "1")
        since = -1 if self._version is None else self._version
        self._add("rounds", f"version > {since} AND version <= {version}")
        self._add("metrics", f"version > {since} AND version <= {version} AND task IS NULL")
        self._add("evaluations", f"version >= {since} AND version < {version}", SCORED)
        candidates = [*self._open, *range(self._next_task, next_task)]
        for number in candidates:
            if number not in under_way:
                self._add("tasks", f"task = {number}")
        self._open = [number for number in candidates if number in under_way]
        self._next_task, self._version = next_task, version
        return f"{self._sum:032x}"

    def _add(self, table: str, which: str, selected: str = "*") -> None:
        for row in self._records.rows(f"SELECT {selected} FROM {table} WHERE {which}"):
            digest = hashlib.blake2b(repr((table, row)).encode(), digest_size=16).digest()
            self._sum = (self._sum + int.from_bytes(digest, "little")) % MODULUS
