from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_results import fake_run
from PIL import Image

from modenorm.lab.cli import reproduce
from modenorm.lab.experiments import TABLES, Cell, figure
from modenorm.lab.experiments.collect import read_lines
from modenorm.lab.experiments.paper import FIGURE2, Figure
from modenorm.lab.models import create_model
from modenorm.lab.training import Run, Training, find_runs, sources

Command = Callable[..., tuple[int, str, str]]
TINY = {
    "model": "lenet",
    "dataset": "builtin",
    "batch": 8,
    "lr": 0.01,
    "unit": "updates",
    "total": 4,
    "eval_every": 2,
}
CELLS = [
    Cell("table1", "LeNet, N=8", "BN", {**TINY, "norm": "bn"}, 20.0, 1.0),
    Cell("table1", "LeNet, N=8", "MN K=2", {**TINY, "norm": "mn"}, 19.0, 1.0),
]
WHERE = ("--device", "cpu", "--data", "data", "--runs", "runs")


@pytest.fixture
def command(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`modenorm reproduce`, with a Table 1 of two tiny trainings."""
    monkeypatch.setitem(TABLES, "table1", CELLS)
    return partial(command, "reproduce")


def test_nothing_is_cut_off_on_a_narrow_terminal(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [replace(cell, group="ResNet20 on CIFAR-100") for cell in CELLS]
    monkeypatch.setitem(TABLES, "table1", [*CELLS, *long])
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command("table1", "--seeds", "2", "--limit", "1", *WHERE)
    assert code == 0
    assert "table1: LeNet, N=8" in out
    assert "table1: ResNet20 on CIFAR-100" in out
    assert "missing" in out
    assert "…" not in out


def test_a_name_that_no_run_has_is_told(command: Command) -> None:
    code, out, err = command("table1", "--only", "nosuch", *WHERE)
    assert (code, out) == (2, "")
    assert "no run of table1 has 'nosuch' in its name" in err


def test_pages_stay_as_they_are_without_results(command: Command) -> None:
    code, _, err = command("pages", "--results", ".")
    assert code == 2
    assert "no README.md here" in err
    text = "<!-- gains -->\n\nmeasured\n\n<!-- end -->\n"
    Path("README.md").write_text(text)
    code, _, err = command("pages", "--results", "nowhere")
    assert code == 2
    assert "nowhere is not a folder" in err
    assert Path("README.md").read_text() == text


def test_figure_is_drawn_from_its_training(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FIGURE2.cell in TABLES["table3"]
    model = create_model("vgg13", num_classes=10, norm="mn")
    assert set(FIGURE2.layers) <= {name for name, _ in model.named_modules()}
    monkeypatch.setattr(reproduce, "FIGURE2", Figure(CELLS[1], ("stage2.norm",)))
    monkeypatch.setattr(figure, "load", sources.load)

    code, out, _ = command("figure2", "--dry-run", *WHERE)
    assert code == 0
    assert "1 missing; 4 steps left" in out
    code, _, err = command("figure2", *WHERE)
    assert code == 0
    assert "results/figure2.png shows what the modes of lenet-builtin-mn2" in err
    assert [line["norm"] for line in read_lines(Path("results/table1.jsonl"))] == ["mn"]
    with Image.open("results/figure2.png") as first:
        assert min(first.size) > 32
    Path("results/figure2.png").unlink()
    code, _, err = command("figure2", *WHERE)
    assert (code, "1/1 done" in err) == (0, False)
    assert Path("results/figure2.png").exists()
    assert command("figure2", *WHERE, "--runs", "other", "--device", "tpu")[0] == 2


def test_results_are_replaced_when_asked_for(command: Command) -> None:
    """One by one: what is not trained again keeps its line."""
    file = Path("results/table1.jsonl")
    assert command("table1", "--seeds", "1", *WHERE)[0] == 0
    before = read_lines(file)
    anew = ("table1", "--seeds", "1", *WHERE, "--again", "--runs", "anew")
    code, out, _ = command(*anew, "--dry-run")
    assert (code, "0 done, 0 failed, 0 incomplete, 2 missing" in out) == (0, True)
    assert command(*anew, "--limit", "1")[0] == 0
    after = read_lines(file)
    assert len(after) == len(before) == 2
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]
    code, out, _ = command(*anew, "--dry-run")
    assert "1 done, 0 failed, 0 incomplete, 1 missing" in out


def test_trains_what_is_missing_and_shows_the_table(command: Command) -> None:
    code, out, _ = command("table1", "--seeds", "2", "--dry-run", *WHERE)
    assert code == 0
    assert "0 done, 0 failed, 0 incomplete, 4 missing; 16 steps left" in out
    assert not Path("runs").exists()

    code, out, err = command("table1", "--seeds", "2", "--limit", "3", *WHERE)
    assert code == 0
    assert "3/3 done  step 12/12" in err
    assert "20.00 ± 1.00" in out
    assert [run.config.seed for run in find_runs(Path("runs"))].count(0) == 2
    lines = read_lines(Path("results/table1.jsonl"))
    assert [(line["norm"], line["seed"]) for line in lines] == [("bn", 0), ("bn", 1), ("mn", 0)]
    assert lines[0]["samples_seen"] == 32

    code, out, err = command("table1", "--seeds", "2", *WHERE)
    assert code == 0
    assert "1/1 done" in err
    assert "1 training in 0.0 minutes" in err
    assert read_lines(Path("results/table1.jsonl"))[:3] == lines
    assert "the paper's order" in out

    code, out, err = command("table1", "--seeds", "2", *WHERE)
    assert (code, err) == (0, "")
    assert "4 trainings" in out


def test_results_without_their_runs_are_done(command: Command) -> None:
    for cell in CELLS:
        fake_run(cell, Path("runs"), 0, 1.0, 2.0)
    assert command("table1", "--seeds", "1", *WHERE)[0] == 0
    Path("runs").rename("moved")
    code, out, _ = command("table1", "--seeds", "1", "--dry-run", *WHERE)
    assert code == 0
    assert "2 done, 0 failed, 0 incomplete, 0 missing; 0 steps left" in out


def test_goes_on_after_an_interruption(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Training._write_checkpoint

    def stop_in_the_middle(training: Training, *given: Any) -> None:
        write(training, *given)
        if training.position.step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_write_checkpoint", stop_in_the_middle)
        code, _, err = command("table1", "--seeds", "1", "--parallel", "1", *WHERE)
    assert code == 130
    assert "give the same command to go on" in err
    assert "not finished" in err
    assert read_lines(Path("results/table1.jsonl")) == []
    _, out, _ = command("table1", "--seeds", "1", "--dry-run", *WHERE)
    assert "1 incomplete, 1 missing; 6 steps left" in out
    steps = []
    train = Training._train

    def watch(training: Training, advance: Callable[[int], int]) -> object:
        steps.append(training.position.step)
        return train(training, advance)

    monkeypatch.setattr(Training, "_train", watch)
    code, _, err = command("table1", "--seeds", "1", "--parallel", "1", *WHERE)
    assert code == 0
    assert steps == [2, 0, 2]
    assert "2/2 done  step 8/8" in err
    assert len(read_lines(Path("results/table1.jsonl"))) == 2


def test_results_are_written_while_others_train(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "_collect", lambda *args: None)  # as if it was killed before
    assert command("table1", "--seeds", "2", "--parallel", "1", *WHERE)[0] == 0
    lines = read_lines(Path("results/table1.jsonl"))
    assert [(line["norm"], line["seed"]) for line in lines] == [("bn", 0), ("bn", 1), ("mn", 0)]


def test_failed_trainings_are_named(command: Command) -> None:
    run = Run.of(CELLS[0].config(0), Path("runs"))
    with run.hold():
        run.fail("the loss was infinite")
    code, out, err = command("table1", "--seeds", "1", *WHERE)
    assert code == 1
    assert "--retry-failed" in err
    assert "the training failed: the loss was infinite" in err
    assert "missing" in out
    assert command("table1", "--seeds", "1", "--retry-failed", *WHERE)[0] == 0


def test_bad_input_in_one_sentence(command: Command) -> None:
    code, _, err = command("table7")
    assert code == 2
    assert err == (
        "modenorm: unknown table 'table7': expected table1, table2, table3, table4, table5, "
        "extra, level, options, automatic, figure2, all, pages\n"
    )
    code, _, err = command("table4", *WHERE)
    assert code == 2
    assert "ResNet18 on ILSVRC12 is left out: there is no folder data/imagenet" in err
    assert "set --data" in err
    Path("results").mkdir()
    Path("results/table1.jsonl").write_text("{")
    code, _, err = command("table1", *WHERE)
    assert code == 2
    assert "table1.jsonl, line 1 is not JSON" in err
    code, _, err = command("table2", "--limit", "1", *WHERE)
    assert code == 2


def test_results_that_cannot_be_written_are_told_before_the_training(command: Command) -> None:
    Path("notes").write_text("no folder of results\n")
    for target in ("table1", "figure2"):
        for results in ("notes", "notes/more"):
            code, _, err = command(target, "--results", results, *WHERE)
            told = "modenorm: notes is a file, not a folder: choose another folder\n"
            assert (code, err) == (2, told)
    assert not Path("runs").exists()


def test_table4_on_a_small_image_folder(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of Table 4, shortened, with its images where the command looks for them."""
    for number in range(12):
        part, label = ("train", "val")[number % 3 == 0], "ab"[number % 2]
        folder = Path("data", "imagenet", part, label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), (20 * number, 0, 0)).save(folder / f"{number}.png")
    short = {"batch": 4, "unit": "updates", "total": 1, "milestones": (), "image_size": 32}
    mode = TABLES["table4"][1]
    cell = Cell(mode.table, mode.group, mode.label, {**mode.settings, **short}, mode.error, None)
    monkeypatch.setitem(TABLES, "table4", [cell])
    code, out, _ = command("table4", "--seeds", "1", *WHERE)
    assert code == 0
    assert "30.07" in out
    (line,) = read_lines(Path("results/table4.jsonl"))
    assert (line["model"], line["dataset"], line["modes"]) == ("resnet18", "imagenet", 2)


