"""Is a comparison exact, does it see planted errors, and does training go on as if it had never been made?"""

import dataclasses
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook  # noqa: E402

from flatout.frameworks.pytorch.numerics.differences import apart, error_of, reals, summary  # noqa: E402
from flatout.frameworks.pytorch.numerics.replay import Replayer  # noqa: E402
from flatout.judge import agreement  # noqa: E402
from processors import computes_bfloat16_lstm  # noqa: E402
from tiers import some  # noqa: E402

WORKLOADS = ("conv", "transformer", "mlp", "lstm", "gan")
EVERYTHING = ("gradients", "updates")


# -- plain against plain -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_plain_against_plain_is_exactly_nothing_and_the_gradient_is_the_scripts_own(name, watch, workload):
    watched, script = watch(), workload(name)
    watched.compare(8, {}, *EVERYTHING)
    script.train(20)
    for check in EVERYTHING:
        found = watched.difference(check)
        assert found.error == found.baseline_error == 0 and found.slope == 1
        assert found.finite and found.random_states_equal
    found = watched.difference()
    assert found.explained_cosine == pytest.approx(1, abs=1e-9)
    assert 0 < found.noise < 2 and found.detail == ""


@pytest.mark.parametrize("scheduler", some([False, True], True))
@pytest.mark.parametrize("name", WORKLOADS)
def test_training_with_comparisons_in_it_ends_with_the_bits_of_training_without(
    name, scheduler, watch, workload, different
):
    plain = workload(name, scheduler=scheduler).train(24).state()
    watched, script = watch(), workload(name, scheduler=scheduler)
    levers = [{"fused_optimizer": {}}, {"bf16": {}}, {"threads": {"num": 2}}]
    if name == "lstm" and not computes_bfloat16_lstm():
        levers.remove({"bf16": {}})
    if name == "conv":
        levers.append({"channels_last": {}, "bf16": {}, "fused_optimizer": {}})
    for number, wanted in enumerate(levers):
        watched.compare(6 + 3 * number, wanted, *EVERYTHING)
    script.train(24)
    assert len(watched.answers) == len(levers)
    assert different(plain, script.state()) == []


def test_timing_at_half_the_batch_leaves_training_as_it_was(watch, workload, different):
    plain = workload("conv").train(14).state()
    watched, script = watch(), workload("conv")

    def begin():
        watched.pytorch.begin_capture()
        watched.listener.waiting = lambda: watched.answers.append(watched.pytorch.scale())

    watched.at(6, begin)
    script.train(14)
    (scaling,) = watched.answers
    assert len(scaling.full_s) == len(scaling.half_s) >= 2 and min(scaling.half_s) > 0
    assert different(plain, script.state()) == []


def test_a_model_that_returns_its_loss_or_refuses_half_a_batch_cannot_be_scaled(watch):
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x.reshape(8, 4))

    for model in (Stubborn(), nn.Linear(4, 2)):
        watched = watch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def begin(watched=watched):
            watched.pytorch.begin_capture()
            watched.listener.waiting = lambda: watched.answers.append(watched.pytorch.scale())

        watched.at(4, begin)
        for _ in range(10):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
        assert (watched.answers[0] is None) == isinstance(model, Stubborn)
        watched.pytorch.detach()


# -- the gradient is the script's own, or that shows ---------------------------------------------------------------


def loop(watch, step, *models, num=14, at=6, levers=None, optimizers=None):
    """Train with a comparison in it; `step(optimizers)` is one step of the script."""
    watched = watch()
    optimizers = optimizers or [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in models]
    watched.compare(at, levers or {})
    for _ in range(num):
        step(*optimizers)
    return watched


def mlp(out=3):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, out))


def simple(model, loss=lambda out: out.pow(2).mean(), before=lambda model: None):
    def step(optimizer):
        optimizer.zero_grad()
        loss(model(torch.randn(6, 4))).backward()
        before(model)
        optimizer.step()

    return step


def scale_by_hand(model):
    for parameter in model.parameters():
        parameter.grad.mul_(torch.rand_like(parameter))


