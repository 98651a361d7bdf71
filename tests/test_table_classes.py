"""examples/table_classes.py and the network it shares with train_regression.py.

Its numbers in several processes and after a kill: tests/test_worlds.py.
"""

import tracemalloc

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import refused, saved
from made_tables import make_table, rated, titled

import predict
from examples import table_classes
from trainkit.config import parse
from trainkit.numbers.loaders import InMemory
from trainkit.tables import network, sets, words
from trainkit.tables.columns import Column
from trainkit.tools import page


def sets_of(path, target, *flags):
    return table_classes.load_data(
        parse(table_classes.Config, ["--data", str(path), "--target", target, *flags])
    )


def test_a_class_is_learned_measured_and_predicted_with_its_probability(tmp_path, run_main):
    table = make_table(tmp_path / "t.csv")
    flags = f"--data {tmp_path}/t.csv --target kind --epochs 2 --run-dir {tmp_path}/run"
    flags += " --features a,b,c --save-every 1000000 --pictures"
    metrics = run_main("examples.table_classes", *flags.split())
    tensors, metadata = saved(tmp_path / "run", "predictions")
    truth = (table.kind == "low").to_numpy()[tensors["index"].numpy()].astype(int)
    assert metadata["classes"] == ["high", "low"] and tensors["target"].tolist() == truth.tolist()
    logits = tensors["logits"]
    assert metrics["eval_loss"] == pytest.approx(F.cross_entropy(logits, tensors["target"]).item())
    right = (logits.argmax(1).numpy() == truth).astype(float)
    assert metrics["eval_accuracy"] == right.mean() > 0.8
    shares = [right[truth == number].mean() for number in (0, 1)]
    assert metrics["eval_balanced_accuracy"] == pytest.approx(np.mean(shares))
    assert (tmp_path / "run" / "confusion.png").is_file()

    predictor = predict.load_run(tmp_path / "run")
    table.drop(columns="kind").to_csv(tmp_path / "new.csv", index=False)
    predictor.predict_file(tmp_path / "new.csv")
    written = pd.read_csv(tmp_path / "new_predictions.csv")
    assert written.predicted_kind[tensors["index"].numpy()].tolist() == [
        metadata["classes"][number] for number in tensors["prediction"]
    ]
    shares = (logits / predictor.calibration["temperature"]).softmax(1).amax(1)
    assert written.probability_kind[tensors["index"].numpy()].to_numpy() == pytest.approx(
        shares.numpy(), abs=1e-5
    )
    spans = {name: page.find_span(predictor.metadata, name) for name in "abc"}
    answer, figure = page.answer_row(predictor, [*"abc"], spans, "a", 3.0, 3.0, 0.0)
    assert answer.startswith("<h2>high ") and figure.axes[0].get_ylabel() == "high"


def test_the_area_under_the_curve_counts_pairs():
    logits = torch.tensor([[0.0, 1], [0, 2], [0, 2], [1, 0], [0, 3]])
    labels = torch.tensor([0, 0, 1, 0, 1])
    pairs = [1, 0.5, 1, 1, 1, 1]  # of each 1 with each 0
    assert table_classes.measure(logits, labels)["eval_auc"] == pytest.approx(sum(pairs) / 6)


def test_whole_numbers_and_booleans_are_classes_and_amounts_are_not(tmp_path):
    grades = {"grade": [1, 2, 10, 2] * 40, "paid": [True, False] * 80}
    make_table(tmp_path / "t.csv", **grades)
    assert sets_of(tmp_path / "t.csv", "grade").metadata["classes"] == ["1", "2", "10"]
    assert sets_of(tmp_path / "t.csv", "paid").metadata["classes"] == ["False", "True"]
    with refused(r"not whole.*python train_regression.py --data .* y$"):
        sets_of(tmp_path / "t.csv", "y")
    with refused("160 different values in 160 rows, which are not classes"):
        sets_of(tmp_path / "t.csv", "a", "--categorical", "a")
    rare = [*["x", "y"] * 79, "once", "x"]
    make_table(tmp_path / "t.csv", kind=rare)
    plan = sets_of(tmp_path / "t.csv", "kind").metadata["plan"]
    assert plan["rare"] == "1 of 3 classes have fewer than 5 rows to evaluate on: once 0"
    assert "not trained" not in plan


