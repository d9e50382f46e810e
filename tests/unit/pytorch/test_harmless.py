"""Is code that shows outside its item refused, with its line, and is what many scripts do let through?"""

import collections
import importlib.util
import io
import random
import textwrap

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
imagery = pytest.importorskip("imagery")

from torch.utils.data import ConcatDataset, Subset, TensorDataset  # noqa: E402

from flatout.frameworks.pytorch.input.harmless import values  # noqa: E402
from flatout.frameworks.pytorch.input.harmless.resolving import Refused  # noqa: E402
from flatout.frameworks.pytorch.input.harmless.values import Value, either, known  # noqa: E402
from flatout.frameworks.pytorch.input.harmless.walking import look_at  # noqa: E402


class Telling(dict):
    def __getitem__(self, name):
        return 1

    def load(self):
        return 1


PRELUDE = """
import functools
import io
import json
import math
import os
import random
import time
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
import imagery
from imagery import T
from PIL import Image, ImageDraw, ImageOps
from torch.utils.data import Dataset

FACTOR = 2
SEEN = []
Record = namedtuple("Record", "file label")


class Flip:
    def __init__(self, p):
        self.p = p

    def __call__(self, image):
        return ImageOps.mirror(image) if random.random() < self.p else image


class Made(Dataset):
    def __init__(self, **parts):
        self.__dict__.update(parts)

    def __len__(self):
        return len(self.files)

"""


@pytest.fixture
def made(tmp_path):
    """Makes a dataset of source code, which has to lie in a file as a script does."""

    def make(body, before="", **parts):
        path = tmp_path / f"made{len(list(tmp_path.iterdir()))}.py"
        body = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
        path.write_text(PRELUDE.replace("class Made", textwrap.dedent(before) + "\n\nclass Made") + body + "\n")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        parts = {
            "files": ["a.jpg", "b.jpg"], "labels": [1, 2], "array": np.zeros((2, 4)), "tensor": torch.zeros(3),
            "root": "/", "cache": {}, "seen": [], "rng": np.random.default_rng(0), "own": random.Random(0),
            "generator": torch.Generator(), "limit": None, "phase": "train", "num": 0,
            "transform": imagery.T.Compose([module.Flip(0.5), imagery.T.ToTensor()]),
            "table": {"train": module.Flip(0.1)}, "records": [{"file": "a.jpg", "y": 1}],
            "rows": [module.Record("a.jpg", 1)], "choices": [module.Flip(0.1), module.Flip(1)],
            **parts,
        }  # fmt: skip
        return module.Made(**parts)

    return make


