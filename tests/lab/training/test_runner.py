import contextlib
import dataclasses
import functools
import time
from pathlib import Path

import pytest
import torch
from fake_data import fake_config, fake_data
from test_resume import same_end
from torch import nn

from modenorm.lab.layers.batch_norm import StreamedBatchNorm2d
from modenorm.lab.training import (
    Checkpoint,
    CheckpointError,
    Diverged,
    Run,
    TrainConfig,
    Training,
    find_runs,
    queue,
    runner,
    sort_by_state,
    sweep,
    train,
    train_many,
)
from modenorm.lab.training import step as step_module
from modenorm.lab.training.ahead import Ahead
from modenorm.lab.training.pace import Pace
from modenorm.lab.training.ranks import Ranks
from modenorm.lab.training.sources import SharedData
from modenorm.lab.training.step import Step
from small_models import counting_backend


def test_alone_and_beside_others_is_the_same(tmp_path: Path) -> None:
    configs = [
        fake_config(total=20),
        fake_config(total=20, seed=1),
        fake_config(total=12, norm="bn", augment=False, channels_last=True),
        fake_config(total=10, norm="mgn", momentum=0.0),
    ]
    outcomes = train_many(configs, tmp_path / "beside", data=fake_data(), parallel=3)
    assert [outcome.run.config for outcome in outcomes] == configs
    for config in configs:
        train(config, tmp_path / "alone", data=fake_data())
        same_end(Run.of(config, tmp_path / "beside"), Run.of(config, tmp_path / "alone"))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which Dynamo hides
def test_compiled_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, dropout and all; Inductor itself is left out to save time."""
    traced = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(step_module, "compiles_on", lambda device: True)
    config = fake_config(total=6, eval_every=6, milestones=(), sparsity=0.1)
    compiled = dataclasses.replace(config, compile=True)
    results = [train(c, tmp_path, data=fake_data()) for c in (config, compiled)]
    assert results[0]["final_error"] == results[1]["final_error"]
    losses = [Run.of(c, tmp_path).metrics()[-1]["train_loss"] for c in (config, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(("compile", "on_gpu"), [(True, True), (True, False), (False, True)])
def test_batch_norms_of_compiled_trainings(
    compile: bool, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "compiles_on", lambda device: on_gpu)
    config, device = fake_config(norm="bn", compile=compile), torch.device("cpu")
    data = SharedData(device, None, fake_data()).get(config)
    model = Step.of(config, data, 9, 3, device, Ranks()).model
    norms = {type(part) for part in model.modules() if isinstance(part, nn.BatchNorm2d)}
    assert norms == {StreamedBatchNorm2d if compile and on_gpu else nn.BatchNorm2d}


@pytest.mark.parametrize("crop", ["padded", "resized"])
def test_compiled_drawing(crop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches, by one form for all seeds."""
    backend, graphs = counting_backend()
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    device = torch.device("cpu")
    for seed in range(2):
        config = fake_config(augment=True, crop=crop, seed=seed)
        data = SharedData(device, None, fake_data()).get(config)
        plain, compiled = (Step.of(config, data, 9, 3, device, Ranks()) for _ in range(2))
        compiled.compile()
        for step in (plain, compiled):
            step.loader.load(1, 4)
        for _ in range(3):
            assert all(map(torch.equal, compiled.draw(), plain.draw()))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("kind", "batch", "steps"),
    [("cpu", 4, 16), ("cuda", 4, 1024), ("cuda", 64, 512), ("cuda", 512, 256)],
)
def test_short_steps_are_prepared_many_at_once(kind: str, batch: int, steps: int) -> None:
    assert Pace.of(fake_config(batch=batch), kind, Ranks(), compiled=False).chunk == steps


def test_trainings_alternate_up_to_the_limit(tmp_path: Path) -> None:
    seen: list[str] = []

    def listener(training: Training) -> None:
        seen.append(training.run.path.name)

    configs = [fake_config(norm="bn", total=32, seed=seed) for seed in range(3)]
    train_many(configs, tmp_path, data=fake_data(), parallel=2, listener=listener)
    first, second, third = (config.run_id for config in configs)
    begin = seen.index(third)
    assert seen[:2] == [first, second]
    assert first not in seen[begin + 1 :]


def test_small_networks_leave_room_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "LARGE_SIDE_BY_SIDE", 2)
    monkeypatch.setattr(queue, "SIDE_BY_SIDE", {"lenet": 4})
    small = [fake_config(model="lenet", total=17, milestones=(), seed=seed) for seed in range(5)]
    large = [fake_config(model="resnet20", total=17, milestones=(), seed=seed) for seed in range(2)]
    began, ended = [], []

    def listener(training: Training) -> None:
        run = training.run.path
        if run not in began:
            began.append(run)
            beside = [path for path in began if path not in ended]
            shares = [4 if "lenet" in path.name else 2 for path in beside]
            assert sum(1 / share for share in shares) <= 1
            most.append(len(beside))
        if training.position.metrics:
            ended.append(run)

    most: list[int] = []
    train_many([*small, *large], tmp_path, data=fake_data(32), listener=listener)
    assert max(most) == 4
    assert len(began) == 7


