"""Which options do several commands share, and what do they mean? In: words. Out: values that `api` takes."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from flatout.errors import ScriptError, UsageError
from flatout.records import output_file
from flatout.records.plan import CLASSES, DEFAULT_CLASS
from flatout.records.ranks import GROUPED_MODES, MODES, RankConfig, sharing_ranks

F = TypeVar("F", bound=Callable[..., Any])

#: Everything after the script is the script's own.
SCRIPT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class ScriptCommand(click.Command):
    """A command that takes a script; what looks like an option before the script is one, and must be known."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; an unknown option, which would then be taken for the script, is refused."""
        given = tuple(args)
        rest = super().parse_args(ctx, args)
        words = ctx.params["words"]
        if words and words[0].startswith("-") and words[0] != "-" and "--" not in given[: len(given) - len(words)]:
            raise click.NoSuchOption(words[0].partition("=")[0], ctx=ctx)
        return rest

    def invoke(self, ctx: click.Context) -> object:
        """Run; where the command is refused and one of flatout's options stands behind the script, the hint says so."""
        try:
            return super().invoke(ctx)
        except (ScriptError, UsageError) as problem:
            words = ctx.params["words"]
            path = Path(words[0]) if words and not ctx.params.get("module") else None
            from flatout.run.launcher_command import is_launcher

            is_launched = path is not None and is_launcher(words[0])  # options behind it are the launcher's
            found = None if is_launched else behind_the_script(self, words if path is None else words[1:], path)
            if found is None:
                raise
            raise type(problem)(problem.error, cause=problem.cause, hint=f"{found}; {problem.hint}") from None


def behind_the_script(command: click.Command, arguments: Sequence[str], path: Path | None = None) -> str | None:
    """What is to be said where an option of the command stands among the script's own arguments.

    Nothing where the script in `path` speaks of that option: it is one of its own.

    >>> behind_the_script(click.Command("tune", params=[click.Option(["--budget"])]), ["--lr", "1"])
    """
    own = own_options(command)
    found = next((name for word in arguments if (name := word.partition("=")[0]) in own), None)
    if found is None or (path is not None and _speaks_of(path, found)):
        return None
    return f"`{found}` stood after the script and so went to the script: flatout's own options stand before it"


def _speaks_of(path: Path, option: str) -> bool:
    """Whether the script has the option as a literal, as for a parser of arguments."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(rf"""["']{re.escape(option)}["']""", text) is not None


def own_options(command: click.Command) -> list[str]:
    """The names of a command's options, but for `--help`, which every script has too.

    >>> own_options(click.Command("tune", params=[click.Option(["-q", "--quiet"]), click.Argument(["words"])]))
    ['-q', '--quiet']
    """
    return [name for one in command.params if isinstance(one, click.Option) for name in one.opts]


def ended_by_module(command: click.Command, words: list[str]) -> list[str]:
    """The words with a `--` after `-m MODULE`, for the module ends flatout's own options as a script does.

    >>> ended_by_module(click.Command("run", params=[click.Option(["-m"])]), ["-m", "train", "--json"])
    ['-m', 'train', '--', '--json']
    """
    options = [p for p in command.params if isinstance(p, click.Option) and not p.is_flag and not p.count]
    valued = {name for option in options for name in option.opts}
    rest = iter(enumerate(words, 1))
    for after, word in rest:
        if "-m" not in valued or not word.startswith("-") or word in ("-", "--"):
            break
        if word in valued and word.startswith("--"):
            next(rest, None)
        elif not word.startswith("--"):
            letter, attached = _first_valued(word, valued)
            if letter == "m" and after + (not attached) <= len(words):
                after += not attached
                return [*words[:after], "--", *words[after:]]
            if letter and not attached:
                next(rest, None)
    return words


def _first_valued(cluster: str, valued: set[str]) -> tuple[str, bool]:
    """The first letter of a cluster such as `-qm` that takes a value, and whether the value is attached to it."""
    for position, letter in enumerate(cluster[1:], 2):
        if f"-{letter}" in valued:
            return letter, position < len(cluster)
    return "", False


def script_words(function: F, *, metavar: str = "SCRIPT [ARGUMENTS]...") -> F:
    """`-m MODULE`, or a script, then the script's own arguments."""
    function = click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=metavar)(function)
    return click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")(function)


def ranks(function: F) -> F:
    """On how many ranks, and how."""
    told = [
        click.option("--ranks", "num_ranks", type=int, metavar="N",
                     help="Train on N ranks.  [default: as many as the plan says]"),
        mode,
        click.option("--hang-timeout", default="5m", show_default=True, metavar="TIME",
                     help="End when a rank is silent so long."),
        click.option("--nnodes", type=int, default=1, metavar="M", help="Machines; each has N / M ranks."),
        click.option("--node-rank", type=int, default=0, metavar="K", help="The number of this machine."),
        click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where machines meet: at machine 0."),
    ]  # fmt: skip
    for option in reversed(told):
        function = option(function)
    return function


