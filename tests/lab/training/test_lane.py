"""Numbers that a training looks at after it has queued more steps."""

from pathlib import Path

import pytest
from fake_data import fake_config, fake_data
from test_resume import Stop, same_end, stop_after

from modenorm.lab.training import Checkpoint, Run, train, trainer


@pytest.mark.parametrize("ahead", [1, 3])
def test_numbers_that_are_looked_at_later_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """As on a GPU: losses, evaluations and checkpoints are of the time when they were sent."""
    config = fake_config(eval_every=7)
    train(config, tmp_path / "whole", data=fake_data())
    monkeypatch.setitem(trainer.AHEAD, "cpu", ahead)
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
