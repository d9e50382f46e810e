"""Are batches of torchvision's datasets and transforms the script's own, random ones too, and the random streams?"""

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import ConcatDataset, DataLoader  # noqa: E402

from flatout.frameworks.pytorch.input.items import random_transforms, vision  # noqa: E402
from flatout.frameworks.pytorch.input.items import shadow as shadow_module  # noqa: E402
from flatout.frameworks.pytorch.input.items.draws import MOST_BELOW, UNIFORM, drawn, skip  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402
from pictures import check, cifar, mnist  # noqa: E402
from vision import torchvision  # noqa: E402

T = torchvision().transforms
TAIL = [T.ToTensor(), T.Normalize((0.49, 0.48, 0.44), (0.2, 0.19, 0.2))]
GREY_TAIL = [T.ToTensor(), T.Normalize((0.1307,), (0.3081,))]


# -- numbers --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.just(UNIFORM) | st.integers(1, 300) | st.integers(1, MOST_BELOW), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(0, 2**31),
)
def test_numbers_drawn_at_once_are_those_of_single_calls(kinds, num_items, seed):
    torch.manual_seed(seed)
    single = [[torch.rand(1).item() if k == UNIFORM else torch.randint(0, k, size=(1,)).item() for k in kinds]
              for _ in range(num_items)]  # fmt: skip
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    found = drawn(kinds, num_items)
    assert [list(row) for row in zip(*(one.tolist() for one in found), strict=True)] == single
    assert torch.equal(after, torch.get_rng_state())
    torch.manual_seed(seed)
    skip(len(kinds) * num_items)
    assert torch.equal(after, torch.get_rng_state())


# -- transforms -----------------------------------------------------------------------------------------------------


CHAINS = {
    "as CIFAR is trained on": lambda: cifar(T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), *TAIL),
    "crops alone": lambda: cifar(T.RandomCrop(24), *TAIL),
    "crops to another shape": lambda: cifar(T.RandomCrop((20, 30), padding=(1, 2, 3, 4)), *TAIL),
    "no room to move": lambda: cifar(T.RandomCrop(32), T.RandomVerticalFlip(0.3), *TAIL),
    "crop by tall padding": lambda: cifar(T.RandomCrop((40, 8), padding=(0, 9)), *TAIL),
    "flips both ways": lambda: cifar(T.RandomHorizontalFlip(0.9), T.RandomVerticalFlip(), T.ToTensor()),
    "never and always": lambda: cifar(T.RandomHorizontalFlip(0), T.RandomHorizontalFlip(1), T.PILToTensor()),
    "grey": lambda: mnist(T.RandomCrop(28, padding=2), T.RandomHorizontalFlip(), *GREY_TAIL),
    "nothing random": lambda: mnist(*GREY_TAIL),
    "nothing random, in colour": lambda: cifar(*TAIL),
}


@pytest.mark.parametrize("name", CHAINS)
def test_batches_and_random_streams_are_those_of_the_script(name):
    assert check(CHAINS[name]) is None


@pytest.mark.parametrize("name", ["nothing random", "nothing random, in colour"])
def test_kept_items_too(name):
    assert check(CHAINS[name], num=4, keep=True) is None


def test_random_items_are_not_kept():
    assert "random" in Loaders().parts.stored.why_not(DataLoader(CHAINS["as CIFAR is trained on"]()))


def test_random_streams_of_workers_that_are_kept_are_theirs():
    loader = DataLoader(CHAINS["as CIFAR is trained on"](), num_workers=2, persistent_workers=True)
    assert "kept between passes" in Loaders().parts.fused.why_not(loader, for_workers=True)


