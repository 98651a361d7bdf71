"""The shipped data are the data, and a data set of another kind is read or refused."""

import hashlib

import datasets
import numpy as np
import pytest
from conftest import ROOT

from trainkit.config import parse
from trainkit.pictures import GreyConfig, load_grey


@pytest.mark.parametrize("split", ["test", pytest.param("train", marks=pytest.mark.slow)])
def test_shipped_mnist_has_the_pixels_its_readme_names(split, tiny_mnist):
    file = ROOT / "data" / "mnist" / f"{split}-00000-of-00001.parquet"
    flags = ["--dataset", str(tiny_mnist), "--eval-data", str(file)]
    _, data, metadata, _ = load_grey(parse(GreyConfig, flags), 28)
    assert metadata["classes"] == list("0123456789")
    pixels = hashlib.md5(data.tensors[0].numpy()).hexdigest()
    labels = hashlib.md5(data.tensors[1].numpy().astype(np.uint8)).hexdigest()
    row = f"| {split} | {len(data):,} | `{pixels}` | `{labels}` |"
    assert row in (ROOT / "data" / "mnist" / "README.md").read_text()
    assert datasets.config.HF_HUB_OFFLINE
