"""Files of measurements on the page: tables, as in the documentation."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from fake_runs import read_lines, text_of

from modenorm.lab.report import Page, render
from modenorm.lab.report.tables import read_table

RESULTS = Path(__file__).parents[3] / "results"


def test_measurements_are_tables(tmp_path):
    file = tmp_path / "bench.jsonl"
    rows = [
        {"tensor": "128×6", "us": 14.23456, "device": "H", "groups": None},
        {"tensor": "1×2", "device": "H"},
        {"tensor": "9×9", "us": 54140.58, "device": "H"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    table = read_table(file)
    assert table.columns == ["tensor", "us"]
    assert table.rows == [["128×6", "14.23"], ["1×2", ""], ["9×9", "54141"]]
    assert table.constants == {"device": "H"}
    text = text_of(render([], Page(results=[file])))
    assert "In all rows: device H ." in text
    assert "14.23" in text
    assert "cannot be read" in text_of(render([], Page(results=[tmp_path / "none.jsonl"])))


def cells_of(html: str) -> list[list[str]]:
    """Cells of the benchmarks' tables, line by line, without their headers."""
    tables = re.findall(r'<div class="scroll benchmark".*?</div>', html, re.S)
    lines = [line for table in tables for line in re.findall(r"<tr>(.*?)</tr>", table)]
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in lines]
    return [[unescape(cell) for cell in line] for line in found]


@pytest.mark.parametrize("file", sorted(RESULTS.glob("bench_*.jsonl")), ids=lambda file: file.name)
def test_benchmarks_are_the_tables_of_the_documentation(file):
    docs = [RESULTS.parent / "README.md", *(RESULTS.parent / "docs").glob("*.md")]
    pattern = rf"<!-- table \w+ {file.name} -->(.*?)<!-- end -->"
    documented = [t for page in docs for t in re.findall(pattern, page.read_text(), re.S)]
    tables = read_table(file).benchmarks
    assert documented
    assert {table.strip() for table in documented} <= {table.markdown() for table in tables}
    html = render([], Page(results=[file]))
    assert cells_of(html) == [line for table in tables for line in (table.header, *table.lines)]
    assert tables[0].conditions in unescape(html)
    count = len(read_lines(file))
    assert f"<details><summary>{count} rows as measured</summary>" in html


@pytest.mark.parametrize(
    "change",
    [{"step_us": "fast"}, {"step_us": None}, {"device": 3}, {"batch": [1]}, {"model": {}}],
    ids=str,
)
def test_odd_benchmarks_do_not_break_the_page(tmp_path, change):
    row = read_lines(RESULTS / "bench_model.jsonl")[0]
    for odd in (row | change, {name: row[name] for name in row if name not in change}):
        (tmp_path / "bench.jsonl").write_text(json.dumps(odd))
        assert row["commit"] in render([], Page(results=[tmp_path / "bench.jsonl"]))


def test_a_layer_without_batch_norm_has_tables(tmp_path):
    rows = read_lines(RESULTS / "bench_layer.jsonl")
    alone = [row for row in rows if row["norm"] == "mn2"]
    for row in alone:
        del row["to_bn"], row["eager_to_bn"], row["memory_to_bn"]
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, alone)))
    layer, eager = read_table(tmp_path / "bench.jsonl").benchmarks
    assert len(layer.lines) == len(alone)
    assert eager.lines[0][1:4] == ["", f"{alone[0]['eager_us']:.0f}", ""]


def test_long_measurements_are_folded_and_their_parts_readable(tmp_path):
    file = tmp_path / "table.jsonl"
    parts = {"conv.norm": {"shares": [0.123456, 1], "entropy": None}}
    file.write_text("\n".join(json.dumps({"seed": seed, "modes": parts}) for seed in range(13)))
    assert read_table(file).constants == {"modes": "conv.norm (shares (0.1235 1), entropy –)"}
    html = render([], Page(results=[file]))
    assert "<details><summary>13 rows</summary>" in html
    file.write_text("\n".join(json.dumps({"seed": seed}) for seed in range(501)))
    html = render([], Page(results=[file]))
    assert "501 rows, the first 500 shown" in html
    assert "<td>499</td>" in html
    assert "<td>500</td>" not in html
    file.write_text(json.dumps({"deep": json.loads("[" * 300 + "]" * 300)}))
    assert render([], Page(results=[file]))
    file.write_text('{"seed": 0}')
    assert "<details open><summary>1 row</summary>" in render([], Page(results=[file]))
