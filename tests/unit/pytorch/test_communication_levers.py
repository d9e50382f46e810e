"""Do `gradient_buckets` and `bf16_gradients` say when they have nothing to do, and set what sums gradients?"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.levers.bf16_gradients import Bf16Gradients  # noqa: E402
from flatout.frameworks.pytorch.levers.gradient_buckets import GradientBuckets  # noqa: E402
from flatout.frameworks.pytorch.parallel.group import Communication  # noqa: E402
from flatout.frameworks.pytorch.seams.calls import Calls  # noqa: E402
from flatout.frameworks.pytorch.session import Session  # noqa: E402
from handmade import FACTS, MACHINE, MODEL  # noqa: E402

MB = 1 << 20
BOTH = (GradientBuckets(), Bf16Gradients())


def on(mode, num_bytes=60 * MB, **changes):
    models = (replace(MODEL, parameter_bytes=num_bytes, **changes),)
    return replace(FACTS, num_ranks=2, rank_mode=mode, models=models)


def session_on(mode, world=2):
    session = Session(Calls(), Loaders(), registry())
    session.ranks = SimpleNamespace(mode=mode, group=SimpleNamespace(world=world, communication=Communication()))
    return session


# -- where they apply ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lever", BOTH, ids=lambda lever: lever.name)
def test_one_process_is_told_that_they_are_for_ranks(lever):
    assert lever.applies(FACTS, MACHINE) == "it is for ranks (`--ranks N`): one process sends no gradients"
    session = Session(Calls(), Loaders(), registry())
    session.engage_at_start({lever.name: {"mb": 1} if lever.parameter else {}})
    assert session.unavailable[lever.name] == lever.applies(FACTS, MACHINE) and not session.engaged


@pytest.mark.parametrize(
    ("mode", "which"),
    [("replicate", "both"), ("auto", "both"), ("replicate+tensor", "both"), ("shard", "bf16"), ("hybrid", "bf16"),
     ("tensor", ""), ("pipeline", "")],
)  # fmt: skip
def test_they_apply_in_modes_that_sum_gradients_so(mode, which):
    buckets, bf16 = (lever.applies(on(mode), MACHINE) for lever in BOTH)
    assert (buckets is None, bf16 is None) == (which == "both", which in ("both", "bf16"))
    assert which == "both" or f"in mode `{mode}` gradients are not summed so" == buckets


def test_sizes_that_make_the_buckets_of_pytorch_are_not_tried():
    def sizes(num_bytes):
        return [settings["mb"] for settings in GradientBuckets().settings(on("replicate", num_bytes), MACHINE)]

    assert sizes(MB // 2) == [] and sizes(4 * MB) == [0, 1] and sizes(20 * MB) == [0, 5, 1]
    assert sizes(200 * MB) == [0, 5, 100, 1]
    assert GradientBuckets().applies(on("replicate", MB // 2), MACHINE) == "all gradients fit in the first bucket"


def test_bf16_gradients_need_some_that_are_float32():
    assert Bf16Gradients().applies(on("replicate", dtypes=("bfloat16",)), MACHINE) == "no float32 parameters"


# -- engaged ---------------------------------------------------------------------------------------------------------


def test_engaging_sets_what_sums_gradients_and_releasing_is_its_undoing():
    session = session_on("replicate")
    session.engage_at_start({"gradient_buckets": {"mb": 5}, "bf16_gradients": {}})
    found = session.ranks.group.communication
    assert found.limits == (MB, 5 * MB) and found.in_bf16
    assert session.evidence()[0] == {}, "nothing was summed yet"
    found.num_buckets = 3
    found.to_send(torch.ones(10**6))
    assert session.evidence()[0] == {
        "gradient_buckets": "gradients are summed in 3 buckets",
        "bf16_gradients": "4 MB of gradients were sent as 2 MB",
    }
    session.release_all(["gradient_buckets", "bf16_gradients"])
    assert found.limits == Communication().limits and not found.in_bf16


def test_all_at_once_is_one_bucket_for_any_model_and_a_small_size_holds_for_the_first_one_too():
    found = Communication()
    assert found.limits == (MB, 25 * MB)
    found.bucket_bytes = 0
    assert min(found.limits) > 1 << 40
    found.bucket_bytes = 100
    assert found.limits == (100, 100)


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
