"""Are batches whose pixel work threads do the script's own, bit for bit, whatever is in the files and in the script?"""

import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest

import warm

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
imagery = pytest.importorskip("imagery")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from PIL import ImageFile  # noqa: E402
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset  # noqa: E402

from flatout.frameworks.pytorch.facts import find  # noqa: E402
from flatout.frameworks.pytorch.input.items.fused import FusedFetch  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import EVERY, difference  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.input.pixels import elements, images, owner, sources, tensors, work  # noqa: E402
from flatout.frameworks.pytorch.input.pixels.comparison import item_difference  # noqa: E402
from flatout.frameworks.pytorch.input.pixels.owner import PixelThreads  # noqa: E402
from flatout.frameworks.pytorch.input.pixels.threads import Threads  # noqa: E402
from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.numerics.batches import compare_batches  # noqa: E402
from flatout.frameworks.pytorch.seams.calls import Calls  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402
from flatout.frameworks.pytorch.session import Session  # noqa: E402
from handmade import MACHINE  # noqa: E402
from tiers import some  # noqa: E402

Photos, OPENERS, TRANSFORMS, OwnTensor = imagery.Photos, imagery.OPENERS, imagery.TRANSFORMS, imagery.OwnTensor


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return imagery.photographs(tmp_path_factory.mktemp("photographs"))


@pytest.fixture(autouse=True)
def nothing_stays():
    """Functions are put back, and no descriptor stays open."""
    before, descriptors = Image.open, num_descriptors()
    yield
    assert Image.open is before and np.array.__module__ == "numpy"
    gc.collect()
    assert num_descriptors() <= descriptors


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def engaged(loader, pixels=None):
    """An iterator that has its pixel work done by threads, and what does it."""
    if pixels is None:
        pixels = PixelThreads(FusedFetch())
        pixels.engage(True)
    iterator = iter(loader)
    pixels.attach(loader, iterator)
    return iterator, pixels


def told(iterator, num=10_000):
    """What a loop sees that goes on after errors: batches, and errors with the script's own frames."""
    found = []
    for _ in range(num):
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as problem:
            said = re.sub("0x[0-9a-f]+", "0x...", str(problem))
            found.append([type(problem).__name__, said, frames(problem), type(problem.__context__).__name__])
    return found


