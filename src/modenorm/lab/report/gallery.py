"""The images that each mode claims most strongly, as the paper's Figure 2 shows them.

A gallery is kept as two files, in a run's directory or elsewhere: gallery.json says which image is
where and how strongly it is claimed, gallery.webp holds every image once, as tiles of one picture.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from modenorm.lab.data import ImageSet
from modenorm.lab.data.loader import DeviceImages, Scaling
from modenorm.lab.training.files import write_whole
from modenorm.listeners import Listener
from modenorm.modes.findings import ModeReport
from modenorm.modes.recording import listening, mode_layers
from modenorm.modes.report import mode_report

FORMAT = "modenorm gallery 1"
COLUMNS = 16
LARGEST_TILE = 64
LARGEST_PICTURE = 16383
"""Side of a WebP."""
BATCH = 512
BROKEN = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)


@dataclass(frozen=True)
class Claim:
    """One image that a mode claims: its tile, its gate, and what it shows."""

    tile: int
    gate: float
    label: str
    domain: str


@dataclass(frozen=True)
class ModeClaims:
    """A mode: its share of all images, and the images it claims most strongly."""

    share: float
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class LayerClaims:
    """A layer: its modes, and what is wrong with them in plain words."""

    name: str
    modes: tuple[ModeClaims, ...]
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gallery:
    """What the modes of some layers claim; `picture` is a WebP of tiles in rows of `COLUMNS`."""

    dataset: str
    num_images: int
    tile: int
    layers: tuple[LayerClaims, ...]
    picture: bytes

    def save(self, folder: Path) -> None:
        """Write gallery.json and gallery.webp."""
        values = asdict(self)
        del values["picture"]
        write_whole(folder / "gallery.webp", self.picture)
        text = json.dumps({"format": FORMAT, "crc32": zlib.crc32(self.picture), **values})
        write_whole(folder / "gallery.json", text.encode())

    @classmethod
    def load(cls, folder: Path) -> Gallery | None:
        """Read a gallery; None if there is none, ValueError if it is broken."""
        if not (folder / "gallery.json").exists():
            return None
        try:
            values = json.loads((folder / "gallery.json").read_text())
            if values.pop("format") != FORMAT:
                raise ValueError("unknown format")
            picture = (folder / "gallery.webp").read_bytes()
            if values.get("crc32", checksum := zlib.crc32(picture)) != checksum:
                raise ValueError("the picture is not the one that was written with it")
            with Image.open(BytesIO(picture)) as opened:
                tiles = COLUMNS * (opened.height // values["tile"])
            layers = tuple(_read_layer(layer, tiles) for layer in values.pop("layers"))
            name, count, side = values["dataset"], values["num_images"], values["tile"]
            return cls(str(name), int(count), int(side), layers, picture)
        except BROKEN as error:
            raise ValueError(f"gallery.json or gallery.webp is broken ({error})") from None


def _read_layer(values: dict[str, Any], tiles: int) -> LayerClaims:
    modes = []
    for mode in values["modes"]:
        claims = tuple(_read_claim(**claim) for claim in mode["claims"])
        if any(not 0 <= claim.tile < tiles for claim in claims):
            raise ValueError("it names a tile that is not there")
        modes.append(ModeClaims(float(mode["share"]), claims))
    return LayerClaims(str(values["name"]), tuple(modes), tuple(map(str, values["findings"])))


def _read_claim(tile: Any, gate: Any, label: Any, domain: Any) -> Claim:
    return Claim(int(tile), float(gate), str(label), str(domain))


def choose_layers(names: Sequence[str], wanted: Sequence[str], most: int) -> list[str]:
    """The layers asked for, or at most `most` evenly spaced ones with the first and the last."""
    if not names:
        raise ValueError("this model has no modes: choose a run with --norm mn or mgn")
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise ValueError(f"the model has no mode norm {unknown[0]!r}: choose of {', '.join(names)}")
    if wanted or len(names) <= most:
        return list(wanted or names)
    places = np.linspace(0, len(names) - 1, most).round().astype(int)
    return [names[place] for place in places]


def look(
    model: nn.Module, batches: Iterable[Any], layers: Sequence[str]
) -> tuple[dict[str, Tensor], ModeReport]:
    """Gates of every sample, (N, K) on the CPU, and the report on them.

    Of mode group norms, which have gates for channels, each sample's means over its channels.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in layers}

    def listener(name: str) -> Listener:
        return lambda gates: found[name].append(gates if gates.ndim == 2 else gates.mean(1))

    modules = mode_layers(model)
    with listening([(modules[name], listener(name)) for name in layers]):
        report = mode_report(model, batches)
    return {name: torch.cat(gates).float().cpu() for name, gates in found.items()}, report


