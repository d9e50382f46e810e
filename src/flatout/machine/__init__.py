"""This machine: cores, control groups, devices, counters of energy, measured ceilings."""
