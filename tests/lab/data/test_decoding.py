"""Images decoded by processes are those of this one, and so are the errors; nothing is left."""

import os
import sys

import numpy as np
import pytest
from PIL import Image

from modenorm.lab.data import DataError, decoding

COUNT = 10


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"ß{i}.{'png' if i % 2 else 'jpg'}" for i in range(COUNT)]
    for path in paths:
        Image.fromarray(rng.integers(256, size=(12, 16, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.fixture
def processes(monkeypatch):
    """Three of them for ten images; those that were started."""
    started, start = [], decoding._start

    def recorded():
        started.append(start())
        return started[-1]

    monkeypatch.setattr(decoding, "_start", recorded)
    monkeypatch.setattr(decoding, "PER_PROCESS", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    yield started
    assert all(process.poll() is not None for process in started)


def here(files, size=None):
    """What this process decodes, or the words of its error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "PER_PROCESS", 10**9)
        return outcome(files, size)


def outcome(files, size=None):
    try:
        return decoding.decode_files(files, size)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("size", [None, 7, 20])
def test_the_same_images(files, processes, size, monkeypatch):
    expected = here(files, size)
    assert not processes
    monkeypatch.setattr(decoding, "open_image", only(files[0]))
    assert np.array_equal(decoding.decode_files(files, size), expected)
    assert len(processes) == 3


def only(first):
    """Decodes one file: the others are up to the processes."""

    def open_image(path, size):
        assert path == first
        return decoding.decoding_process.open_image(path, size)

    return open_image


@pytest.mark.parametrize("wrong", [(1,), (4, 8), (9,), (3, 4, 9)])
@pytest.mark.parametrize("kind", ["no image", "cut off", "other size", "missing"])
def test_the_first_file_that_is_not_right(files, processes, kind, wrong):
    for i in wrong:
        if kind == "missing":
            files[i].unlink()
        elif kind == "other size":
            Image.new("RGB", (9, 8)).save(files[i])
        else:
            whole = files[i].read_bytes()
            files[i].write_bytes(b"no image" if kind == "no image" else whole[: len(whole) // 2])
    found = outcome(files)
    assert len(processes) == 3
    assert found == here(files)
    assert found.startswith(f"{files[wrong[0]]}: ")


def test_processes_that_end_early(files, processes, monkeypatch):
    """What they leave is decoded here."""
    expected = here(files)
    some = "import sys; sys.stdin.read(); sys.stdout.write('x' * 1000)"  # 1.7 images
    for run in ("raise SystemExit(1)", some):
        monkeypatch.setattr(decoding, "RUN", run)
        found = decoding.decode_files(files, None)
        assert np.array_equal(found[1:3], expected[1:3])
        left = [0, 3, 6] if run == some else []
        assert [i for i in range(COUNT) if not np.array_equal(found[i], expected[i])] == left
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert np.array_equal(decoding.decode_files(files, None), expected)


@pytest.mark.parametrize("few", [0, 1])
def test_processes_that_can_not_be_started(files, processes, few, monkeypatch):
    expected, start = here(files), decoding._start

    def refused():
        if len(processes) == few:
            raise OSError("no process")
        return start()

    monkeypatch.setattr(decoding, "_start", refused)
    assert np.array_equal(decoding.decode_files(files, None), expected)
    assert len(processes) == few
    monkeypatch.setattr(sys, "executable", None)
    monkeypatch.setattr(decoding, "_start", None)
    assert np.array_equal(decoding.decode_files(files, None), expected)


def test_processes_end_with_an_interruption(files, processes, monkeypatch):
    def interrupted(process, *_):
        if process is processes[0]:
            raise KeyboardInterrupt
        return process.stdout.readinto(bytearray(1))  # until it ends

    monkeypatch.setattr(decoding, "_hand_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoding.decode_files(files, None)
    assert len(processes) == 3


@pytest.mark.parametrize(("cores", "least"), [(1, 2), (None, 2), (8, 6)])
def test_no_processes_without_need(files, monkeypatch, cores, least):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(decoding, "PER_PROCESS", least)
    monkeypatch.setattr(decoding, "_start", None)
    assert decoding.decode_files(files, None).shape == (COUNT, 3, 12, 16)


@pytest.mark.parametrize("suffix", ["png", "pgm", "tif"])
@pytest.mark.parametrize("size", [None, 256])
def test_grey_of_16_bits(tmp_path, suffix, size):
    """All values; Pillow alone takes those above 255 for white."""
    path, values = tmp_path / f"deep.{suffix}", np.arange(1 << 16, dtype=np.uint16)
    Image.fromarray(values.reshape(256, 256)).save(path)
    found = decoding.decode_files([path], size)[0]
    assert np.array_equal(found, np.broadcast_to((values >> 8).reshape(256, 256), (3, 256, 256)))


def test_floating_point_pixels_are_refused(tmp_path):
    path = tmp_path / "float.pgm"
    path.write_bytes(b"Pf\n2 2\n-1.0\n" + np.zeros(4, "<f4").tobytes())
    assert outcome([path]).startswith(f"{path}: ")
    assert "floating-point numbers" in outcome([path])
