"""Every table that people bring is read as they meant it, said so, or refused in one sentence.

The numbers of examples/table.py in several processes and after a kill: tests/test_worlds.py.
"""

import itertools
import re
from pathlib import Path

from trainkit import predict

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import posix_only, refused, saved
from made_tables import frame, load, make_table

from examples import table as script
from trainkit.numbers.loaders import InMemory
from trainkit.tables import Column, encode, network
from trainkit.tables.columns import INDEX, read_amount
from trainkit.tools import page


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


def text(separator=",", encoding="utf-8") -> bytes:
    return frame().to_csv(index=False, sep=separator).encode(encoding)


def records(**columns) -> bytes:
    return frame().assign(**columns).to_json(orient="records").encode()


def parquet(table) -> bytes:
    return table.to_parquet(None)


def rows(column, values, num=30, **columns) -> pd.DataFrame:
    """A table with a column whose values repeat, one that is a number, and y."""
    cells = [*itertools.islice(itertools.cycle(values), num)]
    return pd.DataFrame({column: cells, "n": range(num), "y": range(num)} | columns)


def csv(*column_and_values, **columns) -> bytes:
    return rows(*column_and_values, **columns).to_csv(index=False).encode()


CITIES = ["city=Köln", "city=Orléans", "city=Rome"]
GARDEN = ["garden=False", "garden=True"]
ALL = ["area", *CITIES, *GARDEN]
# Name of the file, its bytes, flags, the features that are learned.
READ = {
    "byte order mark": ("t.csv", text(encoding="utf-8-sig"), [], ALL),
    "cp1252, for Excel": ("t.csv", text(";", "cp1252"), ["--encoding", "cp1252"], ALL),
    "texts that are no missing values": ("t.csv", csv("k", ["None", "NA", "None", "", "x"]), [],
                                         ["k=NA", "k=None", "k=x", "n"]),
    "a comma in a name that is chosen": ("t.csv", b'"a, b",c;d,y\n' + b"1,2,3\n2,5,4\n4,6,7\n" * 5,
                                         ["--features", '"a, b",c;d'], ["a, b", "c;d"]),
    "index left out": ("t.csv", b",a,y, \n" + b"1,3,4,\n2,4,5,\n7,1,2,\n" * 9, [], ["a"]),
    "spaces round names, of which one is self": (
        "t.csv", b" a , self , y \n" + b"1e-3,2,+3\n-.5,5,4\n4.,6,7\n" * 5, [], ["a", "self"]),
    "two targets": ("t.csv", text(), ["--target", "area,y"], [*CITIES, *GARDEN]),
    "dates of parquet": ("t.parquet", parquet(frame().assign(
        day=pd.date_range("2020", periods=30))), ["--features", "day"],
        ["day", *(f"day, {w}" for w in ("weekday sin", "weekday cos", "day of the year sin",
                                        "day of the year cos"))]),
    "classes of passengers": ("t.csv", csv("c", ["1st", "2nd", "3rd", "3rd"]), [],
                              ["c=1st", "c=2nd", "c=3rd", "n"]),
    "the form of a server": ("t.json", b'{"data": %s, "n": 30}' % records(), [], ALL),
    "Arrow": ("t.arrow", frame().to_feather, [], ALL),
    "columns apart by blanks": ("t.txt", frame().to_string(index=False).encode(),
                                ["--separator", r"\s+"], ALL),
    "lists in a cell": ("t.json", records(tags=[["x"]] * 30, at=[{"x": 1}] * 30), [], ALL),
    "a title above the names": ("t.csv", b"Sales, 2025\n" + text(), ["--header-row", 2], ALL),
    "nothing but an index": ("t.csv", b",y\n" + b"1,3\n2,5\n7,1\n" * 9, [], ["Unnamed: 0"]),
    "two units": ("t.csv", csv("a", ["$1", "$2", "$3", "EUR 5"]), ["--features", "a"],
                  ["a=$1", "a=$2", "a=$3", "a=EUR 5"]),
}  # fmt: skip


