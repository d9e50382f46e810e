"""What a browser makes of the page: quiet, offline, legible on a phone, usable by keyboard, safe against names."""

import contextlib
import shutil
import sys
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import report_examples as examples  # noqa: E402

from flatout.report import view_of, write_page  # noqa: E402
from proofs import PROOFS  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAMES = [*sorted(examples.EXAMPLES), *(f"proof {name}" for name in PROOFS)]
PHONE, DESK = {"width": 390, "height": 800}, {"width": 1280, "height": 900}

CONTRAST = """
() => {
  const numbers = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = numbers(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const inside = element.closest("svg");
    const ink = numbers(inside ? style.fill : style.color);
    let paper = behind(element);
    if (inside) {  // the bar of a phase that the text stands on, if it stands on one
      const box = element.getBoundingClientRect();
      const filled = [...inside.querySelectorAll("path, rect")].filter((p) => getComputedStyle(p).fill !== "none");
      const under = filled.filter((p) => {
        const b = p.getBoundingClientRect();
        return b.left <= box.left && b.right >= box.right && b.top <= box.top + 4 && b.bottom >= box.bottom - 4;
      });
      if (under.length) paper = numbers(getComputedStyle(under[under.length - 1]).fill);
    }
    const [high, low] = [luminance(ink), luminance(paper)].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), walker.currentNode.textContent.trim().slice(0, 40)]);
  }
  return found;
}
"""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: `apt-get install chromium`")
    quiet = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=list(quiet))
        yield found
        found.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    pages = {name: write_page(view_of(make()), folder / f"{name}.html") for name, make in examples.EXAMPLES.items()}
    for name, make in PROOFS.items():
        pages[f"proof {name}"] = write_page(view_of(make()), folder / f"proof {name}.html")
    return pages


@contextlib.contextmanager
def opened(browser, file, size=DESK, scheme="light", **options):
    """The page, with everything it complained of and asked for."""
    page = browser.new_page(viewport=size, color_scheme=scheme, **options)
    page.complaints, page.requests = [], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (page.complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: page.requests.append(request.url))
    page.goto(file.as_uri())
    yield page
    page.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_silent_and_asks_for_nothing(browser, files, name):
    with opened(browser, files[name]) as page:
        assert page.complaints == []
        assert page.requests == [files[name].as_uri()]


