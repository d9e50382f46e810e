"""Which number says how good a trained model is?"""

import math
import re
import signal
from pathlib import Path

import pytest

from flatout.errors import MachineError, RecordError, UsageError
from flatout.judge import metric
from flatout.judge.metric import Metric, Reading, in_lines, in_losses, metric_of, reached_s, rises
from flatout.judge.metric_file import in_file


def values(readings):
    return [r.value for r in readings]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("accuracy: [0-9.]+", "0 groups"), ("(a): ([0-9.]+)", "2 groups"), ("accuracy: ([0-9", "no regular expression"),
        ("a{99999999999999999999}(x)", "no regular expression"),
    ],
)  # fmt: skip
def test_a_pattern_has_one_group(pattern, said):
    with pytest.raises(UsageError) as caught:
        metric_of(pattern, None)
    assert said in caught.value.error and caught.value.hint


def test_a_file_needs_the_name_of_what_to_read_in_it():
    with pytest.raises(UsageError, match="without what to read"):
        metric_of(None, "log.csv")
    assert metric_of("acc", "log.csv") == Metric(file="log.csv", key="acc")
    assert metric_of(None, None).name == "loss"


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("accuracy: ([0-9.]+)", "accuracy"), (r"Acc@1\s+([0-9.]+)", "Acc@1"), (r"^test loss = (\S+)", "test loss"),
        ("(?:val )acc ([0-9.]+)", "val"), ("([0-9]+)%", "([0-9]+)%"),
    ],
)  # fmt: skip
def test_people_call_it_by_the_word_before_the_number(pattern, name):
    assert Metric(pattern=pattern).name == name


def test_every_match_counts_in_its_order_and_two_in_a_line_do_too():
    lines = [(1.0, "acc: 0.1"), (2.0, "nothing"), (3.0, "acc: 0.2 acc: 3e-1")]
    found = in_lines("acc: ([0-9.e-]+)", lines)
    assert values(found) == [0.1, 0.2, 0.3] and [r.at_s for r in found] == [1.0, 3.0, 3.0]
    assert in_lines("f1: ([0-9.]+)", lines) == []


def test_words_where_a_number_is_expected_are_shown():
    with pytest.raises(RecordError) as caught:
        in_lines(r"acc: (\w+)", [(1.0, "acc: good")])
    assert "`good`, which is no number" in caught.value.error and "acc: good" in caught.value.cause


def test_percent_signs_commas_and_nan_are_numbers():
    assert values(in_lines(r"(\S+)", [(0.0, "97.5% 1,234 ")])) == [97.5, 1234.0]
    assert math.isnan(values(in_lines(r"(\S+)", [(0.0, "nan")]))[0])


def test_a_key_of_json_with_dots_a_list_and_json_lines(tmp_path):
    file = tmp_path / "log.json"
    file.write_text('{"test": {"acc": [0.1, 0.2]}, "a.b": 3}')
    assert values(in_file(file, "test.acc", "log.json")) == [0.1, 0.2]
    assert values(in_file(file, "a.b", "log.json")) == [3.0]
    file.write_text('{"acc": 0.1}\n{"loss": 3}\n{"acc": "0.2"}\n')
    assert values(in_file(file, "acc", "log.json")) == [0.1, 0.2]
    file.write_text('[{"acc": 0.1}, {"acc": 0.4}]')
    assert values(in_file(file, "acc", "log.json")) == [0.1, 0.4]


def test_a_file_that_is_half_written_is_told_from_one_without_the_key(tmp_path):
    file = tmp_path / "log.json"
    file.write_text('{"test": {"acc": [0.1, 0.')
    with pytest.raises(RecordError, match="half written"):
        in_file(file, "test.acc", "log.json")
    file.write_text("[" * 100_000)
    with pytest.raises(RecordError, match="half written"):
        in_file(file, "acc", "log.json")
    file.write_text('{"loss": 0.3, "epoch": 1}')
    with pytest.raises(RecordError) as caught:
        in_file(file, "acc", "log.json")
    assert caught.value.error == "`log.json` has no `acc`" and "`loss`, `epoch`" in caught.value.cause
    file.write_text("")
    with pytest.raises(RecordError):
        in_file(file, "acc", "log.json")


