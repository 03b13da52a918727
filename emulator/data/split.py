"""A split of the data among clients, and its JSON file, which a run stores and a user may supply."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbed.emulator.data.raw import in_one_line
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.files import read_regular, user_path

Indices = NDArray[np.int64]
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Split:
    """Sorted indices into the training and the test set: one array per client, and the server's own."""

    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    public: Indices

    @classmethod
    def from_json(cls, text: bytes) -> Split:
        """Read what `to_json` wrote; `read_split_file` reads and checks a user's file."""
        content = msgspec.json.decode(text, type=SplitFile)
        return cls(
            train=tuple(np.array(part, np.int64) for part in content.train),
            test=tuple(np.array(part, np.int64) for part in content.test or ()),
            public=np.array(content.public, np.int64),
        )

    def to_json(self) -> bytes:
        return msgspec.json.encode(
            {
                "train": [part.tolist() for part in self.train],
                "test": [part.tolist() for part in self.test],
                "public": self.public.tolist(),
            }
        )


class SplitFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file. Without `test`, matching test parts are drawn."""

    train: list[list[int]]
    test: list[list[int]] | None = None
    public: list[int] = []


def read_split_file(name: str, train_size: int, test_size: int, clients: int) -> SplitFile:
    """Read the file; raise BadInput unless every index exists and each training sample has one owner."""
    path = user_path(name, "data.partition.file")
    text = read_regular(path, "a partition file", MAX_BYTES, "data.partition.file")
    try:
        content = msgspec.json.decode(text, type=SplitFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(
            f"{path} is not a partition file: {in_one_line(error)}; it must be JSON as "
            '{"train": [[indices of client 0], ...], "test": [...], "public": [...]}, '
            "where test and public are optional."
        ) from error
    for key, parts in (("train", content.train), ("test", content.test)):
        if parts is not None and len(parts) != clients:
            raise BadInput(f"{path}: {key} has {len(parts)} parts, but the fleet has {clients} clients.")
    owners: dict[int, str] = {}
    for key, part in (
        ("public", content.public),
        *((f"train[{k}]", part) for k, part in enumerate(content.train)),
    ):
        _check_range(part, train_size, f"{path}: {key}")
        for index in part:
            if index in owners:
                raise BadInput(
                    f"{path}: {key} has the sample {index}, which {owners[index]} already has; "
                    f"a training sample may be listed only once."
                )
            owners[index] = key
    for k, part in enumerate(content.test or []):
        _check_range(part, test_size, f"{path}: test[{k}]")
        if len(set(part)) < len(part):
            raise BadInput(f"{path}: test[{k}] lists a sample twice.")
    return content


def _check_range(part: list[int], size: int, name: str) -> None:
    for position, index in enumerate(part):
        if not 0 <= index < size:
            raise BadInput(f"{name}[{position}] is {index}; allowed are 0 to {size - 1}.")
