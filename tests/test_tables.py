"""Every table that people bring is read as they meant it or refused in one sentence."""

import io
import itertools
import json
import re
import shlex
import warnings
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from conftest import posix_only, refused
from made_tables import frame, load, titled

import predict
import train_regression
from examples import table_classes
from trainkit.config import parse
from trainkit.errors import UsageError
from trainkit.reading import frames, pieces
from trainkit.reading.encodings import find_encoding
from trainkit.reading.pieces import score_text
from trainkit.tables.amounts import find_form, read_amount
from trainkit.tables.columns import INDEX, Column, encode
from trainkit.tools import predictions


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Where the tables of a test lie."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(table, *flags):
    """The same of a frame, of the bytes of a CSV file, or of a path; its column y is the target."""
    if isinstance(table, pd.DataFrame):
        table = table.to_csv(index=False).encode()
    if isinstance(table, bytes):
        Path("t.csv").write_bytes(table)
        table = "t.csv"
    return load("--data", table, "--target", "y", *flags)


def planned(*table_and_flags):
    """What its plan says."""
    return read(*table_and_flags)[2]["plan"]


def text(separator=",", encoding="utf-8") -> bytes:
    return frame().to_csv(index=False, sep=separator).encode(encoding)


def parquet(table) -> bytes:
    return table.to_parquet(None)


def rows(column, values) -> bytes:
    """A CSV file with a column whose values repeat, one that is a number, and y."""
    cells = [*itertools.islice(itertools.cycle(values), 30)]
    table = pd.DataFrame({column: cells, "n": range(30), "y": range(30)})
    return table.to_csv(index=False).encode()


CITIES = ["city=Köln", "city=Orléans", "city=Rome"]
ALL = ["area", *CITIES, "garden"]
# Name of the file, its bytes, flags, the features that are learned.
READ = {
    "byte order mark": ("t.csv", text(encoding="utf-8-sig"), [], ALL),
    "cp1252, for Excel": ("t.csv", b"sep=;\r\n" + text(";", "cp1252"), ["--encoding", "cp1252"],
                          ALL),
    "texts that are no missing values": ("t.csv", rows("k", ["None", "NA", "None", "", "x"]), [],
                                         ["k=NA", "k=None", "k=x", "n"]),
    "null and a text of it": ("t.json", b'[{"y": 0}' + b', {"k": "null", "y": 1}, '
                              b'{"k": "nan", "y": 2}, {"k": null, "y": 3}' * 9 + b"]", [],
                              ["k=nan", "k=null"]),
    "a comma in a name that is chosen": ("t.csv", b'"a, b",c;d,y\n' + b"1,2,3\n2,5,4\n4,6,7\n" * 5,
                                         ["--features", '"a, b",c;d'], ["a, b", "c;d"]),
    "index left out": ("t.csv", b",Unnamed: 0,a,y, \n" + b"1,1,3,4,\n2,2,4,5,\n" * 9, [], ["a"]),
    "index left out of parquet": ("t.parquet", parquet(frame().sample(frac=1, random_state=0)), [],
                                  ALL),
    "parquet with a named index": ("t.parquet", parquet(frame().set_index("area")), [],
                                   [*CITIES, "garden", "area"]),
    "spaces round names, of which one is self": (
        "t.csv", b" a , self , y \n" + b"1e-3,2,+3\n-.5,5,4\n4.,6,7\n" * 5, [], ["a", "self"]),
    "two targets, one true or false": ("t.csv", text(), ["--target", "garden,y"],
                                       ["area", *CITIES]),
    "words with digits": ("t.csv", rows("k", ["1Story", "2Story", "SLvl"]), [],
                          ["k=1Story", "k=2Story", "k=SLvl", "n"]),
    "dates of parquet": ("t.parquet", parquet(frame().assign(
        day=pd.date_range("2020", periods=30))), ["--features", "day"],
        ["day", *(f"day, {w}" for w in ("weekday sin", "weekday cos", "day of the year sin",
                                        "day of the year cos"))]),
    # float32 is two minutes apart there
    "times in milliseconds": ("t.csv", rows("ms", [17 * 10**11 + 10**4 * i for i in range(30)]),
                              [], ["ms", "n"]),
    "nothing but missing cells": ("t.csv", rows("a", ["", "NA"]), [], ["n"]),
}  # fmt: skip


def untrained(metadata) -> predict.TablePredictor:
    torch.manual_seed(0)
    metadata = metadata | {"model": "linear", "hidden": []}
    model = train_regression.make_model(metadata)
    return predict.TablePredictor(model, metadata, {}).requires_grad_(False)


def predicted(model, path, **options) -> pd.DataFrame:
    """The table that is written beside that of `path`."""
    output = Path(model.predict_file(path).splitlines()[0].split("  (")[0])
    assert output.parent == path.parent and output.name.endswith("_predictions.csv")
    encoding = model.metadata["read_options"]["encoding"]
    table = frames.read_table(str(output), "", encoding=encoding)
    form = table.attrs["form"]
    columns = [Column(**column) for column in model.metadata["columns"]]
    target = model.metadata.get("target_decimal", "")
    has_comma = predictions.has_decimal_comma(table, columns, target, form.separator)
    return pd.read_csv(
        output,
        sep=form.separator,
        decimal="," if has_comma else ".",
        encoding=form.encoding,
        skiprows=int(bool(form.first_line)),
        **options,
    )


@pytest.mark.parametrize("case", READ)
def test_a_table_is_read_as_it_was_meant(case):
    name, content, flags, features = READ[case]
    path = Path(name)
    path.write_bytes(content)
    train, test, metadata = read(path, *flags)
    assert metadata["features"] == features
    assert any(map(INDEX.fullmatch, metadata["left_out"])) == case.startswith("index left out")
    # What a run is trained from, predict.py takes.
    written = predicted(model := untrained(metadata), path)
    assert len(written) == len(train) + len(test) >= 15
    said = written[[f"predicted_{name}" for name in metadata["targets"]]].to_numpy()
    own = model.model(test.tensors[0]).double().numpy() * metadata["target_std"]
    np.testing.assert_allclose(said[test.tensors[2]], own + metadata["target_mean"], rtol=1e-5)


FORMS = {
    "t.parquet": pd.DataFrame.to_parquet,
    "commas.csv": lambda table, path: table.to_csv(path, index=False),
    "semicolons.CSV": lambda table, path: table.to_csv(path, sep=";"),
    "bars.txt": lambda table, path: table.to_csv(path, sep="|"),
    "tabs.CSV.GZ": lambda table, path: table.to_csv(path, sep="\t", compression="gzip"),
    "tabs.tab": lambda table, path: table.to_csv(path, sep="\t", index=False),
    "bars.csv.bz2": lambda table, path: table.to_csv(path, sep="|", index=False),
    "commas.csv.xz": lambda table, path: table.to_csv(path, index=False),
    "lines.jsonl": lambda table, path: table.to_json(path, orient="records", lines=True,
                                                     double_precision=15),
    "wide.json": lambda table, path: table.to_json(path, double_precision=15),
}  # fmt: skip


def test_tables_of_all_kinds_hold_the_same_numbers(here):
    table = frame(200)
    table.loc[3, "city"] = None
    for name, write in FORMS.items():
        Path(name).mkdir()
        write(table, f"{name}/{name}")
    (here / "parts").mkdir()
    FORMS["commas.csv"](table[:90], "parts/a.csv")
    FORMS["commas.csv"](table[90:], "parts/b.CSV")
    flags = ["--missing", "drop", "--features", "area,city"]
    first = read("parts", *flags)
    for name in FORMS:
        train, test, metadata = read(name, *flags)
        assert len(train) + len(test) == 199 and 3 not in test.tensors[2]
        assert metadata["features"] == first[2]["features"]
        for ours, same in zip(train.tensors, first[0].tensors, strict=True):
            assert torch.equal(ours, same)


