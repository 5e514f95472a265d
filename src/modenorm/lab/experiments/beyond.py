"""What the paper leaves open, as further tables: trained and shown like its own."""

from modenorm.lab.experiments.paper import (
    CIFAR10,
    LENET,
    LENET_SMALL_BATCHES,
    PUBLISHED1,
    RESNET20,
    Published,
    cells_of,
)

# Which network and training would explain the level of the paper's Table 1: beside its numbers.
_BN_AND_MN: dict[str, Published] = {label: PUBLISHED1[label] for label in ("BN", "MN K=2")}
LEVEL = [
    cell
    for group, settings, published in (
        ("LeNet of 1989, sigmoid", {"model": "lenet1989"}, PUBLISHED1),
        ("LeNet of 1989, tanh", {"model": "lenet1989", "options": {"activation": "tanh"}}, None),
        ("LeNet-5, sigmoid", {"options": {"activation": "sigmoid"}}, None),
        (
            "LeNet-5, sigmoid, average pooling",
            {"options": {"activation": "sigmoid", "pool": "avg"}},
            None,
        ),
        (
            "LeNet-5, tanh, average pooling",
            {"options": {"activation": "tanh", "pool": "avg"}},
            None,
        ),
        ("LeNet-5, momentum 0.9", {"momentum": 0.9}, None),
        ("LeNet-5, learning rate 0.01", {"lr": 0.01}, None),
    )
    for cell in cells_of("level", group, {**LENET, **settings}, published or _BN_AND_MN)
]

# The paper's settings with the layers' options that it leaves open or does not have.
OPTIONS = [
    *cells_of(
        "options",
        "LeNet, N=128",
        LENET,
        {
            "BN": None,
            **{f"MN K={k}{gate}": None for k in (2, 4, 6) for gate in ("", ", standardised gate")},
        },
    ),
    *(
        cell
        for batch in (4, 8, 16)
        for cell in cells_of(
            "options",
            f"LeNet, N={batch}",
            {**LENET_SMALL_BATCHES, "batch": batch},
            {"BN": None, "MGN K=2": None, "MGN K=2, pixel variance": None},
        )
    ),
]

# The number of modes found by itself, beside fixed numbers; batch norm is K=1.
AUTOMATIC = [
    cell
    for group, settings in (
        ("LeNet, N=128", LENET),
        ("ResNet20 on CIFAR-10", {**RESNET20, **CIFAR10}),
    )
    for cell in cells_of(
        "automatic",
        group,
        settings,
        dict.fromkeys(("BN", "MN K=2", "MN K=4", "MN K=6", "MN K=8", "MN auto")),
    )
]
