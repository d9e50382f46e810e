"""What can bind, in words, and what would free each?

In: nothing. Out: tables by cause, and by what is measured in pairs.
"""

from __future__ import annotations

from typing import NamedTuple

SHARE = "its share of the step"
PROFILED = "a profiled window"
EASED = "its share, and computing that is quicker without it"
IN_A_STEP = ("forward", "loss", "backward", "optimizer", "data")
OF_ALL = "of all the time: what lies between steps"


class Cause(NamedTuple):
    """What can bind.

    Attributes:
        sentence: It in a few words; empty where that depends on what was found.
        remedy: What would free it; empty for none of its own.
        phase: Where it shows.
        how: How its bound is obtained, where that is its own worth.
        shortens: The phases that the remedy shortens then; of a part of one, none.
    """

    sentence: str = ""
    remedy: str = ""
    phase: str = ""
    how: str = ""
    shortens: tuple[str, ...] = ()


CAUSES = {
    "input": Cause(remedy="free data", phase="data"),
    "compute": Cause(
        "the time goes into the model's own operations, forward and backward", "compute at its dtype's ceiling"
    ),
    "memory bandwidth": Cause("the time goes into operations that move more than they compute"),
    "launch overhead": Cause("many small operations, whose starting costs more than their work", "free launches"),
    "host synchronisation": Cause(
        "the program waits for single values from the device", "no host synchronisation", "sync"
    ),
    "copies": Cause(
        "training waits while batches are copied to the device", "no copies to the device", "copy", SHARE, ("copy",)
    ),
    "allocation": Cause(
        "the device idles while memory is asked for and given back", "memory that is kept", how=PROFILED
    ),
    "thread oversubscription": Cause(remedy="threads that fit"),
    "debug switches": Cause(remedy="no debug switches"),
    "interpreter": Cause(remedy="an interpreter that is passed on at once"),
    "optimizer": Cause("the update costs more than the model", "free optimizer", "optimizer"),
    "evaluation": Cause(
        "training waits while the model is evaluated", "free evaluation", how=OF_ALL, shortens=("evaluation",)
    ),
    "checkpoints": Cause(
        "training waits while the model is saved", "free checkpoints", how=OF_ALL, shortens=("checkpoint",)
    ),
    "garbage collection": Cause(
        "Python looks for cycles among many objects", "no garbage collection", "garbage", SHARE, ("garbage",)
    ),
    "logging": Cause(
        "training waits while the script prints, logs or serialises", "no logging", how="sampled stacks"
    ),
    "paging": Cause(
        "memory does not suffice, and pages are read from a disk again and again", "memory that suffices",
        how="sampled waiting",
    ),
    "slow steps": Cause(remedy="every step as the usual one", how="what slow steps take beyond usual ones"),
    "own code": Cause(
        "the time goes into the script's lines between the parts of a step", "free code between the parts",
        "unattributed", SHARE,
    ),
}  # fmt: skip

#: The remedy that would free what binds.
REMEDIES = {name: one.remedy for name, one in CAUSES.items() if one.remedy}

MEASURED = {
    "free_data": ("free data", "one cached batch replayed", ("data",)),
    "fitting_threads": ("threads that fit", "as many threads as cores in turn with now", IN_A_STEP),
    "debugging_off": ("no debug switches", "switched off in turn with now", IN_A_STEP),
    "free_interpreter": ("an interpreter that is passed on at once", "passed on at once in turn with now", IN_A_STEP),
}
"""What is measured in pairs: its remedy, how, and the phases that it shortens."""

OF_THE_MODEL = ("compute", "launch overhead", "memory bandwidth")
"""How the model's time is called, by what it mostly is; what it is worth is all of that time."""

PARTS = {
    "storage": "items wait for reads: a disk, a network",
    "decode": "images, sound or archives are decoded",
    "transform": "the items' own code computes",
    "collate": "items are put together into batches",
    "worker start-up": "workers are started and ended at every epoch",
}
