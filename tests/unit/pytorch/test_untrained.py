"""Are models that no optimizer trains found, timed, judged and reached by levers, and is an evaluation left alone?"""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 5),
    )  # fmt: skip


class Net(nn.Module):
    """Another class than the models beside it."""

    def __init__(self):
        super().__init__()
        self.body = convolutions()

    def forward(self, x):
        return self.body(x)


class Script:
    """A training in which something happens around each step."""

    def __init__(self, model, before=lambda step: None, loss=None, trained=None):
        self.model = model
        self.optimizer = torch.optim.SGD(trained or model.parameters(), lr=0.01)
        self.before, self.loss = before, loss or (lambda out, x, target: out.pow(2).mean())
        self.done = 0

    def train(self, num):
        for _ in range(num):
            generator = torch.Generator().manual_seed(self.done)
            x = torch.randn(4, 3, 8, 8, generator=generator)
            self.optimizer.zero_grad()
            target = self.before(x)
            self.loss(self.model(x), x, target).backward()
            self.optimizer.step()
            self.done += 1
        return self


def distillation(*, gradients=False, teacher=None, student=None):
    """A teacher that answers for every batch, within `no_grad` or not."""
    teacher = teacher or convolutions().eval()

    def answers(x):
        with torch.set_grad_enabled(gradients):
            return teacher(x)

    script = Script(student or Net(), answers, lambda out, x, target: F.mse_loss(out, target.detach()))
    script.teacher = teacher
    return script


def untrained(watched):
    return [call.module for call in watched.pytorch.calls.found if not call.trained]


def phases(watched, script):
    """A step, taken apart, as its window tells of it."""
    watched.pytorch.observe("phases")
    watched.pytorch.start_window()
    script.train(1)
    return watched.listener.last.phases, watched.listener.last.outside_s


# -- which models there are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True])
def test_a_teacher_is_a_model_that_is_not_trained_and_its_calls_are_forward(gradients, watch):
    watched, script = watch(), distillation(gradients=gradients)
    script.train(6)
    assert untrained(watched) == [script.teacher]
    facts = {model.name: model for model in watched.pytorch.facts().models}
    assert not facts["Sequential"].trained and facts["Sequential"].calls_per_step == 1
    assert facts["Net"].trained and [model.name for model in watched.pytorch.facts().main_models] == ["Net"]
    spent, outside_s = phases(watched, script)
    assert spent["forward: Sequential"] > 0 and spent["forward"] > 0 and outside_s == 0 and "evaluation" not in spent


def test_a_frozen_part_of_a_trained_model_and_a_loss_without_parameters_are_no_models(watch):
    model = Net()
    for p in model.body[0].parameters():
        p.requires_grad_(False)
    criterion, elsewhere = nn.MSELoss(), convolutions()
    trained = [p for p in model.parameters() if p.requires_grad]
    script = Script(model, loss=lambda out, x, target: criterion(out, torch.zeros_like(out)), trained=trained)
    watched = watch()
    script.train(6)
    assert [call.module for call in watched.pytorch.calls.found] == [model]
    assert not vars(criterion).get("_compiled_call_impl") and elsewhere not in untrained(watched)


def test_a_frozen_part_that_a_script_calls_by_itself_is_one(watch):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = convolutions().eval(), nn.Linear(5, 2)

        def step(self, x):
            with torch.no_grad():
                found = self.backbone(x)
            return self.head(found)

    model, watched = Both(), watch()
    script = Script(model.step, trained=list(model.head.parameters())).train(7)
    assert untrained(watched) == [model.backbone]
    assert {call.name for call in watched.pytorch.calls.found} == {"Both.head", "Both.backbone"}
    assert "forward: Both.backbone" in phases(watched, script)[0]


def test_a_method_of_a_model_that_is_not_trained_is_seen_through_the_children_that_it_calls(watch):
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = convolutions(), nn.Linear(5, 3)

        @torch.no_grad()
        def encode(self, x):
            return self.encoder(x)

    coder, watched = Coder().eval(), watch()
    Script(Net(), coder.encode, lambda out, x, target: F.mse_loss(out, target)).train(7)
    assert untrained(watched) == [coder.encoder]
    assert not vars(coder.decoder).get("_compiled_call_impl"), "no seam is left in what is not called"


class Average(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model).eval()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("every", [2, 3, 9])
def test_a_copy_that_is_evaluated_every_some_steps_lies_between_them(every, wrapped, watch):
    model = Net()
    wrapper = Average(model)
    average = wrapper.module if wrapped else copy.deepcopy(model).eval()

    def evaluation(x):
        if script.done % every == 0:
            with torch.no_grad():
                for _ in range(3):
                    average(x)

    script, watched = Script(model, evaluation), watch()
    script.train(3 * every)
    while script.done % every:
        script.train(1)
    assert untrained(watched) == []
    spent, outside_s = phases(watched, script)
    assert outside_s > 0 and spent["evaluation"] == pytest.approx(outside_s, abs=1e-3)
    assert len(watched.pytorch.facts().models) == 1


def test_a_teacher_of_each_step_is_evaluated_as_the_script_wrote_it_while_the_student_is(watch):
    """That is told from a step by the student's mode."""
    watched, script = watch(), distillation()
    watched.engage(6, {"bf16": {}})
    script.train(8)
    x = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        taught = script.teacher(x)
        script.model.eval()
        evaluated = script.teacher(x)
        script.model.train()
    assert torch.equal(evaluated, script.teacher._call_impl(x)) and not torch.equal(taught, evaluated)


