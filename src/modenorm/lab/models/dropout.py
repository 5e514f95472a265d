"""Dropout with random numbers of its own.

torch's dropout draws from one generator per process, so what a training draws depends on what runs
beside it. Here every layer owns a generator: a training gives the same numbers alone or in company,
and goes on exactly where it stopped once `load_generator_states` has put the generators back.
A CUDA graph has to know the generators it draws from: register each of `generators(model)` with
`torch.cuda.CUDAGraph.register_generator_state` before the capture.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class SeededDropout(nn.Module):
    """Zero each element with probability p in training and scale the others by 1/(1-p).

    The layer's generator lives where the layer lives: moving the layer to another device starts a
    generator there from the layer's seed. A deep copy goes on from the same state, on its own.

    Args:
        p: Probability of a zero.
        generator: Draws the layer's seed, once; None for torch's global CPU generator.

    Example:
        >>> dropout = SeededDropout(0.5, torch.Generator().manual_seed(0))
        >>> dropout(torch.ones(1000)).unique()
        tensor([0., 2.])
    """

    def __init__(self, p: float = 0.5, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not isinstance(p, int | float) or not 0 <= p < 1:
            raise ValueError(f"p must be in [0, 1), got {p!r}")
        self.p = p
        self.seed = draw_seed(generator)
        self.generator = torch.Generator().manual_seed(self.seed)

    def forward(self, x: Tensor) -> Tensor:
        """Return x in evaluation, a randomly thinned x in training."""
        if not self.training or self.p == 0:
            return x
        keep = 1 - self.p
        scale = torch.empty_like(x).bernoulli_(keep, generator=self.generator).div_(keep)
        return x * scale

    def extra_repr(self) -> str:
        """Show the probability and the seed."""
        return f"p={self.p}, seed={self.seed}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SeededDropout":
        super()._apply(fn, recurse)
        probe = torch.empty(0, device=self.generator.device)
        device = fn(probe).device
        if device != probe.device and device.type != "meta":
            self.generator = torch.Generator(device).manual_seed(self.seed)
        return self


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed from a generator, or from torch's global CPU generator."""
    device = generator.device if generator else "cpu"
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


def generators(model: nn.Module) -> list[torch.Generator]:
    """List the generators that a training step of the model draws from."""
    return list(_named_generators(model).values())


def generator_states(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of each dropout layer's generator, by the layer's name, for a checkpoint."""
    return {name: generator.get_state() for name, generator in _named_generators(model).items()}


def load_generator_states(model: nn.Module, states: Mapping[str, Tensor]) -> None:
    """Put the generators back into the states that `generator_states` returned.

    Raises:
        ValueError: The states are of another model or another kind of device. Nothing is changed.
    """
    targets = _named_generators(model)
    if targets.keys() != states.keys():
        raise ValueError(
            f"random states of dropout layers {sorted(states)} given, "
            f"but the model has {sorted(targets)}"
        )
    for name, generator in targets.items():
        given, expected = states[name].numel(), generator.get_state().numel()
        if given != expected:
            raise ValueError(
                f"random state of dropout layer {name!r} has {given} bytes, but a generator on "
                f"{generator.device} has {expected}: resume on the kind of device that saved it"
            )
    for name, generator in targets.items():
        generator.set_state(states[name].cpu())


def _named_generators(model: nn.Module) -> dict[str, torch.Generator]:
    layers = model.named_modules()
    return {name: layer.generator for name, layer in layers if isinstance(layer, SeededDropout)}
