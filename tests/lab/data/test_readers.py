import gzip
import os
import pickle
import struct
import tarfile
import zlib

import numpy as np
import pytest
import torch
from published import batch, write_cifar10, write_idx, write_idx_set, write_svhn
from scipy.io import savemat

from modenorm.lab.data import DataError, cifar, load, svhn
from modenorm.lab.data.idx import read_idx


def truncate(path, keep=0.6):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def gz_images(root):
    return root / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"


def test_idx_values_padding_and_channels(root):
    data = load("mnist", root)
    raw = read_idx(gz_images(root), 3)
    images = data.train.images
    assert images.shape == (20, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert torch.equal(images[:, 1, 2:30, 2:30], torch.tensor(raw))
    assert images.sum() == 3 * int(raw.sum())
    assert data.train.labels.tolist() == [i % 10 for i in range(20)]
    assert data.train.labels.dtype == data.train.domains.dtype == torch.int64
    assert data.train.domains.unique().tolist() == [0]
    assert len(data.test) == 10
    assert data.test.num_classes == 10


@pytest.mark.parametrize("place", ["mnist", "MNIST", "mnist/raw"])
@pytest.mark.parametrize("suffix", [".gz", ""])
def test_idx_layouts(tmp_path, place, suffix):
    write_idx_set(tmp_path / place, suffix=suffix)
    assert len(load("mnist", tmp_path).train) == 20


def test_idx_truncated_stream(root):
    truncate(gz_images(root))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: expected a complete gzip"):
        load("mnist", root)


def test_idx_not_gzip(root):
    gz_images(root).write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="complete gzip"):
        load("mnist", root)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\0\0\x08\x01" + bytes(12), "magic 00000801, expected 00000803"),
        (b"\0\0\x08\x03" + bytes(5), "truncated"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 5, 28, 28) + bytes(9), "9 bytes of data, expected"),
        (b"", "train-images-idx3-ubyte.gz: empty, expected a header and data"),
    ],
)
def test_idx_wrong_content(root, data, message):
    gz_images(root).write_bytes(gzip.compress(data))
    with pytest.raises(DataError, match=message):
        load("mnist", root)


def test_idx_wrong_counts_size_and_labels(root):
    folder = root / "MNIST" / "raw"
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.arange(19) % 10)
    with pytest.raises(DataError, match="20 images, expected 19"):
        load("mnist", root)
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.arange(20))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz: label 19, expected 0 to 9"):
        load("mnist", root)
    write_idx(gz_images(root), np.zeros((20, 30, 28)))
    with pytest.raises(DataError, match=r"\(30, 28\) pixels, expected \(28, 28\)"):
        load("mnist", root)
    write_idx(gz_images(root), np.zeros((0, 28, 28)))
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.zeros(0))
    with pytest.raises(DataError, match="no images"):
        load("mnist", root)


def test_missing_file_and_missing_set(root, tmp_path_factory):
    (root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz: missing; MNIST needs it"):
        load("mnist", root)
    with pytest.raises(DataError, match=r"no CIFAR-10 in .*data_batch_1 or .*cifar-10-python"):
        load("cifar10", tmp_path_factory.mktemp("empty"))


def test_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(DataError, match=r"'mnits': expected mnist, .*builtin or folder:PATH"):
        load("mnits", tmp_path)


def test_cifar_values(root):
    data = load("cifar10", root)
    expected = batch(10, seed=1)[b"data"].reshape(10, 3, 32, 32)
    assert torch.equal(data.train.images[10:20], torch.tensor(expected))
    assert len(data.train) == 50
    assert data.train.classes[0] == "airplane"
    assert load("cifar100", root).train.num_classes == 100


def python2_batch(n):
    """A batch as Python 2 and an early numpy wrote them: byte strings, protocol 2."""
    values = np.random.default_rng(0).integers(256, size=(n, 3072), dtype=np.uint8)
    data = values.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + b"(K\x01K" + bytes([n]) + b"M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + b"T" + struct.pack("<I", len(data)) + data + b"tb"
    )  # fmt: skip
    labels = b"](" + b"".join(b"K" + bytes([i % 10]) for i in range(n)) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + labels + b"u.", values


def test_cifar_reads_what_python_2_wrote(tmp_path):
    data, values = python2_batch(12)
    images, labels = cifar.read_batch(data, tmp_path, 10)
    assert np.array_equal(images.reshape(12, 3072), values)
    assert labels.tolist() == [i % 10 for i in range(12)]


def test_cifar_reads_fortran_order(tmp_path):
    content = batch(4)
    content[b"data"] = np.asfortranarray(content[b"data"])
    images, _ = cifar.read_batch(pickle.dumps(content, protocol=2), tmp_path, 10)
    assert np.array_equal(images.reshape(4, 3072), content[b"data"])


def test_cifar_from_the_published_archive(tmp_path):
    write_cifar10(tmp_path / "unpacked" / "cifar-10-batches-py")
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "unpacked" / "cifar-10-batches-py", "cifar-10-batches-py")
    packed, unpacked = load("cifar10", tmp_path / "data"), load("cifar10", tmp_path / "unpacked")
    assert torch.equal(packed.train.images, unpacked.train.images)
    assert torch.equal(packed.test.labels, unpacked.test.labels)
    truncate(tmp_path / "data" / "cifar-10-python.tar.gz")
    with pytest.raises(DataError, match=r"cifar-10-python.tar.gz: expected a complete tar.gz"):
        load("cifar10", tmp_path / "data")


def test_cifar_archive_of_no_kind_is_refused_in_one_line(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match=r"^[^\n]*expected a complete tar.gz archive[^\n]*\)$"):
        load("cifar10", tmp_path)


