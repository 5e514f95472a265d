"""The benchmark's command, its refusal of wrong kernels, and the page built from its results."""

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import modenorm
from modenorm.lab.bench import layer, sparsity, train
from modenorm.lab.bench.page import with_tables
from modenorm.lab.bench.timing import alternating, extra
from modenorm.lab.cli import app
from modenorm.lab.cli import bench as bench_commands

ROOT = Path(__file__).parents[2]


def test_layer_command(tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "CPU_SECONDS", 0.01)
    output = tmp_path / "layer.jsonl"
    arguments = ["bench", "layer", "--shape", "4x3x5x5", "--modes", "2", "-o", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["norm"] for row in rows} == {"bn", "gn", "mn2", "mgn2", "loop2"}
    assert {row["layout"] for row in rows} == {"NCHW", "NHWC"}
    for row in rows:
        assert row["device_us"] > 0
        assert row["to_floor"] == pytest.approx(row["device_us"] / row["floor_us"])
        assert row.keys() >= {"device", "torch", "commit", "date", "gb_per_s"}


def test_chosen_norms(tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "CPU_SECONDS", 0.01)
    output = tmp_path / "layer.jsonl"
    arguments = ["bench", "layer", "--shape", "4x3x5x5", "--layout", "NCHW", "-o", str(output)]
    result = CliRunner().invoke(app, [*arguments, "--norm", "bn", "--norm", "mn3"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["norm"] for row in rows] == ["bn", "mn3"]


def test_model_command(tmp_path):
    output = tmp_path / "model.jsonl"
    arguments = ["bench", "model", "--model", "resnet18", "--batch", "2", "--size", "32"]
    arguments += ["--norm", "bn", "--norm", "mn2", "--no-compiled", "-o", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["norm"] for row in rows] == ["bn", "mn2"]
    assert rows[1]["to_bn"] == pytest.approx(rows[1]["step_us"] / rows[0]["step_us"])


def test_model_command_keeps_what_was_measured(tmp_path, monkeypatch):
    def measure(name, *, norms, compiled, **_):
        yield {"model": name, "norm": norms[0], "compiled": compiled[0], "step_us": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_commands, "measure_model", measure)
    output = tmp_path / "model.jsonl"
    arguments = ["bench", "model", "--model", "resnet18", "--no-eager", "-o", str(output)]
    assert CliRunner().invoke(app, arguments).exit_code != 0
    (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert (row["norm"], row["compiled"]) == ("bn", True)


def test_train_command(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "EVALUATION_SECONDS", 0.1)
    output = tmp_path / "train.jsonl"
    arguments = ["bench", "train", "--model", "lenet", "--batch", "4", "--parallel", "2"]
    arguments += ["--images", "40", "--steps", "48", "--rounds", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--compile", "-o", str(output)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["norm"], row["parallel"], row["batch"]) for row in rows] == [
        ("bn", 2, 4),
        ("mn2", 2, 4),
    ]
    assert "compiled, 2 side by side" in result.output.replace("\n", " ")
    for row in rows:
        assert row["compile"] is True  # on a CPU nothing is, see `compiles_on`
        assert row["images_per_s"] == pytest.approx(4e6 / row["step_us"])
        assert row["eval_us"] > 0
        assert row.keys() >= {"device", "torch", "commit", "date", "record_gates_percent"}
    assert rows[1]["speed_to_first"] == pytest.approx(rows[0]["step_us"] / rows[1]["step_us"])
    table = with_tables("<!-- table train train.jsonl --><!-- end -->", tmp_path)
    assert f"| MN K=2 | {rows[1]['step_us']:.0f} |" in table


@pytest.mark.parametrize(
    ("given", "said"),
    [((), "N=128: {:,.0f} µs a step alone"),
     (("--batch", "8", "--parallel", "3"), "N=8: {:,.0f} µs a step with 3 side by side")],
    ids=["alone", "beside"],
)  # fmt: skip
def test_step_command(tmp_path, given, said):
    output = tmp_path / "step.jsonl"
    arguments = ["bench", "step", "--model", "lenet", "--steps", "2", "--most", "3", *given]
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "-o", str(output)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    for norm in ("bn", "mn2"):
        found = [row for row in rows if row["norm"] == norm]
        times = [row["kernel_us"] for row in found]
        assert times == sorted(times, reverse=True)
        assert 0 < times[0] < sum(times) < 2 * found[0]["step_us"]
        assert f"lenet {norm}, {said.format(found[0]['step_us'])}" in result.output
    counts = {row["kernel"]: row["launches"] for row in rows if row["norm"] == "bn"}
    assert counts["aten::native_batch_norm"] == 2
    assert rows[0].keys() >= {"device", "torch", "commit", "date"}


def test_train_command_on_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "EVALUATION_SECONDS", 0.1)
    for number in range(12):
        part = "val" if number < 4 else "train"
        path = tmp_path / "images" / part / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 10), (20 * number, 80, 40)).save(path)
    output = tmp_path / "folder.jsonl"
    arguments = ["bench", "train", "--model", "lenet", "--batch", "2", "--parallel", "1"]
    arguments += ["--folder", str(tmp_path / "images"), "--size", "32", "--steps", "40"]
    arguments += ["--rounds", "1", "--device", "cpu", "-o", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["norm"], row["images"]) for row in rows] == [("bn", "images"), ("mn2", "images")]
    assert rows[1]["speed_to_first"] == pytest.approx(rows[0]["step_us"] / rows[1]["step_us"])
    table = with_tables("<!-- table train folder.jsonl --><!-- end -->", tmp_path)
    assert "files of images | MN K=2" in table


