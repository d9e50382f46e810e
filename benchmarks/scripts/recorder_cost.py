"""The recorder's cost at one depth (`ends` or `phases`), in this process: steps of about one millisecond.

Windows of some tens of milliseconds with the recorder and with nothing attached at all, in turn and many of them, so
that a machine whose speed drifts drifts for both. Prints one JSON object.
"""

import json
import statistics
import sys
import time

import torch
from torch import nn

from flatout import stats
from flatout.frameworks.pytorch.adapter import PyTorch

depth = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(64 * 25, 192), torch.randint(0, 10, (64 * 25,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=64)


def an_epoch() -> float:
    """Seconds of a step."""
    begun = time.perf_counter()
    for batch, wanted in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), wanted).backward()
        optimizer.step()
    return (time.perf_counter() - begun) / len(loader)


class Listener:
    def on_step(self, now_s: float) -> None: ...
    def on_update(self) -> None: ...
    def on_failure(self, stage: str, problem: BaseException) -> None: ...


PAIRS = 200

for _ in range(8):
    an_epoch()
bare, recorded = [], []
for number in range(PAIRS):
    sides = ("bare", "recorded") if number % 2 == 0 else ("recorded", "bare")
    for side in sides:
        if side == "bare":
            an_epoch()
            bare.append(an_epoch())
            continue
        framework = PyTorch()
        framework.prepare({}, endless=False, trial=depth == "phases")
        framework.attach(Listener())
        an_epoch()  # what is done once, at the first step, is not a step's cost
        framework.observe(depth)
        framework.start_window()
        recorded.append(an_epoch())
        framework.detach()
compared = stats.compare(bare, recorded)
median = statistics.median(bare)
extra = statistics.median(b - a for a, b in zip(bare, recorded, strict=True))
print(
    json.dumps(
        {
            "step_s": median,
            "extra_s_per_step": extra,
            "share": extra / median,
            "ratio": compared.ratio,
            "low": compared.low,
            "high": compared.high,
            "bare_s": [round(s, 8) for s in bare],
            "recorded_s": [round(s, 8) for s in recorded],
        }
    )
)
