"""What is called in plain's place shows plain's line, in warnings and in tracebacks."""

import traceback

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: E402

from flatout.guest.caller_frames import caller_in  # noqa: E402


def failing(*given, **named):
    raise ValueError((given, named))


class Plain:
    def __next__(self):
        data = self.fetch(1, two=2)
        return data

    def fetch(self, *given, **named):
        return failing(*given, **named)


def shown(call):
    with pytest.raises(ValueError, match=r"\(\(1,\), \{'two': 2\}\)") as raised:
        call()
    lines = traceback.format_exception(raised.value)
    return next(line for line in lines if "in __next__" in line)


def test_a_traceback_has_the_line_that_plain_has_and_marks_the_same_part_of_it():
    ours = caller_in(Plain.__next__, "self.fetch(1, two=2)")
    assert shown(lambda: ours(failing, 1, two=2)) == shown(lambda: Plain().__next__())
    assert caller_in(Plain.__next__, "self.fetch(1, two=2)") is ours


def test_without_such_a_line_it_is_called_all_the_same():
    assert caller_in(Plain.__next__, "no such line")(max, 1, 2) == 2
    assert caller_in(eval("lambda: 0"), "0")(max, 1, 2) == 2
    with pytest.raises(ValueError, match="1"):
        caller_in(Plain.__next__, "no such line")(failing, 1)


def test_pytorch_has_the_line_that_is_asked_for():
    assert caller_in(_BaseDataLoaderIter.__next__, "self._next_data()").__code__.co_name == "__next__"
