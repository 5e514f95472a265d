"""The passes as plain differentiable operators.

For what the fused kernels don't serve: masks, double backward, `torch.func`, export, and
`torch.compile`, whose Inductor fuses them with their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._C._functorch import is_legacy_batchedtensor as is_batched

from modenorm import exchange, mixing
from modenorm.exchange import Ranks
from modenorm.kernels.layout import statistics_dtype

__all__ = [
    "apply", "as_type", "differentiate", "empty_output", "in_type", "masked_moments",
    "mode_group_norm", "mode_norm", "moments", "node", "only_plain", "widened",
]  # fmt: skip


def node(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its search for leftovers of `torch.func`: fused paths take none."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def moments(x: Tensor, with_var: bool = True) -> tuple[Tensor, Tensor | None]:
    """Mean and biased variance over the positions, (N, C) each."""
    x = x.to(statistics_dtype(x))
    positions = tuple(range(2, x.ndim))
    if not positions:
        return x, torch.zeros_like(x) if with_var else None
    if not with_var:
        return x.mean(positions), None
    if torch.compiler.is_compiling():  # torch 2.13's Inductor fails at var's slope in dynamic sizes
        mean = x.mean(positions, keepdim=True)
        return mean.reshape(x.shape[:2]), (x - mean).square().mean(positions)
    var, mean = torch.var_mean(x, positions, correction=0)
    return mean, var


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance over the positions where mask, (N, 1, *positions), is True; their counts.

    A sample without such a position gets mean 0, variance 0 and count 0.
    """
    x = x.to(statistics_dtype(x))
    x = x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)
    mask = mask.flatten(1).unsqueeze(1)  # (N, 1, L)
    counts = mask.sum(-1).to(x.dtype)  # (N, 1)
    divisor = counts.clamp_min(1)
    mean = torch.where(mask, x, 0).sum(-1) / divisor
    var = torch.where(mask, x - mean[..., None], 0).square().sum(-1) / divisor
    return mean, var, counts.squeeze(1)


def widened(x: Tensor) -> Tensor:
    """x in the statistics' type, for moments and map alike.

    Their gradients cancel, so they have to be added up in that type: float16 may not hold each.
    """
    return as_type(x, statistics_dtype(x))


def apply(
    x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """y = (x − centre) · scale + shift, in x's type or another."""
    shape = x.shape[:2] + (1,) * (x.ndim - 2)
    y = (x - centre.view(shape)) * scale.reshape(shape) + shift.view(shape)
    return as_type(y, x.dtype if dtype is None else dtype)


def empty_output(x: Tensor, *used: Tensor | None) -> Tensor:
    """An empty output that still hands zero gradients to everything that a full one would."""
    y = x.clone()
    for tensor in used:
        if tensor is not None:
            y = y + tensor.sum().to(y.dtype)
    return y


def as_type(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in a type; y itself if it has it, which a traced `to` of torch 2.11 gives no gradient."""
    return y if y.dtype == dtype else y.to(dtype)


def in_type(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The same of what there may be none of."""
    return None if parameter is None else as_type(parameter, dtype)


def only_plain(*upstream: Tensor | None) -> bool:
    """Whether a backward needs plain operators: it is differentiated again, or vectorised."""
    if torch.is_grad_enabled():
        return True
    for tensor in upstream:
        if tensor is not None and (is_wrapped(tensor) or is_batched(tensor)):
            return True
    return False


def differentiate(
    forward: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    upstream: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """A node's gradients by plain operators, so that they can be differentiated again.

    Args:
        forward: The node in plain operators.
        inputs: Its inputs.
        needed: Which of them need a gradient; entries beyond the inputs are ignored.
        upstream: The gradients of its outputs.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # aliases, since one input may depend on another and only the node itself is differentiated
        inputs = [None if t is None else t.view_as(t) for t in inputs]
        outputs = forward(*inputs)
        pairs = [(o, d) for o, d in zip(outputs, upstream, strict=True) if d is not None]
        wanted = [t for t, need in zip(inputs, needed, strict=False) if need and t is not None]
        found = torch.autograd.grad(
            [o for o, _ in pairs],
            wanted,
            [d for _, d in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    gradients = iter(found)
    return [
        next(gradients) if need and t is not None else None
        for t, need in zip(inputs, needed, strict=False)
    ]


def mode_norm(
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the gates (N, K) and their mean, the modes' usage (K,), with the batch's statistics.

    Gates None means the linear gate's.
    """
    wide = widened(x)
    mean, var = moments(wide)
    assert var is not None
    if gates is None:
        assert gate_weight is not None
        assert gate_bias is not None
        gates = torch.softmax(mean @ gate_weight.t() + gate_bias, dim=1)
    if ranks is None:
        scale, shift, _ = mixing.batch_map(mean, var, gates, weight, bias, eps)
    else:
        batch = exchange.statistics(mean, var, gates * x.shape[2:].numel(), ranks)
        scale, shift = mixing.coefficients(batch.mean, batch.var, gates, mean, weight, bias, eps)
    return apply(wide, mean, scale, shift, dtype=x.dtype), gates, gates.mean(0)


def mode_group_norm(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    pixel: bool,
) -> tuple[Tensor, Tensor]:
    """y and the gates (N, C, K)."""
    wide = widened(x)
    mean, var = moments(wide, with_var=pixel)
    scale, shift, gates = mixing.channel_modes(mean, var, gate_weight, gate_bias, weight, bias, eps)
    return apply(wide, mean, scale, shift, dtype=x.dtype), gates
