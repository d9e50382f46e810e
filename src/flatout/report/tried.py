"""Which trials are shown, in which order, and what is said of each?

In: a `Result`. Out: rows in the order of a tree, where a set of levers stands below the set that it extends, so that
a long combination reads as `+ bf16`; the terminal's table and the page's figure show the same rows. And what else the
section on trials has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flatout.judge.result import BRINGS, NOT_NAMED, Result
from flatout.judge.stats import MIN_PAIRS
from flatout.records.plan import Candidate, Trial, label
from flatout.report import words
from flatout.report.table import Look, Mark, Table, shown, table
from flatout.report.view import Listing, Pairs
from flatout.report.words import interval, known, percent, plural, ratio

MOST_ROWS = 7
"""Trials on one screen; `--verbose` shows all."""

MOST_REASONS = 3
"""Reasons for which no candidate could be used, in one sentence."""

NOISY = 0.25
"""Where plain windows spread by more than this fraction, the phases' shares and bounds are as uncertain."""


_SHORTER = (
    ("gradient error", "error"),
    ("items and random streams equal", "items equal"),
    (" pairs of windows that are needed", " pairs needed"),
    (" under many sets", ""),
    ("not sure enough: ", "not sure: "),
)
"""How a narrow column says what elsewhere has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One trial as it is shown.

    Attributes:
        trial: What was measured.
        depth: How many rows above it are extended by it.
        words: Its levers; those of the row that it extends are left out.
        mark: Its verdict.
        chosen: Whether the plan consists of it.
        minor: Whether it is shown only where everything is asked for.
    """

    trial: Trial
    depth: int
    words: str
    mark: Mark
    chosen: bool
    minor: bool = False


def rows(result: Result) -> tuple[Shown, ...]:
    """The trials as a tree; all but the chosen one, the fastest, disagreements and what these extend are minor."""
    trials = result.trials
    parents = [_parent(trials, number) for number in range(len(trials))]
    weighty, again = _weighty(result, parents), result.remeasured
    found: list[Shown] = []

    def descend(parent: int | None, depth: int) -> None:
        for number, trial in enumerate(trials):
            if parents[number] == parent:
                above = None if parent is None else trials[parent]
                added = {n: s for n, s in trial.levers.items() if above is None or n not in above.levers}
                found.append(
                    Shown(
                        trial=trial,
                        depth=depth,
                        words=label(added) if above is None else f"+ {label(added)}",
                        mark=mark(again if again is not None and again.levers == trial.levers else trial),
                        chosen=_is_chosen(result, trial),
                        minor=number not in weighty,
                    )
                )
                descend(number, depth + 1)

    descend(None, 0)
    return tuple(found)


def best(result: Result) -> Trial | None:
    """The trial with the highest ratio; the one that was measured again where there is one."""
    if result.remeasured is not None and known(result.remeasured.ratio):
        return result.remeasured
    measured = [t for t in result.trials if known(t.ratio) and t.outcome not in ("disagrees", "failed")]
    return max(measured, key=lambda t: t.ratio or 0.0, default=None)


def ends(trial: Trial) -> str:
    """Both ends of a trial's interval; nothing of so few pairs that they say how large and not how sure.

    >>> ends(Trial(levers={}, outcome="faster", ratio=1.3, ratio_low=1.28, ratio_high=1.32, num_pairs=9))
    '[1.28, 1.32]'
    >>> ends(Trial(levers={}, outcome="inconclusive", ratio=1.28, ratio_low=1.25, ratio_high=1.31, num_pairs=2))
    ''
    """
    too_few = trial.num_pairs < MIN_PAIRS and trial.outcome != "screened"
    return "" if too_few else interval(trial.ratio_low, trial.ratio_high)


def against_itself(result: Result) -> tuple[str, str]:
    """What measuring plain as if it were a candidate came to: the verdict, and the rest of the sentence."""
    found = result.remeasured
    assert found is not None
    if not known(found.ratio):
        return "inconclusive", f": plain against itself could not be measured: {found.reason or 'nothing was seen'}"
    measured = f"plain against itself {ratio(found.ratio)}x {ends(found)}".rstrip()
    if found.outcome in ("faster", "slower"):
        return "a false alarm", f": {measured}, called {found.outcome}; one such run in a hundred may be"
    reason = f": {found.reason}" if found.reason else ", as it should be"
    return found.outcome, f": {measured} when measured as if it were the best candidate{reason}"


