"""Are numbers that are computed channel by channel those that PyTorch computes, and sizes those that PIL gives?"""

import sys

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from flatout.frameworks.pytorch.input.pixels import calls, elements, geometry, memory  # noqa: E402
from flatout.frameworks.pytorch.input.pixels.calls import Layout, known, noted  # noqa: E402
from flatout.frameworks.pytorch.input.pixels.elements import CHANNELS, Elements  # noqa: E402
from flatout.frameworks.pytorch.input.pixels.memory import array_of, pixels_of  # noqa: E402


class Picture:
    """A picture that is computed already."""

    def __init__(self, mode, size, seed=0):
        rng = np.random.default_rng(seed)
        shape = (size[1], size[0], 3)[: 2 if mode == "L" else 3]
        self.mode, self.size = mode, size
        self._image = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))

    def image(self):
        return self._image


CALLS = [
    (torch.Tensor.float, ()), (torch.Tensor.double, ()), (torch.Tensor.to, (torch.float32,)), (torch.add, (1,)),
    (torch.Tensor.div, (255,)), (torch.div, (3.7,)), (torch.Tensor.__truediv__, (255,)), (torch.Tensor.div_, (3,)),
    (torch.Tensor.sub, (0.5,)), (torch.Tensor.__sub__, (2,)), (torch.Tensor.sub_, (0.25,)), (torch.sub, (7,)),
    (torch.Tensor.mul, (1 / 255,)), (torch.Tensor.__mul__, (0.1,)), (torch.Tensor.mul_, (1.0 / 255,)),
    (torch.Tensor.add, (1e-3,)), (torch.Tensor.add_, (1,)),
    (torch.Tensor.sub, (torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1),)), (torch.Tensor.div_, (torch.tensor([0.2]),)),
    (torch.Tensor.div, (torch.tensor(0.3),)), (torch.Tensor.mul, (torch.tensor([1.5, 2.5, 3.5]),)),
    (torch.Tensor.permute, (2, 0, 1)), (torch.Tensor.permute, ((1, 2, 0),)), (torch.Tensor.transpose, (0, -1)),
    (torch.Tensor.contiguous, ()), (torch.Tensor.clone, ()),
    (torch.Tensor.__setitem__, ((..., slice(1, 3), slice(2, 4)), torch.full((3, 1, 1), 0.5))),
]  # fmt: skip


@pytest.mark.parametrize("in_place", [True, False], ids=["in PIL's memory", "copied"])
@given(
    mode=st.sampled_from(["L", "RGB"]), start=st.sampled_from(["chw", "hwc"]), seed=st.integers(0, 5),
    steps=st.lists(st.sampled_from(CALLS), max_size=7), size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
)  # fmt: skip
def test_calls_that_are_noted_give_the_bits_and_the_strides_that_pytorch_gives(
    in_place, mode, start, seed, steps, size
):
    picture, num = Picture(mode, size, seed), CHANNELS[mode]
    (width, height) = size
    plain = torch.from_numpy(np.array(picture.image())).view(height, width, num)
    found = Elements(picture, (0, 1, 2))
    layout = Layout(tuple(plain.shape), plain.stride(), torch.uint8, array=True)
    if start == "chw":
        plain, made = plain.permute(2, 0, 1), noted(torch.Tensor.permute, found, layout, (2, 0, 1), {})
        found, layout = made.elements, made.layout
    for call, operands in steps:
        made = noted(call, found, layout, operands, {})
        if made is None:
            continue
        found, layout = made.elements, made.layout
        result = call(plain, *operands)
        plain = plain if call is torch.Tensor.__setitem__ else result
    target = layout.place(found.axes)
    with pytest.MonkeyPatch.context() as patch:
        if not in_place:
            patch.setattr(elements, "pixels_of", lambda image: (np.asarray(image), None))
        found.fill(array_of(target))
    assert (target.dtype, target.shape, target.stride()) == (plain.dtype, plain.shape, plain.stride())
    assert target._is_view() is plain._is_view() or layout.array
    assert torch.equal(target, plain)


def test_what_is_not_known_is_not_noted():
    elements_, layout = Elements(Picture("RGB", (4, 5)), (0, 1, 2)), Layout((5, 4, 3), (12, 3, 1), torch.uint8)
    floats = Layout((5, 4, 3), (12, 3, 1), torch.float32)
    for call, operands, keywords in [
        (torch.Tensor.sum, (), {}), (torch.Tensor.div, (2,), {"rounding_mode": "floor"}), (torch.Tensor.mul, (2,), {}),
        (torch.Tensor.to, ("cpu",), {}), (torch.Tensor.permute, (0, 1), {}), (torch.Tensor.div, (True,), {}),
        (torch.Tensor.contiguous, (torch.channels_last,), {}), (torch.Tensor.div, (torch.ones(3),), {}),
    ]:  # fmt: skip
        assert noted(call, elements_, layout, operands, keywords) is None
    for operand in (torch.ones(3, dtype=torch.float64), torch.ones(3, requires_grad=True), torch.ones(2, 5, 4, 3)):
        assert noted(torch.Tensor.sub, elements_, floats, (operand,), {}) is None
    assert known(torch.Tensor.size) and known(torch.Tensor.shape.__get__) and not known(torch.Tensor.sum)


