"""The words after a command name a program as `python` would take them."""

import sys
import zipapp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.cli.options import ended_by_module
from flatout.cli.run_command import command as run_command
from flatout.errors import ScriptError, UsageError
from flatout.run.script import Script, as_typed, check, check_source, from_words, interpreter_flags


def test_the_interpreter_is_called_python_where_that_is_the_same_one(tmp_path):
    real, other = tmp_path / "python3", tmp_path / "other"
    real.write_text("")
    other.write_text("")
    assert as_typed(str(real)) == str(real), "there is no python beside it"
    (tmp_path / "python").symlink_to(other)
    assert as_typed(str(real)) == str(real), "another one"
    (tmp_path / "python").unlink()
    (tmp_path / "python").symlink_to(real)
    assert as_typed(str(real)) == str(tmp_path / "python")


def test_a_script_and_a_module_become_the_command_of_a_plain_run(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", "flatout", "run", "train.py"])
    script = from_words(("src/../train.py", "--epochs", "3", "--", "-m"), None)
    assert script.command == [as_typed(sys.executable), "-u", "src/../train.py", "--epochs", "3", "--", "-m"]
    assert (script.name, script.stem, script.typed) == ("src/../train.py", "train", "src/../train.py --epochs 3 -- -m")
    module = from_words(("a b",), "package.train")
    assert module.command == [as_typed(sys.executable), "-u", "-m", "package.train", "a b"]
    assert (module.name, module.stem, module.typed) == ("-m package.train", "train", "-m package.train 'a b'")
    assert module.folder is None


def test_without_words_there_is_no_script():
    with pytest.raises(UsageError, match="no script was given"):
        from_words((), None)


@pytest.mark.parametrize(
    ("typed", "flags"),
    [
        ("python -m flatout run -u", ""),
        ("python /bin/flatout run -O", ""),
        ("python -u -O -W error -X dev -m flatout", "-u -O -W error -X dev"),
        ("python -Wignore -Xutf8=1 -OOm flatout", "-Wignore -Xutf8=1 -OO"),
        ("python -bum flatout", "-bu"),
        ("python -mflatout -u", ""),
        ("python --check-hash-based-pycs never -s -c pass", "--check-hash-based-pycs never -s"),
        ("python -uX importtime flatout", "-uX importtime"),
        ("python -", ""),
        ("python", ""),
        ("python -W", "-W"),
    ],
)
def test_the_interpreters_flags_are_those_that_were_typed(typed, flags):
    assert " ".join(interpreter_flags(typed.split())).strip() == flags


def test_missing_scripts_and_mere_folders_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no such script: `train\.py`") as missing:
        check(Script(path="train.py"))
    assert str(tmp_path) in missing.value.cause
    with pytest.raises(UsageError, match="no such script"):
        check(Script(path=str(tmp_path / "train.py")))
    with pytest.raises(UsageError, match="is a folder"):
        check(Script(path=""))
    (tmp_path / "__main__.py").touch()
    check(Script(path="."))
    check(Script(module="never.looked.for"))


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (b"print(1)\n", None, ""),
        (b"\xef\xbb\xbfprint(1)\n", None, ""),
        (b"# -*- coding: latin-1 -*-\nx = '\xe4'\n", None, ""),
        (b"#!/usr/bin/env python3\nx = 1\n", None, ""),
        (b"", None, ""),
        (b"#!/bin/bash\necho\n", UsageError, "is not Python"),
        (b"\x7fELF\x00\x01", UsageError, "is not Python source"),
        (b"x = '\xe4'\n", UsageError, "is not Python source"),
        (b"# coding: none-such\n", UsageError, "is not Python source"),
        (b"x = 1\nif x\n", ScriptError, "line 2 is not valid Python"),
        (b"x = 1\0\n", (UsageError, ScriptError), "Python"),
    ],
)
def test_the_source_is_read_before_minutes_are_spent_on_it(tmp_path, source, error, text):
    path = tmp_path / "train.py"
    path.write_bytes(source)
    if error is None:
        check_source(Script(path=str(path)))
    else:
        with pytest.raises(error, match=text):
            check_source(Script(path=str(path)))


def test_archives_folders_and_compiled_scripts_are_not_read_as_source(tmp_path):
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "__main__.py").write_text("print(1)\n")
    zipapp.create_archive(folder, tmp_path / "archive", interpreter="/usr/bin/env python3")
    (tmp_path / "train.pyc").write_bytes(b"\x00\x01")
    for name in ("app", "archive", "train.pyc"):
        check_source(Script(path=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("typed", "ended"),
    [
        ("-m train --json x -q", "-m train -- --json x -q"),
        ("-q --json f -m train -m x", "-q --json f -m train -- -m x"),
        ("-mtrain --plan x", "-mtrain -- --plan x"),
        ("-qm train --json x", "-qm train -- --json x"),
        ("--json=f -m train", "--json=f -m train --"),
        ("--plan -m train.py -m x", "--plan -m train.py -m x"),
        ("train.py -m x", "train.py -m x"),
        ("-- -m x", "-- -m x"),
        ("-q -m", "-q -m"),
        ("", ""),
    ],
)
def test_a_module_ends_our_options_as_a_script_does(typed, ended):
    assert " ".join(ended_by_module(run_command, typed.split())) == ended


@given(words=st.lists(st.sampled_from(["-m", "-q", "--json", "--plan", "x", "--", "-mx", "--levers=a"]), max_size=6))
def test_words_are_neither_lost_nor_reordered(words):
    ended = ended_by_module(run_command, words)
    assert ended == words or any(ended[:n] + ended[n + 1 :] == words for n, word in enumerate(ended) if word == "--")
