"""Which path runs: the one place that decides.

"fused" streams the tensor through hand-written passes (kernels/gpu.py in Triton, native_passes.py
in C, cpu.py in torch operators), "eager" uses plain differentiable operators (kernels/plain.py),
"reference" the paper's sums.

This folder, in an order to read it:

    layout, plain               a tensor as samples × channels × positions; all as plain operators
    streaming, mixing_*         any gate: two autograd nodes, and the mixing between them
    cpu, cpu_*, native*         the CPU: passes in torch operators; passes and whole layers in C
    fused*, *_plan, plan        the GPU: a layer as one autograd node, and its launches
    *_arrays, slab              the memory of these launches
    gpu, gpu_*, tiles           the kernels in Triton, and how they cut a tensor into tiles
    launch, stage, device       launches without Triton's dispatch, in one call of C
    operators, *_operators      for torch.compile on a GPU
    cpp_*, compiled             nodes and operators in C++; what the system's compiler makes
    switches, entropy, several  penalties on modes, for all layers of a model at once
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

from modenorm.kernels.layout import can_count, interpreting
from modenorm.kernels.native import library, takes

__all__ = [
    "choose_backend",
    "cpu_kernels",
    "runs_native",
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


def runs_native(x: Tensor, *others: Tensor | None) -> bool:
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
    if runs_native(torch.ones(1, dtype=torch.float32, device="cpu")):
        return f"compiled: {found.about}"
    return f"torch operators: {'one thread only' if found.library else found.about}"


@functools.cache
def _triton_works(device: int) -> bool:
    """Whether the kernels can be imported, compiled and run on a device; warns once if not."""
    try:
        from modenorm.kernels import fused_channels, gpu  # noqa: F401

        if device >= 0:
            gpu.moments(torch.zeros(1, 1, 2, 2, device=f"cuda:{device}"))
    except Exception as error:
        warnings.warn(
            f"modenorm runs plain PyTorch operators on this GPU, because Triton can't be used "
            f"({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return False
    return True
