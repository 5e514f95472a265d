"""Streamed batches: the same for every number of workers, share by share, and from any step on."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import distributed

from modenorm.lab.data import DataError, Listing, index_folder, streaming
from modenorm.lab.data.loader import SampleStream
from modenorm.lab.data.streaming import (
    CENTRE,
    IMAGENET,
    ImageFiles,
    Place,
    StreamedImages,
    StreamLoader,
    Wanted,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Listing:
    """Smooth pictures of several sizes, each of its own colours."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(13):
        width, height = 30 + 7 * number, 60 - 2 * number
        x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
        picture = np.stack((x * 255, y * 255, np.full_like(x, 20 * number)), axis=-1)
        path = folder / "train" / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.astype(np.uint8)).save(path, quality=95)
    (folder / "val").symlink_to(folder / "train")
    return index_folder(folder).train


@contextlib.contextmanager
def batches(
    listing: Listing, workers: int, start: int = 0, part: slice = slice(None), **options: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    data = StreamedImages(listing, 16, CPU, channels_last=True, workers=workers)
    stream = SampleStream(len(data), 5, options.get("seed", 3), augment=True)
    loader = StreamLoader(data, stream, 7, part)
    loader.load(start, 7)
    found = []
    for _ in range(start, 7):
        loader.feed()
        found.append(loader.next_batch())
    yield found
    loader.close()


def test_the_number_of_workers_makes_no_difference(listing: Listing) -> None:
    before = torch.get_rng_state()
    with batches(listing, 0) as alone, batches(listing, 2) as helped:
        for one, other in zip(alone, helped, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
    assert torch.equal(torch.get_rng_state(), before)
    assert alone[0][0].is_contiguous(memory_format=torch.channels_last)
    with batches(listing, 0, seed=4) as different:
        assert not torch.equal(different[0][0], alone[0][0])


def test_shares_and_later_starts_are_the_same_samples(listing: Listing) -> None:
    with (
        batches(listing, 0) as whole,
        batches(listing, 0, start=4) as later,
        batches(listing, 0, part=slice(0, 2)) as left,
        batches(listing, 0, part=slice(2, 5)) as right,
    ):
        for step, (images, labels) in enumerate(whole):
            parts = left[step], right[step]
            assert torch.equal(torch.cat([part[0] for part in parts]), images)
            assert torch.equal(torch.cat([part[1] for part in parts]), labels)
        assert torch.equal(
            torch.stack([b[0] for b in later]), torch.stack([b[0] for b in whole[4:]])
        )


def test_a_sample_differs_from_epoch_to_epoch(listing: Listing) -> None:
    files, path = ImageFiles(16, seed=0), os.fsencode(listing.paths[4])
    wanted = [Wanted(Place(4, epoch), path, listing.labels[4]) for epoch in range(20)]
    images, labels = files.__getitems__(wanted)
    assert labels.tolist() == [listing.labels[4]] * 20
    assert len({image.numpy().tobytes() for image in images}) == 20
    # red rises from left to right, unless the picture is flipped
    red = images[:, :, :, 0].double().mean(1)
    rising = (red[:, -1] > red[:, 0]).sum()
    assert 3 <= rising <= 17


def test_evaluation_sees_the_centre_of_every_sample_once(listing: Listing) -> None:
    data = StreamedImages(listing, 16, CPU, workers=0)
    seen = list(data.batches(5, slice(2, 13)))
    assert [len(batch.labels) for batch in seen] == [5, 5, 1]
    assert torch.cat([batch.labels for batch in seen]).tolist() == list(listing.labels[2:])
    images = torch.cat([batch.images for batch in seen])
    assert images.is_contiguous()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
    pixels = images * std + mean
    for path, image in zip(listing.paths[2:], pixels, strict=True):
        number = int(path.stem)
        width, height = 30 + 7 * number, 60 - 2 * number
        side = min(width, height) * CENTRE
        for length, colours in ((width, image[0].mean(0)), (height, image[1].mean(1))):
            middle = (length - side) / 2 + side / 32  # of the first pixel
            expected = 255 * (middle - 0.5) / (length - 1)
            # linear in place, up to JPEG and whole numbers
            assert colours[0] == pytest.approx(expected, abs=3)
            assert colours[-1] == pytest.approx(255 - expected, abs=3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_is_named_in_one_sentence(tmp_path: Path, workers: int) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    data = StreamedImages(Listing((tmp_path / "broken.jpg",), (0,)), 8, CPU, workers=workers)
    with pytest.raises(DataError, match=r"broken\.jpg: expected a complete image") as error:
        list(data.batches(1))
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("epoch", [None, 0])
def test_grey_of_16_bits_is_not_white(tmp_path: Path, epoch: int | None) -> None:
    Image.fromarray(np.full((9, 9), 0x80FF, np.uint16)).save(tmp_path / "deep.png")
    wanted = Wanted(Place(0, epoch), os.fsencode(tmp_path / "deep.png"), 0)
    images, _ = ImageFiles(8).__getitems__([wanted])
    assert (images == 0x80).all()


def test_a_process_that_trains_with_others_is_not_forked() -> None:
    """A fork while a thread of its process group holds one of Python's locks hangs the child."""
    options = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group("gloo", **options)
    try:
        assert streaming._context().get_start_method() == "forkserver"
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("parent", "code"), [("alive", 0), ("dead", 1)])
def test_a_worker_whose_training_died_before_it_began_ends(parent: str, code: int) -> None:
    training = os.getpid() if parent == "alive" else -1
    child = os.fork()
    if child == 0:
        streaming._follow_the_training(0, training)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
