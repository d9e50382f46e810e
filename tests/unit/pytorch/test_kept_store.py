"""Are items kept on the disk the script's own in later runs, whatever became of the disk, the run or the data?"""

import contextlib
import dataclasses
import functools
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest

import warm

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, Subset  # noqa: E402

from flatout.frameworks.pytorch.input.items import fused, row_files, shelf  # noqa: E402
from flatout.frameworks.pytorch.input.items import identity as identity_module  # noqa: E402
from flatout.frameworks.pytorch.input.items import kept as kept_module  # noqa: E402
from flatout.frameworks.pytorch.input.items import store as store_module  # noqa: E402
from flatout.frameworks.pytorch.input.items.identity import digest, hashed  # noqa: E402
from flatout.frameworks.pytorch.input.items.rows import Unvectorised  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.input.items.store import Room  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.records import store_folder, store_state  # noqa: E402
from unit.pytorch.test_pipeline import make  # noqa: E402
from unit.pytorch.test_sample_store import epochs  # noqa: E402

WORKS = """
def __getitem__(self, i):
    x = torch.from_numpy(self.images[i]).float() / self.n
    return x, int(self.labels[i])
"""

TENSORS = """
def __getitem__(self, i):
    return self.images[i].float() / self.n, self.labels[i] * 2
"""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Rows count at once, chunks are small, and the machine's disk may be as full as it is."""
    monkeypatch.setattr(row_files, "COMMIT_EVERY_S", 0.0)
    monkeypatch.setattr(row_files, "COMMIT_SHARE", 1e9)
    monkeypatch.setattr(row_files, "CHUNK_BYTES", 500)
    monkeypatch.setattr(store_state, "LEAST_FREE_BYTES", 0)
    monkeypatch.setattr(store_state, "LEAST_FREE_SHARE", 0.0)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes datasets of one class of a script, as it stands in the file that is written for each."""

    def make_in_a_folder_of_its_own(body, **parts):
        numbers = tmp_path / "code"
        place = numbers / str(len(list(numbers.iterdir())) if numbers.exists() else 0)
        place.mkdir(parents=True)
        return make(place, monkeypatch, body, **parts)

    return make_in_a_folder_of_its_own


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "stores"


def run(dataset, *folders, most_bytes=None, num=3, fill=False, between=lambda dataset, number: None, **options):
    """Passes over a dataset as a run makes them that keeps its items; the batches, what was said, the keeper."""
    loaders = Loaders()
    loaders.keeping = [str(one) for one in folders], most_bytes
    loaders.reopen = fill
    loaders.install()
    loader = DataLoader(dataset, **{"batch_size": 6, "shuffle": True, **options})
    if fill:
        loaders.note(loader, 1)
    try:
        loaders.engage("fused", True)
        loaders.engage("stored", True)
        found, states = epochs(loader, num, functools.partial(between, dataset))
        keeper = loaders.pipeline.stored.keeper(loader)
        return found, states, loaders.remarks(), keeper, loaders.pipeline.stored.num_batches
    finally:
        loaders.remove()


def plainly(dataset, num=3, between=lambda dataset, number: None, **options):
    return epochs(
        DataLoader(dataset, **{"batch_size": 6, "shuffle": True, **options}), num, functools.partial(between, dataset)
    )


def check(make_dataset, *folders, num=3, between=lambda dataset, number: None, **options):
    """The passes of a run are those of plain; what was said, and the keeper."""
    limits = {name: options.pop(name) for name in ("most_bytes", "fill") if name in options}
    plain, plain_states = plainly(make_dataset(), num, between, **options)
    ours, our_states, said, keeper, num_batches = run(
        make_dataset(), *folders, num=num, between=between, **limits, **options
    )
    assert difference(ours, plain) is None
    assert all(a.equals(b) for a, b in zip(our_states, plain_states, strict=True))
    keeper.num_batches = num_batches
    return said, keeper


def only(folder):
    (path,) = store_folder.paths(folder)
    return path


def stored(folder):
    return store_state.read(only(folder))


# -- between runs ---------------------------------------------------------------------------------------------------

TENSOR_PARTS = {"images": torch.arange(600, dtype=torch.uint8).view(50, 12), "labels": torch.arange(50)}


@pytest.fixture
def computed(monkeypatch):
    """How many batches were computed."""
    calls = []
    original = fused.FusedFetcher._computed
    monkeypatch.setattr(fused.FusedFetcher, "_computed", lambda *given: calls.append(1) or original(*given))
    return calls


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("source", [WORKS, TENSORS])
def test_a_second_run_computes_nothing_and_gives_the_scripts_batches(made, folder, source, fill, computed):
    make_dataset = functools.partial(made, source, **(TENSOR_PARTS if source is TENSORS else {}))
    images_can_be_resized = TENSOR_PARTS["images"].untyped_storage().resizable()
    said, _ = check(make_dataset, folder, num=2, fill=fill)
    assert said == [f"store `{only(folder).name}`: 50 of 50 items on the disk, 0 MiB"]
    before = len(computed)
    assert (before == 0) is fill
    again, keeper = check(make_dataset, folder, num=2)
    assert again == said and len(computed) == before
    if source is TENSORS:
        assert keeper.reading.dataset.images.untyped_storage().resizable() is images_can_be_resized
    assert keeper.num_batches == 16  # of 18, two of which are compared whole


def test_what_a_run_did_not_come_to_the_next_one_adds(made, folder):
    sampler = list(range(20))
    assert "20 of 50" in check(functools.partial(made, WORKS), folder, shuffle=False, sampler=sampler)[0][0]
    before = only(folder).stat().st_ino, stored(folder).generation
    assert "50 of 50" in check(functools.partial(made, WORKS), folder)[0][0]
    assert (only(folder).stat().st_ino, stored(folder).generation) == before


KINDS = {
    "a dictionary": """
        def __getitem__(self, i):
            x = torch.from_numpy(self.images[i]).double() * 2
            return {"x": x, "pair": (i, i * 1.5)}
    """,
    "half precision": """
        def __getitem__(self, i):
            return (torch.from_numpy(self.images[i]).float() / 3).bfloat16(), i
    """,
    "truth": """
        def __getitem__(self, i):
            return (torch.from_numpy(self.images[i]).float() - 100).clamp(0, 1).bool()
    """,
    "complex": """
        def __getitem__(self, i):
            return self.waves[i] * 2.0
    """,
    "made of texts and numbers": """
        def __getitem__(self, i):
            x = torch.from_numpy(self.images[i]).float() / 2
            if self.names[i] == "":
                raise IndexError
            return x, self.numbers[i], self.large[i] % 7
    """,
    "windows": """
        def __getitem__(self, i):
            x = torch.from_numpy(self.text[i:i + self.n].astype(np.int64)) * 2
            return x, i
    """,
}


@pytest.mark.parametrize("name", KINDS)
def test_items_of_all_kinds_come_back(made, folder, name):
    waves = torch.complex(torch.arange(50.0), -torch.arange(50.0))[:, None].repeat(1, 3)
    parts = {
        "names": [f"n{i}" for i in range(50)], "waves": waves, "numbers": [i / 3 for i in range(50)],
        "large": [i * 10**30 for i in range(50)],
    }  # fmt: skip
    for _ in range(2):
        said, keeper = check(lambda: made(KINDS[name], **parts), folder, num=2)
        assert "50 of 50 items on the disk" in said[0]
    assert keeper.num_batches == 16


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("return torch.from_numpy(self.images[i]).float() / 2, self.names[i]", "texts are kept in memory only"),
        ("return {1: torch.from_numpy(self.images[i]).float() / 2}", "keys are no texts"),
        ("return torch.from_numpy(self.images[i]).float() / 2, self.empty[i]", "a part of the items is empty"),
    ],
)
def test_what_the_disk_does_not_take_memory_does(made, folder, source, why):
    parts = {"names": [f"n{i}" for i in range(50)], "empty": torch.zeros(50, 0)}
    said, keeper = check(lambda: made(f"def __getitem__(self, i):\n    {source}", **parts), folder)
    assert (
        said == [f"the items of `Made` are kept in memory only ({said[0].partition('(')[2][:-1]})"] and why in said[0]
    )
    assert keeper.store.num_kept == 50 and not store_folder.paths(folder)


def test_parts_of_datasets_have_stores_of_their_own(made, folder):
    for _ in range(2):
        for part in ([1, 2, 3] * 6, [4, 8, 15, 16, 23, 42] * 3):
            said, _ = check(lambda part=part: Subset(made(WORKS), part), folder, num=4)
            assert "18 of 18" in said[0]
    assert [one.dataset for one in store_folder.listed(folder)] == ["Made"]
    assert "made anew: " in said[0]  # one after the other they want the same place


def test_folds_that_are_in_use_at_the_same_time_find_their_stores_again(made, folder):
    for number in range(2):
        loaders = Loaders()
        loaders.keeping = [str(folder)], None
        loaders.install()
        loaders.engage("stored", True)
        try:
            folds = [DataLoader(Subset(made(WORKS), part), batch_size=6) for part in ([1, 2, 3] * 6, [4, 8, 15] * 6)]
            for fold in folds * 2:
                list(fold)
            said = loaders.remarks()
            assert loaders.pipeline.stored.num_batches == (2 if number == 0 else 8)
        finally:
            loaders.remove()
        name = store_folder.paths(folder)[0].name
        assert said == [f"store `{name}{end}`: 18 of 18 items on the disk, 0 MiB" for end in ("", "-2")]


def test_a_loader_that_is_made_for_each_pass_goes_on_with_the_same_store(made, folder, computed):
    loaders = Loaders()
    loaders.keeping = [str(folder)], None
    loaders.install()
    loaders.engage("stored", True)
    dataset = made(WORKS)
    try:
        kept = []
        for _ in range(3):
            loader = DataLoader(dataset, batch_size=10)
            assert difference(list(loader), list(plain_iterator(loader))) is None
            kept.append(loader)  # the former ones still live
        assert len(computed) == 5
        assert loaders.remarks() == [f"store `{only(folder).name}`: 50 of 50 items on the disk, 0 MiB"]
    finally:
        loaders.remove()


def plain_iterator(loader):
    return torch.utils.data.dataloader._SingleProcessDataLoaderIter(loader)


def test_what_stands_for_workers_keeps_the_items_of_its_own_copy_of_the_dataset(made, folder):
    loaders = Loaders()
    loaders.keeping = [str(folder)], None
    loaders.install()
    loaders.change({"in_process": True})
    loaders.engage("stored", True)
    dataset = made(TENSORS, images=torch.arange(200).reshape(50, 4), labels=torch.arange(50))
    try:
        iterator = iter(DataLoader(dataset, batch_size=5, num_workers=1))
        dataset.images = dataset.images + 1  # which workers that have begun do not see
        first = next(iterator)[0]
        assert first[0, 0] == 0
        list(iterator)
        assert "50 of 50" in loaders.remarks()[0]
    finally:
        loaders.remove()
    said, _ = check(lambda: made(TENSORS, images=torch.arange(200).reshape(50, 4) + 1, labels=torch.arange(50)), folder)
    assert "made anew: its data" in said[0]


def test_the_loop_may_change_batches_in_place(made, folder):
    for _ in range(2):
        loaders = Loaders()
        loaders.keeping = [str(folder)], None
        loaders.install()
        loaders.engage("stored", True)
        try:
            loader = DataLoader(made(WORKS), batch_size=5)
            plain = list(plain_iterator(loader))
            for _ in range(4):
                for (x, y), (plain_x, plain_y) in zip(loader, plain, strict=True):
                    assert torch.equal(x, plain_x) and torch.equal(y, plain_y)
                    assert x.untyped_storage().resizable() and not x._is_view()
                    x.zero_(), y.fill_(-1)
            loaders.remarks()
        finally:
            loaders.remove()


# -- what items follow from -----------------------------------------------------------------------------------------


def new_labels(made):
    return made(WORKS, labels=np.full(50, 9))


def new_images(made):
    return made(WORKS, images=np.full((50, 6, 5), 7, np.uint8))


def new_type_of_images(made):
    return made(WORKS, images=np.arange(1500, dtype=np.int16).reshape(50, 6, 5))


def new_parameter(made):
    return made(WORKS, n=9)


def new_type_of_parameter(made):
    return made(WORKS, n=8.0)


def new_code(made):
    return made(WORKS.replace("/ self.n", "/ self.n + 1"))


def new_number_in_code(made):
    return made(WORKS.replace("int(self.labels[i])", "int(self.labels[i]) + 1"))


def new_function(made):
    return made(WORKS.replace("/ self.n", "/ halved(self.n)"), before="def halved(n): return n / 2")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (new_labels, "its data have changed"), (new_images, "its data have changed"),
        (new_type_of_images, "what goes into all of its items has changed"),
        (new_parameter, "what goes into all of its items has changed"),
        (new_type_of_parameter, "what goes into all of its items has changed"),
        (new_code, "the code of its dataset has changed"), (new_number_in_code, "the code of its dataset has changed"),
        (new_function, "the code of its dataset has changed"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)  # fmt: skip
def test_a_store_of_something_else_is_made_anew_and_that_is_said(made, folder, change, why):
    check(lambda: made(WORKS), folder)
    former = stored(folder)
    said, _ = check(lambda: change(made), folder)
    assert said == [f"store `{only(folder).name}`: 50 of 50 items on the disk, 0 MiB (made anew: {why})"]
    assert stored(folder).generation != former.generation
    assert len(list(only(folder).iterdir())) == 3 + len(stored(folder).parts), "files of the former one are left"
    check(lambda: change(made), folder)
    check(lambda: made(WORKS), folder)


def test_names_that_the_code_uses_belong_to_it(made, folder):
    source = WORKS.replace("/ self.n", "/ SCALE + shifted(1)")
    before = "SCALE = {}\ndef shifted(x, by={}): return x + by\n"
    for scale, by in [(2, 1), (2, 1), (3, 1), (3, 2)]:
        said, _ = check(lambda scale=scale, by=by: made(source, before=before.format(scale, by)), folder)
        print(said)
        assert ("made anew" in said[0]) is ((scale, by) in [(3, 1), (3, 2)]), (scale, by)


def test_lines_that_are_added_above_the_code_change_nothing(made, folder):
    check(lambda: made(WORKS), folder)
    assert "made anew" not in check(lambda: made("\n\n# a remark\n" + textwrap.dedent(WORKS)), folder)[0][0]


@pytest.mark.parametrize("module", ["torch", "numpy", "flatout"])
def test_another_version_makes_another_store(made, folder, monkeypatch, module):
    check(lambda: made(WORKS), folder)
    monkeypatch.setattr(sys.modules[module], "__version__", "0.0.0")
    said, _ = check(lambda: made(WORKS), folder)
    assert f"(made anew: it was made by flatout {stored(folder).made_by[8:13] and '0.1.0'}" in said[0]


def test_the_default_type_belongs_to_it(made, folder):
    source = "def __getitem__(self, i): return torch.from_numpy(self.images[i]) / 2"
    check(lambda: made(source), folder)
    torch.set_default_dtype(torch.float64)
    try:
        assert "made anew" in check(lambda: made(source), folder)[0][0]
    finally:
        torch.set_default_dtype(torch.float32)


def in_a_closure():
    kept = []
    return lambda: kept


def test_what_equal_values_hide_tells_stores_apart():
    def same(one, other):
        return digest(one) == digest(other)

    assert same([1, (2.0, "a"), {"x": None}], [1, (2.0, "a"), {"x": None}]) and same({1, 2}, {2, 1})
    for one, other in [
        (1, 1.0), (1, True), ([1], (1,)), (0.0, -0.0), ("a", b"a"), ([1, 2], [12]), (["ab"], ["a", "b"]), ({}, []),
        ({"a": 1}, {"b": 1}), (torch.float32, "torch.float32"), (slice(1), slice(2)), (np.float32(1), np.float64(1)),
        (np.float32, np.float64), (len, max), (os, sys), (None, Ellipsis), (test_items_of_all_kinds_come_back, same),
    ][:-1]:  # fmt: skip
        assert not same(one, other), (one, other)
    for unknown in (object(), [object()], in_a_closure(), [].append, torch.zeros(2)):
        with pytest.raises(Unvectorised):
            digest(unknown)


@settings(max_examples=30)
@given(st.integers(0, 3), st.sampled_from(["uint8", "float32", "int64", "bool"]), st.data())
def test_a_hash_sees_every_byte_however_it_lies(dims, dtype, data):
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(dims))
    values = np.zeros(shape, dtype)
    for one in (values, torch.from_numpy(values)):
        before = hashed(one)
        if dims > 1:
            assert hashed(one.transpose(*reversed(range(dims))) if one is values else one.mT) is not None
        place = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        one[place] = 1
        assert hashed(one) != before
        one[place] = 0
        assert hashed(one) == before


def test_what_is_too_large_to_be_hashed_is_compared_row_by_row(made, folder, monkeypatch):
    monkeypatch.setattr(identity_module, "MOST_HASHED_BYTES", 100)
    images = TENSOR_PARTS["images"].bfloat16() if hasattr(torch, "bfloat16") else TENSOR_PARTS["images"]

    def make_dataset(change=0):
        changed = images.clone()
        changed[7] += change
        return made(TENSORS, images=changed, labels=torch.arange(50))

    check(make_dataset, folder)
    assert [part.name for part in stored(folder).parts if part.name.startswith("made")] == ["made-0", "made-1"]
    said, keeper = check(make_dataset, folder)
    assert keeper.num_batches >= 20 and "items have changed" not in said[0]
    said, _ = check(lambda: make_dataset(8), folder)
    assert "50 of 50" in said[0] and "items have changed" in said[0]
    check(make_dataset, folder)


def test_a_memory_mapped_file_is_not_hashed(made, folder, tmp_path):
    np.save(tmp_path / "images.npy", np.arange(1500, dtype=np.uint8).reshape(50, 6, 5))

    def make_dataset():
        return made(WORKS, images=np.load(tmp_path / "images.npy", mmap_mode="r"))

    check(make_dataset, folder)
    said, _ = check(make_dataset, folder)
    assert said == [f"store `{only(folder).name}`: 50 of 50 items on the disk, 0 MiB"]
    np.save(tmp_path / "images.npy", np.arange(1500, dtype=np.uint8).reshape(50, 6, 5) + 1)
    assert "items have changed" in check(make_dataset, folder)[0][0]


# -- data that change while a run goes on ---------------------------------------------------------------------------


def write_array(dataset, number):
    dataset.images = dataset.images if dataset.images.flags.owndata else dataset.images.copy()
    dataset.images[number * 7 % 50] += 1


def write_label(dataset, number):
    dataset.labels[number] = 5


def set_parameter(dataset, number):
    dataset.n = 2.0 + number // 3


def set_type(dataset, number):
    dataset.n = [8, 8.0, 8, np.float32(8)][number % 4]


@pytest.mark.parametrize("change", [write_array, write_label, set_parameter, set_type])
def test_a_dataset_that_changes_is_followed_and_leaves_a_store_of_what_it_was(made, folder, change):
    images = np.random.default_rng(5).integers(0, 256, (50, 6, 5), dtype=np.uint8)

    def make_dataset():
        return made(WORKS, images=images.copy(), labels=list(range(50)))

    for _ in range(2):
        said, _ = check(make_dataset, folder, num=7, between=change)
        assert "changed" in said[0]
        check(make_dataset, folder, num=3)


def test_a_tensor_that_is_written_to_is_followed(made, folder):
    images = torch.arange(200, dtype=torch.uint8).view(50, 4)

    def change(dataset, number):
        if number % 2:
            dataset.images[number * 11 % 50].add_(1)

    for _ in range(2):
        check(lambda: made(TENSORS, images=images.clone(), labels=torch.arange(50)), folder, num=5, between=change)
        check(lambda: made(TENSORS, images=images.clone(), labels=torch.arange(50)), folder)


def test_items_of_a_tensor_that_was_written_to_unseen_do_not_count(made, folder, monkeypatch):
    """An array that shares a tensor's memory changes it without PyTorch's knowledge: no later run may be given that."""
    monkeypatch.setattr(row_files, "COMMIT_EVERY_S", 1e9)
    images = np.arange(200, dtype=np.uint8).reshape(50, 4)

    def make_dataset(values=images):
        return made(TENSORS, images=torch.from_numpy(values), labels=torch.arange(50))

    mine = images.copy()
    loaders = Loaders()
    loaders.keeping = [str(folder)], None
    loaders.install()
    loaders.engage("stored", True)
    try:
        batches = iter(DataLoader(make_dataset(mine), batch_size=10))
        next(batches), next(batches)
        mine[:] = 0
        list(batches)
        assert "in a way that PyTorch does not count" in loaders.remarks()[0]
    finally:
        loaders.remove()
    assert stored(folder).num_rows == 0
    check(make_dataset, folder)


def test_kept_items_that_are_not_the_scripts_are_found_and_no_later_run_is_given_them(made, folder):
    check(lambda: made(WORKS), folder)
    path = only(folder)
    state = stored(folder)
    column = next(part for part in state.parts if part.name == "column-0")
    raw = bytes(state.file(path, column).stat().st_size)
    state.file(path, column).write_bytes(raw)
    chunk = state.chunk_rows * column.row_bytes
    sums = "".join(f"{zlib.crc32(raw[first : first + chunk]):08x}" for first in range(0, len(raw), chunk))
    store_state.write(path, dataclasses.replace(state, sums={**state.sums, "column-0": sums}))
    said, keeper = check(lambda: made(WORKS), folder)
    why = f"store `{path.name}` is gone: its items differ from the script's"
    assert said == [f"the items of `Made` are kept in memory only ({why})"]
    assert "kept batches differ" in keeper.why_not
    assert "50 of 50 items on the disk" in check(lambda: made(WORKS), folder)[0][0]


def test_items_of_a_program_that_was_wrong_are_gone(made, folder):
    loaders = Loaders()
    loaders.keeping = [str(folder)], None
    loaders.install()
    loaders.engage("stored", True)
    try:
        loader = DataLoader(made(WORKS), batch_size=5)
        list(loader)
        assert stored(folder).num_rows == 50
        loaders.pipeline.stored.keeper(loader).reading.differs("other values")
        list(loader)
        assert "is gone: its items differ" in loaders.remarks()[0]
    finally:
        loaders.remove()
    with pytest.raises(FileNotFoundError):
        stored(folder)


# -- the disk -------------------------------------------------------------------------------------------------------


def test_a_disk_that_becomes_full_leaves_a_part_and_the_rest_in_memory(made, folder, monkeypatch):
    write, calls = os.pwrite, []

    def refuse(*given):
        calls.append(1)
        if len(calls) > 14:
            raise OSError(28, "No space left on device")
        return write(*given)

    monkeypatch.setattr(os, "pwrite", refuse)
    said, keeper = check(lambda: made(WORKS), folder)
    assert "12 of 50" in said[0] and "from there on in memory: No space left on device" in said[0]
    assert keeper.store.num_kept == 50
    monkeypatch.undo()
    assert "50 of 50" in check(lambda: made(WORKS), folder)[0][0]


@pytest.mark.parametrize("call", ["ftruncate", "open", "replace", "mkdir"])
def test_a_disk_that_refuses_at_the_start_is_said(made, folder, monkeypatch, call):
    def refuse(*given, **named):
        if call != "open" or "column" in str(given[0]):
            raise OSError(28, "No space left on device")
        return opened(*given, **named)

    opened, datasets = os.open, [made(WORKS), made(WORKS)]
    monkeypatch.setattr(*((os, call) if call in ("ftruncate", "open") else (Path, call)), refuse)
    said, keeper = check(datasets.pop, folder)
    why = "the disk refuses it: No space left on device"
    assert said == [f"the items of `Made` are kept in memory only ({why})"] and keeper.store.num_kept == 50


@pytest.mark.parametrize("free_rows", [-1, 0, 20])
def test_a_disk_with_little_room_is_left_some(made, folder, monkeypatch, free_rows):
    item_bytes = 8 + 6 * 5 + 8 + 6 * 5 * 4 + 8
    monkeypatch.setattr(kept_module, "free_bytes", lambda _: free_rows * item_bytes)
    said, keeper = check(lambda: made(WORKS), folder)
    if free_rows > 0:
        assert "20 of 50 items" in said[0] and keeper.store.why_stopped == "no room on the disk for more"
        assert keeper.store.num_kept == 20
    else:
        assert "in memory only (the disk has no room)" in said[0] and keeper.store.num_kept == 50
    monkeypatch.undo()
    assert "50 of 50" in check(lambda: made(WORKS), folder)[0][0] or free_rows > 0


def test_what_is_free_is_what_a_user_may_take(tmp_path, monkeypatch):
    seen = os.statvfs(tmp_path)
    whole = seen.f_bavail * seen.f_frsize
    monkeypatch.setattr(store_state, "LEAST_FREE_BYTES", 2**30)
    assert abs(store_state.free_bytes(tmp_path / "not" / "there") - (whole - 2**30)) < 2**28
    monkeypatch.setattr(store_state, "LEAST_FREE_SHARE", 2.0)
    assert store_state.free_bytes(tmp_path) < 0


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="only root can mount a small disk")
def test_a_disk_that_is_really_full(made, tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("this machine mounts nothing")
    try:
        large = np.random.default_rng(0).integers(0, 256, (50, 40, 50), dtype=np.uint8)
        for _ in range(2):
            _, keeper = check(lambda: made(WORKS, images=large), place / "stores")
            assert keeper.store.num_kept > 0
        gc.collect()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


READ_ONLY = """
import sys
sys.path[:0] = {paths!r}
import os
os.setgid(65534), os.setuid(65534)
"""


def test_a_folder_that_may_not_be_written_is_read(made, folder, monkeypatch):
    check(lambda: made(WORKS), folder, num=1, shuffle=False, sampler=list(range(30)))
    before = sorted((path.name, path.stat().st_mtime_ns) for path in only(folder).iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    said, keeper = check(lambda: made(WORKS), folder)
    assert said == [f"store `{only(folder).name}`: 30 of 50 items on the disk, 0 MiB (only read: Permission denied)"]
    assert keeper.store.num_kept == 50, "memory has the others"
    after = sorted((path.name, path.stat().st_mtime_ns) for path in only(folder).iterdir())
    assert [one for one in after if one[0] not in ("lock", "writer")] == [
        one for one in before if one[0] not in ("lock", "writer")
    ]


def test_a_home_that_may_not_be_written_costs_the_disk_only(made, tmp_path):
    (tmp_path / "file").write_text("")
    said, keeper = check(lambda: made(WORKS), tmp_path / "file" / "stores")
    assert "in memory only (the disk refuses it: Not a directory)" in said[0] and keeper.store.num_kept == 50


# -- torn -----------------------------------------------------------------------------------------------------------


def files_of(path):
    return sorted(one for one in path.iterdir() if one.name not in (store_state.LOCK, store_state.WRITER))


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("harm", ["delete", "empty", "halve", "shorten"])
def test_a_store_that_is_cut_off_is_made_anew(made, folder, number, harm):
    check(lambda: made(WORKS), folder)
    path = files_of(only(folder))[number]
    if harm == "delete":
        path.unlink()
    else:
        size = path.stat().st_size
        os.truncate(path, {"empty": 0, "halve": size // 2, "shorten": size - 1}[harm])
    assert store_folder.listed(folder)[0].state.startswith("torn")
    said, _ = check(lambda: made(WORKS), folder)
    assert "50 of 50" in said[0] and ("made anew: " in said[0] or harm == "delete"), said
    assert store_folder.listed(folder)[0].state == "whole"
    said, keeper = check(lambda: made(WORKS), folder)
    assert "made anew" not in said[0] and keeper.num_batches > 20


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_byte_that_was_changed_anywhere_is_found(made, folder, tmp_path, data):
    template = tmp_path / "template"
    if not template.exists():
        check(lambda: made(WORKS), template)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    path = data.draw(st.sampled_from(files_of(only(folder))))
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    said, _ = check(lambda: made(WORKS), folder)
    assert "50 of 50" in said[0] and "made anew: " in said[0], (path.name, said)
    assert "made anew" not in check(lambda: made(WORKS), folder)[0][0]


def test_what_is_no_store_is_left_alone(made, folder):
    (folder / "photographs").mkdir(parents=True)
    (folder / "photographs" / "one.jpg").write_bytes(b"1")
    (folder / "state.json").write_text("{}")
    (folder / "odd").mkdir()
    (folder / "odd" / "state.json").mkdir()
    (folder / "link").symlink_to(folder / "photographs")
    said, _ = check(lambda: made(WORKS), folder)
    assert "50 of 50" in said[0]
    assert (folder / "photographs" / "one.jpg").exists() and (folder / "state.json").exists()


@pytest.mark.parametrize("state", ["", "{", "[]", "null", "{}", '{"state": {}, "checksum": ""}', "[" * 100_000, "\0"])
def test_a_state_that_is_none_is_torn(made, folder, state):
    check(lambda: made(WORKS), folder, num=1)
    (only(folder) / "state.json").write_text(state)
    with pytest.raises(store_state.TornError):
        stored(folder)
    assert "(made anew: its state is torn)" in check(lambda: made(WORKS), folder)[0][0]


def test_a_store_of_another_format_is_made_anew(made, folder):
    check(lambda: made(WORKS), folder, num=1)
    path = only(folder) / "state.json"
    state = json.loads(path.read_text())["state"] | {"format": 99}
    path.write_text(json.dumps({"state": state, "checksum": store_state._checksum(state)}))
    assert store_folder.listed(folder)[0].state == "of another version of flatout"
    assert "(made anew: it is of another version of flatout)" in check(lambda: made(WORKS), folder)[0][0]


# -- killed ---------------------------------------------------------------------------------------------------------


def in_a_fork(call):
    """Call something in a process of its own; the signal that ended it, 0 where none did."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            torch.set_num_threads(1)
            call()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