def warnings(result: Result) -> tuple[str, ...]:
    """What the reader must know, also how noisy it was and that the winner's two measurements exclude each other."""
    said = list(result.warnings)
    if result.baseline_spread_fraction > NOISY:
        spread = result.baseline_spread_fraction
        varied = f"varied by ± {percent(spread)}" if spread <= 1 else "varied by more than a step takes"
        said.append(f"plain steps {varied}: what binds may read otherwise on a quieter machine")
    found = next((trial for trial in result.trials if _is_chosen(result, trial)), None)
    again = result.winner if result.launched is None else None  # all ranks of a launcher are not one of them
    exclude = (
        found is not None and again is not None and found.num_pairs and ends(found) and ends(again)
        and max(found.ratio_low or 0.0, again.ratio_low or 0.0) > min(found.ratio_high or 0.0, again.ratio_high or 0.0)
    )  # fmt: skip
    if found is not None and exclude:
        said.append(
            f"the search had measured {ratio(found.ratio)}x {ends(found)} for the same "
            "levers: the machine changed between the two, and each holds for its own minutes"
        )
    return tuple(said)


def input_reached(result: Result) -> str:
    """What free data would bring at most, beside what the levers for the input brought; empty without both."""
    bound = next((b for b in result.diagnosis.bounds if b.remedy == "free data"), None)
    found = result.input_trial
    if bound is None or found is None or not known(found.ratio) or not known(bound.ratio) or bound.ratio <= 1:
        return ""
    won = percent(min(1.0, max(0.0, (1 - 1 / found.ratio) / (1 - 1 / bound.ratio))))  # above 1 is the noise of both
    most = f"{ratio(bound.ratio)}x {interval(bound.low, bound.high)}".rstrip()
    gain = f"{ratio(found.ratio)}x {ends(found)}".rstrip()
    if ends(found) and (found.ratio_low or 0.0) <= 1:
        return f"free data would bring {most}; no lever for it is known to bring anything"
    if ends(found) and (found.ratio_low or 0.0) > bound.high:
        return f"`{found.label}` brings {gain}, more than free data at most: {most}; the two contradict each other"
    return f"free data would bring {most}, `{found.label}` brings {gain}: {won} of the time that waiting for data takes"


def nothing_tried(result: Result) -> str:
    """Why there is no trial at all."""
    if result.stopped:
        return f"no lever could be tried: {result.stopped}"
    if "--levers none" in result.options:
        return "no lever was to be tried"
    return "no lever was worth trying here"


def nothing_usable(result: Result) -> str:
    """What became of the candidates where none of them has a ratio that counts."""
    if not result.trials:
        return "no candidate was measured"
    found: dict[str, list[str]] = {}
    for trial in result.trials:
        found.setdefault(remark(trial), []).append(trial.label)
    parts = [reason if len(found) == 1 else f"{reason} ({', '.join(names)})" for reason, names in found.items()]
    more = f"; {len(parts) - MOST_REASONS} more reasons" if len(parts) > MOST_REASONS else ""
    head = "the one candidate" if len(result.trials) == 1 else f"none of {plural(len(result.trials), 'candidate')}"
    verb = "could not be used" if len(result.trials) == 1 else "could be used"
    return f"{head} {verb}: {'; '.join(parts[:MOST_REASONS])}{more}"


def remark(trial: Trial) -> str:
    """The numerics of a trial that could be kept, or else why it could not; without a full stop.

    >>> remark(Trial(levers={}, outcome="faster", agreement="agrees", agreement_detail="changes no number"))
    'exact: changes no number'
    >>> remark(Trial(levers={}, outcome="slower"))
    'slower'
    """
    head: str = trial.outcome
    rest = trial.reason
    if trial.outcome == "faster":
        is_open = trial.agreement == "inconclusive"
        head = "numerics inconclusive" if is_open else trial.class_
        rest = trial.agreement_detail or ("" if is_open else "not compared")
    elif trial.outcome == "disagrees":
        rest = trial.agreement_detail or trial.reason
    elif trial.outcome == "screened" and trial.agreement_detail:
        head, rest = trial.class_, trial.agreement_detail
    elif trial.outcome == "screened":
        return f"screened in {plural(trial.num_windows, 'window')} under many sets"
    elif trial.outcome not in ("failed", "ruled out", "slower"):
        return (rest or head).removesuffix(".")
    return f"{head}: {rest}".removesuffix(": ").removesuffix(".")  # messages of exceptions may have a full stop


def brief(trial: Trial) -> str:
    """The same in few words, for a narrow column that stands beside the mark.

    >>> brief(Trial(levers={}, outcome="faster", class_="rounding", agreement="agrees",
    ...             agreement_detail="gradient error 2.1e-07, noise 0.7; update error 2.1e-07"))
    'rounding: error 2.1e-07'
    """
    text = remark(trial).removeprefix("disagrees: ")
    for long, short in _SHORTER:
        text = text.replace(long, short)
    told = trial.outcome in ("faster", "disagrees") and trial.agreement in ("agrees", "disagrees")
    return text.partition(", ")[0].partition("; ")[0] if told else text


def mark(trial: Trial) -> Mark:
    """What a trial's verdict looks like: only what pairs have shown is a success, with numbers that were compared."""
    if trial.outcome == "faster":
        return "even" if trial.agreement == "inconclusive" else "yes"
    if trial.outcome == "screened" and (trial.ratio_high or 9.0) < 1:
        return "no"
    if trial.outcome in ("no difference", "inconclusive", "screened"):
        return "even"
    return "never" if trial.outcome == "disagrees" else "no"


