"""flatout's loaders in this process, under the levers that the environment names.

For programs that know nothing of flatout: whoever imports this module has its loaders installed, spawned children too.
In: `FLATOUT_ENGAGED`, JSON of levers and their settings, and `FLATOUT_EVIDENCE`, a file; without the first, nothing
happens. Out: loaders installed, and at the process's end a line in that file that says what took effect.
"""

from __future__ import annotations

import atexit
import json
import os
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

CONFIGURATIONS: dict[str, dict[str, dict[str, Any]] | None] = {
    "plain": None,
    "watched": {},
    "fused_fetch": {"fused_fetch": {}},
    "virtual_workers": {"fused_fetch": {}, "virtual_workers": {}},
    "sample_store": {"sample_store": {}, "virtual_workers": {}},
    "decoded_store": {"decoded_store": {}},
    "workers 2": {"workers": {"num": 2}},
    "workers 0": {"workers": {"num": 0}},
    "ahead 2": {"ahead": {"num": 2}},
}
"""Levers and their settings under a name; None is PyTorch without us. `watched` is our loaders with nothing engaged."""


class Engaged:
    """Our loaders under some levers.

    Attributes:
        loaders: What is installed in the place of `DataLoader.__iter__`.
        problems: What failed and was mended: stage and message.
    """

    def __init__(self, levers: Mapping[str, Mapping[str, Any]]) -> None:
        from flatout.frameworks.pytorch.input.loaders import Loaders
        from flatout.frameworks.pytorch.levers import registry

        class Trained(Loaders):
            """Loaders that take each loader for one that trains: an evaluation's would be left alone."""

            def open(self, loader: Any) -> Any:
                self.note(loader, 0)
                return super().open(loader)

        self.problems: list[str] = []
        self.loaders = Trained()
        self.loaders.on_failure = lambda stage, problem: self.problems.append(f"{stage}: {_first_line(problem)}")
        self.loaders.install()
        session: Any = SimpleNamespace(loaders=self.loaders)
        for name, settings in levers.items():
            registry()[name].engage(session, settings)

    def evidence(self) -> dict[str, Any]:
        """What took effect so far."""
        found = self.loaders.parts
        parts = (found.fused, found.stored)
        return {
            "changed_passes": self.loaders.num_changed,
            "computed_batches": sum(part.num_batches for part in parts),
            "batches_ahead": self.loaders.num_ahead,
            "images_not_decoded": found.decoded.num_given,
            "problems": list(self.problems),
        }


def _first_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:200]


def _tell(engaged: Engaged, path: str, pid: int) -> None:
    if os.getpid() == pid:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(engaged.evidence()) + "\n")


def from_environment() -> Engaged | None:
    """Loaders under the levers of `FLATOUT_ENGAGED`; None where there are none."""
    levers = os.environ.get("FLATOUT_ENGAGED")
    if levers is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engaged = Engaged(json.loads(levers))
    if path := os.environ.get("FLATOUT_EVIDENCE"):
        atexit.register(_tell, engaged, path, os.getpid())
    return engaged


ENGAGED = from_environment()
