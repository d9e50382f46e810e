"""Are batches that are computed at once the script's own, bit for bit, and does whatever is not known stay plain?"""

import functools
import random
import sys
import textwrap

import pytest

import warm

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate  # noqa: E402

from flatout.frameworks.pytorch.input.items import indexing  # noqa: E402
from flatout.frameworks.pytorch.input.items.fused import FusedFetch, computed  # noqa: E402
from flatout.frameworks.pytorch.input.items.reading import Unread, read  # noqa: E402
from flatout.frameworks.pytorch.input.items.rows import Unvectorised  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import AT_ONCE, EVERY, Shadow, difference  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402

PIXELS = np.random.default_rng(0).integers(0, 256, (50, 6, 5), dtype=np.uint8)
COLOURS = np.random.default_rng(1).integers(0, 256, (50, 4, 6, 3), dtype=np.uint8)
LABELS = np.arange(50) % 10
TEXT = np.arange(400, dtype=np.uint16) * 7 % 311

PRELUDE = """
import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

class Made(Dataset):
    def __init__(self, **parts):
        self.__dict__.update(parts)
    def __len__(self):
        return 50
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes a dataset of source code, which has to lie in a file as a script does."""
    return functools.partial(make, tmp_path, monkeypatch)


def make(tmp_path, monkeypatch, body, *, before="", **parts):
    import importlib.util

    path = tmp_path / f"made_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(PRELUDE + textwrap.indent(textwrap.dedent(body), "    ") + "\n" + textwrap.dedent(before))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parts = {"images": PIXELS, "colours": COLOURS, "labels": LABELS, "text": TEXT, "transform": None, "n": 8} | parts
    return module.Made(
        **{
            name: module.Transform() if isinstance(part, str) and part == "Transform" else part
            for name, part in parts.items()
        }
    )


def check(dataset, indices=(3, 1, 4, 1, 5, 9)):
    """The batch computed at once is that of `default_collate`, in memory of its own."""
    indices = list(indices)
    _, program = read(dataset, 2)
    batch = computed(program, dataset, indices)
    plain = default_collate([dataset[index] for index in indices])
    assert difference(batch, plain) is None
    for tensor in torch.utils._pytree.tree_leaves(batch):
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    assert difference(default_collate([dataset[index] for index in indices]), plain) is None, "the dataset was changed"


# -- what is known --------------------------------------------------------------------------------------------------

