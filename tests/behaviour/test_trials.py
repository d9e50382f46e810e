"""Trials leave no trace: nothing on the disk, nothing over the network, no process. A run is not touched by that."""

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest

from flatout.run import isolation
from flatout.run.child_process import environment_for
from flatout.run.trackers import FORGOTTEN, QUIET_TRACKERS, SWITCHES

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "tracked.py"
REASON = isolation.available()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"trials cannot be isolated here: {REASON}")

ON_PURPOSE = {
    "WANDB_MODE": "online",
    "WEAVE_DISABLED": "false",
    "COMET_AUTO_LOG_DISABLE": "0",
    "COMET_START_ONLINE": "1",
    "NEPTUNE_MODE": "sync",
    "MLFLOW_TRACKING_URI": "http://tracking.example",
    "MLFLOW_REGISTRY_URI": "http://registry.example",
    "MLFLOW_RUN_ID": "0f3a",
    "MLFLOW_EXPERIMENT_ID": "7",
    "CLEARML_OFFLINE_MODE": "0",
    "DVC_STUDIO_TOKEN": "secret",
    "DVC_STUDIO_OFFLINE": "false",
    "SWANLAB_MODE": "cloud",
    "TRACKIO_SPACE_ID": "me/losses",
}
"""A user who wants every tracker on, and says so."""

TRACKERS = {
    "wandb",
    "weave",
    "comet",
    "neptune",
    "mlflow",
    "mlflow registry",
    "clearml",
    "dvclive",
    "swanlab",
    "trackio",
}


class Listener:
    """A server that notes what is sent to it."""

    def __init__(self):
        self.heard = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while True:
                connection = self._server.accept()[0]
                with connection, connection.makefile() as lines:
                    self.heard += [line.strip() for line in lines]

    def close(self):
        self._server.close()


@pytest.fixture
def listener():
    found = Listener()
    yield found
    found.close()


@pytest.fixture
def project():
    """A project under a home folder of its own, outside what pytest keeps, with a link that leads out of it."""
    top = Path(tempfile.mkdtemp(prefix="flatout-trials-", dir="/var/tmp"))
    for name in ("home/project", "home/other"):
        (top / name).mkdir(parents=True)
    folder = top / "home" / "project"
    shutil.copy(SCRIPT, folder)
    (folder / "elsewhere").symlink_to(top / "home" / "other")
    (folder / "last.pt").write_bytes(b"the weights of last week")
    yield folder
    shutil.rmtree(top)


def flatout(*words, folder, **extra):
    ceilings = Path(tempfile.gettempdir()) / f"flatout-test-ceilings-{os.getuid()}"  # measured once for all tests
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(ceilings), "HOME": str(folder.parent)}
    return subprocess.run(
        [sys.executable, "-m", "flatout", *words], cwd=folder, env={**environment, **extra},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def contents(folder):
    """Every file with a digest and its time; our own records apart."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and ".flatout" not in path.parts and path.name != "flatout.toml"
    }


def marked(mark):
    """Files that carry the mark in the folders that all users share, and processes that do."""
    places = [Path(place) for place in ("/tmp", "/var/tmp", "/dev/shm")]
    files = [str(path) for place in places for path in place.iterdir() if mark in path.name]
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                mark in (entry / "cmdline").read_text()
                and (entry / "stat").read_text().rpartition(")")[2][1] not in "ZX"
            ):
                processes.append(entry.name)
    return files, processes


@needs_namespaces
def test_tuning_a_script_that_tells_the_world_leaves_no_trace(project, listener):
    mark = f"flatout-mark-{uuid.uuid4().hex}"
    before = contents(project.parent)
    words = ("tune", "--levers", "fused_optimizer", "--budget", "15s", "tracked.py", listener.address, mark)
    done = flatout(*words, folder=project, **ON_PURPOSE)
    assert done.returncode in (0, 6), done.stderr  # 6: others keep the machine too busy to judge
    assert "no such run" not in done.stdout + done.stderr
    assert listener.heard == []
    assert contents(project.parent) == before
    deadline = time.monotonic() + 5
    while marked(mark) != ([], []) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked(mark) == ([], [])


@pytest.mark.smoke
def test_a_run_tells_every_tracker_as_the_user_wants(project, listener):
    words = ("run", "-q", "--levers", "fused_optimizer", "tracked.py", listener.address, "none", "--steps", "40")
    done = flatout(*words, folder=project, **ON_PURPOSE)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(listener.heard) == TRACKERS


@pytest.mark.smoke
def test_what_a_user_says_about_trackers_gives_way_in_trials(tmp_path, monkeypatch):
    for name, value in ON_PURPOSE.items():
        monkeypatch.setenv(name, value)
    found = environment_for(tmp_path / "session.json", QUIET_TRACKERS)
    assert {name: found[name] for name in SWITCHES} == SWITCHES
    assert not {*FORGOTTEN} & {*found}
    assert not {*SWITCHES} & {*FORGOTTEN}
    assert found["DVC_STUDIO_TOKEN"] == "secret"
