"""Which norms a conversion means, and whether it may touch them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Integral

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from modenorm.checks import check_module
from modenorm.layers import ModeNorm

__all__ = [
    "Where", "batchnorms", "check_convertible", "check_model", "check_unwrapped", "is_timm_act",
    "listed", "modes_of", "select",
]  # fmt: skip

Where = str | Sequence[str] | Callable[[str, nn.Module], bool] | None

TIMM_ACT = ("timm.layers.norm_act", "BatchNormAct2d")
STATE = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
SHARDED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def check_model(model: nn.Module) -> None:
    """Refuse models whose layers can't be exchanged, or not any more."""
    check_unwrapped(model, "new parameters; convert the model before wrapping it")
    for name, module in model.named_modules():
        kind, at = type(module).__name__, f" at {name!r}" if name else ""
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"the model has a compiled {kind}{at}, whose layers are fixed; convert the Python "
                f"model, then script or trace it"
            )
        if kind == "OptimizedModule" and isinstance(module._orig_mod, _BatchNorm | ModeNorm):
            raise ValueError(
                f"the model has a {type(module._orig_mod).__name__}{at} that is compiled by itself "
                f"and would go on to run as it is; convert the model, then compile"
            )
        path = type(module).__module__
        if path.startswith(("torch.ao.", "torchao.")) and not path.endswith(".stubs"):
            raise ValueError(
                f"the model is prepared for quantization ({kind}{at}), which has taken its batch "
                f"norms into account; convert the float model first. Mode norms stay float: see "
                f"quantization in docs/conversion.md"
            )


def check_unwrapped(model: nn.Module, message: str) -> None:
    """Refuse models inside of a wrapper that knows their parameters as they were."""
    check_module(model)
    for name, module in model.named_modules():
        if SHARDED & {base.__name__ for base in type(module).__mro__}:
            kind, at = type(module).__name__, f" at {name!r}" if name else ""
            raise ValueError(f"the model is wrapped in {kind}{at}, which doesn't see {message}")


def batchnorms(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every batch norm with all its names, in the model's order."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _BatchNorm):
            found.setdefault(module, []).append(name)
    if not found:
        counts: dict[str, int] = {}
        for module in model.modules():
            if "Norm" in type(module).__name__:
                counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
        others = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no norm at all"
        raise ValueError(
            f"{type(model).__name__} has no batch norm to replace; it has {others}. Mode norms can "
            f"be put in by hand: modenorm.ModeNorm2d(num_features)"
        )
    return found


def select(
    norms: dict[nn.Module, list[str]], model: nn.Module, where: Where
) -> dict[nn.Module, str]:
    """The norms that `where` means, with their first names."""
    if where is None:
        return {module: names[0] for module, names in norms.items()}
    if isinstance(where, str) and where == "first":
        module = next(iter(norms))
        return {module: norms[module][0]}
    if callable(where):
        matches = where
    else:
        if not isinstance(where, str | Iterable):
            raise ValueError(
                f'where is {where!r}; expected a name pattern, several, "first", or a function of '
                f"(name, module)"
            )
        patterns = [where] if isinstance(where, str) else list(where)
        _check_patterns("where", patterns, norms.values())

        def matches(name: str, module: nn.Module) -> bool:
            return any(fnmatchcase(name, pattern) for pattern in patterns)

    found = {m: names[0] for m, names in norms.items() if any(matches(n, m) for n in names)}
    if not found:
        raise ValueError(
            f"where selects none of the {len(norms)} batch norms of {type(model).__name__}: "
            f"{listed(names[0] for names in norms.values())}"
        )
    return found


def _check_patterns(argument: str, patterns: Iterable[str], norms: Iterable[list[str]]) -> None:
    names = [name for several in norms for name in several]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(
                f"{argument} has the pattern {pattern!r}; it must be a text, such as "
                f"{str(pattern)!r}: the names are {listed(names)}"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            inside = [name for name in names if name.startswith(f"{pattern}.")]
            fix = f"use {pattern + '.*'!r} for what is inside" if inside else "see fnmatch"
            raise ValueError(
                f"{argument} has the pattern {pattern!r}, which matches no batch norm ({fix}); "
                f"their names are {listed(names)}"
            )


def modes_of(
    found: dict[nn.Module, list[str]], num_modes: int | Mapping[str, int]
) -> dict[nn.Module, int]:
    """K of each norm that gets one, given all its names."""
    if not isinstance(num_modes, Mapping):
        _check_modes(num_modes)
        return dict.fromkeys(found, num_modes)
    if not num_modes:
        raise ValueError("num_modes is an empty dict; give {name pattern: number of modes}")
    _check_patterns("num_modes", num_modes, found.values())
    chosen = {}
    for module, names in found.items():
        matching = [
            k
            for pattern, k in num_modes.items()
            if any(fnmatchcase(name, pattern) for name in names)
        ]
        if matching:
            _check_modes(matching[0])
            chosen[module] = matching[0]
    return chosen


def _check_modes(num_modes: int) -> None:
    if not isinstance(num_modes, Integral) or isinstance(num_modes, bool) or num_modes < 1:
        raise ValueError(
            f"num_modes is {num_modes!r}; it must be an integer of at least 1, or a dict from name "
            f"patterns to such integers"
        )


def check_convertible(
    found: dict[nn.Module, str],
    known: Collection[type[nn.Module]],
    adapted: Collection[type[nn.Module]],
) -> None:
    """Refuse norms that would lose something; those with an adapter are the caller's."""
    found = {module: name for module, name in found.items() if type(module) not in adapted}
    unknown = [m for m in found if type(m) not in known and not is_timm_act(m)]
    if unknown:
        kind = type(unknown[0]).__name__
        names = listed(f"{found[m]} ({type(m).__name__})" for m in unknown)
        raise ValueError(
            f"these are derived from batch norm and may do more than it does: {names}. Say what "
            f"replaces them, for example subclasses={{{kind}: lambda old, norm: "
            f"nn.Sequential(norm, old.act)}}, or leave them out with where="
        )
    for module, name in found.items():
        if extra := (set(module._parameters) | set(module._buffers)) - STATE:
            raise ValueError(
                f"{name or 'the norm'} has {listed(sorted(extra))} besides a batch norm's tensors "
                f"(pruned?); make them permanent first, or leave it out with where="
            )
        if "forward" in vars(module):
            raise ValueError(
                f"{name or 'the norm'} has its own forward, set on the instance (by a wrapper?); "
                f"convert the model before that, or leave it out with where="
            )
        if module.running_mean is not None and not module.track_running_stats:
            raise ValueError(
                f"{name or 'the norm'} has running statistics but track_running_stats=False, which "
                f"a mode norm doesn't know; set it to True, and see modenorm.freeze_statistics"
            )


def is_timm_act(module: nn.Module) -> bool:
    """Whether this is timm's batch norm with dropout and activation, without importing timm."""
    return (type(module).__module__, type(module).__name__) == TIMM_ACT


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names for a message, the first few of many."""
    names = [name or "the model itself" for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
