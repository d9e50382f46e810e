"""How long is each step of about one millisecond in flatout's code? `own_time.py SECONDS_BEFORE`, under `flatout run`.

Counted twice. `hooks`: a clock before and after each of the hooks that optimizers call, less what the clock takes; in
a run without a plan that is all there is, with one the seams of model and loader come on top. `at_most`: Python's
profiler over every function of flatout and what is built in and called from there, with what the profiler itself adds
to each of these calls. Prints one JSON object.
"""

import cProfile
import json
import pstats
import sys
import time

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(list(torch.randn(500, 64, 256)), batch_size=None)


def epoch():
    for batch in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()


def is_ours(place):
    return "/flatout/" in place[0] and "/benchmarks/" not in place[0]


def timed_epoch():
    begun_s = time.perf_counter()
    epoch()
    return (time.perf_counter() - begun_s) / len(loader)


def profiled(work):
    profile = cProfile.Profile()
    profile.enable()
    work()
    profile.disable()
    return pstats.Stats(profile).stats.items()


class Clocked:
    """A hook between two looks at the clock."""

    def __init__(self, hook):
        self.hook, self.spent_s = hook, 0.0

    def __call__(self, *args):
        begun_s = time.perf_counter()
        result = self.hook(*args)
        self.spent_s += time.perf_counter() - begun_s
        return result


def nothing(*args):
    pass


def in_hooks():
    """Seconds of a step in the hooks that optimizers call, by the kind of hook."""
    spent = {}
    empty = Clocked(nothing)
    for _ in range(100_000):
        empty(optimizer, (), {})
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        hooks = getattr(sys.modules["torch.optim.optimizer"], name)
        former = dict(hooks)
        clocked = {key: Clocked(hook) for key, hook in former.items()}
        hooks.update(clocked)
        for _ in range(EPOCHS):
            epoch()
        hooks.update({key: hook for key, hook in former.items() if key in hooks})
        per_step_s = sum(hook.spent_s for hook in clocked.values()) / EPOCHS / len(loader)
        spent[name] = per_step_s - len(clocked) * empty.spent_s / 100_000
    return spent


EPOCHS = 20
end_s = time.perf_counter() + float(sys.argv[1])  # until the plan has been checked, where there is one
best_s = float("inf")
while time.perf_counter() < end_s:
    best_s = min(best_s, timed_epoch())
hooks_s = in_hooks()
ours_s, num_calls, rows = 0.0, 0, {}
for where, row in profiled(lambda: [epoch() for _ in range(EPOCHS)]):
    _, calls, own_s, _, callers = row
    spent_s = own_s if is_ours(where) else 0.0
    if where[0] == "~":  # built in
        spent_s = sum(caller[2] for who, caller in callers.items() if is_ours(who))
        calls = sum(caller[0] for who, caller in callers.items() if is_ours(who))
    if spent_s:
        ours_s += spent_s
        num_calls += calls
        rows[where[2]] = round(spent_s / EPOCHS / len(loader) * 1e6, 4)
steps = EPOCHS * len(loader)
print(
    json.dumps(
        {
            "step_s": best_s,
            "hooks_s_per_step": sum(hooks_s.values()),
            "hooks": hooks_s,
            "hooks_share": sum(hooks_s.values()) / best_s,
            "at_most_s_per_step": ours_s / steps,
            "calls_per_step": num_calls / steps,
            "at_most_share": ours_s / steps / best_s,
            "own_us_by_function": dict(sorted(rows.items(), key=lambda row: -row[1])[:12]),
        }
    )
)
