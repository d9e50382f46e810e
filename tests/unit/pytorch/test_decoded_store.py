"""Are images that are not decoded again the very images that PIL gives, whatever a script does with them?"""

import io
import itertools
import os
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")

from PIL import Image, ImageFile  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import imagery  # noqa: E402
from flatout.frameworks.pytorch.input import decoded, decoders  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402
from flatout.records.facts import LoaderFacts  # noqa: E402


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return imagery.photographs(tmp_path_factory.mktemp("images"))


@pytest.fixture(autouse=True)
def all_is_kept(monkeypatch):
    """However small images are."""
    monkeypatch.setattr(decoders, "LEAST_NS", 0)
    monkeypatch.setattr(decoded, "CREDIT_NS", 10**12)


@pytest.fixture
def decoding(monkeypatch):
    """Engaged, and whatever was kept is given from the first time on."""
    monkeypatch.setattr(decoders, "NUM_FIRST", 0)
    ours = decoders.Decoding()
    ours.engage(True)
    yield ours
    ours.engage(False)


def same(one, other):
    """Whether two results are alike, images by all that can be asked of them."""
    if isinstance(one, Image.Image):
        return type(one) is type(other) and all(
            part(one) == part(other)
            for part in (
                lambda image: (image.mode, image.size, image.format, image.tobytes(), image.readonly),
                lambda image: (repr(image.info), dict(image.getexif()), getattr(image, "n_frames", None)),
                lambda image: image.palette and (image.palette.mode, image.palette.getdata()),
            )
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or np.array_equal(one, other)


def encoded(seed=0, size=(60, 50), mode="RGB", form="JPEG", **options):
    with io.BytesIO() as file:
        imagery.pattern(*size, mode, seed).save(file, form, **options)
        return file.getvalue()


def loaded(content):
    with io.BytesIO(content) as file:
        image = Image.open(file)
        image.load()
        return image


def error_of(call, *given):
    with pytest.raises(Exception) as raised:
        call(*given)
    return type(raised.value), str(raised.value)


# -- the same images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opener", [*imagery.OPENERS.values(), imagery.untouched, imagery.several, imagery.looked_at])
def test_images_are_those_of_plain_however_they_are_opened_and_whatever_is_done_to_them(opener, paths, decoding):
    decoding.engage(False)
    plain = [opener(path) for path in paths if opener is not imagery.painted or "jpg" in path]
    decoding.engage(True)
    for _ in range(3):
        ours = [opener(path) for path in paths if opener is not imagery.painted or "jpg" in path]
        assert [index for index, pair in enumerate(zip(ours, plain, strict=True)) if not same(*pair)] == []
    assert decoding.num_given >= len(ours)


def test_files_are_read_and_closed_as_plain_does(paths, decoding):
    def traces(path):
        with open(path, "rb") as file:
            image = Image.open(file)
            image.load()
            found = [file.tell(), image.fp]
        image = Image.open(path)
        file = image.fp
        image.load()
        return [*found, file.closed, image.fp, image.tile]

    decoding.engage(False)
    plain = [traces(path) for path in paths]
    decoding.engage(True)
    assert [[traces(path) for path in paths] for _ in range(2)] == [plain] * 2


def test_what_a_script_writes_into_an_image_stays_its_own(decoding):
    content = encoded()
    plain = loaded(content)
    for _ in range(3):
        image = loaded(content)
        assert same(image, plain)
        image.paste((1, 2, 3), (0, 0, 30, 30))
        image.load()[40, 40] = (9, 9, 9)
    assert decoding.num_given == 3


@pytest.mark.parametrize("pieces", [1, 100, 700])
def test_a_parser_that_is_fed_piece_by_piece_gives_the_same(pieces, decoding):
    content = encoded(size=(160, 150))

    def parsed():
        parser = ImageFile.Parser()
        for begin in range(0, len(content), len(content) // pieces + 1):
            parser.feed(content[begin : begin + len(content) // pieces + 1])
        return parser.close()

    found = [parsed().tobytes() for _ in range(3)]
    assert found == [loaded(content).tobytes()] * 3


def test_a_draft_is_another_image(decoding):
    content = encoded(size=(160, 150))

    def drafted():
        image = Image.open(io.BytesIO(content))
        image.draft("L", (40, 40))
        image.load()
        return image

    found = [[loaded(content), drafted()] for _ in range(2)]
    assert found[0][1].size == (80, 75) and found[0][1].mode == "L" and same(*found)


# -- other bytes ----------------------------------------------------------------------------------------------------


def test_a_file_that_has_changed_is_decoded_anew_though_nothing_but_its_bytes_tells(tmp_path, decoding):
    path = tmp_path / "image.png"
    images = [Image.fromarray(np.full((40, 50), value, np.uint8)) for value in (7, 8)]
    contents = []
    for image in images:
        image.save(path, compress_level=0)
        contents.append(path.read_bytes())
    assert len(contents[0]) == len(contents[1])
    for index in (0, 0, 1, 1, 0, 1):
        path.write_bytes(contents[index])
        os.utime(path, (1e9, 1e9))
        assert imagery.untouched(path).getpixel((3, 3)) == 7 + index
    assert decoding.num_given == 4


def test_bytes_that_differ_in_one_bit_of_any_piece_are_decoded(decoding):
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(noise).save(file, "PNG", compress_level=0)
        content = bytearray(file.getvalue())
    loaded(bytes(content))
    plain = loaded(bytes(content)).tobytes()
    assert decoding.num_given == 1
    ImageFile.LOAD_TRUNCATED_IMAGES = True  # so that nobody looks at checksums
    try:
        for place in (2001, len(content) // 2 + 1, len(content) - 5000):
            content[place] ^= 1
            decoding.engage(False)
            outcome = loaded(bytes(content)).tobytes()
            decoding.engage(True)
            assert outcome != plain
            assert [loaded(bytes(content)).tobytes() for _ in range(2)] == [outcome] * 2
            content[place] ^= 1
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("truncated", [False, True])
def test_a_file_that_ends_too_early_is_what_it_is_to_plain(form, truncated, decoding, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", truncated)
    content = encoded(size=(400, 300), form=form, **({"quality": 100} if form == "JPEG" else {"compress_level": 0}))
    assert len(content) > 2**16, "several pieces"

    def outcomes():
        found = []
        for end in (len(content) // 3, len(content) - 30):
            try:
                found.append(loaded(content[:end]).tobytes())
            except Exception as problem:
                found.append((type(problem), str(problem)))
        return found

    decoding.engage(False)
    plain = outcomes()
    decoding.engage(True)
    assert outcomes() == plain
    loaded(content)
    assert [outcomes() for _ in range(2)] == [plain] * 2


def test_an_error_in_the_pixels_is_raised_each_time(decoding):
    content = bytearray(encoded(form="PNG"))
    place = content.index(b"IDAT") + 60
    content[place : place + 40] = bytes(40)
    found = [error_of(loaded, bytes(content)) for _ in range(3)]
    decoding.engage(False)
    assert found == [error_of(loaded, bytes(content))] * 3


# -- how sure that is -----------------------------------------------------------------------------------------------


def test_the_first_ones_are_decoded_all_the_same_and_so_is_one_in_a_thousand():
    ours, content = decoders.Decoding(), encoded(size=(9, 9))
    ours.engage(True)
    try:
        (plain,) = {loaded(content).tobytes() for _ in range(1 + decoders.NUM_FIRST)}
        assert ours.num_given == 0
        for _ in range(1100):
            assert loaded(content).tobytes() == plain
        assert ours.num_given == 1099
        ours.engage(True)
        assert ours.num_given == 0
    finally:
        ours.engage(False)


def test_a_kept_image_that_is_wrong_is_not_given_and_none_is_after_it():
    ours, content = decoders.Decoding(), encoded(size=(9, 9))
    ours.engage(True)
    try:
        plain = loaded(content).tobytes()
        kept = ours._images
        end = kept._numbers[decoded._END]
        kept._memory[end - 1] ^= 255
        assert [loaded(content).tobytes() for _ in range(9)] == [plain] * 9
        assert not kept.engaged and ours.num_given == 0
    finally:
        ours.engage(False)


def test_an_error_of_ours_is_nobodys_business_and_ends_it(decoding, monkeypatch):
    def failing(*_):
        raise RuntimeError("ours")

    content = encoded()
    plain = loaded(content).tobytes()
    monkeypatch.setattr(decoders.Decoder, "_fill", failing)
    assert loaded(content).tobytes() == plain and not decoding._images.engaged


# -- memory -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_decoded_each_time(monkeypatch):
    monkeypatch.setattr(decoders, "NUM_FIRST", 0)
    monkeypatch.setattr(decoded, "may_take_bytes", lambda free: 50_000)
    ours, contents = decoders.Decoding(), [encoded(seed) for seed in range(9)]
    plain = [loaded(content).tobytes() for content in contents]
    ours.engage(True)
    try:
        for _ in range(3):
            assert [loaded(content).tobytes() for content in contents] == plain
        assert 0 < ours.num_given < 2 * 9
    finally:
        ours.engage(False)


def test_where_memory_becomes_short_no_more_is_kept(decoding, monkeypatch):
    monkeypatch.setattr(decoded, "LOOK_EVERY_BYTES", 20_000)
    monkeypatch.setattr(decoded, "free_memory_bytes", lambda: 2**20)
    for seed in range(9):
        loaded(encoded(seed))
    num = len(decoding._images._found)
    for seed in range(9, 18):
        loaded(encoded(seed))
    assert 0 < num < 9 and len(decoding._images._found) == num


def test_without_any_memory_to_spare_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(decoded, "free_memory_bytes", lambda: None)
    ours = decoders.Decoding()
    ours.engage(True)
    try:
        assert [loaded(encoded()).size for _ in range(3)] == [(60, 50)] * 3 and ours._images._found == {}
    finally:
        ours.engage(False)


def test_keeping_takes_no_longer_than_it_has_saved_and_a_small_part_of_what_decoding_takes(monkeypatch):
    monkeypatch.setattr(decoders, "NUM_FIRST", 0)
    monkeypatch.setattr(decoded, "CREDIT_NS", 0)
    now_ns = itertools.count(0, 1000)  # each look at the clock is a microsecond later, so that all takes one
    monkeypatch.setattr(decoders, "perf_counter_ns", lambda: next(now_ns))
    ours, contents = decoders.Decoding(), [encoded(seed, (9, 9)) for seed in range(100)]
    ours.engage(True)
    try:
        num_kept = []
        for _ in range(3):
            for content in contents:
                loaded(content)
            num_kept.append(len(ours._images._found))
        assert num_kept[0] in range(4, 7) and num_kept[1] in range(9, 12), "one in twenty; what is found saves nothing"
    finally:
        ours.engage(False)


def test_what_is_decoded_as_quickly_as_it_is_found_is_not_kept(decoding, monkeypatch):
    monkeypatch.setattr(decoders, "LEAST_NS", 10**9)
    loaded(encoded())
    loaded(encoded())
    assert decoding._images._found == {}


# -- threads and processes ----------------------------------------------------------------------------------------


def test_threads_may_decode_at_once(decoding):
    contents = [encoded(seed, (40 + seed, 30)) for seed in range(40)]
    plain = [loaded(content).tobytes() for content in contents]
    wrong = []

    def work(seed):
        for index in random.Random(seed).choices(range(40), k=200):
            if loaded(contents[index]).tobytes() != plain[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and decoding.num_given > 1000


class Cropped(imagery.Photos):
    """What draws random numbers behind the decoder."""

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        left = int(torch.randint(0, 8, ()))
        return torch.from_numpy(np.array(image.crop((left, 2, left + 20, 22)))), index


@pytest.fixture
def loaders(monkeypatch):
    monkeypatch.setattr(decoders, "NUM_FIRST", 0)
    ours = Loaders()
    ours.install()
    yield ours
    ours.parts.decoded.engage(False)
    ours.remove()


def passes(dataset, num=3, **options):
    torch.manual_seed(0)
    loader, found = DataLoader(dataset, batch_size=4, shuffle=True, **options), []
    for _ in range(num):
        found += [*loader, RandomStates().torch]
    return found


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_batches_and_random_streams_are_those_of_plain_and_what_one_worker_decodes_the_others_have(
    options, loaders, paths
):
    plain = passes(Cropped(paths), **options)
    loaders.parts.decoded.engage(True)
    assert difference(passes(Cropped(paths), **options), plain) is None
    assert loaders.parts.decoded.num_given >= 2 * 15


def test_released_it_reaches_workers_that_run(loaders, paths):
    loaders.parts.decoded.engage(True)
    loader = DataLoader(Cropped(paths), batch_size=4, num_workers=2, persistent_workers=True)
    list(loader), list(loader)
    images = loaders.parts.decoded._images
    assert (num := images.num_found) > 0
    loaders.parts.decoded.engage(False)
    list(loader)
    assert images.num_found == num
    loaders.parts.decoded.engage(True)
    list(loader)
    assert images.num_found > num


def test_a_process_that_was_killed_while_it_wrote_leaves_the_others_what_was_there(decoding, monkeypatch):
    monkeypatch.setattr(decoded, "PATIENCE_S", 0.05)
    loaded(encoded(0))
    loaded(encoded(0))
    if (child := os.fork()) == 0:
        decoding._images._lock.acquire()
        os._exit(0)
    os.waitpid(child, 0)
    plain = [loaded(encoded(seed)).tobytes() for seed in (0, 1)]
    assert [loaded(encoded(seed)).tobytes() for seed in (0, 1)] == plain and decoding.num_given == 3


# -- the seam and the lever -----------------------------------------------------------------------------------------


def test_engaged_and_released_leaves_pils_own_function():
    before, ours = Image._getdecoder, decoders.Decoding()
    for _ in range(2):
        ours.engage(True)
        assert Image._getdecoder is not before
        ours.engage(False)
        assert Image._getdecoder is before


def test_decoders_of_the_scripts_own_and_those_that_are_not_known_are_left_alone(decoding):
    class Own(ImageFile.PyDecoder):
        def decode(self, buffer):
            self.set_as_raw(bytes(60 * 50 * 3))
            return -1, 0

    content = encoded(form="GIF", mode="P")
    assert [loaded(content).size for _ in range(2)] == [(60, 50)] * 2 and decoding._images._found == {}
    Image.register_decoder("jpeg", Own)
    try:
        assert {loaded(encoded()).getextrema() for _ in range(2)} == {((0, 0),) * 3}
    finally:
        del Image.DECODERS["jpeg"]
    assert loaded(encoded()).getextrema() != ((0, 0),) * 3


def test_pil_may_be_loaded_after_it_was_engaged(monkeypatch):
    own = sys.modules["PIL.Image"]
    monkeypatch.delitem(sys.modules, "PIL.Image")
    ours, before = decoders.Decoding(), own._getdecoder
    ours.engage(True)
    assert own._getdecoder is before
    monkeypatch.setitem(sys.modules, "PIL.Image", own)
    ours.before_pass()
    assert own._getdecoder is not before
    ours.engage(False)
    assert own._getdecoder is before


def test_the_lever_says_why_it_has_nothing_to_do_and_what_it_did(loaders, paths, monkeypatch):
    lever, session = registry()["decoded_store"], SimpleNamespace(loaders=loaders)

    def why(**why_not):
        why_not = {"fused_fetch": "unread", "virtual_workers": "no workers", **why_not}
        return lever.applies(SimpleNamespace(loaders=[LoaderFacts(dataset="Photographs", why_not=why_not)]), None)

    assert why(decoded_store=None) is None and why(decoded_store="PIL is not used") == "PIL is not used"
    assert why(decoded_store=None, fused_fetch=None) == "its batches can be computed at once"
    assert lever.applies(SimpleNamespace(loaders=()), None) == "no DataLoader feeds the training"
    part, loader = loaders.parts.decoded, DataLoader(Cropped(paths), batch_size=4)
    spawning = DataLoader(Cropped(paths), num_workers=1, multiprocessing_context="spawn")
    assert part.why_not(loader, for_workers=False) is None
    assert "not forked" in part.why_not(spawning, for_workers=True)
    lever.engage(session, {})
    assert lever.evidence(session) is None
    list(itertools.chain(loader, loader))
    assert lever.evidence(session).endswith("images not decoded again")
    lever.release(session)
    monkeypatch.delitem(sys.modules, "PIL.Image")
    assert part.why_not(loader, for_workers=False) == "PIL is not used"


def test_nothing_of_it_is_left_beside_the_script(decoding):
    before = {*os.listdir("/proc/self/fd")} if Path("/proc/self/fd").exists() else set()
    threads = threading.enumerate()
    loaded(encoded())
    loaded(encoded())
    assert threading.enumerate() == threads and ({*os.listdir("/proc/self/fd")} if before else set()) == before
