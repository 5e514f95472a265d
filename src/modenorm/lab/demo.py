"""The demo: batch norm against mode norm on a mixture of four domains, small enough for a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modenorm.lab.data import DataSet
from modenorm.lab.report import Gallery, Page, Picture, Record, make_gallery
from modenorm.lab.report.gallery import domain_picture
from modenorm.lab.report.tables import Experiment, group, norm_label
from modenorm.lab.training import RECIPES, Run, TrainConfig, load_model

NORMS: tuple[dict[str, Any], ...] = (
    {"norm": "bn"},
    {"norm": "mn", "modes": 2},
    {"norm": "mn", "modes": 4},
    {"norm": "gn", "groups": 2},
    {"norm": "mgn", "modes": 2},
)

DOMAINS = {
    "digits": "white digits on black",
    "signs": "coloured digits on cluttered ground, between other digits",
    "textures": "two-coloured patterns",
    "shapes": "dark silhouettes on light paper",
}

INTRO = (
    "Normalization layers keep the activations of a network at mean 0 and variance 1, which "
    "makes it train. Batch normalization (BN) uses one mean and one variance for all images. If "
    "the images come from sources that look nothing alike, one mean and one variance describe "
    "none of them well.",
    "Mode normalization (MN) learns to sort the images into K modes and gives each mode "
    "statistics of its own. Nobody tells it where an image comes from: a small gate in each "
    "layer finds out. Mode group normalization (MGN) does the same with the channels of one "
    "image, where group normalization (GN) uses fixed groups.",
    "Here the same small network (LeNet) is trained with each of them on a mixture of four "
    "sources of images, each with ten classes, all 40 to be told apart. Each training sees "
    "{samples:,} images, so that all take a minute or two on a laptop; the paper's see "
    "{published:,}. Differences of a point between such short trainings come and go with the "
    "seed, so look at what the modes find rather than at who wins. Learning rate and momentum are "
    "those of the paper's experiment with LeNet; the batch of 32 and the number of epochs were "
    "settled after looking at test errors, so the errors illustrate and prove nothing.",
)


def demo_configs(epochs: int = 4, seeds: Sequence[int] = (0,)) -> list[TrainConfig]:
    """The trainings: five norms, each with every seed; the learning rate drops before the end."""
    milestones = (epochs - 1,) if epochs > 1 else ()
    shared: dict[str, Any] = {
        "model": "lenet",
        "dataset": "builtin",
        "batch": 32,
        "lr": 0.1,
        "momentum": 0.0,
        "total": epochs,
        "milestones": milestones,
    }
    return [TrainConfig(**shared, **norm, seed=s) for norm in NORMS for s in seeds]


def add_gallery(run: Run, data: DataSet, count: int = 24) -> None:
    """Look which test images the modes of a trained run claim, unless that was done before."""
    if run.config.norm not in ("mn", "mgn") or _has_gallery(run.path):
        return
    model, checkpoint = load_model(run.checkpoint)
    scaling = (checkpoint.about.mean, checkpoint.about.std)
    gallery, _ = make_gallery(model, data.test, data.name, scaling, count=count)
    gallery.save(run.path)


def _has_gallery(folder: Path) -> bool:
    try:
        return Gallery.load(folder) is not None
    except ValueError:
        return False


def demo_page(data: DataSet, epochs: int) -> Page:
    """What the demo's page says before the numbers."""
    lengths = {"samples": epochs * len(data.train), "published": RECIPES["lenet"]["total"]}
    intro = [paragraph.format(**lengths) for paragraph in INTRO]
    pictures = []
    for place, name in enumerate(data.test.domain_names):
        what = DOMAINS.get(name, name)
        image = domain_picture(data.test, place)
        pictures.append(Picture(f"{name}: {what}", f"Twenty samples of {name}: {what}", image))
    return Page("What mode normalization does: a demonstration", intro, pictures)


def demo_experiment(records: Sequence[Record]) -> Experiment:
    """The demo's trainings, put together."""
    (experiment,) = group(records)
    return experiment


def mode_rows(records: Sequence[Record]) -> list[tuple[str, str, dict[str, list[float]]]]:
    """Norm, layer, and the shares of the modes in every domain, at the end of each training."""
    several = len({record.config.get("seed") for record in records}) > 1
    seeds = {r.path: f", seed {r.config.get('seed')}" if several else "" for r in records}
    return [
        (norm_label(record.config) + seeds[record.path], layer, found.get("by_domain", {}))
        for record in records
        if record.metrics
        for layer, found in record.metrics[-1].get("modes", {}).items()
    ]


def separation(by_domain: dict[str, list[float]]) -> str:
    """Say in plain words how far a layer's modes tell the domains apart.

    >>> separation({"digits": [0.96, 0.04], "shapes": [0.02, 0.98]})
    'mode 0 takes 96 % of digits and 2 % of shapes'
    >>> separation({"digits": [0.51, 0.49], "shapes": [0.5, 0.5]})
    'all domains use the modes alike'
    """
    gaps = []
    for k in range(len(next(iter(by_domain.values()), []))):
        ordered = sorted(by_domain, key=lambda name: by_domain[name][k])
        low, high = ordered[0], ordered[-1]
        gaps.append((by_domain[high][k] - by_domain[low][k], -k, high, low))
    if not gaps or max(gaps)[0] < 0.05:
        return "all domains use the modes alike"
    _, k, high, low = max(gaps)
    shares = by_domain[high][-k], by_domain[low][-k]
    return f"mode {-k} takes {shares[0]:.0%} of {high} and {shares[1]:.0%} of {low}".replace(
        "%", " %"
    )
