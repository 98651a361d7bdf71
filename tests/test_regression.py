"""train_regression.py finds what is in the data, as plain PyTorch and least squares find it."""

import json
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import CONFIGS, ROOT, assert_num_processes, rows, run
from safetensors import safe_open
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from torch import nn
from torch.optim import lr_scheduler

import train_regression
from trainkit.launch import RunFailure, UsageError
from trainkit.order import EpochBatches
from trainkit.tables import Column, encode


def saved(run_dir: Path, name: str = "model") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(run_dir / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return tensors, json.loads((file.metadata() or {"trainkit": "{}"})["trainkit"])


def load(*args: object) -> tuple[Any, Any, dict[str, Any]]:
    """The training rows, the test rows and what is saved with the weights."""
    parsed = train_regression.parse_args([str(arg) for arg in args])
    train_loader, eval_loader, about = train_regression.make_dataloaders(parsed)
    return train_loader.dataset, eval_loader.dataset, about


@pytest.mark.parametrize("data_seed", [0, 1, 2])
def test_the_defaults_recover_the_truth(data_seed: int, tmp_path: Path, run_main: Callable) -> None:
    started_at = time.process_time()  # of one thread: a busy machine does not count
    found = run_main("train_regression", "--run-dir", tmp_path / "run", "--data-seed", data_seed)
    assert time.process_time() - started_at < 10
    assert found["train_mse"] < 1.01 * found["least_squares_mse"]
    # What training leaves undone is small beside what the noise hides from anyone.
    assert found["distance_to_least_squares"] < 0.2 * found["standard_error"]
    assert found["distance_to_truth"] < (1 if data_seed == 0 else 2) * found["standard_error"]
    # 809 rows of 1 feature: the standard error of a slope and a bias is known in closed form.
    assert found["standard_error"] == pytest.approx(0.1 * (11 / 800) ** 0.5, rel=0.05)


TEMPLATES = {
    # torch.multiprocessing.spawn: 100 x 10 samples in batches of 32
    "spawn": ["--num-samples", 100, "--num-features", 10, "--num-targets", 1, "--batch-size", 32,
              "--learning-rate", 1e-3, "--epochs", 10, "--schedule", "constant"],
    # DistributedDataParallel, GradScaler and two schedules
    "schedules": ["--num-samples", 32, "--num-features", 10, "--num-targets", 10,
                  "--batch-size", 32, "--learning-rate", 1e-2, "--epochs", 100,
                  "--schedule", "exponential+cosine", "--gamma", 0.9, "--cosine-epochs", 50],
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_published_templates_are_plain_pytorch(
    template: str, tmp_path: Path, run_main: Callable
) -> None:
    flags = [*TEMPLATES[template], "--optimizer", "sgd", "--momentum", 0, "--test-fraction", 0]
    run_main("train_regression", "--run-dir", tmp_path / "run", "--log-every", 1,
             "--save-every", 10**6, *flags)  # fmt: skip

    data, _, _ = load(*flags)
    torch.manual_seed(0)
    model = nn.Linear(10, data.targets.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 if template == "spawn" else 1e-2)
    schedulers = []
    if template == "schedules":
        schedulers.append(lr_scheduler.ExponentialLR(optimizer, gamma=0.9))
        schedulers.append(lr_scheduler.CosineAnnealingLR(optimizer, T_max=50))
    order, losses, learning_rates = EpochBatches(len(data), 32, seed=0), [], []
    for epoch in range(10 if template == "spawn" else 100):
        for indices in order.order(epoch).split(32):
            optimizer.zero_grad()
            loss = F.mse_loss(model(data.features[indices]), data.targets[indices])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            learning_rates.append(optimizer.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()

    steps = rows(tmp_path / "run", "steps")
    assert len(losses) == (40 if template == "spawn" else 100)
    assert [row["learning_rate"] for row in steps] == pytest.approx(learning_rates, abs=1e-12)
    assert [row["train_loss"] for row in steps] == pytest.approx(losses, rel=1e-6, abs=1e-6)
    weights, _ = saved(tmp_path / "run")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=0)


def test_1_2_and_3_processes_give_the_same_weights(tmp_path: Path, run_main: Callable) -> None:
    # 187 training rows in batches of 36: 7 are left for the last batch, so that with 12 rows per
    # process two of three processes get none; 47 test rows. None of it divides by 2 or 3.
    flags = ["--num-samples", 234, "--batch-size", 36, "--eval-batch-size", 30, "--epochs", 3,
             "--num-targets", 2, "--log-every", 1]  # fmt: skip
    metrics = {1: run_main("train_regression", "--run-dir", tmp_path / "1", *flags)}
    three = yaml.safe_load((CONFIGS / "2cpu.yaml").read_text())
    (tmp_path / "3.yaml").write_text(yaml.safe_dump(three | {"num_processes": 3,
                                                             "gpu_ids": "-1,-1,-1"}))  # fmt: skip
    for number, config in ((2, CONFIGS / "2cpu.yaml"), (3, tmp_path / "3.yaml")):
        accumulate = 3 if number == 2 else 1
        result = run("train_regression.py", "--run-dir", tmp_path / str(number), *flags,
                     "--accumulate", accumulate, config=config)  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert_num_processes(result.stdout, number)
        metrics[number] = rows(tmp_path / str(number), "epochs")[-1]
    weights = {number: saved(tmp_path / str(number))[0] for number in metrics}
    assert metrics[1]["eval_samples"] == 47
    for number in (2, 3):
        for name, value in weights[1].items():
            torch.testing.assert_close(weights[number][name], value, atol=1e-6, rtol=0)
        for row, same in zip(rows(tmp_path / "1"), rows(tmp_path / str(number)), strict=True):
            assert row == pytest.approx(same, rel=1e-5, abs=1e-6)


def housing() -> pd.DataFrame:
    """2,003 blocks with the columns and the scales of the California housing table."""
    random = np.random.default_rng(0)
    size = 2003
    table = pd.DataFrame({
        "MedInc": random.lognormal(1.2, 0.45, size), "HouseAge": random.integers(1, 53, size),
        "AveRooms": random.lognormal(1.65, 0.3, size), "Population": random.lognormal(7, 0.7, size),
        "Latitude": random.uniform(32.5, 42, size),
        "Ocean": random.choice(["inland", "near bay", "near, ocean"], size, p=[0.6, 0.3, 0.1]),
        "Country": "US",
    })  # fmt: skip
    table["Longitude"] = -119.5 - 0.9 * (table.Latitude - 36) + random.normal(0, 0.6, size)
    table["Price"] = 1e5 * (
        0.44 * table.MedInc + 0.009 * table.HouseAge - 0.42 * table.Latitude
        - 0.43 * table.Longitude - 36 + 0.5 * (table.Ocean == "near bay")
        + random.normal(0, 0.7, size)
    )  # fmt: skip
    return table


def diabetes() -> pd.DataFrame:
    return load_diabetes(as_frame=True, scaled=False).frame.rename(columns={"target": "Price"})


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (housing, ["--epochs", 15]),
        # Blood values that nearly determine each other: least squares is a long way down a valley.
        (
            diabetes,
            [
                "--epochs",
                100,
                "--batch-size",
                100,
                "--optimizer",
                "sgd",
                "--momentum",
                0.95,
                "--learning-rate",
                0.1,
            ],
        ),
    ],
)
def test_real_tables_reach_scikit_learns_r2(
    make: Callable, flags: list, tmp_path: Path, run_main: Callable
) -> None:
    table = make()
    table.to_csv(tmp_path / "table.csv", index=False)
    metrics = run_main("train_regression", "--run-dir", tmp_path / "run", "--data",
                       tmp_path / "table.csv", "--target", "Price", "--save-every", 10**6,
                       *flags)  # fmt: skip
    predictions, _ = saved(tmp_path / "run", "predictions")
    test = predictions["index"].numpy()
    train = np.setdiff1d(np.arange(len(table)), test)
    assert len(test) == metrics["eval_samples"] == round(len(table) / 5)
    inputs, price = pd.get_dummies(table.drop(columns="Price")).astype(float), table.Price
    learned = LinearRegression().fit(inputs.iloc[train], price[train])
    error = price[test] - learned.predict(inputs.iloc[test])
    spread = price[test] - price[train].mean()
    r2 = 1 - (error**2).sum() / (spread**2).sum()
    assert metrics["eval_r2"] == pytest.approx(r2, abs=0.005)
    assert metrics["train_mse"] < 1.01 * metrics["least_squares_mse"]

    # Errors are in the target's own unit, and come from the predictions that were saved.
    assert predictions["target"].squeeze(1).numpy() == pytest.approx(price[test], rel=1e-5)
    error = (predictions["prediction"] - predictions["target"]).squeeze(1).numpy()
    assert metrics["eval_mae"] == pytest.approx(np.abs(error).mean(), rel=1e-6)
    assert metrics["eval_mse"] == pytest.approx((error**2).mean(), rel=1e-6)
    assert metrics["eval_rmse"] == pytest.approx((error**2).mean() ** 0.5, rel=1e-6)
    assert metrics["eval_r2"] == pytest.approx(1 - (error**2).sum() / (spread**2).sum(), rel=1e-4)

    # A prediction needs nothing but the run folder and the rows.
    weights, about = saved(tmp_path / "run")
    columns = [Column(**column) for column in about["columns"]]
    features = encode(pd.read_csv(tmp_path / "table.csv").iloc[test], columns, "here")
    features = (features - about["feature_mean"]) / about["feature_std"]
    model = train_regression.MODELS[about["model"]](len(about["features"]), 1, about["hidden"])
    model.load_state_dict(weights)
    outputs = model(torch.from_numpy(features).float()).detach().double().numpy()
    outputs = outputs * about["target_std"] + about["target_mean"]
    assert outputs == pytest.approx(predictions["prediction"].numpy(), rel=1e-5)
    if make is housing:
        assert about["constant"] == ["Country"]
        assert about["features"][-4:-1] == ["Ocean=inland", "Ocean=near bay", "Ocean=near, ocean"]


