"""Is a value that is only printed told from one that something needs, and is nothing guessed?"""

import textwrap

import pytest

from flatout.judge.read_uses import Source


def use(code, read="item", within=False, mark=None):
    """What becomes of the first `loss.item()` of a function with this body, or of the first `mark`."""
    body = textwrap.indent(textwrap.dedent(code).strip(), "    ")
    text = f"def train(loss, model, logger, writer, pbar, scheduler, step):\n{body}\n"
    return at(text, mark or "loss.item()", read, within)


def at(text, mark, read="item", within=False):
    before, found, _ = text.partition(mark)
    assert found, mark
    line = before.count("\n") + 1
    column = len(before.rpartition("\n")[2].encode())
    last = mark.rpartition("\n")[2]
    end_column = len(last.encode()) + (0 if "\n" in mark else column)
    return Source(text).use((line, line + mark.count("\n"), column, end_column), read=read, within=within)


PRINTED = {
    "an argument": "print(step, loss.item())",
    "a text": "print(f'loss {loss.item():.4f} é')",
    "an old text": "print('loss %.4f' % loss.item())",
    "a text that is made first": "text = 'loss {:.4f}'.format(loss.item())\nprint(text)",
    "a logger": "logger.info('loss %s', loss.item())",
    "a progress bar": "pbar.set_postfix({'loss': f'{loss.item():.3f}'})",
    "by its name": "pbar.set_postfix(loss=loss.item())",
    "TensorBoard": "writer.add_scalar('loss', loss.item(), step)",
    "a name": "value = loss.item()\nif step % 10 == 0:\n    print(value)",
    "a sum": "running = 0.0\nfor _ in range(9):\n    running += loss.item()\nprint(running / 9)",
    "a mean of a list": "seen = []\nseen.append(loss.item())\nprint(sum(seen) / len(seen))\nseen.clear()",
    "two names": "a, b = loss.item(), 3\nprint(a)",
    "a comprehension": "print([round(x, 2) for x in [loss.item()]])",
    "a dict": "log = {}\nlog['loss'] = loss.item()\nfor k, v in log.items():\n    print(k, v)",
    "a walrus": "print(value := loss.item())",
    "rounded": "import math\nprint(round(math.exp(loss.item()), 3))",
}


@pytest.mark.parametrize("code", PRINTED.values(), ids=PRINTED)
def test_a_value_that_only_enters_what_is_printed_is_printed(code):
    assert use(code).kind == "printed", use(code)


USED = {
    "if": "if loss.item() > 3:\n    raise ValueError",
    "while": "while loss.item() > 3:\n    step()",
    "assert": "assert loss.item() < 3",
    "an early stop": "value = loss.item()\nprint(value)\nbest = 9.0\nif value < best:\n    best = value",
    "an index": "print('abc'[loss.item()])",
    "a range": "for _ in range(int(loss.item())):\n    pass",
    "a choice": "print('low' if loss.item() < 3 else 'high')",
    "and": "print(loss.item() and step)",
    "a filter": "print([x for x in [loss.item()] if x > 3])",
    "through a list": "seen = []\nseen.append(loss.item())\nif min(seen) < 3:\n    print('done')",
}


@pytest.mark.parametrize("code", USED.values(), ids=USED)
def test_a_value_that_steers_the_script_is_used(code):
    assert use(code).kind == "used", use(code)


NOT_TOLD = {
    "returned": "return loss.item()",
    "yielded": "yield loss.item()",
    "kept elsewhere": "model.loss = loss.item()",
    "an unknown call": "scheduler.step(loss.item())",
    "an unknown method": "print(loss.item().hex())",
    "somebody else's list": "model.seen.append(loss.item())",
    "a list that is an argument": "step.append(loss.item())\nprint(step)",
    "a list under two names": "seen = model.seen\nseen.append(loss.item())\nprint(seen)",
    "a sum in place": "total = model.total\ntotal += loss.item()\nprint(total)",
    "global": "global last\nlast = loss.item()\nprint(last)",
    "a closure": "value = loss.item()\ndef inner():\n    return value\nprint(value)",
    "a lambda": "value = loss.item()\nmodel.hook(lambda: value)",
    "locals": "value = loss.item()\nprint(locals())",
    "the tensor's own name": "loss = loss.item()\nloss.backward()",
    "print is another's": "print = model.print_\nprint(loss.item())",
    "a log that may be the model's": "model.log('loss', loss.item())",
    "printed and handed on": "value = loss.item()\nprint(value)\nscheduler.step(value)",
    "a container's result": "total = set()\nprint(total.add(loss.item()))",
    "raised": "raise ValueError(f'{loss.item()}')",
    "its alias": "read = loss.item\nprint(read())",
}


