"""Which rows are evaluated: a split that the user made, or a share of each class."""

import json
import os

import datasets
import pandas as pd
import pytest
import torch
from conftest import posix_only, refused
from PIL import Image

import train_mnist
from examples import table
from trainkit.config import parse
from trainkit.errors import UsageError
from trainkit.language import formats
from trainkit.reading import splits
from trainkit.rows.parquet import ParquetRows
from trainkit.texts import texts


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("train.csv test.csv", "train.csv | test.csv | "),
        ("Train.csv TEST.csv", "Train.csv | TEST.csv | "),
        ("train.jsonl dev.jsonl", "train.jsonl |  | dev.jsonl"),
        ("train.csv holdout.csv", "train.csv | holdout.csv | "),
        ("train.csv held_out.csv", "train.csv | held_out.csv | "),
        ("train/a.csv validation/a.csv", "train/a.csv |  | validation/a.csv"),
        (
            "data/train-00000-of-00001.parquet data/test-00000-of-00001.parquet",
            "data/train-00000-of-00001.parquet | data/test-00000-of-00001.parquet | ",
        ),
        ("test-set/train.csv test-set/test.csv", "test-set/train.csv | test-set/test.csv | "),
        ("adult.data adult.test", "adult.data | adult.test | "),
        ("data.csv test.csv", "data.csv | test.csv | "),
        ("dev.csv test.csv", "dev.csv | test.csv | "),
        ("sample.csv test.csv train.csv", "train.csv | test.csv | "),
        ("train.csv test.csv val.csv", "train.csv | test.csv | val.csv"),
        ("train train_10pct test", "train | test | "),
        ("test test_extra validation", "validation | test | "),
    ],
)
def test_names_of_files_and_parts_are_a_split(names, found):
    parts = splits.find_splits(names.split())
    assert " | ".join(",".join(parts.get(s, [])) for s in splits.WORDS) == found


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
        sides = splits.keep_equal_on_one_side(train, held_out, torch.tensor(samples))
        kept, found = (side.tolist() for side in sides)
        assert found == evaluated and sorted(kept + found) == [*range(8)]


def make_table(path, start, num=20, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    a = [n + 0.25 for n in range(start, start + num)]
    table = pd.DataFrame({"a": a, "b": [n % 7 + 0.5 for n in range(num)], "y": [2 * x for x in a]})
    table.assign(**more).to_csv(path, index=False)


def table_of(*flags):
    made = table.load_data(parse(table.Config, ["--target", "y", *map(str, flags)]))
    mean, std = (made.metadata[f"target_{name}"][0] for name in ("mean", "std"))
    train, test = ([round((t * std + mean).item(), 1) for t in p.tensors[1]] for p in made[:2])
    return train, test, made.evaluated.tensors[2].tolist(), made.plan


def test_the_test_rows_of_a_table_are_evaluated_and_not_trained_on(tmp_path):
    make_table(tmp_path / "train.csv", 0)
    make_table(tmp_path / "test.csv", 1000, num=5)
    make_table(tmp_path / "val.csv", 10)
    train, evaluated, rows, plan = table_of("--data", tmp_path)
    assert max(train) < 100 and min(evaluated) > 2000 and rows == [*range(5)]
    assert plan["evaluated on"] == "test.csv: 5 rows; not read: val.csv"
    assert "twice" not in plan
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
        found = formats.read_chat_rows(str(data), eval_data and str(eval_data))
        read, num_given, plan = found
        rows = [formats.read_chat(row)[1] for _, row in read]
        hashes = splits.number_equal(row.as_key() for row in rows)
        sides, twice = conversations.hold_out_tenth(hashes, [True] * len(rows), num_given)
        prompts = [[rows[n].turns[0]["content"] for n in side] for side in sides]
        return *prompts, plan | twice

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


def test_the_test_rows_of_chats_are_evaluated_and_not_trained_on(chats, tmp_path):
    test = "data/validation-00000-of-00001.jsonl"
    write_chats(tmp_path / "train.jsonl", [f"{n}?" for n in range(20)])
    write_chats(tmp_path / test, ["new?", "3?"])
    write_chats(tmp_path / "more.jsonl", ["more?"])
    train, held_out, plan = chats(tmp_path)
    assert (len(train), held_out) == (20, ["new?", "3?"])
    assert plan["evaluated on"] == f"{test}: 2 rows; not read: more.jsonl"
    assert plan["twice"] == "1 of 2 rows to evaluate on is also trained on"
    train, held_out, plan = chats(tmp_path / "train.jsonl", tmp_path / "more.jsonl")
    assert (len(train), held_out) == (20, ["more?"])


def pictures_of(*flags):
    """The classes of both sides as names, and the plan."""
    config = parse(train_mnist.Config, ["--dataset", *map(str, flags)])
    train, held_out, metadata, plan = train_mnist.load_data(config)
    labels = [part.tensors[1] for part in (train, held_out)]
    return *([metadata["classes"][n] for n in side] for side in labels), plan


def shaded(value):
    picture = Image.new("L", (8, 8), value)
    picture.paste(255 - value, (0, 0, 4, 4))
    return picture


def save_shaded(folder, *values):
    folder.mkdir(parents=True)
    for value in values:
        shaded(value).save(folder / f"{value}.png")


def rows_of(values, names, numbers):
    """Rows of the Hub: pictures, and the number of the class of each."""
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names))
    rows = {"image": [*map(shaded, values)], "label": numbers}
    return datasets.Dataset.from_dict(rows, features=features)


