"""What is shown of two runs side by side? What differs besides time, then what changed and what did not.

In: a `Contrast`. Out: a `View`; the words are the same for the terminal and the page.
"""

from __future__ import annotations

from pathlib import Path

from flatout import __version__
from flatout.judge.contrast import Contrast
from flatout.report import figures, words
from flatout.report.table import Look, On, Table, Tone, shown, table
from flatout.report.view import Again, Figure, Item, Row, Section, View

_TONES: dict[str, Tone] = {"faster": "good", "slower": "bad", "no difference": "quiet", "inconclusive": "unsure"}

_BARS = (
    "Both bars have the same scale. Look for a part that changed while the others did not; grey is what no phase "
    "explains. The phases were timed in windows of their own."
)
_SAMPLES = "The samples are on the page of each run, `report.html` in its folder."


def view(found: Contrast) -> View:
    """Two runs side by side."""
    one, other = names(found)
    number, unit, sentence = headline(found)
    runs = list(zip("AB", (one, other), (found.first, found.second), strict=True))
    sides = (
        Row(
            label=letter,
            value=name,
            note=f"  {words.stamp(run.created)} · {run.command} · {run.typed}",
            most=2,
            on="screen",
        )
        for letter, name, run in runs
    )
    again = (
        Again(
            name=f"{letter}: {name}{f', {words.stamp(run.created)}' if run.created else ''}, measured by",
            command=f"{run.tune_command if run.command == 'tune' else 'flatout why'} {run.typed}",
        )
        for letter, name, run in runs
    )
    return View(
        command="flatout report",
        title=other,
        context=(f"beside {one}",),
        number=number,
        unit=unit,
        sentence=sentence,
        verdict=(*_unlike(found, on="page"), *_verdict(found, sentence)),
        sections=(
            Section(name="sides", items=tuple(sides)),
            Section(name="unlike", items=_unlike(found, on="screen")),
            _step(found),
            Section(name="runs", title="The two runs", items=tuple(again), lead=(_SAMPLES,)),
        ),
        next=("flatout tune", found.second.typed),
        version=__version__,
    )


def _verdict(found: Contrast, sentence: str) -> list[Row]:
    verdict = found.step.verdict if found.step.compared is not None else "inconclusive"
    tone = "" if verdict == "no difference" else _TONES[verdict]
    rest = f": `{names(found)[1]}` {sentence.removesuffix('.')}"
    rows = [Row(label="result", value=verdict, note=rest, tone=tone, on="screen")]
    rows += [Row(label=name, note=text) for name, text in groups(found)]
    for number, caution in enumerate(found.cautions):
        rows.append(Row(label="mind", value=caution, tone="caution" if number else "plain"))
    return rows


def names(found: Contrast) -> tuple[str, str]:
    """What the two runs are called: their folders' names, or their paths where these are equal."""
    one, other = Path(found.first.run or "first"), Path(found.second.run or "second")
    return (one.name, other.name) if one.name != other.name else (str(one), str(other))


def headline(found: Contrast) -> tuple[str, str, str]:
    """The one number, what it is a number of, and the verdict on the whole step as what is said of the second run.

    What is not like with like is not said to be faster.
    """
    one, judged = f"`{names(found)[0]}`", found.step.compared
    if judged is None or not words.known(judged.ratio):
        reason = judged.reason if judged is not None else "the step was not measured in both"
        return "No ratio", f"of {one} to `{names(found)[1]}` can be given", f"cannot be held against {one}: {reason}."
    ends, number = words.interval(judged.low, judged.high), f"{words.ratio(judged.ratio)}x"
    if judged.verdict == "inconclusive":
        return ends, f"times as fast as {one}, 95 %", f"may or may not differ from {one}: {judged.reason}."
    sentence = {
        "faster": f"took less time a step than {one}: it was {number} as fast {ends}",
        "slower": f"took more time a step than {one}: it was {number} as fast {ends}",
        "no difference": f"took as long a step as {one}, within 2 % {ends}",
    }[judged.verdict]
    unlike = "" if found.like_with_like else ", but not like with like"
    return number, f"as fast as {one}", f"{sentence}{unlike}."


