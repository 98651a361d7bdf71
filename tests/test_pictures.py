"""Every layout of pictures that people bring is read as they meant it or refused in a sentence."""

import importlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from PIL import Image, ImageDraw

import train_mnist
from trainkit.config import parse
from trainkit.data import files as picture_files
from trainkit.data import pictures
from trainkit.data.small import fit_to_size
from trainkit.errors import UsageError
from trainkit.loaders import InMemory
from trainkit.tools import photos

NUMBERS = {"train": 60, "test": 17}
NAMES = ["three", "one", "two"]


def load(folder: Path, *flags: object) -> tuple[InMemory, InMemory, dict]:
    return train_mnist.load_data(
        parse(train_mnist.Config, ["--dataset", str(folder), *map(str, flags)])
    )


def shapes(split: str, negative: bool = False, size: tuple[int, int] = (28, 28)) -> list:
    """Bright rings, crosses and bars on black, like digits, of many grey values."""
    random = np.random.default_rng(len(split))
    y, x = np.mgrid[-1 : 1 : size[1] * 1j, -1 : 1 : size[0] * 1j]
    pictures = []
    for number in range(NUMBERS[split]):
        a, b = x - random.uniform(-0.2, 0.2), y - random.uniform(-0.2, 0.2)
        inside = np.abs(a) + np.abs(b) < 0.9
        ink = [
            np.abs(np.hypot(a, b) - 0.5) < 0.15,
            (np.abs(a * b) < 0.03) & inside,
            (np.abs(a) < 0.15) & inside,
        ][number % 3]
        grey = (ink * random.integers(100, 256, a.shape)).astype(np.uint8)
        pictures.append(Image.fromarray(255 - grey if negative else grey))
    return pictures


def labels(split: str) -> list[int]:
    return [number % 3 for number in range(NUMBERS[split])]


def column(split: str, kind: str) -> tuple[list, object]:
    """Labels as one of the things that people have."""
    numbers = labels(split)
    return {
        "ClassLabel": (numbers, ClassLabel(names=NAMES)),
        "int": ([n + 5 for n in numbers], Value("int16")),
        "string": ([NAMES[n] for n in numbers], Value("string")),
        "bool": ([n == 1 for n in numbers], Value("bool")),
    }[kind]


def dataset(kind: str = "ClassLabel", change: Callable = lambda x: x, **options: bool) -> dict:
    """{split: Dataset}, `change` applied to each picture."""
    made = {}
    for split in NUMBERS:
        values, feature = column(split, kind)
        pictures = [change(picture) for picture in shapes(split, **options)]
        features = Features(picture=datasets.Image(), kind=feature)
        made[split] = Dataset.from_dict({"picture": pictures, "kind": values}, features=features)
    return made


def parquet(folder: Path, made: dict) -> None:
    folder.mkdir(exist_ok=True)
    for split, rows in made.items():
        rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def image_folder(folder: Path, ending: str, negative: bool = False, **options: object) -> None:
    for split in NUMBERS:
        for n, (picture, label) in enumerate(
            zip(shapes(split, negative), labels(split), strict=True)
        ):
            path = folder / split / NAMES[label] / f"{n}{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path, **options)


def transparent(picture: Image.Image) -> Image.Image:
    ink = Image.new("RGBA", picture.size, (0, 0, 0, 0))
    ink.putalpha(picture)
    return ink


def deep(picture: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(picture, dtype=np.uint16) * 257)


def of_many_sizes(picture: Image.Image) -> Image.Image:
    side = 20 + int(np.asarray(picture, dtype=int).sum()) % 30
    return picture.resize((side, side + 3))


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: shown a quarter turned
    return exif


SORTED = sorted(NAMES)
GREY = "28 x 28 grey"


def changed(change: Callable = lambda picture: picture, kind: str = "ClassLabel") -> Callable:
    """A layout: Parquet files of pictures that `change` made."""
    return lambda folder, negative: parquet(folder, dataset(kind, change, negative=negative))


def ending(name: str, **options: object) -> Callable:
    """A layout: a folder of files of one kind in the folder of each class."""
    return lambda folder, negative: image_folder(folder, name, negative, **options)