def test_a_row_of_csv_that_is_cut_is_an_error_and_an_empty_cell_says_nothing(tmp_path):
    file = tmp_path / "log.csv"
    for whole in ("epoch, acc\n0,0.1\n1,\n2,0.2\n", "epoch, acc\n0,0.1\n\n2,0.2", 'a;"x,y,z";acc\n0;1;0.1\n0;1;0.2\n'):
        file.write_text(whole)
        assert values(in_file(file, "acc", "log.csv")) == [0.1, 0.2]
    for cut in ("0,0.1\n2", "0\n2,0.2\n"):
        file.write_text(f"epoch,acc\n{cut}")
        with pytest.raises(RecordError, match="is not CSV") as caught:
            in_file(file, "acc", "log.csv")
        assert "a row that is cut" in caught.value.cause
    for cut in ("0.", "1e", "1.e", "1e-", "-", ""):
        file.write_text(f"epoch,acc\n1,0.93\n2,{cut}")
        with pytest.raises(RecordError, match="is not CSV") as caught:
            in_file(file, "acc", "log.csv")
        assert f"a row that is cut: it ends in `{cut}`" in caught.value.cause
    file.write_text("epoch,acc,what\n1,0.93,none\n2,0.9,some")
    assert values(in_file(file, "acc", "log.csv")) == [0.93, 0.9]
    file.write_text("epoch,acc\n1,0.93\n2,1.\n")
    assert values(in_file(file, "acc", "log.csv")) == [0.93, 1.0]
    file.write_text('epoch,acc\n0,"0.1\n1,0.2\n')
    with pytest.raises(RecordError, match="is not CSV"):
        in_file(file, "acc", "log.csv")
    file.write_text("epoch;acc\n0;0,5\n")
    with pytest.raises(RecordError, match="no `f1`"):
        in_file(file, "f1", "log.csv")
    file.write_text("epoch,acc\n")
    with pytest.raises(RecordError) as caught:
        in_file(file, "acc", "log.csv")
    assert "the column is empty" in caught.value.cause


def test_a_file_that_was_not_written_or_lay_there_before_the_run_is_said(tmp_path):
    with pytest.raises(RecordError, match="was not written"):
        in_file(tmp_path / "none.json", "acc", "none.json")
    (tmp_path / "old.json").write_text('{"acc": 0.5}')
    written_s = (tmp_path / "old.json").stat().st_mtime
    assert values(in_file(tmp_path / "old.json", "acc", "old.json", since_unix_s=written_s)) == [0.5]
    with pytest.raises(RecordError, match="was not written") as caught:
        in_file(tmp_path / "old.json", "acc", "old.json", since_unix_s=written_s + 1)
    assert "older than this run" in caught.value.cause


def test_a_pattern_that_searches_without_end_is_ended(monkeypatch):
    monkeypatch.setattr(metric, "SEARCH_S", 0.1)
    former = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RecordError, match="was not done") as found:
        in_lines(r"^(?:a+)+(\d)$", [(0.0, "a" * 64 + "!")])
    assert "nested repeats" in found.value.cause
    assert signal.getsignal(signal.SIGALRM) is former and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_event_files_are_read_by_tensorboard_where_it_is_installed(tmp_path):
    (tmp_path / "runs").mkdir()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        with pytest.raises(MachineError) as caught:
            in_file(tmp_path / "runs", "acc", "runs")
        assert caught.value.hint == "`pip install tensorboard`"
        return
    with pytest.raises(RecordError, match="holds no readable events"):
        in_file(tmp_path / "runs", "acc", "runs")
    writer = SummaryWriter(str(tmp_path / "runs" / "today"))
    for step, accuracy in enumerate((0.25, 0.5)):
        writer.add_scalar("test/acc", accuracy, step)
    writer.close()
    found = in_file(tmp_path / "runs", "test/acc", "runs")
    assert values(found) == [0.25, 0.5] and all(r.at_s for r in found)
    with pytest.raises(RecordError) as caught:
        in_file(tmp_path / "runs", "f1", "runs")
    assert "`test/acc`" in caught.value.cause
    broken = tmp_path / "events.out.tfevents.1.host"
    for content in (b"", b"\x00 nothing that an event file begins with"):
        broken.write_bytes(content)
        with pytest.raises(RecordError, match="holds no readable events"):
            in_file(broken, "f1", broken.name)


def test_the_loss_in_the_end_is_that_of_the_last_tenth_and_smooth_on_its_way():
    steps = [(0.1 * i, 100.0 - i) for i in range(100)]
    found = in_losses(steps)
    assert found[-1].value == pytest.approx(sum(100.0 - i for i in range(90, 100)) / 10)
    assert found[0] == Reading(value=pytest.approx(99.5), at_s=pytest.approx(0.1))
    assert in_losses([]) == [] and len(in_losses([(float(i), 1.0) for i in range(100_000)])) <= 202


def test_losses_that_cannot_be_added_have_a_mean_all_the_same():
    for losses, mean in (([1e308] * 40, "inf"), ([float("inf"), float("-inf")] * 20, "nan"), ([float("inf")], "inf")):
        assert str(in_losses([(float(i), x) for i, x in enumerate(losses)])[-1].value) == mean


def test_the_target_is_reached_from_the_side_that_the_metric_comes_from():
    falling = [Reading(value=v, at_s=t) for t, v in ((1.0, 3.0), (2.0, 0.4), (3.0, 0.6))]
    assert reached_s(falling, 0.5, rising=False) == 2.0 and reached_s(falling, 0.1, rising=False) is None
    assert reached_s([Reading(value=1.0)], 0.5, rising=True) is None, "nobody knows when"