def strongest(gates: Tensor, count: int) -> list[Tensor]:
    """For each mode, the samples with the largest gates, largest first; ties in random order."""
    order = torch.randperm(len(gates), generator=torch.Generator().manual_seed(0))
    ranks = gates[order].argsort(dim=0, descending=True, stable=True)[:count]
    return [order[column] for column in ranks.t()]


def make_gallery(
    model: nn.Module,
    images: ImageSet,
    dataset: str,
    scaling: tuple[Sequence[float], Sequence[float]],
    *,
    layers: Sequence[str] = (),
    count: int = 24,
    most_layers: int = 12,
) -> tuple[Gallery, ModeReport]:
    """Look which images the modes of a trained model claim.

    Args:
        model: In evaluation mode, with mode norms or mode group norms.
        images: Usually the test set.
        dataset: Its name.
        scaling: Mean and standard deviation of the channels that the model was trained with.
        layers: Names of layers; without, all of them or `most_layers` spread evenly.
        count: Images for each mode.
        most_layers: See `layers`.
    """
    mean, std = (tuple(values) for values in scaling)
    data = DeviceImages(images, next(model.parameters()).device, scaling=Scaling(mean, std))
    tile = min(LARGEST_TILE, images.images.shape[-1])
    batches, pixels = data.batches(BATCH), images.images.__getitem__
    chosen = choose_layers(list(mode_layers(model)), layers, most_layers)
    return gallery_of(model, batches, images, pixels, dataset, tile, chosen, count)


