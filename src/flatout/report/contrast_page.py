"""How do two runs side by side become one self-contained HTML page? In the style of the page of one run.

In: a `Contrast`. Out: a file. First what differs besides time, then what changed and what did not, then the samples.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.judge.contrast import Change, Contrast
from flatout.report import contrast_words, figures, words
from flatout.report.evidence import Evidence
from flatout.report.html import rendered, write_whole
from flatout.report.tables import Table, table


def write_html(found: Contrast, path: Path | str) -> Path:
    """Write the page whole or not at all; returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    return write_whole(html_text(found), path)


def html_text(found: Contrast) -> str:
    """The page as text."""
    one, other = contrast_words.names(found)
    samples = evidence(found)
    phases = [change.name for change in found.phases if change.verdict != "not compared"]
    return rendered(
        "contrast.html.j2",
        {
            "contrast": found,
            "version": __version__,
            "names": (one, other),
            "sides": _sides(found),
            "said": contrast_words.headline(found),
            "groups": contrast_words.groups(found),
            "apart": words.sentence(contrast_words.taken_apart(found)),
            "alike": words.sentence(contrast_words.alike(found)),
            "cautions": [words.sentence(caution) for caution in found.cautions],
            "unlike": _unlike(found, decisive=True),
            "other": _unlike(found, decisive=False),
            "svg": figures.stacked([(one, found.first.anatomy), (other, found.second.anatomy)]),
            "legend": [(name, figures.phase_colour(name)) for name in phases],
            "changes": changes(found),
            "evidence": samples,
            "anchors": {sample.anchor for sample in samples},
            "command": contrast_words.command(found),
        },
    )


def _rows(found: Contrast) -> list[Change]:
    return [found.step, *((found.tuned_step,) if found.tuned_step is not None else ()), *found.phases]


def changes(found: Contrast) -> Table:
    """Every time in both runs; its numbers lead to their samples."""
    one, other = contrast_words.names(found)
    rows = []
    for change in _rows(found):
        first, second, more, ratio, ends, verdict = contrast_words.cells(change)
        rows.append((change.name, verdict, first, second, more, ratio, ends))
    anchors = [_anchor(number) for number in range(len(rows))]
    head = ("a step", "verdict", one, other, "difference", "ratio", "95 %")
    links = {2: anchors, 5: anchors}
    return table("Every phase in both runs", head, rows, texts=2, links=links)


def _anchor(number: int) -> str:
    return f"raw-change-{number}"


def evidence(found: Contrast) -> list[Evidence]:
    """The samples behind each row."""
    one, other = contrast_words.names(found)
    shown = []
    for number, change in enumerate(_rows(found)):
        what = "windows" if change in (found.step, found.tuned_step) else "quarters of windows"
        pairs = itertools.zip_longest(change.first_samples_s, change.second_samples_s)
        rows = [(str(n), *(_raw(x) for x in pair)) for n, pair in enumerate(pairs, 1)]
        reason = change.compared.reason if change.compared is not None else change.verdict
        shown.append(
            Evidence(
                anchor=_anchor(number),
                title=words.sentence(change.name),
                how=f"seconds a step in {what} of each run, in the order of time; they are no pairs. Welch's interval "
                "on their logarithms, wider for neighbours that resemble each other"
                + (f"; {reason}" if reason else ""),
                command=contrast_words.command(found),
                tables=(table(change.name, ("sample", one, other), rows),),
                missing="" if rows else "the traces of the run folders do not hold them",
            )
        )
    return shown


def _raw(value_s: float | None) -> str:
    return "" if value_s is None else f"{1e3 * value_s:,.4f} ms" if words.known(value_s) else words.MISSING


def _unlike(found: Contrast, *, decisive: bool) -> Table:
    rows = [(one.what, one.first, one.second) for one in found.unlike if one.decisive is decisive]
    title = "What differs besides time" if decisive else "What differs, too"
    return table(title, ("", *contrast_words.names(found)), rows, texts=3)


def _sides(found: Contrast) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "created": words.stamp(side.created),
            "command": side.again,
            "report": f"flatout report {words.nearby(Path(side.run))}",
        }
        for name, side in zip(contrast_words.names(found), (found.first, found.second), strict=True)
    ]