def test_sparsity_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sparsity.SECONDS, "cpu", 0.01)
    cases = [replace(case, rounds=2) for case in sparsity.SPARSITY_CASES]
    monkeypatch.setattr("modenorm.lab.cli.bench.SPARSITY_CASES", cases)
    output = tmp_path / "sparsity.jsonl"
    result = CliRunner().invoke(app, ["bench", "sparsity", "--model", "lenet", "-o", str(output)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["method"] for row in rows] == ["nothing", "entropy", "switch"]
    for row in rows:
        more = 100 * row["penalty_us"] / row["plain_us"]
        assert row["percent_of_step"] == pytest.approx(more)
    table = with_tables("<!-- table sparsity sparsity.jsonl --><!-- end -->", tmp_path)
    assert "lenet, N=128, 32², float32, MN K=8 | switch |" in table


def test_a_line_without_its_fields_is_told_of(tmp_path):
    (tmp_path / "layer.jsonl").write_text('{"shape": "1x2x3x4", "norm": "bn"}\n')
    with pytest.raises(ValueError, match=r"layer\.jsonl has a line without 'layout'"):
        with_tables("<!-- table layer layer.jsonl --><!-- end -->", tmp_path)


LAYER_ROW = {
    "shape": "1x2x3x4", "layout": "NCHW", "dtype": "float32", "norm": "mn2", "floor_us": 7.0,
    "device_us": 9.0, "device": "H", "torch": "2", "commit": "abc", "date": "2026-01-01",
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("layers", {}, r"unknown table 'layers' of bench\.jsonl: expected layer, eager"),
        ("layer", {"device": None}, r"bench\.jsonl has a line with something else"),
        ("layer", {"floor_us": "fast"}, r"bench\.jsonl has a line with something else"),
        ("layer", {"shape": 3}, r"bench\.jsonl has a line with something else"),
    ],
)
def test_odd_results_are_told_of(tmp_path, table, change, message):
    (tmp_path / "bench.jsonl").write_text(json.dumps(LAYER_ROW | change) + "\n")
    with pytest.raises(ValueError, match=message):
        with_tables(f"<!-- table {table} bench.jsonl --><!-- end -->", tmp_path)


