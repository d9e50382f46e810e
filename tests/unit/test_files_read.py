"""What a run reads of the user's files is listed, in its own process, without disturbing it."""

import json
import subprocess
import sys
from pathlib import Path

CODE = """
import json, sys
sys.path[:0] = ["src"]
from flatout.child.files_read import FilesRead
files = FilesRead((".",), without=("kept",))
import os, lib.model
open("config.json").read(); os.close(os.open("data.bin", os.O_RDONLY)); open("kept/own").read()
open("log.csv", "a").close(); open("log.csv").read()
open("/etc/hostname", "rb").close() if os.path.exists("/etc/hostname") else None
try:
    open(b"none.json")
except OSError:
    pass
os.chdir("src"); open("../later.txt").read()
print(json.dumps(files.found()))
"""


def test_files_that_are_read_and_modules_are_listed_and_what_is_written_is_not(tmp_path):
    (tmp_path / "src" / "lib").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    for name in ("config.json", "data.bin", "kept/own", "later.txt", "src/lib/__init__.py", "src/lib/model.py"):
        (tmp_path / name).write_text("")
    package = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": package, "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    found = {Path(path).relative_to(tmp_path).as_posix() for path in json.loads(done.stdout)}
    assert found == {"config.json", "data.bin", "later.txt", "src/lib/__init__.py", "src/lib/model.py"}
