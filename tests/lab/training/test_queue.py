"""Which training starts when."""

import dataclasses
from pathlib import Path

import pytest
from fake_data import fake_config

from modenorm.lab.training import Run, TrainConfig
from modenorm.lab.training.queue import Queue

LENET = fake_config(model="lenet")
SMALL = fake_config(model="resnet20", compile=True)
LARGE = fake_config(model="nin", compile=True)


def runs(folder: Path, config: TrainConfig, count: int) -> list[Run]:
    return [Run.of(dataclasses.replace(config, seed=seed), folder) for seed in range(count)]


def models(found: list[Run]) -> list[str]:
    return [run.config.model for run in found]


def start_all(queue: Queue, active: list[Run]) -> list[Run]:
    """What starts beside others, which it then belongs to."""
    started = []
    while run := queue.take(active):
        active.append(run)
        started.append(run)
    return started


def end(active: list[Run], model: str, count: int) -> None:
    for run in [run for run in active if run.config.model == model][:count]:
        active.remove(run)


def test_a_gpu_is_busy_from_begin_to_end(tmp_path: Path) -> None:
    wanted = [*runs(tmp_path, SMALL, 20), *runs(tmp_path, LARGE, 4), *runs(tmp_path, LENET, 60)]
    queue, active = Queue(wanted, None, compiles=True), []
    # what isn't compiled, while the rest is
    assert models(start_all(queue, active)) == ["lenet"] * 30
    # then large networks, as soon as a place among four is free
    end(active, "lenet", 7)
    assert start_all(queue, active) == []
    end(active, "lenet", 1)
    assert models(start_all(queue, active)) == ["nin"]
    # and a quarter for what isn't compiled
    end(active, "lenet", 22)
    assert sorted(models(start_all(queue, active))) == ["lenet"] * 7 + ["nin"] * 2
    end(active, "nin", 1)
    assert models(start_all(queue, active)) == ["nin"]
    end(active, "nin", 3)
    assert models(start_all(queue, active)) == ["resnet20"] * 12
    # all of it once nothing else is waiting
    end(active, "resnet20", 12)
    assert models(start_all(queue, active)) == ["resnet20"] * 8 + ["lenet"] * 8
    active.clear()
    assert models(start_all(queue, active)) == ["lenet"] * 15
    assert queue.waiting == []


def test_one_goes_on_however_large(tmp_path: Path) -> None:
    plain = dataclasses.replace(LARGE, compile=False)
    wanted = [*runs(tmp_path, LARGE, 2), *runs(tmp_path, plain, 5)]
    queue, active = Queue(wanted, 2, compiles=True), []
    assert [run.config.compile for run in start_all(queue, active)] == [False] * 2
    active.pop()
    assert [run.config.compile for run in start_all(queue, active)] == [True]
    active.clear()
    assert [run.config.compile for run in start_all(queue, active)] == [False, True]
    active.clear()
    assert [run.config.compile for run in start_all(queue, active)] == [False] * 2


@pytest.mark.parametrize("compiles", [True, False])
def test_nothing_is_waited_for_in_vain(tmp_path: Path, compiles: bool) -> None:
    wanted = [*runs(tmp_path, SMALL, 2), *runs(tmp_path, LARGE, 2)]
    started = start_all(Queue(wanted, None, compiles), [])
    assert started == (wanted[2:] + wanted[:2] if compiles else wanted)


def test_order_is_kept_where_nothing_is_compiled(tmp_path: Path) -> None:
    wanted = [*runs(tmp_path, SMALL, 1), *runs(tmp_path, LENET, 1), *runs(tmp_path, LARGE, 1)]
    assert Queue(wanted, 1, compiles=False).waiting == wanted


def test_the_first_of_its_kind_takes_long_to_start(tmp_path: Path) -> None:
    other = dataclasses.replace(SMALL, norm="bn")
    wanted = [*runs(tmp_path, LENET, 2), *runs(tmp_path, SMALL, 2), *runs(tmp_path, other, 2)]
    queue = Queue(wanted, None, compiles=True)
    assert [queue.takes_long(run) for run in wanted] == [False, False, True, False, True, False]
    assert not any(map(Queue(wanted, None, compiles=False).takes_long, wanted))


def test_what_takes_long_is_begun_once_and_early(tmp_path: Path) -> None:
    """Of what fills a GPU next, when all that it needs is on disk."""
    other = dataclasses.replace(LARGE, norm="bn")
    wanted = [*runs(tmp_path, LENET, 30), *runs(tmp_path, SMALL, 2)]
    wanted += [*runs(tmp_path, LARGE, 2), *runs(tmp_path, other, 2)]
    queue, active = Queue(wanted, None, compiles=True), []
    start_all(queue, active)
    on_disk: list[Run] = []

    def early() -> list[Run]:
        return list(iter(lambda: queue.take_early(on_disk.__contains__), None))

    firsts = wanted[32], wanted[34]
    assert early() == []
    on_disk += wanted
    assert early() == [*firsts]  # but not of the small ones: there would be no room for them
    assert early() == []
    assert not any(map(queue.takes_long, firsts))
    active.clear()
    assert start_all(queue, active) == wanted[32:]  # begun or not, they start in their order
    assert early() == wanted[30:31]
