"""The wire: a msgpack header and raw tensor buffers as frames; nothing is ever unpickled.

A message is `[control, manifest, tensor, tensor, ...]`. The control frame is the emulator's own (task number, pacing)
and would not exist on a real device; manifest and tensors are what the method sends, so they are what is counted. Small
tensors travel inside the manifest, because a frame costs more than copying them; large ones are frames of their own, in
order, and are never copied (between broker and worker they may lie in shared memory instead). Everything is checked
against its type, its declared size and the limits below before it is used.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
import zmq
from msgspec import Meta, Struct
from torch import Tensor

from fleetbed.emulator.method.bundle import Bundle, Value, unsupported

MAX_TENSORS = 20_000
MAX_MESSAGE_BYTES = 4 << 30
MAX_HEADER_BYTES = 16 << 20
#: ZeroMQ's own heartbeats: answered by its input/output thread, so a held GIL does not stop them but SIGSTOP does. Only
#: the broker sends them: workers die with it anyway, and sending them too was most of the cost of an idle fleet.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 8_000, 10_000
#: a tensor below this travels in the manifest, until the manifest is full
SMALL_BYTES, MAX_INLINE_BYTES = 1 << 14, 1 << 20
#: below this a received frame is copied: ZeroMQ packs small frames into one buffer, where they lie unaligned
COPY_BELOW_BYTES = 1 << 16
#: below this a sent frame is copied: tracking when ZeroMQ no longer needs its memory would cost more
LEND_FROM_BYTES = 1 << 19

SEND_MORE = int(zmq.SNDMORE)

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "b1": np.dtype(np.bool_),
}
DTYPE_NAMES = {torch.from_numpy(np.empty(0, dtype)).dtype: name for name, dtype in DTYPES.items()}

Buffer = Any  # bytes, a memoryview of bytes or a zmq.Frame, all of which have their size as `len`
Transform = Callable[[Bundle], Bundle]  # the hook for compression or quantisation between tensors and frames


class WireError(Exception):
    """An invalid message; it costs its sender the connection, never the run."""


class TensorSpec(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    dtype: Annotated[str, Meta(max_length=3)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 40)], ...], Meta(max_length=8)]
    data: bytearray | None = None  # None: it is the next frame


class Manifest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tensors: Annotated[list[TensorSpec], Meta(max_length=MAX_TENSORS)]
    values: dict[Annotated[str, Meta(max_length=256)], Value]


_encode = msgspec.msgpack.Encoder().encode
_decode_manifest = msgspec.msgpack.Decoder(Manifest).decode
C = TypeVar("C")


def tune(socket: zmq.Socket[bytes]) -> None:
    """Set the options that the sockets of broker and workers have in common."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def new_address() -> str:
    """An address for a broker: a name outside of the file system, where no path is too long, full or cleaned up."""
    return f"ipc://@fleetbed-{secrets.token_hex(16)}"


def listen(socket: zmq.Socket[bytes], address: str) -> None:
    """Listen for processes of this user and no others; such a name has no permissions of its own."""
    socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    socket.bind(address)


def send(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Send a message; large frames are not copied, so they must not be changed afterwards.

    `send_multipart` takes three times as long.
    """
    *before, last = frames
    for frame in before:
        socket.send(frame, SEND_MORE, len(frame) < LEND_FROM_BYTES)
    socket.send(last, 0, len(last) < LEND_FROM_BYTES)


def receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Receive the frames of the next message, or the rest of them; blocks."""
    frames = [socket.recv(copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(copy=False))
    return frames


def pack(bundle: Bundle) -> list[Buffer]:
    """The frames of a bundle: its manifest, then a buffer for each large tensor, which is not copied."""
    specs: list[tuple[object, ...]] = []
    buffers: list[Buffer] = []
    inline = 0
    for name, tensor in bundle.tensors.items():
        dtype = DTYPE_NAMES.get(tensor.dtype)
        if dtype is None:
            raise unsupported(name, tensor, DTYPE_NAMES)
        array = tensor.numpy(force=True)
        about = (name, dtype, array.shape)
        size = array.nbytes
        if size < SMALL_BYTES and inline + size <= MAX_INLINE_BYTES:
            specs.append((*about, array.tobytes()))
            inline += size
        else:
            specs.append(about)
            buffers.append(np.ascontiguousarray(array).data.cast("B"))
    return [_encode((specs, bundle.values)), *buffers]


def unpack(frames: Sequence[Buffer]) -> Bundle:
    """Check frames against their manifest and view them as tensors; large ones share the frame's memory."""
    if not frames:
        raise WireError("a message without a manifest")
    size_bytes = size_of(frames)
    if size_bytes > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {size_bytes} bytes, above {MAX_MESSAGE_BYTES}")
    manifest = _checked(_decode_manifest, frames[0])
    tensors: dict[str, Tensor] = {}
    used = 1
    for spec in manifest.tensors:
        if spec.name in tensors:
            raise WireError(f"tensor {spec.name!r} comes twice")
        if spec.data is not None:
            tensors[spec.name] = _tensor(spec, spec.data)
        elif used < len(frames):
            tensors[spec.name] = _tensor(spec, _writable(frames[used]))
            used += 1
        else:
            raise WireError(f"tensor {spec.name!r} is declared, but has no frame")
    if used != len(frames):
        raise WireError(f"{len(frames) - 1} tensor frames where the manifest declares {used - 1}")
    return Bundle(tensors, manifest.values)


def _writable(frame: Buffer) -> Buffer:
    """The memory of a frame, or a copy of it if the frame is small or read-only."""
    view = frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)
    return bytearray(view) if view.nbytes < COPY_BELOW_BYTES or view.readonly else view


def _tensor(spec: TensorSpec, data: Buffer) -> Tensor:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise WireError(f"tensor {spec.name!r} has the unknown type {spec.dtype!r}")
    declared = math.prod(spec.shape) * dtype.itemsize
    found = len(data)
    if declared != found:
        raise WireError(f"tensor {spec.name!r} declares {declared} bytes and has {found}")
    try:
        return torch.from_numpy(np.ndarray(spec.shape, dtype, data))
    except ValueError as error:  # it is empty, but has dimensions that no array can have
        raise WireError(f"tensor {spec.name!r} has the impossible shape {spec.shape}") from error


def control(header: Struct) -> bytes:
    return _encode(header)


def parse_control(decoder: msgspec.msgpack.Decoder[C], frame: Buffer) -> C:
    return _checked(decoder.decode, frame)


def _checked(decode: Callable[[Any], C], frame: Buffer) -> C:
    if len(frame) > MAX_HEADER_BYTES:
        raise WireError(f"a header of {len(frame)} bytes, above {MAX_HEADER_BYTES}")
    try:
        return decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a header that does not fit its type: {error}") from error


def size_of(frames: Sequence[Buffer]) -> int:
    """The bytes that travel: manifest and tensors (pass the frames without the control frame)."""
    return sum(map(len, frames))
