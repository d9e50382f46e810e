"""flatout makes an unmodified training script run as fast as its hardware allows, and proves it.

The public names are resolved lazily, so that a user's process which reaches one module loads no other.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_PUBLIC: dict[str, str] = {}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'flatout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
