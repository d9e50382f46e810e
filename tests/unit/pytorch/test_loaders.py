"""Do changed loaders give the very batches and random streams of plain ones, and leave no process behind?"""

import gc
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest

import warm

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.input.passes import Pass  # noqa: E402
from flatout.frameworks.pytorch.input.worker_processes import OurWorkers, Process  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402
from flatout.frameworks.pytorch.seams.trees import digest  # noqa: E402

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
WORKERS = {"num_workers": 2}
AHEAD = {"ahead": 2}


class Squares(Dataset):
    """Items that depend on their number alone."""

    def __init__(self, num=23, epoch=0):
        self.num = num
        self.epoch = epoch

    def __len__(self):
        return self.num

    def __getitem__(self, k):
        return {
            "x": torch.tensor([k, k * k, self.epoch]),
            "label": k,
            "name": f"item {k}",
            "row": np.arange(k % 3 + 1)[:1],
        }


class Slow(Squares):
    def __getitem__(self, k):
        time.sleep(0.4)  # a batch is not ready before the alarm, also where workers start slowly
        return super().__getitem__(k)


class Noisy(Squares):
    def __getitem__(self, k):
        return torch.rand(3) + k, np.random.rand(), random.random()


class Counting(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(14))


class Mine(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch, "mine"


class Batches(Sampler):
    def __init__(self, num):
        super().__init__()
        self.num = num

    def __iter__(self):
        order = torch.randperm(self.num).tolist()
        for k in range(0, self.num, 4):
            yield order[k : k + 4]

    def __len__(self):
        return -(-self.num // 4)


def collate(items):
    return tuple(items)


def own_generator():
    return DataLoader(Squares(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))


LOADERS = {
    "in order": lambda: DataLoader(Squares(), batch_size=4),
    "shuffled": lambda: DataLoader(Squares(), batch_size=4, shuffle=True),
    "dropping the last": lambda: DataLoader(Squares(), batch_size=4, shuffle=True, drop_last=True),
    "with a generator": own_generator,
    "item by item": lambda: DataLoader(Squares(9), batch_size=None, sampler=RandomSampler(Squares(9))),
    "weighted": lambda: DataLoader(Squares(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 23, 23)),
    "with replacement": lambda: DataLoader(
        Squares(), batch_size=4, sampler=RandomSampler(Squares(), replacement=True, num_samples=40)
    ),
    "with a batch sampler of its own": lambda: DataLoader(Squares(), batch_sampler=Batches(23)),
    "with a collate of its own": lambda: DataLoader(Squares(), batch_size=4, shuffle=True, collate_fn=collate),
    "with workers of its own": lambda: DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1),
    "with persistent workers of its own": lambda: DataLoader(
        Squares(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=3
    ),
    "with a timeout": lambda: DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1, timeout=60),
    "iterable": lambda: DataLoader(Counting(), batch_size=4),
    "of a kind of its own": lambda: Mine(Squares(), batch_size=4, shuffle=True),
}


class Shuffled(torch.utils.data.IterDataPipe):
    """A pipe shuffled by PyTorch's own, whose seed it draws in each pass, also where workers are kept."""

    def __init__(self):
        from torch.utils.data.datapipes.iter import IterableWrapper

        self.rows = IterableWrapper(range(23)).shuffle(buffer_size=9).sharding_filter()

    def __iter__(self):
        yield from self.rows


def piped(num_workers, keeps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DataLoader(Shuffled(), batch_size=4, shuffle=True, num_workers=num_workers, persistent_workers=keeps)


LOADERS["a pipe"] = lambda: piped(0, False)
LOADERS["a pipe with persistent workers"] = lambda: piped(1, True)


def served(make):
    """The loader with a worker, where it has none."""

    def made():
        loader = make()
        if not loader.num_workers:
            loader.num_workers, loader.prefetch_factor = 1, 2
        return loader

    return made


def is_in_one_of_ours():
    """Whether this is one of two workers, where the script has one."""
    info = torch.utils.data.get_worker_info()
    return info is not None and info.num_workers == WORKERS["num_workers"]


@pytest.fixture
def loaders():
    """Installed in place of PyTorch's own iteration, and taken out again."""
    before = vars(DataLoader)["__iter__"]
    owner = Loaders()
    owner.install()
    yield owner
    owner.remove()
    assert vars(DataLoader)["__iter__"] is before
    wait_for_no_children()


def wait_for_no_children():
    deadline = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not multiprocessing.active_children()


def epochs(make, owner=None, num=3, stop_after=None):
    """Hashes of every batch of some epochs with a step after each, and the random states at each epoch's end."""
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    loader = make()
    found, states = [], []
    for _ in range(num):
        hashes = []
        for number, batch in enumerate(loader):
            hashes.append(digest(batch))
            torch.rand(1)  # the training draws as well: dropout
            if owner is not None:
                owner.num_steps += 1
            if number + 1 == stop_after:
                break
        found.append(hashes)
        states.append(RandomStates([loader.generator]))
    return found, states


def agree(plain, changed):
    assert changed[0] == plain[0], "other batches"
    assert all(a.equals(b) for a, b in zip(plain[1], changed[1], strict=True)), "other random states"


# -- equal to plain ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOADERS)
def test_a_watched_loader_is_exactly_the_plain_one(name, loaders):
    watched = epochs(LOADERS[name], loaders)
    loaders.remove()
    agree(epochs(LOADERS[name]), watched)


@pytest.mark.parametrize("name", LOADERS)
def test_workers_of_ours_give_the_same_batches_and_random_streams_over_several_epochs(name, loaders):
    make = served(LOADERS[name])
    plain = epochs(make)
    loaders.change(WORKERS)
    changed = epochs(make, loaders, num=3)
    agree(plain, changed)
    assert bool(loaders.num_changed) == (
        name not in ("with a generator", "iterable", "of a kind of its own", "a pipe", "a pipe with persistent workers")
    )


def test_a_loader_that_equals_others_is_left_to_itself(loaders):
    class Alike(DataLoader):
        def __eq__(self, other):
            return isinstance(other, Alike)

    loaders.change(WORKERS)
    assert [batch["label"].tolist() for batch in Alike(Squares(4), batch_size=4)] == [[0, 1, 2, 3]]
    assert not loaders.passes


def test_what_a_handler_of_a_signal_raises_while_workers_are_waited_for_reaches_the_script(loaders):
    class Alarm(TimeoutError):
        pass

    def alarmed(*_):
        raise Alarm

    def rest():
        torch.manual_seed(5)
        batches = iter(DataLoader(Slow(12), batch_size=4, shuffle=True, num_workers=1))
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(Alarm):
            next(batches)
        return [batch["label"].tolist() for batch in batches]

    former = signal.signal(signal.SIGALRM, alarmed)
    try:
        plain = rest()
        loaders.change(WORKERS)
        assert rest() == plain and loaders.num_changed == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("name", ["shuffled", "with persistent workers of its own", "with a timeout"])
def test_no_workers_at_all_give_the_same_as_the_scripts_own_workers(name, loaders):
    make = served(LOADERS[name])
    plain = epochs(make)
    loaders.change({"num_workers": 0, "persistent_workers": False})
    agree(plain, epochs(make, loaders))


@pytest.mark.parametrize("name", ["shuffled", "with persistent workers of its own", "with a generator"])
def test_workers_that_come_and_go_between_epochs_leave_the_random_streams_as_they_are(name, loaders):
    """Plain draws a seed for each pass, but for workers that the script keeps only once."""
    for settings in (WORKERS, {"num_workers": 0, "persistent_workers": False}):
        loaders.change({})
        plain = epochs(served(LOADERS[name]), num=4)
        torch.manual_seed(7)
        loader = served(LOADERS[name])()
        for epoch in range(4):
            loaders.change(settings if epoch in (0, 2) else {})
            assert [digest(batch) for batch in walked(loader, loaders)] == plain[0][epoch]
            assert plain[1][epoch].torch.equal(torch.get_rng_state())


def walked(loader, owner):
    for batch in loader:
        yield batch
        torch.rand(1)
        owner.num_steps += 1


@pytest.mark.parametrize("name", ["shuffled", "in order"])
def test_a_loop_that_breaks_off_early_sees_the_same(name, loaders):
    plain = epochs(served(LOADERS[name]), stop_after=2)
    loaders.change(WORKERS)
    agree(plain, epochs(served(LOADERS[name]), loaders, stop_after=2))


def test_an_iterator_of_ours_is_no_deeper_after_many_epochs(loaders):
    loaders.change(WORKERS)
    loader = DataLoader(Squares(8), batch_size=4, shuffle=True, num_workers=1)
    for _ in range(5):
        passing = iter(loader)
        for _ in passing:
            loaders.num_steps += 1
    assert isinstance(passing.inner, OurWorkers) and loaders.num_changed == 5


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("stop_after", [2, None])
def test_a_loader_that_draws_from_a_generator_of_the_scripts_is_left_alone(replacement, stop_after, loaders):
    """Workers would reach the end of the order, where plain draws once more, before the script does."""

    def make():
        own = torch.Generator().manual_seed(5)
        sampler = RandomSampler(Squares(24), replacement=replacement, generator=own)
        return DataLoader(Squares(24), batch_size=4, sampler=sampler)

    plain = epochs(make, stop_after=stop_after)
    loaders.change(WORKERS)
    agree(plain, epochs(make, loaders, stop_after=stop_after))
    assert not loaders.num_changed and not loaders.may_change(make())


def test_two_loops_over_one_loader_within_each_other_see_the_same(loaders):
    def nested():
        torch.manual_seed(7)
        loader = DataLoader(Squares(9), batch_size=4, shuffle=True, num_workers=1)
        return [(digest(a), digest(b)) for _ in range(2) for a in loader for b in loader]

    plain = nested()
    loaders.change(WORKERS)
    assert nested() == plain


def test_a_loader_that_keeps_its_workers_has_one_iterator(loaders):
    keeping = DataLoader(Squares(), batch_size=4, num_workers=1, persistent_workers=True)
    for settings in ({}, WORKERS, {"num_workers": 0, "persistent_workers": False}):
        loaders.change(settings)
        passing = iter(keeping)
        assert iter(keeping) is passing
        del passing
    other = DataLoader(Squares(), batch_size=4, num_workers=1)
    assert iter(other) is not iter(other)


def test_workers_that_the_script_keeps_are_kept_beside_those_of_many_other_loaders(loaders):
    problems = []
    loaders.on_failure = lambda stage, problem: problems.append(problem)
    keeping = DataLoader(Squares(), batch_size=4, num_workers=1, persistent_workers=True)
    others = [DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1) for _ in range(3)]
    loaders.change(WORKERS)
    for loader in (keeping, *others):
        loaders.note(loader, 1)
    seen = []
    for _ in range(3):
        passing = iter(keeping)
        seen.append({worker.pid for _ in passing for worker in passing._workers})
        for other in others:
            list(other)
    assert not problems
    assert seen[0] == seen[1] == seen[2]


def test_workers_that_the_script_does_not_keep_begin_anew_at_every_pass(loaders):
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1)
    loaders.change(WORKERS)
    pids = []
    for _ in range(3):
        passing = iter(loader)
        for _ in passing:
            pids.append(frozenset(worker.pid for worker in passing._workers))
            loaders.num_steps += 1
        wait_for_no_children()
    assert len({*pids}) == 3 and {len(found) for found in pids} == {2}
    loaders.change({})
    assert len(iter(loader)._workers) == 1


