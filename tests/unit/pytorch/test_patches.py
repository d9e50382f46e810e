"""Are replaced attributes put back exactly, in whatever order and whoever patched on top?"""

import functools
from types import SimpleNamespace

import pytest

from flatout.frameworks.pytorch.seams.patches import Patch, patched


class Base:
    def greet(self):
        return "plain"


class Child(Base):
    pass


def saying(word):
    def make(original, patch):
        @functools.wraps(original)
        def greet(self):
            return f"{word} {original(self)}" if patch.active else original(self)

        return greet

    return make


@pytest.mark.parametrize("kind", [Base, Child])
def test_a_removed_patch_leaves_the_very_function_that_was_there(kind):
    before = dict(vars(kind))
    patch = Patch(kind, "greet", saying("one"))
    assert Child().greet() == "one plain" and patched()[-1] == f"{kind.__name__}.greet"
    patch.remove()
    assert dict(vars(kind)) == before and f"{kind.__name__}.greet" not in patched()
    assert vars(kind).get("greet") is before.get("greet")


def test_patches_of_ours_can_be_removed_in_the_order_in_which_they_came():
    before = vars(Base)["greet"]
    first, second = Patch(Base, "greet", saying("one")), Patch(Base, "greet", saying("two"))
    assert Base().greet() == "two one plain"
    first.remove()
    assert Base().greet() == "two plain"
    second.remove()
    assert vars(Base)["greet"] is before


def test_what_somebody_put_on_top_of_a_patch_stays_and_the_patch_passes_calls_on():
    before = vars(Base)["greet"]
    patch = Patch(Base, "greet", saying("ours"))
    ours = vars(Base)["greet"]

    @functools.wraps(ours)  # copies every attribute, our mark as well
    def theirs(self):
        return f"theirs {ours(self)}"

    Base.greet = theirs
    patch.remove()
    assert vars(Base)["greet"] is theirs
    assert Base().greet() == "theirs plain"
    again = Patch(Base, "greet", saying("again"))
    assert Base().greet() == "again theirs plain"
    again.remove()
    assert vars(Base)["greet"] is theirs
    Base.greet = before


def test_a_patch_that_was_covered_is_taken_out_when_the_cover_of_ours_goes():
    holder = SimpleNamespace(call=lambda: "plain")
    before = holder.call
    under = Patch(holder, "call", lambda original, patch: lambda: original())
    over = Patch(holder, "call", lambda original, patch: lambda: original())
    under.remove()
    assert holder.call is over.replacement
    over.remove()
    assert holder.call is before
    over.remove()
    assert holder.call is before
