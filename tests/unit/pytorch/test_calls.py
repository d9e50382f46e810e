"""Are the model's outermost calls found, whatever the script is built like, and is nothing of ours left in a model?"""

import copy
import gc
import io
import math
import pickle
import subprocess
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.seams import owners  # noqa: E402
from flatout.frameworks.pytorch.seams.calls import Calls  # noqa: E402
from flatout.frameworks.pytorch.seams.outer_call import OuterCall  # noqa: E402


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(forward, optimizers, num=8, loss=lambda out: out.pow(2).mean()):
    for _ in range(num):
        value = loss(forward(torch.randn(3, 4)))
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def names(watched):
    return sorted(call.name for call in watched.pytorch.calls.found)


def sgd(*modules):
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.01)


# -- finding -------------------------------------------------------------------------------------------------------


def test_the_model_that_owns_the_parameters_is_found_and_nothing_below_it(watch):
    watched, model = watch(), net()
    train(model, [sgd(model)])
    assert names(watched) == ["Sequential"]
    (call,) = watched.pytorch.calls.found
    assert call.module is model and call.num_training_calls >= 7 and call.calls_per_step == 1
    assert watched.pytorch.settled()


def test_two_models_in_one_step_are_both_found(watch):
    watched, first, second = watch(), net(), nn.Linear(2, 2)
    train(lambda x: second(first(x)), [sgd(first), sgd(second)], num=12)
    assert names(watched) == ["Linear", "Sequential"]