@pytest.mark.parametrize(
    "before",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
        scale_by_hand,
    ],
    ids=["by norm", "by value", "by hand"],
)
def test_clipped_gradients_are_explained(watch, before):
    model = mlp()
    watched = loop(watch, simple(model, before=before), model)
    assert watched.difference().explained_cosine == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["before forward", "before backward", "after the update", "on the model", "by hand"])
def test_wherever_gradients_are_cleared_they_are_explained(watch, where, set_to_none):
    model = mlp()

    def step(optimizer):
        if where == "before forward":
            optimizer.zero_grad(set_to_none)
        loss = model(torch.randn(6, 4)).pow(2).mean()
        if where == "before backward":
            optimizer.zero_grad(set_to_none)
        if where == "on the model":
            model.zero_grad(set_to_none)
        if where == "by hand":
            for parameter in model.parameters():
                parameter.grad = None
        loss.backward()
        optimizer.step()
        if where == "after the update":
            optimizer.zero_grad(set_to_none)

    assert loop(watch, step, model).difference().explained_cosine == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("order", ["discriminator first", "generator first"])
@pytest.mark.parametrize("clearing", ["by its optimizer", "by both"])
def test_gans_of_either_order_are_explained(watch, order, clearing):
    maker, judge = mlp(4), mlp(1)

    def clear(own, other):
        own.zero_grad()
        if clearing == "by both":
            other.zero_grad()

    def judge_step(judge_optimizer, maker_optimizer, fake):
        clear(judge_optimizer, maker_optimizer)
        F.softplus(-judge(torch.randn(6, 4))).mean().backward()
        F.softplus(judge(fake.detach())).mean().backward()
        judge_optimizer.step()

    def maker_step(judge_optimizer, maker_optimizer, fake):
        clear(maker_optimizer, judge_optimizer)
        F.softplus(-judge(fake)).mean().backward()
        maker_optimizer.step()

    def step(*optimizers):
        fake = maker(torch.randn(6, 4))
        if order == "discriminator first":
            judge_step(*optimizers, fake)
            maker_step(*optimizers, fake)
        else:
            maker_step(*optimizers, fake)
            judge_step(*optimizers, fake)

    watched = loop(watch, step, judge, maker, num=20)
    assert watched.difference().explained_cosine == pytest.approx(1, abs=1e-9)


def test_two_optimizers_on_one_model_are_explained_although_the_first_has_updated_already(watch):
    body, head = mlp(), nn.Linear(3, 1)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = body, head

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    model = Whole()

    def step(first, second):
        model.zero_grad()
        model(torch.randn(6, 4)).pow(2).mean().backward()
        first.step()
        second.step()

    optimizers = [torch.optim.SGD(m.parameters(), lr=2.0) for m in (body, head)]
    watched = loop(watch, step, optimizers=optimizers, num=16)
    assert watched.difference().explained_cosine == pytest.approx(1, abs=1e-9)


