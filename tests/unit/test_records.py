"""Records to JSON and back."""

import dataclasses
import decimal
import enum
import fractions
import json
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from flatout.errors import RecordError
from flatout.records.as_json import from_json, to_json
from flatout.records.facts import Facts
from flatout.records.plan import Plan
from flatout.records.trace import Header
from handmade import FACTS, HEADER, MACHINE, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    name: str
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    x_s: float
    num: int = 0
    flag: bool = False
    word: Literal["ends", "phases", 3] = "ends"
    maybe: float | None = None
    choice: str | int | float | bool = ""
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    names: list[str] = field(default_factory=list)
    pair: tuple[int, str] = (0, "")
    table: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    anything: Any = None


def back(record):
    return from_json(type(record), json.loads(json.dumps(to_json(record), allow_nan=False)))


def refusal(value, kind=Outer):
    with pytest.raises(RecordError) as caught:
        from_json(kind, value, where="`a.json` line 3")
    return caught.value


def test_a_record_with_records_inside_comes_back_as_it_was():
    record = Outer(
        x_s=0.5,
        num=3,
        flag=True,
        word="phases",
        maybe=1.5,
        choice=True,
        inner=Inner(name="a", size=2),
        inners=(Inner(name="b"), Inner(name="c")),
        names=["x", "y"],
        pair=(1, "one"),
        table={"k": {"v": 2.0}},
        anything=[1, {"free": None}],
    )
    assert back(record) == record


@pytest.mark.parametrize("record", [HEADER, FACTS, MACHINE, plan()], ids=lambda record: type(record).__name__)
def test_real_records_come_back_as_they_were(record):
    assert back(record) == record


def test_nan_is_written_as_null_and_read_back_as_nan():
    assert to_json(Outer(x_s=math.nan))["x_s"] is None
    assert math.isnan(back(Outer(x_s=math.nan)).x_s)


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_infinities_are_written_as_words_and_come_back(infinity):
    assert to_json(Outer(x_s=infinity))["x_s"] in ("Infinity", "-Infinity")
    assert back(Outer(x_s=infinity)).x_s == infinity
    assert back(Outer(x_s=0.0, maybe=infinity)).maybe == infinity


def test_nan_in_a_field_that_may_be_none_comes_back_as_none_because_both_mean_not_known():
    assert back(Outer(x_s=0.0, maybe=math.nan)).maybe is None


def test_nan_inside_lists_and_tables_is_no_literal_that_browsers_refuse():
    record = Outer(x_s=0.0, table={"a": {"b": math.nan}}, anything=[math.inf])
    text = json.dumps(to_json(record), allow_nan=False)
    assert '"b": null' in text and '"Infinity"' in text
    assert math.isnan(back(record).table["a"]["b"])


class Width(enum.IntEnum):
    HIDDEN = 16


class Word(str):
    def __str__(self):
        return "another"


class Steps(int):
    pass


class Sized:
    """Something of a script's own that can be counted with."""

    def __index__(self):
        return 7


class Silent:
    def item(self):
        return self


class Breaks:
    def __float__(self):
        raise OSError("gone")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Width.HIDDEN, 16),
        (enum.Enum("Kind", {"A": "a"}).A, "a"),
        (enum.Enum("Rate", {"A": fractions.Fraction(1, 4)}).A, 0.25),
        (Word("own"), "own"),
        (Steps(3), 3),
        (Sized(), 7),
        (pathlib.PurePosixPath("a/b"), "a/b"),
        (fractions.Fraction(1, 2), 0.5),
        (decimal.Decimal("1.5"), 1.5),
        (decimal.Decimal("NaN"), None),
    ],
)
def test_what_stands_for_a_number_or_a_text_is_written_as_that(value, plain):
    (found,) = to_json([value])
    assert found == plain and type(found) is type(plain)


def test_scalars_of_numpy_are_written_as_the_numbers_they_are():
    np = pytest.importorskip("numpy")
    values = [
        np.int64(3),
        np.uint8(3),
        np.float64(0.5),
        np.float32(0.5),
        np.longdouble(0.5),
        np.bool_(True),
        np.str_("a"),
    ]
    found = to_json([*values, np.array(3), np.array(0.5), np.float32("nan"), np.float64("inf")])
    assert found == [3, 3, 0.5, 0.5, 0.5, True, "a", 3, 0.5, None, "Infinity"]
    assert [type(one) for one in found[:8]] == [int, int, float, float, float, bool, str, int]
    record = Outer(x_s=np.float32(0.5), num=np.array((4, 2)).prod(), flag=np.bool_(True), choice=np.int64(3))
    assert back(record) == Outer(x_s=0.5, num=8, flag=True, choice=3)
    assert to_json({np.int64(3): np.int64(4)}) == {"3": 4}