DISK_CALLS = [(os, "pwrite"), (os, "ftruncate"), (Path, "replace"), (Path, "write_text"), (Path, "mkdir"), (os, "open")]


def killed_at(number, call):
    """Call something in a process that is killed before its so manieth call of the disk."""
    left = [number]

    def counting(original):
        def counted(*given, **named):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **named)

        return counted

    def in_child():
        for owner, name in DISK_CALLS:
            setattr(owner, name, counting(getattr(owner, name)))
        call()

    return in_a_fork(in_child)


def test_a_run_that_is_killed_at_any_call_of_the_disk_leaves_what_the_next_one_can_use(made, folder):
    dataset = made(WORKS)
    plain, _ = plainly(dataset, 2)
    number, ends = 0, []
    while not ends or ends[-1]:
        shutil.rmtree(folder, ignore_errors=True)
        ends.append(killed_at(number, lambda: run(dataset, folder, num=2, batch_size=10)))
        for _ in range(2):
            ours, _, said, _, _ = run(dataset, folder, num=2)
            assert difference(ours, plain) is None, (number, said)
            assert "50 of 50 items" in said[0]
        assert "made anew" not in said[0] and store_folder.listed(folder)[0].state == "whole"
        number += 1 if number < 12 else 3
    assert set(ends[:-1]) == {signal.SIGKILL} and len(ends) > 12


