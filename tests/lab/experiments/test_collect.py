import contextlib
import json
import math
import threading
from pathlib import Path

import pytest
from fake_results import fake_run

from modenorm.lab.experiments import TABLES, collect, summarize, update, with_results
from modenorm.lab.experiments.collect import borrow, read_lines
from modenorm.lab.experiments.gates import gate_rows
from modenorm.lab.experiments.page import busy_minutes, cost_text, gains_text
from modenorm.lab.experiments.summary import HEADER, Difference, orders, rows
from modenorm.lab.training.files import write_whole

ROOT = Path(__file__).parents[3]
CELLS = TABLES["table1"]
BN, IN, _, MN2 = CELLS[:4]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """BN and MN with seeds 0, 1, 2 and IN with one seed."""
    for seed, (bn, mn) in enumerate([(14.0, 13.0), (15.0, 14.5), (16.0, 14.0)]):
        fake_run(BN, tmp_path / "runs", seed, bn, bn + 1)
        fake_run(MN2, tmp_path / "runs", seed, mn, mn + 2)
    fake_run(IN, tmp_path / "runs", 4, 17.0, 18.0)
    return tmp_path / "runs"


def test_lines_say_all_about_a_training(runs):
    found = collect(CELLS, runs)
    assert found.problems == []
    assert len(found.lines) == 7
    assert found.lines[0] == {
        "table": "table1", "model": "lenet", "dataset": "multitask", "norm": "bn", "modes": None,
        "groups": None, "where": "all", "batch": 128, "dtype": "float32", "channels_last": False,
        "seed": 0, "final_error": 15.0, "top_error": 14.0, "top5_error": 7.5,
        "domain_errors": {"mnist": 1.0, "svhn": 2.0}, "samples_seen": 512, "seconds": 1.5,
        "torch": "2.13.0", "commit": "abc", "date": "2026-01-02T03:04:05+00:00",
        "gates": {}, "gpu": "some device", "settings": BN.key,
    }  # fmt: skip
    assert {line["modes"] for line in found.lines if line["norm"] == "mn"} == {2}


def test_means_and_differences(runs):
    bn, instance, layer, mn = summarize(CELLS, collect(CELLS, runs).lines)[:4]
    assert (bn.top.mean, bn.top.sd, bn.top.n) == (15.0, 1.0, 3)
    assert (bn.final.mean, bn.final.sd) == (16.0, 1.0)
    assert bn.top_difference is None
    assert bn.as_published is None
    # paired differences −1, −0.5, −2: mean −7/6, variance 7/12
    assert mn.top_difference.mean == pytest.approx(-7 / 6)
    assert mn.top_difference.se == pytest.approx(math.sqrt(7 / 12 / 3))
    assert mn.top_difference.paired
    assert mn.final_difference.mean == pytest.approx(-1 / 6)
    assert mn.as_published is True
    assert (instance.seeds, instance.top.sd) == ((4,), None)
    assert (instance.top_difference.mean, instance.top_difference.se) == (2.0, None)
    assert layer.top is None
    assert layer.top_difference is None


def test_difference_of_other_seeds_is_not_paired():
    found = Difference.of({0: 1.0, 1: 3.0}, {0: 5.0, 1: 5.0, 2: 8.0})
    assert found.mean == -4.0
    assert found.se == pytest.approx(math.sqrt(2 / 2 + 3 / 3))
    assert str(found) == "−4.00 ± 1.41 (unpaired)"


def test_rows_call_missing_what_is_missing(runs):
    found = rows(summarize(CELLS, collect(CELLS, runs).lines))
    assert all(len(row) == len(HEADER) for row in found)
    assert found[0][1:] == ["BN", "26.91 ± 1.08", "15.00 ± 1.00", "16.00 ± 1.00", "3", "", "", ""]
    assert found[2][1:] == ["LN", "27.31 ± 0.71", "missing", "missing", "0", "", "", ""]
    assert found[3][5:] == ["3", "−1.17 ± 0.44", "−0.17 ± 0.44", "yes"]
    assert rows(summarize(TABLES["table3"], []))[0][:3] == ["NIN on CIFAR-10", "Lin et al.", "8.81"]


