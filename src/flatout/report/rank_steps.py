"""What is shown of the steps of ranks? Each phase on each rank, and who waits for whom.

In: a `RankAnatomy`. Out: a `View`.
"""

from __future__ import annotations

from dataclasses import replace

from flatout import __version__
from flatout.judge.rank_steps import COMMUNICATION, RankAnatomy
from flatout.report import figures, words
from flatout.report.table import NOTHING, Table, folded, shown, table
from flatout.report.tuning import machine_rows
from flatout.report.view import Evidence, Figure, Item, Pairs, Row, Section, View

MOST_RANKS = 4
"""So many ranks have a column of their own on a terminal; of more, the least and the most are shown."""

MOST_BARS = 8
"""So many ranks have a bar; of more those with the shortest and the longest step."""

STEP = "raw-step"

_LAUNCHED = (
    "What ranks exchange is within forward and backward pass: the script's own wrappers do it. A rank whose own parts "
    "are longer has the others wait in these."
)
_DIVIDED = (
    "Communication is what a rank waited for while it computed nothing. A rank with little of it is the one that the "
    "others wait for."
)


def view(found: RankAnatomy) -> View:
    """What `flatout why` found of ranks."""
    number, unit = _headline(found)
    head, rest = verdict(found)
    return View(
        command="flatout why",
        title=found.script,
        context=_context(found),
        number=number,
        unit=unit,
        sentence=f"on {words.plural(found.num_ranks, 'rank')}, {found.mode}: {head}{rest}.",
        source=STEP,
        verdict=tuple(_verdict(found)),
        sections=(
            Section(name="measured", items=(_step_row(found),)),
            _step(found),
            _cost(found),
            _machine(found),
        ),
        next=next_command(found),
        created=found.created,
        version=__version__,
    )


def _context(found: RankAnatomy) -> tuple[str, ...]:
    machine = found.machine
    where = words.plural(machine.num_cores, "CPU core")
    if machine.accelerators:
        where = words.plural(len(machine.accelerators), "GPU")
    framework = words.framework(found.framework, found.framework_version)
    return framework, where, f"{found.num_ranks} ranks, {found.mode}"


def _headline(found: RankAnatomy) -> tuple[str, str]:
    """The one number, and what it is a number of."""
    if found.is_launched:
        return words.seconds(found.step_s), f"a step of {words.plural(found.num_ranks, 'rank')}"
    least = words.percent(min(found.shares(COMMUNICATION)))
    return least, "of the step, on the rank with the least, in communication that nothing hides"


def _step_row(found: RankAnatomy) -> Row:
    aside = f"  (of the slowest rank, the mean of {_steps(found)}, after {found.num_left_out})"
    return Row(label="step", value=words.seconds(found.step_s), aside=aside, on="screen")


def _steps(found: RankAnatomy) -> str:
    one = found.ranks[0]
    return f"{words.plural(one.num_steps, 'step')} in {words.plural(one.num_windows, 'window')}"


def _verdict(found: RankAnatomy) -> list[Item]:
    head, rest = verdict(found)
    left_out = words.plural(found.num_left_out, "step")
    rows: list[Item] = [
        Row(label="result", value=head, note=rest),
        Row(label="step", note=f"the mean of {_steps(found)} on each rank, after {left_out} that do not count",
            on="page"),
    ]  # fmt: skip
    if found.kinds:
        kinds = ", ".join(f"{kind} {words.percent(share)}" for kind, share in list(found.kinds.items())[:4])
        note = f"{kinds} of the whole run, with its calls that are computed both ways"
        rows.append(Row(label="exchanges", note=note, on="both"))
    if found.peak_memory_bytes is not None:
        rows.append(Row(label="memory", note=f"up to {words.memory(found.peak_memory_bytes)} held by a rank"))
    rows.append(Row(label="cost", note=f"{words.duration(found.took_s)}, 2 runs of the script's beginning"))
    return rows


