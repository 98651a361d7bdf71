"""train_regression.py finds what is in the data, as plain PyTorch and least squares find it."""

import math
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import rows, saved
from torch import nn
from torch.optim import lr_scheduler

import train_regression
from trainkit.config import parse
from trainkit.loaders import EpochBatches, InMemory


def load(*args: object) -> tuple[InMemory, InMemory, dict[str, Any]]:
    """The training rows, the test rows and what is saved with the weights."""
    return train_regression.load_data(parse(train_regression.Config, [str(arg) for arg in args]))


def beside_least_squares(run_dir: Path, *flags: object, noise: float = 0.1) -> dict[str, float]:
    """The weights of a linear run, the least-squares optimum of its training rows and the truth.

    standard_error is the root mean square distance to the truth that the noise gives the optimum.
    """
    train_set, _, about = load(*flags)
    weights, _ = saved(run_dir, "model")
    learned = torch.cat((weights["weight"], weights["bias"][:, None]), 1).double()
    features, targets = (tensor.double() for tensor in train_set.tensors)
    inputs = F.pad(features, (0, 1), value=1.0)  # a column of ones for the bias
    optimum = torch.linalg.lstsq(inputs, targets, driver="gelsd").solution.T
    found = {
        "train_mse": F.mse_loss(inputs @ learned.T, targets).item(),
        "least_squares_mse": F.mse_loss(inputs @ optimum.T, targets).item(),
    }
    if about["truth"] is not None:
        variances = noise**2 * torch.linalg.pinv(inputs.T @ inputs).diagonal()
        found |= {
            "distance_to_least_squares": (learned - optimum).norm().item(),
            "distance_to_truth": (learned - torch.tensor(about["truth"])).norm().item(),
            "standard_error": math.sqrt(len(learned) * variances.sum().item()),
        }
    print(found)
    return found


@pytest.mark.parametrize("data_seed", [0, 1])
def test_the_defaults_recover_the_truth(data_seed, tmp_path, run_main):
    started_at = time.process_time()  # of one thread: a busy machine does not count
    seed = ["--data-seed", data_seed]
    run_main("train_regression", "--run-dir", tmp_path, *seed, "--save-every", 10**6)
    found = beside_least_squares(tmp_path, *seed)
    assert time.process_time() - started_at < 10
    assert found["train_mse"] < 1.01 * found["least_squares_mse"]
    # What training leaves undone is small beside what the noise hides from anyone.
    assert found["distance_to_least_squares"] < 0.2 * found["standard_error"]
    assert found["distance_to_truth"] < (1 if data_seed == 0 else 2) * found["standard_error"]
    # 809 rows of 1 feature: the standard error of a slope and a bias is known in closed form.
    assert found["standard_error"] == pytest.approx(0.1 * (11 / 800) ** 0.5, rel=0.05)


TEMPLATES = {
    # torch.multiprocessing.spawn: 100 x 10 samples in batches of 32
    "spawn": "--num-samples 100 --learning-rate 1e-3 --epochs 10 --schedule constant",
    # DistributedDataParallel, GradScaler and two schedules
    "schedules": "--num-samples 32 --num-targets 10 --learning-rate 1e-2 --epochs 100 "
    "--schedule exponential+cosine --gamma 0.9 --cosine-epochs 50",
}
TEMPLATE_TOLERANCE = 1e-6  # what README promises


@pytest.mark.numeric
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_published_templates_are_plain_pytorch(template, tmp_path, run_main):
    flags = f"{TEMPLATES[template]} --batch-size 32 --optimizer sgd --momentum 0 --test-fraction 0"
    run = f"--run-dir {tmp_path} --log-every 1 --save-every 1000000"
    run_main("train_regression", *f"{run} {flags}".split())

    features, targets = load(*flags.split())[0].tensors
    torch.manual_seed(0)
    model = nn.Linear(10, targets.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 if template == "spawn" else 1e-2)
    schedulers = []
    if template == "schedules":
        schedulers.append(lr_scheduler.ExponentialLR(optimizer, gamma=0.9))
        schedulers.append(lr_scheduler.CosineAnnealingLR(optimizer, T_max=50))
    order, losses, learning_rates = EpochBatches(len(targets), 32, seed=0), [], []
    for epoch in range(10 if template == "spawn" else 100):
        for indices in order.order(epoch).split(32):
            optimizer.zero_grad()
            loss = F.mse_loss(model(features[indices]), targets[indices])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            learning_rates.append(optimizer.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()

    steps = rows(tmp_path, "steps")
    assert len(losses) == (40 if template == "spawn" else 100)
    assert [row["learning_rate"] for row in steps] == pytest.approx(learning_rates, abs=1e-12)
    assert [row["train_loss"] for row in steps] == pytest.approx(losses, rel=1e-6, abs=1e-6)
    weights, _ = saved(tmp_path)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=0)


