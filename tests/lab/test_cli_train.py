import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from modenorm.lab.cli import report as report_commands
from modenorm.lab.cli import train as train_commands
from modenorm.lab.cli.shown import make_console
from modenorm.lab.cli.train import ProgressReport
from modenorm.lab.report import Gallery
from modenorm.lab.training import Run, Training, find_runs, load_model, recipe, sources
from modenorm.lab.training.checkpoint import Position

Command = Callable[..., tuple[int, str, str]]


SHORT = (
    "--dataset",
    "builtin",
    "--batch",
    "8",
    "--unit",
    "updates",
    "--total",
    "4",
    "--device",
    "cpu",
)


def test_train_shows_the_result_and_keeps_it(command: Command) -> None:
    code, out, progress = command("train", *SHORT, "--norm", "mn", "--seeds", "2")
    assert code == 0
    assert "top error %" in out
    assert "even" in out
    assert "step 4/4" in progress
    runs = find_runs(Path("runs"))
    assert [run.state for run in runs] == ["done", "done"]
    assert [run.config.seed for run in runs] == [0, 1]
    assert runs[0].config.lr == 0.1  # the recipe's

    code, again, told = command("train", *SHORT, "--norm", "mn")
    name, day = runs[0].path.name, runs[0].result()["date"][:10]
    says = f"{name} is done since {day}: nothing was trained; delete runs/{name} to train it again."
    assert (code, told) == (0, says + "\n")
    assert name in again
    code, _, told = command("train", *SHORT, "--norm", "mn", "--seeds", "3")
    assert (code, told.count("nothing was trained"), told.count("step 4/4")) == (0, 2, 1)

    code, listing, _ = command("runs", "runs")
    assert code == 0
    assert listing.count("done") == 3


