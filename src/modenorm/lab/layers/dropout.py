"""Dropout with random numbers of its own.

torch's dropout draws from one generator per process, so what a training draws depends on what runs
beside it. Here every layer owns a generator: a training gives the same numbers alone or in company,
and goes on exactly where it stopped once `load_generator_states` has put the generators back.
A CUDA graph has to know the generators it draws from: register each of `generators(model)` with
`torch.cuda.CUDAGraph.register_generator_state` before the capture.

A generator draws but two words per call, the key; a hash of the key and an element's number decides
over the element. So a compiled network needs no memory for random numbers: it computes them, again
if need be, in the kernels that stand around the layer.
"""

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

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
        self._enter()

    def forward(self, x: Tensor) -> Tensor:
        """Return x in evaluation, a randomly thinned x in training."""
        if not self.training or self.p == 0:
            return x
        kept = _random_words(x.shape, draw_key(self.handle, x.device)) >= _threshold(self.p)
        return x * (1 / (1 - self.p)) * kept

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enter()

    def _enter(self) -> None:
        """Let `draw_key` find the layer; a copy has a number of its own."""
        number = next(_NUMBERS)
        _LAYERS[number] = self
        self.handle = torch.tensor(number)  # neither a buffer nor moved: it is read on the host


_NUMBERS = itertools.count()
_LAYERS: weakref.WeakValueDictionary[int, SeededDropout] = weakref.WeakValueDictionary()


@torch.library.custom_op("modenorm::draw_key", mutates_args=("handle",))
def draw_key(handle: Tensor, device: torch.device) -> Tensor:
    """Draw a key, two words of 32 bits, from the generator of the layer with this number.

    An operator, as compilers know no generators. The number is a tensor, so that models of equal
    form can share compiled code; it counts as changed, so that no two draws are taken for one.
    """
    generator = _LAYERS[int(handle)].generator
    words = (-(1 << 31), 1 << 31)
    return torch.randint(*words, (2,), dtype=torch.int32, generator=generator, device=device)


@draw_key.register_fake
def _empty_key(handle: Tensor, device: torch.device) -> Tensor:
    return torch.empty(2, dtype=torch.int32, device=device)


def _random_words(shape: torch.Size, key: Tensor) -> Tensor:
    """A word of 32 bits for each element: a hash of its number and the key.

    Numbers are multiplied, then mixed by Chris Wellons' lowbias32, which alone leaves neighbours
    correlated by a hundredth. The key's second half comes in between: so two keys' words are not
    the same ones in another order. Products wrap around. Elements are counted channels last, which
    costs nothing where they lie so, and in another order of memory gives the same words.
    """
    last = shape[:1] + shape[2:] + shape[1:2]
    words = torch.arange(shape.numel(), dtype=torch.int32, device=key.device).view(last)
    if len(shape) > 2:
        words = words.movedim(-1, 1)
    words = (words ^ key[0]) * _signed(0x9E3779B1)
    words = (_shifted(words, 16) ^ key[1]) * _signed(0x7FEB352D)
    words = _shifted(words, 15) * _signed(0x846CA68B)
    return _shifted(words, 16)


def _signed(word: int) -> int:
    return word - (word >> 31 << 32)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """The words, each xor itself shifted to the right; the mask takes away copies of the sign."""
    return words ^ (words >> bits & (1 << 32 - bits) - 1)


def _threshold(p: float) -> int:
    """A share p of all words is below it."""
    return min(round(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)


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
