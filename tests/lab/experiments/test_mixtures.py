"""The mixtures' fast trainings compute what the library does, and the command keeps its results."""

import json
from pathlib import Path

import pytest
import torch
from torch.func import stack_module_state
from typer.testing import CliRunner

from modenorm.lab.cli import app
from modenorm.lab.cli import mixtures as command
from modenorm.lab.experiments import mixtures
from modenorm.lab.experiments.mixtures import (
    MIXTURES,
    NEEDED,
    Learner,
    Method,
    Mixture,
    Sources,
    losses,
)
from modenorm.lab.experiments.page import with_results
from modenorm.lab.training.files import read_objects

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("method", ["entropy", "switch"])
def test_losses_are_those_of_the_library(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients of all parameters, learner by learner."""
    torch.manual_seed(0)
    learners = [Learner(Method(method, 0.3)).double() for _ in range(3)]
    for learner in learners:
        learner.network[0].gate.weight.data.normal_()
    parameters, _ = stack_module_state(learners)
    x, classes = Sources([(MIXTURES[5], seed) for seed in range(3)]).batch(40)
    x = x.double()
    noise = torch.rand(3, mixtures.MAX_MODES).double() if method == "switch" else None
    found = losses(parameters, x, classes, 0.3, noise)
    upstream = torch.randn(3, dtype=torch.float64)
    ours = torch.autograd.grad(found @ upstream, list(parameters.values()))
    for i, learner in enumerate(learners):
        if noise is not None:
            monkeypatch.setattr(torch, "rand_like", lambda _, own=noise[i]: own)
        loss = learner(x[i], classes[i])
        # the strength is kept in float32
        torch.testing.assert_close(found[i], loss.double(), rtol=1e-6, atol=1e-6)
        named = dict(learner.named_parameters())
        theirs = torch.autograd.grad(upstream[i] * loss, list(named.values()))
        for name, mine, other in zip(parameters, ours, theirs, strict=True):
            torch.testing.assert_close(mine[i], other, rtol=1e-5, atol=1e-7, msg=name)


def test_mixtures_are_what_they_say() -> None:
    mixture = Mixture(3, False, "overlapping")
    sources = Sources([(mixture, 0), (Mixture(5, True, "apart"), 1)])
    assert sources.shares[0].tolist() == pytest.approx([10 / 12, 1 / 12, 1 / 12, 0, 0])
    x, classes = sources.batch(50_000)
    # 50 000 samples have a standard error below 0.01
    assert float(x.var(1).mean()) == pytest.approx(1, abs=0.03)
    assert classes.shape == (2, 50_000)
    apart, near = (torch.pdist(sources.means[i, :m]).min() for i, m in ((1, 5), (0, 3)))
    assert float(apart / sources.sds[1, :5].log().mean().exp()) == pytest.approx(8, rel=0.3)
    assert float(near / sources.sds[0, :3].log().mean().exp()) == pytest.approx(3, rel=0.3)
    again = Sources([(mixture, 0)])
    assert torch.equal(again.means[0], sources.means[0, :3])


def test_the_command_keeps_and_shows_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixtures, "MIXTURES", [MIXTURES[0], MIXTURES[-1]])
    monkeypatch.setattr(command, "CANDIDATES", [Method("switch", 0.5)])
    arguments = ["mixtures", "--seeds", "1", "--steps", "4", "--results", str(tmp_path)]
    for method in ("switch", "none"):
        result = CliRunner().invoke(app, [*arguments, "--method", method])
        assert result.exit_code == 0, result.output
    assert "…" not in result.output  # nothing is cut off on 80 columns
    file = tmp_path / "automatic_mixtures.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["method"] for line in lines] == ["none"] * 12 + ["switch"] * 4
    assert [line["closing"] for line in lines] == [0.0] * 4 + [0.05] * 4 + [0.1] * 8
    assert [line["seed"] for line in lines] == [0] * 16
    assert [line["tolerance"] for line in lines] == [0.05, 0.1] * 8
    assert all(1 <= line["found"] <= 8 for line in lines)
    assert lines[0].keys() >= {"commit", "torch", "device", "date", "steps"}
    result = CliRunner().invoke(app, [*arguments, "--tune", "--method", "switch"])
    assert result.exit_code == 0, result.output
    tuned = [json.loads(t) for t in (tmp_path / "automatic_tuning.jsonl").read_text().splitlines()]
    assert {line["seed"] for line in tuned} == {1000}
    page = with_results("<!-- mixtures automatic_mixtures --> <!-- end -->", tmp_path)
    assert "| all | " in page
    assert "Seeds 0 to 0" in page
    assert isinstance(CliRunner().invoke(app, ["mixtures", "--method", "x"]).exception, ValueError)


@pytest.mark.parametrize("text", ['{"method": "no', '{"method": "none"}'])
def test_broken_results_are_named_before_anything_is_trained(tmp_path: Path, text: str) -> None:
    file = tmp_path / "automatic_mixtures.jsonl"
    file.write_text(text + "\n")
    result = CliRunner().invoke(app, ["mixtures", "--results", str(tmp_path)])
    assert f"{file}, line 1 is no" in str(result.exception)
    with pytest.raises(ValueError, match="line 1 is no"):
        with_results("<!-- mixtures automatic_mixtures --> <!-- end -->", tmp_path)
    assert file.read_text() == text + "\n"


def test_the_summary_counts() -> None:
    line = {"mixture": "a", "modes": 2, "method": "none", "strength": 0.0, "tolerance": 0.05}
    lines = [line | {"found": found, "closing": 0.0} for found in (2, 2, 3)]
    header, rows = mixtures.summary(lines)
    assert header == ["mixture", "pruning alone"]
    assert rows == [["a", "2/3 (2.3)"], ["all", "2/3"]]


def test_all_conditions_are_told() -> None:
    lines = read_objects(ROOT / "results" / "automatic_mixtures.jsonl", NEEDED)[:2]
    lines[1] |= {"steps": 7, "device": "abacus", "torch": "0.1", "date": "1999-12-31T00:00"}
    told = mixtures.tuning_table(lines).splitlines()[-1]
    for words in ("1000, 7 steps", ", abacus, torch", ", 0.1, commit", ", 1999-12-31."):
        assert words in told


def test_names_of_methods_tell_them_apart() -> None:
    line = {"method": "none", "strength": 0.0, "closing": 0.0, "tolerance": 0.05}
    penalty = {"method": "entropy", "strength": 0.2}
    lines = [line, line | {"closing": 0.1}, line | penalty, line | penalty | {"closing": 0.1}]
    names = ["pruning alone", "closing 0.1", "entropy 0.2", "entropy 0.2, closing 0.1"]
    assert mixtures.by_method(lines) == {n: [x] for n, x in zip(names, lines, strict=True)}


@pytest.mark.parametrize("method", ["entropy", "switch"])
def test_closed_networks_go_on_and_modes_stay_closed(method: str) -> None:
    """One hidden mode: closing leaves one, in which the rest of the training changes nothing."""
    sources = Sources([(MIXTURES[0], 1000), (MIXTURES[1], 1000)])
    networks = mixtures.train(sources, Method(method, 0.05, closing=0.3), seed=0, steps=60)
    x, _ = sources.batch(500)
    gates = torch.softmax(networks[0][0].gate(x[0]), 1)
    assert int((gates.max(0).values > 0).sum()) == 1
    for network in networks:
        assert all(bool(p.isfinite().all()) for p in network.parameters())


def test_the_page_shows_the_committed_results() -> None:
    page = ROOT / "docs" / "automatic_modes_study.md"
    assert with_results(page.read_text(), ROOT / "results") == page.read_text()
