"""How far is one quantity under a lever from the same one without it? The record of one comparison.

Imported in the user's process: the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers to inputs of the script's that nothing was calibrated with, each of them counted once.

    An answer is where the largest value of an output's last dimension stands; of an output of fewer than two
    dimensions there is one, which has changed where the output differs by more than `LARGE_ERROR`.

    Attributes:
        num: How many were compared.
        num_changed: Those that are others under the levers.
        num_changed_by_rounding: Those that are others where all that goes in is moved by its last place.
        num_inputs: Different inputs seen, those of the calibration included.
        num_shared: Those among them that were left out because the calibration had them.
    """

    num: int
    num_changed: int
    num_changed_by_rounding: int
    num_inputs: int
    num_shared: int


LARGE_ERROR = 0.01
"""Relative difference from which an output that has no largest value is another answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One quantity under a lever against the same quantity without it, on the same inputs.

    Attributes:
        check: `gradients`, `outputs`, `updates`, `batches` or `answers`.
        error: Norm of the difference over the norm of the baseline.
        slope: Projection of the lever's quantity on the baseline's, 1 when nothing is scaled (systematic part).
        noise: The baseline's own relative spread between batches, None where not observed.
        baseline_error: Baseline against baseline: 0 on a CPU.
        worst: The parameter or output with the largest error, and that error.
        random_states_equal: Whether every random generator stands where it stood under the baseline.
        finite: Whether no NaN or infinity appeared that the baseline lacks.
        explained_cosine: Cosine of the replayed gradient with the one that the script itself computed; below 1 where
            gradients bypass the outputs.
        rounding: How far the baseline moves, over its norm, where every number that goes in moves by its last place.
        multiple: The largest multiple, over all parameters or outputs, of what rounding alone may move there.
        multiple_of: The parameter, buffer or output where that is.
        truth_error: Relative error against float64.
        baseline_truth_error: The same of the baseline.
        truth_multiple: The largest multiple, over all parameters or outputs, of the baseline's distance from float64.
        same_in_float64: Whether lever and baseline differ in float64 as much less as rounding is smaller there, so that
            what differs is rounding; False also where nobody looked.
        on_device: Whether models computed on a device, where numbers are rounded otherwise from kernel to kernel.
        fault: Something that is wrong whatever the error; empty where nothing.
        detail: A remark for people.
        answers: What is judged where answers may change; None elsewhere.
    """

    check: str
    error: float
    slope: float = 1.0
    noise: float | None = None
    baseline_error: float = 0.0
    worst: str = ""
    worst_error: float = 0.0
    random_states_equal: bool = True
    finite: bool = True
    explained_cosine: float | None = None
    rounding: float | None = None
    multiple: float | None = None
    multiple_of: str = ""
    truth_error: float | None = None
    baseline_truth_error: float | None = None
    truth_multiple: float | None = None
    same_in_float64: bool = False
    on_device: bool = False
    fault: str = ""
    detail: str = ""
    answers: Answers | None = None
