"""PyTorch behind the framework contract: what can be known of it without loading it, and how it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.frameworks.contract import Framework, Kind, Settings
from flatout.machine.installed import Package
from flatout.records.difference import Difference
from flatout.records.plan import Lever

_FOLDER = Path(__file__).resolve().parent


def _levers() -> dict[str, Lever]:
    from flatout.frameworks.pytorch.levers import registry

    return registry()


def _make(settings: Settings) -> Framework:
    from flatout.frameworks.pytorch.adapter import PyTorch

    return PyTorch(settings)


def _is_followed() -> bool:
    from flatout.frameworks.pytorch.steps import followed

    return followed()


def _trained_apart(plain: Path, nudged: Path, other: Path, begun: Path) -> tuple[Difference, ...]:
    from flatout.frameworks.pytorch.numerics.trained import differences

    return differences(plain, nudged, other, begun)


def _losses_apart(plain: Sequence[float], nudged: Sequence[float], other: Sequence[float]) -> tuple[Difference, ...]:
    from flatout.frameworks.pytorch.numerics.trained import of_losses

    return of_losses(plain, nudged, other)


KIND = Kind(
    label="PyTorch",
    package=Package(
        framework="pytorch",
        name="torch",
        calibration=_FOLDER / "observe" / "calibration.py",
        exchange_calibration=_FOLDER / "observe" / "exchange_calibration.py",
    ),
    steps_show_in="`torch.optim` and backward passes",
    levers=_levers,
    make=_make,
    is_followed=_is_followed,
    trained_apart=_trained_apart,
    losses_apart=_losses_apart,
)
