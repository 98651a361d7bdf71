"""Every table that people bring is read as they meant it or refused in one sentence."""

import csv
import gzip
import io
import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import posix_only

import predict
import train_regression
from datakit import tables
from trainkit.errors import UsageError
from trainkit.folder import records
from trainkit.order import InMemory


def load(*args: object) -> tuple[InMemory, InMemory, dict[str, Any]]:
    """The training rows, the test rows and what is saved with the weights."""
    parsed = train_regression.parse_args([str(arg) for arg in args])
    train_regression.check_arguments(parsed, 1)
    return train_regression.load_data(parsed)


def frame(size: int = 30) -> pd.DataFrame:
    random = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "area": random.uniform(20, 200, size).round(2),
            "city": random.choice(["Köln", "Orléans", "Rome"], size),
            "garden": random.choice([True, False], size),
        }
    )
    return table.assign(y=table.area * 3 + 5)


def text(separator: str = ",", encoding: str = "utf-8", **options: Any) -> bytes:
    return frame().to_csv(index=False, sep=separator, **options).encode(encoding)


def parquet(table: pd.DataFrame, **options: Any) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, **options)
    return buffer.getvalue()


def rows(column: str, values: list[Any], size: int = 30) -> bytes:
    """A CSV file with a column whose values repeat, one that is a number, and y."""
    table = pd.DataFrame(
        {column: [values[i % len(values)] for i in range(size)], "n": range(size), "y": range(size)}
    )
    return table.to_csv(index=False).encode()


CITIES = ["city=Köln", "city=Orléans", "city=Rome"]
ALL = ["area", *CITIES, "garden"]
# Name of the file, its bytes, flags, the features that are learned.
READ = {
    "csv": ("t.csv", text(), [], ALL),
    "byte order mark": ("t.csv", text(encoding="utf-8-sig"), [], ALL),
    "an object": ("t.json", json.dumps({"a": [*range(20)], "y": [*range(20)]}).encode(), [], ["a"]),
    "semicolons": ("t.csv", text(";"), [], ALL),
    "bars": ("t.txt", text("|"), [], ALL),
    "utf-16": ("t.csv", text(encoding="utf-16"), ["--encoding", "utf-16"], ALL),
    "gzip and semicolons": ("t.CSV.GZ", gzip.compress(text(";")), [], ALL),
    "old mac lines": ("t.csv", text(lineterminator="\r"), [], ALL),
    "another separator": ("t.csv", text("^"), ["--separator", "^"], ALL),
    "a comma in a name that is chosen": ("t.csv", b'"a, b",c;d,y\n' + b"1,2,3\n2,5,4\n4,5,7\n" * 5,
                                         ["--features", '"a, b",c;d'], ["a, b", "c;d"]),
    "index left out": ("t.csv", frame().to_csv().encode(), [], ALL),
    "index left out of two levels in Parquet": ("t.parquet", parquet(pd.concat(
        {"n": frame(), "s": frame()})), [], ALL),
    "an index by name": ("t.csv", frame().to_csv().encode(), ["--features", "Unnamed: 0,area"],
                         ["Unnamed: 0", "area"]),
    "spaces round names": ("t.csv", b" a , b , y \n" + b"1,2,3\n2,5,4\n4,5,7\n" * 5, [],
                           ["a", "b"]),
    "exponents and signs": ("t.csv", b"a,y\n" + b"1e-3,+2\n-.5,3\n4.,7\n" * 5, [], ["a"]),
    "codes said to be categories": ("t.csv", rows("zip", ["01-2", "02-3"]),
                                    ["--categorical", "zip"], ["zip=01-2", "zip=02-3", "n"]),
    "true and false of R": ("t.csv", rows("a", ["TRUE", "FALSE"]), [], ["a", "n"]),
    "true, false and unknown": ("t.csv", rows("a", ["True", "False", "Unknown"]),
                                ["--categorical", "a"],
                                ["a=False", "a=True", "a=Unknown", "n"]),
    "true, false and missing": ("t.csv", rows("a", ["True", "", "False"]), ["--missing", "impute"],
                                ["a", "n"]),
    "spaces round names in JSON": ("t.json", json.dumps({
        " a ": [*range(20)], "y ": [*range(20)]}).encode(), [], ["a"]),
    "words with digits": ("t.csv", rows("k", ["1Story", "2Story", "SLvl", "SFoyer", "Duplex"]), [],
                          ["k=1Story", "k=2Story", "k=Duplex", "k=SFoyer", "k=SLvl", "n"]),
    "formulas": ("t.csv", rows("k", ["=1+1", "@x"]), [], ["k==1+1", "k=@x", "n"]),
    "index left out of parquet": ("t.parquet", parquet(frame().sample(frac=1, random_state=0)), [],
                                  ALL),
    "parquet with a named index": ("t.parquet", parquet(frame().set_index("area")), [],
                                   [*CITIES, "garden", "area"]),
    "parquet with categories": ("t.parquet", parquet(frame().astype({"city": "category"})), [],
                                ALL),
    "json lines": ("t.jsonl", frame().to_json(orient="records", lines=True).encode(), [],
                   ALL),
    "json records": ("t.json", frame().to_json(orient="records", indent=1).encode(), [],
                     ALL),
    "json columns": ("t.json", frame().to_json().encode(), [], ALL),
    "dates": ("t.csv", rows("day", ["2020-01-01", "2020-02-01T12:00", ""]), [], ["day", "n"]),
    "dates of parquet": ("t.parquet", parquet(frame().assign(
        day=pd.date_range("2020", periods=30))), ["--features", "day"], ["day"]),
    "a free text": ("t.csv", rows("note", [f"Ann {n} of Rome" for n in range(30)]), [], ["n"]),
    "a free text by name": ("t.csv", rows("note", [f"Ann {n} of Rome" for n in range(30)]),
                            ["--features", "n,note", "--categorical", "note"], ["n"]),
    "missing cells": ("t.csv", rows("a", ["1", "", "NA", "4"]), [], ["a", "n"]),
}  # fmt: skip


