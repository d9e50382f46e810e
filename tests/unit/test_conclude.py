"""Does a result say that the machine changed while it was measured? (`flatout.trials.conclude`)"""

from types import SimpleNamespace

import pytest

from flatout.trials import conclude


def conducted(taken_apart_s, *baseline_s):
    plain = SimpleNamespace(
        anatomy=SimpleNamespace(step_s=taken_apart_s), baseline=[SimpleNamespace(training_step_s=s) for s in baseline_s]
    )
    return SimpleNamespace(plain=plain)


@pytest.mark.parametrize("taken_apart_s", [0.0847, 0.0028])
def test_a_step_of_another_length_when_taken_apart_is_said(taken_apart_s):
    (said,) = conclude._other_speed(conducted(taken_apart_s, 0.015, 0.016))
    assert f"{1e3 * taken_apart_s:.3g} ms when taken apart and 15.5 ms in the baseline" in said


@pytest.mark.parametrize("seconds", [(0.018, 0.015, 0.016), (0.018,), (0.0, 0.015)])
def test_nothing_is_said_where_it_is_alike_or_unknown(seconds):
    assert conclude._other_speed(conducted(*seconds)) == []