HARMLESS = {
    "the usual": "img = Image.open(self.files[i]).convert('RGB')\nreturn self.transform(img), self.labels[i]",
    "a dictionary": """
        sample = {"image": Image.open(self.files[i]), "y": self.labels[i]}
        if self.transform:
            sample["image"] = self.transform(sample["image"])
        return sample
    """,
    "numbers that are changed": "y = self.labels[i]\ny -= 1\nreturn Image.open(self.files[i]), y",
    "a copy that is changed": """
        boxes = self.array[i].copy()
        boxes -= 1
        boxes[0] = 3
        return Image.open(self.files[i]), boxes
    """,
    "an array of the image": """
        img = np.array(Image.open(self.files[i]).convert("RGB"))
        img = img[:, ::-1].copy().astype(np.float32) / 255.0
        img[..., 0] -= 0.5
        img -= self.array[0, :3]
        return torch.from_numpy(img.transpose(2, 0, 1))
    """,
    "a tensor in place": """
        x = torch.from_numpy(np.array(Image.open(self.files[i]))).float()
        x.div_(255).sub_(self.tensor)
        return x
    """,
    "another item instead": """
        try:
            return Image.open(self.files[i]).convert("RGB")
        except Exception:
            return self[random.randint(0, len(self) - 1)]
    """,
    "until one can be read": """
        while True:
            try:
                img = Image.open(self.files[i]).convert("RGB")
                break
            except (OSError, SyntaxError) as problem:
                i = (i + 1) % len(self.files)
        return img
    """,
    "a file beside it": """
        path = Path(self.root) / self.files[i]
        with open(path.with_suffix(".json"), encoding="utf-8") as file:
            notes = json.load(file)
        notes["number"] = i
        return Image.open(path), notes
    """,
    "bytes in memory": "return Image.open(io.BytesIO(Path(self.files[i]).read_bytes()))",
    "a text": "return Image.open(f'{self.root}/{i:05d}.jpg')",
    "os.path": "return Image.open(os.path.join(self.root, os.path.basename(self.files[i])))",
    "a list that grows": """
        found = []
        for name in self.files[:2]:
            found.append(Image.open(name))
        return found + [Image.open(one) for one in self.files if one.endswith("g")]
    """,
    "an order that is shuffled": """
        order = list(range(4))
        random.shuffle(order)
        return Image.open(self.files[order[0] % 2])
    """,
    "draws": """
        side = random.choice([1, 2]) + np.random.randint(3) + int(torch.rand(1)) + math.ceil(random.gauss(0, 1))
        return Image.open(self.files[i]).resize((side, side))
    """,
    "one of several": "return random.choice(self.choices)(Image.open(self.files[i]))",
    "each of several": """
        img = Image.open(self.files[i])
        for number, change in enumerate(self.choices):
            img = change(img)
        return img
    """,
    "one by name": "return self.table[self.phase](Image.open(self.files[i]))",
    "a named tuple": "row = self.rows[i]\nreturn Image.open(row.file), Record(row.file, row.label)",
    "records": "row = self.records[i]\nreturn Image.open(row['file']), torch.tensor(row.get('y', 0))",
    "a global": "return Image.open(self.files[i]).resize((FACTOR * 4, FACTOR * 4))",
    "a branch that is not taken": """
        if self.limit is not None:
            print("limited")
        if self.phase == "test":
            SEEN.append(i)
        return Image.open(self.files[i])
    """,
    "drawing on an image": """
        img = Image.open(self.files[i]).convert("RGB")
        draw = ImageDraw.Draw(img)
        draw.rectangle((0, 0, 3, 3), fill=(0, 0, 0))
        img.paste((1, 2, 3), (0, 0, 2, 2))
        img.putpixel((0, 0), (1, 1, 1))
        return img
    """,
    "a mask beside the image": """
        img, mask = Image.open(self.files[i]), Image.open(self.files[i - 1]).convert("L")
        if random.random() > 0.5:
            img, mask = (F_flip(one) for one in (img, mask))
        return T.functional.to_tensor(img), torch.as_tensor(np.array(mask), dtype=torch.int64)
    """,
    "transforms made for each item": "return T.Compose([T.Resize(8), T.ToTensor()])(Image.open(self.files[i]))",
    "a sort": "return Image.open(sorted(self.files, key=lambda name: len(name))[0])",
    "functional": """
        x = T.functional.to_tensor(Image.open(self.files[i]))
        x = F.interpolate(x[None], size=(8, 8))[0]
        return T.functional.normalize(x, [0.5], [0.5], inplace=True)
    """,
}

