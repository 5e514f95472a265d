import pytest
from published import write_cifar10, write_cifar100, write_idx_set, write_svhn


@pytest.fixture
def root(tmp_path):
    """A data folder with all five published sets, small."""
    write_idx_set(tmp_path / "MNIST" / "raw")
    write_idx_set(tmp_path / "FashionMNIST" / "raw", seed=1)
    write_cifar10(tmp_path / "cifar-10-batches-py")
    write_cifar100(tmp_path / "cifar-100-python")
    write_svhn(tmp_path)
    return tmp_path
