"""The recorder's cost at one depth (`ends` or `phases`), in this process: steps of about one millisecond.

Two measures: seconds spent inside our own functions per step (they are wrapped by a counting clock), and paired
windows with the recorder and with nothing attached at all. Prints one JSON object.
"""

import json
import sys
import time

import torch
from torch import nn

from flatout import stats
from flatout.frameworks.pytorch.adapter import PyTorch

depth = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(64, 256), torch.randint(0, 10, (64,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=64)


def steps(num: int) -> float:
    begun = time.perf_counter()
    for _ in range(num):
        for batch, wanted in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), wanted).backward()
            optimizer.step()
    return (time.perf_counter() - begun) / num


class Listener:
    def on_step(self, now_s: float) -> None: ...
    def on_update(self) -> None: ...
    def on_failure(self, stage: str, problem: BaseException) -> None: ...


steps(200)
bare, recorded = [], []
for number in range(24):
    sides = ("bare", "recorded") if number % 2 == 0 else ("recorded", "bare")
    for side in sides:
        if side == "bare":
            bare.append(steps(150))
            continue
        framework = PyTorch()
        framework.prepare({}, endless=False, trial=depth == "phases")
        framework.attach(Listener())
        steps(10)
        framework.observe(depth)
        framework.start_window()
        recorded.append(steps(150))
        framework.detach()
compared = stats.compare(bare, recorded)
median = sorted(bare)[len(bare) // 2]
extra = sorted(b - a for a, b in zip(bare, recorded, strict=True))[len(bare) // 2]
print(
    json.dumps(
        {
            "step_s": median,
            "extra_s_per_step": extra,
            "share": extra / median,
            "ratio": compared.ratio,
            "low": compared.low,
            "high": compared.high,
            "bare_s": bare,
            "recorded_s": recorded,
        }
    )
)
