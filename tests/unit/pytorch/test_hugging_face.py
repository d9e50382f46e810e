"""Are batches of a Hugging Face table, taken column by column, those that its own path gives?"""

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
datasets = pytest.importorskip("datasets")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, Subset  # noqa: E402

from flatout.frameworks.pytorch.input.items.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402

RNG = np.random.default_rng(0)
COLUMNS = {
    "ids": RNG.integers(0, 50_000, (40, 16)).tolist(),
    "mask": (RNG.random((40, 16)) < 0.5).tolist(),
    "weights": RNG.random((40, 3)).tolist(),
    "label": RNG.integers(-(2**40), 2**40, 40).tolist(),
    "score": RNG.random(40).tolist(),
    "flag": [i % 3 == 0 for i in range(40)],
    "text": [f"line {i}" for i in range(40)],
}


def table(*names, cast=None):
    made = datasets.Dataset.from_dict({name: COLUMNS[name] for name in names})
    for name, kind in (cast or {}).items():
        made = made.cast_column(name, kind)
    return made


def check(dataset, least=3, **options):
    """Two passes under the lever are plain's; why it is not used, else None."""
    options = {"batch_size": 6, "shuffle": True, **options}
    found = []
    for on in (False, True):
        owner = Loaders()
        if on:
            owner.install()
            owner.pipeline.fused.engage(True)
        try:
            torch.manual_seed(0)
            loader = DataLoader(dataset, **options)
            found.append(([list(loader), list(loader)], RandomStates()))
            why, num = owner.pipeline.fused.why_not(loader), owner.pipeline.fused.num_batches
        finally:
            owner.remove()
    assert difference(found[1][0], found[0][0]) is None and found[0][1].equals(found[1][1])
    assert num >= (least if why is None else 0), why
    return why


NARROW = {"ids": datasets.List(datasets.Value("uint16")), "score": datasets.Value("float32")}

TABLES = {
    "lists and numbers": lambda: table("ids", "label").with_format("torch"),
    "all kinds": lambda: table(*COLUMNS).with_format("torch"),
    "some columns": lambda: table(*COLUMNS).with_format("torch", columns=["score", "ids"]),
    "shuffled": lambda: table("ids", "label").shuffle(seed=1).with_format("torch"),
    "selected": lambda: table("ids", "label").select([5, 3, 3, *range(39, 15, -1)]).with_format("torch"),
    "of two": lambda: datasets.concatenate_datasets([table("ids"), table("ids")]).with_format("torch"),
    "narrow": lambda: table("ids", "score", cast=NARROW).with_format("torch"),
    "fixed lists": lambda: table("ids", cast={"ids": datasets.List(datasets.Value("int32"), 16)}).with_format("torch"),
    "a part": lambda: Subset(table("ids").with_format("torch"), range(5, 30)),
    "no format": lambda: table("label", "score", "text"),
    "classes": lambda: table("flag").cast_column("flag", datasets.ClassLabel(names=["no", "yes"])).with_format("torch"),
}


@pytest.mark.parametrize("name", TABLES)
def test_batches_are_those_of_the_library(name):
    assert check(TABLES[name]()) is None


def test_what_is_not_known_stays_the_librarys_own():
    ragged = datasets.Dataset.from_dict({"ids": [[1] * (i % 2 + 1) for i in range(40)], "x": list(range(40))})
    missing = datasets.Dataset.from_dict({"x": [None if i == 35 else i for i in range(40)], "y": list(range(40))})
    for dataset, why in [
        (table("ids"), "lists"),
        (table("ids").with_format("numpy"), "format `numpy`"),
        (table("label").with_format("torch", dtype=torch.float64), "format `torch`"),
        (table("label").with_transform(lambda rows: {"x": torch.rand(len(rows["label"]))}), "format `custom`"),
    ]:
        assert why in check(dataset)
    check(missing.select(range(30)).with_format("torch"))
    with pytest.raises(Exception) as plain:
        list(DataLoader(ragged.with_format("torch"), batch_size=6))
    loaders = Loaders()
    loaders.install()
    loaders.pipeline.fused.engage(True)
    try:
        with pytest.raises(type(plain.value)):
            list(DataLoader(ragged.with_format("torch"), batch_size=6))
    finally:
        loaders.remove()


def test_a_format_that_changes_is_followed():
    dataset = table("ids", "label", "score").with_format("torch")
    loaders = Loaders()
    loaders.install()
    loaders.pipeline.fused.engage(True)
    try:
        loader = DataLoader(dataset, batch_size=4)
        for columns in (["ids", "label"], ["score"], ["label"]):
            dataset.set_format("torch", columns=columns)
            for batch in loader:
                assert sorted(batch) == sorted(columns)
        dataset.set_format("numpy")
        ours = list(loader)
    finally:
        loaders.remove()
    assert difference(ours, list(DataLoader(dataset, batch_size=4))) is None


@settings(max_examples=25, deadline=None)
@given(
    st.sets(st.sampled_from(sorted(COLUMNS)), min_size=1),
    st.lists(st.integers(-40, 39), min_size=1, max_size=30),
    st.integers(1, 7),
)
def test_any_columns_in_any_order(names, order, batch_size):
    check(table(*sorted(names)).with_format("torch"), 0, shuffle=False, sampler=order, batch_size=batch_size)
