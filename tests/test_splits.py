"""Which rows are evaluated: a split that the user made, or a share of each class."""

import json

import datasets
import pandas as pd
import pytest
import torch

import train_regression
from trainkit.config import parse
from trainkit.errors import UsageError
from trainkit.reading import splits
from trainkit.texts import texts


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("train.csv test.csv", "train.csv | test.csv | "),
        ("Train.csv TEST.csv", "Train.csv | TEST.csv | "),
        ("train.jsonl dev.jsonl", "train.jsonl |  | dev.jsonl"),
        ("train.csv val.csv", "train.csv |  | val.csv"),
        ("train.csv valid.csv", "train.csv |  | valid.csv"),
        ("training.txt testing.txt", "training.txt | testing.txt | "),
        ("train/a.csv validation/a.csv", "train/a.csv |  | validation/a.csv"),
        (
            "data/train-00000-of-00001.parquet data/test-00000-of-00001.parquet",
            "data/train-00000-of-00001.parquet | data/test-00000-of-00001.parquet | ",
        ),
        ("test-set/train.csv test-set/test.csv", "test-set/train.csv | test-set/test.csv | "),
        ("reviews_train.csv reviews_test.csv", "reviews_train.csv | reviews_test.csv | "),
        ("adult.data adult.test", "adult.data | adult.test | "),
        ("v1.train.csv.gz v1.eval.csv.gz", "v1.train.csv.gz | v1.eval.csv.gz | "),
        ("data.csv test.csv", "data.csv | test.csv | "),
        ("dev.csv test.csv", "dev.csv | test.csv | "),
        ("train_sft test_sft", "train_sft | test_sft | "),
        ("train.csv test.csv val.csv", "train.csv | test.csv | val.csv"),
    ],
)
def test_names_of_files_and_parts_are_a_split(names, found):
    parts = splits.find_splits(names.split())
    assert " | ".join(",".join(parts.get(s, [])) for s in splits.WORDS) == found


@pytest.mark.parametrize(
    "names",
    [
        *("train.csv", "test.csv", "a.csv b.csv", "train-1.csv train-2.csv", "train.csv extra.csv"),
        *("2020/ab-test.csv 2021/ab-test.csv", "strain.csv devices.csv", "latest.csv contest.csv"),
    ],
)
def test_other_names_are_none(names):
    assert splits.find_splits(names.split()) == {"train": names.split()}


def test_a_file_in_no_split_is_not_read():
    parts = splits.find_splits(["sample_submission.csv", "test.csv", "train.csv"])
    assert parts == {"": ["sample_submission.csv"], "test": ["test.csv"], "train": ["train.csv"]}


def test_a_share_of_each_class_is_held_out_and_never_all_of_one():
    labels = torch.tensor([0] * 50 + [1] * 20 + [2])
    train, held_out = splits.hold_out(71, 0.2, labels)
    assert labels[held_out].bincount().tolist() == [10, 4]
    assert sorted(torch.cat((train, held_out)).tolist()) == [*range(71)]
    assert len(splits.hold_out(30, 0.1)[1]) == 3 and len(splits.hold_out(30, number=7)[1]) == 7
    one, other = (splits.hold_out(30, seed=seed)[1] for seed in (0, 1))
    assert one.tolist() != other.tolist()


def test_equal_rows_are_on_one_side_and_other_splits_stay():
    train, held_out = torch.tensor([1, 2, 3, 6, 7]), torch.tensor([0, 4, 5])
    for samples, evaluated in (
        ([5, 1, 5, 2, 3, 2, 2, 9], [0, 4, 2]),
        ([*range(8)], [0, 4, 5]),
        ([5, 1, 5, 5, 3, 2, 5, 9], [4, 5]),  # more of one sample than are to be evaluated
    ):
        sides = splits.keep_together(train, held_out, torch.tensor(samples))
        kept, found = (side.tolist() for side in sides)
        assert found == evaluated and sorted(kept + found) == [*range(8)]


def test_what_is_equal_is_counted():
    numbers = splits.number_equal(["a", "b", "a", "c", "b"])
    assert numbers.tolist() == [0, 1, 0, 3, 1]
    both = splits.describe_equal(numbers[:2], numbers[2:], "row")
    assert both == {"twice": "2 of 3 rows to evaluate on are also trained on"}
    apart = splits.describe_equal(numbers[[1, 3, 4]], numbers[[0, 2]], "row")
    assert apart == {"twice": "2 of 5 rows repeat another: on one side"}
    assert splits.describe_equal(numbers[:1], numbers[1:2], "row") == {}


