"""What can the check of class precision see? bfloat16 whose gradients are scaled as well, by how much, and where.

In: nothing. Out: for each factor, place and moment, what was said in each family of scripts.
"""

from __future__ import annotations

from typing import Any

from numerics_bugs import scaled
from numerics_judging import judged
from numerics_planting import NAME, Undo, parameters_by_size, planted
from numerics_scripts import FAMILIES

FACTORS = (1.0, 1.001, 1.01, 1.02, 1.05, 1.1, 2.0, 0.0)
PLACES = ("all", "largest", "smallest")
MOMENTS = {"at initialisation": 4, "after 60 steps": 60}
"""Steps before the first comparison; 4 is when flatout first knows what the script does."""


def bf16_scaled(factor: float, place: str) -> Any:
    """bfloat16, and gradients scaled: of all parameters, or of the one with the largest or smallest gradient."""

    def plant(session: Any) -> Undo:
        lever = session.levers["bf16"]
        lever.engage(session, {})
        ordered = parameters_by_size(session)
        chosen = {"all": ordered, "largest": ordered[-1:], "smallest": ordered[:1]}[place]
        if place == "all":
            chosen = [p for p in session.parameters() if p.requires_grad]
        handles = [p.register_hook(scaled(factor)) for p in chosen if factor != 1.0]

        def undo() -> None:
            for handle in handles:
                handle.remove()
            lever.release(session)

        return undo

    return planted(plant, "precision", "gradients")


def curves() -> list[dict[str, Any]]:
    """One row for each factor, place, moment and family."""
    rows = []
    for moment, warm_up in MOMENTS.items():
        for place in PLACES:
            for factor in FACTORS:
                if factor == 1.0 and place != "all":
                    continue
                for family, script in FAMILIES.items():
                    found = judged(script, {NAME: {}}, {NAME: bf16_scaled(factor, place)}, warm_up=warm_up)
                    assert found is not None
                    made = [d for point in found.points for d in point.differences if d.check == "gradients"]
                    rows.append(
                        {
                            "moment": moment,
                            "place": place,
                            "factor": factor,
                            "family": family,
                            "word": found.word,
                            "slopes": [d.slope for d in made],
                            "multiples": [d.multiple for d in made],
                            "errors": [d.error for d in made],
                            "noise": [d.noise for d in made],
                            "detail": found.detail,
                        }
                    )
    return rows
