import pytest
import torch
from torch import Tensor

from modenorm.lab.data import ImageSet
from modenorm.lab.data.loader import PADDING, DeviceImages, Loader, SampleStream, Scaling

CPU = torch.device("cpu")


def make_images(count: int, height: int = 6, width: int = 5, seed: int = 0) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, height, width), generator=generator).to(torch.uint8)
    labels = torch.arange(count) % 10
    return ImageSet(images, labels, labels % 2, tuple("0123456789"), ("even", "odd"))


def loaded(
    source: ImageSet, *, batch: int, augment: bool, channels_last: bool = False, seed: int = 0
) -> Loader:
    padding = PADDING if augment else 0
    data = DeviceImages(source, CPU, padding=padding, channels_last=channels_last)
    return Loader(data, SampleStream(len(source), batch, seed, augment=augment), capacity=8)


@pytest.mark.parametrize(("num_samples", "batch"), [(12, 4), (13, 4), (5, 7), (3, 8), (1, 2)])
def test_every_epoch_holds_every_sample_once(num_samples: int, batch: int) -> None:
    stream = SampleStream(num_samples, batch, seed=3, augment=False)
    order = stream.draw(0, 4 * num_samples).sample.flatten()
    for epoch in order.split(num_samples):
        assert sorted(epoch.tolist()) == list(range(num_samples))


def test_batches_straddle_epochs_and_are_full() -> None:
    stream = SampleStream(10, 4, seed=0, augment=True)
    draws = stream.draw(0, 5)
    assert all(values.shape == (5, 4) for values in draws)
    first = stream.draw(0, 2).sample.flatten().tolist() + draws.sample[2, :2].tolist()
    assert sorted(first) == list(range(10))


def test_draws_are_a_function_of_seed_and_step_alone() -> None:
    whole = SampleStream(23, 4, seed=5, augment=True).draw(0, 30)
    resumed = SampleStream(23, 4, seed=5, augment=True)
    for start, stop in [(17, 30), (0, 1), (1, 17), (16, 18)]:
        for all_steps, part in zip(whole, resumed.draw(start, stop), strict=True):
            assert torch.equal(all_steps[start:stop], part)
    other = SampleStream(23, 4, seed=6, augment=True).draw(0, 30)
    assert not torch.equal(whole.sample, other.sample)


def test_epochs_differ_and_draws_cover_their_ranges() -> None:
    draws = SampleStream(500, 500, seed=0, augment=True).draw(0, 3)
    assert not torch.equal(draws.sample[0], draws.sample[1])
    assert set(draws.dy.flatten().tolist()) == set(range(2 * PADDING + 1))
    assert set(draws.dx.flatten().tolist()) == set(range(2 * PADDING + 1))
    assert 0.4 < draws.flip.double().mean() < 0.6


def test_the_global_generator_is_neither_used_nor_changed() -> None:
    before = torch.get_rng_state()
    SampleStream(50, 5, seed=0, augment=True).draw(0, 20)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        SampleStream(0, 4, seed=0, augment=False)