def test_a_dataset_that_the_script_changes_between_epochs_is_seen_by_workers(loaders):
    def curriculum():
        torch.manual_seed(7)
        dataset = Squares()
        loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=1)
        found = []
        for epoch in range(3):
            dataset.epoch = epoch
            for batch in loader:
                found.append(digest(batch))
                loaders.num_steps += 1
        return found

    plain = curriculum()
    loaders.change(WORKERS)
    assert curriculum() == plain and loaders.num_changed == 3


@pytest.mark.parametrize("settings", [{}, WORKERS, {"num_workers": 0}, {"in_process": True}], ids=str)
@pytest.mark.parametrize(("kept", "trains"), [(False, True), (True, True), (True, False)])
def test_a_dataset_that_the_script_changes_is_seen_as_its_own_workers_see_it(settings, kept, trains, loaders):
    """They have it as it was when they began: at the pass's beginning, or at the first one's where they are kept."""

    def curriculum():
        torch.manual_seed(7)
        inner = TensorDataset(torch.arange(20))
        dataset = Subset(inner, range(20))
        loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=1, persistent_workers=kept)
        if trains:
            loaders.note(loader, 1)
        found = []
        for epoch in range(3):
            inner.tensors = (torch.arange(20) + 100 * epoch,)
            for (batch,) in loader:
                found += batch.tolist()
                inner.tensors = (torch.zeros(20),)
        return found

    loaders.remove()
    plain = curriculum()
    assert {number // 100 for number in plain} == ({0} if kept else {0, 1, 2})
    loaders.install()
    loaders.change(settings)
    assert curriculum() == plain and loaders.num_changed == 3 * bool(settings)


@pytest.mark.parametrize("settings", [WORKERS, {"num_workers": 0}, {"in_process": True}], ids=str)
def test_levers_that_come_after_the_dataset_has_changed_leave_kept_workers_alone(settings, loaders):
    def curriculum():
        torch.manual_seed(7)
        inner = TensorDataset(torch.arange(24))
        loader = DataLoader(inner, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
        found = [batch for (batch,) in loader]
        loaders.note(loader, 1)
        inner.tensors = (torch.arange(100, 124),)
        loaders.change(settings)
        return torch.cat(found + [batch for (batch,) in loader]).tolist()

    loaders.remove()
    plain = curriculum()
    loaders.install()
    loaders.change({})
    problems = []
    loaders.on_failure = lambda stage, problem: problems.append(str(problem))
    assert curriculum() == plain and max(plain) == 23
    assert loaders.num_changed == 0 and len(problems) == 1 and "has changed" in problems[0]


def test_it_is_said_where_the_scripts_kept_workers_begin_too_late(loaders):
    """Nobody has the dataset any more as their copy would have it."""
    problems = []
    loaders.on_failure = lambda stage, problem: problems.append(str(problem))
    inner = TensorDataset(torch.arange(24))
    loader = DataLoader(inner, batch_size=4, num_workers=1, persistent_workers=True)
    loaders.note(loader, 1)
    loaders.change(WORKERS)
    list(loader)
    loaders.change({})
    list(loader)
    assert not problems
    loader = DataLoader(inner, batch_size=4, num_workers=1, persistent_workers=True)
    loaders.note(loader, 1)
    loaders.change(WORKERS)
    list(loader)
    inner.tensors = (torch.arange(100, 124),)
    list(loader)
    assert not problems, "ours are kept"
    loaders.change({})
    list(loader)
    assert len(problems) == 1 and "has changed" in problems[0]


def test_what_items_write_where_workers_would_stays_out_of_the_scripts_dataset(loaders, tmp_path):
    """A file that is opened for the first item must not be shared by workers that begin later."""

    class Lines(Squares):
        def __init__(self, path):
            super().__init__()
            self.path, self.file = path, None

        def __getitem__(self, k):
            if self.file is None:
                self.file = self.path.open()
            return super().__getitem__(k)

    (tmp_path / "lines").write_text("x")
    dataset = Lines(tmp_path / "lines")
    loaders.change({"num_workers": 0})
    for _ in range(2):
        list(DataLoader(dataset, batch_size=4, shuffle=True, num_workers=1))
    assert loaders.num_changed == 2 and dataset.file is None


def test_the_loaders_own_attributes_are_never_seen_changed(loaders):
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1)
    before = dict(vars(loader))
    loaders.change(WORKERS)
    for _ in loader:
        assert dict(vars(loader)) == before


def test_the_scripts_choice_of_prefetching_is_kept(loaders):
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1, prefetch_factor=5)
    loaders.change(WORKERS)
    assert iter(loader)._prefetch_factor == 5