@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_is_killed_at_any_moment_leaves_what_the_next_one_can_use(made, folder, seed):
    dataset = made(WORKS)
    plain, _ = plainly(dataset, 2)
    after_s = random.Random(seed).uniform(0.0, 0.06)

    def killed():
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process as well, between any two instructions
        signal.setitimer(signal.ITIMER_REAL, after_s)
        run(dataset, folder, num=6, batch_size=3)

    for _ in range(3):
        in_a_fork(killed)
        ours, _, _, _, _ = run(dataset, folder, num=2)
        assert difference(ours, plain) is None


# -- several at once ------------------------------------------------------------------------------------------------


def test_of_two_runs_the_second_reads(made, folder):
    dataset = made(WORKS)
    plain, _ = plainly(dataset)
    run(dataset, folder, num=1, shuffle=False, sampler=list(range(30)))
    with contextlib.ExitStack() as held:
        held.callback(store_state.Lock(only(folder) / store_state.LOCK, alone=False).release)
        held.callback(store_state.Lock(only(folder) / store_state.WRITER, alone=True).release)
        ours, _, said, keeper, _ = run(dataset, folder)
    assert difference(ours, plain) is None
    assert "30 of 50 items on the disk" in said[0] and "another run writes it, and this one reads" in said[0]
    assert keeper.store.num_kept == 50 and stored(folder).num_rows == 30