# How a folder is made, the classes, and what the plan says of the pictures.
LAYOUTS = {
    "ClassLabel": (changed(), NAMES, GREY),
    "int labels": (changed(kind="int"), ["5", "6", "7"], GREY),
    "string labels": (changed(kind="string"), SORTED, GREY),
    "bool labels": (changed(kind="bool"), ["False", "True"], GREY),
    "colour": (changed(lambda p: p.resize((32, 32)).convert("RGB")), NAMES,
               f"32 x 32 RGB read as {GREY}"),
    "palette": (changed(lambda p: p.convert("P")), NAMES, f"28 x 28 P read as {GREY}"),
    "transparent": (changed(transparent), NAMES, f"28 x 28 RGBA read as {GREY}"),
    "16 bits": (changed(deep), NAMES, f"28 x 28 I of 0 to 65535 read as {GREY}"),
    "many sizes": (changed(of_many_sizes), NAMES, None),
    "folder of JPEG": (ending(".JPG", quality=90), SORTED, GREY),
    "folder of turned JPEG": (ending(".jpeg", exif=turned()), SORTED, GREY),
    "folder of photos with a copy": (
        ending(".mpo", save_all=True, append_images=[Image.new("L", (9, 9))]), SORTED, GREY),
    "folder of WebP": (ending(".webp", lossless=True), SORTED, f"28 x 28 RGB read as {GREY}"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "negative"),
    [*((layout, False) for layout in LAYOUTS), ("ClassLabel", True), ("transparent", True)],
)
def test_a_layout_is_read_as_it_was_meant_and_its_files_alike_by_predict(
    layout, negative, tmp_path
):
    make, classes, read_as = LAYOUTS[layout]
    make(tmp_path / "data", negative)
    train_set, eval_set, about = load(tmp_path / "data")
    assert about["classes"] == classes
    assert read_as in (None, about["pictures"]["read_as"])
    assert (len(train_set), len(eval_set)) == (60, 17)
    framing = photos.learn_framing(eval_set.tensors[0]) | about["pictures"]
    for path, pixels in zip(files(tmp_path), eval_set.tensors[0], strict=True):
        assert torch.equal(photos.read_photo(path, 28, framing)[0][0], pixels), path
    if len(classes) == 3:
        words = {"5": "three", "6": "one", "7": "two"}
        names = [words.get(classes[n], classes[n]) for n in eval_set.tensors[1]]
        assert Counter(names) == Counter(NAMES[n] for n in labels("test"))
        if "folder" not in layout:  # whose rows are in the order of their paths
            assert names == [NAMES[n] for n in labels("test")]


def files(folder: Path) -> list[Path]:
    """The evaluation pictures as files, in their order."""
    paths = []
    for number, cell in enumerate(read_cells(folder / "data", "test")[0]):
        paths.append(Path(folder / f"{number}.png" if cell["bytes"] else cell["path"]))
        if cell["bytes"]:
            paths[-1].write_bytes(cell["bytes"])
    return paths


def read_cells(folder: Path, split: str) -> tuple:
    """What read_split returns, the first as dicts of `bytes` and `path`."""
    rows, *others = pictures.read_split(str(folder), split)
    as_they_are = rows.cast_column(rows.column_names[0], datasets.Image(decode=False))
    return as_they_are[:][rows.column_names[0]], *others


def save_large(path: Path) -> None:
    Image.new("1", (20_000, 20_000)).save(path, compress_level=1)


def save_animation(path: Path, **options: object) -> None:
    frames = [Image.fromarray(np.full((28, 28), 80 * n, np.uint8)) for n in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)


def save_truncated(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:1500])


def save_postscript(path: Path) -> None:
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n")


