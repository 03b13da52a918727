"""Opens files and folders given by a user. Only regular files are opened, so that reading never hangs."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from fleetbed.profiles.errors import BadInput


def show_path(path: str | Path) -> str:
    """Return a path for use in a sentence: printable whatever bytes it has, and shortened."""
    text = "".join(c if c.isprintable() else "?" for c in str(path))
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


def is_code_path(name: str) -> bool:
    """Whether the name of a method, model, policy or data set is the path of a Python file."""
    return name.endswith(".py")


def title_of(name: str) -> str:
    """Return a short name: that of a Python file without its folder and suffix, any other name as it is."""
    return Path(name).stem if is_code_path(name) else name


def user_path(text: str | Path, where: str) -> Path:
    """Return a user's path with `~` expanded; BadInput if no file can have it. The sentence starts with `where`."""
    written = str(text)
    if "\0" in written:
        raise BadInput(
            f"{where}: the path {show_path(written)} has a NUL byte, which no file name can have: remove it."
        )
    if not is_text(written):
        raise BadInput(f"{where}: the path {show_path(written)} is not UTF-8 text: rename the file or folder.")
    try:
        return Path(written).expanduser()
    except RuntimeError:
        user = written.split("/", 1)[0]
        raise BadInput(
            f"{where}: the path {show_path(written)} starts with {show_path(user)}, but that user has no home folder "
            "on this host: write the full path."
        ) from None


def is_text(text: str) -> bool:
    """Return whether the text can be written as UTF-8, which JSON records require."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_file(path: Path, where: str) -> bool:
    """Return whether this is a regular file; BadInput if no file can have such a path."""
    found = _stat(path, where)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: Path, where: str) -> bool:
    found = _stat(path, where)
    return found is not None and stat.S_ISDIR(found.st_mode)


def open_regular(path: Path, wanted: str, where: str = "") -> BinaryIO:
    """Open a regular file for reading; anything else is BadInput. `wanted` describes the file in the error."""
    lead = f"{where}: " if where else ""
    shown = f"{lead}{show_path(path)}"
    try:
        # without O_NONBLOCK, opening a pipe waits for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise BadInput(f"{shown} does not exist: give the path of {wanted}.") from None
    except (OSError, ValueError) as error:
        if _is_socket(path):
            raise BadInput(f"{shown} is a socket, but {wanted} is needed.") from None
        raise BadInput(f"{shown} cannot be read: {reason(error)}.") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise BadInput(f"{shown} is {_kind(mode)}, but the path of {wanted} is needed.")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, wanted: str, limit_bytes: int, where: str = "") -> bytes:
    """Read a whole regular file of at most `limit_bytes` bytes."""
    lead = f"{where}: " if where else ""
    with open_regular(path, wanted, where) as file:
        try:
            content: bytes | None = file.read(limit_bytes + 1)
        except OSError as error:
            raise BadInput(f"{lead}{show_path(path)} cannot be read: {reason(error)}.") from None
    if content is None:  # a virtual file of the kernel may have no content yet
        raise BadInput(f"{lead}{show_path(path)} is empty, but {wanted} is needed.")
    if len(content) > limit_bytes:
        size = f"{limit_bytes >> 20} MiB" if limit_bytes >= 1 << 20 else f"{limit_bytes >> 10} KiB"
        raise BadInput(f"{lead}{show_path(path)} is larger than {size}, so it is not {wanted}: give another file.")
    return content


def list_folder(path: Path, where: str) -> list[Path]:
    """Return the content of a folder, sorted."""
    try:
        found = sorted(path.iterdir())
    except (OSError, ValueError) as error:
        raise BadInput(f"{where}: the folder {show_path(path)} cannot be read: {reason(error)}.") from None
    for each in found:
        if not is_text(each.name):
            raise BadInput(f"{where}: the name of {show_path(each)} is not UTF-8 text: rename it.")
    return found


def check_new(path: Path, where: str) -> None:
    """Refuse a path where no new file or folder can be created, because of its name or its parents."""
    for folder in path.absolute().parents:
        found = _stat(folder, where)
        if found is not None:
            if not stat.S_ISDIR(found.st_mode):
                raise BadInput(f"{where}: {show_path(folder)} is {_kind(found.st_mode)}, not a folder: choose another.")
            break
    _stat(path, where)


def reason(error: Exception) -> str:
    """Return the system's own description of an error."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _stat(path: Path, where: str) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BadInput(f"{where}: {show_path(path)} cannot be used: {reason(error)}.") from None


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if test(mode):
            return name
    return "a device"
