"""Are batches of datasets with torchvision's transforms of version 2 computed at once, and the script's own?"""

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, Subset  # noqa: E402

from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from pictures import check, cifar, mnist  # noqa: E402
from vision import torchvision  # noqa: E402

torchvision = torchvision()
v2 = pytest.importorskip("torchvision.transforms.v2")

COLOUR = (0.49, 0.48, 0.44), (0.2, 0.19, 0.2)
GREY = (0.1307,), (0.3081,)


def coloured(*transforms):
    return cifar(*transforms, chain=v2.Compose)


def grey(*transforms):
    return mnist(*transforms, chain=v2.Compose)


def floats(scale=True, dtype=torch.float32):
    return [v2.ToImage(), v2.ToDtype(dtype, scale=scale)]


@pytest.fixture(autouse=True)
def silent(recwarn):
    """`v2.ToTensor` warns of itself."""


CHAINS = {
    "as MNIST is trained on": lambda: grey(*floats(), v2.Normalize(*GREY)),
    "as CIFAR is trained on": lambda: coloured(
        v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *floats(), v2.Normalize(*COLOUR)
    ),
    "colour": lambda: coloured(*floats(), v2.Normalize(*COLOUR)),
    "bytes": lambda: coloured(v2.ToImage()),
    "grey bytes": lambda: grey(v2.PILToTensor()),
    "colour bytes": lambda: coloured(v2.PILToTensor()),
    "not scaled": lambda: coloured(*floats(scale=False)),
    "doubles": lambda: grey(*floats(dtype=torch.float64)),
    "halves": lambda: coloured(*floats(dtype=torch.float16)),
    "twice": lambda: grey(*floats(), v2.ToDtype(torch.float64, scale=True), v2.Normalize(*GREY)),
    "pure": lambda: coloured(*floats(), v2.ToPureTensor(), v2.Normalize(*COLOUR)),
    "as before": lambda: coloured(v2.ToTensor(), v2.Normalize(*COLOUR)),
    "chains in chains": lambda: grey(v2.Compose([v2.ToImage(), v2.Compose(floats()[1:])]), v2.Normalize(*GREY)),
    "crop by height": lambda: coloured(v2.RandomCrop((20, 32)), v2.RandomVerticalFlip(0.3), *floats()),
    "crop by width": lambda: coloured(v2.RandomCrop((34, 20), padding=[0, 1, 0, 1]), *floats()),
    "no room to move": lambda: grey(v2.RandomCrop(28), *floats()),
    "old ones in a new chain": lambda: coloured(
        torchvision.transforms.RandomHorizontalFlip(), torchvision.transforms.ToTensor(), v2.Normalize(*COLOUR)
    ),
    "new ones in an old chain": lambda: cifar(v2.RandomHorizontalFlip(), *floats(), v2.Normalize(*COLOUR)),
    "a part": lambda: Subset(grey(*floats()), range(5, 50)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_batches_and_random_streams_are_those_of_the_script(name):
    assert check(CHAINS[name]) is None


@pytest.mark.parametrize("name", ["as MNIST is trained on", "doubles", "as before", "grey bytes", "colour"])
def test_kept_items_too(name):
    assert check(CHAINS[name], num=4, keep=True) is None


@pytest.mark.parametrize("batch_size", [1, 60])
@pytest.mark.parametrize("name", ["colour", "colour bytes", "bytes", "halves"])
def test_channels_lie_where_stacking_puts_them_whatever_the_number_of_items(name, batch_size):
    assert check(CHAINS[name], batch_size=batch_size) is None


@pytest.mark.parametrize(
    ("transforms", "why"),
    [
        ([v2.RandomCrop(32, padding=4, padding_mode="reflect"), *floats()], "padding of another kind"),
        ([v2.RandomCrop(32, padding=4, fill=3), *floats()], "padding of another kind"),
        ([v2.RandomCrop(32, padding=4, fill={"others": 7}), *floats()], "padding of another kind"),
        ([v2.RandomCrop(40, pad_if_needed=True), *floats()], "padding of another kind"),
        ([v2.ToImage(), v2.RandomCrop(20), v2.ToDtype(torch.float32)], "something else than a grey or an RGB image"),
        ([v2.RandomRotation(5), *floats()], "RandomRotation"),
        ([v2.RandomApply([v2.RandomHorizontalFlip()]), *floats()], "RandomApply"),
        ([*floats(), v2.Lambda(lambda image: image * 2)], "Lambda"),
        ([*floats(), v2.Normalize(*COLOUR, inplace=True)], "in place"),
        ([v2.ToImage(), v2.ToDtype({"others": torch.float32})], "other types"),
        ([v2.ToImage(), v2.ToDtype(torch.int32, scale=True)], "other types"),
    ],
)
def test_what_is_not_known_stays_the_scripts_own(transforms, why):
    assert why in check(lambda: coloured(*transforms))


def test_what_the_script_does_with_such_a_tensor_stays_its_own():
    class Halved(torchvision.datasets.MNIST):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image / 2, label

    def make():
        dataset = CHAINS["as MNIST is trained on"]()
        dataset.__class__ = Halved
        return dataset

    check(make)

    def summed():
        dataset = CHAINS["as MNIST is trained on"]()
        dataset.__class__ = Summed
        return dataset

    class Summed(torchvision.datasets.MNIST):
        def __getitem__(self, index):
            image, label = torchvision.datasets.MNIST.__getitem__(self, index)
            return image + torch.ones(1), image[0], label

    check(summed)


CHANGES = {
    "mean": lambda chain: chain.transforms[2].mean.__setitem__(0, 0.25),
    "dtype": lambda chain: setattr(chain.transforms[1], "dtype", torch.float64),
    "scale": lambda chain: setattr(chain.transforms[1], "scale", False),
    "order": lambda chain: setattr(chain, "transforms", [*chain.transforms, v2.Normalize((0.5,), (0.5,))]),
    "fewer": lambda chain: setattr(chain, "transforms", [v2.ToImage(), v2.ToDtype(torch.float32)]),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["as MNIST is trained on", "colour"])
@pytest.mark.parametrize("change", CHANGES)
def test_transforms_that_change_are_followed_or_left_to_the_script(name, change, keep):
    def between(dataset, number):
        if number == 2:
            CHANGES[change](dataset.transform)

    check(CHAINS[name], 4, between, keep=keep)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_chain_of_crops_and_flips(data):
    chance, size = st.floats(0, 1), st.integers(1, 40)
    parts = data.draw(
        st.lists(
            st.builds(v2.RandomCrop, st.tuples(size, size), st.integers(0, 9))
            | st.builds(v2.RandomHorizontalFlip, chance)
            | st.builds(v2.RandomVerticalFlip, chance),
            min_size=1,
            max_size=4,
        )
    )
    try:
        check(lambda: coloured(*parts, *floats()), batch_size=data.draw(st.integers(1, 20)), num=2)
    except ValueError as problem:  # plain's, of a crop that is too large
        assert "larger than" in str(problem)


def test_workers_that_are_asked_for_have_the_same_streams():
    assert (
        Loaders().parts.fused.why_not(DataLoader(CHAINS["as CIFAR is trained on"](), num_workers=2), for_workers=True)
        is None
    )


def test_a_chance_that_is_no_number_flips_as_the_script_does():
    def between(dataset, number):
        if number == 2:
            dataset.transform.transforms[0].p = float("nan")

    check(lambda: coloured(v2.RandomHorizontalFlip(), *floats()), 4, between)
