"""The tables of the pages, built from results/bench_*.jsonl and never typed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from modenorm.lab.provenance import all_of
from modenorm.lab.training.files import read_objects

__all__ = ["Table", "markdown_table", "tables_of", "with_tables"]

Row = dict[str, Any]
NAMES = {
    "bn": "BN",
    "gn": "GN",
    "mgn2": "MGN K=2",
    "loop2": "loop K=2",
    "loop8": "loop K=8",
}
HEADLINES = (
    ("256x64x56x56", "NHWC", "bfloat16"),
    ("256x512x28x28", "NHWC", "bfloat16"),
    ("256x2048x7x7", "NHWC", "bfloat16"),
    ("256x64x56x56", "NCHW", "float32"),
    ("256x64x56x56", "NHWC", "float32"),
)


class Table(NamedTuple):
    """Cells of a table, and the sentence below it: where and when they were measured."""

    caption: str
    header: list[str]
    lines: list[list[str]]
    conditions: str

    def markdown(self) -> str:
        """The table as a page in docs/ has it, without the caption."""
        return f"{markdown_table(self.header, self.lines)}\n\n{self.conditions}"


def with_tables(text: str, results: Path) -> str:
    """The page with each table between its markers built anew.

    A table stands between `<!-- table NAME FILE -->` and `<!-- end -->`.
    """

    def rebuild(match: re.Match[str]) -> str:
        name, file = match["name"], match["file"]
        if name not in TABLES:
            raise ValueError(f"unknown table {name!r} of {file}: expected {', '.join(TABLES)}")
        table = _table(name, results / file)
        shown = table.markdown() if table and table.lines else "_not measured yet_"
        return f"<!-- table {name} {file} -->\n\n{shown}\n\n<!-- end -->"

    pattern = r"<!-- table (?P<name>\w+) (?P<file>[\w.]+) -->.*?<!-- end -->"
    return re.sub(pattern, rebuild, text, flags=re.DOTALL)


def _table(name: str, file: Path) -> Table | None:
    """The table of a file; None if there is nothing in it."""
    rows = read_objects(file)
    try:
        return TABLES[name](rows) if rows else None
    except KeyError as error:
        problem = f"a line without {error}"
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problem = f"a line with something else than it should have ({error})"
    raise ValueError(
        f"{file} has {problem}, so it is of another benchmark or an earlier version; measure it "
        "again, or delete that line"
    )


def tables_of(rows: list[Row]) -> list[Table]:
    """The tables of one benchmark's rows, known by a field of its own; none for other rows."""
    known = (names for field, names in KNOWN_BY.items() if all(field in row for row in rows))
    tables = [TABLES[name](rows) for name in next(known, ())] if rows else []
    return [table for table in tables if table.lines]


def _layer_table(rows: list[Row]) -> Table:
    caption = "One layer, forward and backward; the floor is the time of four copies of the tensor"
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["shape"], row["layout"], row["dtype"]), {})[row["norm"]] = row
    norms = list(dict.fromkeys(row["norm"] for row in rows))
    others = [norm for norm in norms if norm != "bn"]
    header = ["tensor", "floor µs", "BN µs", *(f"{_name(n)} × BN" for n in others)]
    header += ["MN K=2 × floor", "memory × BN"]
    lines = []
    for (shape, layout, dtype), found in cases.items():
        bn, mn = found.get("bn", {}), found.get("mn2", {})
        floors = (row["floor_us"] for row in found.values() if row.get("floor_us") is not None)
        cells = [f"{shape.replace('x', '×')} {layout} {dtype}", _us(next(floors, None))]
        cells += [_us(bn.get("device_us"))]
        cells += [_ratio(found.get(norm, {}).get("to_bn")) for norm in others]
        cells += [_ratio(mn.get("to_floor")), _ratio(mn.get("memory_to_bn"))]
        lines.append(cells)
    return Table(caption, header, lines, _conditions(rows))


def _eager_table(rows: list[Row]) -> Table:
    caption = "One layer, wall time of an eager call, and evaluation as a multiple of three passes"
    header = ["tensor", "BN eager µs", "MN K=2 eager µs", "× BN", "MN K=2 eval × 3 passes"]
    batch_norms = {_case(row): row for row in rows if row["norm"] == "bn"}
    lines = []
    for row in rows:
        if row["norm"] != "mn2" or "eager_us" not in row:
            continue
        bn = batch_norms.get(_case(row), {})
        label = f"{row['shape'].replace('x', '×')} {row['layout']} {row['dtype']}"
        evaluation = row["eval_us"] / (row["floor_us"] * 3 / 8)
        cells = [label, _us(bn.get("eager_us")), _us(row["eager_us"])]
        lines.append([*cells, _ratio(row.get("eager_to_bn")), _ratio(evaluation)])
    return Table(caption, header, lines, _conditions(rows))


def _headline_table(rows: list[Row]) -> Table:
    caption = "One layer, forward and backward, for a few tensors"
    norms = ["bn", "mn2", "mn8", "mgn2"]
    header = ["forward + backward, µs", "copy floor", *(_name(norm) for norm in norms)]
    shown = [row for row in rows if _case(row) in HEADLINES and row["norm"] in norms]
    found = {(*_case(row), row["norm"]): row for row in shown}
    lines = []
    for case in HEADLINES:
        if (*case, "bn") in found:
            shape, layout, dtype = case
            times = [_us(found.get((*case, norm), {}).get("device_us")) for norm in norms]
            floor = _us(found[(*case, "bn")]["floor_us"])
            lines.append([f"{shape.replace('x', '×')} {layout} {dtype}", floor, *times])
    return Table(caption, header, lines, _conditions(shown))


