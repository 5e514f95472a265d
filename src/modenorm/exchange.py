"""What the ranks of a process group tell each other: one collective forward, one backward.

Letters: R ranks, N samples, C channels, K modes. Forward, a rank gives weight, mean and variance of
its part of every mode, K(2C+1) numbers, and merges the parts of all; backward, the gradients of the
merged means and variances, 2KC numbers, are summed. The rest of a norm stays on its rank.
Compiled, the collectives are torch's functional ones, whose order Inductor keeps. It may reorder
custom operators that don't depend on each other, and with an empty batch none depends on another.
Derivation: docs/scaling.md.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from modenorm import mixing
from modenorm.mixing import product

if dist.is_available():
    import torch.distributed._functional_collectives as functional

if TYPE_CHECKING:  # a torch without torch.distributed still imports this
    from torch.distributed import ProcessGroup

__all__ = [
    "Ranks",
    "has_group",
    "in_use",
    "merge",
    "statistics",
    "sum_gradients",
    "total",
    "with_share",
]

SIGNATURE_BYTES = 256
_numbers = itertools.count()
# compiled graphs hold numbers, not objects; a layer that is gone must not keep its process group
_ranks: weakref.WeakValueDictionary[int, Ranks] = weakref.WeakValueDictionary()


class Ranks:
    """The processes that a layer takes its statistics over.

    Args:
        group: a process group that this process belongs to; None for all processes.
        name: of the layer, for messages.
    """

    def __init__(self, group: ProcessGroup | None = None, name: str = "") -> None:
        if group is not None and not _is_group(group):
            raise ValueError(
                f"process_group is {group!r}; it must be one group made by "
                f"torch.distributed.new_group, or None for all processes"
            )
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(
                f"process_group doesn't contain this process, rank {dist.get_rank()}; give the "
                f"group that this rank belongs to"
            )
        self.group = group
        self.name = name or "the mode norm"
        self.number = next(_numbers)
        self.agreed: str | None = None  # the signature that all ranks have confirmed
        _ranks[self.number] = self

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self.group)

    @property
    def group_name(self) -> str:
        """What torch calls the group."""
        group: Any = dist.group.WORLD if self.group is None else self.group
        return str(group.group_name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    def __reduce__(self) -> tuple[type[Ranks], tuple[None, str]]:
        if self.group is not None:
            raise ValueError(
                f"{self.name} takes its statistics over a process group, which exists in this "
                f"program only; save model.state_dict() instead of the model"
            )
        return Ranks, (None, self.name)

    def gather(self, values: Tensor) -> Tensor:
        """The values (rows, columns) of every rank, (R, rows, columns)."""
        rows, columns = values.shape
        out = values.new_empty((self.size * rows, columns))
        # torch 2.13 renamed it
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        collective(out, values, group=self.group)
        return out.view(self.size, rows, columns)

    def agree(self, shape: tuple[int, ...], dtype: str, device: torch.device) -> None:
        """Refuse ranks whose layers differ, on the first use; nothing later."""
        num_modes, width = shape
        signature = f"K={num_modes}, C={width // 2}, {dtype.removeprefix('torch.')} at {self.name}"
        if signature == self.agreed:
            return
        text = signature.encode()[:SIGNATURE_BYTES].ljust(SIGNATURE_BYTES)
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        rows = self.gather(own[None]).squeeze(1).tolist()
        texts = [bytes(row).decode(errors="replace").rstrip() for row in rows]
        if len(set(texts)) > 1:
            listed = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts))
            raise ValueError(
                f"ranks that share statistics must have the same layers and run them in the same "
                f"order, but {listed}: build the same model on every rank"
            )
        self.agreed = signature

    def failed(self, error: RuntimeError) -> RuntimeError:
        """The error of a collective that not all ranks took part in."""
        return RuntimeError(
            f"rank {dist.get_rank(self.group)} of {self.size} waited at {self.name} for statistics "
            f"of the other ranks, which didn't come: every rank has to run this layer in training, "
            f"forward and backward, as often as the others, also with an empty batch ({error})"
        )


def _is_group(group: object) -> bool:
    """Whether `new_group` may have made it, on a rank of the group or on another."""
    return isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER


def has_group() -> bool:
    """Whether there are other ranks to exchange with, or could be."""
    return dist.is_available() and dist.is_initialized()


def in_use(ranks: Ranks | None) -> Ranks | None:
    """The ranks to exchange with in a training step: None if there are no others."""
    if ranks is None:
        return None
    if not has_group():
        raise ValueError(
            f"{ranks.name} takes its statistics over all processes, but there is no process group; "
            f"call torch.distributed.init_process_group first and start the program with torchrun, "
            f"or train a model that wasn't converted"
        )
    return ranks if ranks.size > 1 else None


def gather(values: Tensor, ranks: int) -> Tensor:
    """The values (K, 2C+1) of every rank, (R, K, 2C+1)."""
    if torch.compiler.is_compiling():
        num_modes, width = values.shape
        device, dtype = str(values.device), str(values.dtype)
        group, size = _agree_while_tracing(ranks, num_modes, width, dtype, device)
        parts = functional.all_gather_tensor(values.contiguous(), 0, group)
        return parts.view(size, num_modes, width)
    members = _ranks[ranks]
    try:
        members.agree(tuple(values.shape), str(values.dtype), values.device)
        return members.gather(values.contiguous())
    except RuntimeError as error:
        raise members.failed(error) from error


def _agree_while_tracing(
    ranks: int, num_modes: int, width: int, dtype: str, device: str
) -> tuple[Any, int]:
    """The group's name and size; the first use of a compiled layer is its tracing."""
    members = _ranks[ranks]
    members.agree((num_modes, width), dtype, torch.device(device))
    return members.group_name, members.size


