"""What is the plain script like? Its noise, where its steps go, what it does meanwhile, and what if data were free.

In: a bench whose script has warmed up, and a budget. Out: what `diagnosis` is made from, measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from flatout.errors import Inconclusive
from flatout.judge import stats
from flatout.judge.activity import Activity, activity_of, slow_steps
from flatout.judge.anatomy import MARKING_S, RECORDING_S, Account, Anatomy, dissect
from flatout.judge.causes import WORTHWHILE, Findings, arithmetic_of
from flatout.judge.diagnosis import Diagnosis, diagnose
from flatout.judge.paired import SCREENING, Extent, is_calm
from flatout.judge.profiled_time import ProfiledTime, profiled_time
from flatout.judge.read_sites import ReadSites, judged
from flatout.judge.sequential import Looks
from flatout.judge.stats import Comparison
from flatout.records.as_json import to_json
from flatout.records.ceilings import Ceilings, Machine
from flatout.records.host_reads import HostReads
from flatout.records.profile import Profile
from flatout.records.stacks import Stacks
from flatout.records.trace import Census, Levers, Scaling, Window
from flatout.trials import windows
from flatout.trials.bench import Bench
from flatout.trials.budget import WINDOW_S, Budget
from flatout.trials.child_failures import CandidateFailed

MOST_WAIT_S = 120.0
"""How long to wait at most for other processes to leave the machine alone."""

QUIET_SHARE = 2 / 3
"""Of the time for looking at the plain script."""

ANATOMY_WINDOWS = 4
MOST_ANATOMY_WINDOWS = 10
"""Where others disturb some of them; with fewer than three that are calm, bounds have no interval."""
STACKS_WINDOWS = 8
STACKS_SAMPLES = 1000
"""So many samples are enough: they know a share of a half to within 5 %."""

READS_WINDOWS = 4

PROFILE_WINDOWS = 3
"""Where others disturb them; the one with the shortest steps is taken."""
PROFILED_STEPS, MOST_PROFILED_STEPS = 3, 20
"""At the least, and at the most where they are short; one before them does not count."""

FINDINGS = "findings.json"
"""What the diagnosis was made from, in the run folder."""


R = TypeVar("R", Stacks, HostReads, Profile)


class Baseline:
    """The plain script, as far as it has been looked at."""

    def __init__(
        self, bench: Bench, budget: Budget, machine: Machine, run_folder: Path, stage: Callable[[str], None]
    ) -> None:
        self.bench = bench
        self.budget = budget
        self.machine = machine
        self.run_folder = run_folder
        self._stage = stage
        self.ceilings: Ceilings | None = None
        self.noise: Comparison | None = None
        self.baseline: list[Window] = []
        self.accounts: dict[str, Account] = {}
        self.activity: Activity | None = None
        self.reads: ReadSites | None = None
        self.diagnosis: Diagnosis | None = None
        self.census: Census | None = None
        self.profiled: ProfiledTime | None = None
        self.measure_ceilings: Callable[[], Ceilings | None] = lambda: None
        self._counterfactuals: Mapping[str, Comparison] = {}
        self._until_s = budget.deadline_s(0.9)

    @property
    def anatomy(self) -> Anatomy:
        """Where a step goes.

        Raises:
            Inconclusive: None was taken apart.
        """
        return dissect(self._seen("anatomy", "phases"), [w for _, w in self.bench.windows if not w.levers])

    def observe(self, share: float) -> None:
        """What decides what is worth trying: anatomy, counterfactuals, and a first diagnosis made from them.

        Args:
            share: Of the budget, after which nothing is looked at more often than it must be.
        """
        self._stage("where a step goes")
        until_s = min(self.budget.deadline_s(min(QUIET_SHARE * share, 0.2)), time.perf_counter() + MOST_WAIT_S)
        if not windows.wait_for_quiet(self.bench, until_s, self._stage):
            self.bench.warnings["other processes kept the machine busy: intervals are wide, windows were discarded"] = (
                None
            )
        self._take_apart(self.budget.deadline_s(share))
        least_s = stats.MIN_PAIRS * self.bench.pair_s()
        if time.perf_counter() + least_s < self.budget.deadline_s(share):  # else what is left of the time decides
            if self.bench.facts is not None and self.bench.facts.loaders:
                self._stage("what if data were free?")
            self._counterfactuals = self._measure_counterfactuals(share)
        self.baseline = self._seen("baseline", "ends")
        self._diagnose(None, None)

    def look_closer(self, until_s: float, noise_pairs: int) -> None:
        """What changes nothing of a search: noise, ceilings, samples, reads, census, and the diagnosis from all of it.

        Args:
            until_s: `time.perf_counter` after which nothing is looked at twice.
            noise_pairs: Pairs of plain windows.
        """
        self._until_s, scaling = until_s, None
        loaders = self.bench.facts is not None and self.bench.facts.loaders
        if loaders and "free_data" not in self._counterfactuals and self._begins("what if data were free?"):
            self._counterfactuals = self._measure_counterfactuals(0.95)
        if self._begins("plain against plain: how noisy is it here?"):
            self._take_apart(until_s)
            self._measure_noise(noise_pairs)
            self.accounts["taken apart"] = self._account("anatomy", "phases")
        if self._begins("this machine's ceilings"):
            self.ceilings = self.measure_ceilings()
        if self._begins("what does the script do meanwhile?"):
            self.activity = self._sample()
        if self._begins("where does it wait for values?"):
            self.reads = self._note_reads()
        if self._begins("counting operations"):
            self.census, scaling = self.bench.census(), self.bench.scaling()
        if self._begins("a few steps under the framework's profiler"):  # the last: what it leaves slows nothing down
            self.profiled = self._profile()
        self._diagnose(self.census, scaling)

    def _begins(self, text: str) -> bool:
        """Whether there is time for it, which an evaluation between two steps may have taken."""
        if fits := time.perf_counter() < self.budget.end_s:
            self._stage(text)
        return fits

    def _measure_noise(self, num_pairs: int) -> None:
        extent = Extent(looks=Looks.alike(num_pairs), enough="all", deadline_s=self._until_s)
        measured = windows.measure(self.bench, {}, extent, purpose="baseline")
        self.noise = measured.compare()
        self.bench.noise = stats.scatter(measured.baseline_s, measured.candidate_s)
        self.baseline = self._seen("baseline", "ends")
        self.bench.guess(stats.summarize([w.training_step_s for w in self.baseline]).median)

    def _take_apart(self, until_s: float) -> None:
        for _ in range(MOST_ANATOMY_WINDOWS):
            seen = self._seen("anatomy", "phases")
            if sum(map(is_calm, seen)) >= ANATOMY_WINDOWS or (seen and time.perf_counter() > until_s):
                break
            self.bench.window({}, purpose="anatomy", observe="phases", skip=self.bench.size.skip_steps)

    def _seen(self, purpose: str, observe: str) -> list[Window]:
        """The plain windows of a purpose that nothing disturbed; all of them where there are none."""
        seen = [w for _, w in self.bench.windows if w.purpose == purpose and w.observe == observe and not w.levers]
        return [w for w in seen if is_calm(w)] or seen

    def _account(self, purpose: str, observe: str) -> Account:
        """Whether the step that is looked at is the plain one; measured in turn where the two seem to differ.

        The machine may have changed from the one to the other, which contradicts nothing.
        """
        plain, others = self.baseline, self._seen(purpose, observe)
        account = self._of(plain, others, observe)
        sure = account.contradicts(WORTHWHILE) and all(is_calm(w) for w in (*plain, *others))
        return account if sure or not account.seems_to_differ(WORTHWHILE) else self._in_turn(account, purpose, observe)

    @staticmethod
    def _of(plain: Sequence[Window], others: Sequence[Window], observe: str) -> Account:
        return Account(
            plain_s=tuple(w.training_step_s for w in plain if w.training_s > 0),
            other_s=tuple(w.training_step_s for w in others if w.training_s > 0),
            cost_s=RECORDING_S + MARKING_S * any(w.device_phases for w in others) if observe == "phases" else math.inf,
        )

    def _in_turn(self, account: Account, purpose: str, observe: str) -> Account:
        sides: dict[str, list[float]] = {"ends": [], observe: []}
        for number in range(stats.RANKED_PAIRS):
            enough_s = self.budget.deadline_s(0.6) if number >= stats.MIN_PAIRS else math.inf
            if time.perf_counter() > min(self._until_s, enough_s):
                break
            order = [("baseline", "ends"), (purpose, observe)]
            for one, how in order if self.bench.lots.random() < 0.5 else order[::-1]:
                window = self.bench.window({}, purpose=one, observe=how, skip=self.bench.size.skip_steps)
                sides[how].append(window.training_step_s)
        self.baseline = self._seen("baseline", "ends")
        plain_s, other_s = (tuple(side) for side in sides.values())
        whole = replace(account, plain_s=account.plain_s + plain_s, other_s=account.other_s + other_s)
        if whole.contradicts(WORTHWHILE) or len(plain_s) < stats.MIN_PAIRS:  # whatever others did before; or too few
            return whole
        return replace(account, plain_s=plain_s, other_s=other_s, in_turn=True, noise=self.bench.noise)

    def _sample(self) -> Activity | None:
        """Look at what the training thread does; where workers fetch, also without them."""
        seen: list[Stacks] = []
        for _ in range(STACKS_WINDOWS):
            seen += self._looked(Stacks, "stacks")
            if sum(s.num_samples for s in seen) >= STACKS_SAMPLES or time.perf_counter() > self._until_s:
                break
        facts = self.bench.facts
        if not seen or facts is None:
            return None
        self.accounts["sampled"] = self._account("stacks", "stacks")
        back = {name: one for name, lever in self.bench.levers.items() if (one := lever.brings_back(facts)) is not None}
        without = self._looked(Stacks, "stacks", back) if back else []
        return activity_of(seen, without[0] if without else None)

    def _note_reads(self) -> ReadSites | None:
        """Where values are read on the host."""
        seen: list[HostReads] = []
        for _ in range(READS_WINDOWS):
            seen += self._looked(HostReads, "reads")
            if time.perf_counter() > self._until_s:
                break
        return judged(seen)

    def _profile(self) -> ProfiledTime | None:
        """Where a few steps went, as the framework's own profiler sees them."""
        assert self.bench.facts is not None
        fitting = round(WINDOW_S / self.bench.step_guess_s)
        num_steps = 1 + min(max(fitting, PROFILED_STEPS), MOST_PROFILED_STEPS)
        arithmetic = arithmetic_of(self.bench.facts, self.census)
        found: list[ProfiledTime] = []
        for _ in range(PROFILE_WINDOWS):
            seen = self._looked(Profile, "profile", num_steps=num_steps)
            accounts = [profiled_time(one, self.census, self.ceilings, arithmetic) for one in seen]
            found += [account for account in accounts if account is not None]
            calm = all(is_calm(w) for _, w in self.bench.windows[-1:])
            if not seen or calm or time.perf_counter() > self._until_s:
                break
        return min(found, key=lambda one: one.step_s, default=None)

    def _looked(
        self, kind: type[R], observe: str, levers: Levers | None = None, num_steps: int | None = None
    ) -> list[R]:
        """What a window has noted beside its steps: one record, or none where it could not be measured."""
        self.bench.answer = []
        skip = self.bench.size.loader_skip_steps if levers else self.bench.size.skip_steps
        with contextlib.suppress(CandidateFailed, Inconclusive):  # the rest does not depend on it
            self.bench.window(levers or {}, purpose=observe, observe=observe, skip=skip, num_steps=num_steps)
        return [one for one in self.bench.answer if isinstance(one, kind)]

    def _measure_counterfactuals(self, share: float) -> dict[str, Comparison]:
        facts = self.bench.facts
        assert facts is not None
        found: dict[str, Comparison] = {}
        extent = Extent(looks=SCREENING, enough="clear", deadline_s=self.budget.deadline_s(share))

        def compared(levers: Levers) -> Comparison:
            return windows.measure(self.bench, levers, extent, purpose="counterfactual").compare()

        if facts.loaders:
            found["free_data"] = compared({"free_data": {}})
        for lever in self.bench.levers.values():
            for name, settings in lever.frees(facts, self.machine).items():
                with contextlib.suppress(CandidateFailed):  # then it is not known what it would bring
                    found[name] = compared({lever.name: settings})
        return {name: c for name, c in found.items() if math.isfinite(c.ratio)}

    def _diagnose(self, census: Census | None, scaling: Scaling | None) -> None:
        assert self.bench.facts is not None
        shown = self._of(self.baseline, self._seen("anatomy", "phases"), "phases")
        if shown.is_open(WORTHWHILE):  # whatever was measured in turn: these are the two steps that are shown
            self.accounts["taken apart"] = shown
        findings = Findings(
            anatomy=self.anatomy, facts=self.bench.facts, num_cores=self.machine.num_cores,
            counterfactuals=self._counterfactuals, census=census, scaling=scaling, ceilings=self.ceilings,
            activity=self.activity, slow_steps=slow_steps(self.baseline, self._seen("anatomy", "phases")),
            accounts=self.accounts, profiled=self.profiled,
        )  # fmt: skip
        with contextlib.suppress(OSError):  # kept so that other rules can be held against it; not needed for the rest
            (self.run_folder / FINDINGS).write_text(json.dumps(to_json(findings)) + "\n", encoding="utf-8")
        self.diagnosis = diagnose(findings)
