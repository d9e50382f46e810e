"""What does a terminal show of the steps of ranks? Each phase on each rank, and who waits for whom.

In: a `RankAnatomy`. Out: lines; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flatout.judge.rank_steps import COMMUNICATION, RankAnatomy
from flatout.report import words
from flatout.report.screen import Report, Screen

MOST_RANKS = 4
"""So many ranks have a column of their own; of more, the least and the most are shown."""

NAME = 16
COLUMN = 16


def rank_anatomy(found: RankAnatomy, *, page: Path | str | None = None) -> Report:
    """What `flatout why --ranks` prints; `page` is where its page was written."""
    return Report(lambda screen: _compose(screen, found, page))


def _compose(screen: Screen, found: RankAnatomy, page: Path | str | None) -> None:
    framework = words.framework(found.framework, found.framework_version)
    where = words.plural(found.machine.num_cores, "CPU core")
    if found.machine.accelerators:
        where = words.plural(len(found.machine.accelerators), "GPU")
    screen.say(
        "", (found.script, "bold"), f" · {framework} · {where} · {found.num_ranks} ranks, {found.mode}", indent=0
    )
    screen.blank()
    one = found.ranks[0]
    num_steps, num_windows = words.plural(one.num_steps, "step"), words.plural(one.num_windows, "window")
    steps = f"of the slowest rank, the mean of {num_steps} in {num_windows}"
    screen.say("step", (words.seconds(found.step_s), "bold"), f"  ({steps}, after {found.num_left_out})")
    screen.blank()
    heads, columns = _columns(found)
    screen.row((f"  {'phase':<{NAME}}" + "".join(f"{head:>{COLUMN}}" for head in heads), "bold"))
    for name in found.phases:
        line = f"  {name:<{NAME}}" + "".join(f"{text:>{COLUMN}}" for text in columns(name))
        screen.row((line, "bold" if name == COMMUNICATION else ""))
    screen.blank()
    head, rest = verdict(found)
    screen.say("result", (head, "bold"), rest)
    if found.kinds:
        kinds = ", ".join(f"{kind} {words.percent(share)}" for kind, share in list(found.kinds.items())[:4])
        screen.say("exchanges", f"{kinds} of the whole run, with its calls that are computed both ways")
    if found.peak_memory_bytes is not None:
        screen.say("memory", f"up to {words.memory(found.peak_memory_bytes)} held by a rank")
    screen.say("cost", f"{words.duration(found.took_s)}, 2 runs of the script's beginning")
    if page is not None:
        screen.command("report", str(words.nearby(Path(page))))
    screen.command("next", *next_command(found))


def next_command(found: RankAnatomy) -> tuple[str, str]:
    """What to type next: the command with its options, and the script as it was typed."""
    return ("flatout tune" if found.is_launched else f"flatout tune --ranks {found.num_ranks}"), found.typed


def _columns(found: RankAnatomy) -> tuple[list[str], Callable[[str], list[str]]]:
    """Heads of columns, and what stands in them for a phase."""
    if found.num_ranks <= MOST_RANKS:
        heads = [f"rank {rank}" for rank in range(found.num_ranks)]

        def each(name: str) -> list[str]:
            pairs = zip(found.seconds(name), found.shares(name), strict=True)
            return [f"{words.seconds(s)} {words.percent(share):>5}" for s, share in pairs]

        return heads, each

    def ends(name: str) -> list[str]:
        seconds, shares = found.seconds(name), found.shares(name)
        return [f"{words.seconds(f(seconds))} {words.percent(f(shares)):>5}" for f in (min, max)]

    return ["least of ranks", "most of ranks"], ends


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