def test_accumulated_gradients_are_explained(watch):
    model = mlp()

    def step(optimizer):
        for k in range(3):
            (model(torch.randn(6, 4)).pow(2).mean() * (k + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert loop(watch, step, model).difference().explained_cosine == pytest.approx(1, abs=1e-9)


def test_a_step_with_a_closure_is_compared_after_the_closure_has_run(watch):
    model = mlp()

    def step(optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure=closure)

    assert loop(watch, step, model).difference().explained_cosine == pytest.approx(1, abs=1e-9)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    watched = watch()
    watched.compare(4, {}, *EVERYTHING)
    for _ in range(8):
        step(optimizer)
    (answer,) = watched.answers
    assert answer.missing == "an optimizer with a closure cannot be replayed"
    assert answer.differences[0].explained_cosine == pytest.approx(1, abs=1e-9)


def test_an_autocast_of_the_script_is_part_of_the_replay(watch):
    model = mlp()

    def step(optimizer):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(6, 4))
        out.float().pow(2).mean().backward()
        optimizer.step()

    found = loop(watch, step, model).difference()
    assert found.explained_cosine == pytest.approx(1, abs=1e-9) and found.error == 0


def test_a_loss_kept_on_the_model_shows_as_unexplained(watch):
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.layer = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            gate = self.gate(x).softmax(-1)
            self.balance = gate.pow(2).mean() * 10
            return self.layer(x) * gate

    model = Expert()
    step = simple(model, loss=lambda out: out.pow(2).mean() + model.balance)
    assert loop(watch, step, model).difference().explained_cosine < 0.999


def test_a_gradient_penalty_shows_as_unexplained(watch):
    judge = mlp(1)

    def step(optimizer):
        optimizer.zero_grad()
        x = torch.randn(6, 4, requires_grad=True)
        out = judge(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()).backward()
        optimizer.step()

    assert loop(watch, step, judge).difference().explained_cosine < 0.999


def test_a_method_that_uses_the_models_own_parameters_shows_as_unexplained(watch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)

        def encode(self, x):
            return x @ self.layer.weight

    model = Tied()

    def step(optimizer):
        optimizer.zero_grad()
        (model(torch.randn(6, 4)).pow(2).mean() + 3 * model.encode(torch.randn(6, 4)).pow(2).mean()).backward()
        optimizer.step()

    assert loop(watch, step, model).difference().explained_cosine < 0.999


def test_a_model_that_is_only_encoded_with_is_never_said_to_agree(watch):
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def encode(self, x):
            return x @ self.weight

    model = Alone()

    def step(optimizer):
        optimizer.zero_grad()
        model.encode(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()

    (answer,) = loop(watch, step, model, num=20, at=10).answers
    assert answer.missing == "no model call was captured" and not answer.differences


def with_room(monkeypatch, num_bytes):
    """As if no more than that might be kept."""
    monkeypatch.setattr("flatout.frameworks.pytorch.numerics.capture.room_bytes", lambda device: num_bytes)


def test_what_is_too_large_to_keep_is_said(watch, monkeypatch):
    model, watched = mlp(), watch()
    with_room(monkeypatch, 100)
    watched.compare(4, {})
    step, optimizer = simple(model), torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(9):
        step(optimizer)
    assert "larger than the memory set aside" in watched.answers[0].missing


def test_where_two_steps_do_not_fit_one_is_compared_without_its_noise(watch, monkeypatch):
    model, watched = mlp(), watch()
    watched.compare(4, {})
    step, optimizer = simple(model), torch.optim.SGD(model.parameters(), lr=0.01)
    with_room(monkeypatch, 6 * (4 + 3 + 3) * 4 + 50)
    for _ in range(9):
        step(optimizer)
    found = watched.difference()
    assert found.noise is None and found.error == 0


# -- what goes in and what comes out -------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    note: str = "x"


class ModelOutput(OrderedDict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


OUTPUTS = {
    "tuple": (lambda a, b: (a, b), lambda out: out[0].pow(2).mean() + out[1].mean()),
    "dict": (lambda a, b: {"a": a, "n": 3, "b": b}, lambda out: out["a"].pow(2).mean() + out["b"].mean()),
    "dataclass": (lambda a, b: Result(a), lambda out: out.logits.pow(2).mean()),
    "model output": (lambda a, b: ModelOutput(loss=None, logits=a), lambda out: out.logits.pow(2).mean()),
    "nested": (
        lambda a, b: [{"x": (a, [b])}, None],
        lambda out: out[0]["x"][0].pow(2).mean() + out[0]["x"][1][0].mean(),
    ),
    "not all used": (lambda a, b: (a, b), lambda out: out[0].pow(2).mean()),
    "one made from the other": (lambda a, b: (a, a * 2), lambda out: out[1].pow(2).mean()),
    "one made from the other, both used": (lambda a, b: (a, a * 2), lambda out: out[1].pow(2).mean() + out[0].sum()),
    "twice the same": (lambda a, b: (a, a), lambda out: out[0].pow(2).mean() + out[1].sum()),
    "a loss": (lambda a, b: (a.pow(2).mean(), a), lambda out: out[0]),
    "a distribution": (
        lambda a, b: torch.distributions.Normal(a, b.exp()),
        lambda out: -out.log_prob(torch.ones(6, 3)).mean() + out.entropy().mean(),
    ),
    "with numbers": (lambda a, b: (a, a.argmax(1), 3.0, "x"), lambda out: out[0].pow(2).mean()),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_any_kind_are_followed(watch, name):
    make, loss = OUTPUTS[name]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            x = torch.tanh(self.body(x))
            return make(self.a(x), self.b(x))

    model = Model()
    found = loop(watch, simple(model, loss=loss), model).difference()
    assert found.explained_cosine == pytest.approx(1, abs=1e-9) and found.error == 0


def test_a_variational_autoencoder_is_explained(watch):
    class Variational(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)

        def forward(self, x):
            mean, spread = self.encoder(x).chunk(2, 1)
            z = mean + torch.randn_like(spread) * spread.exp()
            return self.decoder(z), mean, spread

    model = Variational()

    def loss(out):
        made, mean, spread = out
        return made.pow(2).mean() + (mean.pow(2) + spread.exp() - spread).mean()

    found = loop(watch, simple(model, loss=loss), model).difference()
    assert found.explained_cosine == pytest.approx(1, abs=1e-9) and found.random_states_equal


def test_inputs_of_any_kind_are_kept_as_they_were(watch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, tokens, x, *, options, mask=None):
            x.mul_(2)  # in place
            options["scale"].add_(1)
            tokens %= 5
            return self.layer(self.embed(tokens) + x) * options["scale"] * options["by"][0]

    model = Model()

    def step(optimizer):
        optimizer.zero_grad()
        options = {"scale": torch.ones(1), "by": [3.0], "name": "x"}
        model(torch.randint(0, 9, (6,)), torch.randn(6, 4), options=options).pow(2).mean().backward()
        optimizer.step()

    found = loop(watch, step, model).difference()
    assert found.explained_cosine == pytest.approx(1, abs=1e-9) and found.baseline_error == 0


def test_an_input_that_needs_a_gradient_may_be_written_to_by_the_model(watch):
    first = nn.Linear(4, 4)

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            x.relu_()
            return self.layer(x)

    second = InPlace()

    def step(*optimizers):
        second(first(torch.randn(6, 4))).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    assert loop(watch, step, first, second, num=20).difference().explained_cosine == pytest.approx(1, abs=1e-9)


def test_the_script_may_write_into_the_models_output(watch):
    model = mlp()
    watched = loop(watch, simple(model, loss=lambda out: out.mul_(3).relu_().pow(2).mean()), model)
    assert watched.difference().explained_cosine == pytest.approx(1, abs=1e-9)


def test_a_hidden_state_that_is_carried_on_is_part_of_the_replay(watch, different):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.hidden = nn.GRUCell(4, 3), None

        def forward(self, x):
            hidden = self.hidden if self.hidden is not None else torch.zeros(6, 3)
            out = self.cell(x, hidden)
            self.hidden = out.detach()
            return out

    def run(compare):
        torch.manual_seed(3)
        model = Recurrent()
        watched = watch()
        if compare:
            watched.compare(4, {"bf16": {}}, *EVERYTHING)
        step, optimizer = simple(model), torch.optim.Adam(model.parameters())
        for _ in range(12):
            step(optimizer)
        watched.pytorch.detach()
        return {k: v.clone() for k, v in model.state_dict().items()} | {"hidden": model.hidden}, watched

    plain, _ = run(compare=False)
    compared, watched = run(compare=True)
    assert different(plain, compared) == []
    assert watched.difference().explained_cosine == pytest.approx(1, abs=1e-9)


def test_hooks_of_the_script_on_all_optimizers_do_not_see_updates_of_ours(watch):
    def run(levers):
        model, watched, seen = mlp(), watch(), []
        optimizer = torch.optim.Adam(model.parameters())
        handles = [
            register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
            register_optimizer_step_post_hook(lambda *_: seen.append("after")),
        ]
        if levers is not None:
            watched.compare(5, levers, "updates")
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).pow(2).mean().backward()
            optimizer.step()
        handles.pop().remove()
        optimizer.step()
        handles.pop().remove()
        assert levers is None or watched.answers
        return seen

    assert run({"fused_optimizer": {}}) == run(None)


def test_hooks_on_accumulated_gradients_do_not_fire_in_a_replay(watch):
    """An optimizer within backward, one for each parameter."""
    model, watched = mlp(), watch()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    fired = []

    def update(parameter):
        fired.append(parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    watched.compare(5, {})
    for _ in range(12):
        model(torch.randn(6, 4)).pow(2).mean().backward()
    assert len(fired) == 12 * 4 and watched.answers
    for hook in hooks:  # a cycle that no garbage collector sees
        hook.remove()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_computes_activations_again_in_backward_is_replayed(watch, reentrant):
    from torch.utils.checkpoint import checkpoint

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body = nn.Linear(4, 4), mlp()

        def forward(self, x):
            return checkpoint(self.body, self.first(x), use_reentrant=reentrant)

    model = Saving()
    found = loop(watch, simple(model), model).difference()
    assert found.explained_cosine == pytest.approx(1, abs=1e-9) and found.error == 0


def test_sparse_gradients_are_compared(watch):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))

    def step(optimizer):
        optimizer.zero_grad()
        model(torch.randint(0, 9, (6,))).pow(2).mean().backward()
        optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = loop(watch, step, optimizers=[optimizer]).difference()
    assert found.explained_cosine == pytest.approx(1, abs=1e-9) and found.error == 0


def test_complex_parameters_are_compared_in_both_parts(watch):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))
            self.register_buffer("seen", torch.zeros(3, dtype=torch.cfloat))

        def forward(self, x):
            self.seen += 1j
            return x.to(torch.cfloat) @ self.weight

    model, watched = Turned(), watch()
    optimizer = torch.optim.Adam(model.parameters())
    watched.compare(4, {}, *EVERYTHING)
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).abs().mean().backward()
        optimizer.step()
    for check in EVERYTHING:
        assert watched.difference(check).error == 0 and watched.difference(check).detail == ""
    assert watched.difference().explained_cosine == pytest.approx(1, abs=1e-9)
    plain = {model.weight: reals(torch.tensor([1 + 2j]))}
    assert error_of({model.weight: reals(torch.tensor([1 + 2j]).conj())}, plain) == pytest.approx((16 / 5) ** 0.5)
    scaled = apart({model.weight: reals(torch.tensor([2 + 4j]))}, plain)
    assert summary("gradients", scaled, str).slope == 2


