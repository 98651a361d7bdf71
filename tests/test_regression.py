"""train_regression.py finds what is in the data, as plain PyTorch and least squares find it."""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import refused, saved

import train_regression


def test_the_defaults_recover_the_truth(tmp_path, run_main):
    run_main("train_regression", f"--run-dir {tmp_path} --save-every 1000000")
    train_set, _, metadata, _ = train_regression.load_data(train_regression.Config())
    features, targets = (tensor.double() for tensor in train_set.tensors)
    inputs = F.pad(features, (0, 1), value=1.0)  # a column of ones for the bias
    optimum = torch.linalg.lstsq(inputs, targets, driver="gelsd").solution.T
    weights, _ = saved(tmp_path)
    learned = torch.cat((weights["weight"], weights["bias"][:, None]), 1).double()
    mse, least_mse = (F.mse_loss(inputs @ found.T, targets).item() for found in (learned, optimum))
    # The root mean square distance to the truth that the noise gives the optimum.
    variances = 0.1**2 * torch.linalg.pinv(inputs.T @ inputs).diagonal()
    standard_error = variances.sum().sqrt().item()
    to_optimum = (learned - optimum).norm().item()
    to_truth = (learned - torch.tensor(metadata["truth"])).norm().item()
    print(f"{mse=} {least_mse=} {to_optimum=} {to_truth=} {standard_error=}")  # for RECORDS.md
    # What training leaves undone is small beside what the noise hides from anyone.
    assert mse < 1.01 * least_mse and to_optimum < 0.2 * standard_error
    assert to_truth < 2 * standard_error


def test_a_network_learns_what_a_line_cannot_and_both_are_measured_in_the_unit_of_the_target(
    tmp_path, run_main
):
    random = np.random.default_rng(0)
    inputs = random.uniform(-2, 2, (600, 2))
    table = pd.DataFrame(inputs, columns=["a", "b"])
    table["product"], table["square"] = inputs.prod(1) * 1000, inputs[:, 0] ** 2
    table.to_json(tmp_path / "table.jsonl", orient="records", lines=True)
    flags = f"--data {tmp_path}/table.jsonl --target product,square --save-every 1000000"
    metrics = run_main("examples.table", f"{flags} --run-dir {tmp_path}/run --epochs 12")
    predictions, _ = saved(tmp_path / "run", "predictions")
    test = predictions["index"].numpy()
    assert len(test) == metrics["eval_samples"] == 120
    y = table[["product", "square"]].to_numpy()
    assert predictions["target"].numpy() == pytest.approx(y[test], rel=1e-5, abs=1e-5)
    error = predictions["prediction"].numpy() - y[test]
    assert metrics["eval_rmse"] == pytest.approx(np.sqrt((error**2).mean(0)).mean(), rel=1e-5)
    ones = np.column_stack((inputs, np.ones(600)))
    train = np.setdiff1d(np.arange(600), test)
    learned, *_ = np.linalg.lstsq(ones[train], y[train], rcond=None)
    r2 = 1 - ((y[test] - ones[test] @ learned) ** 2).mean(0) / y[test].var(0)
    assert r2.mean() < 0.2 < 0.8 < metrics["eval_r2"] < 1


def test_flags_that_have_moved_name_what_is_given_instead():
    for words in (["--data", "x.csv", "--target", "y"], ["--features=a,b"]):
        with refused(r"python examples/table.py --data FILE --target COLUMN"):
            train_regression.main(words)
    with refused(r"^--target-r2: give --target eval_r2:VALUE"):
        train_regression.main(["--target-r2=0.9"])
    with refused(r"^--dry-run: give --stop-after-steps 1 --run-dir FOLDER"):
        train_regression.main(["--dry-run"])
