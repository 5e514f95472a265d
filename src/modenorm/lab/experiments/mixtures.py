"""Made-up mixtures with a known number of modes: how often is that number found?

A sample belongs to one of M hidden modes, x = μ_m + σ_m z in C channels, and its class is decided
by z alone: a network of one mode norm and one linear layer has to undo each mode's mean and
standard deviation to see it. Many networks are trained at once, by `losses`, which computes what
the library's layers do; then each becomes such a network and is pruned by `prune_modes`.
"""

import copy
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.nn import functional

from modenorm import ModeNorm1d, ModeSparsity, prune_modes, recalibrate
from modenorm.kernels.switches import draw_switches, expected_open
from modenorm.lab.bench.page import markdown_table
from modenorm.lab.data.loader import derive_seed
from modenorm.lab.provenance import all_of, provenance
from modenorm.lab.training.closing import DEFAULT_SPARSITY
from modenorm.lab.training.schedule import CLOSING
from modenorm.modes.report import SMALLEST_GATE
from modenorm.pruning.prune import DEFAULT_TOLERANCE
from modenorm.pruning.resizing import close_modes
from modenorm.sparsity import DEFAULT_STRENGTH

CHANNELS = CLASSES = 8
MAX_MODES = 8
EPS = 1e-5
BATCH, STEPS, LR, MOMENTUM = 128, 1000, 0.1, 0.9
LR_DROP = 0.7  # the part of the training before the learning rate falls to a tenth
CLOSING_SAMPLES = 4096  # for the estimates that closing needs
DISTANCE = {"apart": 8.0, "overlapping": 3.0}
UNBALANCED = 10.0
PRUNING_SAMPLES = 512
OPEN = 20.0  # log odds of a switch that stays open
TUNING_SEED = 1000  # development seeds count up from here, published ones from 0

Line = dict[str, Any]
NEEDED = {
    "mixture", "modes", "seed", "method", "strength", "closing", "tolerance", "found", "error",
    "pruned_error", "change", "steps", "device", "torch", "commit", "date",
}  # fmt: skip
"""What a line must have to be shown."""


@dataclass(frozen=True)
class Mixture:
    """What is made up: M modes, of equal size or the first ten times the others, and how near."""

    modes: int
    balanced: bool
    distance: str

    @property
    def label(self) -> str:
        """In words."""
        if self.modes == 1:
            return "1 mode"
        sizes = "equal" if self.balanced else "10:1"
        return f"{self.modes} modes, {sizes}, {self.distance}"


MIXTURES = (
    Mixture(1, True, "apart"),
    *(
        Mixture(modes, balanced, distance)
        for modes, balanced, distance in itertools.product((2, 3, 5), (True, False), DISTANCE)
    ),
)


@dataclass(frozen=True)
class Method:
    """How modes are counted: by pruning at the end, and before with a penalty or by closing.

    Attributes:
        name: Of the penalty.
        strength: Of the penalty; 0 for none.
        closing: Tolerance of the modes that are closed before the end; 0 to close none.
    """

    name: str
    strength: float
    closing: float = 0.1

    @property
    def kind(self) -> str:
        """The penalty's name, "none" without."""
        return self.name if self.strength else "none"


WITHOUT_CLOSING = tuple(Method("entropy", strength, closing=0.0) for strength in (0.0, 0.2))
METHODS = (
    *WITHOUT_CLOSING,
    *(Method("entropy", 0.0, closing) for closing in (DEFAULT_SPARSITY, 0.1)),
    *(Method(name, strength) for name, strength in DEFAULT_STRENGTH.items()),
)
CANDIDATES = (
    *WITHOUT_CLOSING,
    *(Method("entropy", 0.0, closing) for closing in (0.05, 0.15)),
    *(Method("entropy", strength) for strength in (0.0, 0.002, 0.01, 0.05, 0.2)),
    *(Method("switch", strength) for strength in (0.1, 0.3)),
)
TOLERANCES = (0.02, 0.05, 0.1)
PENALTY_FROM = 0.5
"""Part of the training before a penalty sets in, for modes to form."""


