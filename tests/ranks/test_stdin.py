"""All ranks read what one process would, from a pipe and from a terminal as well, which can be read once."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time

import pytest

from faulting import FLATOUT, REASON, environment, left_behind

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"ranks cannot be isolated here: {REASON}")

ASKS = """
import sys, torch
rate = float(input("rate? "))
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
x = torch.randn(64, 8)
for step in range(12):
    if step == 6:
        optimizer.param_groups[0]["lr"] = float(sys.stdin.readline())
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
print(round(loss.item(), 5), sys.stdin.isatty(), sys.stdin.fileno(), sys.stdin, repr(sys.stdin.read()))
"""
ON_RANKS = [*FLATOUT, "run", "--quiet", "--ranks", "2", "--hang-timeout", "20s", "asks.py"]


@pytest.fixture
def asks(tmp_path):
    (tmp_path / "asks.py").write_text(ASKS)
    return tmp_path


def through_a_pipe(command, folder, *chunks):
    """What it prints where the chunks come one after the other."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, env=environment()
    )

    def write():
        for chunk in chunks:
            time.sleep(0.5)
            os.write(process.stdin.fileno(), chunk)

    writer = threading.Thread(target=write)
    writer.start()
    writer.join()
    said, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors.decode()
    return said.decode()


def at_a_terminal(command, folder, *answers):
    """What is shown at a terminal where somebody answers: each of `answers` once its question is shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environment())
    shown, waiting = b"", list(answers)
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
            if waiting and waiting[0][0] in shown:
                os.write(terminal, waiting.pop(0)[1])
    except OSError:  # the terminal's other side is closed
        pass
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, shown.decode()
    return shown.decode()


def test_what_comes_through_a_pipe_is_read_by_all_ranks(asks):
    chunks = (b"0.1\n0.0", b"5\n", b"the rest\nof it\n")
    plain = through_a_pipe([sys.executable, "asks.py"], asks, *chunks)
    assert "'the rest\\nof it\\n'" in plain
    assert through_a_pipe(ON_RANKS, asks, *chunks) == plain
    assert not left_behind(asks) and not list(asks.glob(".flatout/*/stdin*"))


def test_a_script_that_looks_whether_there_is_something_to_read_goes_on(asks):
    (asks / "asks.py").write_text(
        "import select\n" + ASKS.replace('float(input("rate? "))', "0.1")
        .replace("step == 6", "select.select([sys.stdin], [], [], 0)[0]").replace("repr(sys.stdin.read())", "''")
    )  # fmt: skip
    reading, writing = os.pipe()
    done = [
        subprocess.run(command, stdin=reading, capture_output=True, text=True, cwd=asks, env=environment(), timeout=90)
        for command in ([sys.executable, "asks.py"], ON_RANKS)
    ]
    os.close(reading)
    os.close(writing)
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    assert done[0].stdout == done[1].stdout


def test_what_is_typed_at_a_terminal_is_read_by_all_ranks(asks):
    answers = ((b"rate? ", b"0.1\n"), (b"0.1", b"0.05\n\x04"))
    plain = at_a_terminal([sys.executable, "asks.py"], asks, *answers)
    assert "True 0" in plain
    assert at_a_terminal(ON_RANKS, asks, *answers) == plain
    assert not left_behind(asks)
