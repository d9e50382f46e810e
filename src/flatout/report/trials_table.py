"""What was tried, as a table on a terminal: one line a trial, more of it with `--verbose`.

In: a `Result`. Out: lines on a `Screen`.
"""

from __future__ import annotations

import itertools

from rich.cells import cell_len

from flatout.judge.result import NOT_NAMED, Result
from flatout.report import energy, words
from flatout.report.screen import Screen
from flatout.report.tried import ASCII_MARKS, MARKS, Mark, Row, brief, ends, nothing_tried, reasons, rows

MOST_ROWS = 7
"""Trials on one screen; `--verbose` shows all."""

MOST_LINES = 2
"""Lines about what was not tried, on one screen."""

REMARK_LINES = 3
"""Lines of what is said of one trial."""

_STYLES: dict[Mark, str] = {"yes": "green", "even": "yellow", "no": "dim", "never": "red"}


def show_trials(screen: Screen, result: Result, *, verbose: bool) -> None:
    """The trials, and what was not tried."""
    if not result.trials:
        screen.say("tried", f"nothing: {nothing_tried(result)}")
    else:
        _table(screen, result, verbose=verbose)
    _untried(screen, result, verbose=verbose)


def _table(screen: Screen, result: Result, *, verbose: bool) -> None:
    shown = rows(result, None if verbose else MOST_ROWS)
    cells = _label_cells(screen, shown)
    title = f"tried {words.plural(len(result.trials), 'candidate')} in {words.duration(result.trials_s)}"
    if len(title) > cells + 3:
        title = f"tried {len(result.trials):,} in {words.duration(result.trials_s)}"
    screen.row((f"{title:<{cells + 5}}ratio  {'95 %':<12}  numerics", "bold"))
    for row in shown:
        whole = _row(screen, row, cells, verbose=verbose)
        if verbose:
            _details(screen, row, whole=whole)
    hidden = len(result.trials) - len(shown)
    if hidden:
        screen.row(f"  {hidden} more: --verbose")


def _label_cells(screen: Screen, shown: tuple[Row, ...]) -> int:
    """Columns for the levers: what they need, within what leaves the numerics room."""
    needed = max((2 * row.depth + len(row.words) for row in shown), default=0)
    return min(max(needed, 22), 26 + (screen.width - 80) // 2)


def _row(screen: Screen, row: Row, cells: int, *, verbose: bool) -> bool:
    """One line a trial, a few where its levers need them; returns whether all of its remark is there."""
    indent = 2 * row.depth
    first, *more = screen.folded(row.words, cells - indent)
    marks = ASCII_MARKS if screen.ascii_only else MARKS
    head = ("▸ " if row.chosen else "  ", "bold")
    style = "bold" if row.chosen else ""
    numbers = f" {words.ratio(row.trial.ratio):>5}  {ends(row.trial) or words.plural(row.trial.num_pairs, 'pair'):<12}"
    if not words.known(row.trial.ratio):
        numbers = ""
    room = screen.width - cells - 6 - len(numbers)
    remark, whole = _remark(screen, row, room, 1 if verbose else REMARK_LINES)
    screen.row(
        head,
        (" " * indent + screen.fit(first, cells - indent), style),
        " ",
        (marks[row.mark], _STYLES[row.mark]),
        numbers,
        f"  {remark[0]}",
    )
    for levers, rest in itertools.zip_longest(more[:2], remark[1:], fillvalue=""):
        name = screen.fit(f"{' ' * (indent + 2)}{levers}" if levers else "", cells + 2)
        screen.row((f"  {name}", style), " " * (2 + len(numbers)), rest)
    return whole


def _remark(screen: Screen, row: Row, room: int, most: int) -> tuple[list[str], bool]:
    """A remark in at most so many lines of so many columns, and whether it is all of it.

    Numbers of numerics lose their last clauses, which `--verbose` has; a reason is only put in fewer words.
    """
    if cell_len(screen.clean(row.remark)) <= room:
        return [screen.clean(row.remark)], True
    text = brief(row.trial)
    if row.trial.agreement in ("agrees", "disagrees"):
        text = _clause(text, room)
    lines = screen.folded(text, room)
    if len(lines) > most:
        lines = [*lines[: most - 1], screen.ended(lines[most - 1], room)]
    return lines, False


def _clause(text: str, room: int) -> str:
    """Text without the last of its clauses, where that makes it fit."""
    while len(text) > room and (cut := max(text.rfind("; "), text.rfind(", "))) > room // 2:
        text = text[:cut]
    return text


def _details(screen: Screen, row: Row, *, whole: bool) -> None:
    trial = row.trial
    parts = [f"took {words.duration(trial.took_s)}"]
    if trial.num_pairs:
        parts.append(words.plural(trial.num_pairs, "pair"))
    if trial.num_discarded:
        parts.append(f"{words.plural(trial.num_discarded, 'pair')} discarded")
    if trial.engage_s >= 0.05:
        parts.append(f"engaging it took {words.duration(trial.engage_s)}")
    if trial.peak_memory_bytes is not None:
        beside = trial.baseline_peak_memory_bytes
        plain = f" (plain {words.memory(beside)})" if beside is not None else ""
        parts.append(f"memory {words.memory(trial.peak_memory_bytes)}{plain}")
    if used := energy.of_trial(trial):
        parts.append(used)
    for text in ("" if whole else row.remark, _numerics(row), "; ".join(parts)):
        if text:
            screen.say("", (text, "dim"), indent=6)
    for lever, proof in trial.evidence.items():
        screen.say("", (f"{lever}: {proof}", "dim"), indent=6)


def _numerics(row: Row) -> str:
    detail = row.trial.agreement_detail
    return f"{row.trial.agreement}: {detail}" if detail and detail not in row.remark else ""


def _untried(screen: Screen, result: Result, *, verbose: bool) -> None:
    if not result.untried:
        return
    groups = reasons(result.untried)
    if verbose:
        for number, (reason, levers) in enumerate(groups):
            screen.say("  not tried:" if number == 0 else "", f"{', '.join(levers)} ({reason})", indent=13)
        return
    room = MOST_LINES * (screen.width - 13) - len("and 00 more: --verbose") - 4
    shown: list[str] = []
    left = sum(len(levers) for _, levers in groups)
    for reason, levers in sorted(groups, key=lambda group: (group[0] == NOT_NAMED, len(group[0]))):
        text = f"{', '.join(levers)} ({reason})"
        if sum(len(one) + 2 for one in shown) + len(text) > room:
            break
        shown.append(text)
        left -= len(levers)
    if left:
        shown.append(f"{left} more: --verbose")
    screen.say("  not tried:", ", ".join(shown), indent=13)