HARMFUL = {
    "an attribute": ("self.num += 1", "an attribute is assigned"),
    "another attribute": ("self.last = i", "an attribute is assigned"),
    "an attribute of an image": ("img = Image.open(self.files[i])\nimg.mine = 3", "an attribute is assigned"),
    "a cache": ("self.cache[i] = Image.open(self.files[i])", "not the item's own is assigned"),
    "a cache by another name": ("cache = self.cache\ncache[i] = 1", "not the item's own is assigned"),
    "a part of a cache": ("self.cache['a'][i] = 1", "not the item's own is assigned"),
    "a list": ("self.seen.append(i)", "`.append()` changes"),
    "a list of the module": ("SEEN.append(i)", "`.append()` changes"),
    "a list that was put away": ("mine = [self.seen]\nmine[0].append(i)", "`.append()` changes"),
    "a list that was taken out again": (
        "mine = []\nmine.append(self.seen)\nmine.pop().append(i)", "`.append()` changes"
    ),
    "a list in a dictionary": (
        "mine = {'a': self.seen}\nfor one in mine.values():\n    one.append(i)", "`.append()` changes"
    ),
    "a list in a tuple": (
        "for number, one in enumerate((self.seen, [])):\n    one.append(i)", "`.append()` changes"
    ),
    "a list that may be another": ("mine = [] if i else self.seen\nmine.append(i)", "`.append()` changes"),
    "a list in a loop": (
        "mine = []\nfor k in range(i):\n    mine.append(k)\n    mine = self.seen", "`.append()` changes"
    ),
    "a view": ("row = self.array[i]\nrow -= 1", "changed in place"),
    "a view of a view": ("self.array[i][0] = 1", "not the item's own is assigned"),
    "a tensor": ("self.tensor.add_(1)", "`.add_()` changes"),
    "a tensor that shares memory": ("torch.from_numpy(self.array).view(-1).add_(1)", "`.add_()` changes"),
    "an operand in place": ("np.add(self.array, 1, out=self.array)", "changes something"),
    "in place by name": ("T.functional.normalize(self.tensor, [0.5], [0.5], inplace=True)", "changes something"),
    "a shuffle": ("random.shuffle(self.files)", "`random.shuffle` changes"),
    "an iterator": ("next(self.iterator)", "a `list_iterator`", {"iterator": iter([1])}),
    "an iterator of an iterator": ("next(iter(self.iterator))", "a `list_iterator`", {"iterator": iter([1])}),
    "a loop over an iterator": ("for one in self.iterator:\n    break", "a `list_iterator`", {"iterator": iter([1])}),
    "an iterator beside another": ("list(zip(range(2), self.iterator))", "a `zip`", {"iterator": zip([1])}),
    "a file of the dataset's": ("json.load(self.file)", "a `StringIO`", {"file": io.StringIO("1")}),
    "a dictionary that makes what is missing": (
        "self.table[i]", "an element of a `defaultdict`", {"table": collections.defaultdict(list)}
    ),
    "dictionaries that make what is missing": (
        "self.tables[i][0]", "an element of a `defaultdict`", {"tables": [collections.defaultdict(list)] * 100}
    ),
    "a dictionary with code of its own": ("self.table['a']", "an element of a `Telling`", {"table": Telling()}),
    "an array that is perhaps a copy": (
        "row = self.array[i].astype(np.float64, copy=False)\nrow += 1", "changed in place"
    ),
    "an array that is perhaps another": ("row = np.array(self.array, copy=None)\nrow += 1", "changed in place"),
    "memory under another name": ("row = np.frombuffer(self.bytes, np.uint8)\nrow[0] = 1", "not the item's own",
                                  {"bytes": bytearray(8)}),
    "memory that is given to an array": ("np.ndarray((2,), np.uint8, self.bytes)", "a `ndarray` is made",
                                         {"bytes": bytearray(8)}),
    "a tensor by its class": ("row = torch.Tensor(self.tensor)\nrow += 1", "changed in place"),
    "a tensor by another's type": ("self.tensor.type_as(self.tensor).add_(1)", "`.add_()` changes"),
    "pixels of an image of the dataset's": (
        "pixels = self.image.load()\npixels[0, 0] = 1", "is assigned", {"image": Image.new("L", (2, 2))}
    ),
    "a part of a copy": ("mine = self.records[i].copy()\nmine['y'] += 1", "changed in place"),
    "a part of another copy": ("import collections\nmine = collections.OrderedDict(self.cache)\nmine[i].append(1)",
                               "`.append()` changes"),
    "an element by a function": ("import operator\noperator.getitem(self.rows, i).append(1)", "`.append()` changes",
                                 {"rows": [[], []]}),
    "elements in a chain": ("import itertools\nfor one in itertools.chain(self.rows):\n    one.append(1)",
                            "`.append()` changes", {"rows": [[], []]}),
    "elements that are mapped": ("for one in map(lambda x: x, self.rows):\n    one.append(1)",
                                 "`.append()` changes", {"rows": [[], []]}),
    "one of several elements": ("functools.reduce(lambda a, b: a, self.rows).append(1)", "`.append()` changes",
                                {"rows": [[], []]}),
    "a list that has another name": (
        "one = {}\nother = one\none['a'] = self.seen\nother['a'].append(1)", "`.append()` changes"
    ),
    "a list that a function puts away": (
        "mine = {}\nself.put(mine)\nmine['a'].append(1)", "`.append()` changes"
    ),
    "an operand by place": ("np.add(self.array, 1, self.array)", "`np.add` changes"),
    "an operand of another kind by place": ("np.clip(self.array, 0, 1, self.array)", "`np.clip` changes"),
    "an operand of a method by place": ("self.array.cumsum(0, None, self.array)", "`.cumsum()` may change"),
    "in place by place": ("F.relu(self.tensor, True)", "`F.relu` changes"),
    "numbers that are replaced": ("np.nan_to_num(self.array, copy=False)", "`np.nan_to_num` changes"),
    "objects in an array": (
        "self.objects[i].load()", "what a `Telling` does", {"objects": np.array([Telling()] * 100, dtype=object)}
    ),
    "objects in a table": ("self.objects[i]", "an array of objects", {"objects": np.array([[None]], dtype=object)}),
    "an object as text": ("'{}'.format(self.telling)", "is given to `format`", {"telling": Telling()}),
    "a function for each pixel": ("img.point(lambda p: self.seen.append(p))", "`.append()` changes"),
    "a file that a function reads an image from": (
        "with open(self.files[i], 'rb') as file:\n    img = self.read(file)\n    x = file.tell()",
        "read by the script as well",
    ),
    "a global": ("global FACTOR\nFACTOR = 3", "`global FACTOR`"),
    "something printed": ("print(i)", "`print` is called"),
    "a file that is written": ("with open('x', 'w') as file:\n    file.write('a')", "not for reading"),
    "a file that is written by a method": ("Path('x').write_text('a')", "`.write_text()`"),
    "an image that is saved": ("Image.open(self.files[i]).save('x.png')", "`.save()`"),
    "the time": ("x = time.time()", "`time.time` is called"),
    "the system": ("os.system('ls')", "`os.system` is called"),
    "the seed": ("torch.manual_seed(i)", "`torch.manual_seed` is called"),
    "another seed": ("random.seed(i)", "`random.seed` is called"),
    "NumPy's seed": ("np.random.seed(i)", "`np.random.seed` is called"),
    "a generator of NumPy's": ("self.rng.random()", "a generator of the script's own"),
    "a generator of Python's": ("self.own.random()", "a generator of the script's own"),
    "a generator of PyTorch's": ("torch.rand(1, generator=self.generator)", "a generator of the script's own"),
    "a new generator": ("np.random.default_rng(0).random()", "`np.random.default_rng` is called"),
    "an attribute by name": ("setattr(self, 'num', 1)", "`setattr` is called"),
    "a deletion": ("del self.cache[i]", "is deleted"),
    "a property that counts": ("self.counted", "an attribute is assigned"),
    "a method that counts": ("self.count()", "an attribute is assigned"),
    "a function that counts": ("counting(i)", "`.append()` changes"),
    "a function passed on": ("sorted(self.files, key=lambda name: self.seen.append(name))", "`.append()` changes"),
    "a comparison that counts": ("self.odd == 3", "a comparison of"),
    "a truth that counts": ("if self.odd:\n    pass", "is true"),
    "an operator that counts": ("self.odd + 3", "an operator on"),
    "a context that counts": ("with self.odd:\n    pass", "not the item's own"),
    "a transform that counts": ("imagery.T.Compose([self.counter])(i)", "an attribute is assigned"),
    "a transform that is given one that counts": ("self.deep(i)", "an attribute is assigned"),
    "text that counts": ("f'{self.odd}'", "as text"),
    "something unknown": ("what(i)", "`what` is not known"),
    "an unknown module": ("import turtle", "`turtle` is imported"),
    "something that is computed": ("self.cache['change'](i)", "it is not known what"),
    "a class of its own": ("Flip(0.5)", "a `Flip` is made"),
    "a file that is read on": (
        "with open(self.files[i], 'rb') as file:\n    img = Image.open(file)\n    x = file.read()",
        "read by the script as well",
    ),
    "eval": ("eval('1')", "`eval` is called"),
    "a generator": ("yield i", "yield i"),
}  # fmt: skip

