"""Under which levers of its plan has a script run out of memory here? They are left out of its next runs.

In: the folder of run folders, a plan, what broke in a run. Out: a small file, `out-of-memory.json`, beside the run
folders; the plan itself is never edited. A plan that is tuned again is another plan, and nothing of it is left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flatout.records import output_file
from flatout.records.plan import Lever, Plan
from flatout.records.trace import Levers
from flatout.run.choice import Engagement
from flatout.run.folder import ROOT
from flatout.run.outcome import Outcome

FILE = "out-of-memory.json"
FORMAT = 1


def without(chosen: Engagement) -> Engagement:
    """The plan's levers without those under which this script ran out of memory here."""
    if chosen.plan is None or not (names := left_out(Path(ROOT), chosen.plan)):
        return chosen
    levers = {name: settings for name, settings in chosen.levers.items() if name not in names}
    line = f"{chosen.line}; without {', '.join(names)}: out of memory before, see `{ROOT}/{FILE}`"
    return replace(chosen, levers=levers, line=line)


def note_if_any(chosen: Engagement, outcome: Outcome, registry: Mapping[str, Lever]) -> None:
    """Where memory ran out in a run, have the next one go without what took it."""
    if chosen.plan is not None and chosen.levers and outcome.out_of_memory:
        names = suspects(chosen.levers, registry)
        outcome.short_of_memory = names if note(Path(ROOT), chosen.plan, names) else ()


def suspects(levers: Levers, registry: Mapping[str, Lever]) -> tuple[str, ...]:
    """Which of a run's levers are to blame: those that take memory which plain does not, or all where none does."""
    return tuple(name for name in levers if registry[name].takes_memory) or tuple(levers)


def left_out(place: Path, plan: Plan) -> tuple[str, ...]:
    """The levers of a plan under which its script ran out of memory; none where nothing is known."""
    noted = _read(place).get(plan.script)
    if not isinstance(noted, dict) or noted.get("created") != plan.created or not isinstance(noted.get("levers"), list):
        return ()
    return tuple(name for name in plan.levers if name in noted["levers"])


def note(place: Path, plan: Plan, names: tuple[str, ...]) -> bool:
    """Write down that these are to be left out, beside those that are already; whether it could be written."""
    plans = _read(place)
    levers = [name for name in plan.levers if name in {*names, *left_out(place, plan)}]
    plans[plan.script] = {"created": plan.created, "levers": levers}
    try:
        output_file.write_whole([json.dumps({"format": FORMAT, "plans": plans}, indent=1) + "\n"], place / FILE)
    except OSError:  # it is told at the end of this run all the same
        return False
    return True


def _read(place: Path) -> dict[str, object]:
    """What is noted; nothing where the file is missing, torn, from another version, or edited into nonsense."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads((place / FILE).read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("format") == FORMAT and isinstance(found.get("plans"), dict):
            return dict(found["plans"])
    return {}
