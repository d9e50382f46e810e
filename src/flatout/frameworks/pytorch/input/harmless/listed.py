"""Which functions are known to do no harm when they are called once more?

They compute a result from what they are given, read a file, or draw from the generators that all share; a few change
what they are given, which has to be the item's own. In: a function. Out: what it does.
"""

from __future__ import annotations

import os
import random
import sys
import types
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from flatout.frameworks.pytorch.seams.patches import original_of

Effect: TypeAlias = Literal["makes", "passes", "changes"]
"""Makes something new; gives what may be a part of what it is given; changes its first operand."""

_MAKING: dict[str, str] = {
    "builtins": """
        int float complex str bool bytes bytearray len range abs sum round divmod pow ord chr hex bin any all callable
        isinstance issubclass slice object format repr ascii hash
    """,
    "math": "*",
    "bisect": "bisect bisect_left bisect_right",
    "colorsys": "*",
    "fractions": "Fraction",
    "operator": """
        itemgetter add sub mul truediv floordiv mod neg getitem lt le eq ne ge gt and_ or_ not_ index contains
    """,
    "os": "fspath listdir",
    "posixpath": "*",
    "genericpath": "*",
    "pathlib": "Path PurePath PosixPath",
    "string": "capwords",
    "textwrap": "dedent",
    "struct": "unpack unpack_from calcsize",
    "re": "match search sub split findall fullmatch compile escape",
    "io": "BytesIO StringIO",
    "json": "load loads dumps",
    "copy": "copy deepcopy",
    "collections": "OrderedDict defaultdict Counter deque",
    "itertools": "*",
    "functools": "partial reduce",
    "urllib.parse": "unquote quote urlparse",
    "zlib": "decompress crc32",
    "base64": "b64decode",
    "warnings": "catch_warnings simplefilter",
    "contextlib": "suppress nullcontext",
    "PIL.Image": "open new fromarray frombytes frombuffer merge blend composite alpha_composite",
    "PIL.ImageOps": "*",
    "PIL.ImageChops": "*",
    "PIL.ImageEnhance": "*",
    "PIL.ImageFilter": "*",
    "PIL.ImageStat": "*",
    "PIL.ImageColor": "*",
    "torch": """
        tensor zeros ones full empty eye arange linspace logspace zeros_like ones_like full_like empty_like rand randn
        randint randperm rand_like randn_like randint_like bernoulli normal multinomial poisson stack cat concat hstack
        vstack dstack clone exp log log2 log10 log1p sqrt rsqrt square sin cos tan asin acos atan atan2 sinh cosh tanh
        sigmoid relu softmax clamp clip floor ceil round trunc sign abs neg reciprocal pow add sub mul div true_divide
        floor_divide remainder fmod matmul mm bmm dot mean std var sum prod cumsum cumprod min max amin amax argmin
        argmax sort argsort topk median mode unique where masked_select index_select gather take nonzero isnan isinf
        isfinite eq ne lt le gt ge equal allclose any all logical_and logical_or logical_not logical_xor bitwise_and
        bitwise_or flip fliplr flipud rot90 roll tril triu outer cross norm bincount histc
        is_tensor is_floating_point numel tile repeat_interleave Size device no_grad inference_mode lerp addcmul addcdiv
        get_default_dtype
    """,
    "torch.nn.functional": """
        interpolate pad one_hot normalize grid_sample affine_grid relu softmax sigmoid avg_pool2d max_pool2d conv2d
        unfold fold
    """,
}
"""Functions that make something new, by module; `*` stands for all public ones."""

_PASSING: dict[str, str] = {
    "builtins": "list tuple dict set frozenset sorted reversed enumerate zip min max iter map filter",
    "torch": """
        squeeze unsqueeze reshape flatten permute transpose movedim swapaxes ravel narrow select chunk split unbind diag
        tensor_split atleast_1d atleast_2d atleast_3d real imag t broadcast_to broadcast_tensors as_tensor asarray
        from_numpy frombuffer meshgrid cartesian_prod Tensor FloatTensor LongTensor IntTensor ByteTensor BoolTensor
        DoubleTensor
    """,
}

_CHANGING: dict[str, str] = {"builtins": "next", "PIL.ImageDraw": "Draw"}

