"""A fault on one rank has a defined end: all end, the reason is told once, and nothing is left behind."""

from __future__ import annotations

import http.server
import shutil
import socket
import subprocess
import threading
import time

import pytest
import torch

from faulting import FLATOUT, REASON, SCRIPTS, environment, left_behind, parts
from tiers import some

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"ranks cannot be isolated here: {REASON}")


def on_two_ranks(folder, *words, limit_s=90, **changes):
    return subprocess.run(
        [*FLATOUT, "run", "--ranks", "2", "--hang-timeout", "5s", *words],
        capture_output=True, text=True, timeout=limit_s, env=environment(**changes), cwd=folder,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def faulty(folder, fault, who):
    script = folder / f"faulty_{fault}_{who}.py"  # a name of its own, by which what is left of it is found
    shutil.copy(SCRIPTS / "faulty_rank.py", script)
    done = on_two_ranks(folder, str(script), fault, who)
    left = subprocess.run(["pgrep", "-f", script.name], capture_output=True, text=True, check=False).stdout
    assert not left, "processes are left"
    assert not list(folder.glob(".flatout/*/scratch*")), "what ranks above 0 wrote is left"
    return done


@pytest.mark.smoke
def test_what_one_process_prints_saves_and_returns_two_ranks_do(tmp_path):
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    for folder in (alone, ranks):
        folder.mkdir()
        shutil.copy(SCRIPTS / "faulty_rank.py", folder)
    wanted = subprocess.run(
        [FLATOUT[0], "faulty_rank.py", "none", "0"], capture_output=True, text=True, cwd=alone, check=True
    )
    done = on_two_ranks(ranks, "faulty_rank.py", "none", "0")
    assert (done.returncode, done.stdout) == (0, wanted.stdout)
    assert "2 ranks, 60 steps" in done.stderr
    assert {p.name for p in ranks.iterdir()} - {".flatout"} == {p.name for p in alone.iterdir()}
    saved, kept = torch.load(ranks / "trained.pt"), torch.load(alone / "trained.pt")
    assert list(saved) == list(kept)
    assert all(torch.allclose(saved[name], kept[name], rtol=1e-5) for name in kept)


def test_the_exception_of_a_rank_is_shown_once_with_its_rank(tmp_path):
    done = faulty(tmp_path, "raise", "1")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: planted") == 1
    assert "rank 1 ended with exit code 1" in done.stderr
    assert "Lost" not in done.stderr


def test_an_exception_on_all_ranks_is_that_of_one_process(tmp_path):
    done = faulty(tmp_path, "raise", "all")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: planted") == 1
    assert "rank" not in done.stderr.partition("ValueError: planted")[0].replace("faulty_rank", "").replace("ranks", "")


@pytest.mark.parametrize("who", some(["0", "1"], "1"))
def test_a_rank_that_is_killed_ends_the_run_as_killed(tmp_path, who):
    begun_s = time.perf_counter()
    done = faulty(tmp_path, "kill", who)
    assert done.returncode in (-9, 137)
    assert time.perf_counter() - begun_s < 60
    assert ("rank 1 was killed by SIGKILL" in done.stderr) == (who == "1")


@pytest.mark.parametrize("who", some(["0", "1"], "1"))
def test_a_rank_that_hangs_is_named_with_its_line_and_who_waits_for_it(tmp_path, who):
    done = faulty(tmp_path, "hang", who)
    said = parts(done.stderr)
    other = {"0": "1", "1": "0"}[who]
    assert done.returncode == 3
    assert f"rank {who} did not come" in said["error"] and f"rank {other} waits" in said["error"]
    assert "in strike" in said["cause"]
    assert f"rank {who}, the innermost call first" in done.stderr


@pytest.mark.parametrize("how", ["end", "linger"])  # an end that takes longer than the time limit is no hang
def test_a_rank_whose_loop_ends_early_is_named(tmp_path, how):
    said = parts(faulty(tmp_path, how, "1").stderr)
    assert said["error"] == "rank 1 ended, and rank 0 waits for it"


@pytest.mark.parametrize("who", ["0", "1"])
def test_ranks_that_call_models_in_another_order_are_told(tmp_path, who):
    done = faulty(tmp_path, "crossed", who)
    said = parts(done.stderr)
    assert done.returncode == 3
    assert said["error"] == "ranks exchanged what does not fit together"
    assert said["cause"].startswith("the exchanges they were in: rank 0: ") and "; rank 1: " in said["cause"]


def test_a_lock_that_one_holds_while_it_waits_for_another_is_found(tmp_path):
    done = faulty(tmp_path, "locks", "all")
    said = parts(done.stderr)
    assert done.returncode == 3
    assert "did not come" in said["error"] and "waits" in said["error"]
    assert "in take" in said["cause"]


def test_a_port_that_is_taken_is_named(tmp_path):
    shutil.copy(SCRIPTS / "faulty_rank.py", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        there = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", there, "faulty_rank.py", "none", "0"]
        done = on_two_ranks(tmp_path, *words)
    said = parts(done.stderr)
    assert done.returncode == 5 and not (tmp_path / "trained.pt").exists()
    assert said["error"] == f"the machines did not meet at `{there}`"
    assert "in use" in said["cause"] and "the port free there" in said["hint"]


def test_memory_that_runs_out_on_one_rank_ends_all(tmp_path):
    done = faulty(tmp_path, "memory", "1")
    assert done.returncode == 1
    assert "rank 1 ended with exit code 1" in done.stderr and "can't allocate memory" in done.stderr


def test_a_rank_that_keeps_others_waiting_is_named(tmp_path):
    done = faulty(tmp_path, "late", "1")
    assert done.returncode == 0
    assert "of it for rank 1" in done.stderr


def test_rank_0_saves_in_peace_when_others_have_ended(tmp_path):
    done = faulty(tmp_path, "exit", "all")
    assert done.returncode == 3
    assert list(torch.load(tmp_path / "saved.pt")) == ["weight", "bias"]


class _Numbers(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(" ".join(map(str, range(48))).encode())

    def log_message(self, *_):
        pass


def test_what_is_set_up_once_is_set_up_once(tmp_path):
    server = http.server.HTTPServer(("127.0.0.1", 0), _Numbers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        shutil.copy(SCRIPTS / "setting_up.py", tmp_path)
        done = on_two_ranks(tmp_path, "setting_up.py", f"http://127.0.0.1:{server.server_port}/", no_proxy="*")
    finally:
        server.shutdown()
    assert (done.returncode, done.stdout) == (0, "8 lines\n"), done.stderr
    assert len(_Numbers.asked) == 1
    assert len((tmp_path / "runs/first/log.csv").read_text().splitlines()) == 8
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_script_sees_no_ranks(tmp_path):
    script = tmp_path / "looks.py"
    script.write_text(
        "import os, sys, torch\n"
        "m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "for _ in range(6):\n    o.zero_grad(); m(torch.ones(8, 4)).sum().backward(); o.step()\n"
        "names = [n for n in os.environ if 'RANK' in n or 'WORLD' in n or 'ELASTIC' in n or 'FLATOUT' in n]\n"
        "print(names, torch.distributed.is_initialized(), sys.stdin.read().strip())\n"
        "import subprocess\n"
        "print(subprocess.run(['env'], capture_output=True, text=True).stdout.count('RANK'))\n"
    )
    (tmp_path / "words").write_text("from a file\n")
    with open(tmp_path / "words") as words:
        done = subprocess.run(
            [*FLATOUT, "run", "--ranks", "2", "looks.py"], capture_output=True, text=True, timeout=90,
            env=environment(RANK="mine"), cwd=tmp_path, stdin=words, check=False,
        )  # fmt: skip
    assert done.stdout == "['RANK'] False from a file\n1\n", done.stderr


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--ranks", "0"), "`--ranks 0` is not a number of ranks"),
        (("--ranks", "2", "--learn"), "`--ranks` and `--learn` cannot be combined"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(tmp_path, words, error):
    (tmp_path / "train.py").write_text("open('ran', 'w')\n")
    done = subprocess.run(
        [*FLATOUT, "run", *words, "train.py"], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60
    )
    assert parts(done.stderr)["error"] == error
    assert not (tmp_path / "ran").exists()


def test_a_rank_that_ends_before_it_meets_the_others_is_noticed_long_before_the_hang_timeout(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys, torch\n"
        "if 'output-rank' in os.readlink('/proc/self/fd/1'):\n    sys.exit(0)\n"
        "m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "for _ in range(6):\n    o.zero_grad(); m(torch.ones(8, 4)).sum().backward(); o.step()\n"
    )
    done = on_two_ranks(tmp_path, "--hang-timeout", "10m", "train.py", limit_s=60)
    assert done.returncode == 3 and parts(done.stderr)["error"] == "rank 1 ended, and rank 0 waits for it"


def test_a_script_that_makes_itself_distributed_is_refused_with_the_ranks_that_it_has_started(tmp_path):
    (tmp_path / "train.py").write_text(
        "import subprocess, sys, torch.distributed as d\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', 'left_by_a_refused_rank'])\n"
        "d.init_process_group('gloo')\n"
    )
    done = on_two_ranks(tmp_path, "train.py")
    assert done.returncode == 3 and not left_behind(tmp_path)
    assert parts(done.stderr)["error"] == "the script makes itself distributed (`init_process_group`)"
