"""Is every lever undone without a trace, within its class while engaged, and unseen by the script?"""

import copy
import io
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import warm

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.judge.agreement import judge  # noqa: E402
from flatout.records.ceilings import Accelerator  # noqa: E402
from handmade import FACTS, LOADER, MACHINE  # noqa: E402
from processors import computes_bfloat16_lstm  # noqa: E402

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
WORKLOADS = ("conv", "transformer", "mlp", "lstm", "gan")
CPU_LEVERS = {
    "threads": {"num": 2},
    "bf16": {},
    "channels_last": {},
    "fused_optimizer": {},
    "foreach_optimizer": {},
    "tf32": {},
}
MOMENTUM = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "sgd with nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "sgd that maximizes": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.5, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-2),
    "adam with amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=1e-3),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 1e-2}, {"params": p[2:], "weight_decay": 0}]),
}
FOREACH_ONLY = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
}


def skip_where_it_cannot_be_computed(lever, name):
    if (lever, name) == ("bf16", "lstm") and not computes_bfloat16_lstm():
        pytest.skip("no LSTM in bfloat16 on this processor")


# -- engaged and released ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("lever", CPU_LEVERS)
def test_engaging_and_releasing_is_the_identity(lever, name, watch, workload, different, layouts, settings_of_torch):
    plain = workload(name).train(9)
    watched, script = watch(), workload(name)
    script.train(9)
    before = layouts(script), settings_of_torch(), [list(vars(m)) for m in script.models]
    groups = [repr(o) for o in script.optimizers], [dict(vars(o)) for o in script.optimizers]
    watched.pytorch.engage({lever: CPU_LEVERS[lever]})
    watched.pytorch.engage({})
    assert different(plain.state(), script.state()) == []
    assert (layouts(script), settings_of_torch(), [list(vars(m)) for m in script.models]) == before
    assert [repr(o) for o in script.optimizers] == groups[0]
    assert [vars(o).keys() for o in script.optimizers] == [own.keys() for own in groups[1]]
    torch.manual_seed(4)
    wanted = plain.train(8).state()
    torch.manual_seed(4)
    assert different(wanted, script.train(8).state()) == []


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("lever", CPU_LEVERS)
def test_layouts_and_settings_are_plain_again_after_steps_under_a_lever(
    lever, name, watch, workload, layouts, settings_of_torch
):
    skip_where_it_cannot_be_computed(lever, name)
    plain = workload(name).train(18)
    watched, script = watch(), workload(name)
    before = settings_of_torch()
    watched.engage(6, {lever: CPU_LEVERS[lever]})
    watched.engage(12, {})
    script.train(18)
    assert settings_of_torch() == before
    assert layouts(script) == layouts(plain)
    assert [repr(o) for o in script.optimizers] == [repr(o) for o in plain.optimizers]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("lever", ["threads", "bf16", "channels_last", "fused_optimizer", "foreach_optimizer"])
def test_every_lever_agrees_within_its_class(lever, name, watch, workload):
    skip_where_it_cannot_be_computed(lever, name)
    watched, script = watch(), workload(name)
    if name == "conv":
        script.model.body[-1].p = 0.0  # its mask is drawn in the order of the memory: see the test of numerics
    kind = registry()[lever]
    checks = ("gradients", "updates")
    for step in (12, 15, 18):
        watched.compare(step, {lever: CPU_LEVERS[lever]}, *checks)
    script.train(28)
    judged = judge(watched.answers, kind.class_, (kind.check,))
    assert judged.verdict == "agrees", judged.detail
    for answer in watched.answers:
        gradients, outputs, updates = answer.differences
        assert gradients.baseline_error == outputs.baseline_error == updates.baseline_error == 0
        if lever.endswith("optimizer"):
            assert gradients.error == 0


@pytest.mark.parametrize("lever", ["bf16", "channels_last", "fused_optimizer", "threads"])
def test_evidence_of_an_effect_comes_only_with_the_effect(lever, watch, workload):
    watched, script = watch(), workload("conv", lambda p: torch.optim.AdamW(p))
    script.train(8)
    watched.pytorch.engage({lever: CPU_LEVERS[lever]})
    proofs, missing = watched.pytorch.evidence()
    if lever in ("bf16", "fused_optimizer"):
        assert missing == {lever: "no effect was seen"}
    script.train(4)
    proofs, missing = watched.pytorch.evidence()
    assert missing == {} and proofs[lever]


