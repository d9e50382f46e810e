"""Does a tensor reach the device as plain would bring it there, in whichever order the device's streams run?"""

import gc
import random
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, RandomSampler, TensorDataset  # noqa: E402

from flatout.frameworks.pytorch.input import budget  # noqa: E402
from flatout.frameworks.pytorch.input.items.item_cache import Column  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import NUM_FIRST  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.input.transfer import rows as rows_module  # noqa: E402
from flatout.frameworks.pytorch.input.transfer.ahead import Known, TensorInfo  # noqa: E402
from flatout.frameworks.pytorch.input.transfer.rows import Rows  # noqa: E402
from flatout.frameworks.pytorch.input.transfer.staging import Staging  # noqa: E402
from flatout.frameworks.pytorch.input.transfer.transfer import MOST_FAILURES, Transfer  # noqa: E402
from flatout.frameworks.pytorch.input.worker_settings import usable  # noqa: E402
from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.seams.calls import Calls  # noqa: E402
from flatout.frameworks.pytorch.session import Session, Unavailable  # noqa: E402
from flatout.records.ceilings import Accelerator  # noqa: E402
from handmade import FACTS, LOADER, MACHINE  # noqa: E402
from streams import FakeDevice, FakeDevices, Stream  # noqa: E402
from unit.pytorch.test_fused_fetch import make  # noqa: E402

CUDA = torch.device("cuda")


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def script(device, monkeypatch):
    yield from engaged(monkeypatch, device)


def engaged(monkeypatch, *devices):
    """A transfer that is engaged in this process; `to` and `cuda` of plain know the fake devices."""
    own = torch.Tensor.to

    def to(self, *args, **kwargs):
        parsed = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        if parsed[0] is None or parsed[0].type != "cuda":
            return own(self, *args, **kwargs)
        copy = devices[parsed[0].index or 0].plain(self)
        return copy if parsed[1] is None else own(copy, parsed[1])

    def cuda(self, device=None, non_blocking=False):
        return devices[device or 0].plain(self)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "cuda", cuda)
    transfer = Transfer(FakeDevices(*devices))
    transfer.engage("prefetch", True)
    yield transfer
    transfer.engage("prefetch", False)
    assert torch.Tensor.to is to and torch.Tensor.cuda is cuda
    assert transfer.why_not is None or transfer.may_fail


Transfer.may_fail = False


def warm(transfer, like, **options):
    """Copies that are looked at, after which ours are given."""
    for _ in range(NUM_FIRST):
        like.clone().to(CUDA, **options)
    assert transfer.num["staged"] == NUM_FIRST


def batch(number, rows=4):
    return torch.full((rows, 3), float(number))


# -- order on the streams ------------------------------------------------------------------------------------------


def train(device, transfer, choose, num=8, *, non_blocking):
    """A script that reuses its batch on the host, and lets go of it on the device while that is still computing."""
    tensor = batch(0)
    for number in range(num):
        tensor.fill_(number)
        there = tensor.to(CUDA, non_blocking=non_blocking)
        tensor.fill_(-1)  # plain has taken what it takes
        device.compute(there, change=lambda one: one.mul_(2))
        del there
        for name in choose(number):
            device.streams[name].run()
    device.synchronize()
    return [one[0, 0].item() for one in device.results[-num:]]


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), non_blocking=st.booleans(), total_bytes=st.sampled_from([2**11, 2**13, 2**26]))
def test_in_whichever_order_streams_run_the_script_computes_with_what_it_copied(seed, non_blocking, total_bytes):
    device = FakeDevice(total_bytes)
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        for transfer in engaged(patch, device):
            warm(transfer, batch(0))
            runs = train(
                device, transfer, lambda _: draw.choices([*device.streams], k=draw.randrange(6)),
                non_blocking=non_blocking,
            )  # fmt: skip
            assert runs == [float(number) for number in range(8)]


@pytest.mark.parametrize("forgotten", ["wait", "in_use"])
def test_the_fake_device_shows_what_would_be_forgotten(forgotten, monkeypatch):
    """Without waiting, and without telling the allocator."""
    device = FakeDevice()
    lazy = {"wait": ["computing"] * 3, "in_use": ["beside"] * 3}[forgotten]
    for transfer in engaged(monkeypatch, device):
        warm(transfer, batch(0))
        device.forgets = (forgotten,)
        assert train(device, transfer, lambda _: lazy, non_blocking=True) != [float(number) for number in range(8)]