def groups(found: Contrast) -> list[tuple[str, str]]:
    """What changed, what did not, what cannot be told and why, and what was not observed, as far as there is any."""
    by: dict[str, list[str]] = {"changed": [], "unchanged": [], "inconclusive": [], "not observed": []}
    reasons: dict[str, list[str]] = {}
    for change in found.phases:
        if change.verdict in ("faster", "slower"):
            times = f"{words.seconds(change.first_s)} to {words.seconds(change.second_s)}"
            by["changed"].append(f"{change.name} ({change.verdict}, {times})")
        elif change.verdict == "no difference":
            by["unchanged"].append(change.name)
        elif change.verdict == "not observed":
            by["not observed"].append(f"{change.name} in {names(found)[change.first_s is not None]}")
        elif change.compared is not None:
            reasons.setdefault(change.compared.reason, []).append(change.name)
    by["inconclusive"] += [f"{', '.join(phases)}: {reason}" for reason, phases in reasons.items()]
    if found.not_observed:
        by["not observed"].append(f"{', '.join(found.not_observed)} in either")
    return [(name, ("; " if name == "inconclusive" else ", ").join(said)) for name, said in by.items() if said]


def _unlike(found: Contrast, *, on: On) -> tuple[Table, ...]:
    """What differs besides time; what decides stands first."""
    title = "what differs besides time" if found.like_with_like else "not like with like: what differs besides time"
    if on == "page" and not found.like_with_like:
        title = "Not like with like. What differs besides time may be the reason for all of it"
    ordered = sorted(found.unlike, key=lambda one: not one.decisive)
    rows = [(one.what, "", f"{one.first} → {one.second}") for one in ordered]
    named = table(title, (title if on == "screen" else "what", "", "from A to B"), rows, texts=3)
    return (shown(named, range(3), on=on),) if rows else ()


def _step(found: Contrast) -> Section:
    one, other = names(found)
    items: list[Item] = []
    drawing = figures.stacked([(one, found.first.anatomy), (other, found.second.anatomy)])
    if drawing is not None:
        phases = [change.name for change in found.phases if change.verdict != "not compared"]
        legend = tuple((figures.phase_colour(name), "", name, "") for name in phases)
        items.append(Figure(drawing=drawing, caption=_BARS, legend=legend))
    note = (
        f"A ratio says how many times as fast `{other}` is. Faster or slower takes a 99 % interval without 1, for all "
        "phases together"
    )
    items += [Row(label="", note=note, on="page"), changes(found)]
    return Section(name="step", title="Where a step goes", items=tuple(items))


def changes(found: Contrast) -> Table:
    """Every time in both runs."""
    rows, looks = [], []
    tuned = () if found.tuned_step is None else (found.tuned_step,)
    for change in (found.step, *tuned, *found.phases):
        judged, difference_s = change.compared, change.difference_s
        sign = "+" if difference_s is not None and difference_s > 0 else ""
        times = ("not observed" if x is None else words.seconds(x) for x in (change.first_s, change.second_s))
        less = f"{sign}{words.seconds(difference_s)}" if words.known(difference_s) else ""
        ends = words.interval(judged.low, judged.high) if judged else ""
        rows.append((change.name, change.verdict, *times, less, words.ratio(judged.ratio) if judged else "", ends))
        looks.append(Look(depth=change in found.phases, tone=_TONES.get(change.verdict, "quiet")))
    head = ("a step", "verdict", "A", "B", "B less A", "ratio", "95 %")
    named = table("Every phase in both runs", head, rows, texts=2)
    return shown(named, (0, 2, 3, 4, 5, 6, 1), looks)