def gallery_of(
    model: nn.Module,
    batches: Iterable[Any],
    known: ImageSet,
    pixels: Callable[[list[int]], Tensor],
    dataset: str,
    tile: int,
    layers: Sequence[str],
    count: int,
) -> tuple[Gallery, ModeReport]:
    """`make_gallery` of images that come in batches.

    Args:
        model: In evaluation mode.
        batches: What it takes of all images, in order.
        known: Labels and domains of the images; their pixels are not looked at.
        pixels: Returns those of some samples, uint8 (N, 3, H, W).
        dataset: The set's name.
        tile: Side of a picture on the page; less if there are very many.
        layers: Names of the layers to show.
        count: Images for each mode.
    """
    gates, report = look(model, batches, layers)
    tiles: dict[int, int] = {}
    findings = {layer.name: layer.findings() for layer in report.layers}
    found = tuple(
        _claims(name, gates[name], known, count, tiles, tuple(findings[name])) for name in layers
    )
    tile = min(tile, LARGEST_PICTURE // math.ceil(len(tiles) / COLUMNS))
    picture = tile_picture(pixels(list(tiles)), tile)
    return Gallery(dataset, len(known.labels), tile, found, picture), report


def _claims(
    name: str,
    gates: Tensor,
    images: ImageSet,
    count: int,
    tiles: dict[int, int],
    findings: tuple[str, ...],
) -> LayerClaims:
    modes = []
    for k, samples in enumerate(strongest(gates, count)):
        claims = tuple(
            Claim(
                tile=tiles.setdefault(sample, len(tiles)),
                gate=round(float(gates[sample, k]), 4),
                label=images.classes[int(images.labels[sample])],
                domain=images.domain_names[int(images.domains[sample])],
            )
            for sample in samples.tolist()
        )
        modes.append(ModeClaims(round(float(gates[:, k].mean()), 4), claims))
    return LayerClaims(name, tuple(modes), findings)


def tile_picture(images: Tensor, tile: int) -> bytes:
    """A WebP with the images as tiles, in rows of `COLUMNS`."""
    rows = math.ceil(len(images) / COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * tile, rows * tile))
    for place, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        picture = Image.fromarray(np.ascontiguousarray(image)).resize((tile, tile))
        sheet.paste(picture, (place % COLUMNS * tile, place // COLUMNS * tile))
    return encode(sheet, "WEBP", quality=82, method=4)


def encode(picture: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of a picture file."""
    buffer = BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def contact_sheet(gallery: Gallery, scale: int = 2, columns: int = 12) -> Image.Image:
    """The gallery as one picture: a block of images for each mode, two beside each other."""
    blocks = [(layer, k) for layer in gallery.layers for k in range(len(layer.modes))]
    places = list(_places(gallery))
    step, margin, heading = gallery.tile * scale + 4, 16, 34
    rows = max(math.ceil(len(layer.modes[k].claims) / columns) for layer, k in blocks)
    width, height = columns * step + margin, rows * step + heading
    size = (2 * width + margin, (max(y for _, y in places) + 1) * height + margin)
    sheet, source = Image.new("RGB", size, "white"), Image.open(BytesIO(gallery.picture))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(18)
    for (layer, k), (x, y) in zip(blocks, places, strict=True):
        left, top, mode = margin + x * width, margin + y * height, layer.modes[k]
        words = f"{layer.name or 'model'}, mode {k}: share {100 * mode.share:.1f} %"
        draw.text((left, top), words, "black", font)
        for i, claim in enumerate(mode.claims):
            place = (left + i % columns * step, top + heading - 8 + i // columns * step)
            sheet.paste(_tile(source, claim.tile, gallery.tile, scale), place)
    return sheet


def _places(gallery: Gallery) -> Iterator[tuple[int, int]]:
    """Column and row of every mode's block; each layer begins a row."""
    row = 0
    for layer in gallery.layers:
        yield from ((k % 2, row + k // 2) for k in range(len(layer.modes)))
        row += math.ceil(len(layer.modes) / 2)


def _tile(source: Image.Image, number: int, tile: int, scale: int) -> Image.Image:
    x, y = number % COLUMNS * tile, number // COLUMNS * tile
    cut = source.crop((x, y, x + tile, y + tile))
    return cut.resize((tile * scale, tile * scale), Image.Resampling.NEAREST)


def domain_picture(images: ImageSet, domain: int, columns: int = 10, rows: int = 2) -> bytes:
    """A WebP with samples of one domain, each class in turn."""
    own = torch.nonzero(images.domains == domain)[:, 0]
    labels = images.labels[own]
    by_class = [own[labels == label][:rows] for label in labels.unique()[:columns].tolist()]
    chosen = [samples[row] for row in range(rows) for samples in by_class if row < len(samples)]
    tile = images.images.shape[-1]
    sheet = Image.new("RGB", (len(by_class) * tile, rows * tile))
    for place, sample in enumerate(chosen):
        picture = Image.fromarray(images.images[sample].permute(1, 2, 0).contiguous().numpy())
        sheet.paste(picture, (place % len(by_class) * tile, place // len(by_class) * tile))
    return encode(sheet, "WEBP", quality=85)


def write_picture(picture: Image.Image, path: str | os.PathLike[str]) -> None:
    """Write a picture file as a whole; the kind follows the ending."""
    kind = {".png": "PNG", ".webp": "WEBP", ".jpg": "JPEG"}[Path(path).suffix.lower()]
    write_whole(Path(path), encode(picture, kind))