# -- what is left alone --------------------------------------------------------------------------------------------


def test_an_evaluation_in_order_keeps_its_workers_and_a_training_in_order_gets_others_once_it_trains(loaders):
    evaluation, training = (DataLoader(Squares(), batch_size=4, num_workers=1) for _ in range(2))
    loaders.change(WORKERS)
    list(evaluation)
    for _ in training:
        loaders.num_steps += 1
    assert loaders.num_changed == 0
    list(evaluation)
    assert loaders.num_changed == 0
    assert len(iter(training)._workers) == 2


def test_a_shuffled_loader_that_never_trained_gets_no_workers_a_second_time(loaders):
    validation = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1)
    loaders.change(WORKERS)
    list(validation)
    assert loaders.num_changed == 1
    list(validation)
    assert loaders.num_changed == 1


def test_a_dataset_that_holds_a_file_open_is_left_alone(loaders, tmp_path):
    class Lines(Squares):
        def __init__(self, path):
            super().__init__()
            self.parts = {"file": path.open("rb")}

    (tmp_path / "lines").write_bytes(b"x")
    dataset = Lines(tmp_path / "lines")
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=1)
    loaders.change(WORKERS)
    list(loader)
    assert loaders.num_changed == 0 and not loaders.may_change(loader)
    dataset.parts["file"].close()
    assert loaders.may_change(loader)


