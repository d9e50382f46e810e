"""Which backend computed the calls of `scaled_dot_product_attention`, and which may?

In: what a model's call returned. Out: names of backends, read from the graph that PyTorch keeps for the backward; calls
inside a compiled function or a checkpoint are not in it.
"""

from __future__ import annotations

from typing import Any

import torch

from flatout.frameworks.pytorch.seams.trees import tensors_of

BY_HAND = "by hand"
"""A softmax that the script itself takes, which within a model's graph is that of attention, mostly; at its end it
makes probabilities."""

NODES = {
    "ScaledDotProductFlashAttentionForCpuBackward0": "flash",
    "ScaledDotProductFlashAttentionBackward0": "flash",
    "ScaledDotProductEfficientAttentionBackward0": "efficient",
    "ScaledDotProductCudnnAttentionBackward0": "cudnn",
    "SafeSoftmaxBackward0": "math",
    "SoftmaxBackward0": BY_HAND,
}
"""The backward of each; the softmax of `math` is one that nothing else in PyTorch uses."""

MOST_NODES = 50_000
"""A graph is looked through so far: some tenths of a second."""

_FLAGS = {"flash": "flash_sdp", "efficient": "mem_efficient_sdp", "cudnn": "cudnn_sdp", "math": "math_sdp"}


def backends_of(out: Any) -> tuple[str, ...]:
    """Backends and `BY_HAND` in the graph behind these outputs, in alphabetical order."""
    waiting = [tensor.grad_fn for tensor in tensors_of(out, unique=False) if tensor.grad_fn is not None]
    last, seen, found = set(waiting), set(waiting), set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        name = NODES.get(node.name())
        found.add(None if name == BY_HAND and node in last else name)
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return tuple(sorted(name for name in found if name is not None))


def allowed() -> dict[str, bool]:
    """Backend to whether calls may take it, as the process is set."""
    return {name: bool(getattr(torch.backends.cuda, f"{flag}_enabled")()) for name, flag in _FLAGS.items()}


def allow(wanted: dict[str, bool]) -> None:
    """Set that; the settings are called CUDA's and hold for the CPU as well."""
    for name, flag in _FLAGS.items():
        getattr(torch.backends.cuda, f"enable_{flag}")(wanted[name])
