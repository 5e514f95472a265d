"""Small data sets in the published formats, written here byte by byte."""

import gzip
import pickle
import struct

import numpy as np
from PIL import Image
from scipy.io import savemat


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_idx_set(folder, train=20, test=10, suffix=".gz", seed=0):
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for prefix, n in (("train", train), ("t10k", test)):
        images = rng.integers(256, size=(n, 28, 28))
        write_idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", np.arange(n) % 10)


def batch(n, key=b"labels", classes=10, seed=0):
    rng = np.random.default_rng(seed)
    data = rng.integers(256, size=(n, 3072), dtype=np.uint8)
    return {b"data": data, key: [int(v) for v in np.arange(n) % classes], b"filenames": [b"a"] * n}


def write_cifar10(folder, n=10):
    folder.mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(pickle.dumps(batch(n, seed=i), protocol=2))


def write_cifar100(folder, n=100):
    folder.mkdir(parents=True)
    for name in ("train", "test"):
        (folder / name).write_bytes(pickle.dumps(batch(n, b"fine_labels", 100), protocol=2))


def write_svhn(folder, n=10):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        images = rng.integers(256, size=(32, 32, 3, n), dtype=np.uint8)
        labels = (np.arange(n, dtype=np.uint8) % 10 + 1)[:, None]
        savemat(folder / name, {"X": images, "y": labels}, do_compression=True)


def write_image(path, size=(8, 8), colour=(10, 20, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
