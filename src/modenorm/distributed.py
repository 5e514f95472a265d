"""Statistics over all processes of a distributed training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from modenorm.checks import check_module
from modenorm.exchange import Ranks
from modenorm.gates import StandardizedGate
from modenorm.layers import ModeNorm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["convert_sync_modenorm", "share_statistics"]


def convert_sync_modenorm(model: nn.Module, process_group: ProcessGroup | None = None) -> nn.Module:
    """Let the mode norms of a model take their statistics over the batches of all processes.

    In training every process then computes what one process would compute with all batches
    together: output, gradients and running estimates. Batches may differ in size and be empty. In
    evaluation nothing is exchanged and no process group is needed. What a `StandardizedGate` takes
    from the batch is shared too. `ModeGroupNorm`, whose samples are independent, stays as it is.

    Every process of the group has to run every layer, forward and backward, equally often and in
    the same order. docs/scaling.md says what is exchanged, what it costs, and what happens if not.

    Args:
        model: changed in place, before or after it is wrapped for distributed training.
        process_group: the processes to share with, one group that contains this process; None for
            all.

    Returns:
        The model.

    Example:
        >>> import modenorm
        >>> convert_sync_modenorm(nn.Sequential(nn.Conv2d(3, 8, 3), modenorm.ModeNorm2d(8)))[1]
        ModeNorm2d(
          8, num_modes=2, ..., synchronized=True
          (gate): LinearGate(num_features=8, num_modes=2)
        )
    """
    check_module(model)
    share_statistics(model, process_group)
    return model


def share_statistics(
    model: nn.Module, process_group: ProcessGroup | None, prefix: str = ""
) -> None:
    """Tell every layer of the model, whose own name is the prefix, whom it shares with."""
    for name, module in model.named_modules(prefix=prefix):
        if isinstance(module, (ModeNorm, StandardizedGate)):
            module.ranks = Ranks(process_group, name)