def make_table(path, start, num=20, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    a = [n + 0.25 for n in range(start, start + num)]
    table = pd.DataFrame({"a": a, "b": [n % 7 + 0.5 for n in range(num)], "y": [2 * x for x in a]})
    table.assign(**more).to_csv(path, index=False)


def table_of(*flags):
    flags = ["--target", "y", "--model", "linear", *map(str, flags)]
    made = train_regression.load_data(parse(train_regression.Config, flags))
    mean, std = (made.metadata[f"target_{name}"][0] for name in ("mean", "std"))
    train, test = ([round((t * std + mean).item(), 1) for t in p.tensors[1]] for p in made[:2])
    return train, test, made.evaluated.tensors[2].tolist(), made.metadata["plan"]


@pytest.mark.parametrize("test", ["test.csv", "Test/part-1.csv", "val.csv", "the_dev.csv"])
def test_the_test_rows_of_a_table_are_evaluated_and_not_trained_on(tmp_path, test):
    make_table(tmp_path / "train.csv", 0)
    make_table(tmp_path / test, 1000, num=5)
    train, evaluated, rows, plan = table_of("--data", tmp_path)
    assert max(train) < 100 and min(evaluated) > 2000 and rows == [*range(5)]
    assert plan["evaluated on"] == f"{test}: 5 rows" and "train.csv" in plan["data"]
    assert "twice" not in plan


def test_a_given_split_whose_rows_are_trained_on_is_counted(tmp_path):
    make_table(tmp_path / "train.csv", 0)
    make_table(tmp_path / "test.csv", 10)
    make_table(tmp_path / "val.csv", 10)
    train, evaluated, _, plan = table_of("--data", tmp_path)
    assert len(train) == len(evaluated) == 20
    assert plan["evaluated on"] == "test.csv: 20 rows; not read: val.csv"
    assert "twice" not in plan  # b differs
    make_table(tmp_path / "test.csv", 0, num=3)
    assert table_of("--data", tmp_path)[3]["twice"] == (
        "3 of 3 rows to evaluate on are also trained on"
    )


def test_rows_to_evaluate_on_may_be_another_file(tmp_path):
    make_table(tmp_path / "t.csv", 0)
    make_table(tmp_path / "u/new.csv", 1000, num=4, comment="x")
    flags = "--data", tmp_path / "t.csv", "--eval-data", tmp_path / "u/new.csv"
    train, evaluated, rows, plan = table_of(*flags)
    assert (len(train), len(evaluated), rows) == (20, 4, [0, 1, 2, 3])
    assert plan["evaluated on"] == f"--eval-data {tmp_path}/u/new.csv: 4 rows"
    make_table(tmp_path / "u/new.csv", 1000, num=4, a="?")
    with pytest.raises(UsageError, match=r"new.csv, row 1: '\?' is not a number"):
        table_of(*flags)
    pd.DataFrame({"a": [1.5]}).to_csv(tmp_path / "u/new.csv", index=False)
    with pytest.raises(UsageError, match=r"--eval-data .*new.csv: there is no column 'b'"):
        table_of(*flags)


def test_a_test_file_without_the_target_is_not_evaluated_and_said(tmp_path):
    make_table(tmp_path / "train.csv", 0)
    pd.DataFrame({"a": [1.5, 2.5], "b": [1, 2]}).to_csv(tmp_path / "test.csv", index=False)
    pd.DataFrame({"id": [1, 2], "y": [0, 0]}).to_csv(tmp_path / "submission.csv", index=False)
    train, evaluated, _, plan = table_of("--data", tmp_path)
    assert (len(train), len(evaluated)) == (16, 4)
    assert plan["evaluated on"] == (
        "a share of the others; not read: submission.csv, test.csv (no row has what is to be "
        "predicted)"
    )


def test_parts_of_a_data_set_are_a_split(tmp_path):
    rows = {"train": range(30), "test": range(900, 910), "extra": range(5)}
    parts = {
        name: datasets.Dataset.from_dict({"a": [n + 0.5 for n in part], "y": [*part]})
        for name, part in rows.items()
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "set")
    train, evaluated, _, plan = table_of("--data", tmp_path / "set")
    assert len(train) == 30 and evaluated == [*range(900, 910)]
    assert plan["evaluated on"] == "test: 10 rows; not read: extra"


def text_sets(*flags):
    return texts.read_sets(parse(texts.TextConfig, [*map(str, flags)]))


def write_texts(path, word, labels="pos neg", num=20, **columns):
    names = labels.split() * num
    rows = {"text": [f"{word} {name} number {n}" for n, name in enumerate(names[:num])]}
    pd.DataFrame(rows | {"label": names[:num]} | columns).to_json(
        path, orient="records", lines=True
    )


def test_the_test_texts_are_evaluated_and_not_trained_on(tmp_path):
    write_texts(tmp_path / "train.jsonl", "of training")
    write_texts(tmp_path / "dev.jsonl", "of development", "neg new", 6, id=1)
    sets = text_sets("--data", tmp_path)
    assert {words.partition(" n")[0].split()[1] for words, _ in sets.held_out} == {"development"}
    assert (len(sets.train), len(sets.held_out), sets.classes) == (20, 6, ["neg", "new", "pos"])
    assert sets.plan["evaluated on"] == "dev.jsonl: 6 texts"
    assert sets.plan["not trained"] == "classes without texts to train on: new"
    # As in many sets of the Hub: nobody tells the classes of the test rows.
    write_texts(tmp_path / "test.jsonl", "of the test", "-1", 9)
    sets = text_sets("--data", tmp_path)
    assert len(sets.held_out) == 6
    assert sets.plan["evaluated on"] == (
        "dev.jsonl: 6 texts; not read: test.jsonl (no row has what is to be predicted)"
    )
    sets = text_sets("--data", tmp_path, "--eval-data", tmp_path / "train.jsonl")
    assert sets.plan["twice"] == "20 of 20 texts to evaluate on are also trained on"
    assert sets.plan["evaluated on"].endswith(
        "train.jsonl: 20 texts; not read: test.jsonl, dev.jsonl"
    )


@pytest.fixture
def chats(monkeypatch):
    """Rows as read, instead of their tokens: nothing of them depends on a tokenizer."""
    pytest.importorskip("transformers")
    from trainkit.language import conversations, formats

    def call(data, eval_data=None):
        read = formats.read_chat_rows(str(data), eval_data and str(eval_data), formats.find_format)
        rows, _ = formats.read_conversations([*read.train, *read.given])
        hashes = formats.same_turns(row for _, row in rows)
        sides, twice = conversations.hold_out_tenth(
            hashes, [True] * len(rows), len(read.given), "row"
        )
        prompts = [[rows[n][1].turns[0]["content"] for n in side] for side in sides]
        return *prompts, read.plan | twice

    return call


def write_chats(path, prompts):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": prompt, "answer": "yes"} for prompt in prompts]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_tenth_of_chats_is_spread_over_the_file_and_equal_ones_are_on_one_side(chats, tmp_path):
    path = tmp_path / "a.jsonl"
    write_chats(path, [f"{kind} {n}?" for n in range(40) for kind in "abcdefghij"])
    train, held_out, plan = chats(path)
    assert (len(train), len(held_out), plan) == (360, 40, {})
    assert len({prompt[0] for prompt in held_out}) > 7  # rows 1, 11, 21 ... are all of one kind
    write_chats(path, [f"{n // 2}?" for n in range(200)])
    train, held_out, plan = chats(path)
    assert not {*train} & {*held_out} and len(train) + len(held_out) == 200 and held_out
    assert plan == {"twice": "100 of 200 rows repeat another: on one side"}
    write_chats(path, ["same?"] * 3)
    assert chats(path) == (
        ["same?"] * 2,
        ["same?"],
        {"twice": "1 of 1 row to evaluate on is also trained on"},
    )


@pytest.mark.parametrize(
    "test", ["test.jsonl", "data/validation-00000-of-00001.jsonl", "Dev/a.jsonl"]
)
def test_the_test_rows_of_chats_are_evaluated_and_not_trained_on(chats, tmp_path, test):
    write_chats(tmp_path / "train.jsonl", [f"{n}?" for n in range(20)])
    write_chats(tmp_path / test, ["new?", "3?"])
    write_chats(tmp_path / "more.jsonl", ["more?"])
    train, held_out, plan = chats(tmp_path)
    assert (len(train), held_out) == (20, ["new?", "3?"])
    assert plan["evaluated on"] == f"{test}: 2 rows; not read: more.jsonl"
    assert plan["twice"] == "1 of 2 rows to evaluate on is also trained on"
    train, held_out, plan = chats(tmp_path / "train.jsonl", tmp_path / "more.jsonl")
    assert (len(train), held_out) == (20, ["more?"])


def test_parts_of_saved_chats_are_a_split(chats, tmp_path):
    rows = {"train_sft": ["a?", "b?"], "test_sft": ["c?"]}
    parts = {
        name: datasets.Dataset.from_list([{"prompt": p, "answer": "x"} for p in prompts])
        for name, prompts in rows.items()
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "set")
    assert chats(tmp_path / "set") == (["a?", "b?"], ["c?"], {"evaluated on": "test_sft: 1 row"})


def test_a_name_in_two_unicode_forms_is_one_class_category_and_column(tmp_path):
    one, other = "caf\u00e9", "cafe\u0301"
    path = tmp_path / "t.csv"
    kinds = [one, other, "tea", "tea"] * 20
    table = pd.DataFrame({"kind": kinds, other: [n + 0.5 for n in range(80)], "y": range(80)})
    table.to_csv(path, index=False)
    plan = table_of("--data", path)[3]
    assert plan["spelling"] == "20 cells in another form of Unicode, read in NFC"
    assert "category: caf\u00e9, tea" in plan["columns"]
    assert table_of("--data", path, "--features", f"{other},kind")[0]
    pd.DataFrame({"text": [f"line {n}" for n in range(80)], "label": kinds}).to_csv(path)
    sets = text_sets("--data", path)
    assert sets.classes == [one, "tea"]
    assert sets.plan["spelling"] == "20 cells in another form of Unicode, read in NFC"
