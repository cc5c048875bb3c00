"""Decoding processes: the same bytes as in this process, and files that end or fool a decoder."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harmonium.core.errors import EngineError
from harmonium.data.decoding import pool
from harmonium.data.decoding.conversion import read_image
from harmonium.data.decoding.pool import Decoders
from harmonium.data.decoding.worker import Order, perform

HEAD = Order(head=True)


def photo(seed, size=(20, 14), mode="RGB"):
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode)


def run(paths, order, count, chunk=3):
    with Decoders(count) as decoders:
        return [a for some in decoders.run([str(p) for p in paths], order, chunk) for a in some]


@pytest.fixture
def album(tmp_path):
    """Images of many sizes and modes, in a listing that is not sorted."""
    paths = []
    for number, mode in enumerate(["RGB", "L", "P", "CMYK", "RGBA", "1", "RGB", "I;16"] * 2):
        image = photo(number, (20 + number, 14 + 3 * number % 7), "RGB")
        image = image.convert("L").convert("I") if mode == "I;16" else image.convert(mode)
        ending = {"CMYK": "jpg", "RGB": "jpg", "I;16": "tif"}.get(mode, "png")
        path = tmp_path / f"{number * 7 % 16}.{ending}"
        image.save(path)
        paths.append(path)
    return paths


# ---- the same for any number of processes --------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize(("size", "channels"), [(None, 3), (8, 1)])
def test_any_number_of_processes_gives_the_bytes_of_this_one(album, count, size, channels):
    answers = run(album, Order(False, size, channels), count)
    for path, answer in zip(album, answers, strict=True):
        with Image.open(path) as image:
            expected = read_image(image, size, channels)
        assert answer.error == "" and np.array_equal(answer.pixels, expected)
        assert answer.size == expected.shape[1::-1]


def test_names_that_are_not_text(tmp_path):
    paths = [os.fsencode(tmp_path) + b"/\xff.png", os.fsencode(tmp_path) + b"/a\n\xc3\xa4.png"]
    for path in paths:
        with open(path, "wb") as file:
            photo(0).save(file, "png")
    assert [a.error for a in run(map(os.fsdecode, paths), HEAD, 1)] == ["", ""]


def test_a_decoder_imports_little():
    code = (
        "import sys, harmonium.data.decoding.worker; print({'torch', 'sklearn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ---- what files hold -----------------------------------------------------------------------------


def test_kinds_and_sizes_are_known_from_the_head(tmp_path):
    expected = {}

    def keep(name, image, kind, **options):
        image.save(tmp_path / name, **options)
        expected[name] = kind

    keep("a.jpg", photo(0), "colour")
    keep("b.jpg", photo(0, mode="L"), "grey")
    keep("c.jpg", photo(0, mode="CMYK"), "CMYK")
    keep("d.png", photo(0, mode="P"), "with a palette")
    keep("e.png", photo(0, mode="RGBA"), "with transparency")
    keep("f.png", photo(0, mode="LA"), "with transparency")
    keep("g.png", photo(0, mode="1"), "black and white")
    keep("h.png", Image.new("I;16", (20, 14), 999), "16-bit grey")
    keep("i.gif", photo(0, mode="P"), "with a palette", save_all=True, append_images=[photo(1)])
    keep("j.gif", Image.new("P", (20, 14), 1), "with transparency", transparency=1)
    keep("k.webp", photo(0), "colour")
    keep("l.tif", photo(0), "colour")
    keep("m.bmp", photo(0), "colour")
    keep("n.ppm", photo(0), "colour")
    paths = [tmp_path / name for name in expected]
    heads, whole = run(paths, HEAD, 1), run(paths, Order(), 1)
    assert [head.error for head in heads] == [answer.error for answer in whole] == [""] * len(paths)
    assert [head.kind for head in heads] == list(expected.values())
    assert [answer.kind for answer in whole] == list(expected.values())
    assert {head.size for head in heads} == {(20, 14)} == {answer.size for answer in whole}
    assert all(head.pixels is None for head in heads)
    film = whole[list(expected).index("i.gif")].pixels
    assert np.array_equal(film, np.asarray(photo(0, mode="P").convert("RGB")))  # its first frame


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 8])
def test_the_cameras_rotation_changes_the_size_in_head_and_image(tmp_path, ending, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo(0).save(tmp_path / f"a.{ending}", exif=exif)
    expected = (14, 20) if orientation >= 5 else (20, 14)
    for order in (HEAD, Order()):
        answer = perform(str(tmp_path / f"a.{ending}"), order)
        assert (answer.error, answer.size) == ("", expected)


def test_damaged_notes_of_a_camera_do_no_harm(tmp_path):
    photo(0).save(tmp_path / "a.webp", exif=b"Exif\0\0nonsense")
    for order in (HEAD, Order()):
        answer = perform(str(tmp_path / "a.webp"), order)
        assert (answer.error, answer.size) == ("", (20, 14))


def claim(path, width, height):
    """A whole PNG file of one pixel whose head claims a size."""
    Image.new("L", (1, 1)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(content)


def test_files_that_cannot_be_read_say_why(tmp_path):
    for name in ("cut.png", "cut.jpg"):
        photo(0, (200, 200)).save(tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "program.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    Image.new("F", (4, 4)).save(tmp_path / "float.tif")
    claim(tmp_path / "large.png", 10_000, 10_000)  # Pillow warns
    claim(tmp_path / "bomb.png", 60_000, 60_000)  # Pillow refuses
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    said = {
        "cut.png": "truncated",
        "cut.jpg": "truncated",
        "empty.png": "empty",
        "text.png": "not an image",
        "program.png": "not an image",
        "float.tif": "floating",
        "large.png": "exceeds limit",
        "bomb.png": "exceeds limit",
        "pipe.png": "not a file",
        "folder.png": "not a file",
        "missing.png": "no such file",
    }
    answers = run([tmp_path / name for name in said], Order(), 1)
    for name, answer in zip(said, answers, strict=True):
        assert said[name] in answer.error and answer.pixels is None, name
        assert len(answer.error) <= 80 and "\n" not in answer.error
        assert str(tmp_path) not in answer.error


# ---- processes that end --------------------------------------------------------------------------


@pytest.fixture
def slow(tmp_path):
    """An image that takes long enough to be caught in the act."""
    Image.new("L", (6000, 6000)).save(tmp_path / "slow.png")
    return tmp_path / "slow.png"


class Killer(threading.Thread):
    """Kills decoders that have a certain file open, so many times."""

    def __init__(self, decoders, path, times):
        super().__init__(daemon=True)
        self.decoders, self.path, self.times = decoders, path, times
        self.seen, self.over = set(), False

    def run(self):
        while self.times and not self.over:
            for process in list(self.decoders._all):
                self.seen.add(process.pid)
                if self.has_open(process.pid):
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait()
                    self.times -= 1
            time.sleep(0.001)

    def has_open(self, pid):
        try:
            return any(
                os.readlink(fd) == str(self.path) for fd in Path(f"/proc/{pid}/fd").iterdir()
            )
        except OSError:
            return False


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
@pytest.mark.parametrize(("times", "lost"), [(1, 0), (2, 1)])
def test_a_killed_decoder_costs_only_the_image_it_was_on(album, slow, times, lost):
    paths = [*album[:5], slow, *album[5:]]
    with Decoders(2) as decoders:
        killer = Killer(decoders, slow, times)
        killer.start()
        order = Order(size=8, channels=1)
        answers = [a for some in decoders.run([str(p) for p in paths], order, 4) for a in some]
        killer.over = True
        killer.join()
    assert killer.times == 0 and len(answers) == len(paths)
    bad = [path for path, answer in zip(paths, answers, strict=True) if answer.error]
    assert bad == [slow] * lost
    if lost:
        assert answers[5].error == "SIGKILL ended its decoder"
    assert not any(Path(f"/proc/{pid}").exists() for pid in killer.seen)


def dummy(monkeypatch, body):
    """Decoders whose processes do something else; `body` may use what the module has."""
    code = f"from harmonium.data.decoding import worker as decoder\n{body}\ndecoder.main()"
    command = [sys.executable, "-c", code]

    def start():
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(pool, "_start", start)


def test_a_decoder_that_never_ends_is_ended(monkeypatch, album):
    dummy(
        monkeypatch,
        """
