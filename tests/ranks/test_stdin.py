"""What can be read once is refused by name on the ranks that cannot read it; nothing is left behind."""

from __future__ import annotations

import subprocess

import pytest

from faulting import FLATOUT, REASON, environment, left_behind, parts

ASKS = """
import sys, torch
rate = float({ask})
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
for step in range(12):
    optimizer.zero_grad()
    model(torch.ones(64, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.skipif(REASON is not None, reason=f"ranks cannot be isolated here: {REASON}")
@pytest.mark.parametrize("ask", ["input('rate? ')", "sys.stdin.readline()", "sys.stdin.buffer.read()"])
def test_a_script_that_reads_what_can_be_read_once_is_refused(tmp_path, ask):
    (tmp_path / "asks.py").write_text(ASKS.format(ask=ask))
    done = subprocess.run(
        [*FLATOUT, "run", "--quiet", "--ranks", "2", "--hang-timeout", "20s", "asks.py"], input="0.1\n",
        capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    said = parts(done.stderr)
    assert "reads from stdin" in said["error"] and "read once" in said["cause"] and "as a file" in said["hint"]
    assert not left_behind(tmp_path)
