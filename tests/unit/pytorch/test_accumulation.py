"""Does `accumulation` make one update of several batches, as a loop that is written so by hand, and say so?"""

import copy
import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from flatout.frameworks.pytorch.levers.accumulation import Accumulation  # noqa: E402
from flatout.records.plan import ONLY_PROVED  # noqa: E402
from flatout.trials.search.space import Choice, left_out  # noqa: E402
from handmade import FACTS, LOADER, MACHINE, OPTIMIZER  # noqa: E402
from optimizers import Own  # noqa: E402

MAKE = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=lr),
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr),
}
FACTOR = {"SGD": lambda num: num, "Adam": math.sqrt, "AdamW": math.sqrt, "RMSprop": math.sqrt}
BATCHES = torch.arange(12 * 8.0).sin().reshape(12, 8, 1)


class Part(torch.optim.SGD):
    """Has no `step` of its own, and a name for which there is a rule."""


Part.__name__ = "SGD"


@pytest.fixture
def under(watch):
    """Attach with the lever, as a process that is started under it; at the end it is released."""
    started = []

    def start(num, **options):
        started.append(watch({"accumulation": {"num": num}, **options.pop("beside", {})}, **options))
        return started[-1]

    yield start
    for watched in started:
        for name in [n for n in ("accumulation", "batch_size") if n in watched.pytorch.session.engaged]:
            watched.pytorch.session.release(name)


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model, batch):
    return (model(batch) - batch.cos()).square().mean()


def clear_in_front(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()


def clear_to_zero(model, optimizer, batch):
    loss = loss_of(model, batch)
    model.zero_grad(set_to_none=False)
    loss.backward()


def clear_by_hand(model, optimizer, batch):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()
    loss_of(model, batch).backward()


def clear_to_none_by_hand(model, optimizer, batch):
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(model, batch).backward()


CLEARINGS = (clear_in_front, clear_to_zero, clear_by_hand, clear_to_none_by_hand)


def train(make, lr, *, gradients=clear_in_front, between=lambda model: None, schedule=None):
    """A script as people write it: an update a batch. Returns its model, its optimizer, the rates that it reads."""
    model, rates = network(), []
    optimizer = make(model.parameters(), lr)
    scheduler = schedule(optimizer) if schedule else None
    for batch in BATCHES:
        gradients(model, optimizer, batch)
        between(model)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        if scheduler is not None:
            scheduler.step()
    return model, optimizer, rates


def by_hand(make, lr, num, *, between=lambda model: None, schedule=None):
    """The loop as it is written where gradients are accumulated on purpose."""
    model = network()
    optimizer = make(model.parameters(), lr)
    scheduler = schedule(optimizer) if schedule else None
    for number, batch in enumerate(BATCHES, 1):
        (loss_of(model, batch) / num).backward()
        if number % num == 0:
            between(model)
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return model


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def steps(watched):
    """Those that were told of, and those made before it was known what a step is."""
    return watched.listener.num_steps + watched.pytorch.num_missed_steps()


def same(model, other):
    return torch.allclose(weights(model), weights(other), rtol=1e-5, atol=1e-6)


# -- updates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("name", MAKE)
def test_the_training_is_that_of_a_loop_which_accumulates_with_the_rate_by_the_rule(name, num, under):
    factor = FACTOR[name](num)
    wanted = by_hand(MAKE[name], 0.01 * factor, num)
    watched = under(num)
    model, _, rates = train(MAKE[name], 0.01)
    assert same(model, wanted) and not same(model, network())
    assert {*rates} == {0.01}, "the script reads its own"
    assert steps(watched) == 12 // num, "a step is an update"
    proof = f"{12 // num} updates of `{name}`, each of {num} batches, at {factor:.3g} times its rate"
    assert watched.pytorch.evidence() == ({"accumulation": proof}, {})


@pytest.mark.parametrize("gradients", CLEARINGS)
def test_however_a_script_clears_gradients_those_of_a_group_are_averaged(gradients, under):
    wanted = by_hand(MAKE["SGD"], 0.04, 4)
    under(4)
    assert same(train(MAKE["SGD"], 0.01, gradients=gradients)[0], wanted)


def test_a_script_finds_in_grad_what_it_finds_there_plainly_but_at_an_update(under):
    def seen():
        found = []
        train(MAKE["SGD"], 0.0, between=lambda model: found.append(next(model.parameters()).grad.clone()))
        return found

    plain = seen()
    under(4)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen(), strict=True))