KNOWN = {
    "arrays as they are": "return self.images[i], self.labels[i].astype(np.int64)",
    "tensors": "return torch.from_numpy(self.images[i]).float().div(255), int(self.labels[i])",
    "a dictionary": "return {'x': torch.tensor(self.images[i], dtype=torch.float32), 'y': int(self.labels[i])}",
    "images": """
        img = Image.fromarray(self.images[i])
        x = torch.from_numpy(np.array(img)).unsqueeze(0).float() / 255
        return (x - 0.5) / 0.5, float(self.labels[i])""",
    "colours": """
        img = Image.fromarray(self.colours[i]).convert("RGB")
        x = torch.from_numpy(np.asarray(img, dtype=np.float32).transpose(2, 0, 1).copy())
        return x / 255.0""",
    "grey to colours": "return np.array(Image.fromarray(self.images[i]).convert('RGB'))",
    "windows": """
        x = torch.from_numpy(self.text[i:i + self.n].astype(np.int64))
        y = torch.from_numpy(self.text[i + 1:i + 1 + self.n].astype(np.int64))
        return x, y""",
    "windows in steps": """
        start = i * 3
        chunk = torch.tensor(self.text[start:start + self.n + 1].astype(np.int64), dtype=torch.long)
        return chunk[:-1], chunk[1:]""",
    "a list of labels": "return self.names[i], self.numbers[i], self.parts[i]",
    "an index that is a tensor": """
        if torch.is_tensor(i):
            i = i.tolist()
        return self.images[i]""",
    "bounds": """
        if i < 0 or i >= len(self):
            raise IndexError(i)
        return self.labels[i].astype(np.float32) * 1.0 if False else torch.tensor(self.labels[i])""",
    "a transform that is not there": """
        x = torch.as_tensor(self.images[i])
        if self.transform is not None:
            x = self.transform(x)
        return x""",
    "the same twice": "x = torch.from_numpy(self.images[i]).float(); return x, x",
    "channels last, as pixels lie": """
        x = torch.from_numpy(self.images[i]).view(-1, 3, 2).permute(2, 0, 1)
        return x.float().div(255)""",
    "views of one": "x = torch.from_numpy(self.images[i]); return x[0], x[:, 1:3], x.t() if False else x.permute(1, 0)",
    "in place, on what is new": "return torch.from_numpy(self.images[i]).float().clone().sub_(3).div_(7)",
    "numbers": "return i, i * 2 + 1, i / 4, i // 3, i % 7, (i + 0.5) * 3",
    "a comprehension": "return tuple(part[i] for part in [self.images, self.colours])",
    "parts": "return self.images[i][0], self.images[i][2, 1:4], torch.from_numpy(self.images[i])[..., None]",
    "a property and a method": """
        return self.scaled(self.images[i]) + self.offset

    @property
    def offset(self):
        return 2.5

    def scaled(self, x, by=3):
        return torch.from_numpy(x).float() * by""",
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("indices", [(3, 1, 4, 1, 5, 9), (7,)])
def test_batches_are_those_of_the_script(made, name, indices):
    body = "def __getitem__(self, i):\n" + textwrap.indent(textwrap.dedent(KNOWN[name]).strip("\n"), "    ")
    if name == "a property and a method":
        head, _, rest = textwrap.dedent(KNOWN[name]).strip("\n").partition("\n\n")
        body = "def __getitem__(self, i):\n    " + head.strip() + "\n\n" + textwrap.dedent(rest)
    parts = {"names": [f"n{k}" for k in range(50)], "numbers": list(range(50)), "parts": [k / 3 for k in range(50)]}
    check(made(body, **parts), indices)


def test_a_transform_of_the_scripts_is_read_too(made):
    before = """
    class Scale:
        def __call__(self, x):
            return x / 255

    class Compose:
        def __init__(self, *steps):
            self.steps = list(steps)
        def __call__(self, x):
            for step in self.steps:
                x = step(x)
            return x

    def grey(x):
        return torch.from_numpy(np.array(x)).float()

    class Transform(Compose):
        def __init__(self):
            super().__init__(grey, Scale())
    """
    body = """
    def __getitem__(self, i):
        return self.transform(Image.fromarray(self.images[i])), int(self.labels[i])
    """
    check(made(body, before=before, transform="Transform"))


def test_pytorchs_own_datasets_are_read():
    whole = TensorDataset(torch.randn(50, 3), torch.arange(50), torch.rand(50) > 0.5)
    check(whole)
    check(Subset(whole, list(range(49, 0, -2))))
    check(Subset(Subset(whole, range(40)), torch.arange(20).tolist()))


def test_an_array_on_disk_is_read_where_it_lies(made, tmp_path):
    TEXT.tofile(tmp_path / "text.bin")
    mapped = np.memmap(tmp_path / "text.bin", dtype=np.uint16, mode="r")
    body = "def __getitem__(self, i):\n    return torch.from_numpy((self.text[i:i + 16]).astype(np.int64))"
    check(made(body, text=mapped))


# -- what is not known ----------------------------------------------------------------------------------------------

UNKNOWN = {
    "return self.images[i] + torch.rand(1).item()": "`torch.rand`|rand",
    "return np.random.rand() + self.labels[i]": "rand",
    "self.count = i; return self.images[i]": "assigned to an attribute",
    "self.seen.append(i); return self.images[i]": "list.append",
    "x = torch.from_numpy(self.images[i]); x.add_(1); return x": "changes what may be used elsewhere",
    "x = torch.from_numpy(self.images[i]).clone(); y = x[0]; x.add_(1); return y": "changes what may be used elsewhere",
    "x = torch.from_numpy(self.images[i]); x += 1; return x": r"x \+= 1",
    "with torch.no_grad(): return self.images[i]": "with torch.no_grad",
    "import time; return time.time()": "import time",
    "return open('/dev/null').read()": "open",
    "return super().__getitem__(i)": "super",
    "return torch.sin(torch.from_numpy(self.images[i]).float())": "sin",
    "return eval('self.images[i]')": "eval",
    "raise ValueError('no')": "raise ValueError",
    "return self.gone[i]": "gone",
    "return (lambda x: x)(self.images[i])": "lambda",
    "return len(self.images[i])": "len",
}


@pytest.mark.parametrize("body", UNKNOWN)
def test_what_is_not_known_ends_the_reading_and_says_why(made, body):
    import re

    dataset = made("def __getitem__(self, i):\n    " + body, seen=[])
    with pytest.raises(Unread) as caught:
        read(dataset, 2)
    assert re.search(UNKNOWN[body], str(caught.value)), str(caught.value)
    assert str(caught.value).startswith("made_")


def test_a_class_that_looks_attributes_up_itself_is_not_known(made):
    body = """
    def __getitem__(self, i):
        return self.images[i]
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)
    """
    with pytest.raises(Unread, match="in its own way"):
        read(made(body), 0)


def test_source_that_was_changed_since_is_not_believed(made, tmp_path):
    dataset = made("def __getitem__(self, i):\n    return self.images[i] + 1")
    path = next(tmp_path.glob("made_*.py"))
    path.write_text(path.read_text().replace("+ 1", "+ 2"))
    with pytest.raises(Unread, match="changed since"):
        read(dataset, 0)


def test_a_function_that_was_replaced_is_read_as_it_is_now(made):
    dataset = made("def __getitem__(self, i):\n    return self.images[i]")
    _, program = read(dataset, 0)
    assert program.holds()
    type(dataset).__getitem__ = lambda self, i: 0
    assert not program.holds()
    with pytest.raises(Unread):
        read(dataset, 0)


# -- in a loader ----------------------------------------------------------------------------------------------------


def batches(loader, fused=None, epochs=2):
    torch.manual_seed(3)
    found = []
    for _ in range(epochs):
        iterator = iter(loader)
        if fused is not None:
            fused.attach(loader, iterator)
        found += list(iterator)
    return found, RandomStates([loader.generator])


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True, "shuffle": True}, {"batch_size": 64}])
def test_passes_give_the_same_batches_and_leave_the_same_random_streams(options):
    loader = DataLoader(TensorDataset(torch.randn(50, 3), torch.arange(50)), **{"batch_size": 7, **options})
    fused = FusedFetch()
    fused.engage(True)
    plain, after = batches(loader, epochs=3)
    ours, after_ours = batches(loader, fused, epochs=3)
    assert difference(ours, plain) is None and after.equals(after_ours)
    assert fused.num_batches == max(len(plain) - 2, 0) and fused.why_not(loader) is None