def test_what_a_dataset_calls_is_no_model_of_the_step(watch):
    features = nn.Linear(4, 3).eval()

    class Featured(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, place):
            with torch.no_grad():
                return features(torch.randn(4))

    model, watched = nn.Linear(3, 2), watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in DataLoader(Featured(), batch_size=8):
        model(rows).sum().backward()
        optimizer.step()
    assert [call.module for call in watched.pytorch.calls.seams] == [model]


def test_a_model_that_an_optimizer_takes_up_later_is_trained_from_then_on(watch):
    watched, script = watch(), distillation(gradients=True)
    script.train(6)
    assert untrained(watched) == [script.teacher]
    script.optimizer.add_param_group({"params": list(script.teacher.parameters())})
    script.train(6)
    assert untrained(watched) == [] and len(watched.pytorch.calls.found) == 2


def test_ranks_leave_models_that_are_not_trained_as_the_script_calls_them(watch):
    watched, script = watch(), distillation()
    watched.pytorch.calls.divide = lambda call, args, kwargs: call.plain(*args, **kwargs)
    script.train(6)
    assert [call.module for call in watched.pytorch.calls.seams] == [script.model]
    watched.pytorch.calls.divide = None


# -- levers and numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True])
def test_levers_reach_a_teacher_and_are_released_from_it(gradients, watch):
    watched, script = watch(), distillation(gradients=gradients)
    strides = {name: p.stride() for name, p in script.teacher.named_parameters()}
    watched.engage(6, {"bf16": {}, "channels_last": {}})
    script.train(8)
    assert script.teacher[0].weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8)
    with torch.set_grad_enabled(gradients):
        found = script.teacher(x)
    assert found.dtype == torch.float32 and not torch.equal(found, script.teacher._call_impl(x))
    watched.pytorch.engage({})
    assert {name: p.stride() for name, p in script.teacher.named_parameters()} == strides
    assert torch.equal(script.teacher(x), script.teacher._call_impl(x))


def test_plain_against_plain_is_nothing_and_training_goes_on_as_if_never_compared(watch):
    plain = distillation(teacher=nn.Sequential(convolutions(), nn.Dropout(0.5)))  # in training mode: it draws
    watched = watch()
    compared = distillation(teacher=copy.deepcopy(plain.teacher), student=copy.deepcopy(plain.model))
    watched.compare(6, {"bf16": {}})
    watched.compare(12, {})
    torch.manual_seed(3)
    compared.train(20)
    watched.pytorch.detach()
    torch.manual_seed(3)
    plain.train(20)
    last, outputs = watched.answers[1].differences[:2]
    assert last.error == last.baseline_error == outputs.error == 0 and last.random_states_equal
    for ours, theirs in ((plain.model, compared.model), (plain.teacher, compared.teacher)):
        pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def planted(watched, change):
    """A lever of class rounding that changes what models that are not trained return."""
    from flatout.frameworks.lever import Lever

    class Wrong(Lever):
        name, summary, class_, shortens, check = "wrong", "a bug", "rounding", ("forward",), "gradients"

        def applies(self, facts, machine):
            return None

        def engage(self, session, settings):
            for call in session.calls.found:
                if not call.trained:
                    call.arounds["wrong"] = lambda compute, args, kwargs: change(compute, *args)

        def release(self, session):
            for call in session.calls.found:
                call.arounds.pop("wrong", None)

    watched.pytorch.session.levers = {**watched.pytorch.session.levers, "wrong": Wrong()}
    return {"wrong": {}}


def judged(watched):
    from flatout.judge.agreement import judge

    return judge(watched.answers, "rounding", ["gradients"])


class Back(torch.autograd.Function):
    """The very values, and a wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.01 * gradient


def statistics(compute, x):
    with torch.no_grad():
        compute(x)
    return compute(x)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda compute, x: compute(x), "agrees"),
        (lambda compute, x: 1.001 * compute(x), "disagrees"),
        (lambda compute, x: compute(x) + 0 * torch.rand(1), "disagrees"),
        (statistics, "disagrees"),
    ],
    ids=["the same", "another value", "random numbers drawn", "statistics moved twice"],
)
def test_what_a_teacher_gives_and_keeps_is_judged(change, word, watch):
    watched, script = watch(), distillation(teacher=convolutions())
    watched.compare(6, planted(watched, change))
    script.train(14)
    assert judged(watched).verdict == word, judged(watched)


@pytest.mark.parametrize(("change", "word"), [(lambda compute, x: compute(x), "agrees"),
                                              (lambda compute, x: compute(Back.apply(x)), "disagrees")])  # fmt: skip
def test_gradients_that_pass_through_a_model_that_is_not_trained_are_judged(change, word, watch):
    features = nn.Sequential(nn.Linear(5, 8), nn.Tanh()).eval().requires_grad_(False)

    def loss(out, x, target):
        return F.mse_loss(features(out), torch.zeros(4, 8))

    script, watched = Script(Net(), loss=loss), watch()
    watched.compare(6, planted(watched, change))
    script.train(14)
    assert untrained(watched) == [features]
    found = watched.difference()
    assert found.explained_cosine == pytest.approx(1, abs=1e-6)
    assert judged(watched).verdict == word, judged(watched)


def test_a_teacher_in_inference_mode_can_be_compared(watch):
    teacher, watched = convolutions().eval(), watch()

    def answers(x):
        with torch.inference_mode():
            return teacher(x)

    script = Script(Net(), answers, lambda out, x, target: F.mse_loss(out, target.clone()))
    watched.compare(6, {"bf16": {}, "channels_last": {}})
    script.train(14)
    assert untrained(watched) == [teacher] and watched.difference("outputs").error > 0
