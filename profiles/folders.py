"""The folders where fleetbed stores files on this machine, by the XDG rules."""

from __future__ import annotations

import os
from pathlib import Path

from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.files import is_text, show_path


def cache_folder() -> Path:
    """Folder of files that can be made again at any time; safe to delete while nothing is running."""
    return _base("XDG_CACHE_HOME", ".cache") / "fleetbed"


def data_folder() -> Path:
    """Folder of downloaded files."""
    return _base("XDG_DATA_HOME", ".local/share") / "fleetbed"


def _base(variable: str, default: str) -> Path:
    # the XDG rules require that a relative path in the variable is ignored
    value = Path(os.environ.get(variable, ""))
    try:
        base = value if value.is_absolute() else Path.home() / default
    except RuntimeError as error:
        raise HostCannot(f"this user has no home folder: set {variable} to a writable folder.") from error
    if not is_text(str(base)):
        raise BadInput(f"the folder {show_path(base)} ({variable}) is not UTF-8 text: set {variable} to another.")
    return base