_MODULES = frozenset((*_MAKING, *_PASSING, *_CHANGING))


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


_UNKNOWN_ARRAYS = words("""
    put place copyto fill_diagonal putmask save savez savez_compressed savetxt seterr seterrcall setbufsize memmap
    set_printoptions put_along_axis test show_config fromregex vectorize frompyfunc apply_along_axis apply_over_axes
    piecewise fromfunction nditer errstate fromiter ndarray recarray
""")
"""Functions of NumPy that change what they are given, call it, or write."""

_PASSING_ARRAYS = words("""
    asarray asanyarray ascontiguousarray asfortranarray squeeze ravel reshape transpose swapaxes moveaxis rollaxis flip
    fliplr flipud rot90 atleast_1d atleast_2d atleast_3d broadcast_to broadcast_arrays expand_dims split array_split
    hsplit vsplit dsplit real imag diagonal diag nan_to_num require matrix_transpose permute_dims
    asmatrix matrix trim_zeros real_if_close frombuffer asarray_chkfinite unstack from_dlpack
""")

_TORCHVISION = (
    "torchvision.transforms.functional", "torchvision.transforms._functional", "torchvision.transforms.v2.functional",
    "torchvision.io.image",
)  # fmt: skip


def effect_of(function: Any) -> Effect | None:
    """What a function, or a class that is called, does; None where it is not known.

    >>> import math
    >>> effect_of(math.sqrt), effect_of(sorted), effect_of(print)
    ('makes', 'passes', None)
    """
    if isinstance(function, type) and issubclass(function, BaseException) and function.__module__ == "builtins":
        return "makes"
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return None
    if _draws(function):
        return "changes" if name == "shuffle" else "makes"
    found = _table(frozenset(module for module in _MODULES if module in sys.modules)).get(id(function))
    if found is not None and found[0] is function:
        return found[1]
    return _of_arrays(function, name) or _of_torchvision(function)


@lru_cache(maxsize=8)
def _table(loaded: frozenset[str]) -> dict[int, tuple[Any, Effect]]:
    """The functions of the modules that are loaded, by identity."""
    found: dict[int, tuple[Any, Effect]] = {}
    tables: tuple[tuple[dict[str, str], Effect], ...] = (
        (_MAKING, "makes"), (_PASSING, "passes"), (_CHANGING, "changes")
    )  # fmt: skip
    for table, effect in tables:
        for module, names in table.items():
            if module in loaded:
                own = vars(sys.modules[module])
                wanted = [name for name in own if not name.startswith("_")] if names == "*" else names.split()
                things = [original_of(own.get(name)) for name in wanted]
                found |= {id(thing): (thing, effect) for thing in things if _is_of(thing, module)}
    return found


def _is_of(function: Any, module_name: str) -> bool:
    """Whether something that is called belongs to a library, and has not been put there by somebody else."""
    if type(function) is not types.FunctionType:
        return callable(function)
    home = getattr(sys.modules.get(module_name.split(".")[0]), "__file__", None)
    file = function.__code__.co_filename
    return file.startswith("<frozen ") or (home is not None and file.startswith(os.path.dirname(home) + os.sep))


def _draws(function: Any) -> bool:
    """Whether it is a method of Python's or NumPy's own generator that draws."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if owner is random._inst:  # type: ignore[attr-defined]
        return name not in ("seed", "setstate", "getstate")
    drawing = sys.modules.get("numpy.random.mtrand")
    if drawing is not None and owner is drawing._rand:
        return name not in ("seed", "set_state", "get_state")
    return False


def _of_arrays(function: Any, name: str) -> Effect | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or original_of(vars(numpy).get(name)) is not function or not _is_of(function, "numpy"):
        return None
    if name in _UNKNOWN_ARRAYS or name.startswith("_"):
        return None
    return "passes" if name in _PASSING_ARRAYS else "makes"


def _of_torchvision(function: Any) -> Effect | None:
    """Torchvision's functions on images, and its functions that read them."""
    home = getattr(function, "__module__", "") or ""
    if type(function) is not types.FunctionType or not home.startswith(_TORCHVISION):
        return None
    if not _is_of(function, home):
        return None
    return "changes" if function.__name__ in ("normalize", "erase") else "passes"
