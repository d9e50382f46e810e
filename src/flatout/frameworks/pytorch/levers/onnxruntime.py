"""onnxruntime: compute the model with ONNX Runtime, in float32.

Each kind of inputs is exported for itself, so that no batch size is built in. Outputs are new arrays at each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.pytorch.runtime_lever import RuntimeLever, telling_nobody
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.exported import Run, Runtime


class Onnxruntime(RuntimeLever):
    """ONNX Runtime."""

    name = "onnxruntime"
    summary = "the model computed by ONNX Runtime, where nothing is trained"
    conflicts: ClassVar = ("compile", "bf16", "channels_last", "fused_attention", "inference_mode", "openvino")
    packages: ClassVar = ("onnxruntime", "onnx", "onnxscript")
    extra = "onnx"

    def runtime(self, settings: Mapping[str, Setting]) -> Runtime:
        """ONNX Runtime, with as many threads as PyTorch has."""
        with telling_nobody():
            import onnxruntime

        return OnnxRuntime(onnxruntime)


class OnnxRuntime:
    """Converts and computes."""

    def __init__(self, package: Any) -> None:
        self._package = package
        self.name = f"onnxruntime-{package.__version__}"

    def convert(self, program: Any, path: Path) -> None:
        """Write it as ONNX."""
        import torch

        exported = torch.onnx.export(program, dynamo=True, verbose=False)
        assert exported is not None  # it is not, where no file is named
        exported.save(str(path / "model.onnx"))

    def session(self, file: Path, *, made: Path | None = None) -> Any:
        """What computes a file; with `made` the graph that becomes of it is written there."""
        import torch

        options = self._package.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        if made is not None:
            options.optimized_model_filepath = str(made)
        return self._package.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def load(self, path: Path) -> Run:
        """What computes what `convert` has written."""
        import torch

        session = self.session(path / "model.onnx")
        names = [one.name for one in session.get_inputs()]

        def run(tensors: Any) -> list[Any]:
            found = session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)})
            return [torch.from_numpy(one) for one in found]

        return run
