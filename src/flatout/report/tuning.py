"""What is shown of `tune` and `why`? Where a step goes, the steps in time, what was tried, and how far the limits are.

In: a `Result`. Out: a `View`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flatout.judge.remedies import OF_ALL
from flatout.judge.result import Result
from flatout.records.ceilings import Machine
from flatout.report import calls, evidence, figures, profiled, tables, thinned, tried, verdict, words
from flatout.report.table import On, folded, shown
from flatout.report.view import Figure, Item, Listing, Pairs, Row, Section, View

MOST_READS = 4
"""Lines where values are read, on one screen."""

_STEP = (
    "Look at the widest part{}. The parts sum to the step, taken apart in windows of its own; grey is what no phase "
    "explains."
)
_BOTH = " of the upper bar, and at what is left of it in the lower one; both have the same scale"
_TIME = (
    "Every dot is one step: how long it took, over the time of this measurement. Look for dots far above their band, "
    "and for bands that drift."
)
_RING = " A ring is a step with an evaluation or a checkpoint inside."
_TRIED = (
    "Each line is the 95 % interval of one ratio to plain (fewer than four pairs have none). Right of 1 and clear of "
    "it is faster; a line that touches 1 tells nothing. An indented row adds its lever to the row above it."
)
_ROOF = (
    "Each dot is one operation of a step, larger where it takes more time. The lines are this machine's measured "
    "limits: under the slopes moving bytes is the limit, in the memory or, where an operation's operands fit, in the "
    "caches; under the flat part arithmetic. The distance from a dot to its line is what is left. Counting slows "
    "operations down, so small ones stand lower than they run."
)
_NUMERICS = (
    "Each lever's numbers against the plain script's, on the same batch and random state. The noise is how much the "
    "script's own gradient differs from batch to batch: an error far below it drowns in what differs from batch to "
    "batch anyway."
)


def view(result: Result) -> View:
    """What `flatout tune` or `flatout why` found."""
    said, dots = verdict.headline(result), thinned.dots(result)
    tuned = result.command == "tune"
    found = View(
        command=f"flatout {result.command}",
        title=result.script or "a script",
        context=_context(result),
        number=said.number,
        unit=said.unit,
        sentence=said.sentence,
        source=evidence.headline(result),
        verdict=verdict.rows(result),
        sections=(
            Section(
                name="measured",
                items=(
                    _ceilings(result),
                    verdict.baseline(result, on="screen"),
                    *calls.rows(result),
                    *_between(result),
                ),
            ),
            _step(result),
            _bounds(result),
            _time(dots),
            *([_tried(result)] if tuned else []),
            _roof(result),
            _numerics(result),
            _cost(result),
            Section(name="machine", title="Machine and versions", items=(Pairs(pairs=_machine(result)),)),
        ),
        next=verdict.next_command(result),
        created=result.created,
        version=result.flatout,
    )
    return calls.in_calls(found) if result.facts.infers else found


def _context(result: Result) -> tuple[str, ...]:
    here = result.machine
    framework = words.framework(result.header.framework, result.header.framework_version)
    precision = "" if here.bfloat16_in_hardware() else "no "
    name = f"{here.cpu}, " if here.cpu else ""
    gpus = [] if result.facts.device == "cpu" else [a.name for a in here.accelerators[:1]] or [result.facts.device]
    ranks = f"{result.header.world_size} ranks" if result.header.world_size > 1 else ""
    return (framework, *gpus, f"{words.plural(here.num_cores, 'CPU core')} ({name}{precision}bf16 in hardware)", ranks)


def _ceilings(result: Result) -> Row:
    found = result.ceilings
    if found is None:
        return Row(label="ceilings", note="not measured", on="screen")
    named = found.peaks()
    if (memory := found.get("memory_copy")) is not None:
        named[words.ceiling(memory.name)] = memory
    rates = [(name, words.limit(c.value, c.unit)) for name, c in named.items()]
    parts = []
    for number, (name, rate) in enumerate(rates):
        value, _, unit = rate.partition(" ")
        again = number + 1 < len(rates) and rates[number + 1][1].endswith(f" {unit}")
        parts.append(f"{name} {value if again else rate}")
    created = words.moment(result.created)
    age = f"  ({words.age(found.age_s(created.timestamp()))})" if created is not None else ""
    return Row(label="ceilings", note=" · ".join(parts) or "not measured", aside=age, on="screen")


def _between(result: Result) -> list[Row]:
    said = verdict.between(result)
    return [Row(label="between", note=said, on="screen")] if said else []


# -- where a step goes -------------------------------------------------------------------------------------------------


def _step(result: Result) -> Section:
    why: On = "both" if result.command == "why" else "page"
    notes = [note for note in result.diagnosis.notes if not note.startswith("not observed: ")]
    items: list[Item] = [
        replace(tables.steps(result), on="screen"),
        verdict.baseline(result, "plain", on="page"),
        _drawn(result),
        *([drawing] if (drawing := profiled.figure(result)) is not None else []),
        *_not_in_the_account(result),
        replace(verdict.binding(result), on="screen" if result.command == "why" else "both"),
        Listing(label="evidence", entries=result.diagnosis.evidence, each=True, on=why),
        *_utilization(result, why),
        *(profiled.lines(result) if result.command == "why" else []),
        *_reads(result),
        *(Row(label="notes", value=note, tone="quiet", on=why) for note in notes),
    ]
    return Section(
        name="step",
        title="Where a step goes",
        items=tuple(item for item in items if not isinstance(item, Listing) or item.entries),
    )


def _drawn(result: Result) -> Item:
    drawing = figures.step(result)
    if drawing is None:
        return Row(label="", note="No step was taken apart", on="page")
    both = result.plan is not None and result.tuned_anatomy is not None
    tuned = result.tuned_anatomy.phases_s if both and result.tuned_anatomy is not None else ()
    phases = dict.fromkeys([*result.anatomy.phases_s, *tuned])
    return Figure(
        drawing=drawing,
        caption=_STEP.format(_BOTH if both else ""),
        legend=tuple(
            (figures.phase_colour(name), "", f"{name} {words.share(result.anatomy.share(name))}", evidence.ANATOMY)
            for name in phases
        ),
        tables=(
            folded(tables.steps(result), "The numbers"),
            folded(tables.bounds(result), "What each remedy could bring at most"),
            folded(tables.read_sites(result), "Where values are read on the host"),
        ),
    )


def _not_in_the_account(result: Result) -> list[Item]:
    anatomy, bounds = result.anatomy, result.diagnosis.bounds
    found: list[Item] = []
    if anatomy.not_observed:
        trains = {"loss", "backward", "optimizer"} if result.facts.infers else set()
        names = ", ".join(name for name in anatomy.not_observed if name not in trains)
        found.append(Row(label="  not observed", note=names, aside="  (which is not the same as none)"))
    if anatomy.host_s:
        largest = sorted(anatomy.host_s.items(), key=lambda one: -one[1])
        clock = " · ".join(f"{name} {words.seconds(value)}" for name, value in largest)
        found.append(Row(label="  Python was", note=f"in {clock}"))
    for name, outside_s in anatomy.outside_s.items():
        share = words.share(outside_s / anatomy.all_s)
        note = f"{words.seconds(outside_s)} a step, between steps: {share} of all the time, in no ratio"
        found.append(Row(label=f"  {name}", note=note))
    together = [b for b in bounds if len(b.shortens) != 1 or b.shortens[0] not in anatomy.phases_s]
    if together:
        parts = ", ".join(
            f"{words.times(b.ratio)} {'of all the time ' if b.how == OF_ALL else ''}with {b.remedy}" for b in together
        )
        found.append(Row(label="at most", note=parts, source=evidence.behind_bound(together[0])))
    return found


def _utilization(result: Result, on: On) -> list[Item]:
    diagnosis = result.diagnosis
    if diagnosis.model_flops_utilization is None:
        return []
    peak = result.ceilings.peak(diagnosis.arithmetic) if result.ceilings else None
    achieved = words.scaled(diagnosis.achieved_flops_per_s, "FLOP/s")
    of = f", of {words.limit(peak.value, peak.unit)}" if peak is not None else ""
    return [
        Row(
            label="arithmetic",
            value=f"{words.percent(diagnosis.model_flops_utilization)} of the {diagnosis.arithmetic} ceiling",
            note=f": {achieved} over the whole step{of}",
            source=evidence.CENSUS,
            on=on,
        )
    ]


def _reads(result: Result) -> list[Item]:
    """A line for each read; of `tune`, which has little room, those alone at which the host waits for a device."""
    sites = result.reads.sites if result.reads is not None else ()
    if not sites and result.command == "why":
        places = result.census.sync_places if result.census else ()
        return [Listing(label="reads at", entries=places, most=MOST_READS, each=True, on="screen")]
    lines = [
        (one, f"{tables.place(one)} `{tables.code(one)}` {tables.often(one)}, {words.seconds(one.waited_s)}")
        for one in sites
    ]
    waiting = [line for one, line in lines if one.on_device or result.command == "why"]
    silent = [line for one, line in lines if line not in waiting]
    found = [Listing(label="reads", entries=tuple(waiting), most=MOST_READS, each=True, on="screen")]
    if silent:
        found.append(Listing(label="reads", entries=tuple(silent), each=True, verbose=True, on="screen"))
    return list(found)


def _bounds(result: Result) -> Section:
    bounds = tables.bounds(result)
    on_screen = shown(bounds, (0, 3, 4, 1), on="screen")
    named = replace(on_screen, head=(bounds.title, *bounds.head[1:3], "", "95 %"))
    wanted = result.command == "why" and bool(bounds.rows)
    return Section(name="bounds", items=(replace(named, verbose=True),) if wanted else ())


# -- the other sections ------------------------------------------------------------------------------------------------


def _time(dots: tuple[thinned.Dot, ...]) -> Section:
    drawing = figures.timeline(dots)
    if drawing is None:
        return Section(name="time")
    figure = Figure(
        drawing=drawing,
        caption=_TIME + (_RING if any(dot.outside for dot in dots) else ""),
        legend=tuple(
            (kind, "dot", name, "") for kind, name in thinned.KINDS.items() if any(dot.kind == kind for dot in dots)
        ),
        tables=(folded(tables.timeline(dots), "The numbers"),),
    )
    return Section(name="time", title="Step by step", items=(figure,))


_LEGEND = (
    ("yes", "dot", "faster"),
    ("even", "ring", "no difference, or not clear"),
    ("no", "", "slower"),
    ("never", "cross", "its numbers disagree"),
)


def _tried(result: Result) -> Section:
    items: list[Item] = []
    if result.trials:
        items.append(tried.on_screen(result))
    else:
        items.append(Row(label="tried", note=f"nothing: {tried.nothing_tried(result)}"))
    drawing = figures.forest(result)
    if drawing is not None:
        marks = {row.mark for row in tried.rows(result) if words.known(row.trial.ratio)}
        band = " The grey band is what two equal runs differ by." if drawing.band is not None else ""
        items.append(
            Figure(
                drawing=drawing,
                caption=_TRIED + band,
                legend=tuple((tint, shape, name, "") for tint, shape, name in _LEGEND if tint in marks),
                tables=(folded(tables.trials(result), "The numbers"),),
            )
        )
    items += tried.left_out(result)
    return Section(name="tried", title="What was tried", items=tuple(items), lead=_how_tried(result))


def _how_tried(result: Result) -> tuple[str, ...]:
    if not result.trials:
        return ()
    lead = (
        f"{words.plural(len(result.trials), 'candidate')} in {words.duration(result.trials_s)}, each in a throwaway "
        "copy of the run, in turn with the plain script."
    )
    if any(trial.outcome == "screened" for trial in result.trials):
        lead += (
            " Levers that can be switched while the script runs were screened together: each window ran under a set "
            "drawn by lot, and what one lever brings is estimated from all windows."
        )
    if result.num_discarded:
        lead += (
            f" {words.plural(result.num_discarded, 'pair')} of windows discarded, because other processes, a "
            "compilation or a loader that started over disturbed one of the two."
        )
    return (lead,)


def _roof(result: Result) -> Section:
    items: list[Item] = []
    drawing = figures.roofline(result)
    if drawing is not None:
        numbers = folded(tables.operations(result), "The numbers")
        items.append(Figure(drawing=drawing, caption=_ROOF, tables=(numbers,)))
    if (ceilings := tables.ceilings(result)).rows:
        items.append(folded(ceilings, "The measured ceilings"))
    return Section(name="roof", title="How far from the machine's limits", items=tuple(items))


def _numerics(result: Result) -> Section:
    found = tables.numerics(result)
    items = (replace(found, stack=True),) if found.rows else ()
    return Section(name="numerics", title="Numerics", items=items, lead=(_NUMERICS,))


def _cost(result: Result) -> Section:
    took = f" All of this took {words.duration(result.tuning_s)}." if words.known(result.tuning_s) else ""
    kept = f" Isolation of the trials: {result.isolation}." if result.isolation else ""
    run = words.nearby(Path(result.run)) if result.run else ""
    there = (
        f" The samples lie in `{run}`: `result.json` and the traces beside it; `flatout report {run}` shows this again."
        if run
        else ""
    )
    lists = (("Trials would have written: ", "file", result.written), ("Refused: ", "write", result.refused))
    items = [
        Listing(label="", entries=tuple(f"`{name}`" for name in names), title=lead + words.plural(len(names), noun),
                on="page")
        for lead, noun, names in lists
        if names
    ]  # fmt: skip
    return Section(
        name="cost",
        title="What it cost, and how to check it",
        items=(*items, *evidence.evidence(result)),
        lead=(f"How each number was obtained, and the command that obtains it again.{took}{kept}{there}",),
    )


def machine_rows(here: Machine) -> list[tuple[str, str]]:
    """What a page says of the machine."""
    accelerators = ", ".join(f"{a.name} ({words.memory(a.memory_bytes)})" for a in here.accelerators)
    return [
        ("machine", here.hostname),
        ("processor", here.cpu),
        ("cores", f"{here.num_cores} usable of {here.num_cores_total}"),
        ("features", " ".join(here.cpu_features)),
        ("GPU", accelerators),
        ("memory", words.memory(here.memory_bytes)),
        ("system", here.operating_system),
    ]


def _machine(result: Result) -> tuple[tuple[str, str], ...]:
    header = result.header
    rows = [
        *machine_rows(result.machine),
        ("trained on", result.facts.device),
        ("threads", words.count(result.facts.num_threads)),
        ("ranks", words.count(header.world_size) if header.world_size > 1 else ""),
        ("framework", f"{words.label_of(header.framework)} {header.framework_version}".strip()),
        ("Python", header.python),
        ("flatout", result.flatout),
        ("typed", f"{header.script} {' '.join(header.arguments)}".strip()),
        ("isolation of trials", result.isolation),
    ]
    return tuple((name, value) for name, value in rows if value)