def test_a_loader_with_a_multiprocessing_context_is_left_alone(loaders):
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert not loaders.may_change(loader)


def test_a_loader_that_gives_batches_as_they_come_is_left_alone(loaders):
    """Were one of ours to break, nobody would know which batches are still to come."""
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=2, in_order=False)
    loaders.change(WORKERS)
    assert len(list(loader)) == 6 and loaders.num_changed == 0


def test_a_loader_that_makes_its_iterator_itself_is_left_alone(loaders):
    class Own(DataLoader):
        def _get_iterator(self):
            self.asked = True
            return super()._get_iterator()

    loader = Own(Squares(), batch_size=4, shuffle=True, num_workers=1)
    loaders.change(WORKERS)
    assert len(list(loader)) == 6 and loader.asked and loaders.num_changed == 0


def test_a_loader_in_a_process_forked_from_here_is_plain(loaders):
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1)
    loaders.change(WORKERS)
    pid = os.fork()
    if pid == 0:
        list(loader)
        os._exit(0 if loaders.num_changed == 0 else 1)
    assert os.waitpid(pid, 0)[1] == 0


# -- when workers break --------------------------------------------------------------------------------------------


class Breaking(Squares):
    """Raises in a worker of ours alone."""

    def __getitem__(self, k):
        if is_in_one_of_ours() and k == 17:
            raise OSError("no such device in this process")
        return super().__getitem__(k)