decoder.SECONDS = 0.1
real = decoder.perform
def perform(path, order):
    while path.endswith("14.png"):
        pass
    return real(path, order)
decoder.perform = perform""",
    )
    answers = run(album[:5], HEAD, 1)
    assert [a.error for a in answers] == ["", "", "not done in 120 s", "", ""]


def test_an_image_that_would_eat_the_memory_is_unreadable(monkeypatch, album, tmp_path):
    large = tmp_path / "large.png"
    Image.new("RGB", (8000, 8000)).save(large)  # 192 MB, a few copies of it
    with monkeypatch.context() as few:
        dummy(few, "decoder.MEMORY = 1 << 29")
        answers = run([*album[:2], str(large), *album[2:4]], Order(size=8), 1)
    assert [bool(answer.error) for answer in answers] == [False, False, True, False, False]
    assert run([str(large)], Order(size=8), 1)[0].error == ""


def test_a_decoder_that_breaks_off_in_the_middle_of_an_answer(monkeypatch, album):
    dummy(
        monkeypatch,
        """
import os, json
real = decoder.perform
def perform(path, order):
    answer = real(path, order)
    if path.endswith("14.png"):
        about = {**answer._asdict(), "pixels": answer.pixels.shape}
        os.write(3, json.dumps(about).encode() + b"\\nhalf of it")
        os._exit(3)
    return answer
decoder.perform = perform""",
    )
    # The descriptor 3 is the first that the process opens: its copy of the standard output.
    answers = run(album[:5], Order(size=8), 1)
    assert [a.error for a in answers] == ["", "", "its decoder ended with exit code 3", "", ""]


def test_images_that_end_a_decoder_once_are_read_by_the_next(monkeypatch, album):
    dummy(
        monkeypatch,
        """
import os
real = decoder.perform
def perform(path, order):
    if not os.path.exists(path + ".seen"):
        open(path + ".seen", "w").close()
        os._exit(9)
    return real(path, order)
decoder.perform = perform""",
    )
    assert [a.error for a in run(album[:4], HEAD, 1, chunk=4)] == [""] * 4


def test_leaving_early_leaves_no_process(album):
    with Decoders(2) as decoders:
        answers = decoders.run([str(path) for path in album] * 50, Order(), 1)
        next(answers)
        pids = [process.pid for process in decoders._all]
        assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not [t for t in threading.enumerate() if t.name.startswith("harmonium-decoder")]


def test_few_images_need_few_processes(album):
    with Decoders(3) as decoders:
        list(decoders.run([str(path) for path in album], HEAD, len(album)))
        assert len(decoders._all) == 1


def test_a_decoder_that_cannot_start_is_an_error(monkeypatch, album):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="cannot be started.*exit code 1"):
        run(album, HEAD, 2)