def frames(problem):
    """The frames of a traceback that are the script's and not PyTorch's or ours."""
    traceback, found = problem.__traceback__, []
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if "imagery" in name:
            found.append((traceback.tb_frame.f_code.co_name, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found


def passes(dataset, ours, *, epochs=3, **options):
    """What passes over a loader give, the random states after them, and what did it."""
    seed(0)
    loader = DataLoader(dataset, **{"batch_size": 5, "shuffle": True, **options})
    pixels = PixelThreads(FusedFetch())
    pixels.engage(ours)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(epochs):
            found += told(engaged(loader, pixels)[0])
    return found, RandomStates([loader.generator]), pixels, loader


def agree(dataset, *, compare=difference, num_plain=2, **options):
    """Both ways give the same, and ours was ours."""
    plain, after, *_ = passes(dataset, False, **options)
    ours, after_ours, pixels, loader = passes(dataset, True, **options)
    assert compare(ours, plain) is None
    assert after_ours.equals(after)
    assert pixels.why_not(loader) is None
    assert pixels.num_batches == len(plain) - num_plain
    return plain


# -- whatever datasets do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_give_the_same_batches_and_leave_the_same_random_streams(name, paths):
    agree(Photos(paths, TRANSFORMS[name]))


@pytest.mark.parametrize("name", imagery.NEW_TRANSFORMS)
@pytest.mark.parametrize("collate", [None, list])
def test_the_newer_transforms_do_as_well(name, collate, paths):
    compare = difference if collate is None else item_difference
    agree(Photos(paths, imagery.NEW_TRANSFORMS[name]), compare=compare, collate_fn=collate)


@pytest.mark.parametrize("transform", [TRANSFORMS["the usual"], imagery.NEW_TRANSFORMS["jitter"], OwnTensor()])
def test_the_usual_ways_compute_nothing_in_the_scripts_thread(transform, paths, monkeypatch):
    computed = []
    for holder, name in [(images, "compute"), (tensors.DeferredTensor, "flatout_compute"), (work.Work, "spoil")]:
        monkeypatch.setattr(holder, name, lambda *given, name=name: computed.append(name))
    dataset = Photos(paths[:6], imagery.T.Compose([imagery.T.Resize((32, 32)), transform]))
    iterator, pixels = forced(dataset, batch_size=3)
    assert len(list(iterator)) == 2 and pixels.num_batches == 2 and computed == []


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("name", ["the usual", "jitter", "own transforms"])
def test_files_may_be_opened_in_any_way(opener, name, paths):
    transform = TRANSFORMS[name]
    if opener in ("in_grey", "painted") and name == "own transforms":
        paths = paths[:8]
    agree(Photos(paths, imagery.T.Compose([imagery.T.Grayscale(3), transform]), OPENERS[opener]))


@pytest.mark.parametrize("opener", [*OPENERS, "several"])
def test_images_that_a_collate_function_gets_are_plain_ones(opener, paths):
    dataset = Photos(paths, opener=getattr(imagery, opener))
    batches = agree(dataset, compare=item_difference, collate_fn=list)
    assert all(type(item[0]) in (list, Image.Image) for batch in batches for item in batch)


def test_whatever_looks_at_an_image_or_a_tensor_sees_what_plain_has(paths):
    dataset = Photos(paths, opener=imagery.looked_at)
    plain, after, *_ = passes(dataset, False, batch_size=1, collate_fn=list, epochs=1)
    loader = DataLoader(dataset, batch_size=1, collate_fn=list, shuffle=True)
    seed(0)
    iterator, _ = forced(dataset, batch_size=1, collate_fn=list, shuffle=True)
    assert item_difference(list(iterator), plain) is None and after.equals(RandomStates([loader.generator]))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("collate", [None, list])
def test_modes_of_pytorch_in_the_loop_are_those_of_its_batches(mode, collate, paths):
    found, dataset = [], Photos(paths, TRANSFORMS["several tensors"])
    for ours in (False, True):
        with mode():
            batches, _, pixels, loader = passes(dataset, ours, collate_fn=collate)
            leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(batches) if isinstance(leaf, torch.Tensor)]
            found.append([(leaf.is_inference(), leaf.tolist()) for leaf in leaves])
    assert found[0] == found[1] and pixels.why_not(loader) is None and pixels.num_batches == 13


def test_warnings_come_as_often_as_plain_gives_them(paths, tmp_path):
    content = Path(paths[0]).read_bytes()
    block = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x0f\x01"
    odd = tmp_path / "odd.jpg"
    odd.write_bytes(content[:2] + b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block + content[2:])
    num = []
    for ours in (False, True):
        iterator, pixels = forced(Photos([str(odd)] * 6, TRANSFORMS["crop"]), batch_size=2)
        pixels.engage(ours)
        with warnings.catch_warnings(record=True) as told_of:
            warnings.simplefilter("always")
            list(iterator)
        num.append(len(told_of))
    assert num[0] == num[1] > 0


@pytest.mark.parametrize("name", ["the usual", "bytes", "several tensors", "own transforms", "channels last", "grey"])
def test_tensors_that_a_collate_function_gets_are_plain_ones(name, paths):
    def collate(items):
        for item in items:
            for leaf in torch.utils._pytree.tree_leaves(item):
                if isinstance(leaf, torch.Tensor):
                    assert type(leaf) is torch.Tensor and not leaf.__dict__
        return list(items)

    agree(Photos(paths, TRANSFORMS[name]), compare=item_difference, collate_fn=collate)


def test_a_collate_function_that_draws_and_counts_is_called_as_often_as_plain_calls_it(paths):
    calls = []

    def collate(items):
        calls.append(len(items))
        return torch.stack([image * torch.rand(1) for image, _ in items])

    agree(Photos(paths, TRANSFORMS["the usual"]), collate_fn=collate)
    assert len(calls) == 2 * 3 * 5


def test_datasets_of_torchvision_and_of_datasets(paths, tmp_path):
    for number, path in enumerate(paths[:12]):
        folder = tmp_path / f"class{number % 3}"
        folder.mkdir(exist_ok=True)
        shutil.copy(path, folder)
    folder = imagery.torchvision.datasets.ImageFolder(tmp_path, TRANSFORMS["the usual"])
    agree(folder)
    agree(Subset(folder, [1, 5, 7, 2, 9, 3]), batch_size=2)
    agree(ConcatDataset([folder, folder]))


@pytest.mark.parametrize("options", [{"shuffle": False}, {"drop_last": True}, {"batch_size": 40}, {"batch_size": 1}])
def test_loaders_of_every_kind(options, paths):
    agree(Photos(paths, TRANSFORMS["the usual"]), epochs=4, **options)


def test_the_default_type_of_the_moment_counts(paths):
    torch.set_default_dtype(torch.float64)
    try:
        batches = agree(Photos(paths, TRANSFORMS["the usual"]))
        assert batches[0][0].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_each_batch_owns_its_memory_and_nothing_of_it_is_ours(paths):
    iterator, _ = engaged(DataLoader(Photos(paths, TRANSFORMS["several tensors"]), batch_size=4))
    kept = list(iterator)
    for parts, _ in kept:
        places = {part.data_ptr() for part in parts}
        assert len(places) == len(parts)
        for part in parts:
            assert type(part) is torch.Tensor and not part._is_view() and part.untyped_storage().resizable()
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
            part.requires_grad_().detach_()


def test_a_loop_that_changes_its_batches_changes_no_other(paths):
    dataset = Photos(paths, TRANSFORMS["evaluation"])
    plain = [batch.clone() for batch, _ in DataLoader(dataset, batch_size=4)]
    for _ in range(3):
        iterator, _ = engaged(DataLoader(dataset, batch_size=4))
        for (batch, _), wanted in zip(iterator, plain, strict=True):
            assert torch.equal(batch, wanted)
            batch.mul_(0)


# -- what is wrong with files --------------------------------------------------------------------------------------


def spoil(paths, folder):
    """The same files, some of them broken."""
    broken = [shutil.copy(path, folder) for path in paths]
    for number, change in {
        0: lambda content: content[:-40],
        2: lambda content: content[: len(content) // 2],
        3: lambda content: b"",
        4: lambda content: content[:300] + bytes(200) + content[500:],
        6: lambda content: b"no image at all",
        9: lambda content: content[: len(content) // 2] + bytes(50) + content[len(content) // 2 + 50 :],
        10: lambda content: content[:-20],
        14: lambda content: content[:100],
    }.items():
        path = Path(broken[number])
        path.write_bytes(change(path.read_bytes()))
    Path(broken[7]).unlink()
    return broken


@pytest.mark.parametrize("opener", ["from_path", "from_file", "from_bytes"])
@pytest.mark.parametrize("collate", [None, list])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_broken_files_raise_what_plain_raises_where_plain_raises_it(opener, collate, batch_size, paths, tmp_path):
    dataset = Photos(spoil(paths, tmp_path), TRANSFORMS["the usual"], OPENERS[opener])
    options = {"batch_size": batch_size, "collate_fn": collate}
    plain, after, *_ = passes(dataset, False, **options)
    ours, after_ours, *_ = passes(dataset, True, **options)
    assert item_difference(ours, plain) is None and after_ours.equals(after)
    assert sum(type(one[0]) is str for one in plain) > 10, "errors"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_truncated_files_are_what_pils_setting_makes_of_them(when, paths, tmp_path, monkeypatch):
    dataset = Photos(spoil(paths, tmp_path), TRANSFORMS["the usual"])
    found = []
    for ours in (False, True):
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", when == "before")
        seed(0)
        loader = DataLoader(dataset, batch_size=1, shuffle=True)
        pixels = PixelThreads(FusedFetch())
        pixels.engage(ours)
        iterator = engaged(loader, pixels)[0]
        found.append(told(iterator, 4))
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        found[-1] += told(iterator)
    assert item_difference(found[1], found[0]) is None


def test_a_script_that_replaces_what_it_cannot_open_replaces_the_same(paths, tmp_path):
    dataset = imagery.Forgiving(spoil(paths, tmp_path), TRANSFORMS["the usual"])
    plain, after, *_ = passes(dataset, False)
    ours, after_ours, *_ = passes(dataset, True)
    assert difference(ours, plain) is None and after_ours.equals(after)


@pytest.mark.parametrize("collate", [None, list])
def test_images_of_several_sizes_raise_what_plain_raises(collate, paths):
    dataset = Photos(paths, imagery.T.ToTensor())
    plain, after, *_ = passes(dataset, False, collate_fn=collate)
    ours, after_ours, *_ = passes(dataset, True, collate_fn=collate)
    assert item_difference(ours, plain) is None and after_ours.equals(after)
    assert any("equal size" in str(one) for one in plain) is (collate is None)


def test_an_interruption_leaves_nothing_behind(paths, monkeypatch):
    iterator, pixels = engaged(DataLoader(Photos(paths, TRANSFORMS["the usual"]), batch_size=4))
    next(iterator)

    def interrupted(self, jobs):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(pixels._engine.threads), "finish", interrupted)
    for _ in range(2):
        iterator._dataset_fetcher.standing.shadow.num_batches = 2
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    monkeypatch.undo()
    assert len(list(iterator)) == 3


# -- files that change, images that stay ---------------------------------------------------------------------------


def forced(dataset, **options):
    """A loader whose dataset is taken for harmless, though its code is not looked at."""
    loader = DataLoader(dataset, **options)
    pixels = PixelThreads(FusedFetch())
    pixels.engage(True)
    standing = pixels.standing(loader)
    standing.holds()
    standing.holds = lambda: True
    standing.shadow.num_batches = 2
    iterator = iter(loader)
    iterator._dataset_fetcher = pixels.fetcher(loader, iterator._dataset_fetcher)
    return iterator, pixels


def test_what_a_dataset_keeps_is_plain_afterwards_and_of_the_file_that_was_opened(paths, tmp_path):
    copies = [shutil.copy(path, tmp_path) for path in paths[:6]]
    dataset = imagery.Keeping(copies)
    wanted = [dataset[index] for index in range(6)]
    dataset.kept.clear()
    iterator, _ = forced(dataset, batch_size=6)
    batch, _ = next(iterator)
    for path in copies:
        Path(path).write_bytes(b"something else by now")
    assert torch.equal(batch, torch.stack([item[0] for item in wanted]))
    batch.zero_()
    for (image, opened, crop, tensor), (wanted_tensor, index) in zip(dataset.kept, wanted, strict=True):
        plain = Image.open(paths[index])
        assert (type(image), type(opened), type(crop), type(tensor)) == (
            Image.Image, type(plain), Image.Image, torch.Tensor
        )  # fmt: skip
        assert image.tobytes() == plain.convert("RGB").tobytes() and opened.size == plain.size
        assert torch.equal(tensor, wanted_tensor) and not vars(tensor)
        assert sorted(vars(image)) == sorted(vars(plain.convert("RGB")))


def test_what_the_dataset_keeps_can_be_used_by_a_later_item(paths):
    dataset = imagery.Remembering(paths[:6])
    plain = [dataset[index][0] for index in range(6)]
    dataset.last = None
    iterator, _ = forced(dataset, batch_size=2)
    assert torch.equal(torch.cat([batch for batch, _ in iterator]), torch.stack(plain))


@pytest.mark.parametrize("name", ["Keeping", "Remembering", "Counting", "Printing", "Own"])
def test_datasets_whose_code_does_more_than_make_items_stay_plain(name, paths, capsys):
    dataset = getattr(imagery, name)(paths[:6])
    loader = DataLoader(dataset, batch_size=2)
    iterator, pixels = engaged(loader)
    batches = list(iterator)
    assert len(batches) == 3 and pixels.num_batches == 0
    assert f"imagery.py:{imagery.LINES[name]}: " in pixels.why_not(loader)


# -- loops ---------------------------------------------------------------------------------------------------------


def test_a_pass_may_be_left_early_and_several_may_run_at_once(paths):
    def loop(ours):
        seed(1)
        loader = DataLoader(Photos(paths, TRANSFORMS["the usual"]), batch_size=4, shuffle=True)
        other = DataLoader(Photos(paths, TRANSFORMS["jitter"]), batch_size=3, shuffle=True)
        pixels = PixelThreads(FusedFetch())
        pixels.engage(ours)
        found = []
        for _ in range(3):
            ones, others = engaged(loader, pixels)[0], engaged(other, pixels)[0]
            for number, (one, two) in enumerate(zip(ones, others, strict=False)):
                found += [one, two, torch.rand(1)]
                if number == 3:
                    break
        return found, RandomStates()

    (plain, after), (ours, after_ours) = loop(False), loop(True)
    assert difference(ours, plain) is None and after_ours.equals(after)


def test_it_can_be_engaged_and_released_between_any_two_batches(paths):
    loaders = Loaders()
    loaders.install()
    loader = DataLoader(Photos(paths, TRANSFORMS["the usual"]), batch_size=2, shuffle=True)
    seed(0)
    plain = list(loader)
    try:
        seed(0)
        for position, batch in enumerate(loader):
            assert difference(batch, plain[position]) is None
            loaders.engage("pixels", position % 6 < 3)
        assert loaders.pipeline.pixels.why_not(loader) is None
    finally:
        loaders.remove()


def test_what_the_script_changes_counts_at_once(paths):
    def loop(ours):
        seed(0)
        dataset = Photos(paths, TRANSFORMS["crop"])
        loader = DataLoader(dataset, batch_size=2)
        pixels = PixelThreads(FusedFetch())
        pixels.engage(ours)
        found = []
        for number, batch in enumerate(engaged(loader, pixels)[0]):
            found.append(batch)
            if number == 3:
                dataset.transform = TRANSFORMS["the usual"]
            if number == 5:
                dataset.opener = imagery.in_grey
                dataset.transform = TRANSFORMS["evaluation"]
            if number == 7:
                dataset.transform = imagery.T.Compose([TRANSFORMS["grey"], imagery.Count()])
        return found, pixels.num_batches

    (plain, _), (ours, num) = loop(False), loop(True)
    assert difference(ours, plain) is None and num == 6


def test_threads_may_fetch_at_the_same_time(paths):
    loader = DataLoader(Photos(paths, TRANSFORMS["evaluation"]), batch_size=4)
    plain = list(loader)
    pixels = PixelThreads(FusedFetch())
    pixels.engage(True)
    found = {}

    def loop(number):
        own = DataLoader(Photos(paths, TRANSFORMS["evaluation"]), batch_size=4)
        found[number] = [list(engaged(own, pixels)[0]) for _ in range(3)]

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for number in range(3):
        assert all(difference(batches, plain) is None for batches in found[number])


# -- processes and threads -----------------------------------------------------------------------------------------


def test_thousands_of_passes_leak_neither_descriptors_nor_threads(paths):
    loader = DataLoader(Photos(paths[:4], TRANSFORMS["evaluation"]), batch_size=2)
    pixels = PixelThreads(FusedFetch())
    pixels.engage(True)
    before = None
    for number in range(1500):
        iterator = engaged(loader, pixels)[0]
        next(iterator)
        if number % 3 == 0:
            list(iterator)
        if number == 20:
            before = num_descriptors(), threading.active_count()
    gc.collect()
    assert num_descriptors() <= before[0] and threading.active_count() <= before[1]
    assert pixels._engine.descriptors.num == 0


def test_more_files_than_descriptors_of_ours_may_be_open(paths, monkeypatch):
    monkeypatch.setattr(sources, "MOST_OPEN", 3)
    agree(Photos(paths * 3, TRANSFORMS["the usual"]), batch_size=30)


def test_a_process_that_is_forked_while_threads_work_has_its_own(paths):
    loader = DataLoader(Photos(paths, TRANSFORMS["evaluation"]), batch_size=5)
    plain = list(loader)
    iterator, pixels = engaged(loader)
    got = [next(iterator) for _ in range(3)]
    fetcher = iterator._dataset_fetcher
    pending = fetcher.begin(list(range(len(paths))))
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        same = difference([*got, *iterator], plain) is None
        same = (
            same and difference(fetcher.finish(pending), next(iter(DataLoader(loader.dataset, batch_size=99)))) is None
        )
        again = list(engaged(loader, pixels)[0])
        os._exit(0 if same and difference(again, plain) is None else 1)
    assert difference(fetcher.finish(pending), next(iter(DataLoader(loader.dataset, batch_size=99)))) is None
    assert difference([*got, *iterator], plain) is None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


ENDING = """
    import sys
    sys.path[:0] = {path!r}
    import imagery
    from pathlib import Path
    from torch.utils.data import DataLoader
    from flatout.frameworks.pytorch.input.items.fused import FusedFetch
    from flatout.frameworks.pytorch.input.pixels.owner import PixelThreads
    pixels = PixelThreads(FusedFetch())
    pixels.engage(True)
    paths = [str(path) for path in sorted(Path({folder!r}).glob("plain*.jpg"))] * 40
    loader = DataLoader(imagery.Photos(paths, imagery.TRANSFORMS["the usual"]), batch_size=200)
    iterator = iter(loader)
    pixels.attach(loader, iterator)
    fetcher = iterator._dataset_fetcher
    pending = [fetcher.begin(list(range(200))) for _ in range(4)]
    {end}
"""


@pytest.mark.parametrize(
    "end", some(["sys.exit(3)", "raise KeyboardInterrupt", "pending = None; sys.exit(3)"], "sys.exit(3)")
)
def test_a_process_ends_though_everything_is_full(end, paths):
    code = textwrap.dedent(ENDING).format(path=sys.path, folder=str(Path(paths[0]).parent), end=end)
    begun_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    assert done.returncode in (3, -signal.SIGINT, 130), done.stderr
    assert time.monotonic() - begun_s < 60


def test_ctrl_c_in_the_middle_of_a_batch_ends_a_process(paths):
    end = """print("ready", flush=True)
    for one in pending * 1000:
        fetcher.finish(one)
        pending.append(fetcher.begin(list(range(200))))"""
    code = textwrap.dedent(ENDING.replace("{end}", end)).format(path=sys.path, folder=str(Path(paths[0]).parent))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130) and "KeyboardInterrupt" in said


@pytest.mark.parametrize(("quota", "num"), [(None, 4), (2.5, 2), (0.5, 1)])
def test_a_containers_quota_counts(quota, num, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(owner, "cores_quota", lambda: quota)
    assert owner._num_cores() == num


def test_threads_are_named_and_end_when_there_is_nothing_to_do(paths, monkeypatch):
    from flatout.frameworks.pytorch.input.pixels import threads

    monkeypatch.setattr(threads, "IDLE_S", 0.05)
    loader = DataLoader(Photos(paths, TRANSFORMS["the usual"]), batch_size=5)
    iterator, pixels = engaged(loader)
    names = {thread.name for _ in iterator for thread in threading.enumerate()}
    assert "flatout-pixels-0" in names
    deadline_s = time.monotonic() + 10
    while pixels._engine.threads.num_running and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not pixels._engine.threads.num_running
    assert len(list(engaged(loader, pixels)[0])) == 5


def test_pytorchs_own_threads_are_left_as_they_are(paths):
    torch.set_num_threads(2)
    list(engaged(DataLoader(Photos(paths, TRANSFORMS["the usual"]), batch_size=5))[0])
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), seen) == (2, [2])


