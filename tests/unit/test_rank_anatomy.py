"""Who is waited for, and how the steps of ranks are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.judge.anatomy import Anatomy
from flatout.judge.rank_steps import FILE, RankAnatomy, load, summary_of
from flatout.records import files
from handmade import MACHINE
from shown import on_page, on_screen


def anatomy(**phases_s: float) -> Anatomy:
    return Anatomy(
        step_s=sum(phases_s.values()), phases_s=phases_s, spread_fraction={}, outside_s={}, not_observed=(),
        num_steps=14, num_windows=2,
    )  # fmt: skip


@pytest.fixture
def found() -> RankAnatomy:
    return RankAnatomy(
        script="train.py", typed="train.py --epochs 3", num_ranks=2, mode="replicate", machine=MACHINE,
        framework="pytorch", framework_version="2.13.0", kinds={"sum of gradients": 0.2},
        ranks=(
            anatomy(forward=0.02, backward=0.05, communication=0.03),
            anatomy(forward=0.02, backward=0.078, communication=0.002),
        ), peak_memory_bytes=300 << 20,
    )  # fmt: skip


def test_a_rank_that_communicates_for_much_less_is_waited_for_because_of_what_takes_longer_there(found):
    assert found.waited_for == 1
    assert found.longer_there == "backward"
    assert found.step_s == pytest.approx(0.1)


def test_nobody_is_waited_for_where_all_communicate_as_long(found):
    even = replace(found, ranks=(found.ranks[0], found.ranks[0]))
    assert even.waited_for is None
    assert even.longer_there is None
    assert summary_of(even)["communication_share"] == pytest.approx(0.3)


def test_the_terminal_shows_each_rank_or_the_ends_of_many(found):
    assert "rank 1 is waited for: its backward takes longer" in " ".join(on_screen(found).split())
    assert "least of ranks" in on_screen(replace(found, num_ranks=8, ranks=found.ranks * 4))


def test_the_page_has_a_bar_for_each_rank_and_leads_to_their_numbers(found):
    text = on_page(found)
    assert text.count("rank 1</text>") == 2 and 'id="raw-step"' in text and "20 ms" in text


def test_it_is_kept_in_its_run_folder(found, tmp_path):
    files.write(found, tmp_path / FILE)
    assert load(tmp_path) == found
