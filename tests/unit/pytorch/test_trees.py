"""Are tensors found in, and replaced in, whatever a model takes and returns?"""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of  # noqa: E402

Pair = namedtuple("Pair", "logits hidden")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    name: str = "x"
    hidden: tuple = ()


class ModelOutput(OrderedDict):
    """As `transformers` has it: keys are attributes as well, and the class is a dataclass."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass
class CausalOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value


class Batch:
    def __init__(self, x):
        self.x = x
        self.note = "kept"


a, b = torch.ones(2), torch.zeros(3)
SHAPES = {
    "tensor": (a, [a]),
    "tuple": ((a, 1, b), [a, b]),
    "list": ([b, [a]], [b, a]),
    "dict": ({"x": a, "n": None, "y": {"z": b}}, [a, b]),
    "namedtuple": (Pair(a, (b,)), [a, b]),
    "dataclass": (Output(a, hidden=(b,)), [a, b]),
    "model output": (CausalOutput(loss=b, logits=a), [b, a]),
    "mapping": (UserDict(x=a), [a]),
    "namespace": (SimpleNamespace(x=a, y=[b]), [a, b]),
    "object": (Batch(a), [a]),
    "nothing": (("text", 3, None), []),
    "twice": ([a, a, b], [a, b]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_are_found_once_each_and_in_order(name):
    value, wanted = SHAPES[name]
    found = tensors_of(value)
    assert len(found) == len(wanted) and all(x is y for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_replaced_tensors_come_back_in_the_same_kind_of_value_and_the_original_keeps_its_own(name):
    value, wanted = SHAPES[name]
    new = map_tensors(lambda t: t + 1, value)
    assert type(new) is type(value)
    assert [t.tolist() for t in tensors_of(new)] == [(t + 1).tolist() for t in wanted]
    assert all(x is y for x, y in zip(tensors_of(value), wanted, strict=True))
    if name == "model output":
        assert new.logits is new["logits"]
        assert torch.equal(new.logits, a + 1)
    if name == "object":
        assert new.note == "kept" and new is not value
    if name == "twice":
        assert new[0] is new[1]


@pytest.mark.parametrize("name", SHAPES)
def test_a_value_of_which_nothing_changes_stays_the_same_object(name):
    value, _ = SHAPES[name]
    assert map_tensors(lambda t: t, value) is value


def test_a_packed_sequence_and_a_distribution_can_be_rebuilt():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    new = map_tensors(lambda t: t.clone(), packed)
    assert type(new) is type(packed) and torch.equal(new.data, packed.data)
    policy = torch.distributions.Categorical(logits=torch.zeros(4))
    doubled = map_tensors(lambda t: t * 2, policy)
    assert doubled.sample().shape == () and doubled.logits is not policy.logits


def test_objects_of_unknown_kinds_can_be_passed_as_they_are():
    batch = Batch(a)
    assert map_tensors(lambda t: t + 1, (batch, a), objects=False)[0] is batch


def test_long_containers_and_deep_ones_are_not_gone_through():
    deep = a
    for _ in range(20):
        deep = [deep]
    assert tensors_of(deep) == []
    assert tensors_of(["word"] * 100_000) == []


def test_modules_functions_and_generators_are_no_containers():
    model = torch.nn.Linear(2, 2)
    assert tensors_of((model, len, torch.Generator(), type(model))) == []
