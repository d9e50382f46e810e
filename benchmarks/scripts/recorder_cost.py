"""The recorder's cost at one depth (`counted`, `ends` or `phases`), in this process: steps of about one millisecond.

Windows of some tens of milliseconds with the recorder and with nothing attached at all, in turn and many of them, so
that a machine whose speed drifts drifts for both. Prints one JSON object.
"""

import json
import statistics
import sys
import time

import torch
from torch import nn

from flatout.frameworks.pytorch.adapter import PyTorch
from flatout.judge import stats

depth = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(64 * 25, 192), torch.randint(0, 10, (64 * 25,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=64)


def epochs(num: int) -> float:
    """Seconds of a step."""
    begun = time.perf_counter()
    for _ in range(num):
        for batch, wanted in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), wanted).backward()
            optimizer.step()
    return (time.perf_counter() - begun) / len(loader) / num


class Listener:
    def on_step(self, step) -> None: ...
    def on_update(self) -> None: ...
    def on_pass_end(self) -> None: ...
    def on_failure(self, stage: str, problem: BaseException) -> None: ...


PAIRS = 120
WARM_UP = 5  # epochs: attaching takes from Python what it had learned of the functions that are called
MEASURED = 2

epochs(8)
bare, recorded = [], []
for number in range(PAIRS):
    sides = ("bare", "recorded") if number % 2 == 0 else ("recorded", "bare")
    for side in sides:
        if side == "bare":
            epochs(WARM_UP)
            bare.append(epochs(MEASURED))
            continue
        framework = PyTorch()
        framework.prepare({}, trial=depth == "phases")
        framework.attach(Listener())
        epochs(1)
        if depth == "counted":  # a run without levers
            framework.coast()
            epochs(WARM_UP - 1)
        else:
            framework.observe(depth)
            epochs(WARM_UP - 1)
            framework.start_window()
        recorded.append(epochs(MEASURED))
        framework.detach()
compared = stats.compare(bare, recorded)
fastest = [statistics.quantiles(side, n=10)[0] for side in (bare, recorded)]  # what disturbs only ever adds
print(
    json.dumps(
        {
            "step_s": fastest[0],
            "extra_s_per_step": fastest[1] - fastest[0],
            "share": fastest[1] / fastest[0] - 1,
            "ratio": compared.ratio,
            "low": compared.low,
            "high": compared.high,
            "bare_s": [round(s, 8) for s in bare],
            "recorded_s": [round(s, 8) for s in recorded],
        }
    )
)
