"""Loaders and training loops of other libraries run under all levers of the input, and give what they give."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
TESTS = Path(__file__).parent.parent
LIBRARIES = ("torchdata", "pytorch_lightning", "transformers", "accelerate", "timm")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Two folders of images with noise."""
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    folder, random = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for number in range(24):
        place = folder / f"class {number % 2}"
        place.mkdir(exist_ok=True)
        image.fromarray(random.integers(0, 256, (40, 48, 3), np.uint8)).save(place / f"{number}.jpg")
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_librarys_loader_gives_the_same(library, num_workers, photographs, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    script = [TESTS / "scripts" / "library_loaders.py", library, str(num_workers), photographs]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    plain, ours = (
        subprocess.run(
            [sys.executable, *command, *script], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=240, check=False,
        )
        for command in ([], ["-m", "flatout", "run", "--fixed", "--levers", "input"])
    )  # fmt: skip
    assert plain.returncode == 0 and "end" in plain.stdout, plain.stderr
    assert (ours.stdout, ours.returncode) == (plain.stdout, plain.returncode), ours.stderr
    assert "steps" in ours.stderr.splitlines()[-1] or "at work" in ours.stderr, ours.stderr
