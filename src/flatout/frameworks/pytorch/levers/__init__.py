"""Which levers are there? The registry, in the order in which they build on each other.

In: nothing. Out: one verified instance of each lever, by name. Importing a lever imports no framework: the parent
reads descriptions, the child engages.
"""

from __future__ import annotations

from importlib import import_module

from flatout.frameworks.lever import Lever, verify

NAMES = (
    *("numa", "heap", "huge_pages", "expandable_segments", "threads", "switch_interval"),
    *("workers", "ahead", "fused_fetch", "sample_store", "virtual_workers", "decoded_store", "read_ahead"),
    *("pinned_memory", "device_prefetch", "device_store", "cudnn_benchmark", "tf32", "channels_last"),
    *("fused_optimizer", "foreach_optimizer", "fused_attention", "attention", "checkpointing", "compile", "bf16"),
    *("inference_mode", "onnxruntime", "openvino", "int8", "micro_batching"),
    *("ranks", "bf16_gradients", "no_debug", "batch_size"),
)
"""Of each its file; its class is named like it: `TheName` in `the_name.py`."""

LEVERS: tuple[type[Lever], ...] = tuple(
    getattr(import_module(f"{__name__}.{name}"), name.title().replace("_", "")) for name in NAMES
)


def registry() -> dict[str, Lever]:
    """Every lever by name, each checked against the contract."""
    found = {kind.name: kind() for kind in LEVERS}
    for lever in found.values():
        verify(lever)
    return found