# -- looked at again -----------------------------------------------------------------------------------------------


def test_batches_that_differ_are_never_handed_out(paths, monkeypatch):
    dataset = Photos(paths, TRANSFORMS["the usual"])
    plain, after, *_ = passes(dataset, False)
    fill = elements.Elements.fill
    monkeypatch.setattr(elements.Elements, "fill", lambda self, target: (fill(self, target), target.__iadd__(1e-3)))
    ours, after_ours, pixels, loader = passes(dataset, True)
    assert difference(ours, plain) is None and after_ours.equals(after) and pixels.num_batches == 0
    assert pixels.why_not(loader) == "its batches differ: other values"


@pytest.mark.parametrize("collate", [None, list])
def test_a_difference_that_comes_later_is_found_and_ends_it(collate, paths, monkeypatch):
    dataset = Photos(paths[:4] * (EVERY // 2), TRANSFORMS["evaluation"])
    loader = DataLoader(dataset, batch_size=50, collate_fn=collate)
    iterator, pixels = engaged(loader)
    for _ in range(5):
        next(iterator)
    fill = elements.Elements.fill
    monkeypatch.setattr(elements.Elements, "fill", lambda self, target: (fill(self, target), target.__imul__(-1)))
    list(iterator)
    assert pixels.num_batches <= EVERY // 50 + 5
    assert "differ: item" in pixels.why_not(loader)


def test_random_numbers_that_are_drawn_otherwise_are_noticed(paths, monkeypatch):
    from flatout.frameworks.pytorch.input.pixels import replacements

    watch = replacements.watch
    monkeypatch.setattr(replacements, "watch", lambda image, work: (torch.rand(1), watch(image, work)))
    dataset = Photos(paths, TRANSFORMS["the usual"])
    plain, after, *_ = passes(dataset, False)
    ours, after_ours, pixels, loader = passes(dataset, True)
    assert difference(ours, plain) is None and after_ours.equals(after) and pixels.num_batches == 0
    assert pixels.why_not(loader) == "its batches draw other random numbers"


# -- which loaders -------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Several(Photos):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda paths: DataLoader(Photos(paths), num_workers=1), "the script's workers fetch"),
        (lambda paths: DataLoader(Photos(paths), batch_size=None), "puts its batches together itself"),
        (lambda paths: DataLoader(Stream()), "puts its batches together itself"),
        (lambda paths: DataLoader(Several(paths)), "several items at once"),
        (lambda paths: DataLoader(TensorDataset(torch.zeros(3))), "its batches can be computed at once"),
        (lambda paths: DataLoader(imagery.Numbers()), "no image is opened"),
        (lambda paths: DataLoader([1, 2, 3]), "`__getitem__` of `builtins.list` is not known"),
    ],
)
def test_loaders_that_do_not_come_into_question_say_why(make, why, paths):
    assert why in PixelThreads(FusedFetch()).why_not(make(paths))


