"""Numbers on the page equal the run files; nothing on disk can break the page or run in it."""

import errno
import json
import re
import statistics
import time
from pathlib import Path

import pytest
from fake_runs import fake_gallery, fake_run, page_data, read_lines, text_of
from typer.testing import CliRunner

from modenorm.lab.cli import app
from modenorm.lab.report import Page, PaperNumber, read_records, render, write_page
from modenorm.lab.report.tables import Mean, group


def in_percent(evaluations) -> list:
    """Shares as the page has them, with one digit."""
    return [pytest.approx([100 * s for s in shares], abs=0.051) for shares in evaluations]


@pytest.fixture
def runs(tmp_path) -> Path:
    for seed in range(3):
        fake_run(tmp_path / "runs", norm="bn", seed=seed)
        fake_run(tmp_path / "runs", norm="mn", modes=3, seed=seed)
    return tmp_path / "runs"


def test_numbers_equal_the_run_files(runs):
    html = render(read_records([runs]), Page())
    data = page_data(html)
    by_name = {run["name"]: run for run in data["runs"]}
    assert len(by_name) == 6
    for path in runs.iterdir():
        shown, result = by_name[path.name], json.loads((path / "result.json").read_text())
        metrics = read_lines(path / "metrics.jsonl")
        for name in ("final_error", "top_error", "domain_errors"):
            assert shown[name] == result[name]
        assert shown["samples"] == [m["samples"] for m in metrics]
        assert shown["test_error"] == pytest.approx([m["test_error"] for m in metrics], abs=1e-4)
        assert shown["train_loss"] == pytest.approx([m["train_loss"] for m in metrics], abs=1e-5)
        layers = shown["modes"]["layers"] if shown["modes"] else []
        assert len(layers) == len(metrics[-1]["modes"])
        for layer in layers:
            noted = [m["modes"][layer["name"]] for m in metrics]
            assert layer["shares"] == in_percent(found["shares"] for found in noted)
            assert layer["entropy"] == noted[-1]["entropy"]
            assert layer["by_domain"] == {
                name: in_percent(found["by_domain"][name] for found in noted)
                for name in ("plain", "odd")
            }


def test_means_over_seeds(runs):
    html = render(read_records([runs]), Page())
    errors = [
        json.loads((path / "result.json").read_text())["final_error"]
        for path in runs.glob("lenet-builtin-mn3-*")
    ]
    mean, se = statistics.fmean(errors), statistics.stdev(errors) / 3**0.5
    (experiment,) = page_data(html)["experiments"]
    assert [variant["label"] for variant in experiment["variants"]] == ["BN", "MN K=3"]
    final, text = experiment["variants"][1]["final"], f"{mean:.2f} ± {se:.2f}"
    assert (final["mean"], final["se"]) == pytest.approx((mean, se))
    assert (final["n"], final["text"]) == (3, text)
    assert text in text_of(html)
    assert experiment["domains"] == ["plain", "odd"]


def test_the_papers_number_stands_beside_ours(runs):
    paper = [PaperNumber("Table 9", 42.17, {"norm": "mn", "modes": 3})]
    text = text_of(render(read_records([runs]), Page(paper=paper)))
    assert "42.17 Table 9" in text


def test_a_verdict_is_careful(runs, tmp_path):
    (experiment,) = group(read_records([runs]))
    (sentence,) = experiment.sentences()
    assert sentence.startswith("MN K=3 ends with an error of ")
    assert "standard error of the difference" in sentence
    fake_run(tmp_path / "single", norm="bn")
    fake_run(tmp_path / "single", norm="mn")
    assert (
        "with one seed this can be chance"
        in (group(read_records([tmp_path / "single"]))[0].sentences()[0])
    )


def test_mean():
    assert str(Mean.of([1.0, 3.0])) == "2.00 ± 1.00"
    assert str(Mean.of([1.0])) == "1.00"
    assert Mean.of([]) is None


RESULTS = Path(__file__).parents[3] / "results"
EVIL = "<script>document.title='taken'</script><img src=x onerror=alert(1)>"


def test_text_from_files_is_escaped(tmp_path):
    path = fake_run(tmp_path, norm="mn")
    config = json.loads((path / "config.json").read_text())
    config |= {"model": EVIL, "options": {EVIL: EVIL}}
    (path / "config.json").write_text(json.dumps(config))
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(
        json.dumps(result | {"device": EVIL, "domain_errors": {EVIL: 1.0, "b": 2.0}})
    )
    metrics = (path / "metrics.jsonl").read_text().replace("stage1.norm", EVIL)
    (path / "metrics.jsonl").write_text(metrics)
    evil = path.rename(tmp_path / "<script>alert(1)<")
    (evil / "gallery.json").write_text(EVIL)
    (tmp_path / "other.jsonl").write_text(json.dumps({EVIL: EVIL}) + "\n")
    bench = read_lines(RESULTS / "bench_model.jsonl")[0] | dict.fromkeys(("model", "device"), EVIL)
    (tmp_path / "bench.jsonl").write_text(json.dumps(bench) + "\n")
    files = [tmp_path / "other.jsonl", tmp_path / "bench.jsonl"]
    html = render(read_records([tmp_path]), Page(EVIL, [EVIL], results=files))
    assert '<th scope="row">&lt;script&gt;' in html
    own = re.sub(r"<script>\n?/\*\*.*?</script>", "", html, flags=re.S)  # plotly.js
    assert EVIL not in own
    assert "<img src=x" not in own
    assert "<script>alert" not in own
    assert page_data(html)["runs"][0]["name"] == "<script>alert(1)<"


