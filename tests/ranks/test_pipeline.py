"""What one process trains, ranks train that each compute some of the model's calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.module_calls import Timeline
from flatout.frameworks.pytorch.parallel.pipeline_exchanges import Parcel
from flatout.frameworks.pytorch.parallel.pipeline_planning import PipelinePlan
from flatout.frameworks.pytorch.parallel.pipeline_stage import Placeholders, StagePlan, shapes_of
from tiers import some

from . import pipeline_scenarios, scenarios, sharded_scenarios, tensor_scenarios
from .on_ranks import alone, on_ranks
from .test_shard import agrees

REFUSED = {
    scenarios.convolutions: "batch normalisation",
    scenarios.normalised_again: "batch normalisation", scenarios.a_counter_of_calls: "what ranks keep as `kept`",
    scenarios.times_and_weights_that_the_model_draws: "random numbers",
    scenarios.a_critic_that_is_kept_from_training: "it calls 0 modules",
    scenarios.two_models_against_each_other: "batch normalisation",
    scenarios.noise_that_the_model_draws: "random numbers", scenarios.a_model_that_is_called_by_a_method: "modules",
    scenarios.a_loss_kept_in_a_global_list: "it changes `ASIDE`",
    scenarios.a_hook_on_a_layer: "hook", scenarios.gradients_of_inputs: "gradients of its inputs",
    sharded_scenarios.heads_that_take_turns: "stage", **pipeline_scenarios.REFUSED,
}  # fmt: skip
OTHERS = [
    *(one for one in (*scenarios.SAME, *sharded_scenarios.SAME, *tensor_scenarios.SAME) if one not in REFUSED),
    *pipeline_scenarios.IN_TWO_STAGES,
]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "scenario",
    some(pipeline_scenarios.SAME, pipeline_scenarios.a_chain_of_layers),
    ids=lambda scenario: scenario.__name__,
)
def test_stages_end_where_one_process_ends(scenario, world):
    agrees(scenario, world, "pipeline")


@pytest.mark.parametrize("scenario", OTHERS, ids=lambda scenario: scenario.__name__)
def test_two_stages_end_where_one_process_ends(scenario):
    agrees(scenario, 2, "pipeline")


@pytest.mark.parametrize("scenario", REFUSED, ids=lambda scenario: scenario.__name__)
def test_what_makes_no_stages_is_refused_with_its_reason(scenario):
    alone(scenario)
    for found in on_ranks(2, scenario, "pipeline"):
        assert REFUSED[scenario] in found["cause"]
        assert found["error"] and found["hint"]


class Alone:
    """A group of one process that takes itself for several ranks."""

    def __init__(self, world: int) -> None:
        self.rank, self.world, self.ranks = 0, world, list(range(world))


def _timeline(module: nn.Module, *inputs: torch.Tensor) -> Timeline:
    timeline = Timeline(module)
    timeline.watch(module, inputs, {})
    return timeline


@pytest.mark.smoke
def test_stages_share_the_work_and_a_parameter_is_where_it_is_computed_with():
    module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    plan = PipelinePlan(_timeline(module, torch.randn(4, 32)), Alone(3), lambda call: True)
    assert plan.find()
    assert [plan.module_at(call) for call in plan.begins] == [module[2], module[4]]
    assert plan.shares() == pytest.approx([1 / 3] * 3, abs=0.01)
    placements = plan.placements(lambda problem: None)
    owners = [placements[id(layer.weight)].edges for layer in module]
    assert owners == [(0, 32, 32, 32)] * 2 + [(0, 0, 32, 32)] * 2 + [(0, 0, 0, 32)] * 2


@pytest.mark.smoke
def test_what_several_stages_compute_with_stays_whole():
    gpt = pipeline_scenarios.Gpt()
    timeline = _timeline(gpt, torch.randint(0, 37, (2, 8)))
    plan = PipelinePlan(timeline, Alone(2), lambda call: timeline.calls[call].module in list(gpt.blocks))
    assert plan.find()
    whole = {name for name, p in gpt.named_parameters() if id(p) not in plan.placements(lambda problem: None)}
    assert whole == {"words.weight", "places", "mask.scale"}  # tied; read by the model itself; without a dimension


@pytest.mark.smoke
def test_a_stage_skips_what_came_before_and_is_given_what_is_passed_along():
    gpt = pipeline_scenarios.Gpt()
    timeline = _timeline(gpt, torch.randint(0, 37, (2, 8)))
    begins = [call.begin for call in timeline.calls if call.module in list(gpt.blocks)]
    stage = StagePlan.of(timeline, begins[1], begins[3])
    done = [stage.actions[id(one)] for one in (gpt.words, gpt.mask, *gpt.blocks)]
    assert done == [["skip"], ["skip"], ["skip"], ["enter"], ["give"], ["leave"]]
    assert id(gpt.blocks[0].attention) not in stage.actions and id(gpt.head) not in stage.actions


@pytest.mark.smoke
def test_placeholders_have_the_shapes_of_what_is_not_computed():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, *, twice: bool) -> dict[str, torch.Tensor]:
            found, (state, _) = self.rnn(x)
            return {"out": self.last(found), "state": state.bool(), "again": found if twice else x}

    module = Two()
    shapes = shapes_of(module)
    for p in module.parameters():
        p.data = p.data[:0]  # this rank has nothing of it
    placeholders = Placeholders(shapes)
    for num in (2, 5):
        found = placeholders.of(module, (torch.ones(num, 7, 4),), {"twice": True})
        assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
            "out": ((num, 7, 3), torch.float32), "state": ((1, num, 6), torch.bool),
            "again": ((num, 7, 6), torch.float32),
        }  # fmt: skip
        assert found["out"].isnan().all()  # what reads it shows


@pytest.mark.smoke
def test_what_is_sent_arrives():
    tensor, cpu = torch.randn(3, 2, requires_grad=True), torch.device("cpu")
    sent = [tensor, None, torch.arange(5), torch.ones(2, 2, dtype=torch.bool).T, torch.zeros(0, 4), tensor, "word"]
    parcel = Parcel((pipeline_scenarios.Output(tensor + 1, None), sent))
    arrived = Parcel.arriving(parcel.head(), cpu, lambda body: body.copy_(parcel.body(cpu)))
    output, found = arrived.value
    assert arrived.is_whole and output.logits.requires_grad and torch.equal(output.logits, tensor + 1)
    assert found[0] is found[5] and found[0].requires_grad and not found[2].requires_grad and found[4].shape == (0, 4)
    assert all(torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b for a, b in zip(found, sent, strict=True))
