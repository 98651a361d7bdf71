"""Every layout of pictures that people bring is read as they meant it or refused in a sentence."""

import json
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

import predict
import train_mnist
from examples import colour_pictures
from trainkit.data import files as picture_files
from trainkit.data.small import fit_to_small_set
from trainkit.errors import UsageError
from trainkit.loaders import InMemory
from trainkit.tools import photos

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
    "not square": (changed(lambda p: p.resize((40, 33))), NAMES, f"40 x 33 L read as {GREY}"),
    "many sizes": (changed(of_many_sizes), NAMES, None),
    "folder of JPEG": (ending(".JPG", quality=90), SORTED, GREY),
    "folder of turned JPEG": (ending(".jpeg", exif=turned()), SORTED, GREY),
    "folder of GIF": (ending(".gif"), SORTED, None),
    "folder of WebP": (ending(".webp", lossless=True), SORTED, f"28 x 28 RGB read as {GREY}"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "negative"),
    [*((layout, False) for layout in LAYOUTS), ("ClassLabel", True), ("transparent", True)],
)
def test_a_layout_is_read_as_it_was_meant_and_its_files_alike_by_predict(
    layout: str, negative: bool, tmp_path: Path
) -> None:
    make, classes, read_as = LAYOUTS[layout]
    make(tmp_path / "data", negative)
    train_set, eval_set, about = load(tmp_path / "data")
    assert about["classes"] == classes
    assert read_as in (None, about["pictures"]["read_as"])
    assert (len(train_set), len(eval_set)) == (60, 17)
    for path, pixels in zip(files(tmp_path), eval_set.tensors[0], strict=True):
        assert torch.equal(photos.read_picture(path, 28, about["pictures"])[0], pixels), path
    if len(classes) == 3:
        words = {"5": "three", "6": "one", "7": "two"}
        names = [words.get(classes[n], classes[n]) for n in eval_set.tensors[1]]
        assert Counter(names) == Counter(NAMES[n] for n in labels("test"))
        if "folder" not in layout:  # whose rows are in the order of their paths
            assert names == [NAMES[n] for n in labels("test")]


@pytest.mark.parametrize("layout", ["transparent", "many sizes"])
def test_predict_is_right_on_the_pictures_that_the_evaluation_was_right_on(
    layout: str, tmp_path: Path, run_main: Callable
) -> None:
    make, *_ = LAYOUTS[layout]
    make(tmp_path / "data", False)
    run = f"--dataset {tmp_path}/data --run-dir {tmp_path}/run"
    metrics = run_main("train_mnist", *f"{run} --epochs 3 --batch-size 10 --no-augment".split())
    predictor, about = predict.load_run(tmp_path / "run")
    right = 0
    for path, label in zip(files(tmp_path), labels("test"), strict=True):
        said = predictor.predict_file(path).removeprefix(f"{path}: ").split("perhaps ")[-1]
        right += said.split()[0] == about["classes"][label]
    assert right == round(metrics["eval_accuracy"] * 17) > 8


def files(folder: Path) -> list[Path]:
    """The evaluation pictures as files, in their order."""
    rows = datasets.load_dataset(str(folder / "data"))["test"]
    image = next(key for key, kind in rows.features.items() if isinstance(kind, datasets.Image))
    paths = []
    for number, cell in enumerate(rows.cast_column(image, datasets.Image(decode=False))[image]):
        if cell["bytes"] is not None:
            (folder / f"{number}.png").write_bytes(cell["bytes"])
        paths.append(folder / f"{number}.png" if cell["bytes"] is not None else Path(cell["path"]))
    return paths


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


def new_class(folder: Path) -> None:
    made = dataset("string")
    rows = made["test"].to_dict()
    made["test"] = Dataset.from_dict(put("kind", 4, "four")(rows), features=made["test"].features)
    parquet(folder, made)


def other_classes(folder: Path) -> None:
    made = dataset()
    made["test"] = made["test"].cast_column("kind", ClassLabel(names=["six", "one", "two"]))
    parquet(folder, made)


def two_minds(folder: Path) -> None:
    parquet(folder, dataset())
    part = dataset()["test"].cast_column("kind", ClassLabel(names=sorted(NAMES)))
    part.to_parquet(folder / "train-00001-of-00002.parquet")


def class_called_test(folder: Path) -> None:
    """datasets takes every folder called train or test for a split, wherever it lies."""
    image_folder(folder, ".png")
    (folder / "train" / "test").mkdir()
    shapes("train")[0].save(folder / "train" / "test" / "0.png")


def loose_picture(folder: Path) -> None:
    image_folder(folder, ".png")
    next((folder / "train" / "one").iterdir()).rename(folder / "train" / "montage.png")


def no_train(folder: Path) -> None:
    image_folder(folder, ".png")
    shutil.rmtree(folder / "train")


