"""How do calls of modules come to go through functions of ours, hooks and all?

In: modules, and a function for each. Out: they are called within a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CALLED = "_compiled_call_impl"
"""What `nn.Module.__call__` calls in the place of a module's hooks and its `forward`, where there is one. The only
attribute of which that is so; PyTorch leaves it out of pickles and copies."""


@contextmanager
def intercepted(given: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Within, functions are called in the place of modules; `plainly` makes a call as it would have been made."""
    taken: list[dict[str, Any]] = []
    try:
        for module, function in given:
            own = vars(module)
            if own.get(_CALLED) is None:
                own[_CALLED] = function
                taken.append(own)
        yield
    finally:
        for own in taken:
            del own[_CALLED]


def plainly(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a module with its hooks."""
    return module._call_impl(*args, **kwargs)
