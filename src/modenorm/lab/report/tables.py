"""Numbers of runs put together: seeds averaged, variants compared, the paper's numbers beside."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modenorm.lab.bench.page import Table, tables_of
from modenorm.lab.data.folder import dataset_title, folder_name
from modenorm.lab.report.records import Record, is_number
from modenorm.lab.training import TrainConfig

NORMS = ("bn", "mn", "gn", "mgn", "in", "ln")
OF_NORMS = {
    "modes": ("mn", "mgn"),
    "sparsity": ("mn",),
    "groups": ("gn",),
    "gate": ("mn",),
    "variance": ("mgn",),
}
IN_LABEL = ("norm", "modes", "groups")
BASELINES = {"mn": "bn", "mgn": "gn"}
MOST_ROWS = 500


@dataclass(frozen=True)
class PaperNumber:
    """A published lowest error in percent and the configurations it belongs to.

    Attributes:
        where: Such as "Table 2".
        error: In percent.
        match: Settings that a configuration must have.
    """

    where: str
    error: float
    match: Mapping[str, Any]

    def belongs_to(self, config: Mapping[str, Any]) -> bool:
        """Whether the configuration has all the settings."""
        return all(config.get(name) == value for name, value in self.match.items())


@dataclass(frozen=True)
class Mean:
    """Mean over seeds, its standard error (None for one seed) and the number of seeds."""

    mean: float
    se: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean | None:
        """Average the numbers; None if there are none."""
        if not values:
            return None
        se = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        return cls(statistics.fmean(values), se, len(values))

    @property
    def short(self) -> str:
        """The mean as text, without its error."""
        return f"{self.mean:.2f}"

    def __str__(self) -> str:
        return self.short + ("" if self.se is None else f" ± {self.se:.2f}")


@dataclass
class Variant:
    """Runs that differ in nothing but the seed, one for each; further ones are `repeated`."""

    label: str
    config: dict[str, Any]
    runs: list[Record]
    paper: PaperNumber | None = None
    repeated: list[Record] = field(default_factory=list)

    @property
    def done(self) -> list[Record]:
        """The runs that have a result."""
        return [run for run in self.runs if run.result]

    def mean(self, measure: str) -> Mean | None:
        """Mean of a number of the results."""
        return self._mean(lambda result: result.get(measure))

    def domain(self, name: str) -> Mean | None:
        """Mean error in a domain."""
        return self._mean(lambda result: (result.get("domain_errors") or {}).get(name))

    def _mean(self, get: Callable[[dict[str, Any]], Any]) -> Mean | None:
        values = [get(run.result) for run in self.done]
        return Mean.of([value for value in values if is_number(value)])


@dataclass
class Experiment:
    """One model on one data set: the variants that were trained, and the domains of the data."""

    title: str
    variants: list[Variant]
    domains: list[str] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """Say in plain words how mode norms compare with their baselines."""
        return list(filter(None, map(self._compare, self.variants)))

    def _compare(self, variant: Variant) -> str:
        baseline = BASELINES.get(str(variant.config.get("norm")))
        ours = variant.mean("final_error")
        others = [v for v in self.variants if v.config["norm"] == baseline]
        theirs = others[0].mean("final_error") if others else None
        if ours is None or theirs is None:
            return ""
        word = "lower" if ours.mean < theirs.mean else "higher"
        gap = abs(ours.mean - theirs.mean)
        return (
            f"{variant.label} ends with an error of {ours} %, {gap:.2f} points {word} than "
            f"{others[0].label} ({theirs} %); {_significance(ours, theirs)}."
        )


def _significance(a: Mean, b: Mean) -> str:
    if a.se is None or b.se is None:
        return "with one seed this can be chance"
    larger = abs(a.mean - b.mean) > 2 * (a.se**2 + b.se**2) ** 0.5
    return f"that is {'more' if larger else 'less'} than twice the standard error of the difference"


def norm_label(config: Mapping[str, Any]) -> str:
    """A short name of the norm, such as "MN K=2"."""
    norm, modes = str(config.get("norm", "?")), config.get("modes")
    if isinstance(modes, Mapping):
        modes = ", ".join(f"{pattern} {k}" for pattern, k in modes.items())
    number = f" auto (K≤{modes})" if config.get("sparsity") else f" K={modes}"
    count = {"gn": f" G={config.get('groups')}"} | dict.fromkeys(("mn", "mgn"), number)
    return norm.upper() + count.get(norm, "")


def group(records: Iterable[Record], paper: Sequence[PaperNumber] = ()) -> list[Experiment]:
    """Sort runs into experiments and variants; runs without a configuration are left out.

    Runs of one experiment agree in all settings but the seed and those of the norm, and in their
    data: image folders at different places, or of different sizes, may have one name.
    """
    experiments: dict[str, dict[str, Variant]] = {}
    known_runs = [record for record in records if _is_configured(record)]
    sizes = _folder_sizes(known_runs)
    for record in known_runs:
        config = whole_config(record.config)
        settings = settings_of(config) | {"dataset": config["dataset"]}
        settings |= _size(record) or sizes.get(config["dataset"], {})
        common = {n: v for n, v in settings.items() if n not in (*OF_NORMS, "norm", "where")}
        known = experiments.setdefault(json.dumps(common, sort_keys=True), {})
        key = json.dumps(settings, sort_keys=True)
        known.setdefault(key, Variant("", settings, [])).runs.append(record)
    groups = [list(variants.values()) for variants in experiments.values()]
    found = [_experiment(_title(v, groups), v, paper) for v in groups]
    return sorted(found, key=lambda experiment: natural(experiment.title))


def _is_configured(record: Record) -> bool:
    return all(isinstance(record.config.get(name), str) for name in ("model", "dataset", "norm"))


def whole_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with settings that were added after it was written."""
    try:
        values: dict[str, Any] = json.loads(TrainConfig.from_json(json.dumps(config)).to_json())
    except ValueError:
        return config
    return values


