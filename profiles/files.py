"""Files and folders that a user names. Only regular files are opened, so reading one neither hangs nor never ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from fleetbed.profiles.errors import BadInput


def show_path(path: str | Path) -> str:
    """A path as it stands in a sentence: printable whatever bytes it has, and not endless."""
    text = "".join(c if c.isprintable() else "?" for c in str(path))
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


def user_path(text: str | Path, where: str) -> Path:
    """The path that a user wrote, with `~` expanded; BadInput if no file can have it. `where` leads the sentence."""
    written = str(text)
    if "\0" in written:
        raise BadInput(f"{where}: the path {show_path(written)} has a NUL byte, which no file name has: remove it.")
    if not is_text(written):
        raise BadInput(f"{where}: the path {show_path(written)} is not UTF-8 text: rename the file or folder.")
    try:
        return Path(written).expanduser()
    except RuntimeError:
        user = written.split("/", 1)[0]
        raise BadInput(
            f"{where}: the path {show_path(written)} starts with {show_path(user)}, but this host knows no home folder "
            "of that user: write the folder out."
        ) from None


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: a name with other bytes has no place in JSON records."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_file(path: Path, where: str) -> bool:
    """Whether this is a regular file; BadInput if no file can have such a path."""
    found = _stat(path, where)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: Path, where: str) -> bool:
    found = _stat(path, where)
    return found is not None and stat.S_ISDIR(found.st_mode)


def open_regular(path: Path, wanted: str, where: str = "") -> BinaryIO:
    """Open a regular file for reading; a folder, a pipe, a socket and a device are BadInput. `wanted` says what for."""
    lead = f"{where}: " if where else ""
    shown = f"{lead}{show_path(path)}"
    try:
        # without O_NONBLOCK opening a pipe waits for whoever writes into it
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
    """The whole of a regular file that has at most so many bytes."""
    lead = f"{where}: " if where else ""
    with open_regular(path, wanted, where) as file:
        try:
            content: bytes | None = file.read(limit_bytes + 1)
        except OSError as error:
            raise BadInput(f"{lead}{show_path(path)} cannot be read: {reason(error)}.") from None
    if content is None:  # what the kernel makes up as it is read may have nothing yet
        raise BadInput(f"{lead}{show_path(path)} has nothing to read, but {wanted} is needed.")
    if len(content) > limit_bytes:
        size = f"{limit_bytes >> 20} MiB" if limit_bytes >= 1 << 20 else f"{limit_bytes >> 10} KiB"
        raise BadInput(f"{lead}{show_path(path)} is larger than {size}, so it is not {wanted}: give another file.")
    return content


def list_folder(path: Path, where: str) -> list[Path]:
    """What is in a folder, in order."""
    try:
        found = sorted(path.iterdir())
    except (OSError, ValueError) as error:
        raise BadInput(f"{where}: the folder {show_path(path)} cannot be read: {reason(error)}.") from None
    for each in found:
        if not is_text(each.name):
            raise BadInput(f"{where}: the name of {show_path(each)} is not UTF-8 text: rename it.")
    return found


def check_new(path: Path, where: str) -> None:
    """Refuse a path at which no new file or folder can be made, because of its name or of what lies on the way."""
    for folder in path.absolute().parents:
        found = _stat(folder, where)
        if found is not None:
            if not stat.S_ISDIR(found.st_mode):
                raise BadInput(f"{where}: {show_path(folder)} is {_kind(found.st_mode)}, not a folder: choose another.")
            break
    _stat(path, where)


def reason(error: Exception) -> str:
    """What the system says about it, in its own words."""
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
