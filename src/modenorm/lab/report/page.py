"""One self-contained page: tables as HTML, charts and galleries from JSON that lies in the page."""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from modenorm.lab.report.gallery import COLUMNS, Gallery
from modenorm.lab.report.records import Record, is_number
from modenorm.lab.report.tables import (
    Experiment,
    Mean,
    PaperNumber,
    group,
    in_order,
    read_table,
)
from modenorm.lab.training.files import write_whole

CURVE_POINTS = 160
MODE_POINTS = 24
MODE_VALUES = 300_000
GALLERY_BYTES = 1_500_000


@dataclass(frozen=True)
class Picture:
    """A picture with a caption; `image` is a WebP."""

    caption: str
    alternative: str
    image: bytes

    @property
    def address(self) -> str:
        """The picture as an address that needs no network."""
        return data_address(self.image)


@dataclass
class Page:
    """What a page shows besides runs.

    Attributes:
        title: The heading.
        intro: Paragraphs below it.
        pictures: Shown after the paragraphs.
        paper: Published numbers to put beside ours.
        results: Files of JSON lines, such as benchmarks, each shown as a table.
    """

    title: str = "Mode normalization: report"
    intro: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    paper: Sequence[PaperNumber] = ()
    results: Iterable[Path] = field(default_factory=list)


def data_address(image: bytes) -> str:
    """A WebP as a data: address."""
    return "data:image/webp;base64," + base64.b64encode(image).decode()


def write_page(path: Path, records: Sequence[Record], page: Page) -> int:
    """Write the page about some runs and return its size in bytes."""
    content = render(records, page).encode(errors="replace")  # file names need not be Unicode
    write_whole(path, content)
    return len(content)


def render(records: Sequence[Record], page: Page) -> str:
    """The page about some runs, as HTML."""
    experiments = group(records, page.paper)
    records = in_order(records, experiments)
    galleries, left_out = _galleries(records)
    runs = _run_data(records, experiments)
    data = {
        "experiments": [_experiment_data(experiment, records) for experiment in experiments],
        "runs": runs,
        "galleries": galleries,
        "galleryColumns": COLUMNS,
    }
    counts = {state: sum(r.state == state for r in records) for state in STATES}
    return (
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            experiments=experiments,
            records=records,
            counts={state: count for state, count in counts.items() if count},
            has_modes=any(run["modes"] for run in runs),
            tables=[read_table(file) for file in page.results],
            galleries_left_out=left_out,
            data=clean(data),
            made=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
            plotly=plotly_script(),
        )
    )


STATES = ("done", "incomplete", "failed", "broken")


def _environment() -> Environment:
    loader = PackageLoader("modenorm.lab.report", "assets")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
    environment.filters["mean"] = lambda mean: "–" if mean is None else str(mean)
    environment.filters["brief"] = lambda value: f"{value:.2f}" if is_number(value) else value
    environment.globals["asset"] = lambda name: Markup(loader.get_source(environment, name)[0])
    return environment


@cache
def plotly_script() -> Markup:
    """What draws the charts of a page.

    Raises:
        ValueError: The package with it is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ValueError(
            "the page needs the package plotly: pip install plotly, then give the same command "
            "again"
        ) from None
    return Markup(get_plotlyjs())


def clean(value: Any) -> Any:
    """The value with null for numbers that are not finite: JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [clean(entry) for entry in value]
    if isinstance(value, dict):
        return {key: clean(entry) for key, entry in value.items()}
    return value


def _mean_data(mean: Mean | None) -> dict[str, Any] | None:
    """A mean for the charts; its texts are those of the tables, as JavaScript rounds 0.125 up."""
    if mean is None:
        return None
    texts = {"text": str(mean), "short": mean.short}
    return {"mean": mean.mean, "se": mean.se, "n": mean.n, **texts}


def _experiment_data(experiment: Experiment, records: Sequence[Record]) -> dict[str, Any]:
    places = {id(record): place for place, record in enumerate(records)}
    return {
        "title": experiment.title,
        "domains": experiment.domains,
        "variants": [
            {
                "label": variant.label,
                "runs": [places[id(run)] for run in variant.runs],
                "final": _mean_data(variant.mean("final_error")),
                "domains": [_mean_data(variant.domain(name)) for name in experiment.domains],
            }
            for variant in experiment.variants
        ],
    }