def test_which_way_a_metric_is_to_go_is_in_its_name_or_asked_of_all_runs():
    beyond = [Reading(value=v, at_s=t) for t, v in ((1.0, 0.95), (2.0, 0.94))]
    usual = [Reading(value=v, at_s=t) for t, v in ((1.0, 0.5), (2.0, 0.97))]
    assert rises("x", [beyond, usual, usual]) and not rises("x", [beyond])
    assert rises("x", []) and rises("x", [[Reading(value=math.nan)], usual[:1]])
    noisy = [Reading(value=v) for v in (0.97, 0.4, 0.5, 0.9, 0.95, 0.93)]
    assert rises("x", [noisy]), "it begins with its best by chance, and rises all the same"
    assert rises("Accuracy", [beyond]) and not rises("val_loss", [usual])
    assert reached_s(beyond, 0.9, rising=True) == 1.0


def test_a_tag_in_two_folders_of_events_is_no_metric(tmp_path):
    SummaryWriter = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    for name, value in (("old", 0.5), ("train", 0.9), ("val", 0.1)):
        with SummaryWriter(str(tmp_path / "runs" / name)) as writer:
            writer.add_scalar("acc", value, 1, walltime=100.0 if name == "old" else 1000.0)
    with pytest.raises(RecordError, match="stands in 2 folders") as caught:
        in_file(tmp_path / "runs", "acc", "runs", since_unix_s=500.0)
    assert "`runs/train`, `runs/val`" in caught.value.cause and caught.value.hint == "`--metric-file runs/train`"
    assert values(in_file(tmp_path / "runs" / "val", "acc", "runs/val", since_unix_s=500.0)) == [pytest.approx(0.1)]


def test_json_lines_say_which_line_is_cut_and_may_hold_any_text(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text('{"acc": 0.1, "said": "a\u2028b"}\n{"acc": 0.2}\n', encoding="utf-8")
    assert values(in_file(file, "acc", "log.jsonl")) == [0.1, 0.2]
    file.write_text('{"acc": 0.1}\n{"acc": 0.2}\n{"acc": 0.')
    with pytest.raises(RecordError) as caught:
        in_file(file, "acc", "log.jsonl")
    assert caught.value.cause.startswith("line 3: ")


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"reward:\D*([0-9.]+)", "reward: -12.5"),
        (r"loss .*?([0-9.]+)", "loss -0.3"),
        (r"acc.*([0-9.]+)", "acc: 97.5"),
    ],
)
def test_a_sign_or_digits_before_the_group_are_not_left_behind(pattern, line):
    with pytest.raises(RecordError, match="takes a part of the number"):
        in_lines(pattern, [(0.0, line)])


@pytest.mark.parametrize(
    ("pattern", "line", "value"),
    [
        (r"nll: -([0-9.]+)", "nll: -0.5, nll: -0.6", [0.5, 0.6]),
        (r"0\.(\d+)", "acc 0.93", [93.0]),
        (r"acc: ([0-9]+),", "acc: 97,250 samples", [97.0]),
        (r"acc: ([0-9]+)\.\d", "acc: 97.53", [97.0]),
    ],
)
def test_what_the_pattern_names_beside_its_group_is_not_left_behind(pattern, line, value):
    assert values(in_lines(pattern, [(0.0, line)])) == value


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"0\.(\d+)", "acc 10.93"),
        (r"acc: ([0-9]+).*", "acc: 97.53"),
        (r"nll: -([0-9]+)", "nll: -0.5"),
        (r"nll: -?([0-9.]+)", "nll: -0.5"),
        (r"loss: ([0-9.]+)", "loss: 1e-5"),
    ],
)
def test_what_the_pattern_passes_over_or_does_not_name_is_left_behind(pattern, line):
    with pytest.raises(RecordError, match="takes a part of the number"):
        in_lines(pattern, [(0.0, line)])


@pytest.mark.parametrize("pattern", [r"acc: (?P<v>[0-9.]+)", r"(?:acc: ([0-9.]+))", r"acc[:] +([0-9.]+)"])
def test_nan_counts_however_the_group_is_written(pattern):
    assert str(values(in_lines(pattern, [(0.0, "acc: 0.9"), (1.0, "acc: nan")]))) == "[0.9, nan]"


def test_the_documentation_names_every_word_that_decides_between_at_least_and_at_most():
    page = " ".join((Path(__file__).parents[2] / "docs" / "how-to" / "prove.md").read_text().split())
    falling, _, rising = page.partition("**at most** where it holds")[2].partition("**at least** where it holds")
    rising = rising.partition("Where it holds neither")[0]
    assert re.findall("`(.*?)`", falling) == list(metric.FALLING)
    assert re.findall("`(.*?)`", rising) == list(metric.RISING)