def test_a_store_that_is_made_anew_does_not_disturb_who_reads_it(made, folder):
    old, new = made(WORKS), made(WORKS, labels=np.full(50, 7))
    run(old, folder, num=1)
    loaders = Loaders()
    loaders.keeping = [str(folder)], None
    loaders.install()
    loaders.engage("stored", True)
    try:
        loader = DataLoader(old, batch_size=5)
        plain = list(plain_iterator(loader))
        assert difference(list(loader), plain) is None
        kept = loaders.pipeline.stored.keeper(loader).store._kept
        kept._files.stop_writing()  # as if it had come second

        def another():
            loaders.remove()
            ours, _, said, _, _ = run(new, folder)
            assert difference(ours, plainly(new)[0]) is None and "its data have changed" in said[0]

        assert in_a_fork(another) == 0
        assert difference(list(loader), plain) is None
    finally:
        loaders.remove()


def test_runs_at_the_same_time_each_give_the_scripts_batches(made, folder):
    dataset = made(WORKS)
    plain, _ = plainly(dataset, 4)

    def one():
        ours, _, _, _, _ = run(dataset, folder, num=4, batch_size=6)
        assert difference(ours, plain) is None

    pids = []
    for _ in range(4):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                torch.set_num_threads(1)
                one()
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
    one()
    assert stored(folder).num_rows == 50


