"""The user's process: how flatout enters it, the orders it carries out at step boundaries, what it records."""