def test_a_module_that_is_never_called_itself_hands_over_to_its_children(watch):
    class Lightning(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.unused = nn.Linear(2, 2)

        def training_step(self, x):
            x = self.net(x)
            for block in self.blocks:
                x = block(x)
            return x

    watched, module = watch(), Lightning()
    train(module.training_step, [sgd(module)], num=20)
    assert names(watched) == ["Lightning.blocks.0", "Lightning.blocks.1", "Lightning.net"]
    assert "_compiled_call_impl" not in vars(module) and "_compiled_call_impl" not in vars(module.unused)


def test_a_method_other_than_forward_is_seen_through_the_children_that_it_calls(watch):
    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = net(), nn.Linear(2, 4)

        def encode(self, x):
            return self.encoder(x)

    watched, model = watch(), Autoencoder()
    train(lambda x: model.decoder(model.encode(x)), [sgd(model)], num=20)
    assert names(watched) == ["Autoencoder.decoder", "Autoencoder.encoder"]


def test_a_wrapper_that_is_a_module_is_the_outermost_call(watch):
    class Parallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    watched, model = watch(), net()
    wrapped = Parallel(model)
    train(wrapped, [sgd(model)])
    assert names(watched) == ["Parallel"]


def test_a_wrapper_that_is_no_module_leaves_the_model_the_outermost_call(watch):
    class Engine:
        def __init__(self, module):
            self.module = module

        def __call__(self, x):
            return self.module(x)

    watched, model = watch(), net()
    train(Engine(model), [sgd(model)])
    assert names(watched) == ["Sequential"]


def test_a_loss_with_parameters_is_a_call_of_its_own(watch):
    class Margin(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out):
            return self.scale * out.pow(2).mean()

    watched, model, margin = watch(), net(), Margin()
    train(model, [sgd(model, margin)], loss=margin)
    assert names(watched) == ["Margin", "Sequential"]


def test_parameters_without_a_module_are_trained_in_peace(watch):
    watched, weight = watch(), torch.randn(4, 2, requires_grad=True)
    train(lambda x: x @ weight, [torch.optim.Adam([weight])])
    assert names(watched) == [] and watched.pytorch.settled()
    assert watched.pytorch.facts().models == () and watched.pytorch.facts().device == "cpu"


def test_a_model_that_is_made_later_is_found_as_well(watch):
    watched, first = watch(), net()
    train(first, [sgd(first)], num=60)
    later = nn.Linear(4, 2)
    train(later, [sgd(later)], num=60)
    assert names(watched) == ["Linear", "Sequential"]


def test_a_layer_that_is_added_to_a_known_optimizer_is_found(watch):
    watched, model, head = watch(), net(), nn.Linear(2, 2)
    optimizer = sgd(model)
    train(model, [optimizer])
    optimizer.add_param_group({"params": head.parameters()})
    train(lambda x: head(model(x)), [optimizer])
    assert names(watched) == ["Linear", "Sequential"]


def test_two_heads_on_a_shared_body_are_two_calls(watch):
    class Head(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body, self.last = body, nn.Linear(2, 1)

        def forward(self, x):
            return self.last(self.body(x))

    watched, body = watch(), net()
    first, second = Head(body), Head(body)
    parameters = {*first.parameters(), *second.parameters()}
    train(lambda x: first(x) + second(x), [torch.optim.SGD(list(parameters), lr=0.01)])
    assert names(watched) == ["Head", "Head"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_watched_model_can_be_scripted_when_it_has_been_trained(watch):
    ignored = list(torch.jit._recursive.ignored_attributes)
    watched, model = watch(), net()
    train(model, [sgd(model)])
    assert watched.pytorch.calls.found[0].module is model
    scripted = torch.jit.script(model)
    x = torch.randn(3, 4)
    assert torch.equal(scripted(x), model(x))
    watched.pytorch.detach()
    assert torch.jit._recursive.ignored_attributes == ignored


def test_a_scripted_module_is_found_and_trains(watch):
    watched, model = watch(), torch.jit.script(net())
    before = [p.clone() for p in model.parameters()]
    train(model, [sgd(model)])
    assert names(watched) == ["RecursiveScriptModule"]
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    torch.jit.save(model, io.BytesIO())


def test_an_optimizer_for_each_parameter_costs_one_search(watch):
    watched, model = watch(), net()
    optimizers = [torch.optim.SGD([p], lr=0.01) for p in model.parameters()]
    searches = []
    owners = watched.pytorch.calls._owners
    of, owners.of = owners.of, lambda ids: searches.append(ids) or of(ids)
    train(model, optimizers, num=20)
    assert len(searches) == 1 and names(watched) == ["Sequential"]
    assert watched.pytorch.steps.rhythm.num_updates == 4


def test_a_thousand_small_models_are_not_searched_for_longer_than_a_share_of_the_time(watch):
    watched = watch()
    owners = watched.pytorch.calls._owners
    owners._spent_s = 1e6
    model = net()
    train(model, [sgd(model)])
    assert names(watched) == []


# -- living and dying ----------------------------------------------------------------------------------------------


def test_a_model_and_an_optimizer_that_the_script_drops_are_freed(watch):
    watched = watch()

    def fold():
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        train(model, [optimizer], num=40)
        return weakref.ref(model), weakref.ref(optimizer), weakref.ref(next(model.parameters()))

    refs = fold()
    gc.collect()  # which plain needs as well: PyTorch's optimizers refer to themselves
    assert [ref() for ref in refs] == [None, None, None]
    assert watched.pytorch.calls.found == [] and watched.pytorch.session.optimizers == []


def test_a_seam_alone_keeps_a_model_no_longer_than_plain(watch):
    calls, model = Calls(), net()
    calls.meet(model)
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
    assert calls.found == []


def test_models_made_at_the_address_of_freed_ones_are_found_each_time(watch, monkeypatch):
    monkeypatch.setattr(owners, "FREE_SEARCH_S", math.inf)  # the heap of a test process is large
    watched = watch()
    for _ in range(6):
        model = net()
        train(model, [sgd(model)], num=40)
        assert names(watched) == ["Sequential"]
        del model
        gc.collect()


# -- evaluation and the script's other ways to call ----------------------------------------------------------------


def test_evaluation_is_computed_plainly_whatever_is_engaged(watch):
    watched, model = watch(), net()
    watched.engage(5, {"bf16": {}})
    train(model, [sgd(model)])
    x = torch.randn(3, 4)
    with torch.no_grad():
        evaluated = model(x)
    with torch.inference_mode():
        assert torch.equal(evaluated, model(x))
    assert torch.equal(evaluated, model._call_impl(x))
    assert not torch.equal(evaluated, model(x)), "bf16 is engaged"


def test_a_call_in_another_thread_is_left_alone(watch):
    watched, model = watch(), net()
    watched.engage(5, {"bf16": {}})
    train(model, [sgd(model)])
    (call,) = watched.pytorch.calls.found
    num, found = call.num_calls, []
    x = torch.randn(3, 4)
    thread = threading.Thread(target=lambda: found.append(model(x)))
    thread.start()
    thread.join()
    assert call.num_calls == num and torch.equal(found[0], model._call_impl(x))


def test_training_in_a_thread_of_its_own_is_watched(watch):
    watched, model = watch(), net()
    thread = threading.Thread(target=lambda: train(model, [sgd(model)]))
    thread.start()
    thread.join()
    assert watched.listener.num_steps == 6 and names(watched) == ["Sequential"]


def test_a_model_that_calls_itself_is_one_call(watch):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, again=True):
            x = self.layer(x)
            return self(x, again=False) if again else x

    watched, model = watch(), Twice()
    train(model, [sgd(model)])
    (call,) = watched.pytorch.calls.found
    assert call.calls_per_step == 1


def test_an_exception_in_the_model_passes_through_and_the_next_call_is_seen(watch):
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x, fail=False):
            if fail:
                raise KeyError("the script's own")
            return self.layer(x)

    watched, model = watch(), Fragile()
    train(model, [sgd(model)])
    (call,) = watched.pytorch.calls.found
    with pytest.raises(KeyError, match="the script's own") as caught:
        model(torch.randn(3, 4), fail=True)
    assert caught.value.__context__ is None
    assert not watched.pytorch.calls.inside
    num = call.num_calls
    model(torch.randn(3, 4))
    assert call.num_calls == num + 1


def test_hooks_of_the_script_run_once_a_call(watch):
    watched, model = watch(), net()
    train(model, [sgd(model)])
    seen = []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"]
    assert watched.pytorch.calls.found


def test_tracing_and_exporting_a_watched_model_see_the_plain_one(watch):
    watched, model = watch(), net()
    watched.engage(5, {"bf16": {}})
    train(model, [sgd(model)])
    x = torch.randn(3, 4)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model._call_impl(x))
    assert torch.fx.symbolic_trace(model)(x).dtype == torch.float32


