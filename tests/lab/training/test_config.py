import dataclasses
import json
from typing import Any

import pytest

from modenorm.lab.models import MODELS
from modenorm.lab.training import RECIPES, TrainConfig, recipe
from modenorm.lab.training.schedule import Schedule


def test_json_round_trip() -> None:
    config = recipe("lenet", options={"activation": "tanh"}, seed=3, milestones=(10, 20))
    assert TrainConfig.from_json(config.to_json()) == config


def test_run_ids_are_readable_stable_and_differ_in_every_setting() -> None:
    config = recipe("resnet20", norm="mn", modes=4, seed=2)
    assert config.run_id.startswith("resnet20-cifar10-mn4-n128-s2-")
    assert config.run_id == TrainConfig.from_json(config.to_json()).run_id
    assert config.run_id != dataclasses.replace(config, lr=0.2).run_id
    assert "/" not in recipe("resnet18", dataset="folder:/some/where").run_id
    assert recipe("resnet18", dataset="builtin").image_size is None


def test_patterns_of_modes_keep_their_order() -> None:
    """The first that matches decides."""
    modes = {"stage1.*": 4, "stage2.*": 3, "*": 4}
    config = recipe("lenet", norm="mn", modes=modes)
    read = TrainConfig.from_json(config.to_json())
    assert isinstance(read.modes, dict)
    assert list(read.modes) == list(modes)
    assert read.run_id == config.run_id
    backwards = recipe("lenet", norm="mn", modes=dict(reversed(modes.items())))
    assert backwards.run_id != config.run_id


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ({"batch": 0}, "batch is 0, but must be at least 1"),
        ({"lr": -0.1}, "lr is -0.1, but must be above 0 and at most 3.4"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"momentum": 1.0}, "momentum is 1.0, but must be at least 0 and below 1"),
        ({"unit": "hours"}, "unit is 'hours', but must be one of samples, epochs, updates"),
        ({"norm": "xx"}, "norm is 'xx', but must be one of bn, in"),
        ({"model": "alexnet"}, "model is 'alexnet', but must be one of lenet"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"milestones": (20, 10)}, "in rising order"),
        ({"milestones": (-1, 10)}, "above 0 and in rising order"),
        ({"image_size": 0}, "image_size is 0, but must be at least 1"),
        ({"running_momentum": 0.0}, "above 0 and at most 1"),
    ],
)
def test_bad_settings_name_value_rule_and_option(setting: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule) as error:
        TrainConfig(**{"model": "lenet", "dataset": "builtin", **setting})
    assert "set --" in str(error.value)


@pytest.mark.parametrize("text", ["[]", "{}", "nonsense", '{"model": "lenet", "colour": 1}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        TrainConfig.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"options": None}, {"options": 3}, {"dataset": 5}, {"seed": "0"}, {"augment": "no"},
        {"lr": "0.1"}, {"lr": None}, {"batch": True}, {"batch": 8.5}, {"milestones": 3},
        {"milestones": ["a"]}, {"image_size": "32"}, {"modes": "2"}, {"model": []},
        {"total": 10**400, "lr": 10**400}, {"dataset": 5, "stream": True},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_another_type_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        TrainConfig.from_json(json.dumps(json.loads(recipe("lenet").to_json()) | change))
    assert TrainConfig.from_json('{"model": "lenet", "dataset": "x", "lr": 1}').lr == 1


def test_every_model_has_a_recipe() -> None:
    assert RECIPES.keys() == MODELS.keys()
    for model in MODELS:
        assert recipe(model).model == model


def test_another_length_needs_its_own_milestones() -> None:
    for model in RECIPES:
        own = recipe(model)
        assert (
            recipe(model, total=own.total) == recipe(model, unit=own.unit, total=own.total) == own
        )
    assert recipe("resnet20", unit="updates", total=160).milestones == ()
    assert recipe("lenet", total=1000).milestones == ()
    assert recipe("lenet", total=1000, milestones=(500,)).milestones == (500,)
    with pytest.raises(ValueError, match="set --total"):
        recipe("lenet", unit="epochs")
    with pytest.raises(ValueError, match="must be one of"):
        recipe("lenet", unit="hours")


def test_table_1_counts_samples() -> None:
    schedule = Schedule.of(recipe("lenet"), 243_257)
    assert schedule.total == 27_343
    assert schedule.milestones == (19_532, 23_438)  # the first steps after 2.5 M and 3 M samples
    assert len(schedule.evaluations) == 35


def test_resnet_counts_epochs() -> None:
    schedule = Schedule.of(recipe("resnet20"), 50_000)
    assert schedule.total == 62_500
    assert schedule.milestones == (31_250, 46_875)
    assert len(schedule.evaluations) == 160


def test_table_2_counts_updates() -> None:
    config = recipe("lenet", batch=4, lr=0.02, unit="updates", total=50_000)
    config = dataclasses.replace(config, milestones=(35_000, 42_500), eval_every=7000)
    schedule = Schedule.of(config, 243_257)
    assert (schedule.total, schedule.milestones) == (50_000, (35_000, 42_500))
    assert schedule.evaluations == (*range(7000, 50_000, 7000), 50_000)


def test_learning_rate_drops_before_the_step_of_a_milestone() -> None:
    config = recipe("lenet", batch=1, unit="updates", total=10, milestones=(4, 6), eval_every=3)
    schedule = Schedule.of(config, 100)
    rates = [schedule.lr_at(step) for step in range(10)]
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001] * 4)
    stops = [schedule.next_stop(step) for step in range(10)]
    assert stops == [3, 3, 3, 4, 6, 6, 9, 9, 9, 10]


def test_less_than_one_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="less than one batch of 128"):
        Schedule.of(recipe("lenet", total=100), 1000)
