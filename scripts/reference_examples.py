"""The pages about JSON and plan files, with examples made by the code from records made by hand.

In: records with invented numbers. Out: Markdown. The keys that a page explains are compared with those that the code
prints, so that a new key fails here until it is explained.
"""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path
from typing import Any

from flatout.api import Ran
from flatout.cli.foreground import run_summary
from flatout.judge import result
from flatout.judge.anatomy import Anatomy
from flatout.judge.diagnosis import Bound, Diagnosis
from flatout.judge.metric import Metric
from flatout.judge.proof import SIDES, Aim, Asked, Proof, WholeRun, prove, summary_of
from flatout.judge.read_sites import ReadSite, ReadSites
from flatout.judge.result import FORMAT, Result
from flatout.records import plan_file
from flatout.records.as_json import to_json
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import PLAN_FILE, PLAN_FORMAT, Plan, Trial
from flatout.records.trace import Header
from flatout.report.export import Exported
from flatout.run.choice import Engagement
from flatout.run.outcome import Outcome
from flatout.trials.levers import LeverRow
from reference_records import fenced, prose, table, with_ends_folded

Row = tuple[str, str, str]
"""Key, JSON type, meaning."""

TUNE: list[Row] = [
    ("verdict", "string", "`faster`, `no difference` or `inconclusive`"),
    ("goal", "string", "what ratio and steps per second are of: `throughput`: whole steps; `latency`: models' calls"),
    (
        "ratio",
        "number",
        "how many times as fast the plan is, measured again in fresh windows; 1 without a plan, see below",
    ),
    ("ratio_low", "number", "lower end of its 95 % interval; 1 without a plan, see below"),
    ("ratio_high", "number", "upper end of its 95 % interval; 1 without a plan, see below"),
    ("levers", "list of strings", "names of the plan's levers; empty without a plan"),
    ("baseline_steps_per_s", "number", "training steps per second, plain"),
    ("tuned_steps_per_s", "number", "the same under the plan; the baseline's without one"),
    ("tuning_s", "number", "wall seconds that all of it took"),
    ("break_even_steps", "integer or null", "steps after which that is earned back; null where it never is"),
    ("baseline_joules_per_step", "number or null", "energy of a plain step; null where no counter can tell"),
    ("tuned_joules_per_step", "number or null", "the same under the plan, measured beside it; null also without one"),
    ("reads", "list of objects or null", "where values are read on the host, see below; null where nobody looked"),
    ("profiled", "object or null", "a few steps under the framework's profiler: `ProfiledTime` of records.md; or null"),
    ("latency", "object or null", "of a script that infers: by side, `num_calls` and by percentile `seconds`; or null"),
    ("plan", "string or null", "where the plan was written; null where there is none"),
    ("run", "string", "absolute path of the run folder, with `result.json`, `report.html` and every trace"),
]
WHY: list[Row] = [
    ("phases", "object of numbers", "share of the step by phase, 0 to 1; they sum to 1, `unattributed` included"),
    ("binding", "string", "what binds: one of `flatout.judge.diagnosis.BINDINGS`, or `not concluded`"),
    ("bounds", "object of numbers", "by remedy, the most that it can bring: step time now over step time then"),
    (
        "contradictions",
        "list of strings",
        "measurements of the same step that exclude each other: nothing is concluded",
    ),
    ("steps_per_s", "number", "training steps per second"),
    (
        "model_flops_utilization",
        "number or null",
        "achieved FLOP/s over the ceiling of the script's own arithmetic; null unknown",
    ),
    ("not_observed", "list of strings", "phases that could not be seen; none of them is known to be 0"),
    ("joules_per_step", "number or null", "energy of a plain step; null where no counter can tell"),
    ("reads", "list of objects or null", "where values are read on the host, see below; null where nobody looked"),
    ("profiled", "object or null", "a few steps under the framework's profiler: `ProfiledTime` of records.md; or null"),
    ("latency", "object or null", "of a script that infers: by side, `num_calls` and by percentile `seconds`; or null"),
    ("run", "string", "absolute path of the run folder"),
]
READ: list[Row] = [
    ("file", "string", "the script's own file"),
    ("line", "integer", "the line in it"),
    ("code", "string", "what stands in the line; empty where that cannot be read"),
    ("reads_per_step", "number", "how often in a mean step"),
    ("waited_s", "number", "seconds of a mean step that pass in these reads"),
]
RUN: list[Row] = [
    ("exit_code", "integer", "the script's; negative for the signal that ended it"),
    ("steps", "integer", "training steps that were seen"),
    ("steps_s", "number", "wall seconds from the first to the last of them that was recorded"),
    ("levers", "list of strings", "what was to be engaged"),
    ("engaged", "boolean", "whether it still was at the end"),
    ("released", "boolean", "whether the check at the start released the plan because it was slower here"),
    (
        "decisions",
        "list of objects",
        "what later looks came to: `kind` (`released`, `engaged again`, `kept`), step, ratio, pairs, why, beside",
    ),
    ("looking_s", "number", "seconds that those looks have cost the run"),
    ("learned", "object or null", "with `--learn`: `levers`, `steps`, `took_s`, `lost_s`, `stopped`, `trials`"),
    ("inapplicable", "object of strings", "levers that have nothing to work on in this script, and why"),
    ("ratio", "number or null", "plain over plan, from this run's own windows; null where it was not checked"),
    ("ratio_low", "number or null", "lower end of its 95 % interval"),
    ("ratio_high", "number or null", "upper end of its 95 % interval"),
    ("joules", "number or null", "energy of the machine during the run; null where no counter can tell"),
    (
        "exchanges",
        "object or null",
        "what exchanges between ranks cost as shares of training, each kind of them in `kinds`; null without ranks",
    ),
    ("remarks", "list of strings", "what else was said in the end, e.g. what became of kept items"),
    ("processes", "integer", "processes that trained; more than 1 only under a launcher"),
    ("run", "string", "absolute path of the run folder; empty where no record could be kept"),
]
EXPORTED: list[Row] = [
    ("file", "string", "where it was written"),
    ("run", "string", "path of the run folder"),
    ("num_steps", "integer", "steps in it"),
    ("remarks", "list of strings", "e.g. windows that were left out"),
]
LEVERS: list[Row] = [
    ("class", "string", "what it may change: `exact`, `rounding`, `precision`, `statistical` or `semantics`"),
    ("shortens", "list of strings", "phases that it can make shorter"),
    ("summary", "string", "what it does"),
    ("toggles", "string", "`step`, `epoch` or `process`: when it can be engaged and released"),
    ("parameter", "string or null", "the setting that it must be given, as in `workers=2`; null where none"),
    ("choices", "list of strings", "the words that the setting may be; empty where it is a number"),
    ("optional", "boolean", "whether the setting may be left out"),
    ("applies", "boolean or null", "whether it can be tried on the script; null without a script"),
    ("reason", "string or null", "why not; null where it applies, and without a script"),
]
PROVED: list[Row] = [
    ("script", "string", "the script and its arguments, as they were typed"),
    ("levers", "object", "settings by lever"),
    ("metric", "string", "the name of the metric that was compared; `loss` by default"),
    ("verdict", "string", "`identical`, `equivalent`, `different` or `undecided`"),
    ("equivalence", "object", "the numbers behind it, see below"),
    ("time", "object", "wall seconds of whole runs, plain over plan: a `Comparison`, see below"),
    ("training_time", "object", "the same from the end of the first step to the end of the last"),
    ("target", "number or null", "the metric's value that was to be reached; null where none was named"),
    ("target_time", "object or null", "seconds to it; null without a target, or where it cannot be seen"),
    ("reached", "list of integers", "how many seeds reached the target: plain, and under the plan"),
    ("energy", "object or null", "joules of whole runs; null where no counter can tell"),
    ("seeds_ignored", "boolean", "whether plain runs of different seeds computed the very same"),
    ("notes", "list of strings", "what the reader must know"),
    ("stopped", "string", "why it ended early, or empty"),
    (
        "runs",
        "list of objects",
        "each with `seed`, `side`, `value`, `wall_s`, and `problem` where it counts for nothing",
    ),
    ("run", "string", "path of the run folder"),
]
WITHOUT_A_PLAN = (
    "Without a plan `ratio`, `ratio_low` and `ratio_high` are 1 because nothing is changed, not because equality was "
    "measured: what the candidates came to stands in the report."
)
PLAN: list[Row] = [
    ("flatout", "string", "the version that wrote it"),
    ("arguments", "list of strings", "the script's own when it was tuned; others are allowed and said"),
    ("ratio", "number", "how many times as fast it was, measured again in fresh windows"),
    ("ratio_low", "number", "lower end of its 95 % interval"),
    ("ratio_high", "number", "upper end of its 95 % interval"),
    ("num_pairs", "integer", "pairs of windows behind it"),
    ("agreement", "string", "the widest class among the levers, and the numbers behind their agreement"),
    ("class_", "string", "that class; `--accept` must admit it"),
    ("baseline_steps_per_s", "number", "training steps per second, plain"),
    ("tuned_steps_per_s", "number", "the same under the plan"),
    ("python", "string", "version of Python; its first two numbers must be equal where the plan is used"),
    ("framework", "string", "`pytorch`"),
    ("framework_version", "string", "must be equal where the plan is used"),
    ("created", "string", "when: ISO 8601, UTC, to the second"),
    ("run", "string", "the run folder with the trials behind it, and the kernels that were compiled for them"),
    ("reason", "string", "why nothing is to be changed, and what was tried; empty of a plan with levers"),
    ("infers", "boolean", "whether it is for the calls of a script that trains as well (`--infer`)"),
    ("goal", "string", "what it was chosen by: `throughput`, or `latency`: the time in the models alone"),
    ("levers", "table", "one table per lever with its settings; what is engaged is decided here alone"),
    ("machine", "table", "where it was measured: the record [`Machine`](records.md#machine), without what is unknown"),
]

