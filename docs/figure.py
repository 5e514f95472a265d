"""Draw docs/img/how_it_works.svg: python docs/figure.py. It gives the same file anywhere.

One channel of 128 samples: half have a low mean and little spread, half a high mean and much. Batch
norm and mode norm see the same numbers; the gate is set by hand, as one that has learnt would be.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import modenorm

SAMPLES, POSITIONS, BINS = 64, 256, 60
WIDTH, HEIGHT, PANEL, TITLE, FLOOR, CURVE = 960, 425, 290, 168, 370, 150
Kinds = tuple[Tensor, Tensor]
COLOURS = ("#2563a8", "#d9730d")
INK, GREY, PAPER, BOX = "#1f2933", "#66727f", "#ffffff", "#eef2f7"
STEPS = (
    ("input x", "samples × channels", "× positions"),
    ("moments", "mean and variance", "per sample, channel"),
    ("gate", "each sample belongs", "softly to K modes"),
    ("statistics", "mean and variance", "of every mode"),
    ("map", "scale and shift", "per sample, channel"),
    ("output y", "as large", "as x"),
)


def quantiles(count: int) -> Tensor:
    """A standard normal sample without chance."""
    return torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)


def kind(mean: float, spread: float) -> Tensor:
    """Samples (N, 1, L) whose means scatter a little."""
    return mean + 0.3 * quantiles(SAMPLES)[:, None, None] + spread * quantiles(POSITIONS)


def normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of batch norm and of mode norm, in training."""
    layer = modenorm.ModeNorm1d(1, num_modes=2, dtype=torch.float64)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.tensor([[-4.0], [4.0]]))
        layer.gate.bias.zero_()
        return nn.BatchNorm1d(1, dtype=torch.float64)(x), layer(x)


def text(x: float, y: float, words: str, size: int = 13, colour: str = INK, more: str = "") -> str:
    """A line of text, centred at x."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="middle" '
        f"{more}>{words}</text>"
    )


def flow() -> list[str]:
    """The row of boxes: what happens to a tensor."""
    parts, width, gap = [], 136, 22
    for i, (name, *lines) in enumerate(STEPS):
        left = 17 + i * (width + gap)
        ends = i in (0, len(STEPS) - 1)
        parts.append(
            f'<rect x="{left}" y="24" width="{width}" height="74" rx="8" '
            f'fill="{PAPER if ends else BOX}" stroke="{GREY}"/>'
        )
        parts.append(text(left + width / 2, 47, name, 15, more='font-weight="600"'))
        parts += [text(left + width / 2, 66 + 16 * j, line, 12) for j, line in enumerate(lines)]
        if i:
            parts.append(
                f'<path d="M{left - gap + 3} 61 h{gap - 9}" stroke="{INK}" marker-end="url(#tip)"/>'
            )
    parts.append(text(254, 119, "reads x once", 12, GREY))
    parts.append(text(492, 119, "small arrays, whatever K is", 12, GREY))
    parts.append(text(728, 119, "reads x, writes y", 12, GREY))
    return parts


def panel(left: float, title: str, kinds: Kinds, ticks: range, names: tuple[str, str]) -> list[str]:
    """Both kinds' values as filled curves over an axis with ticks."""
    low, high = ticks[0] - 0.5, ticks[-1] + 0.5

    def at(value: float) -> float:
        return left + PANEL * (value - low) / (high - low)

    parts = [text(left + PANEL / 2, TITLE, title, 14, more='font-weight="600"')]
    counts = [torch.histc(values.flatten(), BINS, low, high) for values in kinds]
    highest = torch.stack(counts).max()
    for count, colour, name in zip(counts, COLOURS, names, strict=True):
        heights = CURVE * count / highest
        points = " ".join(
            f"{left + PANEL * (i + 0.5) / BINS:.1f},{FLOOR - height:.1f}"
            for i, height in enumerate(heights.tolist())
        )
        parts.append(
            f'<polygon points="{left},{FLOOR} {points} {left + PANEL},{FLOOR}" fill="{colour}" '
            f'fill-opacity="0.25"/><polyline points="{points}" fill="none" stroke="{colour}" '
            f'stroke-width="1.5"/>'
        )
        top = left + PANEL * (int(heights.argmax()) + 0.5) / BINS
        parts.append(text(top, FLOOR - float(heights.max()) - 8, name, 13, colour))
    parts.append(f'<path d="M{left} {FLOOR} h{PANEL}" stroke="{INK}"/>')
    for tick in ticks:
        parts.append(f'<path d="M{at(tick):.1f} {FLOOR} v5" stroke="{INK}"/>')
        parts.append(text(at(tick), FLOOR + 19, f"{tick}".replace("-", "−"), 12, GREY))
    return parts


def draw() -> str:
    """The figure as SVG."""
    kinds = kind(-2, 0.4), kind(2, 1.2)
    both = [y.chunk(2) for y in normalised(torch.cat(kinds))]
    apart, together = ("kind 1", "kind 2"), ("", "both kinds")
    panels = (("Input: two kinds of samples", kinds, range(-4, 7), apart),
              ("Batch norm: one mean, one variance", both[0], range(-3, 4), apart),
              ("Mode norm, K = 2", both[1], range(-3, 4), together))  # fmt: skip
    parts = flow()
    for i, content in enumerate(panels):
        parts += panel(20 + i * (PANEL + 25), *content)
    parts.append(text(WIDTH / 2, 410, "values of one channel", 12, GREY))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'width="{WIDTH}" height="{HEIGHT}" '
            f'font-family="system-ui, -apple-system, Segoe UI, sans-serif">',
            "<title>The steps of mode normalization, and two kinds of samples before and after "
            "batch norm and mode norm</title>",
            f'<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker>'
            f"</defs>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{PAPER}"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (Path(__file__).parent / "img" / "how_it_works.svg").write_text(draw())
