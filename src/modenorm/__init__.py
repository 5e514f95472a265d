"""Mode Normalization (Deecke, Murray & Bilen, ICLR 2019) for PyTorch.

Batch norm that discovers K modes in your data and normalises each with its own statistics.
"""

from modenorm import functional, gates, reference
from modenorm.convert import norm_parameters, replace_batchnorm, to_batchnorm
from modenorm.distributed import convert_sync_modenorm
from modenorm.gates import LinearGate, StandardizedGate
from modenorm.kernels.choice import use_backend
from modenorm.layers import ModeGroupNorm, ModeNorm1d, ModeNorm2d, ModeNorm3d
from modenorm.modes import mode_report, record_gates
from modenorm.pruning import match_modes, prune_modes
from modenorm.sparsity import ModeSparsity
from modenorm.statistics import freeze_statistics, recalibrate

__version__ = "0.1.0"

__all__ = [
    "LinearGate",
    "ModeGroupNorm",
    "ModeNorm1d",
    "ModeNorm2d",
    "ModeNorm3d",
    "ModeSparsity",
    "StandardizedGate",
    "convert_sync_modenorm",
    "freeze_statistics",
    "functional",
    "gates",
    "match_modes",
    "mode_report",
    "norm_parameters",
    "prune_modes",
    "recalibrate",
    "record_gates",
    "reference",
    "replace_batchnorm",
    "to_batchnorm",
    "use_backend",
]
