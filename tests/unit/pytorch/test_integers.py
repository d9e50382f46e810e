"""Whole numbers of many items at once are Python's, however large they are."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from flatout.frameworks.pytorch.input.items import arrays, integers
from flatout.frameworks.pytorch.input.items.rows import Rows

NUMBERS = st.one_of(st.integers(-5, 5), st.integers(-(2**31), 2**31), st.integers(-(2**63), 2**63), st.integers())
OPERATIONS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.lists(st.tuples(st.sampled_from(OPERATIONS), NUMBERS), max_size=6))
def test_chains_of_arithmetic_give_what_python_gives(values, steps):
    rows, expected = integers.whole(values), list(values)
    for operation, operand in steps:
        if operation in (operator.floordiv, operator.mod) and operand == 0:
            continue
        rows = arrays.arithmetic(operation, rows, operand)
        expected = [operation(value, operand) for value in expected]
        assert rows.listed() == expected
        assert {type(one) for one in rows.listed()} == {int}


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5), st.sampled_from(OPERATIONS[:3]))
def test_rows_with_rows_give_what_python_gives(pairs, operation):
    left, right = zip(*pairs, strict=True)
    rows = arrays.arithmetic(operation, integers.whole(left), integers.whole(right))
    assert rows.listed() == [operation(a, b) for a, b in pairs]


@given(st.lists(NUMBERS, min_size=1, max_size=5), NUMBERS, st.sampled_from(COMPARISONS))
def test_comparisons_give_what_python_gives(values, other, comparison):
    found = integers.compared(comparison, integers.whole(values), other)
    if found is not None:
        assert found.listed() == [comparison(value, other) for value in values]


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.lists(st.tuples(st.sampled_from(OPERATIONS), NUMBERS), max_size=4))
def test_the_bounds_that_are_carried_along_hold(values, steps):
    rows = integers.whole(values)
    for operation, operand in steps:
        found = integers.calculated(operation, rows, operand)
        if found is not None:
            rows = found
            assert all(rows.least <= one <= rows.most for one in rows.listed())


def test_a_division_by_zero_is_left_to_python():
    assert integers.calculated(operator.floordiv, integers.whole([1]), 0) is None
    with pytest.raises(ZeroDivisionError):
        arrays.arithmetic(operator.mod, integers.whole([1, 2]), 0)


def test_truth_values_and_floats_are_no_whole_numbers():
    assert integers.calculated(operator.add, integers.whole([1]), True) is None
    assert integers.calculated(operator.add, integers.whole([1]), 1.0) is None
    assert integers.calculated(operator.add, Rows("float", [1.0]), 1) is None
