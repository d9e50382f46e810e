"""How do the steps of ranks become one self-contained HTML page? In: a `RankAnatomy`. Out: a file."""

from __future__ import annotations

from pathlib import Path

from flatout import __version__
from flatout.judge.rank_steps import COMMUNICATION, RankAnatomy
from flatout.report import figures, words
from flatout.report.html import machine_rows, rendered, write_whole
from flatout.report.rank_anatomy import next_command, verdict
from flatout.report.tables import Table, table

MOST_BARS = 8
"""So many ranks have a bar; of more those with the shortest and the longest step."""


def write_html(found: RankAnatomy, path: Path | str) -> Path:
    """Write the page whole or not at all; returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    return write_whole(html_text(found), path)


def html_text(found: RankAnatomy) -> str:
    """The page as text."""
    head, rest = verdict(found)
    number, unit = _headline(found)
    one = found.ranks[0]
    return rendered(
        "rank_steps.html.j2",
        {
            "found": found,
            "version": __version__,
            "created": words.moment(found.created),
            "number": number,
            "unit": unit,
            "sentence": f"{head}{rest}.",
            "steps": f"{words.plural(one.num_steps, 'step')} in {words.plural(one.num_windows, 'window')}",
            "figure": figures.stacked([(f"rank {rank}", found.ranks[rank]) for rank in _shown(found)]),
            "phases": [(name, figures.phase_colour(name)) for name in found.phases],
            "table": phases(found),
            "kinds": [(kind, words.percent(share)) for kind, share in found.kinds.items()],
            "memory": words.memory(found.peak_memory_bytes) if found.peak_memory_bytes is not None else "",
            "took": words.duration(found.took_s),
            "again": f"flatout why {_options(found)}{found.typed}",
            "next": " ".join(next_command(found)),
            "machine": machine_rows(found.machine),
        },
    )


def _options(found: RankAnatomy) -> str:
    return "" if found.is_launched else f"--ranks {found.num_ranks} --mode {found.mode} "


def _headline(found: RankAnatomy) -> tuple[str, str]:
    """The one number, and what it is a number of."""
    if found.is_launched:
        return words.seconds(found.step_s), f"a step of {words.plural(found.num_ranks, 'rank')}"
    return words.percent(
        min(found.shares(COMMUNICATION))
    ), "of the step, on the rank with the least, in communication that nothing hides"


def _shown(found: RankAnatomy) -> list[int]:
    if found.num_ranks <= MOST_BARS:
        return list(range(found.num_ranks))
    by_length = sorted(range(found.num_ranks), key=lambda rank: found.ranks[rank].step_s)
    return sorted({by_length[0], by_length[-1]})


def phases(found: RankAnatomy) -> Table:
    """Every phase on every rank, in seconds and as a share of its step."""
    rows = []
    for name in found.phases:
        cells = zip(found.seconds(name), found.shares(name), strict=True)
        rows.append((name, *(f"{words.seconds(s)} ({words.percent(share)})" for s, share in cells)))
    rows.append(("step", *(words.seconds(one.step_s) for one in found.ranks)))
    return table("Time of a step by phase and rank", ("phase", *(f"rank {r}" for r in range(found.num_ranks))), rows)
