"""Where do the pixels of an image lie, and the numbers of a tensor? Arrays of other people's memory.

PIL's own memory is looked at where PIL hands it out, which saves packing pixels; a tensor's is written to without
PyTorch's `numpy()`, after which the tensor could not be resized any more. In: an image, or a tensor. Out: an array.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch


class _ArrowArray(ctypes.Structure):
    """Source: the Arrow C data interface, https://arrow.apache.org/docs/format/CDataInterface.html."""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64), ("null_count", ctypes.c_int64), ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64), ("n_children", ctypes.c_int64), ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
]  # fmt: skip

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def pixels_of(image: Any) -> tuple[np.ndarray, Any]:
    """The pixels, `[height, width]` or `[height, width, 3 or 4]`, and what must be kept while they are read."""
    if image.mode == "RGB" and hasattr(image, "__arrow_c_array__"):
        width, height = image.size
        try:
            capsule = image.im.__arrow_c_array__()
        except ValueError:  # the image lies in several blocks of memory
            return np.asarray(image), None
        array = _ArrowArray.from_address(_pointer(capsule, b"arrow_array"))
        if (array.length, array.offset, array.n_children) == (width * height, 0, 1):
            words = array.children[0].contents
            if (words.length, words.offset, words.n_buffers) == (4 * width * height, 0, 2):
                memory = (ctypes.c_uint8 * (4 * width * height)).from_address(words.buffers[1])
                return np.frombuffer(memory, np.uint8).reshape(height, width, 4), capsule
    return np.asarray(image), None


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor on the CPU, which has to be kept while the array is used."""
    num = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_uint8 * (num * tensor.element_size())).from_address(tensor.data_ptr())
    strides = [stride * tensor.element_size() for stride in tensor.stride()]
    kind = str(tensor.dtype).removeprefix("torch.")
    return np.ndarray(tuple(tensor.shape), kind, memoryview(memory), strides=strides)
