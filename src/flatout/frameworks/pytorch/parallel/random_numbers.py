"""What becomes of random numbers while a divided call computes a part of the batch?

Noise that a model draws by itself (`torch.randn_like` in an autoencoder) is drawn for the whole batch, and a rank takes
its part: so it is what one process draws. Masks of dropout are other ones on each rank, drawn from a generator of the
rank's own, because drawing all of them everywhere would cost what is to be divided. After the call every rank's
generators stand at the same place. In: a call's share. Out: contexts around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flatout.frameworks.pytorch.parallel.assembly import Share
from flatout.frameworks.pytorch.seams.random_states import TorchStates

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
OF_SHAPE = ("randn", "rand")
OF_TENSORS = ("randn_like", "rand_like", "randint_like", "normal", "bernoulli", "poisson")
IN_PLACE = ("normal_", "uniform_", "exponential_", "bernoulli_", "log_normal_", "cauchy_", "geometric_")


class NoDropout:
    """No mask is drawn within `on`; it is noted whether one would have been."""

    def __init__(self) -> None:
        self.broken = False
        """Whether something was kept from drawing a mask."""

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        """Around a call of `module`."""
        recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase) and part.dropout]
        replaced: list[tuple[Any, str, Any]] = [(F, name, self._passed_by) for name in DROPOUTS]
        replaced += [(F, "scaled_dot_product_attention", self._attention(F.scaled_dot_product_attention))]
        replaced += [(part, "dropout", 0.0) for part in recurrent]
        self.broken = self.broken or any(part.training for part in recurrent)
        with ExitStack() as stack:
            for holder, name, new in replaced:
                stack.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, new)
            yield

    def _passed_by(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:  # fmt: skip
        self.broken = self.broken or (training and p > 0)
        return input

    def _attention(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(plain)
        def attention(
            query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any
        ) -> torch.Tensor:
            self.broken = self.broken or dropout_p > 0
            return plain(query, key, value, attn_mask, 0.0, *rest, **named)

        return attention


class BatchRandom:
    """Draws for the whole batch, of which a rank takes its part.

    Noise of the shape of one of the parameters is that of a weight, unless it has just the part's samples.
    """

    def __init__(self, share: Share, rank: int, parameters: Iterable[torch.Tensor]) -> None:
        self._share = share
        self._weights = {tuple(parameter.shape) for parameter in parameters}
        self._low, self._size = share.edges[rank], share.size(rank)
        self.drawn = False
        self._within = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Around a call of the rank's part."""
        replaced = (
            (torch, OF_SHAPE, self._of_shape), (torch, ("randint",), self._of_numbers),
            (torch, OF_TENSORS, self._of_tensors), (torch.Tensor, IN_PLACE, self._in_place),
        )  # fmt: skip
        with ExitStack() as stack:
            for holder, name, draw in ((holder, name, draw) for holder, names, draw in replaced for name in names):
                plain = getattr(holder, name)
                if name in vars(holder):
                    stack.callback(setattr, holder, name, plain)
                else:  # it is the base's
                    stack.callback(delattr, holder, name)
                setattr(holder, name, self._replacing(plain, draw))
            yield

    def _replacing(self, plain: Callable[..., torch.Tensor], draw: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        @wraps(plain)
        def drawn(*given: Any, **named: Any) -> torch.Tensor:
            if self._within or named.get("generator") is not None or named.get("out") is not None:
                return plain(*given, **named)
            return draw(plain, *given, **named)

        return drawn

    def _whole(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int] | None:
        """The shape for the whole batch, the dimension that counts samples and how often; None where none does."""
        for dim, size in enumerate(shape):
            blocks, rest = divmod(size, self._size)
            if blocks and not rest and (blocks == 1 or (dim == 0 and shape not in self._weights)):
                return (*shape[:dim], self._share.num * blocks, *shape[dim + 1 :]), dim, blocks
        return None

    def _mine(self, whole: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
        return whole.narrow(dim, self._low * blocks, self._size * blocks)

    def _through(self, draw: Callable[[tuple[int, ...]], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Draw for the whole batch; functions that call each other are replaced once."""
        self.drawn = True
        found = self._whole(shape)
        self._within = True
        try:
            if found is None:
                return draw(shape)
            return self._mine(draw(found[0]), found[1], found[2]).clone()
        finally:
            self._within = False

    def _of_shape(self, plain: Any, *size: Any, requires_grad: bool = False, **named: Any) -> torch.Tensor:
        shape = named.pop("size", size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size)
        found = self._through(lambda new: plain(*new, **named), tuple(map(int, shape)))
        return found.requires_grad_(requires_grad)

    def _of_numbers(self, plain: Any, *given: Any, **named: Any) -> torch.Tensor:
        """`randint(low, high, size)`: the shape comes last."""
        limits, shape = (given, named.pop("size")) if "size" in named else (given[:-1], given[-1])
        return self._through(lambda new: plain(*limits, size=new, **named), tuple(map(int, shape)))

    def _of_tensors(self, plain: Any, *given: Any, requires_grad: bool = False, **named: Any) -> Any:
        """Of the shape of a tensor, which may tell each element's parameters: those of other ranks do not matter."""
        first = next((one for one in (*given, *named.values()) if isinstance(one, torch.Tensor)), None)
        if first is None:
            return plain(*given, **named)
        mine = tuple(first.shape)

        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            def spread(value: Any) -> Any:
                """Parameters for the whole batch with this rank's in their place."""
                if not isinstance(value, torch.Tensor) or tuple(value.shape) != mine or mine == shape:
                    return value
                found = self._whole(mine)
                assert found is not None
                wide = value.new_zeros(shape)
                self._mine(wide, found[1], found[2]).copy_(value)
                return wide

            drawn: torch.Tensor = plain(*map(spread, given), **{name: spread(one) for name, one in named.items()})
            return drawn

        return self._through(draw, mine).requires_grad_(requires_grad)

    def _in_place(self, plain: Any, tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return tensor.copy_(self._of_tensors(plain, tensor.detach(), *rest, **named))


@contextmanager
def drawn_apart(rank: int) -> Iterator[None]:
    """Draws within are this rank's own, and follow from where all ranks stand, which draw once more."""
    seed = int(torch.empty((), dtype=torch.int64).random_())
    outside = TorchStates()
    torch.manual_seed((seed + 1_000_003 * (rank + 1)) % 2**63)
    try:
        yield
    finally:
        outside.restore()