def test_order_of_the_paper(tmp_path):
    cells = TABLES["table3"][:2]
    assert "not measured yet" in orders(summarize(cells, []))[0]
    for cell, error in zip(cells, (8.0, 9.0), strict=True):
        fake_run(cell, tmp_path, 0, error, error)
    (sentence,) = orders(summarize(cells, collect(cells, tmp_path).lines))
    assert sentence == (
        "NIN on CIFAR-10: the paper's order does not hold: MN K=2 < BN there, BN < MN K=2 here."
    )
    assert summarize(cells, collect(cells, tmp_path).lines)[1].as_published is False


def test_what_cannot_be_used_is_named(runs, tmp_path):
    config = CELLS[4].config(0)
    (runs / config.run_id).mkdir()
    (runs / config.run_id / "config.json").write_text(config.to_json())
    fake_run(CELLS[5], runs, 0, math.nan, 3.0)
    broken = fake_run(CELLS[5], runs, 1, 2.0, 3.0)
    (broken / "result.json").write_text('{"final_err')
    other = fake_run(CELLS[5], runs, 2, 2.0, 3.0, run="another")
    old = fake_run(CELLS[5], runs, 3, 2.0, 3.0)
    (old / "result.json").write_text('{"final_error": 1, "top_error": 1}')
    strange = fake_run(CELLS[5], runs, 4, 2.0, 3.0)
    (strange / "config.json").write_text('{"model": "abacus"}')
    odd = fake_run(CELLS[5], runs, 5, 2.0, 3.0)
    last = {"step": 4, "samples": 1, "test_error": 2.0, "modes": {"a": 3}}
    (odd / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    fake_run(TABLES["table2"][0], runs, 0, 1.0, 1.0)  # of another table: passed over

    found = collect(CELLS, runs)
    assert len(found.lines) == 7
    problems = "\n".join(found.problems)
    assert len(found.problems) == 7
    assert f"{config.run_id} is left out: not finished" in problems
    assert f"{broken.name} is left out: result.json cannot be read" in problems
    assert f"{other.name} is left out: result.json is of the run another" in problems
    assert f"{old.name} is left out: result.json has no run" in problems
    assert f"{strange.name} is left out: " in problems
    assert f"{odd.name} is left out: metrics.jsonl tells no shares and entropy of a" in problems
    assert collect(CELLS, tmp_path / "nowhere").lines == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": None}, "seconds None, which is not a finite number"),
        ({"top_error": math.nan}, "top_error nan, which is not a finite number"),
        ({"seed": "0"}, "seed '0', which is not a whole number"),
        ({"date": 3}, "date 3, which is not a text"),
        ({"date": "yesterday"}, "date 'yesterday', which is not a date and time"),
        ({"domain_errors": {"a": "x"}}, "which is not an object of numbers"),
        ({"num_modes": {"a": "x"}}, "which is not an object of whole numbers"),
        ({"gates": []}, "gates [], which is not an object of shares and entropies"),
        ({"gates": {"a": {"shares": [], "entropy": 1}}}, "which is not an object of shares and"),
    ],
    ids=str,
)
def test_lines_of_wrong_types_are_named(runs, tmp_path, change, words):
    lines = collect(CELLS, runs).lines
    lines[1] |= change
    path = tmp_path / "table1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"table1\.jsonl, line 2 has ") as error:
        read_lines(path)
    assert words in str(error.value)


def test_results_of_wrong_types_are_left_out(tmp_path):
    odd = fake_run(BN, tmp_path, 0, 14.0, 15.0, seconds=None)
    found = collect(CELLS, tmp_path)
    assert found.lines == []
    words = "result.json has seconds None, which is not a finite number"
    assert found.problems == [f"{odd.name} is left out: {words}"]