@pytest.mark.parametrize("as_keyword", [True, False])
def test_a_closure_is_evaluated_at_each_call_and_its_loss_given_back(as_keyword, under):
    wanted = by_hand(MAKE["SGD"], 0.04, 4)
    under(4)
    model = network()
    optimizer = MAKE["SGD"](model.parameters(), 0.01)
    rates, losses = [], []
    for batch in BATCHES:

        def closure(batch=batch):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure=closure) if as_keyword else optimizer.step(closure))
    assert same(model, wanted)
    assert len(rates) == 12 and {*rates} == {0.01}
    assert all(loss.requires_grad for loss in losses)


def test_schedules_go_on_batch_by_batch_without_a_warning_and_their_rate_counts(under, recwarn):
    def schedule(factor):
        return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02 * factor, total_steps=13)

    wanted = by_hand(MAKE["SGD"], 0.01, 3, schedule=schedule(3))
    recwarn.clear()
    under(3)
    model, optimizer, rates = train(MAKE["SGD"], 0.01, schedule=schedule(1))
    assert same(model, wanted) and len({*rates}) == 12
    assert optimizer.param_groups[0]["max_lr"] == 0.02
    assert not [one for one in recwarn if "lr_scheduler" in str(one.message)]


def test_parameters_that_only_some_batches_reach_are_updated_with_their_share(under):
    def losses(model, number):
        return model[number % 2](torch.ones(1, 1)).square().sum()

    def made():
        torch.manual_seed(3)
        model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)])
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    wanted, optimizer = made()
    for number in range(4):
        (losses(wanted, number) / 2).backward()
        if number % 2:
            optimizer.param_groups[0]["lr"] = 0.2
            optimizer.step()
            optimizer.zero_grad()
    under(2)
    model, optimizer = made()
    for number in range(4):
        optimizer.zero_grad()
        losses(model, number).backward()
        optimizer.step()
    assert same(model, wanted) and model[2].weight.grad is None


def test_sparse_gradients_are_averaged_as_well(under):
    def made():
        torch.manual_seed(3)
        model = nn.Embedding(6, 2, sparse=True)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    rows = torch.tensor([[0, 1], [1, 2], [3, 3], [0, 5]])
    wanted, optimizer = made()
    optimizer.param_groups[0]["lr"] = 0.2
    for first, second in rows.reshape(2, 2, 2):
        optimizer.zero_grad()
        ((wanted(first).square().sum() + wanted(second).square().sum()) / 2).backward()
        optimizer.step()
    watched = under(2)
    model, optimizer = made()
    for row in rows:
        optimizer.zero_grad()
        model(row).square().sum().backward()
        optimizer.step()
    assert same(model, wanted) and "accumulation" in watched.pytorch.evidence()[0]


def test_each_of_two_optimizers_counts_for_itself_and_a_step_is_still_their_order(under, workload):
    def groups(script, num):
        """The loop of a discriminator and a generator, with gradients of each accumulated apart."""
        (discriminator, maker), (first, second) = script.models, script.optimizers
        kept = {o: [torch.zeros_like(p) for p in o.param_groups[0]["params"]] for o in (first, second)}

        def take(optimizer, last):
            parameters = optimizer.param_groups[0]["params"]
            for summed, parameter in zip(kept[optimizer], parameters, strict=True):
                summed.add_(parameter.grad / num)
            if last:
                for summed, parameter in zip(kept[optimizer], parameters, strict=True):
                    parameter.grad = summed.clone()
                    summed.zero_()
                optimizer.step()

        for number in range(1, 25):
            generator = torch.Generator().manual_seed(99 + number)
            real = torch.randn(8, 4, generator=generator)
            fake = maker(torch.randn(8, 6, generator=generator))
            first.zero_grad()
            nn.functional.softplus(-discriminator(real)).mean().backward()
            nn.functional.softplus(discriminator(fake.detach())).mean().backward()
            take(first, number % num == 0)
            second.zero_grad()
            nn.functional.softplus(-discriminator(fake)).mean().backward()
            take(second, number % num == 0)

    def adam(factor):
        return lambda p: torch.optim.Adam(p, lr=1e-3 * factor, betas=(0.5, 0.999))

    wanted = workload("gan", optimizer=adam(math.sqrt(2)))
    groups(wanted, 2)
    watched = under(2)
    script = workload("gan", optimizer=adam(1.0)).train(24)
    assert all(same(a, b) for a, b in zip(script.models, wanted.models, strict=True))
    assert "24 updates of `Adam`" in watched.pytorch.evidence()[0]["accumulation"]
    assert watched.pytorch.facts().optimizers_per_step == 2
    assert Accumulation().applies(watched.pytorch.facts(), MACHINE) is None


