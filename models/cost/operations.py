"""Counts the work of a training step by class of operation, from the operators that torch runs.

The counter works below autograd, so that it sees the forward and backward passes of any module. Convolutions are
classified by kernel and groups; every other operator with a FLOP count in torch is a matrix product. All others are
memory-bound, and count the bytes that they read and write. A convolution also counts the bytes of its tensors, because
CPU kernels copy them into another layout first. Views and allocations are free.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from fleetbed.models.cost.flops import TRAINING_RULES
from fleetbed.profiles.rates import rates_of
from fleetbed.profiles.types import Device, Rates

aten = torch.ops.aten
FLOAT_BYTES = 4


class Operations(Struct, frozen=True, kw_only=True):
    """An amount of work. FLOP are two per multiply-add; bytes are those that operators read and write."""

    conv_1x1_flop: float = 0.0
    conv_flop: float = 0.0
    depthwise_flop: float = 0.0
    matmul_flop: float = 0.0
    memory_bytes: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Operations) -> Operations:
        # written out, because it is called for every operator that is counted
        return Operations(
            conv_1x1_flop=self.conv_1x1_flop + other.conv_1x1_flop,
            conv_flop=self.conv_flop + other.conv_flop,
            depthwise_flop=self.depthwise_flop + other.depthwise_flop,
            matmul_flop=self.matmul_flop + other.matmul_flop,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            calls=self.calls + other.calls,
        )

    def __sub__(self, other: Operations) -> Operations:
        return self + -1 * other

    def __rmul__(self, factor: float) -> Operations:
        return Operations(**{name: factor * getattr(self, name) for name in self.__struct_fields__})

    @property
    def flop(self) -> float:
        """FLOP of convolutions and matrix products, as usually counted."""
        return self.conv_1x1_flop + self.conv_flop + self.depthwise_flop + self.matmul_flop


def compute_seconds(device: Device, work: Operations) -> float:
    """Return how long the device needs to compute this work."""
    return seconds_of(rates_of(device), work) * device.train_scale


def seconds_of(rates: Rates, work: Operations) -> float:
    """Return the sum of work / rate over all classes, and of the time of the calls."""
    return (
        work.conv_1x1_flop / (1e9 * rates.conv_1x1_gflops)
        + work.conv_flop / (1e9 * rates.conv_gflops)
        + work.depthwise_flop / (1e9 * rates.depthwise_gflops)
        + work.matmul_flop / (1e9 * rates.matmul_gflops)
        + work.memory_bytes / (1e9 * rates.memory_gb_s)
        + work.calls * rates.call_us / 1e6
    )


def update_work(parameters: int, kept_copies: int) -> Operations:
    """Return the work of one step of an optimiser with `kept_copies` state values per parameter.

    It reads the parameter and its gradient, writes the parameter, and reads and writes each state value, in one call.
    """
    return Operations(memory_bytes=FLOAT_BYTES * parameters * (3 + 2 * kept_copies), calls=1)


def parameter_pass(parameters: int) -> Operations:
    """Return the work of one element-wise pass over all parameters: two values read, one written."""
    return Operations(memory_bytes=FLOAT_BYTES * parameters * 3, calls=1)


class OperatorCount(TorchDispatchMode):
    """Adds up the work of all operators that run inside it. `unknown` lists operators that are in no class."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = Operations()
        self.unknown: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # half of all calls in fake mode
            return func(*args, **kwargs)
        if facts_of(func).is_composite:  # in inference mode, for example, nothing above has decomposed it
            with self:
                return func.decompose(*args, **kwargs)
        out = self.run(func, args, kwargs)
        self._count(func, args, kwargs, out, tensors_in(args, kwargs), tensors_in(out))
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator. Subclasses that measure time override this method, which excludes the counting."""
        return func(*args, **kwargs)

    def _count(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        facts = facts_of(func)
        if facts.is_free:
            return
        packet = func.overloadpacket
        if packet in _CONVOLUTIONS:
            self.total += _convolution(*_CONVOLUTIONS[packet](args, out), moved=_bytes(inputs) + _bytes(outputs))
        elif packet in _MATRIX_PRODUCTS:
            flop = float(_MATRIX_PRODUCTS[packet](*args, **kwargs, out_val=out))
            inside = _INSIDE[packet](args) if packet in _INSIDE else 0
            self.total += Operations(matmul_flop=flop, memory_bytes=inside, calls=1)
        elif not _is_free(facts, inputs, outputs):
            if not facts.is_known:
                self.unknown.add(str(packet))
            read = outputs if packet in _LOOKUPS else inputs
            self.total += Operations(memory_bytes=_bytes(read) + _bytes(outputs), calls=1)


def _convolution(x: Tensor, weight: Tensor, out: Tensor, more: tuple[Any, ...], passes: int, moved: int) -> Operations:
    """Return the work of `passes` passes, each as much as the forward pass. `more` are the arguments after the bias."""
    transposed, groups = more[3], more[5]
    places = x if transposed else out
    flop = 2.0 * passes * places.numel() // places.shape[1] * weight.numel()
    inputs_per_group = weight.shape[0] // groups if transposed else weight.shape[1]
    if groups > 1 and inputs_per_group == 1:
        return Operations(depthwise_flop=flop, memory_bytes=moved, calls=1)
    if groups == 1 and all(size == 1 for size in weight.shape[2:]):
        return Operations(conv_1x1_flop=flop, memory_bytes=moved, calls=1)
    return Operations(conv_flop=flop, memory_bytes=moved, calls=1)


def _forward(args: tuple[Any, ...], out: Any) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...], int]:
    return args[0], args[1], out, args[3:], 1


def _backward(args: tuple[Any, ...], out: Any) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...], int]:
    """One pass each for the gradients of input and weight, if they are requested."""
    del out
    return args[1], args[2], args[0], args[4:], sum(args[10][:2])


def _attention_maps(args: tuple[Any, ...], query: int, passes: int) -> int:
    """Bytes of the softmax over scores, which the fused operator computes but never stores: read and write per pass."""
    q, k = args[query], args[query + 1]
    return passes * 2 * FLOAT_BYTES * int(q.numel() // q.shape[-1] * k.shape[-2])


def _gates(args: tuple[Any, ...], passes: int) -> int:
    """Bytes of the four gates of each step of a fused LSTM layer: one read and one write per pass."""
    x, w_hidden = args[0], args[2]
    return passes * 2 * 4 * FLOAT_BYTES * int(x.shape[0] * x.shape[1] * w_hidden.shape[1])


def tensors_in(*trees: Any) -> list[Tensor]:
    """The tensors among the arguments or the results of an operator; faster than torch's trees."""
    found: list[Tensor] = []
    for each in trees:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += tensors_in(*each)
        elif isinstance(each, dict):
            found += tensors_in(*each.values())
    return found


