"""How long will compiling take? Guessed from the modules that are to be compiled, until it has been seen here.

Measured on two cores with cold caches, seconds from engaging to the first step: 6 modules (`lenet.py`, `vae`) 20 and
22, 28 modules (a Transformer of two layers) 20, 55 modules (`char_gpt.py`) 46 and 59. Warm caches make it a tenth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flatout.records.facts import Facts
from flatout.records.plan import Candidate, Lever, Trial

STARTING_S = 15.0
"""What the compiler's start and its first kernels take, however small the model."""

MODULE_S = 0.6
"""What each module adds: its forward and its backward become kernels of their own."""


def compiling_s(
    candidate: Candidate, levers: Mapping[str, Lever], facts: Facts | None, trials: Iterable[Trial] = ()
) -> float:
    """Seconds that engaging a candidate is expected to take for compiling; 0 where nothing in it compiles.

    Args:
        candidate: What would be engaged.
        levers: The catalogue, by name.
        facts: The models of the script; None where nobody has looked yet.
        trials: What has been tried here: compiling takes at least as long as the longest of them took.
    """
    compiling = [name for name in candidate.levers if levers[name].compiles]
    if not compiling:
        return 0.0
    regional = any(candidate.levers[name].get("mode") == "regional" for name in compiling)
    seen = (t.engage_s for t in trials if any(levers[name].compiles for name in t.levers))
    return max(STARTING_S + MODULE_S * _num_modules(facts, regional=regional), *seen, 0.0)


def _num_modules(facts: Facts | None, *, regional: bool) -> float:
    """Modules that are compiled: of blocks that repeat, one is enough where the lever says so."""
    if facts is None:
        return 0.0
    return sum(m.num_modules / (max(m.num_repeated_blocks, 1) if regional else 1) for m in facts.models)
