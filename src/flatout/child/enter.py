"""How does a process begin that has just imported a framework? As the session says: a trial, a run, one of the ranks.

In: the path of `session.json`, and what was imported. Out: a conductor, told of each step. Imported in the user's
process: the standard library, and the framework that the script itself imported.
"""

from __future__ import annotations

import json
from pathlib import Path

from flatout.child.conductor import Conductor
from flatout.child.orders import SessionSpec
from flatout.frameworks import kind_of_module
from flatout.frameworks.contract import Framework
from flatout.guest import lifeline
from flatout.records.as_json import from_json
from flatout.records.ranks import RankPlace, refuse


def enter(session: str, module: str, rank: bytes | None = None) -> None:
    """Called once a framework has been imported, as `module`: attach to it as the session says.

    Args:
        session: Path of `session.json`.
        module: What was imported.
        rank: What launched us; None where we are no rank.
    """
    spec = from_json(SessionSpec, json.loads(Path(session).read_text(encoding="utf-8")), where="session")
    if spec.lives_with is not None:
        lifeline.hold(spec.lives_with)
    if spec.ranks is not None and rank is None:  # a process that a rank has started
        return
    framework = kind_of_module(module).make(spec.settings)
    if spec.seed_run is not None:
        framework.vary_seeds(spec.seed_run)
    if spec.keep_losses:
        framework.keep_losses()
    place = None if rank is None else RankPlace.of(rank.decode())
    if place is not None and spec.ranks is not None:
        try:
            framework.join(place, spec.ranks)
        except Exception as problem:  # noqa: BLE001  a rank that cannot join would train alone
            error, cause = "a rank could not join the others", f"{type(problem).__name__}: {problem}"
            hint = "`--hang-timeout` says how long ranks wait for each other"
            refuse(spec.ranks, place.rank, error, cause=cause, hint=hint)
    conductor_of(spec, framework, place).begin()


def conductor_of(spec: SessionSpec, framework: Framework, rank: RankPlace | None = None) -> Conductor:
    """The conductor of a trial, or of a run."""
    if spec.mode == "trial":
        from flatout.child.trial import Trial

        return Trial(spec, framework, rank)
    from flatout.child.run import Run

    return Run(spec, framework, rank)
