"""What can this processor not compute, though PyTorch offers it? For tests that would fail for that alone."""

import torch
from torch import nn


def computes_bfloat16_lstm() -> bool:
    """oneDNN has no LSTM in bfloat16 for a processor without the instructions: a trial finds that out, and says so."""
    try:
        with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(8, 12, batch_first=True)(torch.zeros(2, 3, 8))
    except RuntimeError:
        return False
    return True
