"""Models with fewer modes.

prune.py decides how many modes go, by what the model computes; layer_view.py and search.py which
ones, by what each layer computes; resizing.py changes the layers.
"""

from modenorm.pruning.outcome import LayerPruning, Pruning
from modenorm.pruning.prune import DEFAULT_TOLERANCE, prune_modes
from modenorm.pruning.resizing import close_modes, match_modes

__all__ = [
    "DEFAULT_TOLERANCE",
    "LayerPruning",
    "Pruning",
    "close_modes",
    "match_modes",
    "prune_modes",
]
