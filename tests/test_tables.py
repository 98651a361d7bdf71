"""Every table that people bring is read as they meant it or refused in one sentence."""

import csv
import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import posix_only, run

import predict
import train_regression
from trainkit import plots
from trainkit.errors import UsageError
from trainkit.order import InMemory


def load(*args: object) -> tuple[InMemory, InMemory, dict[str, Any]]:
    """The training rows, the test rows and what is saved with the weights."""
    parsed = train_regression.parse_args([str(arg) for arg in args])
    train_regression.check_arguments(parsed, 1)
    return train_regression.load_data(parsed)


def frame(size: int = 30) -> pd.DataFrame:
    random = np.random.default_rng(0)
    table = pd.DataFrame({"area": random.uniform(20, 200, size).round(2),
                          "city": random.choice(["Köln", "Orléans", "Rome"], size),
                          "garden": random.choice([True, False], size)})  # fmt: skip
    return table.assign(y=table.area * 3 + 5)


def text(separator: str = ",", encoding: str = "utf-8", **options: Any) -> bytes:
    return frame().to_csv(index=False, sep=separator, **options).encode(encoding)


def parquet(table: pd.DataFrame, **options: Any) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, **options)
    return buffer.getvalue()


def rows(column: str, values: list[Any], size: int = 30) -> bytes:
    """A CSV file with a column whose values repeat, one that is a number, and y."""
    table = pd.DataFrame({column: [values[i % len(values)] for i in range(size)],
                          "n": range(size), "y": range(size)})  # fmt: skip
    return table.to_csv(index=False).encode()


