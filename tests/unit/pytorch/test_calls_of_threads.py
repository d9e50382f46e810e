"""Do calls of several threads count, give plain's answers under every lever, and leave each other alone?"""

import copy
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from answering import Net  # noqa: E402
from flatout.frameworks.pytorch.seams import gate as gates  # noqa: E402
from flatout.frameworks.pytorch.seams.gate import CallsUnderWay, Gate  # noqa: E402
from flatout.judge.agreement import judge  # noqa: E402

pytestmark = pytest.mark.usefixtures("whatever_runs_the_tests_trains")

NUM_THREADS, BATCHES = 8, (1, 2, 3, 5, 8)
LEVERS = [{"channels_last": {}}, {"inference_mode": {}}, {"threads": {"num": 2}}, {}]


def asked(net, plain, num_calls, *, seed):
    """Calls with inputs and a gradient mode that depend on the thread and the call; which were wrong."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(batch, 3, 8, 8, generator=generator) for batch in BATCHES]
    with torch.no_grad():
        expected = [plain(x) for x in inputs]
    wrong = []
    for number in range(num_calls):
        n = (number * 7 + seed) % len(inputs)
        with torch.set_grad_enabled(seed % 2 == 1):
            out = net(inputs[n])
        apart = (out.detach() - expected[n]).abs().max().item()
        if apart > 1e-4 or out.requires_grad != (seed % 2 == 1):
            wrong.append((number, n, apart, out.requires_grad))
        if number % 50 == 0:
            with pytest.raises(RuntimeError, match="channels"):
                net(torch.ones(1, 4, 8, 8))
    return wrong


def in_threads(net, plain, num_calls):
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        wrong = pool.map(lambda seed: asked(net, plain, num_calls, seed=seed), range(NUM_THREADS))
        return [one for found in wrong for one in found]


def toggled(watched, levers, every):
    """Engage these in turn, each after so many steps more."""

    def engage(step):
        if step % every == 0:
            watched.pytorch.engage(levers[step // every % len(levers)])

    watched.listener.each_step = engage


@pytest.mark.parametrize("num_calls", [100, pytest.param(1250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("runtime", ["", "onnxruntime", "openvino"])
def test_eight_threads_with_mixed_shapes_get_plain_answers_while_levers_come_and_go(watch, runtime, num_calls):
    levers = LEVERS
    if runtime:
        pytest.importorskip(runtime, reason=f"needs {runtime}: pip install 'flatout[onnx,openvino]'")
        pytest.importorskip("onnxscript")
        levers = [{runtime: {}}, {}, {runtime: {}, "threads": {"num": 2}}]
    plain = Net().eval()
    watched, net = watch(trial=not runtime), copy.deepcopy(plain).eval()
    toggled(watched, levers, every=97)
    assert not in_threads(net, plain, num_calls)
    total = NUM_THREADS * num_calls
    assert watched.listener.num_steps + watched.pytorch.num_missed_steps() == total
    assert watched.pytorch.facts().several_threads
    if runtime:
        watched.pytorch.engage(levers[0])
        assert f"calls by {runtime}" in watched.pytorch.evidence()[0][runtime]


POOL = ThreadPoolExecutor(2)


class Split(nn.Module):
    """Computes its parts in other threads."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        halves = [POOL.submit(part, x) for part in (self.left, self.right)]
        return sum(half.result(10) for half in halves)


def test_a_model_that_waits_for_calls_of_other_threads_is_not_kept_from_them_by_an_export(watch, monkeypatch):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'flatout[openvino]'")
    monkeypatch.setattr(gates, "LONGEST_WAIT_S", 0.1)
    watched, net, x = watch(), Split().eval(), torch.ones(2, 8)
    with torch.no_grad():
        for _ in range(12):
            true = net(x)
        watched.pytorch.engage({"openvino": {}})
        found = [net(x) for _ in range(6)]
    assert all(torch.allclose(one, true, rtol=1e-4, atol=1e-5) for one in found)
    assert "TimeoutError" not in repr(watched.listener.failures)
    watched.listener.failures.clear()  # how much of it is exported is the exporter's


