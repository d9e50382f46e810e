"""Orders and sessions survive their way from the parent to the child."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.child.orders import Order, SessionSpec, decode, encode
from flatout.errors import RecordError
from flatout.records.as_json import from_json, to_json

settings = st.dictionaries(
    st.text(max_size=5), st.one_of(st.integers(), st.booleans(), st.text(max_size=5)), max_size=2
)
orders = st.builds(
    Order,
    number=st.integers(0, 10_000),
    kind=st.sampled_from(["window", "compare", "census", "scaling"]),
    purpose=st.text(max_size=20),
    levers=st.dictionaries(st.text(min_size=1, max_size=10), settings, max_size=3),
    observe=st.sampled_from(["ends", "phases"]),
    num_steps=st.integers(1, 10**9),
    limit_s=st.floats(0, 1e6),
    skip_steps=st.integers(0, 100),
)


@given(order=orders)
def test_an_order_survives_its_line(order):
    line = encode(order)
    assert line.count("\n") == 1 and line.endswith("\n")  # whatever stands in its texts
    assert decode(line) == order


def test_an_order_of_an_unknown_kind_is_refused():
    with pytest.raises(RecordError, match="order"):
        decode('{"number": 1, "kind": "dance"}')


def test_a_session_survives_its_file():
    spec = SessionSpec(
        mode="run",
        trace="/t",
        claim="/c",
        orders="/o",
        levers={"threads": {"num": 2}, "bf16": {}},
        script="-m package.train",
        arguments=("--name", "größer\n", ""),
        writable=("/a", "/b"),
        per_process=True,
    )
    assert from_json(SessionSpec, json.loads(json.dumps(to_json(spec))), where="session") == spec