def test_results_are_merged(runs, tmp_path):
    path = tmp_path / "results" / "table1.jsonl"
    lines = collect(CELLS, runs).lines
    foreign = lines[0] | {"settings": "zzz", "seed": 0, "top_error": 1.0}
    update(path, [*lines[3:], foreign], CELLS)
    newer = [line | {"top_error": 10.0} for line in lines[:4]]
    update(path, newer, CELLS)
    found = read_lines(path)
    assert len(found) == 8
    assert found[-1] == foreign
    assert [line["norm"] for line in found[:-1]] == ["bn"] * 3 + ["in"] + ["mn"] * 3
    assert [line["seed"] for line in found[:3]] == [0, 1, 2]
    assert all(line in found for line in newer)
    assert [p.name for p in path.parent.iterdir()] == ["table1.jsonl"]


def test_two_commands_add_to_one_file(runs, tmp_path, monkeypatch):
    path, lines = tmp_path / "results" / "table1.jsonl", collect(CELLS, runs).lines
    both = threading.Barrier(2)

    def slow(*given):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.2)  # unless one waits for the other, both have read by now
        write_whole(*given)

    monkeypatch.setattr("modenorm.lab.training.files.write_whole", slow)
    commands = [threading.Thread(target=update, args=(path, [line], CELLS)) for line in lines[:2]]
    for command in commands:
        command.start()
    for command in commands:
        command.join()
    assert read_lines(path) == lines[:2]