def test_a_forked_process_writes_nothing(made, folder):
    dataset = made(WORKS)
    loaders = Loaders()
    loaders.keeping = [str(folder)], None
    loaders.install()
    loaders.engage("stored", True)
    try:
        loader = DataLoader(dataset, batch_size=10)
        batches = iter(loader)
        next(batches), next(batches)
        plain = list(plain_iterator(loader))

        def child():
            loaders._pid = os.getpid()
            assert difference(list(loader), plain) is None
            loaders.remarks()

        assert in_a_fork(child) == 0
        assert stored(folder).num_rows == 20
        list(batches)
        assert "50 of 50" in loaders.remarks()[0]
    finally:
        loaders.remove()
    check(lambda: made(WORKS), folder)


def test_only_the_first_rank_writes(made, folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    said, keeper = check(lambda: made(WORKS), folder)
    assert "in memory only (only the first rank writes)" in said[0] and keeper.store.num_kept == 50
    monkeypatch.setenv("RANK", "0")
    assert "50 of 50" in check(lambda: made(WORKS), folder)[0][0]
    monkeypatch.setenv("RANK", "1")
    said, keeper = check(lambda: made(WORKS), folder)
    assert "50 of 50" in said[0] and keeper.num_batches > 20 and not keeper.store._kept.writes


def test_a_process_that_others_started_writes_nothing(monkeypatch):
    assert shelf.may_write()
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    assert not shelf.may_write()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert shelf.may_write()


def test_a_script_that_closes_all_descriptors_gets_none_of_our_bytes(made, folder, tmp_path):
    dataset = made(WORKS)

    def child():
        loaders = Loaders()
        loaders.keeping = [str(folder)], None
        loaders.install()
        loaders.engage("stored", True)
        loader = DataLoader(dataset, batch_size=10)
        plain = list(plain_iterator(loader))
        batches = iter(loader)
        found = [next(batches), next(batches)]
        os.closerange(3, 200)
        mine = [os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT) for _ in range(20)]
        found += list(batches)
        assert difference(found, plain) is None
        loaders.remarks()
        del loaders, loader, batches
        gc.collect()
        assert [os.fstat(one).st_size for one in mine] == [0] * 20

    assert in_a_fork(child) == 0
    assert stored(folder).num_rows == 20


