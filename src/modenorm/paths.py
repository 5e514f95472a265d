"""From a checked call of a mode norm to the path that serves it: moments → mixing → affine map.

Letters: N samples, C channels, L positions, K modes. What the layers and `functional` call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from modenorm import exchange, mixing, reference
from modenorm.buffers import recomputing
from modenorm.checks import Options, check_input, check_options, masked
from modenorm.gates import Gate, LinearGate, is_just, logits_of
from modenorm.kernels import mixing_node, plain, streaming
from modenorm.kernels.c import mode_norm as c_mode_norm
from modenorm.kernels.choice import FUSED, choose_path
from modenorm.kernels.gpu import mode_norm_operator
from modenorm.kernels.layout import statistics_dtype
from modenorm.kernels.mode_norm_arrays import Found, Inputs, fits
from modenorm.mixing import RunningEstimates, autocasting, product

__all__ = ["moments_and_map", "normalize_modes"]


class _Call(NamedTuple):
    """What a mode norm is called with."""

    x: Tensor
    gates: Tensor | Gate
    estimates: RunningEstimates | None
    weight: Tensor | None
    bias: Tensor | None
    options: Options
    mask: Tensor | None

    @property
    def from_batch(self) -> bool:
        """Whether the statistics are the batch's, not the running estimates."""
        return self.options.training or self.estimates is None


def normalize_modes(
    x: Tensor,
    gates: Tensor | Gate,
    estimates: RunningEstimates | None,
    weight: Tensor | None,
    bias: Tensor | None,
    options: Options,
    mask: Tensor | None = None,
) -> Found:
    """`mode_norm` as the layers call it: returns y, the gates (N, K), and the modes' usage (K,).

    The usage is the mean of the gates over the samples, 0 for an empty batch. What the options
    don't ask for may have no gradient, or be None.
    """
    check_input(x)
    if options.momentum is None:
        check_options(options, estimates)
    dtype = statistics_dtype(x)
    weight, bias = plain.in_type(weight, dtype), plain.in_type(bias, dtype)
    x, mask = (x, None) if mask is None else masked(x, mask)
    call = _Call(x, gates, estimates, weight, bias, options, mask)
    if not autocasting(x):
        return _normalize_modes(call)
    with mixing.full_precision(x):
        return _normalize_modes(call)


def _normalize_modes(call: _Call) -> Found:
    options = call.options
    if not options.usage_matters:
        return _found_modes(call)
    # kernels find it where they have the gate, and a mass that is this rank's own
    by_kernels = call.from_batch and options.ranks is None and not isinstance(call.gates, Tensor)
    if not by_kernels:
        options = options._replace(gates_matter=True, usage_matters=False)
        call = call._replace(options=options)
    y, gates, usage = _found_modes(call)
    if usage is None and gates is not None:
        usage = gates.mean(0) if len(gates) > 0 else gates.sum(0)
    return y, gates, usage


def _found_modes(call: _Call) -> Found:
    x, options = call.x, call.options
    if x.numel() == 0:
        return *_empty_modes(call), None
    if call.from_batch and x.numel() == x.shape[1] and options.ranks is None:
        raise ValueError(
            f"a batch of shape {tuple(x.shape)} has one value per channel, so no variance; "
            f"use more samples or positions, or call eval() on a layer with running estimates"
        )
    path = choose_path(x, plain_only=call.mask is not None)
    found = _BY_ONE[path](call) if path in _BY_ONE else None
    if found is not None and path == "operators":
        return found  # with its ReLU
    y, gates, usage = found or (*_by_parts(call, path in FUSED), None)
    return y.relu() if options.relu else y, gates, usage


def _known_gates(call: _Call) -> bool:
    """Whether the gates are given, or the gate is the paper's, unchanged and without hooks."""
    return isinstance(call.gates, Tensor) or is_just(LinearGate, call.gates)


def _is_one_node(call: _Call) -> bool:
    """Whether a whole layer in one node could serve: with estimates, it is not differentiable."""
    by_estimates = torch.is_grad_enabled() or isinstance(call.gates, Tensor)
    return (call.from_batch or not by_estimates) and _known_gates(call)


def _by_gpu(call: _Call) -> Found | None:
    from modenorm.kernels.gpu import mode_norm as gpu_mode_norm

    estimates, options = call.estimates, call.options
    if not _is_one_node(call):
        return None
    if estimates is not None and not options.training:
        return gpu_mode_norm.mode_norm_inference(call.x, _gpu_inputs(call), estimates, options)
    if estimates is not None and options.momentum is None:
        return None
    return gpu_mode_norm.mode_norm(call.x, _gpu_inputs(call), estimates, options)


