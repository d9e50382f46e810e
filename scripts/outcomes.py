"""A plugin for pytest that tells the outcome of each test as soon as it is known, so that a test may end the process.

In: `FLATOUT_OUTCOMES`, a file. Out: a line of JSON when a test begins, and one with its outcome.
"""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """A test begins."""
    _tell(nodeid, "begun", "", 0.0)


def pytest_runtest_logreport(report: Any) -> None:
    """One of the three parts of a test is over; what sets it up and takes it down counts where it fails."""
    if report.when == "call" or report.outcome != "passed":
        _tell(report.nodeid, report.outcome, _message(report), report.duration)


def pytest_sessionfinish() -> None:
    """All tests were run; a process that some of them left behind may keep this one from ending."""
    _tell("", "over", "", 0.0)


def _message(report: Any) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message) if crash is not None else ""


def _tell(nodeid: str, outcome: str, message: str, duration_s: float) -> None:
    test = nodeid.split("::", 1)[-1].replace("::", ".")
    line = json.dumps({"test": test, "outcome": outcome, "message": message[:2000], "duration_s": duration_s})
    with open(os.environ["FLATOUT_OUTCOMES"], "a", encoding="utf-8") as file:
        file.write(line + "\n")
