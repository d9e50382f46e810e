"""What a terminal shows, against golden files and by its rules."""

import io
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from flatout import api
from flatout.judge.diagnosis import EASED, Bound
from flatout.records.plan import Trial
from flatout.report import levers, machine, screen, terminal, tried, view_of

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))

import report_examples as examples  # noqa: E402

from handmade import trial  # noqa: E402
from shown import as_text  # noqa: E402
from shown import on_screen as shown  # noqa: E402

RESULTS = {name: make() for name, make in examples.EXAMPLES.items()}
TUNED = [name for name, result in RESULTS.items() if result.command == "tune"]


def printed(view, **options):
    return as_text(terminal.report(view, verbose=True), **options)


def wider_than(text, width):
    """Lines that are too wide, but for commands and paths, in which no word may be cut."""
    lines, kept = text.splitlines(), False
    found = []
    for line in lines:
        kept = line.startswith(("next ", "report ", "plan ")) or (kept and line.startswith("             "))
        if cell_len(line) > width and not kept:
            found.append(line)
    return found


@pytest.mark.parametrize("name", sorted(examples.terminal_texts()))
def test_the_terminal_shows_what_it_showed(name):
    assert examples.terminal_texts()[name] == (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("width", [60, 80, 81, 100, 120, 200])
@pytest.mark.parametrize("verbose", [False, True])
def test_no_line_is_wider_than_the_terminal(name, width, verbose):
    assert wider_than(shown(RESULTS[name], width=width, verbose=verbose), width) == []


@pytest.mark.parametrize("name", RESULTS)
def test_no_line_ends_in_spaces_and_no_two_blank_lines_follow(name):
    text = shown(RESULTS[name], verbose=True)
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "\n\n\n" not in text


@pytest.mark.parametrize("name", ["lenet", "nothing", "busy", "why", "gpu"])
def test_the_default_fits_one_screen(name):
    assert 20 <= len(shown(RESULTS[name]).splitlines()) <= 39


@pytest.mark.parametrize("name", RESULTS)
def test_the_last_line_names_the_next_command(name):
    *_, last = [line for line in shown(RESULTS[name]).splitlines() if line.startswith("next")]
    assert last.startswith("next       flatout ")


def test_a_winner_says_how_much_how_sure_and_when_it_pays():
    text = " ".join(shown(RESULTS["lenet"]).split())
    assert "3.6x faster: 231 → 832 steps/s [3.49, 3.70] when measured again" in text
    assert "two equal runs differ by up to 1.4 % here" in text
    assert "earned back after 22,700 steps. This run has 2,814: it pays from run 9 on" in text


def test_a_run_long_enough_pays_within_itself():
    result = replace(RESULTS["lenet"], steps_in_run=40_000)
    assert "This run has 40,000: it pays within this very run" in " ".join(shown(result).split())


def test_an_unknown_length_of_the_run_is_not_guessed():
    text = shown(replace(RESULTS["lenet"], steps_in_run=None))
    assert "earned back after 22,700 steps" in text
    assert "This run" not in text


def test_nothing_helps_says_what_binds_and_how_close_to_the_ceiling():
    text = " ".join(shown(RESULTS["nothing"]).split())
    assert "no difference: best of 9 candidates 1.01x [0.98, 1.03] when measured again" in text
    assert "bound by compute, at 86 % of this machine's float32 ceiling" in text


def test_inconclusive_says_why():
    text = " ".join(shown(RESULTS["busy"]).split())
    assert "inconclusive: best of 2 candidates 1.18x [0.88, 1.58], the interval is too wide to tell" in text
    assert "Plain against plain: only 2 pairs of windows" in text
    assert "stopped the search ended early: the budget of 180 s was too short for more" in text
    assert "21 pairs of windows that others" in text


def test_faster_with_numbers_that_nobody_compared_is_no_success():
    text = " ".join(shown(RESULTS["gpu"]).split())
    assert "✔" not in text
    assert "but its numbers could not be compared" in text


def test_what_was_only_screened_or_did_not_hold_when_measured_again_does_not_look_like_a_win():
    screened = replace(trial({"fused": {}}, 1.8), outcome="screened", num_windows=31)
    luckier = trial({"bf16": {}}, 1.3)
    again = replace(luckier, outcome="inconclusive", ratio=1.01, ratio_low=0.9, remeasured=True)
    found = replace(RESULTS["busy"], trials=(screened, luckier), remeasured=again, verdict="inconclusive")
    assert [row.mark for row in tried.rows(found)] == ["even", "even"]
    assert "✔" not in shown(found) and "screened in 31 windows" in shown(found)
    confirmed = replace(found, trials=(screened,), remeasured=replace(luckier, levers=screened.levers))
    assert [row.mark for row in tried.rows(confirmed)] == ["yes"]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_word_of_a_verdict_is_cut_and_no_lever_of_a_long_set(width):
    names = {f"a_lever_of_set_{n}": {} for n in range(9)}
    detail = "error 0.41 is not small against the noise between batches of the script"
    long = replace(trial(names, 1.3), outcome="disagrees", agreement="disagrees", agreement_detail=detail)
    found = replace(RESULTS["busy"], trials=(long,))
    for verbose in (False, True):
        text = shown(found, width=width, verbose=verbose)
        assert "…" not in text and all(name in text for name in names)


def test_a_disagreement_has_its_own_mark():
    line = next(line for line in shown(RESULTS["nothing"]).splitlines() if line.startswith("  bf16"))
    assert "✖" in line and "1.41" in line


def test_a_phase_without_a_measured_bound_has_none():
    lines = shown(RESULTS["lenet"]).splitlines()
    assert next(line for line in lines if line.startswith("  backward")).endswith("12 %")
    assert "3.4x  one cached batch replayed" in next(line for line in lines if line.startswith("  data"))


def test_phases_that_were_not_seen_are_named():
    assert "not observed  copy, communication" in shown(RESULTS["lenet"])


def test_warnings_refusals_and_discarded_windows_are_said():
    text = shown(RESULTS["busy"])
    for label in ("discarded", "warning", "refused"):
        assert f"\n{label}" in text


def test_two_measurements_of_the_winner_that_exclude_each_other_are_said():
    lenet = RESULTS["lenet"]
    chosen = next(t for t in lenet.trials if t.levers == lenet.plan.levers)
    away = replace(chosen, ratio=1.06, ratio_low=1.02, ratio_high=1.19)
    trials = tuple(away if t is chosen else t for t in lenet.trials)
    assert "the search had measured" not in shown(lenet)
    text = " ".join(shown(replace(lenet, trials=trials), verbose=True).split())
    assert "the search had measured 1.06x [1.02, 1.19] for the same levers" in text


@pytest.mark.parametrize(("spread", "said"), [(0.31, True), (0.25, False), (float("nan"), False)])
def test_a_diagnosis_from_noisy_steps_is_said_to_be_one(spread, said):
    result = replace(RESULTS["lenet"], baseline_spread_fraction=spread)
    warned = [text for text in tried.warnings(result) if text.startswith("plain steps varied by ± 31 %: what binds")]
    assert bool(warned) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"stopped": "the budget of 10 s was too short for more"},
            "no lever could be tried: the budget of 10 s was too short for more",
        ),
        ({"stopped": "", "options": "--levers none"}, "no lever was to be tried"),
        ({"stopped": ""}, "no lever was worth trying here"),
    ],
)
def test_why_nothing_was_tried_is_said(changes, said):
    result = replace(RESULTS["busy"], trials=(), **changes)
    text = " ".join(shown(result).split())
    assert f"tried nothing: {said}" in text and "inconclusive: no candidate was measured" in text


