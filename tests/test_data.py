"""The shipped data are the data, and a data set of another kind is read or refused."""

import hashlib

import datasets
import numpy as np
import pytest
from conftest import ROOT

from trainkit.pictures.grey import load_images


@pytest.mark.parametrize("split", ["test", pytest.param("train", marks=pytest.mark.slow)])
def test_shipped_mnist_has_the_pixels_its_readme_names(split):
    data, part = load_images(str(ROOT / "data" / "mnist"), split, 28)
    assert part.classes == list("0123456789")
    pixels = hashlib.md5(data.tensors[0].numpy()).hexdigest()
    labels = hashlib.md5(data.tensors[1].numpy().astype(np.uint8)).hexdigest()
    row = f"| {split} | {len(data):,} | `{pixels}` | `{labels}` |"
    assert row in (ROOT / "data" / "mnist" / "README.md").read_text()
    assert datasets.config.HF_HUB_OFFLINE
