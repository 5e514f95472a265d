"""Which code serves a call: the one place that decides.

    path         code                                           serves
    reference    the paper's sums, reference.py                 what `use_backend` forces on it
    eager        plain differentiable operators, plain.py       masks, `torch.func`, tracing,
                                                                `torch.compile` on a CPU,
                                                                float64 on a GPU
    operators    registered operators, gpu/*_operator           `torch.compile` on a GPU
    gpu          Triton, gpu/                                   GPUs
    c            C, c/                                          float32 on a CPU with a compiler
    torch        torch operators, torch_passes, torch_mixing    everything else

The last three are the backend "fused". modenorm/paths.py and group_paths.py take the path's
autograd node for a whole layer if it has one for such a call, and otherwise two nodes around the
mixing, which ask `choose_kernels` for the tensors at hand.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from types import TracebackType

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforming
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.autograd import forward_ad

from modenorm.kernels.c.library import library, takes
from modenorm.kernels.layout import can_count, interpreting

__all__ = [
    "FUSED",
    "choose_kernels",
    "choose_path",
    "cpu_kernels",
    "runs_c",
    "runs_operators",
    "runs_triton",
    "use_backend",
    "without_compiling",
]

BACKENDS = ("auto", "reference", "eager", "fused")
FUSED = ("gpu", "c", "torch")
_forced = "auto"


class use_backend:
    """Force a path for debugging: "reference", "eager" or "fused"; "auto" lets the library choose.

    Takes effect at once, and until the end of the block when used in a `with` statement. A forced
    "fused" still gives way where it cannot serve (masks, `torch.func`, forward-mode
    differentiation, `torch.compile`). On a CPU "fused" is C where it could be compiled, and torch
    operators otherwise: `modenorm.kernels.cpu_kernels()` says which.

    Example:
        >>> import modenorm
        >>> layer, x = modenorm.ModeNorm2d(3), torch.randn(4, 3, 5, 5)
        >>> fast = layer(x)
        >>> with modenorm.use_backend("reference"):
        ...     torch.allclose(layer(x), fast, atol=1e-5)
        True
    """

    def __init__(self, name: str) -> None:
        global _forced
        if name not in BACKENDS:
            raise ValueError(f"backend is {name!r}; use one of {', '.join(BACKENDS)}")
        self._before, _forced = _forced, name

    def __enter__(self) -> None:
        """The backend was set when this object was made."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _forced
        _forced = self._before


def without_compiling() -> use_backend:
    """A block of plain operators, unless another path is forced: for sizes that are only tried."""
    return use_backend("eager" if _forced == "auto" else _forced)


def choose_path(x: Tensor, plain_only: bool = False) -> str:
    """The path for a call on this tensor; see the table above."""
    if _forced in ("reference", "eager"):
        return _forced
    if plain_only:
        return "eager"
    if torch.compiler.is_compiling():
        return "operators" if runs_operators(x) else "eager"
    return choose_kernels(x) if _can_fuse(x) else "eager"


def choose_kernels(x: Tensor, *others: Tensor | None) -> str:
    """What computes with these tensors behind an autograd node: "gpu", "c" or "torch"."""
    if runs_triton(x):
        return "gpu"
    return "c" if runs_c(x, *others) else "torch"


def _can_fuse(x: Tensor) -> bool:
    if torch.jit.is_tracing() or transforming():
        return False
    if type(x) not in (Tensor, torch.nn.Parameter):
        return False
    if forward_ad._current_level >= 0 or is_wrapped(x) or _only_recorded():
        return False
    return x.is_cpu or runs_triton(x)


def _only_recorded() -> bool:
    """Whether torch notes operators (`make_fx`), or does without memory (fake tensors).

    Then nothing may happen behind its back.
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    kinds = torch._C._TorchDispatchModeKey
    recorders = (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL)
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in recorders)


_TRITON = importlib.util.find_spec("triton") is not None
_OPERATORS_TAKE = (torch.float32, torch.float16, torch.bfloat16)


def runs_operators(x: Tensor) -> bool:
    """Whether a compiled call on this tensor can use the registered operators."""
    return _TRITON and x.device.type == "cuda" and x.dtype in _OPERATORS_TAKE and can_count(x)


def runs_triton(x: Tensor) -> bool:
    """Whether the Triton kernels take this tensor: on a GPU, or in Triton's interpreter."""
    if x.dtype == torch.float64 or not (x.is_cuda or interpreting()) or not can_count(x):
        return False
    return _triton_works(x.get_device())


def runs_c(x: Tensor, *others: Tensor | None) -> bool:
    """Whether C takes these: float32 on a CPU, where the code could be compiled."""
    if not takes(x, *others) or x.numel() == 0:
        return False
    found = library()
    return found.library is not None and (found.shares or torch.get_num_threads() == 1)


def cpu_kernels() -> str:
    """What normalises float32 tensors on this CPU, in words: for bug reports and the curious.

    Example:
        >>> cpu_kernels().partition(":")[0] in ("compiled", "torch operators")
        True
    """
    found = library()
    if runs_c(torch.ones(1, dtype=torch.float32, device="cpu")):
        return f"compiled: {found.about}"
    return f"torch operators: {'one thread only' if found.library else found.about}"


@functools.cache
def _triton_works(device: int) -> bool:
    """Whether the kernels can be imported, compiled and run on a device; warns once if not."""
    try:
        from modenorm.kernels.gpu import mode_group_norm, passes  # noqa: F401

        if device >= 0:
            passes.moments(torch.zeros(1, 1, 2, 2, device=f"cuda:{device}"))
    except Exception as error:
        warnings.warn(
            f"modenorm runs plain PyTorch operators on this GPU, because Triton can't be used "
            f"({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return False
    return True