def test_nothing_is_cut_off_on_a_narrow_terminal(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = "runs [red] :smile: [/x]"
    code, out, _ = command("train", *SHORT, "--runs", folder)
    assert code == 0
    assert "seconds" in out
    assert "…" not in out
    assert {len(line) for line in out.splitlines()} == {80}
    code, out, _ = command("report", folder, "-o", f"{folder}/page.html")
    assert code == 0
    assert out.startswith(f"{folder}/page.html: 1 run (1 done)")


@pytest.mark.parametrize("width", [80, 140])
def test_progress_shows_error_speed_and_time_left(width: int) -> None:
    file = io.StringIO()
    console = make_console(file=file, width=width, force_terminal=True, color_system=None)
    config = recipe("resnet18", dataset="folder:tiny-imagenet-200", norm="mn", image_size=64)
    report = ProgressReport(console)
    training: Any = SimpleNamespace(
        run=Run.of(config, Path("runs")),
        position=Position(step=0, metrics=[{"test_error": 12.34}]),
        schedule=SimpleNamespace(total=1000),
        train_loss=1.0,
    )
    with report:
        for step in (0, 500):
            training.position.step = step
            report(training)
    _, _, last = file.getvalue().rpartition("error 12.34 %")
    speed, left = last.split("samples/s")
    assert int(speed.replace(",", "")) > 0
    assert left.splitlines()[0].endswith((":--", ":00"))


def test_broken_runs_are_listed_with_the_others(command: Command) -> None:
    command("train", *SHORT, "--seeds", "3")
    first, second, third = find_runs(Path("runs"))
    (first.path / "config.json").write_text("{")
    (second.path / "metrics.jsonl").write_text('nonsense\n{"a": 1}\n')
    third.path.rename("runs/a[red]b")
    code, listing, _ = command("runs", "runs")
    assert code == 0
    assert listing.count("broken") == 2
    assert "a[red]b" in listing
    assert f"{first.path.name}: config.json cannot be read" in listing
    assert f"{second.path.name}: metrics.jsonl, line 2: no evaluation" in listing


def test_errors_of_done_runs_are_those_of_the_result(command: Command) -> None:
    command("train", *SHORT, "--eval-every", "1")
    (run,) = find_runs(Path("runs"))
    changed = run.result() | {"final_error": 43.21, "top_error": 12.34}
    (run.path / "result.json").write_text(json.dumps(changed))
    run.set_metrics(run.metrics()[:2])
    code, listing, _ = command("runs", "runs")
    assert code == 0
    assert all(word in listing for word in ("43.21", "12.34", "32", "broken"))
    assert "metrics.jsonl ends at step 2, but the training took 4 steps" in listing


def test_settings_reach_the_configuration(command: Command) -> None:
    code, _, _ = command(
        "train", *SHORT, "--milestones", "2,3", "--augment", "--weight-decay", "0.001",
        "--options", "activation=tanh", "--modes", "4", "--norm", "mn", "--gate", "standardized",
    )  # fmt: skip
    assert code == 0
    (run,) = find_runs(Path("runs"))
    config = run.config
    assert config.milestones == (2, 3)
    assert config.augment
    assert config.weight_decay == 0.001
    assert config.options == {"activation": "tanh"}
    assert (config.norm, config.modes, config.gate) == ("mn", 4, "standardized")


def test_modes_per_layer_are_read_back(command: Command) -> None:
    """A number of modes means mode norm."""
    code, _, _ = command("train", *SHORT, "--modes", "stage1.*=4,*=2")
    assert code == 0
    (run,) = find_runs(Path("runs"))
    assert run.config.run_id == run.path.name
    model, _ = load_model(run.checkpoint)
    assert [len(model.get_buffer(f"stage{i}.norm.running_mean")) for i in (1, 2)] == [4, 2]


def test_a_training_without_modes_has_one_name(command: Command) -> None:
    for more in (["--modes", "2"], ["--modes", "4"], ["--groups", "4"], ["--variance", "pixel"]):
        assert command("train", *SHORT, "--norm", "bn", *more)[0] == 0
    assert len(find_runs(Path("runs"))) == 1


def test_options_that_make_no_difference_are_told(command: Command) -> None:
    code, _, notes = command("train", *SHORT, "--norm", "bn", "--modes", "2", "--compile")
    assert code == 0
    assert "--modes 2 is ignored: it is for mn and mgn alone.\n" in notes
    assert "--compile is ignored: models are compiled on GPUs only.\n" in notes
    code, _, notes = command("train", *SHORT, "--modes", "2", "--gate", "linear", "--groups", "4")
    assert code == 0
    assert "--groups 4 is ignored: it is for gn alone.\n" in notes
    assert notes.count("ignored") == 1


def test_modes_say_what_they_want_to_see(command: Command) -> None:
    Path("notes.txt").write_text("some words\n")
    Path("runs").mkdir()
    for path, says in (("notes.txt", "is not a checkpoint"), ("runs", "not the folder of a run")):
        code, _, message = command("modes", path)
        assert code == 2
        assert f"{path} is" in message
        assert says in message
        assert "give a run's folder or its checkpoint.safetensors" in message
        assert "restore" not in message


def test_automatic_modes_need_no_norm(command: Command) -> None:
    code, out, _ = command(
        "train", *SHORT, "--modes", "auto", "--max-modes", "3", "--sparsity", "0.05"
    )
    assert code == 0
    assert "needs these modes: stage1.norm" in out
    assert command("train", *SHORT)[0] == 0
    configs = [run.config for run in find_runs(Path("runs"))]
    assert sorted((c.norm, c.sparsity) for c in configs) == [("bn", 0.0), ("mn", 0.05)]
    assert {c.modes for c in configs if c.norm == "mn"} == {3}


def test_imagenet_is_looked_for_among_the_data(command: Command) -> None:
    code, _, errors = command("train", "--model", "resnet18", "--data", "sets", "--device", "cpu")
    assert code == 2
    assert "sets/imagenet/train: missing" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "alexnet"], "alexnet"),
        (["--norm", "xx"], "norm is 'xx', but must be one of bn, in, ln, gn, mn, mgn"),
        (["--dataset", "nowhere"], "unknown data set 'nowhere'"),
        (["--dataset", "cifar10"], "cifar"),
        (["--batch", "0"], "batch is 0"),
        (["--lr", "1e300"], "lr is 1e+300, but must be above 0 and at most 3.40282e+38"),
        (["--lr", "1e39"], "lr is 1e+39, but must be above 0 and at most 3.40282e+38"),
        (["--lr", "nan"], "lr is nan, but must be above 0"),
        (["--image-size", "16"], "image_size is 16, but builtin has a size of its own"),
        (["--milestones", "a,b"], "expected whole numbers"),
        (["--norm", "mgn", "--modes", "auto"], "--modes auto is for mn alone: use --norm mn"),
        (["--modes", "auto", "--sparsity", "0"], "needs a --sparsity above 0"),
        (["--sparsity", "0.1"], "--sparsity is 0.1, but it is for --modes auto alone"),
        (["--modes", "4", "--max-modes", "6"], "--max-modes is 6, but it is for --modes auto"),
        (["--modes", "²"], "--modes is '²', expected a number"),
        (["--modes", "*=2,*=3"], "each pattern may be there once"),
        (["--options", "tanh"], "expected NAME=VALUE"),
        (["--options", "colour=1"], "'colour', but lenet has only activation, pool: leave it"),
        (
            ["--model", "resnet20", "--options", "eps=0"],
            "options has 'eps', but resnet20 has none: leave it",
        ),
        (["--dataset", ""], "dataset is '', but must be the name of a data set"),
        (["--norm", "gn", "--groups", "5"], "doesn't divide the 6 channels of a layer: set --gro"),
        (["--options", "activation=[1]"], "unknown activation [1]; known: relu"),
        (["--model", "nin", "--options", "dropout=half"], "must be in [0, 1), got 'half'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--runs", "/dev/null/runs"], "cannot write /dev/null/runs"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    command: Command, arguments: list[str], message: str
) -> None:
    code, out, errors = command("train", *SHORT, *arguments)
    assert code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1
    assert out == ""


