"""Which scripts are compared, with which options, and what in their output tells how far they have come?

In: nothing. Out: `CASES`. Five scripts are our own examples; seven are pytorch/examples' at `COMMIT`, fetched by
whoever runs the benchmark and never committed here. Options are the script's own; they make steps small enough for two
cores and the training long enough to be measured, and leave the algorithm alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from measuring import SHARED

REPOSITORY = "https://github.com/pytorch/examples"
COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script.

    Attributes:
        name: Ours; also that of its expert's edit.
        words: Script and options, as typed.
        line: A regular expression for lines that the script prints while it trains, each after equally much work. With
            a group that group is the work since the line before.
        work_per_line: Work units from one such line to the next.
        work: Work units that are timed.
        unit: What a work unit is.
        folder: Folder of pytorch/examples; empty where the script is an example of ours.
        prepare: Python script and options that make the data, once.
        environment: What the script needs to run at all with this PyTorch, also without flatout.
        counted: Whether it enters the geometric mean; the others are measured by name only.
    """

    name: str
    words: tuple[str, ...]
    line: str
    work_per_line: float
    work: float
    unit: str = "steps"
    folder: str = ""
    prepare: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    counted: bool = True


MNIST = str(SHARED / "MNIST")
TEXT = str(SHARED / "text" / "tinyshakespeare.txt")
PHOTOGRAPHS = str(SHARED / "imagenet-sample")

ALL = (
    Case(
        name="lenet",
        words=("lenet.py", "--data", MNIST, "--epochs", "200"),
        line=r"^epoch \d+ step \d+00/",
        work_per_line=100,
        work=900,
    ),
    Case(  # its evaluations, which stay plain on every side, are moved out of the window
        name="char_gpt",
        words=("char_gpt.py", "--data", TEXT, "--steps", "100000", "--eval-every", "100000", "--log-every", "10"),
        line=r"^iter \d+:",
        work_per_line=10,
        work=60,
    ),
    Case(
        name="resnet_folder",
        words=("resnet_folder.py", "--data", PHOTOGRAPHS, "--epochs", "1000", "--log-every", "1"),
        line=r"^epoch \d+ step \d+/",
        work_per_line=1,
        work=13,
    ),
    Case(
        name="gan",
        words=("gan.py", "--data", MNIST, "--epochs", "100"),
        line=r"^epoch \d+ step \d+/",
        work_per_line=20,
        work=120,
    ),
    Case(  # whole epochs of 500 steps, with the validation after each
        name="tabular_mlp",
        words=("tabular_mlp.py", "--epochs", "2000"),
        line=r"^epoch \d+/",
        work_per_line=500,
        work=4000,
    ),
    Case(
        name="mnist",
        folder="mnist",
        words=("main.py",),
        line=r"^Train Epoch:",
        work_per_line=10,
        work=120,
    ),
    Case(  # whole epochs of 469 steps, with the test after each
        name="vae",
        folder="vae",
        words=("main.py", "--epochs", "1000"),
        line=r"^====> Test set loss",
        work_per_line=469,
        work=469,
    ),
    Case(
        name="dcgan",
        folder="dcgan",
        words=(
            *("main.py", "--dataset", "mnist", "--dataroot", "../data"),
            *("--batchSize", "16", "--manualSeed", "1"),
        ),
        line=r"^\[\d+/\d+\]\[\d+/\d+\] Loss_D",
        work_per_line=1,
        work=24,
    ),
    Case(
        name="word_language_model",
        folder="word_language_model",
        words=("main.py", "--epochs", "40", "--log-interval", "10"),
        line=r"^\| epoch +\d+ \| +\d+/",
        work_per_line=10,
        work=50,
    ),
    Case(  # a step of LBFGS takes half a minute, so that work is counted in evaluations of its closure
        name="time_sequence_prediction",
        folder="time_sequence_prediction",
        words=("train.py", "--steps", "15"),
        line=r"^loss: ",
        work_per_line=1,
        work=8,
        unit="evaluations of the closure",
        prepare=("generate_sine_wave.py",),
        environment=(("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"),),
    ),
    Case(
        name="imagenet",
        folder="imagenet",
        words=("main.py", "--arch", "resnet18", "--dummy", "--epochs", "1", "--batch-size", "16", "--print-freq", "1"),
        line=r"^Epoch: \[0\]\[",
        work_per_line=1,
        work=8,
    ),
    Case(  # episodes get longer as the policy learns: what compares is a step of the game, which is what earns 1
        name="reinforcement_learning",
        folder="reinforcement_learning",
        words=("reinforce.py", "--log-interval", "1"),
        line=r"^Episode \d+\tLast reward: (\d+)",
        work_per_line=1,
        work=20_000,
        unit="steps of the environment",
    ),
    Case(
        name="word_language_model_transformer",
        folder="word_language_model",
        words=(
            *("main.py", "--epochs", "40", "--log-interval", "10"),
            *("--model", "Transformer", "--use-optimizer", "--lr", "0.001"),
        ),
        line=r"^\| epoch +\d+ \| +\d+/",
        work_per_line=10,
        work=50,
        counted=False,
    ),
)

CASES = {case.name: case for case in ALL}