_MACHINE = Machine(
    hostname="workbench",
    cpu="AMD EPYC",
    architecture="x86_64",
    num_cores=2,
    num_physical_cores=1,
    num_cores_total=2,
    memory_bytes=16 * 2**30,
    operating_system="Linux 6.1.0",
    shm_bytes=8 * 2**30,
    cpu_features=("avx2", "fma", "avx512_bf16"),
)
_LEVERS: dict[str, dict[str, str | int | float | bool]] = {"threads": {"num": 1}, "fused_optimizer": {}}
_PLAN = Plan(
    format=PLAN_FORMAT,
    flatout="0.1.0",
    script="train.py",
    arguments=("--epochs", "3"),
    levers=_LEVERS,
    ratio=1.5,
    ratio_low=1.45,
    ratio_high=1.55,
    num_pairs=10,
    agreement="rounding: gradient error 2.4e-07, noise 0.7; update error 2.1e-07",
    class_="rounding",
    baseline_steps_per_s=100.0,
    tuned_steps_per_s=150.0,
    machine=_MACHINE,
    python="3.11.7",
    framework="pytorch",
    framework_version="2.13.0+cpu",
    created="2026-01-31T12:00:00+00:00",
    run=".flatout/train-1",
)


_READS = ReadSites(
    sites=(
        ReadSite(
            file="/home/you/work/train.py", line=41, code="print(loss.item())", read="item", on_device=True,
            reads_per_step=1.0, waited_s=0.0004,
        ),
    )
)  # fmt: skip