BEFORE = """
class Odd:
    def __eq__(self, other):
        SEEN.append(1)
        return True

    def __bool__(self):
        return not SEEN.append(1)

    def __add__(self, other):
        return SEEN.append(1)

    def __enter__(self):
        return SEEN.append(1)

    def __exit__(self, *all):
        return None


class Counter:
    num = 0

    def __call__(self, x):
        self.num += 1
        return x


def counting(x):
    SEEN.append(x)


def F_flip(image):
    return T.functional.hflip(image)
"""
METHODS = """

@property
def counted(self):
    self.num += 1
    return self.num

def count(self):
    self.num += 1

def put(self, mine):
    mine["a"] = self.seen

def read(self, file):
    return Image.open(file).convert("RGB")
"""


@pytest.mark.parametrize("name", HARMLESS)
def test_what_many_scripts_do_is_let_through(name, made):
    body = textwrap.indent(textwrap.dedent(HARMLESS[name]).strip("\n"), "    ")
    assert look_at(made(f"def __getitem__(self, i):\n{body}", BEFORE)).guards.hold()


@pytest.mark.parametrize("name", HARMFUL)
def test_what_shows_outside_the_item_is_refused_with_its_line(name, made):
    body, why, *parts = HARMFUL[name]
    dataset = made(
        "def __getitem__(self, i):\n    img = Image.open(self.files[0])\n" + textwrap.indent(body, "    ") + METHODS,
        BEFORE,
    )
    names = type(dataset).__getitem__.__globals__
    counter = names["Counter"]()
    dataset.odd, dataset.counter = names["Odd"](), counter
    dataset.deep = imagery.T.RandomApply([imagery.T.Lambda(imagery.T.Compose([counter]))])
    dataset.__dict__.update(*parts)
    with pytest.raises(Refused, match=r"made0\.py:\d+: ") as caught:
        look_at(dataset)
    assert why in str(caught.value)


