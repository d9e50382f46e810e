"""The HTML page and the JSON, as text; what a browser makes of it is in `tests/end_to_end/test_report_browser.py`."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.judge.result import TimelineStep
from flatout.records.plan import Trial
from flatout.records.trace import PHASES
from flatout.report import (
    evidence,
    figures,
    json_text,
    proof,
    svg,
    table,
    tables,
    thinned,
    ticks,
    verdict,
    view_of,
    words,
    write_page,
)
from flatout.report.figures import phase_colour
from handmade import anatomy
from proofs import PROOFS
from shown import on_page, on_screen

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import report_examples as examples

from tiers import some

RESULTS = {name: make() for name, make in examples.EXAMPLES.items()}
PROVED = {name: make() for name, make in PROOFS.items()}
VOID = {"meta", "br", "wbr", "link", "img", "input", "hr"}


class Pages(dict):
    """The text of the page of each example, written when it is first asked for."""

    def __missing__(self, name):
        self[name] = on_page(RESULTS[name] if name in RESULTS else PROVED[name.removeprefix("proof ")])
        return self[name]


PAGES = Pages()
PAGE_NAMES = [*RESULTS, *(f"proof {name}" for name in PROVED)]


class Page(HTMLParser):
    """Collects elements, text and ids, and checks that every element is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.stack, self.words, self.ids = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.elements.append((tag, found))
        if "id" in found:
            self.ids.append(found["id"])
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if "id" in dict(attributes):
            self.ids.append(dict(attributes)["id"])

    def handle_endtag(self, tag):
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes <{self.stack[-1] if self.stack else None}>"
        self.stack.pop()

    def handle_data(self, data):
        if not self.stack or self.stack[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).replace("\u00a0", " ").split())

    def named(self, tag):
        return [found for name, found in self.elements if name == tag]


@pytest.fixture(scope="module", params=PAGE_NAMES)  # all that is asked of a page, then the next page
def page(request):
    return Page(PAGES[request.param])


def test_every_element_is_closed_and_every_id_unique(page):
    assert page.stack == []
    assert len(page.ids) == len(set(page.ids))