def test_a_target_of_true_and_false_and_rows_without_names(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(text())
    flags = ["--target", "garden", "--categorical", "city"]
    train_set, _, about = load("--data", tmp_path / "t.csv", *flags)
    assert about["features"] == ["area", *CITIES, "y"] and len(train_set.tensors[1].unique()) == 2
    (tmp_path / "t.json").write_text(json.dumps([[i, i * i] for i in range(20)]))
    assert load("--data", tmp_path / "t.json", "--target", "1")[2]["features"] == ["0"]


@pytest.mark.parametrize("case", READ)
def test_a_table_is_read_as_it_was_meant(case: str, tmp_path: Path) -> None:
    name, content, flags, features = READ[case]
    path = tmp_path / name
    path.write_bytes(content)
    train, test, about = load("--data", path, "--target", "y", *flags)
    assert about["features"] == features
    assert any(map(tables.INDEX.fullmatch, about["left_out"])) == case.startswith("index left out")
    # What a run is trained from, predict.py takes.
    model = train_regression.Predictor(about | {"model": "linear", "hidden": []}).requires_grad_(
        False
    )
    output = Path(model.predict_file(path).splitlines()[0])
    assert output.parent == tmp_path and output.name.lower() == "t_predictions.csv"
    written = pd.read_csv(output)
    assert len(written) == len(train) + len(test) >= 15
    predicted = written.predicted_y.to_numpy()[test.tensors[2]]
    own = model.model(test.tensors[0]).double().numpy() * about["target_std"] + about["target_mean"]
    assert predicted == pytest.approx(own[:, 0], rel=1e-5)


def test_tables_of_all_kinds_hold_the_same_numbers(tmp_path: Path) -> None:
    table = frame(200)
    table.loc[3, "city"] = None
    for name in ("folder", "parts"):
        (tmp_path / name).mkdir()
    table.to_csv(tmp_path / "with_index.csv")
    table.to_parquet(tmp_path / "folder" / "table.parquet")
    table[:90].to_csv(tmp_path / "parts" / "a.csv", index=False)
    table[90:].to_csv(tmp_path / "parts" / "b.CSV", index=False)
    table.to_json(tmp_path / "table.json", orient="records", double_precision=15)
    loaded = [
        load(
            "--data",
            tmp_path / name,
            "--target",
            "y",
            "--missing",
            "drop",
            "--features",
            "area,city",
            "--data-seed",
            1,
        )
        for name in ("with_index.csv", "folder", "parts", "table.json")
    ]
    for train, test, about in loaded:
        assert len(train) + len(test) == 199
        assert 3 not in test.tensors[2]
        assert about["features"] == loaded[0][2]["features"]
        for ours, first in zip(train.tensors, loaded[0][0].tensors, strict=True):
            assert torch.equal(ours, first)


NO_NUMBER = r"  a: row {}: '{}' is no number, as 1234\.5"
REFUSED = {
    **{f"a column of {value}": ("t.csv", rows("a", [value, value.replace("0", "7")]), [],
                                NO_NUMBER.format(1, re.escape(value)))
       for value in ("12_000", "1,234.50", "$10", "10 km", "10/01/2020", "10:30", "10.01.20")},
    "a stray text": ("t.csv", b"a,b,y\n1,2,3\nx2,1,5\n" + b"2,3,4\n3,4,5\n" * 5, [],
                     NO_NUMBER.format(2, "x2")),
    "a stray date": ("t.csv", rows("a", ["2020-01-10", "2020-01-11", "2020-13-10"]), [],
                     "a: row 3: '2020-13-10' is no date, as 2020-01-31"),
    "decimal commas in the target": ("t.csv", b"a;y\n" + b"1;2,5\n2;3,5\n" * 9, [],
                                     "y: row 1: '2,5' is no number"),
    "text far down": ("t.csv", b"b,a,y\n" + b"1,2,3\n2,3,4\n" * 1500 + b"1,x,3\n", [],
                      NO_NUMBER.format(3001, "x")),
    "infinite": ("t.csv", b"a,y\n1,2\n2,inf\n3,4\n", [], r"y: row 2: 'inf' .*at most 1e38"),
    "beyond float32": ("t.csv", b"a,y\n1,2\n2,2\n-1e300,4\n", [], "a: row 3: '-1e300' .*1e38"),
    "infinity in 16 bits": ("t.parquet", parquet(pd.DataFrame({
        "a": np.float16([1, 2, np.inf]), "y": range(3)})), [], "a: row 3: 'inf' is no number"),
    "missing": ("t.csv", b"a,b,y\n" + b"1,,3\n2,2,4\n3,4,5\n" * 5, ["--missing", "refuse"],
                "b: row 1: the value is missing"),
    "no such file": ("nothing.csv", None, [], "nothing.csv cannot be read: FileNotFoundError"),
    "not a table": ("t.xlsx", b"PK\x03\x04", [], "is not a table: .*.csv, .tsv"),
    "not utf-8": ("t.csv", text(encoding="latin-1"), [], "cannot be read: UnicodeDecodeError"),
    "no encoding": ("t.csv", text(), ["--encoding", "klingon"], "cannot be read: .*klingon"),
    "empty": ("t.csv", b"", [], "cannot be read"),
    "ragged": ("t.csv", b"a,b,y\n1,2,3\n1,2,3,4\n", [], "cannot be read"),
    "more values than names": ("t.csv", b"a,b,y\n1,2,3,4\n2,3,4,5\n", [],
                               "names 3 columns, and the rows have 4"),
    "fewer values than names": ("t.csv", b"a,b,y\n" + b"1,2\n2,3\n" * 9, [],
                                "names 3 columns, and the rows have 2"),
    "junk parquet": ("t.parquet", b"hello", [], "cannot be read"),
    "junk gzip": ("t.csv.gz", b"hello", [], "cannot be read"),
    "junk json": ("t.json", b"{a: 1}", [], "cannot be read"),
    "a key twice": ("t.json", b'[{"a": 1, "a": 2, "y": 1}]', [], "names a column twice: a, a, y"),
    "a key twice in a line": ("t.jsonl", b'{"a": 1, "a": 2, "y": 1}', [], "names a column twice"),
    "wrong target": ("t.csv", b"a,b,z\n1,2,3\n", [], "no column 'y'.*'a', 'b', 'z'"),
    "wrong feature": ("t.csv", b"a,b,y\n1,2,3\n", ["--features", "c"], "no column 'c'"),
    "twice but for a space": ("t.csv", b"a, a,y\n1,2,3\n", [], "name each column once"),
    "all dropped": ("t.csv", b"a,b,y\n1,,3\n2,,4\n", ["--missing", "drop"], "of 0 rows 0"),
    "constant target": ("t.csv", b"a,y\n" + b"".join(b"%d,3\n" % i for i in range(9)), [],
                        "a target is the same in all training rows"),
    "constant features": ("t.csv", b"a,y\n1,2\n1,3\n1,4\n", [], "a: left out: always the same"),
    "too close for float64": ("t.csv", rows("a", [2**62 + i for i in range(30)]),
                              ["--features", "a"], "a: left out: always the same"),
    "too close to be squared": ("t.csv", rows("a", [f"{i}e-200" for i in range(30)]),
                                ["--features", "a"], "a: left out: always the same"),
    "flags without a table": (None, None, ["--separator", ";"], "are for --data"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_cannot_be_meant_is_one_sentence(case: str, tmp_path: Path) -> None:
    name, content, flags, message = REFUSED[case]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    data = ["--data", tmp_path / name, "--target", "y"] if name else []
    with pytest.raises(UsageError, match=message) as raised:
        load(*data, *flags)
    assert name is None or str(tmp_path / name) in str(raised.value)
    assert len([*tmp_path.iterdir()]) == (content is not None)


def test_a_folder_of_unlike_tables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(text())
    (tmp_path / "b.csv").write_bytes(frame().drop(columns="city").to_csv(index=False).encode())
    with pytest.raises(UsageError, match=r"b\.csv has other columns than a\.csv"):
        load("--data", tmp_path, "--target", "y")
    (tmp_path / "b.csv").rename(tmp_path / "b.json")
    with pytest.raises(UsageError, match="files of one kind"):
        load("--data", tmp_path, "--target", "y")


def test_a_folder_is_read_whole_and_its_files_are_named_in_the_plan(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", ".ipynb_checkpoints/a.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(rows("k", ["x", "y", None]))
    flags = ["--data", tmp_path, "--target", "y", "--missing", "drop"]
    train, test, about = load(*flags)
    assert len(train) + len(test) == 40
    plan = about["plan"]
    assert plan["data"] == f"{tmp_path.name} (a.csv, b.csv), 20 rows dropped: no value"
    assert plan["columns"] == "k (category: x, y)" and plan["targets"] == "y"


def test_whole_numbers_are_the_same_categories_where_one_is_missing(tmp_path: Path) -> None:
    codes = pd.Series([0, 1, 2, None] * 9)
    table = pd.DataFrame({"code": codes, "y": range(36)})
    table.to_parquet(tmp_path / "t.parquet")
    flags = ["--target", "y", "--categorical", "code", "--missing", "impute"]
    _, _, about = load("--data", tmp_path / "t.parquet", *flags)
    assert about["features"] == ["code=0", "code=1", "code=2"]


def test_means_come_from_the_training_rows_alone(tmp_path: Path) -> None:
    table = frame(400).rename(columns={"area": "a"}).drop(columns="garden")
    table.loc[::7, "a"] = None
    table.loc[::11, "city"] = None
    file = tmp_path / "table.csv"
    flags = ["--data", file, "--target", "y", "--missing", "impute"]
    table.to_csv(file, index=False)
    train, test, before = load(*flags)
    index = test.tensors[2].numpy()
    table.loc[index, ["a", "y"]] = 12345
    table.loc[index, "city"] = "mars"
    table.to_csv(file, index=False)
    train_again, test_again, after = load(*flags)
    assert before == after
    features = train.tensors[0]
    assert torch.equal(features, train_again.tensors[0])
    assert (test_again.tensors[0] != test.tensors[0]).any()
    rest = np.setdiff1d(np.arange(len(table)), index)
    assert before["columns"][0]["fill"] == pytest.approx(table.a[rest].mean(), rel=1e-12)
    most = table.city[rest].value_counts().index[0]
    assert before["columns"][1] == {
        "name": "city",
        "categories": ["Köln", "Orléans", "Rome"],
        "fill": most,
    }
    assert features.mean(0).abs().max() < 1e-5
    assert (features.std(0, correction=0) - 1).abs().max() < 1e-5
    # An unknown category is none of the known ones.
    raw = test_again.tensors[0].double() * torch.tensor(after["feature_std"])
    raw += torch.tensor(after["feature_mean"])
    assert raw[:, 1:].abs().max() < 1e-5


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory, run_main: Callable) -> Path:
    """A run on columns of every kind, from a Parquet file."""
    folder = tmp_path_factory.mktemp("tables")
    frame(200).to_parquet(folder / "t.parquet")
    run_main(
        "train_regression",
        "--data",
        folder / "t.parquet",
        "--target",
        "y",
        "--epochs",
        20,
        "--run-dir",
        folder / "run",
    )
    return folder


FORMS = {
    "t.parquet": lambda table, path: table.to_parquet(path),
    "commas.csv": lambda table, path: table.to_csv(path, index=False),
    "semicolons.CSV": lambda table, path: table.to_csv(path, sep=";"),
    "tabs.txt": lambda table, path: table.to_csv(path, sep="\t"),
    "small.csv.gz": lambda table, path: table.to_csv(path),
    "lines.jsonl": lambda table, path: table.to_json(path, orient="records", lines=True,
                                                     double_precision=15),
    "wide.json": lambda table, path: table.to_json(path, double_precision=15),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_model_takes_the_table_in_every_form(name: str, table_run: Path, tmp_path: Path) -> None:
    FORMS[name](frame(200), tmp_path / name)
    predict.main([str(table_run / "run"), str(tmp_path / name)])
    written = pd.read_csv(tmp_path / f"{name.split('.')[0]}_predictions.csv")
    tensors, _ = records.load_predictions(table_run / "run" / records.PREDICTIONS)
    said = written.predicted_y[tensors["index"].numpy()].to_numpy()
    assert said == pytest.approx(tensors["prediction"][:, 0].numpy(), rel=1e-6)
    assert (written.y == frame(200).y).all()


def test_a_table_of_the_hub_is_named_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    rows = datasets.Dataset.from_pandas(frame())
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    _, _, about = load("--data", "someone/houses", "--target", "y")
    assert (about["data"], about["features"]) == ("houses", ALL)


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.csv"])
def test_what_is_no_feature_comes_back_as_it_was_written(
    name: str, table_run: Path, tmp_path: Path
) -> None:
    ids = ["1152921504606846977", "", "3"]
    table = frame(3).assign(id=pd.array([2**60 + 1, None, 3], "Int64"), note=["NA", "null", "x"])
    FORMS.get(name.replace("t.", "lines."), FORMS.get(name, FORMS["commas.csv"]))(
        table, tmp_path / name
    )
    predict.main([str(table_run / "run"), str(tmp_path / name)])
    with open(tmp_path / "t_predictions.csv", newline="") as file:
        written = [*csv.DictReader(file)]
    assert [row["id"] for row in written] == ids
    assert [row["note"] for row in written] == ["NA", "null", "x"]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("t.csv", ["TRUE", "FALSE", "unknown"]),
        ("t.parquet", [1.0, 2.0, 2.5]),
        ("t.jsonl", [1.0, 2.0, 2.5]),
    ],
)
def test_a_category_is_known_again_in_a_table_that_lacks_another(
    name: str, texts: list[Any], tmp_path: Path
) -> None:
    table = pd.DataFrame({"k": texts * 8, "y": [1.0, 2, 3] * 8})
    write = FORMS.get(name.replace("t.", "lines."), FORMS.get(name, FORMS["commas.csv"]))
    write(table, tmp_path / name)
    flags = ["--categorical", "k"] if texts[0] == 1 else []
    _, _, about = load("--data", tmp_path / name, "--target", "y", *flags)
    assert len(about["features"]) == 3
    write(table[table.k != texts[2]], tmp_path / name)
    model = train_regression.Predictor(about | {"model": "linear", "hidden": []})
    assert "not in the training rows" not in model.requires_grad_(False).predict_file(
        tmp_path / name
    )


def test_missing_is_the_same_in_every_kind_of_file(tmp_path: Path) -> None:
    table = pd.DataFrame({"c": ["NA", "US", "DE"] * 8, "a": range(24), "y": range(24)})
    for name, write in (
        ("t.json", lambda path: table.to_json(path, orient="records")),
        ("t.parquet", table.to_parquet),
        ("t.csv", lambda path: table.to_csv(path, index=False)),
    ):
        write(tmp_path / name)
        _, _, about = load("--data", tmp_path / name, "--target", "y", "--missing", "drop")
        assert about["features"] == ["c=DE", "c=US", "a"]
        assert "8 rows dropped" in about["plan"]["data"]


def test_two_tables_with_one_answer_file_keep_the_first(
    table_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORMS["commas.csv"](frame(5), tmp_path / "t.csv")
    FORMS["t.parquet"](frame(9), tmp_path / "t.parquet")
    with pytest.raises(UsageError, match="1 of 2 files cannot be used"):
        predict.main([str(table_run / "run"), str(tmp_path / "t.csv"), str(tmp_path / "t.parquet")])
    assert len(pd.read_csv(tmp_path / "t_predictions.csv")) == 5
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="has just been written for another table"):
        predict.main([str(table_run / "run"), "t.parquet"])
    predict.main([str(table_run / "run"), str(tmp_path / "t.csv")])  # once more is allowed

    def broken(*_: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(predict, "print", broken, raising=False)
    with pytest.raises(BrokenPipeError):  # which is nothing about the file
        predict.main([str(table_run / "run"), str(tmp_path / "t.csv")])


def test_what_a_prediction_cannot_know_is_said(
    table_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "t.csv"
    frame(5).assign(city=["Mars", "Venus"] * 2 + ["Mars"]).to_csv(path, index=False)
    predict.main([str(table_run / "run"), str(path)])
    said = "(column 'city': 'Mars', 'Venus' not in the training rows)"
    assert capsys.readouterr().out.splitlines()[0] == f"{tmp_path / 't_predictions.csv'}  {said}"
    for table, sentence in (
        (frame(5).assign(predicted_y=1), "has a column 'predicted_y' already"),
        (
            frame(5).assign(area="$1"),
            r"no row can be predicted: row 1 \(column 'area': '\$1' is no",
        ),
    ):
        table.to_csv(path, index=False)
        with pytest.raises(UsageError, match=sentence):
            predict.main([str(table_run / "run"), str(path)])


def test_a_row_that_cannot_be_predicted_is_named_and_left_empty(
    table_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "t.csv"
    frame(5).to_csv(path, index=False)
    predict.main([str(table_run / "run"), str(path)])
    whole = pd.read_csv(tmp_path / "t_predictions.csv").predicted_y
    frame(5).astype({"area": object}).assign(area=[1e300, 2, None, "$1", 5]).to_csv(path)
    table = frame(5).astype({"area": object})
    table.loc[[0, 2, 3], "area"] = [1e300, None, "$1"]
    table.to_csv(path, index=False)
    capsys.readouterr()
    predict.main([str(table_run / "run"), str(path)])
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith("no prediction for row 1 (column 'area': '1e+300' is no number")
    assert "row 3 (column 'area': the value is missing), row 4" in said and "--" not in said
    written = pd.read_csv(tmp_path / "t_predictions.csv").predicted_y
    assert written.isna().tolist() == [True, False, True, True, False]
    assert written[[1, 4]].tolist() == whole[[1, 4]].tolist()


def test_dates_are_days_and_other_dates_are_refused_in_a_new_table(tmp_path: Path) -> None:
    days = pd.date_range("2019-12-31", periods=30).strftime("%Y-%m-%d")
    pd.DataFrame({"day": days, "y": range(30)}).to_csv(tmp_path / "t.csv", index=False)
    _, _, about = load("--data", tmp_path / "t.csv", "--target", "y")
    (column,) = [tables.Column(**column) for column in about["columns"]]
    assert column.days and "days since 1970" in about["plan"]["columns"]
    written = ["1970-01-02", "2020-01-01T12:00:00+02:00", "1960-01-01", "2020", "1/2/2020"]
    values, problems = tables.encode(pd.DataFrame({"day": written}), [column])
    assert values[:3, 0].tolist() == [1.0, 18262 + 10 / 24, -3653.0]
    assert [row for row, *_ in problems] == [3, 4]


def test_all_columns_are_judged_at_once_and_the_command_below_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.csv"
    table = frame(60).assign(far=["12 km", "3 km"] * 30, note=[f"no {n}" for n in range(60)])
    table = table.astype({"area": object}).rename(columns={"city": "city, town"})
    table.loc[5, "area"] = "about 30"
    table.loc[[7, 8], "y"] = None
    table.to_csv(path, index=False)
    typed = ["train_regression.py", "--data", str(path), "--target", "y"]
    monkeypatch.setattr("sys.argv", typed)
    with pytest.raises(UsageError) as raised:
        load(*typed[1:])
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["area", "far", "note"]
    assert "row 6: 'about 30' is no number" in lines[1] and "row 1: '12 km'" in lines[2]
    command = shlex.split(lines[-1].removeprefix("This works: python train_regression.py "))
    _, _, about = load(*command)
    assert {column["name"] for column in about["columns"]} == {"city, town", "garden"}
    assert about["plan"]["data"] == "t.csv, 2 rows dropped: no target"


def test_the_folder_at_hand_is_predicted(
    table_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    frame(5).drop(columns="y").to_csv(tmp_path / "new" / "t.csv", index=False)
    monkeypatch.chdir(tmp_path / "new")
    predict.main([str(table_run / "run"), "."])
    assert len(pd.read_csv(tmp_path / "new_predictions.csv").predicted_y) == 5


def test_the_first_rows_are_shown_in_79_columns(
    table_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = frame(9).drop(columns="y").assign(note="said at length " * 9)
    table = table.assign(**{f"a long name of a column {i}": i / 7 for i in range(40)})
    table.to_csv(tmp_path / "t.csv", index=False)
    predict.main([str(table_run / "run"), str(tmp_path / "t.csv")])
    shown = capsys.readouterr().out.splitlines()[1:]
    written = pd.read_csv(tmp_path / "t_predictions.csv").predicted_y
    for value in written[:5]:
        assert sum(line.rstrip(" \\").endswith(f" {value:.6g}") for line in shown) == 1
    assert f"{written[5]:.6g}" not in "".join(shown)
    assert max(len(line) for line in shown) <= 79


@posix_only  # links
def test_predictions_are_safe_to_open_in_a_spreadsheet(table_run: Path, tmp_path: Path) -> None:
    risky = ["=1+1", "\r=1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", " =1", "\n=1"]
    plain = ["-5", "+4.5", "-1e3", "a=b", "", "1-2", "me@home", "two\nlines"]
    table = frame(len(risky) + len(plain)).drop(columns="y").assign(note=risky + plain)
    table = table.rename(columns={"note": "=note"})
    table.to_json(tmp_path / "t.json")  # holds what no CSV file would
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (tmp_path / "t_predictions.csv").symlink_to(secret)
    predict.main([str(table_run / "run"), str(tmp_path / "t.json")])
    assert secret.read_text() == "secret"  # a link is replaced, not written through
    with open(tmp_path / "t_predictions.csv", newline="") as file:
        written = [row["'=note"] for row in csv.DictReader(file)]
    assert written == [f"'{value}".replace("\r", "\n") for value in risky] + plain


def test_a_model_of_synthetic_data_takes_a_table_of_its_columns(
    tmp_path: Path, run_main: Callable
) -> None:
    run_main("train_regression", "--run-dir", tmp_path / "run", "--num-samples", 50, "--epochs", 1)
    args = train_regression.parse_args(["--num-samples", "50"])
    table, *_ = train_regression.make_synthetic(args)
    table.drop(columns="y0").to_csv(tmp_path / "t.csv", index=False)
    predict.main([str(tmp_path / "run"), str(tmp_path / "t.csv")])
    said = pd.read_csv(tmp_path / "t_predictions.csv").predicted_y0
    tensors, _ = records.load_predictions(tmp_path / "run" / records.PREDICTIONS)
    rows = said[tensors["index"].numpy()].to_numpy()
    assert rows == pytest.approx(tensors["prediction"][:, 0].numpy(), rel=1e-5)


def test_large_numbers_lose_nothing(tmp_path: Path, run_main: Callable) -> None:
    seconds = 1_700_000_000 + np.arange(50)  # float32 is 128 s apart there
    pd.DataFrame({"t": seconds, "y": np.arange(50) * 2.0}).to_csv(tmp_path / "t.csv", index=False)
    run_main(
        "train_regression",
        "--data",
        tmp_path / "t.csv",
        "--target",
        "y",
        "--epochs",
        1,
        "--run-dir",
        tmp_path / "run",
    )
    predict.main([str(tmp_path / "run"), str(tmp_path / "t.csv")])
    written = pd.read_csv(tmp_path / "t_predictions.csv")
    tensors, _ = records.load_predictions(tmp_path / "run" / records.PREDICTIONS)
    said = written.predicted_y[tensors["index"].numpy()].to_numpy()
    assert said == pytest.approx(tensors["prediction"][:, 0].numpy(), rel=1e-6)


def test_a_wide_table_is_encoded_in_seconds() -> None:
    """A copy of the table for each of its columns took minutes."""
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(1000, 3000))).add_prefix("x")
    args = train_regression.parse_args(["--target", "x0"])
    started_at = time.process_time()
    train, _, about = tables.make_sets(table, ["x0"], {"data": "x"}, args)
    assert time.process_time() - started_at < 10
    assert train.tensors[0].shape == (800, 2999) and len(about["columns"]) == 2999