@pytest.mark.parametrize("code", NOT_TOLD.values(), ids=NOT_TOLD)
def test_what_the_function_does_not_show_is_not_told(code):
    found = use(code, mark="read()" if "read()" in code else None)
    assert found.kind == "not told" and found.why, found


def test_a_value_that_nothing_takes_is_unused():
    assert use("loss.item()").kind == "unused"
    assert use("value = loss.item()").kind == "unused"


def test_where_it_steers_is_said_with_its_line():
    found = use("value = loss.item()\nprint(value)\nif value > 3:\n    pass")
    assert (found.kind, found.why, found.code) == ("used", "steers `if`, line 4", "loss.item()")


def test_of_two_reads_in_one_line_each_has_a_use_of_its_own():
    text = "print(loss.item()); stop = score.item()\nif stop: pass\n"
    assert at(text, "loss.item()").kind == "printed"
    assert at(text, "score.item()").kind == "used"


@pytest.mark.parametrize(
    ("code", "mark", "read", "kind"),
    [
        ("print('loss', loss)", "print('loss', loss)", "__repr__", "printed"),
        ("print(f'{loss:.3f}')", "f'{loss:.3f}'", "__format__", "printed"),
        ("print('%f' % loss)", "'%f' % loss", "__float__", "printed"),
        ("value = float(loss)\nprint(value)", "float(loss)", "__float__", "printed"),
        ("if loss > 3:\n    pass", "loss > 3", "__bool__", "used"),
        ("print(not loss)", "not loss", "__bool__", "printed"),
        ("print([1, 2][loss])", "[1, 2][loss]", "__index__", "used"),
        ("step(loss)", "step(loss)", "__float__", "not told"),
        ("print(loss.nonzero())", "loss.nonzero()", "nonzero", "used"),
        ("torch.cuda.synchronize()", "torch.cuda.synchronize()", "synchronize", "not told"),
    ],
)
def test_reads_without_a_call_of_their_own_are_followed_from_what_made_them(code, mark, read, kind):
    assert use(code, read, mark=mark).kind == kind


def test_what_a_library_reads_is_told_only_where_the_line_prints():
    assert use("writer.add_scalar('loss', loss)", within=True, mark="writer.add_scalar('loss', loss)").kind == "printed"
    found = use("scheduler.step(loss)", within=True, mark="scheduler.step(loss)")
    assert (found.kind, found.why) == ("not told", "read within `scheduler.step`")


def test_a_source_that_is_not_what_ran_tells_nothing():
    assert Source("print(1)\n").use((7, 7, 0, 5), read="item", within=False).kind == "not told"


def test_a_modules_own_names_are_followed_unless_a_function_reads_them():
    assert at("value = loss.item()\nprint(value)\n", "loss.item()").kind == "printed"
    assert at("value = loss.item()\ndef f():\n    return value\n", "loss.item()").kind == "not told"


def test_python_names_every_reading_expression_so_that_it_is_found():
    """The places of instructions, as the recorder takes them, against the syntax tree."""
    import sys
    from itertools import islice

    spans = []

    class Value:
        def item(self):
            frame = sys._getframe(1)
            spans.append(next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)))
            return 3.0

    text = (
        "def train(loss, seen):\n"
        "    print(f'é {loss.item():.2f}', loss\n"
        "          .item())\n"
        "    seen.append((loss\n"
        "                 .item()))\n"
        "    if loss.item() > 9: pass\n"
    )
    names = {"print": lambda *_: None}
    exec(compile(text, "train.py", "exec"), names)
    names["train"](Value(), [])
    found = [Source(text).use((a, b, c, d), read="item", within=False).kind for a, b, c, d in spans]
    assert found == ["printed", "printed", "not told", "used"]
