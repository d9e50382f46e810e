"""How fast can ranks of this machine exchange at most?

In: how many. Out: a ceiling for each kind of exchange, measured now by as many processes that do nothing else; nothing
of them is left, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flatout.errors import MachineError, UsageError
from flatout.records.ceilings import Ceiling, ceiling_of


def exchange_ceilings(program: Path, num_ranks: int, *, limit_s: float = 60.0) -> tuple[Ceiling, ...]:
    """What exchanges between so many ranks of this machine reach.

    Args:
        program: What each rank runs, a framework's.
        num_ranks: At least 2.
        limit_s: Wall seconds after which it ends.

    Raises:
        UsageError: One rank has nobody to exchange with.
        MachineError: The ranks did not come to their end.
    """
    if num_ranks < 2:
        raise UsageError(
            f"`--ranks {num_ranks}` exchange nothing", cause="one process is one rank", hint="e.g. `--ranks 2`"
        )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLATOUT_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryDirectory(prefix="flatout-exchanges-") as folder:
        said, errors = ([Path(folder, f"{kind}-{rank}") for rank in range(num_ranks)] for kind in ("said", "errors"))
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                words = [str(program), str(rank), str(num_ranks), str(Path(folder, "meeting")), "30"]
                with said[rank].open("w") as out, errors[rank].open("w") as err:
                    started.append(
                        subprocess.Popen(
                            [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                            env=environment, start_new_session=True,
                        )
                    )  # fmt: skip
            if _have_ended(started, limit_s):
                return _summarized(said[0].read_text())
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        texts = [path.read_text(errors="replace").strip() for path in errors]
    raise MachineError(
        f"exchanges between {num_ranks} ranks could not be measured",
        cause=next((text.splitlines()[-1] for text in texts if text), f"nothing came within {limit_s:.3g} s"),
        hint="`--ranks 2` needs the least; the framework must have been built with what ranks exchange by",
    )


def _have_ended(ranks: list[subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Whether all come to their end in time."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        codes = [process.poll() for process in ranks]
        if any(codes):
            return False
        if all(code == 0 for code in codes):
            return True
        time.sleep(0.05)
    return False


def _summarized(text: str) -> tuple[Ceiling, ...]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return tuple(
        ceiling_of(
            probe["name"], probe["unit"],
            [line["value"] for line in lines if line["kind"] == "sample" and line["name"] == probe["name"]],
            source=probe["source"],
        )
        for probe in lines if probe["kind"] == "probe"
    )  # fmt: skip
