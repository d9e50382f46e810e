"""Do the example scripts run offline, repeat themselves, and build the models they name?"""

import functools
import gzip
import importlib.util
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# settings under which each script ends within seconds
SETTINGS = {
    "lenet": ["--epochs", "1"],
    "resnet_folder": ["--epochs", "1", "--image-size", "32", "--batch-size", "64"],
    "char_gpt": ["--steps", "4", "--batch-size", "4", "--block-size", "16", "--eval-iters", "2", "--sample", "20"],
    "tabular_mlp": ["--epochs", "2", "--samples", "500"],
    "gan": ["--epochs", "1", "--nf", "4"],
}
# the line that carries each script's last metric
METRICS = {
    "lenet": r"^accuracy: [01]\.\d{4}$",
    "resnet_folder": r"^epoch 1 loss \d+\.\d{4} top-1 [01]\.\d{4}$",
    "char_gpt": r"^final: train loss \d+\.\d{4}, val loss \d+\.\d{4}$",
    "tabular_mlp": r"^epoch 2/2 loss \d+\.\d{4} val_accuracy [01]\.\d{4}$",
    "gan": r"^epoch 1 loss_d \d+\.\d{4} loss_g \d+\.\d{4}$",
}
NAMES = list(SETTINGS)
SERVING = ["ask", "serve"]
"""These are run by `test_serving.py`."""


AGAIN_AND_OTHERWISE = """
import runpy, sys
script, *arguments = sys.argv[1:]
for seed in ("3", "4"):
    sys.argv = [script, "--seed", seed, *arguments]
    runpy.run_path(script, run_name="__main__")
    print("\f", end="")
"""
"""Two runs of an example in one process, with the seed of the first run and with another one."""