def test_batches_that_can_be_computed_at_once_are_left_to_that_in_whichever_order_both_are_engaged(paths):
    for pixels_first in (True, False):
        loaders = Loaders()
        loaders.install()
        try:
            pixels = loaders.pipeline.pixels
            if pixels_first:
                loaders.engage("pixels", True)
            loaders.engage("fused", True)
            loaders.engage("pixels", True)
            list(DataLoader(TensorDataset(torch.zeros(40, 3)), batch_size=4))
            list(DataLoader(Photos(paths, TRANSFORMS["the usual"]), batch_size=4))
            assert (loaders.pipeline.fused.num_batches, pixels.num_batches) == (8, 4)
        finally:
            loaders.remove()


def test_the_lever_applies_where_images_are_opened_shows_its_effect_and_is_released(paths):
    loaders = Loaders()
    loaders.reopen = loaders.studies = True
    loaders.install()
    session = Session(Calls(), loaders, registry())
    try:
        loader = DataLoader(Photos(paths, TRANSFORMS["the usual"]), batch_size=3, shuffle=True)
        loaders.note(loader, 1)
        assert session.levers["pixel_threads"].applies(find(session, 1), MACHINE) is None
        session.engage_exactly({"pixel_threads": {}})
        assert session.evidence() == ({}, {"pixel_threads": "no effect was seen"})
        list(loader)
        assert session.evidence()[0]["pixel_threads"] == "6 batches whose pixel work was done on threads"
        agreement = compare_batches(session, {"pixel_threads": {}})
        assert (agreement.error, agreement.random_states_equal) == (0.0, True)
        session.engage_exactly({})
        assert type(iter(loader)._inner._dataset_fetcher).__name__ != "PixelFetcher"
    finally:
        loaders.remove()