def test_an_mlp_learns_what_a_line_cannot(tmp_path: Path, run_main: Callable) -> None:
    random = np.random.default_rng(0)
    inputs = random.uniform(-2, 2, (600, 2))
    table = pd.DataFrame(inputs, columns=["a", "b"])
    table["product"], table["square"] = inputs.prod(1) * 1000, inputs[:, 0] ** 2
    table.to_json(tmp_path / "table.jsonl", orient="records", lines=True)
    common = ["--data", tmp_path / "table.jsonl", "--target", "product,square", "--epochs", 12,
              "--save-every", 10**6]  # fmt: skip
    line = run_main("train_regression", "--run-dir", tmp_path / "line", *common)
    mlp = run_main("train_regression", "--run-dir", tmp_path / "mlp", *common, "--model", "mlp",
                   "--hidden", "32,32", "--loss", "huber", "--target-r2", 0.8)  # fmt: skip
    assert line["eval_r2"] < 0.2 < 0.9 < mlp["eval_r2"] < 1
    assert list(saved(tmp_path / "mlp")[0]) == [
        f"{number}.{kind}" for number in (0, 2, 4) for kind in ("bias", "weight")
    ]
    with pytest.raises(SystemExit) as ended:
        run_main("train_regression", "--run-dir", tmp_path / "line", *common, "--target-r2", 0.8,
                 "--resume", "latest")  # fmt: skip
    assert ended.value.code == 3


