"""Loads code that a user brings: a Python file given by its path, or an entry point of an installed package.

A file runs only because the user named it, once in each process and for each content. It stands alone: its folder is
not searched for modules, so what it imports must be installed.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct, defstruct

from fleetbed.profiles.errors import BadInput, FleetbedError
from fleetbed.profiles.files import is_code_path, read_regular, show_path, user_path

MAX_BYTES = 4 << 20
#: frames of these are not where the author of a plug-in can change something
_OURS = tuple(f"{Path(__file__).parents[1] / name}/" for name in ("profiles", "models", "emulator"))
_NEVER_THEIRS = ("importlib", "/torch/", "/numpy/")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")

_loaded: dict[tuple[str, str], ModuleType] = {}


class PlugIn(Struct, frozen=True):
    """What was loaded: a module, or whatever an entry point names. A sentence about it starts with `source`."""

    content: Any
    source: str
    title: str

    def get(self, name: str) -> Any:
        """Return what the plug-in defines by this name; None if it does not."""
        with blamed(self.source, "cannot be imported"):
            return getattr(self.content, name, None)


def find_plug_in(group: str, name: str, where: str) -> PlugIn | None:
    """Load the file or entry point of this name; None if it is neither. `where` is the key path, for errors."""
    if is_code_path(name):
        path = user_path(name, where)
        return PlugIn(_load_file(path, where), f"{where}: {show_path(path)}", path.stem)
    points = outside(group)
    if name not in points:
        return None
    point = points[name]
    origin = f"the distribution {point.dist.name} ({point.value})" if point.dist else point.value
    source = f"{where}: {name} comes from {origin}, which"
    with blamed(source, "cannot be imported", "; correct or uninstall it, or choose another"):
        return PlugIn(point.load(), source, name)


@lru_cache(maxsize=64)
def strict(kind: type[Struct]) -> type[Struct]:
    """The same type of parameters, but unknown keys are refused: most authors do not think of asking for that."""
    if kind.__struct_config__.forbid_unknown_fields:
        return kind
    return defstruct(kind.__name__, [], bases=(kind,), module=kind.__module__, frozen=True, forbid_unknown_fields=True)


def outside(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name. Nothing is imported."""
    return {point.name: point for point in entry_points(group=group)}


def code_files(names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of every Python file among these names, by path."""
    return {name: _sha256(_read(Path(name), "")) for name in names if is_code_path(name)}


def check_unchanged(files: Mapping[str, str]) -> None:
    """Refuse files whose content has another SHA-256 by now."""
    for name, before in files.items():
        if code_files([name])[name] != before:
            raise BadInput(f"{show_path(name)} was changed since the run was started: restore it, or start a new run.")


@contextmanager
def blamed(source: str, doing: str, advice: str = "") -> Iterator[None]:
    """Turn whatever a user's code raises into one sentence with the file and line."""
    try:
        yield
    except FleetbedError:
        raise
    except (Exception, SystemExit) as error:  # foreign code raises what it likes
        raise BadInput(f"{source} {doing}: {_said(error)}{advice}.") from error


def _said(error: BaseException) -> str:
    """The error of foreign code on one line, with the file and line where its author can change something."""
    text = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {text[:300]}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """The file and line where the author of the code that failed can change something, in brackets; else nothing."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OURS) and not any(part in frame.filename for part in _NEVER_THEIRS)
    ]
    if not frames:
        return " (its module was not found)" if isinstance(error, ImportError) else ""
    # an installed plug-in is a library itself
    theirs = [frame for frame in frames if not any(part in frame.filename for part in _LIBRARIES)] or frames
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})"


def _load_file(path: Path, where: str) -> ModuleType:
    text = _read(path, where)
    key = (str(path.absolute()), _sha256(text))
    if key not in _loaded:
        module = ModuleType(f"fleetbed_file_{path.stem}_{key[1][:12]}")
        module.__file__ = key[0]
        sys.modules[module.__name__] = module  # types look up their module by name
        try:
            with blamed(f"{where}: {show_path(path)}", "cannot be imported"):
                exec(compile(text, key[0], "exec"), module.__dict__)
        except BaseException:
            del sys.modules[module.__name__]
            raise
        _loaded[key] = module
    return _loaded[key]


def _read(path: Path, where: str) -> bytes:
    return read_regular(path, "a Python file", MAX_BYTES, where)


@lru_cache(maxsize=64)
def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
