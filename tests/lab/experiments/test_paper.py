import json
from collections import Counter
from pathlib import Path

import pytest

from modenorm.lab.data.catalog import MULTITASK, PUBLISHED
from modenorm.lab.experiments import TABLES, configs
from modenorm.lab.experiments.paper import (
    CITED,
    PAPER_TABLES,
    TRAIN_IMAGES,
    dataset_name,
    located,
    settings_key,
)
from modenorm.lab.experiments.plan import total_steps
from modenorm.lab.experiments.published import published_numbers
from modenorm.lab.report.tables import settings_of

PUBLISHED_ERRORS = {
    "table1": "26.91 28.87 27.31 23.16 24.25 25.12",
    "table2": "33.40 32.80 32.15 31.30 31.98 29.05 28.60 26.83 30.38 28.70 27.63 26.00",
    "table3": "8.82 8.42 32.30 31.66 8.28 7.79 31.15 30.06 8.44 7.99 31.56 30.53",
    "table4": "30.25 30.07",
    "table5": "26.34 31.15 26.95 25.29 25.04 24.88 26.51 29.00 28.98 26.18 24.29 25.33",
    "extra": "28.75 7.73",
}
PUBLISHED_SDS = {
    "table1": "1.08 2.28 0.71 1.23 0.71 1.48",
    "table2": "0.75 1.59 1.10 1.65 1.53 1.51 1.45 1.34 0.60 0.68 0.45 1.68",
    "table5": "1.82 3.45 2.51 1.31 1.88 1.24 1.15 1.85 1.32 1.86 1.82 1.33",
}


@pytest.mark.parametrize("table", PAPER_TABLES)
def test_every_published_number_is_there_once(table):
    errors = [f"{cell.error:.2f}" for cell in TABLES[table] if cell.error is not None]
    sds = [f"{cell.sd:.2f}" for cell in TABLES[table] if cell.sd is not None]
    assert errors == PUBLISHED_ERRORS[table].split()
    assert sds == PUBLISHED_SDS.get(table, "").split()


def test_numbers_of_cells():
    counts = {table: len(cells) for table, cells in PAPER_TABLES.items()}
    assert counts == {
        "table1": 6, "table2": 12, "table3": 12, "table4": 8, "table5": 12, "extra": 4,
    }  # fmt: skip
    assert [cell.top5 for cell in TABLES["table4"]] == [10.90, 10.65, *[None] * 6]
    assert [cited.error for cited in CITED] == [8.81, 8.75]


@pytest.mark.parametrize("table", TABLES)
def test_trainings_are_valid_and_differ(table):
    found = configs(table, range(5))
    assert len({config.run_id for config in found}) == len(found) == 5 * len(TABLES[table])
    assert [config.seed for config in found[: len(TABLES[table])]] == [0] * len(TABLES[table])
    assert all(cell.table == table for cell in TABLES[table])
    groups = {cell.group for cell in TABLES[table]}
    labels = [(cell.group, cell.label) for cell in TABLES[table]]
    assert len(set(labels)) == len(labels)
    assert {group for group, label in labels if label == "BN"} == groups


def test_one_training_belongs_to_two_tables():
    keys = Counter(cell.key for cells in PAPER_TABLES.values() for cell in cells)
    (shared,) = [key for key, count in keys.items() if count > 1]
    assert [c.group for c in TABLES["extra"] if c.key == shared] == ["ResNet20 on CIFAR-10"]


def test_norms_of_a_table_differ_in_nothing_but_the_norm():
    norm = {"norm", "modes", "sparsity", "groups", "where", "gate", "variance"}
    for cells in TABLES.values():
        groups = {}
        for cell in cells:
            common = {name: v for name, v in cell.settings.items() if name not in norm}
            assert groups.setdefault(cell.group, common) == common


def test_lengths_in_steps():
    cells = [cell for found in TABLES.values() for cell in found]
    known = [cell for cell in cells if cell.settings["dataset"] != "folder:stand-in"]
    steps = {cell.group: total_steps(cell.config(0)) for cell in known}
    assert steps["LeNet, N=128"] == 27_343
    assert steps["LeNet, N=4"] == steps["LeNet, N=16"] == 50_000
    assert steps["VGG13 on CIFAR-100"] == 39_062
    assert steps["ResNet20 on CIFAR-10"] == 62_500


def test_numbers_of_images():
    sizes = {name: sum(PUBLISHED[name].histograms["train"]) for name in PUBLISHED}
    assert TRAIN_IMAGES["multitask"] == sum(sizes[name] for name in MULTITASK)
    assert TRAIN_IMAGES["cifar10"] == sizes["cifar10"]
    assert TRAIN_IMAGES["cifar100"] == sizes["cifar100"]


def test_image_folders_lie_in_the_folder_of_data():
    config = TABLES["table4"][0].config(0)
    there = located(config, Path("/some/where"))
    assert there.dataset == "folder:/some/where/imagenet"
    assert dataset_name(there) == "imagenet"
    assert settings_key(there) == settings_key(config)
    lenet = TABLES["table1"][0].config(0)
    assert located(lenet, Path("/some/where")) == lenet


def test_the_search_for_the_level_stands_beside_table_1():
    published = {cell.label: cell.error for cell in TABLES["table1"]}
    for cell in TABLES["level"]:
        assert cell.error == published[cell.label]


def test_options_share_the_trainings_of_the_paper():
    paper = {cell.key for cells in PAPER_TABLES.values() for cell in cells}
    shared = [cell.label for cell in TABLES["options"] if cell.key in paper]
    assert shared == ["BN", "MN K=2", "MN K=4", "MN K=6", *["BN", "MGN K=2"] * 3]


def test_published_numbers_find_their_runs():
    numbers = published_numbers()
    assert len(numbers) == sum(len(errors.split()) for errors in PUBLISHED_ERRORS.values())
    for cell in (c for cells in PAPER_TABLES.values() for c in cells):
        config = located(cell.config(3), Path("/some/where"))
        settings = settings_of(json.loads(config.to_json()))
        found = {number.error for number in numbers if number.belongs_to(settings)}
        assert found == ({cell.error} - {None} or {c.error for c in shared(cell)} - {None})


def shared(cell):
    return [c for cells in PAPER_TABLES.values() for c in cells if c.key == cell.key]
