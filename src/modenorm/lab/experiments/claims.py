"""What mode normalization adds to the paper's networks, counted and not measured."""

from modenorm.lab.models import count_parameters, create_model

PARAMETER_HEADER = ("network", "parameters with BN", "MN K=2", "MN K=4", "MN K=6")
NETWORKS = {"lenet": 40, "nin": 10, "vgg13": 10, "resnet20": 10, "resnet56": 100, "resnet18": 1000}
"""The networks of the tables and their numbers of classes."""


def parameter_rows() -> list[list[str]]:
    """The parameters of every network, and how many more it has with modes, in percent."""
    return [_row(model, classes) for model, classes in NETWORKS.items()]


def _row(model: str, classes: int) -> list[str]:
    plain = _count(model, classes, norm="bn")
    more = [_count(model, classes, norm="mn", modes=k) / plain - 1 for k in (2, 4, 6)]
    return [model, f"{plain:,}", *(f"+{100 * share:.2f} %" for share in more)]


def _count(model: str, classes: int, **norm: object) -> int:
    return count_parameters(create_model(model, num_classes=classes, **norm))  # type: ignore[arg-type]
