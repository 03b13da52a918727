"""Data sets of a user's own: a file, or an entry point in the group `fleetbed.data`, with `train` and `test`.

Both return a torch `Dataset`, a Hugging Face data set, or anything else with a length and items. An item is a pair
(x, y), or a mapping with x, y and columns such as user. They are read once, and prepared like any other data set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fleetbed.emulator.data.raw import SPLITS, Array, Kind, Raw, SplitName, checked
from fleetbed.models.plug_ins import PlugIn, blamed
from fleetbed.profiles.errors import BadInput

GROUP = "fleetbed.data"
MOST_SAMPLES = 100_000_000


@lru_cache(maxsize=4)  # by plug-in: its code is loaded anew when it changes
def read_plug_in(found: PlugIn) -> tuple[Raw, str]:
    """The data set that a plug-in defines, and a digest of its content: the files that it reads may have changed."""
    parts = {split: _split(found, split) for split in SPLITS}
    names = [name for name in parts["train"] if name not in ("x", "y")]
    columns = {name: {split: parts[split][name] for split in SPLITS if name in parts[split]} for name in names}
    x = {split: parts[split]["x"] for split in SPLITS}
    y = {split: parts[split]["y"] for split in SPLITS}
    raw = checked(x, y, found.source, _kind(x["train"]), columns)
    digest = hashlib.blake2b()
    for split in SPLITS:
        for name, array in sorted(parts[split].items()):
            digest.update(f"{split} {name} {array.dtype} {array.shape}\n".encode())
            digest.update(array.tobytes())
    return raw, digest.hexdigest()


def _kind(x: Array) -> Kind:
    """What samples are, by their type: pixels are bytes, tokens are other integers."""
    if x.dtype.kind == "U":
        return "texts"
    if x.dtype == np.uint8:
        return "images"
    return "tokens" if x.dtype.kind in "iu" else "values"


def _split(found: PlugIn, split: SplitName) -> dict[str, Array]:
    """The items of a split, stacked by name."""
    make = found.get(split)
    if make is None:
        raise BadInput(
            f"{found.source} has no {split}: a data file defines train() and test(), which return data sets."
        )
    with blamed(found.source, f"failed in {split}()"):
        items = make() if callable(make) and not hasattr(make, "__getitem__") else make
        if isinstance(items, Mapping):
            raise BadInput(
                f"{found.source} cannot be used: {split}() returns a mapping with {', '.join(map(str, items))[:100]}, "
                f"but one data set is needed: return one of them."
            )
        if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
            raise BadInput(
                f"{found.source} cannot be used: {split}() returns {type(items).__name__}, which is no data set; it "
                f"must have a length and items, like torch.utils.data.Dataset (of Hugging Face: without streaming)."
            )
        count = len(items)
        if not 1 <= count <= MOST_SAMPLES:
            raise BadInput(f"{found.source} cannot be used: {split}() has {count} samples; 1 or more are needed.")
        rows = [
            _row(items[number], f"{found.source} cannot be used: item {number} of {split}()") for number in range(count)
        ]
    return {name: _stacked(rows, name, f"{found.source} cannot be used: {split}()") for name in rows[0]}


def _row(item: Any, where: str) -> dict[str, Any]:
    """The parts of an item by name."""
    if isinstance(item, Mapping):
        if missing := [name for name in ("x", "y") if name not in item]:
            raise BadInput(
                f"{where} has no {missing[0]}, only {', '.join(map(str, item)) or 'nothing'}; name the input x and the "
                f"label y (a Hugging Face data set: rename_columns)."
            )
        return dict(item)
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        what = f"{len(item)} part{'s' * (len(item) != 1)}" if isinstance(item, (tuple, list)) else type(item).__name__
        raise BadInput(f"{where} is {what}, but a pair (x, y) is needed, or a mapping with x and y: it has no label.")
    return {"x": item[0], "y": item[1]}


def _stacked(rows: list[dict[str, Any]], name: str, where: str) -> Array:
    arrays: list[Array] = []
    for number, row in enumerate(rows):
        if name not in row:
            raise BadInput(f"{where}: item {number} has no {name}, but item 0 has one.")
        array = np.asarray(row[name])
        if array.dtype.kind not in "fiubU":
            raise BadInput(
                f"{where}: {name} of item {number} is {type(row[name]).__name__}; it must be numbers or text: "
                f"convert it, or leave that column out."
            )
        if array.shape != np.shape(arrays[0] if arrays else array):
            raise BadInput(
                f"{where}: {name} has shape {arrays[0].shape} in item 0 and {array.shape} in item {number}; all must "
                f"be the same: cut or pad them."
            )
        arrays.append(array)
    return np.stack(arrays)
