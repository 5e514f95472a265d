"""The recipe of Table 4: on ILSVRC12 or a stand-in, recognised and labelled, by one rank or two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from modenorm.lab.data.folder import IMAGENETTE, recognise
from modenorm.lab.experiments import TABLES, summarize, update
from modenorm.lab.experiments.collect import line, read_lines
from modenorm.lab.experiments.paper import dataset_name, located, settings_key
from modenorm.lab.experiments.plan import make_plan, total_steps
from modenorm.lab.experiments.summary import rows
from modenorm.lab.report.records import read_record
from modenorm.lab.report.tables import group
from modenorm.lab.training import find_runs

SHORT = """
import dataclasses, sys
import torch
from modenorm.lab import cli
from modenorm.lab.experiments import TABLES

torch.set_num_threads(1)
short = {"batch": 6, "total": 1, "milestones": (), "image_size": 32}
TABLES["table4"] = [
    dataclasses.replace(cell, settings={**cell.settings, **short}) for cell in TABLES["table4"]
]
if __name__ == "__main__":
    cli.main()
"""
RESULT = {
    "final_error": 50.0, "top_error": 40.0, "top5_error": 10.0, "domain_errors": {},
    "samples_seen": 1, "seconds": 1.0, "torch": "2", "commit": "c", "date": "2026-01-01",
    "device": "X",
}  # fmt: skip


def write_classes(folder: Path, classes: list[str]) -> Path:
    for name in classes:
        for part in ("train", "val"):
            (folder / part / name).mkdir(parents=True)
    return folder


def write_jpegs(folder: Path) -> Path:
    write_classes(folder, ["cat", "dog"])
    for number in range(14):
        part, label = ("train", "val")[number % 3 == 0], ("cat", "dog")[number % 2]
        colour = (17 * number, 200 - 11 * number, 90)
        Image.new("RGB", (48 + number, 40), colour).save(folder / part / label / f"{number}.jpg")
    return folder


SYNSETS = [f"n{number:08}" for number in range(1000)]


@pytest.mark.parametrize(
    ("classes", "name"),
    [
        (SYNSETS, "imagenet"),
        (SYNSETS[:200], "tiny-imagenet-200"),
        (sorted(IMAGENETTE), "imagenette"),
        (SYNSETS[:10], "stand-in"),
        (["cat", "dog"], "stand-in"),
        ([f"class {number}" for number in range(1000)], "stand-in"),
    ],
)
def test_folders_are_recognised_by_their_classes(
    tmp_path: Path, classes: list[str], name: str
) -> None:
    folder = write_classes(tmp_path / "anything", classes)
    assert recognise(folder) == name
    cells = [cell for cell in TABLES["table4"] if dataset_name(cell.config(0)) == name]
    config = located(cells[0].config(0), folder)
    assert config.dataset == f"folder:{name}={folder}"
    assert settings_key(config) == cells[0].key
    assert cells[0].stand_in == (name != "imagenet") == ("a stand-in" in cells[0].group)
    plan = make_plan(
        ["table4"], range(2), data=folder, runs_dir=tmp_path / "runs", results=tmp_path
    )
    assert [run.config.norm for run in plan.runs["missing"]] == ["bn", "mn", "bn", "mn"]
    assert plan.without_data == {}


def test_the_recipe() -> None:
    for cell in TABLES["table4"]:
        config = cell.config(0)
        assert (config.model, config.batch, config.total) == ("resnet18", 256, 90)
        assert (config.dtype, config.channels_last, config.crop) == ("bfloat16", True, "resized")
    first = TABLES["table4"][0].config(0)
    assert first.stream
    assert first.image_size == 224
    assert total_steps(first) == 450_410


def test_a_wrong_imagenet_is_no_ilsvrc12() -> None:
    """Two classes in a folder called imagenet: kept, but not put beside the paper's numbers."""
    cell = TABLES["table4"][0]
    lines = []
    for seed, classes in ((0, 2), (1, 1000)):
        config = cell.config(seed)
        lines.append(
            line("table4", config, RESULT | {"run": config.run_id, "classes": classes}, [])
        )
    assert [each["stand_in"] for each in lines] == [True, False]
    summary = summarize([cell], lines)[0]
    assert summary.seeds == (1,)
    assert "top-5 10.00" in rows([summary])[0][4]


def test_results_of_another_folder_are_not_taken_for_those_of_this_one(tmp_path: Path) -> None:
    (cell,) = [c for c in TABLES["table4"] if "another" in c.group and c.label == "BN"]
    first, second = (write_jpegs(tmp_path / name) for name in ("first", "second"))
    config = located(cell.config(0), first)
    about = {"run": config.run_id, "classes": 2, "train_images": 9}
    update(tmp_path / "table4.jsonl", [line("table4", config, RESULT | about, [])], [cell])

    def done(data: Path) -> int:
        folders = {"data": data, "runs_dir": tmp_path / "runs", "results": tmp_path}
        return len(make_plan(["table4"], range(1), **folders).runs["done"])

    assert done(first) == done(tmp_path / "nowhere") == 1
    next((second / "train").rglob("*.jpg")).unlink()
    with pytest.raises(
        ValueError, match=r"table4\.jsonl is of an image folder with 2 classes and 9"
    ):
        done(second)


def test_end_to_end_on_two_ranks(tmp_path: Path) -> None:
    folder = write_jpegs(tmp_path / "pictures")
    (tmp_path / "short.py").write_text(SHORT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(tmp_path / "short.py"), "reproduce", "table4"]
    command += ["--data", str(folder), "--seeds", "1", "--device", "cpu", "--workers", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ResNet18 on another image folder (a stand-in)") == 1  # rank 0 alone
    lines = read_lines(tmp_path / "results" / "table4.jsonl")
    assert [each["norm"] for each in lines] == ["bn", "mn"]
    for each in lines:
        assert each["stand_in"]
        assert (each["dataset"], each["classes"], each["train_images"]) == ("stand-in", 2, 9)
        assert (each["ranks"], each["samples_seen"], each["top5_error"]) == (2, 6, 0.0)
    records = [read_record(run.path) for run in find_runs(tmp_path / "runs")]
    (experiment,) = group(records)
    assert experiment.title == "resnet18 on stand-in (a stand-in for ILSVRC12)"
