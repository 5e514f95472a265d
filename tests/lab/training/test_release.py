"""Trainings that have ended give their memory back."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_data import fake_config, fake_data
from torch import nn

from modenorm.lab.training import Training, train, train_many


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator["weakref.WeakSet[nn.Module]"]:
    """The models of all trainings that are still there, with no help of the garbage collector."""
    train(fake_config(total=1, milestones=()), tmp_path, data=fake_data())  # imports leave frames
    models = weakref.WeakSet[nn.Module]()
    init = Training.__init__

    def noticing(self, *arguments, **options):
        init(self, *arguments, **options)
        models.add(self.model)

    monkeypatch.setattr(Training, "__init__", noticing)
    gc.collect()
    gc.disable()
    yield models
    gc.enable()


def test_a_training_is_gone_when_it_has_ended(tmp_path: Path, started) -> None:
    there = list[int]()
    train_many(
        [fake_config(total=40), fake_config(total=4, seed=1, milestones=())],
        tmp_path,
        data=fake_data(),
        parallel=2,
        listener=lambda training: there.append(len(started)),
    )
    assert max(there) == 2
    assert there[-1] == 1  # though it was the last to start
    assert not started


def test_a_training_that_diverges_is_gone(tmp_path: Path, started) -> None:
    (outcome,) = train_many([fake_config(lr=1e30, eval_every=2)], tmp_path, data=fake_data())
    assert outcome.failure
    del outcome
    assert not started
