"""For which runtimes are models exported, what writes their files, and what loads these without PyTorch or flatout?

In: a name as typed after `--to`. Out: a runtime as `seams/exported.py` wants it, and a loader's text. Loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.frameworks.pytorch.levers.onnxruntime import Onnxruntime
from flatout.frameworks.pytorch.levers.openvino import Openvino

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.exported import Run, Runtime

LOADER = '''"""Loads what `flatout export` has written here, and compares its outputs with the model's own."""

from pathlib import Path

import numpy as np
{package}

here = Path(__file__).resolve().parent
{load}
inputs, outputs = (list(np.load(here / name).values()) for name in ("inputs.npz", "outputs.npz"))
for found, expected in zip(model(*inputs), outputs, strict=True):
    apart = np.linalg.norm(np.subtract(found, expected, dtype="f8")) / max(np.linalg.norm(expected), 1e-30)
    largest = [one.argmax(-1) for one in (found, expected)] if expected.ndim > 1 else (found, expected)
    equal = np.isclose(*largest, rtol=0.01, atol=0)
    print(f"outputs {{apart:.1e}} apart, {{equal.sum()}} of {{equal.size}} answers equal")
'''

_ONNX = """session = onnxruntime.InferenceSession(here / "model.onnx", providers=["CPUExecutionProvider"])
names = [one.name for one in session.get_inputs()]


def model(*arrays):
    return session.run(None, dict(zip(names, arrays, strict=True)))

"""

_OPENVINO = """compiled = openvino.Core().compile_model(here / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def model(*arrays):
    return list(compiled(list(arrays)).values())

"""

_TORCHSCRIPT = """module = torch.jit.load(here / "model.pt")


def model(*arrays):
    with torch.no_grad():
        return [one.numpy() for one in module(*map(torch.from_numpy, arrays))]

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One runtime.

    Attributes:
        packages: What has to be installed, the runtime itself first.
        extra: What installs them: `flatout[onnx]`.
        runtime: What writes and loads its files, given a module whose inputs and outputs are tensors, and inputs.
        loader: The text of `load.py`.
    """

    packages: tuple[str, ...]
    extra: str
    runtime: Callable[[Any, Sequence[Any]], Runtime]
    loader: str


def _loader(package: str, load: str) -> str:
    return LOADER.format(package=f"import {package}", load=load)


FORMATS = {
    "onnx": Format(
        packages=Onnxruntime.packages,
        extra=Onnxruntime.extra,
        runtime=lambda module, inputs: Onnxruntime().runtime({}),
        loader=_loader("onnxruntime", _ONNX),
    ),
    "openvino": Format(
        packages=Openvino.packages,
        extra=Openvino.extra,
        runtime=lambda module, inputs: Openvino().runtime({}),
        loader=_loader("openvino", _OPENVINO),
    ),
    "torchscript": Format(
        packages=("torch",),
        extra="pytorch",
        runtime=lambda module, inputs: _TorchScript(module, inputs),
        loader=_loader("torch", _TORCHSCRIPT),
    ),
}

NOT_BUILT = {
    "executorch": "its files are made for one device's delegate, and nothing here can run and check them",
    "tensorrt": "its engines are built on the GPU that runs them, and nothing here can check them",
}


def exports() -> dict[str, str]:
    """Each format, and why nothing can be exported to it here; empty where it can."""
    found = dict(NOT_BUILT)
    for name, one in FORMATS.items():
        missing = [package for package in one.packages if find_spec(package) is None]
        lacks = " and ".join(f"`{package}`" for package in missing)
        found[name] = f"{lacks} not installed: `pip install 'flatout[{one.extra}]'`" if missing else ""
    return found


class _TorchScript:
    """Traced, which is safe after `torch.export` has refused control flow that depends on values."""

    def __init__(self, module: Any, inputs: Sequence[Any]) -> None:
        self.name = "torchscript"
        self._module, self._inputs = module, tuple(inputs)

    def convert(self, program: Any, path: Path) -> None:
        import torch

        torch.jit.trace(self._module, self._inputs, check_trace=False).save(str(path / "model.pt"))

    def load(self, path: Path) -> Run:
        import torch

        module = torch.jit.load(str(path / "model.pt"))
        return lambda tensors: list(module(*tensors))