@pytest.mark.parametrize("name", imagery.TRANSFORMS)
def test_all_transforms_of_torchvision_are_let_through(name):
    assert look_at(imagery.Photos(["a.jpg"], imagery.TRANSFORMS[name])).guards.hold()


def test_a_subclass_of_a_transform_is_looked_at_as_the_scripts_own(made):
    counts = """
    class Counting(T.RandomCrop):
        @staticmethod
        def get_params(img, output_size):
            SEEN.append(1)
            return 0, 0, 3, 3
    """
    dataset = made("def __getitem__(self, i):\n    return self.transform(Image.open(self.files[i]))", counts)
    dataset.transform = type(dataset).__getitem__.__globals__["Counting"](3)
    with pytest.raises(Refused, match=r"`\.append\(\)` changes"):
        look_at(dataset)


def test_datasets_of_datasets_are_looked_into(made):
    good = made("def __getitem__(self, i):\n    return Image.open(self.files[i])")
    bad = made("def __getitem__(self, i):\n    self.num = Image.open(self.files[i])")
    assert look_at(Subset(Subset(good, [0]), [0])).guards.hold()
    assert look_at(ConcatDataset([good, Subset(good, [1])])).guards.hold()
    with pytest.raises(Refused, match="attribute"):
        look_at(ConcatDataset([good, bad]))