def _step(found: RankAnatomy) -> Section:
    table_ = phases(found)
    bars = [(f"rank {rank}", found.ranks[rank]) for rank in _drawn(found)]
    drawing = figures.stacked(bars)
    items: list[Item] = [replace(table_, on="screen" if drawing is not None else "both")]
    if drawing is not None:
        caption = (
            f"Each bar is the step of one rank, cut by what it did. {_LAUNCHED if found.is_launched else _DIVIDED}"
        )
        legend = tuple((figures.phase_colour(name), "", name, "") for name in found.phases)
        items.append(Figure(drawing=drawing, caption=caption, legend=legend, tables=(folded(table_, "The numbers"),)))
    return Section(name="step", title="Where the step of each rank goes", items=tuple(items))


def _drawn(found: RankAnatomy) -> list[int]:
    if found.num_ranks <= MOST_BARS:
        return list(range(found.num_ranks))
    by_length = sorted(range(found.num_ranks), key=lambda rank: found.ranks[rank].step_s)
    return sorted({by_length[0], by_length[-1]})


def phases(found: RankAnatomy) -> Table:
    """Every phase on every rank, in seconds and as a share of its step; a terminal shows the ends of many ranks."""
    ranks = range(found.num_ranks)
    rows = []
    for name in found.phases:
        pairs = list(zip(found.seconds(name), found.shares(name), strict=True))
        ends = [(min(column), max(column)) for column in zip(*pairs, strict=True)]
        cells = [*zip(*ends, strict=True), *pairs]
        rows.append((name, *(f"{words.seconds(s)} {words.percent(share):>5}" for s, share in cells)))
    head = ("phase", "least of ranks", "most of ranks", *(f"rank {rank}" for rank in ranks))
    columns = range(3, 3 + found.num_ranks) if found.num_ranks <= MOST_RANKS else range(1, 3)
    return shown(table("Time of a step by phase and rank", head, rows), (0, *columns, NOTHING))


def _cost(found: RankAnatomy) -> Section:
    lead = (
        f"2 runs of the script's beginning in {words.duration(found.took_s)}. Timing the parts of steps costs time "
        "itself. All of the numbers are in `rank-anatomy.json`."
    )
    options = "" if found.is_launched else f"--ranks {found.num_ranks} --mode {found.mode} "
    behind = Evidence(
        anchor=STEP, title="Step of each rank", how=f"the mean of {_steps(found)}",
        command=f"flatout why {options}{found.typed}",
    )  # fmt: skip
    return Section(name="cost", title="What it cost, and how to check it", items=(behind,), lead=(lead,))


def _machine(found: RankAnatomy) -> Section:
    framework = ("framework", f"{words.label_of(found.framework)} {found.framework_version}")
    pairs = tuple((name, value) for name, value in (*machine_rows(found.machine), framework) if value)
    return Section(name="machine", title="Machine and versions", items=(Pairs(pairs=pairs),))


def next_command(found: RankAnatomy) -> tuple[str, str]:
    """What to type next: the command with its options, and the script as it was typed."""
    return ("flatout tune" if found.is_launched else f"flatout tune --ranks {found.num_ranks}"), found.typed


def verdict(found: RankAnatomy) -> tuple[str, str]:
    """What it comes to: its head, and the rest of the sentence."""
    if found.is_launched:
        return _launched(found)
    shares, rank = found.shares(COMMUNICATION), found.waited_for
    if rank is not None:
        longer = found.longer_there
        why = f": its {longer} takes longer than theirs" if longer is not None else ""
        return f"rank {rank} is waited for", f"{why} (communication {_range(shares)} of the step)"
    share = _range(shares)
    if min(shares) == max(min(found.shares(name)) for name in found.phases):
        return "communication", f" takes more of the step than any other phase: {share} on every rank"
    return _longest(
        found
    ), f" takes more of the step than any other phase; communication that nothing hides takes {share}"


def _launched(found: RankAnatomy) -> tuple[str, str]:
    """Of ranks that exchange by themselves, which is not told apart from what they do meanwhile."""
    if (uneven := found.uneven) is not None:
        rank, name = uneven
        return f"rank {rank} is slower", f": its {name} takes longer than that of the others"
    return _longest(found), " takes more of the step than any other phase; what ranks exchange is within these phases"


def _longest(found: RankAnatomy) -> str:
    return next((name for name in found.phases if name not in ("unattributed", COMMUNICATION)), "")


def _range(shares: list[float]) -> str:
    low, high = words.percent(min(shares)), words.percent(max(shares))
    return low if low == high else f"{low} to {high}"