# How a bad file is written, and the sentence.
BAD_FILES = {
    "20,000 x 20,000.png": (save_large, "400000000 pixels"),
    "truncated.png": (save_truncated, "truncated"),
    "text.png": (lambda p: p.write_text("not a picture"), "none of PNG, JPEG"),
    "postscript.png": (save_postscript, "none of PNG, JPEG"),
    "moving.gif": (save_animation, "holds 3 pictures"),
    "pages.tiff": (save_animation, "holds 3 pictures"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_sentence_with_its_name(name, tmp_path):
    save, message = BAD_FILES[name]
    image_folder(tmp_path / "data", ".png")
    path = tmp_path / "data" / "train" / "one" / name
    save(path)
    with pytest.raises(UsageError, match=message) as raised:
        load(tmp_path / "data")
    assert name in str(raised.value) and "\n" not in str(raised.value)
    seen = {"shape": [28, 28], "border": [0, 0], "frame": None}
    with pytest.raises(UsageError, match=message) as raised:
        photos.read_photo(path, 28, seen)
    assert name in str(raised.value) and "\n" not in str(raised.value)


def with_rows(change: Callable[[dict], dict], kind: str = "ClassLabel") -> Callable:
    """A layout whose training rows, as a dict of lists, are changed."""

    def make(folder: Path) -> None:
        made = dataset(kind)
        rows = made["train"].cast_column("picture", datasets.Image(decode=False)).to_dict()
        made["train"] = Dataset.from_dict(change(rows), features=made["train"].features)
        parquet(folder, made)

    return make


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: parquet(
        folder, {split: rows.remove_columns(name) for split, rows in dataset().items()}
    )


def put(name: str, row: int, value: object) -> Callable[[dict], dict]:
    return lambda rows: rows | {name: [*rows[name][:row], value, *rows[name][row + 1 :]]}


def two_columns(folder: Path) -> None:
    parquet(
        folder,
        {
            split: rows.add_column("id", [*range(len(rows))])
            for split, rows in dataset("int").items()
        },
    )


def new_class(folder: Path) -> None:
    made = dataset("string")
    rows = made["test"].to_dict()
    made["test"] = Dataset.from_dict(put("kind", 4, "four")(rows), features=made["test"].features)
    parquet(folder, made)


def two_minds(folder: Path) -> None:
    parquet(folder, dataset())
    part = dataset()["test"].cast_column("kind", ClassLabel(names=sorted(NAMES)))
    part.to_parquet(folder / "train-00001-of-00002.parquet")


def holding(*paths: str) -> Callable[[Path], None]:
    """A layout: files at these paths, each with a row of its own: a picture, or its class too."""

    def make(folder: Path) -> None:
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            picture = Image.new("L", (8, 8), len(path))
            if path.endswith(".parquet"):
                some = {"image": [picture], "label": [path]} if "empty" not in path else {}
                features = Features(image=datasets.Image(), label=Value("string"))
                rows = {"image": [], "label": []} | some
                made = Dataset.from_dict(rows, features=features)
                pq.write_table(made.data.table, folder / path)  # to_parquet: no empty table
            else:
                picture.save(folder / path, "PNG")

    return make


def zipped(folder: Path, *paths: str) -> None:
    holding(*paths)(folder.parent / "inside")
    folder.mkdir()
    shutil.make_archive(str(folder / "train"), "zip", folder.parent / "inside")


# How a folder is made, flags, and the sentence.
BAD_LAYOUTS = {
    "no folder": (lambda f: None, [], "cannot be read"),
    "an empty folder": (Path.mkdir, [], "cannot be read"),
    "a file": (Path.touch, [], "is a file: name its folder"),
    "an archive of classes": (lambda f: zipped(f, "a/0.png", "b/0.png"), [], "unpack train.zip, "),
    "no picture": (with_rows(put("picture", 7, None)), [], "row 8: .*no picture in it"),
    "no rows": (holding("train.parquet", "test_empty.parquet"), [], "'test': .* no rows"),
    "no label": (with_rows(put("kind", 7, None)), [], "'kind', row 8: the label .* is not one of"),
    "no number": (with_rows(put("kind", 7, None), kind="int"), [], "row 8: the label None is not"),
    "no pictures": (without("picture"), [], "one Image column"),
    "fractions": (lambda f: parquet(f, {split: rows.cast_column("kind", Value("float32"))
                                        for split, rows in dataset("int").items()}), [],
                  "--label must name .*whole numbers or texts"),
    "a loose picture": (holding("train/a/0.png", "train/1.png"), [],
                        "train/1.png is in no class: .* each lies in the folder of its class"),
    "no train": (holding("test/a/0.png"), [], r"there are only \['test'\]; .* into train/"),
    "other words": (holding("Training/a/0.png", "Test/a/0.png"), [], "rename Test, Training: "),
    "another word": (holding("train/a/0.png", "valid/a/0.png"), [], "rename valid: "),
    "a folder more": (holding("set/a/0.png", "set/b/0.png"), [], "one class, set: "),
    "nothing read": (holding("_a/0.png", "b/0.psd"), [], r"no file .* \(not read: _a/0.png, b/"),
    "two columns": (two_columns, [], "--label must name .*'kind', 'id'"),
    "a new class": (new_class, [], "'test', column 'kind', row 5: the label 'four' is not one of"),
    "files of two minds": (two_minds, [], "its files name other columns, or classes"),
}  # fmt: skip


@pytest.mark.parametrize("layout", BAD_LAYOUTS)
def test_a_layout_that_cannot_be_meant_is_one_sentence(layout, tmp_path):
    make, flags, message = BAD_LAYOUTS[layout]
    make(tmp_path / "data")
    with pytest.raises(UsageError, match=message) as raised:
        load(tmp_path / "data", *flags)
    assert str(tmp_path / "data") in str(raised.value) and "\n" not in str(raised.value)


# What it is called; its files, and of which split and class each is. "": counted as not read.
FOLDERS: dict[str, dict[str, str | None]] = {
    "words": {"airport/my train 0.png": "train/airport", "airport/test_3.png": "train/airport",
              "train station/0.png": "train/train station", "val/d/0.png/.0.png": ""},
    "splits": {"train/test/val.png": "train/test", "train/test/a/b/0.png": "train/test",
               "val/test/0.PNG": "validation/test", "other/a/0.png": "", "montage.png": ""},
    "left": {"a/0.png": "train/a", "a/._0.png": "", "a/.ipynb_checkpoints/0.png": "",
             "__MACOSX/a/0.png": "", "_a/0.png": "", ".git/x": None, "a/Thumbs.db": None,
             "a/.DS_Store": None, "notes.csv": "", "a/_DSC1.JPG": "train/a"},
    "_set [1]": {"a/0.png": "train/a"},
    "brackets[1]": {"a.parquet": "train", "notes/chart.png": ""},
    "set.parquet": {"part-0.parquet": "train", "part-1.parquet": "train", "_SUCCESS": None,
                    "_temporary/0/part-0.parquet": "", "_delta_log/0.json": None,
                    ".ipynb_checkpoints/a.parquet": "", "part-2-empty.parquet": None},
    "of splits": {"a/train-00000.parquet": "train", "a/b_test.parquet": "test", "c.parquet": ""},
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_splits_and_classes_are_folders_and_what_tools_leave_is_not_read(name, tmp_path, capfd):
    expected, found = FOLDERS[name], {}
    holding(*expected)(tmp_path / name)
    (tmp_path / name / "link").symlink_to(tmp_path)
    for split in ("train", "test"):
        cells, numbers, classes, _, where = read_cells(tmp_path / name, split)
        for cell, number in zip(cells, numbers, strict=True):
            label, own = classes[number], where.split("'")[-2]
            if not cell["bytes"]:
                own, label = f"{own}/{label}", str(Path(cell["path"]).relative_to(tmp_path / name))
            found[label] = own
    assert found == {path: split for path, split in expected.items() if split}
    num_unread = [*expected.values(), ""].count("")
    assert capfd.readouterr().err.count(f": {num_unread} not read: ") == 1


@pytest.mark.parametrize("kind", ["folder", "list", "parquet"])
def test_other_pixels_and_another_decoder_are_other_data(kind, tmp_path, monkeypatch):
    data, label = tmp_path / "data", "cls" if kind == "list" else None

    def read(negative: bool) -> torch.Tensor:
        """Of files with equal names, times and, but for Parquet, sizes."""
        make = changed() if kind == "parquet" else ending(".bmp")
        make(data, negative)
        for split in NUMBERS if kind == "list" else ():
            names = [f"{NAMES[label]}/{n}.bmp" for n, label in enumerate(labels(split))]
            lines = ["file_name,cls", *(f"{name},{name[0]}" for name in names)]
            (data / split / "metadata.csv").write_text("\n".join(lines))
        for path in data.rglob("*"):
            os.utime(path, (1e9, 1e9))
        return pictures.load_images(str(data), "train", 28, label)[0].tensors[0]

    first = read(negative=False)
    assert torch.equal(read(negative=True), 255 - first)
    source = Path(picture_files.__file__).read_text()
    (tmp_path / f"of_{kind}.py").write_text(
        source.replace("np.asarray(picture)[None]", "255 - np.asarray(picture)[None]")
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pictures, "files", importlib.import_module(f"of_{kind}"))
    assert torch.equal(read(negative=False), 255 - first)


@pytest.mark.parametrize(
    ("scale", "kind", "said"),
    [
        (1, np.uint16, "I of 0 to 65535 must .* as 8 bits"),
        (1 / 255, np.uint8, r".*\(0 to 1\), .* spread"),
        (1 / 2550, np.float32, "F of 0 to 1 must"),
        (257, np.uint16, None),
    ],
)
def test_values_that_fill_a_small_part_of_their_range_are_named(scale, kind, said, tmp_path):
    make = changed(lambda p: Image.fromarray((np.asarray(p, int) * scale).astype(kind)))
    make(tmp_path, False)
    line = load(tmp_path)[-1]["plan"].get("values", "")
    assert re.search(f"^77 of 77 pictures .*{said}", line) if said else not line


def test_the_column_of_the_classes_can_be_named(tmp_path):
    two_columns(tmp_path / "data")
    _, eval_set, about = load(tmp_path / "data", "--label", "kind")
    assert about["classes"] == ["5", "6", "7"] and eval_set.tensors[1].tolist() == labels("test")
    assert load(tmp_path / "data", "--label", "id")[1].tensors[1].tolist() == [*range(17)]


def test_the_classes_of_another_split_go_by_their_names(tmp_path):
    parquet(tmp_path / "data", dataset("string"))
    rows = pq.read_table(tmp_path / "data" / "test-00000-of-00001.parquet").to_pylist()
    few = [row for row in rows if row["kind"] != "one"]  # else `two` would be the second
    made = Dataset.from_list(few).cast_column("picture", datasets.Image())
    made.to_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    _, eval_set, about = load(tmp_path / "data")
    names = [about["classes"][label] for label in eval_set.tensors[1]]
    assert about["classes"] == SORTED and names == [row["kind"] for row in few]


def test_what_is_learned_of_pictures_is_theirs_alone():
    pixels = torch.zeros(3, 28, 28, dtype=torch.uint8)
    pixels[0, 4:24, 10:18] = 200
    pixels[1] = 255
    pixels[1, 4:24, 10:18] = 5
    border, side, x, y, _ = photos.describe_looks(pixels).tolist()
    for looks, value in ((side, 20 / 28), (x, 0.5), (y, 0.5)):
        assert looks[:2] == pytest.approx([value] * 2, abs=1e-6)
    assert border[:2] == [0, 1] and np.isnan([border[2], x[2]]).all()
    kinds = Counter(["28 x 28 L"] * 3)
    seen = photos.learn_framing(pixels[:, None])
    assert seen["border"] == [0, 1] and 0 < seen["most_ink"] < 1
    assert seen["frame"] == pytest.approx([20 / 28, 0.5, 0.5], abs=1e-6)
    assert pictures.describe_pictures(28, (pixels, kinds))["shape"] == [28, 28]
    mixed = Counter(["2 x 2 L", "3 x 3 L", "2 x 2 L"])
    described = pictures.describe_pictures(28, (pixels[2:], kinds), (pixels, mixed))
    assert described["shape"] is None
    assert described["read_as"] == "28 x 28 L and 2 other kinds read as 28 x 28 grey"
    with pytest.raises(UsageError, match="of one grey value"):
        pictures.describe_pictures(28, (pixels[2:], kinds))


def test_pictures_of_every_mode_keep_their_values_in_grey_and_in_colour(tmp_path):
    ramp = np.linspace(0, 255, 784).round().astype(np.uint8).reshape(28, 28)
    deep = ramp.astype(np.uint16) * 257
    grey, black, white = (Image.fromarray(each) for each in (ramp, 0 * ramp, 0 * ramp + 255))
    for picture, expected in (
        (grey.convert("RGB"), [ramp] * 3),
        (Image.fromarray(deep), [ramp] * 3),
        (Image.fromarray(np.float32(ramp / 255)), [ramp] * 3),
        (Image.merge("LA", [grey, white]), [ramp] * 3),
        (Image.merge("LA", [white, grey]), [ramp] * 3),
        (Image.merge("RGBA", [black, black, black, grey]), [255 - ramp] * 3),
        (Image.merge("RGBA", [white, black, black, grey]), [0 * ramp + 255, *[255 - ramp] * 2]),
    ):
        values = picture_files.to_values(picture, "RGB")
        np.testing.assert_allclose(values, expected, atol=1e-4)
        if (values == values[0]).all():
            np.testing.assert_array_equal(picture_files.to_grey(picture), values[0])
    Image.fromarray(deep).save(tmp_path / "0.png", transparency=257)
    clear = picture_files.to_grey(picture_files.open_picture(tmp_path / "0.png"))
    np.testing.assert_allclose(clear, np.where(ramp == 1, 255, ramp))


def test_floats_and_32_bits_are_read_by_one_rule_for_all_pictures():
    """Classes that differ by brightness alone stay different."""
    for kind, white in ((np.float32, 1), (np.int32, 65535)):
        for grey in (51, 204):
            values = np.full((28, 28), grey / 255 * white).astype(kind)
            assert picture_files.to_grey(Image.fromarray(values)) == pytest.approx(grey)
        for wrong in (-white, 2 * white) + (np.nan, np.inf) * (white == 1):
            values[3, 3] = wrong
            with pytest.raises(ValueError, match=f"must be 0 to {white}"):
                picture_files.to_grey(Image.fromarray(values))


def fruit(kind: str, rng: np.random.Generator) -> Image.Image:
    """A red round apple, a yellow crescent or a purple plum, as grey values nearly alike."""
    paper = tuple(rng.integers(170, 256, 3).tolist())
    ink = {"apple": (200, 40, 45), "banana": (230, 200, 50), "plum": (90, 40, 120)}[kind]
    picture = Image.new("RGB", (64, 64), paper)
    (x, y), r = rng.uniform(26, 38, 2), rng.uniform(14, 20)
    width = r * (0.65 if kind == "plum" else 1)
    draw = ImageDraw.Draw(picture)
    draw.ellipse((x - width, y - r, x + width, y + r), ink)
    if kind == "banana":
        draw.ellipse((x - r, y - 1.5 * r, x + r, y + r / 2), paper)
    values = np.asarray(picture.rotate(rng.uniform(-40, 40), fillcolor=paper))
    return Image.fromarray((values + rng.normal(0, 6, values.shape)).clip(0, 255).astype(np.uint8))


def fruits(folder: Path, number: int) -> None:
    rng = np.random.default_rng(0)
    for kind in ("apple", "banana", "plum"):
        (folder / kind).mkdir(parents=True)
        for n in range(number):
            fruit(kind, rng).save(folder / kind / f"{n}.jpg")


def test_a_folder_of_colour_pictures_without_a_test_split_works_at_the_first_try(
    tmp_path, run_main, capsys
):
    fruits(tmp_path / "data", 60)
    flags = ["--dataset", tmp_path / "data", "--run-dir", tmp_path / "run", "--save-every", 10**6]
    metrics = run_main("train_mnist", *flags)
    assert metrics["eval_accuracy"] >= 0.85 and metrics["eval_samples"] == 36
    plan = capsys.readouterr().out
    assert "36 of 180 training pictures, to evaluate on" in plan
    sizes = "--batch-size 32 --epochs 113 --max-shift 3 --max-turn 20 --no-drop-last"
    assert f"of 144 pictures: {sizes}" in plan
    assert run_main("train_mnist", *flags, "--resume", "latest") == metrics
    chosen = json.loads((tmp_path / "run" / "run.json").read_text())["arguments"]
    assert (chosen["batch_size"], chosen["epochs"], chosen["drop_last"]) == (32, 113, False)


def test_what_is_held_out_is_a_fifth_of_each_class_and_nothing_is_in_both(tmp_path):
    fruits(tmp_path / "data", 10)
    for flags, sizes in (((), (24, 6)), (("--validation-split", 10), (20, 10))):
        train_set, eval_set, _ = load(tmp_path / "data", *flags, "--epochs", 1)
        both = [{x.numpy().tobytes() for x in each.tensors[0]} for each in (train_set, eval_set)]
        assert (len(both[0]), len(both[1])) == sizes and not both[0] & both[1]
        again = load(tmp_path / "data", *flags, "--seed", 5)[1]
        assert torch.equal(again.tensors[0], eval_set.tensors[0])
        assert flags or eval_set.tensors[1].bincount().tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("num", "typed", "sizes"),
    [
        (100, "", (163, 32, False, 3, 20)),
        (100, "--epochs 5 --max-turn 90", (5, 32, False, 3, 90)),  # no batch of 128 could be filled
        (100, "--batch-size 128", (3, 128, True, 1, 5)),
        (100, "--no-drop-last", (3, 128, False, 1, 5)),
        (60_000, "--max-shift 0", (3, 128, True, 0, 5)),
    ],
)
def test_sizes_that_are_given_are_kept(num, typed, sizes):
    config = parse(train_mnist.Config, typed.split())
    plan = fit_to_size(config, num, train_mnist.LARGE, train_mnist.SMALL)
    chosen = config.epochs, config.batch_size, config.drop_last, config.max_shift, config.max_turn
    assert chosen == sizes and bool(plan) == (sizes[1] == 32)
    assert not {*typed.split()} & {*" ".join(plan.values()).split()}
