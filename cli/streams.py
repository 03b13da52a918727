"""Standard streams that no command depends on: closed, full, without a reader or of few characters."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class Unfailing(io.FileIO):
    """A file that drops what cannot be written to it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data))


def open_closed() -> None:
    """Put /dev/null behind a closed stream, or the next file that is opened would be taken for it."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def show_all_characters() -> None:
    """Write what a stream's encoding cannot hold as an escape."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def unfailing(stream: TextIO) -> TextIO:
    """A stream like this one on which every write succeeds."""
    if stream not in (sys.__stdout__, sys.__stderr__):
        return stream  # somebody captures it
    stream.flush()
    raw = Unfailing(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.isatty() or stream is sys.__stderr__,
    )