def test_a_store_that_is_in_use_is_not_removed(made, folder, monkeypatch):
    monkeypatch.setattr(store_folder, "stores_folder", lambda: folder)
    dataset = made(WORKS)
    loaders = Loaders()
    loaders.keeping = [str(folder)], None
    loaders.install()
    loaders.engage("stored", True)
    try:
        loader = DataLoader(dataset, batch_size=10)
        list(loader)
        name = only(folder).name
        assert store_folder.listed(folder)[0].in_use
        assert store_folder.remove_stores([name]) == store_folder.Removed(in_use=(name,))
        list(loader)
        loaders.remarks()
    finally:
        loaders.remove()
    done = store_folder.remove_stores(None)
    assert done.names == (name,) and done.freed_bytes > 0 and not store_folder.paths(folder)
    assert not (folder / name).exists()


def test_a_store_that_is_being_removed_is_not_opened(made, folder, monkeypatch):
    check(lambda: made(WORKS), folder, num=1)
    lock = store_state.Lock(only(folder) / store_state.LOCK, alone=True)
    try:
        said, keeper = check(lambda: made(WORKS), folder)
        assert "it is being removed" in said[0] and keeper.store.num_kept == 50
    finally:
        lock.release()


# -- memory ---------------------------------------------------------------------------------------------------------