def test_another_batch_size_beside_it_multiplies(under):
    items = torch.arange(64.0) / 64

    def epochs(size, lr, num=1):
        torch.manual_seed(4)
        model = nn.Linear(1, 1)
        optimizer, count = MAKE["SGD"](model.parameters(), lr), 0
        for _ in range(3):
            for batch in DataLoader(items, batch_size=size, shuffle=True):
                (loss_of(model, batch[:, None]) / num).backward()
                count += 1
                if count % num == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return model

    wanted = epochs(16, 0.04, num=2)
    watched = under(2, beside={"batch_size": {"num": 16}})
    torch.manual_seed(4)
    model = nn.Linear(1, 1)
    optimizer = MAKE["SGD"](model.parameters(), 0.01)
    for _ in range(3):
        for batch in DataLoader(items, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss_of(model, batch[:, None]).backward()
            optimizer.step()
    assert same(model, wanted) and optimizer.param_groups[0]["lr"] == 0.01
    assert watched.pytorch.session.engaged.keys() == {"accumulation", "batch_size"}


# -- clipping ------------------------------------------------------------------------------------------------------


CLIPS = {
    "the norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "values": lambda model: nn.utils.clip_grad_value_(list(model.parameters()), 0.01),
    "one after the other": lambda model: (
        nn.utils.clip_grad_value_(model.parameters(), clip_value=0.02),
        nn.utils.clip_grad.clip_grad_norm_(parameters=model.parameters(), max_norm=0.03, norm_type=1.0),
    ),
    "a layer alone": lambda model: nn.utils.clip_grad_norm_(model[0].parameters(), 0.01),
    "a tensor": lambda model: nn.utils.clip_grad_norm_(model[0].weight, 0.01),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_the_mean_of_a_group_is_clipped_once(clip, under):
    wanted = by_hand(MAKE["SGD"], 0.04, 4, between=clip)
    assert not same(wanted, by_hand(MAKE["SGD"], 0.04, 4))
    under(4)
    assert same(train(MAKE["SGD"], 0.01, between=clip)[0], wanted)


def test_a_script_is_told_the_norm_of_the_batch_at_hand(under):
    def norms():
        found = []
        train(
            MAKE["SGD"],
            0.0,
            between=lambda model: found.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()),
        )
        return found

    plain = norms()
    under(4)
    assert norms() == pytest.approx(plain)


def test_what_no_optimizer_updates_is_clipped_at_once(under):
    under(4)
    train(MAKE["SGD"], 0.01)
    picture = torch.zeros(3, requires_grad=True)
    picture.grad = torch.full((3,), 5.0)
    nn.utils.clip_grad_value_((p for p in [picture]), 1.0)
    assert picture.grad.tolist() == [1.0] * 3


def test_gradients_of_two_optimizers_that_are_clipped_together_end_it_and_are_clipped(under):
    def run():
        model = network()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
        for batch in BATCHES:
            model.zero_grad()
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            for optimizer in optimizers:
                optimizer.step()
        return model

    plain = run()
    watched = under(4)
    assert torch.equal(weights(run()), weights(plain))
    assert "clipped together" in watched.pytorch.evidence()[1]["accumulation"]


def test_a_wrong_call_of_the_clipping_raises_what_it_raises_plainly(under):
    with pytest.raises(TypeError) as plain:
        nn.utils.clip_grad_norm_()
    under(4)
    train(MAKE["SGD"], 0.01)
    with pytest.raises(TypeError) as ours:
        nn.utils.clip_grad_norm_()
    assert str(ours.value) == str(plain.value)


# -- gradient scalers ----------------------------------------------------------------------------------------------


def scaled(make, lr, overflows=(), clip=False):
    model = network()
    optimizer, scaler = make(model.parameters(), lr), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for number, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch) * (math.inf if number in overflows else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    return model


@pytest.mark.parametrize("clip", [False, True])
def test_with_a_gradient_scaler_whose_scale_changes_the_training_is_the_same(clip, under):
    between = CLIPS["the norm"] if clip else lambda model: None
    wanted = by_hand(MAKE["SGD"], 0.04, 4, between=between)
    watched = under(4)
    assert same(scaled(MAKE["SGD"], 0.01, clip=clip), wanted)
    assert steps(watched) == 3


def test_a_batch_that_overflows_is_left_out_of_its_group_and_is_no_step(under):
    watched = under(4)
    model = scaled(MAKE["SGD"], 0.01, overflows=(0, 5))
    assert weights(model).isfinite().all()
    assert steps(watched) == 2 and "2 updates" in watched.pytorch.evidence()[0]["accumulation"]


def test_a_fused_update_that_is_given_scaled_gradients_ends_it(under):
    def fused(parameters, lr):
        return torch.optim.Adam(parameters, lr=lr, fused=True)

    plain = scaled(fused, 0.01)
    watched = under(4)
    assert torch.equal(weights(scaled(fused, 0.01)), weights(plain))
    assert "still scaled" in watched.pytorch.evidence()[1]["accumulation"]
    assert steps(watched) == 12


# -- what ends it, and the end -------------------------------------------------------------------------------------


def test_with_an_optimizer_without_a_rule_each_call_updates_as_plainly_and_nothing_is_claimed(under):
    plain = train(Own, 0.01)[0]
    watched = under(4)
    kept = train(Own, 0.01)
    assert torch.equal(weights(kept[0]), weights(plain))
    why = "no rule is known for the learning rate of `Own`"
    assert watched.pytorch.evidence() == ({}, {"accumulation": why})
    assert Accumulation().applies(watched.pytorch.facts(), MACHINE) == why


def test_an_optimizer_of_several_evaluations_is_left_alone(under):
    watched = under(4)
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, BATCHES[0])
        loss.backward()
        return loss

    before = loss_of(model, BATCHES[0]).item()
    for _ in range(9):
        optimizer.step(closure)
    assert loss_of(model, BATCHES[0]).item() < before
    assert "accumulation" in watched.pytorch.evidence()[1]