def test_datasets_without_images_say_so():
    with pytest.raises(Refused, match="no image is opened"):
        look_at(TensorDataset(torch.zeros(3)))


def test_hooks_and_replaced_methods_of_modules_are_seen():
    crop = imagery.T.RandomResizedCrop(8)
    dataset = imagery.Photos(["a.jpg"], crop)
    found = look_at(dataset)
    assert found.guards.hold()
    handle = crop.register_forward_hook(lambda *all: None)
    with pytest.raises(Refused, match="has hooks"):
        look_at(dataset)
    handle.remove()
    crop.forward = lambda image: image
    assert not found.guards.hold()


CHANGES = {
    "the transform": "dataset.transform = None",
    "a part of the transform": "dataset.transform.transforms[0] = print",
    "another part": "dataset.transform.transforms.append(print)",
    "a method": "type(dataset).__getitem__ = lambda self, i: print(i)",
    "the code of a method": "type(dataset).__getitem__.__code__ = (lambda self, i: print(i)).__code__",
    "a function": "names['helped'] = print",
    "a function's defaults": "names['helped'].__defaults__ = (3,)",
    "a constant that decides": "dataset.phase = 'test'",
    "a name of a module": "names['Image'] = None",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_is_noticed(change, made):
    helped = """
    def helped(image, size=8):
        return image.resize((size, size))
    """
    dataset = made(
        """
        def __getitem__(self, i):
            image = helped(Image.open(self.files[i]))
            if self.phase == "test":
                return image
            return self.transform(image)
        """,
        helped,
    )
    names = type(dataset).__getitem__.__globals__
    found = look_at(dataset)
    assert found.guards.hold()
    exec(CHANGES[change], {"dataset": dataset, "names": names})
    assert not found.guards.hold()


def test_arrays_that_go_straight_into_tensors_are_known(made):
    straight = made(
        "def __getitem__(self, i):\n    x = torch.from_numpy(np.array(Image.open(self.files[i])))\n    return x.float()"
    )
    assert look_at(straight).straight == {type(straight).__getitem__.__code__}
    astray = made(
        "def __getitem__(self, i):\n    x = np.array(Image.open(self.files[i]))\n    return torch.from_numpy(x)"
    )
    assert not look_at(astray).straight
    renamed = made(
        "def __getitem__(self, i):\n    img, make = Image.open(self.files[i]), np.array\n"
        "    return torch.from_numpy(np.array(img)), make(img)"
    )
    assert not look_at(renamed).straight


# -- values --------------------------------------------------------------------------------------------------------


def test_what_is_one_of_two_values_is_the_items_own_only_if_both_are():
    seen = []
    own, shared = known([], own=True), known(seen)
    assert either(own, own) is own
    found = either(own, shared)
    assert found.among == (own.among[0], seen) and not found.own
    pair = either(Value(own=True, parts=(own, own)), Value(own=True, parts=(own, shared)))
    assert pair.parts[0].own and not pair.parts[1].own and not pair.element().own
    assert either(known(1), Value()).among is None
    many = values.joined([known(object()) for _ in range(values.MOST_AMONG + 1)])
    assert many.among is None


def test_values_say_the_same_only_if_all_of_their_parts_do():
    thing = object()
    one, other = Value((thing,), each=Value(own=True)), Value((thing,), each=Value(own=True))
    assert values.same(one, other) and values.same(None, None)
    assert not values.same(one, Value((thing,))) and not values.same(one, Value((object(),), each=Value(own=True)))
    assert not values.same(one, None)
