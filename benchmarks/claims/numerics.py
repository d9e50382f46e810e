"""What does the check of numbers miss, and what does it refuse wrongly? `python benchmarks/claims/numerics.py`.

Planted bugs over five families of scripts, sound levers over hard scripts, levers that are closer to float64 than
plain, and what the check of class precision can see. In: nothing. Out: `results/claims_numerics_*.json`, and tables.
Takes about ten minutes on two cores; `--quick` leaves out compilation and the curves of precision.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from numerics_bugs import BUGS, PLANTED_IN
from numerics_judging import WARM_UP_STEPS, Verdict, judged
from numerics_planting import NAME, planted
from numerics_precision import FACTORS, MOMENTS, PLACES, curves
from numerics_scripts import FAMILIES
from numerics_sound import COMPILED, FORCED, LATE_SETS, LATE_STEPS, SCRIPTS, SETS, UNSOUND
from numerics_truth import CASES, DROPOUTS

from flatout.judge import agreement
from measuring import write


def limits() -> dict[str, float]:
    """The thresholds that were judged with."""
    names = ("ROUNDINGS", "PRECISION_ROUNDINGS", "UPDATE_ROUNDINGS", "ROUNDING_ERROR", "SLOPE_ERROR", "NOISE_SHARE")
    return {name: getattr(agreement, name) for name in (*names, "CLOSER")}


def numbers(found: Verdict) -> dict[str, Any]:
    """What a reader needs of a verdict."""
    made = [d for point in found.points for d in point.differences]

    def largest(name: str) -> float | None:
        told = [getattr(d, name) for d in made if d.check != "outputs"]  # whose error stands beside the gradients'
        return max((v for v in told if v is not None), default=None)

    names = ("error", "rounding", "truth_error", "baseline_truth_error")
    multiples = {d.check: None if d.multiple is None else float(f"{d.multiple:.3g}") for d in made}
    for d in made:
        if d.multiple is not None:
            multiples[d.check] = max(multiples[d.check] or 0.0, float(f"{d.multiple:.3g}"))
    return {
        "word": found.word,
        "checks": list(found.checks),
        "detail": found.detail,
        "multiples": multiples,
        **{name: largest(name) for name in names},
    }


def bugs() -> list[dict[str, Any]]:
    """Every bug in every script in which it can happen."""
    rows = []
    for bug in BUGS:
        for family in bug.families:
            found = judged(PLANTED_IN[family], {NAME: {}}, {NAME: bug.lever()})
            assert found is not None
            row = {"bug": bug.name, "class": bug.class_, "check": bug.check, "family": family, **numbers(found)}
            rows.append(row)
        caught = sum(row["word"] == "disagrees" for row in rows[-len(bug.families) :])
        print(f"{bug.name:45} {bug.class_:9} {bug.check:10} {caught}/{len(bug.families)}", flush=True)
    return rows


def sound(*, compiled: bool) -> list[dict[str, Any]]:
    """Every set of levers on every script to which it applies."""
    pairs = [(script, levers, WARM_UP_STEPS) for script in SCRIPTS for levers in SETS]
    pairs += [(script, levers, steps) for steps in LATE_STEPS for script in FAMILIES for levers in LATE_SETS]
    pairs += [(script, {"compile": {}}, WARM_UP_STEPS) for script in COMPILED if compiled]
    rows = []
    for script, levers, steps in pairs:
        found = judged(SCRIPTS[script], levers, applying=True, forced=FORCED, warm_up=steps)
        if found is None:
            continue
        label = "+".join(levers)
        row = {"script": script, "levers": label, "steps": steps, "unsound": UNSOUND.get((script, label), "")}
        rows.append({**row, "effect": dict(found.evidence), "points": len(found.points), **numbers(found)})
        if found.word != "agrees":
            print(f"{script} | {label}: {found.word}, {found.detail}", flush=True)
    return rows


def truth() -> list[dict[str, Any]]:
    """Levers beside float64, with and without dropout."""
    rows = []
    for dropout in DROPOUTS:
        for name, script, plant, wanted in CASES:
            found = judged(partial(script, dropout), {NAME: {}}, {NAME: planted(plant, "rounding", "gradients")})
            assert found is not None
            rows.append({"case": name, "dropout": dropout, "wanted": wanted, **numbers(found)})
            print(f"{name} (dropout {dropout}): {found.word}, {found.detail}", flush=True)
    return rows


def show_curves(rows: list[dict[str, Any]]) -> None:
    """How many of the five families disagree, by factor."""
    for moment in MOMENTS:
        for place in PLACES:
            told = []
            for factor in FACTORS:
                here = [r for r in rows if (r["moment"], r["place"], r["factor"]) == (moment, place, factor)]
                if here:
                    told.append(f"{factor:g}: {sum(r['word'] == 'disagrees' for r in here)}/{len(here)}")
            print(f"{moment}, {place}: {', '.join(told)}", flush=True)


def main() -> None:
    """All of it."""
    quick = "--quick" in sys.argv
    planted_rows = bugs()
    sound_rows = sound(compiled=not quick)
    truth_rows = truth()
    curve_rows = [] if quick else curves()
    show_curves(curve_rows)
    believed = [row for row in sound_rows if not row["unsound"]]
    summary = {
        "bugs": len(BUGS),
        "planted": Counter(row["word"] for row in planted_rows),
        "planted_by_check": Counter(f"{row['check']}: {row['word']}" for row in planted_rows),
        "sound_pairs": Counter(row["word"] for row in believed),
        "sound_with_effect": sum(bool(row["effect"]) for row in believed),
        "unsound_pairs": Counter(row["word"] for row in sound_rows if row["unsound"]),
        "truth": Counter("as wanted" if r["word"] == r["wanted"] else r["word"] for r in truth_rows if r["wanted"]),
    }
    print(summary)
    if not quick:
        parts = {"planted": planted_rows, "sound": sound_rows, "truth": truth_rows, "precision": curve_rows}
        write("claims_numerics", {"limits": limits(), "summary": summary, **parts})


if __name__ == "__main__":
    main()
