"""How does a script that serves get calls, and if it gets none, why? Its client, as a bench sees it.

In: the client's command; what its runs have left. Out: the command that starts both; an error in three parts.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from flatout.errors import ScriptError
from flatout.report.words import nearby, printable
from flatout.run import with_client
from flatout.run.child_process import Ended, tail
from flatout.run.script import Script
from flatout.trials.terms import Terms

PATIENCE_S = 20.0
"""A client may fail for so long before the script's first calls: a server may listen before it is ready."""


class Client:
    """Of one child of a bench.

    Args:
        script: What serves.
        terms: With the client's command, or without: then nothing here does anything.
        run_folder: Where its output and the note about it go.
        name: The child's.
    """

    def __init__(self, script: Script, terms: Terms, run_folder: Path, name: str) -> None:
        self._script, self._terms = script, terms
        self._note = run_folder / f"client-{name}.json"
        self._words = shlex.join(terms.client)

    def beside(self, command: list[str]) -> list[str]:
        """The command that starts both."""
        return with_client.command(command, self._terms.client, self._note) if self._terms.client else command

    def look(self) -> None:
        """Before the first calls: does it do nothing but fail?

        Raises:
            ScriptError: It does.
        """
        found = with_client.read(self._note) if self._terms.client else None
        since_s = found["failing_since_s"] if found is not None else None
        if found is not None and since_s is not None and time.monotonic() - since_s > PATIENCE_S:
            raise self._failed(found["exit_code"])

    def why_no_calls(self, end: Ended) -> ScriptError | None:
        """Why a script was given up; None where that has nothing to do with a client."""
        if not self._terms.client or not end.hung:
            return None
        found = with_client.read(self._note)
        if found is None:
            return ScriptError(
                f"`{self._script.name}` did not begin to serve within {self._terms.start_limit_s:.0f} s",
                cause=f"it listens on no port; {_last(end.output)}",
                hint="`--start-limit 10m` waits longer; `--client` is for scripts that wait for a client",
            )
        if found["failing_since_s"] is not None:
            return self._failed(found["exit_code"])
        calls = "no call of a model came" if not end.num_steps else f"after {end.num_steps} calls of models none came"
        return ScriptError(
            f"`{self._words}` led to too few calls in `{self._script.name}`",
            cause=f"{calls} in time, and it ended well {found['num_runs']} times; {_last(end.output)}",
            hint="calls count that are made in evaluation mode and in the script's own process; `--start-limit 10m` "
            "waits longer",
        )

    def _failed(self, exit_code: int) -> ScriptError:
        log = with_client.output_of(self._note)
        return ScriptError(
            f"the client of `{self._script.name}` fails: `{self._words}` ended with exit code {exit_code}",
            cause=_last(tail(log)),
            hint=f"start `python {self._script.typed}` by hand, then the client; what it printed is in `{nearby(log)}`",
        )


def _last(output: str) -> str:
    lines = output.strip().splitlines()
    return f"the last line it printed: `{printable(lines[-1])[:160]}`" if lines else "it printed nothing"
