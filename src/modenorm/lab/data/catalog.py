"""The published data sets: their files, addresses, checksums, classes and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from modenorm.lab.data import cifar, files, idx, svhn
from modenorm.lab.data.checks import Splits
from modenorm.lab.data.files import Form


@dataclass(frozen=True)
class Published:
    """A data set as its authors published it.

    Args:
        title: Its name in print.
        read: Reads the files that `find` returns.
        forms: The ways in which it may lie on disk.
        downloads: md5 of each published file by its place below the data folder.
        address: Where the files are, without the last name.
        classes: Class names in the order of the labels.
        histograms: Images of each class, for "train" and "test".
    """

    title: str
    read: Callable[[Sequence[Path], int], Splits]
    forms: tuple[Form, ...]
    downloads: dict[str, str]
    address: str
    classes: tuple[str, ...]
    histograms: dict[str, tuple[int, ...]]

    def find(self, root: Path) -> list[Path]:
        """The set's files below `root`, or a DataError that says what is missing."""
        return files.find(self.title, self.forms, root)


DIGITS = tuple("0123456789")
FASHION = (
    "t-shirt/top", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
CIFAR10 = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
CIFAR100 = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
    "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
    "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup",
    "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house",
    "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man",
    "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
    "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy",
    "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal",
    "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar",
    "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor",
    "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman",
    "worm",
)  # fmt: skip


def _idx_forms(*places: str) -> tuple[Form, ...]:
    compressed = tuple(f"{name}.gz" for name in idx.NAMES)
    return Form(compressed, places), Form(idx.NAMES, places)


def _cifar_forms(num_classes: int, folder: str, archive: str) -> tuple[Form, ...]:
    own = f"cifar{num_classes}"
    unpacked = Form(cifar.NAMES[num_classes], (folder, f"{own}/{folder}", own))
    return unpacked, Form((archive,), (".", own))


PUBLISHED = {
    "mnist": Published(
        title="MNIST",
        read=idx.read,
        forms=_idx_forms("MNIST/raw", "MNIST", "mnist/raw", "mnist"),
        downloads={
            "MNIST/raw/train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "MNIST/raw/train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "MNIST/raw/t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "MNIST/raw/t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        address="https://ossci-datasets.s3.amazonaws.com/mnist/",
        classes=DIGITS,
        histograms={
            "train": (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
            "test": (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
        },
    ),
    "cifar10": Published(
        title="CIFAR-10",
        read=cifar.read,
        forms=_cifar_forms(10, "cifar-10-batches-py", "cifar-10-python.tar.gz"),
        downloads={"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
        address="https://www.cs.toronto.edu/~kriz/",
        classes=CIFAR10,
        histograms={"train": (5000,) * 10, "test": (1000,) * 10},
    ),
    "svhn": Published(
        title="SVHN",
        read=svhn.read,
        forms=(Form(svhn.NAMES, (".", "svhn", "SVHN")),),
        downloads={
            "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
        address="http://ufldl.stanford.edu/housenumbers/",
        classes=DIGITS,
        histograms={
            "train": (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
            "test": (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
        },
    ),
    "fashion_mnist": Published(
        title="Fashion-MNIST",
        read=idx.read,
        forms=_idx_forms("FashionMNIST/raw", "FashionMNIST", "fashion_mnist/raw", "fashion_mnist"),
        downloads={
            "FashionMNIST/raw/train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "FashionMNIST/raw/train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "FashionMNIST/raw/t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        classes=FASHION,
        histograms={"train": (6000,) * 10, "test": (1000,) * 10},
    ),
    "cifar100": Published(
        title="CIFAR-100",
        read=cifar.read,
        forms=_cifar_forms(100, "cifar-100-python", "cifar-100-python.tar.gz"),
        downloads={"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
        address="https://www.cs.toronto.edu/~kriz/",
        classes=CIFAR100,
        histograms={"train": (500,) * 100, "test": (100,) * 100},
    ),
}

MULTITASK = ("mnist", "cifar10", "svhn", "fashion_mnist")
