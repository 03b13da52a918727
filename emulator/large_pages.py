"""Large pages of shared memory: how they are made, and mapped so that the kernel finds them whole.

A page of 2 MiB is handed out, cleared and looked up at once, where its 512 small ones would cost a fault each in every
process that touches them. A mapping has it whole where address and offset in the file agree modulo its size.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from fleetbed.emulator.heap import LIBC

LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

LARGE_PAGE = 2 << 20
MAP_FIXED, PROT_NONE, MADV_HUGEPAGE, MADV_COLLAPSE = 0x10, 0, 14, 25
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class Addresses:
    """Addresses with nothing behind them, for others to be put there; free again when nobody refers to this."""

    def __init__(self, size: int) -> None:
        self._size = size + LARGE_PAGE
        self._all = LIBC.mmap(None, self._size, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if self._all == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"no addresses are left: {os.strerror(ctypes.get_errno())}")
        self.start = rounded_up(self._all)  # that many from here on

    def __del__(self) -> None:
        LIBC.munmap(self._all, self._size)


def rounded_up(size: int) -> int:
    return -(-size // LARGE_PAGE) * LARGE_PAGE


def put(address: int, size: int, flags: int, fd: int, offset: int) -> None:
    """Have the file's memory at this address, in place of what was there."""
    if LIBC.mmap(address, size, READ_WRITE, flags | MAP_FIXED, fd, offset) != address:
        raise OSError(ctypes.get_errno(), f"shared memory cannot be mapped: {os.strerror(ctypes.get_errno())}")
    # asked for even where the kernel would do so by itself: NumPy asks for its large arrays, wherever they lie, and one
    # mapping of two minds would break large pages at their ends
    LIBC.madvise(address, size, MADV_HUGEPAGE)


def view(fd: int, offset: int, size: int, flags: int) -> memoryview:
    """A part of the file that lies in whole large pages, as memory; it lives as long as anything that stands on it."""
    first = offset // LARGE_PAGE * LARGE_PAGE
    length = rounded_up(offset + size) - first
    addresses = Addresses(length)
    put(addresses.start, length, flags, fd, first)
    memory = (ctypes.c_ubyte * size).from_address(addresses.start + offset - first)
    memory.addresses = addresses  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def furnish(address: int, fd: int, offset: int) -> bool:
    """Have a page there, with nothing in it, of a file that is mapped at this address. False if it is small ones."""
    os.pwrite(fd, b"\0", offset)  # where there is nothing at all, nothing can be made one page
    if LIBC.madvise(address, LARGE_PAGE, MADV_COLLAPSE) == 0:
        return True
    os.posix_fallocate(fd, offset, LARGE_PAGE)  # no large page is left, or an old kernel
    return False