def test_a_copy_that_the_host_waits_for_is_there_for_every_stream_and_waits_for_no_computation(device, script):
    warm(script, batch(0))
    device.streams["other"] = Stream("other")
    device.compute(batch(7))  # which nobody runs
    there = batch(5).to(CUDA)
    assert there[0, 0].item() == 5.0, "it has happened before the host went on"
    assert device.streams["computing"].waiting, "and the computation was not waited for"


def test_a_copy_that_the_host_does_not_wait_for_has_the_stream_wait(device, script):
    warm(script, batch(0))
    there = batch(5).to(CUDA, non_blocking=True)
    assert device.streams["beside"].waiting
    device.compute(there)
    device.streams["computing"].run(9)
    assert not device.results, "the computing stream waits for the copy"
    device.streams["beside"].run(9)
    device.streams["computing"].run(9)
    assert device.results[0][0, 0] == 5.0


def test_the_host_runs_no_further_ahead_than_memory_allows():
    device = FakeDevice(total_bytes=32 * 1000)  # room for 1000 bytes
    staging = Staging(device, 2**20)
    given = []
    for number in range(30):
        copy = staging.begin(torch.full((100,), number, dtype=torch.uint8))
        given.append(staging.hand_over(copy, waits=False))
        device.compute(given[-1])
    assert device.streams["computing"].num_done >= 2 * 19 - 1
    assert len(device.streams["computing"].waiting) <= 2 * 11
    assert staging.begin(torch.zeros(1001, dtype=torch.uint8)) is None, "larger than all there may be"
    assert staging.begin(torch.zeros(1000, dtype=torch.uint8), early=True) is None, "nobody waits for what is early"


# -- what takes plain's own way -----------------------------------------------------------------------------------


def ours(transfer, act):
    """Whether a copy of ours is what `act` gives."""
    before = sum(transfer.num.values())
    act()
    return sum(transfer.num.values()) > before


def test_what_is_asked_beyond_a_plain_copy_is_plains(device, script):
    warm(script, batch(0))
    assert ours(script, lambda: batch(1).to(CUDA)) and ours(script, lambda: batch(1).to("cuda:0", torch.float32))
    assert ours(script, lambda: batch(1).cuda()) and ours(script, lambda: batch(1).cuda(0, True))
    assert ours(script, lambda: batch(1).to(device="cuda", non_blocking=True))
    asked = [
        lambda: batch(1).to(CUDA, torch.float16),
        lambda: batch(1).to(CUDA, copy=True),
        lambda: batch(1).to(CUDA, memory_format=torch.contiguous_format),
        lambda: batch(1).to("cpu"),
        lambda: batch(1).to(torch.float64),
        lambda: batch(1).requires_grad_().to(CUDA),
        lambda: torch.nn.Parameter(batch(1)).to(CUDA),
        lambda: batch(1).expand(1, 4, 3)[:, ::2].to(CUDA),
        lambda: batch(1).t()[:2].to(CUDA),
        lambda: torch.empty(0, 3).to(CUDA),
        lambda: torch.zeros(4, 3, dtype=torch.cfloat).conj().to(CUDA),
    ]
    for number, act in enumerate(asked):
        assert not ours(script, act), number
    for call in (batch(1).to, batch(1).cuda):
        with pytest.raises((RuntimeError, TypeError)):
            call("no such thing")


def test_a_copy_has_plains_shape_strides_type_and_history(device, script):
    for like in (
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(7),
        torch.tensor(3.5),
        torch.tensor([True, False]),
        torch.randn(3).bfloat16(),
        torch.randn(5, dtype=torch.complex64),
    ):
        for _ in range(NUM_FIRST + 4):
            there = like.clone(memory_format=torch.preserve_format).to(CUDA)
            device.synchronize()
            assert torch.equal(there, like) and there.stride() == like.stride() and there.dtype is like.dtype
            assert type(there) is torch.Tensor and there.is_leaf and not there._is_view()
    assert script.num["staged"] > 20


def test_page_locked_tensors_of_the_scripts_own_are_plains(device, script):
    """They may be what a copy from the device writes to, in the order of the script's own stream."""
    warm(script, batch(0))
    assert not ours(script, lambda: device.pin(batch(1)).to(CUDA))
    assert not ours(script, lambda: device.pin(batch(1)).to(CUDA, non_blocking=True))


