"""Does the lever `collector` leave old objects out, collect at step ends, and give way to a script with its own way?"""

import gc
import os
import weakref
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch.levers.collector import STEERED, Collector, Paced, is_steered  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = {"collector": {}}


class Node:
    """Something that only the collector can free once it holds itself."""

    def __init__(self):
        self.held = self


@pytest.fixture(autouse=True)
def what_was_there_before_is_left_out():
    """It is not: nobody has steered the collector."""


@pytest.fixture(autouse=True)
def the_collector_is_as_it_was():
    before = gc.isenabled(), gc.get_threshold(), gc.get_debug()
    yield
    gc.set_threshold(*before[1])
    (gc.enable if before[0] else gc.disable)()
    gc.unfreeze()


@pytest.fixture
def paced():
    """A collector of which nobody but the lever's own part knows."""
    assert not is_steered()
    one = Paced(lambda: None)
    one.begin()
    yield one
    one.end()


def state_of_the_collector():
    return gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count() > 0, len(gc.callbacks)


def test_engaging_and_releasing_leaves_the_collector_as_it_was(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    before = state_of_the_collector()
    for _ in range(20):
        watched.pytorch.engage(LEVER)
        assert gc.get_freeze_count() and gc.get_threshold() != before[1] and gc.isenabled()
        script.train(1)
        watched.pytorch.engage({})
        assert state_of_the_collector() == before
    assert watched.pytorch.session.at_step_end == {} and "collector" not in watched.pytorch.session.kept


@pytest.mark.parametrize("name", ["conv", "transformer", "gan"])
def test_every_bit_of_a_run_is_kept(name, watch, workload, different):
    plain = workload(name).train(20)
    watched, script = watch(), workload(name)
    watched.engage(5, LEVER)
    script.train(20)
    assert watched.pytorch.engaged() == LEVER
    watched.pytorch.detach()
    assert different(plain.state(), script.state()) == []


def test_the_evidence_names_what_is_left_out_and_the_collections_at_step_ends(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.engage(LEVER)
    for _ in range(3):
        made = [Node() for _ in range(2 * gc.get_threshold()[0] // 10)]
        script.train(1)
        del made
    proof = watched.pytorch.evidence()[0]["collector"]
    num_objects, num_collections = (int(word) for word in proof.split() if word.isdecimal())
    assert num_objects > 10_000 and num_collections == 3


def test_cycles_are_freed_at_the_end_of_the_step_in_which_python_would_have_freed_them(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.engage(LEVER)
    own = gc.get_threshold()[0] // 10
    kept = [weakref.ref(Node()) for _ in range(2 * own)]
    assert all(one() is not None for one in kept)
    script.train(1)
    assert not any(one() is not None for one in kept)


def test_few_objects_cause_no_collection_at_a_steps_end(paced):
    gc.collect()
    paced.at_step_end()
    assert paced.num_collections == 0


def test_what_lies_between_two_steps_cannot_pile_up_garbage_without_bound(paced):
    kept = [weakref.ref(Node()) for _ in range(3 * gc.get_threshold()[0])]
    assert any(one() is None for one in kept)


def test_python_chooses_which_generation_is_due(paced):
    seen = []
    gc.callbacks.append(lambda moment, details: moment == "stop" and seen.append(details["generation"]))
    try:
        for _ in range(30):
            made = [Node() for _ in range(2 * gc.get_threshold()[0] // 10)]
            paced.at_step_end()
            del made
    finally:
        gc.callbacks.pop()
    assert paced.num_collections == len(seen) == 30 and {*seen} >= {0, 1}


def test_a_full_collection_of_the_scripts_own_is_a_whole_one_when_there_has_been_none_for_long(paced):
    node = weakref.ref(old := Node())
    paced.end()
    paced.begin()  # it is frozen now
    del old
    gc.collect()
    assert node() is not None, "frozen a moment ago"
    paced._walked_s -= 1e6
    gc.collect()
    assert node() is None and gc.get_freeze_count() == paced.num_frozen
    cost_s = paced._cost_s
    gc.collect()
    assert paced._cost_s == cost_s, "the next one leaves out what is frozen again"


def test_a_release_after_partial_walks_tells_python_how_many_objects_there_are(paced):
    walks = []
    gc.collect()
    paced.end()
    gc.callbacks.append(lambda moment, details: moment == "start" and walks.append(details["generation"]))
    try:
        paced.begin()
        paced.end()
        assert walks == []
        paced.begin()
        gc.collect()
        paced.end()
        assert walks == [2, 2]
    finally:
        gc.callbacks.pop()


# -- giving way ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steer",
    [gc.disable, lambda: gc.set_threshold(50_000, 20, 20), gc.freeze, lambda: gc.set_debug(gc.DEBUG_UNCOLLECTABLE)],
    ids=["disabled", "other thresholds", "frozen", "debugged"],
)
def test_a_script_that_steers_the_collector_is_left_alone(steer, watch, workload):
    watched, script = watch(), workload("mlp")
    try:
        steer()
        script.train(8)
        assert watched.pytorch.facts().collector_of_its_own
        before = state_of_the_collector()
        watched.pytorch.engage(LEVER)
        assert watched.pytorch.evidence() == ({}, {"collector": STEERED})
        assert state_of_the_collector() == before and watched.pytorch.engaged() == {}
    finally:
        gc.set_debug(0)


def test_a_script_without_a_way_of_its_own_may_have_the_lever(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    assert not watched.pytorch.facts().collector_of_its_own
    watched.pytorch.engage(LEVER)
    assert not watched.pytorch.facts().collector_of_its_own, "what we did is not the script's doing"
    assert Collector().applies(FACTS, MACHINE) is None
    assert Collector().applies(replace(FACTS, collector_of_its_own=True), MACHINE) == STEERED


def test_a_script_that_disables_the_collector_later_is_not_fought(watch, workload):
    watched, script = watch(), workload("mlp")
    own = gc.get_threshold()
    script.train(8)
    watched.pytorch.engage(LEVER)
    gc.disable()
    script.train(2)
    assert not gc.isenabled() and gc.get_threshold() == own
    assert watched.pytorch.evidence() == ({}, {"collector": "no effect was seen"})
    watched.pytorch.engage({})
    assert not gc.isenabled() and gc.get_threshold() == own


def test_thresholds_that_the_script_sets_later_stay(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.engage(LEVER)
    gc.set_threshold(12_345, 6, 7)
    script.train(2)
    watched.pytorch.engage({})
    assert gc.get_threshold() == (12_345, 6, 7)


def test_what_the_script_freezes_later_stays_frozen(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.engage(LEVER)
    made = [Node() for _ in range(500)]
    gc.freeze()
    frozen = gc.get_freeze_count()
    watched.pytorch.engage({})
    assert gc.get_freeze_count() > frozen // 2 and made


def test_enabling_and_collecting_in_the_script_change_nothing(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.engage(LEVER)
    gc.enable()
    gc.collect()
    script.train(2)
    assert watched.pytorch.evidence()[1] == {}


# -- others --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_collects_as_plain_python(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    before = gc.get_threshold()
    watched.pytorch.engage(LEVER)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, repr((gc.get_threshold(), gc.isenabled(), gc.get_freeze_count())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(told, 1000).decode() == repr((before, True, 0))
    os.close(told)
    os.close(tell)
    assert gc.get_freeze_count() and watched.pytorch.evidence()[1] == {}
    watched.pytorch.engage({})
    if os.fork() == 0:
        os._exit(0 if gc.get_threshold() == before else 1)
    assert os.wait()[1] == 0


def test_models_that_were_frozen_are_found_when_their_optimizer_first_updates(watch, workload):
    watched = watch()
    first, second = workload("mlp"), workload("conv")
    first.train(20)
    watched.pytorch.engage(LEVER)
    first.train(2)
    second.train(30)
    assert any(call.module is second.model for call in watched.pytorch.calls.found)
    assert watched.pytorch.engaged() == LEVER and gc.get_freeze_count()


def test_a_script_that_raises_in_a_step_leaves_the_lever_engaged_and_releasable(watch, workload):
    watched, script = watch(), workload("mlp")
    before = state_of_the_collector()
    script.train(8)
    watched.pytorch.engage(LEVER)
    with pytest.raises(TypeError):
        script.optimizer.step(closure=3)
    script.train(3)
    assert watched.pytorch.evidence()[1] == {}
    watched.pytorch.engage({})
    assert state_of_the_collector() == before


def test_a_callback_list_that_the_script_has_emptied_is_no_trouble(watch, workload):
    watched, script = watch(), workload("mlp")
    script.train(8)
    watched.pytorch.engage(LEVER)
    kept, gc.callbacks[:] = list(gc.callbacks), []
    script.train(2)
    watched.pytorch.engage({})
    assert gc.get_freeze_count() == 0
    gc.callbacks[:] = [one for one in kept if "Paced" not in repr(one)]