def test_results_of_other_tensors_are_no_headline(tmp_path):
    (tmp_path / "bench.jsonl").write_text(json.dumps(LAYER_ROW) + "\n")
    page = with_tables("<!-- table headline bench.jsonl --><!-- end -->", tmp_path)
    assert page == "<!-- table headline bench.jsonl -->\n\n_not measured yet_\n\n<!-- end -->"


def test_the_floor_needs_no_batch_norm(tmp_path):
    (tmp_path / "bench.jsonl").write_text(json.dumps(LAYER_ROW) + "\n")
    page = with_tables("<!-- table layer bench.jsonl --><!-- end -->", tmp_path)
    assert "| 1×2×3×4 NCHW float32 | 7 |  |" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "--dtype", "foo"], "dtype is 'foo'; it must be one of float32, bfloat16"),
        (["model", "--model", "lenet"], "lenet needs 32×32 images, this benchmark has 224×224"),
        (["model", "--model", "resnet50", "--norm", "gn2"], "resnet50"),
        (["sync", "--shape", "1x4x1x1"], "shape is 1x4x1x1; a channel must have more than one"),
        (["model", "--batch", "-1"], "Invalid value for '--batch'"),
        (["model", "--batch", "0"], "Invalid value for '--batch'"),
        (["model", "--size", "0"], "Invalid value for '--size'"),
        (["layer", "--modes", "0"], "Invalid value for '--modes'"),
        (["sync", "--modes", "0"], "Invalid value for '--modes'"),
        (["sync", "--steps", "0"], "Invalid value for '--steps'"),
        (["sync", "--steps", "-3"], "Invalid value for '--steps'"),
    ],
)
def test_bad_values_are_told_in_a_sentence(arguments, message):
    small = ["--batch", "1"] if arguments[0] == "model" else []
    result = CliRunner().invoke(app, ["bench", arguments[0], *small, *arguments[1:]])
    assert result.exit_code != 0
    assert isinstance(result.exception, ValueError | SystemExit)
    assert message in f"{result.exception} {result.output}"


def test_train_command_refuses(tmp_path):
    for arguments, message in (
        (["--model", "alexnet"], "unknown model 'alexnet': expected lenet"),
        (["--steps", "10", "--device", "cpu"], "steps is 10, but must exceed 32"),
        (["--model", "lenet", "--size", "16"], "lenet needs 32×32 images, this benchmark has 16"),
    ):
        result = CliRunner().invoke(app, ["bench", "train", *arguments])
        assert message in str(result.exception)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    forward = modenorm.ModeNorm2d.forward
    monkeypatch.setattr(modenorm.ModeNorm2d, "forward", lambda self, x: forward(self, x) * 1.01)
    case = layer.Case((4, 3, 5, 5), "float32", "NCHW", "cpu")
    with pytest.raises(ValueError, match=r"mn2 is wrong .* error of the output is 1\.0e-02"):
        list(layer.measure(case, ["bn", "mn2"]))


def test_a_kernel_with_wrong_gradients_of_parameters_is_not_timed(monkeypatch):
    forward = modenorm.ModeNorm2d.forward

    def steeper(self, x):
        return forward(self, x) + (self.weight - self.weight.detach()).sum()

    monkeypatch.setattr(modenorm.ModeNorm2d, "forward", steeper)
    case = layer.Case((4, 3, 5, 5), "float32", "NCHW", "cpu")
    with pytest.raises(ValueError, match=r"mn2 is wrong .* of the gradients of parameters"):
        layer.check(case, "mn2")