class Dying(Squares):
    def __getitem__(self, k):
        if is_in_one_of_ours() and k == 17:
            os._exit(3)
        return super().__getitem__(k)


class Unsendable(Squares):
    """Items that a process cannot send to another."""

    def __getitem__(self, k):
        return {**super().__getitem__(k), "how": (lambda: k) if k == 17 else None}


class Lost(Squares):
    def __getitem__(self, k):
        if is_in_one_of_ours() and k == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((50_000,), float(k))


@pytest.mark.parametrize("kind", [Breaking, Dying, Lost])
def test_training_goes_on_in_the_same_order_where_a_worker_breaks(kind, loaders):
    def make():
        return DataLoader(kind(), batch_size=4, shuffle=True, num_workers=1)

    plain = epochs(make)
    problems = []
    loaders.on_failure = lambda stage, problem: problems.append((stage, type(problem)))
    loaders.change(WORKERS)
    agree(plain, epochs(make, loaders))
    assert [stage for stage, _ in problems] == ["step"], "it is refused from then on"


class Permuted(Sampler):
    """Has a random stream of its own, that nobody else knows of; the whole order at once, or as it is asked."""

    def __init__(self, at_once):
        self.at_once = at_once
        self.random = np.random.default_rng(3)

    def __len__(self):
        return 23

    def __iter__(self):
        return iter(self.drawn()) if self.at_once else self.one_by_one()

    def drawn(self):
        return self.random.permutation(23).tolist()

    def one_by_one(self):
        yield from self.drawn()