def test_a_model_under_a_transform_of_functions_is_left_in_peace(watch):
    model, watched = mlp(), watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched.compare(4, {})
    for _ in range(9):
        parameters = dict(model.named_parameters())
        rows = torch.randn(6, 4)
        losses = torch.func.vmap(
            lambda row, p=parameters: torch.func.functional_call(model, p, (row,)).pow(2).mean(), randomness="same"
        )(rows)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (answer,) = watched.answers
    assert "transform" in answer.missing


# -- planted errors ------------------------------------------------------------------------------------------------


def planted(watch, workload, monkeypatch, name, around):
    """The difference that a wrong way of computing shows."""
    from flatout.frameworks.pytorch.levers.bf16 import Bf16

    def engage(self, session, settings):
        for call in session.calls.found:
            call.arounds["bf16"] = around

    monkeypatch.setattr(Bf16, "engage", engage)
    watched, script = watch(), workload(name)
    watched.compare(8, {"bf16": {}})
    script.train(14)
    return watched.difference()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def test_a_gradient_scaled_by_a_hundredth_shows_in_error_and_slope(watch, workload, monkeypatch):
    found = planted(watch, workload, monkeypatch, "conv", lambda f, a, k: Scaled.apply(f(*a, **k)))
    assert found.error == pytest.approx(0.01, rel=1e-3) and found.slope == pytest.approx(1.01, rel=1e-4)


