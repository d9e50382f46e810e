"""Are numbers compared rightly where a device computes them? It adds in another order each time, and its memory ends.

No GPU is needed: models compute on the CPU, and what is asked of a device is answered by the test.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flatout.frameworks.pytorch.numerics import rounding, truth  # noqa: E402
from flatout.frameworks.pytorch.numerics.masks import Draw, differ_by_type  # noqa: E402
from flatout.frameworks.pytorch.numerics.room import LEAST_BYTES, NoRoom, place_for, room_bytes  # noqa: E402
from flatout.frameworks.pytorch.numerics.updates import Moved, Snapshot, updated  # noqa: E402
from flatout.frameworks.pytorch.observe import devices  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402
from flatout.judge import agreement  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "claims"))

from numerics_planting import NAME, around, planted  # noqa: E402

from simulated_device import SimulatedDevice  # noqa: E402

GB = 10**9
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory", 2),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL Error 1: unhandled cuda error, Cuda failure 2 'out of memory'"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
    MemoryError(),
]


@pytest.fixture
def device(monkeypatch):
    """A device of 80 GB of which 10 are free and 5 in PyTorch's hands; its `calls.device` is for the test to set."""
    state = SimpleNamespace(free=10 * GB, reserved=8 * GB, peak=3 * GB, capability=(9, 0), asked=[])
    SimulatedDevice().stands_in(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # as it is from the start; ceilings set it otherwise

    def stand_in(name, answer):
        def ask(device=None):
            state.asked.append((name, device))
            return answer()

        monkeypatch.setattr(torch.cuda, name, ask)

    stand_in("synchronize", lambda: None)
    stand_in("mem_get_info", lambda: (state.free, 80 * GB))
    stand_in("memory_reserved", lambda: state.reserved)
    stand_in("max_memory_allocated", lambda: state.peak)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: state.capability)
    monkeypatch.setattr(truth, "slowdown", lambda dtype, convolves, device: 2.0)
    return state


def compared(watch, model, plant, *, class_="rounding", check="gradients", on_device=False, make=None, shape=(6, 4)):
    """What is said of a planted lever on a model, at one point of training, and what was measured."""
    watched = watch()
    watched.pytorch.session.levers[NAME] = planted(plant, class_, check)
    optimizer = (make or (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)))(model.parameters())
    watched.compare(4, {NAME: {}}, check)
    for step in range(8):
        watched.pytorch.calls.device = "cuda:1" if on_device and step > 1 else "cpu"
        optimizer.zero_grad()
        model(torch.randn(*shape)).pow(2).mean().backward()
        optimizer.step()
    watched.pytorch.calls.device = "cpu"
    (answer,) = watched.answers
    return agreement.judge([answer], class_, [check]), answer


def nothing(session):
    return lambda: None


def mlp(*more):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *more, nn.Linear(8, 3))


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_a_quarter_of_what_is_free_where_a_step_needs_most_may_be_kept(device, monkeypatch):
    assert room_bytes("cuda") == (10 + 8 - 3) * GB // 4
    device.free, device.reserved = 0, device.peak
    assert room_bytes("cuda") == LEAST_BYTES
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.room.free_memory_bytes", lambda: 64 * GB)
    assert 10 * GB < room_bytes("cpu") <= 16 * GB
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.room.free_memory_bytes", lambda: None)
    assert room_bytes("cpu") == LEAST_BYTES


@pytest.mark.parametrize("check", ["gradients", "updates"])
def test_memory_and_waiting_are_those_of_the_device_that_trains_and_not_of_the_current_one(watch, device, check):
    assert compared(watch, mlp(), nothing, check=check, on_device=True)[0].verdict == "agrees"
    assert {where for _, where in device.asked} == {torch.device("cuda", 1)}