def test_memory_and_time_grow_with_the_rows_and_not_with_rows_times_classes():
    labels = [f"class {n % 10000}" for n in range(20000)]
    table = pd.DataFrame({"a": np.random.default_rng(0).random(20000), "label": labels})
    column = Column("label", sorted({*labels}))
    numbers, problems = sets.number_classes(table["label"], column)
    assert not problems
    assert [column.categories[n] for n in numbers[:50]] == labels[:50]
    config = parse(table_classes.Config, ["--data", "x.csv", "--target", "label"])
    tracemalloc.start()
    made = sets.make_class_sets(table, ["label"], {"plan": {}}, config)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**28  # with a 0/1 number for each class it is more than 1.6 GB
    rows = made.train.tensors[1], made.evaluated.tensors[1]
    assert torch.cat(rows).bincount(minlength=10000).eq(2).all()
    table = pd.DataFrame({"label": [f"class {n % 30000}" for n in range(60000)]})
    with refused("30000 classes in 60000 rows, and a score of each class for each row takes 14 GB"):
        sets.find_table_classes(table["label"], "--data x.csv", config)


def test_ridge_regression_has_the_penalty_with_the_smallest_leave_one_out_error():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(25, 30, generator=generator, dtype=torch.float64)
    truth = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    noise = torch.tensor([0.1, 30.0])
    targets = features @ truth.T + noise * torch.randn(25, 2, generator=generator)

    def solve(x, y, penalty):
        mean, middle = x.mean(0), y.mean(0)
        gram = (x - mean).T @ (x - mean) + penalty * torch.eye(30)
        weight = torch.linalg.solve(gram, (x - mean).T @ (y - middle))
        return weight, middle - mean @ weight

    weight, bias = network.fit_ridge(features, targets)
    for n in range(2):
        errors = []
        for penalty in network.PENALTIES:
            error = 0
            for left_out in range(25):
                kept = torch.arange(25) != left_out
                own, shift = solve(features[kept], targets[kept, n], penalty)
                error += (targets[left_out, n] - features[left_out] @ own - shift) ** 2
            errors.append(error)
        best = network.PENALTIES[torch.stack(errors).argmin()]
        own, shift = solve(features, targets[:, n], best)
        torch.testing.assert_close(weight[n], own, rtol=1e-6, atol=1e-8)
        assert bias[n].item() == pytest.approx(shift.item())


def test_logistic_regression_is_at_its_minimum():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (60,), generator=generator)
    weight, bias = network.fit_logistic(features, labels, 3)
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    loss = F.cross_entropy(F.linear(features, weight, bias), labels, reduction="sum")
    (loss + weight.square().sum() / 2).backward()
    assert weight.grad.abs().max() < 1e-4 and bias.grad.abs().max() < 1e-4
    assert weight.abs().max() > 0.1


def test_a_network_begins_as_its_linear_model_and_is_trusted_as_far_as_it_helps():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 3, generator=generator)
    targets = inputs[:, :1] * 2 + inputs[:, 1:2].abs()
    fold = torch.arange(200) % network.NUM_FOLDS
    train = InMemory(inputs, targets, fold)
    model = network.TabM(1, network.find_edges(inputs))
    network.start_linear(model, train, network.fit_ridge)
    weight, bias = network.fit_ridge(inputs.double(), targets.double())
    linear = F.linear(inputs, weight.float(), bias.float())
    torch.testing.assert_close(model.eval()(inputs), linear)
    assert model.scale == 0
    num_others = (network.NUM_FOLDS - 1) * network.NUM_MEMBERS
    assert model.train()(inputs, fold).shape == (200, num_others, 1)
    accelerator = Accelerator(cpu=True)
    with torch.no_grad():
        for what, scale in (("noise", 0), ("help", 1)):
            added = targets - linear if what == "help" else torch.randn(200, 1, generator=generator)
            rows = iter(zip(linear.split(256), added.split(256), strict=True))
            model.forward = lambda x, fold, rows=rows: next(rows)
            network.set_scale(accelerator, model, train, F.mse_loss)
            assert model.scale.item() == pytest.approx(scale, abs=0.1), what