# -- begun before it is wanted -------------------------------------------------------------------------------------


def test_a_batch_that_was_begun_earlier_is_finished_with_the_states_of_its_own(paths):
    loader = DataLoader(Photos(paths, TRANSFORMS["the usual"]), batch_size=5)
    iterator, _ = engaged(loader)
    fetcher = iterator._dataset_fetcher
    list(engaged(loader, fetcher._owner)[0])
    seed(5)
    plain, after = fetcher._original.fetch([3, 1, 4]), RandomStates()
    seed(5)
    pending = fetcher.begin([3, 1, 4], states=True)
    assert pending.after.equals(after) and pending.after.equals(RandomStates())
    torch.rand(3)
    assert difference(fetcher.finish(pending), plain) is None
    abandoned = fetcher.begin([1, 2, 3])
    del abandoned


# -- whatever chains there are -------------------------------------------------------------------------------------

STEPS = [
    ".crop((2, 3, 31, 29))", ".crop((-3, 5, 40, 33))", ".crop((3.4, 2.6, 20.5, 21.5))", ".resize((17, 23))",
    ".resize((40, 12), Image.Resampling.NEAREST)", ".resize((20, 20), Image.Resampling.LANCZOS, (1, 2, 12, 14))",
    ".resize((9, 9), Image.Resampling.BICUBIC, None, 2.0)", ".transpose(Image.Transpose.ROTATE_90)",
    ".transpose(Image.Transpose.FLIP_TOP_BOTTOM)", ".transpose(Image.Transpose.TRANSVERSE)", ".rotate(30)",
    ".rotate(90)", ".rotate(-17.5, Image.Resampling.BILINEAR, fillcolor=(1, 2, 3))", ".rotate(45, expand=True)",
    ".copy()", ".convert('L').convert('RGB')", ".convert('RGB')", ".filter(ImageFilter.BLUR)", ".reduce(2)",
    ".point(lambda value: 255 - value)", ".convert('HSV').convert('RGB')", ".quantize(8).convert('RGB')",
]  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(STEPS), max_size=6), number=st.integers(0, 12), end=st.sampled_from(["", "x"]))
def test_chains_of_calls_on_an_image_give_what_plain_gives(steps, number, end, paths, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    source = "import numpy as np\nimport torch\nfrom PIL import Image, ImageFilter\n\n\ndef chain(path):\n"
    source += "    image = Image.open(path).convert('RGB')\n" + "".join(f"    image = image{step}\n" for step in steps)
    source += "    return image\n" if not end else "    return torch.from_numpy(np.array(image)).float().div(255)\n"
    (folder / "chain.py").write_text(source)
    names = {"__name__": "chain"}
    exec(compile(source, str(folder / "chain.py"), "exec"), names)
    dataset = Photos([paths[number]] * 4, opener=names["chain"])
    plain, after, *_ = passes(dataset, False, batch_size=1, collate_fn=list, epochs=1)
    ours, after_ours, pixels, loader = passes(dataset, True, batch_size=1, collate_fn=list, epochs=1)
    assert item_difference(ours, plain) is None and after_ours.equals(after)
    assert pixels.why_not(loader) is None


# -- what an attacker found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.2345e-38, 3e-40, 1.2345e38, 1e300, 0.0, 0, float("inf"), float("nan"), 1 / 3])
def test_numbers_at_the_ends_of_their_type_are_pytorchs_and_nothing_is_said_of_them(factor, paths):
    def chain(image):
        whole, part = imagery.T.functional.pil_to_tensor(image), imagery.T.functional.to_tensor(image)
        return whole * float(factor), whole / factor, whole.double() / factor, part * factor * factor, part - factor

    dataset = Photos(paths, lambda image: chain(image.resize((8, 8))))
    plain, *_ = passes(dataset, False, epochs=1, collate_fn=list)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seed(0)
        iterator, pixels = forced(dataset, batch_size=5, shuffle=True, collate_fn=list)
        assert item_difference(list(iterator), plain) is None and pixels.num_batches == len(plain)


@pytest.mark.parametrize("name", ["photo.jpg", "drawing.png"])
def test_what_stands_beside_the_pixels_belongs_to_one_image(name, paths, tmp_path):
    path = tmp_path / name
    Image.open(paths[0]).save(path)

    def marked(path):
        image = Image.open(path)
        other = image.copy()
        num = len(image.info)
        image.info["mine"] = 1
        return image, other, num, len(other.info)

    dataset = Photos([str(path)] * 20, lambda parts: parts, opener=marked)
    plain, *_ = passes(dataset, False, epochs=1, shuffle=False, collate_fn=list)
    for keeps in (False, True):
        iterator, pixels = forced(dataset, batch_size=5, collate_fn=list)
        pixels.decoded.engage(keeps)
        assert item_difference(list(iterator), plain) is None


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1)])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_smallest_images_lie_in_memory_as_plain_has_them(size, mode, tmp_path):
    path = tmp_path / "small.png"
    Image.new(mode, size, "gray").save(path)
    functional = imagery.T.functional
    dataset = Photos(
        [str(path)] * 4, lambda image: (functional.to_tensor(image), functional.pil_to_tensor(image)), Image.open
    )
    plain, *_ = passes(dataset, False, epochs=1, collate_fn=list)
    iterator, _ = forced(dataset, batch_size=5, shuffle=True, collate_fn=list)
    assert [[one.stride() for one in item[0]] for item in next(iterator)] == [
        [one.stride() for one in item[0]] for item in plain[0]
    ]


