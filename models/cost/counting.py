"""Counts the memory of training by running it on tensors that have shapes but no storage.

Under torch's fake mode every operator runs as it would on the CPU, only without data, so that a whole training step
takes a fraction of a second for any model and batch. The ledger sees each operator below autograd: tensors saved for
the backward pass, gradients, and temporary tensors between two operators are all alive, and are counted. It cannot see
what an operator allocates internally; `scratch_bytes` has rules for the operators that allocate much.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FLOAT_BYTES = 4
#: oneDNN pads channels to blocks of 16 if the CPU has AVX-512, otherwise to smaller ones. One figure for all hosts, so
#: that a prediction does not depend on the host.
CHANNEL_BLOCK = 16
#: glibc maps large blocks one by one and unmaps them when they are freed; smaller ones share its heap. Its threshold
#: rises with every mapped block that is freed, up to this: from the second step on, all smaller blocks are in the heap.
MAPPED_BYTES = 32 << 20
#: how much larger a heap is than the most it ever contained, as blocks come and go in every step; measured
HOLES = 0.47


class Ledger(TorchDispatchMode):
    """Counts the bytes alive by role, and the memory of the process by role at the moment of its peak.

    A block that is mapped by itself is returned when it is freed. The heap of smaller blocks never shrinks, and is
    larger than its content because it is fragmented: both excesses are counted under `allocator`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self._role: str | None = "activations"
        self._heap = 0
        self._heap_peak = 0
        self._numbers = itertools.count()
        self._known: dict[int, int] = {}  # address of a living storage -> its number
        self._entries: dict[int, tuple[str, int]] = {}  # number -> role, bytes
        self._entries_at_peak: set[int] = set()

    @property
    def peak(self) -> int:
        return self.at_peak.total()

    @contextmanager
    def role(self, name: str | None) -> Iterator[None]:
        """Count allocations inside this context under `name`; do not count them if `name` is None."""
        before, self._role = self._role, name
        try:
            yield
        finally:
            self._role = before

    def keep(self, role: str, size: int) -> None:
        """Count bytes that stay allocated to the end, without a tensor; they do not fragment the heap."""
        self.live[role] += size
        self.scratch(0)

    def scratch(self, size: int) -> None:
        """Count bytes that are needed for a moment, in addition to those alive."""
        heap = self._heap + _in_heap(size)
        self._heap_peak = max(self._heap_peak, heap)
        allocator = round((1 + HOLES) * self._heap_peak) - heap
        if self.live.total() + size + allocator > self.peak:
            self.at_peak = self.live + Counter(workspace=size, allocator=allocator)
            self._entries_at_peak = set(self._entries)

    def rebook(self, tensor: Tensor, role: str) -> None:
        """Move a tensor to another role: a gradient is recognised only when it is accumulated."""
        number = self._known[tensor.untyped_storage()._cdata]
        before, size = self._entries[number]
        self._entries[number] = (role, size)
        for book in (self.live, self.at_peak) if number in self._entries_at_peak else (self.live,):
            book[before] -= size
            book[role] += size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls; each would pass through every mode
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            self._book(out[3].untyped_storage(), _lstm_workspace(args))  # of unknown size in fake mode
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._book(tensor.untyped_storage())
        self.scratch(scratch_bytes(func, args, out))
        return out

    def _book(self, storage: torch.UntypedStorage, size: int | None = None) -> None:
        address = storage._cdata
        if address in self._known:
            return
        if size is None:
            size = storage.nbytes()
        role, size = (self._role, size) if self._role else ("uncounted", 0)
        number = next(self._numbers)
        self._known[address] = number
        self._entries[number] = (role, size)
        self.live[role] += size
        self._heap += _in_heap(size)
        weakref.finalize(storage, self._drop, address, number)

    def _drop(self, address: int, number: int) -> None:
        role, size = self._entries.pop(number)
        self.live[role] -= size
        self._heap -= _in_heap(size)
        del self._known[address]


def _in_heap(size: int) -> int:
    return size if size < MAPPED_BYTES else 0


def scratch_bytes(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that an operator allocates internally, besides its inputs and outputs."""
    rule = _RULES.get(func)
    return rule(args, out) if rule else 0


def _convolution(args: tuple[Any, ...], out: Tensor) -> int:
    """oneDNN computes on blocked copies of input and weight into a blocked result, and copies that back."""
    x, weight = args[0], args[1]
    blocked_out = _blocked(out)
    return max(_read(x) + _blocked_weight(weight) + blocked_out - _bytes(out), blocked_out)


def _convolution_backward(args: tuple[Any, ...], out: tuple[Tensor | None, ...]) -> int:
    """Take the larger of two phases: the gradient of the input, then that of the weight, each on blocked copies."""
    gradient, x, weight, stride = args[0], args[1], args[2], args[4]
    blocked_gradient, blocked_weight = _blocked(gradient), _blocked_weight(weight)
    need = 0
    if out[0] is not None:
        blocked_x = _blocked(x)
        # the weight's gradient is already in the ledger as an output, but not allocated yet
        need = max(blocked_gradient + blocked_weight + blocked_x - _bytes(x), blocked_x) - _bytes(weight)
        if max(stride) > 1:
            need = max(need, 2 * _bytes(x) - _bytes(weight))
    if out[1] is not None:
        need = max(need, _read(x) + blocked_gradient + blocked_weight - _bytes(weight), blocked_weight)
    return need


def _lstm_workspace(args: tuple[Any, ...]) -> int:
    """Bytes stored for a layer's backward pass: the gates and states of each step that oneDNN writes."""
    return 5 * _lstm_values(args)[1]


def _lstm_backward(args: tuple[Any, ...], out: Any) -> int:
    """Bytes of the gradients of gates, states and inputs of all steps at once. The factors are measured."""
    del out
    inputs, hidden = _lstm_values(args)
    return 2 * inputs + 6 * hidden


def _lstm_values(args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the bytes of a layer's input and of its hidden state over all steps."""
    x, w_hidden = args[0], args[2]
    steps, batch, _ = x.shape
    return _bytes(x), steps * batch * w_hidden.shape[1] * x.element_size()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(channels: int) -> int:
    return -(-channels // CHANNEL_BLOCK) * CHANNEL_BLOCK


def _blocked(x: Tensor) -> int:
    """Return the bytes of images [batch, channels, ...] in oneDNN's blocked layout."""
    return _bytes(x) // x.shape[1] * _padded(x.shape[1])


def _read(x: Tensor) -> int:
    """Return the bytes of the blocked copy of an input; images with few channels are not copied."""
    return _blocked(x) if x.shape[1] >= CHANNEL_BLOCK else 0


def _blocked_weight(weight: Tensor) -> int:
    outputs, inputs = weight.shape[:2]
    padded_inputs = _padded(inputs) if inputs >= CHANNEL_BLOCK else inputs
    return _padded(outputs) * padded_inputs * prod(weight.shape[2:]) * weight.element_size()


_RULES: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
}