def json_page() -> str:
    """What `--json` prints, command by command."""
    tune = result.summary_of(_result("tune"))
    why = result.summary_of(_result("why"))
    lever = LeverRow(
        name="bf16", class_="precision", shortens=("forward",), summary="...", toggles="step", known=False, refusal=None
    ).as_json()
    parts = [
        "# JSON",
        prose(
            "`--json` prints one object on one line to stdout and nothing else there; progress stays on stderr. "
            "`flatout run --json FILE` and `flatout exec --json FILE` write it to a file, because stdout is the "
            "script's. Keys may be added; a key's meaning does not change."
        ),
        "## tune",
        _explained(TUNE, tune),
        prose(WITHOUT_A_PLAN),
        "## why",
        _explained(WHY, why),
        "Each of `reads`, also of `tune` ([how they are found](../explanation/numbers.md#values-read-on-the-host)):",
        _in_words(READ, why["reads"][0]),
        "## run, exec",
        _explained(RUN, run_summary(_ran())),
        "## prove",
        _explained(PROVED, to_json(summary_of(_proof()))),
        prose(
            "`equivalence` is the record [`Equivalence`](records.md#equivalence); `time`, `training_time`, "
            "`target_time` and `energy` are each a [`Comparison`](records.md#comparison). The whole record, with every "
            "reading of the metric, is `proof.json` in the run folder."
        ),
        "## report",
        prose(
            "`flatout report --json` prints again what the `tune` or `why` of that run printed. With `--export FILE` "
            "it prints:"
        ),
        _in_words(EXPORTED, to_json(_EXPORTED)),
        "## levers",
        "One object per lever, by name:",
        _in_words(LEVERS, lever),
        "## machine",
        prose(
            "The record [`Ceilings`](records.md#ceilings), and `energy` with the `counters` that can be read (name, "
            "device and source) and the list `missing` of what cannot, and why."
        ),
    ]
    return "\n\n".join(parts)