# How a folder is made, flags, and the sentence.
BAD_LAYOUTS = {
    "no folder": (lambda f: None, [], "cannot be read"),
    "an empty folder": (Path.mkdir, [], "cannot be read"),
    "no picture": (with_rows(put("picture", 7, None)), [], "the pictures cannot be read"),
    "no label": (with_rows(put("kind", 7, None)), [], "'kind', row 8: the label .* is not one of"),
    "no text": (with_rows(put("kind", 7, None), kind="string"), [], "row 8: the label nan is not"),
    "no number": (with_rows(put("kind", 7, None), kind="int"), [], "row 8: the label None is not"),
    "no pictures": (without("picture"), [], "one Image column"),
    "fractions": (lambda f: parquet(f, {split: rows.cast_column("kind", Value("float32"))
                                        for split, rows in dataset("int").items()}), [],
                  "--label must name .*whole numbers or texts"),
    "a loose picture": (loose_picture, [], "each lies in the folder of its class"),
    "no train": (no_train, [], r"there are only \['test'\]; names of folders .* into train/"),
    "two columns": (two_columns, [], "--label must name .*'kind', 'id'"),
    "a new class": (new_class, [], "'test', column 'kind', row 5: the label 'four' is not one of"),
    "files of two minds": (two_minds, [], "its files name other columns, or classes"),
    "other classes": (other_classes, [], "name other columns, or classes"),
    "a class called test": (class_called_test, [], "called train or test, and would"),
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


def test_the_column_of_the_classes_can_be_named(tmp_path: Path) -> None:
    two_columns(tmp_path / "data")
    _, eval_set, about = load(tmp_path / "data", "--label", "kind")
    assert about["classes"] == ["5", "6", "7"] and eval_set.tensors[1].tolist() == labels("test")


def test_the_classes_of_another_split_go_by_their_names(tmp_path: Path) -> None:
    parquet(tmp_path / "data", dataset("string"))
    rows = pq.read_table(tmp_path / "data" / "test-00000-of-00001.parquet").to_pylist()
    few = [row for row in rows if row["kind"] != "one"]  # else `two` would be the second
    made = Dataset.from_list(few).cast_column("picture", datasets.Image())
    made.to_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    _, eval_set, about = load(tmp_path / "data")
    names = [about["classes"][label] for label in eval_set.tensors[1]]
    assert about["classes"] == SORTED and names == [row["kind"] for row in few]


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
    learned = photos.learn_framing(28, (pixels, Counter(["2 x 2 L", "3 x 3 L", "2 x 2 L"])))
    assert learned["read_as"] == "2 x 2 L and 1 other kinds read as 28 x 28 grey"
    assert learned["shape"] is None and learned["frame"] is None and 0 < learned["most_ink"] < 1
    with pytest.raises(UsageError, match="of one grey value"):
        photos.learn_framing(28, (pixels[2:], kinds))


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


def test_floats_and_32_bits_are_read_by_one_rule_for_all_pictures() -> None:
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
    fruits(tmp_path / "data", 60)
    flags = ["--dataset", tmp_path / "data", "--run-dir", tmp_path / "run", "--save-every", 10**6]
    metrics = run_main("train_mnist", *flags)
    assert metrics["eval_accuracy"] >= 0.85 and metrics["eval_samples"] == 36
    plan = capsys.readouterr().out
    assert "36 of 180 training pictures, to evaluate on" in plan
    sizes = "--batch-size 32 --epochs 113 --max-shift 3 --max-turn 20 --no-drop-last"
    assert f"of 144 pictures: {sizes}" in plan
    assert "examples/colour_pictures.py --dataset" in plan
    assert run_main("train_mnist", *flags, "--resume", "latest") == metrics
    chosen = json.loads((tmp_path / "run" / "run.json").read_text())["arguments"]
    assert (chosen["batch_size"], chosen["epochs"], chosen["drop_last"]) == (32, 113, False)


def test_the_example_in_colour_takes_the_same_folder(tmp_path: Path) -> None:
    fruits(tmp_path / "data", 10)
    for sizes in ((24, 6), (30, 9)):
        args = colour_pictures.parse_args(["--dataset", str(tmp_path / "data")])
        train_set, eval_set, classes, plan = colour_pictures.load_data(args)
        assert classes == ["apple", "banana", "plum"] and (len(train_set), len(eval_set)) == sizes
        assert f"of {sizes[0]} pictures: --batch-size 32 --epochs" in plan["small set"]
        assert (args.batch_size, args.drop_last) == (32, False)
        assert sorted(eval_set.labels) == sorted([0, 1, 2] * (sizes[1] // 3))
        if sizes == (24, 6):
            (tmp_path / "data").rename(tmp_path / "train")
            fruits(tmp_path / "test", 3)
            for split in ("train", "test"):
                (tmp_path / "data").mkdir(exist_ok=True)
                (tmp_path / split).rename(tmp_path / "data" / split)


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
        assert fit_to_small_set(args, 100, max_turn=20.0) == {} and vars(args) == before
    args = train_mnist.parse_args(["--max-turn", "90"])
    fit_to_small_set(args, 100, max_turn=20.0, max_shift=3.0)
    assert (args.batch_size, args.epochs, args.max_turn, args.max_shift) == (32, 163, 90, 3)
    args = train_mnist.parse_args([])
    assert fit_to_small_set(args, 60_000) == {}
    assert (args.epochs, args.batch_size, args.drop_last) == (3, 128, True)
