"""`flatout prove`: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from flatout.cli import options

EXIT_CODES = {"identical": 0, "equivalent": 0, "different": 1, "undecided": 6}


@click.command("prove", cls=options.ScriptCommand, context_settings=options.SCRIPT_SETTINGS)
@click.option("--plan", type=click.Path(dir_okay=False, path_type=Path), help="The plan to prove.")
@click.option("--levers", "lever_names", metavar="NAMES", help="Prove exactly these; `none`: plain against itself.")
@options.accept
@click.option("--seeds", type=int, default=5, show_default=True, help="Over so many seeds: two runs each.")
@click.option(
    "--metric",
    metavar="PATTERN",
    help="Its number in the output, e.g. `'accuracy: ([0-9.]+)'`; with `--metric-file` a key.  [default: the loss]",
)
@click.option("--metric-file", metavar="FILE", help="Where the script writes it: JSON, CSV, or TensorBoard's folder.")
@click.option("--margin", type=float, help="What difference may be.  [default: the plain seeds' standard deviation]")
@click.option(
    "--target",
    type=float,
    help="Also the time until the metric is at least this; at most where it is one that falls, as a loss.",
)
@click.option(
    "--seed-option", metavar="NAME", default="", help="The script's own option for a seed, e.g. `--seed-option=--seed`."
)
@click.option("--fresh", is_flag=True, help="Begin anew, whatever an interrupted proof has finished.")
@click.option(
    "--allow-writes", is_flag=True, help="Let runs write to your real folders (where namespaces are forbidden)."
)
@options.as_json
@options.script_words
def command(  # noqa: PLR0913  one parameter per option
    words: tuple[str, ...], module: str | None, plan: Path | None, lever_names: str | None, accept: str, seeds: int,
    metric: str | None, metric_file: str | None, margin: float | None, target: float | None, seed_option: str,
    fresh: bool, allow_writes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run SCRIPT to its end several times, plain and under its plan, and compare what comes of it.

    \b
    Example:  flatout prove --metric 'accuracy: ([0-9.]+)' train.py --epochs 3

    The exit code is 0 where the metric is the same, 1 where it is not, 6 where these seeds cannot tell. Each run
    has its writes discarded. Ctrl-C keeps the runs that are done, and the same command goes on.
    """  # noqa: D301
    from flatout import api
    from flatout.cli.output import show
    from flatout.cli.progress import measured
    from flatout.judge.metric import metric_of
    from flatout.judge.proof import Aim, Proof
    from flatout.run.script import from_words

    aim = Aim(
        num_seeds=seeds,
        margin=options.finite(margin, "--margin", positive=True),
        target=options.finite(target, "--target"),
    )
    request = api.ProveRequest(
        plan=plan,
        levers=options.names(lever_names),
        accept=accept,
        metric=metric_of(metric, metric_file),
        aim=aim,
        seed_option=seed_option,
        isolate=not allow_writes,
        fresh=fresh,
    )
    script = from_words(words, module)

    def shown(found: Proof) -> None:
        show(found, as_json=as_json)
        sys.exit(EXIT_CODES[found.equivalence.verdict])

    measured(lambda told: api.prove(script, request=request, show=told), shown, stopped="no run had ended")