def test_what_a_handler_of_signals_raises_is_raised(paths, monkeypatch):
    class Alarmed(Exception):
        pass

    def handler(*about):
        raise Alarmed("time")

    def slow(image):
        os.kill(os.getpid(), signal.SIGUSR1)
        return imagery.T.functional.to_tensor(image.resize((8, 8)))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        iterator, _ = forced(Photos(paths, slow), batch_size=4)
        with pytest.raises(Alarmed):
            next(iterator)
        part = threading.main_thread()
        iterator, _ = forced(Photos(paths, TRANSFORMS["crop"]), batch_size=4)
        done = work.Work.wanted

        def interrupted(self):
            if threading.current_thread() is part:
                os.kill(os.getpid(), signal.SIGUSR1)
            return done(self)

        monkeypatch.setattr(work.Work, "wanted", interrupted)
        with pytest.raises(Alarmed):
            next(iterator)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interruption_in_the_pixel_work_of_another_batch_leaves_that_one_to_the_script(paths, monkeypatch):
    dataset = Photos(paths, TRANSFORMS["crop"])
    iterator, _ = forced(dataset, batch_size=4)
    fetcher = iterator._dataset_fetcher
    monkeypatch.setattr(fetcher._engine, "threads", Threads(0))
    seed(0)
    pending = fetcher.begin([0, 1, 2, 3])
    fill = tensors.DeferredTensor.flatout_fill

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(tensors.DeferredTensor, "flatout_fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetcher._engine.threads.finish(pending.jobs)
    monkeypatch.setattr(tensors.DeferredTensor, "flatout_fill", fill)
    batch = fetcher.finish(pending)
    seed(0)
    assert difference(batch, torch.utils.data.default_collate([dataset[index] for index in range(4)])) is None


def test_pils_setting_at_the_time_of_the_item_counts(paths, monkeypatch):
    iterator, _ = forced(Photos(paths, TRANSFORMS["crop"]), batch_size=4)
    fetcher = iterator._dataset_fetcher
    monkeypatch.setattr(fetcher._engine, "threads", Threads(0))
    pending = fetcher.begin([0, 1, 2, 3])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert fetcher._engine.threads.finish(pending.jobs)
    assert all("settings have changed" in str(one.problem) for one in pending.works)
    pending.drop()


class NeverEqual:
    def __eq__(self, other):
        raise ValueError("not to be compared")

    __hash__ = None


@pytest.mark.parametrize(
    "thing", [torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.complex64).conj(), NeverEqual()], ids=type
)
def test_items_that_cannot_be_compared_are_no_error(thing):
    assert item_difference((thing, 1), (thing, 1)) is not None


def test_a_quantised_tensor_in_an_item_does_not_end_the_process():
    code = """
        import torch
        from flatout.frameworks.pytorch.input.items.shadow import difference
        quantised = torch.quantize_per_tensor(torch.arange(8.0), 0.1, 0, torch.qint8)
        print(difference(quantised, quantised))
    """
    done = warm.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "quantised" in done.stdout