@pytest.mark.parametrize("options", [{}, {"num_workers": 3, "prefetch_factor": 1}, {"generator": 5, "drop_last": True}])
@pytest.mark.parametrize("stop", [None, 2])
def test_each_worker_has_a_random_stream_of_its_own_without_workers_too(options, stop):
    found = []
    for on in (False, True):
        owner = Loaders()
        owner.install()
        if on:
            owner.change({"in_process": True})
        try:
            torch.manual_seed(0)
            given = {**options, **({"generator": torch.Generator().manual_seed(5)} if "generator" in options else {})}
            loader = DataLoader(
                CHAINS["as CIFAR is trained on"](), **{"batch_size": 7, "shuffle": True, "num_workers": 2, **given}
            )
            batches, states = [], []
            for _ in range(2):
                for number, batch in enumerate(loader):
                    batches.append(batch)
                    states.append((torch.rand(1).item(), RandomStates([loader.generator])))
                    if number == stop:
                        break
            found.append((batches, states, owner.num_changed))
        finally:
            owner.remove()
    assert difference(found[0][0], found[1][0]) is None and (found[0][2], found[1][2]) == (0, 2)
    assert all(a[0] == b[0] and a[1].equals(b[1]) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_items_looked_at_later_have_the_numbers_that_they_had(monkeypatch):
    monkeypatch.setattr(shadow_module, "EVERY", 5)
    assert check(CHAINS["as CIFAR is trained on"]) is None


def test_a_difference_found_later_leaves_batches_and_streams_as_they_are(monkeypatch):
    monkeypatch.setattr(shadow_module, "EVERY", 5)
    cropped, num = random_transforms._cropped, 0

    def wrong_later(*given):
        nonlocal num
        num += 1
        return cropped(*given) + (num > 12)

    crop = random_transforms.RandomTransform(random_transforms._crop_kinds, wrong_later)
    monkeypatch.setitem(random_transforms.RANDOM[vision.OLD], "RandomCrop", crop)
    monkeypatch.setattr(shadow_module, "AT_ONCE", 1)
    assert "its batches differ: item" in check(CHAINS["as CIFAR is trained on"])


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (T.RandomCrop(32, padding=4, padding_mode="reflect"), "padding of another kind"),
        (T.RandomCrop(32, padding=4, fill=3), "padding of another kind"),
        (T.RandomCrop(40, pad_if_needed=True), "padding of another kind"),
        (T.RandomRotation(5), "RandomRotation"),
        (T.RandomApply([T.RandomHorizontalFlip()]), "RandomApply"),
        (T.RandomResizedCrop(32), "RandomResizedCrop"),
    ],
)
def test_what_is_not_known_stays_the_scripts_own(transform, why):
    assert why in check(lambda: cifar(transform, *TAIL))


def test_transforms_that_change_are_followed_or_left_to_the_script():
    def chance(dataset, number):
        dataset.transform.transforms[1].p = [0.5, 0.0, 1.0, np.float32(0.5)][number]

    def size(dataset, number):
        dataset.transform.transforms[0].size = [(32, 32), (30, 30), (32, 32), (40, 40)][number]

    for change in (chance, size):
        check(CHAINS["as CIFAR is trained on"], 4, change)


def test_an_error_comes_with_the_random_stream_where_plain_has_it():
    states, said = [], []
    for on in (False, True):
        torch.manual_seed(0)
        owner = Loaders()
        if on:
            owner.install()
            owner.parts.fused.engage(True)
        try:
            loader = DataLoader(CHAINS["as CIFAR is trained on"](), batch_size=4, sampler=[*range(20), 999])
            with pytest.raises(IndexError) as caught:
                list(loader)
            said.append(str(caught.value))
            states.append(RandomStates())
        finally:
            owner.remove()
    assert said[0] == said[1] and states[0].equals(states[1])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_chain_of_crops_and_flips(data):
    chance = st.floats(0, 1)
    parts = data.draw(
        st.lists(
            st.builds(T.RandomCrop, st.tuples(st.integers(1, 40), st.integers(1, 40)), st.integers(0, 9))
            | st.builds(T.RandomHorizontalFlip, chance)
            | st.builds(T.RandomVerticalFlip, chance),
            min_size=1,
            max_size=4,
        )
    )
    try:
        check(lambda: cifar(*parts, *TAIL), batch_size=data.draw(st.integers(1, 20)), num=2)
    except ValueError as problem:  # plain's, of a crop that is too large
        assert "larger than input image" in str(problem)


# -- what an attack found -------------------------------------------------------------------------------------------


def test_random_datasets_one_after_another_stay_the_scripts_own():
    def both():
        return ConcatDataset([CHAINS["flips both ways"](), CHAINS["flips both ways"]()])

    assert "one after another" in check(both)


def test_another_default_type_of_floats_draws_otherwise():
    def between(dataset, number):
        torch.set_default_dtype([torch.float32, torch.float64, torch.float64, torch.float32][number])

    try:
        check(CHAINS["as CIFAR is trained on"], 4, between)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("means", [(0.1, 0.2, 0.3), (torch.tensor(0.1),)])
def test_means_of_another_kind_are_left_to_torchvision(means):
    std = [0.3] * len(means)
    plain = DataLoader(mnist(T.ToTensor(), T.Normalize(means, std)), batch_size=5)
    said = []
    for on in (False, True):
        owner = Loaders()
        if on:
            owner.install()
            owner.parts.fused.engage(True)
        try:
            said.append(str(next(iter(plain))[0].sum()))
        except RuntimeError as problem:
            said.append(str(problem))
        finally:
            owner.remove()
    assert said[0] == said[1]