def mode(function: F) -> F:
    """How ranks divide the work."""
    return click.option(
        "--mode",
        type=click.Choice(MODES),
        default="auto",
        show_default=True,
        help="Ranks divide the batch; with it parameters (all ranks, or those of a machine); or the model, by features "
        "or in stages.",
    )(function)


def nodes(num_ranks: int, nnodes: int, node_rank: int, rdzv_endpoint: str | None) -> dict[str, Any]:
    """On which machines the ranks are.

    Raises:
        UsageError: They cannot be.
    """
    error = cause = ""
    if nnodes < 1:
        error, cause = f"`--nnodes {nnodes}` is not a number of machines", "there is at least this one"
    elif nnodes > 1 and (num_ranks % nnodes or num_ranks < nnodes):
        error, cause = f"{num_ranks} ranks are not {nnodes} times as many", "each machine has as many as the others"
    elif not 0 <= node_rank < nnodes:
        error, cause = f"`--node-rank {node_rank}` is none of {nnodes}", "machines are numbered from 0"
    elif nnodes > 1 and (rdzv_endpoint is None or not re.fullmatch(r".+:[0-9]{1,5}", rdzv_endpoint)):
        error, cause = "machines need a place to meet", "`--rdzv-endpoint` names machine 0 and a free port there"
    if error:
        example = "--ranks 16 --nnodes 2 --node-rank 0 --rdzv-endpoint HOST:29400"
        raise UsageError(error, cause=cause, hint=f"e.g. `{example}`")
    return {"num_nodes": nnodes, "node_rank": node_rank, "rdzv_endpoint": rdzv_endpoint or ""}


LEAST_PATIENCE_S = 1.0


def patience(hang_timeout: str) -> float:
    """Seconds after which a silent rank hangs.

    Raises:
        UsageError: They are too few for ranks to meet in.
    """
    limit_s = seconds(hang_timeout, "--hang-timeout")
    if limit_s < LEAST_PATIENCE_S:
        raise UsageError(
            f"`--hang-timeout {hang_timeout}` gives ranks no time to meet",
            cause=f"it is shorter than {LEAST_PATIENCE_S:.0f} s, and one that takes longer is taken for one that hangs",
            hint="e.g. `--hang-timeout 5m`",
        )
    return limit_s


