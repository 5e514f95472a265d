"""What every data set is after loading: uint8 images, labels, domains, and their names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


class DataError(ValueError):
    """A problem with data files, told in one sentence: the file and what was expected."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with a class label and a domain each.

    Args:
        images: uint8, (N, 3, H, W).
        labels: int64, (N,), indices into `classes`.
        domains: int64, (N,), indices into `domain_names`.
        classes: Class names.
        domain_names: Names of the data sources that were mixed; one name when there is one source.
    """

    images: Tensor
    labels: Tensor
    domains: Tensor
    classes: tuple[str, ...]
    domain_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """The number of classes, whether or not all of them occur."""
        return len(self.classes)


@dataclass(frozen=True, eq=False)
class DataSet:
    """A training set and a test set over the same classes and domains."""

    name: str
    train: ImageSet
    test: ImageSet