def test_numbers_are_compared_though_other_threads_call(watch):
    plain = Net().eval()
    watched, net = watch(), copy.deepcopy(plain).eval()
    watched.compare(60, {"channels_last": {}}, "outputs")
    assert not in_threads(net, plain, 60)
    assert judge(watched.answers, "rounding", ("outputs",)).verdict == "agrees"


def test_operations_are_not_counted_where_several_threads_call(watch):
    plain = Net().eval()
    watched, net, refused = watch(), copy.deepcopy(plain).eval(), []

    def begin():
        try:
            watched.pytorch.begin_census()
        except RuntimeError as problem:
            refused.append(str(problem))

    watched.at(60, begin)
    assert not in_threads(net, plain, 60)
    assert refused == ["several threads call models: operations are not counted"]


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_forked_process_gets_the_models_own_answers(watch, runtime):
    pytest.importorskip(runtime, reason=f"needs {runtime}: pip install 'flatout[onnx,openvino]'")
    watched, net, x = watch(), Net().eval(), torch.ones(1, 3, 8, 8)
    with torch.no_grad():
        for _ in range(12):
            true = net(x)
        watched.pytorch.engage({runtime: {}})
        net(x)
        child = os.fork()
        if not child:
            signal.alarm(20)
            os._exit(0 if torch.equal(net(x), true) and len(net(torch.ones(4, 3, 8, 8))) == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_each_thread_computes_with_the_threads_of_the_lever_and_with_its_own_after_it(watch):
    watched, net, seen = watch(), Net().eval(), {}
    steps = [threading.Barrier(3) for _ in range(6)]

    def call(name, own):
        torch.get_num_threads()  # else the first operation of the thread sets it as it is elsewhere
        torch.set_num_threads(own)
        for n in range(3):
            steps[2 * n].wait()
            with torch.no_grad():
                net(torch.ones(1, 3, 8, 8))
            seen[name, n] = torch.get_num_threads()
            steps[2 * n + 1].wait()

    threads = [threading.Thread(target=call, args=(str(own), own)) for own in (1, 2)]
    with torch.no_grad():
        for _ in range(20):
            net(torch.ones(1, 3, 8, 8))
        for thread in threads:
            thread.start()
        for n, levers in enumerate(({}, {"threads": {"num": 3}}, {})):
            watched.pytorch.engage(levers)
            steps[2 * n].wait()
            steps[2 * n + 1].wait()
    for thread in threads:
        thread.join()
    assert seen == {("1", 0): 1, ("2", 0): 2, ("1", 1): 3, ("2", 1): 3, ("1", 2): 1, ("2", 2): 2}


# -- calls that go together ----------------------------------------------------------------------------------------


def gathered(watched, net, inputs, *, num=20):
    """Answers of as many threads as there are inputs, under the lever."""
    watched.pytorch.engage({"micro_batching": {}})

    def ask(x):
        with torch.no_grad():
            return [net(x) for _ in range(num)]

    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(ask, inputs))


def test_calls_that_come_together_are_computed_as_one_and_each_has_its_rows_for_itself(watch):
    plain = Net().eval()
    watched, net = watch(), copy.deepcopy(plain).eval()
    assert not in_threads(net, plain, 10)
    net.register_forward_pre_hook(lambda *_: time.sleep(0.002))  # long enough for others to come
    inputs = [torch.randn(batch, 3, 8, 8) for batch in (1, 2, 1, 3, 1, 1)]
    found = gathered(watched, net, inputs)
    for x, outs in zip(inputs, found, strict=True):
        assert all(torch.allclose(out, plain(x), atol=1e-5) for out in outs)
        outs[0].zero_()
    pointers = {out.untyped_storage().data_ptr() for outs in found for out in outs}
    assert len(pointers) == 20 * len(inputs)
    assert " batches, " in watched.pytorch.evidence()[0]["micro_batching"]


