"""Does a loop that changes what items follow from see what plain shows it, to the last pass, and is it said if not?"""

import runpy
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "changes_items.py"


@pytest.fixture
def printed(monkeypatch, capsys):
    """What the script prints, under settings or plainly; and the problems that were told."""

    def run(settings, *words):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
        owner, problems = Loaders(), []
        owner.on_failure = lambda stage, problem: problems.append(str(problem))
        if settings:
            owner.install()
            owner.change(settings)

        def count(*_):
            owner.num_steps += 1

        counted = register_optimizer_step_post_hook(count)
        try:
            module = runpy.run_path(str(SCRIPT), run_name="changes_items")
            monkeypatch.setitem(sys.modules, "changes_items", sys.modules[__name__])  # whose file is the tests' own
            module["main"]()
        finally:
            counted.remove()
            owner.remove()
        assert owner.num_changed == (3 if settings and not problems else owner.num_changed)
        return capsys.readouterr().out, problems + owner.remarks()

    return run


@pytest.mark.parametrize("kind", ["settings", "labels", "epoch"])
def test_what_changes_between_passes_is_seen(kind, printed):
    plain, _ = printed({}, kind, "2")
    ours, problems = printed({"num_workers": 1}, kind, "2")
    assert ours == plain and problems == []


def test_as_many_workers_as_the_script_has_ask_a_sampler_as_its_own_do(printed):
    plain, _ = printed({}, "epoch", "2", "--mid")
    assert printed({"num_workers": 2}, "epoch", "2", "--mid") == (plain, [])


def test_what_changes_in_mid_pass_is_not_seen_where_the_scripts_own_workers_do_not_see_it(printed):
    plain, _ = printed({}, "settings", "2", "--mid")
    assert printed({"num_workers": 1}, "settings", "2", "--mid") == (plain, [])


def test_items_that_begin_to_draw_random_numbers_are_left_to_plain_from_that_pass_on(printed):
    plain, _ = printed({}, "augments", "2")
    ours, problems = printed({"num_workers": 1}, "augments", "2")
    assert ours == plain and len(problems) == 1
    assert "in pass 2, the first batch was not what plain computes" in problems[0]


class Changing(Dataset):
    """Items that change by themselves where nobody looks, or draw random numbers from the beginning."""

    def __init__(self, labels=(), draws=False):
        self.labels, self.draws = list(labels), draws
        self.num_asked = 0

    def __len__(self):
        return 128

    def __getitem__(self, k):
        self.num_asked += 1
        return k, self.labels[k] if self.labels else 0, torch.rand(()) if self.draws else 0


@pytest.fixture
def loaders():
    owner = Loaders()
    owner.problems = []
    owner.on_failure = lambda stage, problem: owner.problems.append(str(problem))
    owner.install()
    owner.change({"num_workers": 2})
    yield owner
    owner.remove()


class Drawing(Changing):
    """Items of a generator of the dataset's own."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, k):
        return k, self.generator.random()


def test_items_that_follow_from_those_before_are_no_ones_but_plains(loaders):
    loaders.change({"num_workers": 1})
    for _ in DataLoader(Drawing(), batch_size=4, shuffle=True, num_workers=2):
        pass
    assert len(loaders.remarks()) == 1 and "draw random numbers" in loaders.remarks()[0]


def test_where_random_items_are_not_admitted_the_loader_is_left_to_plain(loaders):
    loaders.admits_random = False
    torch.manual_seed(0)
    ours = [batch[1] for batch in DataLoader(Drawing(), batch_size=4, shuffle=True, num_workers=1)]
    loaders.change({})
    torch.manual_seed(0)
    plain = [batch[1] for batch in DataLoader(Drawing(), batch_size=4, shuffle=True, num_workers=1)]
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert len(loaders.problems) == 1 and "class statistical" in loaders.problems[0]


def test_random_items_are_not_compared_and_it_is_said_in_the_end(loaders):
    loader = DataLoader(Changing(draws=True), batch_size=4, shuffle=True, num_workers=1)
    for _ in range(2):
        for _ in loader:
            loaders.num_steps += 1
    assert loaders.problems == [] and loaders.num_changed == 2
    assert len(loaders.remarks()) == 1 and "`Changing` draw random numbers" in loaders.remarks()[0]


def test_comparing_moves_no_random_number_and_asks_nothing_of_the_scripts_dataset(loaders):
    def states():
        found = []
        torch.manual_seed(5)
        for _ in DataLoader(dataset, batch_size=4, shuffle=True, num_workers=1):
            found.append(RandomStates())
        return found

    dataset = Changing()
    ours = states()
    assert dataset.num_asked == 0 and loaders.problems == []
    loaders.change({})
    assert all(a.equals(b) for a, b in zip(ours, states(), strict=True)) and dataset.num_asked == 0


@pytest.mark.parametrize("options", [{"multiprocessing_context": "fork"}, {"sampler": []}], ids=str)
def test_a_loader_that_workers_of_ours_do_not_fetch_for_is_not_compared(options, loaders):
    loader = DataLoader(Changing(), batch_size=4, num_workers=1, **options)
    loaders.note(loader, 1)
    assert len(list(loader)) == (0 if "sampler" in options else 32) and loaders.problems == []
