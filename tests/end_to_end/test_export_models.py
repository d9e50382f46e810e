"""`flatout export` as a user types it: files that load without flatout, or an error and nothing left behind."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from end_to_end.test_tune import HERE, run, three_parts

pytest.importorskip("torch")

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
INFERS = str(SCRIPTS / "infers.py")


def test_files_come_with_a_loader_and_hashes_and_agree(tmp_path: Path) -> None:
    done = run("export", "--json", "--to", "torchscript", "-o", "out", *HERE, INFERS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    told, (model,) = json.loads((out / "export.json").read_text()), json.loads(done.stdout)["models"]
    assert told["models"] == [model] and model["verdict"] == "agrees" and model["batch_is_free"]
    for name, digest in model["sha256"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    loaded = subprocess.run([sys.executable, out / "load.py"], capture_output=True, text=True, check=True)
    assert "answers equal" in loaded.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".flatout"}
    assert not list((tmp_path / ".flatout").glob("infers-*"))


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = run("export", "--to", "torchscript", "-o", ".", *HERE, INFERS, folder=tmp_path)
    assert done.returncode == 2 and "nothing is written over" in three_parts(done.stderr)["cause"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("to", ["tensorrt", "executorch", "onx"])
def test_a_runtime_that_there_is_not_is_refused_by_name(to: str, tmp_path: Path) -> None:
    done = run("export", "--to", to, "-o", "out", *HERE, INFERS, folder=tmp_path)
    assert done.returncode == 2 and to in three_parts(done.stderr)["error"]
    assert not list(tmp_path.iterdir())


def test_a_script_that_trains_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    script = str(SCRIPTS / "trains_and_infers.py")
    done = run("export", "--to", "torchscript", "-o", "out", *HERE, script, folder=tmp_path)
    assert done.returncode == 3 and "--infer" in three_parts(done.stderr)["hint"]
    assert [path.name for path in tmp_path.iterdir()] == [".flatout"]
