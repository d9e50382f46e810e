"""A framework in pure Python goes through the conductor's trial: the contract asks for nothing of PyTorch's."""

from types import SimpleNamespace

import pytest

import toy
from conducting import Ended, FakePipe, in_this_process, records
from flatout.child.enter import conductor_of
from flatout.child.orders import Order, SessionSpec
from flatout.frameworks.contract import Framework
from flatout.judge.anatomy import dissect
from flatout.records.facts import Facts
from flatout.records.trace import Agreement, Census, Header, Ready, Scaling, Toggle, Window
from flatout.run.child_process import session_files

_this_process = in_this_process


@pytest.fixture
def conducted_over(tmp_path):
    """Builds a conductor over a framework in this process; nobody follows it when the test is over."""

    def build(framework, *orders, mode):
        found = conductor_of(SessionSpec(mode=mode, **session_files(tmp_path, "x")), framework)
        found._pipe = FakePipe(orders)
        found._pipe.closed = True
        found.begin()
        return SimpleNamespace(trace=tmp_path / "trace-x.jsonl")

    yield build
    toy.Regression.follower = None


def window(number, *, levers=None, observe="ends", num=6):
    return Order(number=number, kind="window", purpose="trial", levers=levers or {}, observe=observe, num_steps=num)


def test_it_fulfils_the_contract():
    missing = [name for name in dir(Framework) if not name.startswith("_") and not hasattr(toy.Toy, name)]
    assert missing == []


def test_a_trial_measures_compares_and_counts_it_and_leaves_it_as_it_was(conducted_over):
    shortcut = {"shortcut": {}}
    orders = [
        window(0),
        window(1, levers=shortcut),
        window(2, observe="phases"),
        window(3, levers={"free_data": {}}, observe="phases"),
        Order(number=4, kind="compare", levers=shortcut, purpose="gradients"),
        Order(number=5, kind="scaling"),
        Order(number=6, kind="census", num_steps=2, purpose="census"),
    ]
    here = conducted_over(toy.Toy(), *orders, mode="trial")
    model = toy.Regression()
    with pytest.raises(Ended):  # nobody gives another order
        model.train(100)

    assert records(here, Header)[0].framework == "toy"
    assert records(here, Facts)[0].models[0].num_parameters == 64
    plain, under, apart, free = records(here, Window)
    assert [len(one.step_s) for one in (plain, under, apart, free)] == [6] * 4
    assert under.levers == shortcut and len(plain.losses) == 6
    anatomy = dissect([apart])
    assert {*anatomy.phases_s} >= {"data", "forward", "optimizer"}
    assert sum(anatomy.phases_s.values()) == pytest.approx(anatomy.step_s, rel=1e-6)
    assert sum(free.phases["data"]) < sum(apart.phases["data"]), "one batch is drawn, and then it is given again"
    (agreement,) = records(here, Agreement)
    assert 0 < agreement.differences[0].error < 1e-12, "the same sum in another order of rounding"
    assert len(records(here, Scaling)[0].full_s) == 5 and records(here, Census)[0].flops == 2 * 4 * 64 * 2
    assert [one.order for one in records(here, Ready)] == [-1, *range(7)]
    assert any("shortcut" in one.evidence for one in records(here, Toggle))
    assert model.dot is toy.dot


def test_training_is_the_same_with_and_without_us(conducted_over):
    alone, followed = toy.Regression(), toy.Regression()
    alone.train(30)
    conducted_over(toy.Toy(), mode="run")
    followed.train(30)
    assert followed.weights == alone.weights