def broken_runs(folder: Path) -> dict[str, str]:
    """Damaged run directories, and a part of what should be said about each."""
    (folder / "empty").mkdir(parents=True)

    def damaged(name: str, file: str, content: str | bytes | None) -> None:
        path = fake_run(folder, norm="bn", seed=len(list(folder.iterdir()))).rename(folder / name)
        if content is None:
            (path / file).unlink()
        else:
            (path / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    damaged("no-config", "config.json", None)
    damaged("config-cut-off", "config.json", '{"model": "le')
    damaged("config-list", "config.json", "[1, 2]")
    damaged("metrics-binary", "metrics.jsonl", b"\xff\xfe\x00")
    damaged("metrics-half", "metrics.jsonl", '{"samples": 1, "test_error": 5}\nnonsense\n')
    damaged("metrics-text", "metrics.jsonl", '{"samples": "many", "test_error": NaN}\n')
    damaged("metrics-cut", "metrics.jsonl", '{"step": 10, "samples": 1280, "test_error": 5}\n')
    damaged("metrics-gone", "metrics.jsonl", None)
    damaged("metrics-deep", "metrics.jsonl", "[" * 100_000 + "\n")
    damaged("no-result", "result.json", None)
    damaged("result-empty", "result.json", "{}")
    damaged("result-nan", "result.json", '{"final_error": NaN, "top_error": 1}')
    damaged(
        "result-list", "result.json", '{"final_error": 2, "top_error": 1, "domain_errors": [1]}'
    )
    return {
        "empty": "the directory is empty",
        "no-config": "config.json is missing",
        "config-cut-off": "config.json cannot be read",
        "config-list": "config.json is not a JSON object",
        "metrics-binary": "metrics.jsonl cannot be read",
        "metrics-half": "metrics.jsonl, line 2",
        "metrics-text": "no evaluation with numbers",
        "metrics-cut": "metrics.jsonl ends at step 10, but the training took 50 steps",
        "metrics-gone": "metrics.jsonl ends at step 0, but",
        "metrics-deep": "metrics.jsonl, line 1",
        "no-result": "result.json is missing",
        "result-empty": "result.json has no final_error",
        "result-list": "domain_errors that are not",
        "result-nan": "result.json has no final_error",
    }


def test_broken_runs_are_shown_as_such(runs):
    expected = broken_runs(runs)
    incomplete = fake_run(runs, norm="gn", done=False)
    failed = fake_run(runs, norm="mgn", done=False)
    (failed / "failed").write_text(f"{failed.name}: the loss is no longer finite\n")
    cut = fake_run(runs, norm="ln", done=False)
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 60, "sam')
    records = {record.name: record for record in read_records([runs])}
    assert len(records) == 6 + len(expected) + 3
    for name, words in expected.items():
        assert any(words in problem for problem in records[name].problems), name
        assert records[name].state == "broken"
    assert records[incomplete.name].state == records[cut.name].state == "incomplete"
    assert records[cut.name].problems == []
    assert records[failed.name].state == "failed"
    assert records[failed.name].problems == ["the training failed: the loss is no longer finite"]
    html = render(list(records.values()), Page())
    text = text_of(html)
    for words in (*expected, *expected.values(), "the loss is no longer finite"):
        assert words in text
    assert f"{len(expected)} runs broken" in text
    assert "6 runs done" in text
    finals = [run["final_error"] for run in page_data(html)["runs"]]
    assert sum(value is not None for value in finals) == 6 + sum(
        name.startswith(("metrics", "config", "no-config")) for name in expected
    )


@pytest.mark.parametrize("method", ["iterdir", "exists"])
def test_an_unreadable_directory_is_one_broken_run(runs, monkeypatch, method):
    closed = runs / "closed"
    closed.mkdir()
    real = getattr(Path, method)

    def refuse(path, *args, **kwargs):
        if closed in (path, path.parent):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    (closed / "config.json").write_text("{}")
    monkeypatch.setattr(Path, method, refuse)
    records = {record.name: record for record in read_records([runs])}
    assert len(records) == 7
    assert records["closed"].state == "broken"
    assert "the directory cannot be read" in records["closed"].problems[0]
    assert "1 run broken" in text_of(render(list(records.values()), Page()))


def test_odd_modes_in_metrics_are_left_out(tmp_path):
    path = fake_run(tmp_path, norm="mn")
    lines = read_lines(path / "metrics.jsonl")
    lines[-1]["modes"]["stage0.norm"] = {"shares": "all"}
    lines[-1]["modes"]["stage1.norm"]["by_domain"] = [1]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = page_data(render(read_records([tmp_path]), Page()))["runs"]
    assert [layer["name"] for layer in run["modes"]["layers"]] == ["stage1.norm"]
    assert run["modes"]["layers"][0]["by_domain"] == {}


def test_integers_that_no_float_holds_are_no_numbers(tmp_path):
    path = fake_run(tmp_path, norm="mn")
    lines = read_lines(path / "metrics.jsonl")
    lines[0]["test_error"] = 10**400
    lines[-1]["modes"]["stage0.norm"]["shares"][0] = -(10**400)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (record,) = read_records([tmp_path])
    assert record.problems == ["metrics.jsonl, line 1: no evaluation with numbers"]
    (run,) = page_data(render([record], Page()))["runs"]
    assert [layer["name"] for layer in run["modes"]["layers"]] == ["stage1.norm"]


def test_domains_that_an_evaluation_lacks_are_left_out(tmp_path):
    path = fake_run(tmp_path, norm="mn")
    lines = read_lines(path / "metrics.jsonl")
    del lines[0]["modes"]["stage0.norm"]["by_domain"]["odd"]
    lines[1]["modes"]["stage1.norm"]["by_domain"]["plain"] = [1.0]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = page_data(render(read_records([tmp_path]), Page()))["runs"]
    assert [list(layer["by_domain"]) for layer in run["modes"]["layers"]] == [["plain"], ["odd"]]


def test_the_page_needs_no_network(runs):
    html = render(read_records([runs]), Page())
    own = re.sub(r"<script>\n?/\*\*.*?</script>", "", html, flags=re.S)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", own)
    assert "default-src 'none'" in own


def test_text_that_is_no_unicode_does_not_break_the_page(tmp_path):
    run = fake_run(tmp_path / "runs", norm="mn")
    file = run / "config.json"
    config = json.loads(file.read_text()) | {"dataset": "folder:caf\udce9"}  # a name in Latin-1
    file.write_text(json.dumps(config))
    write_page(tmp_path / "page.html", read_records([tmp_path / "runs"]), Page())
    assert "on caf?" in (tmp_path / "page.html").read_text("utf-8")


def test_no_runs_at_all(tmp_path):
    (tmp_path / "notes.txt").write_text("no run")
    html = render(read_records([tmp_path]), Page())
    assert "No run directory was found" in html
    with pytest.raises(ValueError, match="is not a folder"):
        read_records([tmp_path / "missing"])


def test_one_run_is_no_runs_and_missing_results_are_refused(tmp_path):
    fake_run(tmp_path / "runs", 2, norm="bn")
    command = ["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")]
    assert "page.html: 1 run (1 done)" in CliRunner().invoke(app, command).output.replace("\n", "")
    (tmp_path / "page.html").unlink()
    found = CliRunner().invoke(app, [*command, "--results", str(tmp_path / "absent.jsonl")])
    assert isinstance(found.exception, ValueError)
    assert "there is no such file or folder" in str(found.exception)
    assert not (tmp_path / "page.html").exists()


