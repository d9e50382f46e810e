"""Is a bound on what reading later brings never too small, and is each place told with its line?"""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.judge.read_sites import judged, saved_s
from flatout.records.host_reads import HostRead, HostReads

SCRIPT = """\
def train(loss, steps):
    for step in range(steps):
        print(loss.item())
        if loss.item() > 9:
            break
"""
FILE = "/home/me/train.py"


def row(line=3, column=14, *, num=10, waited_s=0.4, until_next_s=0.1, on_device=True, **changes):
    place = {"file": FILE, "line": line, "end_line": line, "column": column, "end_column": column + len("loss.item()")}
    return HostRead(**{
        **place, "read": "item", "within": False, "on_device": on_device, "num": num, "waited_s": waited_s,
        "until_next_s": until_next_s, **changes,
    })  # fmt: skip


def seen(*rows, num_steps=10, wall_s=1.0):
    return HostReads(rows=rows, num_steps=num_steps, wall_s=wall_s)


def judge(*windows, step_s=0.1, source=SCRIPT):
    return judged(windows, step_s, lambda file: source if file == FILE else None)


def test_a_printed_value_and_one_that_stops_the_training_are_told_apart_with_their_lines():
    found = judge(seen(row(3, 14), row(4, 11, waited_s=0.2)))
    printed, used = found.sites
    assert (printed.line, printed.use, printed.code, printed.deferrable) == (3, "printed", "loss.item()", True)
    assert (used.line, used.use, used.why, used.deferrable) == (4, "used", "steers `if`, line 4", False)
    assert printed.reads_per_step == 1 and printed.waited_s == pytest.approx(0.04)


def test_a_wait_for_a_device_saves_no_more_than_the_host_could_have_done_meanwhile():
    (site,) = judge(seen(row(waited_s=0.4, until_next_s=0.1))).sites
    assert site.saved_s == pytest.approx(0.01) and site.ratio == pytest.approx(0.1 / 0.09)
    (site,) = judge(seen(row(waited_s=0.1, until_next_s=0.4))).sites
    assert site.ratio == pytest.approx(0.1 / 0.09)


def test_a_value_on_the_host_saves_what_reading_it_took():
    (site,) = judge(seen(row(on_device=False, waited_s=0.05, until_next_s=0.0))).sites
    assert site.ratio == pytest.approx(0.1 / 0.095)


def test_what_takes_next_to_nothing_is_counted_and_not_shown_but_for_a_device():
    found = judge(seen(row(on_device=False, waited_s=0.0005, until_next_s=0.0), row(4, 11, waited_s=0.0005)))
    assert [site.line for site in found.sites] == [4] and found.num_left_out == 1


def test_windows_are_added_and_ratios_are_of_the_shorter_step():
    found = judge(seen(row()), seen(row(), wall_s=3.0), step_s=0.1)
    assert found.num_steps == 20 and found.step_s == 0.1
    assert found.sites[0].reads_per_step == 1 and found.sites[0].waited_s == pytest.approx(0.04)
    assert judge(seen(row()), step_s=math.nan).step_s == 0.1


def test_together_is_of_those_alone_that_are_only_printed():
    found = judge(seen(row(3, 14), row(4, 11)))
    assert found.together == pytest.approx(found.sites[0].ratio)
    assert judge(seen(row(4, 11))).together is None


def test_together_counts_what_one_wait_leaves_to_the_next():
    script = "print(a.item())\nprint(b.item())\n"
    rows = [row(n, 6, end_column=14, waited_s=w, until_next_s=u) for n, w, u in ((1, 0.4, 0.0), (2, 0.0, 0.3))]
    found = judge(seen(*rows), source=script)
    assert [site.ratio for site in found.sites] == [1, 1] and found.together == pytest.approx(0.1 / 0.07)


@pytest.mark.parametrize("source", [None, "def broken(:\n", "x\0"])
def test_without_the_source_the_wait_is_known_and_its_use_not_told(source):
    (site,) = judge(seen(row()), source=source).sites
    assert site.use == "not told" and site.why and site.waited_s > 0 and not site.deferrable


def test_without_columns_the_use_is_not_told():
    (site,) = judge(seen(row(end_line=0))).sites
    assert site.use == "not told" and site.code == "print(loss.item())"


def test_no_step_gives_no_sites():
    assert judge() is None and judge(seen(num_steps=0, wall_s=0.0)) is None
    assert judge(seen()).sites == ()


def test_reads_of_more_than_the_step_do_not_divide_by_zero():
    (site,) = judge(seen(row(waited_s=5.0, until_next_s=5.0))).sites
    assert site.ratio == pytest.approx(1000)


# -- the bound against a queue that is emptied at each wait ---------------------------------------------------------


def makespan(parts, without_wait):
    """When host and device are done: each part starts work of the device, and then waits, or does not.

    Returns the end, and for each wait its length and the host's time until the next one.
    """
    host = device = 0.0
    waits, ends = [], []
    for number, (host_s, device_s) in enumerate(parts):
        host += host_s
        device = max(device, host) + device_s
        if number in without_wait:
            continue
        begun, host = host, max(host, device)
        waits.append((number, host - begun))
        ends.append((begun, host))
    until = [begun - ended for (_, ended), (begun, _) in itertools.pairwise(ends)] + [0.0]
    return max(host, device), {n: (w, u) for (n, w), u in zip(waits, until, strict=True)}


PARTS = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=2, max_size=8)


@given(PARTS, st.data())
def test_no_deferral_saves_more_than_its_bound(parts, data):
    """A host that starts work, a device that does it in order, and waits that empty the queue; the last one stays."""
    some = st.sets(st.integers(0, len(parts) - 2))
    never, deferred = data.draw(some), data.draw(some)
    plain_s, waits = makespan(parts, never)
    rows = [row(waited_s=waits[n][0], until_next_s=waits[n][1]) for n in deferred - never]
    assert plain_s - makespan(parts, never | deferred)[0] <= saved_s(*rows) + 1e-9
