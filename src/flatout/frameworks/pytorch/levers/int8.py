"""int8: compute the model in 8-bit integers, with ONNX Runtime or OpenVINO.

Weights have a scale for each channel, activations scales from the script's first inputs. ONNX Runtime
(`flatout[onnx]`) gets them unsigned, else half of the convolutions stay in float32; for OpenVINO NNCF decides
(`flatout[nncf]`). What is really computed in integers is counted in the graph that the runtime makes of it, for what it
cannot quantize it leaves in float without a word.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.pytorch import quantize
from flatout.frameworks.pytorch.levers.onnxruntime import OnnxRuntime, Onnxruntime
from flatout.frameworks.pytorch.levers.openvino import OpenVino, Openvino
from flatout.frameworks.pytorch.runtime_lever import TO_NOBODY, RuntimeLever, not_installed, telling_nobody
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.calibrated import CalibratedCall, CalibratedRuntime
    from flatout.frameworks.pytorch.session import Session

IN_INTEGERS = frozenset((
    "QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "ConvInteger", "MatMulInteger", "QAttention",
    "DynamicQuantizeMatMul", "DynamicQuantizeLSTM",
))  # fmt: skip
IN_FLOAT = frozenset((
    "Conv", "FusedConv", "ConvTranspose", "MatMul", "FusedMatMul", "Gemm", "FusedGemm", "LSTM", "GRU", "RNN",
    "Attention", "MultiHeadAttention",
))  # fmt: skip
"""Operators of ONNX Runtime that multiply, by what they compute in."""

MULTIPLY = frozenset((
    "Convolution", "Deconvolution", "DeformableConvolution", "FullyConnected", "MatMul", "RNNCell", "RNNSeq",
    "ScaledDotProductAttention",
))  # fmt: skip
"""Those of OpenVINO; what they compute in ends the name of their kernel, for the precision that is told beside it is
that of the weights where these alone are integers."""

OPERATORS = "operators.txt"

NEEDED = {"onnxruntime": (Onnxruntime.packages, Onnxruntime.extra), "openvino": ((*Openvino.packages, "nncf"), "nncf")}
"""By runtime, the packages that quantize for it and compute, and what installs them."""


class Int8(RuntimeLever):
    """8-bit integers."""

    name = "int8"
    summary = "the model computed in 8-bit integers by ONNX Runtime or OpenVINO, where nothing is trained"
    class_ = "lossy"
    check = "answers"
    warm_up_steps = 64
    parameter = "runtime"
    choices: ClassVar = tuple(NEEDED)
    optional = True
    conflicts: ClassVar = (*Onnxruntime.conflicts, "onnxruntime")

    def lacks(self, machine: Machine) -> str | None:
        """A runtime."""
        return None if _installed() else "; ".join(f"{name} {not_installed(*NEEDED[name])}" for name in NEEDED)

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """The runtimes that are installed."""
        return tuple({"runtime": name} for name in _installed())

    def package(self, settings: Mapping[str, Setting]) -> str:
        """The runtime that is named, else the first that is installed."""
        return str(settings.get("runtime") or [*_installed(), *NEEDED][0])

    def call(self, call: Any, runtime: Any, folder: Path, *, at_once: bool) -> CalibratedCall:
        """What takes the place of a model's call."""
        from flatout.frameworks.pytorch.seams.calibrated import CalibratedCall

        return CalibratedCall(call, runtime, folder, at_once=at_once)

    def runtime(self, settings: Mapping[str, Setting]) -> CalibratedRuntime:
        """The runtime, with as many threads as PyTorch has."""
        from flatout.frameworks.pytorch.session import Unavailable

        name = self.package(settings)
        if missing := not_installed(*NEEDED[name]):
            raise Unavailable(f"{name} {missing}")
        with telling_nobody():
            package = import_module(name)
        return _Int8OpenVino(package) if name == "openvino" else _Int8OnnxRuntime(package)

    def evidence(self, session: Session) -> str | None:
        """Calls that were computed in integers, how much of the model that is, and the size of both."""
        said = super().evidence(session)
        parts = [part for one in self.exported(session) if (part := one.described())]
        return said and "; ".join([said, *parts])


