"""Every layout of pictures that people bring is read as they meant it or refused in a sentence."""

import io
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, refused
from datasets import ClassLabel, Dataset, Features, Value
from PIL import Image, ImageOps

import train_mnist
from examples.pictures import Config
from trainkit.config import parse
from trainkit.numbers.loaders import InMemory
from trainkit.pictures import files as picture_files
from trainkit.pictures import grey as pictures
from trainkit.pictures import photos as photos_in_colour
from trainkit.pictures.decoding import source_of
from trainkit.pictures.grey import Sampled
from trainkit.pictures.small import fit_to_size
from trainkit.pictures.splits import read_split
from trainkit.tools import photos

NUMBERS = {"train": 60, "test": 17}
NAMES = ["three", "one", "two"]


def load(folder: Path, *flags: object) -> tuple[InMemory, InMemory, dict]:
    return train_mnist.load_data(
        parse(train_mnist.Config, ["--dataset", str(folder), *map(str, flags)])
    )


def digits(number: int, negative: bool = False) -> list[Image.Image]:
    """Shipped digits of the three classes in turn, or dark ones on white."""
    shipped = pq.read_table(ROOT / "data/mnist/test-00000-of-00001.parquet").to_pandas()
    of_classes = [shipped.image[shipped.label == digit] for digit in (3, 1, 2)]
    cells = chain.from_iterable(zip(*of_classes, strict=False))
    pictures = [Image.open(io.BytesIO(cell["bytes"])) for cell in islice(cells, number)]
    return [*map(ImageOps.invert, pictures)] if negative else pictures


# Labels as one of the things that people have: of each digit.
LABELS = {
    "ClassLabel": ([0, 1, 2], ClassLabel(names=NAMES)),
    "int": ([5, 6, 7], Value("int16")),
    "string": (NAMES, Value("string")),
    "bool": ([False, True, False], Value("bool")),
}


def dataset(
    kind: str = "ClassLabel", change: Callable = lambda picture: picture, negative: bool = False
) -> dict[str, Dataset]:
    """{split: Dataset}, `change` applied to each picture."""
    of_classes, feature = LABELS[kind]
    features = Features(picture=datasets.Image(), kind=feature)
    made = {}
    for split, number in NUMBERS.items():
        values = [of_classes[n % 3] for n in range(number)]
        rows = {"picture": [*map(change, digits(number, negative))], "kind": values}
        made[split] = Dataset.from_dict(rows, features=features)
    return made


def parquet(folder: Path, made: dict):
    folder.mkdir(exist_ok=True)
    for split, rows in made.items():
        rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def save_in(folder: Path, ending: str, pictures: list[Image.Image], **options: object):
    """Save digits in the folders of their classes."""
    for n, picture in enumerate(pictures):
        path = folder / NAMES[n % 3] / f"{n}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, **options)


TURNED = Image.Exif()
TURNED[0x0112] = 6  # orientation: shown a quarter turned


def changed(change: Callable = lambda picture: picture, kind: str = "ClassLabel") -> Callable:
    """A layout: Parquet files of pictures that `change` made."""
    return lambda folder, negative: parquet(folder, dataset(kind, change, negative=negative))


def ending(name: str, **options: object) -> Callable:
    """A layout: a folder of files of one kind in the folder of each class."""

    def make(folder: Path, negative: bool = False):
        for split, number in NUMBERS.items():
            save_in(folder / split, name, digits(number, negative), **options)

    return make


# How a folder is made, and what each digit is called.
LAYOUTS = {
    "ClassLabel": (changed(), NAMES),
    "int labels": (changed(kind="int"), ["5", "6", "7"]),
    "string labels": (changed(kind="string"), NAMES),
    "bool labels": (changed(kind="bool"), ["False", "True", "False"]),
    "colour of many sizes": (changed(lambda p: p.crop(p.getbbox()).convert("RGB")), NAMES),
    "transparent": (changed(lambda p: Image.merge("LA", [Image.new("L", p.size), p])), NAMES),
    "folder of turned JPEG": (ending(".jpeg", exif=TURNED), NAMES),
    "folder of photos with a copy": (
        ending(".mpo", save_all=True, append_images=[Image.new("L", (9, 9))]),
        NAMES,
    ),
}


