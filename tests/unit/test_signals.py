"""The tests of `flatout.run.signals`, in a process of their own.

They send signals to themselves; threads that other tests started (numerical libraries') would take them.
"""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).with_name("signals_in_a_process_of_their_own.py")


def test_signals_find_the_script_and_leave_the_program_as_it_was():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
