"""A user's own data: one .npz file with x_train, y_train, x_test, y_test, or text_* in place of x_*.

Nothing is ever unpickled: an array of Python objects is refused.
"""

from __future__ import annotations

import lzma
import struct
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np

from fleetbed.emulator.data.raw import SPLITS, Array, Raw, checked, in_one_line
from fleetbed.profiles.errors import BadInput

# all that numpy, zipfile and the decompressors raise on a file that is damaged or is something else
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    SyntaxError,
    MemoryError,
    OverflowError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def read_npz(path: Path) -> Raw:
    """Raise BadInput unless the file is whole and its arrays make a data set."""
    arrays = _arrays(path)
    prefix = "text" if "text_train" in arrays else "x"
    for split in SPLITS:
        for name in (f"{prefix}_{split}", f"y_{split}"):
            if name not in arrays:
                found = ", ".join(sorted(arrays)) or "nothing"
                raise BadInput(
                    f"{path}: there is no array {name}, only {found}; needed are x_train, y_train, x_test "
                    f"and y_test, or text_train and text_test in place of x_*."
                )
        is_text = arrays[f"{prefix}_{split}"].dtype.kind == "U"
        if is_text != (prefix == "text"):
            kind = arrays[f"{prefix}_{split}"].dtype
            raise BadInput(f"{path}: {prefix}_{split} is of type {kind}; x_* are images, text_* are unicode texts.")
    x = {split: arrays[f"{prefix}_{split}"] for split in SPLITS}
    y = {split: arrays[f"y_{split}"] for split in SPLITS}
    return checked(x, y, str(path), prefix)


def _arrays(path: Path) -> dict[str, Array]:
    wanted = {f"{prefix}_{split}" for prefix in ("x", "text", "y") for split in SPLITS}
    if not path.is_file():
        raise BadInput(f"data.name: there is no file {path}; give the path of an .npz file.")
    try:
        # opened here, for numpy leaves the file open when it cannot make sense of it
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old header formats, which it reads all the same
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise BadInput(f"{path} holds a single array; an .npz with x_train, y_train, x_test, y_test is needed.")
            return {name: archive[name] for name in archive.files if name in wanted}
    except _UNREADABLE as error:
        if "allow_pickle" in str(error):
            raise BadInput(
                f"{path} holds pickled Python objects, which are never loaded because they can run code; "
                f"save plain arrays (uint8 images, integer labels, unicode texts)."
            ) from error
        raise BadInput(
            f"{path} cannot be read as an .npz file, it is damaged or something else: {in_one_line(error)}."
        ) from error