def test_broken_results_are_refused_and_kept(tmp_path):
    path = tmp_path / "table1.jsonl"
    for text in ('{"sett', "[]\n", "{}\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"table1\.jsonl, line \d"):
            update(path, [], CELLS)
        assert path.read_text() == text


@pytest.mark.parametrize("text", [b"\xff", b'{"settings": "a", "seed": 0, "top_error": 1.0}'])
def test_lines_that_cannot_be_shown_are_named(tmp_path, text):
    path = tmp_path / "table1.jsonl"
    path.write_bytes(text + b"\n")
    with pytest.raises(ValueError, match=r"table1\.jsonl, line 1 is no"):
        read_lines(path)


def test_a_training_of_two_tables_is_in_both(tmp_path):
    cell = next(c for c in TABLES["table3"] if (c.group, c.label) == ("ResNet20 on CIFAR-10", "BN"))
    fake_run(cell, tmp_path / "runs", 0, 8.0, 8.1)
    lines = collect(TABLES["table3"], tmp_path / "runs").lines
    update(tmp_path / "table3.jsonl", lines, TABLES["table3"])
    (line,) = borrow("extra", tmp_path)
    assert line == lines[0] | {"table": "extra"}
    update(tmp_path / "extra.jsonl", [line], TABLES["extra"])
    assert borrow("extra", tmp_path) == []
    assert cost_text(tmp_path).splitlines()[-1].startswith("| all |  | 1 |")


def test_page_round_trip(runs, tmp_path):
    page = "Before\n<!-- results table1 --><!-- end -->\nbetween\n<!-- results table2 --> old\n"
    page += "<!-- end -->\n<!-- results unknown --> stays <!-- end -->\n"
    empty = with_results(page, tmp_path)
    assert empty.count("_not measured yet_") == 2
    assert "stays" in empty
    assert "old" not in empty
    update(tmp_path / "table1.jsonl", collect(CELLS, runs).lines, CELLS)
    full = with_results(empty, tmp_path)
    assert "| LeNet, N=128 | MN K=2 | 23.16 ± 1.23 | 13.83 ± 0.76 |" in full
    assert "some device, torch 2.13.0, commit abc, 2026-01-02." in full
    assert full.count("_not measured yet_") == 1
    assert with_results(full, tmp_path) == full
    (tmp_path / "table1.jsonl").unlink()
    assert with_results(full, tmp_path) == empty


@pytest.mark.parametrize("page", ["README.md", "docs/reproduction.md"])
def test_pages_show_the_results(page):
    text = (ROOT / page).read_text()
    assert with_results(text, ROOT / "results") == text, "run: modenorm reproduce pages"


def test_committed_results_are_whole():
    for table in TABLES:
        for line in read_lines(ROOT / "results" / f"{table}.jsonl"):
            assert line["table"] == table
            assert line["settings"] in {cell.key for cell in TABLES[table]}, "names must not change"


def with_gates(line, *layers):
    gates = {f"layer{i}": {"shares": s, "entropy": e} for i, (s, e) in enumerate(layers)}
    return line | {"gates": gates}


def test_gates_are_summed_up_by_cell(runs):
    lines = [line for line in collect(CELLS, runs).lines if line["norm"] == "mn"][:2]
    lines[0] = with_gates(lines[0], ([0.25, 0.75], 0.5), ([0.005, 0.995], 0.1))
    lines[1] = with_gates(lines[1], ([0.5, 0.5], 1.0), ([0.985, 0.015], 0.4))
    assert gate_rows(CELLS, lines) == [
        ["LeNet, N=128", "MN K=2", "2", "2", "19.2 %", "0.5 %", "0.50", "1 of 4"]
    ]
    assert gate_rows(CELLS, collect(CELLS, runs).lines) == []


def test_gates_come_from_the_last_evaluation(runs, tmp_path):
    folder = next(runs.glob("*-mn2-*"))
    records = [
        {
            "step": s,
            "samples": s,
            "test_error": 1.0,
            "modes": {"a": {"shares": [s / 10, 1 - s / 10], "entropy": s}},
        }
        for s in (1, 4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (line,) = [line for line in collect(CELLS, runs).lines if line["gates"]]
    assert line["gates"] == {"a": {"shares": [0.4, 0.6], "entropy": 4}}
    (folder / "metrics.jsonl").write_text(json.dumps(records[0]) + "\n")  # the last one is lost
    found = collect(CELLS, runs)
    assert len(found.lines) == 6
    assert found.problems == [
        f"{folder.name} is left out: metrics.jsonl ends at step 1, but the training took 4 steps"
    ]


def test_minutes_count_overlapping_trainings_once():
    def ended(second, seconds):
        return {
            "date": f"2026-01-02T03:{second // 60:02d}:{second % 60:02d}+00:00",
            "seconds": seconds,
        }

    # 0 to 60 and 30 to 90, then a pause, then 120 to 150
    assert busy_minutes([ended(90, 60), ended(60, 60), ended(150, 30)]) == pytest.approx(2.0)
    assert busy_minutes([]) == 0


def test_the_cost_of_each_experiment_is_shown(runs, tmp_path):
    update(tmp_path / "table1.jsonl", collect(CELLS, runs).lines, CELLS)
    # all end at the same moment, after a second and a half
    assert cost_text(tmp_path).splitlines()[2:] == [
        "| table1 | LeNet, N=128 | 7 | 0.0 |",
        "| all |  | 7 | 0.0 |",
    ]


def test_the_cost_of_several_commits_is_shown_apart(runs, tmp_path):
    first, *others = collect(CELLS, runs).lines
    update(tmp_path / "table1.jsonl", [first | {"commit": "older"}, *others], CELLS)
    rows = cost_text(tmp_path).splitlines()[3:]
    assert {row.split("|")[2].strip() for row in rows[:-1]} == {
        "at commit older", f"at commit {first['commit']}"
    }  # fmt: skip
    assert sorted(row.split("|")[3].strip() for row in rows) == ["1", "6", "7"]


def test_below_the_gains_stands_what_they_are_from(runs, tmp_path):
    """BN and MN K=2, not the one training of IN, nor what nothing stands beside."""
    update(tmp_path / "table1.jsonl", collect(CELLS, runs).lines, CELLS)
    alone = next(cell for cell in TABLES["table3"] if cell.label == "MN K=2")
    fake_run(alone, runs, 0, 8.0, 8.1, commit="other")
    update(tmp_path / "table3.jsonl", collect(TABLES["table3"], runs).lines, TABLES["table3"])
    _, _, row, _, conditions = gains_text(tmp_path).splitlines()
    assert row.startswith("| LeNet, N=128 | 26.91 | 23.16 | −3.75 | 15.00 ± 1.00 | 13.83 ± 0.76 |")
    assert conditions.startswith(
        "6 trainings in 0.0 minutes; some device, torch 2.13.0, commit abc,"
    )