def _steps_table(rows: list[Row]) -> Table:
    caption = "A training step of a network, by norm"
    norms = list(dict.fromkeys(row["norm"] for row in rows))
    header = ["training step, ms", *map(_name, norms)]
    found = {(_network_name(row), row["norm"]): f"{row['step_us'] / 1e3:.1f}" for row in rows}
    names = dict.fromkeys(map(_network_name, rows))
    lines = [[name, *(found.get((name, norm), "") for norm in norms)] for name in names]
    return Table(caption, header, lines, _conditions(rows))


def _model_table(rows: list[Row]) -> Table:
    caption = "A training step of a network"
    header = ["network", "norm", "step ms", "× BN", "images/s", "memory × BN"]
    lines = [
        [
            _network_name(row),
            _name(row["norm"]),
            f"{row['step_us'] / 1e3:.1f}",
            _ratio(row["to_bn"]),
            f"{row['images_per_s']:.0f}",
            _ratio(row.get("memory_to_bn")),
        ]
        for row in rows
    ]
    return Table(caption, header, lines, _conditions(rows))


def _sync_table(rows: list[Row]) -> Table:
    caption = "One layer's step on each of several ranks, with statistics of its own and of all"
    header = ["tensor of a rank", "K", "ranks", "bytes given by a rank", "own µs", "shared µs"]
    header.append("exchange µs")
    lines = [
        [
            row["shape"].replace("x", "×"),
            str(row["modes"]),
            str(row["ranks"]),
            str(row["bytes"]),
            _us(row["local_us"]),
            _us(row["shared_us"]),
            _us(row["shared_us"] - row["local_us"]),
        ]
        for row in rows
    ]
    about = rows[0]
    busy = f"load of other processes {about['load']:.1f} on {about['cores']} cores"
    return Table(caption, header, lines, f"{about['backend']}, {busy}; {_conditions(rows)}")


def _train_table(rows: list[Row]) -> Table:
    caption = "Trainings of the laboratory"
    header = ["training", "norm", "step µs", "images/s", "speed × first"]
    lines = [
        [
            _training_name(row),
            _name(row["norm"]),
            _us(row["step_us"]),
            f"{row['images_per_s']:.0f}",
            _ratio(row["speed_to_first"]),
        ]
        for row in rows
    ]
    if "record_gates_percent" in rows[0]:
        caption += ", and what watching their modes costs"
        header += ["record_gates, % of eval", "mode log, % of training"]
        for line, row in zip(lines, rows, strict=True):
            within = row.get("record_gates_percent_within")
            line += [_with_error(row["record_gates_percent"], within)]
            line += [_ratio(row["log_modes_percent_of_training"])]
    return Table(caption, header, lines, _conditions(rows))


def _sparsity_table(rows: list[Row]) -> Table:
    caption = "What the penalty on modes costs"
    header = ["training step", "method", "step µs", "penalty µs", "% of it"]
    lines = [
        [
            f"{row['model']}, N={row['batch']}, {row['size']}², {row['dtype']}, "
            f"{_name(row['norm'])}",
            row["method"],
            _us(row["plain_us"]),
            _us(row["penalty_us"]),
            _with_error(row["percent_of_step"], row["percent_of_step_within"]),
        ]
        for row in rows
    ]
    return Table(caption, header, lines, _conditions(rows))


def _network_name(row: Row) -> str:
    mode = "compiled" if row["compiled"] else "eager"
    return f"{row['model']}, N={row['batch']}, {row['size']}², {row['dtype']}, {mode}"


def _training_name(row: Row) -> str:
    name = f"{row['model']}, N={row['batch']}, {row['size']}², {row['dtype']}, "
    if row.get("images", "noise") != "noise":
        return name + f"files of {row['images']}"
    return name + f"{row['parallel']} side by side"


TABLES: dict[str, Callable[[list[Row]], Table]] = {
    "layer": _layer_table,
    "eager": _eager_table,
    "headline": _headline_table,
    "model": _model_table,
    "steps": _steps_table,
    "sparsity": _sparsity_table,
    "sync": _sync_table,
    "train": _train_table,
}
KNOWN_BY = {
    "layout": ("headline", "layer", "eager"),
    "compiled": ("steps", "model"),
    "penalty_us": ("sparsity",),
    "shared_us": ("sync",),
    "speed_to_first": ("train",),
}


def _case(row: Row) -> tuple[str, str, str]:
    return row["shape"], row["layout"], row["dtype"]


def _name(norm: str) -> str:
    return NAMES.get(norm, f"MN K={norm.removeprefix('mn')}")


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _with_error(value: float | None, within: float | None) -> str:
    return _ratio(value) if within is None else f"{_ratio(value)} ± {_ratio(within)}"


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown; after the first column, those of numbers are set to the right."""
    numbers = [all(map(_is_number, cells)) for _, *cells in zip(header, *lines, strict=True)]
    rule = ["---", *("--:" if right else "---" for right in numbers[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))


def _is_number(cell: str) -> bool:
    return cell in ("", "missing") or cell.lstrip("+−-")[:1].isdigit()


def _conditions(rows: list[Row]) -> str:
    return (
        f"{all_of(rows, 'device')}, torch {all_of(rows, 'torch')}, "
        f"commit {all_of(rows, 'commit')}, {all_of(rows, 'date', 10)}; "
        "forward and backward together."
    )
