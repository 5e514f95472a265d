"""Models with batch norm into models with mode norm, and back.

replace.py and back.py do it, with selection.py (which norms), substitutes.py (layers that only a
conversion makes), replacement.py (hooks and places) and optimizers.py (parameters).
"""

from modenorm.convert.back import to_batchnorm
from modenorm.convert.optimizers import NormParameters, norm_parameters
from modenorm.convert.replace import replace_batchnorm

__all__ = ["NormParameters", "norm_parameters", "replace_batchnorm", "to_batchnorm"]
