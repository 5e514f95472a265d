import math

import pytest
import torch
from torch.nn import functional

from modenorm.lab.data.crops import AREA, RATIO, Boxes, draw_boxes, resample


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [(64, 64), (40, 100), (375, 500), (5, 90), (1, 1)])
def test_boxes_lie_inside_and_have_allowed_shapes(size: tuple[int, int]) -> None:
    top, left, height, width = draw_boxes(*size, 2000, seeded())
    assert (height >= 1).all()
    assert (width >= 1).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= size[0]).all()
    assert (left + width <= size[1]).all()
    # whole pixels: sides are rounded by up to a half
    assert ((width + 0.5) / (height - 0.5).clamp_min(0.1) >= RATIO[0]).all()
    assert ((width - 0.5) / (height + 0.5) <= RATIO[1]).all()


def test_areas_and_shapes_are_spread_evenly() -> None:
    top, left, height, width = (
        values.double() for values in draw_boxes(900, 900, 20_000, seeded())
    )
    area = height * width / 900**2
    assert area.min() > AREA[0] - 0.01
    # large parts of extreme shapes do not fit and are drawn again, so the mean is below 0.54
    assert 0.45 < area.mean() < 0.54
    small = area < 0.5
    assert (width / height)[small].log().mean().abs() < 0.01
    assert (width / height)[small].log().std() == pytest.approx(
        math.log(RATIO[1] / RATIO[0]) / math.sqrt(12), rel=0.02
    )
    assert (top / (900 - height + 1)).mean() == pytest.approx(0.5, abs=0.01)
    assert (left / (900 - width + 1)).mean() == pytest.approx(0.5, abs=0.01)


def test_boxes_are_a_function_of_the_generator() -> None:
    one, same, other = (draw_boxes(30, 40, 50, seeded(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.top, other.top)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_resampling_is_cutting_out_and_resizing(format: torch.memory_format) -> None:
    images = torch.rand(40, 3, 17, 13, dtype=torch.float64, generator=seeded())
    images = images.contiguous(memory_format=format)
    boxes = draw_boxes(17, 13, 40, seeded(1))
    flip = torch.randint(2, (40,), generator=seeded(2))
    found = resample(images, boxes, flip, (17, 13))
    for n, (top, left, height, width) in enumerate(zip(*(b.tolist() for b in boxes), strict=True)):
        part = images[n : n + 1, :, top : top + height, left : left + width]
        expected = functional.interpolate(part, (17, 13), mode="bilinear")[0]
        expected = expected.flip(2) if flip[n] else expected
        # centres of pixels are computed in float32, images are of order 1
        torch.testing.assert_close(found[n], expected, rtol=0, atol=1e-5)


def test_nothing_outside_a_part_matters() -> None:
    images = torch.full((1, 3, 8, 8), 1e6)
    images[:, :, 2:5, 3:7] = 1.0
    box = Boxes(*(torch.tensor([value]) for value in (2, 3, 3, 4)))
    found = resample(images, box, torch.zeros(1), (8, 8))
    # places are float32 of numbers up to 8: the neighbour's weight is below 1e-6
    torch.testing.assert_close(found, torch.ones_like(found), rtol=0, atol=1.0)
