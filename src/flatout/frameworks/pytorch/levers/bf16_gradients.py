"""bf16_gradients: ranks send float32 gradients as bfloat16 and sum them so, in half of the bytes.

Parameters, their updates and what the script sees stay float32; the mean over ranks is taken in float32 as well.
Gradients of other types are sent as they are. Calls that are computed both ways are compared without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.lever import Lever
from flatout.frameworks.pytorch.lever_bases import why_not_on_ranks
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.ranks import SUMMING_MODES
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class Bf16Gradients(Lever):
    """A hook of the reducer; in sharded modes what `MixedPrecisionPolicy(reduce_dtype=...)` does."""

    name = "bf16_gradients"
    summary = "gradients sent between ranks and summed in bfloat16, in half of the bytes"
    class_ = "precision"
    shortens: ClassVar = ("backward", "communication")
    toggles = "process"
    check = "gradients"
    modes: ClassVar = SUMMING_MODES

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """On ranks that sum gradients of float32 parameters."""
        reason = why_not_on_ranks(facts.num_ranks, facts.rank_mode)
        if reason is None and not any("float32" in model.dtypes for model in facts.main_models):
            return "no float32 parameters"
        return reason

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Have models that are divided from now on be summed so."""
        session.communication().in_bf16 = True

    def release(self, session: Session) -> None:
        """Sums in the gradients' own type, for models that are divided from now on."""
        if session.ranks is not None:
            session.ranks.group.communication.in_bf16 = False

    def evidence(self, session: Session) -> str | None:
        """Bytes of gradients, and as how many they were sent."""
        found = session.communication()
        if not found.num_sent_bytes:
            return None
        return f"{found.num_bytes / 1e6:.3g} MB of gradients were sent as {found.num_sent_bytes / 1e6:.3g} MB"