def test_a_model_whose_rows_depend_on_each_other_answers_call_by_call_and_says_why(watch):
    class Mean(Net):
        def forward(self, x):
            time.sleep(0.002)
            return super().forward(x - x.mean())

    watch.may_fail = True
    plain = Mean().eval()
    watched, net = watch(), copy.deepcopy(plain).eval()
    assert not in_threads(net, plain, 10)
    inputs = [torch.randn(1, 3, 8, 8) for _ in range(4)]
    for x, outs in zip(inputs, gathered(watched, net, inputs), strict=True):
        assert all(torch.allclose(out, plain(x), atol=1e-5) for out in outs)
    ((stage, problem),) = watched.listener.failures
    assert stage == "step" and "depend on each other" in str(problem) and not watched.pytorch.engaged()


def test_a_call_that_raises_raises_in_its_own_thread_alone(watch):
    class Picky(Net):
        def forward(self, x):
            time.sleep(0.002)
            if (x > 90).any():
                raise ValueError("too bright")
            return super().forward(x)

    plain = Picky().eval()
    watched, net = watch(), copy.deepcopy(plain).eval()
    assert not in_threads(net, plain, 10)
    watched.pytorch.engage({"micro_batching": {}})

    def ask(x):
        raised = 0
        for _ in range(20):
            try:
                with torch.no_grad():
                    assert torch.allclose(net(x), plain(x), atol=1e-5)
            except ValueError:
                raised += 1
        return raised

    inputs = [torch.randn(1, 3, 8, 8) for _ in range(3)] + [torch.full((1, 3, 8, 8), 99.0)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, inputs)) == [0, 0, 0, 20]


def test_a_call_that_another_one_waits_for_does_not_wait_for_it_for_ever(watch, monkeypatch):
    monkeypatch.setattr("flatout.frameworks.pytorch.seams.gathered.LONGEST_WAIT_S", 0.1)

    class Asks(Net):
        def forward(self, x):
            if x.sum() > 0:
                helper = threading.Thread(target=lambda: inner.append(net(-x)))
                helper.start()
                helper.join(20)
            return super().forward(x)

    watched, net, inner = watch(), Asks().eval(), []
    with torch.no_grad():
        for _ in range(20):
            net(-torch.ones(1, 3, 8, 8))
        watched.pytorch.engage({"micro_batching": {}})
        net(torch.ones(1, 3, 8, 8))
    assert len(inner) == 1


# -- the gate ------------------------------------------------------------------------------------------------------


def call(gate, during):
    with gate:
        gate.begin()
    try:
        during()
    finally:
        with gate.lock:
            gate.end()


def test_one_that_is_to_be_alone_waits_for_calls_under_way_and_others_wait_for_it():
    gate, order, begun = Gate(), [], threading.Event()

    def first():
        begun.set()
        time.sleep(0.2)
        order.append("first")

    threads = [threading.Thread(target=call, args=(gate, first))]
    threads[0].start()
    begun.wait()
    with gate:
        gate.alone()
        order.append("alone")
        threads.append(threading.Thread(target=call, args=(gate, lambda: order.append("second"))))
        threads[1].start()
        time.sleep(0.1)
        assert gate.num_under_way == 0
    for thread in threads:
        thread.join()
    assert order == ["first", "alone", "second"]


def test_two_calls_that_each_want_to_be_alone_have_their_turns():
    gate, order, both = Gate(), [], threading.Barrier(2)

    def during():
        both.wait()
        with gate.apart():
            order.append("begins")
            time.sleep(0.05)
            order.append("ends")

    threads = [threading.Thread(target=call, args=(gate, during)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert order == ["begins", "ends"] * 2 and gate.num_under_way == 0


def test_a_call_that_waits_for_one_that_is_kept_from_beginning_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(gates, "LONGEST_WAIT_S", 0.1)
    gate, begun, second = Gate(), threading.Event(), threading.Event()

    def first():
        begun.set()
        assert second.wait(5)

    threads = [threading.Thread(target=call, args=(gate, first))]
    threads[0].start()
    begun.wait()
    with gate, pytest.raises(CallsUnderWay, match="not over"):
        threads.append(threading.Thread(target=call, args=(gate, second.set)))
        threads[1].start()
        gate.alone()
    for thread in threads:
        thread.join(5)
    assert gate.num_under_way == 0
