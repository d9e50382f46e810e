"""Are the model FLOPs that flatout counts those that are published or follow from the layers' sizes?

`python benchmarks/claims/flops.py` counts thirteen architectures, a forward and a training step each, and a transformer
whose layers are recomputed; it writes `results/claims_flops_<cpu>_<yyyymm>.json` and prints the table in Markdown.
`tests/unit/pytorch/test_flops.py` fails where one is off by more than 1 %.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from architectures import ARCHITECTURES, Architecture, Transformer, block_flops, built, linear, tokens  # noqa: E402
from flatout.frameworks.pytorch.observe.census import OperationCounter  # noqa: E402
from flatout.records.trace import Census  # noqa: E402
from measuring import write  # noqa: E402

LAYERS, WIDTH, WORDS, TIME = 3, 64, 500, 48


def counted(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, training: bool) -> Census:
    """A census of one call, or of one step."""
    with torch.set_grad_enabled(training), OperationCounter() as counter:
        out = model(*inputs)
        if training:
            out.sum().backward()
    return counter.census()


def row(architecture: Architecture) -> dict[str, Any]:
    """What was counted beside what was expected."""
    model, inputs = built(architecture)
    forward = counted(model, inputs, training=False).flops
    training = counted(model, inputs, training=True)
    return {
        "architecture": architecture.name,
        "forward_flops": forward,
        "forward_expected": architecture.forward,
        "forward_published": architecture.published,
        "training_flops": training.flops,
        "training_expected": architecture.training,
        "recomputed_flops": training.recomputed_flops,
        "error_fraction": max(abs(forward / architecture.forward - 1), abs(training.flops / architecture.training - 1)),
        "formula": architecture.formula,
        "source": architecture.source,
    }


def recomputation(how: str) -> dict[str, Any]:
    """The same step with and without recomputed layers needs the same work of the model."""
    torch.manual_seed(0)
    model = Transformer(LAYERS, WIDTH, 4, WORDS, causal=True, recompute=how)
    found = counted(model, tokens(TIME)(), training=True)
    expected = 3 * (LAYERS * block_flops(WIDTH, TIME) + linear(WIDTH, WORDS, TIME))
    return {
        "recomputation": how or "none",
        "training_flops": found.flops,
        "training_expected": expected,
        "recomputed_flops": found.recomputed_flops,
        "error_fraction": abs(found.flops / expected - 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The same for a page."""
    lines = ["| architecture | forward | by formula | published | step | by formula |", "|---|---|---|---|---|---|"]
    for one in rows:
        published = f"{one['forward_published'] / 1e9:.4g} G" if one["forward_published"] else ""
        numbers = [f"{one[key] / 1e9:.4g} G" for key in ("forward_flops", "forward_expected")]
        numbers += [published, *(f"{one[key] / 1e9:.4g} G" for key in ("training_flops", "training_expected"))]
        lines.append(f"| {one['architecture']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    """Count all of them."""
    rows = [row(architecture) for architecture in ARCHITECTURES]
    again = [recomputation(how) for how in ("", "reentrant", "not reentrant")]
    worst = max(one["error_fraction"] for one in (*rows, *again))
    print(table(rows))
    print(f"worst: {100 * worst:.3f} %")
    write("claims_flops", {"limit_fraction": 0.01, "worst_fraction": worst, "rows": rows, "recomputation": again})


if __name__ == "__main__":
    main()
