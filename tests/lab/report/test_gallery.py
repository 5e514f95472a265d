"""Galleries show the images with the largest gates, and survive the way through files."""

import io

import pytest
import torch
from PIL import Image
from torch import nn

import modenorm
from modenorm.lab.data import ImageSet
from modenorm.lab.report import Gallery, contact_sheet, make_gallery
from modenorm.lab.report.gallery import (
    COLUMNS,
    LARGEST_PICTURE,
    choose_layers,
    encode,
    strongest,
)

torch.set_num_threads(1)


class Brightness(nn.Module):
    """A gate that gives dark images to mode 0 and bright ones to mode 1."""

    def forward(self, features):
        value = features.mean(1)
        return torch.stack((-value, value), 1)


def brightness_model() -> nn.Sequential:
    model = nn.Sequential(modenorm.ModeNorm2d(3, gate=Brightness()), nn.Conv2d(3, 2, 3))
    return model.eval()


@pytest.fixture
def images() -> ImageSet:
    values = torch.linspace(0, 255, 50).to(torch.uint8)[torch.randperm(50)]
    return ImageSet(
        values[:, None, None, None].expand(50, 3, 8, 8).contiguous(),
        torch.arange(50) % 2,
        torch.arange(50) % 2,
        ("even/a", "odd/b"),
        ("even", "odd"),
    )


def made(images, **options) -> Gallery:
    return make_gallery(brightness_model(), images, "grey", ((128,) * 3, (64,) * 3), **options)[0]


def tile(gallery: Gallery, number: int) -> float:
    """Mean value of a tile of the picture."""
    side, picture = gallery.tile, Image.open(io.BytesIO(gallery.picture)).convert("L")
    x, y = number % COLUMNS * side, number // COLUMNS * side
    pixels = picture.crop((x, y, x + side, y + side)).tobytes()
    return sum(pixels) / len(pixels)


def test_modes_show_the_images_they_claim_most_strongly(images):
    gallery = made(images, count=5)
    (layer,) = gallery.layers
    values = images.images[:, 0, 0, 0].float()
    ordered = values.sort()[0]
    for mode, best in zip(layer.modes, (ordered[:5], ordered[-5:].flip(0)), strict=True):
        shown = [tile(gallery, claim.tile) for claim in mode.claims]
        assert shown == pytest.approx(best.tolist(), abs=4)  # WebP loses a little
        assert [claim.gate for claim in mode.claims] == sorted(
            (claim.gate for claim in mode.claims), reverse=True
        )
        for claim, value in zip(mode.claims, best, strict=True):
            sample = int((values == value).nonzero()[0])
            assert claim.domain == images.domain_names[sample % 2]
            assert claim.label == images.classes[sample % 2]
    assert layer.modes[0].share + layer.modes[1].share == pytest.approx(1, abs=1e-3)


def test_very_many_images_become_smaller(images, monkeypatch):
    monkeypatch.setattr("modenorm.lab.report.gallery.LARGEST_PICTURE", 20)
    gallery = made(images, count=50)
    assert gallery.tile == 5  # four rows
    values = images.images[:, 0, 0, 0].sort()[0].tolist()
    shown = [tile(gallery, claim.tile) for claim in gallery.layers[0].modes[0].claims]
    assert shown == pytest.approx(values, abs=12)  # of tiles that share WebP's blocks


def test_a_picture_is_as_large_as_a_webp_can_be():
    encode(Image.new("RGB", (1, LARGEST_PICTURE)), "WEBP")
    with pytest.raises(ValueError, match=f"limit of {LARGEST_PICTURE} pixels"):
        encode(Image.new("RGB", (1, LARGEST_PICTURE + 1)), "WEBP")


def test_ties_are_not_broken_by_position():
    gates = torch.tensor([[1.0, 0.0]] * 1000)
    first = strongest(gates, 10)[0]
    assert first.max() > 100
    assert torch.equal(first, strongest(gates, 10)[0])


def test_a_gallery_survives_the_way_through_files(images, tmp_path):
    gallery = made(images, count=3)
    gallery.save(tmp_path)
    assert Gallery.load(tmp_path) == gallery
    assert Gallery.load(tmp_path / "elsewhere") is None


def test_a_gallery_that_was_half_replaced_is_told(images, tmp_path):
    """As after a kill between the two files, which would show other images under the old names."""
    made(images, count=3).save(tmp_path)
    (tmp_path / "gallery.webp").write_bytes(made(images, count=4).picture)
    with pytest.raises(ValueError, match="broken"):
        Gallery.load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "gallery.webp").write_bytes(b"no picture"),
        lambda folder: (folder / "gallery.webp").unlink(),
        lambda folder: (folder / "gallery.json").write_text("{"),
        lambda folder: (folder / "gallery.json").write_text("[]"),
        lambda folder: (folder / "gallery.json").write_text(
            (folder / "gallery.json").read_text().replace('"tile": 0', '"tile": 99999')
        ),
    ],
    ids=["picture", "no picture", "json", "list", "tile"],
)
def test_a_broken_gallery_is_told(images, tmp_path, damage):
    made(images, count=3).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match="broken"):
        Gallery.load(tmp_path)


def test_mode_group_norms_have_galleries_too(images):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), modenorm.ModeGroupNorm(8, 3)).eval()
    gallery, report = make_gallery(model, images, "grey", ((128,) * 3, (64,) * 3), count=4)
    assert [len(mode.claims) for mode in gallery.layers[0].modes] == [4, 4, 4]
    shares = [mode.share for mode in gallery.layers[0].modes]
    assert shares == pytest.approx(report.layers[0].shares, abs=1e-3)


def test_the_contact_sheet_has_every_mode(images):
    gallery = made(images, count=5)
    sheet = contact_sheet(gallery, scale=2, columns=5)
    assert sheet.width > 2 * 5 * 2 * gallery.tile
    assert len(sheet.getcolors(1 << 20)) > 5


def test_choice_of_layers():
    names = [f"layer{i}" for i in range(10)]
    assert choose_layers(names, ["layer3"], 4) == ["layer3"]
    assert choose_layers(names, [], 4) == ["layer0", "layer3", "layer6", "layer9"]
    assert choose_layers(names, [], 10) == names
    with pytest.raises(ValueError, match="no mode norm 'conv'"):
        choose_layers(names, ["conv"], 4)


def test_a_model_without_modes(images):
    with pytest.raises(ValueError, match="no modes"):
        make_gallery(nn.Conv2d(3, 3, 3), images, "grey", ((0,) * 3, (1,) * 3))