@pytest.mark.parametrize(
    "layout, negative",
    [*((layout, False) for layout in LAYOUTS), ("ClassLabel", True), ("transparent", True)],
)
def test_a_layout_is_read_as_it_was_meant_and_its_files_alike_by_predict(
    layout, negative, tmp_path
):
    make, names = LAYOUTS[layout]
    make(tmp_path / "data", negative)
    train_set, eval_set, metadata = load(tmp_path / "data")
    assert (len(train_set), len(eval_set)) == (60, 17)
    framing = photos.learn_framing(eval_set.tensors[0]) | metadata["pictures"]
    cells, *_ = read_cells(tmp_path / "data", "test")
    for cell, pixels in zip(cells, eval_set.tensors[0], strict=True):
        assert torch.equal(photos.read_photo(source_of(cell), 28, framing)[0][0], pixels)
    expected = [names[number % 3] for number in range(17)]
    if "folder" in layout:  # whose rows are in the order of their paths
        expected.sort()
    assert [metadata["classes"][label] for label in eval_set.tensors[1]] == expected


def read_cells(folder: Path, split: str) -> tuple:
    """What read_split returns, the first as dicts of `bytes` and `path`."""
    rows, *others = read_split(str(folder), split)
    as_they_are = rows.cast_column(rows.column_names[0], datasets.Image(decode=False))
    return as_they_are[:][rows.column_names[0]], *others


def save_large(path: Path):
    Image.new("1", (20_000, 20_000)).save(path, compress_level=1)


def save_truncated(path: Path):
    Image.effect_noise((64, 64), 99).save(path)
    path.write_bytes(path.read_bytes()[:1500])