def test_a_class_without_a_step_of_its_own_updates_once_in_a_group(under):
    wanted = by_hand(lambda p, lr: torch.optim.SGD(p, lr=lr), 0.04, 4)
    under(4)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert same(train(Part, 0.01)[0], wanted)


def test_a_copy_of_an_optimizer_counts_for_itself(under):
    wanted = by_hand(MAKE["SGD"], 0.04, 4)
    under(4)

    def copied(parameters, lr):
        parameters = list(parameters)
        other = copy.deepcopy(MAKE["SGD"](parameters, lr))
        other.param_groups[0]["params"] = parameters
        return other

    assert same(train(copied, 0.01)[0], wanted)


def test_an_update_that_raises_leaves_the_rate_and_begins_a_new_group(under):
    under(2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def fails():
        raise ValueError("no gradient")

    clear_in_front(model, optimizer, BATCHES[0])
    optimizer.step()
    with pytest.raises(ValueError, match="no gradient"):
        optimizer.step(fails)
    assert optimizer.param_groups[0]["lr"] == 0.5
    before = weights(model).clone()
    clear_in_front(model, optimizer, BATCHES[1])
    optimizer.step()
    assert not torch.equal(weights(model), before), "the call that raised handed over nothing: this one is the second"
    optimizer.register_step_pre_hook(lambda *_: fails())
    clear_in_front(model, optimizer, BATCHES[1])
    optimizer.step()
    with pytest.raises(ValueError, match="no gradient"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_group_that_is_not_complete_at_the_end_is_dropped(under):
    wanted = by_hand(MAKE["SGD"], 0.05, 5)
    watched = under(5)
    model, _, _ = train(MAKE["SGD"], 0.01)
    assert same(model, wanted), "twelve batches are two groups of five"
    assert steps(watched) == 2


def test_released_in_the_middle_of_a_group_each_call_updates_and_classes_are_as_they_were(under):
    before = torch.optim.SGD.step, nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_value_
    made = torch.optim.Optimizer.__dict__["_patch_step_function"]
    watched = under(4)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in BATCHES[:2]:
        clear_in_front(model, optimizer, batch)
        optimizer.step()
    assert torch.equal(weights(model), weights(network()))
    watched.pytorch.session.release("accumulation")
    for batch in BATCHES[2:]:
        clear_in_front(model, optimizer, batch)
        optimizer.step()
    plain = network()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in BATCHES[2:]:
        clear_in_front(plain, other, batch)
        other.step()
    assert torch.equal(weights(model), weights(plain)), "what the group had until then is dropped"
    assert (torch.optim.SGD.step, nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_value_) == before
    assert torch.optim.Optimizer.__dict__["_patch_step_function"] is made


def test_what_breaks_in_it_is_said_and_the_training_goes_on(under, monkeypatch):
    from flatout.frameworks.pytorch.seams.summed_gradients import SummedGradients

    def fails(sums, parameters):
        raise RuntimeError("no memory")

    plain, _, _ = train(MAKE["SGD"], 0.01)
    watched = under(4)
    monkeypatch.setattr(SummedGradients, "add", fails)
    assert torch.equal(weights(train(MAKE["SGD"], 0.01)[0]), weights(plain))
    assert "no memory" in watched.pytorch.evidence()[1]["accumulation"]


def test_before_the_first_group_is_complete_that_is_why_nothing_is_shown(under):
    watched = under(100)
    train(MAKE["SGD"], 0.01)
    assert watched.pytorch.evidence()[1] == {"accumulation": "no optimizer has been called 100 times yet"}


# -- where it applies ----------------------------------------------------------------------------------------------


def test_a_script_that_accumulates_itself_is_told_to_change_its_own_number(under):
    watched = under(2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(BATCHES.flatten()[:, None], batch_size=8)
    for _ in range(6):
        for number, batch in enumerate(loader, 1):
            (loss_of(model, batch) / 3).backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    why = "the script accumulates gradients itself, of 3 batches: change its own number"
    assert Accumulation().applies(watched.pytorch.facts(), MACHINE) == why
    assert watched.pytorch.evidence()[1] == {"accumulation": why}


def test_under_it_the_facts_of_a_plain_loop_do_not_look_like_one_that_accumulates(under):
    watched = under(3)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(BATCHES.flatten()[:, None], batch_size=8)
    for _ in range(6):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    facts = watched.pytorch.facts()
    assert facts.loaders[0].fetches_per_step == pytest.approx(3, abs=0.2)
    assert facts.calls_per_update == 3 and Accumulation().applies(facts, MACHINE) is None
    assert "accumulation" in watched.pytorch.evidence()[0]


def test_it_applies_to_one_process_whose_optimizers_have_a_rule_and_evaluate_once():
    lever = Accumulation()
    assert lever.applies(FACTS, MACHINE) is None
    assert "several processes" in lever.applies(replace(FACTS, distributed=True), MACHINE)
    assert "no optimizer" in lever.applies(replace(FACTS, step_rhythm="call"), MACHINE)
    closure = replace(OPTIMIZER, name="LBFGS", has_closure=True)
    assert "several times in an update" in lever.applies(replace(FACTS, optimizers=(closure,)), MACHINE)
    often = replace(FACTS, loaders=(replace(LOADER, fetches_per_step=5.0),))
    assert "of 5 batches" in lever.applies(often, MACHINE)
    critics = replace(often, optimizers_per_step=6)
    assert lever.applies(critics, MACHINE) is None


def test_the_search_never_tries_it_whatever_it_may_accept():
    lever = Accumulation()
    assert lever.settings(FACTS, MACHINE) == ()
    assert ONLY_PROVED in left_out(lever, Choice(accept="semantics", only=("accumulation",)))