def test_it_can_be_engaged_and_released_between_any_two_batches():
    loaders = Loaders()
    loaders.install()
    try:
        dataset = TensorDataset(torch.randn(60, 3))
        numbers = []
        for position, (batch,) in enumerate(DataLoader(dataset, batch_size=4)):
            assert torch.equal(batch, dataset.tensors[0][4 * position : 4 * position + 4])
            loaders.parts.fused.engage(position % 6 < 3), loaders.attach()
            numbers.append(loaders.parts.fused.num_batches)
        assert loaders.parts.fused.why_not(DataLoader(dataset)) is None
    finally:
        loaders.remove()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_workers": 1}, "workers"),
        ({"collate_fn": list}, "function of the script's"),
        ({"batch_size": None}, "function of the script's"),
    ],
)
def test_loaders_that_do_not_come_into_question_say_why(options, why):
    assert why in FusedFetch().why_not(DataLoader(TensorDataset(torch.zeros(3)), **options))


def test_a_dataset_that_gives_several_items_at_once_stays_plain():
    class Several(TensorDataset):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    assert "several items" in FusedFetch().why_not(DataLoader(Several(torch.zeros(3))))


def engaged(loader):
    fused = FusedFetch()
    fused.engage(True)
    iterator = iter(loader)
    fused.attach(loader, iterator)
    return fused, iterator