def test_tensors_of_one_number_are_written_as_it():
    torch = pytest.importorskip("torch")
    found = to_json([torch.tensor(3), torch.tensor(0.5), torch.tensor(True), torch.nn.Parameter(torch.ones(1))])
    assert found == [3, 0.5, True, 1.0] and [type(one) for one in found] == [int, float, bool, float]
    with pytest.raises(TypeError, match=r"`num` is `torch\.Tensor`"):
        to_json(Outer(x_s=0.0, num=torch.ones(2)))


@pytest.mark.parametrize("value", [object(), {1}, b"bytes", 1j, int, Silent(), Breaks()])
def test_what_stands_for_nothing_plain_is_named_with_its_place(value):
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    with pytest.raises(TypeError) as caught:
        to_json(Outer(x_s=0.0, table={"k": {"v": [1.0, value]}}))
    assert str(caught.value) == f"Outer: `table.k.v` is `{kind}`, not a plain number or text"


def test_a_whole_number_is_read_into_a_float_field_as_float():
    found = from_json(Outer, {"x_s": 2})
    assert found.x_s == 2.0 and isinstance(found.x_s, float)


def test_a_setting_keeps_its_own_type():
    for value in ("a", 3, 2.5, True, False):
        found = back(Outer(x_s=0.0, choice=value)).choice
        assert found == value and type(found) is type(value)


def test_unknown_fields_are_ignored_so_that_an_old_reader_reads_on():
    assert from_json(Outer, {"x_s": 1.0, "from_the_future": 3}) == Outer(x_s=1.0)


def test_a_missing_field_is_named_with_its_place_and_its_record():
    problem = refusal({})
    assert problem.error == "`a.json` line 3 lacks the field `x_s`"
    assert "`Outer`" in problem.cause and problem.hint


def test_a_field_missing_deep_inside_is_named_by_its_path():
    problem = refusal({"x_s": 1.0, "inners": [{"name": "a"}, {}]})
    assert problem.error == "`a.json` line 3 lacks the field `inners[1].name`"


@pytest.mark.parametrize(
    ("changes", "path", "wanted"),
    [
        ({"x_s": "fast"}, "x_s", "float"),
        ({"x_s": True}, "x_s", "float"),
        ({"x_s": "NaN"}, "x_s", "float"),
        ({"x_s": 10**400}, "x_s", "float"),
        ({"num": 1.5}, "num", "int"),
        ({"num": True}, "num", "int"),
        ({"num": None}, "num", "int"),
        ({"flag": 1}, "flag", "bool"),
        ({"word": "often"}, "word", "one of ends, phases, 3"),
        ({"word": 3.0}, "word", "one of ends, phases, 3"),
        ({"maybe": "x"}, "maybe", "float"),
        ({"choice": []}, "choice", "str or int or float or bool"),
        ({"choice": None}, "choice", "str or int or float or bool"),
        ({"inner": 3}, "inner", "a `Inner` record"),
        ({"inner": {"name": 4}}, "inner.name", "str"),
        ({"inners": {}}, "inners", "a list"),
        ({"inners": [{"name": "a"}, {"name": "b", "size": "big"}]}, "inners[1].size", "int"),
        ({"names": "abc"}, "names", "a list"),
        ({"names": ["a", 1]}, "names[1]", "str"),
        ({"pair": [1]}, "pair", "a list of 2"),
        ({"pair": [1, 2]}, "pair[1]", "str"),
        ({"table": []}, "table", "an object"),
        ({"table": {"a": {"b": "c"}}}, "table.a.b", "float"),
    ],
)
def test_a_wrong_value_is_named_by_its_path_with_what_belongs_there(changes, path, wanted):
    problem = refusal({"x_s": 1.0, **changes})
    assert problem.error.startswith(f"`a.json` line 3: `{path}` is `")
    assert problem.error.endswith(f"`, not {wanted}")
    assert problem.cause and problem.hint


@pytest.mark.parametrize("value", [None, 3, "text", [1, 2]])
def test_something_that_is_no_object_at_all_is_refused_with_its_place(value):
    assert refusal(value).error == f"`a.json` line 3 is `{value}`, not a `Outer` record"


def test_a_long_value_is_shown_by_its_beginning_on_one_line():
    problem = refusal({"x_s": "line\n" * 1000})
    assert len(problem.error) < 150 and "\n" not in problem.error


def test_a_number_too_long_to_print_is_still_refused_in_three_parts():
    assert "is `int`" in refusal({"x_s": 10**5000}).error


def test_what_a_record_itself_refuses_stays_its_own_error():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Positive:
        value: float

        def __post_init__(self):
            if self.value <= 0:
                raise RecordError("not positive", cause="made so", hint="make it positive")

    assert refusal({"value": -1.0}, Positive).error == "not positive"


@pytest.mark.parametrize("kind", [Header, Facts, Plan])
def test_every_field_that_must_be_there_is_named_when_it_is_not(kind):
    full = to_json({Header: HEADER, Facts: FACTS, Plan: plan()}[kind])
    for each in dataclasses.fields(kind):
        rest = {name: value for name, value in full.items() if name != each.name}
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            assert f"`{each.name}`" in refusal(rest, kind).error
        else:
            from_json(kind, rest)
