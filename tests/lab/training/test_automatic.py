"""Trainings that look for their number of modes, and numbers of modes per layer."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from fake_data import fake_config, fake_data
from test_resume import same_end

from modenorm import record_gates
from modenorm.lab.models import create_model
from modenorm.lab.training import Run, TrainConfig, Training, load_model, train
from modenorm.lab.training.schedule import Schedule
from modenorm.lab.training.trainer import Diverged
from modenorm.modes.recording import mode_layers

AUTO = {
    "modes": 3,
    "sparsity": 0.2,
    "total": 36,
    "milestones": (),
    "augment": False,
    "model": "lenet",
}


def test_a_training_ends_with_a_smaller_model(tmp_path: Path) -> None:
    config = fake_config(**AUTO)
    result = train(config, tmp_path, data=fake_data(32))
    run = Run.of(config, tmp_path)
    assert run.path.name.startswith("lenet-fake-mnauto3-")
    numbers = result["num_modes"]
    assert all(1 <= k <= 3 for k in numbers.values())
    assert sum(numbers.values()) < 3 * len(numbers)
    model, checkpoint = load_model(run.pruned)
    assert {name: layer.num_modes for name, layer in mode_layers(model).items()} == numbers
    assert checkpoint.config.modes == numbers
    assert checkpoint.config.sparsity == 0
    assert result["pruning"]["change"] <= result["pruning"]["tolerance"]
    whole, _ = load_model(run.checkpoint)
    x = torch.randn(20, 3, 32, 32)
    assert model(x).shape == whole(x).shape
    for record in run.metrics():
        assert all(1 <= layer["distinct"] <= 3 for layer in record["modes"].values())
    assert json.loads((run.path / "result.json").read_text()) == result


def test_modes_are_closed_before_the_learning_rate_falls() -> None:
    config = fake_config(**AUTO | {"total": 64, "milestones": (30, 50)})
    assert Schedule.of(config, 70).closing == 27
    assert Schedule.of(dataclasses.replace(config, milestones=(60,)), 70).closing == 44
    assert Schedule.of(dataclasses.replace(config, milestones=(1,)), 70).closing == 1


def test_modes_are_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config(**AUTO | {"total": 64})
    assert Schedule.of(config, 70).closing == 44
    taken = []
    monkeypatch.setattr(Training, "_close", lambda self: taken.append(self.position.step))
    train(config, tmp_path, data=fake_data(32))
    plain = dataclasses.replace(config, sparsity=0.0)
    assert Schedule.of(plain, 70).closing == 0
    train(plain, tmp_path, data=fake_data(32))
    assert taken == [44]
    ours, theirs = (load_model(Run.of(c, tmp_path).checkpoint)[0] for c in (config, plain))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)  # nothing else differs


def test_a_larger_tolerance_leaves_fewer_modes(tmp_path: Path) -> None:
    data, left = fake_data(32), []
    for sparsity in (1e-6, 0.2, 50.0):
        result = train(fake_config(**AUTO | {"sparsity": sparsity}), tmp_path, data=data)
        assert result["pruning"]["tolerance"] == pytest.approx(sparsity / 10)
        left.append(sum(result["num_modes"].values()))
    assert left[0] == 6
    assert left == sorted(left, reverse=True)
    assert left[2] == 2


def test_closed_modes_stay_closed_to_the_end(tmp_path: Path) -> None:
    config = fake_config(**AUTO | {"eval_every": 25})
    seen = {}

    def look(training: Training) -> None:
        biases = [layer.gate.bias.detach() for layer in mode_layers(training.model).values()]
        seen[training.position.step] = [int((bias < -1e3).sum()) for bias in biases]

    result = train(config, tmp_path, data=fake_data(32), listener=look)
    assert seen[16] == [0, 0]
    assert sum(seen[25]) > 0
    assert seen[36] == seen[25]
    for closed, left in zip(seen[25], result["num_modes"].values(), strict=True):
        assert left <= 3 - closed
    last = Run.of(config, tmp_path).metrics()[-1]["modes"].values()
    assert all(layer["distinct"] <= 3 - k for layer, k in zip(last, seen[25], strict=True))


def test_a_training_that_diverges_before_its_modes_are_closed_says_so(tmp_path: Path) -> None:
    config = fake_config(**AUTO | {"total": 20, "lr": 1e30})
    with pytest.raises(Diverged, match="no longer finite"):
        train(config, tmp_path, data=fake_data(32))


@pytest.mark.parametrize("step", [16, 25, 30])  # modes are closed after step 25
def test_an_interrupted_automatic_training_ends_the_same(tmp_path: Path, step: int) -> None:
    config = fake_config(**AUTO)
    train(config, tmp_path / "whole", data=fake_data(32))

    class Killed(Exception):
        pass

    def kill(training: Training) -> None:
        if training.position.step >= step:
            training.save()
            raise Killed

    with pytest.raises(Killed):
        train(config, tmp_path / "twice", data=fake_data(32), listener=kill)
    train(config, tmp_path / "twice", data=fake_data(32))
    first, second = (Run.of(config, tmp_path / name) for name in ("whole", "twice"))
    same_end(first, second)
    assert first.result()["num_modes"] == second.result()["num_modes"]


def test_numbers_of_modes_per_layer() -> None:
    model = create_model("lenet", num_classes=4, norm="mn", modes={"stage1.*": 4, "*": 2})
    assert {n: layer.num_modes for n, layer in mode_layers(model).items()} == {
        "stage1.norm": 4, "stage2.norm": 2
    }  # fmt: skip
    with record_gates(model) as gates:
        model(torch.randn(8, 3, 32, 32)).sum().backward()
    assert [g[0].shape[1] for g in gates.values()] == [4, 2]
    generator = torch.Generator()
    twice = [
        create_model(
            "lenet", num_classes=4, norm="mgn", modes={"*": 3}, generator=generator.manual_seed(1)
        )
        for _ in range(2)
    ]
    for a, b in zip(*(m.state_dict().values() for m in twice), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"says nothing of the layer stage2\.norm"):
        create_model("lenet", num_classes=4, norm="mn", modes={"stage1.*": 4})
    with pytest.raises(ValueError, match=r"'stage7', which matches no layer.*stage1\.norm"):
        create_model("lenet", num_classes=4, norm="mn", modes={"stage7": 4, "*": 1})


def test_configurations() -> None:
    config = fake_config(modes={"block1.*": 4, "*": 2})
    assert TrainConfig.from_json(config.to_json()) == config
    assert config.run_id.startswith("nin-fake-mn4.2-")
    assert "sparsity" not in config.chosen()  # names and results of earlier trainings stay
    auto = fake_config(modes=8, sparsity=0.2)
    assert TrainConfig.from_json(auto.to_json()) == auto
    for changes, message in (
        ({"modes": 0}, "modes is 0"),
        ({"modes": {"*": 0}}, "at least 1 for each layer"),
        ({"modes": {}}, "modes is {}"),
        ({"sparsity": -1.0}, "sparsity is -1.0"),
        ({"sparsity": 0.1, "norm": "mgn"}, "unless the norm is mn"),
    ):
        with pytest.raises(ValueError, match=message):
            fake_config(**changes)


def test_names_of_earlier_trainings_stay() -> None:
    """Results on disk are found by these hashes."""
    from modenorm.lab.experiments.paper import settings_key

    root = Path(__file__).parents[3]
    line = json.loads((root / "results" / "table1.jsonl").read_text().splitlines()[0])
    from modenorm.lab.experiments import TABLES

    assert line["settings"] in {settings_key(cell.config(0)) for cell in TABLES["table1"]}