def rank_terms(num_ranks: int | None, mode: str, hang_timeout: str, places: dict[str, Any]) -> RankConfig | None:
    """How a run is divided over ranks; None where nothing was said, so that a plan may say it.

    Raises:
        UsageError: There are no such ranks.
    """
    if num_ranks is not None and num_ranks < 1:
        raise UsageError(
            f"`--ranks {num_ranks}` is not a number of ranks", cause="one process is one rank", hint="e.g. `--ranks 2`"
        )
    limit_s = patience(hang_timeout)
    if mode != "auto" and (num_ranks or 1) == 1:
        raise UsageError(
            f"`--mode {mode}` has nothing to divide", hint=f"e.g. `--ranks 2 --mode {mode}`",
            cause="`--ranks` says on how many ranks, and was not typed" if num_ranks is None else "one rank has it all",
        )  # fmt: skip
    if num_ranks is None:
        return None
    if (
        mode in GROUPED_MODES
        and num_ranks > 1
        and sharing_ranks(num_ranks, num_ranks // places.get("num_nodes", 1)) == 1
    ):
        raise UsageError(
            f"`--mode {mode}` needs groups of ranks, and `--ranks {num_ranks}` gives none",
            cause="ranks of a machine share a model, machines hold copies of it; on one machine, halves of the ranks",
            hint=f"four ranks or more, or `--mode {'shard' if mode == 'hybrid' else mode.rpartition('+')[2]}`",
        )
    return RankConfig(num_ranks=num_ranks, mode=mode, hang_timeout_s=limit_s, **places)


def infer(function: F) -> F:
    """That calls of models are meant, whatever else a script does."""
    says = "Measure its calls of models, not its training; needed only of a script that trains as well."
    return click.option("--infer", "infers", is_flag=True, help=says)(function)


def client(function: F) -> F:
    """Who calls a script that serves."""
    says = "A program that calls SCRIPT, which serves: a Python file or a command; started anew while it is wanted."
    return click.option("--client", metavar="COMMAND", help=says)(function)


def client_words(client: str | None) -> tuple[str, ...]:
    """The client's command.

    Raises:
        UsageError: There is no such program.
    """
    if client is None:
        return ()
    try:
        words = shlex.split(client)
    except ValueError as problem:
        hint = "quote it as a shell does"
        raise UsageError(f"`--client {client}` is no command", cause=str(problem), hint=hint) from None
    name = (words or [""])[0]
    if not Path(name).is_file() if name.endswith(".py") else shutil.which(name) is None:
        raise UsageError(
            f"no such client: `{name}`", cause="it is no Python file here, and no program that can be started",
            hint="e.g. `--client ask.py`, or `--client 'ask.py --rate 50'`",
        )  # fmt: skip
    return tuple(words)


def goal(function: F) -> F:
    """What candidates are compared by."""
    says = "Compare by the time of steps, or of the models' calls alone.  [default: `latency` with a client]"
    return click.option("--goal", "compared_by", type=click.Choice(["throughput", "latency"]), help=says)(function)


def accept(function: F) -> F:
    """How far levers may go."""
    return click.option(
        "--accept",
        type=click.Choice(CLASSES),
        default=DEFAULT_CLASS,
        show_default=True,
        help="How far levers may go: nothing changes, rounding, width of floats, other random numbers, "
        "answers of inference, the model.",
    )(function)


def terms(function: F, *, prefix: str = "") -> F:
    """How a measured script may be run; `prefix` says when they count."""
    writes = f"{prefix}let trials write to your real folders (where namespaces are forbidden)."
    waits = f"{prefix}wait so long for the first few steps."
    function = click.option("--allow-writes", is_flag=True, help=writes[0].upper() + writes[1:])(function)
    return click.option(
        "--start-limit", default="90s", show_default=True, metavar="TIME", help=waits[0].upper() + waits[1:]
    )(function)


def store_memory(function: F) -> F:
    """How many of the items of `sample_store` are kept."""
    memory = "Memory for kept items, e.g. `4GB`, `512MiB`; `0`: keep none.  [default: half of what is free]"
    return click.option("--store-memory", metavar="SIZE", help=memory)(function)


def json_file(function: F) -> F:
    """A file for the summary, since stdout is the script's."""
    return click.option(
        "--json",
        "json_file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        callback=_summary_file,
        help="Write what was measured here: stdout is the script's.",
    )(function)


def _summary_file(ctx: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """The file, where it is new, empty or a summary: what else is there is somebody's work, the script perhaps."""
    if path is not None:
        try:
            output_file.check(path, output_file.SUMMARY, option="--json")
        except UsageError as problem:
            cause = f"{problem.cause}; here `--json` takes a FILE to write to, for stdout is the script's"
            raise UsageError(
                problem.error, cause=cause, hint=f"e.g. `{ctx.command_path} --json run.json SCRIPT`"
            ) from None
    return path


def as_json(function: F) -> F:
    """One JSON object on stdout, and nothing else there."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")(function)


def seconds(text: str, option: str) -> float:
    """Seconds of a duration such as `90`, `90s`, `3m`, `1h`.

    >>> seconds("3m", "--budget")
    180.0

    Raises:
        UsageError: It is no duration.
    """
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]+)?)\s*(s|m|h|)\s*", text)
    if not match:
        raise UsageError(
            f"`{option} {text}` is no duration",
            cause="durations are a number and `s`, `m` or `h`",
            hint=f"e.g. `{option} 3m`",
        )
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def finite(value: float | None, option: str, *, positive: bool = False) -> float | None:
    """A number that is neither NaN nor infinite, and above 0 where it must be; None where the option was not given.

    >>> finite(-0.5, "--target")
    -0.5

    Raises:
        UsageError: It is one of these.
    """
    if value is None or (math.isfinite(value) and (value > 0 or not positive)):
        return value
    kind = "positive" if math.isfinite(value) else "finite"
    cause = "it is a distance" if kind == "positive" else "nothing can be compared with it"
    raise UsageError(f"`{option} {value:g}` is no {kind} number", cause=cause, hint=f"e.g. `{option} 0.01`")


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def size_bytes(text: str | None, option: str) -> int | None:
    """Bytes of a size such as `4GB`, `512MiB`, `1.5g` or `0`; None where the option was not given.

    >>> size_bytes("4GB", "--store-memory"), size_bytes("512 MiB", "--store-memory"), size_bytes("0", "--store-memory")
    (4000000000, 536870912, 0)

    Raises:
        UsageError: It is no size.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(i?)(b?)\s*", text.lower())
    if not match or (match[3] and not match[2]):
        raise UsageError(
            f"`{option} {text}` is no size",
            cause="sizes are a number and `kB`, `MB`, `GB`, `TB`, or `KiB`, `MiB`, `GiB`, `TiB`",
            hint=f"e.g. `{option} 4GB`",
        )
    unit = 1024 ** " kmgt".index(match[2]) if match[3] else _UNITS[match[2]]
    return int(float(match[1]) * unit)


def names(text: str | None) -> tuple[str, ...] | None:
    """Names separated by commas; None where the option was not given.

    >>> names("bf16, compile"), names("none")
    (('bf16', 'compile'), ())

    Raises:
        UsageError: There is no name in it.
    """
    if text is None:
        return None
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise UsageError(f"`{text}` names no lever", cause="names are separated by commas", hint="`flatout levers`")
    return () if found == ("none",) else found