def _by_c(call: _Call) -> Found | None:
    x, options = call.x, call.options
    if not _is_one_node(call) or options.ranks is not None:
        return None
    return c_mode_norm.mode_norm(x, *_inputs(call, x.dtype), call.estimates, options)


def _by_operators(call: _Call) -> Found | None:
    """Under `torch.compile` on a GPU: maps for Inductor to fuse with their neighbours.

    Their coefficients are by our kernels.
    """
    if not (call.from_batch and _known_gates(call)) or call.options.ranks is not None:
        return None
    inputs = _gpu_inputs(call)
    if not fits(call.x, inputs, call.estimates, call.options.num_modes):
        return None
    moves = call.options.training and not recomputing()
    estimates = call.estimates if moves else None
    return mode_norm_operator.mode_norm(call.x, inputs, estimates, call.options)


def _by_reference(call: _Call) -> Found:
    x, gates, estimates, weight, bias, options, mask = call
    if options.ranks is not None:
        raise ValueError('the "reference" backend sees one process only; use "eager"')
    pooled = plain.moments(x, False)[0] if mask is None else plain.masked_moments(x, mask)[0]
    gates = _gates_of(call, pooled, x)
    counts = gates.new_ones(len(gates)) if mask is None else mask.flatten(1).sum(1)
    mass = (gates.detach() * counts[:, None]).sum(0)
    several = mask is None or counts.sum() > 1
    usable = several and bool(pooled.isfinite().all() & gates.isfinite().all() & (mass > 0).any())
    momentum = options.momentum
    if options.training and (recomputing() or not usable):
        estimates = None
    if options.training and estimates is not None and estimates.share is not None:
        if momentum is None:
            raise ValueError(
                'the "reference" backend has no momentum=None with "usage"; use "eager"'
            )
        estimates.share.add_(mass / counts.sum())
    tracked = None if estimates is None else estimates.num_batches_tracked
    if tracked is not None and options.training:
        tracked.add_(1)
    if momentum is None and tracked is not None:
        momentum = 1 / max(1, int(tracked))
    weight, bias = mixing.written_out(weight, bias, gates.shape[1], x.shape[1])
    y = reference.mode_norm(
        x.to(gates.dtype),
        gates,
        None if estimates is None else estimates.mean,
        None if estimates is None else estimates.var,
        weight,
        bias,
        options.training,
        0.1 if momentum is None else momentum,
        options.eps,
        mask=None if mask is None else mask.squeeze(1),
        running_update=options.running_update,
    )
    return y.to(x.dtype), gates, None


_BY_ONE = {"reference": _by_reference, "operators": _by_operators, "gpu": _by_gpu, "c": _by_c}
"""What serves a whole layer, by path; None for calls that it doesn't take."""


def _inputs(call: _Call, dtype: torch.dtype) -> Inputs:
    """What the nodes take beside x, gate parameters in a type."""
    if not isinstance(call.gates, LinearGate):
        given = _gates_of(call, call.x, call.x)
        return Inputs(given, None, None, call.weight, call.bias)
    weight, bias = call.gates.used_parameters()
    gate = (plain.as_type(weight, dtype), plain.as_type(bias, dtype))
    return Inputs(None, *gate, call.weight, call.bias)


def _gpu_inputs(call: _Call) -> Inputs:
    inputs = _inputs(call, torch.float32)
    if inputs.gates is not None:
        inputs = inputs._replace(gates=inputs.gates.contiguous())
    return inputs


def _by_parts(call: _Call, fused: bool) -> tuple[Tensor, Tensor]:
    """Moments, then gates and mixing by operators of torch or nodes of their own, then the map."""
    if not call.from_batch and isinstance(call.gates, Tensor):
        return _by_one_map(call, fused)
    x, gates, estimates, weight, bias, options, mask = call
    mean, var, counts, affine = moments_and_map(x, fused, mask, with_var=call.from_batch)
    gates = _gates_of(call, mean, x)
    if fused and call.from_batch:
        assert var is not None
        scale, shift, batch = mixing_node.mix(
            mean, var, gates, weight, bias, options.eps, options.ranks, x.shape[2:].numel()
        )
        _update_running(estimates, batch, options)
        return affine(mean.detach(), scale, shift), gates
    if call.from_batch and options.ranks is None:
        assert var is not None
        given = (mean, var, gates, weight, bias, options.eps)
        scale, shift, batch = mixing.batch_map(*given, counts=counts)
        if counts is not None:  # one value has no variance, so running estimates stay
            batch = batch._replace(mass=torch.where(counts.sum() > 1, batch.mass, 0))
        _update_running(estimates, batch, options)
        return affine(mean, scale, shift), gates
    if counts is None and options.ranks is not None:
        counts = gates.new_tensor(x.shape[2:].numel()).expand(x.shape[0])
    mode_mean, mode_var = _mode_moments(mean, var, counts, gates, estimates, options)
    scale, shift = mixing.coefficients(mode_mean, mode_var, gates, mean, weight, bias, options.eps)
    return affine(mean, scale, shift), gates


