"""What do levers that compute a model in another runtime share? All but how that runtime converts and computes.

In: a session, a `Runtime`. Out: `OuterCall.compute` set, and taken back.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.lever import Check, Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import LeverClass, label
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.exported import ExportedCall, Runtime
    from flatout.frameworks.pytorch.session import Session


TRAINS = "the script trains: another runtime has no gradients"

TO_NOBODY = {"CI": "true", "ORT_DISABLE_TELEMETRY": "1"}
"""Variables by which runtimes do not report to their makers."""


@contextlib.contextmanager
def telling_nobody() -> Iterator[None]:
    """Runtimes that report to their makers, as they are loaded or when they convert, do not within this."""
    former = {name: os.environ.get(name) for name in TO_NOBODY}
    os.environ.update(TO_NOBODY)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def not_installed(packages: Sequence[str], extra: str) -> str | None:
    """What installs these packages of another runtime; None where they are."""
    return f"not installed: `pip install 'flatout[{extra}]'`" if None in map(find_spec, packages) else None


class RuntimeLever(Lever):
    """Models that nobody trains, computed by another runtime."""

    class_: ClassVar[LeverClass] = "rounding"
    shortens: ClassVar = ("forward",)
    check: ClassVar[Check] = "gradients"
    compiles = True
    compiles_faster = 8.0  # a ResNet-18 in 2.4 and 4.7 s on two cores, where 60 s are expected of `torch.compile`
    packages: ClassVar[tuple[str, ...]]
    """What has to be installed, the runtime itself first."""
    extra: ClassVar[str]
    """What installs them: `flatout[onnx]`."""

    @abstractmethod
    def runtime(self, settings: Mapping[str, Setting]) -> Runtime:
        """The runtime, loaded."""

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Calls of models that compute on a CPU, as the script wrote them."""
        if not facts.infers:
            return TRAINS
        if facts.device != "cpu":
            return "it computes on a CPU"
        if any(model.compiled for model in facts.models):
            return "the script compiles its model itself"
        if facts.autocast:
            return "the script uses autocast"
        return self.lacks(machine)

    def lacks(self, machine: Machine) -> str | None:
        """The runtime."""
        return not_installed(self.packages, self.extra)

    def package(self, settings: Mapping[str, Setting]) -> str:
        """What computes under these settings."""
        return self.packages[0]

    def call(self, call: Any, runtime: Any, folder: Path, *, at_once: bool) -> ExportedCall:
        """What takes the place of a model's call."""
        from flatout.frameworks.pytorch.seams.exported import ExportedCall

        return ExportedCall(call, runtime, folder, at_once=at_once)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Compute each call elsewhere once its kind of inputs has come a few times."""
        from flatout.frameworks.pytorch.session import Unavailable

        if not session.calls.infers:
            raise Unavailable(TRAINS)
        folder = session.cache_folder
        if folder is None:  # a run without a plan's folder: what is made lasts as long as the process
            kept = session.kept[self.name] = tempfile.TemporaryDirectory(prefix="flatout-")
            folder = kept.name
        name = label({self.name: settings})
        for call in session.calls.found:
            if name not in call.kept:
                runtime = self.runtime(settings)
                call.kept[name] = self.call(call, runtime, Path(folder), at_once=session.loaders.studies)
            call.compute = call.kept[name]

    def release(self, session: Session) -> None:
        """As the model is written; what was exported is kept for another time."""
        for call in session.calls.found:
            call.compute = None
        kept = session.kept.pop(self.name, None)
        if kept is not None:
            kept.cleanup()

    def evidence(self, session: Session) -> str | None:
        """Calls that were computed elsewhere, and those that were not."""
        num, package = sum(one.num_calls for one in self.exported(session)), self.package(session.engaged[self.name])
        rest = "".join(f", {some:,} by the model ({reason})" for reason, some in self._plain(session).items())
        return f"{num:,} calls by {package} {version(package)}{rest}" if num else None

    def why_no_evidence(self, session: Session) -> str:
        """What all calls have that cannot be computed elsewhere."""
        return "; ".join(self._plain(session))

    def exported(self, session: Session) -> list[Any]:
        """What takes the place of calls under the settings that it is engaged with."""
        name = label({self.name: session.engaged[self.name]})
        return [call.kept[name] for call in session.calls.found if name in call.kept]

    def _plain(self, session: Session) -> dict[str, int]:
        found: dict[str, int] = {}
        for reason, num in (item for one in self.exported(session) for item in one.num_plain.items()):
            found[reason] = found.get(reason, 0) + num
        return found
