"""The demo on a small part of its data: it trains, tells, draws, and goes on where it stopped."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from modenorm.lab.cli import app
from modenorm.lab.cli import demo as demo_cli
from modenorm.lab.cli import report as report_cli
from modenorm.lab.data import DataSet, ImageSet, builtin
from modenorm.lab.demo import NORMS, demo_configs, separation
from modenorm.lab.report import Gallery, page
from modenorm.lab.training import TrainConfig, train

torch.set_num_threads(1)


def part(images: ImageSet, count: int) -> ImageSet:
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count]
    return ImageSet(
        images.images[chosen],
        images.labels[chosen],
        images.domains[chosen],
        images.classes,
        images.domain_names,
    )


@pytest.fixture(scope="module")
def small() -> DataSet:
    whole = builtin.make()
    return DataSet("builtin", part(whole.train, 400), part(whole.test, 200))


@pytest.fixture
def invoke(small, monkeypatch):
    monkeypatch.setattr(demo_cli, "load", lambda name: small)
    monkeypatch.setattr(report_cli, "load", lambda *args, **kwargs: small)

    def run(*arguments):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    return run


def test_the_demo_ends_with_a_table_and_a_page(invoke, tmp_path):
    output = invoke("demo", "-o", tmp_path, "--epochs", 2, "--device", "cpu")
    for words in ("Test error in percent", "MN K=4", "MGN K=2", "signs", "can be chance"):
        assert words in output
    html = (tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])
    assert len(data["runs"]) == len(NORMS)
    assert len(data["galleries"]) == 3
    assert html.count('src="data:image/webp') == 4
    words = "all take a minute or two on a laptop; the paper&#39;s see 3,5"
    assert f"sees 800 images, so that {words}" in html
    for run in data["runs"]:
        result = json.loads((tmp_path / "runs" / run["name"] / "result.json").read_text())
        assert run["final_error"] == result["final_error"]
        assert f"{result['final_error']:.2f}" in output

    again = invoke("demo", "-o", tmp_path, "--epochs", 2, "--device", "cpu")
    assert (
        json.loads(
            re.search(r'id="data">(.*?)</script>', (tmp_path / "report.html").read_text(), re.S)[1]
        )
        == data
    )
    assert "samples/s" not in again  # nothing was trained again

    (run,) = (tmp_path / "runs").glob("*mn4*")
    output = invoke("modes", run, "-o", tmp_path / "modes.png", "--json", tmp_path / "modes.json")
    assert "stage1.norm" in output
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")
    layers = json.loads((tmp_path / "modes.json").read_text())["layers"]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["modes"]
    for layer in layers:
        assert layer["shares"] == pytest.approx(last[layer["name"]]["shares"], abs=1e-3)
        assert layer["domain_information"] >= 0
    checkpoint = run / "checkpoint.safetensors"
    one = tmp_path / "pages" / "one.html"
    invoke("modes", checkpoint, "--layer", "stage2.norm", "--count", 5, "-o", one)
    shown = json.loads(re.search(r'id="data">(.*?)</script>', one.read_text(), re.S)[1])
    (layer,) = shown["galleries"][0]["layers"]
    assert layer["name"] == "stage2.norm"
    assert [len(mode["claims"]) for mode in layer["modes"]] == [5] * 4


def test_tables_need_no_plotly(invoke, small, tmp_path, monkeypatch):
    config = TrainConfig(model="lenet", dataset="builtin", norm="mn", batch=32, total=1)
    monkeypatch.setattr(demo_cli, "demo_configs", lambda *args: [config])
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    monkeypatch.setattr(page, "plotly_script", page.plotly_script.__wrapped__)
    monkeypatch.setattr(demo_cli, "plotly_script", page.plotly_script)
    needed = "the page needs the package plotly: pip install plotly"
    result = CliRunner().invoke(app, ["demo", "-o", str(tmp_path), "--device", "cpu"])
    assert needed in str(result.exception)
    told, _, shown = result.output.partition("Drawing")
    assert f"There will be tables alone: {needed}" in told
    assert "Test error in percent" in shown
    assert "Share of each mode in each domain" in shown

    run = tmp_path / "runs" / config.run_id
    output = tmp_path / "modes.html"
    result = CliRunner().invoke(app, ["modes", str(run), "-o", str(output)])
    assert needed in str(result.exception)
    assert "stage1.norm" in result.output
    assert not output.exists()


def test_modes_of_a_streamed_run_are_those_of_its_evaluation(tmp_path):
    """Wide images with bright sides: another cut than the evaluation's has other gates."""
    folder, rng = tmp_path / "pictures", np.random.default_rng(0)
    for number, place in enumerate(["train/a", "train/b", "val/a", "val/b", "val/b"]):
        (folder / place).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(256, size=(20, 30 + number, 3)).astype(np.uint8)
        pixels[:, :4] = pixels[:2] = 255
        Image.fromarray(pixels).save(folder / place / f"{number}.png")
    config = TrainConfig(
        model="nin",
        dataset=f"folder:{folder}",
        norm="mn",
        stream=True,
        crop="resized",
        image_size=16,
        batch=2,
        total=2,
        augment=True,
    )
    train(config, tmp_path / "runs", workers=0, device="cpu")
    (folder / "train" / "a" / "0.png").write_bytes(b"not to be decoded")
    run = tmp_path / "runs" / config.run_id
    arguments = [run, "-o", tmp_path / "modes.html", "--json", tmp_path / "modes.json"]
    result = CliRunner().invoke(app, ["modes", "--count", "2", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert not (folder / ".modenorm-cache").exists()
    layers = json.loads((tmp_path / "modes.json").read_text())["layers"]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["modes"]
    for layer in layers:
        # shares are rounded to 4 places in the metrics
        assert layer["shares"] == pytest.approx(last[layer["name"]]["shares"], abs=1e-4)
    gallery = Gallery.load(run)
    assert (gallery.num_images, gallery.tile) == (3, 16)
    claims = [claim for layer in gallery.layers for mode in layer.modes for claim in mode.claims]
    assert {claim.label for claim in claims} == {"a", "b"}
    assert {claim.domain for claim in claims} == {"pictures"}


def test_bad_arguments_are_told_in_a_sentence(tmp_path):
    for arguments, words in (
        (["modes", str(tmp_path), "-o", "x.gif"], "must end in .html or .png"),
        (["modes", str(tmp_path)], "is not the folder of a run with a checkpoint"),
        (["report", str(tmp_path / "none")], "is not a folder"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code != 0
        assert words in str(result.exception)


def test_the_demos_trainings_differ_in_nothing_but_the_norm():
    configs = demo_configs(seeds=(0, 1))
    assert len({config.run_id for config in configs}) == 2 * len(NORMS)
    first = configs[0]
    for config in configs:
        names = {text.split()[0] for text in first.differences(config)}
        assert names <= {"norm", "modes", "groups", "seed"}


def test_separation_names_the_mode_that_tells_most_apart():
    shares = {"a": [0.2, 0.1, 0.7], "b": [0.3, 0.6, 0.1], "c": [0.2, 0.2, 0.6]}
    assert separation(shares) == "mode 2 takes 70 % of a and 10 % of b"
    assert separation({}) == "all domains use the modes alike"