def test_a_lost_gradient_is_an_infinite_error_that_names_the_parameter(watch, workload, monkeypatch):
    def lose(f, args, kwargs):
        model = f.__self__.module
        model.head.weight.requires_grad_(False)
        try:
            return f(*args, **kwargs)
        finally:
            model.head.weight.requires_grad_(True)

    found = planted(watch, workload, monkeypatch, "conv", lose)
    assert found.error == float("inf") and "head.weight" in found.detail


def test_another_dropout_mask_shows(watch, workload, monkeypatch):
    def redraw(f, args, kwargs):
        torch.rand(1)
        return f(*args, **kwargs)

    found = planted(watch, workload, monkeypatch, "conv", redraw)
    assert found.error > 0.1 and not found.random_states_equal


def test_random_numbers_drawn_and_not_used_show(watch, workload, monkeypatch):
    def draw(f, args, kwargs):
        out = f(*args, **kwargs)
        torch.rand(1)
        return out

    found = planted(watch, workload, monkeypatch, "conv", draw)
    assert found.error == 0 and not found.random_states_equal


def test_batch_statistics_in_place_of_running_ones_show(watch, workload, monkeypatch):
    def freeze(f, args, kwargs):
        norm = f.__self__.module.body[1]
        norm.eval()
        try:
            return f(*args, **kwargs)
        finally:
            norm.train()

    assert planted(watch, workload, monkeypatch, "conv", freeze).error > 0.1