def untrained(metadata):
    torch.manual_seed(0)
    kind = predict.KINDS[metadata["input"]]()
    model = script.make_model(metadata)
    model.weight[-1] = torch.randn(model.weight[-1].shape)
    return kind(model, metadata, {}).eval().requires_grad_(False)


def predicted(model, path, **options) -> pd.DataFrame:
    """The table that is written beside that of `path`."""
    output = Path(model.predict_file(path).splitlines()[0].split("  (")[0])
    assert output.parent == path.parent and output.name.endswith("_predictions.csv")
    return pd.read_csv(output, **options)


@pytest.mark.parametrize("case", READ)
def test_a_table_is_read_as_it_was_meant(case):
    name, content, flags, features = READ[case]
    path = Path(name)
    content(path) if callable(content) else path.write_bytes(content)
    train, test, metadata = read(path, *flags)
    assert metadata["features"] == features
    assert any(map(INDEX.fullmatch, metadata["left_out"])) == case.startswith("index left out")
    said = metadata["plan"]["columns"].endswith(
        "nothing but an index is used, as nothing else can be"
    )
    assert said == case.startswith("nothing but")
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
    "tabs.CSV.GZ": lambda table, path: table.to_csv(path, sep="\t", compression="gzip"),
    "lines.jsonl": lambda table, path: table.to_json(path, orient="records", lines=True,
                                                     double_precision=15),
    "wide.json": lambda table, path: table.to_json(path, double_precision=15),
}  # fmt: skip


def test_tables_of_all_kinds_hold_the_same_numbers_and_copies_are_not_read(here, capsys):
    table = frame(200)
    table.loc[3, ["city", "y"]] = None
    for name, write in FORMS.items():
        Path(name).mkdir()
        write(table, f"{name}/{name}")
    for name, part in (
        ("a.csv", table[:90]),
        ("_k=2/b.CSV", table[90:]),
        ("_temporary/c.csv", table),
    ):
        (here / "parts" / name).parent.mkdir(parents=True, exist_ok=True)
        FORMS["commas.csv"](part, here / "parts" / name)
    first = read("parts", "--features", "area,city")
    assert capsys.readouterr().err.count(": 1 hidden file not read, such as _temp") == 1
    # Files are read in the order of their paths.
    assert first[2]["plan"]["data"].startswith("parts (_k=2/b.CSV, a.csv), 1 row dropped: no tar")
    same = read("t.parquet", "--features", "area,city")[0]
    for name in FORMS:
        train, test, metadata = read(name, "--features", "area,city")
        assert len(train) + len(test) == 199 and 3 not in test.tensors[2]
        assert metadata["features"] == first[2]["features"]
        for ours, theirs in zip(train.tensors, same.tensors, strict=True):
            assert torch.equal(ours, theirs)