CITIES = ["city=Köln", "city=Orléans", "city=Rome"]
GARDENS = ["garden=False", "garden=True"]
ALL = ["area", *CITIES, *GARDENS]
INDEX = ", without 'Unnamed: 0', an index that pandas wrote"
# Name of the file, its bytes, flags, the features that are learned, what the plan says of reading.
READ = {
    "csv": ("t.csv", text(), [], ALL, ""),
    "upper case": ("T.CSV", text(), [], ALL, ""),
    "byte order mark": ("t.csv", text(encoding="utf-8-sig"), [], ALL, ""),
    "semicolons": ("t.csv", text(";"), [], ALL, ", separator ';', encoding utf-8-sig"),
    "tabs": ("t.tsv", text("\t"), [], ALL, r", separator '\t', encoding utf-8-sig"),
    "bars": ("t.txt", text("|"), [], ALL, ", separator '|', encoding utf-8-sig"),
    "commas in a txt": ("t.txt", text(), [], ALL, ""),
    "latin-1": ("t.csv", text(encoding="latin-1"), [], ALL, ", separator ',', encoding cp1252"),
    "latin-1 with a flag": ("t.csv", text(encoding="latin-1"), ["--encoding", "latin-1"], ALL,
                            ", separator ',', encoding latin-1"),
    "utf-16": ("t.csv", text(encoding="utf-16"), [], ALL, ", separator ',', encoding utf_16"),
    "utf-16 without a mark": ("t.csv", text(encoding="utf-16-le"), [], ALL,
                              ", separator ',', encoding utf_16_le"),
    "excel's unicode text": ("t.txt", text("\t", "utf-16"), [], ALL,
                             r", separator '\t', encoding utf_16"),
    "gzip": ("t.csv.gz", gzip.compress(text()), [], ALL, ""),
    "gzip and semicolons": ("t.CSV.GZ", gzip.compress(text(";")), [], ALL,
                            ", separator ';', encoding utf-8-sig"),
    "windows lines": ("t.csv", text(lineterminator="\r\n"), [], ALL, ""),
    "old mac lines": ("t.csv", text(lineterminator="\r"), [], ALL, ""),
    "all in quotes": ("t.csv", text(";", quoting=csv.QUOTE_ALL), [], ALL,
                      ", separator ';', encoding utf-8-sig"),
    "another separator": ("t.csv", text("^"), ["--separator", "^"], ALL,
                          ", separator '^', encoding utf-8-sig"),
    "comma in a quoted name": ("t.csv", b'"a, b";y\n' + b"1;2\n2;3\n4;5\n" * 5, [], ["a, b"],
                               ", separator ';', encoding utf-8-sig"),
    "a comma in a name that is chosen": ("t.csv", b'"a, b",c;d,y\n' + b"1,2,3\n2,5,4\n4,5,7\n" * 5,
                                         ["--features", '"a, b",c;d'], ["a, b", "c;d"], ""),
    "an index": ("t.csv", frame().to_csv().encode(), [], ALL, INDEX),
    "an index twice": ("t.csv", frame().rename_axis("Unnamed: 0").reset_index().to_csv(
        index=False).encode(), [], ALL, INDEX),
    "an index by name": ("t.csv", frame().to_csv().encode(), ["--features", "Unnamed: 0,area"],
                         ["Unnamed: 0", "area"], ""),
    "spaces round names": ("t.csv", b" a , b , y \n" + b"1,2,3\n2,5,4\n4,5,7\n" * 5, [],
                           ["a", "b"], ""),
    "spaces round values": ("t.csv", b"a,y\n" + b" 1, 2\n 2 ,3\n4, 7\n" * 5, [], ["a"], ""),
    "exponents and signs": ("t.csv", b"a,y\n" + b"1e-3,+2\n-.5,3\n4.,7\n" * 5, [], ["a"], ""),
    "codes said to be categories": ("t.csv", rows("zip", ["01-2", "02-3"]),
                                    ["--categorical", "zip"], ["zip=01-2", "zip=02-3", "n"], ""),
    "dates said to be categories": ("t.csv", rows("day", ["2020-01-01", "2020-01-02"]),
                                    ["--categorical", "day"],
                                    ["day=2020-01-01", "day=2020-01-02", "n"], ""),
    "words with digits": ("t.csv", rows("k", ["1Story", "2Story", "SLvl", "SFoyer", "Duplex"]), [],
                          ["k=1Story", "k=2Story", "k=Duplex", "k=SFoyer", "k=SLvl", "n"], ""),
    "months as words": ("t.csv", rows("m", ["May", "June"]), [], ["m=June", "m=May", "n"], ""),
    "formulas": ("t.csv", rows("k", ["=1+1", "@x"]), [], ["k==1+1", "k=@x", "n"], ""),
    "parquet": ("t.parquet", parquet(frame()), [], ["area", *CITIES, "garden"], ""),
    "parquet with an index": ("t.parquet", parquet(frame().sample(frac=1, random_state=0)), [],
                              ["area", *CITIES, "garden"],
                              INDEX.replace("Unnamed: 0", "__index_level_0__")),
    "parquet with a named index": ("t.parquet", parquet(frame().set_index("area")), [],
                                   [*CITIES, "garden", "area"], ""),
    "parquet with categories": ("t.parquet", parquet(frame().astype({"city": "category"})), [],
                                ["area", *CITIES, "garden"], ""),
    "json lines": ("t.jsonl", frame().to_json(orient="records", lines=True).encode(), [],
                   ["area", *CITIES, "garden"], ""),
    "ndjson in gzip": ("t.ndjson.gz", gzip.compress(frame().to_json(
        orient="records", lines=True).encode()), [], ["area", *CITIES, "garden"], ""),
    "json records": ("t.json", frame().to_json(orient="records", indent=1).encode(), [],
                     ["area", *CITIES, "garden"], ""),
    "json columns": ("t.json", frame().to_json().encode(), [], ["area", *CITIES, "garden"], ""),
    "json in utf-16": ("t.json", frame().to_json(orient="records", force_ascii=False).encode(
        "utf-16"), [], ["area", *CITIES, "garden"], ""),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_a_table_is_read_as_it_was_meant(case: str, tmp_path: Path) -> None:
    name, content, flags, features, said = READ[case]
    path = tmp_path / name
    path.write_bytes(content)
    train, test, about = load("--data", path, "--target", "y", *flags)
    assert about["features"] == features and about["source"] == f"{path}{said}"
    # What a run is trained from, predict.py takes.
    model = train_regression.Predictor(about | {"model": "linear", "hidden": []}).requires_grad_(
        False
    )
    words = model.predict_file(path)
    output = Path(words)
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
    (tmp_path / "folder" / "README.txt").write_text("the houses of 2020")
    table[:90].to_csv(tmp_path / "parts" / "a.csv", index=False)
    table[90:].to_csv(tmp_path / "parts" / "b.CSV", index=False)
    table.to_json(tmp_path / "table.json", orient="records", lines=True, double_precision=15)
    loaded = [load("--data", tmp_path / name, "--target", "y", "--missing", "drop",
                   "--features", "area,city", "--data-seed", 1)
              for name in ("with_index.csv", "folder", "parts", "table.json")]  # fmt: skip
    for train, test, about in loaded:
        assert len(train) + len(test) == 199
        assert 3 not in test.tensors[2]
        assert about["features"] == loaded[0][2]["features"]
        for ours, first in zip(train.tensors, loaded[0][0].tensors, strict=True):
            assert torch.equal(ours, first)


def number(value: str) -> tuple[bytes, str]:
    """A column that is meant as numbers or dates, and the sentence: column, row, remedy."""
    values = [value, value.replace("0", "7"), value.replace("0", "3").replace("1", "4")]
    return rows("when", values), rf"'when', row 1: {value!r} reads like a number.*--categorical"


REFUSED = {
    **{f"a column of {value}": ("t.csv", number(value)[0], [],
                                number(value)[1].replace("$", r"\$").replace("(", r"\("
                                ).replace(")", r"\)").replace("+", r"\+")) for value in (
        "12_000", "1,234.50", "1 000", "$10", "10%", "10 km", "10kg", "1.000,50", "(100)",
        "2020-01-10", "10/01/2020", "2020-01-10T10:00:00", "10:30", "10 Jan 2020", "Jan 10, 2020",
        "10.01.20", "+49 30 1000", "10-20")},
    "no such file": ("nothing.csv", None, [], "nothing.csv: there is no such file"),
    "not a table": ("t.xlsx", b"PK\x03\x04", [], "is not a table: .*.csv, .tsv"),
    "no words": ("t.txt", b"hello", [], "no column 'y', only"),
    "binary": ("t.csv", b"\xff\xfe\x00", [], "cannot be read"),
    "not this encoding": ("t.csv", text(encoding="latin-1"), ["--encoding", "utf-8"],
                          "cannot be read: UnicodeDecodeError"),
    "no encoding": ("t.csv", text(), ["--encoding", "klingon"], "cannot be read: .*klingon"),
    "long separator": ("t.csv", text(), ["--separator", ", "], "cannot be read"),
    "empty": ("t.csv", b"", [], "cannot be read|first line"),
    "no rows": ("t.csv", b"a,b,y\n", [], "of 0 rows 0 are left"),
    "ragged": ("t.csv", b"a,b,y\n1,2,3\n1,2,3,4\n", [], "cannot be read.*line 3"),
    "more values than names": ("t.csv", b"a,b,y\n1,2,3,4\n2,3,4,5\n", [], "more values than its"),
    "fewer values than names": ("t.csv", b"a,b,y\n" + b"1,2\n2,3\n" * 9, [],
                                "'y', row 1: the value is missing"),
    "an open quote": ("t.csv", b'a,y\n"1,2\n3,4\n', [], "cannot be read"),
    "junk parquet": ("t.parquet", b"hello", [], "cannot be read"),
    "junk gzip": ("t.csv.gz", b"hello", [], "cannot be read"),
    "a bomb": ("t.csv.gz", gzip.compress(b"a,y\n" + b"1,2\n" * 2**24), [], "unpacks to more"),
    "junk json": ("t.json", b"{a: 1}", [], "cannot be read"),
    "nested json": ("t.json", b"[" * 10**5, [], "cannot be read"),
    "a json number": ("t.json", b"5", [], "cannot be read|no column 'y'"),
    "wrong target": ("t.csv", b"a,b,z\n1,2,3\n", [], "no column 'y'.*'a', 'b', 'z'"),
    "wrong feature": ("t.csv", b"a,b,y\n1,2,3\n", ["--features", "c"], "no column 'c'"),
    "a stray text": ("t.csv", b"a,b,y\n1,2,3\n1,x2,3\n2,3,4\n", [], "'b', row 2: 'x2' is not a n"),
    "a stray $0": ("t.csv", b"a,b,y\n1,2,3\n1,$0,3\n2,3,4\n", [], r"'b', row 2: '\$0' reads like "),
    "decimal commas": ("t.csv", b"a;b;y\n" + b"1,5;1;2\n2,5;2;3\n" * 9, [],
                       r"'a', row 1: '1,5' reads like a number.*: write plain numbers \(1234\.5"),
    "a stray decimal comma": ("t.csv", b"a;b;y\n1;1;2\n2;2;3\n3,5;2;3\n", [],
                              r"'a', row 3: '3,5' reads like .*: write plain numbers \(1234\.5"),
    "decimal commas in the target": ("t.csv", b"a;y\n" + b"1;2,5\n2;3,5\n" * 9, [],
                                     r"'y', row 1: '2,5' reads like .* \(1234\.5"),
    "text far down": ("t.csv", b"a,b,y\n" + b"1,2,3\n" * 15000 + b"1,x,3\n", [],
                      "'b', row 15001: 'x' is not a number"),
    "text target": ("t.csv", b"a,y\n1,red\n2,blue\n3,red\n4,red\n", [],
                    "'y', row 1: 'red' is not a number"),
    "infinite": ("t.csv", b"a,y\n1,2\n2,inf\n3,4\n", [], "'y', row 2: the value is not finite"),
    "missing": ("t.csv", b"a,b,y\n1,,3\n2,,4\n3,4,5\n", [], "'b', row 1: the value is missing"),
    "missing target": ("t.csv", b"a,y\n1,3\n2,\n3,4\n5,6\n", ["--missing", "impute"],
                       "'y', row 2: the value is missing"),
    "all dropped": ("t.csv", b"a,b,y\n1,,3\n2,,4\n", ["--missing", "drop"], "of 0 rows 0"),
    "constant target": ("t.csv", b"a,y\n" + b"".join(b"%d,3\n" % i for i in range(9)), [],
                        "target column 'y' is the same in all 7 training rows"),
    "constant features": ("t.csv", b"a,y\n1,2\n1,3\n1,4\n", [], "no feature column"),
    "names": ("t.csv", rows("who", [f"Ann {chr(97 + i)}" for i in range(26)], 26), [],
              "'who' holds a different text in each row"),
    "many texts": ("t.csv", rows("who", [f"Ann{chr(97 + i % 26)}{i}x" for i in range(150)], 300),
                   [], r"'who' holds 1\d\d different texts"),
    "twice": ("t.csv", b"a,a,y\n1,2,3\n", [], "name each column once"),
    "twice but for a space": ("t.csv", b"a, a,y\n1,2,3\n", [], "name each column once"),
    "lists": ("t.jsonl", b'{"a": [1, 2], "y": 1}\n{"a": [3, 4], "y": 2}\n{"a": [3], "y": 3}', [],
              "'a', row 1: the value is neither a number nor a text"),
    "parquet dates": ("t.parquet", parquet(frame().assign(
        when=pd.date_range("2020", periods=30))), [], "'when' holds datetime64"),
    "parquet days": ("t.parquet", parquet(frame().assign(
        when=pd.date_range("2020", periods=30).date)), [], "'when', row 1: .* reads like"),
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
    sentence = str(raised.value)
    assert "\n" not in sentence and (name is None or str(tmp_path / name) in sentence)
    assert len([*tmp_path.iterdir()]) == (content is not None)


def test_a_folder_of_unlike_tables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(text())
    (tmp_path / "b.csv").write_bytes(frame().drop(columns="city").to_csv(index=False).encode())
    with pytest.raises(UsageError, match=r"b\.csv and a\.csv differ in columns"):
        load("--data", tmp_path, "--target", "y")
    (tmp_path / "b.csv").rename(tmp_path / "b.json")
    with pytest.raises(UsageError, match="files of one kind"):
        load("--data", tmp_path, "--target", "y")


def test_a_bad_table_ends_with_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,y\n1,2\n2,3\nthree,4\n")
    result = run("train_regression.py", "--run-dir", tmp_path / "run", "--data",
                 tmp_path / "table.csv", "--target", "y")  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"error: --data {tmp_path / 'table.csv'}, column 'a', row 3: 'three' is not a number "
        "(a category? see --categorical)"
    ]


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
    assert before["columns"][1] == {"name": "city", "categories": ["Köln", "Orléans", "Rome"],
                                    "fill": most}  # fmt: skip
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
    run_main("train_regression", "--data", folder / "t.parquet", "--target", "y", "--epochs", 20,
             "--run-dir", folder / "run")  # fmt: skip
    return folder


FORMS = {
    "t.parquet": lambda table, path: table.to_parquet(path),
    "commas.csv": lambda table, path: table.to_csv(path, index=False),
    "semicolons.CSV": lambda table, path: table.to_csv(path, sep=";"),
    "latin.txt": lambda table, path: table.to_csv(path, sep="\t", encoding="latin-1"),
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
    tensors, _ = plots.load_predictions(table_run / "run" / plots.PREDICTIONS)
    said = written.predicted_y[tensors["index"].numpy()].to_numpy()
    assert said == pytest.approx(tensors["prediction"][:, 0].numpy(), rel=1e-6)
    assert (written.y == frame(200).y).all()


def test_what_a_prediction_cannot_know_is_said(
    table_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "t.csv"
    frame(5).assign(city="Mars").to_csv(path, index=False)
    predict.main([str(table_run / "run"), str(path)])
    assert capsys.readouterr().out == (
        f"{tmp_path / 't_predictions.csv'}  (column 'city': 'Mars' was not in the training rows)\n"
    )
    frame(5).assign(predicted_y=1).to_csv(path, index=False)
    with pytest.raises(UsageError, match="rename its column 'predicted_y'"):
        predict.main([str(table_run / "run"), str(path)])


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
    table, _ = train_regression.make_synthetic(args)
    table.drop(columns="y0").to_csv(tmp_path / "t.csv", index=False)
    predict.main([str(tmp_path / "run"), str(tmp_path / "t.csv")])
    said = pd.read_csv(tmp_path / "t_predictions.csv").predicted_y0
    tensors, _ = plots.load_predictions(tmp_path / "run" / plots.PREDICTIONS)
    rows = said[tensors["index"].numpy()].to_numpy()
    assert rows == pytest.approx(tensors["prediction"][:, 0].numpy(), rel=1e-5)


def test_large_numbers_lose_nothing(tmp_path: Path, run_main: Callable) -> None:
    seconds = 1_700_000_000 + np.arange(50)  # float32 is 128 s apart there
    pd.DataFrame({"t": seconds, "y": np.arange(50) * 2.0}).to_csv(tmp_path / "t.csv", index=False)
    run_main("train_regression", "--data", tmp_path / "t.csv", "--target", "y", "--epochs", 1,
             "--run-dir", tmp_path / "run")  # fmt: skip
    predict.main([str(tmp_path / "run"), str(tmp_path / "t.csv")])
    written = pd.read_csv(tmp_path / "t_predictions.csv")
    tensors, _ = plots.load_predictions(tmp_path / "run" / plots.PREDICTIONS)
    said = written.predicted_y[tensors["index"].numpy()].to_numpy()
    assert said == pytest.approx(tensors["prediction"][:, 0].numpy(), rel=1e-6)
