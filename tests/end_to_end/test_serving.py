"""Scripts that serve, under a client of the user's; no timing is asserted."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from end_to_end.test_tune import HERE, run, three_parts

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SERVE, ASK = str(EXAMPLES / "serve.py"), str(EXAMPLES / "ask.py")


@pytest.fixture
def port() -> str:
    """One that is free."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def test_a_server_is_tuned_under_a_client_by_the_time_in_its_model(tmp_path: Path, port: str) -> None:
    client, levers = f"{ASK} --port {port} --requests 100", "inference_mode,channels_last"
    words = ["--client", client, "--levers", levers, "--budget", "10s"]
    done = run("tune", "--json", *words, *HERE, SERVE, "--port", port, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["goal"] == "latency" and found["latency"]["plain"]["num_calls"] > 100
    shown = run("report", folder=tmp_path).stdout
    assert "in the models" in shown and f"--client '{client}'" in re.sub(r"[\s\\]+", " ", shown), shown
    assert "requests, p50" in (Path(found["run"]) / "client-1.log").read_text()
    assert not subprocess.run(["pgrep", "-f", f"port {port}"], capture_output=True).stdout


def test_answers_of_a_run_under_levers_are_plains_and_it_ends_as_plain_does(tmp_path: Path, port: str) -> None:
    digests, ends = set(), set()
    for words in ([sys.executable], [sys.executable, "-m", "flatout", "run", "--levers", "channels_last,threads=1"]):
        served = subprocess.Popen([*words, SERVE, "--port", port], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert served.stdout is not None and "serving" in served.stdout.readline()
        asked = subprocess.run(
            [sys.executable, ASK, "--port", port, "--requests", "60"], capture_output=True, text=True
        )
        digests.add(asked.stdout.rpartition(" ")[2])
        served.send_signal(signal.SIGINT)
        ends.add(served.wait(20))
        served.stdout.close()
    assert len(digests) == 1 and "" not in digests and len(ends) == 1


@pytest.mark.parametrize(
    ("client", "error", "cause"),
    [
        ("nobody.py", "no such client: `nobody.py`", "no Python file here"),
        ("'", "is no command", "quotation"),
        (f"{ASK} --port 1", "the client of", "Connection refused"),
        ("true", "led to too few calls", "ended well"),
    ],
)
def test_a_client_that_does_not_ask_is_an_error(client: str, error: str, cause: str, tmp_path: Path, port: str) -> None:
    words = ["--client", client, "--start-limit", "4s"]
    found = three_parts(run("why", *words, *HERE, SERVE, "--port", port, folder=tmp_path).stderr)
    assert error in found["error"] and cause in found["cause"], found


def test_a_script_that_listens_nowhere_and_one_whose_port_is_taken_say_so(tmp_path: Path, port: str) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time, torch\nprint('loading', flush=True)\ntime.sleep(60)\n")
    words = ["--client", ASK, "--start-limit", "4s", *HERE]
    found = three_parts(run("why", *words, str(script), folder=tmp_path).stderr)
    assert "did not begin to serve" in found["error"] and "loading" in found["cause"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(port)))
        taken.listen()
        begun_s = time.monotonic()
        found = three_parts(run("why", *words, SERVE, "--port", port, folder=tmp_path).stderr)
    assert "Address already in use" in found["error"] and time.monotonic() - begun_s < 30