def test_others_have_their_turns_before_another_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[Training] = []
    steps: list[list[int]] = []

    class Watched(Training):
        def __init__(self, *arguments: object, **options: object) -> None:
            steps.append([other.position.step for other in began])
            super().__init__(*arguments, **options)
            began.append(self)

    monkeypatch.setattr(runner, "Training", Watched)
    monkeypatch.setitem(runner.ROUNDS_BETWEEN_STARTS, "cpu", 5)
    configs = [fake_config(norm="bn", total=8, milestones=(), seed=seed) for seed in range(3)]
    train_many(configs, tmp_path, data=fake_data(), parallel=2)
    assert steps == [[], [5], [8, 5]]  # for the third there is no room before


def test_others_queue_far_ahead_of_one_that_takes_long_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, bool]] = []

    class Watched(Training):
        def queue_far_ahead(self, far: bool) -> None:
            seen.append((self.run.config.norm, self.position.step, far))

    monkeypatch.setattr(runner, "Training", Watched)
    monkeypatch.setattr(runner, "compiles_on", lambda device: True)
    monkeypatch.setattr(runner, "FAR_AHEAD_SECONDS", 0.0)
    config = fake_config(norm="bn", total=12, milestones=(), compile=True)
    another = dataclasses.replace(config, seed=1)
    configs = [config, another, dataclasses.replace(config, norm="mn")]
    train_many(configs, tmp_path, data=fake_data(), parallel=3)
    begin = [("bn", 0, True)] * 2
    assert seen == [*begin, *(("bn", 1, False) for _ in begin)]


@pytest.mark.parametrize("fails", [False, True])
def test_what_takes_long_to_start_is_begun_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """It waits for room; what fails meanwhile is begun again when there is some."""
    seen: list[str] = []

    class Watched(Training):
        def __init__(self, run: Run, *arguments: object, **options: object) -> None:
            seen.append(f"{run.config.norm} begins")
            if fails and seen.count("mn begins") == 1 and seen[-1] == "mn begins":
                raise torch.OutOfMemoryError
            super().__init__(run, *arguments, **options)

    def listener(training: Training) -> None:
        seen.append(training.run.config.norm)

    monkeypatch.setattr(runner, "Training", Watched)
    monkeypatch.setattr(runner, "compiles_on", lambda device: True)
    monkeypatch.setattr(runner, "FAR_AHEAD_SECONDS", 0.0)
    monkeypatch.setattr(Ahead, "has", lambda ahead, config: True)
    monkeypatch.setattr(time, "monotonic", lambda: float(len(seen)))
    config = fake_config(norm="bn", total=48, milestones=(), compile=True)
    configs = [config, dataclasses.replace(config, norm="mn")]
    found = train_many(configs, tmp_path, data=fake_data(), parallel=1, listener=listener)
    begin = ["bn begins", "mn begins"]
    turns = seen.count("bn")
    again = ["mn begins"] * fails
    assert seen == [*begin, *["bn"] * turns, *again, *["mn"] * turns]
    assert found[1].result["seconds"] == found[0].result["seconds"] - 1  # where the other began


def test_others_lose_nothing_when_one_can_not_go_on(tmp_path: Path) -> None:
    whole, broken = (fake_config(norm="bn", total=32, seed=seed) for seed in range(2))
    runs = [Run.of(config, tmp_path) for config in (whole, broken)]
    with runs[1].hold():
        runs[1].checkpoint.write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        train_many([whole, broken], tmp_path, data=fake_data(), parallel=2)
    assert Checkpoint.load(runs[0].checkpoint).position.step == 1


def test_training_learns(tmp_path: Path) -> None:
    result = train(fake_config(norm="bn", total=150, milestones=(100,)), tmp_path, data=fake_data())
    assert result["top_error"] <= result["final_error"] < 30
    assert result["samples_seen"] == 600
    assert result["domain_errors"].keys() == {"plain", "odd"}
    assert result["torch"] == torch.__version__