def test_nothing_is_done_while_a_graph_is_captured(device, script):
    warm(script, batch(0))
    device.graph = True
    assert not ours(script, lambda: batch(1).to(CUDA))
    device.graph = False
    assert ours(script, lambda: batch(1).to(CUDA))


def test_nothing_is_done_in_other_threads_or_under_modes(device, script, monkeypatch):
    warm(script, batch(0))

    def in_a_thread():
        thread = threading.Thread(target=lambda: batch(1).to(CUDA))
        thread.start()
        thread.join()

    assert not ours(script, in_a_thread)

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        assert not ours(script, lambda: batch(1).to(CUDA))
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert not ours(script, lambda: batch(1).to(CUDA)), "a process that was forked"


def test_without_memory_on_the_device_plain_copies_and_after_some_times_for_good(device, script):
    script.may_fail = True
    warm(script, batch(0))
    device.out_of_memory = True
    for _ in range(MOST_FAILURES):
        assert script.why_not is None
        assert batch(6).to(CUDA)[0, 0] == 6.0
    assert "none is left" in script.why_not
    device.out_of_memory = False
    assert not ours(script, lambda: batch(1).to(CUDA))


def test_each_device_has_streams_of_its_own(monkeypatch):
    first, second = FakeDevice(), FakeDevice()
    for transfer in engaged(monkeypatch, first, second):
        warm(transfer, batch(0))
        there, elsewhere = batch(1).to("cuda:0"), batch(2).to("cuda:1")
        assert there[0, 0] == 1.0 and elsewhere[0, 0] == 2.0
        assert id(there) in first.owners and id(elsewhere) in second.owners


def test_a_copy_that_differs_from_plains_ends_it_and_plains_is_given(device, script, monkeypatch):
    script.may_fail = True
    monkeypatch.setattr(device, "copy", lambda target, source: None)
    batch(3).to(CUDA)
    assert torch.equal(batch(3).to(CUDA), batch(3))
    assert "copies differ" in script.why_not
    assert not ours(script, lambda: batch(3).to(CUDA))


# -- the methods of a tensor ----------------------------------------------------------------------------------------


