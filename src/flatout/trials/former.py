"""What do earlier tunings change about this one, and what does it leave to later ones?

In: the script, what was seen of it, its result. Out: the search's space in another order, and a file. Whatever is wrong
with the files of earlier tunings is said once, and ends nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from flatout.judge.result import Result
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Header
from flatout.run.script import Script
from flatout.trials.plain import Plain
from flatout.trials.search import priors, priors_file, strategy
from flatout.trials.search.priors import Tuning
from flatout.trials.search.space import Space, advised

OPTION = "--no-priors"


class Former:
    """Earlier tunings as one tuning sees them; without a script there are none, and nothing is kept."""

    def __init__(self, script: Script | None = None, say: Callable[[str], None] = lambda text: None) -> None:
        self._digest = digest_of(script) if script is not None else ""
        self._say = say
        self.said = ""
        """That earlier tunings changed the order, where they did."""

    def advised(self, space: Space, seen: tuple[Header, Facts, Machine], plain: Plain) -> Space:
        """The space in the order that earlier tunings suggest."""
        if not self._digest or plain.anatomy is None or plain.diagnosis is None:
            return space
        header, facts, machine = seen
        traits = priors.traits_of(self._digest, facts, plain.anatomy, plain.diagnosis)
        versions = (header.framework, header.framework_version)
        place = priors.place_of(machine.machine_key(), *versions, facts.device)
        said = priors.advice(self._read(), place, traits)
        ordered = advised(space, said.expected, said.own, said.former)
        if strategy.is_reordered(ordered, space):
            tunings = "an earlier tuning" if said.num_tunings == 1 else f"{said.num_tunings} earlier tunings"
            first = ", first this script's last plan" if ordered.own else ""
            self.said = f"{tunings} on this machine decided what was tried first{first} (`{OPTION}`: the usual order)"
        return ordered

    def _read(self) -> Sequence[Tuning]:
        kept = priors_file.kept_priors()
        if kept.num_unreadable:
            files = "a file" if kept.num_unreadable == 1 else f"{kept.num_unreadable} files"
            self._say(
                f"{files} of earlier tunings in `{kept.folder}` cannot be read and count for nothing; "
                "`flatout machine --forget-priors` removes all"
            )
        return kept.tunings

    def keep(self, result: Result) -> None:
        """Leave what this tuning found to later ones."""
        tuning = priors.tuning_of_result(result, self._digest) if self._digest else None
        problem = priors_file.keep(tuning) if tuning is not None else ""
        if problem:
            self._say(f"what was found is not kept for later tunings: {problem}")


def digest_of(script: Script) -> str:
    """Sixteen hexadecimal digits, the same for the same script whatever its arguments, that tell nobody which it is."""
    where = (
        f"-m {script.module} in {Path.cwd()}" if script.module is not None else str(Path(script.path or "").resolve())
    )
    return hashlib.sha256(where.encode("utf-8", "surrogateescape")).hexdigest()[:16]
