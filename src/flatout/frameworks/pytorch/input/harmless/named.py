"""What does a method of something do that a library made, whatever that is? Known by its name.

In: names. Out: whether it makes something new, gives a part of what it belongs to, or changes that.
"""

from __future__ import annotations

from flatout.frameworks.pytorch.input.harmless.listed import Effect, words

_MAKING = words("""
    split rsplit splitlines strip lstrip rstrip lower upper title capitalize casefold replace startswith endswith join
    format zfill ljust rjust center find rfind index rindex count encode decode isdigit isnumeric isalpha isalnum
    isspace islower isupper rpartition translate removeprefix removesuffix hex expandtabs

    getvalue exists is_file is_dir read_bytes read_text as_posix with_suffix with_name joinpath resolve absolute
    relative_to expanduser iterdir glob rglob match group groups groupdict span start end

    convert crop getbands getbbox getchannel filter point tobytes quantize histogram getpixel
    getextrema reduce transform getdata getcolors entropy enhance get_flattened_data

    astype copy tolist item mean std var sum prod min max argmin argmax argsort cumsum cumprod nonzero dot round any
    all clip repeat clone mul div sub pow matmul mm abs neg exp log sqrt clamp floor ceil sigmoid softmax tanh
    relu gt lt ge le eq ne logical_not logical_and logical_or masked_fill scatter gather index_select where numel dim
    size stride element_size nelement ndimension is_floating_point is_complex new_zeros new_ones new_full new_tensor
    new_empty tile repeat_interleave bernoulli multinomial topk median norm amin amax isnan flip roll get_device
    true_divide floor_divide remainder fmod square reciprocal is_contiguous bincount

    keys intersection union difference issubset issuperset isdisjoint most_common to_dict to_list to_numpy isna notna
    nunique value_counts toordinal timestamp total_seconds
""")

_PASSING = words("""
    get values items transpose reshape flatten ravel squeeze unsqueeze swapaxes view permute contiguous float double
    half bfloat16 long int short byte bool to type cpu cuda numpy detach expand expand_as narrow select chunk unbind t
    load getexif type_as
    movedim diagonal view_as reshape_as split_with_sizes tensor_split pin_memory iterrows itertuples
""")

_CHANGING = words("""
    append extend insert pop popitem remove discard add update setdefault clear reverse appendleft popleft extendleft
    seek tell read readline readlines readinto fill setflags paste putalpha putpixel putdata putpalette thumbnail draft
    verify alpha_composite apply_transparency ellipse rectangle line polygon text arc chord pieslice bitmap itemset
    sort rotate resize partition close
""")
"""Those that change what they belong to, of any class: a `deque` is rotated in place, an image is not."""

_GIVING = words("pop popitem popleft setdefault")

_KEEPING = words("append extend insert add update setdefault appendleft extendleft")

_ATTRIBUTES = words("""
    shape ndim dtype T mT H size width height mode info format filename device layout real imag strides itemsize nbytes
    name stem suffix suffixes parent parents parts anchor values index columns iloc loc at iat start stop step is_cuda
    requires_grad data flat names is_leaf grad palette n_frames is_animated str dt
""")


def effect_of_method(name: str) -> Effect | None:
    """What a method does; None where it is not known.

    >>> effect_of_method("append"), effect_of_method("mul_"), effect_of_method("save")
    ('changes', 'changes', None)
    """
    if name in _CHANGING or (name.endswith("_") and not name.startswith("_")):
        return "changes"
    if name in _PASSING:
        return "passes"
    return "makes" if name in _MAKING else None


def gives_element(name: str) -> bool:
    """Whether a method gives an element of what it belongs to."""
    return name in _GIVING


def keeps_operands(name: str) -> bool:
    """Whether a method puts what it is given into what it belongs to."""
    return name in _KEEPING


def is_plain_attribute(name: str) -> bool:
    """Whether reading an attribute of this name does nothing."""
    return name in _ATTRIBUTES
