"""Which functions and methods are known to do no harm when they are called once more?

They compute a result from what they are given, read a file, or draw from the generators that all share; a few change
what they are given, which has to be the item's own. In: a function, or the name of a method. Out: what it does.
"""

from __future__ import annotations

import os
import random
import sys
import types
from functools import lru_cache
from typing import Any, Literal, TypeAlias

Effect: TypeAlias = Literal["makes", "passes", "changes"]
"""Makes something new; gives what may be a part of what it is given; changes its first operand, or what it belongs to."""

_FUNCTIONS: dict[str, str] = {
    "builtins": (
        "int float complex str bool bytes bytearray len range abs sum round divmod pow ord chr hex bin any all callable "
        "isinstance issubclass slice object format repr ascii hash"
    ),
    "math": "*", "bisect": "bisect bisect_left bisect_right", "colorsys": "*", "fractions": "Fraction",
    "operator": "itemgetter add sub mul truediv floordiv mod neg getitem lt le eq ne ge gt and_ or_ not_ index contains",
    "os": "fspath listdir", "string": "capwords", "textwrap": "dedent", "struct": "unpack unpack_from calcsize",
    "posixpath": "*", "genericpath": "*", "re": "match search sub split findall fullmatch compile escape",
    "io": "BytesIO StringIO", "json": "load loads dumps", "pathlib": "Path PurePath PosixPath", "copy": "copy deepcopy",
    "collections": "OrderedDict defaultdict Counter deque", "itertools": "*", "functools": "partial reduce",
    "urllib.parse": "unquote quote urlparse", "zlib": "decompress crc32", "base64": "b64decode",
    "PIL.Image": "open new fromarray frombytes frombuffer merge blend composite alpha_composite eval",
    "PIL.ImageOps": "*", "PIL.ImageChops": "*", "PIL.ImageEnhance": "*", "PIL.ImageFilter": "*", "PIL.ImageStat": "*",
    "PIL.ImageColor": "*", "PIL.ImageMath": "lambda_eval",
    "torch": (
        "tensor zeros ones full empty eye arange linspace logspace zeros_like ones_like full_like empty_like rand randn "
        "randint randperm rand_like randn_like randint_like bernoulli normal multinomial poisson stack cat concat "
        "hstack vstack dstack clone exp log log2 log10 log1p sqrt rsqrt square sin cos tan asin acos atan atan2 sinh "
        "cosh tanh sigmoid relu softmax clamp clip floor ceil round trunc sign abs neg reciprocal pow add sub mul div "
        "true_divide floor_divide remainder fmod matmul mm bmm dot mean std var sum prod cumsum cumprod min max amin "
        "amax argmin argmax sort argsort topk median mode unique where masked_select index_select gather take nonzero "
        "isnan isinf isfinite eq ne lt le gt ge equal allclose any all logical_and logical_or logical_not "
        "logical_xor bitwise_and bitwise_or flip fliplr flipud rot90 roll meshgrid cartesian_prod tril triu diag "
        "outer cross norm bincount histc is_tensor is_floating_point numel broadcast_tensors tile repeat_interleave "
        "Size device no_grad inference_mode Tensor FloatTensor LongTensor IntTensor ByteTensor BoolTensor DoubleTensor "
        "as_strided_copy lerp addcmul addcdiv get_default_dtype from_numpy as_tensor"
    ),
    "torch.nn.functional": (
        "interpolate pad one_hot normalize grid_sample affine_grid relu softmax sigmoid avg_pool2d max_pool2d conv2d "
        "unfold fold cross_entropy"
    ),
    "warnings": "catch_warnings simplefilter", "contextlib": "suppress nullcontext",
}  # fmt: skip
"""Functions that make something new, by module; `*` stands for all that the module defines."""

_PASSING: dict[str, str] = {
    "builtins": "list tuple dict set frozenset sorted reversed enumerate zip min max iter map filter getattr",
    "torch": (
        "squeeze unsqueeze reshape flatten permute transpose movedim swapaxes ravel narrow select chunk split unbind "
        "tensor_split atleast_1d atleast_2d atleast_3d view_as_real view_as_complex real imag t broadcast_to "
        "as_tensor asarray from_numpy frombuffer"
    ),
}  # fmt: skip

_CHANGING: dict[str, str] = {"builtins": "next", "PIL.ImageDraw": "Draw"}

_MODULES = frozenset((*_FUNCTIONS, *_PASSING, *_CHANGING))

_UNKNOWN_ARRAYS = (
    "put place copyto fill_diagonal putmask save savez savez_compressed savetxt seterr seterrcall setbufsize memmap "
    "set_printoptions set_string_function put_along_axis lookfor test show_config fromregex vectorize frompyfunc "
    "apply_along_axis apply_over_axes piecewise fromfunction nditer errstate open_memmap"
).split()
"""Functions of NumPy that change what they are given, call what they are given, or write."""

_PASSING_ARRAYS = (
    "asarray asanyarray ascontiguousarray asfortranarray squeeze ravel reshape transpose swapaxes moveaxis rollaxis flip "
    "fliplr flipud rot90 atleast_1d atleast_2d atleast_3d broadcast_to broadcast_arrays expand_dims split array_split "
    "hsplit vsplit dsplit real imag diagonal diag nan_to_num require matrix_transpose permute_dims"
).split()