def test_autocast_is_that_of_whatever_accelerator_there_is(watch, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("xpu"))
    assert devices.kinds() == ("cpu", "xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    assert devices.kinds() == ("cpu",)


def test_what_is_larger_than_the_least_is_compared_where_memory_is_free(watch, monkeypatch):
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.room.free_memory_bytes", lambda: 16 * GB)
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.room.LEAST_BYTES", 100)
    assert compared(watch, mlp(), nothing)[0].verdict == "agrees"
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.room.free_memory_bytes", lambda: 0)
    assert compared(watch, mlp(), nothing)[0].verdict == "inconclusive"


def test_what_does_not_fit_is_inconclusive_and_says_the_limit(watch, device, monkeypatch):
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.room.LEAST_BYTES", 100)
    device.free, device.reserved = 400, device.peak
    found, _ = compared(watch, mlp(), nothing, on_device=True)
    assert found.verdict == "inconclusive" and "(0.0 GB, by what is free)" in found.detail


def test_what_has_no_room_on_the_device_lies_on_the_host_and_else_that_is_said(device, monkeypatch):
    tensor = torch.empty(3, device="meta")
    assert place_for(3 * GB, "cuda", "they")(tensor) is tensor
    moved = []
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.room.free_memory_bytes", lambda: 32 * GB)
    place_for(4 * GB, "cuda", "they")(SimpleNamespace(cpu=lambda: moved.append(1)))
    assert moved == [1]
    with pytest.raises(NoRoom, match=r"they take 9\.0 GB, more than a quarter .* \(3\.8 GB\) .* \(\d\.\d GB\)"):
        place_for(9 * GB, "cuda", "they")


@pytest.mark.parametrize("problem", OUT_OF_MEMORY, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("check", ["gradients", "updates"])
def test_out_of_memory_while_comparing_is_inconclusive_whoever_says_it(watch, monkeypatch, check, problem):
    def fail(*args, **options):
        raise problem

    for name in ("replay.Replayed.keep_outputs", "updates.RandomStates"):
        monkeypatch.setattr(f"flatout.frameworks.pytorch.numerics.{name}", fail)
    found, answer = compared(watch, mlp(), nothing, check=check)
    assert found.verdict == "inconclusive" and "memory ran out" in found.detail, found.detail
    assert answer.differences == ()


def test_out_of_memory_while_the_truth_or_a_sum_is_computed_decides_nothing(watch, monkeypatch):
    def fail(*args, **options):
        raise OUT_OF_MEMORY[0]

    class Scaled(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, gradient: 1.01 * gradient)

    scaled = around(lambda module, compute, args, kwargs: Scaled.apply(compute(*args, **kwargs)))
    assert compared(watch, mlp(), scaled)[0].verdict == "disagrees"
    monkeypatch.setattr(truth, "_wide", fail)
    assert compared(watch, mlp(), scaled)[0].verdict == "inconclusive"
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.replay._backward", fail)
    assert compared(watch, mlp(), nothing)[0].verdict == "inconclusive"


def test_the_scripts_own_step_goes_on_where_no_memory_is_left_to_keep_its_gradients(watch, monkeypatch):
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.capture.Gradients", dict, raising=False)
    clone = torch.Tensor.clone

    def fails(tensor, *args, **options):
        if sys._getframe(1).f_code.co_name in ("_copies", "<dictcomp>"):
            raise OUT_OF_MEMORY[0]
        return clone(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "clone", fails)
    assert compared(watch, mlp(), nothing)[0].verdict == "agrees"


class Counted(TorchDispatchMode):
    """The most bytes of tensors of a size or more that were alive at a time, of those that went through it."""

    def __init__(self, least):
        super().__init__()
        self.least, self.alive, self.most = least, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage):
        from torch.multiprocessing.reductions import StorageWeakRef

        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        if storage.nbytes() >= self.least:
            self.alive.setdefault(storage.data_ptr(), (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(num for _, num in self.alive.values()))


def test_updates_keep_one_snapshot_and_one_copy_and_look_at_the_rest_where_it_lies(watch):
    num_layers, num_bytes = 10, 4 * 300 * 300
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(num_layers)))
    watched = watch()
    watched.pytorch.session.levers[NAME] = planted(nothing, "rounding", "updates")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    counted = Counted(num_bytes // 2)

    def begin():
        watched.pytorch.begin_capture()

        def look():
            with counted:
                watched.answers.append(watched.pytorch.compare({NAME: {}}, ("updates",)))

        watched.listener.waiting = look

    watched.at(4, begin)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(2, 300)).pow(2).mean().backward()
        optimizer.step()
    assert watched.difference("updates").error == 0
    # the script's parameter, gradient and two moments, and a copy; what plain did to parameter and moments; and, of one
    # parameter, what is computed in double
    assert counted.most <= ((4 + 4 + 3) * num_layers + 12) * num_bytes


