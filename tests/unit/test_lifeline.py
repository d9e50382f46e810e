"""A process that serves flatout ends with it, also where that one is dead and has not been waited for yet."""

import os
import subprocess
import sys

import pytest

from flatout.guest import lifeline
from flatout.run import enter_isolation


@pytest.fixture
def zombie():
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="lifelines are Linux's")
@pytest.mark.parametrize("where", [lifeline, enter_isolation])
def test_who_was_killed_just_now_does_not_live(where, zombie):
    assert where._lives(os.getpid()) and where._lives(1)
    assert not where._lives(zombie) and not where._lives(2**22 + 1)


@pytest.mark.skipif(sys.platform != "linux", reason="lifelines are Linux's")
def test_who_comes_too_late_ends_at_once(zombie):
    program = f"from flatout.guest import lifeline; lifeline.hold({zombie}); print('goes on')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