def test_means_come_from_the_training_rows_alone(tmp_path: Path) -> None:
    table = housing().drop(columns="Country")
    table.loc[::7, "MedInc"] = None
    table.loc[::11, "Ocean"] = None
    file = tmp_path / "table.csv"
    flags = ["--data", file, "--target", "Price", "--missing", "impute"]
    table.to_csv(file, index=False)
    train, test, before = load(*flags)
    index = test.numbers.numpy()
    table.loc[index, ["MedInc", "HouseAge", "Price"]] = 12345
    table.loc[index, "Ocean"] = "mars"
    table.to_csv(file, index=False)
    train_again, test_again, after = load(*flags)
    assert before == after
    assert torch.equal(train.features, train_again.features)
    assert (test_again.features != test.features).any()
    rest = np.setdiff1d(np.arange(len(table)), index)
    assert before["columns"][0]["fill"] == pytest.approx(table.MedInc[rest].mean(), rel=1e-12)
    kinds = ["inland", "near bay", "near, ocean"]
    assert before["columns"][5] == {"name": "Ocean", "categories": kinds, "fill": "inland"}
    assert train.features.mean(0).abs().max() < 1e-5
    assert (train.features.std(0, correction=0) - 1).abs().max() < 1e-5
    # An unknown category is none of the known ones.
    ocean = [number for number, name in enumerate(after["features"]) if "Ocean" in name]
    raw = test_again.features * torch.tensor(after["feature_std"]) + torch.tensor(
        after["feature_mean"]
    )
    assert raw[:, ocean].abs().max() < 1e-5