def test_evidence_of_bf16_is_missing_where_nothing_is_computed_in_it(watch):
    class Elementwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (x * self.scale).sum(1)

    watched, model = watch(), Elementwise()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched.engage(5, {"bf16": {}})
    for _ in range(12):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert watched.pytorch.evidence() == ({}, {"bf16": "no effect was seen"})


def test_evidence_of_bf16_is_there_though_every_output_is_float32(watch):
    class Returning(nn.Linear):
        def forward(self, x):
            return super().forward(x).float()

    watched, model = watch(), Returning(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched.engage(5, {"bf16": {}})
    for _ in range(12):
        out = model(torch.randn(3, 4))
        out.sum().backward()
        optimizer.step()
    assert out.dtype == torch.float32
    assert watched.pytorch.evidence()[0] == {"bf16": "products in bfloat16"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_levers_reach_models_and_optimizers_that_come_later(name, watch, workload):
    skip_where_it_cannot_be_computed("bf16", name)
    watched = watch()
    first = workload(name)
    first.train(60)
    watched.pytorch.engage({"bf16": {}, "fused_optimizer": {}})
    second = workload(name, lambda p: torch.optim.Adam(p))
    second.train(60)
    assert all("bf16" in call.arounds for call in watched.pytorch.calls.found)
    assert watched.pytorch.session.flags.num_optimizers("fused") == len(watched.pytorch.session.optimizers) - (
        len(first.optimizers) if name == "lstm" else 0
    )


# -- exact levers --------------------------------------------------------------------------------------------------


def test_pinned_memory_keeps_every_bit_of_a_run(shuffled_epochs):
    """For `workers` see `test_loaders`."""
    command = [sys.executable, SCRIPTS / "under_levers.py", '{"pinned_memory": {}}', SCRIPTS / "shuffled_epochs.py"]
    done = warm.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == shuffled_epochs.stdout and "epoch 3" in done.stdout


@pytest.mark.parametrize(
    ("shm_mb", "batch_mb", "nums"),
    [
        (64, 1, [4, 2, 1, 0]),
        (64, 5, [1, 0]),
        (64, 8, None),
        (64, None, None),
        (2048, None, [4, 2, 1, 0]),
        (None, 9, [4, 2, 1, 0]),
    ],
)
def test_workers_need_room_for_the_batches_that_wait(shm_mb, batch_mb, nums):
    """Docker's 64 MB are enough for small batches, and a bus error for large ones."""
    lever = registry()["workers"]
    facts = replace(FACTS, loaders=(replace(LOADER, num_workers=3, batch_bytes=batch_mb and batch_mb * 2**20),))
    machine = replace(MACHINE, num_cores=4, shm_bytes=shm_mb and shm_mb * 2**20)
    if nums is None:
        assert "/dev/shm has 64 MB" in lever.applies(facts, machine)
    else:
        assert lever.applies(facts, machine) is None
        assert [s["num"] for s in lever.settings(facts, machine)] == nums


@pytest.mark.parametrize(
    ("now", "cores", "nums"),
    [(2, 4, [4, 1, 0]), (12, 2, [2, 8, 4, 1, 0]), (1, 2, [2, 0]), (64, 32, [32, 8, 4, 2, 1, 0])],
)
def test_workers_are_tried_up_to_the_cores_and_down_to_none(now, cores, nums):
    facts = replace(FACTS, loaders=(replace(LOADER, num_workers=now, batch_bytes=2**20),))
    settings = registry()["workers"].settings(facts, replace(MACHINE, num_cores=cores, shm_bytes=None))
    assert [one["num"] for one in settings] == nums


def test_a_script_without_workers_is_given_none():
    assert registry()["workers"].applies(FACTS, MACHINE) == "the script has no workers"


# -- optimizers ----------------------------------------------------------------------------------------------------


def shown(optimizer):
    """What the script can see of its optimizer's options."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups], [
        list(group) for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("kind", MOMENTUM)
def test_a_fused_update_is_the_plain_one_within_rounding_and_unseen(kind, watch, workload, different):
    plain = workload("mlp", MOMENTUM[kind]).train(20)
    watched, script = watch(), workload("mlp", MOMENTUM[kind])
    seen = []
    watched.engage(5, {"fused_optimizer": {}})
    script.train(10)
    assert watched.pytorch.session.flags.num_optimizers("fused") == 1
    script.optimizer.register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0].get("fused")))
    script.train(10)
    assert shown(script.optimizer) == shown(plain.optimizer)
    assert script.optimizer.defaults == plain.optimizer.defaults
    a, b = plain.optimizer.state_dict(), script.optimizer.state_dict()
    assert a["param_groups"] == b["param_groups"] and list(a["state"]) == list(b["state"])
    for mine, theirs in zip(a["state"].values(), b["state"].values(), strict=True):
        assert list(mine) == list(theirs)
        for name, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert theirs[name].dtype == value.dtype and theirs[name].stride() == value.stride()
                torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-5)
    for p, q in zip(plain.model.parameters(), script.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", [*MOMENTUM, *FOREACH_ONLY])
def test_foreach_updates_agree_for_every_optimizer(kind, watch, workload):
    watched, script = watch(), workload("mlp", {**MOMENTUM, **FOREACH_ONLY}[kind])
    watched.compare(8, {"foreach_optimizer": {}}, "updates")
    script.train(14)
    assert watched.difference("updates").error < 1e-5
    watched.pytorch.engage({"foreach_optimizer": {}})
    script.train(3)
    assert watched.pytorch.evidence()[0]["foreach_optimizer"].startswith("1 of 1 optimizers use foreach in 3")
    assert shown(script.optimizer)[0][0].get("foreach") is None


@pytest.mark.parametrize("kind", FOREACH_ONLY)
def test_an_optimizer_without_a_fused_update_is_left_alone(kind, watch, workload):
    watched, script = watch(), workload("mlp", FOREACH_ONLY[kind])
    script.train(8)
    assert not watched.pytorch.facts().optimizers[0].can_fuse
    watched.pytorch.engage({"fused_optimizer": {}})
    script.train(3)
    assert watched.pytorch.evidence() == ({}, {"fused_optimizer": "no effect was seen"})


class MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, fused=False),
        lambda p: torch.optim.Adam(p, fused=True),
        lambda p: torch.optim.Adam(p, foreach=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
        lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True),
        MyAdam,
    ],
    ids=["not fused", "fused", "foreach", "tensor as rate", "differentiable", "of its own"],
)
def test_an_optimizer_about_which_the_script_has_decided_cannot_be_fused(make):
    from flatout.frameworks.pytorch.seams.optimizers import can_fuse

    assert not can_fuse(make([nn.Parameter(torch.ones(2))]))


def test_a_rate_that_is_a_tensor_goes_without_foreach_as_pytorch_refuses_it():
    from flatout.frameworks.pytorch.seams.optimizers import can_foreach

    parameter = nn.Parameter(torch.ones(2))
    assert can_foreach(torch.optim.Adam([parameter]))
    for options in ({"lr": torch.tensor(1e-3)}, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}):
        parameter.grad = torch.ones(2)
        with pytest.raises((ValueError, RuntimeError)):
            torch.optim.Adam([parameter], foreach=True, **options).step()
        assert not can_foreach(torch.optim.Adam([parameter], **options))


def test_sparse_or_complex_parameters_cannot_be_fused():
    from flatout.frameworks.pytorch.seams.optimizers import can_fuse

    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    assert not can_fuse(torch.optim.SGD(embedding.parameters(), lr=0.1))
    assert not can_fuse(torch.optim.Adam([nn.Parameter(torch.ones(2, dtype=torch.cfloat))]))


@pytest.mark.parametrize("kind", ["sgd with momentum", "adamw", "adagrad"])
def test_a_checkpoint_saved_while_fused_continues_in_plain_as_its_values_say(kind, watch, workload, different):
    watched, script = watch(), workload("mlp", MOMENTUM[kind])
    watched.engage(4, {"fused_optimizer": {}})
    script.train(12)
    file = io.BytesIO()
    torch.save({"model": script.model.state_dict(), "optimizer": script.optimizer.state_dict()}, file)
    watched.pytorch.detach()
    file.seek(0)
    checkpoint = torch.load(file)
    by_hand = workload("mlp", MOMENTUM[kind])
    loaded = workload("mlp", MOMENTUM[kind])
    loaded.model.load_state_dict(checkpoint["model"])
    loaded.optimizer.load_state_dict(checkpoint["optimizer"])
    with torch.no_grad():  # the same values put into a plain run by hand
        for p, value in zip(by_hand.model.parameters(), checkpoint["model"].values(), strict=True):
            p.copy_(value)
    for number, p in enumerate(by_hand.optimizer.param_groups[0]["params"]):
        by_hand.optimizer.state[p] = copy.deepcopy(script.optimizer.state_dict()["state"][number])
    for one in (loaded, by_hand):
        one.done = 12
        torch.manual_seed(9)
        one.train(6)
    assert different(loaded.state(), by_hand.state()) == []


@pytest.mark.parametrize("kind", ["sgd with momentum", "adamw", "two groups"])
def test_the_script_may_load_add_groups_and_schedule_while_fused(kind, watch, workload):
    def script_of(levers):
        watched, script = watch(), workload("mlp", MOMENTUM[kind], scheduler=True)
        watched.engage(4, levers)
        script.train(8)
        saved = copy.deepcopy(script.optimizer.state_dict())
        script.train(3)
        script.optimizer.load_state_dict(saved)
        extra = nn.Parameter(torch.ones(3))
        script.optimizer.add_param_group({"params": [extra], "lr": 0.5})
        for _ in range(4):
            extra.grad = torch.ones(3)
            script.train(1)
        watched.pytorch.detach()
        return script, extra

    plain, extra = script_of({})
    fused, fused_extra = script_of({"fused_optimizer": {}})
    assert shown(plain.optimizer) == shown(fused.optimizer)
    torch.testing.assert_close(fused_extra, extra)
    for p, q in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-5)


def test_step_counters_of_a_script_in_double_precision_are_given_back_in_its_type(watch, workload):
    torch.set_default_dtype(torch.float64)
    try:
        watched, script = watch(), workload("mlp", MOMENTUM["adam"])
        watched.engage(4, {"fused_optimizer": {}})
        script.train(8)
        assert script.optimizer.state_dict()["state"][0]["step"].dtype == torch.float64
        assert watched.pytorch.session.flags.num_updates > 0
        watched.pytorch.engage({})
        assert {s["step"].dtype for s in script.optimizer.state.values()} == {torch.float64}
        assert float(script.optimizer.state_dict()["state"][0]["step"]) == 8
    finally:
        torch.set_default_dtype(torch.float32)


def test_moments_that_lie_otherwise_than_their_parameter_are_aligned_before_a_fused_update(watch):
    watched = watch()
    model = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(2, 3, 6, 6)
    twin = copy.deepcopy(model)
    plain = torch.optim.Adam(twin.parameters(), lr=0.01)
    for number in range(14):
        for net, update in ((model, optimizer), (twin, plain)):
            update.zero_grad()
            net(x).pow(2).mean().backward()
            if number == 6 and net is model:
                model.to(memory_format=torch.channels_last)  # the script's own: moments stay as they are
                watched.pytorch.engage({"fused_optimizer": {}})
            update.step()
    assert watched.pytorch.session.flags.num_updates > 0
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-4, atol=1e-6)


def test_an_update_that_raises_leaves_the_scripts_flags_after_the_next_one(watch, workload):
    watched, script = watch(), workload("mlp", MOMENTUM["adam"])
    watched.engage(4, {"fused_optimizer": {}})
    script.train(8)
    with pytest.raises(TypeError):
        script.optimizer.step(closure=3)
    script.train(1)
    assert shown(script.optimizer)[0][0]["fused"] is None
    watched.pytorch.engage({})
    assert shown(script.optimizer)[0][0]["fused"] is None


@pytest.mark.parametrize(("lever", "flag"), [("fused_optimizer", "fused"), ("foreach_optimizer", "foreach")])
def test_checkpoints_written_within_an_update_or_after_one_that_was_interrupted_show_the_scripts_flags(
    lever, flag, watch, workload
):
    watched, script = watch(), workload("mlp", MOMENTUM["adam"])
    watched.engage(4, {lever: {}})
    script.train(8)
    optimizer, seen = script.optimizer, []

    def checkpoint(*_):
        seen.append(optimizer.state_dict()["param_groups"][0][flag])

    def interrupted():
        checkpoint()
        raise KeyboardInterrupt

    handle = optimizer.register_step_post_hook(checkpoint)
    script.train(1)
    assert watched.pytorch.session.flags.num_updates > 0
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted)
    checkpoint()
    handle.remove()
    watched.pytorch.engage({})
    checkpoint()
    assert seen == [None] * 4
    assert not optimizer._optimizer_state_dict_post_hooks


def test_what_the_script_makes_of_its_checkpoint_is_its_own_while_fused(watch, workload):
    watched, script = watch(), workload("mlp", MOMENTUM["adam"])
    script.optimizer.register_state_dict_post_hook(lambda _, kept: {"steps": float(kept["state"][0]["step"])})
    watched.engage(4, {"fused_optimizer": {}})
    script.train(8)
    assert script.optimizer.state_dict() == {"steps": 8.0}


def test_a_learning_rate_that_becomes_a_tensor_later_is_the_scripts_business_under_foreach(watch, workload):
    watched, script = watch(), workload("mlp", MOMENTUM["adam"])
    watched.engage(4, {"foreach_optimizer": {}})
    script.train(8)
    script.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)  # PyTorch refuses it where `foreach` was asked for
    script.train(3)
    script.optimizer.param_groups[0]["lr"] = 1e-3
    script.train(3)
    assert watched.pytorch.session.flags.num_optimizers("foreach") == 1


def test_gradients_that_are_sparse_later_are_added_as_in_plain_while_fused(watch):
    table, head = torch.nn.Embedding(50, 4, sparse=True), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
    watched = watch()
    watched.engage(4, {"fused_optimizer": {}})
    for number in range(20):
        words = torch.arange(3)
        loss = head(table(words) if number > 10 else torch.ones(3, 4)).pow(2).mean()  # unused at first: no gradients
        before = table.weight.detach().clone()
        loss.backward()
        optimizer.step()
        assert (number > 10) == (not torch.equal(before, table.weight))
        optimizer.zero_grad()
    assert watched.pytorch.session.flags.num_optimizers("fused") == 1


# -- bf16 ----------------------------------------------------------------------------------------------------------


def trained(watch, model, loss=lambda out: out.float().pow(2).mean(), levers=None, batch=lambda: torch.randn(3, 4)):
    watched = watch()
    watched.engage(5, levers or {"bf16": {}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    out = None
    for _ in range(12):
        out = model(batch())
        loss(out).backward()
        optimizer.step()
        optimizer.zero_grad()
    return watched, out


class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        out = self.layer(x)
        return {"own": out.to(torch.bfloat16), "plain": out, "label": out.argmax(1), "half": out.half()}


def test_outputs_come_back_in_the_types_that_plain_gives(watch):
    watched, out = trained(watch, Casting(), lambda out: out["own"].float().sum() + out["plain"].sum())
    assert {k: v.dtype for k, v in out.items()} == {
        "own": torch.bfloat16, "plain": torch.float32, "label": torch.int64, "half": torch.float16
    }  # fmt: skip
    assert watched.pytorch.evidence()[0]["bf16"] == "outputs and products in bfloat16"


def test_a_model_with_bfloat16_parts_of_its_own_keeps_them(watch):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16)

        def forward(self, x):
            return self.second(self.first(x).to(torch.bfloat16))

    _, out = trained(watch, Mixed())
    assert out.dtype == torch.bfloat16


def test_outputs_in_a_distribution_or_a_dataclass_come_back_as_well(watch):
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Linear(4, 2)

        def forward(self, x):
            return torch.distributions.Normal(self.mean(x), torch.ones(2))

    _, out = trained(watch, Policy(), lambda out: -out.log_prob(torch.zeros(2)).mean())
    assert out.loc.dtype == torch.float32 and out.sample().dtype == torch.float32


def test_a_lever_under_which_the_model_raises_is_dropped_and_training_goes_on_exactly(watch, workload, different):
    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

        def forward(self, x):
            x = self.drop(self.norm(x))
            x = self.layer(x)
            if x.dtype != torch.float32:
                raise RuntimeError("expected scalar type Float")
            return x

    def run(levers):
        torch.manual_seed(0)
        model = Strict()
        watched, _ = trained(watch, model, levers=levers)
        watched.pytorch.detach()
        return model.state_dict() | {"random": torch.get_rng_state()}, watched.listener.failures

    watch.may_fail = True
    plain, none = run({"threads": {"num": 1}})
    dropped, failures = run({"bf16": {}, "fused_optimizer": {}})
    assert none == [] and [(stage, str(problem)) for stage, problem in failures] == [
        ("step", "expected scalar type Float")
    ]
    assert different(plain, dropped) == []


def test_the_binary_loss_that_autocast_refuses_is_computed_or_dropped(watch):
    class Judge(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.loss = nn.Linear(4, 1), nn.BCELoss()

        def forward(self, x):
            return self.loss(torch.sigmoid(self.layer(x)), torch.ones(3, 1))

    watch.may_fail = True
    watched, out = trained(watch, Judge(), lambda out: out)
    assert out.dtype == torch.float32
    assert watched.pytorch.engaged() == {} or watched.pytorch.evidence()[0]


# -- channels_last -------------------------------------------------------------------------------------------------


class Images(nn.Module):
    def __init__(self, *layers, view=False):
        super().__init__()
        self.body = nn.Sequential(*layers)
        self.view = view

    def forward(self, x):
        x = self.body(x)
        return x.view(x.shape[0], -1) if self.view else x.flatten(1)


KINDS = {
    "plain": lambda: (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)),
    "grouped": lambda: (nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=4)),
    "depthwise": lambda: (nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8)),
    "of one by one": lambda: (nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)),
    "transposed": lambda: (nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3)),
    "of one channel": lambda: (nn.Conv2d(3, 1, 3), nn.Conv2d(1, 4, 3)),
}


def images(dims=2):
    return lambda: torch.randn(2, 3, *[6] * dims)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [MOMENTUM["adam"], MOMENTUM["sgd with momentum"]], ids=["adam", "sgd"])
def test_convolutions_of_every_kind_agree_in_channels_last_and_go_back(kind, make, watch, layouts):
    watched, model = watch(), Images(*KINDS[kind]())
    optimizer = make(list(model.parameters()))
    watched.compare(5, {"channels_last": {}, "fused_optimizer": {}}, "gradients", "updates")
    watched.engage(9, {"channels_last": {}, "fused_optimizer": {}})
    watched.engage(14, {})
    batch, script = images(), SimpleNamespace(models=[model], optimizers=[optimizer])
    before = None
    for number in range(20):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        before = before or layouts(script)
        if watched.listener.num_steps == 12:
            proof = watched.pytorch.evidence()[0]["channels_last"]
            assert proof == f"{sum(p.dim() == 4 for p in model.parameters())} convolution weights lie in channels_last"
    assert watched.difference().error < 1e-4 and watched.difference("updates").error < 1e-4
    assert layouts(script) == before


VOLUMES = {
    "plain": lambda: (nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 4, 3)),
    "transposed": lambda: (nn.Conv3d(3, 8, 3, stride=2), nn.ConvTranspose3d(8, 4, 2)),
    "grouped": lambda: (nn.Conv3d(3, 8, 3), nn.Conv3d(8, 8, 3, groups=4)),
    "of one channel": lambda: (nn.Conv3d(3, 1, 3), nn.Conv3d(1, 4, 3)),
}


@pytest.mark.parametrize("kind", VOLUMES)
def test_volumes_move_whole_agree_and_go_back(kind, watch, layouts):
    """Parameters, gradients and moments alike: what is left behind would be paired with other elements."""
    watched, model = watch(), Images(*VOLUMES[kind]())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch, script = images(3), SimpleNamespace(models=[model], optimizers=[optimizer])
    watched.compare(5, {"channels_last": {}}, "gradients", "updates")
    watched.engage(9, {"channels_last": {}})
    before = None
    for number in range(16):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        before = before or layouts(script)
    weights = [p for p in model.parameters() if p.dim() == 5]
    telling = [p for p in weights if min(p.shape[1:]) > 1]
    for p in telling:
        for value in (p, p.grad, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
            assert value.is_contiguous(memory_format=torch.channels_last_3d) and not value.is_contiguous()
    proof = watched.pytorch.evidence()[0]["channels_last"]
    assert telling and proof == f"{len(weights)} convolution weights lie in channels_last"
    assert watched.difference().error < 1e-4 and watched.difference("updates").error < 1e-4
    values = [p.detach().clone() for p in model.parameters()]
    watched.pytorch.engage({})
    assert layouts(script) == before
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))


def test_grey_images_are_laid_out_so_too_though_any_layout_passes_for_it(watch):
    """By the strides of its input and weight a convolution chooses its kernel: backward was 2.4 times as long."""
    model = Images(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 4, 3))
    seen = []
    model.body[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].stride()))
    plain = [p.stride() for p in model.parameters()]
    watched, _ = trained(watch, model, levers={"channels_last": {}}, batch=lambda: torch.rand(2, 1, 8, 8))
    assert model.body[0].weight.stride() == (9, 1, 3, 1) and seen[-1] == (64, 1, 8, 1)
    watched.engage(0, {})
    watched.pytorch.engage({})
    assert [p.stride() for p in model.parameters()] == plain


def test_a_view_on_images_raises_in_channels_last_and_the_lever_is_dropped(watch):
    """Documented: `view` wants the channel's stride where `flatten` or `reshape` would copy."""
    watch.may_fail = True
    model = Images(nn.Conv2d(3, 8, 3), view=True)
    watched, out = trained(watch, model, levers={"channels_last": {}}, batch=images())
    ((stage, problem),) = watched.listener.failures
    assert stage == "step" and "view" in str(problem)
    assert watched.pytorch.engaged() == {} and model.body[0].weight.is_contiguous() and out.shape == (2, 128)


def test_a_view_on_images_fails_a_comparison_in_channels_last(watch):
    model = Images(nn.Conv2d(3, 8, 3), view=True)
    watched, problems = watch(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def begin():
        watched.pytorch.begin_capture()
        watched.listener.waiting = compare

    def compare():
        with pytest.raises(RuntimeError, match="view"):
            watched.pytorch.compare({"channels_last": {}}, ("gradients",))
        problems.append(1)

    watched.at(5, begin)
    for _ in range(12):
        model(images()()).pow(2).mean().backward()
        optimizer.step()
    assert problems and watched.pytorch.engaged() == {}


def test_weights_that_are_views_of_one_storage_stay_where_they_are(watch):
    model = Images(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    flat = torch.zeros(sum(p.numel() for p in model.body[0].parameters()))
    start = 0
    for p in model.body[0].parameters():  # a flat buffer, as some optimizers keep
        view = flat[start : start + p.numel()].view_as(p)
        view.copy_(p.data)
        p.data, start = view, start + p.numel()
    model.body[2].weight.data = model.body[1].weight.data  # two parameters on one storage
    watched, _ = trained(watch, model, levers={"channels_last": {}}, batch=images())
    assert model.body[0].weight.data_ptr() == flat.data_ptr() and model.body[0].weight.is_contiguous()
    assert model.body[1].weight.data_ptr() == model.body[2].weight.data_ptr()
    assert watched.pytorch.engaged()


def test_a_model_that_the_script_has_laid_out_itself_gets_its_own_layout_back(watch, layouts):
    model = Images(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    watched, _ = trained(watch, model, levers={"channels_last": {}}, batch=images())
    script = SimpleNamespace(models=[model], optimizers=[])
    before = layouts(script)
    watched.pytorch.engage({})
    assert layouts(script) == before
    assert not model.body[0].weight.is_contiguous()


# -- what levers say of themselves ---------------------------------------------------------------------------------


def test_pinned_memory_is_asked_for_training_loaders_and_given_up_again(watch):
    watched = watch()
    watched.pytorch.engage({"pinned_memory": {}})
    assert watched.pytorch.loaders.settings == {"pin_memory": True}
    watched.pytorch.engage({"pinned_memory": {}, "workers": {"num": 2}})
    assert watched.pytorch.loaders.settings["num_workers"] == 2
    watched.pytorch.engage({})
    assert watched.pytorch.loaders.settings == {}


def test_tf32_in_the_scripts_newer_terms_is_engaged_and_released_in_them(watch, settings_of_torch):
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("PyTorch before 2.9 has one way to say it")
    watched = watch()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert watched.pytorch.facts().matmul_precision == "high"
        watched.pytorch.engage({"tf32": {}})
        watched.pytorch.engage({})
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    watched.pytorch.engage({"tf32": {}})
    assert torch.backends.cuda.matmul.allow_tf32
    watched.pytorch.engage({})
    assert torch.backends.cuda.matmul.fp32_precision == "none" and not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("lever", ["bf16", "tf32"])
@pytest.mark.parametrize(("capability", "fits"), [("7.5", False), ("8.0", True), ("12.0", True)])
def test_a_gpu_before_ampere_has_neither_bfloat16_nor_tf32(lever, capability, fits):
    gpu = Accelerator(name="GPU", memory_bytes=2**34, compute_capability=capability)
    machine = replace(MACHINE, accelerators=(gpu,))
    reason = registry()[lever].applies(replace(FACTS, device="cuda"), machine)
    assert (reason is None) == fits
    if lever == "bf16":
        assert fits or "float16" in reason
        assert registry()[lever].applies(FACTS, machine) == registry()[lever].applies(FACTS, MACHINE)


def test_whoever_warns_of_the_older_terms_for_tf32_the_scripts_stderr_is_plain(watch, workload, monkeypatch, recwarn):
    """As PyTorch 2.9 and 2.10 do, whose own warning is not to be had here."""

    def warns(ask):
        return lambda *arguments: (warnings.warn("use the new API", stacklevel=1), ask(*arguments))[1]

    for name in ("_get_cublas_allow_tf32", "_set_cublas_allow_tf32", "get_float32_matmul_precision"):
        place = torch if hasattr(torch, name) else torch._C
        monkeypatch.setattr(place, name, warns(getattr(place, name)))
    watched = watch()
    workload("mlp").train(8)
    watched.pytorch.facts()
    watched.pytorch.engage({"tf32": {}})
    watched.pytorch.engage({})
    assert not [str(one.message) for one in recwarn if "use the new API" in str(one.message)]


def test_tf32_is_looked_for_in_one_product_that_tensor_cores_compute(watch, workload, monkeypatch):
    shapes, plain = [], torch.full

    def full(shape, value, device):
        shapes.append(shape)
        return plain(shape, 1.0)  # as TF32 rounds it

    watched = watch()
    workload("mlp").train(8)
    watched.pytorch.engage({"tf32": {}})
    monkeypatch.setattr(torch, "full", full)
    assert all(watched.pytorch.evidence()[0]["tf32"] for _ in range(3))
    assert len(shapes) == 1 and min(shapes[0]) >= 1024
    watched.pytorch.engage({})
    watched.pytorch.engage({"tf32": {}})
    assert watched.pytorch.evidence()[0]["tf32"] and len(shapes) == 2, "what was shown before proves nothing now"


def test_a_lever_that_fails_half_way_is_taken_back(watch, workload, monkeypatch, layouts):
    watched, script = watch(), workload("conv")
    script.train(8)
    before = layouts(script)
    from flatout.frameworks.pytorch.session import Session

    whole = Session.map_state
    monkeypatch.setattr(Session, "map_state", lambda self, change: whole(self, change) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        watched.pytorch.engage({"channels_last": {}})
    monkeypatch.setattr(Session, "map_state", whole)
    assert watched.pytorch.engaged() == {}
    assert layouts(script) == before


def test_one_forward_under_every_lever_at_once(watch, workload):
    watched, script = watch(), workload("conv", MOMENTUM["adamw"])
    watched.engage(5, {"channels_last": {}, "bf16": {}, "fused_optimizer": {}, "threads": {"num": 2}})
    script.train(12)
    proofs, missing = watched.pytorch.evidence()
    assert missing == {} and len(proofs) == 4
    x = torch.randn(2, 3, 8, 8)
    script.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(script.model(x), script.model._call_impl(x))
    assert F.softmax(script.model(x), 1).dtype == torch.float32


@pytest.mark.parametrize("hashed", [False, True], ids=["no hash", "hash by value"])
def test_optimizers_that_compare_by_value_are_told_apart(hashed, watch):
    class ByValue(torch.optim.SGD):
        def __eq__(self, other):
            return True

        __hash__ = (lambda self: 1) if hashed else None

    watched = watch()
    models = [torch.nn.Linear(4, 2) for _ in range(2)]
    optimizers = [ByValue(model.parameters(), lr=0.01, momentum=0.9) for model in models]

    def train(num):
        for _ in range(num):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()

    train(6)
    num_steps = watched.listener.num_steps
    train(4)
    assert watched.listener.num_steps == num_steps + 4
    watched.pytorch.engage({"foreach_optimizer": {}})
    train(2)
    assert watched.pytorch.evidence()[0]["foreach_optimizer"].startswith("2 of 2 optimizers use foreach")
    watched.pytorch.engage({})
    watched.compare(watched.listener.num_steps + 1, {"foreach_optimizer": {}}, "updates")
    train(6)
    assert watched.difference("updates").error < 1e-5


# -- before the first step -----------------------------------------------------------------------------------------


def test_cudnn_searches_from_the_first_convolution_on_because_it_keeps_the_plan_that_a_shape_got_first(
    watch, workload, monkeypatch
):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert registry()["cudnn_benchmark"].toggles == "process"
    watched, script, seen = watch({"cudnn_benchmark": {}}), workload("conv"), []
    for model in script.models:
        model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
    script.train(8)
    watched.pytorch.engage({})
    assert seen and all(seen) and torch.backends.cudnn.benchmark
