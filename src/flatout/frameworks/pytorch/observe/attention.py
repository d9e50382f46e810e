"""Which backend computed the calls of `scaled_dot_product_attention`, which may, and what is written by hand?

In: what a model's call returned. Out: names of backends, read from the graph that PyTorch keeps for the backward; calls
inside a compiled function or a checkpoint are not in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from flatout.frameworks.pytorch.seams.trees import tensors_of

NODES = {
    "ScaledDotProductFlashAttentionForCpuBackward0": "flash",
    "ScaledDotProductFlashAttentionBackward0": "flash",
    "ScaledDotProductEfficientAttentionBackward0": "efficient",
    "ScaledDotProductCudnnAttentionBackward0": "cudnn",
    "SafeSoftmaxBackward0": "math",
}
"""The backward of each; the softmax of `math` is one that nothing else in PyTorch uses."""

BY_HAND = {"by hand": (), "by hand, dropped": ("NativeDropoutBackward0", "MulBackward0")}
"""A softmax between two products, as the script wrote it, and what may happen to its weights."""

_PRODUCT = "BmmBackward0"
_VIEWS = {"Expand", "View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "ToCopy", "Clone", "Unsqueeze"}
_VIEWS = {f"{name}Backward0" for name in _VIEWS}
_BEFORE = _VIEWS | {"MulBackward0", "DivBackward0", "MaskedFillBackward0", "AddBackward0", "SqueezeBackward0"}

MOST_NODES = 50_000
"""A graph is looked through so far: some tenths of a second."""

_FLAGS = {"flash": "flash_sdp", "efficient": "mem_efficient_sdp", "cudnn": "cudnn_sdp", "math": "math_sdp"}


def backends_of(out: Any) -> tuple[str, ...]:
    """Backends in the graph behind these outputs, and which of `BY_HAND`, in alphabetical order."""
    waiting = [tensor.grad_fn for tensor in tensors_of(out, unique=False) if tensor.grad_fn is not None]
    seen, found = set(waiting), set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        found.add(NODES.get(node.name()))
        if node.name() == _PRODUCT:
            found.add(next((word for word, between in BY_HAND.items() if _weighs(node, between)), None))
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return tuple(sorted(name for name in found if name is not None))


def _weighs(product: Any, between: Collection[str]) -> bool:
    """Whether a product takes a softmax of a product, with nothing but views and `between` on the way."""
    weights = (node for node in _reached(product, _VIEWS | {*between}) if node.name() == "SoftmaxBackward0")
    return any(node.name() == _PRODUCT for weight in weights for node in _reached(weight, _BEFORE))


def _reached(node: Any, through: Collection[str]) -> Iterator[Any]:
    """The first nodes towards the inputs that have none of these names."""
    waiting, seen = [node], {node}
    while waiting:
        new = {other for other, _ in waiting.pop().next_functions if other is not None} - seen
        seen |= new
        waiting += [one for one in new if one.name() in through]
        yield from (one for one in new if one.name() not in through)


def allowed() -> dict[str, bool]:
    """Backend to whether calls may take it, as the process is set."""
    return {name: bool(getattr(torch.backends.cuda, f"{flag}_enabled")()) for name, flag in _FLAGS.items()}


def allow(wanted: dict[str, bool]) -> None:
    """Set that; the settings are called CUDA's and hold for the CPU as well."""
    for name, flag in _FLAGS.items():
        getattr(torch.backends.cuda, f"enable_{flag}")(wanted[name])
