"""How does a proof look while it goes on? In: the call. Out: a line of progress on stderr, then the report."""

from __future__ import annotations

from collections.abc import Callable

from flatout.cli import showing
from flatout.cli.progress import Progress, end_children_when_told_to_end
from flatout.judge.proof import Proof, WholeRun
from flatout.report import words
from flatout.report.proof_words import number
from flatout.trials.proving.conduct import Show

EXIT_CODES = {"identical": 0, "equivalent": 0, "different": 1, "undecided": 6}


def proved(call: Callable[[Show], Proof], *, as_json: bool, against_itself: bool = False) -> int:
    """Make the call with live progress on stderr, show the proof, and give the exit code."""
    end_children_when_told_to_end()
    progress = Progress()
    with progress:
        show = Show(
            stage=progress.show.stage,
            tick=progress.show.tick,
            remark=progress.show.remark,
            run=lambda run: progress.line(run_line(run, against_itself=against_itself)),
        )
        try:
            found = call(show)
        except KeyboardInterrupt:
            raise progress.stopped("no run had ended: the same command begins anew") from None
        except SystemExit:
            show.remark("told to end: the runs that have ended are kept, and the same command goes on from there")
            raise
    showing.show(found, as_json=as_json)
    return EXIT_CODES[found.equivalence.verdict]


def run_line(run: WholeRun, *, against_itself: bool = False) -> str:
    """What a run came to.

    >>> run_line(WholeRun(seed=1, side="plan", exit_code=0, wall_s=12.0, training_s=10.0, num_steps=900, value=0.981))
    '  seed 1  plan       12 s  0.981'
    """
    side = "again" if against_itself and run.side == "plan" else run.side
    value = words.printable(run.problem) or (number(run.value) if run.value is not None else "no metric")
    return f"  seed {run.seed:<2} {side:<5} {words.duration(run.wall_s):>8}  {words.shortened(value, 90)}"
