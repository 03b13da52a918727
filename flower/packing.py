"""Flower's records as bundles and back: the data of every array is a tensor of bytes, the rest one msgpack header.

So they travel and are stored like everything else here, checked and limited, and nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from msgspec import Struct
from torch import Tensor

from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire.codec import WireError

HEADER = "header"
EXAMPLES = "num-examples"  # the metric by which Flower's strategies weight
LEGACY_NAMES = {"num_examples": EXAMPLES}


class ArrayHeader(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    stype: str  # how its bytes are to be read
    tensor: str


class RecordHeader(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    kind: Literal["arrays", "metrics", "config"]
    arrays: list[ArrayHeader]
    values: dict[str, Any]  # numbers, texts, bytes and lists of them, which Flower's records check


class ContentHeader(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The records of a message; the other fields are those of an instruction, and empty in a reply."""

    records: list[RecordHeader]
    message_id: str = ""
    message_type: str = ""
    group_id: str = ""
    ttl: float = 0.0


_decode = msgspec.msgpack.Decoder(ContentHeader).decode


def pack(content: RecordDict, about: Message | None = None) -> Bundle:
    """The bundle of these records and, with `about`, of what the client needs to know of the message."""
    tensors: dict[str, Tensor] = {}
    records = []
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = []
            for key, array in record.items():
                tensor = str(len(tensors))
                tensors[tensor] = torch.from_numpy(np.frombuffer(array.data, np.uint8).copy())
                arrays.append(ArrayHeader(key, array.dtype, tuple(array.shape), array.stype, tensor))
            records.append(RecordHeader(name, "arrays", arrays, {}))
        else:
            kind: Literal["metrics", "config"] = "metrics" if isinstance(record, MetricRecord) else "config"
            records.append(RecordHeader(name, kind, [], dict(record)))
    header = ContentHeader(records)
    if about is not None:
        told = about.metadata
        header = ContentHeader(records, told.message_id, told.message_type, told.group_id, told.ttl)
    encoded = np.frombuffer(msgspec.msgpack.encode(header), np.uint8).copy()
    return Bundle({HEADER: torch.from_numpy(encoded), **tensors})


def unpack(bundle: Bundle) -> tuple[RecordDict, ContentHeader]:
    """The records of a bundle, and its header. Raises WireError for anything that `pack` does not make."""
    try:
        header = _decode(_bytes(bundle, HEADER))
        content = RecordDict({record.name: _record(record, bundle) for record in header.records})
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"not the records of a Flower message: {error}") from error
    return content, header


def _record(header: RecordHeader, bundle: Bundle) -> ArrayRecord | MetricRecord | ConfigRecord:
    if header.kind == "arrays":
        return ArrayRecord(
            {
                each.name: Array(dtype=each.dtype, shape=each.shape, stype=each.stype, data=_bytes(bundle, each.tensor))
                for each in header.arrays
            }
        )
    return MetricRecord(header.values) if header.kind == "metrics" else ConfigRecord(header.values)


def _bytes(bundle: Bundle, name: str) -> bytes:
    return bundle.tensors[name].numpy().tobytes()


def numbers(content: RecordDict) -> dict[str, float]:
    """The finite single figures among the metrics of a reply, by name.

    The metrics of a legacy client are a config record, and it names its examples in its own way.
    """
    legacy = [record for name, record in content.config_records.items() if name.endswith(".metrics")]
    records: list[MetricRecord | ConfigRecord] = [*content.metric_records.values(), *legacy]
    return figures({LEGACY_NAMES.get(name, name): value for record in records for name, value in record.items()})


def figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those metrics that are one finite number."""
    return {
        name[:256]: float(value)
        for name, value in metrics.items()
        if name and isinstance(value, (int, float)) and np.isfinite(value)
    }