def test_the_first_steps_are_plain_sgd(tmp_path: Path) -> None:
    """The same updates by hand, with torch's unfused SGD and the loader's batches."""
    from modenorm.lab.data.loader import derive_seed
    from modenorm.lab.training.checkpoint import build_model
    from modenorm.lab.training.runner import SharedData

    config = fake_config(model="resnet20", norm="bn", total=3, milestones=(2,), augment=False)
    train(config, tmp_path, data=fake_data())
    found = Checkpoint.load(Run.of(config, tmp_path).checkpoint).part("model")

    data = SharedData(torch.device("cpu"), None, fake_data()).get(config).train
    model = build_model(
        config, 4, torch.Generator().manual_seed(derive_seed(config.seed, "weights"))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4, foreach=False)
    (everything,) = data.batches(100)
    from modenorm.lab.data.loader import SampleStream

    draws = SampleStream(len(data), config.batch, config.seed, augment=False).draw(0, 3)
    for step, index in enumerate(draws.sample):
        optimizer.param_groups[0]["lr"] = 0.01 if step < 2 else 0.001
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(everything.images[index]), everything.labels[index]
        )
        loss.backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        # ten layers of float32 gradients, summed in another order
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_bfloat16_trains(tmp_path: Path) -> None:
    result = train(fake_config(total=4, dtype="bfloat16"), tmp_path, data=fake_data())
    assert result["steps"] == 4


def test_running_momentum_reaches_the_layers(tmp_path: Path) -> None:
    from modenorm.lab.training.checkpoint import build_model

    model = build_model(fake_config(running_momentum=0.3), 4, torch.Generator())
    found = {m.momentum for m in model.modules() if hasattr(m, "running_mean")}
    assert found == {0.3}


def test_done_runs_are_not_repeated(tmp_path: Path) -> None:
    config = fake_config(total=2)
    first = train(config, tmp_path, data=fake_data())

    def refuse(training: Training) -> None:
        raise AssertionError("trained again")

    assert train(config, tmp_path, data=fake_data(), listener=refuse) == first


def test_sweep_does_the_rest(tmp_path: Path) -> None:
    done, missing = fake_config(total=2), fake_config(total=2, seed=1)
    failed = fake_config(total=20, norm="bn", lr=1e30)
    incomplete = fake_config(total=2, seed=2)
    train(done, tmp_path, data=fake_data())
    with pytest.raises(Diverged):
        train(failed, tmp_path, data=fake_data())
    with Run.of(incomplete, tmp_path).hold():
        pass
    configs = [done, failed, incomplete, missing]

    def names(states: dict[str, list[Run]]) -> dict[str, list[TrainConfig]]:
        return {state: [run.config for run in runs] for state, runs in states.items()}

    assert names(sort_by_state(configs, tmp_path)) == {
        "done": [done], "failed": [failed], "incomplete": [incomplete], "missing": [missing]
    }  # fmt: skip
    assert names(sweep(configs, tmp_path, data=fake_data())) == {
        "done": [done, incomplete, missing], "failed": [failed], "incomplete": [], "missing": []
    }  # fmt: skip
    assert len(find_runs(tmp_path)) == 4


def test_tensorboard_events_on_request(tmp_path: Path) -> None:
    config = fake_config(total=2)
    train(config, tmp_path, data=fake_data(), tensorboard=True)
    assert list((Run.of(config, tmp_path).path / "tensorboard").glob("events.*"))
    other = dataclasses.replace(config, seed=1)
    train(other, tmp_path, data=fake_data())
    assert not (Run.of(other, tmp_path).path / "tensorboard").exists()


def test_tensorboard_shows_all_evaluations_after_a_resume(tmp_path: Path) -> None:
    """Also those of before it was asked for."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = fake_config(norm="bn", total=6, eval_every=2, milestones=())
    run = Run.of(config, tmp_path)

    def stop(training: Training, evaluations: int) -> None:
        if len(training.position.metrics) == evaluations:
            raise InterruptedError

    for evaluations, tensorboard in ((1, False), (2, True), (9, True)):
        options = {"tensorboard": tensorboard, "checkpoint_every": 0, "data": fake_data()}
        with contextlib.suppress(InterruptedError):
            listener = functools.partial(stop, evaluations=evaluations)
            train(config, tmp_path, listener=listener, **options)
    events = accumulator.EventAccumulator(str(run.path / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("test_error")]
    told = [(entry["samples"], entry["test_error"]) for entry in run.metrics()]
    assert len(told) == 3
    assert shown == [(samples, pytest.approx(error)) for samples, error in told]


@pytest.mark.parametrize(
    "device", ["tpu", "meta", "cuda:99" if torch.cuda.is_available() else "cuda"]
)
def test_unknown_devices_are_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ValueError, match="device"):
        train(fake_config(), tmp_path, data=fake_data(), device=device)


def test_a_bad_configuration_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        train(fake_config(norm="gn", groups=7), tmp_path, data=fake_data())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["lenet", "lenet1989", "vgg13"])
def test_images_of_another_size_leave_no_directory(tmp_path: Path, model: str) -> None:
    with pytest.raises(ValueError, match=f"{model} needs 32×32 images, fake has 8×8: set"):
        train(fake_config(model=model), tmp_path, data=fake_data())
    assert not list(tmp_path.iterdir())