def slow_batch(source: ImageSet, stream: SampleStream, step: int, scaling: Scaling) -> Tensor:
    """Pad, crop, flip and normalise one sample after the other."""
    height, width = source.images.shape[2:]
    mean = torch.tensor(scaling.mean, dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor(scaling.std, dtype=torch.float64).view(3, 1, 1)
    batch = []
    for values in zip(*(values[0] for values in stream.draw(step, step + 1)), strict=True):
        sample, dy, dx, flip, *_ = map(int, values)
        image = torch.zeros(3, height + 2 * PADDING, width + 2 * PADDING, dtype=torch.uint8)
        image[:, PADDING:-PADDING, PADDING:-PADDING] = source.images[sample]
        y, x = (dy, dx) if stream.augment else (PADDING, PADDING)
        image = image[:, y : y + height, x : x + width]
        batch.append((image.flip(2) if flip else image).double() - mean)
    return torch.stack(batch) / std


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("augment", [False, True])
def test_batches_equal_a_slow_loop_over_samples(augment: bool, channels_last: bool) -> None:
    source = make_images(30)
    loader = loaded(source, batch=8, augment=augment, channels_last=channels_last)
    loader.load(2, 8)
    for step in range(2, 8):
        images, labels = loader.next_batch()
        expected = slow_batch(source, loader.stream, step, loader.data.scaling)
        # float32 of numbers up to 255/std ≈ 4, a few roundings
        torch.testing.assert_close(images.double(), expected, rtol=0, atol=3e-6)
        order = loader.stream.draw(step, step + 1).sample[0]
        assert torch.equal(labels, source.labels[order])
        format = torch.channels_last if channels_last else torch.contiguous_format
        assert images.is_contiguous(memory_format=format)


def test_scaling_is_that_of_the_training_set() -> None:
    source = make_images(40)
    mean, std = Scaling.measure(source.images)
    values = source.images.double()
    torch.testing.assert_close(torch.tensor(mean).double(), values.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(std).double(), values.std((0, 2, 3), correction=0))


def test_a_constant_channel_stays_finite() -> None:
    source = make_images(4)
    source.images[:, 1] = 7
    (batch,) = DeviceImages(source, CPU).batches(4)
    assert batch.images.isfinite().all()
    assert batch.images[:, 1].abs().max() < 1e-5


@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize("channels_last", [False, True])
def test_evaluation_sees_every_sample_once_in_order(padding: int, channels_last: bool) -> None:
    source = make_images(23)
    data = DeviceImages(source, CPU, padding=padding, channels_last=channels_last)
    batches = list(data.batches(10))
    assert [len(batch.labels) for batch in batches] == [10, 10, 3]
    assert torch.equal(torch.cat([batch.labels for batch in batches]), source.labels)
    assert torch.equal(torch.cat([batch.domains for batch in batches]), source.domains)
    images = torch.cat([batch.images for batch in batches])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in data.scaling)
    torch.testing.assert_close(images, (source.images - mean) / std, rtol=0, atol=3e-6)


@pytest.mark.parametrize("channels_last", [False, True])
def test_resized_crops_on_the_device(channels_last: bool) -> None:
    source = make_images(30, 9, 8)
    data = DeviceImages(source, CPU, channels_last=channels_last)
    stream = SampleStream(30, 8, 0, augment=True, resized=(9, 8))
    loader = Loader(data, stream, capacity=8)
    loader.load(2, 8)
    (everything,) = data.batches(30)
    for step in range(2, 8):
        images, labels = loader.next_batch()
        draws = stream.draw(step, step + 1)
        assert torch.equal(labels, source.labels[draws.sample[0]])
        format = torch.channels_last if channels_last else torch.contiguous_format
        assert images.is_contiguous(memory_format=format)
        for n, values in enumerate(zip(*(values[0] for values in draws), strict=True)):
            sample, y, x, flip, height, width = map(int, values)
            part = everything.images[sample, None, :, y : y + height, x : x + width]
            wanted = torch.nn.functional.interpolate(part, (9, 8), mode="bilinear")[0]
            # float32 of numbers up to 4, interpolated
            torch.testing.assert_close(
                images[n], wanted.flip(2) if flip else wanted, rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("resized", [None, (6, 5)])
def test_parts_of_batches_are_all_of_them(resized: tuple[int, int] | None) -> None:
    source = make_images(30)
    data = DeviceImages(source, CPU, padding=0 if resized else PADDING)
    stream = SampleStream(30, 7, 0, augment=True, resized=resized)
    parts = (slice(None), slice(0, 2), slice(2, 7))
    loaders = [Loader(data, stream, 3, part) for part in parts]
    for loader in loaders:
        loader.load(0, 3)
    for _ in range(3):
        (images, labels), *others = (loader.next_batch() for loader in loaders)
        assert torch.equal(images, torch.cat([other[0] for other in others]))
        assert torch.equal(labels, torch.cat([other[1] for other in others]))
