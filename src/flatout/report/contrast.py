"""What is shown of two runs side by side? What differs besides time, then what changed and what did not.

In: a `Contrast`. Out: a `View`. The words for it are in `contrast_words.py`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from flatout import __version__
from flatout.judge.contrast import Change, Contrast
from flatout.report import contrast_words, figures, words
from flatout.report.table import Look, On, Table, Tone, folded, milliseconds, shown, table
from flatout.report.view import Again, Evidence, Figure, Item, Row, Section, View, raw

_TONES: dict[str, Tone] = {"faster": "good", "slower": "bad", "no difference": "quiet", "inconclusive": "unsure"}

_BARS = (
    "Both bars have the same scale. Look for a part that changed while the others did not; grey is what no phase "
    "explains. The phases were timed in windows of their own."
)


def view(found: Contrast) -> View:
    """Two runs side by side."""
    said, names = contrast_words.headline(found), contrast_words.names(found)
    return View(
        command="flatout report",
        title=names[1],
        context=(f"beside {names[0]}",),
        number=said.number,
        unit=said.unit,
        sentence=said.sentence,
        source=_anchor(0),
        verdict=(*_unlike(found, decisive=True, on="page"), *_verdict(found)),
        sections=(
            Section(name="sides", items=tuple(_sides(found))),
            Section(name="unlike", items=_unlike(found, decisive=True, on="screen")),
            Section(name="other", items=_unlike(found, decisive=False, on="screen")),
            _step(found),
            _runs(found),
            raw(evidence(found), "What stands behind each number above."),
        ),
        next=("flatout tune", found.second.typed),
        version=__version__,
    )


def _sides(found: Contrast) -> list[Item]:
    sides = zip("AB", contrast_words.names(found), (found.first, found.second), strict=True)
    return [
        Row(label=letter, value=name, note=f"  {words.stamp(side.created)} · {side.command} · {side.typed}", most=2,
            on="screen")
        for letter, name, side in sides
    ]  # fmt: skip


def _verdict(found: Contrast) -> list[Item]:
    said = contrast_words.headline(found)
    tone = _TONES.get(said.verdict, "")
    rest = f": `{contrast_words.names(found)[1]}` {said.sentence.removesuffix('.')}"
    rows: list[Item] = [
        Row(label="result", value=said.verdict, note=rest, tone="" if tone == "quiet" else tone, on="screen")
    ]
    if same := contrast_words.alike(found):
        rows.append(Row(label="", note=same))
    rows += [Row(label=name, note=text) for name, text in contrast_words.groups(found)]
    if apart := contrast_words.taken_apart(found):
        rows.append(Row(label="warning", value=apart, tone="caution"))
    for number, caution in enumerate(found.cautions):
        rows.append(Row(label="mind", value=caution, tone="caution" if number else "plain"))
    return rows


def _unlike(found: Contrast, *, decisive: bool, on: On) -> tuple[Table, ...]:
    title = "not like with like: what differs besides time" if decisive else "differs, too"
    rows = [(one.what, "", f"{one.first} → {one.second}") for one in found.unlike if one.decisive is decisive]
    if on == "page" and decisive:
        title = "Not like with like. What differs besides time may be the reason for all of it"
    named = table(title, (title if on == "screen" else "what", "", "from A to B"), rows, texts=3)
    return (shown(named, range(3), on=on),) if rows else ()


def _step(found: Contrast) -> Section:
    one, other = contrast_words.names(found)
    drawing = figures.stacked([(one, found.first.anatomy), (other, found.second.anatomy)])
    phases = [change.name for change in found.phases if change.verdict != "not compared"]
    items: list[Item] = []
    if drawing is not None:
        legend = tuple((figures.phase_colour(name), "", name, "") for name in phases)
        items.append(Figure(drawing=drawing, caption=_BARS, legend=legend))
    note = (
        f"A ratio says how many times as fast `{other}` is. Faster or slower takes a 99 % interval without 1, for all "
        "phases together"
    )
    items += [Row(label="", note=note, on="page"), changes(found)]
    return Section(name="step", title="Where a step goes", items=tuple(items))


def _runs(found: Contrast) -> Section:
    items: list[Item] = []
    sides = zip("AB", contrast_words.names(found), (found.first, found.second), strict=True)
    for letter, name, side in sides:
        created = f", {words.stamp(side.created)}" if side.created else ""
        items.append(Again(name=f"{letter}: {name}{created}, measured by", command=side.again))
        items.append(Again(name="shown by", command=f"flatout report {words.nearby(Path(side.run))}"))
    items += [folded(one, one.title) for one in _unlike(found, decisive=False, on="page")]
    items.append(Again(name="this page", command=contrast_words.command(found)))
    return Section(name="runs", title="The two runs", items=tuple(items))


def _rows(found: Contrast) -> list[Change]:
    return [found.step, *((found.tuned_step,) if found.tuned_step is not None else ()), *found.phases]


def changes(found: Contrast) -> Table:
    """Every time in both runs; its numbers lead to their samples."""
    inside = {change.name for change in found.phases}
    rows, looks = [], []
    for change in _rows(found):
        verdict = change.verdict
        rows.append((change.name, verdict, *contrast_words.cells(change)))
        looks.append(Look(depth=change.name in inside, tone=_TONES.get(verdict, "quiet")))
    anchors = [_anchor(number) for number in range(len(rows))]
    head = ("a step", "verdict", "A", "±", "B", "±", "B less A", "ratio", "95 %")
    found_ = table("Every phase in both runs", head, rows, texts=2, links={2: anchors, 7: anchors})
    return shown(found_, (0, 2, 4, 6, 7, 8, 1), looks)


def _anchor(number: int) -> str:
    return f"raw-change-{number}"


def evidence(found: Contrast) -> list[Evidence]:
    """The samples behind each row."""
    one, other = contrast_words.names(found)
    behind = []
    for number, change in enumerate(_rows(found)):
        what = "windows" if change in (found.step, found.tuned_step) else "quarters of windows"
        pairs = itertools.zip_longest(change.first_samples_s, change.second_samples_s)
        rows = [(str(n), *("" if x is None else milliseconds(x) for x in pair)) for n, pair in enumerate(pairs, 1)]
        reason = change.compared.reason if change.compared is not None else change.verdict
        behind.append(
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
    return behind
