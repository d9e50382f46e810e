"""Are values of outputs, growing buffers and kept options compared, and is what is no number left alone?"""

import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.numerics.compare import compared_outputs  # noqa: E402
from flatout.frameworks.pytorch.numerics.differences import apart, buffer_error, numbered, relative_error  # noqa: E402
from flatout.frameworks.pytorch.numerics.faults import integers_fault  # noqa: E402
from flatout.frameworks.pytorch.numerics.replay import Replayed  # noqa: E402
from flatout.frameworks.pytorch.numerics.updates import _lessened  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "claims"))

from numerics_bugs import kept_since  # noqa: E402
from numerics_judging import judged  # noqa: E402
from numerics_output_bugs import each_output, valued  # noqa: E402
from numerics_particular import classified, two_layers  # noqa: E402
from numerics_planting import NAME, planted  # noqa: E402


def outputs_apart(found, plain):
    return apart(numbered(found), numbered(plain), masks=True).values()


def error(found, plain):
    return relative_error(outputs_apart([torch.tensor(found)], [torch.tensor(plain)]))


def test_what_stands_for_no_number_has_to_stand_for_the_same_and_hides_nothing_beside_it():
    inf, nan, least = math.inf, math.nan, torch.finfo(torch.float32).min
    for mark in (-inf, inf, nan, least):
        assert error([mark, 1.0, 2.0], [mark, 1.0, 2.0]) == 0
        assert error([mark, 1.0, 3.0], [mark, 1.0, 2.0]) == pytest.approx(1 / math.sqrt(5))
        assert not error([0.0, 1.0, 2.0], [mark, 1.0, 2.0]) < inf
        assert not error([1.0, mark, 2.0], [1.0, 1.0, 2.0]) < 1e20
    assert error([inf, 1.0], [-inf, 1.0]) == inf
    assert error([torch.finfo(torch.bfloat16).min, 1.0], [least, 1.0]) == 0, "the type's own least value"


def test_outputs_that_are_missing_or_of_another_shape_are_infinitely_off():
    plain = [torch.ones(3), torch.ones(2)]
    assert [a.distance for a in outputs_apart([torch.ones(3)], plain)] == [0, math.inf]
    assert [a.distance for a in outputs_apart([torch.ones(1), torch.ones(2)], plain)] == [math.inf, 0]
    assert relative_error(outputs_apart([torch.zeros(2)], [torch.zeros(2)])) == 0
    assert relative_error(outputs_apart([torch.ones(2)], [torch.zeros(2)])) == math.inf


def test_infinities_of_both_signs_and_outputs_of_no_elements_can_be_measured():
    mixed = [torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), torch.zeros(0)]
    found, plain = Replayed(), Replayed()
    found.outputs, plain.outputs = mixed, [torch.ones(2), torch.ones(2), torch.zeros(0)]
    plain.output_names = ["a", "b", "c"]
    measured = compared_outputs(found, plain)
    assert measured.error == math.inf and not measured.finite and measured.worst in ("a", "b")
    assert compared_outputs(plain, plain).error == 0


def test_whole_numbers_may_change_in_as_many_places_as_rounding_changes():
    def places(*numbers):
        return torch.tensor([n in numbers for n in range(8)])

    assert integers_fault([places()], [], ["a"]) == ""
    assert "`a` are others in 1 of 8 places" in integers_fault([places(3)], [], ["a"])
    assert integers_fault([places(3)], [[places()], [places(3)]], ["a"]) == ""
    assert "where rounding changes 2" in integers_fault([places(3, 4, 5)], [[places(3)], [places(4)]], ["a"])


def test_a_buffer_of_another_shape_after_each_call_is_compared_and_one_on_one_side_alone_is_infinitely_off():
    before, after = torch.zeros(2), torch.tensor([0.0, 0.0, 4.0])
    plain = {(0, "queue"): (before, after)}
    assert buffer_error(plain, plain) == (None, 0.0)
    key, off = buffer_error({(0, "queue"): (before, after + torch.tensor([0.0, 0.0, 1.0]))}, plain)
    assert key == (0, "queue") and off == pytest.approx(1 / 4)
    assert buffer_error({}, plain) == ((0, "queue"), math.inf)
    assert buffer_error({**plain, (0, "new"): (before, before)}, plain) == ((0, "new"), math.inf)


class Masked(nn.Module):
    """Classes that cannot be are minus infinity."""

    def __init__(self):
        super().__init__()
        self.body = two_layers(6)

    def forward(self, x):
        return self.body(x).masked_fill(torch.arange(6) > 3, -math.inf)


def masked():
    model = Masked()
    return classified(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_outputs_with_infinities_of_the_scripts_own_are_compared_in_their_other_places():
    for levers in ({"bf16": {}}, {"threads": {"num": 2}}):
        found = judged(masked, levers)
        assert found.word == "agrees", found.detail
    wrong = planted(valued(lambda value: value * 1.001), "rounding", "gradients")
    assert judged(masked, {NAME: {}}, {NAME: wrong}).word == "disagrees"
    unmasked = planted(each_output(lambda value: value.nan_to_num(neginf=0.0)), "rounding", "gradients")
    assert judged(masked, {NAME: {}}, {NAME: unmasked}).word == "disagrees"


@pytest.mark.parametrize(("change", "word"), [(torch.zeros_like, "disagrees"), (lambda v: 1.05 * v, "disagrees"),
                                              (lambda v: v.clone(), "agrees")])  # fmt: skip
def test_bfloat16_with_wrong_outputs_is_told_from_bfloat16(change, word):
    def plant(session):
        bf16, undo = session.levers["bf16"], valued(change)(session)
        bf16.engage(session, {})

        def release():
            bf16.release(session)
            undo()

        return release

    lever = planted(plant, "precision", "gradients")
    found = judged(masked, {NAME: {}}, {NAME: lever})
    assert found.word == word, found.detail


# -- options of optimizers -----------------------------------------------------------------------------------------


class Insisting(torch.optim.SGD):
    """Updates with the momentum that it was made with only."""

    def step(self, closure=None):
        assert all(group["momentum"] == 0.9 for group in self.param_groups), "another momentum"
        return super().step(closure)


def insisting():
    model = two_layers()
    return classified(model, Insisting(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2))


def test_an_optimizer_that_bears_no_other_options_is_compared_with_its_own():
    still = planted(lambda session: lambda: None, "rounding", "updates")
    assert judged(insisting, {NAME: {}}, {NAME: still}).word == "agrees"
    rate = planted(kept_since("lr"), "rounding", "updates")
    assert judged(insisting, {NAME: {}}, {NAME: rate}).word == "disagrees"


def test_options_are_lessened_whatever_they_are_made_of_and_switches_and_counts_are_not():
    assert _lessened(0.5) == 0.25 and _lessened((0.5, (1.0, None))) == (0.25, (0.5, None))
    assert _lessened([0.5, True]) == [0.25, True] and _lessened(3) == 3
    assert _lessened(3, integers=True) == 1.5 and _lessened(True, integers=True) is True
    np = pytest.importorskip("numpy")
    assert _lessened(np.float64(0.5)) == _lessened(np.float32(0.5)) == 0.25 and _lessened(np.int64(3)) == 3
    assert _lessened(np.int64(3), integers=True) == 1.5 and _lessened(np.bool_(True)) is np.True_
    betas = (torch.tensor(0.5), 0.5)
    assert _lessened(betas)[0] == 0.25 and betas[0] == 0.5, "the script's own tensor stays as it is"
