"""Is each line at which a value is read told with what it takes of a step?"""

import pytest

from flatout.judge.read_sites import judged
from flatout.records.host_reads import HostRead, HostReads

SCRIPT = """\
def train(loss, steps):
    for step in range(steps):
        print(loss.item())
        if loss.item() > 9:
            break
"""


@pytest.fixture
def row(tmp_path):
    """Makes rows of one script."""
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)

    def make(line=3, *, num=10, waited_s=0.4, on_device=True, **changes):
        place = {"file": str(file), "line": line, "read": "item"}
        return HostRead(**{**place, "on_device": on_device, "num": num, "waited_s": waited_s, **changes})

    return make


def judge(*rows, num_steps=10, wall_s=1.0):
    return judged([HostReads(rows=rows, num_steps=num_steps, wall_s=wall_s)])


def test_each_line_has_its_code_and_its_share_of_a_mean_step_the_longest_first(row):
    found = judge(row(4, waited_s=0.2), row(3, num=20))
    assert [(site.line, site.code) for site in found.sites] == [(3, "print(loss.item())"), (4, "if loss.item() > 9:")]
    assert [site.reads_per_step for site in found.sites] == [2, 1]
    assert [site.waited_s for site in found.sites] == pytest.approx([0.04, 0.02])


def test_what_takes_next_to_nothing_is_not_shown_but_for_a_device(row):
    found = judge(row(on_device=False, waited_s=0.0005), row(4, waited_s=0.0005))
    assert [site.line for site in found.sites] == [4]


def test_windows_are_added(row):
    found = judged([HostReads(rows=(row(),), num_steps=10, wall_s=wall_s) for wall_s in (1.0, 3.0)])
    (site,) = found.sites
    assert (site.reads_per_step, site.waited_s) == (1, pytest.approx(0.04))


@pytest.mark.parametrize("file", ["<stdin>", "/not/there.py"])
def test_without_the_source_the_wait_is_known_and_the_code_is_not(row, file):
    (site,) = judge(row(file=file)).sites
    assert site.code == "" and site.waited_s > 0


def test_no_step_gives_no_sites():
    assert judged([]) is None and judge(num_steps=0, wall_s=0.0) is None
    assert judge().sites == ()
