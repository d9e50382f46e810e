"""The comparison of twelve scripts: experts' edits apply and are small, windows lie between progress lines."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import measuring  # noqa: E402
import sides  # noqa: E402
import speedups  # noqa: E402
import speedups_page  # noqa: E402
from flatout.machine.read import read_machine  # noqa: E402
from speedup_cases import ALL, CASES  # noqa: E402
from stamped import Stretch, stamped, watch  # noqa: E402

VARIANTS = ("cpu-bf16", "cpu-float32")
STRETCH = Stretch(line=r"^step (\d+)$", work_per_line=1, work=20, settle_s=1.0)


def lines(*stamps):
    return iter([(at_s, f"{text}\n") for at_s, text in stamps])


def test_twelve_scripts_are_counted():
    assert sum(case.counted for case in ALL) == 12


@pytest.mark.parametrize("machine", VARIANTS)
@pytest.mark.parametrize("name", CASES)
def test_an_experts_edit_is_at_most_ten_lines_and_says_why(name, machine):
    edit = sides.edit_for(name, machine)
    assert edit.why and (edit.options or edit.diff)
    assert edit.num_lines + bool(edit.options) <= sides.MOST_LINES


@pytest.mark.parametrize("machine", VARIANTS)
@pytest.mark.parametrize("name", [case.name for case in ALL if not case.folder])
def test_an_experts_edit_of_an_example_applies(name, machine, tmp_path):
    shutil.copytree(measuring.ROOT / "examples", tmp_path / "expert")
    sides.change(tmp_path / "expert", sides.edit_for(name, machine).diff)
    script = tmp_path / "expert" / CASES[name].words[0]
    changed = script.read_text(encoding="utf-8")
    compile(changed, str(script), "exec")
    assert changed != (measuring.ROOT / "examples" / CASES[name].words[0]).read_text(encoding="utf-8")


def test_every_edit_is_that_of_a_script():
    assert {path.name.partition(".")[0] for path in sides.EXPERTS.glob("*.patch")} == set(CASES)


def test_an_edit_says_nothing_about_batch_size_or_learning_rate():
    for path in sides.EXPERTS.glob("*.patch"):
        removed, added = (
            re.findall(rf"^\{sign}(?!{re.escape(sign * 2)}).*?\b(lr ?=[^,)]+)", path.read_text(encoding="utf-8"), re.M)
            for sign in "-+"
        )
        assert sorted(removed) == sorted(added), path.name


def test_lines_are_counted_by_what_is_new_changed_or_gone():
    diff = "--- a/x\n+++ b/x\n@@ -1,6 +1,6 @@\n same\n-one\n+one, changed\n+another\n same\n-gone\n same\n"
    assert sides.Edit(why="", options=(), diff=diff, source="").num_lines == 3


def test_a_window_lies_between_lines_after_the_start_has_settled():
    stamps = lines((2.0, "step 5"), (2.5, "step 5"), (3.0, "noise"), (3.5, "step 5"), (4.5, "step 15"), (5.5, "step 5"))
    found = watch(stamps, STRETCH, lambda: None)
    assert (found.first_s, found.begin_s, found.end_s, found.work) == (2.0, 3.5, 5.5, 20)
    assert found.unit_s == pytest.approx(0.1)


def test_a_short_run_is_as_much_work_as_the_window_from_the_first_line_on():
    stamps = lines((2.0, "step 5"), (2.5, "step 15"), (3.5, "step 5"), (4.5, "step 15"), (5.5, "step 5"))
    assert watch(stamps, STRETCH, lambda: None).short_s == 3.5


def test_a_script_that_ends_too_early_has_no_window():
    found = watch(lines((2.0, "step 5"), (3.5, "step 5")), STRETCH, lambda: None)
    assert found.failed == "it ended before its window was over"
    with pytest.raises(ValueError, match="before its window"):
        _ = found.unit_s


def test_a_script_without_progress_lines_is_said_to_have_none():
    assert watch(lines((2.0, "noise")), STRETCH, lambda: None).failed == "no progress line was seen"


def test_a_process_is_ended_with_its_children_once_its_window_is_over(tmp_path):
    script = tmp_path / "steps.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('child', 'w').write(str(child.pid))\n"
        "for n in range(10**6):\n    print('step 10')\n    time.sleep(0.05)\n"
    )
    stretch = Stretch(line=STRETCH.line, work_per_line=1, work=30, settle_s=0.1, limit_s=60)
    found = stamped([sys.executable, str(script)], tmp_path, {}, stretch)
    assert not found.failed and found.work == 30 and found.end_s > found.begin_s
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # whoever inherited it has to reap it first
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return
        time.sleep(0.05)
    raise AssertionError(f"its child is left: {state}")


def test_a_process_that_says_nothing_is_ended_at_its_limit(tmp_path):
    stretch = Stretch(line=STRETCH.line, work_per_line=1, work=30, settle_s=0.1, limit_s=1.0)
    found = stamped([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, {}, stretch)
    assert found.failed == "no window within 1 s"


def test_a_run_under_a_plan_is_timed_after_its_check():
    tune = {"levers": ["bf16"], "verdict": {"tuned_steps_per_s": 100.0}}
    assert speedups.checked_s({"levers": []}) == speedups.SETTLE_S
    assert 19 < speedups.checked_s(tune) < 30
    assert speedups.checked_s({**tune, "verdict": {"tuned_steps_per_s": 1.0}}) > 64


def test_a_script_of_which_no_ratio_came_is_tried_again(tmp_path, monkeypatch):
    result = tmp_path / "result.json"
    monkeypatch.setattr(speedups, "file_for", lambda name: result)
    assert not speedups.is_done("lenet", 4)
    for rounds, found, done in ((4, 1.5, True), (3, 1.5, False), (4, None, False)):
        result.write_text(json.dumps({"rounds": rounds, "over_plain": {"ratio": found}}), encoding="utf-8")
        assert speedups.is_done("lenet", 4) is done


def test_results_of_processors_without_fast_bfloat16_have_names_of_their_own(monkeypatch):
    here = read_machine()
    without, native = (
        type(here)(**{**vars_of(here), "cpu_features": features})
        for features in (("avx2",), ("avx2", "amx_bf16", "avx512_bf16", "bf16"))
    )
    monkeypatch.setattr(measuring, "bfloat16_pays", lambda: True)
    fast = measuring.named(native)
    assert measuring.named(without) == f"{fast}-no-bf16"
    monkeypatch.setattr(measuring, "bfloat16_pays", lambda: False)
    assert measuring.named(native) == f"{fast}-slow-bf16"


def vars_of(record):
    return {name: getattr(record, name) for name in type(record).__dataclass_fields__}


def ratio(value):
    return {"ratio": value, "low": value / 1.1, "high": value * 1.1, "reason": ""}


def test_the_summary_names_the_mean_its_interval_and_the_worst():
    told = speedups_page.over_all("plain", {"one": ratio(1.0), "two": ratio(4.0)})
    half = math.exp(math.log(1.1) / math.sqrt(2))
    assert told == (
        f"flatout over plain: geometric mean 2.00 [{2 / half:.2f}, {2 * half:.2f}] of 2 scripts, "
        "from 1.00 (one, 1.00 [0.91, 1.10]) to 4.00"
    )


def test_operators_of_torchvision_are_offered_to_pytorch_by_metadata_alone():
    from importlib.metadata import distributions

    (found,) = distributions(path=[str(sides.OPERATORS)])
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("torch.backends", "torchvision_operators:define")
    assert {path.suffix for path in sides.OPERATORS.iterdir()} == {".py", ".dist-info"}
