"""PyTorch behind the framework contract: what can be known of it without loading it, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from flatout.frameworks.contract import FrameworkSpec
from flatout.machine.installed import Package

_FOLDER = Path(__file__).resolve().parent


def _of(module: str, name: str) -> Callable[..., Any]:
    """What a module of ours has under a name, loaded when it is called."""
    return lambda *arguments: getattr(import_module(f"{__name__}.{module}"), name)(*arguments)


KIND = FrameworkSpec(
    label="PyTorch",
    package=Package(
        framework="pytorch",
        name="torch",
        calibration=_FOLDER / "observe" / "calibration.py",
        exchange_calibration=_FOLDER / "observe" / "exchange_calibration.py",
    ),
    steps_show_in="`torch.optim`, backward passes, and calls of models where nothing is trained",
    levers=_of("levers", "registry"),
    make=_of("adapter", "PyTorch"),
    is_followed=_of("steps", "followed"),
    trained_apart=_of("numerics.trained", "differences"),
    exports=_of("export_formats", "exports"),
    losses_apart=_of("numerics.trained", "of_losses"),
)
