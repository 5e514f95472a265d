import hashlib

import pytest
import torch

from modenorm.lab.data import builtin, glyphs, load
from modenorm.lab.data.picture import contact_sheet
from modenorm.lab.data.verify import checksum

# Of make(80, 40, seed=0). It changes only when the drawings are changed on purpose.
PINNED = (
    "d10a21c80616e905dce51b257435ac2a7da942f96f2ef2a868f0e6dbf2f56fa3",
    "4b7df8bab4b0c1d7f4d0d29d3a855f31e617db2610938600ca652fbb954aad94",
)


@pytest.fixture(scope="module")
def data():
    return builtin.make(400, 80)


def test_the_same_bytes_everywhere():
    data = builtin.make.__wrapped__(80, 40, seed=0)
    assert (checksum(data.train), checksum(data.test)) == PINNED


def test_seeds_and_splits_differ(data):
    other = builtin.make(400, 80, seed=1)
    assert not torch.equal(other.train.images, data.train.images)
    pictures = {hashlib.sha256(image.numpy().tobytes()).digest() for image in data.train.images}
    assert len(pictures) == 400
    assert not pictures & {hashlib.sha256(i.numpy().tobytes()).digest() for i in data.test.images}


def test_contents(data):
    train = data.train
    assert train.images.shape == (400, 3, 32, 32)
    assert train.images.dtype == torch.uint8
    assert train.labels.bincount().tolist() == [10] * 40
    assert torch.equal(train.domains, train.labels // 10)
    assert train.domain_names == ("digits", "signs", "textures", "shapes")
    assert train.num_classes == len(set(train.classes)) == 40
    assert train.labels[:20].unique().numel() > 5


def test_odd_sizes():
    data = builtin.make(43, 3)
    assert data.train.labels.bincount().tolist() == [2, 2, 2] + [1] * 37
    assert len(data.test) == 3


def test_domains_have_different_statistics(data):
    """Brightness, contrast and colour are what modes can be told apart by."""
    x = data.train.images.double() / 255
    rows = []
    for domain in range(4):
        part = x[data.train.domains == domain]
        colour = (part.amax(1) - part.amin(1)).mean()
        rows.append([part.mean(), colour])
    (black, grey), signs, textures, shapes = [[float(v) for v in row] for row in rows]
    assert black < 0.2 < signs[0] < 0.42 < textures[0] < 0.6 < 0.7 < shapes[0]
    assert grey == 0 < shapes[1] < signs[1] < textures[1]


def test_neighbours_of_a_sign_say_nothing_about_its_class(monkeypatch):
    """The table of neighbours is drawn for each picture, not for each class."""
    drawn = []
    table = builtin.DIGIT_TABLE

    class Spy:
        def __getitem__(self, index):
            drawn.append(index)
            return table[index]

    monkeypatch.setattr(builtin, "DIGIT_TABLE", Spy())
    builtin.draw_signs(builtin._generator(0, 0, 13), 3, 200)
    assert len(drawn) == 2
    assert all(len(set(index.tolist())) == 10 for index in drawn)


def test_glyph_table():
    table = glyphs.table(glyphs.DIGITS)
    assert table.shape[0] == 10
    assert (abs(table) <= 1.1).all()
    assert (table[1, 2:] == glyphs.DIGITS["1"][-1]).all()


def test_load_uses_the_default_sizes(monkeypatch, data):
    monkeypatch.setattr(builtin, "make", lambda: data)
    assert load("builtin") is data


def test_contact_sheet(data):
    sheet = contact_sheet(data.train, columns=3, scale=1)
    assert sheet.size == (4 * (3 * 34 - 2 + 10) + 10, 10 * 34 - 2 + 20)
    colours = sheet.getcolors(1 << 20)
    assert len(colours) > 1000


@pytest.mark.parametrize("draw", [draw for draw, _ in builtin.DOMAINS.values()])
def test_drawing_stays_in_float32(draw):
    assert draw(builtin._generator(0), 1, 2).dtype == "float32"