def _group_name(ranks: int) -> Any:
    return _ranks[ranks].group_name


# torch.compiler.assume_constant_result without its import of the compiler: called while tracing
_agree_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
_group_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def total(values: Tensor, ranks: int) -> Tensor:
    """The sum of the values over the ranks."""
    if torch.compiler.is_compiling():
        return functional.all_reduce(values.contiguous(), "sum", _group_name(ranks))
    return _Total.apply(values, ranks)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: int) -> Tensor:
        members = _ranks[ranks]
        ctx.ranks, ctx.members = ranks, members  # the layer may be gone before the backward
        out = values.clone(memory_format=torch.contiguous_format)
        try:
            dist.all_reduce(out, group=members.group)
        except RuntimeError as error:
            raise members.failed(error) from error
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return total(gradient, ctx.ranks), None


def merge(
    mass: Tensor, mean: Tensor, var: Tensor, ranks: int, positions: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Mass (K,), mean and variance (K, C) over all ranks, from those of this one (Chan et al.).

    A mass counts samples of so many positions, of which other ranks may have more or fewer.
    """
    num_channels = mean.shape[1]
    parts = gather(torch.cat([mass[:, None] * positions, mean, var], 1), ranks)
    masses, means, variances = parts.split([1, num_channels, num_channels], 2)
    mass = masses.sum(0)  # (K, 1)
    shares = masses / mass.clamp_min(torch.finfo(mass.dtype).tiny)  # (R, K, 1)
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean) ** 2)).sum(0)
    return mass.squeeze(1) / positions, mean, var


def sum_gradients(u: Tensor, s: Tensor, mass: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Gradients of the merged means and variances over all ranks, (K, C), divided by the mass."""
    divisor = mass.clamp_min(torch.finfo(mass.dtype).tiny)[:, None]
    both = total(torch.cat([u, s], 1) * divisor, ranks) / divisor
    return both[:, : u.shape[1]], both[:, u.shape[1] :]


def statistics(mean: Tensor, var: Tensor, weights: Tensor, ranks: Ranks) -> mixing.Statistics:
    """`mixing.batch_statistics` over the batches of all ranks.

    Args:
        mean: m, (N, C).
        var: v, (N, C).
        weights: (N, K), gates times the positions that count in each sample.
        ranks: those that take part; N may differ between them, and be 0.
    """
    return with_share(*_Statistics.apply(mean, var, weights, ranks.number))


def with_share(
    mode_mean: Tensor, mode_var: Tensor, mass: Tensor, positions: int = 1
) -> mixing.Statistics:
    """Statistics whose shares are of the mass, since the samples of all ranks are not counted.

    One value per channel in all ranks together has no variance, which no rank knows before. Such a
    batch gets no mass, so that running estimates stay. Small masses alone don't tell: the gates of
    a sample need not sum to 1.

    Args:
        mode_mean: (K, C).
        mode_var: (K, C).
        mass: (K,).
        positions: Values per channel for which a mass of 1 stands.
    """
    mass = mass.detach()
    together = mass.sum()
    still = mode_var.detach() <= 1e-12 * mode_mean.detach().square()
    mass = torch.where((together * positions < 1.5) & still.all(), 0, mass)
    share = mass / together.clamp_min(torch.finfo(mass.dtype).tiny)
    return mixing.Statistics(mode_mean, mode_var, mass, share)


class _Statistics(torch.autograd.Function):
    """Differentiable as often as one likes; parts of modes without mass on this rank included."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, weights: Tensor, ranks: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        local = mixing.batch_statistics(mean, var, weights)
        mass, mode_mean, mode_var = merge(local.mass, local.mean, local.var, ranks)
        ctx.save_for_backward(mean, var, weights, mode_mean, mode_var, mass)
        ctx.ranks = ranks
        if not torch.compiler.is_compiling():
            ctx.members = _ranks[ranks]  # the layer may be gone before the backward
        ctx.set_materialize_grads(False)
        return mode_mean, mode_var, mass

    @staticmethod
    def backward(
        ctx: Any, dmode_mean: Tensor | None, dmode_var: Tensor | None, dmass: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        mean, var, weights, mode_mean, mode_var, mass = ctx.saved_tensors
        divisor = mixing.divisor_of(mass)[:, None]
        parts = [torch.zeros_like(mode_mean) if d is None else d for d in (dmode_mean, dmode_var)]
        if dmass is not None:  # in a double backward only
            parts.append(dmass[:, None])
        u, s, *rest = total(torch.cat(parts, 1), ctx.ranks).split([d.shape[1] for d in parts], 1)
        u, s = u / divisor, s / divisor
        apart = mean[:, None] - mode_mean  # (N, K, C)
        dmean = (weights[:, :, None] * (u + 2 * s * apart)).sum(1)
        dweights = (u * apart + s * (var[:, None] + apart**2 - mode_var)).sum(2)
        for of_mass in rest:
            dweights = dweights + of_mass.t()
        return dmean, product(weights, s), dweights, None
