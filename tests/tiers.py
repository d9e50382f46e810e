"""Which tests `make test` runs of folders whose tests start processes: those that are marked `smoke`."""

import pytest


def some(values, *chosen):
    """Values of a parameter, of which the chosen ones are run by `make test` and all by `make test-all`."""
    assert all(one in values for one in chosen), "one that is not there"
    return [pytest.param(value, marks=pytest.mark.smoke) if value in chosen else value for value in values]