def test_without_memory_nothing_is_kept_and_that_is_said(made, folder):
    said, keeper = check(lambda: made(WORKS), folder, most_bytes=0)
    assert said == ["sample_store: `--store-memory 0` keeps nothing"]
    assert keeper.store is None and keeper.why_not == "`--store-memory 0` keeps nothing"
    assert not folder.exists()


def test_all_stores_of_a_process_share_the_memory_that_they_were_given():
    class Fake:
        def __init__(self, taken_bytes):
            self.taken_bytes = taken_bytes

    room, one, other = Room(1000), Fake(0), Fake(0)
    assert room.free_bytes(one) == 1000
    one.taken_bytes = 700
    assert room.free_bytes(other) == 300 and room.free_bytes(one) == 1000
    other.taken_bytes = 600
    assert room.free_bytes(Fake(0)) == 0
    del one
    gc.collect()
    assert room.free_bytes(Fake(0)) == 400


@pytest.mark.parametrize("keeps", [False, True])
def test_so_much_is_kept_as_memory_may_be_taken(made, folder, keeps):
    item_bytes = 8 + 6 * 5 + 8 + 6 * 5 * 4 + 8
    _, keeper = check(lambda: made(WORKS), *[folder] * keeps, most_bytes=20 * item_bytes, num=4)
    assert 20 <= keeper.store.num_kept == keeper.store.capacity <= 22
    assert keeper.store.why_stopped == "no memory for more"
    if keeps:
        assert "50 of 50" in check(lambda: made(WORKS), folder)[0][0], "later runs may take more"


