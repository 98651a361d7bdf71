"""train_regression.py finds what is in the data, as plain PyTorch and least squares find it."""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import saved
from made_tables import frame, load

import train_regression


def test_the_defaults_recover_the_truth(tmp_path, run_main):
    run_main("train_regression", f"--run-dir {tmp_path} --save-every 1000000")
    train_set, _, metadata = load()
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


def test_a_table_reaches_the_r2_of_least_squares_in_the_unit_of_its_target(tmp_path, run_main):
    table = frame(2003)
    table.y += 90 * (table.city == "Rome") + np.random.default_rng(1).normal(0, 150, len(table))
    table.to_csv(tmp_path / "table.csv", index=False)
    data = f"--data {tmp_path}/table.csv --target y --model linear"
    metrics = run_main(
        "train_regression", data, f"--run-dir {tmp_path}/run --epochs 15 --save-every 1000000"
    )
    predictions, _ = saved(tmp_path / "run", "predictions")
    test = predictions["index"].numpy()
    train = np.setdiff1d(np.arange(len(table)), test)
    assert len(test) == metrics["eval_samples"] == round(len(table) / 5)
    inputs, y = pd.get_dummies(table.drop(columns="y")).astype(float), table.y.to_numpy()
    ones = inputs.assign(one=1.0).to_numpy()
    learned, *_ = np.linalg.lstsq(ones[train], y[train], rcond=None)
    r2 = 1 - ((y[test] - ones[test] @ learned) ** 2).mean() / y[test].var()
    assert r2 > 0.5 and metrics["eval_r2"] == pytest.approx(r2, abs=0.005)
    assert predictions["target"][:, 0].numpy() == pytest.approx(y[test], rel=1e-5)
    error = predictions["prediction"] - predictions["target"]
    assert metrics["eval_rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-5)


def test_an_mlp_learns_what_a_line_cannot(tmp_path, run_main):
    random = np.random.default_rng(0)
    inputs = random.uniform(-2, 2, (600, 2))
    table = pd.DataFrame(inputs, columns=["a", "b"])
    table["product"], table["square"] = inputs.prod(1) * 1000, inputs[:, 0] ** 2
    table.to_json(tmp_path / "table.jsonl", orient="records", lines=True)
    data = f"--data {tmp_path}/table.jsonl --target product,square --epochs 12 --save-every 1000000"
    line = run_main("train_regression", f"{data} --run-dir {tmp_path}/l --model linear")
    mlp = f"{data} --run-dir {tmp_path}/mlp --model mlp --hidden 32,32 --loss huber"
    metrics = run_main("train_regression", f"{mlp} --target-r2 0.8")
    assert line["eval_r2"] < 0.2 < 0.9 < metrics["eval_r2"] < 1
    with pytest.raises(SystemExit) as ended:
        run_main("train_regression", f"{mlp} --target-r2 0.999 --resume latest")
    assert ended.value.code == 3


def test_r2_of_a_target_that_does_not_vary_is_0_or_if_it_is_met_1():
    truth = np.array([[3.0, 3, 0], [3, 3, 2]])  # met exactly; not met; varies
    guess = np.array([[3.0, 4, 0], [3, 4, 1]])
    found = train_regression.measure(guess, truth, np.array([3, 3, -1]))
    # MSE, RMSE, MAE, R2 of 1, 0 and 0.5, and of 1, 0 and 0.9 beside the mean of the training.
    expected = [0.5, (1 + 0.5**0.5) / 3, 0.5, 0.5, 1.9 / 3]
    assert [*found.values()] == pytest.approx(expected)
