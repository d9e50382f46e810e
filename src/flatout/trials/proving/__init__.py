"""Whole runs with and without a plan, over several seeds."""
