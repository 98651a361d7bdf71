"""Every layout of pictures that people bring is read as they meant it or refused in a sentence."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import refused
from datasets import ClassLabel, Dataset, Features, Value
from made_pictures import (
    BAD_FILES,
    NAMES,
    NUMBERS,
    TURNED,
    colour_folder,
    dataset,
    digits,
    parquet,
    save_in,
)
from PIL import Image

import train_mnist
from trainkit.config import parse
from trainkit.errors import UsageError
from trainkit.hashes import digest
from trainkit.numbers.loaders import InMemory
from trainkit.pictures import PhotoConfig, decoding, framing, grey, load_photos, splits
from trainkit.pictures import files as picture_files


def load(folder: Path, *flags: object) -> tuple[InMemory, InMemory, dict, dict]:
    return train_mnist.load_data(
        parse(train_mnist.Config, ["--dataset", str(folder), *map(str, flags)])
    )


def load_colours(folder: Path, *flags: object) -> tuple:
    words = ["--dataset", str(folder), "--size", "28", "--fit", "squash", *map(str, flags)]
    return load_photos(parse(PhotoConfig, words))


def cells_in(folder: Path) -> list:
    """The pictures to evaluate on as they are stored."""
    rows = splits.open_dataset(str(folder), "")["test"]
    (cells,) = splits.label_rows(rows, "", None).rows[:].values()
    return cells


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
    "string labels": (changed(kind="string"), NAMES),
    "colour of many sizes": (changed(lambda p: p.crop(p.getbbox()).convert("RGB")), NAMES),
    "transparent": (changed(lambda p: Image.merge("LA", [Image.new("L", p.size), p])), NAMES),
    "folder of turned JPEG": (ending(".jpeg", exif=TURNED), NAMES),
}


@pytest.mark.parametrize(
    "layout, negative", [*((layout, False) for layout in LAYOUTS), ("transparent", True)]
)
def test_a_layout_is_read_as_it_was_meant_and_its_files_alike_by_predict(
    layout, negative, tmp_path
):
    make, names = LAYOUTS[layout]
    make(tmp_path / "data", negative)
    train_set, eval_set, metadata, _ = load(tmp_path / "data")
    assert (len(train_set), len(eval_set)) == (60, 17)
    framed = framing.learn_framing(eval_set.tensors[0]) | metadata["pictures"]
    for cell, pixels in zip(cells_in(tmp_path / "data"), eval_set.tensors[0], strict=True):
        read, _ = framing.read_photo(picture_files.source_of(cell), 28, framed)
        assert torch.equal(read[0], pixels)
    expected = [names[number % 3] for number in range(17)]
    if "folder" in layout:  # whose rows are in the order of their paths
        expected.sort()
    assert [metadata["classes"][label] for label in eval_set.tensors[1]] == expected


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_sentence_with_its_name(name, tmp_path):
    save, message = BAD_FILES[name]
    ending(".png")(tmp_path / "data")
    path = tmp_path / "data" / "train" / "one" / name
    save(path)
    for read in (lambda: load(tmp_path / "data"), lambda: framing.read_photo(path, 28, {})):
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
                features = Features(image=datasets.Image(), label=Value("string"))
                rows = {"image": [picture], "label": [path]}
                Dataset.from_dict(rows, features=features).to_parquet(folder / path)
            else:
                picture.save(folder / path, "PNG")

    return make


# How a folder is made, and the sentence.
BAD_LAYOUTS = {
    "no folder": (lambda folder: None, "there is no such file or folder$"),
    "an empty folder": (Path.mkdir, "cannot be read"),
    "a file": (Path.touch, "is a file: name its folder"),
    "no picture": (with_cell("picture", None), "row 8: .*no picture in it"),
    "no label": (with_cell("kind", None), "'kind', row 8: the label .* is not one of"),
    "a loose picture": (holding("train/a/0.png", "train/1.png"),
                        "train/1.png is in no class: put .* into the folder of its class"),
    "a split or a class": (holding("bus/0.png", "car/1.png", "train/steam/2.png"),
                           "train/ may be a class beside bus/ or a split: put all classes into"),
    "no train": (holding("test/a/0.png"), r"give only \['test'\]: .* into train/"),
    "a folder more": (holding("set/a/0.png", "set/b/0.png"), "of one class, set: "),
    "nothing read": (holding("_a/0.png", "b/0.psd"),
                     r"no picture files \(2 not read: _a/0.png, b/0.psd; archives must be"),
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
    "a class train": {"bus/0.png": "train/bus", "train/1.png": "train/train"},
    "alone": {"train/bus/0.png": "train/bus", "train/train/1.png": "train/train"},
    "of classes": {"valid/a.png": "train/valid", "invalid/a.png": "train/invalid"},
    "left": {"a/0.png": "train/a", "a/._0.png": "", "a/.ipynb_checkpoints/0.png": "",
             "__MACOSX/a/0.png": "", "_a/0.png": "", ".git/x": None, "a/Thumbs.db": None,
             "a/.DS_Store": None, "notes.csv": "", "a/_DSC1.JPG": "train/a"},
    "_set [1]": {"a/0.png": "train/a"},
    "brackets[1]": {"a.parquet": "train", "notes/chart.png": ""},
    "set.parquet": {"part-0.parquet": "train", "part-1.parquet": "train", "_SUCCESS": None,
                    "_temporary/0/part-0.parquet": "", "_delta_log/0.json": None,
                    ".ipynb_checkpoints/a.parquet": ""},
    "of splits": {"a/train-00000.parquet": "train", "a/b_test.parquet": "test", "c.parquet": ""},
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_splits_and_classes_are_folders_and_what_tools_leave_is_not_read(name, tmp_path, capfd):
    expected, found = FOLDERS[name], {}
    holding(*expected)(tmp_path / name)
    (tmp_path / name / "link").symlink_to(tmp_path)
    (tmp_path / name / "gone.png").symlink_to("nowhere")
    for split, rows in splits.open_dataset(str(tmp_path / name), "--dataset x").items():
        labels = splits.values_of(rows, "label")
        (cells,) = splits.label_rows(rows, "", "label").rows[:].values()
        for cell, label in zip(cells, labels, strict=True):
            if cell["bytes"]:
                found[label] = split
            else:
                path = Path(cell["path"]).relative_to(tmp_path / name)
                found[str(path)] = f"{split}/{label}"
    assert found == {path: split for path, split in expected.items() if split}
    num_unread, text = [*expected.values(), "", ""].count(""), capfd.readouterr().err
    assert text.count(f": {num_unread} not read: ") == 1


@pytest.mark.parametrize("kind", ["folder", "list"])
def test_other_pixels_and_another_decoder_are_other_data(kind, tmp_path, monkeypatch):
    data, flags = tmp_path / "data", ["--label", "cls"] if kind == "list" else []

    def read(negative: bool) -> torch.Tensor:
        """Of files with equal names, sizes and times."""
        ending(".bmp")(data, negative)
        for split in NUMBERS if kind == "list" else ():
            names = [f"{NAMES[n % 3]}/{n}.bmp" for n in range(NUMBERS[split])]
            lines = ["file_name,cls", *(f"{name},{name[0]}" for name in names)]
            (data / split / "metadata.csv").write_text("\n".join(lines))
        for path in data.rglob("*"):
            os.utime(path, (1e9, 1e9))
        return load(data, *flags)[0].tensors[0]

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    first = read(negative=False)
    assert torch.equal(read(negative=True), 255 - first)
    assert Path(picture_files.__file__).read_bytes() in picture_files.READER
    monkeypatch.setattr(picture_files, "READER", b"another")
    before = len([*tmp_path.rglob("*.npy")])
    read(negative=False)
    assert len([*tmp_path.rglob("*.npy")]) == before + 2


@pytest.mark.parametrize("num_bytes", [1, 3 * 784, 2**18])
def test_each_row_has_its_own_hash_in_batches_of_any_size(num_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "NUM_BYTES", num_bytes)
    cells = dataset()["train"].select_columns("picture")
    cells = cells.cast_column("picture", datasets.Image(decode=False))
    made = decoding.Pictures(cells, 28, picture_files.read_square)
    forms, hashes, problems = decoding.decode(made, (1, 28, 28), tmp_path / "x.npy")
    rows = np.load(tmp_path / "x.npy")
    assert hashes == "".join(digest(row.tobytes())[:16] for row in rows) and not problems
    assert forms.total() == len(rows) == len({*map(bytes, rows)}) > 7


def test_a_picture_that_has_the_size_is_still_padded_where_less_is_seen():
    grid = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3
    picture = Image.fromarray(grid)
    assert (picture_files.fit_square(picture, 8, "squash") == grid).all()
    inner = np.array(picture.resize((4, 4), Image.Resampling.BICUBIC))
    assert (picture_files.fit_square(picture, 8, "pad", 4) == picture_files.pad(inner, 8)).all()


@pytest.mark.parametrize("factor, kind", [(257, np.uint16), (1 / 255, np.float32)])
def test_deep_greys_have_one_range_in_the_whole_set_which_is_said(factor, kind, tmp_path):
    """Also a dark file, and a split that has no bright one."""
    to_depth = lambda p: Image.fromarray((np.asarray(p, float) * factor).astype(kind))  # noqa: E731
    made, dark = dataset(change=to_depth), [p.point(lambda v: v // 8) for p in digits(17)]
    rows = {"picture": [*map(to_depth, dark)], "kind": [n % 3 for n in range(17)]}
    made["test"] = Dataset.from_dict(rows, features=made["test"].features)
    parquet(tmp_path / "data", made)
    train_set, eval_set, metadata, plan = load(tmp_path / "data")
    for images, expected in ((train_set, digits(60)), (eval_set, dark)):
        for pixels, picture in zip(images.tensors[0], expected, strict=True):
            assert np.abs(pixels[0].numpy().astype(int) - np.asarray(picture)).max() <= 1
    assert plan["greys"].endswith("0 is black, 65535, or 1 of fractions, is white (--grey-range)")
    rows["picture"][0].save(tmp_path / "0.tiff")
    framed = framing.learn_framing(eval_set.tensors[0]) | metadata["pictures"]
    read, _ = framing.read_photo(tmp_path / "0.tiff", 28, framed, **metadata["reading"])
    assert torch.equal(read[0], eval_set.tensors[0][0])
    train, held_out, of_colours = load_colours(tmp_path / "data")
    assert of_colours["greys"] == plan["greys"]
    for part, images in ((train, train_set), (held_out, eval_set)):
        colours = part.pick(torch.arange(len(part))).images
        assert (colours - images.tensors[0]).count_nonzero() == 0


def test_one_file_on_transparent_ground_is_seen_alike_in_grey_and_in_colour(tmp_path):
    """On white, as on a page, or on black where it could not be seen on white."""
    for shade, ground in ((255, 0), (230, 0), (150, 255), (0, 255)):
        icon = np.full((28, 28, 4), shade, np.uint8)
        icon[..., 3] = 0
        icon[8:20, 8:20, 3] = 255
        Image.fromarray(icon).save(tmp_path / "icon.png")
        square, _ = picture_files.read_square(tmp_path / "icon.png", 28)
        centre, _ = picture_files.read_centre(tmp_path / "icon.png", 28)
        assert (centre == square[0][..., None]).all() and square[0, 0, 0] == ground
        assert square[0, 14, 14] == shade


def test_a_folder_of_colour_pictures_without_a_test_split_works_at_the_first_try(
    tmp_path, run_main, capsys, monkeypatch
):
    monkeypatch.setattr(grey, "NUM_SEEN", 144 * 20)
    colour_folder(tmp_path / "data", 60)
    flags = ["--dataset", tmp_path / "data", "--run-dir", tmp_path / "run", "--save-every", 10**6]
    metrics = run_main("train_mnist", *flags)
    assert metrics["eval_accuracy"] >= 0.85 and metrics["eval_samples"] == 36
    plan = capsys.readouterr().out
    sizes = "--batch-size 32 --epochs 20 --no-drop-last --max-shift 3 --max-turn 20"
    assert f"of 144 pictures: {sizes}" in plan
    assert run_main("train_mnist", *flags, "--resume", "latest") == metrics


def test_what_is_held_out_is_a_fifth_of_each_class_and_nothing_is_in_both(tmp_path):
    colour_folder(tmp_path / "data", 10)
    for flags, sizes in (((), (24, 6)), (("--validation-split", 10), (20, 10))):
        train_set, eval_set, *_ = load(tmp_path / "data", *flags, "--epochs", 1)
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
    *sets, plan = load_colours(tmp_path / "one")
    train, held_out = ({*part.split.hashes.tolist()} for part in sets)
    assert not train & held_out and sum(map(len, sets)) == 45
    assert plan["twice"] == "15 of 45 pictures repeat another: on one side"
    train_set, eval_set, _, of_greys = load(tmp_path / "one")
    train, held_out = ({*map(bytes, part.tensors[0].numpy())} for part in (train_set, eval_set))
    assert not train & held_out and len(train | held_out) == 30
    few = "fewer than 5 pictures to evaluate on: one 2, two 2"
    assert plan["rare"] == of_greys["rare"] == f"2 of 3 classes have {few}"
    shutil.copytree(tmp_path / "one", tmp_path / "two" / "train")
    shutil.copytree(tmp_path / "one" / "one", tmp_path / "two" / "val" / "one")
    plan = load(tmp_path / "two")[-1]
    assert plan["twice"] == "10 of 10 pictures to evaluate on are also trained on"
    assert plan["rare"].endswith(" on: three 0, two 0")


@pytest.mark.parametrize(
    "factor, kind, said",
    [
        (16, np.uint16, "nearly black if 65535"),  # 12 bits in 16
        (-1, np.int32, r"mode I\) are -255 to 0, not 0 to 65535: .* --grey-range"),
        (1, np.float32, r"mode F\) are 0 to 255, not 0 to 1: .* --grey-range"),
    ],
)
def test_deep_greys_that_do_not_fit_the_range_are_a_question(factor, kind, said, tmp_path):
    to_depth = lambda p: Image.fromarray((np.asarray(p, float) * factor).astype(kind))  # noqa: E731
    parquet(tmp_path / "data", dataset(change=to_depth))
    with pytest.raises(UsageError, match=said):
        load(tmp_path / "data")
    low, high = sorted((0, 255 * factor))
    train_set, _, metadata, _ = load(tmp_path / "data", "--grey-range", low, high)
    expected = np.asarray(digits(1)[0], int)
    expected = 255 - expected if factor < 0 else expected
    assert np.abs(train_set.tensors[0][0, 0].numpy() - expected).max() <= 1
    assert metadata["reading"]["greys"] == {"any": [low, high]}
