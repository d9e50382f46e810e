"""`make gpu-check`: every item is rehearsed without a device, and the page says what the last results say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the check is of PyTorch")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu_page():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import gpu_page

        return gpu_page
    finally:
        sys.path.remove(str(ROOT / "scripts"))


CHECK = """
import runpy, sys
sys.path.insert(0, {folder!r})
import groups
groups.GROUPS |= {limits}
sys.argv[0] = {folder!r}
runpy.run_path({folder!r}, run_name="__main__")
"""


def check(out, *words, **limits):
    """Its lines by group and item; `limits` are other ones of groups."""
    code = CHECK.format(folder=str(ROOT / "scripts" / "gpu_check"), limits=limits)
    command = [sys.executable, "-c", code, "--out", str(out), "--rehearse", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [json.loads(line) for line in (out / "gpu_check.jsonl").read_text().splitlines()]
    return {(line["group"], line["item"]): line for line in lines}, done.stdout + done.stderr


@pytest.mark.timeout(540)
def test_every_item_is_rehearsed_without_a_device_or_says_why_it_cannot_be(gpu_page, tmp_path):
    lines, said = check(tmp_path)
    items = {(group, item.name): item for group, item in gpu_page.items()}
    assert len(items) == len(gpu_page.items()) and items.keys() == {key for key in lines if key[1] != "group"}, said
    for key, item in items.items():
        line = lines[key]
        assert line["ok"] is not False, line
        assert line.get("skipped") == item.cannot if item.cannot else line["rehearsed"] == item.rehearsed, line
    assert {line["exit"] for key, line in lines.items() if key[1] == "group"} == {"0"}
    assert gpu_page.last_results(lines.values()) == {}, "a rehearsal is no result"


def test_what_has_no_time_left_says_so_and_groups_can_be_named(tmp_path):
    lines, _ = check(tmp_path, "--groups", "truth,env", "--limit", "5")
    assert list(lines) == [("truth", "group"), ("env", "group")]
    assert all("s left" in line["skipped"] for line in lines.values())


def test_what_was_known_before_a_group_was_cut_is_kept_and_what_was_cut_is_named(tmp_path):
    lines, _ = check(tmp_path, "--groups", "env", env=(0, 0.9))
    assert ("env", "nvidia_smi") in lines and ("env", "empty_plan") not in lines
    assert lines["env", "group"]["exit"] == "cut" and lines["env", "group"]["ok"] is False
    assert [line["item"] for line in lines.values() if line.get("error") == "cut"] == [[*lines][-2][1]]


def test_the_page_and_the_readme_say_what_the_results_say(gpu_page):
    results = gpu_page.last_results(gpu_page.read(sorted(gpu_page.RESULTS.glob("gpu_check_*.jsonl"))))
    for path, text in gpu_page.made(results).items():
        assert path.read_text(encoding="utf-8") == text, f"`{path.name}` is stale: `python scripts/gpu_page.py`"


def test_the_last_result_counts_with_its_date_device_and_commit_and_the_others_never_ran(gpu_page, tmp_path):
    about = {"group": "truth", "item": "events", "device": "NVIDIA H100", "commit": "1234abcd"}
    lines = [
        {**about, "ok": False, "unix_s": 1.8e9},
        {**about, "ok": True, "unix_s": 1.7e9},
        {**about, "ok": True, "unix_s": 1.9e9, "rehearsed": "CPU"},
        {**about, "ok": None, "unix_s": 1.9e9, "skipped": "3 s left"},
        {**about, "item": "group", "ok": True, "unix_s": 1.9e9, "exit": "0"},
    ]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"group": "tr')
    results = gpu_page.last_results(gpu_page.read([tmp_path / "lines"]))
    page = gpu_page.page(results)
    assert "| **not shown**, 2027-01-15, NVIDIA H100, `1234abcd` |" in page
    assert "1 have run on a device, and 1 of them did not show" in page
    assert (
        "**Never run on a device:** `nvidia_smi`" in page
        and "`events`" not in page.split("**Never run")[1].split("##")[0]
    )
    assert "ran last on NVIDIA H100, 2027-01-15" in gpu_page.sentence(results)
    assert page.count("never run") == len(gpu_page.items()) - 1


def test_without_results_the_page_says_that_nothing_has_ever_run(gpu_page):
    assert f"**None of these {len(gpu_page.items())} items has ever run on a device.**" in gpu_page.page({})
    assert "has never run on a GPU" in gpu_page.sentence({})
