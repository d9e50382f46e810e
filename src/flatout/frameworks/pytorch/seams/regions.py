"""Where does a setting of the process hold? Inside the model's training calls and the backward through them.

In: how to read the setting and how to write it. Out: it is ours between `start` and `stop`, and the script's elsewhere,
so that an evaluation, the loss and the update are computed as the script wrote them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flatout.frameworks.pytorch.seams.trees import tensors_of


class Region:
    """A setting that is ours at times.

    Args:
        read: The setting as it is.
        write: Sets what `read` has given.
        ours: Sets what a lever wants.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], ours: Callable[[], None]) -> None:
        self._read, self._write, self._ours = read, write, ours
        self._plain: Any = None
        self._over = False

    def start(self) -> None:
        """Ours from here on; nothing where that is so already."""
        if self._plain is None and not self._over:
            self._plain = self._read()
            self._ours()

    def stop(self) -> None:
        """As the script has it."""
        plain, self._plain = self._plain, None
        if plain is not None:
            self._write(plain)

    def end(self) -> None:
        """As the script has it, for good: graphs that were made before go backward so."""
        self.stop()
        self._over = True

    def call(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call with the setting ours, and again when the backward comes to its outputs, until that is over.

        A checkpoint computes its part of the forward again there.
        """
        self.start()
        try:
            out = compute(*args, **kwargs)
        finally:
            self.stop()
        for tensor in tensors_of(out, unique=False):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._backward)
        return out

    def _backward(self, *_: Any) -> None:
        """Before the backward of an output.

        After a backward that raises, PyTorch does not call us; then it is the next forward that ends it.
        """
        if self._plain is None and not self._over:
            torch.autograd.Variable._execution_engine.queue_callback(self.stop)
            self.start()