_MAKING_METHODS = frozenset((
    # text
    "split rsplit splitlines strip lstrip rstrip lower upper title capitalize casefold replace startswith endswith join "
    "format zfill ljust rjust center find rfind index rindex count encode decode isdigit isnumeric isalpha isalnum "
    "isspace islower isupper partition rpartition translate removeprefix removesuffix hex expandtabs "
    # files and paths
    "getvalue exists is_file is_dir read_bytes read_text as_posix with_suffix with_name "
    "joinpath resolve absolute relative_to expanduser iterdir glob rglob match group groups groupdict span start end "
    # images
    "convert resize crop rotate getbands getbbox getchannel filter point getexif tobytes quantize histogram getpixel "
    "getextrema reduce transform getdata getcolors entropy load close enhance get_flattened_data "
    # arrays and tensors
    "astype copy tolist item mean std var sum prod min max argmin argmax argsort cumsum cumprod nonzero dot round any "
    "all clip repeat tobytes clone mul div sub add pow matmul mm abs neg exp log sqrt clamp floor ceil sigmoid softmax "
    "tanh relu gt lt ge le eq ne logical_not logical_and logical_or masked_fill scatter gather index_select where "
    "numel dim size stride element_size nelement ndimension is_floating_point is_complex new_zeros new_ones new_full "
    "new_tensor new_empty tile repeat_interleave bernoulli multinomial sort topk median norm amin amax isnan flip roll "
    "get_device data_ptr true_divide floor_divide remainder fmod square reciprocal type_as is_contiguous bincount "
    # containers and tables
    "keys intersection union difference issubset issuperset isdisjoint most_common to_dict to_list to_numpy isna notna "
    "nunique value_counts toordinal timestamp total_seconds"
).split())  # fmt: skip

_PASSING_METHODS = frozenset((
    "get values items __getitem__ "
    "transpose reshape flatten ravel squeeze unsqueeze swapaxes view permute contiguous float double half bfloat16 long "
    "int short byte bool to type cpu cuda numpy detach expand expand_as narrow select chunk unbind t movedim diagonal "
    "view_as reshape_as asnumpy split_with_sizes tensor_split pin_memory "
    "__enter__ __exit__ iterrows itertuples"
).split())  # fmt: skip

_CHANGING_METHODS = frozenset((
    "append extend insert pop popitem remove discard add update setdefault clear reverse appendleft popleft extendleft "
    "seek tell read readline readlines readinto fill setflags paste putalpha putpixel putdata putpalette thumbnail draft verify "
    "alpha_composite apply_transparency ellipse rectangle line polygon text arc chord pieslice point bitmap itemset"
).split())  # fmt: skip

_ATTRIBUTES = frozenset((
    "shape ndim dtype T mT H size width height mode info format filename device layout real imag strides itemsize nbytes "
    "name stem suffix suffixes parent parents parts anchor values index columns iloc loc at iat start stop step "
    "is_cuda requires_grad data flat names is_leaf grad palette n_frames is_animated str dt"
).split())  # fmt: skip


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
        (_FUNCTIONS, "makes"), (_PASSING, "passes"), (_CHANGING, "changes")
    )  # fmt: skip
    for table, effect in tables:
        for module, names in table.items():
            if module in loaded:
                own = vars(sys.modules[module])
                wanted = [name for name in own if not name.startswith("_")] if names == "*" else names.split()
                found |= {id(own[name]): (own[name], effect) for name in wanted if _is_of(own.get(name), module)}
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
    if numpy is None or vars(numpy).get(name) is not function or not _is_of(function, "numpy"):
        return None
    if name in _UNKNOWN_ARRAYS or name.startswith("_"):
        return None
    return "passes" if name in _PASSING_ARRAYS else "makes"


def _of_torchvision(function: Any) -> Effect | None:
    """torchvision's functions on images, and its functions that read them."""
    home = getattr(function, "__module__", "") or ""
    if type(function) is not types.FunctionType or not home.startswith(_TORCHVISION):
        return None
    if not _is_of(function, home):
        return None
    return "changes" if function.__name__ in ("normalize", "erase") else "passes"


_TORCHVISION = (
    "torchvision.transforms.functional", "torchvision.transforms._functional", "torchvision.transforms.v2.functional",
    "torchvision.io.image",
)  # fmt: skip


def effect_of_method(name: str) -> Effect | None:
    """What a method does to what it belongs to, whatever that is; None where it is not known.

    >>> effect_of_method("append"), effect_of_method("mul_"), effect_of_method("save")
    ('changes', 'changes', None)
    """
    if name in _CHANGING_METHODS or (name.endswith("_") and not name.startswith("_")):
        return "changes"
    if name in _PASSING_METHODS:
        return "passes"
    return "makes" if name in _MAKING_METHODS else None


def keeps_operands(name: str) -> bool:
    """Whether a method puts what it is given into what it belongs to."""
    return name in ("append", "extend", "insert", "add", "update", "setdefault", "appendleft", "extendleft")


def is_plain_attribute(name: str) -> bool:
    """Whether reading an attribute of this name, of whatever a library made, does nothing."""
    return name in _ATTRIBUTES