def test_the_operands_of_a_script_are_left_as_they_are():
    mean = torch.tensor([0.1, 0.2, 0.3])
    layout = Layout((5, 4, 3), (12, 3, 1), torch.float32)
    made = noted(torch.Tensor.sub, Elements(Picture("RGB", (4, 5)), (0, 1, 2)), layout, (mean,), {})
    mean.resize_(0)  # not possible after `numpy()`
    assert made.elements.steps[0].operand.ravel().tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_an_array_of_a_tensors_memory_writes_to_the_tensor_which_can_still_be_resized():
    tensor = torch.zeros(4, 6)[1:, ::2]
    array_of(tensor)[:] = np.arange(9).reshape(3, 3)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    own = torch.zeros(3)
    array_of(own)[1] = 7
    assert own.untyped_storage().resizable() and own.tolist() == [0, 7, 0]


def test_the_memory_of_an_image_is_read_in_place_where_pil_hands_it_out(monkeypatch):
    image = Picture("RGB", (7, 5)).image()
    pixels, kept = pixels_of(image)
    assert np.array_equal(pixels[..., :3], np.asarray(image))
    if hasattr(image, "__arrow_c_array__") and sys.byteorder == "little":
        assert kept is not None and pixels.shape == (5, 7, 4)

    def refuses(self):
        raise ValueError("Image is in multiple array blocks, use imaging_new_block for zero copy")

    monkeypatch.setattr(memory, "_pointer", refuses)
    big = Image.new("RGB", (3000, 3000))
    assert pixels_of(Picture("L", (3, 4)).image())[0].shape == (4, 3) and big.size == (3000, 3000)


def test_images_too_large_for_one_block_of_pils_are_copied():
    image = Image.new("RGB", (2500, 2500), (1, 2, 3))  # a block has 16 MB
    pixels, _ = pixels_of(image)
    assert pixels[-1, -1, :3].tolist() == [1, 2, 3]


# -- sizes ---------------------------------------------------------------------------------------------------------

SIDES = st.one_of(st.integers(-20, 60), st.floats(-20, 60))


@given(size=st.tuples(st.integers(1, 40), st.integers(1, 40)), box=st.tuples(SIDES, SIDES, SIDES, SIDES))
def test_crops_have_the_size_that_pil_gives_and_take_rows_that_are_there(size, box):
    image = Picture("RGB", size).image()
    found = geometry.size_of_crop(box)
    if found is None:
        return
    assert image.crop(box).size == found
    num_rows = geometry.rows_of_crop(box, size)
    assert 0 < num_rows <= size[1]
    upper = image.crop((0, 0, size[0], num_rows))
    if num_rows < size[1]:
        assert upper.crop(box).tobytes() == image.crop(box).tobytes()


@given(size=st.tuples(st.integers(1, 40), st.integers(1, 40)), method=st.sampled_from(list(Image.Transpose)))
def test_transposed_images_have_the_size_that_pil_gives(size, method):
    assert Picture("L", size).image().transpose(method).size == geometry.size_of_transpose(size, method)
    assert geometry.size_of_transpose(size, 9) is None and geometry.size_of_transpose(size, "no") is None


@pytest.mark.parametrize(
    ("size", "found"),
    [((3, 4), (3, 4)), ([3, 4], (3, 4)), ((0, 4), None), ((3.0, 4), None), (3, None), ((3, 4, 5), None)],
)
def test_sizes_that_are_no_plain_numbers_are_not_known_beforehand(size, found):
    assert geometry.size_of_resize(size) == found


@pytest.mark.parametrize(
    ("padding", "size"),
    [(2, (14, 24)), ([2], (14, 24)), ((1, 2), (12, 24)), ((1, 2, 3, 4), (14, 26)), (-1, None), ((1, 2, 3), None),
     ("1", None)],
)  # fmt: skip
def test_padded_images_have_the_size_that_torchvision_gives(padding, size):
    imagery = pytest.importorskip("imagery")
    assert geometry.size_of_pad((10, 20), padding) == size
    if size is not None:
        assert imagery.T.functional.pad(Picture("RGB", (10, 20)).image(), padding).size == size


def test_constants_are_copied_and_nothing_else_is_one():
    matrix = [1.0, [2, (3, None)]]
    (found,) = geometry.constants((matrix,))
    matrix[1].append(9)
    assert found == [1.0, [2, (3, None)]]
    assert geometry.constants((object(),)) is None and geometry.constants(([object()],)) is None


# -- how results lie in memory --------------------------------------------------------------------------------------


@given(st.permutations(range(3)), st.lists(st.integers(1, 3), min_size=3, max_size=3), st.data())
def test_results_of_arithmetic_lie_in_memory_as_pytorch_has_them(order, sizes, data):
    whole = torch.zeros(sizes).permute(order)
    narrow = whole[:, : data.draw(st.integers(1, whole.shape[1]))]
    operand = torch.ones([data.draw(st.sampled_from([1, size])) for size in narrow.shape])
    layout = calls.Layout(tuple(narrow.shape), narrow.stride(), narrow.dtype)
    for operation in (torch.add, torch.sub, torch.mul, torch.div):
        found = calls._calculated(layout, tuple(operand.shape))
        assert (found.shape, found.strides) == (tuple(narrow.shape), operation(narrow, operand).stride())
        assert calls._calculated(layout, ()).strides == operation(narrow, 2.0).stride()