def test_pictures_are_evaluated_on_a_folder_of_their_own(tmp_path):
    for name in ("a", "b", "c"):
        save_shaded(tmp_path / "set" / name, *range(10, 30))
    (tmp_path / "set" / "c").rename(tmp_path / "set" / "e\u0301")  # as macOS writes it
    save_shaded(tmp_path / "new" / "a", 10, 101)
    save_shaded(tmp_path / "new" / "\xe9", 102)
    train, held_out, plan = pictures_of(tmp_path / "set", "--eval-data", tmp_path / "new")
    assert len(train) == 60 and held_out == ["a", "a", "\xe9"]
    assert plan["evaluated on"] == f"--eval-data {tmp_path}/new: 3 pictures"
    assert plan["twice"] == "1 of 3 pictures to evaluate on is also trained on"
    assert plan["rare"].endswith("fewer than 5 pictures to evaluate on: b 0, \xe9 1, a 2")
    save_shaded(tmp_path / "new" / "d", 103)
    sentence = r"^--eval-data .*/new, column 'label', row 3: the label 'd' is not one of the 3 "
    with pytest.raises(UsageError, match=sentence):
        pictures_of(tmp_path / "set", "--eval-data", tmp_path / "new")
    with pytest.raises(UsageError, match=r"^--eval-data .*/nowhere: there is no such file"):
        pictures_of(tmp_path / "set", "--eval-data", tmp_path / "nowhere")


def test_pictures_are_evaluated_on_a_file_of_rows_or_on_the_test_part_of_a_clone(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "clone" / "data").mkdir(parents=True)
    rows_of(range(40), ["a", "b"], [0, 1] * 20).to_parquet(tmp_path / "set" / "train.parquet")
    rows_of(range(50, 52), ["a", "b"], [0, 0]).to_parquet(tmp_path / "set" / "test.parquet")
    for name, start in (("train", 0), ("test", 60)):
        rows = rows_of(range(start, start + 5), ["b", "a"], [0, 0, 0, 0, 1])
        rows.to_parquet(tmp_path / "clone" / "data" / f"{name}-00000-of-00001.parquet")
    file = tmp_path / "clone" / "data" / "train-00000-of-00001.parquet"
    for given, twice in ((file, True), (tmp_path / "clone", False)):
        train, held_out, plan = pictures_of(tmp_path / "set", "--eval-data", given)
        assert train == ["a", "b"] * 20 and held_out == ["b"] * 4 + ["a"]
        assert plan["evaluated on"] == f"--eval-data {given}: 5 pictures; not read: test"
        assert ("5 of 5 pictures to evaluate on are" in plan.get("twice", "")) == twice


@posix_only
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "ok.jsonl").write_text(json.dumps(row))
    save_shaded(tmp_path / "set" / "a", 1, 2)
    read = {
        "--data": lambda: formats.read_chat_rows(str(pipe), None),
        "--eval-data": lambda: formats.read_chat_rows(str(tmp_path / "ok.jsonl"), str(pipe)),
        "--dataset": lambda: pictures_of(pipe),
        "": lambda: ParquetRows(str(pipe), "id"),
    }
    for flag, reading in read.items():
        with pytest.raises(UsageError, match=f"^{flag} ?.*rows.jsonl is (not )?a file"):
            reading()


SIDES = ["train"] * 12 + ["test"] * 5 + ["train"] * 3


def test_a_column_that_says_which_rows_are_evaluated_is_refused_unless_it_is_wanted(tmp_path):
    said = "says which rows are evaluated: write the rows of each split into files"
    make_table(tmp_path / "t.csv", 0, Split=[side.upper() for side in SIDES])
    with refused(said):
        table_of("--data", tmp_path / "t.csv")
    make_table(tmp_path / "t.csv", 0, split=["left", "right"] * 10)
    assert "split (category: left, right)" in table_of("--data", tmp_path / "t.csv")[3]["columns"]
    write_texts(tmp_path / "t.jsonl", "of a file", split=SIDES)
    with refused(said):
        text_sets("--data", tmp_path / "t.jsonl")
    sets = text_sets("--data", tmp_path / "t.jsonl", "--label", "split")
    assert sets.classes == ["test", "train"]