def test_the_page_needs_no_script_and_no_network(page):
    assert not {"script", "link", "iframe", "img", "object"} & {tag for tag, _ in page.elements}
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("href", "src", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")


def test_the_head_says_what_a_browser_and_a_reader_need(page):
    assert page.named("html")[0]["lang"] == "en"
    assert page.named("meta")[0] == {"charset": "utf-8"}
    assert any(found.get("name") == "viewport" for found in page.named("meta"))
    assert len(page.named("title")) == len(page.named("h1")) == len(page.named("main")) == 1


def test_every_drawing_is_an_image_with_words_drawn_wide_and_narrow(page):
    drawings = page.named("svg")
    assert [d["class"] for d in drawings] == ["wide", "narrow"] * (len(drawings) // 2)
    assert all(d["role"] == "img" and len(d["aria-label"]) > 20 for d in drawings)


def test_every_figure_has_a_caption(page):
    tags = [tag for tag, _ in page.elements]
    assert tags.count("figure") == tags.count("figcaption")


def test_every_colour_of_a_drawing_is_a_custom_property_of_the_style_sheet(page):
    style = (Path(svg.__file__).parent / "page.css").read_text()
    for _, attributes in page.elements:
        for value in re.findall(r"(?:fill|stroke):([^;]+)", attributes.get("style", "")):
            assert value == "none" or value.startswith("var(--"), value
            if value.startswith("var("):
                assert f"{value[4:-1]}: #" in style


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_a_colour_in_drawings_and_legends(phase):
    style = (Path(svg.__file__).parent / "page.css").read_text()
    tint = phase_colour(phase)
    assert style.count(f"--{tint}: #") == 2 and f'[data-tint="{tint}"]' in style


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_a_page_stays_small(name):
    assert len(PAGES[name].encode()) < 300_000


def long_timeline(num=100_000, every=2_000):
    """Steps of 4 ms, of which a few took from 0.2 s on, each a little longer than the one before, some side by side."""
    return tuple(
        TimelineStep(
            start_s=n * 0.004, step_s=0.2 + 1e-6 * n if n % every in (7, 8) else 0.004 + (n % 97) * 1e-6,
            group="trial", label="x" if n % 2 else "plain",
        )
        for n in range(num)
    )  # fmt: skip


def test_a_page_of_a_hundred_thousand_steps_is_small_and_shows_the_slowest_of_them():
    steps = long_timeline()
    text = on_page(replace(RESULTS["lenet"], timeline=steps))
    assert len(text.encode()) < 3_000_000
    assert words.seconds(max(step.step_s for step in steps)) in text


def test_every_outlier_of_a_hundred_thousand_steps_is_drawn():
    found = thinned.dots(replace(RESULTS["lenet"], timeline=long_timeline()))
    kept = thinned.thin(found, slices=180)
    assert len(kept) < 4_000
    assert {dot for dot in found if dot.step_s > 0.1} <= set(kept)


def test_outliers_beside_each_other_stay_where_they_do_not_cover_each_other():
    durations = [0.004] * 10_000
    durations[5000:5003] = [0.5, 0.3, 0.1]
    found = [
        thinned.Dot(start_s=0.01 * n, step_s=step_s, kind="plain", outside=False) for n, step_s in enumerate(durations)
    ]
    kept = [dot.step_s for dot in thinned.thin(found, slices=10)]
    assert {0.5, 0.3, 0.1} <= set(kept)


def test_of_very_many_outliers_the_slowest_stay(monkeypatch):
    monkeypatch.setattr(thinned, "MOST_OUTLIERS", 50)
    found = [
        thinned.Dot(start_s=0.01 * n, step_s=1.03 ** (n / 20) if n % 20 == 0 else 0.004, kind="plain", outside=False)
        for n in range(20_000)
    ]
    kept = thinned.thin(found, slices=10)
    assert len(kept) <= 50 + 10 * 4
    assert set(sorted(found, key=lambda dot: dot.step_s)[-50:]) <= set(kept)


# -- what stands behind a number -------------------------------------------------------------------------------------


def test_every_link_of_a_page_leads_to_something_in_it(page):
    links = [found["href"] for found in page.named("a")]
    assert len(links) > 1
    assert all(link[1:] in page.ids for link in links)


def test_every_row_of_every_table_leads_to_how_it_was_obtained_and_a_command():
    result = RESULTS["lenet"]
    found = evidence.evidence(result)
    anchors = {one.anchor for one in found}
    shown = [
        tables.steps(result), tables.bounds(result), tables.trials(result), tables.ceilings(result),
        tables.numerics(result), tables.operations(result), tables.timeline(thinned.dots(result)),
    ]  # fmt: skip
    for one in shown:
        assert one.rows
        for number in range(len(one.rows)):
            leads = {column[number] for column in one.links.values()} - {""}
            assert leads and leads <= anchors, one.title
    assert evidence.headline(result) in anchors
    assert all(one.command.startswith("flatout ") and one.how for one in found)


def test_names_of_the_record_are_text_wherever_they_stand():
    page = Page(PAGES["huge"])
    assert "<script>alert(1)</script>.py trains 123 times as fast" in page.text
    assert "<img src=x onerror=alert(1)>" in page.text
    labels = " ".join(found.get("aria-label", "") for found in page.named("svg"))
    assert "</text><script>alert(2)</script>" in labels
    assert "$\\frac{1}{2}$" in page.text  # no formula is made of it
    assert "<svg onload=alert(3)>" in page.text


def test_no_control_character_reaches_the_page():
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", PAGES["huge"])
    assert "h\\x07ost\\u202egnp.exe" in PAGES["huge"]


hostile = st.text(st.sampled_from("<>&\"'`$\\{}%;/=\x00\x1b\n\u202e\ud800\uffffaA0 訓"), max_size=30)


@pytest.mark.slow
@given(name=hostile, lever=hostile, reason=hostile)
@settings(max_examples=15, deadline=None)
def test_whatever_the_names_are_the_page_is_well_formed(name, lever, reason):
    result = RESULTS["lenet"]
    trial = replace(result.trials[0], levers={lever: {reason: name}}, agreement_detail=reason)
    operation = replace(result.census.operations[0], name=lever, shape=reason)
    found = replace(
        result, script=name, typed=reason, trials=(trial,), remeasured=trial, warnings=(reason,), refused=(name,),
        plan=replace(result.plan, levers=trial.levers), census=replace(result.census, operations=(operation,)),
        timeline=(),
    )  # fmt: skip
    page = Page(on_page(found))
    assert page.stack == []
    assert not page.named("script")
    on_page(found).encode("utf-8")


@pytest.mark.parametrize(
    ("name", "number", "sentence"),
    [
        ("lenet", "3.6x as fast", "lenet.py trains 3.6 times as fast on this machine, and its numbers agree."),
        ("nothing", "1.01x at best", "resnet_folder.py is as fast as any lever makes it on this machine."),
        ("busy", "[0.88, 1.58] 95 % interval", "lenet.py may or may not be faster with a lever"),
        ("why", "59.2 steps a second", "char_gpt.py is bound by launch overhead"),
        ("gpu", "1.2x but numbers that nobody compared", "train.py stays as it is: the fastest candidate could not be"),
    ],
)
def test_the_page_begins_with_one_number_and_one_sentence(name, number, sentence):
    text = Page(PAGES[name]).text
    assert text.index(number) < text.index(sentence) < 600


def test_a_fast_winner_with_other_numbers_is_no_success():
    result = RESULTS["gpu"]
    winner = replace(result.remeasured, outcome="disagrees", agreement="disagrees", agreement_detail="scaled by 0.9")
    text = Page(on_page(replace(result, remeasured=winner))).text
    assert "1.2x but other numbers" in text
    assert "does not compute the same" in text


def test_numbers_are_said_to_agree_only_where_they_do():
    result = RESULTS["lenet"]
    unjudged = replace(result, remeasured=replace(result.remeasured, agreement=""))
    assert "numbers agree" in Page(PAGES["lenet"]).text
    assert "numbers agree" not in Page(on_page(unjudged)).text


def test_the_sections_tell_a_story_in_order():
    text = PAGES["lenet"]
    ids = ["h-step", "h-time", "h-tried", "h-roof", "h-numerics", "h-cost", "h-machine"]
    places = [text.index(f'<h2 id="{name}">') for name in ids]
    assert places == sorted(places)


def test_a_table_too_long_for_the_page_says_so():
    long = table.table("x", ("a",), [("1",)] * (table.MOST_ROWS + 5))
    assert len(long.rows) == table.MOST_ROWS and long.left_out == 5


def test_every_number_comes_with_the_command_that_obtains_it_again():
    text = Page(PAGES["lenet"]).text
    for command in ("flatout why lenet.py --data mnist", "flatout tune lenet.py", "flatout machine --refresh"):
        assert command in text


def test_a_result_without_anything_still_has_a_page():
    page = Page(PAGES["hollow"])
    assert not page.named("svg")
    assert "nan" not in page.text.lower().replace("finance", "")


def test_the_page_says_what_became_of_candidates_that_could_not_be_used():
    lost = Trial(levers={"bf16": {}}, outcome="inconclusive", reason="every window was disturbed")
    text = on_page(replace(RESULTS["busy"], trials=(lost,)))
    assert "the one candidate could not be used: every window was disturbed" in text
    assert "no candidate was measured" not in text
    spent = on_page(replace(RESULTS["busy"], trials=()))
    assert "nothing: no lever could be tried: the budget of 180" in spent
    asked = on_page(replace(RESULTS["busy"], trials=(replace(lost, reason="use `reshape` instead."),)))
    assert "instead." in asked and "instead.." not in asked


def test_the_page_is_the_same_every_time():
    assert on_page(RESULTS["lenet"]) == PAGES["lenet"]


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    assert write_page(view_of(RESULTS["why"]), path) == path
    before = path.read_text(encoding="utf-8")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write_page(view_of(RESULTS["lenet"]), str(path))
    assert path.read_text(encoding="utf-8") == before
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_importing_the_report_imports_no_library():
    heavy = {"rich", "jinja2", "scipy", "markupsafe", "numpy", "torch"}
    code = f"import flatout.report, sys; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_json_is_the_summary_and_valid_even_where_numbers_are_missing():
    assert json.loads(json_text(RESULTS["lenet"]))["ratio"] == 3.6
    assert json.loads(json_text(RESULTS["hollow"]))["baseline_steps_per_s"] is None
    assert set(json.loads(json_text(RESULTS["why"]))["phases"]) == set(RESULTS["why"].anatomy.phases_s)


times = st.floats(min_value=1e-6, max_value=1e4)


points_of_steps = st.tuples(times, times, st.sampled_from(sorted(thinned.KINDS)), st.booleans())


@given(st.lists(points_of_steps, min_size=2, max_size=300))
def test_thinning_keeps_the_fastest_and_the_slowest_of_every_kind(points):
    found = [thinned.Dot(start_s=a, step_s=b, kind=kind, outside=c) for a, b, kind, c in points]
    kept = thinned.thin(found, slices=5)
    assert set(kept) <= set(found)
    assert len(kept) <= max(5 * thinned.EACH * len(thinned.KINDS) * 2, 5 * thinned.EACH)
    for kind in {dot.kind for dot in found}:
        own = [dot.step_s for dot in found if dot.kind == kind]
        left = [dot.step_s for dot in kept if dot.kind == kind]
        assert (min(left), max(left)) == (min(own), max(own))


@given(st.floats(0, 1e6), st.floats(min_value=1e-3, max_value=1e6), st.integers(4, 8))
def test_times_of_day_are_few_inside_and_each_said_once(first, over, most):
    found, said = zip(*ticks.times(first, first + over, most), strict=True)
    assert 1 <= len(found) <= most + 1 and len({*said}) == len(said)
    assert all(first - 1e-6 <= t <= first + over + 1e-6 for t in found)


@given(st.floats(min_value=1e-3, max_value=0.99), st.floats(min_value=1.01, max_value=900), st.integers(4, 8))
def test_one_is_among_the_ticks_of_every_range_of_ratios(low, high, most):
    found = ticks.ratios(low, high, most)
    assert 1.0 in found
    assert all(low <= x <= high for x in found)


@given(st.floats(min_value=1e-9, max_value=1e3), st.floats(min_value=1.5, max_value=1e6))
def test_logarithmic_ticks_lie_inside(low, factor):
    found = ticks.logarithmic(low, low * factor)
    assert all(low <= x <= low * factor for x in found)


def test_cut_text_ends_in_an_ellipsis_and_counts_wide_letters_twice():
    assert svg.cut("convolution", 20) == "convolution"
    assert svg.cut("convolution_backward", 12) == "convolution…"
    assert len(svg.cut("訓" * 20, 10)) < 8


def test_the_last_label_of_an_axis_lies_inside_the_drawing():
    taken = anatomy({"data": 0.005, "forward": 0.002, "backward": 0.002, "unattributed": 0.001})
    drawn = str(svg.drawn(figures.stacked([("a", taken)])))
    last = [label for label in re.findall(r"<text[^>]*>[^<]*</text>", drawn) if label.endswith(">10 ms</text>")]
    assert len(last) == 2 and all('text-anchor="end"' in label for label in last)


def test_operations_above_every_ceiling_are_drawn_all_the_same():
    census = RESULTS["lenet"].census
    fast = replace(census.operations[0], self_s=2e-6)
    drawn = figures.roofline(replace(RESULTS["lenet"], census=replace(census, operations=(fast,))))
    assert "Above them by more than their spread: convolution" in drawn.label


def test_on_a_gpu_no_operation_is_placed_because_its_time_is_that_of_its_start():
    ceilings = replace(RESULTS["lenet"].ceilings, device="Some GPU")
    assert figures.roofline(replace(RESULTS["lenet"], ceilings=ceilings)) is None


def test_a_single_step_or_a_constant_timeline_is_no_problem():
    one = TimelineStep(start_s=0.0, step_s=0.004, group="baseline")
    assert figures.timeline(thinned.dots(replace(RESULTS["lenet"], timeline=(one,)))) is None
    assert figures.timeline(thinned.dots(replace(RESULTS["lenet"], timeline=(one, one)))) is not None


# -- a proof -----------------------------------------------------------------------------------------------------------


def test_the_page_of_a_proof_begins_with_the_verdict_and_what_it_rests_on():
    text = Page(PAGES["proof identical"]).text
    assert "equal acc, 8 seeds" in text and "under bf16" in text
    assert "Result: equal: the same acc, to the last digit, with all 8 seeds" in text and "Time: a whole run 2" in text
    assert "undecided" in Page(PAGES["proof undecided"]).text
    assert "Result: not enough seeds to tell: 2 of at least 3" in Page(PAGES["proof undecided"]).text
    assert "Result: different: acc differs by -0.059" in Page(PAGES["proof different"]).text


def test_a_proof_is_drawn_where_there_is_something_to_draw():
    drawn = {name: len(Page(PAGES[f"proof {name}"]).named("svg")) // 2 for name in PROOFS}
    assert drawn["equivalent"] == drawn["different"] == 2
    assert drawn["of nothing"] == drawn["without metric"] == drawn["of huge numbers"] == 0
    many = PAGES["proof of many seeds"]
    assert many.count("seed 39</text>") == 2 and "seed 40</text>" not in many


@pytest.mark.parametrize("page", ["lenet", "proof equivalent"])
def test_the_framework_is_called_by_its_name(page):
    assert re.search(r"<dt>framework</dt><dd>PyTorch 2\.13", PAGES[page])


def test_every_number_of_a_proof_leads_to_its_samples():
    found = PROVED["different"]
    evidence, seeds = proof.evidence(found), proof.seeds(found)
    assert len(seeds.rows) == 8 and {to for column in seeds.links.values() for to in column} == {evidence.anchor}
    assert evidence.command.startswith("flatout prove")
    assert repr(found.runs[0].value) in PAGES["proof different"], "with every digit"
    assert "killed by signal 9" in PAGES["proof with failures"]


@pytest.mark.parametrize(
    ("low", "high"), [(0.97, 0.98), (-1.0, 1.0), (0.1, 250.0), (-1e30, 1e30), (1.0, 1.0 + 1e-9), (0.0, 0.0043)]
)
def test_ticks_between_two_values_are_few_round_and_inside(low, high):
    found = ticks.between(low, high, 5)
    room = 1e-9 * (high - low)
    assert 2 <= len(found) <= 6 and all(low - room <= x <= high + room for x in found)


@pytest.mark.parametrize("name", sorted(RESULTS))
@pytest.mark.parametrize("foreign", some([0.58, 0.0, None], 0.58))
def test_the_page_and_the_terminal_say_the_same_of_plain_of_what_binds_and_of_what_is_next(name, foreign):
    found = replace(RESULTS[name], foreign_fraction=foreign, options="--accept exact --levers none")
    page = " ".join("".join(Page(on_page(found)).words).split())
    shown = " ".join(on_screen(found, verbose=True, width=120).replace(" \\\n", " ").split())
    for said in (verdict.baseline(found).text, " ".join(verdict.next_command(found)).strip()):
        assert " ".join(said.split()) in page and " ".join(said.split()) in shown
    doubtful = "(doubtful: others used 58 % of the CPU)"
    assert (doubtful in page) == (doubtful in shown) == (foreign == 0.58)


def test_no_page_begins_with_a_lone_question_mark():
    found = replace(RESULTS["nothing"], verdict="inconclusive", trials=(), remeasured=None)
    said = verdict.headline(found)
    assert (said.number, said.unit) == ("No answer", "no candidate was measured")
    unclear = replace(found, options="--levers none", remeasured=Trial(levers={}, outcome="inconclusive"))
    assert "?" not in verdict.headline(unclear).number