def _installed() -> list[str]:
    return [name for name, needed in NEEDED.items() if not not_installed(*needed)]


class _Counted:
    """Counts how many of the operators that multiply are computed in integers."""

    def count(self, num: int, left: Sequence[str], path: Path) -> None:
        """Note how many are, beside those that are left.

        Raises:
            NotExported: None is.
        """
        from flatout.frameworks.pytorch.seams.exported import NotExported

        if not num:
            raise NotExported(f"the runtime quantizes none of it ({', '.join(sorted({*left})) or 'no operator'})")
        (path / OPERATORS).write_text(f"{num} of {num + len(left)}")

    def described(self, path: Path) -> str:
        """What was noted."""
        return f"{(path / OPERATORS).read_text()} operators in int8"


class _Int8OnnxRuntime(_Counted, OnnxRuntime):
    def __init__(self, package: Any) -> None:
        super().__init__(package)
        self.name = f"int8-{self.name}"
        self.inputs: list[Any] = []

    def convert(self, program: Any, path: Path) -> None:
        """Write it as ONNX, quantized."""
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        super().convert(program, path)
        whole, prepared = path / "model.onnx", path / "prepared.onnx"
        names = [one.name for one in self.session(whole).get_inputs()]

        class Reader(CalibrationDataReader):
            def __init__(self, inputs: list[Any]) -> None:
                self._left: Iterator[Any] = iter(inputs)

            def get_next(self) -> Any:
                tensors = next(self._left, None)
                return tensors and {n: t.numpy() for n, t in zip(names, tensors, strict=True)}

        quant_pre_process(str(whole), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared), str(whole), Reader(self.inputs),
            quant_format=QuantFormat.QDQ, per_channel=True, reduce_range=saturates(),
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]},  # answers must not be cut off
        )  # fmt: skip
        prepared.unlink()
        self._look_into(whole)

    def _look_into(self, path: Path) -> None:
        import onnx

        made = path.with_name("made.onnx")
        self.session(path, made=made)
        types = [node.op_type for node in onnx.load(str(made)).graph.node]
        made.unlink()
        self.count(sum(one in IN_INTEGERS for one in types), [one for one in types if one in IN_FLOAT], path.parent)


class _Int8OpenVino(_Counted, OpenVino):
    def __init__(self, package: Any) -> None:
        super().__init__(package)
        self.name = f"int8-{self.name}-nncf-{version('nncf')}"
        self.inputs: list[Any] = []

    def convert(self, program: Any, path: Path) -> None:
        """Write it as OpenVINO does, quantized."""
        import numpy as np

        whole = path / quantize.WHOLE
        whole.mkdir()
        super().convert(program, whole)
        for num, tensors in enumerate(self.inputs):
            np.savez(whole / f"{num:04}.npz", *(one.numpy() for one in tensors))
        fix, environment = "enable" if saturates() else "disable", {**os.environ, **TO_NOBODY}
        command = [sys.executable, "-I", quantize.__file__, str(path), fix, *sys.path]  # -I: flatout stays out of it
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"NNCF ended with {done.returncode}"])[-1])
        shutil.rmtree(whole)
        graph = self.compiled(path / "model.xml").get_runtime_model()
        told = [one.get_rt_info() for one in graph.get_ordered_ops()]
        kernels = [(one["layerType"].value, one["primitiveType"].value) for one in told]
        multiply = [(kind, kernel.lower().endswith("_i8")) for kind, kernel in kernels if kind in MULTIPLY]
        left = [kind for kind, in_integers in multiply if not in_integers]
        self.count(len(multiply) - len(left), left, path)


def saturates() -> bool:
    """Whether sums of products of 8-bit integers may overflow 16 bits: on an x86 without VNNI. Then 7 bits are used."""
    try:
        known = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "sse2" in known and "vnni" not in known