def housing() -> pd.DataFrame:
    """2,003 blocks with columns and scales as of the California housing table."""
    random, size = np.random.default_rng(0), 2003
    table = pd.DataFrame(
        {
            "MedInc": random.lognormal(1.2, 0.45, size),
            "Population": random.lognormal(7, 0.7, size),
            "Latitude": random.uniform(32.5, 42, size),
            "Ocean": random.choice(["inland", "near bay", "near, ocean"], size, p=[0.6, 0.3, 0.1]),
            "Country": "US",
        }
    )
    table["Longitude"] = -119.5 - 0.9 * (table.Latitude - 36) + random.normal(0, 0.6, size)
    price = 0.44 * table.MedInc - 0.42 * table.Latitude - 0.43 * table.Longitude - 36
    return table.assign(
        Price=1e5 * (price + 0.5 * (table.Ocean == "near bay") + random.normal(0, 0.7, size))
    )


def r2_of(truth: np.ndarray, guess: np.ndarray) -> float:
    """1 - squared error / squared distance from the mean."""
    return 1 - ((truth - guess) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()


def test_a_table_reaches_the_r2_of_least_squares(tmp_path, run_main):
    table = housing()
    table.to_csv(tmp_path / "table.csv", index=False)
    data = ["--data", tmp_path / "table.csv", "--target", "Price"]
    run = f"--run-dir {tmp_path}/run --epochs 15 --save-every 1000000".split()
    metrics = run_main("train_regression", *data, *run)
    predictions, _ = saved(tmp_path / "run", "predictions")
    test = predictions["index"].numpy()
    train = np.setdiff1d(np.arange(len(table)), test)
    assert len(test) == metrics["eval_samples"] == round(len(table) / 5)
    inputs, price = pd.get_dummies(table.drop(columns="Price")).astype(float), table.Price
    ones = inputs.assign(one=1.0).to_numpy()
    learned, *_ = np.linalg.lstsq(ones[train], price[train], rcond=None)
    r2 = r2_of(price[test], ones[test] @ learned)
    assert r2 > 0.5 and metrics["eval_r2"] == pytest.approx(r2, abs=0.005)
    found = beside_least_squares(tmp_path / "run", *data)
    assert found["train_mse"] < 1.01 * found["least_squares_mse"]

    # Errors are in the target's own unit, and come from the predictions that were saved.
    assert predictions["target"].squeeze(1).numpy() == pytest.approx(price[test], rel=1e-5)
    error = (predictions["prediction"] - predictions["target"]).squeeze(1).numpy()
    assert metrics["eval_mae"] == pytest.approx(np.abs(error).mean(), rel=1e-6)
    assert metrics["eval_mse"] == pytest.approx((error**2).mean(), rel=1e-6)
    assert metrics["eval_rmse"] == pytest.approx((error**2).mean() ** 0.5, rel=1e-6)
    _, about = saved(tmp_path / "run")
    assert about["left_out"] == ["Country"]
    assert about["features"][-4:-1] == ["Ocean=inland", "Ocean=near bay", "Ocean=near, ocean"]


def test_an_mlp_learns_what_a_line_cannot(tmp_path, run_main):
    random = np.random.default_rng(0)
    inputs = random.uniform(-2, 2, (600, 2))
    table = pd.DataFrame(inputs, columns=["a", "b"])
    table["product"], table["square"] = inputs.prod(1) * 1000, inputs[:, 0] ** 2
    table.to_json(tmp_path / "table.jsonl", orient="records", lines=True)
    data = f"--data {tmp_path}/table.jsonl --target product,square --epochs 12 --save-every 1000000"
    line = run_main("train_regression", *f"{data} --run-dir {tmp_path}/line".split())
    mlp = f"{data} --run-dir {tmp_path}/mlp --model mlp --hidden 32,32 --loss huber"
    metrics = run_main("train_regression", *f"{mlp} --target-r2 0.8".split())
    assert line["eval_r2"] < 0.2 < 0.9 < metrics["eval_r2"] < 1
    assert list(saved(tmp_path / "mlp")[0]) == [
        f"{number}.{kind}" for number in (0, 2, 4) for kind in ("bias", "weight")
    ]
    with pytest.raises(SystemExit) as ended:
        run_main("train_regression", *f"{mlp} --target-r2 0.999 --resume latest".split())
    assert ended.value.code == 3


def test_r2_of_a_target_that_does_not_vary_is_0_or_if_it_is_met_1():
    generator = np.random.default_rng(0)
    truth, guess = generator.normal(size=(2, 20, 4))
    truth[:, 1] = guess[:, 1] = truth[:, 2] = 3.0  # met exactly; not met
    found = train_regression.measure(guess, truth, np.full(4, 0.5))
    scores = r2_of(truth[:, 0], guess[:, 0]), 1, 0, r2_of(truth[:, 3], guess[:, 3])
    assert found["eval_r2"] == pytest.approx(np.mean(scores), rel=1e-6)
    expected = 1 - ((truth - guess) ** 2).mean(0) / ((truth - 0.5) ** 2).mean(0)
    assert found["eval_r2_train_mean"] == pytest.approx(expected.mean(), rel=1e-6)


def test_synthetic_data_come_from_a_generator_of_their_own():
    args = Namespace(num_samples=50, num_features=3, num_targets=2, noise=0.0, data_seed=5)
    state = torch.random.get_rng_state()
    table, names, known = train_regression.make_synthetic(args)
    assert torch.equal(state, torch.random.get_rng_state())
    features, targets = table.drop(columns=names).to_numpy(), table[names].to_numpy()
    truth = np.array(known["truth"])
    assert targets == pytest.approx(features @ truth[:, :-1].T + truth[:, -1], abs=1e-12)
