"""Handwritten digits: MNIST's files where there are some, else those that scikit-learn ships."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch.utils.data import TensorDataset


def load(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """The images to train with, and those to test with.

    Args:
        folder: where MNIST's four files are, as published (``train-images-idx3-ubyte``, …), packed
            by gzip or not; None takes scikit-learn's 1797 images of 8 x 8.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file is not of the idx format.
    """
    if folder is None:
        return _small()
    return _mnist(folder, "train"), _mnist(folder, "t10k")


def _mnist(folder: Path, part: str) -> TensorDataset:
    images = _idx(folder / f"{part}-images-idx3-ubyte").float() / 255
    labels = _idx(folder / f"{part}-labels-idx1-ubyte").long()
    # Mean 0 and deviation 1, over all pixels of MNIST.
    return TensorDataset((images.unsqueeze(1) - 0.1307) / 0.3081, labels)


def _idx(path: Path) -> torch.Tensor:
    """Read bytes of any shape: two zeros, 8 for bytes, the number of sizes, the sizes, the data."""
    packed = path.with_name(f"{path.name}.gz")
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} does not begin as an idx file of bytes does")
    start = 4 + 4 * content[3]
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(sizes)


def _small() -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16  # they go from 0 to 16
    labels = torch.from_numpy(found.target).long()
    # Every fifth is for the test: the file is sorted by who wrote them.
    is_test = torch.arange(len(labels)) % 5 == 4
    train, test = (TensorDataset(images[part], labels[part]) for part in (~is_test, is_test))
    return train, test
