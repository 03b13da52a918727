"""Counts multiply-adds: fvcore for one forward pass, and rules that torch's own counter lacks for training.

Both count matrix products and convolutions only. fvcore's unit is the multiply-add, torch's is the FLOP, of which it
has two. Neither supports the fused LSTM and attention operators of the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from fleetbed.models.base import InputSpec, Net, input_dtype

Shape = Sequence[int]

#: the operators of fvcore that multiply and add; its other operators (norms, pooling) are elementwise
_MULTIPLY_ADDS = ("conv", "linear", "addmm", "mm", "bmm", "matmul", "einsum", "lstm", "scaled_dot_product_attention")


def forward_macs(net: Net, spec: InputSpec) -> float:
    """Return the multiply-adds of one sample's forward pass. Runs it once, because the tracer needs real tensors."""
    with warnings.catch_warnings():
        # fvcore compiles and traces with deprecated parts of torch that have no replacement
        warnings.simplefilter("ignore")
        from fvcore.nn import FlopCountAnalysis

        analysis = FlopCountAnalysis(net.eval(), torch.zeros(1, *spec.shape, dtype=input_dtype(spec)))
        analysis.set_op_handle("aten::lstm", _traced_lstm)
        analysis.set_op_handle("aten::scaled_dot_product_attention", _traced_attention)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        with torch.no_grad():
            found = analysis.by_operator()
    return float(sum(found[name] for name in _MULTIPLY_ADDS))


def _traced_lstm(inputs: list[Any], outputs: list[Any]) -> float:
    """Count each weight of all layers once per step; biases are vectors, and are not counted."""
    del outputs
    batch, steps = _shape(inputs[0])[:2]
    tensors = [_shape(tensor) for tensor in inputs[2].node().inputs()]
    return float(batch * steps * sum(prod(shape) for shape in tensors if len(shape) == 2))


def _traced_attention(inputs: list[Any], outputs: list[Any]) -> float:
    """Count the scores from queries and keys, and the weighted sum of the values."""
    del outputs
    query, key, value = (_shape(v) for v in inputs[:3])
    return float(prod(query) * key[-2] + prod(query[:-1]) * prod(value[-2:]))


def _shape(value: Any) -> list[int]:
    sizes: list[int] = value.type().sizes()
    return sizes


def _lstm(x: Shape, w_input: Shape, w_hidden: Shape, *_: Any, **__: Any) -> int:
    steps, batch = x[:2]
    return 2 * steps * batch * (prod(w_input) + prod(w_hidden))


def _lstm_backward(x: Shape, w_input: Shape, w_hidden: Shape, *_: Any, **__: Any) -> int:
    """Count the gradients of the inputs and of the weights, each as much as the forward pass."""
    return 2 * _lstm(x, w_input, w_hidden)


def _attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _attention_backward(g: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(g, q, k, v))


#: for torch.utils.flop_counter.FlopCounterMode
TRAINING_RULES: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mkldnn_rnn_layer: _lstm,
    torch.ops.aten.mkldnn_rnn_layer_backward: _lstm_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