def test_what_became_of_candidates_of_which_none_could_be_used_is_said():
    disturbed = "other processes used the CPU in every window"
    trials = tuple(Trial(levers={name: {}}, outcome="inconclusive", reason=disturbed) for name in ("a", "b"))
    text = " ".join(shown(replace(RESULTS["busy"], trials=trials)).split())
    assert f"inconclusive: none of 2 candidates could be used: {disturbed}." in text
    assert "no candidate was measured" not in text
    trials += (Trial(levers={"c": {}}, outcome="disagrees", ratio=1.4, reason="other items"),)
    said = tried.nothing_usable(replace(RESULTS["busy"], trials=trials))
    assert said == f"none of 3 candidates could be used: {disturbed} (a, b); disagrees: other items (c)"


def test_where_the_budget_was_spent_the_next_command_has_a_larger_one():
    assert "\nnext       flatout tune --budget 360s " in shown(RESULTS["busy"])
    stopped = replace(RESULTS["busy"], stopped="you stopped it", short_budget_s=None)
    assert "\nnext       flatout tune lenet.py " in shown(stopped)


def test_the_ceilings_line_shows_what_utilization_is_measured_against():
    lenet = RESULTS["lenet"]
    faster = [replace(c, value=242e9) if c.name == "conv_float32" else c for c in lenet.ceilings.values]
    text = shown(replace(lenet, ceilings=replace(lenet.ceilings, values=tuple(faster))))
    assert "ceilings   float32 242 · bfloat16 434 GFLOP/s" in text


def test_one_window_has_no_spread():
    text = shown(replace(RESULTS["lenet"], baseline_spread_fraction=math.nan))
    assert "±" not in next(line for line in text.splitlines() if line.startswith("baseline"))


