"""Which groups are there, in the order of their value? Each is the module of that name."""

GROUPS = {
    "env": (10, 75),
    "truth": (20, 90),
    "ceilings": (20, 110),
    "levers": (30, 150),
    "numerics": (20, 110),
    "compute": (60, 130),
    "marked": (30, 100),
    "data": (50, 130),
    "rest": (10, 40),
    "first_use": (50, 150),
}
"""Of each group: seconds that it needs at least, and seconds after which it is killed."""
