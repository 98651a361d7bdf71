"""The shipped data are the data, and a data set of another kind is read or refused."""

import hashlib

import datasets
import numpy as np
import pytest
from conftest import ROOT

from trainkit.data.pictures import load_images

MD5 = {
    "train": ("6510e85a72c3e9475c492d559d3770d2", "e86ee40d66677c011a9abda399ec8c4d"),
    "test": ("240610fa99e73bfa49df8e7fc24d3206", "073c3904dfbd3e141ff8aa01cfde6b15"),
}


@pytest.mark.parametrize("split", ["test", pytest.param("train", marks=pytest.mark.slow)])
def test_shipped_mnist_has_the_pixels_its_readme_names(split):
    data, names, _ = load_images(str(ROOT / "data" / "mnist"), split, 28)
    assert names == list("0123456789")
    pixels = hashlib.md5(data.tensors[0].numpy()).hexdigest()
    labels = hashlib.md5(data.tensors[1].numpy().astype(np.uint8)).hexdigest()
    assert (pixels, labels) == MD5[split]
    readme = (ROOT / "data" / "mnist" / "README.md").read_text()
    assert pixels in readme and labels in readme
    assert datasets.config.HF_HUB_OFFLINE