def _bytes(tensors: list[Tensor]) -> int:
    """Return the bytes in memory, which are fewer than the values of an expanded tensor."""
    return sum(t.nbytes if t.is_contiguous() else min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)


class _Facts(NamedTuple):
    """What is the same for all calls of an operator: found once, because looking at its schema and tags takes long."""

    is_composite: bool  # it has no kernel of its own, but is composed of others
    is_free: bool  # a view or an allocation
    is_new: bool  # its results are never views
    is_mutable: bool
    is_known: bool  # in a class, or free


@cache
def facts_of(func: Any) -> _Facts:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    packet, tags, is_mutable = func.overloadpacket, func.tags, func._schema.is_mutable
    is_pointwise = torch.Tag.pointwise in tags
    is_free = func.is_view or torch.Tag.inplace_view in tags or packet in _ALLOCATIONS
    is_product = packet in _CONVOLUTIONS or packet in _MATRIX_PRODUCTS
    name = packet.__name__.strip("_").removesuffix("_backward")
    return _Facts(
        is_composite=has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU"),
        is_free=is_free and not is_product,
        is_new=is_mutable or is_pointwise,
        is_mutable=is_mutable,
        is_known=is_free or is_product or (func.namespace == "aten" and (is_pointwise or name in _MEMORY_BOUND)),
    )


def _is_free(facts: _Facts, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Return whether this call of an operator returned nothing, or only views of what it was given."""
    if not outputs:
        return not facts.is_mutable
    if facts.is_new:
        return False
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in known for tensor in outputs)


_CONVOLUTIONS = {aten.convolution: _forward, aten._convolution: _forward, aten.convolution_backward: _backward}
#: torch's own counts of the others; its count of a grouped convolution's backward pass is too large, hence the above.
#: Those of plain products are written out: they are called often, and torch's take 0.1 ms
_MATRIX_PRODUCTS: dict[Any, Callable[..., Any]] = {
    **{packet: rule for packet, rule in flop_registry.items() if packet not in _CONVOLUTIONS},
    **{packet: shape_wrapper(rule) for packet, rule in TRAINING_RULES.items()},
    aten.mm: lambda a, b, **_: 2 * a.numel() * b.shape[-1],
    aten.bmm: lambda a, b, **_: 2 * a.numel() * b.shape[-1],
    aten.addmm: lambda _bias, a, b, **_: 2 * a.numel() * b.shape[-1],
}
_INSIDE: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda args: _attention_maps(args, 0, 1),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args: _attention_maps(args, 1, 2),
    aten.mkldnn_rnn_layer: lambda args: _gates(args, 1),
    aten.mkldnn_rnn_layer_backward: lambda args: _gates(args, 2),
}
_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
#: operators that read as much as they return, not the whole table
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather}
#: operators, including their backward forms, whose time is proportional to their bytes; element-wise ones have a tag
_MEMORY_BOUND_NAMES = """
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d all amax amin any arange argmax
argmin as_strided_scatter avg_pool1d avg_pool2d avg_pool3d batch_norm_with_update bernoulli binary_cross_entropy
bincount cat clone col2im constant_pad_nd copy cumprod cumsum embedding embedding_bag embedding_dense expand eye
fill flip foreach_add full full_like fused_adam fused_dropout fused_sgd gather grid_sampler_2d hardsigmoid hardswish
hardtanh huber_loss im2col index index_add index_copy index_fill index_put index_select linalg_vector_norm linspace
local_scalar_dense log_softmax log_softmax_backward_data logsumexp masked_fill masked_scatter masked_select max
max_pool2d_with_indices max_pool3d_with_indices mean min mse_loss multinomial native_batch_norm
native_batch_norm_legit native_dropout native_group_norm native_layer_norm new_full new_ones new_zeros nll_loss
nll_loss2d nll_loss2d_forward nll_loss_forward nonzero norm normal ones ones_like pixel_shuffle pixel_unshuffle prod
rand rand_like randint randn randn_like randperm reflection_pad1d reflection_pad2d repeat replication_pad2d roll
rot90 scalar_tensor scatter scatter_add select select_scatter slice slice_scatter smooth_l1_loss softmax
softmax_backward_data sort split split_with_sizes stack std std_mean sum to_copy topk tril triu unfold uniform
unsafe_index unsafe_index_put unsafe_view upsample_bicubic2d upsample_bilinear2d upsample_nearest1d
upsample_nearest2d upsample_trilinear3d var var_mean where zero zeros zeros_like
"""
_MEMORY_BOUND = frozenset(_MEMORY_BOUND_NAMES.split())