class Sources:
    """Endless samples of many mixtures at once, B of them.

    The means are random, scaled so that the two nearest lie `DISTANCE` apart in units of the
    typical standard deviation; then all is scaled to unit variance.
    """

    def __init__(self, drawn: Sequence[tuple[Mixture, int]]) -> None:
        most = max(mixture.modes for mixture, _ in drawn)
        self.means = torch.zeros(len(drawn), most, CHANNELS)
        self.sds, self.shares = torch.ones_like(self.means), torch.zeros(len(drawn), most)
        self.teachers = torch.zeros(len(drawn), CHANNELS, CLASSES)
        for i, (mixture, seed) in enumerate(drawn):
            generator = torch.Generator().manual_seed(derive_seed(seed, mixture.label))
            self._draw(i, mixture, generator)
        seeds = "+".join(f"{mixture.label} {seed}" for mixture, seed in drawn)
        self._generator = torch.Generator().manual_seed(derive_seed(0, seeds))

    def _draw(self, i: int, mixture: Mixture, generator: torch.Generator) -> None:
        m = mixture.modes
        means = torch.randn(m, CHANNELS, generator=generator)
        sds = torch.exp(0.4 * torch.randn(m, CHANNELS, generator=generator))
        shares = torch.ones(m)
        shares[0] = 1.0 if mixture.balanced else UNBALANCED
        shares /= shares.sum()
        if m > 1:
            means *= DISTANCE[mixture.distance] / torch.pdist(means).min()
        centre = shares @ means
        total = (shares @ (sds**2 + (means - centre) ** 2)).mean().sqrt()
        self.means[i, :m], self.sds[i, :m], self.shares[i, :m] = means / total, sds / total, shares
        self.teachers[i] = torch.randn(CHANNELS, CLASSES, generator=generator)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Inputs, (B, size, C), and classes, (B, size)."""
        modes = torch.multinomial(self.shares, size, True, generator=self._generator)
        z = torch.randn(*modes.shape, CHANNELS, generator=self._generator)
        chosen = modes[..., None].expand_as(z)
        x = self.means.gather(1, chosen) + self.sds.gather(1, chosen) * z
        return x, (z @ self.teachers).argmax(-1)


class Learner(nn.Module):
    """A network and its penalty; says the loss of a batch."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        norm = ModeNorm1d(CHANNELS, MAX_MODES, eps=EPS)
        self.network = nn.Sequential(norm, nn.Linear(CHANNELS, CLASSES))
        self.sparsity = ModeSparsity(self.network, method.strength, method.name)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Cross-entropy and penalty."""
        return functional.cross_entropy(self.network(x), classes) + self.sparsity()


def losses(
    parameters: dict[str, Tensor], x: Tensor, classes: Tensor, strength: float, noise: Tensor | None
) -> Tensor:
    """What `Learner` says, of B learners at once, (B,): the same sums as batched products.

    Args:
        parameters: Those of a `Learner`, stacked.
        x: (B, N, C).
        classes: (B, N).
        strength: Of the penalty.
        noise: (B, K), uniform, for the switches; None for the penalty on entropy.
    """
    logits = x @ parameters["network.0.gate.weight"].mT + parameters["network.0.gate.bias"][:, None]
    if noise is not None:
        log_odds = parameters["sparsity.log_odds"]
        logits = logits + draw_switches(log_odds, noise).log()[:, None]
    gates = torch.softmax(logits, -1)  # (B, N, K)
    weights = (gates / gates.sum(1, keepdim=True).clamp_min(SMALLEST_GATE)).mT
    mean = weights @ x  # (B, K, C)
    inverse = (weights @ x**2 - mean**2 + EPS).rsqrt()  # x has unit variance: nothing is lost here
    y = (gates @ inverse) * x - gates @ (inverse * mean)
    y = y * parameters["network.0.weight"][:, None] + parameters["network.0.bias"][:, None]
    scores = y @ parameters["network.1.weight"].mT + parameters["network.1.bias"][:, None]
    loss = functional.cross_entropy(scores.mT, classes, reduction="none").mean(1)
    if noise is not None:
        return loss + strength * expected_open(log_odds).sum(1)
    return loss + strength * torch.special.entr(gates.mean(1).clamp_min(SMALLEST_GATE)).sum(1)


def train(sources: Sources, method: Method, seed: int, steps: int = STEPS) -> list[nn.Sequential]:
    """Train a network on each of the mixtures, by SGD."""
    count = len(sources.means)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, method.name))
        parameters, _ = stack_module_state([Learner(method) for _ in range(count)])
        optimizer = torch.optim.SGD(parameters.values(), lr=LR, momentum=MOMENTUM)
        for step in range(steps):
            if step == round(LR_DROP * steps):
                optimizer.param_groups[0]["lr"] *= 0.1
            if step == round(CLOSING * steps) and method.closing:
                _close(sources, parameters, optimizer, method)
            noise = torch.rand(count, MAX_MODES) if method.name == "switch" else None
            before_closing = step < CLOSING * steps or not method.closing
            strength = method.strength if step >= PENALTY_FROM * steps and before_closing else 0.0
            optimizer.zero_grad()
            losses(parameters, *sources.batch(BATCH), strength, noise).sum().backward()
            optimizer.step()
    return [_single(parameters, i, method) for i in range(count)]


@torch.no_grad()
def _close(
    sources: Sources,
    parameters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    method: Method,
) -> None:
    """Close modes that make little difference, in each network; switches are open from then on."""
    x, _ = sources.batch(CLOSING_SAMPLES)
    for i in range(len(x)):
        network = _single(parameters, i, method)
        recalibrate(network, x[i].split(1024))
        pruned = copy.deepcopy(network)
        prune_modes(pruned, [x[i, :PRUNING_SAMPLES]], method.closing)
        close_modes(network, pruned)
        for name, parameter in network.named_parameters():
            parameters[f"network.{name}"][i] = parameter
    for name, stacked in parameters.items():
        if name == "sparsity.log_odds":
            stacked.fill_(OPEN)
        if name.startswith(("network.0.gate.", "sparsity.")):
            optimizer.state[stacked]["momentum_buffer"].zero_()


def _single(parameters: dict[str, Tensor], i: int, method: Method) -> nn.Sequential:
    """The i-th network by itself, with the switches written into its gate."""
    learner = Learner(method)
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            parameter.copy_(parameters[name][i])
    learner.sparsity.remove()
    return learner.network


def measure(
    drawn: Sequence[tuple[Mixture, int]],
    method: Method,
    tolerances: Sequence[float] = (DEFAULT_TOLERANCE, 2 * DEFAULT_TOLERANCE),
    steps: int = STEPS,
) -> Iterator[Line]:
    """Train on mixtures and seeds, prune, and count the modes that are left."""
    sources = Sources(drawn)
    networks = train(sources, method, seed=0, steps=steps)
    data = [sources.batch(1024) for _ in range(8)]
    x_test, y_test = sources.batch(4096)
    for i, (mixture, seed) in enumerate(drawn):
        recalibrate(networks[i], (x[i] for x, _ in data))
        error = _error(networks[i], x_test[i], y_test[i])
        for tolerance in tolerances:
            pruned = copy.deepcopy(networks[i])
            result = prune_modes(pruned, [data[0][0][i, :PRUNING_SAMPLES]], tolerance)
            (modes,) = result.num_modes.values()
            yield {
                "mixture": mixture.label,
                "modes": mixture.modes,
                "seed": seed,
                "method": method.kind,
                "strength": method.strength,
                "closing": method.closing,
                "tolerance": tolerance,
                "found": modes,
                "error": round(error, 2),
                "pruned_error": round(_error(pruned, x_test[i], y_test[i]), 2),
                "change": round(result.change, 4),
                "steps": steps,
            }


@torch.no_grad()
def _error(network: nn.Module, x: Tensor, classes: Tensor) -> float:
    return 100 * float((network.eval()(x).argmax(1) != classes).double().mean())


def study(
    seeds: Iterable[int], methods: Iterable[Method] = METHODS, **options: Any
) -> Iterator[list[Line]]:
    """The lines of each method, with where they come from."""
    drawn = [(mixture, seed) for mixture in MIXTURES for seed in seeds]
    about = provenance(torch.device("cpu"))
    for method in methods:
        yield [line | about for line in measure(drawn, method, **options)]


def right(lines: Iterable[Line]) -> str:
    """How many of the lines found the right number."""
    hits = [line["found"] == line["modes"] for line in lines]
    return f"{sum(hits)}/{len(hits)}" if hits else ""


def summary(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """A header and rows: how often each method found the right number, and the mean it found."""
    methods = by_method(lines)
    rows = []
    for label in dict.fromkeys(line["mixture"] for line in lines):
        chosen = [[line for line in part if line["mixture"] == label] for part in methods.values()]
        means = [statistics.fmean(line["found"] for line in part) for part in chosen]
        rows.append([label, *(f"{right(p)} ({m:.1f})" for p, m in zip(chosen, means, strict=True))])
    rows.append(["all", *map(right, methods.values())])
    return ["mixture", *methods], rows


def errors(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """A header and rows: hits and mean test errors of each method, before and after pruning."""
    header = ["method", "right", "error %", "error % after pruning", "largest change of outputs"]
    rows = []
    for name, part in by_method(lines).items():
        names = ("error", "pruned_error")
        means = [f"{statistics.fmean(line[name] for line in part):.2f}" for name in names]
        largest = max(line["change"] for line in part)
        rows.append([name, right(part), *means, f"{largest:.3f}"])
    return header, rows


def by_method(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Lines by penalty and closing, in words; with the tolerance where there are several."""
    lines = list(lines)
    several = len({line["tolerance"] for line in lines}) > 1
    found: dict[str, list[Line]] = {}
    for line in lines:
        parts = [f"{line['method']} {line['strength']:g}"] if line["method"] != "none" else []
        parts += [f"closing {line['closing']:g}"] if line["closing"] else []
        parts = parts or ["pruning alone"]
        parts += [f"tolerance {line['tolerance']:g}"] if several else []
        found.setdefault(", ".join(parts), []).append(line)
    return found


def mixtures_tables(lines: Sequence[Line]) -> str:
    """What was found of every mixture, in Markdown, and where the numbers come from.

    Mixture by mixture with the default tolerance alone.
    """
    default = [line for line in lines if line["tolerance"] == DEFAULT_TOLERANCE]
    return "\n\n".join([markdown_table(*summary(default)), tuning_table(lines)])


def tuning_table(lines: Sequence[Line]) -> str:
    """Hits and errors of every strength and tolerance, in Markdown, and where they come from."""
    seeds = sorted({line["seed"] for line in lines})
    steps = ", ".join(dict.fromkeys(str(line["steps"]) for line in lines))
    conditions = (
        f"Seeds {seeds[0]} to {seeds[-1]}, at most {MAX_MODES} modes, {steps} steps "
        f"of {BATCH} samples; {all_of(lines, 'device')}, torch {all_of(lines, 'torch')}, "
        f"commit {all_of(lines, 'commit')}, {all_of(lines, 'date', 10)}."
    )
    return "\n\n".join([markdown_table(*errors(lines)), conditions])
