"""What only a GPU can show: captured steps, streams, and their agreement with plain ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_data import fake_config, fake_data, fake_images
from test_resume import same_end

from modenorm.lab.data.loader import PADDING, DeviceImages, Loader, SampleStream
from modenorm.lab.models import generators
from modenorm.lab.training import Run, Training, train, train_many
from modenorm.lab.training.ahead import Ahead
from modenorm.lab.training.evaluate import Evaluation
from modenorm.lab.training.lane import Lane
from modenorm.lab.training.ranks import Ranks
from modenorm.lab.training.sources import SharedData
from modenorm.lab.training.step import capture

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def deterministic_convolutions() -> Iterator[None]:
    """Backward passes that add in any order would differ from run to run by themselves."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        yield


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("augment", "resized"), [(False, None), (True, None), (True, (8, 8))])
def test_batches_are_those_of_the_cpu(
    augment: bool, resized: tuple[int, int] | None, channels_last: bool
) -> None:
    batches = []
    for device in (CPU, CUDA):
        padding = PADDING if augment and not resized else 0
        data = DeviceImages(fake_images(50), device, padding=padding, channels_last=channels_last)
        stream = SampleStream(50, 8, 0, augment=augment, resized=resized)
        loader = Loader(data, stream, capacity=8)
        loader.load(3, 9)
        batches.append([loader.next_batch() for _ in range(6)])
    for plain, fast in zip(*batches, strict=True):
        torch.testing.assert_close(fast[0].cpu(), plain[0], rtol=0, atol=1e-5 if resized else 3e-6)
        assert torch.equal(fast[1].cpu(), plain[1])


def started(tmp_path: Path, **changes: object) -> Training:
    config = fake_config(**changes)
    data = SharedData(CUDA, None, fake_data()).get(config)
    training = Training(Run.of(config, tmp_path), data, Lane(CUDA))
    training.lane.join()
    training._load_chunk()
    torch.cuda.synchronize()
    return training


def test_capture_changes_nothing(tmp_path: Path) -> None:
    training = started(tmp_path)
    step = training._step
    before = [tensor.clone() for tensor in step.state()]
    draws = [generator.get_state() for generator in generators(training.model)]
    capture(step, generators(training.model), training.lane)
    torch.cuda.synchronize()
    for old, new in zip(before, step.state(), strict=True):
        assert torch.equal(old, new)
    for old, generator in zip(draws, generators(training.model), strict=True):
        assert torch.equal(old, generator.get_state())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "bn", "dtype": "bfloat16", "channels_last": True},
        {"norm": "mgn"},
        {"norm": "gn", "momentum": 0.0},
        {"crop": "resized", "channels_last": True},
    ],
)
@pytest.mark.parametrize("together", [1, 4])
def test_replays_follow_plain_steps(
    tmp_path: Path, changes: dict[str, object], together: int
) -> None:
    plain, fast = (started(tmp_path, **changes) for _ in range(2))
    replay = capture(fast._step, generators(fast.model), fast.lane, together)
    for training, advance in ((plain, plain._step.take_one), (fast, replay)):
        taken = 0
        with training.lane.enter():
            while taken < 10:
                taken += advance(10 - taken)
    torch.cuda.synchronize()
    # the same kernels; a capture may choose other convolution algorithms
    tolerance = 2e-2 if changes.get("dtype") == "bfloat16" else 1e-4
    torch.testing.assert_close(fast._step.loss_sum, plain._step.loss_sum, rtol=tolerance, atol=0)
    assert int(fast._step.loader._counter) == int(plain._step.loader._counter) == 10


@pytest.mark.parametrize("norm", ["bn", "mn", "mgn"])
def test_replayed_evaluations_see_the_weights_of_the_time(tmp_path: Path, norm: str) -> None:
    training = started(tmp_path, norm=norm)
    names, test = training.data.about.domain_names, training.data.test
    for _ in range(4):  # the second is captured
        with training.lane.enter():
            training._step()
            found = training._evaluation.queue()
            again = Evaluation(
                training.model, test, names, torch.float32, training.lane, Ranks(), distinct=False
            ).queue()
        torch.cuda.synchronize()
        assert torch.equal(found.counts, again.counts)
        torch.testing.assert_close(found.totals, again.totals)


def test_dropout_differs_from_replay_to_replay_and_resumes(tmp_path: Path) -> None:
    config = fake_config(norm="bn", augment=False)
    outcome = train(config, tmp_path / "whole", data=fake_data(), device="cuda")

    def interrupt(training: Training) -> None:
        if training.position.step >= 18:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(config, tmp_path / "parts", data=fake_data(), device="cuda", listener=interrupt,
              checkpoint_every=0.0)  # fmt: skip
    resumed = train(config, tmp_path / "parts", data=fake_data(), device="cuda")
    assert resumed["samples_seen"] == outcome["samples_seen"]
    losses = [
        [record["train_loss"] for record in Run.of(config, tmp_path / part).metrics()]
        for part in ("whole", "parts")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_alone_and_beside_others_is_the_same(tmp_path: Path) -> None:
    configs = [fake_config(total=600, eval_every=250, seed=seed) for seed in range(4)]
    train_many(configs, tmp_path / "beside", data=fake_data(), device="cuda", parallel=4)
    train(configs[2], tmp_path / "alone", data=fake_data(), device="cuda")
    same_end(Run.of(configs[2], tmp_path / "beside"), Run.of(configs[2], tmp_path / "alone"))


@pytest.mark.parametrize("parallel", [1, 2])
def test_compiled_beside_others_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: int
) -> None:
    """Those that train queue far ahead of another kind, whose network is traced meanwhile.

    Where there is no room for it, it is begun all the same, and waits.
    """
    monkeypatch.setattr(Ahead, "has", lambda ahead, config: True)
    settings = {"compile": True, "channels_last": True, "total": 600, "eval_every": 250}
    configs = [fake_config(norm=norm, **settings) for norm in ("bn", "mn")]
    train_many(configs, tmp_path / "beside", data=fake_data(), device="cuda", parallel=parallel)
    for config in configs:
        train(config, tmp_path / "alone", data=fake_data(), device="cuda")
        same_end(Run.of(config, tmp_path / "beside"), Run.of(config, tmp_path / "alone"))


def test_streamed_images_on_the_device(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(24):
        part, label = ("train", "val")[number % 4 == 3], "ab"[number // 4 % 2]
        path = tmp_path / "images" / part / label / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30 + number, 24), (9 * number, 80, 99)).save(path)
    config = fake_config(
        model="resnet20", dataset=f"folder:{tmp_path / 'images'}", image_size=16, stream=True,
        crop="resized", total=3, milestones=(), dtype="bfloat16", channels_last=True,
    )  # fmt: skip
    losses = []
    for device in ("cpu", "cuda"):
        train(config, tmp_path / device, device=device, workers=2)
        losses.append(Run.of(config, tmp_path / device).metrics()[-1]["train_loss"])
    # bfloat16 has 8 bits
    assert losses[1] == pytest.approx(losses[0], rel=5e-2)