def _proof() -> Proof:
    """Of two seeds that were run with and without a plan."""
    asked = Asked(
        script="train.py --epochs 3", source_hash="3f2a", levers=_LEVERS, metric=Metric(), seed_option="",
        versions=("0.1.0", "2.13.0+cpu", "3.11.7"), machine_key="2c1d",
    )  # fmt: skip
    runs = [
        WholeRun(seed=seed, side=side, exit_code=0, wall_s=60.0, training_s=50.0, num_steps=1200, value=0.1)
        for seed in (0, 1)
        for side in SIDES
    ]
    return prove(asked, Aim(num_seeds=2), runs, _MACHINE, created="2026-01-31T12:00:00+00:00")


_EXPORTED = Exported(file="steps.csv", run="/home/you/work/.flatout/train-1", num_steps=1200)


def _explained(rows: list[Row], value: dict[str, Any]) -> str:
    if [key for key, _, _ in rows] != list(value):
        raise LookupError(f"the keys {list(value)} are not those explained here: {[key for key, _, _ in rows]}")
    for key, kind, _ in rows:
        if not any(_is(value[key], one) for one in kind.split(" or ")):
            raise TypeError(f"`{key}` is explained as {kind}, and is {value[key]!r}")
    return table(
        ["key", "type", "meaning"], with_ends_folded((f"`{key}`", kind, meaning) for key, kind, meaning in rows)
    )


def _in_words(rows: list[Row], value: dict[str, Any]) -> str:
    """The same as `_explained` for a few keys, as a paragraph."""
    _explained(rows, value)
    said = (f"`{key}` ({kind}): {meaning}" for key, kind, meaning in rows)
    return prose("; ".join(said) + ".")


def _is(value: Any, kind: str) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "string": isinstance(value, str),
        "number": number,
        "integer": number and isinstance(value, int),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "object of strings": isinstance(value, dict) and all(isinstance(x, str) for x in value.values()),
        "list of strings": isinstance(value, list) and all(isinstance(v, str) for v in value),
        "list of numbers": isinstance(value, list) and all(_is(v, "number") for v in value),
        "list of integers": isinstance(value, list) and all(isinstance(v, int) for v in value),
        "table": isinstance(value, dict),
        "object": isinstance(value, dict),
        "list of objects": isinstance(value, list) and all(isinstance(v, dict) for v in value),
        "object of numbers": isinstance(value, dict) and all(_is(v, "number") for v in value.values()),
    }[kind]


