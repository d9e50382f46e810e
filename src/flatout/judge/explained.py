"""How is a diagnosis said? The sentence, the measurements that say so, and what the reader must know.

In: `Findings` and what binds. Out: lines for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flatout.judge import stats
from flatout.judge.causes import OF_THE_MODEL, WORTHWHILE, nearly_as_large
from flatout.judge.findings import Findings, fixed_share, phase_s, without

COUNTED_TWICE = 0.01
"""Phases that exceed the step by more than this share of it are an error of ours, and said."""

WORTH_A_PLACE = 0.05
"""A line of the script is named from this share of the step on."""

MAY_BE = "perhaps another thread of the script holds the interpreter, or others used the machine"
"""Why the step may take another time when it is looked at."""

HIDDEN = 0.05
"""From this share on it is said what may hide in the time that no phase explains."""

MODELS_TIME = "the model's own time"

PARTS = {
    "storage": "items wait for reads: a disk, a network",
    "decode": "images, sound or archives are decoded",
    "transform": "the items' own code computes",
    "collate": "items are put together into batches",
    "worker start-up": "workers are started and ended at every epoch",
}


def contradictions(found: Findings) -> list[str]:
    """Measurements of the same thing that differ by more than a cause must be worth to be named, and why perhaps."""
    lines = [
        f"a step takes {_step(account.plain_s)} in plain windows and {_step(account.other_s)} where it is {looked}"
        for looked, account in found.accounts.items()
        if account.is_open(WORTHWHILE)
    ]
    lines += [MAY_BE] if lines else []
    twice = -(found.anatomy.share("unattributed") or 0.0)
    if twice > WORTHWHILE - 1:  # in the same windows: no noise
        lines.append(f"the phases sum to {percent(twice)} more than the step: something was counted twice")
    return lines


def _step(seen_s: Sequence[float]) -> str:
    """Seconds of a step, and half the interquartile range between windows, where there are several."""
    found = stats.summarize(seen_s)
    step = f"{found.median:.3g} s" if found.median >= 1 else f"{1e3 * found.median:.3g} ms"
    return f"{step} ± {percent(found.spread_fraction)}" if found.num > 1 else f"{step} (one window)"


def sentence(binding: str, parts: Sequence[str], found: Findings) -> str:
    """What binds, in one sentence."""
    workers = max((loader.num_workers for loader in found.facts.loaders), default=0)
    by = f"by {workers} workers that do not keep up" if workers else "item by item in the training process"
    mostly = f"; mostly {' and '.join(parts)}: {'; '.join(PARTS[part] for part in parts)}" if parts else ""
    threads = f"{found.facts.num_threads} threads on {found.num_cores} cores"
    sentences = {
        "input": f"input: batches are built {by} while the model waits{mostly}",
        "compute": "compute: the time goes into the model's own operations, forward and backward",
        "memory bandwidth": "memory bandwidth: the time goes into operations that move more than they compute",
        "launch overhead": "launch overhead: many small operations, whose starting costs more than their work",
        "host synchronisation": "host synchronisation: the program waits for single values from the device",
        "thread oversubscription": f"thread oversubscription: {threads}",
        "optimizer": "optimizer: the update costs more than the model",
        "checkpoints": "checkpoints: training waits while the model is saved",
        "garbage collection": "garbage collection: Python looks for cycles among many objects",
        "logging": "logging: training waits while the script prints, logs or serialises",
        "paging": "paging: memory does not suffice, and pages are read from a disk again and again",
        "slow steps": _slow(found),
        "own code": "own code: the time goes into the script's lines between the parts of a step",
        "nothing": _nothing(found),
    }
    return sentences[binding]


def _slow(found: Findings) -> str:
    slow = found.slow_steps
    if slow is None:
        return "slow steps: some take far longer than the usual one"
    where = f", mostly in {slow.phase}" if slow.phase else ""
    return f"slow steps: one in {slow.every:.0f} takes {slow.times:.1f} times as long as the usual one{where}"


def _nothing(found: Findings) -> str:
    """No cause that is known; a large part that belongs to none of them is said."""
    name, seconds = max(found.anatomy.phases_s.items(), key=lambda item: item[1], default=("", 0.0))
    if without(seconds, found) < WORTHWHILE:
        return "nothing: no single cause, freed entirely, would bring 10 %"
    share = f"{percent(seconds / found.anatomy.step_s)} of the step"
    if name == "unattributed":
        return f"nothing that can be named: {share} lies outside every phase that was seen"
    return f"nothing that can be named: {share} is `{name}`"


def beside(binding: str, also: Sequence[str], worth: Mapping[str, float]) -> list[str]:
    """The same causes in a few words, to stand behind the sentence that names what binds."""
    found = []
    for said, nearly in (("nearly", True), ("perhaps", False)):
        names = [name for name in also if nearly_as_large(worth[name], worth[binding]) == nearly]
        if names:
            found.append(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {said} as large")
    return found


def ties(binding: str, also: Sequence[str], worth: Mapping[str, float]) -> list[str]:
    """Causes that are nearly as large as what binds, or whose intervals leave open which is larger."""
    lines = []
    for name in also:
        near = "is nearly" if nearly_as_large(worth[name], worth[binding]) else "may be"
        this = MODELS_TIME if name in OF_THE_MODEL else "it"
        that = MODELS_TIME if binding in OF_THE_MODEL else binding
        lines.append(f"{name} {near} as large: {worth[name]:.2f}x without {this}, {worth[binding]:.2f}x without {that}")
    return lines


def evidence(binding: str, found: Findings) -> list[str]:
    """Further measurements that say so."""
    lines = [*_in_fetching(binding, found), *_where(binding, found)]
    fixed = fixed_share(found)
    if fixed is not None and binding in ("launch overhead", "compute", "memory bandwidth"):
        lines.append(f"{percent(fixed)} of the model's time does not shrink with the batch")
    if found.census is not None:
        operations = found.census.num_operations
        lines.append(f"{operations:,} operation{'' if operations == 1 else 's'} a step")
        if found.census.num_syncs:
            waits = "on a CPU that waits for nothing" if found.facts.device == "cpu" else "each waits for the device"
            values = "value" if found.census.num_syncs == 1 else "values"
            lines.append(f"{found.census.num_syncs:,} {values} read back a step (`.item()` and the like); {waits}")
    if found.facts.num_threads > found.num_cores:
        lines.append(f"{found.facts.num_threads} threads on {found.num_cores} cores")
    return lines


def _in_fetching(binding: str, found: Findings) -> list[str]:
    """What fetching is spent on."""
    if binding != "input" or found.activity is None:
        return []
    parts = sorted(found.activity.data_parts.items(), key=lambda item: -item[1])
    said = [f"{name} {percent(share)}" for name, share in parts if share >= WORTH_A_PLACE]
    return [f"of fetching: {', '.join(said)} (sampled)"] if said else []


def _where(binding: str, found: Findings) -> list[str]:
    """The line of the script that most of it passes at."""
    if found.activity is None:
        return []
    wanted = {
        "input": lambda p: p.phase == "data" and p.kind != "queue",
        "logging": lambda p: p.kind == "output",
        "own code": lambda p: p.phase == "unattributed",
        "paging": lambda p: p.phase != "data",
    }.get(binding)
    places = [p for p in found.activity.places if wanted is not None and wanted(p) and p.step_share >= WORTH_A_PLACE]
    return [f"{percent(places[0].step_share)} of the step at `{places[0].place}`"] if places else []


def notes(found: Findings, utilization: float | None) -> list[str]:
    """What the reader must know."""
    lines = []
    if utilization is not None and utilization > 1:
        lines.append(
            f"a utilization of {percent(utilization)} is impossible: the ceiling was measured too low, "
            "or the work was overcounted: measure again on a quiet machine, `flatout machine --refresh`"
        )
    rest = found.anatomy.share("unattributed")
    if rest is not None and rest < -COUNTED_TWICE:
        lines.append(f"the phases sum to {percent(-rest)} more than the step: something was counted twice")
    if rest is not None and rest > HIDDEN:
        lines.append(_hidden(rest, found))
    if found.census is not None and found.census.uncounted:
        lines.append("no FLOP formula for: " + ", ".join(f"`{name}`" for name in found.census.uncounted[:6]))
    if dearer := _dearer_than_its_phase(found):
        lines.append(dearer)
    if found.anatomy.not_observed:
        lines.append("not observed: " + ", ".join(found.anatomy.not_observed))
    return lines


def _hidden(rest: float, found: Findings) -> str:
    """What could hide in the time that no phase explains."""
    places = [p for p in found.activity.places if p.phase == "unattributed"] if found.activity is not None else []
    seen = ", ".join(f"`{p.place}` {percent(p.step_share)}" for p in places[:2])
    where = f"; sampled there: {seen}" if seen else ""
    return f"{percent(rest)} of the step is in no phase: the script's own lines between the parts{where}"


def _dearer_than_its_phase(found: Findings) -> str | None:
    """Fetching that costs the step surely more than the time that the step waits for it."""
    free_data = found.counterfactuals.get("free_data")
    share = found.anatomy.share("data")
    if free_data is None or share is None or not free_data.low > WORTHWHILE * without(phase_s(found, "data"), found):
        return None
    workers = any(loader.num_workers for loader in found.facts.loaders)
    who = "workers that fetch take cores" if workers else "fetching takes caches and memory"
    return f"free data would bring more than the {percent(share)} that `data` takes: {who} from the rest of the step"


def percent(share: float) -> str:
    """A share in hundredths."""
    return f"{100 * share:.0f} %"
