"""micro_batching: calls that several threads make at one time, computed as one batch.

A call that finds the model idle goes at once; those that come while it computes wait for its end, which is what they
pay, and go together. A call of its own batch size is rounded in another way. Some batches are computed call by call as
well, as long as the script runs; where rows depend on each other, the lever is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class MicroBatching(Lever):
    """Calls of several threads gathered."""

    name = "micro_batching"
    summary = "calls that several threads make at one time, computed as one batch"
    class_ = "rounding"
    shortens: ClassVar = ("forward",)
    check = "gradients"
    only_by_name = "a call waits for the one before it, and its rows share a batch with others'"
    conflicts: ClassVar = ("compile", "onnxruntime", "openvino", "int8", "fused_attention")

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Models that several threads call."""
        if not facts.infers:
            return "the script trains"
        return None if facts.several_threads else "one thread calls the model"

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next call on."""
        from flatout.frameworks.pytorch.seams.gathered import GatheredCalls
        from flatout.frameworks.pytorch.session import Unavailable

        if not session.calls.infers:
            raise Unavailable("the script trains")
        for call in session.calls.found:
            call.kept[self.name] = GatheredCalls()
            call.arounds[self.name] = call.kept[self.name].call

    def release(self, session: Session) -> None:
        """Each by itself."""
        for call in session.calls.found:
            call.arounds.pop(self.name, None)

    def evidence(self, session: Session) -> str | None:
        """How many calls went together, and how far they were from single ones."""
        found = self._gathered(session)
        num, batches = sum(one.num_calls for one in found), sum(one.num_batches for one in found)
        compared, apart = sum(one.num_compared for one in found), max((one.apart for one in found), default=0.0)
        said = (
            f"{num:,} calls in {batches:,} batches, {compared:,} of them compared with single calls: {apart:.1e} apart"
        )
        return said if num else None

    def why_no_evidence(self, session: Session) -> str:
        """What the model has shown."""
        return next((one.refused for one in self._gathered(session) if one.refused), "no two calls came at one time")

    def _gathered(self, session: Session) -> list[Any]:
        return [call.kept[self.name] for call in session.calls.found if self.name in call.kept]