def test_items_that_have_changed_need_memory(made, folder, monkeypatch):
    dataset = made(WORKS, labels=list(range(50)))
    plain = plainly(made(WORKS, labels=list(range(50))), 6, write_label)[0]
    monkeypatch.setattr(store_module.Room, "free_bytes", lambda self, store: 10**9 if not store.num_kept else 0)
    ours, _, said, _, _ = run(dataset, folder, num=6, between=write_label)
    assert difference(ours, plain) is None and "items have changed" in said[0]


# -- in a process of its own ----------------------------------------------------------------------------------------

SCRIPT = """
import hashlib, sys
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset

class Digits(Dataset):
    def __init__(self):
        self.data = torch.arange(1900 * 16, dtype=torch.int64).remainder_(251).to(torch.uint8).view(1900, 4, 4)
        self.targets = [i % 10 for i in range(1900)]
    def __len__(self):
        return len(self.data)
    def __getitem__(self, i):
        return (self.data[i].float().div(255) - 0.5) / 0.25, self.targets[i]

torch.manual_seed(0)
model = torch.nn.Linear(16, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = hashlib.sha256()
for epoch in range(2):
    for x, y in DataLoader(Digits(), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x.flatten(1)), y)
        loss.backward()
        optimizer.step()
        seen.update(x.numpy().tobytes() + y.numpy().tobytes())
print(seen.hexdigest(), loss.item(), torch.rand(1).item())
"""


@pytest.mark.slow
def test_a_script_prints_the_same_in_every_run(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    flatout = [sys.executable, "-m", "flatout"]

    def runs(*command):
        done = warm.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=True)
        return done.stdout, done.stderr.splitlines()

    plain, _ = runs(sys.executable, "train.py")
    keep = [*flatout, "run", "--fixed", "--keep-store", "--levers", "sample_store", "train.py"]
    for _ in range(2):
        out, said = runs(*keep)
        assert out == plain
        assert said[-1].startswith("flatout: store `train-digits-") and "1,900 of 1,900 items on the disk" in said[-1]
    (one,) = json.loads(runs(*flatout, "store", "ls", "--json")[0]).values()
    assert (one["num_kept"], one["num_items"], one["state"], one["in_use"]) == (1900, 1900, "whole", False)
    assert one["dataset"] == "Digits" and one["script"] == str(tmp_path / "train.py")
    out, said = runs(*flatout, "run", "--fixed", "--store-memory", "0", "--levers", "sample_store", "train.py")
    assert out == plain and said[-1] == "flatout: sample_store: `--store-memory 0` keeps nothing"
    out, said = runs(*flatout, "run", "--keep-store", "train.py")
    assert out == plain
    assert "flatout: `--keep-store` has nothing to do here: the lever sample_store is not engaged" in said
    assert runs(*flatout, "store", "rm", "--all")[0].startswith("removed train-digits-")
    assert runs(*flatout, "store", "ls")[0].startswith("no store is kept")
