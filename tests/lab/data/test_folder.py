import errno
import os
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from published import write_image

from modenorm.lab.data import DataError, index_folder, load
from modenorm.lab.training.sources import _describe_folder


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "val"):
        write_image(tmp_path / split / "cat" / "1.png", colour=(1, 2, 3))
        write_image(tmp_path / split / "ant" / "2.JPEG")
    write_image(tmp_path / "train" / "cat" / "3.png", colour=(4, 5, 6))
    (tmp_path / "train" / ".hidden").mkdir()
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path


def test_index_lists_without_decoding(folder):
    index = index_folder(folder)
    assert index.classes == ("ant", "cat")
    assert index.train.labels == (0, 1, 1)
    assert [path.name for path in index.train.paths] == ["2.JPEG", "1.png", "3.png"]
    assert len(index.paths) == 5


@pytest.mark.parametrize("form", ["folder:{}", "{}", Path])
def test_load(folder, form):
    name = form(folder) if form is Path else form.format(folder)
    data = load(name)
    assert data.train.images.shape == (3, 3, 8, 8)
    assert data.train.images[1, :, 0, 0].tolist() == [1, 2, 3]
    assert data.test.labels.tolist() == [0, 1]
    assert data.train.classes == ("ant", "cat")
    again = load(name)
    assert torch.equal(again.train.images, data.train.images)


def test_the_name_of_a_folder(folder, monkeypatch):
    monkeypatch.chdir(folder / "train")
    for name, expected in (
        (f"folder:{folder}", folder.name),
        (f"folder:a name={folder}", "a name"),
        ("folder:..", folder.name),
        (folder, folder.name),
    ):
        data = load(name, use_cache=False)
        assert (data.name, data.test.domain_names) == (expected, (expected,))


def test_new_image_is_noticed(folder):
    load(folder)
    write_image(folder / "train" / "ant" / "4.tif")
    assert len(load(folder).train) == 4


def test_hidden_files_and_folders_are_no_images(folder):
    before = index_folder(folder)
    write_image(folder / "train" / "ant" / "._2.png")
    write_image(folder / "train" / "ant" / ".trash" / "5.png")
    assert index_folder(folder) == before


def test_linked_folders_are_followed_once(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write_image(elsewhere / "deep" / "0.png")
    ant = folder / "train" / "ant"
    (ant / "more").symlink_to(elsewhere)
    (ant / "circle").symlink_to(ant)
    (elsewhere / "deep" / "back").symlink_to(elsewhere)
    found = index_folder(folder).train
    assert found.labels == (0, 0, 1, 1)
    assert found.paths[:2] == (ant / "2.JPEG", ant / "more" / "deep" / "0.png")


def test_files_are_in_the_order_of_their_paths(folder):
    names = ("10.png", "9.png", "B.png", "a/1.png", "a.b/1.png", "a-b.png", "folder.png/1.png")
    for name in names:
        write_image(folder / "train" / "ant" / name)
    ant = folder / "train" / "ant"
    expected = sorted(ant / name for name in ("2.JPEG", *names))
    assert list(index_folder(folder).train.paths[:-2]) == expected


def test_a_class_without_training_images(folder):
    (folder / "train" / "bee").mkdir()
    (folder / "train" / "bee" / "notes.txt").write_text("not an image")
    with pytest.raises(DataError, match=r"train/bee: no images, expected some in every class"):
        index_folder(folder)


def test_a_class_without_test_images(folder):
    write_image(folder / "train" / "bee" / "1.png")
    message = r"val: no images of bee, expected some of .*: add some, or remove .*/train/bee"
    with pytest.raises(DataError, match=message):
        index_folder(folder)
    (folder / "val" / "bee").mkdir()
    with pytest.raises(DataError, match=message):
        index_folder(folder)
    write_image(folder / "val" / "bee" / "1.png")
    assert index_folder(folder).classes == ("ant", "bee", "cat")


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes and links in folders")
def test_what_is_no_file_is_named(folder):
    """Whoever opened the pipe would wait for ever."""
    path = folder / "train" / "cat" / "4.png"
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"cat/4.png is no regular file, as images are: remove"):
        index_folder(folder)
    path.unlink()
    path.symlink_to("nowhere.png")
    with pytest.raises(DataError, match=r"cat/4.png is a link to nowhere.png, which is not there"):
        index_folder(folder)
    path.unlink()
    path.symlink_to(folder / "val" / "cat" / "1.png")
    assert path in index_folder(folder).train.paths


