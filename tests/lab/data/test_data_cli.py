import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modenorm.lab.cli import data as data_commands
from modenorm.lab.cli.data import app
from modenorm.lab.data import catalog, load, verify


@pytest.fixture
def small(root, monkeypatch):
    """The small data folder, with its own counts taken for the published ones."""
    counts = {
        "mnist": ((2,) * 10, (1,) * 10),
        "fashion_mnist": ((2,) * 10, (1,) * 10),
        "cifar10": ((5,) * 10, (1,) * 10),
        "cifar100": ((1,) * 100, (1,) * 100),
        "svhn": ((1,) * 10, (1,) * 10),
    }
    for name, (train, test) in counts.items():
        monkeypatch.setitem(catalog.PUBLISHED[name].histograms, "train", train)
        monkeypatch.setitem(catalog.PUBLISHED[name].histograms, "test", test)
    return root


def run(*args):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(arg) for arg in args])


def test_list(root):
    (root / "train_32x32.mat").unlink()
    (root / "test_32x32.mat").unlink()
    result = run("list", "--data", root)
    assert result.exit_code == 0
    lines = {line.split()[1]: line for line in result.output.splitlines() if "│" in line}
    assert "60000 + 10000" in lines["mnist"]
    assert "MNIST/raw" in lines["mnist"]
    assert "not there" in lines["svhn"]
    assert "made by code" in lines["builtin"]
    assert "without svhn" in lines["multitask"]
    file = root / "a file"
    file.touch()
    assert "is a file: --data is the folder" in run("list", "--data", file).output


def test_incomplete_sets(small):
    (part,) = small.rglob("data_batch_3")
    part.unlink()
    words = f"cifar10 is incomplete: {part}: missing; CIFAR-10 needs it beside data_batch_1"
    result = run("list", "--data", small)
    assert result.exit_code == 0
    (line,) = (line for line in result.output.splitlines() if "│ cifar10 " in line)
    assert "incomplete" in line
    assert words in result.output
    result = run("verify", "--data", small)
    assert result.exit_code == 2
    assert result.output.count("│ ok") == 8  # of the other four sets
    assert words in result.output
    assert run("verify", "mnist", "--data", small).exit_code == 0


def test_verify_as_published(small, tmp_path):
    out = tmp_path / "results" / "data.jsonl"
    result = run("verify", "--data", small, "--json", out)
    assert result.exit_code == 0, result.output
    assert result.output.count("│ ok") == 12
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["dataset"], row["split"]) for row in rows][:2] == [
        ("mnist", "train"),
        ("mnist", "test"),
    ]
    row = next(row for row in rows if row["dataset"] == "multitask" and row["split"] == "train")
    assert row["count"] == 100
    assert row["histogram"] == [2] * 10 + [5] * 10 + [1] * 10 + [2] * 10
    assert row["shape"] == [3, 32, 32]
    assert len(row["sha256"]) == 64
    assert row["problems"] == []
    assert {"date", "torch", "numpy", "commit"} <= set(row)
    assert not row["original_files"]


def test_verify_mismatch(root):
    result = run("verify", "mnist", "--data", root)
    assert result.exit_code == 2
    assert "mnist train: 20 images, expected 60000" in result.output
    assert "2 images of class 0, expected 5923 (10 classes differ)" in result.output


def test_verify_damaged_and_missing(root, tmp_path):
    (root / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"?")
    result = run("verify", "--data", root)
    assert result.exit_code == 2
    assert "train-images-idx3-ubyte.gz: expected a complete gzip" in result.output
    result = run("verify", "--data", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "no data set in" in result.output
    for name in ("what", "builtin", f"folder:{root}"):
        result = run("verify", name, "--data", root)
        assert result.exit_code == 2
        assert f"'{name}' is not a published data set: expected mnist" in result.output


def test_verify_goes_on_after_a_damaged_set(small, tmp_path):
    (small / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"?")
    (small / "train_32x32.mat").write_bytes(b"")
    result = run("verify", "--data", small, "--json", tmp_path / "found.jsonl")
    assert result.exit_code == 2
    assert result.output.count("train-images-idx3-ubyte.gz: expected a complete gzip") == 1
    assert "train_32x32.mat: expected a complete MATLAB 5 file" in result.output
    rows = map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
    assert {row["dataset"] for row in rows} == {"fashion_mnist", "cifar10", "cifar100"}


def test_verify_reads_the_files_not_the_cache(small):
    load("multitask", small)
    assert (small / ".modenorm-cache" / "mnist.safetensors").exists()
    path = small / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz"
    data, status = path.read_bytes(), path.stat()
    path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])  # a bit that the disk lost
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for name in ("mnist", "multitask"):
        assert run("verify", name, "--data", small).exit_code == 2


def test_original_files_are_recognised(small, monkeypatch):
    paths = catalog.PUBLISHED["svhn"].find(small)
    for path in paths:
        monkeypatch.setitem(catalog.PUBLISHED["svhn"].downloads, path.name, verify.md5(path))
    assert all(verdict.original_files for verdict in verify.verify("svhn", small))


def test_json_that_cannot_be_written_is_told_before_the_work(small, monkeypatch):
    monkeypatch.setattr(data_commands, "check", lambda name, data: pytest.fail("it was read"))
    result = run("verify", "svhn", "--data", small, "--json", small / "test_32x32.mat" / "x.jsonl")
    assert result.exit_code == 2
    assert "test_32x32.mat is a file, not a folder: choose another folder" in result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_json_on_a_full_disk_keeps_the_former_one(small, tmp_path, monkeypatch):
    out = tmp_path / "results" / "data.jsonl"
    out.parent.mkdir()
    out.write_text("former\n")
    path_open = Path.open

    def full(path, mode="r", *args, **kwargs):
        to = Path("/dev/full") if "w" in mode and path.parent == out.parent else path
        return path_open(to, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    result = run("verify", "svhn", "--data", small, "--json", out)
    assert result.exit_code == 2
    assert f"cannot write {out}: No space left on device" in result.output
    assert list(out.parent.iterdir()) == [out]
    assert out.read_text() == "former\n"


def test_published_counts():
    sums = {n: [sum(h) for h in p.histograms.values()] for n, p in catalog.PUBLISHED.items()}
    assert sums == {
        "mnist": [60000, 10000],
        "cifar10": [50000, 10000],
        "svhn": [73257, 26032],
        "fashion_mnist": [60000, 10000],
        "cifar100": [50000, 10000],
    }
    for published in catalog.PUBLISHED.values():
        assert {len(h) for h in published.histograms.values()} == {len(published.classes)}