def test_what_trials_wrote_is_listed_with_verbose():
    assert "runs/lenet.pt" in shown(RESULTS["lenet"], verbose=True)


def test_a_set_stands_below_the_set_that_it_extends():
    words = [(row.depth, row.words) for row in tried.rows(RESULTS["lenet"])]
    assert words[:5] == [
        (0, "fused_fetch"), (1, "+ fused_optimizer"), (2, "+ threads=1"), (3, "+ bf16"), (3, "+ compile"),
    ]  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from("abcde"), st.just({}), min_size=1), min_size=1, max_size=12))
@settings(deadline=None)
def test_every_trial_has_one_row_and_its_levers_are_those_on_the_way_to_it(sets):
    unique = list({tuple(sorted(one)): one for one in sets}.values())
    trials = tuple(Trial(levers=one, outcome="faster", ratio=1.0 + len(one)) for one in unique)
    rows = tried.rows(replace(RESULTS["lenet"], trials=trials))
    assert sorted(id(row.trial) for row in rows) == sorted(map(id, trials))
    path = []
    for row in rows:
        path = [*path[: row.depth], row.words.removeprefix("+ ")]
        assert sorted(" ".join(path).split()) == sorted(row.trial.levers)


def test_the_chosen_one_and_disagreements_are_kept_when_rows_are_few():
    result = RESULTS["lenet"]
    kept = [row for row in tried.rows(result) if not row.minor]
    assert len(kept) == tried.MOST_ROWS
    assert any(row.chosen for row in kept)
    assert any(row.mark == "never" for row in kept)
    assert f"{len(result.trials) - len(kept)} more: --verbose" in shown(result)


def test_reasons_are_said_once_for_all_levers_that_share_them():
    assert "pinned_memory, cudnn_benchmark, tf32 (trains on the CPU)" in shown(RESULTS["lenet"])


def test_a_long_command_is_broken_between_arguments_so_that_it_can_be_copied():
    lines = shown(RESULTS["huge"]).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("next"))
    command = "\n".join(lines[start:]).removeprefix("next       ")
    assert " ".join(command.replace("\\\n", "").split()) == " ".join(("flatout run " + RESULTS["huge"].typed).split())
    assert all(line.endswith(" \\") for line in lines[start:-1])
    assert "'a  b'" in command


def test_a_terminal_that_wants_colour_gets_it_and_others_do_not(monkeypatch):
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    lenet = terminal.report(view_of(RESULTS["lenet"]))
    coloured, plain, without = Terminal(), io.StringIO(), Terminal()
    screen.show(lenet, coloured)
    screen.show(lenet, plain)
    monkeypatch.setenv("NO_COLOR", "1")
    screen.show(lenet, without)
    assert "\x1b[" in coloured.getvalue()
    assert "\x1b[" not in plain.getvalue()
    assert "\x1b[3" not in without.getvalue()  # bold stays, colour goes
    assert plain.getvalue() == as_text(lenet)


def test_a_stream_that_is_not_utf_8_is_not_broken():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1", newline="\n")
    screen.show(terminal.report(view_of(RESULTS["huge"])), stream)
    stream.flush()
    assert b"\\u8a13" in raw.getvalue() or b"faster" in raw.getvalue()
    assert stream.errors == "strict", "what the caller writes to it afterwards is the caller's"


def test_the_machine_shows_every_ceiling_and_its_age():
    text = printed(machine.view(examples.CEILINGS, now_unix_s=examples.CREATED_UNIX_S))
    assert "159 GFLOP/s" in text and "measured 2 days ago" in text and "1.9 µs" in text


def test_levers_stand_under_their_class():
    class Lever:
        known = True

        def __init__(self, name, class_, refusal=None, parameter=None, choices=(), optional=False):
            self.name, self.class_, self.summary, self.refusal = name, class_, f"what {name} does", refusal
            self.parameter, self.choices, self.optional = parameter, choices, optional

    shown_levers = [Lever("bf16", "precision", "no bf16 here"), Lever("workers", "exact", parameter="num")]
    words = Lever("mode", "rounding", parameter="way", choices=("slow", "quick"), optional=True)
    assert "\n  mode[=WORD]  what" in (text := printed(levers.view([words]))) and "for mode: slow, quick" in text
    text = printed(levers.view(shown_levers))
    assert "\n  workers=N  what" in text and "\n  bf16       what" in text and "\nN          a number" in text
    assert text.index("exact") < text.index("workers") < text.index("precision") < text.index("bf16")
    assert "what bf16 does (not here: no bf16 here)" in text
    assert "what workers does\n" in text


def test_the_list_of_all_levers_keeps_to_80_columns_and_says_which_need_a_number():
    text = printed(levers.view(api.describe_levers()))
    assert wider_than(text, 80) == []
    assert "\n  workers=N " in text and "\n  threads=N " in text and "\n  bf16 " in text


