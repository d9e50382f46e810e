"""What stands in for a device in a rehearsal: the tests' own simulated device, and their driver of numbers."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from windows import Windows


@contextlib.contextmanager
def tests() -> Iterator[None]:
    """Modules of the tests can be imported."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
    try:
        yield
    finally:
        sys.path.pop()


@contextlib.contextmanager
def loop(watched: Windows, **costs: Any) -> Iterator[tuple[Callable[[], object], Callable[[], float]]]:
    """A step of such costs on the simulated device, and its true seconds."""
    with tests():
        from simulated_device import Mixture, Script

    script = Script(Mixture(**costs), pytorch=watched.framework)
    with contextlib.ExitStack() as given:
        patch = types.SimpleNamespace(setattr=lambda *names: given.enter_context(mock.patch.object(*names)))
        script.device.times(watched.framework, script, patch)
        yield script.step, script.true_step_s