def _size(record: Record) -> dict[str, Any]:
    """Of an image folder, as the result tells it."""
    names = ("train_images", "classes") if record.config["dataset"].startswith("folder:") else ()
    return {name: record.result[name] for name in names if name in record.result}


def _folder_sizes(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Sizes of image folders, for runs that have not told theirs: those of the first that has."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if size := _size(record):
            found.setdefault(record.config["dataset"], size)
    return found


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the result, without the seed and what the norm does not use.

    Of an image folder's path the last part is kept.
    """
    used = {
        name: value
        for name, value in config.items()
        if name != "seed" and config["norm"] in OF_NORMS.get(name, (config["norm"],))
    }
    if used["dataset"].startswith("folder:"):
        used["dataset"] = "folder:" + folder_name(used["dataset"])
    return used


def _title(variants: list[Variant], groups: list[list[Variant]]) -> str:
    """Model, data, and the settings that tell it from other experiments with both: one will do."""
    own = variants[0].config
    same = [v[0].config for v in groups if _pair(v[0].config) == _pair(own)]
    varying = [name for name in _varying(same) if name not in (*OF_NORMS, "norm", "where")]
    values = {name: [json.dumps(config.get(name)) for config in same] for name in varying}
    unique = [name for name in varying if len(set(values[name])) == len(same)]
    told = unique[:1] or varying
    return ", ".join([" on ".join(_pair(own)), *(f"{name} {own.get(name)}" for name in told)])


def _pair(config: Mapping[str, Any]) -> tuple[str, str]:
    return config["model"], dataset_title(config["dataset"])


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in a text by their value."""
    return [(int(part or 0), rest) for rest, part in re.findall(r"(\D*)(\d*)", text)]


def in_order(records: Sequence[Record], experiments: Iterable[Experiment]) -> list[Record]:
    """The runs in the order of the experiments and variants; those of none come last."""
    grouped = [run for e in experiments for variant in e.variants for run in variant.runs]
    known = {id(run) for run in grouped}
    return grouped + [record for record in records if id(record) not in known]


def _experiment(title: str, variants: list[Variant], paper: Sequence[PaperNumber]) -> Experiment:
    varying = [n for n in _varying([variant.config for variant in variants]) if n not in IN_LABEL]
    for variant in variants:
        more = [f"{name} {variant.config[name]}" for name in varying if name in variant.config]
        variant.label = ", ".join([norm_label(variant.config), *more])
        settings = settings_of(variant.config)
        variant.paper = next((p for p in paper if p.belongs_to(settings)), None)
        _set_repeated_apart(variant)
    order = {norm: place for place, norm in enumerate(NORMS)}
    variants.sort(key=lambda v: (order.get(v.config["norm"], 9), natural(v.label)))
    names = (run.result.get("domain_errors") or {} for v in variants for run in v.done)
    domains = list(dict.fromkeys(name for found in names for name in found))
    return Experiment(title, variants, domains if len(domains) > 1 else [])


def _set_repeated_apart(variant: Variant) -> None:
    """Keep one run of every seed, a done one if there is one, and put them in order."""
    by_seed: dict[str, Record] = {}
    for run in sorted(variant.runs, key=lambda run: (run.state != "done", not run.result)):
        by_seed.setdefault(str(whole_config(run.config).get("seed")), run)
    kept = {id(run) for run in by_seed.values()}
    variant.repeated = [run for run in variant.runs if id(run) not in kept]
    variant.runs = [by_seed[seed] for seed in sorted(by_seed, key=natural)]


def _varying(configs: list[dict[str, Any]]) -> list[str]:
    """Settings that differ between configurations that have them."""
    names = dict.fromkeys(name for config in configs for name in config)
    values = {name: {json.dumps(c[name]) for c in configs if name in c} for name in names}
    return [name for name in names if len(values[name]) > 1]


@dataclass(frozen=True)
class FileTable:
    """The first lines of a file of JSON lines; what is the same in all lines is said once.

    Lines of a benchmark also give the tables that the documentation has of them.
    """

    title: str
    columns: list[str]
    rows: list[list[Any]]
    constants: dict[str, Any]
    count: int = 0
    problem: str = ""
    benchmarks: Sequence[Table] = ()


def read_table(path: Path) -> FileTable:
    """Read a file of JSON lines, one object a line, such as the benchmarks write."""
    try:
        entries = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("a line is not a JSON object")
        cells = [{name: _cell(value) for name, value in entry.items()} for entry in entries]
    except (ValueError, OSError, RecursionError) as error:
        return FileTable(path.name, [], [], {}, problem=f"cannot be read: {error}")
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    flat = {name: {json.dumps(entry.get(name)) for entry in entries} for name in names}
    fixed = [name for name in names if len(entries) > 1 and len(flat[name]) == 1]
    columns = [name for name in names if name not in fixed]
    rows = [[row.get(name, "") for name in columns] for row in cells[:MOST_ROWS]]
    constants = {name: cells[0][name] for name in fixed if cells[0].get(name, "") != ""}
    benchmarks = _benchmarks(entries)
    return FileTable(path.name, columns, rows, constants, len(entries), benchmarks=benchmarks)


def _benchmarks(entries: list[dict[str, Any]]) -> list[Table]:
    try:
        return tables_of(entries)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return []  # lines that no benchmark wrote are shown as they are


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(_part, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_part(part)}" for name, part in value.items())
    return "" if value is None else value


def _part(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"({_cell(value)})"
    return "–" if value is None else str(_cell(value))
