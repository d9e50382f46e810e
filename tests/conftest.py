"""What all tests share."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

SLOW_FOLDERS = [Path(__file__).parent / name for name in ("behaviour", "end_to_end", "faults", "ranks")]


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items):
    """Folders whose tests start processes are slow, but for the tests that are marked `smoke`."""
    for item in items:
        if any(folder in item.path.parents for folder in SLOW_FOLDERS) and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.slow)


# A shell starts what it puts into the background with Ctrl-C ignored, `nohup` with SIGHUP, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def nothing_ends_the_tests(monkeypatch):
    """`flatout run` ends its process as the script ended: reached in this very process, no test after it would run,
    no failure before it would be told, and the exit code would be the script's 0. Forked processes may end so."""
    ends, here = os._exit, os.getpid()

    def end(code):
        if os.getpid() != here:
            ends(code)
        raise AssertionError(f"os._exit({code}) in the process that runs the tests")

    monkeypatch.setattr(os, "_exit", end)
