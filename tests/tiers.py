"""Which tests `make test` runs: not those that are marked `slow`, which `make test-all` runs too."""

import pytest


def some(values, *chosen):
    """Values of a parameter: `make test` runs the chosen ones, of several parameters those that all of them chose."""
    assert all(one in values for one in chosen), "one that is not there"
    mark = {True: pytest.mark.smoke, False: pytest.mark.slow}
    return [pytest.param(value, marks=mark[value in chosen]) for value in values]