def test_pages_are_rebuilt(command: Command) -> None:
    fake_run(CELLS[0], Path("runs"), 0, 12.34, 13.0)
    fake_run(CELLS[1], Path("runs"), 0, 11.0, 12.0)
    assert command("table1", "--seeds", "1", *WHERE)[0] == 0
    Path("docs").mkdir()
    page = Path("docs/reproduction.md")
    page.write_text("# Page\n\n<!-- results table1 --> <!-- end -->\n")
    assert command("pages") == (0, "", f"rebuilt the tables of {page}\n")
    assert "| LeNet, N=8 | BN | 20.00 ± 1.00 | 12.34 | 13.00 | 1 |" in page.read_text()


def test_only_some_runs(command: Command) -> None:
    code, out, _ = command("table1", "--seeds", "2", "--only", "-mn2-", "--dry-run", *WHERE)
    assert code == 0
    assert out.count("-mn2-") == 2
    assert "-bn-" not in out
    both = ("--only", "-mn2-", "--only", "-bn-")
    _, out, _ = command("table1", "--seeds", "2", *both, "--dry-run", *WHERE)
    assert (out.count("-mn2-"), out.count("-bn-")) == (2, 2)


def test_several_tables(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "extra", [replace(CELLS[0], table="extra", group="another")])
    code, out, err = command("table1", "extra", "--seeds", "1", *WHERE)
    assert code == 0
    assert "2 trainings in" in err  # batch norm's is the same in both
    for name, norms in (("table1", ["bn", "mn"]), ("extra", ["bn"])):
        assert [line["norm"] for line in read_lines(Path(f"results/{name}.jsonl"))] == norms
        assert f"{name}: " in out
    code, _, err = command("table1", "pages")
    assert code == 2
    assert "pages stands alone" in err