POSTSCRIPT = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n"
TWO = {"save_all": True, "append_images": [Image.new("L", (28, 28), 9)]}  # frames
# How a bad file is written, and the sentence.
BAD_FILES = {
    "20,000 x 20,000.png": (save_large, "400000000 pixels"),
    "truncated.png": (save_truncated, "truncated"),
    "text.png": (lambda path: path.write_text("not a picture"), "not one of PNG, JPEG"),
    "postscript.png": (lambda path: path.write_text(POSTSCRIPT), "not one of PNG, JPEG"),
    "moving.gif": (lambda path: Image.new("L", (28, 28)).save(path, **TWO), "holds 2 pictures"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_sentence_with_its_name(name, tmp_path):
    save, message = BAD_FILES[name]
    ending(".png")(tmp_path / "data")
    path = tmp_path / "data" / "train" / "one" / name
    save(path)
    for read in (lambda: load(tmp_path / "data"), lambda: photos.read_photo(path, 28, {})):
        with refused(message) as raised:
            read()
        assert name in str(raised.value)


def with_cell(name: str, value: object, kind: str = "ClassLabel", split: str = "train") -> Callable:
    """A layout with another value in row 8 of a split."""

    def make(folder: Path):
        made = dataset(kind)
        rows = made[split].cast_column("picture", datasets.Image(decode=False)).to_dict()
        rows[name][7] = value
        made[split] = Dataset.from_dict(rows, features=made[split].features)
        parquet(folder, made)

    return make


def with_rows(change: Callable[[Dataset], Dataset], kind: str = "int") -> Callable:
    """A layout whose splits are changed."""
    return lambda folder: parquet(
        folder, {split: change(rows) for split, rows in dataset(kind).items()}
    )


two_columns = with_rows(lambda rows: rows.add_column("id", [*range(len(rows))]))


def two_minds(folder: Path):
    parquet(folder, dataset())
    part = dataset()["test"].cast_column("kind", ClassLabel(names=sorted(NAMES)))
    part.to_parquet(folder / "train-00001-of-00002.parquet")


def holding(*paths: str) -> Callable[[Path], None]:
    """A layout: files at these paths, each with a row of its own: a picture, or its class too."""

    def make(folder: Path):
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            picture = Image.new("L", (8, 8), len(path))
            if path.endswith(".parquet"):
                labels = [] if "empty" in path else [path]
                rows = {"image": [picture] * len(labels), "label": labels}
                features = Features(image=datasets.Image(), label=Value("string"))
                made = Dataset.from_dict(rows, features=features)
                pq.write_table(made.data.table, folder / path)  # to_parquet: no empty table
            else:
                picture.save(folder / path, "PNG")

    return make


def zipped(folder: Path, *paths: str):
    holding(*paths)(folder.parent / "inside")
    folder.mkdir()
    shutil.make_archive(str(folder / "train"), "zip", folder.parent / "inside")


# How a folder is made, and the sentence.
BAD_LAYOUTS = {
    "no folder": (lambda folder: None, "cannot be read"),
    "an empty folder": (Path.mkdir, "cannot be read"),
    "a file": (Path.touch, "is a file: name its folder"),
    "an archive of classes": (lambda f: zipped(f, "a/0.png", "b/0.png"), "unpack train.zip, "),
    "no picture": (with_cell("picture", None), "row 8: .*no picture in it"),
    "no rows": (holding("train.parquet", "test_empty.parquet"), "'test': .* no rows"),
    "no label": (with_cell("kind", None), "'kind', row 8: the label .* is not one of"),
    "no number": (with_cell("kind", None, "int"), "row 8: the label None is not"),
    "no pictures": (with_rows(lambda rows: rows.remove_columns("picture")), "one Image column"),
    "fractions": (with_rows(lambda rows: rows.cast_column("kind", Value("float32"))),
                  "--label must name .*whole numbers or texts"),
    "a loose picture": (holding("train/a/0.png", "train/1.png"),
                        "train/1.png is in no class: put .* into the folder of its class"),
    "no train": (holding("test/a/0.png"), r"give only \['test'\]: .* into train/"),
    "classes beside test": (holding("a/0.png", "test/a/0.png"), r"give only \['test'\]: "),
    "a folder more": (holding("set/a/0.png", "set/b/0.png"), "one class, set: "),
    "nothing read": (holding("_a/0.png", "b/0.psd"),
                     r"no picture .*hidden \(1\): _a/0.png; no picture files \(1\): b/"),
    "two columns": (two_columns, "--label must name .*'kind', 'id'"),
    "a new class": (with_cell("kind", "four", "string", "test"),
                    "'test', column 'kind', row 8: the label 'four' is not one of"),
    "files of two minds": (two_minds, "its files differ in their columns or classes"),
}  # fmt: skip


@pytest.mark.parametrize("layout", BAD_LAYOUTS)
def test_a_layout_that_cannot_be_meant_is_one_sentence(layout, tmp_path):
    make, message = BAD_LAYOUTS[layout]
    make(tmp_path / "data")
    with refused(message) as raised:
        load(tmp_path / "data")
    assert f"{tmp_path}/data" in str(raised.value)


# What it is called; its files, and of which split and class each is. "": counted as not read.
FOLDERS = {
    "words": {"airport/my train 0.png": "train/airport", "airport/test_3.png": "train/airport",
              "train station/0.png": "train/train station", "val/d/0.png/.0.png": ""},
    "splits": {"train/test/val.png": "train/test", "train/test/a/b/0.png": "train/test",
               "val/test/0.PNG": "validation/test", "other/a/0.png": "", "montage.png": ""},
    "other words": {"Training/a/0.png": "train/a", "Test/a/0.png": "test/a"},
    "dev": {"train/a/0.png": "train/a", "dev/a/0.png": "validation/a"},
    "of classes": {"valid/a.png": "train/valid", "invalid/a.png": "train/invalid"},
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
    (tmp_path / name / "gone.png").symlink_to("nowhere")
    for split in ("train", "test"):
        cells, numbers, classes, _, where = read_cells(tmp_path / name, split)
        for cell, number in zip(cells, numbers, strict=True):
            label, own = classes[number], where.split("'")[-2]
            if not cell["bytes"]:
                own, label = f"{own}/{label}", str(Path(cell["path"]).relative_to(tmp_path / name))
            found[label] = own
    assert found == {path: split for path, split in expected.items() if split}
    num_unread, text = [*expected.values(), "", ""].count(""), capfd.readouterr().err
    assert text.count(f": {num_unread} not read: ") == 1
    assert "linked folders (1): link" in text and "links that lead nowhere (1): gone.png" in text


@pytest.mark.parametrize("kind", ["folder", "list", "parquet"])
def test_other_pixels_and_another_decoder_are_other_data(kind, tmp_path, monkeypatch):
    data, label = tmp_path / "data", "cls" if kind == "list" else None

    def read(negative: bool) -> torch.Tensor:
        """Of files with equal names, times and, but for Parquet, sizes."""
        make = changed() if kind == "parquet" else ending(".bmp")
        make(data, negative)
        for split in NUMBERS if kind == "list" else ():
            names = [f"{NAMES[n % 3]}/{n}.bmp" for n in range(NUMBERS[split])]
            lines = ["file_name,cls", *(f"{name},{name[0]}" for name in names)]
            (data / split / "metadata.csv").write_text("\n".join(lines))
        for path in data.rglob("*"):
            os.utime(path, (1e9, 1e9))
        return pictures.load_images(str(data), "train", 28, label)[0].tensors[0]

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    first = read(negative=False)
    assert torch.equal(read(negative=True), 255 - first)
    assert Path(picture_files.__file__).read_bytes() in picture_files.READER
    monkeypatch.setattr(picture_files, "READER", b"another")
    before = len([*tmp_path.rglob("*.npy")])
    read(negative=False)
    assert len([*tmp_path.rglob("*.npy")]) == before + 1


@pytest.mark.parametrize(
    "scale, kind, said",
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
    assert load(tmp_path / "data", "--label", "kind")[2]["classes"] == ["5", "6", "7"]
    assert load(tmp_path / "data", "--label", "id")[1].tensors[1].tolist() == [*range(17)]


def test_the_classes_of_another_split_go_by_their_names(tmp_path):
    made = dataset("string")
    made["test"] = few = made["test"].filter(lambda row: row["kind"] != "one")  # else `two` is 2
    parquet(tmp_path / "data", made)
    _, eval_set, metadata = load(tmp_path / "data")
    assert metadata["classes"] == sorted(NAMES)
    assert [metadata["classes"][label] for label in eval_set.tensors[1]] == [*few["kind"]]


def test_what_is_learned_of_pictures_is_theirs_alone():
    pixels = torch.zeros(3, 28, 28, dtype=torch.uint8)
    pixels[0, 4:24, 10:18] = 200
    pixels[1] = 255
    pixels[1, 4:24, 10:18] = 5  # the third has nothing in it
    seen = photos.learn_framing(pixels[:, None])
    assert seen == {"border": [0, 1], "framed": True}
    pixels[0, 1:24, 10:18] = 200
    assert not photos.learn_framing(pixels[:, None])["framed"]
    pixels, kinds = pixels.flatten(1), Counter(["28 x 28 L"] * 3)
    described = pictures.describe_pictures(28, Sampled(pixels, kinds))
    assert described == {"read_as": "28 x 28 grey", "shape": [28, 28]}
    mixed = kinds + Counter(["2 x 2 L", "3 x 3 L", "2 x 2 L"])
    described = pictures.describe_pictures(28, Sampled(pixels, mixed))
    assert described["shape"] is None
    assert described["read_as"] == "28 x 28 L and 2 other kinds read as 28 x 28 grey"
    with refused("a single grey value"):
        pictures.describe_pictures(28, Sampled(pixels[2:], kinds))


def test_pictures_of_every_mode_keep_their_values_in_grey_and_in_colour(tmp_path):
    ramp = np.linspace(0, 255, 784).round().astype(np.uint8).reshape(28, 28)
    grey, black, white = (Image.fromarray(each) for each in (ramp, 0 * ramp, 0 * ramp + 255))
    for picture, expected in (
        (grey.convert("RGB"), [ramp] * 3),
        (Image.fromarray(ramp.astype(np.uint16) * 257), [ramp] * 3),
        (Image.merge("LA", [white, grey]), [ramp] * 3),
        (Image.merge("RGBA", [black, black, black, grey]), [255 - ramp] * 3),
        (Image.merge("RGBA", [white, black, black, grey]), [0 * ramp + 255, *[255 - ramp] * 2]),
    ):
        values = picture_files.to_values(picture, "RGB")
        np.testing.assert_allclose(values, expected, atol=1e-4)
        if (values == values[0]).all():
            np.testing.assert_array_equal(picture_files.to_grey(picture), values[0])
    grey.save(tmp_path / "0.png", exif=TURNED)
    upright = picture_files.open_picture(tmp_path / "0.png")
    np.testing.assert_array_equal(picture_files.to_grey(upright), np.rot90(ramp, -1))


def test_floats_and_32_bits_are_read_by_one_rule_for_all_pictures():
    """Classes that differ by brightness alone stay different."""
    for kind, white in ((np.float32, 1), (np.int32, 65535)):
        values = np.full((28, 28), 51 / 255 * white).astype(kind)
        assert picture_files.to_grey(Image.fromarray(values)) == pytest.approx(51)
        for wrong in (-white, 2 * white) + (np.nan, np.inf) * (white == 1):
            values[3, 3] = wrong
            with pytest.raises(ValueError, match=f"must be 0 to {white}"):
                picture_files.to_grey(Image.fromarray(values))


def colour_folder(folder: Path, number: int):
    """So many red threes, gold ones and purple twos on white, in folders of their own."""
    inks = "red", "gold", "purple"
    coloured = [
        ImageOps.colorize(picture.resize((64, 64)), "white", inks[n % 3])
        for n, picture in enumerate(digits(3 * number))
    ]
    save_in(folder, ".jpg", coloured)


def test_a_folder_of_colour_pictures_without_a_test_split_works_at_the_first_try(
    tmp_path, run_main, capsys
):
    colour_folder(tmp_path / "data", 60)
    flags = ["--dataset", tmp_path / "data", "--run-dir", tmp_path / "run", "--save-every", 10**6]
    metrics = run_main("train_mnist", *flags)
    assert metrics["eval_accuracy"] >= 0.85 and metrics["eval_samples"] == 36
    plan = capsys.readouterr().out
    assert len(re.findall("^[0-9]+/113 ", plan, re.M)) == 24  # every fifth, and two more
    assert "36 of 180 training pictures, to evaluate on" in plan
    sizes = "--batch-size 32 --epochs 113 --max-shift 3 --max-turn 20 --no-drop-last"
    assert f"of 144 pictures: {sizes}" in plan
    assert run_main("train_mnist", *flags, "--resume", "latest") == metrics


def test_what_is_held_out_is_a_fifth_of_each_class_and_nothing_is_in_both(tmp_path):
    colour_folder(tmp_path / "data", 10)
    for flags, sizes in (((), (24, 6)), (("--validation-split", 10), (20, 10))):
        train_set, eval_set, _ = load(tmp_path / "data", *flags, "--epochs", 1)
        both = [{x.numpy().tobytes() for x in each.tensors[0]} for each in (train_set, eval_set)]
        assert (len(both[0]), len(both[1])) == sizes and not both[0] & both[1]
        again = load(tmp_path / "data", *flags, "--seed", 5)[1]
        assert torch.equal(again.tensors[0], eval_set.tensors[0])
        assert flags or eval_set.tensors[1].bincount().tolist() == [2, 2, 2]


def test_equal_pictures_are_on_one_side_and_what_an_evaluation_cannot_tell_is_in_the_plan(tmp_path):
    colour_folder(tmp_path / "one", 10)
    for path in [*(tmp_path / "one" / "three").iterdir()][:5]:
        for n in range(3):
            shutil.copy(path, path.with_stem(f"copy {n} of {path.stem}"))
    config = parse(Config, ["--dataset", str(tmp_path / "one"), "--resize", "32"])
    *sets, plan = photos_in_colour.load_sets(config)
    train, held_out = ({*part.split.hashes.tolist()} for part in sets)
    assert not train & held_out and sum(map(len, sets)) == 45
    assert plan["twice"] == "15 of 45 pictures repeat another: on one side"
    train_set, eval_set, metadata = load(tmp_path / "one")
    train, held_out = ({*map(bytes, part.tensors[0].numpy())} for part in (train_set, eval_set))
    assert not train & held_out and len(train | held_out) == 30
    few = "fewer than 5 pictures to evaluate on: one 2, two 2"
    assert plan["rare"] == metadata["plan"]["rare"] == f"2 of 3 classes have {few}"
    shutil.copytree(tmp_path / "one", tmp_path / "two" / "train")
    shutil.copytree(tmp_path / "one" / "one", tmp_path / "two" / "val" / "one")
    shutil.copy(tmp_path / "one" / "two" / "2.jpg", tmp_path / "two" / "val" / "one" / "of two.jpg")
    config.dataset = str(tmp_path / "two")
    for plan in (load(tmp_path / "two")[2]["plan"], photos_in_colour.load_sets(config)[-1]):
        assert plan["twice"] == "11 of 11 pictures to evaluate on are also trained on"
        assert plan["rare"].endswith(" on: three 0, two 0")


@pytest.mark.parametrize(
    "num, typed, sizes",
    [
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