def run_example(name: str, *arguments: str, before: tuple[str, ...] = ()) -> str:
    """Run one example on the CPU as a user would; its standard output."""
    # one thread, since small operations on several threads crawl when another process takes a core
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, *before, str(EXAMPLES / f"{name}.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def num_parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


def write_idx(folder: Path, compress: bool) -> None:
    """Write 40 training and 20 test images of noise as MNIST's four files."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 40), ("t10k", 20)):
        images = rng.integers(0, 256, size=(count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, size=count, dtype=np.uint8)
        for kind, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            content = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()
            if compress:
                (folder / f"{prefix}-{kind}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / f"{prefix}-{kind}").write_bytes(content)


def write_photos(folder: Path, names: list[str]) -> None:
    for i, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (60, 40 + i), (40 * i, 90, 200 - 40 * i)).save(path, format="JPEG")


@functools.cache
def first_output(name: str) -> str:
    return run_example(name, "--seed", "3", *SETTINGS[name])


@functools.cache
def later_outputs(name: str) -> list[str]:
    return run_example(name, *SETTINGS[name], before=("-c", AGAIN_AND_OTHERWISE)).split("\f")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_offline_and_prints_its_metric(name):
    assert re.search(METRICS[name], first_output(name), flags=re.MULTILINE), first_output(name)


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_with_one_seed_are_equal(name):
    assert later_outputs(name)[0] == first_output(name)


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_another_run(name):
    assert later_outputs(name)[1] not in ("", first_output(name))


@pytest.mark.smoke
def test_there_is_a_run_for_every_example_and_none_of_them_knows_flatout():
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert sorted([*NAMES, *SERVING]) == [script.stem for script in scripts]
    for script in scripts:
        assert "flatout" not in script.read_text(encoding="utf-8")


def test_lenet_has_the_known_number_of_parameters():
    assert num_parameters(load_example("lenet").LeNet()) == 61_706


def test_resnet18_has_the_known_number_of_parameters_and_the_usual_keys():
    model = load_example("resnet_folder").ResNet18(num_classes=1000)
    assert num_parameters(model) == 11_689_512
    keys = list(model.state_dict())
    assert len(keys) == 122
    usual = {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer2.0.downsample.0.weight"}
    assert usual | {"layer4.1.bn2.num_batches_tracked", "fc.weight", "fc.bias"} <= set(keys)


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("below", [".", "raw", "MNIST/raw"])
def test_lenet_reads_idx_files_where_people_keep_them(tmp_path, below, compress):
    write_idx(tmp_path / "mnist" / below, compress)
    (train_images, train_labels), (test_images, test_labels) = load_example("lenet").load_mnist(tmp_path / "mnist")
    assert train_images.shape == (40, 28, 28)
    assert test_images.shape == (20, 28, 28)
    rng = np.random.default_rng(0)
    assert np.array_equal(train_images, rng.integers(0, 256, size=(40, 28, 28), dtype=np.uint8))
    assert np.array_equal(train_labels, rng.integers(0, 10, size=40, dtype=np.uint8))
    assert np.array_equal(test_images, rng.integers(0, 256, size=(20, 28, 28), dtype=np.uint8))
    assert np.array_equal(test_labels, rng.integers(0, 10, size=20, dtype=np.uint8))
    assert np.array_equal(load_example("gan").load_mnist(tmp_path / "mnist"), train_images)


def test_lenet_and_gan_train_on_idx_files(tmp_path):
    write_idx(tmp_path / "raw", compress=True)
    assert "accuracy: " in run_example("lenet", "--data", str(tmp_path), "--epochs", "1", "--batch-size", "16")
    assert "loss_g" in run_example("gan", "--data", str(tmp_path), "--epochs", "1", "--batch-size", "16")


def test_lenet_prepares_an_image_as_torchvision_does():
    lenet = load_example("lenet")
    pixels = np.arange(28 * 28, dtype=np.int64).reshape(28, 28).astype(np.uint8)
    transform = lenet.Compose([lenet.ToTensor(), lenet.Normalize((0.1307,), (0.3081,))])
    expected = (torch.tensor(pixels).unsqueeze(0).float() / 255 - 0.1307) / 0.3081
    tensor = transform(Image.fromarray(pixels))
    assert tensor.shape == (1, 28, 28)
    assert torch.equal(tensor, expected)


def test_photographs_are_labelled_by_folder_or_else_by_file_name(tmp_path):
    photo_folder = load_example("resnet_folder").PhotoFolder
    write_photos(tmp_path / "flat", ["n02_b.JPEG", "n01_a_long_name.JPEG", "n02_c.jpg"])
    flat = photo_folder(tmp_path / "flat", 32)
    assert (flat.classes, flat.labels) == (["n01", "n02"], [0, 1, 1])
    write_photos(tmp_path / "deep", ["cat/n02_b.JPEG", "dog/n01_a.JPEG"])
    deep = photo_folder(tmp_path / "deep", 32)
    assert (deep.classes, deep.labels) == (["cat", "dog"], [0, 1])
    image, label = deep[1]
    assert (image.shape, label) == ((3, 32, 32), 1)


def test_a_folder_of_photographs_can_be_trained_on_with_workers(tmp_path):
    write_photos(tmp_path, [f"n0{i % 2}_{i}.JPEG" for i in range(5)])
    arguments = ["--data", str(tmp_path), "--epochs", "1", "--batch-size", "3", "--image-size", "32"]
    output = run_example("resnet_folder", *arguments, "--workers", "1")
    assert output.startswith("5 images, 2 classes\n")


def test_the_gan_saves_nothing_unless_told_to(tmp_path):
    settings = ["--epochs", "2", "--nf", "4", "--batch-size", "256"]
    run_example("gan", *settings, "--save", str(tmp_path / "out"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "gan_001.pt",
        "gan_002.pt",
        "samples_001.png",
        "samples_002.png",
    ]
    assert Image.open(tmp_path / "out" / "samples_002.png").size == (8 * 28, 8 * 28)
    assert set(torch.load(tmp_path / "out" / "gan_002.pt", weights_only=True)) == {"netG", "netD"}


def test_the_gpt_reads_a_text_file(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("ab" * 200, encoding="utf-8")
    settings = ["--steps", "2", "--batch-size", "2", "--block-size", "8", "--eval-iters", "1", "--sample", "5"]
    assert run_example("char_gpt", "--data", str(text), *settings).startswith("400 characters, 2 different, ")
