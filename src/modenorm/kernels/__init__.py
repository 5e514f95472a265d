"""Which backend a call gets, and the kernels.

"fused" streams the tensor through hand-written passes (in Triton on a GPU, in C or torch operators
on a CPU), "eager" uses plain differentiable operators (plain.py), "reference" the paper's sums.
modenorm/paths.py then picks a whole layer in one autograd node where there is one; streaming.py and
mixing_node.py serve any gate, with passes and mixing of the folder that `runs_triton` and
`runs_c` allow.

The same functions in three languages:

                                gpu/ (Triton)       c/ (C)              torch operators
    the four passes             passes              passes              torch_passes
    the mixing between them     mixing              mixing              torch_mixing
    mode norm, one node         mode_norm           mode_norm           plain
    mode group norm, one node   mode_group_norm     mode_group_norm     plain
    penalties on modes          switches, entropy   switches            switches, entropy

This folder, in an order to read it:

    layout, plain                           a tensor as three axes; everything as plain operators
    streaming, mixing_node                  any gate: two autograd nodes, the mixing in between
    torch_passes, torch_mixing              passes and mixing in torch operators
    *_arrays                                the tensors of a mixing, and of a norm that is one node
    c/*                                     the CPU: C, compiled on first use
    gpu/passes, gpu/pass_kernels            the GPU: the four passes,
    gpu/flat_maps, gpu/lines                the same for short rows,
    gpu/tiles, gpu/common                   their tiles, and how all kernels begin
    gpu/mixing*, gpu/mode_group_mixing      the mixing
    gpu/*plan, gpu/slab                     the launches of a layer, and their memory
    gpu/mode_norm, gpu/mode_group_norm      a layer as one autograd node,
    gpu/inference                           its evaluation in one launch,
    gpu/*_operator                          its operators for `torch.compile`
    gpu/launch, gpu/stage, gpu/device       launches without Triton's dispatch, in one call of C
    cpp/*, build                            nodes and operators in C++; what a compiler makes, kept
    switches, entropy, several              penalties on modes, for all layers of a model at once,
    gpu/switches, gpu/entropy, gpu/several  the same in Triton
"""

from __future__ import annotations

import functools
import warnings
from types import TracebackType

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforming
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.autograd import forward_ad

from modenorm.kernels.c.library import library, takes
from modenorm.kernels.cpp.module import autograd_nodes
from modenorm.kernels.layout import can_count, interpreting

__all__ = [
    "autograd_nodes",
    "choose_backend",
    "cpu_kernels",
    "runs_c",
    "runs_triton",
    "use_backend",
    "without_compiling",
]

BACKENDS = ("auto", "reference", "eager", "fused")
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


def choose_backend(x: Tensor, plain_only: bool = False) -> str:
    """The path for this call: "reference", "eager" or "fused"."""
    if _forced in ("reference", "eager"):
        return _forced
    return "fused" if not plain_only and _can_fuse(x) else "eager"


def _can_fuse(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if type(x) not in (Tensor, torch.nn.Parameter) or transforming():
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