def test_an_error_in_an_item_is_the_scripts_own_and_comes_at_its_batch():
    dataset = TensorDataset(torch.arange(10))
    loader = DataLoader(dataset, batch_size=2, sampler=[0, 1, 2, 3, 4, 5, 6, 99, 8, 9])
    fused, iterator = engaged(loader)
    assert [next(iterator)[0].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(IndexError):
        next(iterator)
    assert next(iterator)[0].tolist() == [8, 9] and fused.why_not(loader) is None


@pytest.mark.parametrize(
    "indices", [[-1, -2, 3, 4, 5, 6], [torch.tensor(1), 2, 3, 4, 5, 6], [np.int64(3), 0, 1, 2, 3, 4]]
)
def test_indices_of_other_kinds_give_what_plain_gives(indices):
    dataset = TensorDataset(torch.arange(10))
    loader = DataLoader(dataset, batch_size=2, sampler=indices)
    _, iterator = engaged(loader)
    assert difference(list(iterator), list(loader)) is None


def test_items_that_take_different_branches_are_left_to_the_script(made):
    dataset = made("def __getitem__(self, i):\n    return self.images[i] if self.labels[i] < 8 else self.images[0]")
    loader = DataLoader(dataset, batch_size=5)
    fused, iterator = engaged(loader)
    assert difference(list(iterator), list(loader)) is None
    assert 0 < fused.num_batches < 8 and fused.why_not(loader) is None


def test_attributes_that_change_while_a_pass_is_under_way_count_at_once():
    dataset = TensorDataset(torch.arange(40))
    fused, iterator = engaged(DataLoader(dataset, batch_size=4))
    for _ in range(4):
        next(iterator)
    dataset.tensors = (torch.arange(40) * 2, torch.arange(40))
    assert [part.tolist() for part in next(iterator)] == [[32, 34, 36, 38], [16, 17, 18, 19]]
    dataset.tensors = (torch.arange(40).float(),)
    assert next(iterator)[0].dtype is torch.float32
    assert fused.num_batches


def test_batches_that_differ_are_never_handed_out(monkeypatch, made):
    body = "def __getitem__(self, i):\n    return torch.from_numpy(np.array(Image.fromarray(self.images[i])))"
    dataset = made(body)
    from flatout.frameworks.pytorch.input.items import tensors

    monkeypatch.setitem(
        tensors.FUNCTIONS, "from_numpy", lambda value: tensors.Rows("tensor", tensors.from_numpy(value).data + 1)
    )
    loader = DataLoader(dataset, batch_size=5)
    fused, iterator = engaged(loader)
    assert difference(list(iterator), list(loader)) is None
    assert "differ" in fused.why_not(loader) and fused.num_batches == 0


WARNS = """
import warnings, torch, numpy as np
from torch.utils.data import DataLoader, Dataset
from flatout.frameworks.pytorch.input.loaders import Loaders

class ReadOnly(Dataset):
    def __init__(self):
        self.data = np.zeros((20, 3), np.float32)
        self.data.setflags(write=False)
    def __len__(self):
        return 20
    def __getitem__(self, i):
        return torch.from_numpy(self.data[i])

if LEVER:
    owner = Loaders()
    owner.install()
    owner.parts.fused.engage(True)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        list(DataLoader(ReadOnly(), batch_size=4))
print([str(one.message)[:31] for one in said])
"""


def test_what_pytorch_warns_of_once_is_said_to_the_script(tmp_path):
    said = []
    for lever in ("False", "True"):
        (tmp_path / "train.py").write_text(WARNS.replace("LEVER", lever))
        run = [sys.executable, str(tmp_path / "train.py")]
        said.append(warm.run(run, capture_output=True, text=True, check=True).stdout)
    assert said[0] == said[1] and "The given NumPy array" in said[0]


def test_a_difference_that_comes_later_is_found_and_ends_it(monkeypatch):
    dataset = TensorDataset(torch.arange(2 * AT_ONCE * EVERY))
    loader = DataLoader(dataset, batch_size=50)
    fused, iterator = engaged(loader)
    for _ in range(5):
        next(iterator)
    taken = indexing._taken
    monkeypatch.setattr(indexing, "_taken", lambda *given: indexing.Rows("tensor", taken(*given).data - 1))
    found = [batch[0][0].item() for batch in iterator]
    right = [value == 50 * number for number, value in enumerate(found, 5)]
    assert right.index(True) <= AT_ONCE * EVERY // 50 + 1 and all(right[right.index(True) :]), "set aside for good"
    assert "item" in fused.why_not(loader)


@pytest.mark.parametrize("batch_size", [1, 3, AT_ONCE, 100, 7 * EVERY])
def test_one_item_in_a_thousand_is_due_however_small_or_large_the_batches(batch_size):
    shadow, num = Shadow(), 30 * AT_ONCE * EVERY
    for _ in range(num // batch_size):
        batch = torch.zeros(batch_size)
        if shadow.any_due(batch_size):
            assert shadow.of_items(batch, list(range(batch_size)), lambda place: torch.zeros(1)) is None
    assert num // EVERY - AT_ONCE - batch_size // EVERY <= shadow.num_items <= num // EVERY


def test_the_share_of_items_computed_both_ways_is_one_in_a_thousand_however_large_the_batches():
    for batch_size in (7, 1500, 9000):
        loader = DataLoader(TensorDataset(torch.arange(40 * EVERY)), batch_size=batch_size)
        fused, iterator = engaged(loader)
        for _ in iterator:
            pass
        num_first = 2 * batch_size
        assert fused.reading(loader).shadow.num_items >= (40 * EVERY - num_first) // EVERY - AT_ONCE - 8


def test_the_value_of_an_item_that_is_used_twice_is_not_overwritten(made):
    dataset = made("""
        def __getitem__(self, i):
            x = torch.from_numpy(self.images[i]).float() / 255
            y = x - 0.5
            z = (x * 2) - 1
            return x, y, z / 3, x.clone().div(2)
    """)
    check(dataset)


def test_each_batch_owns_its_memory():
    dataset = TensorDataset(torch.arange(40.0))
    _, iterator = engaged(DataLoader(dataset, batch_size=4))
    kept = []
    for (batch,) in iterator:
        assert batch.untyped_storage().nbytes() == 16 and batch.untyped_storage().resizable()
        batch.mul_(-1)
        kept.append(batch)
    assert torch.equal(torch.cat(kept), -torch.arange(40.0)) and torch.equal(dataset.tensors[0], torch.arange(40.0))


# -- what an attack found -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [[1, 2, 3, 4], (1.0, 2.0), "text", range(5)])
def test_a_dataset_that_is_no_object_of_a_class_stays_plain(dataset):
    loader = DataLoader(dataset, batch_size=2)
    fused, iterator = engaged(loader)
    assert difference(list(iterator), list(loader)) is None and fused.why_not(loader)


def test_batches_are_tensors_of_their_own_and_no_views():
    _, iterator = engaged(DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=4))
    for (batch,) in iterator:
        batch.requires_grad_().detach_()


def test_quantized_tensors_are_left_to_pytorch():
    items = torch.quantize_per_tensor(torch.arange(120.0).view(40, 3), 0.1, 0, torch.quint8)
    assert FusedFetch().why_not(DataLoader(TensorDataset(items)))


ODD = {
    "captions that are missing": ("""
        if self.caption[i] is None:
            return self.x[i] * 0
        return self.x[i]""", {"caption": np.array(["a"] * 35 + [None] + ["b"] * 14, dtype=object)}),
    "numbers of two types": ("""
        y = self.y[i]
        if isinstance(y, int):
            y = y + 0.5
        return self.x[i], y""", {"y": [1] * 35 + [2.0] * 5 + [1] * 10}),
    "bytes that overflow": ("return torch.tensor(i * 8, dtype=torch.uint8)", {}),
    "numbers beyond floats": ("return torch.tensor(self.y[i], dtype=torch.float32)",
                              {"y": [2**53 + k for k in range(50)]}),
    "half precision with a NaN": ("return self.half[i] * 2", {"half": torch.full((50, 3), float("nan")).bfloat16()}),
    "a small comparison": ("return self.x[i] if self.s[i] > self.t[i] else -self.x[i]",
                           {"s": np.full(50, 0.1, np.float32), "t": [0.25] * 40 + [0.1] * 10}),
    "unsigned bounds": ("return self.text[self.a[i]:self.b[i]].astype(np.int64)",
                        {"a": np.full(50, 90, np.uint8), "b": np.full(50, 95, np.uint8)}),
    "a remainder": ("return self.x[i] % 0.3", {}),
    "a sum with alpha": ("return self.x[i].add(self.x[i], alpha=0.3)", {}),
    "a crop of much": ("return self.volume[i][:4].astype(np.float32)", {"volume": np.ones((50, 200_000), np.uint8)}),
    "a validated field": ("return self.x[i] * self.field", {"field": 2.0}),
    "a truth of its own": ("return self.x[i] if self.switch else -self.x[i]", {"switch": "Transform"}),
    "an equality of its own": ("return self.x[i] if self.switch == 1 else -self.x[i]", {"switch": "Transform"}),
    "a property of its own kind": ("return self.x[i] * self.lazy", {}),
}  # fmt: skip

ODD_CODE = """
class Field:
    def __get__(self, obj, kind):
        return obj.__dict__["field"]
    def __set__(self, obj, value):
        obj.__dict__["field"] = value

class Transform:
    num = 0
    def __bool__(self):
        Transform.num += 1
        return Transform.num < 40
    def __eq__(self, other):
        return bool(self)
    __hash__ = None

class lazy(property):
    def __get__(self, obj, kind=None):
        Transform.num += 1
        return Transform.num

Made.lazy = lazy(lambda self: 1)
"""


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_odd_items_are_the_scripts_own(made, name, batch_size):
    body, parts = ODD[name]
    body = "def __getitem__(self, i):\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    before = ODD_CODE + ("\nMade.field = Field()\n" if name == "a validated field" else "")

    def whole(attach):
        dataset = made(body, before=before, x=torch.arange(50.0).view(50, 1), **parts)
        loader = DataLoader(dataset, batch_size=batch_size)
        found, iterator = [], engaged(loader)[1] if attach else iter(loader)
        while True:
            try:
                found.append(next(iterator))
            except StopIteration:
                return found
            except Exception as problem:
                found.append([type(problem).__name__, str(problem), str(problem.__context__)])

    assert difference(whole(True), whole(False)) is None


CHANGES = {
    "a method on the object": "dataset.prep = lambda x: x * 3",
    "a method of the class": "type(dataset).prep = lambda self, x: x * 3",
    "a default": "type(dataset).prep.__defaults__ = (4.0,)",
    "a global": "module.FACTOR = 5.0",
    "a class attribute": "module.Config.scale = 6.0",
    "the layout": "dataset.x = dataset.x.flip(0)",
    "an array in place": "dataset.x.mul_(2)",
    "another type": "dataset.x = dataset.x.double()",
    "another kind": "dataset.x = dataset.x.numpy()",
    "a function that is gone": "del module.twice",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["within a pass", "between passes"])
def test_what_the_script_changes_counts_at_once(made, change, when):
    before = """
    FACTOR = 2.0

    class Config:
        scale = 1.0

    def twice(x):
        return x * 2
    """
    body = """
    def prep(self, x, by=1.0):
        return twice(x) * by
    def __getitem__(self, i):
        return self.prep(self.x[i]) * FACTOR * Config.scale
    """

    def whole(attach):
        dataset = made(body, before=before, x=torch.arange(150.0).view(50, 3))
        names = {"dataset": dataset, "module": _Namespace(type(dataset).__getitem__.__globals__)}
        loader = DataLoader(dataset, batch_size=5)
        fused = FusedFetch()
        fused.engage(attach)
        found = []
        for epoch in range(2):
            iterator = iter(loader)
            fused.attach(loader, iterator)
            for number in range(10):
                if (epoch, number) == ((0, 6) if when == "within a pass" else (1, 0)):
                    exec(CHANGES[change], names)
                try:
                    found.append(next(iterator))
                except Exception as problem:
                    found.append([type(problem).__name__, str(problem), str(problem.__context__)])
        return found

    assert difference(whole(True), whole(False)) is None


class _Namespace:
    """A module's globals as attributes."""

    def __init__(self, names):
        self.__dict__ = names


# -- whatever is written of known operations ------------------------------------------------------------------------

TENSOR_STEPS = [
    ".float()", ".long()", ".div(255)", ".sub(1)", ".unsqueeze(0)", ".flatten()", " / 3", " - 0.5", " * 2", ".clone()",
    ".clone().mul_(3)", ".contiguous()", ".to(torch.float64)", ".neg()", "[0]", "[..., None]", "[None]",
    ".permute(1, 0)", ".transpose(0, 1)",
    ".view(-1)", ".reshape(-1)", ".abs()", ".half()", ".double()", " + 1", ".int()",
    "[1:]", "[:, 1:]",
]  # fmt: skip
STARTS = [
    "torch.from_numpy(self.images[i])", "torch.tensor(self.labels[i])",
    "torch.from_numpy(np.array(Image.fromarray(self.images[i])))",
    "torch.from_numpy(self.text[i:i + self.n].astype(np.int64))", "torch.as_tensor(self.colours[i])", "torch.tensor(i)",
]  # fmt: skip


@settings(max_examples=150)
@given(
    start=st.sampled_from(STARTS), steps=st.lists(st.sampled_from(TENSOR_STEPS), max_size=5), seed=st.integers(0, 99)
)
def test_chains_of_known_operations_agree_or_are_refused(tmp_path_factory, start, steps, seed):
    text = start
    for step in steps:
        text = f"({text}){step}"
    dataset = make(tmp_path_factory.mktemp("made"), None, f"def __getitem__(self, i):\n    return {text}")
    indices = random.Random(seed).sample(range(50), 5)
    try:
        plain = default_collate([dataset[index] for index in indices])
    except Exception:
        with pytest.raises((Unread, Unvectorised)):
            computed(read(dataset, 0)[1], dataset, indices)
        return
    try:
        batch = computed(read(dataset, 0)[1], dataset, indices)
    except (Unread, Unvectorised):
        return
    assert difference(batch, plain) is None, text