@pytest.mark.parametrize("is_class", [False, True])
def test_it_is_said_once_that_the_metrics_stay_those_of_the_linear_model(is_class, capsys):
    inputs = torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] > 0).long() if is_class else inputs * 2
    train = InMemory(inputs, targets, torch.arange(40) % network.NUM_FOLDS)
    model = network.TabM(1 + is_class, network.find_edges(inputs))
    loss = F.cross_entropy if is_class else F.mse_loss
    right = F.one_hot(targets, 2) * 1.0 if is_class else targets
    said = []
    for helps in (False, True, False, False, False, True, True, False):
        added = right if helps else -right
        model.forward = lambda x, fold, added=added: (torch.zeros_like(right), added)
        network.set_scale(Accelerator(cpu=True), model, train, loss)
        assert (model.scale > 0) == helps
        said.append(capsys.readouterr().out)
    name = "logistic regression" if is_class else "ridge"
    assert "the network has weight 0 so far: " in said[3] and f"alone ({name}) is" in said[3]
    assert said[5] == "the network has weight 1.00 now, beside the linear model\n"
    assert not any(said[:3] + said[4:5] + said[6:])


def test_no_row_reaches_the_members_and_the_linear_model_that_judge_it():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=generator)
    fold = torch.arange(40) % network.NUM_FOLDS

    def judge(targets):
        torch.manual_seed(0)
        model = network.TabM(1, network.find_edges(inputs))
        network.start_linear(model, InMemory(inputs, targets, fold), network.fit_ridge)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for _ in range(3):
            outputs = model(inputs, fold)
            (outputs - targets[:, None]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum(model.eval()(inputs, fold)).detach()[:, 0]

    targets = inputs[:, :1].sin()
    judged = judge(targets)
    assert judged.std() > 0.1
    for row, own in ((5, 1), (7, 3)):
        other = targets + 100 * (torch.arange(40) == row)[:, None]
        changed = (judge(other) - judged).abs()
        assert changed[fold == own].max() == 0 and changed[fold != own].min() > 0


def test_words_tell_classes_one_number_for_each(tmp_path):
    table = titled()
    kinds = np.select([table.y > 200, table.y > 90], ["dear", "mid"], "cheap")
    for names, told in ((kinds, ["cheap", "dear", "mid"]), (kinds == "dear", ["True"])):
        table.assign(y=names).to_csv(tmp_path / "t.csv", index=False)
        made = sets_of(tmp_path / "t.csv", "y")
        features = ["a", *(f"title, its words for {word}" for word in told)]
        assert made.metadata["features"] == features
        inputs, labels, _ = made.evaluated.tensors
        says = inputs[:, 1:].argmax(1) if len(told) > 1 else inputs[:, 1] > 0
        assert (says == labels).double().mean() > 0.1 + labels.bincount().max() / len(labels)


@pytest.mark.parametrize("size, num_classes", [(200, 2), (400, 3), (400, 5), (800, 8)])
def test_words_tell_ordered_classes_of_which_those_in_the_middle_are_told_by_none(
    tmp_path, size, num_classes
):
    rated(size, num_classes).to_csv(tmp_path / "t.csv", index=False)
    made = sets_of(tmp_path / "t.csv", "y")
    (column,) = (column for column in made.metadata["columns"] if column["name"] == "review")
    stars = [str(star + 1) for star in range(num_classes)]
    assert column["scores"] == (stars if num_classes > 2 else ["2"])
    assert f"whose words tell {column['explained']}% of" in made.metadata["plan"]["columns"]
    features, labels, _ = made.train.tensors
    weight, bias = network.fit_logistic(features.double(), labels, num_classes)
    inputs, labels, _ = made.evaluated.tensors
    right = (F.linear(inputs.double(), weight, bias).argmax(1) == labels).double().mean()
    assert right > 1.2 / num_classes


def test_words_that_say_nothing_of_classes_are_left_out():
    taken = 0
    for seed in range(24):
        size, num_classes = ((60, 3), (60, 20), (150, 2))[seed % 3]
        random = np.random.default_rng(seed)
        labels = torch.from_numpy(random.integers(num_classes, size=size))
        texts = words.number_texts(rated(size, 2, seed).review)
        fold = torch.arange(size) % network.NUM_FOLDS
        nothing = torch.zeros(size, 0, dtype=torch.float64)
        taken += words.learn_words(texts, F.one_hot(labels).double(), nothing, fold).share > 0
    assert taken <= 1  # 1 in 100 of many more