REFUSED = {
    "a name twice": ("t.csv", b'a,y," a"\n1,2,3\n', [], "two columns are called 'a'"),
    "a column of lists": ("t.parquet", parquet(pd.DataFrame({"a": [[1]], "y": [1]})),
                          ["--features", "a"], "column 'a' holds bytes, lists or objects"),
    "a title": ("t.csv", b"Sales of 2025\n\na,y\n1,2\n", [],
                "--header-row says .*: ParserError: C error: Expected 1 field"),
    "an object of JSON": ("t.json", b'{"nodes": [{"y": 1}, {"y": 2}], "links": [{"y": 1}]}', [],
                          "an object of JSON: write the rows as a list of objects"),
    "a form of pandas": ("t.json", frame().to_json(orient="split").encode(), [],
                         "an object of JSON: write the rows as a list of objects"),
    "columns apart by blanks": ("t.txt", frame().to_string(index=False).encode(), [],
                                r"--separator says .* '\\s\+' for blanks"),
    "names that are wide apart": ("t.csv", b"a;;b c\n1;2;3\n", [], "Unnamed: 1, b c .*header-row"),
    "texts that all differ": ("t.csv", csv("a", [1, 2], y=[f"no {n}" for n in range(30)]), [],
                              "'y' has 30 different texts in 30 rows, which are neither"),
    "classes beside a number": ("t.csv", csv("k", ["u", "v"]), ["--target", "k,y"],
                                "'k' holds texts, and several targets must be numbers"),
    "a name too few": ("t.csv", b"a,y\n1,2,3\n", [], "saw 3"),
    "no rows": ("t.csv", b"a,y\n", [], "'y' has 0 different texts in 0 rows"),
    "no names": ("t.csv", b"0.5,1.5,Oslo\n2,3,Bonn\n", [], "no column 'y', only 0.5, 1.5, Oslo "),
    "no target": ("t.csv", b'a,b c,"d, e"\n1,2,3\n', ["--target", ""],
                  "choose the column to predict with --target: 'a', 'b c', 'd, e'$"),
    "wrong target": ("t.csv", b"a,b,z\n1,2,3\n", [], "no column 'y', only a, b, z "),
    "constant target": ("t.csv", b"a,y\n" + b"1,3\n2,3\n" * 5, [], "'y', a target, is the same"),
    "constant target but for NA": ("t.csv", b"a,y\n" + b"1,3\n2,3\n3,NA\n" * 5, [],
                                   "'y', a target, is the same in all"),
    "constant features": ("t.csv", b"a,y\n1,2\n1,3\n1,4\n", [],
                          r"no column can be used: a \(left out: always the same\)"),
    "another encoding": ("t.csv", text(encoding="cp1252"), [], "not in UTF-8.* --encoding cp1252"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_cannot_be_meant_is_one_sentence(case, here):
    name, content, flags, message = REFUSED[case]
    (here / name).write_bytes(content)
    with refused(message) as raised:
        read(here / name, *flags)
    assert f"{here / name}" in str(raised.value)
    assert [path.name for path in here.iterdir()] == [name]


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
    assert area["fill"] == pytest.approx(table.drop(index=index).area.mean(), rel=1e-12)
    assert city["categories"] == ["Köln", "Orléans", "Rome"]
    assert features.mean(0).abs().max() < 1e-5
    assert (features.std(0, correction=0) - 1).abs().max() < 1e-5
    # An unknown category is none of the known ones.
    raw = test_again.tensors[0].double() * torch.tensor(after["feature_std"])
    cities = (raw + torch.tensor(after["feature_mean"]))[:, 1:]
    assert len(cities) and cities.abs().max() < 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of columns of every kind, from a Parquet file."""
    path = tmp_path_factory.mktemp("tables") / "t.parquet"
    frame(200).to_parquet(path)
    return untrained(read(path)[2])


@pytest.mark.parametrize("name", ["t.parquet", "lines.jsonl"])
def test_what_is_no_feature_comes_back_as_it_was_written(name, model):
    table = frame(3).assign(id=pd.array([2**60 + 1, None, 3], "Int64"), note=["NA", "null", "x"])
    FORMS[name](table, name)
    written = predicted(model, Path(name), dtype=str, keep_default_na=False)
    assert [*written.id] == ["1152921504606846977", "", "3"]
    assert [*written.note] == ["NA", "null", "x"]


def test_one_value_has_one_text_in_every_file():
    table = pd.DataFrame({"code": [1.0, 2, 2.5] * 10, "city": ["Oslo", "Oslo ", "Bonn"] * 10})
    table["on"], table["y"] = ["TRUE", "false", "?"] * 10, np.arange(30.0)
    known = []
    for name in ("commas.csv", "t.parquet"):
        FORMS[name](table, name)
        known.append(read(name, "--categorical", "code"))
        assert known[-1][2]["features"] == known[0][2]["features"]
    codes, cities, on = (column["categories"] for column in known[0][2]["columns"])
    assert (codes, cities, on) == (["1", "2", "2.5"], ["Bonn", "Oslo"], ["?", "False", "True"])


def test_a_row_that_cannot_be_predicted_is_named_and_left_empty(model):
    path = Path("t.csv")
    frame(5).to_csv(path, index=False)
    whole = predicted(model, path).predicted_y
    table = frame(5).astype({"area": object})
    table.loc[[0, 2, 3], "area"] = [1e300, "NA", "$1"]
    table.to_csv(path, index=False)
    said = model.predict_file(path).splitlines()[1]
    assert said.startswith("no prediction for row 1 (column 'area': '1e+300' is not a number")
    assert "row 3 (column 'area': the value is missing), row 4" in said
    written = predicted(model, path).predicted_y
    assert written.isna().tolist() == [True, False, True, True, False]
    assert written[[1, 4]].tolist() == whole[[1, 4]].tolist()


def test_numbers_beyond_the_training_rows_are_said_for_each_row(model):
    path = Path("t.csv")
    table = frame(5).astype({"area": object})
    table.to_csv(path, index=False)
    assert "outside" not in model.predict_file(path)
    table.loc[[1, 3], "area"] = [2e8, -50]
    table.to_csv(path, index=False)
    said = model.predict_file(path).splitlines()[1]
    assert said.startswith("outside the range of the training rows: row 2 (area 2e+08, ")
    assert re.search(r"not 2\d\.\d+ to 19\d\.\d+\), row 4 \(area -50, ", said)
    days = pd.DataFrame({"day": pd.date_range("2020-01-01", periods=30).astype(str)})
    model = untrained(read(days.assign(y=range(30)))[2])
    Path("new.csv").write_text("day\n2020-01-09\n2031-05-06\n31/1/2020\n")
    said = model.predict_file(Path("new.csv"))
    assert "row 2 (day 22405, not 1826" in said and "row 1" not in said
    assert "row 3 (column 'day': '31/1/2020' is not a date like 2020-01-31)" in said


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


def test_dates_are_days_and_have_the_phases_that_vary():
    days = pd.date_range("2019-12-30 06:00", periods=30, freq="27h")
    for texts in (days.strftime("%Y-%m-%d %H:%M"), days.strftime("%Y-%m-%dT%H:%M:%SZ")):
        table = pd.DataFrame({"when": texts, "y": range(30)})
        train, _, metadata = read(table, "--test-fraction", 0)
        (column,) = metadata["columns"]
        assert column["cycles"] == ["hour", "weekday", "day of the year"]
        numbers = train.tensors[0].double() * torch.tensor(metadata["feature_std"])
        numbers += torch.tensor(metadata["feature_mean"])
        phases = [1, 0, np.sin(np.pi / 14), np.cos(np.pi / 14)]
        assert numbers[0, :5].tolist() == pytest.approx([18260.25, *phases], abs=1e-3)
    written = ["1970-01-02", "2020-01-01T12:00:00+02:00", "1500-01-01", "9999-12-31", "31/1/2020"]
    values, problems = encode(pd.DataFrame({"when": written}), [Column(**column)])
    assert values[:4, 0].tolist() == [1.0, 18262 + 10 / 24, -171664.0, 2932896.0]
    assert [row for row, *_ in problems] == [4]


def test_what_is_no_number_is_a_category_and_what_hardly_repeats_is_left_out_and_said():
    titles = [*["film a", "film b", "film c", "300"] * 13, "12", "film a"]
    table = pd.DataFrame({"title": titles, "n": range(54), "y": range(54)})
    table["address"] = [f"{n} Main Street" for n in range(50)] + ["1 Main Street"] * 4
    table["answer"] = ["1. Yes", "2. No"] * 27
    table["rownames"] = range(7, 61)
    _, _, metadata = read(table)
    assert metadata["left_out"] == ["address", "rownames"]
    kinds = {column["name"]: column["categories"] for column in metadata["columns"]}
    assert kinds["title"][-3:] == ["film a", "film b", "film c"] and kinds["n"] is None
    assert kinds["answer"] == ["1. Yes", "2. No"]
    said = metadata["plan"]["columns"]
    assert re.search(r"address \(left out: 4\d different texts, such as '\d+ Main Street'\)", said)
    assert "rownames (left out: an index)" in said
    assert read(table, "--features", "rownames,n")[2]["features"] == ["rownames", "n"]  # wanted


def write_sheets(path, **sheets):
    """An Excel file: the rows of each sheet, of which cells of several rows are merged."""
    book = pytest.importorskip("openpyxl").Workbook()
    book.create_sheet("left empty")
    book.remove(book.worksheets[0])
    for name, (cells, merged) in sheets.items():
        sheet = book.create_sheet(name)
        for row in cells:
            sheet.append(row)
        for area in merged:
            sheet.merge_cells(area)
    book.save(path)


def test_a_sheet_of_excel_is_what_a_person_sees():
    names, *cells = [["city", "n", "y"]], *([city, n, n] for city in "abcabc" for n in range(8))
    alone = [[city if n == 0 else None, n, y] for city, n, y in cells]
    merged = [f"A{top}:A{top + 7}" for top in range(4, 52, 8)]
    write_sheets("t.xlsx", s=([["Sales of 2025"], [], *names, *alone], merged))
    write_sheets("plain.xlsx", s=(names + cells, []))
    with refused("no column 'y', only Sales of 2025, .*Unnamed: 2.* --header-row where"):
        read("t.xlsx")
    (train, test, metadata), plain = read("t.xlsx", "--header-row", 3), read("plain.xlsx")
    assert metadata["features"] == ["city=a", "city=b", "city=c", "n"]
    assert torch.equal(train.tensors[0], plain[0].tensors[0])
    assert torch.equal(test.tensors[0], plain[1].tensors[0])
    assert predicted(untrained(metadata), Path("t.xlsx")).predicted_y.notna().all()


def test_sheets_are_splits_or_chosen_and_a_formula_has_a_value():
    names, *cells = [["a", "y"]], *([n, n % 7] for n in range(30))
    write_sheets("t.xlsx", train=(names + cells, []), test=(names + cells[:5], []))
    train, test, metadata = read("t.xlsx")
    assert (len(train), len(test)) == (30, 5)
    assert metadata["plan"]["evaluated on"] == "test: 5 rows"
    write_sheets("t.xlsx", north=(names + cells, []), south=(names + cells[:5], []))
    with refused(r"t.xlsx has the sheets 'north', 'south': choose one, or .*--sheet A,B$"):
        read("t.xlsx")
    with refused("has no sheet 'west' but 'north', 'south'"):
        read("t.xlsx", "--sheet", "west")
    for chosen, num in (("south", 5), ("north,south", 35)):
        train, test, metadata = read("t.xlsx", "--sheet", chosen)
        assert len(train) + len(test) == num
        assert len(predicted(untrained(metadata), Path("t.xlsx"))) == num
    write_sheets("t.xlsx", s=([*names, *cells, [3, "=A2*2"]], []))
    with refused("t.xlsx, sheet 's': cell B32 is a formula whose value is not in the file: save"):
        read("t.xlsx")


def test_a_row_of_totals_is_asked_about():
    table = pd.DataFrame({"region": ["n", "s"] * 10, "a": range(20), "y": range(5, 25)})
    assert "asked" not in read(table)[2]["plan"]
    for region, y, why in (("Grand total", 9, "'Grand total'"), ("n", 290, "y 290")):
        last = pd.DataFrame([[region, 1, y]], columns=[*table])
        _, _, metadata = read(pd.concat([table, last]))
        said = f"is row 21 ({why}) a sum of others? Then remove it from the file"
        assert metadata["plan"]["asked"] == said


def test_two_tables_whose_predictions_have_one_name_are_not_both_predicted(model):
    frame(5).to_csv("t.csv", index=False)
    frame(5).to_parquet("t.parquet")
    model.predict_file(Path("t.parquet"))
    with refused("t.csv: t_predictions.csv holds what is predicted for t.parquet: rename one"):
        model.predict_file(Path("t.csv"))
    model.predict_file(Path("t.parquet"))


def test_a_run_of_an_earlier_version_is_to_be_trained_again():
    metadata = read(frame())[2]
    metadata["read_options"]["missing_values"] = []
    with refused("an earlier version made this run: train the model again"):
        untrained(metadata).predict_file(Path("t.csv"))


def test_equal_rows_are_in_one_part_and_those_that_must_repeat_are_counted():
    random = np.random.default_rng(3)
    once = pd.DataFrame(random.normal(size=(40, 4))).add_prefix("x").assign(y=range(40))
    train, test, metadata = read(pd.concat([once] * 4))
    parts = [{*map(tuple, part.tensors[0].tolist())} for part in (train, test)]
    assert not parts[0] & parts[1]
    assert sum(map(len, parts)) == 40 and len(test) in range(16, 60)
    features, _, fold = train.tensors
    pairs = {(*row, n) for row, n in zip(features.tolist(), fold.tolist(), strict=True)}
    assert len(pairs) == len(parts[0])
    assert metadata["plan"]["twice"] == "120 of 160 rows repeat another: on one side"
    # A few kinds of rows, each of which occurs often: they are no copies.
    kinds = pd.DataFrame({"sex": ["f", "m"] * 40, "class": [1, 2, 3, 3] * 20, "y": [0, 1] * 40})
    train, test, metadata = read(kinds)
    assert (len(train), len(test)) == (64, 16)
    assert metadata["plan"]["twice"] == "16 of 16 rows to evaluate on are also trained on"


# Cells, and with which unit and as what they are read with a point, and with a comma; None: not.
AMOUNTS = {
    "$1,721 $850 -$3.5": ("$", [1721, 850, -3.5], None),
    "56 %|3%": ("%", [56, 3], [56, 3]),
    "1.234,56 EUR|12,00 EUR|850 EUR|7.000 EUR": ("EUR", None, [1234.56, 12, 850, 7000]),
    "1\u202f234,5 \u20ac|3\u20ac": ("\u20ac", None, [1234.5, 3]),
    "1'234.50 CHF|20 CHF": ("CHF", [1234.5, 20], None),
    "2,5 3,25": ("", None, [2.5, 3.25]),
    "-5 km|3 km": ("km", [-5, 3], [-5, 3]),
    "10:30 5-10 01.02.2020 A1 555-1234 1,2,3 1_200": ("", [None] * 7, [None] * 7),
}  # fmt: skip


@pytest.mark.parametrize("cells", AMOUNTS)
def test_an_amount_is_the_number_that_is_written(cells):
    unit, with_point, with_comma = AMOUNTS[cells]
    cells = cells.split("|" if "|" in cells else " ")
    for mark, expected in ((".", with_point), (",", with_comma)):
        found = [read_amount(cell, mark) for cell in cells]
        if expected is None:
            assert None in found
        else:
            assert found == [None if x is None else (unit, x) for x in expected]


PROOF, FIXED = [f"{n}9,21" for n in range(1, 10)], [f"{267 + n},{n}77" for n in range(1, 10)]
# Flags, separator and cells of y, and its number nearest to 0.
MARKS = {
    "decimals with commas": ([], ",", PROOF, 19.21),
    "thousands, as in English": ([], ",", FIXED, 268177),
    "a semicolon tells": ([], ";", FIXED, 268.177),
    "who may say a comma": (["--decimal", ","], ",", FIXED, 268.177),
    "also of plain numbers": (["--decimal", ","], "\t", [f"{n}.500" for n in range(1, 10)], 1500),
}


@pytest.mark.parametrize("case", MARKS)
def test_a_mark_is_read_as_the_cells_the_separator_or_the_user_say(case):
    flags, separator, cells, least = MARKS[case]
    table = pd.DataFrame({"a": cells, "n": range(9), "y": cells})
    content = table.to_csv(index=False, sep=separator).encode()
    _, _, metadata = read(content, "--test-fraction", "0", *flags)
    assert min(metadata["target_range"][0], key=abs) == pytest.approx(least)
    said = f"a (number, {max(cells, key=len)!r} is "
    assert said in metadata["plan"]["columns"]
    # A new file is read the same way, whatever lies between its cells.
    new = pd.DataFrame({"a": cells[:1], "n": [0]})
    inputs, problems = encode(new, [Column(**column) for column in metadata["columns"]])
    assert inputs.tolist() == [[pytest.approx(least), 0]] and not problems


# Classes, and what the network does with both kinds of targets.


def test_a_class_is_learned_measured_and_predicted_with_its_probability(tmp_path, run_main):
    table = make_table(tmp_path / "t.csv")
    flags = f"--data {tmp_path}/t.csv --target kind --epochs 1 --run-dir {tmp_path}/run"
    flags += " --features a,b,c --save-every 1000000 --no-pictures"
    metrics = run_main("examples.table", *flags.split())
    tensors, metadata = saved(tmp_path / "run", "predictions")
    truth = (table.kind == "low").to_numpy()[tensors["index"].numpy()].astype(int)
    assert metadata["classes"] == ["high", "low"] and tensors["target"].tolist() == truth.tolist()
    logits = tensors["logits"]
    assert metrics["eval_loss"] == pytest.approx(F.cross_entropy(logits, tensors["target"]).item())
    right = (logits.argmax(1).numpy() == truth).astype(float)
    assert metrics["eval_accuracy"] == right.mean() > 0.8
    shares = [right[truth == number].mean() for number in (0, 1)]
    assert metrics["eval_balanced_accuracy"] == pytest.approx(np.mean(shares))

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
    assert page.answer_row(predictor, 3.0, 3.0, 0.0).startswith("<h2>high ")


@pytest.mark.parametrize(
    "cells, flags, classes",
    [
        (["low", "high", "NA"], [], ["NA", "high", "low"]),
        ([0, 1, 1, "NA"], [], ["0", "1"]),
        ([0, 1] * 6 + ["?"], [], ["0", "1"]),
        ([1, 2, 10, 2], ["--categorical", "y"], ["1", "2", "10"]),
        ([1, 2, 10, 2], [], None),
    ],
)
def test_texts_and_two_values_are_classes_and_numbers_are_if_it_is_said(cells, flags, classes):
    table = rows("y", cells, 160, n=np.random.default_rng(0).normal(size=160)).drop(columns="y")
    table["y"] = [*itertools.islice(itertools.cycle(cells), 160)]
    train, test, metadata = read(table, *flags)
    assert metadata.get("classes") == classes
    assert metadata["input"] == ("table_class" if classes else "table")
    dropped = ("", "NA", "?") if classes == ["0", "1"] else ()
    assert len(train) + len(test) == 160 - sum(cell in dropped for cell in table.y)
    assert train.tensors[1].min() >= 0 or classes is None


def test_ridge_regression_has_the_penalty_with_the_smallest_leave_one_out_error():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(12, 30, generator=generator, dtype=torch.float64)
    truth = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    noise = torch.tensor([0.1, 30.0])
    targets = features @ truth.T + noise * torch.randn(12, 2, generator=generator)

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
            for left_out in range(12):
                kept = torch.arange(12) != left_out
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
    network.start_linear(model, train)
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
            parts = iter(zip(linear.split(256), added.split(256), strict=True))
            model.forward = lambda x, fold, parts=parts: next(parts)
            network.set_scale(accelerator, model, train, script.compute_losses)
            assert model.scale.item() == pytest.approx(scale, abs=0.1), what


def test_no_row_reaches_the_members_and_the_linear_model_that_judge_it():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=generator)
    fold = torch.arange(40) % network.NUM_FOLDS

    def judge(targets):
        torch.manual_seed(0)
        model = network.TabM(1, network.find_edges(inputs))
        network.start_linear(model, InMemory(inputs, targets, fold))
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