SAMPLERS = {
    "a random stream of its own": lambda: Permuted(at_once=False),
    "an order drawn at once": lambda: Permuted(at_once=True),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("kind", [Breaking, Dying])
@pytest.mark.parametrize("batch_size", [4, None])
def test_the_order_is_kept_where_a_worker_breaks_and_only_the_sampler_knows_it(name, kind, batch_size, loaders):
    def make():
        options = {"collate_fn": collate} if batch_size else {}
        return DataLoader(kind(), batch_size=batch_size, sampler=SAMPLERS[name](), num_workers=1, **options)

    loaders.remove()
    plain = epochs(make)
    loaders.install()
    problems = []
    loaders.on_failure = lambda stage, problem: problems.append(stage)
    loaders.change(WORKERS)
    agree(plain, epochs(make, loaders))
    assert problems == ["step"]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("settings", [WORKERS, {"num_workers": 0}], ids=str)
def test_a_sampler_that_raises_does_so_at_its_batch(num_workers, settings, loaders):
    class Ending(Permuted):
        def __iter__(self):
            yield from range(12)
            raise OSError("the list of items ends here")

    def seen():
        found = []
        try:
            for batch in DataLoader(Squares(), batch_size=4, sampler=Ending(True), num_workers=num_workers):
                found.append(digest(batch))
        except OSError as problem:
            return [*found, str(problem)]

    loaders.remove()
    plain = seen()
    loaders.install()
    loaders.change(settings)
    assert seen() == plain


def test_training_goes_on_where_workers_cannot_be_started(loaders, monkeypatch):
    plain = epochs(served(LOADERS["shuffled"]))
    problems = []
    loaders.on_failure = lambda stage, problem: problems.append((stage, str(problem)))
    loaders.change(WORKERS)

    def refuse(*_, **__):
        raise OSError("cannot allocate memory")

    monkeypatch.setattr(Process, "start", refuse)
    agree(plain, epochs(served(LOADERS["shuffled"]), loaders))
    assert problems == [("engage", "cannot allocate memory")]


def test_an_item_that_raises_in_plain_raises_the_scripts_own_exception(loaders):
    class Broken(Squares):
        def __getitem__(self, k):
            if k == 17:
                raise KeyError(17)
            return super().__getitem__(k)

    loaders.change(WORKERS)
    with pytest.raises(KeyError) as caught:
        list(DataLoader(Broken(), batch_size=4, shuffle=True))
    assert caught.value.args == (17,), "not a worker's account of it"


# -- in a trial ----------------------------------------------------------------------------------------------------


CHANGES = {
    "other workers": lambda owner: owner.change({"num_workers": 1}),
    "no workers": lambda owner: owner.change({"num_workers": 0}),
    "processes ahead": lambda owner: owner.change({"ahead": 1}),
    "one batch again and again": lambda owner: owner.replay(True),
}
"""What a trial may do in the midst of a pass."""


def longest_pass(make, owner, changes, num=4):
    """How many batches the script collects in each pass while a trial changes something every few steps."""
    loader, steps, found = make(), 0, []
    for _ in range(num):
        seen = []
        for batch in loader:
            seen.append(batch)
            owner.num_steps += 1
            steps += 1
            if steps % 5 == 2:
                changes[steps // 5 % len(changes)](owner)
            elif steps % 5 == 4:
                owner.change({})
                owner.replay(False)
        found.append(len(seen))
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_what_a_script_collects_over_an_epoch_never_grows_beyond_one(change, options, loaders):
    loaders.reopen = True

    def make():
        return DataLoader(Squares(), batch_size=4, shuffle=True, **options)

    assert longest_pass(make, loaders, [CHANGES[change]]) == [6] * 4
    loaders.change({})


@pytest.mark.parametrize("change", CHANGES)
def test_a_script_that_works_out_the_rest_of_an_epoch_meets_no_count_of_zero(change, loaders):
    loaders.reopen = True
    loader, steps = DataLoader(Squares(24), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True), 0
    rest = len(loader) % 4
    for epoch in range(3):
        updates = 0
        for number, _ in enumerate(loader):
            group = rest if number >= len(loader) - rest else 4
            if (number + 1) % group == 0 or number + 1 == len(loader):
                loaders.num_steps += 1
                updates += 1
            steps += 1
            if steps == 5:
                CHANGES[change](loaders)
        assert updates == 2, epoch
    loaders.change({})


def test_a_pass_of_unknown_length_ends_where_its_iterator_does(loaders):
    loaders.reopen = True
    seen = []
    for number, batch in enumerate(DataLoader(Counting(), batch_size=4)):
        seen.append(len(batch))
        loaders.num_steps += 1
        if number in (1, 3):
            loaders.replay(number == 1)
    assert seen == [4, 4, 4, 4, 2], "and the one that was given twice"


def test_passes_over_loaders_that_train_are_counted_and_their_ends_told(loaders):
    told = []
    loaders.on_pass_end = lambda: told.append(loaders.num_steps)
    training, evaluation = (DataLoader(Squares(8), batch_size=4, shuffle=True) for _ in range(2))
    for _ in range(3):
        for _ in training:
            loaders.num_steps += 1
        list(evaluation)
    assert told == [2, 4, 6] and loaders.num_passes == 2, "the first one began before it was known to train"
    assert loaders.training == [training]


@pytest.mark.parametrize(("num_items", "num_smaller"), [(10, 3), (8, 0)])
def test_last_batches_that_are_smaller_than_the_others_are_counted(loaders, num_items, num_smaller):
    loaders.studies = True
    training, evaluation = (DataLoader(Squares(num_items), batch_size=4, shuffle=True) for _ in range(2))
    for _ in range(3):
        for _ in training:
            loaders.num_steps += 1
        list(evaluation)
    assert loaders.num_smaller == num_smaller
    loaders.replay(True)
    for _ in training:
        loaders.num_steps += 1
    assert loaders.num_smaller == num_smaller, "one batch again and again"


def test_where_data_are_free_a_pass_begins_no_workers(loaders):
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=2)
    for _ in loader:
        loaders.num_steps += 1
    loaders.replay(True)
    next(iter(loader))
    passing = iter(loader)
    assert [len(batch["x"]) for batch in passing] == [4] * 6 and passing.inner is None
    wait_for_no_children()


def test_workers_change_in_the_middle_of_a_trials_training_pass(loaders):
    loaders.reopen = True
    loader = DataLoader(Squares(80), batch_size=4, shuffle=True, num_workers=1)
    passing, seen = iter(loader), []
    for number in range(18):
        next(passing)
        loaders.num_steps += 1
        seen.append(len(passing._workers))
        if number == 5:
            loaders.change(WORKERS)
        if number == 11:
            loaders.change({})
    assert seen == [1] * 6 + [2] * 6 + [1] * 6
    assert len(list(passing)) == 2
    wait_for_no_children()


def test_in_a_run_a_pass_under_way_keeps_what_it_began_with(loaders):
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1)
    passing = iter(loader)
    next(passing)
    loaders.num_steps += 1
    loaders.change(WORKERS)
    next(passing)
    loaders.num_steps += 1
    assert len(passing._workers) == 1
    assert len(iter(loader)._workers) == 2