pyarrow.parquet.write_table(pyarrow.table([[1]] * 3, ["a", "y", "a"]), twice := io.BytesIO())
NO_NUMBER = r"  a: row {}: '{}' is not a number like 1234\.5"
REFUSED = {
    **{f"a column of {value}": ("t.csv", rows("a", [value, value.replace("0", "7")]), [],
                                NO_NUMBER.format(1, re.escape(value)))
       for value in ("1_234.50", "10:30")},
    **{f"a name twice in {name}": (name, content, [], "two columns are called 'a'")
       for name, content in (
           ("t.csv", b'a,y," a"\n1,2,3\n'), ("t.json", b'[{"a": 1, "y": 2, "a": 3}]'),
           ("t.parquet", twice.getvalue()))},
    **{f"a column of {value}": ("t.parquet", parquet(pd.DataFrame({"a": [value], "y": [1]})), [],
                                "column 'a' holds bytes or lists")
       for value in (b"\xff", [1], {"b": 1})},
    "many words": ("t.csv", rows("a", ["1", "2", "x"]), [], NO_NUMBER.format(3, "x")),
    "days or months": ("t.csv", rows("a", ["01/02/2020", "03/04/2020"]), ["--features", "a"],
                       "a: left out: dates, but the day or the month may come first"),
    "a stray text": ("t.csv", b"a,b,y\n1,2,3\nx2,1,5\n" + b"2,3,4\n3,4,5\n" * 5, [],
                     NO_NUMBER.format(2, "x2")),
    "a stray date": ("t.csv", rows("a", ["2020-01-10", "2020-01-11", "2020-13-10"]), [],
                     "a: row 3: '2020-13-10' is not a date as in training"),
    "two currencies": ("t.csv", rows("a", ["$1", "$2", "$3", "$4", "EUR 5"]), [],
                       r"a: row 5: 'EUR 5' is not a number like \$1"),
    "two kinds of decimals": ("t.csv", rows("a", ["1,5 m", "2,5 m", "1,25 m", "0,5 m", "1.25 m"]),
                              [], "a: row 5: '1.25 m' is not a number like 1,25 m"),
    "a target in words": ("t.csv", b"a,y\n" + b"1,5:30\n2,6:30\n" * 9, [],
                          "y: row 1: '5:30' is not a number(?s:.*)in one way: 1234.5"),
    "nothing below the names": ("t.csv", b"a,b,y\n", [], "there is no row below the names"),
    "a number of 400 digits": ("t.json", b'[{"a": 1, "y": 2}, {"a": 1' + b"0" * 400 + b', "y": 3}'
                               + b', {"a": 2, "y": 2}, {"a": 3, "y": 5}' * 9 + b"]",
                               [], "a: row 2: '10000000.*' is not a number.*1e38"),
    "spaces between": ("t.csv", b"a b y\n1 2 3\n", [], "one column, 'a b y', .* --separator"),
    "a name too few": ("t.csv", b"a,y\n1,2,3\n", [], "saw 3: the first line must name all"),
    "beyond float32": ("t.csv", b"a,y\n1,2\n2,2\n-1e300,4\n", [], "a: row 3: '-1e300' .*1e38"),
    "missing": ("t.csv", b"a,b,y\n" + b"1,,3\n2,2,4\n3,4,5\n4,,6\n5,,7\n" * 5,
                ["--missing", "refuse"], r"b: row \d: the value is missing"),
    "fewer values than names": ("t.csv", b"a,b,y\n" + b"1,2\n2,3\n" * 9, [], "of 0 rows 0"),
    "no names": ("t.csv", b"0.5,1.5,Oslo\n2,3,Bonn\n4,5,Oslo\n", [], "line must name the columns"),
    "no target": ("t.csv", b'a,b c,"d, e"\n1,2,3\n', ["--target", ""],
                  """choose the column to predict with --target: a, 'b c', '"d, e"'$"""),
    "wrong target": ("t.csv", b"a,b,z\n1,2,3\n", [], "no column 'y', only a, b, z$"),
    "constant target": ("t.csv", b"a,y\n" + b"1,3\n2,3\n" * 5, [],
                        "a target is the same in all training rows"),
    "constant features": ("t.csv", b"a,y\n1,2\n1,3\n1,4\n", [], "a: left out: always the same"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_cannot_be_meant_is_one_sentence(case, here):
    name, content, flags, message = REFUSED[case]
    (here / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:  # some with a list below
        read(here / name, *flags)
    assert f"{here / name}" in str(raised.value)
    assert [path.name for path in here.iterdir()] == [name]


def test_a_folder_of_unlike_tables_is_refused(here):
    for name, table in (("a.csv", frame()), ("b.csv", frame().drop(columns="city"))):
        FORMS["commas.csv"](table, name)
    with refused(r"b\.csv has other columns than a\.csv"):
        read(here)
    (here / "b.csv").rename("b.json")
    with refused("must be of one kind"):
        read(here)


def test_a_folder_is_read_whole_but_for_copies_and_its_plan_counts(here, capsys):
    copies = [".ipynb_checkpoints/a.csv", "._a.csv", "_temporary/0/a.csv", "_delta_log/0.json"]
    for name in ("b.csv", "a.csv/part.csv", "_k=2/a.csv", *copies):
        (here / name).parent.mkdir(exist_ok=True, parents=True)
        (here / name).write_bytes(rows("k", ["1.180", 2, "NA"]))
    train, test, metadata = read(here, "--missing", "drop")
    assert len(train) + len(test) == 60
    plan, doubt = metadata["plan"], "whole or with three decimals: is . a thousands separator?"
    assert plan["data"].endswith(" (a.csv, part.csv, b.csv), 30 rows dropped: no value: 30 'NA'")
    assert plan["columns"] == f"k (number, {doubt})" and plan["targets"] == "y"
    assert planned(here)["columns"] == f"k (number, filled in where missing: 30 'NA', {doubt})"
    assert capsys.readouterr().err.count(": 4 hidden files not read, such as .") == 1
    for known in ("1.18", "1180", "0.125"):
        table = rows("n", [1, 2]).replace(b",0\n", f",{known}\n".encode())
        assert planned(table)["columns"] == "numbers"


def test_means_come_from_the_training_rows_alone():
    table = frame(400).drop(columns="garden")
    table.loc[::7, "area"] = None
    table.loc[::11, "city"] = None
    train, test, before = read(table)
    index = test.tensors[2].numpy()
    table.loc[index, ["area", "y"]] += 12345
    table.loc[index, "city"] += " on Mars"
    again, test_again, after = read(table)
    features = train.tensors[0]
    assert before == after and torch.equal(features, again.tensors[0])
    area, city = before["columns"]
    rest = table.drop(index=index)
    assert area["fill"] == pytest.approx(rest.area.mean(), rel=1e-12)
    assert city["categories"] == ["Köln", "Orléans", "Rome"]
    assert city["fill"] == rest.city.value_counts().index[0]
    assert features.mean(0).abs().max() < 1e-5
    assert (features.std(0, correction=0) - 1).abs().max() < 1e-5
    # An unknown category is none of the known ones.
    raw = test_again.tensors[0].double() * torch.tensor(after["feature_std"])
    cities = (raw + torch.tensor(after["feature_mean"]))[np.array(table.city[index].notna()), 1:]
    assert len(cities) and cities.abs().max() < 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of columns of every kind, from a Parquet file."""
    path = tmp_path_factory.mktemp("tables") / "t.parquet"
    frame(200).to_parquet(path)
    return untrained(read(path)[2])


def test_a_table_of_the_hub_is_named_in_the_plan(monkeypatch):
    monkeypatch.chdir("/")
    rows = datasets.Dataset.from_pandas(frame())
    monkeypatch.setattr(datasets, "load_dataset", lambda name: rows)
    _, _, metadata = read("someone/houses")
    assert (metadata["plan"]["data"], metadata["features"]) == ("houses", ALL)
    assert "data" not in metadata  # a resume compares the metadata, and the name may change


@pytest.mark.parametrize("name", ["t.parquet", "lines.jsonl", "commas.csv"])
def test_what_is_no_feature_comes_back_as_it_was_written(name, model):
    ids = ["1152921504606846977", "", "3"]
    table = frame(3).assign(id=pd.array([2**60 + 1, None, 3], "Int64"), note=["NA", "null", "x"])
    FORMS[name](table, name)
    written = predicted(model, Path(name), dtype=str, keep_default_na=False)
    assert [*written.id] == ids and [*written.note] == ["NA", "null", "x"]


@pytest.mark.parametrize(
    "name, texts", [("commas.csv", ["TRUE", "FALSE", "unknown"]), ("lines.jsonl", [1.0, 2.0, 2.5])]
)
def test_a_category_is_known_again_in_a_table_that_lacks_another(name, texts):
    table = pd.DataFrame({"k": texts * 8, "y": [1.0, 2, 3] * 8})
    FORMS[name](table, name)
    _, _, metadata = read(name, "--categorical", "k")
    assert metadata["features"][:2] in (["k=False", "k=True"], ["k=1", "k=2"])
    FORMS[name](table[table.k != texts[2]], name)
    assert "not in the training rows" not in untrained(metadata).predict_file(Path(name))


def test_two_tables_with_one_answer_file_keep_the_first(model, here):
    FORMS["commas.csv"](frame(5), here / "t.csv")
    FORMS["t.parquet"](frame(9), "t.parquet")
    assert len(predicted(model, here / "t.csv")) == 5
    with refused("has just been written for another table"):
        model.predict_file(Path("t.parquet"))
    assert len(predicted(model, here / "t.csv")) == 5  # once more is allowed


def test_what_a_prediction_cannot_know_is_said(model, here):
    path = here / "t.csv"
    frame(5).assign(city=["Mars", "Venus"] * 2 + ["Mars"]).to_csv(path, index=False)
    said = "(column 'city': 'Mars', 'Venus' not in the training rows)"
    assert model.predict_file(path).splitlines()[0] == f"{here / 't_predictions.csv'}  {said}"
    path.write_bytes(text(encoding="cp1252"))
    with refused("--encoding cp1252"):
        model.predict_file(path)
    assert "not in the training rows" not in model.predict_file(path, encoding="cp1252")
    for change, sentence in (
        ({"predicted_y": 1}, "has a column 'predicted_y' already"),
        ({"area": "$1"}, r"no row can be predicted: row 1 \(column 'area': '\$1' is not"),
    ):
        frame(5).assign(**change).to_csv(path, index=False)
        with refused(sentence):
            model.predict_file(path)


def test_a_row_that_cannot_be_predicted_is_named_and_left_empty(model):
    path = Path("t.csv")
    frame(5).to_csv(path, index=False)
    whole = predicted(model, path).predicted_y
    table = frame(5).astype({"area": object})
    table.loc[[0, 2, 3], "area"] = [1e300, "NA", "$1"]
    table.to_csv(path, index=False)
    said = model.predict_file(path).splitlines()[1]
    assert said.startswith("no prediction for row 1 (column 'area': '1e+300' is not a number")
    assert "row 3 (column 'area': the value is missing), row 4" in said and "--" not in said
    written = predicted(model, path).predicted_y
    assert written.isna().tolist() == [True, False, True, True, False]
    assert written[[1, 4]].tolist() == whole[[1, 4]].tolist()


def test_dates_are_days_and_other_dates_are_refused_in_a_new_table():
    days = pd.date_range("2019-12-31", periods=30)
    for form in ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y-%m-%d"):
        table = pd.DataFrame({"day": days.strftime(form), "y": range(30)})
        _, _, metadata = read(table, "--test-fraction", 0)
        assert metadata["feature_range"][0] == [18261, 18290]
    (column,) = [Column(**column) for column in metadata["columns"]]
    assert column.days and "days since 1970" in metadata["plan"]["columns"]
    written = ["1970-01-02", "2020-01-01T12:00:00+02:00", "1500-01-01", "9999-12-31", "31/1/2020"]
    values, problems = encode(pd.DataFrame({"day": written}), [column])
    assert values[:4, 0].tolist() == [1.0, 18262 + 10 / 24, -171664.0, 2932896.0]
    assert [row for row, *_ in problems] == [4]


def test_all_columns_are_judged_at_once_and_the_command_below_works(here, monkeypatch):
    path = here / "t.csv"
    table = frame(60).assign(far=["12:10", "3:10"] * 30, note=[f"no {n}" for n in range(60)])
    table["year"] = [*range(56), *["?", "unknown"] * 2]
    table = table.astype({"area": object}).rename(columns={"city": "city, town"})
    table.loc[5, "area"] = "about 30"
    table.loc[[7, 8], "y"] = None
    table.to_csv(path, index=False)
    typed = ["train_regression.py", "--data", str(path), "--target", "y"]
    monkeypatch.setattr("sys.argv", typed)
    with pytest.raises(UsageError) as raised:
        load(*typed[1:])
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:3]] == ["area", "far"]
    assert "  note: free text" in lines  # what its words say is only known of a table that works
    assert "row 6: 'about 30' is not a number" in lines[1] and "row 1: '12:10'" in lines[2]
    assert "  year: number, filled in where missing: 2 '?', 2 'unknown'" in lines
    assert lines[-2].endswith("are kinds, not amounts, add --categorical area,far")
    command = shlex.split(lines[-1].removeprefix("This works: python train_regression.py "))
    _, _, metadata = load(*command)
    assert {column["name"] for column in metadata["columns"]} == {"city, town", "garden", "year"}
    assert metadata["plan"]["data"] == "t.csv, 2 rows dropped: no target: 2 empty"


def test_the_folder_at_hand_is_predicted_and_its_first_rows_shown_in_79_columns(
    model, here, monkeypatch
):
    (here / "new").mkdir()
    table = frame(9).drop(columns="y").assign(note="said at length " * 9)
    table = table.assign(**{f"a long name of a column {i}": i / 7 for i in range(40)})
    table.to_csv("new/t.csv", index=False)
    monkeypatch.chdir("new")
    _, *shown = model.predict_file(Path()).splitlines()
    written = pd.read_csv("../new_predictions.csv").predicted_y
    for value in written[:5]:
        assert sum(line.rstrip(" \\").endswith(f" {value:.6g}") for line in shown) == 1
    assert f"{written[5]:.6g}" not in "".join(shown)
    assert max(len(line) for line in shown) <= 79


GERMAN = "Stadt;Fl\u00e4che;y\n" + "K\u00f6ln;-1,5;2\nBonn;2,25;3\nTrier;1.234,5;4\n" * 5
# What a table holds, the encoding and the mark of its file, the ends of its lines, and its flags.
WRITTEN = {
    "Excel in German": (GERMAN, "utf-8", b"\xef\xbb\xbf", "\r\n", []),
    "Excel in German, years ago": (GERMAN, "cp1252", b"", "\r\n", ["--encoding", "cp1252"]),
    "Unicode text of Excel": (GERMAN.replace(";", "\t"), "utf-16-le", b"\xff\xfe", "\r\n", []),
    "big endian": (GERMAN, "utf-16-be", b"\xfe\xff", "\n", []),
    "no mark": (GERMAN, "utf-16-le", b"", "\n", ["--encoding", "utf-16"]),
    "a line for Excel": ("sep=;\n" + GERMAN, "utf-8", b"", "\n", []),
    "old Macs": (GERMAN, "mac_roman", b"", "\r", ["--encoding", "mac_roman"]),
    "points": (GERMAN.replace(",", "."), "utf-8", b"", "\n", ["--features", "Stadt"]),
    "whole numbers": (re.sub("[.,]", "", GERMAN), "utf-8", b"", "\n", ["--features", "Stadt"]),
    "colons": (GERMAN.replace(";", ":"), "utf-8", b"", "\n", ["--separator", ":"]),
    "a pattern": (GERMAN.replace(";", " "), "utf-8", b"", "\n", ["--separator", r"\s+"]),
    "commas, quoted": (re.sub(r"([-\d.]+,\d+)", r'"\1"', GERMAN).replace(";", ","), "utf-8", b"",
                       "\n", []),
    "a name of two lines": (GERMAN.replace("Fl\u00e4che", '"Fl\u00e4\nche"'), "utf-8", b"", "\r\n",
                            []),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN)
def test_a_text_file_comes_back_in_the_form_in_which_it_came(case):
    content, encoding, mark, end, flags = WRITTEN[case]
    inner, content = content, content.replace("\n", end).replace(f"{end}che", "\nche")
    Path("t.csv").write_bytes(mark + content.encode(encoding))
    model = untrained(read("t.csv", *flags)[2])
    model.predict_file(Path("t.csv"))
    written = Path("t_predictions.csv").read_bytes()
    assert written.startswith(mark)
    lines = written[len(mark) :].decode(encoding).split(end)
    assert inner.count("\n") == len(lines) - 1 + ("\nche" in inner) and not lines[-1]
    numbers = []
    for came, back in zip(content.split(end), lines, strict=True):
        if came.startswith("sep="):
            assert back == came
        elif came:
            assert back.startswith(came)  # the cells of the user, as they were written
            numbers.append(back[len(came) :])
    mark_of_decimals = "." if case == "points" else ","
    quote = '"?' if case == "commas, quoted" else ""
    separator = re.escape(numbers[0][0])
    for number in numbers[1:]:
        assert re.fullmatch(
            rf"{separator}{quote}-?\d+{re.escape(mark_of_decimals)}\d+{quote}", number
        )


def test_other_files_come_back_as_csv_and_letters_that_do_not_fit_in_utf_8(model):
    frame(5).assign(note="2,5").to_json("u.json")
    Path("parts").mkdir()
    frame(5).to_csv("parts/a.csv", sep=";", index=False)
    frame(5).to_csv("parts/b.csv", index=False)
    for name in ("u.json", "parts"):
        model.predict_file(Path(name))
        head, first = Path(f"{Path(name).stem}_predictions.csv").read_bytes().split(b"\n")[:2]
        assert head.endswith(b",predicted_y") and re.search(rb",-?\d+\.\d+\Z", first)
    model.metadata["targets"] = ["\u0142"]
    Path("t.csv").write_bytes(text(";", "cp1252"))
    said = model.predict_file(Path("t.csv"), encoding="cp1252")
    assert "\nwritten in UTF-8, as cp1252 has no '\u0142'\n" in said
    assert Path("t_predictions.csv").read_text("utf-8-sig").startswith("area;city;garden;y;predict")


READ_AS = {
    "utf-8-sig": "read as UTF-8, not as cp1252: its byte order mark says so",
    "utf-16": "read as UTF-16, not as cp1252: its byte order mark says so",
    "utf-8": "read as UTF-8, which it is, not as cp1252",
    "cp1252": "",
}


@pytest.mark.parametrize("encoding", READ_AS)
def test_a_file_in_another_encoding_than_the_given_one_is_read_as_what_it_is(encoding):
    Path("t.csv").write_bytes(text(encoding="cp1252"))
    Path("new.csv").write_bytes(text(encoding=encoding))
    model = untrained(read("t.csv", "--encoding", "cp1252")[2])
    said = model.predict_file(Path("new.csv"))
    assert "not in the training rows" not in said
    assert (f"\nnew.csv {READ_AS[encoding]}\n" in said) == bool(READ_AS[encoding])
    assert (" read as " in said) == bool(READ_AS[encoding])
    _, test, metadata = read("t.csv", "--encoding", "cp1252", "--eval-data", "new.csv")
    assert metadata["features"] == ALL and test.tensors[0][:, 1:4].ne(0).any(0).all()
    line = metadata["plan"].get("encoding", "")
    assert line == (f"new.csv {READ_AS[encoding]}" if READ_AS[encoding] else "")


def test_a_file_is_looked_at_once_for_its_encoding(monkeypatch):
    paths = []
    find = frames.find_encoding
    monkeypatch.setattr(frames, "find_encoding", lambda *a: [paths.append(a[0]), find(*a)][1])
    for name in ("t.csv", "new.csv"):
        Path(name).write_bytes(text(";", encoding="cp1252"))
    model = untrained(read("t.csv", "--encoding", "cp1252", "--eval-data", "new.csv")[2])
    model.predict_file(Path("new.csv"))
    assert paths == ["t.csv", "new.csv", "new.csv"]


def test_utf_8_is_told_from_utf_16_and_from_text_that_is_ascii_alone():
    for content, given, said in (
        (text(), "utf-16", "utf-8"),
        (b"a,b\n1,2\n", "utf-16", "utf-8"),
        ("a,\u4e2d\n".encode("utf-16-le"), "utf-16", "utf-16-le"),
        (b"a,b\n1,2\n", "cp1252", "cp1252"),
        ("a,\u65e5\n".encode("iso2022_jp"), "iso2022_jp", "iso2022_jp"),
        ("\u4e2d\u6587\n".encode("gbk"), "gbk", "gbk"),
        ("\u4e2d\u6587\n".encode(), "gbk", "utf-8"),
        (b"", "utf-16", "utf-8"),
        ("\ufeffa".encode("utf-32"), None, "utf-32-le"),
    ):
        Path("t.txt").write_bytes(content)
        assert find_encoding("t.txt", given).writer == said, (content, given)


@posix_only  # links
def test_predictions_are_safe_to_open_in_a_spreadsheet(model):
    risky = ["=1+1", "\r=1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", " =1", "\n=1"]
    plain = ["-5", "+4.5", "-1e3", "-0,5", "-1.234,5", "a=b", "", "1-2", "me@home", "two\nlines"]
    table = frame(len(risky) + len(plain)).drop(columns="y").assign(**{"=note": risky + plain})
    table.to_json("t.json")  # holds what no CSV file would
    secret = Path("secret.txt")
    secret.write_text("secret")
    Path("t_predictions.csv").symlink_to(secret)
    written = predicted(model, Path("t.json"), keep_default_na=False)
    assert secret.read_text() == "secret"  # a link is replaced, not written through
    assert [*written["'=note"]] == [f"'{value}".replace("\r", "\n") for value in risky] + plain


def test_a_date_is_read_in_many_forms_and_has_the_phases_that_vary():
    days = pd.date_range("2019-12-30 06:00", periods=30, freq="27h")
    forms = ["%b %d %Y %H:%M", "%d %B %Y %H:%M", "%a, %d %b %Y %H:%M:%S +0000", "%d.%m.%Y %H:%M"]
    written = [days.strftime(form) for form in forms]
    written += [days.as_unit("s").astype(int), days.as_unit("ms").astype(int)]
    for texts in written:
        table = pd.DataFrame({"when": texts, "y": range(30)})
        train, _, metadata = read(table, "--test-fraction", 0)
        (column,) = metadata["columns"]
        assert column["cycles"] == ["hour", "weekday", "day of the year"]
        numbers = train.tensors[0].double() * torch.tensor(metadata["feature_std"])
        numbers += torch.tensor(metadata["feature_mean"])
        phases = [1, 0, np.sin(np.pi / 14), np.cos(np.pi / 14)]
        assert numbers[0, :5].tolist() == pytest.approx([18260.25, *phases], abs=1e-3)
    monthly = pd.date_range("2000-01-03", periods=30, freq="28D").strftime("%b %d %Y")
    _, _, metadata = read(pd.DataFrame({"when": monthly, "y": range(30)}))
    assert metadata["columns"][0]["cycles"] == ["day of the year"]  # all of them are Mondays
    quarters = [f"2020Q{n % 4 + 1}x{n}" for n in range(30)]
    weeks = [f"2020-W{n:02}" for n in range(30)]
    table = pd.DataFrame({"week": weeks, "quarter": quarters, "a": range(30), "y": range(30)})
    said = "week (left out: dates in a form that is not read, so write 2020-01-31)"
    assert said in planned(table)["columns"]


def test_what_holds_mostly_texts_is_a_category_and_what_hardly_repeats_is_left_out():
    titles = [*["film a", "film b", "film c", "300"] * 13, "12", "film a"]
    table = pd.DataFrame({"title": titles, "n": range(54), "y": range(54)})
    table["address"] = [f"{n} Main Street" for n in range(50)] + ["1 Main Street"] * 4
    table["answer"] = ["1. Yes", "2. No"] * 27  # the unit of no amount
    table["rownames"], table["index"] = range(7, 61), range(1, 55)
    _, _, metadata = read(table)
    assert metadata["left_out"] == ["address", "rownames", "index"]
    kinds = {column["name"]: column["categories"] for column in metadata["columns"]}
    assert kinds["title"][-3:] == ["film a", "film b", "film c"] and kinds["n"] is None
    assert kinds["answer"] == ["1. Yes", "2. No"]
    assert "with 14 cells that read as numbers" in metadata["plan"]["columns"]
    assert "rownames (left out: an index)" in metadata["plan"]["columns"]
    _, _, metadata = read(table, "--features", "rownames,n")
    assert metadata["features"] == ["rownames", "n"]  # named, so wanted
    narrow = pd.DataFrame({f"x{n}": np.random.default_rng(n).normal(size=20) for n in range(30)})
    assert "16 to train on for 30 features" in planned(narrow.assign(y=range(20)))["few rows"]


def test_one_value_has_one_text_in_every_file_and_long_ids_stay_apart():
    table = pd.DataFrame({"code": [1.0, 2, 2.5] * 10, "city": ["Oslo", "Oslo ", "Bonn"] * 10})
    table["id"] = 1582218195625938945 + np.arange(30) % 3
    table["n"] = table["y"] = np.arange(30.0)
    known = []
    for name in ("commas.csv", "t.parquet"):
        FORMS[name](table, name)
        known.append(read(name, "--categorical", "code")[2]["features"])
    assert known[0] == known[1]
    assert known[0][:5] == ["code=1", "code=2", "code=2.5", "city=Bonn", "city=Oslo"]
    assert known[0][5:8] == [f"id={number}" for number in sorted({*table.id})]


def test_a_line_of_whole_numbers_above_a_table_is_asked_about():
    plan = planned(b"2019,2020\n" + b"1,2\n2,3\n4,5\n" * 9, "--target", "2020")
    assert plan["names"] == "the first line is 2019, 2020: if it is data, add a line of names above"


def test_a_sheet_of_excel_is_a_table():
    pytest.importorskip("openpyxl")
    frame().to_excel("t.xlsx", index=False)
    assert read("t.xlsx")[2]["features"] == ALL


def test_equal_rows_are_in_one_part_and_those_that_must_repeat_are_counted():
    random = np.random.default_rng(3)
    once = pd.DataFrame(random.normal(size=(40, 4))).add_prefix("x").assign(y=range(40))
    pd.concat([once] * 4).to_csv("t.csv", index=False)
    flags = "--data t.csv --target y --model tabm"
    made = train_regression.load_data(parse(train_regression.Config, flags.split()))
    parts = [{*map(tuple, part.tensors[0].tolist())} for part in made[:2]]
    assert not parts[0] & parts[1]
    assert sum(map(len, parts)) == 40 and len(made.evaluated) in range(16, 60)
    features, _, fold = made.train.tensors
    pairs = {(*row, n) for row, n in zip(features.tolist(), fold.tolist(), strict=True)}
    assert len(pairs) == len(parts[0]) and {*fold.tolist()} == {0, 1, 2, 3}
    assert made.metadata["plan"]["twice"] == "120 of 160 rows repeat another: on one side"
    # A few kinds of rows, each of which occurs often: they are no copies.
    kinds = pd.DataFrame({"sex": ["f", "m"] * 40, "class": [1, 2, 3, 3] * 20, "y": [0, 1] * 40})
    train, test, metadata = read(kinds)
    assert (len(train), len(test)) == (64, 16)
    assert metadata["plan"]["twice"] == "16 of 16 rows to evaluate on are also trained on"


def test_a_target_of_texts_is_answered_with_the_command_for_classes():
    with pytest.raises(UsageError) as raised:
        read(frame(), "--target", "city", "--features", "area")
    command = str(raised.value).partition("For the class of a row: ")[2]
    config = parse(table_classes.Config, shlex.split(command)[2:])
    made = table_classes.load_data(config)
    assert made.metadata["classes"] == ["Köln", "Orléans", "Rome"]
    assert made.metadata["features"] == ["area"]


AMOUNTS = {
    "$1,721 $850 -$3.5": ("$", [1721, 850, -3.5]),
    "40% 3%": ("%", [40, 3]),
    "1.234,56|12,00|850 EUR|7.000 EUR": None,
    "1.234,56 EUR|12,00 EUR|850 EUR|7.000 EUR": ("EUR", [1234.56, 12, 850, 7000]),
    "1\u202f234,5 \u20ac|\u20ac3": ("\u20ac", [1234.5, 3]),
    "1'234.50 CHF|CHF 20": ("CHF", [1234.5, 20]),
    "Rs. 1,23,456|Rs 20": ("Rs", [123456, 20]),
    "R$ 1.234,56|R$5": ("R$", [1234.56, 5]),
    "(1,200) 300": ("", [-1200, 300]),
    "2,5 3,25": ("", [2.5, 3.25]),
    "1,234.50 7": ("", [1234.5, 7]),
    "1,729 EUR|0,729 EUR": ("EUR", [1.729, 0.729]),
    "1.234.567 3": ("", [1234567, 3]),
    "10 m2|17 m2": ("m2", [10, 17]),
    "36 months|1 month": ("month", [36, 1]),
    "\u22125 \u00b0C|3 \u00b0C": ("\u00b0C", [-5, 3]),
    "12 13.5 -1": None,
    "10:30 9:15": None,
    "5-10 3-4": None,
    "01.02.2020 03.02.2020": None,
    "A1 A2": None,
    "555-1234 555-9876": None,
    "1. Yes|2. No": None,
    "1,2,3 4,5": None,
    "1_200 1_300": None,
}


@pytest.mark.parametrize("cells", AMOUNTS)
def test_an_amount_is_the_number_that_is_written(cells):
    cells, expected = cells.split("|" if "|" in cells else " "), AMOUNTS[cells]
    form = find_form(cells)
    assert (form and form.unit) == (expected and expected[0])
    if form is not None:
        read = [read_amount(cell, form.unit, form.decimal) for cell in cells]
        assert read == expected[1]


def test_amounts_are_trained_on_and_predicted_and_the_plan_gives_an_example(model):
    amounts = [f"${1000 + 50 * n:,}" for n in range(29)]
    table = pd.DataFrame({"rent": [*amounts, "n/a"], "share": [f"{n % 7} %" for n in range(30)]})
    table["y"] = [f"{n},5 EUR" for n in range(30)]
    _, _, metadata = read(table)
    assert metadata["plan"]["columns"] == (
        "rent (number, '$1,000' is 1000, filled in where missing: 1 'n/a'), "
        "share (number, '0 %' is 0), y (number, '10,5 EUR' is 10.5)"
    )
    assert 20 < metadata["target_range"][0][1] <= 29.5
    model = untrained(metadata)
    assert predicted(model, Path("t.csv")).predicted_y.notna().all()
    Path("new.csv").write_text('rent,share\n"$1,250",3 %\n1250,3 %\n"$1,250",0.03\n')
    said = model.predict_file(Path("new.csv"))
    assert (
        "no prediction for row 2 (column 'rent': '1250' is not a number like $1,000), row 3" in said
    )
    frame = pd.DataFrame({"rent": [1250.0, 1250.0], "share": ["3 %", 0.03]})
    frame.astype({"share": object}).to_json("other.json", orient="records")
    said = model.predict_file(Path("other.json"))  # a number needs no currency, but 0.03 may be 3 %
    assert "no prediction for row 2 (column 'share': '0.03' is not a number like 0 %)" in said


FIXED, PROOF = [f"{267 + n},{n}77" for n in range(1, 10)], [f"{n}9,21" for n in range(1, 10)]
ROUND, MIXED = [f"{n}.500" for n in range(1, 10)], ["850", "1.180", "2.340"] * 3
ENGLISH = [f"{n}.25" for n in range(1, 10)]
COMMA, POINT = "is , a thousands separator?", "or is . the decimal mark?"
THOUSAND = "or is , the decimal mark?"
# Separator, columns, the number in y that is nearest to 0, and the end of a question about y.
OPEN = {
    "other columns prove a comma": (";", {"a": PROOF, "y": FIXED}, 268.177, ""),
    "they do between commas": (",", {"a": PROOF, "y": FIXED}, 268.177, ""),
    "they do between tabs": ("\t", {"a": PROOF, "y": FIXED}, 268.177, ""),
    "a point before thousands": (";", {"a": PROOF, "y": ROUND}, 1500, ""),
    "a point before some thousands": (";", {"a": PROOF, "y": MIXED}, 850, ""),
    "below zero, in euros": (
        ";", {"a": [f"{c} EUR" for c in PROOF], "y": [f"-{c} EUR" for c in FIXED]}, -268.177, ""),
    "other columns prove a point": (";", {"a": ENGLISH, "y": FIXED}, 268177, ""),
    "exponents prove a point": (";", {"a": [f"{c}0e+01" for c in ENGLISH], "y": FIXED}, 268177,
                                ""),
    "blanks and apostrophes prove it": (
        ";", {"a": ["1 234,567", "2 345,678", "1,2"] * 3, "y": FIXED}, 268.177, ""),
    "Indian groups prove it": (
        ";", {"a": ["1,23,456", "12,345", "1,234"] * 3, "y": FIXED}, 268177, ""),
    "dollars prove themselves": (";", {"a": PROOF, "y": [f"${c}" for c in FIXED]}, 268177, ""),
    "dates say nothing": (
        ";", {name: [f"{n}.12.2020" for n in range(1, 10)] for name in "ab"} | {"y": FIXED},
        268.177, COMMA),
    "columns of both": (";", {"a": PROOF, "b": PROOF, "c": ENGLISH, "y": FIXED}, 268.177, COMMA),
    "a semicolon alone": (";", {"a": range(9), "y": FIXED}, 268.177, COMMA),
    "a semicolon, of two open columns": (";", {"a": ROUND, "y": FIXED}, 268.177, COMMA),
    "a semicolon and some thousands": (";", {"a": range(9), "y": MIXED}, 850, POINT),
    "a semicolon and three decimals": (
        ";", {"a": ROUND, "y": ROUND}, 1.5, "with three decimals: is . a thousands separator?"),
    "nothing": (",", {"a": range(9), "y": FIXED}, 268177, THOUSAND),
    "nothing, in English": (",", {"a": range(9), "y": ROUND}, 1.5, ""),
    "nothing, some thousands": (
        ",", {"a": range(9), "y": MIXED}, 1.18,
        "whole or with three decimals: is . a thousands separator?"),
    "years and codes are no numbers with marks": (
        ";", {"a": range(2000, 2009), "b": ["007", "008", "009"] * 3, "y": FIXED}, 268.177, COMMA),
}  # fmt: skip


@pytest.mark.parametrize("case", OPEN)
def test_other_columns_and_then_a_semicolon_tell_the_mark_that_a_column_leaves_open(case):
    separator, columns, least, asked = OPEN[case]
    content = pd.DataFrame(columns).assign(n=range(9)).to_csv(index=False, sep=separator)
    _, _, metadata = read(content.encode(), "--test-fraction", "0")
    assert min(metadata["target_range"][0], key=abs) == pytest.approx(least)
    said = re.search(r"\by \((.*)\)", metadata["plan"]["columns"] + ", y ()")[1]
    assert said.partition(")")[0].endswith(asked) and ("?" in said) == bool(asked)


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_a_mark_that_others_tell_is_saved_with_its_column_and_all_columns_tell(kind):
    table = pd.DataFrame({"a": PROOF, "b": ROUND, "n": range(9), "y": FIXED})
    path = Path(f"t.{kind}")
    if kind == "csv":
        table.to_csv(path, sep="\t", index=False)
    elif kind == "json":
        table.to_json(path, orient="records")
    else:
        table.to_parquet(path)
    metadata = read(path)[2]
    new = pd.DataFrame({"a": ["1,5"], "b": ["2.500"], "n": [0]})
    inputs, problems = encode(new, [Column(**column) for column in metadata["columns"]])
    assert inputs.tolist() == [[1.5, 2500, 0]] and not problems
    assert read(path, "--features", "n")[2]["target_range"][0][1] < 300


NUMBERS = [f"{n}.126" for n in range(1, 10)]
# What is trained on, the rows to predict, what a prediction has, between which separators.
BACK = {
    "three decimals with points": (";", {"a": NUMBERS, "y": NUMBERS}, ["a"], "."),
    "the target alone has points": (";", {"a": range(9), "y": NUMBERS}, ["a"], "."),
    "the target alone has commas": ("\t", {"a": range(9), "y": PROOF}, ["a"], ","),
    "points between semicolons": (";", {"a": ENGLISH, "y": range(9)}, ["a"], "."),
    "thousands beside points": (";", {"a": FIXED, "b": ENGLISH, "y": range(9)}, ["a", "b"], "."),
    "three decimals with commas": (";", {"a": FIXED, "b": PROOF, "y": FIXED}, ["a", "b"], ","),
    "commas between tabs": ("\t", {"a": FIXED, "b": PROOF, "y": FIXED}, ["a", "b"], ","),
    "no decimals between commas": (",", {"a": range(9), "y": range(9)}, ["a"], "."),
    "a unit without decimals": (";", {"a": [f"{n} months" for n in range(9)], "y": range(9)}, ["a"],
                                ","),
}  # fmt: skip


@pytest.mark.parametrize("case", BACK)
def test_predictions_have_the_decimal_mark_with_which_the_table_was_read(case):
    separator, columns, features, mark = BACK[case]
    table = pd.DataFrame(columns)
    table["n"] = [n % 4 for n in range(9)]
    metadata = read(table.to_csv(index=False, sep=separator).encode(), "--test-fraction", "0")[2]
    table = table[[*features, "n"]]
    table.to_csv("new.csv", index=False, sep=separator)
    untrained(metadata).predict_file(Path("new.csv"))
    first = Path("new_predictions.csv").read_text().splitlines()[1]
    assert re.fullmatch(rf"-?\d+{re.escape(mark)}\d+", first.rsplit(separator, 1)[1])


@pytest.mark.parametrize(
    "code, others, asked",
    [
        ("-999", [f"{n / 7:.2f}" for n in range(28)], "is -999 in 2 rows of a"),
        ("-999.00", [f"{n / 7:.2f}" for n in range(28)], "is -999 in 2 rows of a"),
        ("99", [n % 5 + 1 for n in range(28)], "is 99 in 2 rows of a"),
        ("32767", [*range(28)], "is 32767 in 2 rows of a"),
        ("9999-12-31", [f"2020-01-{n + 1:02}" for n in range(28)], "is 9999-12-31 in 2 rows of a"),
        ("$-999", [f"${n}" for n in range(28)], "is $-999 in 2 rows of a"),
        ("99", [*range(60, 88)], None),
        ("900", [*range(28)], None),
        ("0", [*range(100, 128)], None),
    ],
)
def test_a_number_far_off_that_reads_as_a_code_is_asked_about(code, others, asked):
    table = pd.DataFrame({"a": [*others, code, code], "n": range(30), "y": range(30)})
    plan = planned(table)
    assert plan.get("asked", "").partition(" a missing value?")[0] == (asked or "")
    if asked:
        flag = re.search("--missing-values=(.*)", plan["asked"])[0]
        plan = planned(table, shlex.split(flag)[0])
        assert "asked" not in plan and plan["missing"].endswith(": 2 cells of a")
        assert "filled in where missing: 2 empty" in plan["columns"]


PRICES = [round(1.37 * n, 2) for n in range(50)]


@pytest.mark.parametrize(
    "cells, code",
    [
        (PRICES + [-1] * 4, "-1"),
        (PRICES + [0] * 20 + [-1.0] * 4, "-1"),
        ([f"${amount}" for amount in PRICES] + ["$-1"] * 4, "$-1"),
        ([*range(300)] + [-1] * 4, "-1"),
        ([*range(30)] * 2 + [-1] * 8, "-1"),
        (PRICES + [-9] * 4, "-9"),
        (PRICES + [99] * 4, "99"),
        ([*PRICES, -1], None),
        (PRICES + [-1] * 4 + [-0.5], None),
        ([n % 3 - 1 for n in range(60)], None),
        ([n % 12 - 1 for n in range(60)], None),
        ([-1] * 64 + [0] * 32 + [1] * 16 + [*range(2, 12)], None),
        (PRICES + [72] * 4, None),
        ([0] * 90 + [1] * 9 + [-1] * 30, None),
    ],
    ids=str,
)
def test_a_number_outside_all_others_that_is_too_frequent_is_asked_about(cells, code):
    signs = [1 if n % 2 else -1 for n in range(len(cells))]
    plan = planned(pd.DataFrame({"y": cells, "n": range(len(cells)), "m": signs}))
    which = f"is {code} in {cells.count(cells[-1])} rows of y a missing value?"
    if not code:
        assert "asked" not in plan
    else:
        assert plan["asked"].startswith(f"{which} Then add --missing-values=")
    if code == "-1":
        assert plan["asked"].endswith(f"=-1 (it empties these cells too: {signs.count(-1)} of m)")


def test_a_target_that_is_a_code_is_dropped_once_it_is_said_and_new_rows_follow():
    table = pd.DataFrame({"a": [*range(28), -999, 5], "y": [*range(29), -999]})
    _, _, metadata = read(pd.concat([table] * 2), "--missing-values=-999")
    assert metadata["plan"]["data"] == "t.csv, 2 rows dropped: no target: 2 empty"
    assert metadata["feature_range"][0][0] >= 0
    Path("new.csv").write_text("a\n-999\n3\n")
    assert predicted(untrained(metadata), Path("new.csv")).predicted_y.notna().all()


NUMBERS = [f"{n / 7:.2f}" for n in range(20)]


@pytest.mark.parametrize("missing", [None, "drop", "refuse"])
@pytest.mark.parametrize(
    "words, others, name",
    [
        *((words, NUMBERS, "a") for words in (["?"], ["--"], ["-"], ["?", "no answer"])),
        (["n.a., none"], NUMBERS, "a"),
        (["?"], [f"${n}" for n in range(100, 140)], "a"),
        (["?"], [f"2020-01-{n + 1:02}" for n in range(20)], "a"),
        (["?"], NUMBERS, "y"),
        (["?", "??", "unknown"], ["1", "2"] * 10, "y"),
    ],
    ids=str,
)
def test_a_refusal_of_words_among_numbers_names_the_flag_that_reads_them(
    words, others, name, missing
):
    cells = [*others, *(words * 5)]
    table = pd.DataFrame({"a": range(len(cells)), "n": range(len(cells)), "y": range(len(cells))})
    table[name] = cells
    flags = ["--missing", missing] if missing else []
    with pytest.raises(UsageError) as raised:
        read(table, "--missing-values=-999", *flags)
    which = " or ".join(map(repr, words))
    said = re.search(
        f"If {re.escape(which)} means a missing value, add (.*?)(\\. For the|$)",
        str(raised.value),
        re.MULTILINE,
    )[1]
    metadata = read(table, *flags, *shlex.split(said))[2]
    assert {"a", "n"} <= {*metadata["features"]} and "-999" in metadata["plan"]["missing"]


@pytest.mark.parametrize("words", [["x7"], ["12:30"], [f"no {letter}" for letter in "abcdef"]])
def test_texts_among_numbers_are_no_missing_values(words):
    cells = [*NUMBERS, *(words * 3)]
    rows = range(len(cells))
    with pytest.raises(UsageError) as raised:
        read(pd.DataFrame({"a": [*rows], "y": cells, "n": rows}))
    assert "--missing-values" not in str(raised.value)


def test_a_word_that_cannot_be_predicted_names_the_flag_of_the_training():
    table = pd.DataFrame({"a": NUMBERS, "n": range(20), "y": range(20)})
    Path("new.csv").write_text("a,n\n1,2\n--,3\n5,?\n")
    said = untrained(read(table)[2]).predict_file(Path("new.csv"))
    flags = "train with --missing-values='--,?' --missing impute"
    assert f"; if '--' or '?' means a missing value, {flags}\n" in said
    model = untrained(read(table, *shlex.split(flags.removeprefix("train with ")))[2])
    assert predicted(model, Path("new.csv")).predicted_y.notna().all()
    Path("new.csv").write_text("a,n\n1,2\n?!,3\n")
    said = model.predict_file(Path("new.csv"))
    told = "--missing-values='--,?,?!'"
    assert f"means a missing value, empty the cell, or train with {told}\n" in said
    Path("new.csv").write_text("a,n\n?!,3\n")
    with refused(f"no row can be predicted: .* or train with {re.escape(told)}"):
        model.predict_file(Path("new.csv"))


@pytest.mark.parametrize(
    "cells, asked",
    [
        ([f"{n % 5 * 7919 + 10111}" for n in range(40)], "a (5 whole numbers of 5 digits)"),
        ([f"0{n % 5 + 3}" for n in range(40)], "a (5 whole numbers of 2 digits)"),
        ([1990 + n % 5 for n in range(40)], None),
        ([10000 + n % 5 * 500 for n in range(40)], None),
        ([10000 + 7 * n for n in range(40)], None),
        ([n % 5 for n in range(40)], None),
    ],
    ids=str,
)
def test_whole_numbers_that_look_like_codes_are_asked_about(cells, asked):
    table = pd.DataFrame({"a": cells, "n": range(40), "y": range(40)})
    plan = planned(table)
    assert plan.get("asked") == (asked and f"are these codes: {asked}? Then add --categorical a")
    assert "asked" not in planned(table, "--categorical", "a")
    named = table.rename(columns={"a": "zip_code"})
    assert ("zip_code" in planned(named).get("asked", "")) == (cells != [*map(str, cells)] or True)


def test_numbers_beyond_the_training_rows_are_said_for_each_row(model):
    path = Path("t.csv")
    table = frame(5).astype({"area": object})
    table.to_csv(path, index=False)
    assert "outside" not in model.predict_file(path)
    table.loc[[1, 3], "area"] = [2e8, -50]
    table.to_csv(path, index=False)
    said = model.predict_file(path).splitlines()[1]
    assert said.startswith("outside the range of the training rows: row 2 (column 'area': 2")
    assert re.search(r"not 2\d\.\d+ to 19\d\.\d+\), row 4 \(column 'area': -50", said)
    column = pd.read_csv("t_predictions.csv")["outside_training_range"]
    assert column.notna().tolist() == [False, True, False, True, False]
    assert column[3].startswith("column 'area': -50, not ")
    days = pd.DataFrame({"day": pd.date_range("2020-01-01", periods=30).astype(str)})
    model = untrained(read(days.assign(y=range(30)))[2])
    Path("new.csv").write_text("day\n2020-01-09\n2031-05-06\n")
    said = model.predict_file(Path("new.csv")).splitlines()[1]
    assert "row 2 (column 'day': 2031-05-06, not 2020-01-0" in said and "row 1" not in said


def test_half_a_surrogate_pair_and_a_name_too_long_for_a_path_are_no_tracebacks():
    cells = [{"k": "\ud800" if n % 2 else "b", "n": n, "y": n} for n in range(30)]
    Path("t.json").write_text(json.dumps(cells))
    _, _, metadata = read("t.json")
    assert metadata["features"][:2] == ["k=b", "k=\ufffd"]
    assert predicted(untrained(metadata), Path("t.json")).predicted_y.notna().all()
    with refused("cannot be read"):
        read("n" * 5000)
    Path("none.csv").write_text("k,n\n")
    with refused("there is no row below the names of the columns"):
        untrained(metadata).predict_file(Path("none.csv"))


def test_thousands_of_columns_are_read_by_few_calls_of_pandas(monkeypatch):
    made = []
    series = pd.Series.__init__
    monkeypatch.setattr(pd.Series, "__init__", lambda *a, **k: [made.append(1), series(*a, **k)][1])
    random = np.random.default_rng(0).normal(size=(20, 200))
    whole = (random * 100).round().astype(int)
    lacking = np.where(random > 1, np.nan, random.round(4))
    for numbers in (random.round(4), whole, lacking):
        table = pd.DataFrame(numbers).add_prefix("c").assign(y=range(20))
        table.to_csv("t.csv", index=False, na_rep="NA")
        made.clear()
        read("t.csv")
        assert len(made) < 20 * 200


def test_words_for_a_missing_number_are_counted_as_they_are_written():
    cells = ["NA", "nan", "", "NA", *(f"{n / 7:.2f}" for n in range(26))]
    table = pd.DataFrame({"a": cells, "n": range(30), "y": range(30)})
    for flags in ([], ["--missing", "impute"]):
        _, _, metadata = read(table, *flags)
        assert (
            "a (number, filled in where missing: 2 'NA', 1 'nan', 1 empty)"
            in metadata["plan"]["columns"]
        )
        assert metadata["columns"][0]["words"] == {"NA": 2, "nan": 1, "": 1}
    train, test, metadata = read(table, "--missing", "drop")
    assert len(train) + len(test) == 26
    assert metadata["plan"]["data"] == "t.csv, 4 rows dropped: no value: 2 'NA', 1 'nan', 1 empty"
    with pytest.raises(UsageError, match="a: row 1: the value is missing"):
        read(table, "--missing", "refuse")


NOT_A_LIST = {
    '"': "come in pairs",
    'a,"b': "come in pairs",
    ",": "no name in ','",
    " ": "no name in",
}


@pytest.mark.parametrize("name", ["--target", "--features", "--categorical"])
@pytest.mark.parametrize("text", NOT_A_LIST)
def test_a_list_of_columns_without_a_name_or_a_quote_is_refused(name, text):
    with pytest.raises(UsageError, match=f"{name}: .*{NOT_A_LIST[text]}"):
        parse(train_regression.Config, [name, text])


def test_words_of_free_text_are_numbers_that_tell_of_rows_which_they_were_not_learned_from():
    table = titled()
    train, test, metadata = read(table)
    assert metadata["features"] == ["a", "title, its words for y"]
    said = re.search(r"title \(free text, whose words tell (\d+)% of", metadata["plan"]["columns"])
    assert said and 80 < int(said[1]) < 100
    for rows in (train, test):  # training rows are scored as those that are new
        features, targets = rows.tensors[:2]
        rest = targets[:, 0] - targets[:, 0].mean()
        rest = rest - features[:, 0] * (features[:, 0] @ rest) / features[:, 0].square().sum()
        assert 0.9 < torch.corrcoef(torch.stack((features[:, 1], rest)))[0, 1] < 0.999
    index = test.tensors[2].numpy()
    own, _ = encode(table, [Column(**column) for column in metadata["columns"]])
    raw = test.tensors[0].double().numpy() * metadata["feature_std"] + metadata["feature_mean"]
    np.testing.assert_allclose(own[index], raw, rtol=1e-4, atol=1e-4)
    others = np.delete(own, index, 0)[:, 1]
    in_training = train.tensors[0][:, 1].double() * metadata["feature_std"][1]
    in_training = in_training.numpy() + metadata["feature_mean"][1]
    assert np.isclose(in_training, others, rtol=1e-3).mean() < 0.1
    assert 0.7 < test.tensors[0][:, 1].std() < 1.4
    # Rows that are trained on are evaluated without themselves, which the plan says.
    assert "words" not in metadata["plan"]
    train, test, metadata = read(table, "--test-fraction", "0")
    assert torch.equal(train.tensors[0], test.tensors[0])
    assert "closer to the targets" in metadata["plan"]["words"]
    assert "words" not in read(table, "--test-fraction", "0", "--features", "a")[2]["plan"]
    metadata = read(table)[2]
    # What is evaluated is not learned from.
    table.loc[index, "y"] = 0.0
    table.loc[index, "title"] = "plastic"
    assert read(table)[2] == metadata


def test_words_that_say_nothing_leave_the_numbers_as_they_are_without_them():
    random = np.random.default_rng(1)
    table = (
        titled()
        .assign(title=titled(seed=1).title)
        .assign(y=lambda rows: (rows.a * 2 + random.normal(size=len(rows))).round(2))
    )
    table = pd.concat([table, table.assign(title=[f"no. {n:x}" for n in range(240)])])
    train, test, metadata = read(table)
    plan = metadata["plan"]["columns"]
    assert metadata["left_out"] == ["title"] and "training rows, whose words say nothing" in plan
    *without, facts = read(table.drop(columns="title"))
    assert metadata["plan"]["twice"] == facts["plan"]["twice"]  # rows and copies are on one side
    for rows, same in zip((train, test), without, strict=True):
        assert all(map(torch.equal, rows.tensors, same.tensors))
    # Nor do those that say hardly anything.
    again = titled().assign(y=lambda rows: rows.a * 50000 + rows.y)
    assert read(again)[2]["left_out"] == ["title"]


@pytest.mark.parametrize("flags, answered", [([], 4), (["--missing", "refuse"], 3)])
def test_a_row_without_words_or_with_new_ones_is_predicted(flags, answered, here):
    table = titled(60)
    if not flags:
        table.loc[::9, "title"] = None
    metadata = read(table, *flags)[2]
    assert ("none where missing: 7 empty" in metadata["plan"]["columns"]) == (not flags)
    new = pd.DataFrame({"a": [0.0] * 4, "title": ["silk sofa", "沙发 <b>", None, "300"]})
    new.to_csv(here / "new.csv", index=False)
    (column,) = [Column(**facts) for facts in metadata["columns"] if "scores" in facts]
    scores = column.expand(np.array(["silk sofa", "zzz qqq", "", "plastic lamp"], object))[:, 0]
    assert scores[0] > scores[1] > scores[3] and scores[2] == 0
    assert [score_text(text, column.facts()) for text in ("silk sofa", " ")] == [scores[0], 0]
    assert "trainkit" not in Path(pieces.__file__).read_text()  # an export has a copy of it
    assert predicted(untrained(metadata), here / "new.csv").predicted_y.count() == answered
    if not flags:
        new.assign(title="").to_csv(here / "new.csv", index=False)
        with warnings.catch_warnings(action="error"):
            assert predicted(untrained(metadata), here / "new.csv").predicted_y.nunique() == 1


def test_two_columns_of_text_in_any_script_share_what_they_say():
    chinese = {"sofa": "沙发", "table": "桌子", "lamp": "灯", "oak": "橡木", "silk": "丝绸"}
    table = titled()
    written = table.title.replace(chinese, regex=True).str.replace(" ", "")
    other = titled(seed=1)
    table = table.assign(title=written, about=other.title, y=table.y + other.y)
    metadata = read(table)[2]
    assert metadata["features"] == ["a", "title, its words for y", "about, its words for y"]
    # Texts alone are enough, and are left out like any other column.
    assert read(table, "--features", "title,about")[2]["features"] == metadata["features"][1:]
    assert read(table, "--features", "a,title")[2]["features"] == metadata["features"][:2]


def test_more_columns_than_can_be_used_at_once_are_refused_unless_some_are_chosen(monkeypatch):
    monkeypatch.setattr("trainkit.tables.sets.MAX_COLUMNS", 2)
    pd.DataFrame({"a": range(9), "b": range(9), "y": range(9)}).to_csv("t.csv", index=False)
    with refused(
        "it has 3 columns, and at most 2 are used at once, .* choose some with --features"
    ):
        read("t.csv")
    assert read("t.csv", "--features", "a")[2]["features"] == ["a"]