def test_an_empty_folder_is_shown_as_a_broken_run(tmp_path):
    (tmp_path / "run").mkdir()
    output = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "-o", str(output)])
    assert "1 run (1 broken)" in result.output.replace("\n", "")
    assert "the directory is empty" in output.read_text()


def test_200_runs_in_30_seconds_and_10_megabytes(tmp_path):
    for seed in range(10):
        for modes in (2, 4, 8):
            fake_run(tmp_path, 160, 19, model="resnet20", norm="mn", modes=modes, seed=seed)
        fake_run(tmp_path, 160, 19, model="resnet20", norm="bn", seed=seed)
        for norm in ("bn", "in", "ln", "gn", "mgn"):
            for batch in (32, 64, 128):
                fake_run(tmp_path, 100, 12, norm=norm, batch=batch, seed=seed)
        path = fake_run(tmp_path, 35, 110, model="resnet110", norm="mn", seed=seed)
        fake_gallery(layers=12, count=24).save(path)
    began = time.perf_counter()
    result = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "page.html")])
    seconds, size = time.perf_counter() - began, (tmp_path / "page.html").stat().st_size
    assert result.exit_code == 0, result.output
    assert "200 runs (200 done)" in result.output
    assert seconds < 30
    assert size < 10e6
    data = page_data((tmp_path / "page.html").read_text())
    assert len(data["runs"]) == 200
    assert 0 < len(data["galleries"]) < 10  # the others are named
    assert "are left out: resnet110-" in (tmp_path / "page.html").read_text()
