"""Which random numbers does a whole run draw? In processes of their own, since seeding is replaced for good."""

import json
import sys

import pytest

import warm

SCRIPT = """
import json, random, sys
import numpy as np
import torch
from flatout.frameworks.pytorch.seams import seeds
seeds.vary(int(sys.argv[1]))
first = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # nobody has seeded
fresh = [float(np.random.default_rng().random()), float(np.random.default_rng().random())]
torch.manual_seed(3); random.seed(3); np.random.seed(seed=3)
own = [float(torch.rand(())), random.random(), float(np.random.rand()), float(np.random.default_rng(3).random())]
torch.manual_seed(4)
other = float(torch.rand(()))
torch.manual_seed(np.int64(3)); np.random.seed(np.int32(3))
numbers = [float(torch.rand(())), float(np.random.rand())]
torch.manual_seed(3)
loader = torch.utils.data.DataLoader(range(64), batch_size=8, shuffle=True, num_workers=int(sys.argv[2]))
order = [b.tolist() for b in loader]
print(json.dumps({"first": first, "fresh": fresh, "own": own, "other": other, "numbers": numbers, "order": order}))
"""


def drawn(run, workers=0):
    words = [sys.executable, "-c", SCRIPT, str(run), str(workers)]
    return json.loads(warm.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def runs():
    return {run: drawn(run) for run in (0, 1, 2)}


def test_run_0_draws_what_the_script_seeds_for_itself(runs):
    import random

    import numpy as np
    import torch

    torch.manual_seed(3)
    chance = random.Random(3)
    expected = [float(torch.rand(())), chance.random(), float(np.random.RandomState(3).rand())]
    assert runs[0]["own"] == [*expected, float(np.random.default_rng(3).random())]


def test_each_run_draws_others_whatever_the_script_seeds_with(runs):
    for key in ("first", "own", "fresh", "numbers"):
        assert len({json.dumps(runs[run][key]) for run in runs}) == 3, key
    assert all(runs[run]["other"] != runs[run]["own"][0] for run in runs), "its own seeds stay different ones"
    assert runs[1]["fresh"][0] != runs[1]["fresh"][1], "generators without a seed too"
    assert len({json.dumps(runs[run]["order"]) for run in runs}) == 3


@pytest.mark.parametrize("run", [0, 1])
def test_a_run_draws_the_same_numbers_when_it_is_repeated_with_workers_too(runs, run):
    assert drawn(run, workers=1) == runs[run]
