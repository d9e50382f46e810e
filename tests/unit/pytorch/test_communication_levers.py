"""Does `bf16_gradients` say when it has nothing to do, and set what sums gradients?"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.levers.bf16_gradients import Bf16Gradients  # noqa: E402
from flatout.frameworks.pytorch.parallel.group import Communication  # noqa: E402
from flatout.frameworks.pytorch.seams.calls import Calls  # noqa: E402
from flatout.frameworks.pytorch.session import Session  # noqa: E402
from handmade import FACTS, MACHINE, MODEL  # noqa: E402

LEVER = Bf16Gradients()


def on(mode, **changes):
    return replace(FACTS, num_ranks=2, rank_mode=mode, models=(replace(MODEL, **changes),))


def session_on(mode, world=2):
    session = Session(Calls(), Loaders(), registry())
    session.ranks = SimpleNamespace(mode=mode, group=SimpleNamespace(world=world, communication=Communication()))
    return session


# -- where it applies ------------------------------------------------------------------------------------------------


def test_one_process_is_told_that_it_is_for_ranks():
    assert LEVER.applies(FACTS, MACHINE) == "it is for ranks (`--ranks N`): one process sends no gradients"
    session = Session(Calls(), Loaders(), registry())
    session.engage_at_start({LEVER.name: {}})
    assert session.unavailable[LEVER.name] == LEVER.applies(FACTS, MACHINE) and not session.engaged


@pytest.mark.parametrize(
    ("mode", "sums"),
    [("replicate", True), ("auto", True), ("replicate+tensor", True), ("shard", True), ("hybrid", True),
     ("tensor", False), ("pipeline", False)],
)  # fmt: skip
def test_it_applies_in_modes_that_sum_gradients(mode, sums):
    assert LEVER.applies(on(mode), MACHINE) == (None if sums else f"in mode `{mode}` gradients are not summed so")


def test_bf16_gradients_need_some_that_are_float32():
    assert LEVER.applies(on("replicate", dtypes=("bfloat16",)), MACHINE) == "no float32 parameters"


# -- engaged ---------------------------------------------------------------------------------------------------------


def test_engaging_sets_what_sums_gradients_and_releasing_is_its_undoing():
    session = session_on("replicate")
    session.engage_at_start({"bf16_gradients": {}})
    found = session.ranks.group.communication
    assert found.in_bf16
    assert session.evidence()[0] == {}, "nothing was summed yet"
    found.to_send(torch.ones(10**6))
    assert session.evidence()[0] == {"bf16_gradients": "4 MB of gradients were sent as 2 MB"}
    session.release_all(["bf16_gradients"])
    assert not found.in_bf16


def test_what_is_compared_is_summed_in_full_and_other_types_are_sent_as_they_are():
    found = Communication()
    found.in_bf16 = True
    assert found.narrows(torch.float32) and not found.narrows(torch.float64) and not found.narrows(torch.bfloat16)
    half = torch.ones(3, dtype=torch.float16)
    sent = found.to_send(half)
    assert sent.dtype == torch.float16 and sent is not half and not found.num_sent_bytes
    with found.in_full():
        assert not found.narrows(torch.float32)
    assert found.in_bf16