def test_buffers_that_are_updated_twice_show(watch, workload, monkeypatch):
    def twice(f, args, kwargs):
        state = torch.get_rng_state()
        f(*args, **kwargs)
        torch.set_rng_state(state)
        return f(*args, **kwargs)

    found = planted(watch, workload, monkeypatch, "conv", twice)
    assert found.error == pytest.approx(1, abs=0.2) and found.random_states_equal and found.slope == 1
    assert "running" in found.worst or "num_batches" in found.worst, "statistics decide every later evaluation"
    assert f"`{found.worst}` ends elsewhere" in found.detail


def test_statistics_of_many_images_that_another_memory_format_sums_otherwise_are_rounding(watch):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
    net = nn.Sequential(body, nn.Flatten(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    watched = watch()
    watched.compare(8, {"channels_last": {}}, "gradients")
    for _ in range(14):
        optimizer.zero_grad()
        F.cross_entropy(net(torch.rand(16, 3, 224, 224) - 0.5), torch.arange(16) % 4).backward()
        optimizer.step()
    found = watched.difference()
    assert found.error > 0 and agreement.judge(watched.answers, "rounding", ("gradients",)).verdict == "agrees"


def test_values_that_are_no_numbers_show(watch, workload, monkeypatch):
    found = planted(watch, workload, monkeypatch, "mlp", lambda f, a, k: f(*a, **k) * torch.tensor(float("nan")))
    assert not found.finite


# planted in the optimizer


def planted_update(watch, workload, monkeypatch, name, change, optimizer=None, steps=14):
    from flatout.frameworks.pytorch.levers.fused_optimizer import FusedOptimizer

    undo = []
    monkeypatch.setattr(FusedOptimizer, "engage", lambda self, session, settings: undo.append(change(session)))
    monkeypatch.setattr(FusedOptimizer, "release", lambda self, session: undo.pop()())
    watched, script = watch(), workload(name, optimizer)
    watched.compare(8, {"fused_optimizer": {}}, "updates")
    script.train(steps)
    return watched.difference("updates")


def with_options(**options):
    def change(session):
        kept = [(group, {k: group[k] for k in options}) for o in session.optimizers for group in o.param_groups]
        for group, _ in kept:
            group.update({k: group[k] * factor for k, factor in options.items()})

        def undo():
            for group, own in kept:
                group.update(own)

        return undo

    return change


@pytest.mark.parametrize(
    ("options", "least"), [({"eps": 1e4}, 1e-2), ({"weight_decay": 2}, 1e-4), ({"lr": 1.01}, 9e-3)]
)
def test_another_option_of_the_optimizer_shows_in_its_updates(watch, workload, monkeypatch, options, least):
    found = planted_update(
        watch, workload, monkeypatch, "transformer", with_options(**options),
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    )  # fmt: skip
    assert found.error > least and found.baseline_error == 0


def test_moments_paired_with_other_elements_of_their_parameter_show(watch, workload, monkeypatch):
    """A fused update over channels_last parameters with contiguous moments pairs elements as they lie in memory."""

    def change(session):
        parameters = [p for p in session.parameters() if p.dim() == 4]
        for parameter in parameters:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
            parameter.grad.data = parameter.grad.data.contiguous(memory_format=torch.channels_last)
        for optimizer in session.optimizers:
            session.flags._flags[optimizer] = {"fused": True}

        def undo():
            session.flags.release("fused")
            for parameter in parameters:
                parameter.data = parameter.data.contiguous()
                parameter.grad.data = parameter.grad.data.contiguous()

        return undo

    found = planted_update(
        watch, workload, monkeypatch, "conv", change, lambda p: torch.optim.Adam(p, lr=1e-3)
    )  # fmt: skip
    assert found.error > 0.02 and found.worst.endswith("weight")


def test_our_own_memory_format_and_fused_update_pair_them_rightly(watch, workload):
    watched, script = watch(), workload("conv", lambda p: torch.optim.Adam(p, lr=1e-3))
    script.model.body[-1].p = 0.0  # whose mask is drawn in the order of the memory, see below
    watched.compare(8, {"channels_last": {}, "fused_optimizer": {}}, *EVERYTHING)
    script.train(14)
    assert watched.difference("updates").error < 1e-5 and watched.difference().error < 1e-4


def test_a_dropout_on_images_that_draws_in_the_order_of_the_memory_shows(watch, workload):
    images, drawn = torch.ones(2, 8, 4, 4), []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        drawn.append(nn.functional.dropout(images.contiguous(memory_format=memory_format)))
    if torch.equal(*drawn):
        pytest.skip(f"PyTorch {torch.__version__} draws in the order of the dimensions here")
    watched, script = watch(), workload("conv")
    watched.compare(8, {"channels_last": {}})
    script.train(14)
    found = watched.difference()
    assert found.error > 0.1 and found.random_states_equal


def test_an_optimizer_without_gradients_is_said(watch, workload):
    watched, script = watch(), workload("mlp")
    watched.at(6, lambda: watched.answers.append(watched.pytorch.compare({}, ("updates",))))

    def clear(_):
        script.optimizer.zero_grad()

    watched.listener.each_step = clear
    script.train(10)
    assert watched.answers[0].missing == "no optimizer has gradients at this point"


def test_a_comparison_that_raises_leaves_everything_as_it_was(watch, workload, different, monkeypatch):
    plain = workload("conv").train(14).state()
    watched, script = watch(), workload("conv")
    run = Replayer.run

    def fail(self, captured, **options):
        if options.get("levers"):
            raise RuntimeError("view size is not compatible")
        return run(self, captured, **options)

    monkeypatch.setattr(Replayer, "run", fail)
    failures = []

    def begin():
        watched.pytorch.begin_capture()

        def compare():
            try:
                watched.pytorch.compare({"channels_last": {}}, ("gradients",))
            except RuntimeError as problem:
                failures.append(problem)

        watched.listener.waiting = compare

    watched.at(6, begin)
    script.train(14)
    assert failures and watched.pytorch.engaged() == {} and watched.pytorch.calls.capture is None
    assert different(plain, script.state()) == []


@pytest.mark.parametrize("breaks", ["halving", "timing"])
def test_a_failure_while_half_the_batch_is_timed_is_raised_and_leaves_no_capture(watch, monkeypatch, breaks):
    watched, model, found = watch(), nn.Linear(4, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    numerics = watched.pytorch.numerics

    def fail(*_):
        raise RuntimeError("out of memory")

    def scale():
        if breaks == "halving":
            monkeypatch.setattr("flatout.frameworks.pytorch.numerics.compare.half", fail)
        else:
            run, calls = numerics._replayer.run, []
            monkeypatch.setattr(numerics._replayer, "run", lambda c: fail() if calls else (calls.append(c), run(c))[1])
        try:
            found.append(watched.pytorch.scale())
        except RuntimeError as problem:
            found.append(str(problem))
        found.append(watched.pytorch.capture.active)

    def begin():
        watched.pytorch.begin_capture()
        watched.listener.waiting = scale

    watched.at(4, begin)
    for _ in range(8):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    assert found == ["out of memory", False]