def plan_page() -> str:
    """The plan file, as `plan_file.write` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PLAN_FILE
        plan_file.write(_PLAN, path)
        text = path.read_text(encoding="utf-8")
    return "\n\n".join(
        [
            "# The plan file",
            prose(
                f"`flatout tune` writes `{PLAN_FILE}` into the working folder, or the file named by `--plan`. It "
                "is TOML, one table per script, so that several scripts share a folder; comments of yours on lines "
                "of their own and other scripts' plans stay when a plan is written anew. It is plain data: nothing in "
                "it is evaluated or imported. It is safe to commit if the name of the machine and the script's "
                "arguments are. Delete a table to forget a plan."
            ),
            "An example as the code writes it, with invented numbers:",
            fenced(text, "toml"),
            "## Fields",
            prose(
                "At the top: `format`, the version of the file; a newer one is refused with an error that says so. In "
                'the table of a script, `[plan."PATH"]`, where PATH is the way to the script from the folder of the '
                "file, or `-m package.module`:"
            ),
            _explained(PLAN, tomllib.loads(text)["plan"][_PLAN.script]),
            prose(
                'A plan that `tune --ranks` has made may have the lever `ranks`, with `division = "2:shard"`: a run is '
                "started on as many ranks; without it a run is one process."
            ),
            prose(
                "`flatout run` compares `machine` with the machine that it is on: the processor and its features, the "
                "usable cores, accelerators, memory and `/dev/shm` (5 % are forgiven) and the C++ compiler. "
                "Where anything differs it says so and runs plainly, until the plan "
                "[has been tested there](../how-to/other-machine.md). The hostname and the kernel are written down and "
                "not compared."
            ),
        ]
    )


def _result(command: Any) -> Result:
    """A result with as little in it as there can be."""
    trial = Trial(levers=_LEVERS, outcome="faster", ratio=1.5, ratio_low=1.45, ratio_high=1.55)
    return Result(
        format=FORMAT,
        command=command,
        flatout="0.1.0",
        created="2026-01-31T12:00:00+00:00",
        script="train.py",
        typed="train.py --epochs 3",
        header=Header(
            format=1,
            flatout="0.1.0",
            started_unix_s=0.0,
            script="train.py",
            arguments=(),
            python="3.11.7",
            framework="pytorch",
            framework_version="2.13.0+cpu",
            pid=1,
        ),
        machine=_MACHINE,
        facts=Facts(device="cpu", models=(), optimizers=(), loaders=(), num_threads=2),
        anatomy=Anatomy(
            step_s=0.01,
            phases_s={"data": 0.006, "backward": 0.003, "unattributed": 0.001},
            spread_fraction={},
            outside_s={},
            not_observed=("copy", "communication", "sync"),
            num_steps=400,
            num_windows=4,
        ),
        diagnosis=Diagnosis(
            binding="input",
            sentence="input: batches are built item by item in the training process while the model waits",
            evidence=(),
            bounds=(
                Bound(remedy="free data", ratio=2.4, low=2.3, high=2.5, how="one cached batch", shortens=("data",)),
            ),
            model_flops_utilization=0.25,
        ),
        noise=None,
        baseline_steps_per_s=100.0,
        baseline_spread_fraction=0.01,
        baseline_window_step_s=(0.01,),
        verdict="faster",
        tuned_steps_per_s=150.0,
        tuning_s=60.0,
        remeasured=trial,
        plan=_PLAN,
        plan_path=PLAN_FILE,
        break_even_steps=18000,
        reads=_READS,
        run="/home/you/work/.flatout/train-1",
    )


def _ran() -> Ran:
    outcome = Outcome(num_steps=1200, steps_s=8.0, engaged=True)
    return Ran(
        engagement=Engagement(levers=_LEVERS), outcome=outcome, registry={}, run="/home/you/work/.flatout/train-2"
    )