def test_an_evaluation_pass_under_way_is_not_opened_again(loaders):
    loaders.reopen = loaders.studies = True
    passing = iter(DataLoader(Squares(), batch_size=4))
    first = next(passing)
    loaders.change(WORKERS)
    assert first["label"].tolist() + next(passing)["label"].tolist() == list(range(8))


def test_settings_that_were_changed_there_and_back_open_nothing_again(loaders):
    loaders.reopen = loaders.studies = True
    passing = iter(DataLoader(Squares(), batch_size=4))
    labels = []
    for _ in range(4):
        labels += next(passing)["label"].tolist()
        loaders.num_steps += 1
        loaders.change(WORKERS)
        loaders.change({})
    assert labels == list(range(16))


def test_free_data_hands_out_one_batch_in_new_containers(loaders):
    passing = iter(DataLoader(Squares(), batch_size=4, shuffle=True))
    next(passing)
    loaders.num_steps += 1
    loaders.replay(True)
    first, second = next(passing), next(passing)
    assert first is not second and first["x"] is second["x"]
    first.clear()
    assert "x" in next(passing)
    loaders.replay(False)
    assert not torch.equal(next(passing)["x"], second["x"])


# -- what the script sees of a pass --------------------------------------------------------------------------------


def test_a_pass_looks_like_the_loaders_own_iterator(loaders):
    loader = DataLoader(Squares(), batch_size=4)
    passing = iter(loader)
    assert isinstance(passing, Pass) and iter(passing) is passing and len(passing) == 6
    assert passing._dataset is loader.dataset
    with pytest.raises(AttributeError):
        _ = passing.nothing_of_this_name
    with pytest.raises(AttributeError):
        _ = Pass.__new__(Pass).anything


def test_a_pass_that_is_over_stays_over(loaders):
    passing = iter(DataLoader(Squares(8), batch_size=4))
    assert len(list(passing)) == 2 and list(passing) == []


@pytest.mark.slow
def test_a_whole_script_with_processes_of_ours_ends_with_the_output_of_plain_and_no_process(shuffled_epochs):
    script, plain = SCRIPTS / "shuffled_epochs.py", shuffled_epochs
    watched = warm.run(
        [sys.executable, SCRIPTS / "under_levers.py", '{"ahead": {"num": 2}}', script],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert watched.stdout == plain.stdout and watched.stderr == plain.stderr
    assert "worker" not in plain.stdout


# -- how batches come ----------------------------------------------------------------------------------------------


class Shapes(Squares):
    """One batch an item: views, strides, types and sizes of all kinds."""

    def __getitem__(self, k):
        base = torch.arange(24.0).reshape(2, 3, 4) + k
        grey = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(k))
        return {
            "one memory": (base, base.view(-1), base[:, 1], base.transpose(0, 2)),
            "the same": [grey, grey],
            "strides": grey.repeat(1, 3, 1, 1).to(memory_format=torch.channels_last),
            "types": [
                torch.tensor([k]).to(dtype) for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64)
            ],
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(float(k)),
            "large": torch.full((300_000,), float(k)),
            "many": [torch.full((60_000,), float(k + n)) for n in range(6)],
            "sparse": torch.eye(3).to_sparse(),
            "parameter": torch.nn.Parameter(torch.ones(2) * k),
            "named": np.full(3, k),
            "text": "x" * 100_000,
        }


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_batches_of_every_shape_come_as_they_are(loaders):
    def make():
        return DataLoader(Shapes(), batch_size=None)

    batches = list(make())
    loaders.change(AHEAD)
    loader = make()
    loaders.note(loader, 1)
    for mine, plain in zip(loader, batches, strict=True):
        base, flat, row, turned = mine["one memory"]
        assert len({t.untyped_storage().data_ptr() for t in (base, flat, row, turned)}) == 1
        assert (row.stride(), turned.stride()) == (plain["one memory"][2].stride(), plain["one memory"][3].stride())
        assert mine["the same"][0] is mine["the same"][1]
        assert mine["strides"].is_contiguous(memory_format=torch.channels_last)
        assert isinstance(mine["parameter"], torch.nn.Parameter) and mine["parameter"].requires_grad
        assert torch.equal(mine["sparse"].to_dense(), plain["sparse"].to_dense())
        for name in ("one memory", "types", "empty", "scalar", "large", "many", "named", "text"):
            assert digest(mine[name]) == digest(plain[name]), name
        base.add_(1)
        assert torch.equal(flat, base.reshape(-1)), "views of one memory stay so"
    assert loaders.num_ahead > 10