def test_every_kind_of_file_is_the_same_table(tmp_path: Path) -> None:
    table = housing()[:200].drop(columns="Country")
    table.loc[3, "Ocean"] = None
    for name in ("folder", "parts"):
        (tmp_path / name).mkdir()
    table.to_csv(tmp_path / "with_index.csv")
    table.to_parquet(tmp_path / "folder" / "table.parquet")
    table[:90].to_csv(tmp_path / "parts" / "a.csv", index=False, float_format="%.17g")
    table[90:].to_csv(tmp_path / "parts" / "b.csv", index=False, float_format="%.17g")
    table.to_json(tmp_path / "table.json", orient="records", lines=True, double_precision=15)
    features = ",".join(table.columns.drop("Price"))
    loaded = [
        load("--data", tmp_path / name, "--target", "Price", "--missing", "drop",
             "--features", features)
        for name in ("with_index.csv", "folder", "parts", "table.json")
    ]  # fmt: skip
    for train, test, about in loaded:
        assert len(train) + len(test) == 199
        assert 3 not in torch.cat((train.numbers, test.numbers))
        assert about["features"] == loaded[0][2]["features"]
        torch.testing.assert_close(train.features, loaded[0][0].features)
        torch.testing.assert_close(test.targets, loaded[0][1].targets)


