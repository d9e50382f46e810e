"""How does NNCF quantize a model of OpenVINO? As a program of its own: it prints, logs, and draws random numbers.

It also sets the class of Python's loggers, and nothing of that is to happen to the script. Started as
`python -I quantize.py FOLDER FIX PATH...`. In: a model and inputs in a folder of the folder, whether NNCF is to keep
sums within 16 bits (`nncf.OverflowFix`), and the entries of `sys.path`. Out: `model.xml` in the folder.
"""

import sys
from pathlib import Path

WHOLE = "whole"
"""The folder with the model in float32 and, for each of its calls, a file of its inputs."""


def main(folder: Path, fix: str) -> None:
    """Quantize, from all inputs."""
    import nncf
    import numpy as np
    import openvino

    inputs = nncf.Dataset(sorted((folder / WHOLE).glob("*.npz")), lambda file: list(np.load(file).values()))
    quantized = nncf.quantize(
        openvino.Core().read_model(folder / WHOLE / "model.xml"),
        inputs,
        subset_size=inputs.get_length(),
        advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix(fix)),
    )
    openvino.save_model(quantized, folder / "model.xml", compress_to_fp16=False)


if __name__ == "__main__":
    sys.path[:] = sys.argv[3:]
    main(Path(sys.argv[1]), sys.argv[2])