def test_no_descriptor_is_left_open(loaders):
    loaders.change({**WORKERS, "persistent_workers": False})
    loader = DataLoader(Squares(), batch_size=4, shuffle=True)
    list(loader)
    gc.collect()
    wait_for_no_children()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        list(loader)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


# -- what plain does at which moment ---------------------------------------------------------------------------------


def pairs_of_passes(owner=None, settings=WORKERS, num_workers=0):
    torch.manual_seed(7)
    first, second = (DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=num_workers) for _ in range(2))
    if owner is not None:
        owner.change(settings)
    found = []
    for _ in range(3):
        torch.rand(1)
        one, other = iter(first), iter(second)
        torch.rand(1)
        for a, b in zip(one, other, strict=True):
            found.append((digest(a), digest(b), torch.rand(1).item()))
            if owner is not None:
                owner.num_steps += 1
    return found


@pytest.mark.parametrize(("num_workers", "settings"), [(1, WORKERS), (1, {"num_workers": 0})])
def test_two_passes_opened_before_either_is_fetched_from_draw_as_plain_does(num_workers, settings, loaders):
    plain = pairs_of_passes(num_workers=num_workers)
    assert pairs_of_passes(loaders, settings, num_workers) == plain
    assert loaders.num_changed == 6


@pytest.mark.parametrize("meant", [{"worker_init_fn": lambda number: np.random.seed(3)}, {"timeout": 5}])
def test_workers_that_the_script_means_are_not_done_without(meant, loaders):
    loaders.change({"num_workers": 0})
    list(DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1, **meant))
    assert loaders.num_changed == 0
    list(DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1))
    assert loaders.num_changed == 1


@pytest.mark.parametrize("settings", [{}, WORKERS, {"num_workers": 0}, {"in_process": True}], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_two_loops_over_kept_workers_disturb_each_other_as_they_do_in_plain(settings, shuffle, loaders):
    """Plain has one iterator for both, which the inner loop takes back to the start and uses up."""

    def nested():
        torch.manual_seed(7)
        dataset = TensorDataset(torch.arange(16))
        loader = DataLoader(dataset, batch_size=4, shuffle=shuffle, num_workers=1, persistent_workers=True)
        loaders.note(loader, 1)
        pairs = [(digest(a), digest(b)) for _ in range(2) for a in loader for b in loader]
        return pairs, [digest(pair) for pair in zip(loader, loader, strict=True)], torch.rand(1).item()

    loaders.remove()
    plain = nested()
    assert len(plain[0]) == 8 and len(plain[1]) == 2, "of 32, and of 4"
    loaders.install()
    loaders.change(settings)
    assert nested() == plain
    assert bool(loaders.num_changed) == bool(settings)


def test_training_goes_on_where_a_process_cannot_send_its_batch(loaders):
    loaders.change(AHEAD)
    torch.manual_seed(7)
    loader = DataLoader(Unsendable(), batch_size=2, shuffle=True, collate_fn=collate)
    items = [item for _ in range(2) for batch in loader for item in batch]
    assert sorted(item["label"] for item in items) == sorted([*range(23), *range(23)])
    assert next(item["how"] for item in items if item["label"] == 17)() == 17


class Marked(Squares):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __getitem__(self, k):
        value = torch.complex(torch.tensor([1.0 + k, 2.0]), torch.tensor([3.0, 4.0]))
        if self.kind == "conjugate":
            return value.conj()
        if self.kind == "negative":
            return value.conj().imag
        if self.kind == "quantized":
            return torch.quantize_per_tensor(value.real, 0.1, 0, torch.qint8)
        value.note = "mine"
        return value


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("kind", ["conjugate", "negative", "quantized", "attribute"])
def test_what_pytorch_loses_between_processes_arrives(kind, loaders):
    loaders.on_failure = lambda stage, problem: None
    loaders.change(AHEAD)
    loader = DataLoader(Marked(kind), batch_size=None, sampler=RandomSampler(Squares()))
    torch.manual_seed(3)
    found = list(loader)
    loaders.change({})
    torch.manual_seed(3)
    for mine, plain in zip(found, list(loader), strict=True):
        assert torch.equal(torch.dequantize(mine) if kind == "quantized" else mine,
                           torch.dequantize(plain) if kind == "quantized" else plain)  # fmt: skip
        assert vars(mine) == vars(plain)
