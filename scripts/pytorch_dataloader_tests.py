"""Does PyTorch's own test file of the `DataLoader` say the same under flatout's loaders as without them?

    python scripts/pytorch_dataloader_tests.py PATH_TO_test_dataloader.py [--only "workers 2"] [--levers JSON]

The file is not part of this repository; a copy in a temporary folder is changed so far that it runs: it imports
`engaged`, and what it takes from another place or another version is taken from here. Each configuration is one process
of pytest, which begins again behind a test that ended it. In: the file. Out: a table, and each test that differs from
plain with its message; the exit status is 1 where one differs every time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engaged import CONFIGURATIONS

HERE = Path(__file__).resolve().parent
LIMIT_S = 240
"""For one test; the longest of PyTorch's ends processes in some thirty ways and takes two minutes and more."""

MOST_ENDING_S = 30.0
"""How long a process may take to end once all tests were run: some leave processes behind, for which it waits."""

MOST_STARTS = 12
"""Processes for one configuration; each but the last was ended by a test."""

CHANGES = (
    # torchdata has a copy of the file for its own loader
    (r"from torchdata\.stateful_dataloader import StatefulDataLoader as ", "from torch.utils.data import "),
    (r"\bIS_PYTORCH_CI\b", "IS_CI"),  # its name until PyTorch 1.10
    (r"^([ \t]*)(from torch\.utils\.data import .*\bDataLoader\b.*)$", r"\1\2\n\1import engaged"),
)
"""What is replaced in the copy, so that it runs under another PyTorch and tests the loader that it is to test."""


@dataclass
class Outcomes:
    """What one configuration's tests came to: outcome and message of each, seconds, and what took effect."""

    tests: dict[str, tuple[str, str]] = field(default_factory=dict)
    wall_s: float = 0.0
    evidence: list[dict[str, Any]] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        """How many tests have this outcome."""
        return Counter(found for found, _ in self.tests.values())[outcome]


def adapted(text: str) -> str:
    """The test file as it is run here."""
    for pattern, replacement in CHANGES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


@dataclass(frozen=True)
class Choice:
    """Which tests are run: `only` these, or all `without` those."""

    only: Sequence[str] = ()
    without: Sequence[str] = ()

    def arguments(self, file: Path, done: Sequence[str]) -> list[str]:
        """Of pytest; `done`: what was run already."""
        left_out = [f"--deselect={_node(file, test)}" for test in (*done, *self.without)]
        return [*([_node(file, test) for test in self.only] or [file.name]), *left_out]


def _node(file: Path, test: str) -> str:
    return f"{file.name}::{test.replace('.', '::', 1)}"


def run(file: Path, levers: Mapping[str, Any] | None, choice: Choice) -> Outcomes:
    """Tests of a file under some levers."""
    found = Outcomes()
    begun_s = time.monotonic()
    for _ in range(MOST_STARTS):
        if _one_process(file, levers, choice, found):
            break
    found.wall_s = time.monotonic() - begun_s
    return found


