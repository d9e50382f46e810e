"""Arithmetic on records: what a step is made of, what binds, what is faster, whether numbers agree. No clock."""
