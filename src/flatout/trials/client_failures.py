"""Why does a script that serves get no call? What is said of its client, and of a script that listens nowhere.

In: what the client's runs have left. Out: an error in three parts.
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


def raise_client_failure(script: Script, terms: Terms, note: Path) -> None:
    """Look whether the client does nothing but fail.

    Raises:
        ScriptError: It does.
    """
    found = with_client.read(note)
    since_s = found["failing_since_s"] if found is not None else None
    if found is not None and since_s is not None and time.monotonic() - since_s > PATIENCE_S:
        raise _failed(script, terms, note, found["exit_code"])


def not_asked(script: Script, terms: Terms, note: Path, end: Ended) -> ScriptError:
    """The error for a script that serves and was given up because no call came."""
    found = with_client.read(note)
    if found is None:
        return ScriptError(
            f"`{script.name}` did not begin to serve within {terms.start_limit_s:.0f} s",
            cause=f"it listens on no port; {_last(end.output)}",
            hint="`--start-limit 10m` waits longer; `--client` is for scripts that wait for a client",
        )
    if found["failing_since_s"] is not None:
        return _failed(script, terms, note, found["exit_code"])
    calls = "no call of a model came" if not end.num_steps else f"after {end.num_steps} calls of models none came"
    return ScriptError(
        f"`{shlex.join(terms.client)}` led to too few calls in `{script.name}`",
        cause=f"{calls} in time, and it ended well {found['num_runs']} times; {_last(end.output)}",
        hint="a call counts where the script calls a model in evaluation mode, in its own process; `--start-limit 10m` "
        "waits longer",
    )


def _failed(script: Script, terms: Terms, note: Path, exit_code: int) -> ScriptError:
    log = with_client.output_of(note)
    return ScriptError(
        f"the client of `{script.name}` fails: `{shlex.join(terms.client)}` ended with exit code {exit_code}",
        cause=_last(tail(log)),
        hint=f"start `python {script.typed}` by hand, then the client; all that it printed is in `{nearby(log)}`",
    )


def _last(output: str) -> str:
    lines = output.strip().splitlines()
    return f"the last line it printed: `{printable(lines[-1])[:160]}`" if lines else "it printed nothing"