def test_images_of_another_size_are_told_in_one_sentence(command: Command) -> None:
    for part in ("train", "val"):
        for name in "ab":
            Path("f64", part, name).mkdir(parents=True)
            Image.new("RGB", (64, 48)).save(Path("f64", part, name, "image.png"))
    code, _, message = command("train", *SHORT, "--dataset", "folder:f64")
    assert code == 2
    assert message == (
        "modenorm: lenet needs 32×32 images, folder:f64 has 48×64: set --image-size 32 or choose "
        "resnet20\n"
    )
    assert not Path("runs").exists()
    assert command("train", *SHORT, "--dataset", "folder:f64", "--image-size", "32")[0] == 0
    command("train", *SHORT, "--norm", "mn")
    run = next(Path("runs").glob("*builtin*"))
    code, _, message = command("modes", str(run), "--dataset", "folder:f64")
    assert code == 2
    assert "folder:f64 has 48×64: set another --dataset" in message


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("can't allocate memory: you tried to allocate 9 bytes. Error code 12"), "9"),
        (RuntimeError("not enough memory: you tried to allocate 9 bytes."), "9"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 bytes."), "9"),
        (MemoryError("Unable to allocate 9 bytes for an array"), "9"),
        (RuntimeError("Storage size calculation overflowed with sizes=[1]"), ""),
    ],
    ids=str,
)
def test_too_little_memory_is_told_in_one_sentence(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(train_commands, "train_many", refuse)
    code, _, message = command("train", *SHORT)
    assert code == 2
    size = f" for {words} bytes more" if words else ""
    start = f"modenorm: there is not enough memory{size}: use a smaller batch"
    assert message.splitlines()[-1].startswith(start)
    assert "Traceback" not in message


def test_other_errors_are_not_hidden(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(train_commands, "train_many", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        command("train", *SHORT)


def test_modes_of_a_folder_that_cannot_be_written_are_shown(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(gallery: Gallery, folder: Path) -> None:
        raise OSError(f"cannot write {folder / 'gallery.webp'}: Read-only file system")

    command("train", *SHORT, "--norm", "mn")
    (run,) = find_runs(Path("runs"))
    monkeypatch.setattr(Gallery, "save", refuse)
    monkeypatch.setattr(report_commands, "load", sources.load)
    code, out, _ = command("modes", str(run.path), "-o", "modes.html", "--count", "2")
    assert code == 0
    assert "not kept for the report: cannot write" in out
    assert Path("modes.html").stat().st_size > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is there")
def test_modes_say_if_there_is_no_gpu(command: Command) -> None:
    code, _, message = command("modes", "nowhere", "--device", "cuda")
    assert code == 2
    assert "torch finds none: use --device cpu" in message


def test_a_diverging_run_says_so(command: Command) -> None:
    code, out, _ = command("train", *SHORT, "--lr", "1e30")
    assert code == 1
    assert "no longer finite" in out


@pytest.mark.parametrize(("signum", "ends"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_says_how_to_go_on(
    command: Command, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, ends: int
) -> None:
    def interrupt(training: Training) -> None:
        signal.raise_signal(signum)

    tell = Training._tell
    monkeypatch.setattr(Training, "_tell", interrupt)
    code, out, errors = command("train", *SHORT, "--total", "300", "--eval-every", "150")
    assert (code, out) == (ends, "")
    assert "give the same command to go on" in errors
    (run,) = find_runs(Path("runs"))
    assert run.state == "incomplete"
    assert run.checkpoint.exists()

    monkeypatch.setattr(Training, "_tell", tell)
    code, _, _ = command("train", *SHORT, "--total", "300", "--eval-every", "150")
    assert code == 0
    assert Run.open(run.path).state == "done"


def test_help_names_the_choices(command: Command) -> None:
    code, out, _ = command("train", "--help")
    assert code == 0
    for word in ("lenet", "builtin", "mode normalization", "--milestones", "bfloat16"):
        assert word in out
    assert command("runs", "nowhere")[0] == 2
