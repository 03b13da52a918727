"""The wire: a msgpack header and raw tensor buffers as frames; nothing is ever unpickled.

A message is `[control, manifest, tensor, tensor, ...]`. The control frame is the emulator's own (task number, pacing)
and would not exist on a real device; manifest and tensors are what the method sends, so they are what is counted.
Everything is checked against its type, its declared size and the limits below before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import zmq
from msgspec import Meta, Struct
from torch import Tensor

from fleetbed.emulator.bundle import Bundle, Value

MAX_TENSORS = 20_000
MAX_MESSAGE_BYTES = 4 << 30
MAX_HEADER_BYTES = 16 << 20
#: below this a received frame is copied: ZeroMQ packs small frames into one buffer, where they lie unaligned
COPY_BELOW_BYTES = 1 << 16

DTYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "u8": torch.uint8,
    "b1": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Buffer = Any  # bytes, memoryview or zmq.Frame: what zmq takes and gives
Transform = Callable[[Bundle], Bundle]  # the hook for compression or quantisation between tensors and frames


class WireError(Exception):
    """A message that is not what it must be; it costs its sender the connection, never the run."""


class TensorSpec(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    dtype: Annotated[str, Meta(max_length=3)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 40)], ...], Meta(max_length=8)]


class Manifest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tensors: Annotated[list[TensorSpec], Meta(max_length=MAX_TENSORS)]
    values: dict[Annotated[str, Meta(max_length=256)], Value]


_encode = msgspec.msgpack.Encoder().encode
_decode_manifest = msgspec.msgpack.Decoder(Manifest).decode
C = TypeVar("C")


def pack(bundle: Bundle) -> list[Buffer]:
    """The frames of a bundle: its manifest, then one buffer per tensor, without copying."""
    specs, buffers = [], []
    for name, tensor in bundle.tensors.items():
        flat = tensor.detach().cpu().contiguous()
        specs.append(TensorSpec(name, DTYPE_NAMES[flat.dtype], tuple(flat.shape)))
        buffers.append(flat.view(-1).numpy().data.cast("B") if flat.numel() else b"")
    return [_encode(Manifest(specs, bundle.values)), *buffers]


def unpack(frames: Sequence[Buffer]) -> Bundle:
    """Check frames against their manifest and view them as tensors; large ones share the frame's memory."""
    if not frames:
        raise WireError("a message without a manifest")
    manifest = _checked(_decode_manifest, frames[0])
    if len(manifest.tensors) != len(frames) - 1:
        raise WireError(f"{len(frames) - 1} tensor frames where the manifest declares {len(manifest.tensors)}")
    if size_of(frames) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {size_of(frames)} bytes, above {MAX_MESSAGE_BYTES}")
    tensors: dict[str, Tensor] = {}
    for spec, frame in zip(manifest.tensors, frames[1:], strict=True):
        if spec.name in tensors:
            raise WireError(f"tensor {spec.name!r} comes twice")
        tensors[spec.name] = _tensor(spec, frame)
    return Bundle(tensors, manifest.values)


def _tensor(spec: TensorSpec, frame: Buffer) -> Tensor:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise WireError(f"tensor {spec.name!r} has the unknown type {spec.dtype!r}")
    declared = math.prod(spec.shape) * dtype.itemsize
    found = _length(frame)
    if declared != found:
        raise WireError(f"tensor {spec.name!r} declares {declared} bytes and has {found}")
    if not found:
        return torch.empty(spec.shape, dtype=dtype)
    view = frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)
    if found < COPY_BELOW_BYTES or view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=dtype).reshape(spec.shape)


def control(header: Struct) -> bytes:
    return _encode(header)


def parse_control(decoder: msgspec.msgpack.Decoder[C], frame: Buffer) -> C:
    return _checked(decoder.decode, frame)


def _checked(decode: Callable[[Any], C], frame: Buffer) -> C:
    if _length(frame) > MAX_HEADER_BYTES:
        raise WireError(f"a header of {_length(frame)} bytes, above {MAX_HEADER_BYTES}")
    try:
        return decode(frame.buffer if isinstance(frame, zmq.Frame) else frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a header that does not fit its type: {error}") from error


def size_of(frames: Sequence[Buffer]) -> int:
    """The bytes that travel: manifest and tensors (give it the frames without the control frame)."""
    return sum(_length(frame) for frame in frames)


def _length(frame: Buffer) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)