# -- copies and checkpoints ----------------------------------------------------------------------------------------


class Dumping(nn.Module):
    """Pickles its `__dict__` as it is, as some libraries do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

    def __getstate__(self):
        return self.__dict__.copy()


def test_a_watched_model_is_pickled_to_the_very_bytes_of_an_unwatched_one(watch):
    watched, model = watch(), net()
    train(model, [sgd(model)])
    assert "_compiled_call_impl" in vars(model)
    data, parameters = pickle.dumps(model), io.BytesIO()
    torch.save(model.state_dict(), parameters)
    whole = io.BytesIO()
    torch.save(model, whole)
    watched.pytorch.detach()
    assert "_compiled_call_impl" not in vars(model)
    assert pickle.dumps(model) == data and b"flatout" not in data and b"flatout" not in whole.getvalue()
    again = io.BytesIO()
    torch.save(model.state_dict(), again)
    assert again.getvalue() == parameters.getvalue()


def test_copies_of_a_watched_model_are_their_own_and_unwatched(watch):
    watched, model = watch(), net()
    optimizer = sgd(model)
    train(model, [optimizer])
    x = torch.randn(3, 4)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert "_compiled_call_impl" not in vars(copied)
        assert list(copied.state_dict()) == list(model.state_dict())
        assert torch.equal(copied(x), model(x))
    other = copy.deepcopy(model)
    train(model, [optimizer])
    assert not torch.equal(other(x), model(x))
    assert names(watched) == ["Sequential"]


def test_a_model_that_pickles_its_dictionary_loads_without_flatout(watch, tmp_path):
    watched, model = watch(), Dumping()
    train(model, [sgd(model)])
    data = pickle.dumps(model)
    assert b"flatout" not in data
    loaded = pickle.loads(data)
    assert vars(loaded)["_compiled_call_impl"] is None
    x = torch.randn(3, 4)
    assert torch.equal(loaded(x), model(x))
    for copied in (copy.deepcopy(model), copy.copy(model)):
        assert torch.equal(copied(x), model(x))
    assert watched.listener.num_steps


def test_a_checkpoint_of_a_watched_model_loads_in_a_process_without_flatout(watch, tmp_path):
    _, model = watch(), net()
    train(model, [sgd(model)])
    torch.save(model, tmp_path / "whole.pt")
    program = (
        "import sys, torch\n"
        "sys.modules['flatout'] = None\n"
        f"model = torch.load({str(tmp_path / 'whole.pt')!r}, weights_only=False)\n"
        "print(tuple(model(torch.ones(1, 4)).shape), sorted(model.state_dict()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "(1, 2) ['0.bias', '0.weight', '2.bias', '2.weight']\n"


def test_a_clone_made_by_copying_the_dictionary_computes_with_its_own_parameters(watch):
    """As meta-learning libraries clone: `learn2learn.clone_module`, `nn.parallel.replicate`."""
    watched, model = watch(), nn.Linear(4, 2)
    train(model, [sgd(model)])
    clone = model.__new__(type(model))
    clone.__dict__ = model.__dict__.copy()
    clone._parameters = {name: p * 0 + 1 for name, p in model._parameters.items()}
    x = torch.randn(3, 4)
    assert torch.allclose(clone(x), x.sum(1, keepdim=True).expand(3, 2) + 1)
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
    assert watched.pytorch.calls.found[0].module is model


def test_taking_the_seam_away_leaves_the_model_as_it_was(watch):
    watched, model = watch(), net()
    before = dict(vars(model))
    train(model, [sgd(model)])
    watched.pytorch.detach()
    assert dict(vars(model)) == before and list(vars(model)) == list(before)


def test_a_compiled_call_of_the_script_is_kept_and_given_back():
    calls, model = Calls(), net()
    seen = []
    own = lambda *a: seen.append(1) or model._call_impl(*a)  # noqa: E731
    model._compiled_call_impl = own
    calls.meet(model)
    model(torch.randn(3, 4))
    assert seen == [1] and calls.found[0].compiled_by_script and calls.found[0].num_calls == 1
    calls.remove()
    assert vars(model)["_compiled_call_impl"] is own


def test_a_model_compiled_in_place_after_it_was_found_is_taken_up_again():
    calls, model = Calls(), net()
    calls.meet(model)
    (call,) = calls.found
    assert isinstance(vars(model)["_compiled_call_impl"], OuterCall) and not call.compiled_by_script
    seen = []
    model._compiled_call_impl = own = lambda *a: seen.append(1) or model._call_impl(*a)
    calls.refresh()
    model(torch.randn(3, 4))
    assert seen == [1] and call.num_calls == 1 and call.compiled_by_script
    calls.remove()
    assert vars(model)["_compiled_call_impl"] is own


def test_a_compilation_that_the_script_takes_back_is_gone_for_good():
    model, calls = net(), Calls()
    model._compiled_call_impl = lambda *_: "compiled"
    calls.look_for(list(model.parameters()))
    (call,) = calls.found
    model._compiled_call_impl = None
    calls.refresh()
    assert not call.compiled_by_script and torch.is_tensor(model(torch.randn(3, 4)))
    calls.lift()
    assert model._compiled_call_impl is None


def test_keywords_of_the_script_named_as_ours_pass_through_levers(watch):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x, *, inner, around, module):
            return self.layer(x) * inner * around * module

    model, watched = Named(), watch()
    optimizer = sgd(model)

    def step():
        model(torch.ones(3, 4), inner=1.0, around=2.0, module=3.0).sum().backward()
        optimizer.step()

    step()
    step()
    watched.pytorch.engage({"bf16": {}})
    step()
    assert "bf16" in watched.pytorch.session.engaged


def test_a_scaler_passes_any_keyword_on_to_the_optimizer(watch):
    class Told(torch.optim.SGD):
        def step(self, closure=None, *, scaler):
            self.told = scaler
            return super().step(closure)

    watch()
    model = net()
    optimizer, scaler = Told(model.parameters(), 0.1), torch.amp.GradScaler("cpu", enabled=False)
    model(torch.ones(2, 4)).sum().backward()
    scaler.step(optimizer, scaler="its own")
    assert optimizer.told == "its own"
