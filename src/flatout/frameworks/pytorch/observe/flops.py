"""How many floating-point operations does one call compute, and how many of them does the model itself need?

In: an operation with its arguments and results. Out: operations, two per multiply-add, and those among them that only
do again what the forward has done already (recomputation), which a model's FLOPs leave out. Matrix products and
convolutions count, elementwise work and lookups do not.

`torch.utils.flop_counter` has most formulas. Here are those that it lacks, and those that it has wrong in the versions
that flatout runs under: in the gradient of a grouped convolution's weights it counts every group with every other.

Source: Chowdhery et al., "PaLM", JMLR 24, 2023, appendix B: model FLOPs leave out rematerialisation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_ENGINE = "_engine_run_backward"
_TORCH = os.path.dirname(torch.__file__) + os.sep
_BETWEEN = (os.path.dirname(os.path.dirname(__file__)) + os.sep, f"{_TORCH}_compile.py", f"{_TORCH}_dynamo{os.sep}")
"""Where the frames lie between an operation's caller and us."""


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Scores of every query with every key, and their products with the values; a causal mask leaves none out."""
    batch, heads, num_queries, width = query.shape
    return int(2 * batch * heads * num_queries * key.shape[2] * (width + value.shape[3]))


def _attention_backward(grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products for each of the forward's, and the scores once more, because they were not kept."""
    return 2 * _attention(query, key, value) + int(2 * prod(query.shape) * key.shape[2])


def _convolution_backward(grad_out: Any, input_: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """Each gradient takes as many products as the forward: a filter at every place where it was put."""
    transposed, output_mask = rest[4], rest[7]
    places = prod((input_ if transposed else grad_out).shape[2:])
    return int(2 * input_.shape[0] * places * weight.numel() * sum(output_mask[:2]))


def _recurrent(input_: Any, weights: Any, *others: Any, **_: Any) -> int:
    """Each step multiplies input and state by their weights: all of cuDNN's, or the first two of a single layer."""
    given = (weights, others[0]) if isinstance(weights, torch.Tensor) else weights
    return int(2 * prod(input_.shape[:-1]) * sum(w.numel() for w in given if w is not None and w.dim() > 1))


def _recurrent_backward(input_: Any, weights: Any, *others: Any, **_: Any) -> int:
    return 2 * _recurrent(input_, weights, *others)


def _matrix_vector(matrix: Any, *_: Any, **__: Any) -> int:
    return int(2 * matrix.numel())


def _added_product(_added: Any, first: Any, second: Any, *_: Any, **__: Any) -> int:
    return int(2 * first.numel() * (second.shape[-1] if second.dim() > 1 else 1))


FORMULAS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("mv", "dot"), _matrix_vector),
    **dict.fromkeys(("addmv", "addbmm", "addmm_", "baddbmm_"), _added_product),
}
"""Formulas that `torch.utils.flop_counter` lacks or has wrong, by the operation's name."""

_RECOMPUTES_SCORES = {
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_flash_attention_backward",
    "_efficient_attention_backward",
}
"""Attention whose backward computes the scores again; its arguments are the gradient, query, key and value."""


def flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int | None:
    """What the operation computes, or None where no formula is known or the formula does not fit."""
    packet = func._overloadpacket
    try:
        own = FORMULAS.get(packet.__name__)
        if own is not None:
            return own(*args, **kwargs)
        formula: Callable[..., int] | None = flop_registry.get(packet)
        return int(formula(*args, **kwargs, out_val=out)) if formula is not None else None
    except Exception:  # noqa: BLE001  a formula for other arguments than these must not end the script
        return None


def recomputed(func: Any, args: Any, num_flops: int) -> int:
    """How many of an operation's `num_flops` do again what the forward had done; asked at the moment of its call."""
    if in_recomputation():
        return num_flops
    if func._overloadpacket.__name__ not in _RECOMPUTES_SCORES or num_flops == 0:
        return 0
    width, value_width = args[1].shape[-1], args[3].shape[-1]
    # three of its five products are as wide as the queries, one of them is the recomputed one
    return num_flops * width // (3 * width + 2 * value_width)


def in_recomputation() -> bool:
    """Whether a forward runs within a backward: gradients are being computed, and yet it is recorded for gradients.

    A backward that itself is to be differentiated is recorded as well, but there the engine calls the operations, while
    a recomputation (`torch.utils.checkpoint`, or a function that does it itself) calls them from Python.
    """
    if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_name != _ENGINE