def _weighty(result: Result, parents: Sequence[int | None]) -> set[int]:
    """Numbers of the trials that fit one screen, with those that they extend."""
    trials = result.trials

    def weight(number: int) -> tuple[bool, bool, float]:
        trial = trials[number]
        return (_is_chosen(result, trial), trial.outcome == "disagrees", _speed(trial) or 1.0)

    found: set[int] = set()
    for number in sorted(range(len(trials)), key=weight, reverse=True):
        path, at = [], number
        while at is not None and at not in found:
            path.append(at)
            at = parents[at]  # type: ignore[assignment]
        if len(found) + len(path) <= MOST_ROWS:
            found.update(path)
    return found


def _parent(trials: Sequence[Trial], number: int) -> int | None:
    """The largest set that this one extends, among equals the fastest; None where it stands for itself."""
    own = dict(trials[number].levers)
    largest: tuple[int, float] = (0, 0.0)
    found = None
    for other, trial in enumerate(trials):
        size = len(trial.levers)
        extends = size < len(own) and all(own.get(n) == s and n in own for n, s in trial.levers.items())
        if extends and (size, _speed(trial)) > largest:
            largest, found = (size, _speed(trial)), other
    return found


def _speed(trial: Trial) -> float:
    return trial.ratio if trial.ratio is not None and known(trial.ratio) else 0.0


def _as_kept(row: Shown) -> Trial:
    """The trial of a row; of the plan's, which was measured again after its pairs, what its numerics are."""
    return replace(row.trial, outcome="faster") if row.chosen else row.trial


def _is_chosen(result: Result, trial: Trial) -> bool:
    if result.plan is None:
        return False
    return Candidate(levers=trial.levers).key == Candidate(levers=result.plan.levers).key


# -- the section -------------------------------------------------------------------------------------------------------


def on_screen(result: Result) -> Table:
    """One line a trial, more of it where everything is asked for."""
    found = rows(result)
    title = f"tried {len(result.trials):,} in {words.duration(result.trials_s)}"
    cells = [
        (row.words, ratio(row.trial.ratio), ends(row.trial) or plural(row.trial.num_pairs, "pair"), remark(row.trial))
        if known(row.trial.ratio)
        else (row.words, "", "", remark(row.trial))
        for row in found
    ]
    looks = [
        Look(depth=row.depth, mark=row.mark, chosen=row.chosen, brief=brief(_as_kept(row)), notes=_notes(row),
             minor=row.minor)
        for row in found
    ]  # fmt: skip
    named = replace(table(title, (title, "ratio", "95 %", "numerics"), cells), rows=tuple(cells))
    return shown(named, range(4), looks, on="screen")


def _notes(row: Shown) -> tuple[str, ...]:
    trial = row.trial
    detail = trial.agreement_detail
    numerics = f"{trial.agreement}: {detail}" if detail and detail not in remark(trial) else ""
    parts = [f"took {words.duration(trial.took_s)}"]
    if trial.num_pairs:
        parts.append(plural(trial.num_pairs, "pair"))
    if trial.num_discarded:
        parts.append(f"{plural(trial.num_discarded, 'pair')} discarded")
    if trial.engage_s >= 0.05:
        parts.append(f"engaging it took {words.duration(trial.engage_s)}")
    if trial.peak_memory_bytes is not None:
        beside = trial.baseline_peak_memory_bytes
        plain = f" (plain {words.memory(beside)})" if beside is not None else ""
        parts.append(f"memory {words.memory(trial.peak_memory_bytes)}{plain}")
    proofs = [f"{lever}: {proof}" for lever, proof in trial.evidence.items()]
    return tuple(filter(None, (numerics, "; ".join(parts), *proofs)))


def left_out(result: Result) -> list[Listing | Pairs]:
    """Trials without a ratio, and levers that were not tried, with the reason of each."""
    unmeasured = tuple((trial.label, remark(trial)) for trial in result.trials if not known(trial.ratio))
    levers_by_reason: dict[str, list[str]] = {}  # each reason once with all levers that it holds for
    for one in result.untried:
        levers_by_reason.setdefault(one.reason, []).append(one.lever)
    groups = [(reason, tuple(dict.fromkeys(levers))) for reason, levers in levers_by_reason.items()]
    found: list[Listing | Pairs] = []
    if unmeasured:
        found.append(Pairs(title="Without a ratio", pairs=unmeasured, code=True))
    if groups:
        short = sorted(groups, key=lambda group: (BRINGS not in group[0], group[0] == NOT_NAMED, len(group[0])))
        names = tuple(f"{', '.join(levers)} ({reason})" for reason, levers in short)
        found.append(Listing(label="  not tried:", entries=names, on="screen"))
        pairs = tuple((", ".join(levers), reason) for reason, levers in groups)
        found.append(Pairs(title="Not tried", pairs=pairs, code=True))
    return found