def test_tables_of_methods_that_libraries_keep_find_ours_and_the_other_way_round():
    before = {torch.Tensor.to, torch.Tensor.cuda}
    own = torch.Tensor.to
    transfer = Transfer(FakeDevices())
    transfer.engage("prefetch", True)
    try:
        assert torch.Tensor.to is not own
        assert torch.Tensor.to in before and own in {torch.Tensor.to} and torch.Tensor.cuda in before
        assert torch.Tensor.to != torch.Tensor.cuda and torch.Tensor.to.__name__ == "to"
        assert torch.Tensor.to.__doc__ == own.__doc__
        assert torch.Tensor.to(torch.zeros(2), torch.int64).dtype is torch.int64

        seen = []

        class Kind(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                seen.append(function in before)
                return super().__torch_function__(function, types, args, kwargs or {})

        assert type(torch.zeros(2).as_subclass(Kind).to(torch.float64)) is Kind and seen[0] is True
    finally:
        transfer.engage("prefetch", False)
    assert torch.Tensor.to is own and "to" not in vars(torch.Tensor)


COMPILED = """
import torch
from flatout.frameworks.pytorch.input.transfer.transfer import Transfer
transfer = Transfer()
transfer.engage("prefetch", True)
call = torch.compile(lambda x: x.to(torch.float64) + torch.Tensor.to(x, "cpu", non_blocking=True), backend="eager",
                     fullgraph=True)
print(call(torch.ones(2)).tolist())
transfer.engage("prefetch", False)
torch._dynamo.reset()
print(call(torch.ones(2)).tolist())
"""


@pytest.mark.slow
def test_a_compiled_function_copies_as_ever_without_a_break_in_its_graph():
    """In a process of its own: what counts is what the compiler finds when it is used for the first time."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[2.0, 2.0]\n" * 2


# -- what is known of a batch ---------------------------------------------------------------------------------------


def test_a_tensor_is_known_once_and_only_as_it_was():
    known = Known()
    tensor, leaf = batch(1), TensorInfo()
    known.know(tensor, leaf)
    assert known.take(tensor) is leaf and known.take(tensor) is None
    known.know(tensor, leaf)
    tensor.add_(1)
    assert known.take(tensor) is None, "PyTorch counts changes"
    known.know(tensor, leaf)
    tensor.data = batch(2)
    assert known.take(tensor) is None, "it has other memory"
    known.know(tensor, leaf)
    del tensor
    gc.collect()
    assert not len(known)


# -- one batch ahead ------------------------------------------------------------------------------------------------

ITEMS = torch.arange(60.0).view(30, 2)
LABELS = torch.arange(30)


@pytest.fixture
def loaders(device, monkeypatch):
    owner = Loaders()
    owner.install()
    for transfer in engaged(monkeypatch, device):
        owner._transfer = transfer
        yield owner
    owner.remove()


class Patient:
    """The worker's queue has all there is before the next batch is asked for."""

    def __init__(self, loader):
        self.iterator = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        inner, seen = self.iterator.inner, 0
        while seen < 200 and not inner._data_queue.qsize():
            threading.Event().wait(0.005)
            seen += 1
        return next(self.iterator)


def run(loader, device, num=None, *, patient=True):
    found = []
    for number, (x, y) in enumerate(Patient(loader) if patient else loader):
        x, y = x.to(CUDA, non_blocking=True), y.to(CUDA, non_blocking=True)
        device.compute(x)
        device.synchronize()
        found.append((x.clone(), y.clone()))
        if number + 1 == num:
            break
    return found


def test_batches_of_workers_are_copied_one_ahead_in_their_order(loaders, device):
    loader = DataLoader(TensorDataset(ITEMS, LABELS), batch_size=3, num_workers=1)
    found = run(loader, device)
    assert torch.equal(torch.cat([x for x, _ in found]), ITEMS) and torch.equal(
        torch.cat([y for _, y in found]), LABELS
    )
    assert loaders.transfer.num["early"] > 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_whatever_is_ahead_passes_end_break_and_begin_as_plain(loaders, device, num_workers):
    def passes():
        torch.manual_seed(3)
        options = {"shuffle": True, "num_workers": num_workers, "persistent_workers": num_workers > 0}
        loader = DataLoader(TensorDataset(ITEMS, LABELS), batch_size=4, **options)
        found = [run(loader, device, num, patient=False) for num in (None, 3, None)]
        return [y for one in found for _, y in one], torch.get_rng_state()

    ours, our_state = passes()
    loaders.transfer.engage("prefetch", False)
    loaders.remove()
    device.synchronize()
    torch.manual_seed(3)
    plain, state = passes()
    assert torch.equal(torch.cat(ours), torch.cat(plain)) and torch.equal(our_state, state)


class Raises(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i == 7:
            raise ValueError("item 7")
        return torch.tensor(float(i)), torch.tensor(i)


def test_an_error_in_a_batch_taken_early_comes_when_the_script_gets_there(loaders, device):
    found = []
    with pytest.raises(ValueError, match="item 7"):
        for x, _ in Patient(DataLoader(Raises(), batch_size=2, num_workers=1)):
            found.append(x.to(CUDA, non_blocking=True).tolist())
    assert len(found) == 3


def test_a_batch_that_was_changed_meanwhile_is_copied_as_it_is(loaders, device):
    loader = DataLoader(TensorDataset(ITEMS), batch_size=3, num_workers=1)
    found = []
    for number, (x,) in enumerate(Patient(loader)):
        if number % 2:
            x.neg_()
        found.append(x.to(CUDA).clone())
    assert [one[0, 0].item() for one in found] == [6.0 * n * (-1) ** n for n in range(10)]


def test_copies_begun_early_for_a_script_that_moved_on_are_let_go(loaders, device):
    """It copies its batches later than it gets the next."""
    loader = DataLoader(TensorDataset(ITEMS), batch_size=2, num_workers=1)
    kept = []
    for (x,) in Patient(loader):
        kept.append(x)
        if len(kept) > 2:
            kept[-3].to(CUDA)
    assert loaders.transfer.num["early"] == 0
    assert sum(block.until is None for block in device.blocks) == 0, "no memory of the device is held"


@pytest.mark.parametrize(
    "sampler",
    [RandomSampler(range(30), generator=torch.Generator().manual_seed(1)), iter],
)
def test_an_order_of_the_scripts_own_is_not_asked_early(loaders, device, sampler):
    class Told(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(30))

        def __len__(self):
            return 30

    sampler = Told() if sampler is iter else sampler
    run(DataLoader(TensorDataset(ITEMS, LABELS), batch_size=3, num_workers=1, sampler=sampler), device)
    assert loaders.transfer.num["early"] == 0 and loaders.transfer.num["staged"] > 0


def test_an_iterator_of_the_scripts_own_is_followed_as_it_is(loaders):
    class Own(DataLoader):
        def _get_iterator(self):
            return iter([1, 2])

    assert list(Own(TensorDataset(ITEMS))) == [1, 2]


def test_a_released_lever_still_gives_the_batch_that_waits(loaders, device):
    loader = DataLoader(TensorDataset(LABELS), batch_size=3, num_workers=1)
    found = []
    for number, (y,) in enumerate(Patient(loader)):
        found.append(y.to(CUDA).clone())
        if number == 4:
            loaders.transfer.engage("prefetch", False)
    assert torch.equal(torch.cat(found), LABELS)
    loaders.transfer.engage("prefetch", True)


# -- the levers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["device_prefetch", "device_store"])
def test_without_a_device_the_levers_refuse_with_a_reason(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    session = Session(Calls(), Loaders(), registry())
    own = torch.Tensor.to
    with pytest.raises(Unavailable, match="no CUDA device"):
        session.engage(name, {})
    assert torch.Tensor.to is own and not session.engaged
    session.engage_exactly({name: {}, "sample_store": {}})
    assert list(session.engaged) == ["sample_store"], "the others do not pay for it"
    assert session.evidence()[1][name] == "PyTorch finds no CUDA device here"
    session.engage_exactly({})
    assert name not in session.evidence()[1]


def test_the_levers_say_where_they_apply():
    prefetch, store = registry()["device_prefetch"], registry()["device_store"]
    machine = replace(MACHINE, accelerators=(Accelerator(name="GPU", memory_bytes=2**30),))
    assert prefetch.applies(FACTS, machine) == store.applies(FACTS, machine) == "no CUDA device is used"
    facts = replace(FACTS, device="cuda", loaders=(replace(LOADER, why_not={"sample_store": "its items are random"}),))
    assert prefetch.applies(facts, machine) is None and store.applies(facts, machine) == "its items are random"
    facts = replace(facts, loaders=(replace(LOADER, why_not={"sample_store": None}),))
    assert store.applies(facts, machine) is None
    assert prefetch.lacks(machine) is None and "CUDA" in prefetch.lacks(MACHINE) and "CUDA" in store.lacks(MACHINE)


def test_what_the_levers_did_is_told(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    session = Session(Calls(), Loaders(), registry())
    session.loaders._transfer = Transfer(FakeDevices(device))
    session.engage_exactly({"device_prefetch": {}, "device_store": {}})
    assert [*session.evidence()[1]] == ["device_prefetch", "device_store"], "nothing yet"
    session.loaders.transfer.num.update(staged=1000, early=500, gathered=7)
    proofs = session.evidence()[0]
    assert "1,500 tensors copied" in proofs["device_prefetch"] and "500 of them early" in proofs["device_prefetch"]
    assert "7 tensors put together on the GPU" in proofs["device_store"]
    session.engage_exactly({"device_store": {}})
    assert "to" in vars(torch.Tensor), "the other lever needs it still"
    session.engage_exactly({})
    assert "to" not in vars(torch.Tensor) and session.loaders.parts.stored.on_taken is None


# -- kept items on the device ---------------------------------------------------------------------------------------

WORKS = """
def __getitem__(self, i):
    x = torch.from_numpy(self.images[i]).float() / self.n
    return x, int(self.labels[i])
"""


@pytest.fixture
def stored(loaders, tmp_path, monkeypatch):
    """A loader of kept items, whose columns go to the device at their first batch."""
    monkeypatch.setattr(rows_module, "NUM_BEFORE", 0)
    monkeypatch.setattr(budget, "LEAST_FREE_BYTES", 0)
    loaders.parts.fused.engage(True)
    loaders.parts.stored.engage(True)
    loaders.transfer.engage("prefetch", False)
    loaders.transfer.engage("store", True)
    loaders.parts.stored.on_taken = loaders.transfer.gathered
    dataset = make(tmp_path, monkeypatch, WORKS)
    yield DataLoader(dataset, batch_size=6, shuffle=True)
    loaders.transfer.engage("store", False)


def epoch(loader, device, between=lambda number: None):
    """What the device computes with in a pass, beside what the script was given; the script changes its own after."""
    found = []
    for number, (x, y) in enumerate(loader):
        between(number)
        expected = x.clone(), y.clone()
        x, y = x.to(CUDA, non_blocking=True), y.to(CUDA, non_blocking=True)
        device.compute(x, change=lambda one: one.zero_())
        device.compute(y)
        found.append(expected)
    device.synchronize()
    results, device.results = device.results, []
    assert len(results) == 2 * len(found)
    for number, (x, y) in enumerate(found):
        assert torch.equal(results[2 * number], x) and torch.equal(results[2 * number + 1], y)
    return found


def test_kept_items_are_put_together_on_the_device_once_all_of_a_batch_lie_there(loaders, stored, device):
    passes = []
    for _ in range(20):  # how soon items are worth keeping is measured, and takes longer on a busy machine
        before = loaders.transfer.num["gathered"]
        device.log.clear()
        epoch(stored, device)
        passes.append(loaders.transfer.num["gathered"] - before)
        if passes[-1] == 2 * len(stored):
            break
    assert passes[-1] == 2 * len(stored), "every tensor of the pass"
    assert ("scatter", "beside") not in device.log and ("gather", "beside") in device.log


def test_an_item_that_changes_is_followed_on_the_device(loaders, stored, device):
    for number in range(14):
        epoch(stored, device)
        if number == 6:
            before = loaders.transfer.num["gathered"]
            stored.dataset.images[number] += 1
    assert 0 < before < loaders.transfer.num["gathered"]


def test_without_room_for_all_items_on_the_device_batches_are_copied(loaders, stored, device):
    device.free = 100
    for _ in range(4):
        epoch(stored, device)
    assert loaders.transfer.num == {"staged": 0, "early": 0, "gathered": 0} and len(device.blocks) == 0


def test_a_quarter_of_the_device_stays_free_however_much_the_items_take(loaders, stored, device):
    device.free = device.total // 4 + 100
    for _ in range(12):
        epoch(stored, device)
    assert loaders.transfer.num["gathered"] == 0 and len(device.blocks) == 0


def test_items_leave_the_device_for_good_where_the_script_runs_short_of_memory(loaders, stored, device):
    for _ in range(20):
        epoch(stored, device)
        if loaders.transfer.num["gathered"]:
            break
    before, device.retries = loaders.transfer.num["gathered"], 1
    for _ in range(2):
        epoch(stored, device)
    assert 0 < before == loaders.transfer.num["gathered"]


def test_where_memory_for_the_items_is_refused_batches_are_copied(loaders, stored, device):
    loaders.transfer.engage("prefetch", True)
    device.out_of_memory = True
    loaders.transfer.may_fail = True
    for _ in range(3):
        epoch(stored, device)
    assert loaders.transfer.num["gathered"] == 0


def test_a_batch_lies_on_the_device_when_all_of_its_rows_have_arrived_there():
    column = Column(torch.arange(6.0).view(3, 2), 3)
    device, rows = FakeDevice(), Rows(column, np.array([0, 2]))
    column.num_arrived = rows_module.NUM_BEFORE
    device.free = 2**40
    mirror = rows.look(device)
    assert mirror is not None and not mirror.covers(rows.places)
    mirror.has(rows.places)
    assert mirror.covers(rows.places) and not mirror.covers(np.arange(3))
    assert rows.look(FakeDevice()) is None, "it lies on one device"


# -- page-locked batches --------------------------------------------------------------------------------------------


def test_without_cuda_in_use_no_loader_pins_and_nobody_is_warned(watch, recwarn):
    watched = watch({"pinned_memory": {}})
    list(DataLoader(TensorDataset(ITEMS), batch_size=5, shuffle=True))
    list(DataLoader(TensorDataset(ITEMS), batch_size=5, shuffle=True, num_workers=1))
    assert not [w for w in recwarn if "pin_memory" in str(w.message)]
    assert watched.pytorch.loaders.num_changed == 0


def test_where_the_script_uses_cuda_its_loaders_are_opened_pinned(watch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    settings, loader = {"num_workers": 1, "pin_memory": True}, DataLoader([1])
    assert usable(settings, loader) == settings
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert usable(settings, loader) == {"num_workers": 1}


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.zeros(1, device="cuda")
    loaders = Loaders()
    loaders.install()
    session = Session(Calls(), loaders, registry())
    yield session
    session.engage_exactly({})
    loaders.remove()


BIG = torch.arange(64.0 * 3 * 64 * 64 * 8).view(64 * 8, 3, 64, 64)


def training(loader, *, non_blocking, num_passes=3, waits=False):
    """Sums that depend on every value, by a device that is kept busy, so that copies and computation overlap."""
    weight = torch.randn(2048, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    found, seen = [], []
    for _ in range(num_passes):
        for x, y in loader:
            x, y = x.to("cuda", non_blocking=non_blocking), y.to("cuda", non_blocking=non_blocking)
            for _ in range(3):
                weight = (weight @ weight).sigmoid() - 0.5
            found.append(torch.stack([x.double().sum(), x.double().square().sum(), y.double().sum()]))
            seen.append(y)
            x.zero_()
            if waits:
                torch.cuda.synchronize()
    return torch.stack(found).cpu(), torch.cat(seen).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_on_a_gpu_a_script_computes_with_the_same_batches(cuda, num_workers, pin_memory, non_blocking, waits):
    def run_once():
        torch.manual_seed(5)
        options = {"batch_size": 64, "shuffle": True, "num_workers": num_workers, "pin_memory": pin_memory}
        loader = DataLoader(TensorDataset(BIG, torch.arange(len(BIG))), **options)
        return training(loader, non_blocking=non_blocking, waits=waits)

    plain = run_once()
    cuda.engage("device_prefetch", {})
    ours = run_once()
    assert torch.equal(ours[0], plain[0]) and torch.equal(ours[1], plain[1])
    transfer = cuda.loaders.transfer
    assert transfer.why_not is None
    assert sum(transfer.num.values()) or (pin_memory and non_blocking and not num_workers)


@pytest.mark.gpu
def test_on_a_gpu_kept_items_are_put_together_there(cuda, tmp_path, monkeypatch):
    dataset = make(tmp_path, monkeypatch, WORKS)
    cuda.engage_exactly({"sample_store": {}, "device_store": {}, "device_prefetch": {}})
    monkeypatch.setattr(rows_module, "NUM_BEFORE", 2)
    loader, transfer = DataLoader(dataset, batch_size=6, shuffle=True), cuda.loaders.transfer
    for _ in range(20):  # of one loader: what is kept is kept for it
        for x, y in loader:
            assert torch.equal(x.to("cuda").cpu(), x) and torch.equal(y.cuda().cpu(), y)
    assert transfer.why_not is None and transfer.num["gathered"] > 0


@pytest.mark.gpu
def test_on_a_gpu_a_graph_can_be_captured_while_the_lever_is_engaged(cuda):
    cuda.engage("device_prefetch", {})
    x = torch.ones(64, 64)
    for _ in range(4):
        static = x.to("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static * 2
    graph.replay()
    assert torch.equal(out.cpu(), x * 2)


@pytest.mark.gpu
def test_on_a_gpu_other_streams_see_what_the_host_waited_for(cuda):
    cuda.engage("device_prefetch", {})
    other = torch.cuda.Stream()
    for number in range(20):
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(5):
            busy = busy @ busy
        there = torch.full((64, 3, 64, 64), float(number)).to("cuda")
        with torch.cuda.stream(other):
            total = there.sum()
        other.synchronize()
        assert total.item() == number * there.numel()
    assert cuda.loaders.transfer.num["staged"] > 0


def test_an_iterator_of_the_scripts_that_has_no_hash_is_followed_as_any():
    class Unhashed:
        __hash__ = None

    assert Transfer(FakeDevices()).following(Unhashed(), lambda _: 3) == 3


def test_where_the_script_copies_back_without_waiting_copies_that_wait_are_plains(device, script, monkeypatch):
    """Such a script may read what came back after its next copy to the device, which in plain waits for both."""
    warm(script, batch(0))
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: self.dtype is not torch.float64))
    torch.zeros(2, dtype=torch.float64).to("cpu", non_blocking=True)
    assert not ours(script, lambda: batch(1).to(CUDA))
    assert ours(script, lambda: batch(1).to(CUDA, non_blocking=True)), "this one never waited"
