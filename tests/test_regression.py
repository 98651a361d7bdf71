"""train_regression.py finds what is in the data, as plain PyTorch and least squares find it."""

import time

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import rows, saved
from plain import logged_losses, plain_losses
from test_tables import frame, load
from torch import nn
from torch.optim import lr_scheduler

import train_regression
from trainkit.config import parse
from trainkit.loaders import EpochBatches


@pytest.mark.parametrize("data_seed", [0, 1])
def test_the_defaults_recover_the_truth(data_seed, tmp_path, run_main):
    started_at = time.process_time()  # of one thread: a busy machine does not count
    seed = ["--data-seed", data_seed]
    run_main("train_regression", "--run-dir", tmp_path, *seed, "--save-every", 10**6)
    assert time.process_time() - started_at < 10
    train_set, _, metadata = load(*seed)
    features, targets = (tensor.double() for tensor in train_set.tensors)
    inputs = F.pad(features, (0, 1), value=1.0)  # a column of ones for the bias
    optimum = torch.linalg.lstsq(inputs, targets, driver="gelsd").solution.T
    weights, _ = saved(tmp_path)
    learned = torch.cat((weights["weight"], weights["bias"][:, None]), 1).double()
    # The root mean square distance to the truth that the noise gives the optimum.
    variances = 0.1**2 * torch.linalg.pinv(inputs.T @ inputs).diagonal()
    found = {
        "train_mse": F.mse_loss(inputs @ learned.T, targets).item(),
        "least_squares_mse": F.mse_loss(inputs @ optimum.T, targets).item(),
        "distance_to_least_squares": (learned - optimum).norm().item(),
        "distance_to_truth": (learned - torch.tensor(metadata["truth"])).norm().item(),
        "standard_error": variances.sum().sqrt().item(),
    }
    print(found)
    assert found["train_mse"] < 1.01 * found["least_squares_mse"]
    # What training leaves undone is small beside what the noise hides from anyone.
    assert found["distance_to_least_squares"] < 0.2 * found["standard_error"]
    assert found["distance_to_truth"] < 2 * found["standard_error"]


TEMPLATES = {
    # torch.multiprocessing.spawn: 100 x 10 samples in batches of 32
    "spawn": "--num-samples 100 --learning-rate 1e-3 --epochs 10 --schedule constant",
    # DistributedDataParallel, GradScaler and two schedules
    "schedules": "--num-samples 32 --num-targets 10 --learning-rate 1e-2 --epochs 100 "
    "--schedule exponential+cosine --gamma 0.9 --cosine-epochs 50",
}


@pytest.mark.numeric
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_published_templates_are_plain_pytorch(template, tmp_path, run_main):
    flags = f"{TEMPLATES[template]} --batch-size 32 --optimizer sgd --momentum 0 --test-fraction 0"
    run = f"--run-dir {tmp_path} --log-every 1 --save-every 1000000"
    run_main("train_regression", *f"{run} {flags}".split())

    features, targets = load(*flags.split())[0].tensors
    config = parse(train_regression.Config, flags.split())
    torch.manual_seed(0)
    model = nn.Linear(10, targets.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    schedulers = []
    if template == "schedules":
        schedulers.append(lr_scheduler.ExponentialLR(optimizer, gamma=0.9))
        schedulers.append(lr_scheduler.CosineAnnealingLR(optimizer, T_max=50))
    order, losses, learning_rates = EpochBatches(len(targets), 32, seed=0), [], []
    for epoch in range(config.epochs):
        losses += plain_losses(
            order,
            optimizer,
            [epoch],
            lambda these: F.mse_loss(model(features[these]), targets[these]),
        )
        learning_rates += [optimizer.param_groups[0]["lr"]] * (len(losses) - len(learning_rates))
        for scheduler in schedulers:
            scheduler.step()

    steps = rows(tmp_path, "steps")
    assert len(losses) == {"spawn": 40, "schedules": 100}[template]
    assert [row["learning_rate"] for row in steps] == pytest.approx(learning_rates, abs=1e-12)
    assert logged_losses(tmp_path) == pytest.approx(losses, rel=1e-6, abs=1e-6)
    weights, _ = saved(tmp_path)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=0)


def test_a_table_reaches_the_r2_of_least_squares(tmp_path, run_main):
    table = frame(2003)
    table.y += 90 * (table.city == "Rome") + np.random.default_rng(1).normal(0, 150, len(table))
    table.to_csv(tmp_path / "table.csv", index=False)
    data = ["--data", tmp_path / "table.csv", "--target", "y"]
    run = f"--run-dir {tmp_path}/run --epochs 15 --save-every 1000000 --model linear".split()
    metrics = run_main("train_regression", *data, *run)
    predictions, _ = saved(tmp_path / "run", "predictions")
    test = predictions["index"].numpy()
    train = np.setdiff1d(np.arange(len(table)), test)
    assert len(test) == metrics["eval_samples"] == round(len(table) / 5)
    inputs, y = pd.get_dummies(table.drop(columns="y")).astype(float), table.y.to_numpy()
    ones = inputs.assign(one=1.0).to_numpy()
    learned, *_ = np.linalg.lstsq(ones[train], y[train], rcond=None)
    r2 = 1 - ((y[test] - ones[test] @ learned) ** 2).mean() / y[test].var()
    assert r2 > 0.5 and metrics["eval_r2"] == pytest.approx(r2, abs=0.005)

    # Errors are in the target's own unit, and come from the predictions that were saved.
    assert predictions["target"].squeeze(1).numpy() == pytest.approx(y[test], rel=1e-5)
    error = (predictions["prediction"] - predictions["target"]).squeeze(1).numpy()
    assert metrics["eval_rmse"] == pytest.approx((error**2).mean() ** 0.5, rel=1e-6)


def test_an_mlp_learns_what_a_line_cannot(tmp_path, run_main):
    random = np.random.default_rng(0)
    inputs = random.uniform(-2, 2, (600, 2))
    table = pd.DataFrame(inputs, columns=["a", "b"])
    table["product"], table["square"] = inputs.prod(1) * 1000, inputs[:, 0] ** 2
    table.to_json(tmp_path / "table.jsonl", orient="records", lines=True)
    data = f"--data {tmp_path}/table.jsonl --target product,square --epochs 12 --save-every 1000000"
    line = run_main("train_regression", *f"{data} --run-dir {tmp_path}/l --model linear".split())
    mlp = f"{data} --run-dir {tmp_path}/mlp --model mlp --hidden 32,32 --loss huber"
    metrics = run_main("train_regression", *f"{mlp} --target-r2 0.8".split())
    assert line["eval_r2"] < 0.2 < 0.9 < metrics["eval_r2"] < 1
    with pytest.raises(SystemExit) as ended:
        run_main("train_regression", *f"{mlp} --target-r2 0.999 --resume latest".split())
    assert ended.value.code == 3


def test_r2_of_a_target_that_does_not_vary_is_0_or_if_it_is_met_1():
    truth = np.array([[3.0, 3, 0], [3, 3, 2]])  # met exactly; not met; varies
    guess = np.array([[3.0, 4, 0], [3, 4, 1]])
    found = train_regression.measure(guess, truth, np.array([3, 3, -1]))
    # MSE, RMSE, MAE, R2 of 1, 0 and 0.5, and of 1, 0 and 0.9 beside the mean of the training.
    expected = [0.5, (1 + 0.5**0.5) / 3, 0.5, 0.5, 1.9 / 3]
    assert [*found.values()] == pytest.approx(expected)