def test_a_snapshot_elsewhere_puts_back_what_was_there(watch, monkeypatch):
    places = []

    def elsewhere(num_bytes, device, what):
        places.append((num_bytes, device))
        return lambda tensor: tensor.to("cpu", copy=True)

    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.updates.place_for", elsewhere)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
    session, snapshot = watch().pytorch.session, Snapshot([optimizer], "cuda")
    kept = updated(session, [optimizer], snapshot, lambda: Moved([optimizer], snapshot, "cuda"))
    assert all(bool(value.abs().max() > 0) for value in kept.parameters.values()) and len(kept.states) == 6
    assert places == [(4 * 10 * 4 + 2 * 4, "cuda"), (3 * 10 * 4 + 2 * 4, "cuda")]
    for state in optimizer.state.values():
        del state["exp_avg"]
        state["step"] = torch.zeros(2)
    snapshot.restore()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for parameter, state in moments.items():
        assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state.items())


# -- an order of its own each time ------------------------------------------------------------------------------------


class Unsteady(torch.autograd.Function):
    """Adds in another order each time: gradients that differ by a ten thousandth."""

    generator = torch.Generator()

    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        noise = torch.randn(gradient.shape, generator=Unsteady.generator)
        return gradient * (1 + ctx.size * noise), None


def unsteady(size):
    return around(lambda module, compute, args, kwargs: Unsteady.apply(compute(*args, **kwargs), size))