def _run_data(records: Sequence[Record], experiments: list[Experiment]) -> list[dict[str, Any]]:
    labels = {
        id(run): f"{experiment.title}: {variant.label}"
        for experiment in experiments
        for variant in experiment.variants
        for run in variant.runs
    }
    per_point = sum(_values_per_point(record) for record in records)
    points = max(2, min(MODE_POINTS, MODE_VALUES // max(1, per_point)))
    return [
        {
            "name": record.name,
            "title": f"{labels.get(id(record), record.name)}, seed {record.config.get('seed')}",
            "state": record.state,
            "seed": record.config.get("seed"),
            "final_error": record.result.get("final_error"),
            "top_error": record.result.get("top_error"),
            "domain_errors": record.result.get("domain_errors"),
            **_curves(record),
            "modes": _modes(record, points),
        }
        for record in records
    ]


def thin(entries: Sequence[Any], most: int) -> list[Any]:
    """At most `most` entries, evenly spaced, with the first and the last."""
    if len(entries) <= most:
        return list(entries)
    return [entries[round(i * (len(entries) - 1) / (most - 1))] for i in range(most)]


def _curves(record: Record) -> dict[str, Any]:
    metrics = thin(record.metrics, CURVE_POINTS)
    losses = [entry.get("train_loss") for entry in metrics]
    return {
        "samples": [entry["samples"] for entry in metrics],
        "test_error": [round(float(entry["test_error"]), 4) for entry in metrics],
        "train_loss": [None if _number(loss) is None else round(loss, 5) for loss in losses],
    }


def _values_per_point(record: Record) -> int:
    layers = record.metrics[-1].get("modes", {}) if record.metrics else {}
    return sum(len(shares) for layer in layers.values() for shares in _all_shares(layer).values())


def _all_shares(layer: Any) -> dict[str | None, list[float]]:
    """Percent of every domain that a layer's modes take and, as None, of all samples.

    Those that are not as they should be are left out.
    """
    found = layer if isinstance(layer, Mapping) else {}
    domains = found.get("by_domain")
    rows = {None: found.get("shares"), **(domains if isinstance(domains, Mapping) else {})}
    return {
        name: [round(100 * share, 1) for share in shares]
        for name, shares in rows.items()
        if isinstance(shares, list) and all(map(is_number, shares))
    }


def _number(value: Any) -> float | None:
    return value if is_number(value) else None


def _modes(record: Record, points: int) -> dict[str, Any] | None:
    """Shares of every layer's modes over training, in all samples and in every domain."""
    entries = [entry for entry in record.metrics if entry.get("modes")]
    if not entries:
        return None
    chosen, layers = thin(entries, points), []
    for name, layer in entries[-1]["modes"].items():
        shares = _over_training([_all_shares(entry["modes"].get(name)) for entry in chosen])
        if None in shares:
            layers.append(
                {
                    "name": name,
                    "shares": shares.pop(None),
                    "by_domain": shares,
                    "entropy": _number(layer.get("entropy")),
                    "distinct": _number(layer.get("distinct")),
                    "needed": _number(_needed(record).get(name)),
                }
            )
    return {"samples": [entry["samples"] for entry in chosen], "layers": layers} if layers else None


def _over_training(history: list[dict[Any, list[float]]]) -> dict[Any, list[list[float]]]:
    """The rows that all evaluations have, of as many modes as there are at the end."""
    count = len(history[-1].get(None, []))
    return {
        name: [rows[name] for rows in history]
        for name in history[-1]
        if count and all(len(rows.get(name, [])) == count for rows in history)
    }


def _needed(record: Record) -> Mapping[str, Any]:
    """The numbers of modes that pruning left, by layer."""
    numbers = record.result.get("num_modes")
    return numbers if isinstance(numbers, Mapping) else {}


def _galleries(records: Sequence[Record]) -> tuple[list[dict[str, Any]], list[str]]:
    """The galleries as far as there is room for them, and the runs whose galleries are left out."""
    shown: list[dict[str, Any]] = []
    left_out, size = [], 0
    for place, record in enumerate(records):
        if record.gallery is None:
            continue
        found = {"run": place, **gallery_data(record.gallery)}
        length = len(json.dumps(found))
        if shown and size + length > GALLERY_BYTES:
            left_out.append(record.name)
        else:
            size += length
            shown.append(found)
    return shown, left_out


def gallery_data(gallery: Gallery) -> dict[str, Any]:
    """A gallery as the page's script wants it."""
    layers = [
        {
            "name": layer.name or "model",
            "findings": list(layer.findings),
            "modes": [
                {
                    "share": mode.share,
                    "claims": [[c.tile, c.gate, c.label, c.domain] for c in mode.claims],
                }
                for mode in layer.modes
            ],
        }
        for layer in gallery.layers
    ]
    return {
        "dataset": gallery.dataset,
        "numImages": gallery.num_images,
        "tile": gallery.tile,
        "layers": layers,
        "picture": data_address(gallery.picture),
    }