@pytest.mark.parametrize("name", ["cat", "cat/more", "."])
def test_a_folder_that_cannot_be_listed(folder, monkeypatch, name):
    (folder / "train" / "cat" / "more").mkdir()
    scandir = os.scandir

    def refused(path):
        if Path(path) == folder / "train" / name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)  # modes of files do not stop a superuser
    with pytest.raises(DataError, match=r"train.*: cannot be listed \(Permission denied\)"):
        index_folder(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="needs names of any bytes")
def test_names_that_are_not_utf_8(folder):
    name = os.fsdecode(b"caf\xe9")
    for split in ("train", "val"):
        write_image(folder / split / name / f"{name}.png")
    data = load(folder)
    assert name in data.train.classes
    assert torch.equal(load(folder).train.images, data.train.images)
    assert "4 training" in _describe_folder(index_folder(folder), folder)


def test_tiny_imagenet_layout(tmp_path):
    for wnid in ("n01", "n02"):
        write_image(tmp_path / "train" / wnid / "images" / f"{wnid}_0.JPEG")
    write_image(tmp_path / "val" / "images" / "val_0.JPEG")
    write_image(tmp_path / "val" / "images" / "val_1.JPEG")
    table = tmp_path / "val" / "val_annotations.txt"
    table.write_text("val_0.JPEG\tn02\t0\t0\t7\t7\nval_1.JPEG\tn01\t0\t0\t7\t7\n")
    data = load(tmp_path)
    assert data.train.labels.tolist() == [0, 1]
    assert data.test.labels.tolist() == [1, 0]
    table.write_text("val_0.JPEG\tn99\t0\t0\t7\t7\n")
    with pytest.raises(DataError, match=r"val_annotations.txt: line 'val_0.*expected a file"):
        load(tmp_path)
    table.write_text("val_7.JPEG\tn01\t0\t0\t7\t7\n")
    with pytest.raises(DataError, match=r"val_7.JPEG: missing"):
        load(tmp_path)
    table.write_text("val_0.JPEG\tn02\t0\t0\t7\t7\n")
    with pytest.raises(DataError, match=r"val: no images of n01, .* or remove .*/train/n01"):
        load(tmp_path)


def test_sizes(folder):
    wide = Image.new("RGB", (40, 20), (255, 0, 0))
    wide.paste((0, 0, 255), (10, 0, 30, 20))
    wide.save(folder / "train" / "cat" / "1.png")
    with pytest.raises(DataError, match=r"1.png: 40×20 pixels, expected 8×8 .*give a size"):
        load(folder)
    images = load(folder, size=10).train.images
    assert images.shape == (3, 3, 10, 10)
    assert images[1, :, 5, 5].tolist() == [0, 0, 255]
    assert load(folder, size=12).test.images.shape == (2, 3, 12, 12)
    with pytest.raises(DataError, match="size 0"):
        load(folder, size=0)


def test_bad_images(folder):
    path = folder / "val" / "ant" / "2.JPEG"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"2.JPEG: expected a complete image"):
        load(folder)
    path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"2.JPEG: expected a complete image"):
        load(folder)


def test_bad_layouts(tmp_path):
    with pytest.raises(DataError, match=r"train: missing; expected train/<class>/"):
        load(f"folder:{tmp_path}")
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="no classes, expected one folder for each class"):
        load(tmp_path)
    write_image(tmp_path / "train" / "cat" / "1.png")
    with pytest.raises(DataError, match=r"val: missing"):
        load(tmp_path)
    (tmp_path / "val" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match=r"val: no images"):
        load(tmp_path)
    write_image(tmp_path / "val" / "dog" / "1.png")
    with pytest.raises(DataError, match=r"dog: unknown class"):
        load(tmp_path)
