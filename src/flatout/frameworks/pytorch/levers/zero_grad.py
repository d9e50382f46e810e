"""zero_grad: set gradients to None where the script has them set to zero.

Backward then writes the first gradient instead of adding it to zeros, and nothing has to be filled with zeros before.
The update is another one for a parameter that a step does not reach: with a gradient of zero, momentum moves it on,
weight decay shrinks it and Adam's moments decay; with None the optimizer leaves it out. A script that reads `.grad`
between clearing and backward finds None. Therefore it is of class semantics, though where every parameter has a
gradient in every step nothing changes but the sign of zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.guest.tracebacks import hide_ours
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    import torch

    from flatout.frameworks.pytorch.seams.patches import Patch
    from flatout.frameworks.pytorch.session import Session

Parameters = Iterable["torch.Tensor"]


class ZeroGrad(Lever):
    """`zero_grad(set_to_none=True)` where the script says False."""

    name = "zero_grad"
    summary = "gradients set to None where the script sets them to zero"
    class_ = "semantics"
    shortens: ClassVar = ("loss", "backward", "optimizer")
    check = "gradients"  # the script's own ways of clearing are called under the lever; updates see gradients as given

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Scripts that call `zero_grad(set_to_none=False)`."""
        return None if facts.zeroes_gradients else "the script does not call `zero_grad(set_to_none=False)`"

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Have each such call set to None."""
        session.kept[self.name] = clearings = Clearings()

        def to_none(parameters: Parameters) -> bool:
            if not session.comparing:
                clearings.num_calls += 1
                clearings.note(parameters)
            return True

        clearings.begin(to_none)

    def release(self, session: Session) -> None:
        """Set to zero as the script says, beginning with what stands at None now."""
        clearings = session.kept.pop(self.name, None)
        if clearings is not None:
            clearings.end()
            clearings.fill()

    def evidence(self, session: Session) -> str | None:
        """Calls that set to None."""
        clearings = session.kept.get(self.name)
        num = clearings.num_calls if clearings is not None else 0
        return f"{num} {'call' if num == 1 else 'calls'} set gradients to None instead of zero" if num else None


class Clearings:
    """Calls of `zero_grad` that ask for zeros, of optimizers and of modules.

    Attributes:
        num_calls: Calls since `begin`, as far as who is told has counted them.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._patches: list[Patch] = []
        self._cleared: dict[int, weakref.ref[torch.Tensor]] = {}

    def begin(self, told: Callable[[Parameters], bool]) -> None:
        """From here on tell of each such call; where the answer is True it sets to None."""
        import torch

        from flatout.frameworks.pytorch.seams.patches import Patch

        for kind, parameters_of in ((torch.optim.Optimizer, _of_optimizer), (torch.nn.Module, _of_module)):
            self._patches.append(Patch(kind, "zero_grad", _telling(told, parameters_of)))

    def end(self) -> None:
        """Tell no more."""
        for patch in self._patches:
            patch.remove()
        self._patches = []

    def note(self, parameters: Parameters) -> None:
        """These are set to None now, those of them that have a gradient."""
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in self._cleared:
                self._cleared[id(parameter)] = weakref.ref(parameter)

    def fill(self) -> None:
        """Give zeros to what was set to None and has no gradient since."""
        import torch

        for reference in self._cleared.values():
            parameter = reference()
            if parameter is not None and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._cleared.clear()


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Parameters:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _of_module(module: torch.nn.Module) -> Parameters:
    return module.parameters()


def _telling(told: Callable[[Parameters], bool], parameters_of: Callable[[Any], Parameters]) -> Any:
    import torch

    is_compiling = torch.compiler.is_compiling

    def make(original: Any, patch: Patch) -> Any:
        @wraps(original)
        def zero_grad(target: Any, *args: Any, **kwargs: Any) -> Any:
            if patch.active and not is_compiling():
                asked = args[0] if args else kwargs.get("set_to_none", True)
                if not asked and told(parameters_of(target)):
                    if args:
                        args = (True, *args[1:])
                    else:
                        kwargs = {**kwargs, "set_to_none": True}
            try:
                return original(target, *args, **kwargs)
            except BaseException as problem:
                hide_ours(problem)
                raise

        return zero_grad

    return make