BAD = {
    "no such file": ("nothing.csv", None, [], "nothing.csv: there is no such file"),
    "not a table": ("table.txt", "hello", [], "is not a table"),
    "binary": ("table.csv", b"\xff\xfe\x00", [], "cannot be read"),
    "empty": ("table.csv", "", [], "cannot be read|first line"),
    "no rows": ("table.csv", "a,b,y\n", [], "of 0 rows 0 are left|cannot be read"),
    "ragged": ("table.csv", "a,b,y\n1,2,3\n1,2,3,4\n", [], "cannot be read.*line 3"),
    "junk parquet": ("table.parquet", "hello", [], "cannot be read"),
    "wrong target": ("table.csv", "a,b,z\n1,2,3\n", [], "no column 'y'.*'a', 'b', 'z'"),
    "wrong feature": ("table.csv", "a,b,y\n1,2,3\n", ["--features", "c"], "no column 'c'"),
    "text": ("table.csv", "a,b,y\n1,2,3\n1,x2,3\n2,3,4\n", [], "'b', row 2: 'x2' is not a number"),
    "text far down": ("table.csv", "a,b,y\n" + "1,2,3\n" * 15000 + "1,x,3\n", [],
                      "'b', row 15001: 'x' is not a number"),
    "text target": ("table.csv", "a,y\n1,red\n2,blue\n3,red\n4,red\n", [],
                    "'y', row 1: 'red' is not a number"),
    "infinite": ("table.csv", "a,y\n1,2\n2,inf\n3,4\n", [], "'y', row 2: the value is not finite"),
    "missing": ("table.csv", "a,b,y\n1,,3\n2,,4\n3,4,5\n", [], "'b', row 1: the value is missing"),
    "missing target": ("table.csv", "a,y\n1,3\n2,\n3,4\n5,6\n", ["--missing", "impute"],
                       "'y', row 2: the value is missing"),
    "all dropped": ("table.csv", "a,b,y\n1,,3\n2,,4\n", ["--missing", "drop"], "of 0 rows 0"),
    "constant target": ("table.csv", "a,y\n" + "".join(f"{i},3\n" for i in range(9)), [],
                        "target column 'y' is the same in all 7 training rows"),
    "constant features": ("table.csv", "a,y\n1,2\n1,3\n1,4\n", [], "no feature column"),
    "names": ("table.csv", "a,y\n" + "".join(f"Ann{i},{i}\n" for i in range(150)), [],
              "'a' holds 120 different texts"),
    "twice": ("table.csv", "a,a,y\n1,2,3\n", [], "name each column once"),
    "lists": ("table.jsonl", '{"a": [1, 2], "y": 1}\n{"a": [3, 4], "y": 2}\n{"a": [3], "y": 3}', [],
              "'a', row 1: the value is neither a number nor a text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_one_sentence(case: str, tmp_path: Path) -> None:
    name, content, flags, message = BAD[case]
    if content is not None:
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:
        load("--data", tmp_path / name, "--target", "y", *flags)
    text = str(raised.value)
    assert "\n" not in text and str(tmp_path / name) in text


def test_bad_flags_are_named_at_once(tmp_path: Path, run_main: Callable) -> None:
    with pytest.raises(UsageError) as raised:
        run_main("train_regression", "--run-dir", tmp_path, "--data", "x.csv", "--noise", "-1",
                 "--test-fraction", 1, "--hidden", "8,0", "--batch-size", 0)  # fmt: skip
    for part in ("--target", "--noise -1", "--test-fraction 1", "--hidden [8, 0]", "--batch-size"):
        assert part in str(raised.value)


def test_a_bad_table_ends_with_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,y\n1,2\n2,3\nthree,4\n")
    result = run("train_regression.py", "--run-dir", tmp_path / "run", "--data",
                 tmp_path / "table.csv", "--target", "y")  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"error: --data {tmp_path / 'table.csv'}, column 'a', row 3: 'three' is not a number "
        "(a category? see --categorical)"
    ]


def test_a_stopped_run_continues_to_the_same_bytes(tmp_path: Path, run_main: Callable) -> None:
    flags = ["--num-samples", 130, "--batch-size", 10, "--epochs", 3, "--save-every", 4]
    run_main("train_regression", "--run-dir", tmp_path / "whole", *flags)
    run_main("train_regression", "--run-dir", tmp_path / "parts", *flags,
             "--stop-after-steps", 16)  # fmt: skip
    metrics = run_main("train_regression", "--run-dir", tmp_path / "parts", *flags,
                       "--resume", "auto")  # fmt: skip
    for name in ("model.safetensors", "predictions.safetensors"):
        whole, parts = (tmp_path / run_dir / name for run_dir in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes()
    # Only the evaluation at the stop is extra. (It also ends a float32 sum, hence approx.)
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [row["step"] for row in parts] == [11, 16, 22, 33]
    for row, same in zip(whole, parts[:1] + parts[2:], strict=True):
        assert row == pytest.approx(same, rel=1e-6)
    again = run_main("train_regression", "--run-dir", tmp_path / "parts", *flags,
                     "--resume", "auto")  # fmt: skip
    assert again == metrics


def test_numbers_that_go_bad_end_the_run(tmp_path: Path, run_main: Callable) -> None:
    with pytest.raises(RunFailure, match="the numbers went bad at step"):
        run_main("train_regression", "--run-dir", tmp_path / "run", "--optimizer", "sgd",
                 "--learning-rate", 1e6)  # fmt: skip


def test_both_scripts_have_the_same_skeleton() -> None:
    stages = []
    for script in ("train_mnist.py", "train_regression.py"):
        text = (ROOT / script).read_text()
        text = text[text.index("def main(") :]
        stages.append([line for line in text.splitlines() if line.startswith("    # ")])
        five = "model, optimizer, train_loader, eval_loader, scheduler"
        assert f"{five} = accelerator.prepare(\n        {five},\n" in text
    assert stages[0] == stages[1] and len(stages[0]) == 5


def test_synthetic_data_come_from_a_generator_of_their_own() -> None:
    args = Namespace(num_samples=50, num_features=3, num_targets=2, noise=0.0, data_seed=5)
    torch.manual_seed(1)
    _, features, targets, about = train_regression.make_synthetic(args)
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())
    truth = np.array(about["truth"])
    assert targets == pytest.approx(features @ truth[:, :-1].T + truth[:, -1], abs=1e-12)
    longer = Namespace(**vars(args) | {"num_samples": 51})
    assert train_regression.make_synthetic(longer)[3]["truth"] == about["truth"]
