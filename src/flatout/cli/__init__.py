"""What can be typed? The command group; each command lies in a file of its own and is loaded when it is typed."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

import click

from flatout import __version__
from flatout.cli.options import ScriptCommand, ended_by_module, own_options
from flatout.errors import FlatoutError, Inconclusive, InternalError, UsageError, did_you_mean

COMMANDS = {
    "tune": "measure, diagnose, try, choose; writes a plan and a report",
    "run": "run a script under its plan",
    "why": "only measure and diagnose",
    "prove": "whole runs over several seeds: same final metric, time saved",
    "export": "the models that a script calls, as files of another runtime, checked",
    "machine": "this machine and its measured ceilings",
    "levers": "every lever: what it changes, and whether it applies here",
    "report": "a former result again: terminal, HTML, JSON",
    "exec": "run a launcher (torchrun, accelerate, a shell script) with flatout in its Python children",
}


class Commands(click.Group):
    """Loads a command's file only when it is typed, so that `--help` starts at once."""

    typed: str | None = None
    """The command that was typed, once that is known."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which one needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        return load(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command and the words for it."""
        if args and args[0] not in COMMANDS:
            raise no_such_command(args[0])
        name, command, words = super().resolve_command(ctx, args)
        self.typed = name
        return name, command, words if command is None else ended_by_module(command, words)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the list above, without loading any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Print flatout's own errors in three parts; the exit code is the error's."""
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except FlatoutError as problem:
            tell(str(problem))
            return problem.exit_code
        except click.exceptions.NoArgsIsHelpError as problem:
            problem.show()
            return 0
        except click.UsageError as problem:
            complain_usage(problem, self.typed)
            return 2
        except click.exceptions.Exit as end:
            return end.exit_code
        except (click.Abort, KeyboardInterrupt) as stop:
            tell(f"flatout: stopped {stop.__cause__ or stop}".rstrip())  # click wraps Ctrl-C
            return 130
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 141
        except Exception as problem:  # noqa: BLE001  a traceback of ours tells nobody what to do
            tell(str(failed := own_failure(problem)))
            return failed.exit_code


def load(name: str) -> click.Command:
    """A command, from its file."""
    command: click.Command = importlib.import_module(f"flatout.cli.{name}_command").command
    return command


def own_failure(problem: Exception) -> InternalError:
    """The error for what nobody foresaw; what there is to report goes into a file in `.flatout`, or a temporary one."""
    import platform
    import tempfile
    import traceback

    last = traceback.extract_tb(problem.__traceback__)[-1]
    what = " ".join(f"{type(problem).__name__}: {problem}".removesuffix(": ").split())[:300]
    versions = f"flatout {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
    hint = "please report it, with the command that you typed"
    for folder in (".flatout", None):
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(".txt", "error-", folder)
            with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write(versions + "".join(traceback.format_exception(problem)))
            hint = f"please report it, with the command that you typed and `{path}`"
            break
    return InternalError(
        "flatout itself failed",
        cause=f"`{what}` at line {last.lineno} of `{os.path.basename(last.filename)}`; the script is not to blame",
        hint=hint,
    )


def tell(text: str) -> None:
    """Print to stderr, where there is one: without one `print` would take stdout, which is the script's."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


def complain_usage(problem: click.UsageError, typed: str | None) -> None:
    """Click's own usage errors in our three parts; not all of them know the command that was `typed`."""
    if isinstance(problem, click.NoSuchOption) and problem.ctx is not None:
        tell(str(no_such_option(problem.option_name, problem.ctx)))
        return
    command = problem.ctx.command_path if problem.ctx else f"flatout {typed or ''}".rstrip()
    message = problem.format_message().rstrip(".")
    tell(f"error: {message[:1].lower()}{message[1:]}")
    tell("cause: the command was not typed as it takes its words")
    tell(f"hint:  `{command} --help`")


def no_such_command(name: str) -> UsageError:
    """The error for a first word that is none of ours: a slip, or a script where the command was left out."""
    hint = did_you_mean(name, COMMANDS, "`flatout --help`", before="flatout ")
    cause = f"the commands are {', '.join(f'`{one}`' for one in COMMANDS)}"
    if name.endswith(".py"):
        cause, hint = "a command stands before the script", f"`flatout tune {name}` or `flatout run {name}`"
    return UsageError(f"no such command: `{name}`", cause=cause, hint=hint)


def no_such_option(name: str, ctx: click.Context) -> UsageError:
    """The error for an option that a command does not have, or that stands before the command."""
    own = (one for one in own_options(ctx.command) if one.startswith("--"))
    hint = did_you_mean(name, own, f"`{ctx.command_path} --help`")
    cause = f"`{ctx.command_path}` has no option of that name"
    if isinstance(ctx.command, ScriptCommand):
        cause += "; flatout's own options stand before the script, the script's own after it"
    elif isinstance(ctx.command, Commands):
        owners = [one for one in COMMANDS if name in own_options(load(one))]
        if owners:
            cause = f"it is an option of {', '.join(f'`{one}`' for one in owners)}, and stands after the command"
            hint = f"e.g. `flatout {owners[0]} {name} ...`"
    return UsageError(f"no such option: `{name}`", cause=cause, hint=hint)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="flatout %(version)s")
def flatout() -> None:
    """Make an unmodified training script run as fast as its hardware allows.

    \b
      flatout tune train.py --epochs 3
      flatout run train.py --epochs 3
    """  # noqa: D301


__all__ = ["Inconclusive", "flatout"]