def _one_process(file: Path, levers: Mapping[str, Any] | None, choice: Choice, found: Outcomes) -> bool:
    """Run what is not known yet; whether all of it was run."""
    with tempfile.TemporaryDirectory() as folder:
        told, evidence, said = (Path(folder) / name for name in ("outcomes", "evidence", "said"))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "PYTORCH_TEST_WITH_SLOW": "1",
            "FLATOUT_OUTCOMES": str(told),
            "FLATOUT_EVIDENCE": str(evidence),
        }
        if levers is not None:
            environment["FLATOUT_ENGAGED"] = json.dumps(levers)
        with said.open("wb") as output:
            command = _command(choice.arguments(file, list(found.tests)))
            process = subprocess.Popen(
                command, cwd=file.parent, env=environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            _wait(process, told)
        running, is_over = _read(told, found)
        if evidence.exists():
            found.evidence += [json.loads(line) for line in evidence.read_text(encoding="utf-8").splitlines()]
        if running is not None:
            found.tests[running] = ("ended the process", f"exit status {process.returncode}")
        elif not is_over:
            raise SystemExit(said.read_text(encoding="utf-8", errors="replace")[-4000:])
        return running is None


def _command(tests: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "pytest", "-p", "outcomes", "-p", "no:cacheprovider", "-q", "-c", os.devnull,
        "-o", "python_functions=", "--rootdir", ".", f"--timeout={LIMIT_S}", "--timeout-method=signal",
        *tests,
    ]  # fmt: skip


def _wait(process: subprocess.Popen[bytes], told: Path) -> None:
    """Until the process ends; it is killed, with what it started, where nothing was told for too long."""
    while process.poll() is None:
        time.sleep(0.5)
        last_s = told.stat().st_mtime if told.exists() else time.time()
        if time.time() - last_s > (MOST_ENDING_S if _is_over(told) else LIMIT_S + 60):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_over(told: Path) -> bool:
    return told.exists() and '"over"' in told.read_text(encoding="utf-8").rpartition("\n{")[2]


def _read(told: Path, found: Outcomes) -> tuple[str | None, bool]:
    """Take up what was told: the test that was running when the process ended, if one was; whether all were run."""
    running, is_over = None, False
    for line in told.read_text(encoding="utf-8").splitlines() if told.exists() else []:
        one = json.loads(line)
        test, outcome = one["test"], one["outcome"]
        if outcome == "over":
            is_over = True
            continue
        if outcome == "begun":
            running = test
            continue
        running = None
        if found.tests.get(test, ("",))[0] != "failed":
            found.tests[test] = (outcome, one["message"])
    return running, is_over


# -- what is said --------------------------------------------------------------------------------------------------


def differing(plain: Outcomes, other: Outcomes) -> list[str]:
    """Tests whose outcome is not that of plain."""
    return [t for t in plain.tests if other.tests.get(t, ("not run",))[0] != plain.tests[t][0]]


def row(name: str, found: Outcomes, num_differing: int | None) -> str:
    """One row of the table."""
    changed, computed, mended = (
        sum(one["changed_passes"] for one in found.evidence),
        sum(one["computed_batches"] + one["batches_ahead"] for one in found.evidence),
        sum(len(one["problems"]) for one in found.evidence),
    )
    cells = [
        name, found.count("passed"), found.count("failed"), found.count("skipped"), found.count("ended the process"),
        "" if num_differing is None else num_differing, changed, computed, mended, f"{found.wall_s:.0f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = """\
| configuration | passed | failed | skipped | ended the process | differ | passes changed | batches computed | mended | s |
|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def say_outcomes(title: str, found: Outcomes, outcomes: Sequence[str]) -> None:
    """List the tests with some outcomes, by their message."""
    print(f"\n{title}")
    by_message: dict[str, list[str]] = {}
    for test, (outcome, message) in found.tests.items():
        if outcome in outcomes:
            by_message.setdefault(f"{outcome}: {message.splitlines()[0] if message else ''}", []).append(test)
    for message, tests in by_message.items():
        print(f"- {message}\n  " + "\n  ".join(tests))


def say_difference(test: str, plain: Outcomes, other: Outcomes, again: Mapping[str, Sequence[str]]) -> None:
    """One test that differs from plain."""
    for name, found in (("plain", plain), ("here", other)):
        outcome, message = found.tests.get(test, ("not run", ""))
        print(f"  {name}: {outcome}. " + " ".join(message.split())[:600])
    for name, outcomes in again.items():
        print(f"  again, {name}: {', '.join(outcomes)}")


def run_all(
    file: Path, names: Mapping[str, Any], choice: Choice, num_at_once: int, kept: Path | None
) -> dict[str, Outcomes]:
    """Run all configurations, most of which is waiting. Outcomes are kept in a file as they come."""
    found: dict[str, Outcomes] = {}
    with ThreadPoolExecutor(num_at_once) as threads:
        under_way = {threads.submit(run, file, levers, choice): name for name, levers in names.items()}
        for ended in as_completed(under_way):
            found[under_way[ended]] = ended.result()
            if kept is not None:
                told = {name: asdict(one) for name, one in found.items()}
                kept.write_text(json.dumps(told, indent=1), encoding="utf-8")
            print(row(under_way[ended], ended.result(), None), file=sys.stderr, flush=True)
    return {name: found[name] for name in names}


def compare(file: Path, names: Mapping[str, Any], found: Mapping[str, Outcomes], num_again: int) -> bool:
    """Say what configurations came to; whether none differs from plain each time."""
    plain = found["plain"]
    print(HEAD)
    for name, one in found.items():
        print(row(name, one, None if one is plain else len(differing(plain, one))))
    say_outcomes("plain does not pass:", plain, ("failed", "skipped", "ended the process"))
    same = True
    for name, one in found.items():
        for test in differing(plain, one):
            print(f"\n{name}: {test}", flush=True)
            again = {
                side: [
                    run(file, names[side], Choice([test])).tests.get(test, ("not run",))[0] for _ in range(num_again)
                ]
                for side in ("plain", name)
            }
            say_difference(test, plain, one, again)
            same &= bool(again[name]) and set(again["plain"]) >= set(again[name])
    return same


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="a copy of PyTorch's `test/test_dataloader.py`")
    parser.add_argument("--only", action="append", default=[], choices=[*CONFIGURATIONS], help="a configuration")
    parser.add_argument("--levers", action="append", default=[], help="a further configuration, in JSON")
    parser.add_argument("--json", type=Path, help="a file for all outcomes")
    parser.add_argument("--without", action="append", default=[], help="a test that is left out, `Class.test_name`")
    parser.add_argument("--at-once", type=int, default=1, help="configurations that are run at the same time")
    parser.add_argument("--again", type=int, default=2, help="how often a test that differs is run again, alone")
    arguments = parser.parse_args()
    wanted = arguments.only or ([] if arguments.levers else list(CONFIGURATIONS))
    names = {name: CONFIGURATIONS[name] for name in ("plain", *wanted)}
    names |= {text: json.loads(text) for text in arguments.levers}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "test_dataloader.py"
        copy.write_text(adapted(arguments.file.read_text(encoding="utf-8")), encoding="utf-8")
        found = run_all(copy, names, Choice(without=arguments.without), arguments.at_once, arguments.json)
        sys.exit(0 if compare(copy, names, found, arguments.again) else 1)


if __name__ == "__main__":
    main()
