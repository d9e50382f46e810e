"""openvino: compute the model with OpenVINO, in float32.

float32 is asked for, because OpenVINO chooses bfloat16 by itself where the processor has it. Calls at one time have a
request each, for a shared one gives wrong answers; outputs are copied, for the next call writes where they were.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.pytorch.runtime_lever import RuntimeLever, telling_nobody
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.exported import Run, Runtime


class Openvino(RuntimeLever):
    """OpenVINO."""

    name = "openvino"
    summary = "the model computed by OpenVINO in float32, where nothing is trained"
    conflicts: ClassVar = ("compile", "bf16", "channels_last", "fused_attention", "inference_mode", "onnxruntime")
    packages: ClassVar = ("openvino",)
    extra = "openvino"

    def runtime(self, settings: Mapping[str, Setting]) -> Runtime:
        """OpenVINO, with as many threads as PyTorch has."""
        with telling_nobody():
            import openvino

        return OpenVino(openvino)


class OpenVino:
    """Converts and computes."""

    def __init__(self, package: Any) -> None:
        self._package = package
        self.name = f"openvino-{package.__version__.partition('-')[0]}"

    def convert(self, program: Any, path: Path) -> None:
        """Write it as OpenVINO does."""
        with telling_nobody():
            model = self._package.convert_model(program)
        self._package.save_model(model, str(path / "model.xml"), compress_to_fp16=False)

    def compiled(self, file: Path) -> Any:
        """What computes a file."""
        import torch

        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        with own_signal_stack():
            return self._package.Core().compile_model(str(file), "CPU", settings)

    def load(self, path: Path) -> Run:
        """What computes what `convert` has written."""
        import torch

        model = self.compiled(path / "model.xml")
        outputs, idle = list(model.outputs), list[Any]()

        def run(tensors: Any) -> list[Any]:
            try:
                request = idle.pop()
            except IndexError:
                request = model.create_infer_request()
            found = request.infer([t.numpy() for t in tensors], share_inputs=True, share_outputs=False)
            idle.append(request)
            return [torch.from_numpy(found[one]) for one in outputs]

        return run


class _SignalStack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextlib.contextmanager
def own_signal_stack() -> Iterator[None]:
    """Behind this the thread handles signals on the stack that it had before (`sigaltstack(2)`).

    Compiling a model has it handle them on one that belongs to the model. Where two models go in the order in which
    they came, a stack that is gone is left behind, and the next signal (Ctrl-C) ends Python with a segmentation fault.
    """
    stack, set_stack = _SignalStack(), ctypes.CDLL(None).sigaltstack
    set_stack(None, ctypes.byref(stack))
    try:
        yield
    finally:
        set_stack(ctypes.byref(stack), None)
