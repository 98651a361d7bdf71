"""Every layout of pictures that people bring is read as they meant it or refused in a sentence."""

import io
import json
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import linux_only
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from PIL import Image, ImageDraw

import predict
import train_mnist
from datakit import files as picture_files
from datakit import pictures
from modelkit import photos
from trainkit.errors import UsageError
from trainkit.order import InMemory

NUMBERS = {"train": 60, "test": 17}
NAMES = ["three", "one", "two"]


def load(folder: Path, *flags: object) -> tuple[InMemory, InMemory, dict]:
    return train_mnist.load_data(
        train_mnist.parse_args(["--dataset", str(folder), *map(str, flags)])
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


def metadata_folder(folder: Path, negative: bool = False) -> None:
    for split in NUMBERS:
        (folder / split).mkdir(parents=True)
        names = [f"{n}.png" for n in range(NUMBERS[split])]
        for name, picture in zip(names, shapes(split, negative), strict=True):
            picture.save(folder / split / name)
        texts = [NAMES[label] for label in labels(split)]
        table = pd.DataFrame({"file_name": names, "kind": texts})
        table.to_csv(folder / split / "metadata.csv", index=False)


def transparent(picture: Image.Image) -> Image.Image:
    ink = Image.new("RGBA", picture.size, (0, 0, 0, 0))
    ink.putalpha(picture)
    return ink


def deep(picture: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(picture, dtype=np.uint16) * 257)


def of_many_sizes(picture: Image.Image) -> Image.Image:
    side = 20 + int(np.asarray(picture, dtype=int).sum()) % 30
    return picture.resize((side, side + 3))


BY_NAME, SORTED = NAMES, sorted(NAMES)
# How a folder is made, flags, the classes, and what the plan says of the pictures.
LAYOUTS = {
    "ClassLabel": (lambda f, n: parquet(f, dataset(negative=n)), [], BY_NAME, "28 x 28 grey"),
    "int labels": (lambda f, n: parquet(f, dataset("int", negative=n)), [], ["5", "6", "7"],
                   "28 x 28 grey"),
    "string labels": (lambda f, n: parquet(f, dataset("string", negative=n)), [], SORTED,
                      "28 x 28 grey"),
    "bool labels": (lambda f, n: parquet(f, dataset("bool", negative=n)), [], ["False", "True"],
                    "28 x 28 grey"),
    "colour": (lambda f, n: parquet(f, dataset(
        change=lambda p: p.resize((32, 32)).convert("RGB"), negative=n)), [], BY_NAME,
        "32 x 32 RGB read as 28 x 28 grey"),
    "palette": (lambda f, n: parquet(f, dataset(change=lambda p: p.convert("P"), negative=n)), [],
                BY_NAME, "28 x 28 P read as 28 x 28 grey"),
    "bits": (lambda f, n: parquet(f, dataset(change=lambda p: p.convert("1"), negative=n)), [],
             BY_NAME, "28 x 28 1 read as 28 x 28 grey"),
    "transparent": (lambda f, n: parquet(f, dataset(change=transparent, negative=n)), [], BY_NAME,
                    "28 x 28 RGBA read as 28 x 28 grey"),
    "16 bits": (lambda f, n: parquet(f, dataset(change=deep, negative=n)), [], BY_NAME,
                "28 x 28 I of 0 to 65535 read as 28 x 28 grey"),
    "not square": (lambda f, n: parquet(f, dataset(change=lambda p: p.resize((40, 33)),
                                                   negative=n)), [], BY_NAME,
                   "40 x 33 L read as 28 x 28 grey"),
    "many sizes": (lambda f, n: parquet(f, dataset(change=of_many_sizes, negative=n)), [], BY_NAME,
                   None),
    "save_to_disk": (lambda f, n: DatasetDict(dataset("int", negative=n)).save_to_disk(f), [],
                     ["5", "6", "7"], "28 x 28 grey"),
    "save_to_disk of one": (lambda f, n: dataset(negative=n)["train"].save_to_disk(f),
                            ["--validation-split", 20], BY_NAME, "28 x 28 grey"),
    "folder of PNG": (lambda f, n: image_folder(f, ".png", n), [], SORTED, "28 x 28 grey"),
    "folder of JPEG": (lambda f, n: image_folder(f, ".JPG", n, quality=90), [], SORTED,
                       "28 x 28 grey"),
    "folder of turned JPEG": (lambda f, n: image_folder(f, ".jpeg", n, exif=turned()), [], SORTED,
                              "28 x 28 grey"),
    "folder of TIFF": (lambda f, n: image_folder(f, ".tiff", n), [], SORTED, "28 x 28 grey"),
    "folder of GIF": (lambda f, n: image_folder(f, ".gif", n), [], SORTED, None),
    "folder of WebP": (lambda f, n: image_folder(f, ".webp", n, lossless=True), [], SORTED,
                       "28 x 28 RGB read as 28 x 28 grey"),
    "folder and metadata.csv": (metadata_folder, [], SORTED, "28 x 28 grey"),
}  # fmt: skip


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: shown a quarter turned
    return exif


FAST = {"ClassLabel", "colour", "transparent", "many sizes", "folder of turned JPEG"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_it_was_meant(layout: str, tmp_path: Path) -> None:
    make, flags, classes, read_as = LAYOUTS[layout]
    make(tmp_path / "data", False)
    train_set, eval_set, about = load(tmp_path / "data", *flags)
    assert about["classes"] == classes
    if read_as:
        assert about["pictures"]["read_as"] == read_as
    assert (len(train_set), len(eval_set)) == ((40, 20) if flags else (60, 17))
    if not flags and len(classes) == 3:
        words = {"5": "three", "6": "one", "7": "two"}
        names = [words.get(classes[n], classes[n]) for n in eval_set.tensors[1]]
        assert Counter(names) == Counter(NAMES[n] for n in labels("test"))
        if "folder" not in layout:  # whose rows are in the order of their paths
            assert names == [NAMES[n] for n in labels("test")]


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(
    "layout",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_predict_is_right_on_the_pictures_that_the_evaluation_was_right_on(
    layout: str, negative: bool, tmp_path: Path, run_main: Callable, capsys: pytest.CaptureFixture
) -> None:
    make, flags, *_ = LAYOUTS[layout]
    make(tmp_path / "data", negative)
    run_main(
        "train_mnist",
        "--dataset",
        tmp_path / "data",
        "--run-dir",
        tmp_path / "run",
        "--epochs",
        3,
        "--batch-size",
        10,
        "--no-augment",
        *flags,
    )
    _, eval_set, about = load(tmp_path / "data", *flags)
    predictor, saved = predict.load_run(tmp_path / "run")
    assert saved["pictures"] == about["pictures"]
    paths = files(tmp_path)
    if flags:  # held out of the training pictures, in an order of their own
        order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[: flags[1]]
        paths = [paths[index] for index in order]
    right = 0
    for path, pixels, label in zip(paths, *eval_set.tensors, strict=True):
        read = photos.read_picture(path, 28, saved["pictures"])
        assert torch.equal(read[0], pixels), path
        with torch.inference_mode():
            right += predictor(read)[0].argmax().item() == label
    metrics = pd.read_json(tmp_path / "run" / "metrics.jsonl", lines=True).iloc[-1]
    assert right == round(metrics.eval_accuracy * len(paths))
    assert metrics.eval_accuracy > 0.5 or layout == "bits"


def files(folder: Path) -> list[Path]:
    """The evaluation pictures as files, in their order."""
    name = str(folder / "data")
    if (folder / "data" / "state.json").exists():
        rows = datasets.load_from_disk(name)
    else:
        rows = datasets.load_dataset(name)["test"]
    image = next(key for key, kind in rows.features.items() if isinstance(kind, datasets.Image))
    paths = []
    for number, cell in enumerate(rows.cast_column(image, datasets.Image(decode=False))[image]):
        if cell["bytes"] is not None:
            (folder / f"{number}.png").write_bytes(cell["bytes"])
        paths.append(folder / f"{number}.png" if cell["bytes"] is not None else Path(cell["path"]))
    return paths


def test_a_dark_digit_on_white_is_told_by_a_model_of_either_kind(tmp_path: Path) -> None:
    for negative in (False, True):
        folder = tmp_path / f"{negative}"
        parquet(folder, dataset(negative=negative))
        seen = load(folder)[2]["pictures"]
        assert seen["border"] == ([1.0, 1.0] if negative else [0.0, 0.0])
        for other in (False, True):
            shapes("test", other)[0].save(tmp_path / "picture.png")
            read = photos.read_picture(tmp_path / "picture.png", 28, seen)
            assert (read[0, 0, 0, 0] == 255) == negative
            kept = photos.read_picture(tmp_path / "picture.png", 28, seen, as_is=True)
            assert torch.equal(kept, read) == (other == negative)


def save_bomb(path: Path, width: int, height: int) -> None:
    """A PNG file of a few bytes that says it holds width x height pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
            for name, content in chunks
        )
    )


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
    "20,000 x 20,000.png": (lambda p: save_bomb(p, 20_000, 20_000), "400000000 pixels"),
    "10,000 x 10,000.png": (lambda p: save_bomb(p, 10_000, 10_000), "100000000 pixels"),
    "2**31.png": (lambda p: save_bomb(p, 2**31 - 1, 2**31 - 1), "pixels"),
    "no width.png": (lambda p: save_bomb(p, 0, 28), "none of PNG|pixel|zero|size|empty"),
    "truncated.png": (save_truncated, "truncated"),
    "short.png": (lambda p: save_bomb(p, 2000, 2000), "truncated|broken"),
    "text.png": (lambda p: p.write_text("not a picture"), "none of PNG, JPEG"),
    "empty.png": (lambda p: p.write_bytes(b""), "none of PNG, JPEG"),
    "postscript.png": (save_postscript, "none of PNG, JPEG"),
    "moving.gif": (save_animation, "holds 3 pictures"),
    "moving.webp": (save_animation, "holds 3 pictures"),
    "moving.png": (save_animation, "holds 3 pictures"),
    "pages.tiff": (save_animation, "holds 3 pictures"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_sentence_with_its_name(name: str, tmp_path: Path) -> None:
    save, message = BAD_FILES[name]
    image_folder(tmp_path / "data", ".png")
    path = tmp_path / "data" / "train" / "one" / name
    save(path)
    with pytest.raises(UsageError, match=message) as raised:
        load(tmp_path / "data")
    assert name in str(raised.value) and "\n" not in str(raised.value)
    seen = {"shape": [28, 28], "border": [0, 0], "frame": None}
    with pytest.raises(UsageError, match=message) as raised:
        photos.read_picture(path, 28, seen)
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


def raw_bytes(folder: Path) -> None:
    folder.mkdir()
    table = pa.table({"picture": [b"1", b"2"], "kind": [0, 1]})
    pq.write_table(table, folder / "train.parquet")
    pq.write_table(table, folder / "test.parquet")


def new_class(folder: Path) -> None:
    made = dataset("string")
    rows = made["test"].to_dict()
    made["test"] = Dataset.from_dict(put("kind", 4, "four")(rows), features=made["test"].features)
    parquet(folder, made)


def listed(*names: str) -> Callable[[Path], None]:
    """A layout whose test split has another ClassLabel; a class that it lacks is its first."""

    def make(folder: Path, on_disk: bool = False) -> None:
        made = dataset()
        kinds = [
            names.index(name) if (name := NAMES[label]) in names else 0 for label in labels("test")
        ]
        rows = made["test"].remove_columns("kind").add_column("kind", kinds)
        made["test"] = rows.cast_column("kind", ClassLabel(names=list(names)))
        DatasetDict(made).save_to_disk(folder) if on_disk else parquet(folder, made)

    return make


def two_minds(folder: Path) -> None:
    parquet(folder, dataset())
    part = dataset()["test"].cast_column("kind", ClassLabel(names=sorted(NAMES)))
    part.to_parquet(folder / "train-00001-of-00002.parquet")


def new_folder(folder: Path) -> None:
    image_folder(folder, ".png")
    (folder / "test" / "four").mkdir()
    shapes("test")[0].save(folder / "test" / "four" / "0.png")


def class_called_test(folder: Path) -> None:
    """datasets takes every folder called train or test for a split, wherever it lies."""
    image_folder(folder, ".png")
    (folder / "train" / "test").mkdir()
    shapes("train")[0].save(folder / "train" / "test" / "0.png")


def two_pictures(folder: Path) -> None:
    made = {}
    for split, rows in dataset().items():
        table = rows.to_dict()
        features = rows.features | {"mask": datasets.Image()}
        made[split] = Dataset.from_dict(
            table | {"mask": table["picture"]}, features=datasets.Features(features)
        )
    parquet(folder, made)


def one_folder(folder: Path) -> None:
    image_folder(folder, ".png")
    for kind in folder.glob("*/*"):
        if kind.name != "one":
            shutil.rmtree(kind)


def loose_picture(folder: Path) -> None:
    image_folder(folder, ".png")
    next((folder / "train" / "one").iterdir()).rename(folder / "train" / "montage.png")


def valid_and_invalid(folder: Path) -> None:
    image_folder(folder, ".png")
    for name, kind in (("valid", "one"), ("invalid", "two")):
        (folder / "train" / kind).rename(folder / name)
    shutil.rmtree(folder / "train")
    shutil.rmtree(folder / "test")


# How a folder is made, flags, and the sentence.
BAD_LAYOUTS = {
    "no folder": (lambda f: None, [], "cannot be read"),
    "an empty folder": (Path.mkdir, [], "cannot be read"),
    "no picture": (with_rows(put("picture", 7, None)), [], "row 8: the picture is missing"),
    "no label": (with_rows(put("kind", 7, None)), [], "'kind', row 8: the label is missing"),
    "no text": (with_rows(put("kind", 7, None), kind="string"), [], "row 8: the label is missing"),
    "no number": (with_rows(put("kind", 7, None), kind="int"), [], "row 8: the label is missing"),
    "label -1": (with_rows(put("kind", 7, -1)), [], "row 8: the label is not one of the 3"),
    "no pictures": (without("picture"), [], "one Image column"),
    "no labels": (without("kind"), [], "--label must name .*one of \\[\\]"),
    "fractions": (lambda f: parquet(f, {split: rows.cast_column("kind", Value("float32"))
                                        for split, rows in dataset("int").items()}), [],
                  "--label must name .*whole numbers or texts"),
    "a loose picture": (loose_picture, [], "each lies in the folder of its class"),
    "classes valid and invalid": (
        valid_and_invalid, ["--validation-split", 5],
        r"there are only \['validation'\]; names of folders .* into train/"),
    "one folder": (one_folder, [], "each lies in the folder of its class"),
    "two columns": (two_columns, [], "--label must name .*'kind', 'id'"),
    "not a column": (two_columns, ["--label", "x"], "--label must name"),
    "the pictures": (two_columns, ["--label", "picture"], "--label must name"),
    "one class": (with_rows(lambda rows: rows | {"kind": [5] * 60}, kind="int"), [], "only one cl"),
    "a new class": (new_class, [], "'test', column 'kind', row 5: the label is not one of the 3"),
    "files of two minds": (two_minds, [], "its files name other columns, or classes"),
    "other classes": (listed("six", "one", "two"), [], "name other columns, or classes"),
    "an untrained class": (new_folder, [], "no training picture is of the class 'four'"),
    "a class called test": (class_called_test, [], "called train or test, and would"),
    "two pictures": (two_pictures, [], "one Image column"),
    "raw bytes": (raw_bytes, [], r"datasets\.Image\(\)"),
    "html": (lambda f: (f.mkdir(), (f / "train.parquet").write_text("<html>")), [],
             "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("layout", BAD_LAYOUTS)
def test_a_layout_that_cannot_be_meant_is_one_sentence(layout: str, tmp_path: Path) -> None:
    make, flags, message = BAD_LAYOUTS[layout]
    make(tmp_path / "data")
    with pytest.raises(UsageError, match=message) as raised:
        load(tmp_path / "data", *flags)
    assert str(tmp_path / "data") in str(raised.value) and "\n" not in str(raised.value)


def test_files_that_are_not_read_are_named(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    image_folder(tmp_path, ".png")
    (tmp_path / "README.md").write_text("hello")
    load(tmp_path)
    assert "not read" not in capfd.readouterr().err
    first = next((tmp_path / "train" / "one").iterdir())
    first.rename(first.with_suffix(".heic"))
    (tmp_path / "train" / "four").symlink_to("two")
    load(tmp_path)
    said = f"not read: train/four, train/one/{first.stem}.heic\n"
    assert capfd.readouterr().err.count(said) == 1


@pytest.mark.parametrize("flags", [[], ["--validation-split", 10]])
def test_what_save_to_disk_left_of_an_older_version_is_not_read(
    flags: list[object], tmp_path: Path
) -> None:
    for num_shards in (3, 2):
        splits = DatasetDict(dataset())
        if flags:
            splits["train"].save_to_disk(tmp_path, num_shards=num_shards)
        else:
            splits.save_to_disk(tmp_path, num_shards={"train": num_shards, "test": 1})
    assert len([*tmp_path.rglob("data-*-of-*3.arrow")]) == 3
    train_set, eval_set, _ = load(tmp_path, *flags)
    assert (len(train_set), len(eval_set)) == ((50, 10) if flags else (60, 17))


def test_pictures_of_one_grey_value_are_refused(tmp_path: Path) -> None:
    flat = torch.full((5, 28, 28), 7, dtype=torch.uint8)
    with pytest.raises(UsageError, match="of one grey value"):
        photos.learn_framing(28, (flat, Counter({"28 x 28 L": 5})))


def test_the_column_of_the_classes_can_be_named(tmp_path: Path) -> None:
    two_columns(tmp_path / "data")
    _, eval_set, about = load(tmp_path / "data", "--label", "kind")
    assert about["classes"] == ["5", "6", "7"] and eval_set.tensors[1].tolist() == labels("test")


@pytest.mark.parametrize("names", [("two", "one", "three"), ("one", "more", "two", "three")])
def test_the_classes_of_another_split_go_by_their_names(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    listed(*names)(tmp_path / "data", True)
    _, eval_set, about = load(tmp_path / "data")
    assert about["classes"] == NAMES and eval_set.tensors[1].tolist() == labels("test")


@linux_only  # ru_maxrss, in kilobytes
def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    save_bomb(tmp_path / "bomb.png", 20_000, 20_000)
    with pytest.raises(UsageError, match="pixels"):
        photos.read_picture(tmp_path / "bomb.png", 28, {})
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    )  # KB; it holds 400 MB


def test_a_photo_with_a_copy_inside_is_one_picture(tmp_path: Path) -> None:
    photo = Image.fromarray(np.full((40, 40, 3), 90, np.uint8))
    photo.save(tmp_path / "photo.jpg", format="MPO", save_all=True, append_images=[photo])
    assert picture_files.open_picture(tmp_path / "photo.jpg").size == (40, 40)


def test_what_is_learned_of_pictures_is_theirs_alone() -> None:
    pixels = torch.zeros(3, 28, 28, dtype=torch.uint8)
    pixels[0, 4:24, 10:18] = 200
    pixels[1] = 255
    pixels[1, 4:24, 10:18] = 5
    looks = {name: values.tolist() for name, values in photos.describe_looks(pixels).items()}
    for name, value in (("side", 20 / 28), ("x", 0.5), ("y", 0.5)):
        assert looks[name][:2] == pytest.approx([value] * 2, abs=1e-6)
    assert looks["border"][:2] == [0, 1] and np.isnan([looks["border"][2], looks["x"][2]]).all()
    kinds = Counter(["28 x 28 L"] * 3)
    seen = photos.learn_framing(28, (pixels[:2], kinds), (pixels[2:], kinds))
    assert seen["border"] == [0, 1] and seen["shape"] == [28, 28]
    assert seen["frame"] == pytest.approx([20 / 28, 0.5, 0.5], abs=1e-6)
    moved = pixels[0].roll(9, 1)
    assert photos.learn_framing(28, (torch.stack((pixels[0], moved)), kinds))["frame"] is None
    sizes = Counter(["2 x 2 L", "3 x 3 L", "2 x 2 L"])
    learned = photos.learn_framing(28, (pixels, sizes))
    assert 0 < learned.pop("most_ink") < 1
    assert learned == {
        "read_as": "2 x 2 L and 1 other kinds read as 28 x 28 grey",
        "shape": None,
        "border": [0, 1],
        "frame": None,
    }


def test_pictures_of_every_mode_keep_their_grey_values() -> None:
    ramp = np.linspace(0, 255, 784).round().astype(np.uint8).reshape(28, 28)
    grey = Image.fromarray(ramp)
    sixteen = Image.fromarray(ramp.astype(np.uint16) * 257)
    assert sixteen.mode == "I;16"
    for picture in (grey, sixteen, grey.convert("RGB")):
        np.testing.assert_array_equal(picture_files.to_grey(picture), ramp)
    clear = Image.new("RGBA", (28, 28), (0, 0, 0, 0))  # black ink on nothing, as on white paper
    clear.paste((0, 0, 0, 255), (5, 5, 9, 20))
    paper = picture_files.to_grey(clear)
    assert (paper[5:20, 5:9] == 0).all() and (paper[:, 10:] == 255).all()


def test_floats_and_32_bits_are_read_by_one_rule_for_all_pictures(tmp_path: Path) -> None:
    """Classes that differ by brightness alone stay different."""
    for mode, white in (("F", 1), ("I", 65535)):
        folder = tmp_path / mode
        for split in NUMBERS:
            for number in range(4):
                path = folder / split / NAMES[number % 2] / f"{number}.tiff"
                path.parent.mkdir(parents=True, exist_ok=True)
                values = np.full((28, 28), white * (0.2 + 0.6 * (number % 2)))
                values[:, ::2] *= 0.5
                Image.fromarray(values.astype(np.float32 if mode == "F" else np.int32)).save(path)
        train_set, _, about = load(folder)
        assert about["pictures"]["read_as"] == (
            f"28 x 28 {mode} of 0 to {white} read as 28 x 28 grey"
        )
        brightest = train_set.tensors[0].amax((1, 2, 3)).tolist()
        assert sorted(brightest) == [51, 51, 204, 204]
        for wrong in (-white, 2 * white) + (np.nan, np.inf) * (mode == "F"):
            values[3, 3] = wrong
            picture = Image.fromarray(values.astype(np.float32 if mode == "F" else np.int32))
            picture.save(folder / "train" / "one" / "wrong.tiff")
            with pytest.raises(
                UsageError, match=rf"row \d \(.*wrong\.tiff\).* must be 0 to {white}"
            ):
                load(folder)


def test_bytes_in_memory_are_read_like_a_file() -> None:
    buffer = io.BytesIO()
    shapes("test")[0].save(buffer, "PNG")
    assert picture_files.open_picture(buffer).size == (28, 28)


def fruit(kind: str, rng: np.random.Generator) -> Image.Image:
    """A red round apple, a yellow crescent or a purple plum, as grey values nearly alike."""
    paper = tuple(rng.integers(170, 256, 3).tolist())
    colour = {"apple": (200, 40, 45), "banana": (230, 200, 50), "plum": (90, 40, 120)}[kind]
    ink = tuple((np.array(colour) + rng.integers(-20, 21, 3)).tolist())
    picture = Image.new("RGB", (64, 64), paper)
    (x, y), r = rng.uniform(26, 38, 2), rng.uniform(14, 20)
    width = r * (rng.uniform(0.55, 0.75) if kind == "plum" else 1)
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
    tmp_path: Path, run_main: Callable, capsys: pytest.CaptureFixture
) -> None:
    fruits(tmp_path / "data", 80)
    flags = ["--dataset", tmp_path / "data", "--run-dir", tmp_path / "run", "--save-every", 10**6]
    metrics = run_main("train_mnist", *flags)
    assert metrics["eval_accuracy"] >= 0.85 and metrics["eval_samples"] == 48
    plan = capsys.readouterr().out
    assert "48 of 240 training pictures, to evaluate on" in plan
    assert "of 192 pictures: --batch-size 16 --epochs 42 --no-drop-last" in plan
    assert "examples/colour_pictures.py --dataset" in plan
    assert run_main("train_mnist", *flags, "--resume", "latest") == metrics
    chosen = json.loads((tmp_path / "run" / "run.json").read_text())["arguments"]
    assert (chosen["batch_size"], chosen["epochs"], chosen["drop_last"]) == (16, 42, False)


def test_what_is_held_out_is_a_fifth_of_each_class_and_nothing_is_in_both(tmp_path: Path) -> None:
    fruits(tmp_path / "data", 10)
    for flags, sizes in (((), (24, 6)), (("--validation-split", 10), (20, 10))):
        train_set, eval_set, _ = load(tmp_path / "data", *flags, "--epochs", 1)
        both = [{x.numpy().tobytes() for x in each.tensors[0]} for each in (train_set, eval_set)]
        assert (len(both[0]), len(both[1])) == sizes and not both[0] & both[1]
        again = load(tmp_path / "data", *flags, "--seed", 5)[1]
        assert torch.equal(again.tensors[0], eval_set.tensors[0])
        assert flags or eval_set.tensors[1].bincount().tolist() == [2, 2, 2]


def test_sizes_that_are_given_are_kept() -> None:
    for typed in (["--epochs", "5"], ["--batch-size", "128"], ["--no-drop-last"]):
        args = train_mnist.parse_args(typed)
        before = dict(vars(args))
        assert pictures.fit_to_small_set(args, 100) == "" and vars(args) == before
    args = train_mnist.parse_args([])
    assert pictures.fit_to_small_set(args, 60_000) == ""
    assert (args.epochs, args.batch_size, args.drop_last) == (3, 128, True)
