"""Photographs of digits are read, and what is not one digit is called unsure."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT
from PIL import Image, ImageDraw, ImageFilter, ImageFont

import predict
from trainkit.tools.calibration import calibrate

KINDS = ("uneven light", "on a table", "pencil", "coloured ink", "lined", "turned", "no contrast")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, run_main):
    """A run on 36,000 of the shipped digits."""
    data, folder = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("runs") / "mnist"
    for split in ("train", "test"):
        file = f"{split}-00000-of-00001.parquet"
        pq.write_table(pq.read_table(ROOT / "data" / "mnist" / file)[:36_000], data / file)
    flags = f"--dataset {data} --run-dir {folder} --epochs 1 --batch-size 128"
    run_main("train_mnist", *flags.split())
    return folder


@pytest.fixture(scope="module")
def digits():
    table = pq.read_table(ROOT / "data" / "mnist" / "test-00000-of-00001.parquet").slice(0, 1000)
    images = [Image.open(io.BytesIO(image["bytes"])) for image in table["image"].to_pylist()]
    return list(zip(images, table["label"].to_pylist(), strict=True))


def photograph(digit: Image.Image, kind: str, rng: np.random.Generator) -> Image.Image:
    """The digit on paper of another size, in uneven light, blurred and with noise."""
    width, height = rng.integers(280, 480, 2).tolist()
    paper = np.full((height, width, 3), rng.uniform(200, 250))
    ink = {
        "pencil": paper[0, 0] - rng.uniform(45, 80),
        "coloured ink": (180, 30, 30),
        "no contrast": (60, 170, 160),
    }.get(kind, (30, 30, 40))
    if kind == "no contrast":  # the grey values of the two are alike
        paper[:] = (230, 120, 110)
    if kind == "lined":
        for y in range(rng.integers(5, 20), height, rng.integers(22, 40)):
            paper[y : y + 2] = (150, 170, 210)
    side = int(min(width, height) * rng.uniform(0.35, 0.8))
    turn = rng.uniform(-15, 15) if kind == "turned" else 0
    stroke = digit.resize((side, side), Image.Resampling.BICUBIC)
    stroke = stroke.rotate(turn, Image.Resampling.BICUBIC)
    mask = Image.new("L", (width, height))
    mask.paste(stroke, (rng.integers(4, width - side - 3), rng.integers(4, height - side - 3)))
    share = np.asarray(mask, dtype=float)[..., None] / 255
    values = paper * (1 - share) + np.array(ink) * share
    if kind == "on a table":
        sheet = Image.fromarray(values.astype(np.uint8)).convert("RGBA")
        sheet = sheet.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC, expand=True)
        table = Image.new("RGBA", (sheet.width + 90, sheet.height + 70), (70, 50, 35, 255))
        table.alpha_composite(sheet, (50, 30))
        values = np.asarray(table.convert("RGB"), dtype=float)
    return in_light(values, rng.uniform(0, 120) if kind == "uneven light" else 40, rng)


def in_light(values: np.ndarray, falloff: float, rng: np.random.Generator) -> Image.Image:
    height, width = values.shape[:2]
    angle = rng.uniform(0, 2 * np.pi)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    light = np.cos(angle) * x + np.sin(angle) * y
    light = (light - light.min()) / np.ptp(light) * falloff / 255
    values = values * (1 - light[..., None]) + rng.normal(0, rng.uniform(1, 6), values.shape)
    picture = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    return picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.5)))


def no_digits(digits: list[tuple[Image.Image, int]], rng: np.random.Generator) -> Iterator:
    """Letters, dots and pairs of digits, six each."""
    for number in range(18):
        kind = ("letter", "dot", "pair")[number % 3]
        page = Image.new("RGB", (320, 320), (235, 235, 230))
        if kind == "letter":
            letter = "ABCEFGHKMNPRTUVWXY"[rng.integers(18)]
            font = ImageFont.load_default(rng.integers(110, 190).item())
            ImageDraw.Draw(page).text((160, 160), letter, (30, 30, 40), font, anchor="mm")
        elif kind == "dot":
            radius, x, y = rng.integers(6, 60), *rng.integers(70, 250, 2)
            box = (x - radius, y - radius, x + radius, y + radius)
            ImageDraw.Draw(page).ellipse(tuple(map(int, box)), (30, 30, 40))
        else:
            for left in (10, 165):
                stroke = digits[rng.integers(len(digits))][0].resize((145, 145))
                page.paste((30, 30, 40), (left, rng.integers(40, 130).item()), stroke)
        yield kind, in_light(np.asarray(page, dtype=float), rng.uniform(0, 90), rng)


def answers(run_dir: Path, pictures: list[Image.Image], folder: Path) -> list[str]:
    predictor = predict.load_run(run_dir)
    said = []
    for number, picture in enumerate(pictures):
        path = folder / f"{number}.png"
        picture.save(path)
        with torch.inference_mode():
            said.append(predictor.predict_file(path).removeprefix(f"{path}: "))
    return said


@pytest.mark.slow
def test_sixty_photographs(run_dir, digits, tmp_path):
    rng = np.random.default_rng(0)
    chosen = [digits[rng.integers(len(digits))] for _ in range(60)]
    pictures = [photograph(digit, KINDS[n % 7], rng) for n, (digit, _) in enumerate(chosen)]
    said = answers(run_dir, pictures, tmp_path)
    wrong = []
    for text, (_, label) in zip(said, chosen, strict=True):
        if text.split("perhaps ")[-1].split()[0] != str(label):
            wrong.append(text)
    print(f"{60 - len(wrong)} of 60 photographs are read; the others: {wrong}")
    assert len(wrong) <= 3, wrong
    assert sum(text.startswith("unsure") for text in wrong) >= 0.8 * len(wrong), wrong
    assert sum(text.startswith("unsure") for text in said) < 30  # a model that is never sure


def test_what_is_not_one_digit_is_called_unsure(run_dir, digits, tmp_path):
    kinds, pictures = zip(*no_digits(digits, np.random.default_rng(0)), strict=True)
    said = answers(run_dir, pictures, tmp_path)
    sure = [text for text in said if not text.startswith("unsure")]
    assert len(sure) <= 3, sure
    pairs = [text for kind, text in zip(kinds, said, strict=True) if kind == "pair"]
    named = [text for text in pairs if text.startswith("unsure (2 separate groups of ink)")]
    assert len(named) >= 5, pairs


def test_calibration_finds_the_temperature_of_exact_probabilities():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 5, generator=generator)
    targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    for scale in (0.5, 1, 2):
        found = calibrate(scale * logits, targets)
        assert found["temperature"] == pytest.approx(scale, rel=0.06)
        sure, answer = (scale * logits / found["temperature"]).softmax(1).max(1)
        right = (answer == targets).float().mean().item()
        assert sure.mean().item() == pytest.approx(right, abs=0.02)
        assert (sure < found["threshold"]).float().mean().item() == pytest.approx(0.05, abs=0.001)
    assert json.loads(json.dumps(found)) == found


def test_a_bad_file_does_not_end_a_batch(run_dir, tmp_path, capsys, digits):
    digits[0][0].save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("not a picture")
    files = [str(tmp_path / name) for name in ("a.png", "b.png", "none.png", "a.png")]
    capsys.readouterr()
    with pytest.raises(predict.UsageError, match="2 of 4 files cannot be used"):
        predict.main([str(run_dir), *files])
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first == last and "7 " in first
    assert second.startswith(f"error: {files[1]}") and third.startswith(f"error: {files[2]}")
