"""The parts by themselves: cuts of a batch, how outputs are put together, pages, and what is said of a hang."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.cli import options
from flatout.errors import UsageError
from flatout.frameworks.pytorch.parallel.assembly import Rule, Share, candidates, gradient_of, put_together, shape_at
from flatout.frameworks.pytorch.parallel.call_signature import forgotten, remembered
from flatout.frameworks.pytorch.parallel.cuts import Cut, bounds, guesses, part
from flatout.frameworks.pytorch.parallel.protocol import ParameterHolder
from flatout.guest import rank_status
from flatout.guest.rank_status import StatusPage, page_file
from flatout.records.ceilings import Accelerator, Machine
from flatout.records.ranks import EXIT_LOST, RankConfig, ended_file, leaves_file, stacks_file
from flatout.run.rank_start import crowding, devices_for
from flatout.run.rank_watch import RankWatch

pytestmark = pytest.mark.smoke  # in this process


@given(num=st.integers(1, 500), world=st.integers(1, 16))
def test_every_sample_is_one_ranks_and_shares_are_nearly_equal(num, world):
    edges = bounds(num, world)
    sizes = [high - low for low, high in itertools.pairwise(edges)]
    assert edges[0] == 0 and edges[-1] == num
    assert max(sizes) - min(sizes) <= 1


def test_the_dimension_that_most_inputs_share_is_guessed_first():
    words, state = torch.zeros(35, 20), torch.zeros(2, 20, 200)
    assert guesses([words, state], 2)[0] == Cut((1, 1))
    images, mask = torch.zeros(12, 8), torch.zeros(12, 12)
    assert guesses([images, mask], 3)[0] == Cut((0, None))
    assert guesses([torch.zeros(())], 2) == []


def test_inputs_that_disagree_have_no_number_of_samples():
    assert Cut((0, 0)).num_samples([torch.zeros(4), torch.zeros(5)]) is None
    assert Cut((0, None)).num_samples([torch.zeros(4), torch.zeros(5)]) == 4
    assert Cut((1,)).num_samples([torch.zeros(4)]) is None


def test_a_part_is_laid_out_as_the_whole_is():
    assert part(torch.zeros(6, 8), 1, 2, 5).is_contiguous()
    image = torch.zeros(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert part(image, 0, 1, 3).is_contiguous(memory_format=torch.channels_last)


RULES = [Rule("joined", 0), Rule("joined", 1), Rule("joined", 0, 3), Rule("folded", 0, 3)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("num", [4, 7])
def test_what_is_taken_apart_is_put_together_again(rule, num):
    world = 3
    share = Share.of([torch.zeros(num)], (0,), num, world)
    shape = [5, 5]
    shape[rule.dim] = num * rule.blocks
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    rows = [gradient_of(rule, whole, share, rank, world) for rank in range(world)]
    assert torch.equal(put_together(rule, rows, share), whole)
    assert [tuple(row.shape) for row in rows] == [shape_at(rule, rows[0], share, rank) for rank in range(world)]
    assert rule in candidates(whole, rows[1], share, 1) or rule.blocks > 1


def test_a_mean_weighs_samples_and_leaves_out_what_counts_for_nothing():
    share = Share.of([torch.zeros(5)], (0,), 5, 2)
    found = put_together(Rule("mean"), [torch.tensor(1.0), torch.tensor(2.0)], share)
    assert float(found) == pytest.approx((1.0 * 2 + 2.0 * 3) / 5)
    labels = torch.tensor([-100, -100, 1, 2])
    ignored = Share.of([labels], (0,), 4, 2)
    rule = Rule("mean", weigh=0)
    assert float(put_together(rule, [torch.tensor(float("nan")), torch.tensor(3.0)], ignored)) == 3.0
    assert gradient_of(rule, torch.tensor(1.0), ignored, 0, 2) is None
    assert float(gradient_of(rule, torch.tensor(1.0), ignored, 1, 2)) == 1.0


@pytest.mark.parametrize(
    ("kept", "other"),
    [
        (3, 4), (0.5, 0.6), ("a", "b"), (deque([0.5]), deque([0.5, 0.6])), ({"loss": 0.5}, {"loss": 0.6}),
        ((torch.ones(2), torch.ones(2)), (torch.ones(2), torch.zeros(2))), (torch.ones(2), torch.ones(3)),
    ],
)  # fmt: skip
def test_what_a_module_keeps_of_a_call_is_compared_by_value(kept, other):
    module = torch.nn.Linear(2, 2)
    module.kept = kept
    wanted = remembered(module)
    assert forgotten(wanted, module) is None
    module.kept = other
    assert forgotten(wanted, module) == "kept"


# -- pages and hangs ---------------------------------------------------------------------------------------------------


def test_a_page_tells_where_a_rank_stands_also_when_it_is_gone(tmp_path):
    page = StatusPage(page_file(tmp_path, 0))
    page.begin("outputs of `Net`")
    stand = rank_status.read(page_file(tmp_path, 0))
    assert stand.waits and (stand.num_begun, stand.num_ended, stand.name) == (1, 0, "outputs of `Net`")
    page.end(waiting=True)
    del page
    stand = rank_status.read(page_file(tmp_path, 0))
    assert not stand.waits and stand.waited_s >= 0
    assert rank_status.read(tmp_path / "none") is None


def watched(folder, hang_timeout_s=0.05):
    return RankWatch(RankConfig(num_ranks=2, folder=str(folder), hang_timeout_s=hang_timeout_s))


def stood(folder, rank, num_ended, waits_for=None, frames=()):
    page = StatusPage(page_file(folder, rank))
    for _ in range(num_ended):
        page.begin("an exchange")
        page.end(waiting=True)
    if waits_for is not None:
        page.begin(waits_for)
    lines = "".join(f'  File "{place}", line {line} in {name}\n' for place, line, name in frames)
    stacks_file(folder, rank).write_text(f"Current thread 0x1 (most recent call first):\n{lines}")
    return page


def test_who_is_behind_is_named_with_its_line(tmp_path):
    pages = [stood(tmp_path, 0, 7, "outputs of `Net`"), stood(tmp_path, 1, 7, frames=[("/home/u/train.py", 3, "load")])]
    watch = watched(tmp_path)
    time.sleep(0.1)
    assert watch.look()
    assert "rank 1 did not come" in watch.hang.error.error and "rank 0 waits" in watch.hang.error.error
    assert "/home/u/train.py:3 in load" in watch.hang.error.cause
    assert len(pages) == 2


def test_a_rank_that_came_to_no_exchange_yet_is_waited_for_longer_it_may_load_all_again(tmp_path):
    pages = [stood(tmp_path, 0, 0, "meeting of all ranks")]
    watch = watched(tmp_path)
    time.sleep(0.1)
    assert not watch.look() and watch.hang is None, "it has not begun"
    pages.append(stood(tmp_path, 1, 0))
    time.sleep(0.6)
    assert not watch.look() and watch.hang is None, "it has begun, and has not come"


def test_ranks_in_different_exchanges_have_taken_other_branches(tmp_path):
    pages = [stood(tmp_path, 0, 7, "outputs of `A`"), stood(tmp_path, 1, 7, "outputs of `B`")]
    watch = watched(tmp_path)
    time.sleep(0.1)
    assert watch.look()
    assert watch.hang.error.error.startswith("ranks wait for each other in different exchanges")
    assert len(pages) == 2


def test_ranks_that_all_compute_for_long_are_no_hang(tmp_path):
    pages = [stood(tmp_path, 0, 7), stood(tmp_path, 1, 7)]
    watch = watched(tmp_path)
    time.sleep(0.1)
    assert not watch.look() and watch.hang is None
    assert len(pages) == 2


def test_a_rank_that_is_ending_does_not_hang_and_one_that_has_ended_is_waited_for_in_vain(tmp_path):
    frames = [("/home/u/train.py", 3, "load")]
    pages = [stood(tmp_path, 0, 7, "outputs of `Net`", frames=frames), stood(tmp_path, 1, 7, frames=frames)]
    leaves_file(tmp_path, 1).touch()
    watch = watched(tmp_path)
    time.sleep(0.1)
    assert not watch.look() and watch.hang is None
    ended_file(tmp_path, 1).write_text(json.dumps({"code": 0, "unix_s": 1.0}))
    watch = watched(tmp_path)
    assert watch.look()
    assert len(pages) == 2


def test_a_rank_that_ended_well_while_another_waited_is_named(tmp_path):
    pages = [stood(tmp_path, 0, 7, "outputs of `Net`"), stood(tmp_path, 1, 7)]
    for rank, code in ((0, EXIT_LOST), (1, 0)):
        ended_file(tmp_path, rank).write_text(json.dumps({"code": code, "unix_s": 1.0}))
    assert watched(tmp_path).ended_early().error == "rank 1 ended, and rank 0 waits for it"
    assert len(pages) == 2


# -- terms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        ((4, 0, 0, None), "not a number of machines"),
        ((3, 2, 0, "h:1"), "not 2 times as many"),
        ((4, 2, 2, "h:1"), "is none of 2"),
        ((4, 2, 0, None), "need a place to meet"),
        ((4, 2, 0, "host"), "need a place to meet"),
    ],
)
def test_machines_that_cannot_be_are_refused(typed, error):
    with pytest.raises(UsageError, match=error):
        options.nodes(*typed)


def test_ranks_are_given_time_to_meet():
    with pytest.raises(UsageError, match="gives ranks no time to meet"):
        options.rank_terms(2, "auto", "0", options.nodes(2, 1, 0, None))


def test_ranks_are_dealt_out_to_machines():
    places = options.nodes(8, 2, 1, "host:29400")
    assert options.rank_terms(8, "auto", "30s", places).of_this_node == range(4, 8)
    assert options.rank_terms(None, "auto", "30s", options.nodes(1, 1, 0, None)) is None


MACHINE = Machine(
    hostname="here", cpu="a CPU", architecture="x86_64", num_cores=4, num_physical_cores=4, num_cores_total=4,
    memory_bytes=2**34, operating_system="Linux 6.1",
)  # fmt: skip
GPUS = (Accelerator(name="a GPU", memory_bytes=2**34, compute_capability="9.0"),) * 2


def test_ranks_share_a_cpu_with_a_word_and_a_gpu_never():
    assert crowding(4, MACHINE) is None and devices_for(5, MACHINE, None) == ()
    assert crowding(5, MACHINE) == "5 ranks share 4 cores: this is no faster than 4"
    with_gpus = dataclasses.replace(MACHINE, accelerators=GPUS)
    assert devices_for(2, with_gpus, None) == ("0", "1") and devices_for(2, with_gpus, "3,5") == ("3", "5")
    with pytest.raises(UsageError, match="needs 3 GPUs, and there are 2"):
        devices_for(3, with_gpus, None)


def test_each_kind_of_exchange_is_told_by_its_time(tmp_path):
    page = rank_status.StatusPage(tmp_path / "page")
    page.trains()
    for number in range(3):
        for name, waiting in ((f"activations, {number} of 3", True), ("sum 2", True), ("hidden", False)):
            page.begin(name)
            page.end(waiting=waiting)
    page.tell()
    stand = rank_status.read(tmp_path / "page")
    assert set(stand.kinds) == {"activations", "sum"}
    assert sum(stand.kinds.values()) == pytest.approx(stand.waited_s, abs=1e-3)


def test_a_graph_that_waits_does_not_take_nudges_for_a_change():
    weight = torch.ones(3, requires_grad=True)
    out = (weight.square()).sum()
    held = ParameterHolder()
    held.parameters = [weight]
    with torch.no_grad(), held.nudged(16):
        assert not torch.equal(weight, torch.ones(3))
    out.backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
