"""Makes commands independent of their standard streams, which may be closed, full, unread or not UTF-8."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class LossyFile(io.FileIO):
    """A file that drops any data that cannot be written to it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data))


def open_closed() -> None:
    """Connect closed standard streams to /dev/null; otherwise the next opened file would get their descriptor."""
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
    """Print characters outside the encoding of standard output as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def never_failing(stream: TextIO) -> TextIO:
    """Return a stream like this one on which every write succeeds."""
    if stream not in (sys.__stdout__, sys.__stderr__):
        return stream  # it is being captured, for example by a test
    stream.flush()
    raw = LossyFile(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.isatty() or stream is sys.__stderr__,
    )
