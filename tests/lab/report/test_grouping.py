"""Which runs are averaged: those that differ in the seed alone, and each seed once."""

import json
import shutil
from pathlib import Path

import pytest
from fake_runs import fake_run

from modenorm.lab.report import Page, read_records, render
from modenorm.lab.report.tables import group


def test_experiments_and_variants_are_named_by_what_differs(tmp_path):
    for batch in (32, 128):
        fake_run(tmp_path, norm="bn", batch=batch)
        for gate in ("linear", "standardized"):
            fake_run(tmp_path, norm="mn", modes=2, batch=batch, gate=gate)
    fake_run(tmp_path, norm="bn", batch=32, modes=7, seed=1)  # batch norm has no modes
    small, large = group(read_records([tmp_path]))
    assert [small.title, large.title] == [
        "lenet on builtin, batch 32",
        "lenet on builtin, batch 128",
    ]
    labels = ["BN", "MN K=2, gate linear", "MN K=2, gate standardized"]
    assert [variant.label for variant in small.variants] == labels
    assert [len(variant.runs) for variant in small.variants] == [2, 1, 1]
    assert len(small.sentences()) == 2


def change_json(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_folders_of_one_name_are_kept_apart(tmp_path):
    fake_run(tmp_path, dataset="folder:p/imgs")
    fake_run(tmp_path, dataset="folder:q/imgs")
    experiments = group(read_records([tmp_path]))
    titles = [f"lenet on imgs, dataset folder:{place}/imgs" for place in "pq"]
    assert [experiment.title for experiment in experiments] == titles
    assert [str(e.variants[0].mean("final_error").n) for e in experiments] == ["1", "1"]


@pytest.mark.parametrize("name", ["train_images", "classes"])
def test_a_folder_that_changed_is_another(tmp_path, name):
    sizes = {"train_images": 100, "classes": 10}
    for seed, count in enumerate([100, 100, 120]):
        path = fake_run(tmp_path, dataset="folder:imgs", seed=seed)
        change_json(path / "result.json", **sizes | {name: count})
    fake_run(tmp_path, dataset="folder:imgs", seed=3, done=False)  # has not told its data's size
    first, second = group(read_records([tmp_path]))
    assert [first.title, second.title] == [f"lenet on imgs, {name} {n}" for n in (100, 120)]
    assert [len(e.variants[0].runs) for e in (first, second)] == [3, 1]


def test_a_copied_run_counts_once(tmp_path):
    runs = tmp_path / "runs"
    for seed in range(3):
        fake_run(runs, norm="bn", seed=seed)
        fake_run(runs, norm="mn", modes=3, seed=seed)
    one = next(runs.glob("*-mn3-*-s1-*"))
    shutil.copytree(one, runs / "copy")
    shutil.copytree(one, runs / "a-copy-that-is-not-done")
    (runs / "a-copy-that-is-not-done" / "done").unlink()
    (experiment,) = group(read_records([runs]))
    bn, mn = experiment.variants
    assert bn.repeated == []
    assert [run.config["seed"] for run in mn.runs] == [0, 1, 2]
    assert all(run.state == "done" for run in mn.runs)
    assert len(mn.repeated) == 2
    html = render(read_records([runs]), Page())
    assert "Repeated runs of MN K=3, which count in no average" in html
    assert str(runs / "a-copy-that-is-not-done") in html


def test_a_setting_that_was_added_later_has_its_default(tmp_path):
    old = fake_run(tmp_path, norm="mn", seed=1)
    fake_run(tmp_path, norm="mn", seed=2)
    config = json.loads((old / "config.json").read_text())
    del config["sparsity"], config["sync"], config["compile"]
    (old / "config.json").write_text(json.dumps(config))
    ((variant,),) = [e.variants for e in group(read_records([tmp_path]))]
    assert len(variant.runs) == 2