def moments_and_map(
    x: Tensor, fused: bool, mask: Tensor | None, with_var: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Mean, variance, counts (with a mask), and the affine map that belongs to this x."""
    if fused:
        mean, var, handed, link = streaming.moments(x, with_var)
        return mean, var, None, partial(streaming.affine, handed, link=link)
    wide = plain.widened(x)
    if mask is not None:
        mean, var, counts = plain.masked_moments(wide, mask)
    else:
        (mean, var), counts = plain.moments(wide, with_var), None
    return mean, var, counts, partial(plain.apply, wide, dtype=x.dtype)


def _mode_moments(
    mean: Tensor,
    var: Tensor | None,
    counts: Tensor | None,
    gates: Tensor,
    estimates: RunningEstimates | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """μ_k and σ²_k, (K, C): of all ranks' batches, which moves the estimates, or these."""
    if estimates is not None and not options.training:
        return estimates.mean.to(gates.dtype), estimates.var.to(gates.dtype)
    assert var is not None
    assert counts is not None
    assert options.ranks is not None
    batch = exchange.statistics(mean, var, gates * counts[:, None], options.ranks)
    _update_running(estimates, batch, options)
    return batch.mean, batch.var


def _update_running(
    estimates: RunningEstimates | None, batch: mixing.Statistics, options: Options
) -> None:
    """Move the running estimates, unless this forward repeats one that moved them already."""
    if estimates is not None and options.training and not recomputing():
        mixing.update_running(estimates, batch, options.momentum, options.running_update)


def _by_one_map(call: _Call, fused: bool) -> tuple[Tensor, Tensor]:
    """Inference with gates from outside: one map, no look at the data first."""
    x, estimates = call.x, call.estimates
    assert estimates is not None
    gates = _gates_of(call, x, x)
    mode_mean, mode_var = estimates.mean.to(gates.dtype), estimates.var.to(gates.dtype)
    # y does not depend on it, and backward keeps no buffer
    centre = product(gates.detach(), mode_mean)
    scale, shift = mixing.coefficients(
        mode_mean, mode_var, gates, centre, call.weight, call.bias, call.options.eps
    )
    affine = streaming.affine if fused else plain.apply
    return affine(x, centre, scale, shift), gates


def _gates_of(call: _Call, pooled: Tensor, x: Tensor) -> Tensor:
    """The gates (N, K) in the statistics' type, evaluated if they are a gating network."""
    gates, num_modes = call.gates, call.options.num_modes
    if isinstance(gates, Tensor):
        given, name = gates.to(statistics_dtype(x)), "gates"
    else:
        logits, name = logits_of(gates, pooled, call.mask), "the gate's logits"
        if not isinstance(logits, Tensor):
            raise ValueError(f"{name} are a {type(logits).__name__}; expected a tensor, (N, K)")
        given = logits.to(pooled.dtype)
    wrong_modes = num_modes is not None and given.shape[-1] != num_modes
    if given.ndim != 2 or given.shape[0] != x.shape[0] or given.shape[1] == 0 or wrong_modes:
        # written only here: a compiler takes a number in a text for a constant
        expected = "N, K" if num_modes is None else f"{x.shape[0]}, {num_modes}"
        raise ValueError(
            f"{name} have shape {tuple(given.shape)}; expected ({expected}): one row per sample "
            f"of x, {tuple(x.shape)}, one column per mode"
        )
    return given if isinstance(gates, Tensor) else torch.softmax(given, dim=1)


def _empty_modes(call: _Call) -> tuple[Tensor, Tensor]:
    """For no values: an empty output, and statistics without mass for other ranks."""
    x, gates, estimates, weight, bias, options, _ = call
    seen = x if isinstance(gates, Tensor) else x[:0]  # a gate learns nothing from no data
    mean, _ = plain.moments(x[:0], with_var=False)
    gates = _gates_of(call._replace(mask=None), mean, seen)
    y = plain.empty_output(x, gates, weight, bias)
    if options.ranks is not None:
        batch = exchange.statistics(mean, torch.zeros_like(mean), gates[:0], options.ranks)
        _update_running(estimates, batch, options)
        y = plain.empty_output(y, batch.mean, batch.var)
    return y, gates