class Overwrites(torch.autograd.Function):
    """Where two backward passes meet, what the first one left counts for nothing."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        if ctx.weight.grad is not None:
            ctx.weight.grad.zero_()
        return gradient @ ctx.weight, gradient.T @ x


def test_gradients_that_differ_by_the_order_of_a_device_are_no_fault(watch):
    found, answer = compared(watch, mlp(), unsteady(1e-4), class_="precision")
    assert found.verdict == "agrees", found.detail
    assert answer.differences[0].fault == ""


def test_noise_of_plain_is_no_fault_of_a_lever_that_changes_nothing(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return Unsteady.apply(self.inner(x), 1e-4)

    for class_ in ("exact", "precision"):
        found, answer = compared(watch, Net(), nothing, class_=class_)
        assert found.verdict == "agrees" and answer.differences[0].baseline_error > 1e-5, found.detail


def test_buffers_that_differ_from_run_to_run_count_as_noise_of_plain(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            out = self.inner(x)
            noise = torch.randn(3, generator=Unsteady.generator)
            self.mean.mul_(0.9).add_(out.detach().mean(0) * (1 + 1e-5 * noise))
            return out

    found, answer = compared(watch, Net(), nothing, class_="exact")
    assert answer.differences[0].baseline_error > 0
    assert found.verdict == "agrees", found.detail


@pytest.mark.parametrize("size", [0.0, 1e-4, 1e-2])
def test_gradients_that_do_not_add_up_are_a_fault_however_unsteady_they_are(watch, size):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return x @ self.weight.T

    def change(module, compute, args, kwargs):
        return Unsteady.apply(Overwrites.apply(args[0], module.weight), size)

    watched, model = watch(), Twice()
    watched.pytorch.session.levers[NAME] = planted(around(change), "precision", "gradients")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched.compare(4, {NAME: {}})
    for _ in range(8):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()
    assert "do not add up" in watched.difference().fault


# -- half a batch ------------------------------------------------------------------------------------------------------


class Gathering(nn.Module):
    def __init__(self, kept=None):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        if kept is not None:
            self.register_buffer("places", kept)

    def forward(self, x, places=None):
        places = self.places if places is None else places
        return self.layer(x) + self.layer(x[places % len(x)])


@pytest.mark.parametrize(
    ("on_device", "places", "kept", "is_scaled"),
    [
        (True, [7, 1, 0], False, False),
        (True, [7, 1, 0], True, False),
        (True, [3, 1, 0, 0, -4, 1, 2, 3], False, True),
        (True, [3, -5, 0, 0, 1, 1, 2, 3], False, False),
        (False, [7, 1, 0, 2, 3, 4, 5, 6], False, True),
    ],
    ids=["an index", "one that is kept", "within half", "from the end", "on a CPU"],
)
def test_on_a_device_no_index_can_lie_in_the_half_that_is_cut(watch, device, on_device, places, kept, is_scaled):
    places = torch.tensor((places * 8)[:8])
    model, watched = Gathering(places if kept else None), watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def begin():
        watched.pytorch.begin_capture()
        watched.listener.waiting = lambda: watched.answers.append(watched.pytorch.scale())

    watched.at(4, begin)
    for step in range(8):
        watched.pytorch.calls.device = "cuda:1" if on_device and step > 1 else "cpu"
        model(torch.randn(8, 4), *(() if kept else (places,))).sum().backward()
        optimizer.step()
    watched.pytorch.calls.device = "cpu"
    assert (watched.answers[0] is not None) == is_scaled


# -- TF32 --------------------------------------------------------------------------------------------------------------


class Tf32(TorchDispatchMode):
    """Inputs of convolutions lose 13 bits of mantissa, which are cut off or rounded away."""

    added = 0x1000

    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in func._schema.name:
            args = tuple(
                self._coarse(a) if isinstance(a, torch.Tensor) and a.dtype == torch.float32 else a for a in args
            )
        return func(*args, **(kwargs or {}))

    def _coarse(self, tensor):
        return ((tensor.contiguous().view(torch.int32) + self.offset) & ~0x1FFF).view(torch.float32)


def images(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


class Convolving(nn.Module):
    """Plain rounds them away, as one kernel does."""

    def __init__(self, seed):
        super().__init__()
        self.inner = images(seed)

    def forward(self, x):
        with Tf32(Tf32.added):
            return self.inner(x)


def rounds_otherwise(session):
    """As another kernel does: it cuts them off."""
    Tf32.added = 0

    def undo():
        Tf32.added = 0x1000

    return undo


def test_two_kernels_that_round_to_tf32_in_their_own_ways_agree(watch, device):
    def word(seed):
        found, answer = compared(watch, Convolving(seed), rounds_otherwise, on_device=True, shape=(8, 3, 16, 16))
        assert answer.differences[0].error > 1e-5
        return found.verdict

    assert [word(seed) for seed in range(3)] == ["agrees"] * 3
    device.capability = (7, 5)
    assert "disagrees" in [word(seed) for seed in range(3)], "there is no TF32"


def test_the_unit_of_a_type_is_tf32s_where_an_operation_of_the_model_may_compute_in_it(device, recwarn):
    def unit(module, device="cuda"):
        call = SimpleNamespace(module=module)
        return rounding.epsilon_of(SimpleNamespace(call=call, device=device, autocast_dtypes=set()))

    single = torch.finfo(torch.float32).eps
    assert unit(images(0)) == rounding.TF32 == 2.0**-10
    assert unit(images(0), "cpu") == single and unit(mlp()) == single
    assert unit(nn.LSTM(2, 2)) == rounding.TF32
    assert unit(images(0).bfloat16()) == torch.finfo(torch.bfloat16).eps
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = False
        assert unit(images(0)) == single
        torch.backends.cuda.matmul.allow_tf32 = True
        assert unit(mlp()) == rounding.TF32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    old = SimpleNamespace(allow_tf32=True)
    assert rounding._allowed(None, old) and rounding._allowed(old, old)
    assert not recwarn.list


# -- the truth ---------------------------------------------------------------------------------------------------------


def test_float64_is_computed_only_where_a_product_says_that_it_can_be_afforded(watch, device, monkeypatch):
    class Scaled(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, gradient: 1.01 * gradient)

    scaled = around(lambda module, compute, args, kwargs: Scaled.apply(compute(*args, **kwargs)))
    asked = []

    def slow(dtype, convolves, device):
        asked.append((dtype, convolves))
        return 1e9

    assert compared(watch, mlp(), scaled, on_device=True)[1].differences[0].truth_error is not None
    monkeypatch.setattr(truth, "slowdown", slow)
    assert compared(watch, mlp(), scaled)[1].differences[0].truth_error is not None, "on a CPU nothing is asked"
    assert not asked
    found = compared(watch, mlp(), scaled, on_device=True)[1].differences[0]
    assert found.truth_error is None and "would take too long" in found.detail
    assert set(asked) == {(torch.float32, False)}


def test_a_product_and_a_convolution_tell_how_much_longer_float64_takes(monkeypatch):
    monkeypatch.setattr(truth, "PROBE_ROWS", 64)
    monkeypatch.setattr(torch, "conv2d", lambda *_: None)
    took = {torch.float64: 3.0, torch.float32: 0.5, torch.bfloat16: 0.1}
    monkeypatch.setattr(
        truth,
        "_seconds",
        lambda compute, args, dtype: took[dtype] * (4 if compute is not torch.mm and dtype is torch.float64 else 1),
    )
    truth.slowdown.cache_clear()
    assert truth.slowdown(torch.float32, False, "cpu") == 6.0
    assert truth.slowdown(torch.bfloat16, True, "cpu") == pytest.approx(120.0)
    monkeypatch.undo()
    truth.slowdown.cache_clear()
    monkeypatch.setattr(truth, "PROBE_ROWS", 64)
    assert 1.0 <= truth.slowdown(torch.float32, True, "cpu") < 1000.0
    truth.slowdown.cache_clear()


# -- masks -------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("flatout_test::masked", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def masked(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keep = torch.rand(x.shape) > 0.3
    keep = keep.flip(0) if x.dtype == torch.bfloat16 else keep  # a kernel of another width
    return x * keep / 0.7, keep


@masked.register_fake
def _(x):
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


masked.register_autograd(
    lambda ctx, gradient, _: gradient * ctx.saved_tensors[0].to(gradient.dtype) / 0.7,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Dropout(nn.Module):
    def forward(self, x):
        return masked(x)[0]


def narrow(module, compute, args, kwargs):
    with torch.autocast("cpu", torch.bfloat16):
        return compute(*args, **kwargs).float()


def redrawn(module, compute, args, kwargs):
    torch.rand(1)
    return narrow(module, compute, args, kwargs)


def without_masks(module, compute, args, kwargs):
    module[2].eval()
    module[2].forward = lambda x: x.clone()
    try:
        return narrow(module, compute, args, kwargs)
    finally:
        del module[2].forward
        module[2].train()


def wide(*more):
    return nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 32), *more, nn.Linear(32, 3))


def test_masks_that_differ_by_the_type_alone_are_inconclusive(watch):
    found, _ = compared(watch, wide(Dropout()), around(narrow), class_="precision")
    assert found.verdict == "inconclusive" and "other masks from the same random state" in found.detail


@pytest.mark.parametrize(
    ("dropout", "change"),
    [(Dropout, redrawn), (Dropout, without_masks), (lambda: nn.Dropout(0.3), redrawn)],
    ids=["drawn before", "not drawn", "dropout of PyTorch"],
)
def test_masks_that_differ_for_another_reason_still_disagree(watch, dropout, change):
    found, _ = compared(watch, wide(dropout()), around(change), class_="precision")
    assert found.verdict == "disagrees", found.detail


def test_only_what_differs_in_nothing_but_its_type_differs_by_it():
    def draw(dtype=torch.float32, mask=(1, 0, 1, 1), before=0, after=1, stride=(1,)):
        return Draw(kind=(dtype, stride), masked=torch.tensor(mask).bool(), before=at[before], after=at[after])

    at = {number: torch.manual_seed(number) and RandomStates() for number in range(3)}
    plain, flipped = [draw(), draw(before=1, after=2)], {"mask": (1, 1, 0, 1)}
    assert not differ_by_type([draw(torch.bfloat16), draw(torch.bfloat16, before=1, after=2)], plain)
    assert differ_by_type([draw(torch.bfloat16, **flipped)], plain)
    assert differ_by_type([draw(), draw(torch.bfloat16, before=1, after=0)], plain), "as many, and others after it"
    assert not differ_by_type([draw(**flipped)], plain), "the type is the same"
    assert not differ_by_type([draw(torch.bfloat16, before=2, **flipped)], plain), "something was drawn before"
    assert not differ_by_type([draw(torch.bfloat16, stride=(2,), **flipped)], plain), "it lies otherwise"
    assert not differ_by_type([draw(**flipped), draw(torch.bfloat16, before=1, **flipped)], plain), "not the first"
    assert not differ_by_type([], plain)


def test_dropout_of_pytorchs_that_draws_the_same_masks_in_both_types_is_compared(watch):
    found, answer = compared(watch, wide(nn.Dropout(0.3)), around(narrow), class_="precision")
    assert answer.differences and answer.differences[0].random_states_equal, found.detail
