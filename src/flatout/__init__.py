"""flatout makes an unmodified training script run as fast as its hardware allows, and proves it.

The public names are resolved lazily, so that a user's process which reaches one module loads no other.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_PUBLIC: dict[str, str] = {
    "Choice": "flatout.api",
    "FlatoutError": "flatout.errors",
    "Goal": "flatout.api",
    "Inconclusive": "flatout.errors",
    "MachineError": "flatout.errors",
    "RecordError": "flatout.errors",
    "Result": "flatout.judge.result",
    "RunRequest": "flatout.api",
    "ScriptError": "flatout.errors",
    "Terms": "flatout.api",
    "UsageError": "flatout.errors",
    "levers": "flatout.api",
    "observe": "flatout.child.observe",
    "tune": "flatout.api",
    "why": "flatout.api",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'flatout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