@given(share=st.floats(min_value=0, max_value=1), cells=st.integers(min_value=1, max_value=60))
@settings(deadline=None)
def test_a_bar_is_as_long_as_its_share_and_shows_whatever_is_not_zero(share, cells):
    found = {}

    def compose(page):
        found["bar"] = page.bar(share, cells)

    as_text(screen.Report(compose))
    bar = found["bar"]
    assert cell_len(bar) == cells
    assert (bar.strip() == "") == (share == 0)
    full = bar.count("█")
    assert full <= share * cells + 1 and share * cells <= full + 1.1


@given(text=st.text(max_size=60), cells=st.integers(min_value=3, max_value=40))
@settings(deadline=None)
def test_fitted_text_has_exactly_its_columns(text, cells):
    found = {}

    def compose(page):
        found["text"] = page.fit(text, cells)

    as_text(screen.Report(compose))
    assert cell_len(found["text"]) == cells


def test_what_free_data_would_bring_stands_beside_what_the_input_levers_brought():
    result = next(r for r in RESULTS.values() if r.command == "tune" and r.verdict == "faster")
    bound = Bound(remedy="free data", ratio=4.0, low=3.8, high=4.3, how="replayed", shortens=("data",))
    found = trial({"sample_store": {}}, 2.5, ratio_low=2.4, ratio_high=2.6)
    result = replace(result, diagnosis=replace(result.diagnosis, bounds=(bound,)), input_trial=found)
    said = " ".join(shown(result, width=200).split())
    assert "input free data would bring 4.00x [3.80, 4.30], `sample_store` brings 2.50x [2.40, 2.60]: 80 %" in said
    assert "of the time that waiting for data takes" in said
    for without in (replace(result, input_trial=None), replace(result, diagnosis=replace(result.diagnosis, bounds=()))):
        assert "waiting for data" not in shown(without)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("no difference", "no difference: plain against itself 1.00x [0.99, 1.01] when measured as if"),
        ("faster", "a false alarm: plain against itself 1.00x [0.99, 1.01], called faster; one such run in a hundred"),
    ],
)
def test_plain_against_itself_is_told_as_what_it_is(outcome, said):
    again = trial({}, 1.0, outcome, ratio_low=0.99, ratio_high=1.01, remeasured=True)
    word, rest = tried.against_itself(replace(examples.lenet(), remeasured=again))
    assert (word + rest).startswith(said)
    never = replace(again, ratio=None, outcome="inconclusive", reason="others used the CPU")
    assert "could not be measured: others" in tried.against_itself(replace(examples.lenet(), remeasured=never))[1]


REASONS = [
    "not sure enough: 1 lies in the 99 % interval",
    "1 of at least 4 pairs of windows that are needed",
    "the interval is too wide to tell",
    "other processes used the CPU in every window",
    "27 s to compile, then no difference to the set without it",
]


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("reason", REASONS)
def test_no_reason_in_the_table_is_cut(reason, width):
    again = trial(
        {"workers": {"num": 1}, "threads": {"num": 1}}, 1.2, outcome="inconclusive", ratio_low=1.07, ratio_high=1.33,
        reason=reason,
    )  # fmt: skip
    text = shown(replace(RESULTS["lenet"], trials=(again,)), width=width)
    table = text.partition("numerics\n")[2].partition("not tried")[0]
    assert "…" not in table
    assert " ".join(table.split()).endswith((tried.brief(again), tried.remark(again)))


def test_a_remark_longer_than_its_lines_ends_at_a_word_and_shows_that():
    long = trial({"bf16": {}}, 1.2, outcome="inconclusive", ratio_low=1.0, ratio_high=1.3, reason="some words " * 40)
    text = shown(replace(RESULTS["lenet"], trials=(long,)), width=100)
    cut = [line for line in text.splitlines() if line.endswith("…")]
    assert len(cut) == 1 and cut[0].endswith(("some…", "words…"))
    assert text.count("some words") <= 3 * terminal.CELL_LINES * 3


def test_how_a_bound_is_known_is_not_cut_in_the_middle():
    result = RESULTS["lenet"]
    bounds = tuple(replace(b, how=EASED) for b in result.diagnosis.bounds)
    for width in (80, 100):
        text = shown(replace(result, diagnosis=replace(result.diagnosis, bounds=bounds)), width=width)
        assert EASED in " ".join(text.split())


def test_a_budget_that_was_overrun_by_far_is_said():
    late = replace(RESULTS["busy"], asked_budget_s=60.0, tuning_s=116.0)
    assert "cost       116 s, where 60 s were asked for" in shown(late)
    assert "asked for" not in shown(replace(late, tuning_s=66.0)) and "asked for" not in shown(RESULTS["busy"])
