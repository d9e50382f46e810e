"""int8: compute the model in 8-bit integers, with ONNX Runtime.

Weights are signed with a scale for each channel, activations unsigned with scales from the script's first inputs: with
signed activations half of the convolutions stay in float32. What is really computed in integers is counted in the graph
that ONNX Runtime makes of it, for what it cannot quantize it leaves in float without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.pytorch.levers.onnxruntime import OnnxRuntime
from flatout.frameworks.pytorch.runtime_lever import RuntimeLever, telling_nobody
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.calibrated import CalibratedCall
    from flatout.frameworks.pytorch.session import Session

IN_INTEGERS = frozenset((
    "QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "ConvInteger", "MatMulInteger", "QAttention",
    "DynamicQuantizeMatMul", "DynamicQuantizeLSTM",
))  # fmt: skip
IN_FLOAT = frozenset((
    "Conv", "FusedConv", "ConvTranspose", "MatMul", "FusedMatMul", "Gemm", "FusedGemm", "LSTM", "GRU", "RNN",
    "Attention", "MultiHeadAttention",
))  # fmt: skip
"""Operators that multiply, by what ONNX Runtime computes them in."""


OPERATORS = "operators.txt"


class Int8(RuntimeLever):
    """8-bit integers."""

    name = "int8"
    summary = "the model computed in 8-bit integers by ONNX Runtime, where nothing is trained"
    class_ = "lossy"
    check = "answers"
    warm_up_steps = 64
    parameter = "runtime"
    choices: ClassVar = ("onnxruntime",)
    optional = True
    conflicts: ClassVar = (
        "compile",
        "bf16",
        "channels_last",
        "fused_attention",
        "inference_mode",
        "onnxruntime",
        "openvino",
    )
    packages: ClassVar = ("onnxruntime", "onnx", "onnxscript")
    extra = "onnx"

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """The one runtime that there is."""
        return ({"runtime": "onnxruntime"},)

    def call(self, call: Any, folder: Path, *, at_once: bool) -> CalibratedCall:
        """What takes the place of a model's call."""
        from flatout.frameworks.pytorch.seams.calibrated import CalibratedCall

        return CalibratedCall(call, self.runtime(), folder, at_once=at_once)

    def runtime(self) -> _Int8Runtime:
        """ONNX Runtime, with as many threads as PyTorch has."""
        with telling_nobody():
            import onnxruntime

        return _Int8Runtime(onnxruntime)

    def evidence(self, session: Session) -> str | None:
        """Calls that were computed in integers, how much of the model that is, and the size of both."""
        said = super().evidence(session)
        found = [call.kept[self.name] for call in session.calls.found if self.name in call.kept]
        parts = [part for one in found if (part := one.described())]
        return said and "; ".join([said, *parts])


class _Int8Runtime(OnnxRuntime):
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

    def described(self, path: Path) -> str:
        """How many operators that multiply are computed in integers."""
        return f"{(path / OPERATORS).read_text()} operators in int8"

    def _look_into(self, path: Path) -> None:
        """Count what is computed in integers.

        Raises:
            NotExported: Nothing is.
        """
        import onnx

        from flatout.frameworks.pytorch.seams.exported import NotExported

        made = path.with_name("made.onnx")
        self.session(path, made=made)
        types = [node.op_type for node in onnx.load(str(made)).graph.node]
        made.unlink()
        num, left = sum(one in IN_INTEGERS for one in types), [one for one in types if one in IN_FLOAT]
        if not num:
            raise NotExported(f"ONNX Runtime quantizes none of it ({', '.join(sorted({*left})) or 'no operator'})")
        path.with_name(OPERATORS).write_text(f"{num} of {num + len(left)}")


def saturates() -> bool:
    """Whether sums of products of 8-bit integers may overflow 16 bits: on an x86 without VNNI. Then 7 bits are used."""
    try:
        known = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "sse2" in known and "vnni" not in known