def test_cifar_archive_without_a_batch(tmp_path):
    write_cifar10(tmp_path / "b")
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "b" / "data_batch_1", "cifar-10-batches-py/data_batch_1")
    with pytest.raises(DataError, match=r"data_batch_2: missing from the archive"):
        load("cifar10", tmp_path)


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "make",
    [lambda p: Evil(os.mkdir, str(p)), lambda p: Evil(eval, f"__import__('os').mkdir('{p}')")],
)
def test_cifar_pickle_that_runs_code_is_refused(tmp_path, protocol, make):
    target = tmp_path / "made"
    data = pickle.dumps({b"data": make(target), b"labels": [0]}, protocol=protocol)
    with pytest.raises(DataError, match="refused to unpickle"):
        cifar.read_batch(data, tmp_path, 10)
    assert not target.exists()


@pytest.mark.parametrize(
    "data",
    [
        # Changing a stand-in itself: BUILD on the class that the pickle names.
        b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.",
        b"\x80\x02c_codecs\nencode\n}U\x01aK\x01sb.",
        b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
        b"\x80\x02}(U\x04data",
        b"",
        b"garbage",
    ],
)
def test_cifar_odd_pickles_are_refused(tmp_path, data):
    before = dict(vars(cifar._Array)), dict(vars(cifar._Bytes))
    with pytest.raises(DataError, match="refused to unpickle"):
        cifar.unpickle(data, tmp_path)
    assert (dict(vars(cifar._Array)), dict(vars(cifar._Bytes))) == before


def test_cifar_every_truncation_is_refused(tmp_path):
    data = pickle.dumps(batch(1), protocol=2)
    for length in range(0, len(data), 97):
        with pytest.raises(DataError):
            cifar.read_batch(data[:length], tmp_path, 10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "a pickled list, expected a dict"),
        ({b"labels": [1]}, r"expected data of shape \(N, 3072\)"),
        ({b"data": np.zeros((2, 5), np.uint8), b"labels": [1, 2]}, "3072"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "list of integers 'labels'"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "2 images, expected 1"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]}, "label 10, expected 0 to 9"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10**30]}, "data_batch_1: label 1000"),
        ({b"data": np.zeros((2, 3072), np.float32), b"labels": [1, 1]}, "array of type"),
    ],
)
def test_cifar_wrong_content(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        cifar.read_batch(pickle.dumps(content, protocol=2), tmp_path / "data_batch_1", 10)


def test_svhn_values_and_label_ten(tmp_path):
    write_svhn(tmp_path / "svhn")
    data = load("svhn", tmp_path)
    assert data.train.images.shape == (10, 3, 32, 32)
    assert data.train.images.is_contiguous()
    assert data.train.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.95])
def test_svhn_truncated(root, keep):
    truncate(root / "train_32x32.mat", keep)
    with pytest.raises(DataError, match=r"train_32x32.mat: expected"):
        load("svhn", root)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "expected the arrays X and y"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1))}, "X is float64"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1))}, "2 images, expected 3"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.zeros((2, 1))}, "label 0, expected 1"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full((2, 1), 11)}, "label 11, expect"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full((2, 1), 1.5)}, "label 1.5, exp"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full((2, 1), np.nan)}, "label nan, exp"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": ["a", "b"]}, "expected the arrays X"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": {"a": 1}}, "expected the arrays X"),
    ],
)
def test_svhn_wrong_content(root, content, message):
    savemat(root / "train_32x32.mat", content)
    with pytest.raises(DataError, match=message):
        load("svhn", root)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.float64])
def test_svhn_reads_what_scipy_writes(tmp_path, compressed, kind):
    images = np.arange(32 * 32 * 3 * 3).astype(np.uint8).reshape(32, 32, 3, 3)
    labels = np.array([[10], [1], [9]], kind)
    content = {"about": "a text", "X": images, "y": labels, "cells": np.array(["a", 1], object)}
    savemat(tmp_path / "a.mat", content, do_compression=compressed)
    read, digits = svhn._read_mat(tmp_path / "a.mat", 10)
    assert np.array_equal(read, images.transpose(3, 2, 0, 1))
    assert digits.tolist() == [0, 1, 9]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("big", [b"\x02\x8d", b"\xff\xff", b"\x08\x00", b"\x03\x00"])
def test_svhn_damaged_types_are_refused(root, compressed, big):
    content = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((2, 1))}
    path = root / "train_32x32.mat"
    savemat(path, content)
    data = bytearray(path.read_bytes())
    assert data[184:186] == b"\2\0"  # the type of X's values: bytes
    data[184:186] = big
    if compressed:
        size = 8 + struct.unpack_from("<I", data, 132)[0]
        packed = zlib.compress(data[128 : 128 + size])
        data[128 : 128 + size] = struct.pack("<II", 15, len(packed)) + packed
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train_32x32.mat: expected a complete MATLAB 5 file"):
        load("svhn", root)


def test_multitask_mixture(root):
    data = load("multitask", root)
    train = data.train
    assert train.domain_names == ("mnist", "cifar10", "svhn", "fashion_mnist")
    assert train.num_classes == 40
    assert train.classes[10] == "cifar10/airplane"
    assert train.domains.bincount().tolist() == [20, 50, 10, 20]
    start = 0
    for number, name in enumerate(train.domain_names):
        part = load(name, root).train
        rows = slice(start, start + len(part))
        assert torch.equal(train.images[rows], part.images)
        assert torch.equal(train.labels[rows], part.labels + 10 * number)
        assert train.domains[rows].unique().tolist() == [number]
        start += len(part)
