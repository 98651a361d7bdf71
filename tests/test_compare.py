"""What is printed about several runs: what differs, what was measured, what a difference means."""

import pytest
import torch
from conftest import rows

from trainkit.store import records
from trainkit.store.weights import write_tensors
from trainkit.tools import compare, plots


@pytest.fixture(scope="module")
def folders(tiny_mnist, tmp_path_factory, run_main):
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate("ab"):
        flags = f"--batch-size 30 --epochs 2 --run-dir {folder}/{name} --seed {seed}"
        run_main("train_mnist", "--dataset", tiny_mnist, flags)
    return [folder / "a", folder / "b"]


def cells(text: str) -> dict[str, list[str]]:
    table = [line.split() for line in text.split("\n\n")[0].splitlines()]
    return {name: values for name, *values in map(list, zip(*table, strict=True))}


def test_the_table_says_what_differs_and_what_was_measured(folders, capsys):
    plots.main([*map(str, folders)])
    text = capsys.readouterr().out
    plots.main([str(folders[0].parent)])
    assert capsys.readouterr().out == text
    table = cells(text)
    best_first = sorted(folders, key=lambda f: -rows(f, "epochs")[-1]["eval_accuracy"])
    assert table["run"] == [*map(str, best_first)]
    for run, accuracy, seed, seconds in zip(
        best_first, table["eval_accuracy"], table["seed"], table["train_seconds"], strict=True
    ):
        assert accuracy == f"{rows(run, 'epochs')[-1]['eval_accuracy']:.6g}"
        assert seed == {"a": "0", "b": "1"}[run.name]
        timing = records.read_rows(run / "timing.jsonl")
        assert seconds == f"{sum(row.get('train_seconds', 0) for row in timing):.6g}"
    assert not {"run_dir", "epochs", "command", "host", "target"} & table.keys()


def test_a_difference_of_accuracy_is_called_chance_or_not(folders, tmp_path):
    target = torch.arange(1000) % 10
    for name, num_wrong in (("good", 10), ("same", 12), ("bad", 40), ("other", 10)):
        (tmp_path / name).mkdir()
        for file in ("run.json", "metrics.jsonl"):
            (tmp_path / name / file).write_bytes((folders[0] / file).read_bytes())
        prediction = target.clone()
        start = 500 if name == "same" else 0
        prediction[start : start + num_wrong] += 1
        tensors = {"prediction": prediction % 10, "target": target}
        metadata = {"classes": [*("cd" if name == "other" else "ab")]}
        write_tensors(tmp_path / name / records.PREDICTIONS, tensors, metadata)
    good, same, bad, other = (tmp_path / name for name in ("good", "same", "bad", "other"))
    assert "no significant difference" in compare.compare_runs([good, same])
    text = compare.compare_runs([good, bad])
    assert f"of 1000 samples {good} alone gets 30 right, {bad} alone 0:\na significant " in text
    assert f"p = {2 / 2**30:.2g})" in text
    for unlike in (other, folders[0]):  # other classes; other pictures: the table alone
        assert "\n\n" not in compare.compare_runs([good, unlike])
