"""Flower's records as bundles: they come back as they were, and anything else is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.codec import WireError
from fleetbed.flower.packing import HEADER, numbers, pack, unpack


def content() -> RecordDict:
    config = ConfigRecord({"lr": 0.1, "on": True, "name": "x", "raw": b"\x00\xff", "list": [1, 2], "texts": ["a"]})
    arrays = ArrayRecord([np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7), np.zeros(0, np.int64)])
    return RecordDict({"a": arrays, "m": MetricRecord({"loss": 0.5, "n": 3, "list": [0.25]}), "c": config})


def test_records_come_back_as_they_were_over_the_wire() -> None:
    sent = content()
    found, _ = unpack(codec.unpack(codec.pack(pack(sent))))
    assert list(found) == ["a", "m", "c"]
    for one, other in zip(found["a"].to_numpy_ndarrays(), sent["a"].to_numpy_ndarrays(), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert dict(found["m"]) == dict(sent["m"])
    assert dict(found["c"]) == dict(sent["c"])
    assert type(found["m"]["n"]) is int


def header(*records: object) -> Bundle:
    encoded = msgspec.msgpack.encode([records])
    return Bundle({HEADER: torch.tensor(list(encoded), dtype=torch.uint8)})


@pytest.mark.parametrize(
    "bundle",
    [
        Bundle({}),
        Bundle({HEADER: torch.zeros(3, dtype=torch.uint8)}),
        header(["a", "pickle", [], {}]),
        header(["a", "arrays", [["w", "float32", [2], "numpy.ndarray", "missing"]], {}]),
        header(["m", "metrics", [], {"loss": "a text"}]),
        header(["c", "config", [], {"deep": {"er": 1}}]),
    ],
)
def test_anything_else_is_refused(bundle: Bundle) -> None:
    with pytest.raises(WireError, match="not the records of a Flower message"):
        unpack(bundle)


def test_an_array_is_bytes_until_the_app_reads_it() -> None:
    # a pickle inside of an array is never opened by us, and numpy refuses it where the app does
    sly = Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=b"\x93NUMPY pickled")
    found, _ = unpack(pack(RecordDict({"a": ArrayRecord({"w": sly})})))
    assert found["a"]["w"].data == sly.data


def test_the_figures_of_new_and_legacy_replies() -> None:
    new = RecordDict({"m": MetricRecord({"loss": 0.5, "nan": float("nan"), "list": [1.0], "num-examples": 3})})
    assert numbers(new) == {"loss": 0.5, "num-examples": 3.0}
    legacy = RecordDict(
        {"fitres.num_examples": MetricRecord({"num_examples": 3}), "fitres.metrics": ConfigRecord({"acc": 1, "s": "x"})}
    )
    assert numbers(legacy) == {"num-examples": 3.0, "acc": 1.0}
