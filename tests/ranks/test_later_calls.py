"""What makes a division wrong in the middle of a run ends it before the update, soon, or in the end; never well."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from faulting import REASON, parts
from flatout.frameworks.pytorch.parallel.later_calls import Changes

from . import later_scenarios as later
from .on_ranks import on_ranks
from .test_faults import on_two_ranks
from .test_shard import agrees

isolated = pytest.mark.skipif(REASON is not None, reason=f"ranks cannot be isolated here: {REASON}")
NO_MORE = "outputs for parts of a batch do not make up those of the whole one; its call {} was the last"


@pytest.mark.parametrize(
    ("scenario", "last"),
    [(one, 17) for one in (*later.AT_ONCE, *later.SOON)] + [(one, 33) for one in later.IN_THE_END],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
@pytest.mark.parametrize("mode", ["auto", "shard"])
def test_samples_that_see_each_other_later_end_the_run(scenario, last, mode):
    if mode == "shard" and scenario in (later.a_model_of_another_type_at_the_end, later.a_layer_that_is_replaced):
        pytest.skip("sharded models are not changed so, which has a refusal of its own")
    for found in on_ranks(2, scenario, mode):
        assert NO_MORE.format(last) in found["cause"]
        assert found["error"].endswith("any more") and found["hint"]


def test_a_hook_that_comes_later_is_refused_by_name():
    for found in on_ranks(2, later.a_hook_that_is_put_on):
        assert "a hook on its inner module `inner`, " in found["cause"] and "its call 17 was the last" in found["cause"]


@pytest.mark.parametrize("mode", ["auto", "shard", "tensor"])
@pytest.mark.parametrize("scenario", later.LEGAL, ids=lambda scenario: scenario.__name__)
def test_what_may_change_in_the_middle_is_trained_as_in_one_process(scenario, mode):
    if mode != "auto" and scenario is later.a_model_that_is_trained_in_double_precision_later:
        pytest.skip("refused where parameters are divided")
    agrees(scenario, 2, mode)


def test_other_masks_may_come_later():
    first, second = on_ranks(2, later.other_masks_later)
    assert first.said == second.said


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.strength, self.num = nn.Linear(8, 3), 0.0, 0

    def forward(self, x):
        self.num += 1
        out = self.inner(x)
        return out - out.mean(0) / 2 if self.strength or self.num > {count} else out

def main():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(24, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(44):
        if step == {switch}:
            model.strength = 0.7
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        print(step, f"{{loss.item():.4f}}", flush=True)

main()
"""


@isolated
def test_the_run_ends_before_the_first_wrong_update(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(switch=40, count=99))
    plain = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    done = on_two_ranks(tmp_path, "train.py")
    assert done.returncode == 3 and NO_MORE.format(33) in parts(done.stderr)["cause"]
    assert done.stdout.splitlines() == plain.stdout.splitlines()[:40]


@isolated
def test_no_run_ends_well_whose_last_calls_are_not_what_one_process_computes(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(switch=99, count=40))
    done = on_two_ranks(tmp_path, "train.py")
    assert len(done.stdout.splitlines()) == 44
    assert done.returncode == 3 and NO_MORE.format(33) in parts(done.stderr)["cause"]


# -- by themselves -----------------------------------------------------------------------------------------------------


def noted(model):
    changes = Changes()
    changes.note(model)
    assert not changes.look()
    return changes


def test_what_changes_before_every_call_is_news_ever_more_rarely():
    model = nn.Dropout(0.5)
    changes, news = noted(model), []
    for number in range(1, 20):
        model.p = number / 20
        news.append(changes.look())
        changes.note(model)
    assert [number for number, is_new in enumerate(news, 1) if is_new] == [1, 2, 4, 8, 16]


def test_what_changes_within_a_call_is_none():
    model = later.Rows(lambda m: False)
    changes = noted(model)
    model(torch.ones(2, 8))
    changes.note(model)
    assert not changes.look()


def test_attributes_hooks_and_modules_are_those_of_the_last_call_for_a_while():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    changes = noted(model)
    model.eval()
    model[1] = nn.ReLU()
    hook = model.register_forward_hook(print)
    with changes.taken_back():
        assert model.training and model[0].training and isinstance(model[1], nn.Dropout)
        assert not model._forward_hooks
    assert not model.training and isinstance(model[1], nn.ReLU) and hook.id in model._forward_hooks


def test_arrays_and_objects_that_cannot_be_compared_do_no_harm():
    class Odd:
        def __eq__(self, other):
            raise RuntimeError("not me")

        __hash__ = None

    model = nn.Linear(2, 2)
    model.odd, model.array = Odd(), torch.ones(3).numpy()
    changes = noted(model)
    model.odd, model.array = Odd(), torch.ones(3).numpy()
    assert changes.look()
