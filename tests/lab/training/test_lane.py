"""Numbers that a training looks at after it has queued more steps."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fake_data import fake_config, fake_data
from test_resume import Stop, same_end, stop_after
from torch import Tensor

from modenorm.lab.training import Checkpoint, Run, Training, pace, train
from modenorm.lab.training.lane import Inbox, Lane, Parcel
from modenorm.lab.training.sources import SharedData


@pytest.mark.parametrize("ahead", [1, 3])
def test_numbers_that_are_looked_at_later_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """As on a GPU: losses, evaluations and checkpoints are of the time when they were sent."""
    config = fake_config(eval_every=7)
    train(config, tmp_path / "whole", data=fake_data())
    monkeypatch.setitem(pace.AHEAD, "cpu", ahead)
    for calls in (5, 8):
        with pytest.raises(Stop):
            train(
                config,
                tmp_path / "late",
                data=fake_data(),
                checkpoint_every=0.0,
                listener=stop_after(calls),
            )
        checkpoint = Checkpoint.load(Run.of(config, tmp_path / "late").checkpoint)
        assert 0 < checkpoint.position.step < 40
    train(config, tmp_path / "late", data=fake_data())
    same_end(*(Run.of(config, tmp_path / name) for name in ("late", "whole")))


class SlowLane(Lane):
    """Nothing arrives before the device is let on."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.arrived = False

    def send(self, tensors: Sequence[Tensor]) -> Parcel:
        class Late(Parcel):
            def has_arrived(_) -> bool:
                return self.arrived

        return Late(super().send(tensors).tensors, None)


def test_room_for_more_parcels_is_seen_at_once() -> None:
    lane, found = SlowLane(), []
    inbox = Inbox(lane, room=1)
    for number in range(3):
        inbox.expect([torch.tensor(number)], lambda arrived: found.append(int(arrived[0])))
    turns = inbox.opened()
    assert not next(turns)
    inbox.room = 3
    assert list(turns) == found == []
    inbox.room, lane.arrived = 1, True
    assert list(inbox.opened()) == []
    assert found == [0, 1]
    assert list(inbox.opened(to_the_last=True)) == []
    assert found == [0, 1, 2]


def test_a_training_queues_far_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as its stream takes, until it is to do as usual."""
    monkeypatch.setitem(pace.AHEAD, "cpu", 1)
    monkeypatch.setattr(pace, "LAUNCHES", 36)  # three chunks of 16 steps, four at a time
    config, lane = fake_config(total=160, eval_every=160), SlowLane()
    data = SharedData(lane.device, None, fake_data()).get(config)
    training = Training(Run.of(config, tmp_path), data, lane)
    turns = training.turns()

    def queued() -> int:
        while next(turns):
            pass
        return training.position.step

    usual = queued()
    training.queue_far_ahead(True)
    far = queued()
    assert far - usual == 32  # two more chunks than the one
    training.queue_far_ahead(False)
    assert queued() == far
    lane.arrived = True
    assert sum(turns) == 160 - far  # one step a turn on a CPU
    assert Run.of(config, tmp_path).state == "done"