@pytest.mark.smoke
def test_the_page_is_the_same_without_scripts(browser, files):
    with opened(browser, files["lenet"], java_script_enabled=False) as page:
        assert page.locator("svg.wide").first.is_visible()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_sticks_out_sideways_at_any_width(browser, files, name):
    with opened(browser, files[name]) as page:
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        for width in (320, 390, 640, 641, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("innerWidth") == width
            assert page.evaluate("document.documentElement.scrollWidth") <= width, width


@pytest.mark.parametrize(("size", "shown", "hidden"), [(PHONE, "narrow", "wide"), (DESK, "wide", "narrow")])
def test_a_phone_gets_the_narrow_figures_and_a_desk_the_wide_ones(browser, files, size, shown, hidden):
    with opened(browser, files["lenet"], size) as page:
        visible = {kind: page.locator(f"svg.{kind}:visible").count() for kind in ("wide", "narrow")}
        assert visible[hidden] == 0
        assert visible[shown] == page.locator(f"svg.{shown}").count() == 4


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_text_in_figures_is_never_smaller_than_eleven_pixels(browser, files, size):
    with opened(browser, files["lenet"], size) as page:
        sizes = page.evaluate(
            """() => [...document.querySelectorAll("svg text")].filter((t) => t.getClientRects().length).map(
              (t) => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a)"""
        )
        assert len(sizes) > 20 and min(sizes) >= 11


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("name", ["lenet", "nothing", "busy", "gpu", "why", "proof equivalent"])
def test_text_of_a_figure_stays_inside_it(browser, files, name, size):
    with opened(browser, files[name], size) as page:
        outside = page.evaluate(
            """() => [...document.querySelectorAll("svg")].filter((s) => s.getClientRects().length).flatMap((s) => {
              const box = s.getBoundingClientRect();
              return [...s.querySelectorAll("text")].filter((t) => {
                const b = t.getBoundingClientRect();
                const [wide, high] = [b.left < box.left - 2 || b.right > box.right + 2, b.bottom > box.bottom + 2];
                return wide || high || b.top < box.top - 2;
              }).map((t) => t.textContent);
            })"""
        )
        assert outside == []


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("name", ["lenet", "busy", "gpu", "nothing"])
def test_all_text_stands_out_from_what_is_behind_it_by_day_and_by_night(browser, files, name, size):
    with opened(browser, files[name], size) as page:
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = page.evaluate(CONTRAST)
            assert len(found) > 100
            assert [pair for pair in found if pair[0] < 4.5] == [], scheme


def test_the_dark_page_is_dark(browser, files):
    grounds = []
    for scheme in ("light", "dark"):
        with opened(browser, files["lenet"], scheme=scheme) as page:
            grounds.append(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    assert grounds == ["rgb(253, 253, 251)", "rgb(22, 24, 26)"]


def test_the_tab_key_reaches_the_skip_link_first_and_then_every_detail(browser, files):
    with opened(browser, files["lenet"]) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "To the report"
        assert page.locator(".skip").bounding_box()["x"] > 0
        wanted = page.locator("summary").count()
        reached = set()
        for _ in range(2 * wanted + page.locator("a").count() + 10):
            page.keyboard.press("Tab")
            number = page.evaluate("[...document.querySelectorAll('summary')].indexOf(document.activeElement)")
            reached.add(number)
            assert number < 0 or page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert reached >= set(range(wanted))
        assert wanted > 10


def test_a_detail_opens_with_the_keyboard(browser, files):
    with opened(browser, files["lenet"]) as page:
        page.locator("summary").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("details").first.get_attribute("open") is not None
        assert page.locator("details table").first.is_visible()


@pytest.mark.parametrize("name", ["lenet", "proof equivalent"])
def test_a_number_leads_to_its_samples_which_open_without_a_script(browser, files, name):
    with opened(browser, files[name], PHONE, java_script_enabled=False) as page:
        link = page.locator(".number a")
        target = page.locator(f"#{link.get_attribute('href')[1:]}")
        assert not target.is_visible()
        link.click()
        assert target.is_visible() and target.locator(".again code").inner_text().startswith("flatout ")
        assert target.bounding_box()["y"] < PHONE["height"]


def test_the_skip_link_leads_to_the_report(browser, files):
    with opened(browser, files["lenet"]) as page:
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"


def test_names_are_shown_as_text_and_run_as_nothing(browser, files):
    with opened(browser, files["huge"]) as page:
        assert page.complaints == []
        assert page.locator("script, img, iframe").count() == 0
        assert "<script>alert(1)</script>.py" in page.locator("h1").inner_text()
        assert page.locator("svg.wide text", has_text="<img src=x onerror=").count() == 1


def test_figures_have_a_name_for_those_who_do_not_see_them(browser, files):
    with opened(browser, files["lenet"]) as page:
        images = page.get_by_role("img")
        assert images.count() == 4
        assert "with the plan: 1.2 ms a step" in images.first.get_attribute("aria-label").lower()


def test_paper_shows_what_the_screen_folds(browser, files):
    with opened(browser, files["lenet"]) as page:
        page.emulate_media(media="print")
        assert not page.locator(".next").is_visible()
        assert page.evaluate("document.querySelector('details table').getBoundingClientRect().height") > 20
        assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(253, 253, 251)"


def test_paper_is_light_even_where_the_screen_is_dark(browser, files):
    with opened(browser, files["lenet"], scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(253, 253, 251)"