@pytest.mark.parametrize("name", ["mn1", "mn4", "mgn2", "loop2", "bn", "gn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_norm_passes_the_check(name, dtype):
    layer.check(layer.Case((4, 6, 5, 5), dtype, "NHWC", "cpu"), name)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--shape", "4x3x5", "four sizes"),
        ("--norm", "foo2", "norm is 'foo2'; it must be one of bn, gn, mn"),
        ("--dtype", "int8", "dtype is 'int8'; it must be one of float32"),
        ("--layout", "CHWN", "layout is 'CHWN'; it must be one of NCHW, NHWC"),
    ],
)
def test_bad_options_of_a_layer(option, value, message):
    result = CliRunner().invoke(app, ["bench", "layer", option, value])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_sync_command(tmp_path):
    output = tmp_path / "sync.jsonl"
    arguments = ["bench", "sync", "--ranks", "1", "--shape", "4x3x5x5", "--steps", "2"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(output)])
    assert result.exit_code == 0, result.output
    (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert row["ranks"] == 1
    assert row["bytes"] == 4 * (2 * 7 + 2 * 6)
    assert row["shared_us"] > 0
    assert row["local_us"] > 0
    assert row.keys() >= {"device", "torch", "commit", "date", "backend"}


@pytest.mark.parametrize(
    "name", ["README.md", "docs/speed.md", "docs/scaling.md", "docs/automatic_modes_study.md"]
)
def test_pages_show_the_measured_results(name):
    page = (ROOT / name).read_text()
    assert "<!-- table" in page
    assert with_tables(page, ROOT / "results") == page


def test_pages_stay_as_they_are_without_results(tmp_path):
    page = tmp_path / "page.md"
    text = "<!-- table headline bench_layer.jsonl -->\n\nmeasured\n\n<!-- end -->\n"
    page.write_text(text)
    arguments = ["bench", "page", "--page", str(page), "--results", str(tmp_path / "nowhere")]
    result = CliRunner().invoke(app, arguments)
    assert "nowhere is not a folder" in str(result.exception)
    assert page.read_text() == text


def test_broken_results_are_named(tmp_path):
    (tmp_path / "bench_layer.jsonl").write_text('{"norm": "bn"')
    with pytest.raises(ValueError, match=r"bench_layer\.jsonl, line 1 is not JSON"):
        with_tables("<!-- table headline bench_layer.jsonl -->\n<!-- end -->\n", tmp_path)


def test_tables_are_built_from_files(tmp_path):
    row = {"shape": "2x3x4x4", "layout": "NCHW", "dtype": "float32", "floor_us": 4.0}
    about = {"device": "X", "torch": "2", "commit": "c", "date": "2026-01-01T00:00:00"}
    rows = [
        row | about | {"norm": "bn", "device_us": 10.0, "to_bn": 1.0},
        row | about | {"norm": "mn2", "device_us": 5.0, "to_bn": 0.5, "to_floor": 1.25},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = with_tables("<!-- table layer a.jsonl -->\nold\n<!-- end -->", tmp_path)
    assert "| 2×3×4×4 NCHW float32 | 4 | 10 | 0.50 | 1.25 |  |" in text
    assert "old" not in text
    assert with_tables(text, tmp_path) == text
    assert "not measured" in with_tables("<!-- table layer b.jsonl --><!-- end -->", tmp_path)


def test_a_small_difference_is_found_among_large_variations():
    """Every step's time wanders by a thousand; the second one takes ten more each time."""
    drift = torch.rand(400, generator=torch.Generator().manual_seed(0)).double() * 1000
    noise = torch.randn(2, 400, generator=torch.Generator().manual_seed(1)).double()
    base, times = (drift + noise[0]).tolist(), (drift + 10 + noise[1]).tolist()
    found = extra(times, base)
    assert abs(found.value - 10) <= found.within < 1
    few = extra([3.0, 9.0, 4.0], [1.0, 2.0, 3.0])
    assert few == (2.0, 3.0)


def test_turns_alternate():
    order: list[int] = []
    steps = [lambda i=i: order.append(i) for i in range(3)]
    times = alternating(steps, seconds=1.0, turns=4)
    assert order == [0, 1, 2, *(0, 1, 2, 2, 1, 0) * 2]
    assert [len(found) for found in times] == [4] * 3
    assert gc.isenabled()


def test_device_time_is_positive():
    assert layer.device_time(lambda: torch.ones(10).sum(), 0.001) > 0
