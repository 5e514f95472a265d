import errno
import os

import pytest
import torch
from published import write_idx_set

from modenorm.lab.data import cache, idx, load


@pytest.fixture
def reads(root, monkeypatch):
    """The data folder and a list that grows with every file decoded."""
    calls = []
    original = idx.read_idx
    monkeypatch.setattr(idx, "read_idx", lambda *args: calls.append(args[0]) or original(*args))
    return root, calls


def stored(root):
    return root / cache.FOLDER / "mnist.safetensors"


def test_second_load_decodes_nothing(reads):
    root, calls = reads
    first = load("mnist", root)
    assert len(calls) == 4
    second = load("mnist", root)
    assert len(calls) == 4
    assert torch.equal(first.train.images, second.train.images)
    assert torch.equal(first.test.labels, second.test.labels)
    assert [p.name for p in stored(root).parent.iterdir()] == ["mnist.safetensors"]


def test_changed_source_is_noticed(reads):
    root, calls = reads
    load("mnist", root)
    folder = root / "MNIST" / "raw"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    write_idx_set(folder, train=30)
    assert len(load("mnist", root).train) == 30
    assert len(calls) == 8


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "garbage"])
def test_damaged_cache_is_rebuilt(reads, damage):
    root, calls = reads
    expected = load("mnist", root).train.images.clone()
    data = bytearray(stored(root).read_bytes())
    if damage == "flip":
        data[-100] ^= 1
    content = {"truncate": data[: len(data) // 2], "empty": b"", "garbage": b"x" * 99}
    stored(root).unlink()
    stored(root).write_bytes(content.get(damage, data))
    assert torch.equal(load("mnist", root).train.images, expected)
    assert len(calls) == 8
    load("mnist", root)
    assert len(calls) == 8


def test_changing_loaded_images_leaves_the_cache(root):
    load("cifar10", root)
    data = load("cifar10", root)
    before = data.train.images.clone()
    data.train.images.fill_(7)
    assert torch.equal(load("cifar10", root).train.images, before)


def test_unwritable_folder_only_warns(root):
    (root / cache.FOLDER).write_text("a file where the folder should be")
    with pytest.warns(cache.CacheWarning, match=r"mnist.safetensors: data set not cached"):
        assert len(load("mnist", root).train) == 20


def test_full_disk_only_warns_and_leaves_nothing(root, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "save_file", full)
    with pytest.warns(cache.CacheWarning, match="No space left"):
        assert len(load("mnist", root).train) == 20
    assert list((root / cache.FOLDER).iterdir()) == []


def test_without_cache(root):
    load("mnist", root, use_cache=False)
    assert not (root / cache.FOLDER).exists()
